//! Payloads that leave: to the receive that the peer has posted for each.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::time::Instant;

use super::super::bulk::PayloadPosted;
use super::super::limits::RETRY;
use super::super::outbox::AnnouncedPayload;
use super::super::sys::{CompletionError, Label};
use super::OfiLink;
use super::arriving::broken;
use crate::transport::Sink;

#[derive(Default)]
pub(super) struct Leaving {
    /// Payloads that the peer is ready for, with their tags, and that the provider had no room for, or no connection yet.
    waiting: VecDeque<(AnnouncedPayload, u64)>,
    /// The numbers of those that are on their way.
    sent: HashSet<u64>,
}

impl OfiLink {
    /// The peer has posted a receive for a payload.
    pub(super) fn peer_is_ready(&self, number: u64, tag: u64, name: &[u8]) -> io::Result<()> {
        let payload = self.out.lock().take_announced(number)?;
        self.bulk()?.set_peer(name, self.remote)?;
        self.leaving.lock().waiting.push_back((payload, tag));
        if self.send_payloads()? {
            self.wants_timer(Instant::now() + RETRY);
        }
        Ok(())
    }

    /// The peer has posted receives for payloads that come at once.
    pub(super) fn peer_has_slots(&self, tag: u64, count: u8, name: &[u8]) -> io::Result<()> {
        // One that is opened for this would be at the request of a stranger: only a peer that was announced a payload has slots.
        let Some(bulk) = self.opened_bulk() else { return Err(broken("receives for payloads, though none was announced to it")) };
        bulk.set_peer(name, self.remote)?;
        self.out.lock().set_slots(tag, count)
    }

    /// Sends the payloads that were announced, and for which the peer is ready before.
    pub(super) fn send_eager(&self) -> io::Result<()> {
        let eager = self.out.lock().take_eager();
        if eager.is_empty() {
            return Ok(());
        }
        self.leaving.lock().waiting.extend(eager);
        if self.send_payloads()? {
            self.wants_timer(Instant::now() + RETRY);
        }
        Ok(())
    }

    /// Sends the payloads that the peer is ready for. True when some must wait.
    fn send_payloads(&self) -> io::Result<bool> {
        let bulk = self.bulk()?;
        loop {
            let Some((payload, tag)) = self.leaving.lock().waiting.pop_front() else { return Ok(false) };
            let label = Label::Payload { link: self.number, number: payload.number };
            // Another thread may handle its arrival before this one is back.
            self.leaving.lock().sent.insert(payload.number);
            match bulk.send(&payload.memory, tag, label, payload.covered)? {
                PayloadPosted::Begun | PayloadPosted::Gone => {}
                PayloadPosted::Busy => {
                    let mut leaving = self.leaving.lock();
                    leaving.sent.remove(&payload.number);
                    leaving.waiting.push_front((payload, tag));
                    return Ok(true);
                }
            }
        }
    }

    /// Tries again what the provider had no room for. True when something waits on.
    pub(super) fn retry_payloads(&self, sink: &mut dyn Sink) -> io::Result<bool> {
        let waits = !self.leaving.lock().waiting.is_empty();
        let leaving = waits && self.send_payloads()?;
        let arriving = self.receive_waiting(sink)?;
        Ok(leaving || arriving)
    }

    /// The provider has taken a payload: the peer reports when it has arrived.
    pub(in super::super) fn payload_sent(&self, result: Result<(), CompletionError>, sink: &mut dyn Sink) {
        if let Err(error) = result {
            self.report_failure(error.into(), sink);
        }
    }

    /// A payload has arrived, or is not wanted. Messages may overtake payloads, so the peer has it only now.
    pub(super) fn payload_taken(&self, number: u64, sink: &mut dyn Sink) -> io::Result<()> {
        let was_sent = self.leaving.lock().sent.remove(&number);
        if !was_sent && !self.out.lock().forget_announced(number) {
            let what = "it reports the arrival of a payload that it was not sent";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        self.out.lock().free_slot_of(number);
        self.bulk()?.end_payload();
        sink.returned(self.key);
        Ok(())
    }
}
