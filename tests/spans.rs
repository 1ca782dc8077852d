//! Spans of calls and of handlers: their fields, what is within them, and how they end.

mod common;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, Once};
use std::thread;

use calomel::{Endpoint, Engine, HandlerResult, Request, Responder};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber, info};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use common::{Watchdog, block_on, eventually};

#[derive(Clone, Debug, Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

#[derive(Clone, Debug)]
struct Recorded {
    id: u64,
    name: &'static str,
    level: Level,
    parent: Option<u64>,
    fields: Fields,
    closed: bool,
}

impl Recorded {
    fn field(&self, name: &str) -> &str {
        self.fields.0.get(name).map_or("", String::as_str)
    }
}

static SPANS: Mutex<Vec<Recorded>> = Mutex::new(Vec::new());
/// The messages of events, each with the span that it is within.
static EVENTS: Mutex<Vec<(String, Option<u64>)>> = Mutex::new(Vec::new());

struct Recorder;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let metadata = attributes.metadata();
        let parent = context.span(id).and_then(|span| span.parent().map(|parent| parent.id().into_u64()));
        let (id, name, level) = (id.into_u64(), metadata.name(), *metadata.level());
        SPANS.lock().unwrap().push(Recorded { id, name, level, parent, fields, closed: false });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        change(id, |span| values.record(&mut span.fields));
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        change(&id, |span| span.closed = true);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let within = context.event_span(event).map(|span| span.id().into_u64());
        EVENTS.lock().unwrap().push((fields.0.get("message").cloned().unwrap_or_default(), within));
    }
}

/// The registry uses numbers again: the last one is meant.
fn change(id: &Id, change: impl FnOnce(&mut Recorded)) {
    let mut spans = SPANS.lock().unwrap();
    spans.iter_mut().rev().find(|span| span.id == id.into_u64()).map(change);
}

/// The recorder of all tests.
fn record() {
    static SET: Once = Once::new();
    SET.call_once(|| {
        let wanted = Targets::new().with_target("calomel::rpc", Level::DEBUG).with_target("spans", Level::INFO);
        tracing_subscriber::registry().with(Recorder.with_filter(wanted)).init();
        // Where several threads come to a callsite for the first time at once, a span of it may be lost: so one thread does.
        let server = Engine::server("loop://").unwrap();
        server.define("first", |_: &Request, ()| ()).unwrap();
        let client = Engine::client("loop").unwrap();
        client.procedure::<(), ()>("first").on(client.lookup(server.address()).unwrap()).call(&()).unwrap();
    });
}

/// Waits until so many spans of a procedure are closed, and returns them.
#[track_caller]
fn closed(name: &str, procedure: &str, count: usize) -> Vec<Recorded> {
    let found = || {
        let spans = SPANS.lock().unwrap();
        spans.iter().filter(|span| span.name == name && span.field("procedure") == procedure && span.closed).cloned().collect()
    };
    eventually(&format!("{count} spans `{name}` of `{procedure}`"), || Vec::len(&found()) == count);
    found()
}

#[track_caller]
fn one(name: &str, procedure: &str) -> Recorded {
    closed(name, procedure, 1).remove(0)
}

/// The span within which an event of this message was.
#[track_caller]
fn span_of(message: &str) -> Option<u64> {
    let events = EVENTS.lock().unwrap();
    events.iter().find(|(found, _)| found == message).unwrap_or_else(|| panic!("no event `{message}`")).1
}

fn engines() -> (Engine, Endpoint, Engine) {
    record();
    let server = Engine::server("loop://").unwrap();
    let client = Engine::client("loop").unwrap();
    let peer = client.lookup(server.address()).unwrap();
    (server, peer, client)
}

#[test]
fn spans_have_the_fields_of_the_book() {
    let _watchdog = Watchdog::start("spans_have_the_fields_of_the_book");
    let (server, peer, client) = engines();
    server.provider(7).define("fields", |_: &Request, ()| 1u8).unwrap();
    client.procedure::<(), u8>("fields").on(peer.provider(7)).call(&()).unwrap();
    client.procedure::<(), u8>("fields").on(peer.provider(7)).notify(&()).unwrap();
    for (name, kind) in [("call", "client"), ("handle", "server")] {
        let spans = closed(name, "fields", 2);
        for (span, one_way) in spans.iter().zip(["false", "true"]) {
            assert_eq!(span.level, Level::DEBUG);
            for (field, expected) in [
                ("provider", "7"),
                ("one_way", one_way),
                ("otel.kind", kind),
                ("otel.name", "fields"),
                ("rpc.system.name", "calomel"),
                ("rpc.method", "fields"),
                ("error", ""),
                ("error.type", ""),
                ("otel.status_code", ""),
            ] {
                assert_eq!(span.field(field), expected, "{field} of {span:?}");
            }
            assert!(!span.field("peer").is_empty());
            let book = include_str!("../docs/src/tracing.md");
            for field in span.fields.0.keys() {
                assert!(book.contains(&format!("`{field}`")), "the book does not tell of `{field}`");
            }
        }
    }
    assert_eq!(closed("call", "fields", 2)[0].field("peer"), server.address().to_string());
}

/// A handler's own events and calls are within its span; and it is no child of what its thread did before.
#[test]
fn what_a_handler_does_is_within_its_span() {
    let _watchdog = Watchdog::start("what_a_handler_does_is_within_its_span");
    let (server, peer, client) = engines();
    server.define("inner", |_: &Request, n: u32| n).unwrap();
    let inner = |request: &Request| {
        let caller = request.engine().lookup(request.engine().address()).unwrap();
        request.engine().procedure::<u32, u32>("inner").on(caller).start(&1).unwrap()
    };
    server
        .define("closure", move |request: &Request, ()| {
            info!("in the closure");
            inner(request).wait().unwrap()
        })
        .unwrap();
    let by_future = move |request: Request, ()| async move {
        info!("in the future");
        let result = inner(&request).await.unwrap();
        info!("in the future, later");
        result
    };
    server.define_async("future", by_future).unwrap();
    let later = move |responder: Responder<u32>, ()| {
        info!("in the deferred one");
        let started = inner(responder.request());
        thread::spawn(move || responder.respond(&started.wait().unwrap()).unwrap());
    };
    server.define_deferred("deferred", later).unwrap();
    let outside = tracing::info_span!("outside");
    let outside_id = outside.id().unwrap().into_u64();
    outside.in_scope(|| {
        for name in ["closure", "future", "deferred"] {
            let call = client.procedure::<(), u32>(name).on(&peer);
            assert_eq!(call.call(&()).unwrap(), 1);
            block_on(call.start(&()).unwrap()).unwrap();
        }
    });
    let mut inner_parents = Vec::new();
    for (name, messages) in [
        ("closure", &["in the closure"][..]),
        ("future", &["in the future", "in the future, later"]),
        ("deferred", &["in the deferred one"]),
    ] {
        for call in closed("call", name, 2) {
            assert_eq!(call.parent, Some(outside_id));
        }
        let handlers = closed("handle", name, 2);
        for handler in &handlers {
            assert_eq!(handler.parent, None, "{handler:?}");
        }
        for message in messages {
            assert_eq!(span_of(message), Some(handlers[0].id), "{message}");
        }
        inner_parents.extend(handlers.iter().map(|handler| Some(handler.id)));
    }
    let found: Vec<_> = closed("call", "inner", 6).iter().map(|call| call.parent).collect();
    assert_eq!(found, inner_parents);
}

#[test]
fn failures_are_recorded_on_both_sides() {
    let _watchdog = Watchdog::start("failures_are_recorded_on_both_sides");
    let (server, peer, client) = engines();
    server.define_try("refuses", |_: &Request, ()| -> HandlerResult<u8> { Err("not today".into()) }).unwrap();
    server.define("panics", |_: &Request, ()| -> u8 { panic!("out of cheese") }).unwrap();
    server.define_async("panics later", |_: Request, ()| async { panic!("out of milk") as u8 }).unwrap();
    server.define_deferred("panics deferred", |_: Responder<u8>, ()| panic!("out of bread")).unwrap();
    server.define_deferred("forgets", |responder: Responder<u8>, ()| drop(responder)).unwrap();
    server.define("wants a text", |_: &Request, _: String| 1u8).unwrap();
    for (name, kind, text) in [
        ("refuses", "Failed", "not today"),
        ("panics", "HandlerPanicked", "out of cheese"),
        ("panics later", "HandlerPanicked", "out of milk"),
        ("panics deferred", "HandlerPanicked", "out of bread"),
        ("forgets", "NoResponse", ""),
        ("wants a text", "TypeMismatch", ""),
    ] {
        client.procedure::<(), u8>(name).on(&peer).call(&()).unwrap_err();
        for span in [one("call", name), one("handle", name)] {
            assert_eq!((span.field("error.type"), span.field("otel.status_code")), (kind, "ERROR"), "{span:?}");
            assert!(span.field("error").contains(text) && span.field("otel.status_description").contains(text), "{span:?}");
        }
    }
    // Without a handler: the call has a span alone. One that is not sent, too.
    client.procedure::<(), u8>("nothing").on(&peer).call(&()).unwrap_err();
    assert_eq!(one("call", "nothing").field("error.type"), "NoSuchProcedure");
    client.procedure::<[u8], u8>("too large").on(&peer).call(&vec![0; 65 << 20]).unwrap_err();
    assert_eq!(one("call", "too large").field("error.type"), "MessageTooLarge");
    // One whose result is not taken.
    server.define("idles", |request: &Request, ()| while !request.is_cancelled() {}).unwrap();
    drop(client.procedure::<(), ()>("idles").on(&peer).start(&()).unwrap());
    assert_eq!(one("call", "idles").field("error.type"), "Cancelled");
}
