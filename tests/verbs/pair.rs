//! A server and a client in one process, which meet at a device.

use std::time::Duration;

use calomel::{Endpoint, Engine, EngineBuilder, Request};

use crate::support::*;

/// Slow where the device is emulated.
pub fn patient() -> EngineBuilder {
    builder().default_timeout(BOUND)
}

pub struct Pair {
    pub server: Engine,
    pub client: Engine,
    pub to_server: Endpoint,
}

impl Pair {
    pub fn new() -> Pair {
        Pair::at(&anywhere())
    }

    pub fn at(address: &str) -> Pair {
        let server = patient().listen(address).build().unwrap();
        define_add(&server);
        server.define("echo", |_: &Request, text: String| text).unwrap();
        Pair::with(server)
    }

    pub fn with(server: Engine) -> Pair {
        let client = patient().build().unwrap();
        let to_server = client.lookup(server.address()).unwrap();
        Pair { server, client, to_server }
    }

    #[track_caller]
    pub fn assert_serves(&self) {
        assert_serves(&self.client, &self.to_server);
    }
}

/// The memory is this process' own again: no device writes it.
#[track_caller]
pub fn assert_quiet(bytes: &[u8], time: Duration) {
    let snapshot = bytes.to_vec();
    stays("no device writes", time, || std::hint::black_box(bytes) == snapshot);
}
