//! `WeakEngine`: a handle that does not keep its engine alive.

use std::fmt;
use std::sync::Weak;

use super::{Engine, EngineShared};

/// A handle of an engine that does not keep it alive: for closures and values that the engine itself keeps, such as its
/// handlers. Made by [`Engine::downgrade`].
///
/// ```
/// use calomel::{Engine, Request};
///
/// # fn main() -> calomel::Result<()> {
/// let server = Engine::server("loop://")?;
/// let engine = server.downgrade();
/// server.define("addresses", move |_: &Request, ()| engine.upgrade().map_or(0, |engine| engine.addresses().len()))?;
/// # let client = Engine::client("loop")?;
/// # let peer = client.lookup(server.address())?;
/// # assert_eq!(client.procedure::<(), usize>("addresses").on(&peer).call(&())?, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct WeakEngine {
    shared: Weak<EngineShared>,
}

impl Engine {
    /// A handle that does not keep the engine alive.
    pub fn downgrade(&self) -> WeakEngine {
        WeakEngine { shared: std::sync::Arc::downgrade(&self.shared) }
    }
}

impl WeakEngine {
    /// A handle that keeps the engine alive. `None` when the last such handle has been dropped, which finalizes the engine, and
    /// in a forked child.
    pub fn upgrade(&self) -> Option<Engine> {
        let shared = self.shared.upgrade().filter(|shared| !shared.core.is_forked())?;
        let alive = shared.alive.lock().upgrade()?;
        Some(Engine { shared, alive: Some(alive) })
    }
}

impl fmt::Debug for WeakEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakEngine")
    }
}
