//! Progress by the caller's own event loop.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::Engine;
use crate::progress::in_job;
use crate::{Error, Result};

impl Engine {
    /// The descriptor that the event loop of a [`Progress::External`](crate::Progress::External) engine waits for, with epoll,
    /// poll, `mio`, or `AsyncFd` of tokio: it is readable when [`Engine::progress`] has something to do. Only this engine reads
    /// it. It stays valid, and readable, when the engine has been finalized: deregister it then.
    ///
    /// It is an epoll descriptor that holds another one, so a loop may nest it two levels deeper at most.
    ///
    /// # Panics
    /// If the engine has another [`Progress`](crate::Progress), and makes progress by itself.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        let descriptor = self.shared.core.descriptor();
        descriptor.expect("`as_fd` is for engines with `Progress::External`; this one makes progress by itself")
    }

    /// Makes progress: reads, sends, runs handlers and timers on this thread, and expires deadlines, until something was
    /// handled or `timeout` is over. True when something was handled; then there may be more. `Duration::ZERO` polls once, and
    /// never waits. For engines with [`Progress::External`](crate::Progress::External).
    ///
    /// A loop that is told as long as the descriptor is readable (level-triggered) calls this once each time. One that is told
    /// of changes (edge-triggered, as `mio` and tokio do) has to call it until it returns false.
    ///
    /// Threads may call this at the same time, and while others wait in calls: one at a time drives. The others wait for it
    /// until their timeout, and run handlers meanwhile. With `Duration::ZERO` they get false, and when the lock is free the
    /// descriptor is readable again.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use calomel::{Engine, Progress, Request};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::builder().listen("tcp://127.0.0.1:0").progress(Progress::External).handler_threads(0).build()?;
    /// server.define("double", |_: &Request, x: u32| 2 * x)?;
    ///
    /// let client = Engine::client("tcp")?;
    /// let call = client.procedure::<u32, u32>("double").on(client.lookup(server.address())?).start(&21)?;
    /// while !call.is_ready() {
    ///     server.progress(Duration::from_millis(100))?;
    /// }
    /// assert_eq!(call.wait()?, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an engine with another [`Progress`](crate::Progress), in a handler, a timer, a waker or a hook
    /// of the engine, and in a forked child; [`Error::Finalized`].
    pub fn progress(&self, timeout: Duration) -> Result<bool> {
        let core = &self.shared.core;
        self.shared.check("progress")?;
        let unsupported =
            |reason: &str| Err(Error::Unsupported { what: "`Engine::progress`".to_owned(), reason: reason.to_owned() });
        if !core.is_external() {
            return unsupported("the engine makes progress by itself: it was not built with `Progress::External`");
        }
        if core.is_driving() || in_job(core) {
            return unsupported("this thread runs a handler, a timer, a waker or a hook of the engine");
        }
        Ok(core.progress(timeout))
    }
}

impl AsFd for Engine {
    /// As [`Engine::as_fd`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        Engine::as_fd(self)
    }
}
