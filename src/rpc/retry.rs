//! `Retry`: how calls that are idempotent are repeated.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::procedure::Call;
use crate::{Result, random};

/// How often a call is repeated, and how long to wait in between: see [`Call::retry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    attempts: u32,
    first: Duration,
    longest: Duration,
}

impl Retry {
    /// Up to `attempts` attempts, the first one included; at least one. It waits 10 ms before the second, each time twice as
    /// long, and a second at most.
    pub fn new(attempts: u32) -> Retry {
        Retry { attempts: attempts.max(1), first: Duration::from_millis(10), longest: Duration::from_secs(1) }
    }

    /// Waits `first` before the second attempt, each time twice as long, and `longest` at most. What is waited is up to a half
    /// shorter, so that callers that failed together do not come back together.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Retry {
        (self.first, self.longest) = (first, longest);
        self
    }

    fn pause_before(&self, attempt: u32) -> Duration {
        let doubled = self.first.saturating_mul(1_u32.checked_shl(attempt - 1).unwrap_or(u32::MAX));
        let full = doubled.min(self.longest);
        let random = u16::from_ne_bytes(random::from_system().unwrap_or_default());
        full - full.mul_f64(f64::from(random) / f64::from(u16::MAX) / 2.0)
    }
}

/// A call that is repeated when it fails; made by [`Call::retry`].
#[derive(Debug)]
pub struct RetriedCall<A: ?Sized, R> {
    call: Call<A, R>,
    retry: Retry,
}

impl<A: Serialize + ?Sized, R: DeserializeOwned> Call<A, R> {
    /// Declares this call idempotent, and repeats it when it fails with an error that a further attempt may mend
    /// ([`Error::is_retryable`](crate::Error::is_retryable)): then its handler may run several times.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use calomel::{Engine, Request, Retry};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// # let server = Engine::server("loop://")?;
    /// # server.define("get", |_: &Request, key: String| key.len())?;
    /// # let client = Engine::client("loop")?;
    /// # let peer = client.lookup(server.address())?;
    /// let get = client.procedure::<str, usize>("get");
    /// let found = get.on(&peer).timeout(Duration::from_secs(1)).retry(Retry::new(5)).call("key")?;
    /// # assert_eq!(found, 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn retry(self, retry: Retry) -> RetriedCall<A, R> {
        RetriedCall { call: self, retry }
    }
}

impl<A: Serialize + ?Sized, R: DeserializeOwned> RetriedCall<A, R> {
    /// Calls, and blocks until an attempt has succeeded, has failed with an error that is not retryable, or was the last one.
    /// Each attempt has the [timeout](Call::timeout) of the call.
    ///
    /// # Errors
    /// That of the last attempt.
    pub fn call(&self, arguments: &A) -> Result<R> {
        let mut attempt = 1;
        loop {
            match self.call.call(arguments) {
                Err(error) if error.is_retryable() && attempt < self.retry.attempts => {
                    tracing::debug!(target: "calomel::rpc", %error, attempt, "a call is repeated");
                }
                ended => return ended,
            }
            self.call.pause(self.retry.pause_before(attempt));
            attempt += 1;
        }
    }
}
