//! Waiting for a buffer of a pool.

use std::time::{Duration, Instant};

use crate::memory::{BufferPool, PooledBuffer};
use crate::progress::Blocking;
use crate::{Error, Result};

impl BufferPool {
    /// A buffer of the pool, with whatever its last user left in it. Where all are taken, blocks until one is returned, but no
    /// longer than `timeout`; a timeout beyond what the clock can represent never ends.
    ///
    /// A buffer is returned when it is dropped, which a panic does too, also while it is exposed or part of a transfer that
    /// owns it. A thread that waits for a buffer and holds one itself may wait for itself.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # fn main() -> calomel::Result<()> {
    /// # let engine = calomel::Engine::client("loop")?;
    /// let pool = engine.buffer_pool(1 << 20, 4);
    /// let mut buffer = pool.take_timeout(Duration::from_secs(1))?;
    /// buffer[0] = 1;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Timeout`] when all buffers are still taken; [`Error::Unsupported`] in a forked child, and for a pool without
    /// buffers.
    pub fn take_timeout(&self, timeout: Duration) -> Result<PooledBuffer> {
        let what = || format!("taking one of the {} buffers of {} bytes of a pool", self.capacity(), self.buffer_len());
        let unsupported = |reason: &str| Err(Error::Unsupported { what: what(), reason: reason.to_owned() });
        if self.is_forked() {
            return unsupported("the buffers belong to the process that made the pool, and this is a forked child of it");
        }
        if let Some(buffer) = self.take() {
            return Ok(buffer);
        }
        if self.capacity() == 0 {
            return unsupported("there is none to wait for");
        }
        // Another handler may run meanwhile, and return a buffer.
        let _blocking = Blocking::enter();
        let deadline = Instant::now().checked_add(timeout);
        self.take_until(deadline).ok_or_else(|| Error::Timeout { peer: self.owner().clone(), what: what(), after: timeout })
    }
}
