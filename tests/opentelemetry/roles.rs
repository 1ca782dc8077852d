//! What each process does: it serves, calls the next one, and prints its finished spans.

use std::io::BufRead;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use calomel::{Call, Endpoint, Engine, HandlerResult, Pending, Request, Responder, Retry};
use opentelemetry::trace::{SpanContext, TraceContextExt as _, TraceFlags, TraceState, TracerProvider as _};
use opentelemetry::{Context, SpanId, TraceId};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tracing::info_span;
use tracing::level_filters::LevelFilter;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::support::{BOUND, anywhere, client, configured, patience, say};

/// The address that a process calls.
pub const NEXT: &str = "CALOMEL_TEST_NEXT";

/// What the process in the middle defines: handlers of each kind.
pub const RELAYS: [&str; 6] = ["relay", "relay started", "relay async", "relay deferred", "relay of much", "relay one way"];

pub fn run(role: &str) {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("calomel"));
    // Those of this library, and of this program.
    let wanted =
        Targets::new().with_target("calomel", LevelFilter::DEBUG).with_target(env!("CARGO_CRATE_NAME"), LevelFilter::INFO);
    tracing_subscriber::registry().with(layer.with_filter(wanted)).init();
    let engine = match role {
        "a" => client(),
        _ => configured().listen(anywhere()).build().unwrap(),
    };
    match role {
        "a" => say("ready"),
        "b" => define_relays(&engine, &next(&engine)),
        "c" => define_leaves(&engine),
        other => panic!("no role `{other}`"),
    }
    if role != "a" {
        say(&format!("address {}", engine.address()));
    }
    for order in std::io::stdin().lock().lines() {
        match order.unwrap().as_str() {
            "spans" => {
                exporter.get_finished_spans().unwrap().iter().for_each(|span| say(&line(span)));
                say("all");
            }
            "end" => break,
            name => call(&engine, name),
        }
    }
    engine.finalize().unwrap();
}

fn next(engine: &Engine) -> Endpoint {
    engine.lookup(std::env::var(NEXT).unwrap()).unwrap()
}

fn line(span: &SpanData) -> String {
    let context = &span.span_context;
    let procedure = span.attributes.iter().find(|attribute| attribute.key.as_str() == "procedure");
    let procedure = procedure.map(|attribute| attribute.value.to_string()).unwrap_or_default();
    let (remote, kind, status) = (span.parent_span_is_remote, &span.span_kind, format!("{:?}", span.status).replace('|', "/"));
    format!(
        "span {}|{}|{}|{remote}|{kind:?}|{status}|{}|{procedure}|{}",
        context.trace_id(),
        context.span_id(),
        span.parent_span_id,
        context.trace_state().header(),
        span.name,
    )
}

/// The first process: calls within a span of its own, in a trace of which it is told by yet another program.
fn call(engine: &Engine, name: &str) {
    let program = info_span!("program");
    static NUMBER: AtomicU32 = AtomicU32::new(0x1000);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let state: TraceState = "vendor=1".parse().unwrap();
    let trace = TraceId::from_bytes([[0; 12].as_slice(), &number.to_be_bytes()].concat().try_into().unwrap());
    let above = SpanContext::new(trace, SpanId::from_bytes([1; 8]), TraceFlags::SAMPLED, true, state);
    program.set_parent(Context::new().with_remote_span_context(above)).unwrap();
    let outcome = program.in_scope(|| {
        let text = if name == "relay of much" { "x".repeat(1 << 20) } else { "x".to_owned() };
        let call = engine.procedure::<str, u32>(name).on(next(engine)).timeout(patience() * BOUND);
        match name {
            "relay started" => call.start(&text).and_then(Pending::wait),
            "relay one way" => call.notify(&text).map(|()| 42),
            "retried" => call.timeout(patience() * Duration::from_millis(300)).retry(Retry::new(20)).call(&text),
            _ => call.call(&text),
        }
    });
    drop(program);
    let outcome = match outcome {
        Ok(number) => format!("ok {number}"),
        Err(error) => error.to_string(),
    };
    say(&format!("done {trace} {outcome}"));
}

fn leaf(next: &Endpoint, engine: &Engine, name: &str) -> Call<(), u32> {
    engine.procedure::<(), u32>(name).on(next)
}

/// Calls the last process twice.
fn call_leaves(request: &Request, next: &Endpoint) -> calomel::Result<u32> {
    leaf(next, request.engine(), "note").notify(&())?;
    leaf(next, request.engine(), "leaf").call(&())
}

/// The process in the middle.
fn define_relays(engine: &Engine, next: &Endpoint) {
    for name in ["relay", "relay started", "relay of much", "relay one way"] {
        let next = next.clone();
        engine.define_try(name, move |request: &Request, _: String| call_leaves(request, &next)).unwrap();
    }
    let to = next.clone();
    let relay_async = move |request: Request, _: String| {
        let next = to.clone();
        async move {
            // Ready later, so that the future is polled more than once.
            let started = leaf(&next, request.engine(), "leaf").start(&())?;
            leaf(&next, request.engine(), "note").notify_async(&()).await?;
            started.await
        }
    };
    engine.define_try_async("relay async", relay_async).unwrap();
    let to = next.clone();
    let relay_deferred = move |responder: Responder<u32>, _: String| {
        let request = responder.request();
        leaf(&to, request.engine(), "note").notify(&()).unwrap();
        // Started here, within the handler's span, and waited for on another thread.
        let started = leaf(&to, request.engine(), "leaf").start(&()).unwrap();
        thread::spawn(move || responder.respond(&started.wait().unwrap()).unwrap());
    };
    engine.define_deferred("relay deferred", relay_deferred).unwrap();
    for (name, leaf_name) in [("relay to a failure", "failing leaf"), ("relay to a panic", "panicking leaf")] {
        let next = next.clone();
        engine.define_try(name, move |request: &Request, _: String| leaf(&next, request.engine(), leaf_name).call(&())).unwrap();
    }
    // Attempts are not answered until their caller has given them up, but for the third.
    let attempts = Mutex::new(Vec::new());
    let retried = move |responder: Responder<u32>, _: String| {
        let mut attempts = attempts.lock().unwrap();
        if attempts.len() < 2 {
            attempts.push(responder);
        } else {
            responder.respond(&3).unwrap();
            attempts.clear();
        }
    };
    engine.define_deferred("retried", retried).unwrap();
}

/// The last process.
fn define_leaves(engine: &Engine) {
    engine.define("leaf", |_: &Request, ()| 42u32).unwrap();
    engine.define("note", |_: &Request, ()| 0u32).unwrap();
    engine.define_try("failing leaf", |_: &Request, ()| -> HandlerResult<u32> { Err("no leaf today".into()) }).unwrap();
    engine.define("panicking leaf", |_: &Request, ()| -> u32 { panic!("leaf fell") }).unwrap();
}
