//! Payloads that leave: to the receive that the peer has posted for each.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Instant;

use smallvec::SmallVec;

use super::super::bulk::PayloadPosted;
use super::super::limits::RETRY;
use super::super::outbox::Parcel;
use super::super::sys::{CompletionError, Label};
use super::super::wire::MOST_TOGETHER;
use super::OfiLink;
use super::arriving::broken;
use crate::memory::Slice;
use crate::transport::Sink;

#[derive(Default)]
pub(super) struct Leaving {
    /// What the peer is ready for, and the provider had no room for, or no connection yet.
    waiting: VecDeque<Parcel>,
    /// What is on its way, by the number of its first payload.
    sent: HashMap<u64, SentParcel>,
}

/// Payloads that were posted. They count as under way until the peer has reported them and the provider has done with them: a peer that
/// reports what it does not read would else have the provider keep ever more.
struct SentParcel {
    payloads: usize,
    to_slot: bool,
    /// The provider has done with it.
    left: bool,
    arrived: bool,
}

impl Leaving {
    /// Notes what has happened to a parcel. How many payloads have ended; `None`: there is no such parcel.
    fn note(&mut self, first: u64, note: impl FnOnce(&mut SentParcel)) -> Option<usize> {
        let parcel = self.sent.get_mut(&first)?;
        note(parcel);
        let SentParcel { payloads, left, arrived, .. } = *parcel;
        if !(left && arrived) {
            return Some(0);
        }
        self.sent.remove(&first);
        Some(payloads)
    }

    /// The peer has reported a parcel. An error when it was not sent, or not so.
    fn note_arrived(&mut self, first: u64, to_slot: bool) -> io::Result<usize> {
        let was_sent = self.sent.get(&first).is_some_and(|parcel| parcel.to_slot == to_slot && !parcel.arrived);
        let ended = if was_sent { self.note(first, |parcel| parcel.arrived = true) } else { None };
        ended
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it reports the arrival of a payload that it was not sent"))
    }
}

impl OfiLink {
    /// The peer has posted a receive for a payload.
    pub(super) fn peer_is_ready(&self, number: u64, tag: u64, name: &[u8]) -> io::Result<()> {
        let payload = self.out.lock().take_announced(number)?;
        self.bulk()?.set_peer(name, self.remote)?;
        self.leaving.lock().waiting.push_back(Parcel { payloads: vec![payload], tag, slot: None });
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
        self.out.lock().set_slots(tag, count, bulk.station.endpoint.most_segments())
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
            let (parcel, number, covered) = {
                let mut leaving = self.leaving.lock();
                let Some(parcel) = leaving.waiting.pop_front() else { return Ok(false) };
                let Some(first) = parcel.payloads.first() else { continue };
                let (number, covered) = (first.number, first.covered);
                // Another thread may handle its arrival before this one is back.
                let (payloads, to_slot) = (parcel.payloads.len(), parcel.slot.is_some());
                leaving.sent.insert(number, SentParcel { payloads, to_slot, left: false, arrived: false });
                (parcel, number, covered)
            };
            let posted = {
                let memory: SmallVec<[&Slice; MOST_TOGETHER]> = parcel.payloads.iter().map(|payload| &payload.memory).collect();
                let label = Label::Payload { link: self.number, number };
                bulk.send(&memory, parcel.tag, label, covered, parcel.slot.is_some())?
            };
            match posted {
                PayloadPosted::Begun | PayloadPosted::Gone => {}
                PayloadPosted::Busy => {
                    let mut leaving = self.leaving.lock();
                    leaving.sent.remove(&number);
                    leaving.waiting.push_front(parcel);
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

    /// The provider has done with a parcel: the peer reports when it has arrived.
    pub(in super::super) fn payload_sent(&self, first: u64, result: Result<(), CompletionError>, sink: &mut dyn Sink) {
        if let Err(error) = result {
            return self.report_failure(error.into(), sink);
        }
        let ended = self.leaving.lock().note(first, |parcel| parcel.left = true);
        if let Err(error) = self.payloads_have_ended(ended.unwrap_or(0), sink) {
            self.report_failure(error, sink);
        }
    }

    /// A payload has arrived, or is not wanted. Messages may overtake payloads, so the peer has it only now.
    pub(super) fn payload_taken(&self, number: u64, sink: &mut dyn Sink) -> io::Result<()> {
        let was_announced = self.out.lock().forget_announced(number);
        let ended = if was_announced { 1 } else { self.leaving.lock().note_arrived(number, false)? };
        self.out.lock().has_arrived(number);
        self.payloads_have_ended(ended, sink)
    }

    /// The payloads of a slot have arrived.
    pub(super) fn slot_is_emptied(&self, slot: u8, sink: &mut dyn Sink) -> io::Result<()> {
        let numbers = self.out.lock().free_slot_of(slot);
        // No payload has the number that stands for none.
        let first = numbers.first().copied().unwrap_or(u64::MAX);
        let ended = self.leaving.lock().note_arrived(first, true)?;
        {
            let mut out = self.out.lock();
            numbers.into_iter().for_each(|number| out.has_arrived(number));
        }
        self.payloads_have_ended(ended, sink)
    }

    fn payloads_have_ended(&self, count: usize, sink: &mut dyn Sink) -> io::Result<()> {
        if count > 0 {
            let bulk = self.bulk()?;
            for _ in 0..count {
                bulk.end_payload();
                sink.returned(self.key);
            }
        }
        Ok(())
    }
}
