//! Hooks around calls, handlers and transfers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Endpoint, EngineShared};
use crate::Error;
use crate::proto::TransferDirection;

/// Code of the program that an engine runs before and after each call, handler and transfer; set by
/// [`EngineBuilder::monitor`](crate::EngineBuilder::monitor). Each method does nothing by default.
///
/// The methods run where the operation begins or ends, with no lock held: on the thread that calls, that handles, or that
/// takes the result. They must be quick, and must not call, transfer or wait. A panic in one is logged, and changes nothing.
/// The end of an operation is reported when its result is taken, or when its [`Pending`](crate::Pending) or
/// [`Transfer`](crate::Transfer) is dropped; [`Stats`](crate::Stats) has the times at which responses arrived.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use calomel::{Engine, Error, Monitor, MonitoredCall, Request};
///
/// #[derive(Default)]
/// struct Failures(Arc<AtomicU64>);
///
/// impl Monitor for Failures {
///     fn call_ended(&self, call: &MonitoredCall<'_>, error: Option<&Error>) {
///         if let Some(error) = error {
///             eprintln!("`{}` at {} failed: {error}", call.procedure, call.peer.address());
///             self.0.fetch_add(1, Ordering::Relaxed);
///         }
///     }
/// }
///
/// # fn main() -> calomel::Result<()> {
/// let server = Engine::server("loop://")?;
/// let failures = Failures::default();
/// let count = failures.0.clone();
/// let client = Engine::builder().monitor(failures).build()?;
/// let peer = client.lookup(server.address())?;
/// assert!(client.procedure::<(), ()>("nothing").on(&peer).call(&()).is_err());
/// assert_eq!(count.load(Ordering::Relaxed), 1);
/// # Ok(())
/// # }
/// ```
pub trait Monitor: Send + Sync + 'static {
    /// This engine makes a call, one-way or not: its arguments are encoded next. A one-way call that the peer has no room for is
    /// made again, and reported again.
    fn call_begins(&self, call: &MonitoredCall<'_>) {
        let _ = call;
    }

    /// A call of this engine has ended; a one-way call was sent.
    fn call_ended(&self, call: &MonitoredCall<'_>, error: Option<&Error>) {
        let _ = (call, error);
    }

    /// The handler of a peer's call begins: its arguments are decoded next. A one-way call that then has to wait for memory begins
    /// again.
    fn handler_begins(&self, call: &MonitoredCall<'_>) {
        let _ = call;
    }

    /// A peer's call was answered, or a one-way call was handled. `error`: what its caller gets, or why the answer was not sent.
    fn handler_ended(&self, call: &MonitoredCall<'_>, error: Option<&Error>) {
        let _ = (call, error);
    }

    /// This engine begins a pull or a push.
    fn transfer_begins(&self, transfer: &MonitoredTransfer<'_>) {
        let _ = transfer;
    }

    /// A pull or a push of this engine has ended.
    fn transfer_ended(&self, transfer: &MonitoredTransfer<'_>, error: Option<&Error>) {
        let _ = (transfer, error);
    }
}

/// A call, as a [`Monitor`] sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MonitoredCall<'a> {
    /// Distinguishes it from other calls that this engine makes, or else from other calls that it handles, at the same time.
    pub id: u64,
    /// The procedure.
    pub procedure: &'a str,
    /// The provider that is called.
    pub provider: u16,
    /// The peer that is called; for a handler its caller.
    pub peer: &'a Endpoint,
    /// No response is sent.
    pub one_way: bool,
}

/// A transfer, as a [`Monitor`] sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MonitoredTransfer<'a> {
    /// Distinguishes it from other transfers that this engine makes at the same time.
    pub id: u64,
    /// Pull or push.
    pub direction: TransferDirection,
    /// Its length.
    pub bytes: usize,
    /// The owner of the remote memory.
    pub peer: &'a Endpoint,
}

/// The program's monitor, where it has set one.
pub(crate) struct MonitorSlot {
    monitor: Option<Box<dyn Monitor>>,
    next: AtomicU64,
}

impl MonitorSlot {
    pub(crate) fn new(monitor: Option<Box<dyn Monitor>>) -> MonitorSlot {
        MonitorSlot { monitor, next: AtomicU64::new(1) }
    }

    pub(crate) fn is_set(&self) -> bool {
        self.monitor.is_some()
    }
}

impl EngineShared {
    /// A number for an operation that the monitor is told of; 0 without one.
    pub(crate) fn monitored_id(&self) -> u64 {
        if self.monitor.is_set() { self.monitor.next.fetch_add(1, Ordering::Relaxed) } else { 0 }
    }

    /// Tells the monitor, if there is one. No lock may be held.
    #[inline]
    pub(crate) fn tell_monitor(&self, tell: impl FnOnce(&dyn Monitor)) {
        if let Some(monitor) = self.monitor.monitor.as_ref().filter(|_| !self.core.is_forked()) {
            tell_quietly(&**monitor, tell);
        }
    }
}

#[cold]
fn tell_quietly(monitor: &dyn Monitor, tell: impl FnOnce(&dyn Monitor)) {
    if catch_unwind(AssertUnwindSafe(|| tell(monitor))).is_err() {
        tracing::error!(target: "calomel::engine", "a monitor panicked");
    }
}
