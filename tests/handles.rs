//! Handles that handlers hold do not keep an engine alive. This test counts threads and descriptors, so it runs alone in its
//! process.

#[path = "common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use calomel::{Bulk, BulkMode, Engine, Request, Responder};
use common::{Watchdog, eventually, patience};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const ENGINES: usize = 50;

/// Defines handlers on an engine whose closures hold handles of that engine.
type Capture = fn(&Engine);

fn weak(engine: &Engine) {
    let own = engine.downgrade();
    engine.define("use", move |_: &Request, ()| own.upgrade().unwrap().addresses().len()).unwrap();
}

fn request(engine: &Engine) {
    engine.define("use", |request: &Request, ()| request.engine().clone().addresses().len()).unwrap();
    // A future of an engine that is dropped meanwhile, and a responder that is kept.
    engine
        .define_async("never", |request: Request, ()| async move {
            std::future::pending::<()>().await;
            request.engine().addresses().len()
        })
        .unwrap();
    let kept = Mutex::new(Vec::new());
    engine.define_deferred("kept", move |reply: Responder<()>, ()| kept.lock().unwrap().push(reply)).unwrap();
}

fn endpoint(engine: &Engine) {
    let itself = engine.lookup(engine.address()).unwrap();
    let call = engine.procedure::<(), usize>("ready").on(&itself);
    engine.define("ready", |_: &Request, ()| 1usize).unwrap();
    engine.define("use", move |_: &Request, ()| call.call(&()).unwrap() + usize::from(!itself.is_connected())).unwrap();
}

fn exposed(engine: &Engine) {
    let memory = engine.expose(vec![1u8; 100_000], BulkMode::ReadWrite).unwrap();
    let part = memory.slice(0, 10).unwrap();
    let bulk: Bulk = memory.bulk();
    let remote = bulk.origin(engine).unwrap();
    engine.define("use", move |_: &Request, ()| memory.slice(0, part.len()).map_or(0, |_| remote.len() / bulk.len())).unwrap();
}

fn provider(engine: &Engine) {
    let (provider, of) = (engine.provider(7), engine.downgrade());
    let define = move |_: &Request, ()| {
        let defined = provider.define("more", |_: &Request, ()| ());
        usize::from(defined.is_ok() || of.upgrade().is_some())
    };
    engine.define("use", define).unwrap();
}

fn later(engine: &Engine) {
    // Callbacks that run when the engine ends, and a timer that would fire much later.
    let itself = engine.lookup(engine.address()).unwrap();
    let (before, after, timer) = (itself.clone(), itself.clone(), itself.clone());
    engine.on_prefinalize(move || assert!(before.transport().is_none() || before.is_connected()));
    engine.on_finalize(move || assert!(!after.is_connected()));
    engine.timer(Duration::from_secs(3600), move || drop(timer)).unwrap();
    let own = engine.downgrade();
    engine.on_finalize(move || {
        // These run at once, or next, and are dropped then.
        if let Some(own) = own.upgrade() {
            own.on_finalize(|| ());
        }
        let late = itself.engine();
        let (one, other) = (itself.clone(), itself);
        late.on_finalize(move || drop(one));
        late.on_prefinalize(move || drop(other));
    });
    engine.define("use", |_: &Request, ()| 1usize).unwrap();
}

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

fn threads_and_descriptors() -> (usize, usize) {
    (entries("/proc/self/task"), entries("/proc/self/fd"))
}

fn server(transport: &str) -> Engine {
    let builder = Engine::builder().same_host_upgrade(false).finalize_timeout(Duration::from_millis(1));
    builder.listen(transport).build().unwrap()
}

static WARNED: AtomicUsize = AtomicUsize::new(0);

/// Counts the warnings about handles that handlers hold.
struct Counting;

impl Subscriber for Counting {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "calomel::engine" && *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn event(&self, event: &Event<'_>) {
        if event.metadata().fields().field("handles").is_some() {
            WARNED.fetch_add(1, Ordering::SeqCst);
        }
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn handlers_do_not_keep_their_engine_alive() {
    let _watchdog = Watchdog::start("handlers_do_not_keep_their_engine_alive");
    tracing::subscriber::set_global_default(Counting).unwrap();
    engine_ends_when_a_handler_drops_its_last_handle();
    let captures: [(&str, Capture); 6] = [
        ("weak", weak),
        ("request", request),
        ("endpoint", endpoint),
        ("exposed", exposed),
        ("provider", provider),
        ("later", later),
    ];
    for transport in ["loop://", "tcp://127.0.0.1:0", "shm://"] {
        let client = Engine::builder().same_host_upgrade(false).build().unwrap();
        for (what, capture) in captures {
            // Each engine is used and dropped: the count grows by that of one engine at most.
            let before = threads_and_descriptors();
            for round in 0..ENGINES {
                let engine = server(transport);
                capture(&engine);
                let peer = client.lookup(engine.address()).unwrap();
                let call = client.procedure::<(), usize>("use").on(&peer).timeout(patience() * Duration::from_secs(20));
                // Most engines are dropped without a call.
                if round % 10 == 0 {
                    assert_eq!(call.call(&()).unwrap(), 1, "{what} over {transport}");
                    if what == "request" {
                        client.procedure::<(), usize>("never").on(&peer).notify(&()).unwrap();
                        client.procedure::<(), ()>("kept").on(&peer).notify(&()).unwrap();
                    }
                }
                let weak = engine.downgrade();
                drop(engine);
                assert!(weak.upgrade().is_none(), "{what} over {transport}");
                let gone = call.call(&()).unwrap_err();
                assert!(gone.is_disconnected(), "{what} over {transport} goes on serving: {gone}");
            }
            eventually(&format!("nothing is left of engines with {what} over {transport}; before: {before:?}"), || {
                let now = threads_and_descriptors();
                now.0 <= before.0 && now.1 <= before.1
            });
        }
        assert_eq!(WARNED.load(Ordering::SeqCst), 0);

        // A captured `Engine` counts like any other: such an engine ends only when it is finalized, and logs a warning.
        let before = threads_and_descriptors();
        let engine = server(transport);
        let own = engine.clone();
        engine.define("use", move |_: &Request, ()| own.addresses().len()).unwrap();
        let (weak, address) = (engine.downgrade(), engine.address());
        drop(engine);
        let peer = client.lookup(address).unwrap();
        assert_eq!(client.procedure::<(), usize>("use").on(&peer).call(&()).unwrap(), 1);
        weak.upgrade().unwrap().finalize().unwrap();
        assert_eq!(WARNED.swap(0, Ordering::SeqCst), 1);
        assert!(weak.upgrade().is_none());
        drop(peer);
        eventually("nothing is left of an engine that was finalized", || {
            let now = threads_and_descriptors();
            now.0 <= before.0 && now.1 <= before.1
        });
    }
}

fn engine_ends_when_a_handler_drops_its_last_handle() {
    let engine = server("loop://");
    let (own, slot) = (engine.downgrade(), Arc::new(Mutex::new(None)));
    let outside = slot.clone();
    let last = move |_: &Request, ()| {
        let inside = own.upgrade();
        drop(outside.lock().unwrap().take());
        inside.map_or(0, |engine| engine.addresses().len())
    };
    engine.define("last", last).unwrap();
    let client = Engine::client("loop").unwrap();
    let peer = client.lookup(engine.address()).unwrap();
    let weak = engine.downgrade();
    *slot.lock().unwrap() = Some(engine);
    assert_eq!(client.procedure::<(), usize>("last").on(&peer).call(&()).unwrap(), 1);
    eventually("the engine ends", || weak.upgrade().is_none());
}
