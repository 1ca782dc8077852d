//! Waiting in async code: for the end of an operation, with a deadline, and for work that blocks.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::Instant;

use crate::sync::Mutex;

use crate::progress::{Completion, Core, wake_quietly};
use crate::{Error, Result};

/// A value that one thread hands to one task.
struct Handover<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

impl<T> Handover<T> {
    fn new() -> Arc<Mutex<Handover<T>>> {
        Arc::new(Mutex::new(Handover { value: None, waker: None }))
    }

    fn put(handover: &Mutex<Handover<T>>, value: T) {
        let waker = {
            let mut handover = handover.lock();
            handover.value = Some(value);
            handover.waker.take()
        };
        // Woken where no lock is held: wakers are user code.
        waker.into_iter().for_each(wake_quietly);
    }

    fn poll(handover: &Mutex<Handover<T>>, waker: &Waker) -> Poll<T> {
        // Cloned, and the earlier one dropped, where no lock is held.
        let waker = waker.clone();
        let mut locked = handover.lock();
        if let Some(value) = locked.value.take() {
            return Poll::Ready(value);
        }
        let earlier = locked.waker.replace(waker);
        drop(locked);
        drop(earlier);
        Poll::Pending
    }
}

/// A timer of the engine that a task waits for; dropping this removes it.
struct Alarm {
    core: Weak<Core>,
    key: Option<(Instant, u64)>,
    expired: Arc<Mutex<Handover<()>>>,
}

impl Alarm {
    fn at(core: &Arc<Core>, deadline: Instant) -> Alarm {
        let expired = Handover::new();
        let own = expired.clone();
        let delay = deadline.saturating_duration_since(Instant::now());
        let key = core.add_timer(delay, Box::new(move || Handover::put(&own, ())));
        Alarm { core: Arc::downgrade(core), key, expired }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let (Some(key), Some(core)) = (self.key, self.core.upgrade()) {
            core.remove_timer(key);
        }
    }
}

/// An operation that a future polls.
struct Polled<'a>(&'a Core, &'a Completion);

impl Drop for Polled<'_> {
    fn drop(&mut self) {
        self.0.forget_polls(self.1);
    }
}

/// Resolves when the operation has ended; false when the deadline comes first, and in a forked child.
pub(crate) async fn completed(core: &Arc<Core>, completion: &Completion, deadline: Option<Instant>) -> bool {
    if completion.is_ready() {
        return true;
    }
    let alarm = deadline.map(|deadline| Alarm::at(core, deadline));
    let _polled = Polled(core, completion);
    poll_fn(|context| {
        if core.is_forked() {
            return Poll::Ready(false);
        }
        if core.poll_operation(completion, context.waker(), true) {
            return Poll::Ready(true);
        }
        let expired = alarm.as_ref().map(|alarm| Handover::poll(&alarm.expired, context.waker()));
        if expired.is_some_and(|expired| expired.is_ready()) {
            return Poll::Ready(false);
        }
        Poll::Pending
    })
    .await
}

/// Runs `work`, which blocks, on a thread of its own.
pub(crate) async fn on_a_thread<T: Send + 'static>(
    name: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let handover = Handover::new();
    let own = handover.clone();
    let spawned = std::thread::Builder::new().name(format!("calomel-{name}")).spawn(move || Handover::put(&own, work()));
    spawned.map_err(|error| Error::io(format!("can't start the thread for {name}"), error))?;
    poll_fn(|context| Handover::poll(&handover, context.waker())).await
}
