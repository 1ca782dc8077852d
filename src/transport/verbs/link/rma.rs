//! A link's use of its RMA queue pair.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::sync::MutexGuard;

use super::super::limits::{STAGE, STAGED};
use super::super::sys::WorkCompletion;
use super::super::wire::{MessageContent, QpOffer, StagedSegment};
use super::rma_queue_pair::RmaQueuePair;
use super::{VerbsConnection, VerbsLink};
use crate::transport::closed_by_peer;

impl VerbsLink {
    /// Both sides are connected: offers the first RMA queue pair. Done once.
    pub(in super::super) fn start_rma(&self) -> io::Result<()> {
        let (Some(connection), Some(hello)) =
            (self.connection.get(), self.connection.get().and_then(|connection| connection.hello.get()))
        else {
            return Ok(());
        };
        if self.rma_started.load(Ordering::Acquire) || self.rma_started.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let Some(id) = self.id() else { return Ok(()) };
        // The connection manager has no path when the peer has disconnected already.
        let path = id.path().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => closed_by_peer(),
            _ => error,
        })?;
        if let Some(qp) = &connection.out.lock().qp {
            qp.set_patience();
        }
        let mut slot = connection.rma.lock();
        let rma = slot.insert(RmaQueuePair::new(self.me.clone(), &connection.links, &connection.queue_set, path, hello.reads));
        let offer = rma.start()?;
        send_offer(connection, offer, None)
    }

    /// The peer has offered its end of an RMA queue pair.
    pub(super) fn peer_offered(&self, connection: &VerbsConnection, offer: QpOffer) -> io::Result<()> {
        let mut slot = connection.rma.lock();
        let Some(rma) = slot.as_mut() else { return Ok(()) };
        let (own, connected) = rma.peer_offered(offer)?;
        send_offer(connection, own, connected.then_some(offer.generation))?;
        self.deliver(slot);
        Ok(())
    }

    /// The peer has connected its end. True when RMA may begin.
    pub(super) fn peer_connected(&self, connection: &VerbsConnection, generation: u32) -> io::Result<bool> {
        connection.rma.lock().as_mut().map_or(Ok(false), |own| own.peer_connected(generation))
    }

    pub(super) fn fetch(&self, connection: &VerbsConnection, staged: StagedSegment, payload: bool) -> io::Result<()> {
        {
            let mut inbox = self.inbox.lock();
            if staged.len as usize > STAGE || inbox.expected() >= STAGED {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it stages more than was agreed"));
            }
            let mut slot = connection.rma.lock();
            let Some(rma) = slot.as_mut() else { return Ok(()) };
            inbox.expect(rma.fetch(connection.device.take_stage()?, staged), payload);
        }
        self.post_pending(connection);
        Ok(())
    }

    /// Posts the RMA requests that there is room for.
    pub(super) fn post_pending(&self, connection: &VerbsConnection) {
        let mut slot = connection.rma.lock();
        let Some(rma) = slot.as_mut() else { return };
        if let Err(error) = rma.post_pending() {
            self.fail_rma(connection, rma, &error.to_string());
        }
        let busy = rma.is_busy();
        self.deliver(slot);
        if busy {
            self.shared.set_alarm();
        }
    }

    /// Replaces a stalled queue pair. True while requests are outstanding.
    pub(in super::super) fn check_progress(&self, now: Instant) -> bool {
        let Some(connection) = self.connection.get() else { return false };
        self.replace_rma_if(connection, |rma| rma.has_stalled(now), "its device makes no progress");
        connection.rma.lock().as_ref().is_some_and(RmaQueuePair::is_busy)
    }

    /// Replaces the queue pair, if the condition holds.
    pub(super) fn replace_rma_if(&self, connection: &VerbsConnection, is_it: impl FnOnce(&RmaQueuePair) -> bool, why: &str) {
        let mut slot = connection.rma.lock();
        let Some(rma) = slot.as_mut() else { return };
        if is_it(rma) {
            self.fail_rma(connection, rma, why);
        }
        self.deliver(slot);
    }

    /// The caller holds the lock, so that offers are sent in order.
    fn fail_rma(&self, connection: &VerbsConnection, rma: &mut RmaQueuePair, why: &str) {
        if let Err(error) = rma.fail(why).and_then(|offer| send_offer(connection, offer, None)) {
            self.fail(error);
        }
    }

    /// A request on the RMA queue pair has completed; `continue_rma` follows. Callable from any thread.
    pub(in super::super) fn rma_completed(&self, completion: &WorkCompletion) {
        let Some(connection) = self.connection.get() else { return };
        let mut slot = connection.rma.lock();
        let Some(rma) = slot.as_mut() else { return };
        if let Err(why) = rma.ended(completion) {
            self.fail_rma(connection, rma, &why);
        }
    }

    /// Posts what there is room for after completions.
    pub(in super::super) fn continue_rma(&self) {
        if let Some(connection) = self.connection.get() {
            self.post_pending(connection);
        }
    }

    /// Passes operations that have ended to the driver.
    pub(super) fn deliver(&self, mut slot: MutexGuard<'_, Option<RmaQueuePair>>) {
        let done = slot.as_mut().map_or_else(Vec::new, RmaQueuePair::take_done);
        drop(slot);
        if let (false, Some(own)) = (done.is_empty(), self.me.upgrade()) {
            self.shared.deliver(&own, done);
        }
    }
}

/// Sends messages about the RMA queue pair, ahead of frames that wait, since those may depend on it.
fn send_offer(connection: &VerbsConnection, offer: Option<QpOffer>, up: Option<u32>) -> io::Result<()> {
    let mut out = connection.out.lock();
    offer.into_iter().try_for_each(|offer| out.queue_control(MessageContent::Offer(offer)))?;
    up.into_iter().try_for_each(|generation| out.queue_control(MessageContent::RmaConnected(generation)))?;
    out.send_control().map(drop)
}
