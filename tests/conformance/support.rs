//! Infrastructure of the conformance tests: engines on the transport under test, which are finalized at the end.

use std::process;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use calomel::{Bulk, Endpoint, Engine, EngineBuilder, Error};

pub use crate::common::*;

/// Finalizing an engine with nothing in progress takes milliseconds; the rest is a margin for a busy machine.
const FINALIZE_BOUND: Duration = Duration::from_secs(3);

/// Runs one test over one transport, with a watchdog, and finalizes every engine in bounded time at the end.
pub fn run(name: &'static str, scheme: &'static str, listen: &str, knobs: Knobs, test: fn(&Net)) {
    let _watchdog = Watchdog::start(name);
    let net = Net { scheme, listen: listen.to_owned(), knobs, engines: Mutex::new(Vec::new()) };
    test(&net);
    for engine in net.engines.lock().unwrap().drain(..).rev() {
        let (begin, ended) = (Instant::now(), engine.is_finalized());
        let result = engine.finalize();
        // A test may have ended the engine with an error, which stays the result.
        assert!(ended || result.is_ok(), "{result:?}");
        let took = begin.elapsed();
        assert!(took < FINALIZE_BOUND, "finalize took {took:?}");
        assert!(engine.is_finalized());
    }
}

/// Configures an engine for the transport under test.
pub type Knobs = fn(EngineBuilder) -> EngineBuilder;

pub fn guarded(builder: EngineBuilder) -> EngineBuilder {
    builder.same_host_upgrade(false).pre_shared_key("for conformance only").payload_checksums(true)
}

/// The messages utility takes a tenth of a second to connect, and where the device is emulated, several connections at once take
/// seconds.
#[cfg(feature = "ofi")]
pub fn slow_to_connect(builder: EngineBuilder) -> EngineBuilder {
    builder.same_host_upgrade(false).connect_timeout(Duration::from_secs(20))
}

/// The transport under test, and the engines of the test.
pub struct Net {
    scheme: &'static str,
    listen: String,
    knobs: Knobs,
    engines: Mutex<Vec<Engine>>,
}

/// Two engines, and the client's endpoint of the server.
pub struct Pair {
    pub server: Engine,
    pub client: Engine,
    pub to_server: Endpoint,
}

impl Net {
    pub fn scheme(&self) -> &'static str {
        self.scheme
    }

    /// Configures engines that are made elsewhere for this transport.
    pub fn knobs(&self) -> Knobs {
        self.knobs
    }

    /// A builder configured for this transport. Engines that wait send no heartbeats, which would wake an engine that has missed
    /// an event, so that it is late and does not hang.
    pub fn builder(&self) -> EngineBuilder {
        (self.knobs)(Engine::builder().peer_timeout(Duration::from_secs(3600)))
    }

    /// An address to listen at that no other test uses.
    pub fn fresh_address(&self) -> String {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        match self.listen.strip_suffix("://") {
            Some(scheme) => {
                format!("{scheme}://conformance-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
            }
            None => self.listen.clone(),
        }
    }

    /// An address of this transport at which no engine listens.
    pub fn dead_address(&self) -> String {
        let engine = self.builder().listen(self.fresh_address()).build().unwrap();
        let address = engine.address().to_string();
        engine.finalize().unwrap();
        address
    }

    /// Finalizes the engine at the end of the test.
    pub fn keep(&self, engine: Engine) -> Engine {
        self.engines.lock().unwrap().push(engine.clone());
        engine
    }

    pub fn server(&self) -> Engine {
        self.server_with(|builder| builder)
    }

    pub fn client(&self) -> Engine {
        self.client_with(|builder| builder)
    }

    pub fn server_with(&self, configure: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Engine {
        self.keep(configure(self.builder().listen(self.fresh_address())).build().unwrap())
    }

    pub fn client_with(&self, configure: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Engine {
        self.keep(configure(self.builder()).build().unwrap())
    }

    pub fn pair(&self) -> Pair {
        Pair::of(self.server(), self.client())
    }

    /// A pair with the same settings on both sides.
    pub fn pair_with(&self, configure: impl Fn(EngineBuilder) -> EngineBuilder) -> Pair {
        Pair::of(self.server_with(&configure), self.client_with(&configure))
    }
}

impl Pair {
    pub fn of(server: Engine, client: Engine) -> Pair {
        let to_server = client.lookup(server.address()).unwrap();
        Pair { server, client, to_server }
    }
}

/// Finalizes an engine whose work in progress may outlast the deadline: that is reported as an error, but the engine ends.
#[track_caller]
pub fn end(engine: &Engine) {
    match engine.finalize() {
        Ok(()) | Err(Error::Timeout { .. }) => assert!(engine.is_finalized()),
        Err(other) => panic!("{other:?}"),
    }
}

/// The bulk as another process decodes it.
pub fn travelled(bulk: &Bulk) -> Bulk {
    postcard::from_bytes(&postcard::to_stdvec(bulk).unwrap()).unwrap()
}
