//! A subscriber of the log may use the engine that a line is about: the transport holds no lock while a line is written.

use std::cell::{Cell, RefCell};

use calomel::Engine;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::pair::{Pair, patient};
use crate::support::*;

thread_local! {
    static ENGINE: RefCell<Option<Engine>> = const { RefCell::new(None) };
    static LINES: Cell<u32> = const { Cell::new(0) };
}

/// Exposes memory at each line of the transport, which looks at the engine's devices.
struct Exposing;

impl Subscriber for Exposing {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "calomel::verbs"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, _: &Event<'_>) {
        // The lines of this are not of interest.
        if let Some(engine) = ENGINE.take() {
            drop(engine.expose_read_only(vec![0u8; 8]).unwrap());
            LINES.set(LINES.get() + 1);
            ENGINE.set(Some(engine));
        }
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn a_subscriber_of_the_log_may_use_the_engine() {
    let pair = Pair::new();
    let client = patient().build().unwrap();
    ENGINE.set(Some(client.clone()));
    tracing::subscriber::with_default(Exposing, || {
        // To look a peer up puts the device into use, on this thread.
        let to_server = client.lookup(pair.server.address()).unwrap();
        assert_serves(&client, &to_server);
    });
    assert!(LINES.get() > 0);
    ENGINE.take();
    pair.assert_serves();
}

on_device!(a_subscriber_of_the_log_may_use_the_engine);
