//! Payloads that leave: to the receive that the peer has posted for each.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::time::Instant;

use super::super::bulk::PayloadPosted;
use super::super::limits::RETRY;
use super::super::outbox::AnnouncedPayload;
use super::super::sys::{CompletionError, Label};
use super::OfiLink;
use crate::transport::Sink;

#[derive(Default)]
pub(super) struct Leaving {
    /// Payloads that the peer is ready for, with their tags, and that the provider had no room for, or no connection yet.
    waiting: VecDeque<(AnnouncedPayload, u64)>,
    /// The numbers of those that are being sent.
    sending: HashSet<u64>,
}

impl OfiLink {
    /// The peer has posted a receive for a payload.
    pub(super) fn peer_is_ready(&self, number: u64, tag: u64, name: &[u8], sink: &mut dyn Sink) -> io::Result<()> {
        let payload = self.out.lock().take_announced(number)?;
        self.bulk()?.set_peer(name, self.peer.socket())?;
        self.leaving.lock().waiting.push_back((payload, tag));
        if self.send_payloads(sink)? {
            self.wants_timer(Instant::now() + RETRY);
        }
        Ok(())
    }

    /// Sends the payloads that the peer is ready for. True when some must wait.
    fn send_payloads(&self, _sink: &mut dyn Sink) -> io::Result<bool> {
        let copies = self.port.copies_payloads();
        loop {
            let Some((payload, tag)) = self.leaving.lock().waiting.pop_front() else { return Ok(false) };
            let label = Label::Payload { link: self.number, number: payload.number };
            // Before it is sent: the completion may come at once.
            self.leaving.lock().sending.insert(payload.number);
            match self.bulk()?.send(&payload.memory, tag, label, payload.covered, copies)? {
                PayloadPosted::Begun | PayloadPosted::Copied | PayloadPosted::Gone => {}
                PayloadPosted::Busy => {
                    let mut leaving = self.leaving.lock();
                    leaving.sending.remove(&payload.number);
                    leaving.waiting.push_front((payload, tag));
                    return Ok(true);
                }
            }
        }
    }

    /// Tries again what the provider had no room for. True when something waits on.
    pub(super) fn retry_payloads(&self, sink: &mut dyn Sink) -> io::Result<bool> {
        let leaving = !self.leaving.lock().waiting.is_empty() && self.send_payloads(sink)?;
        let arriving = self.receive_waiting(sink)?;
        Ok(leaving || arriving)
    }

    /// A payload was sent: its memory is not in use any more.
    pub(in super::super) fn payload_sent(&self, number: u64, result: Result<(), CompletionError>, sink: &mut dyn Sink) {
        if self.is_closed() || !self.leaving.lock().sending.remove(&number) {
            return;
        }
        match result {
            Ok(()) => sink.returned(self.key),
            Err(error) => self.report_failure(error.into(), sink),
        }
    }
}
