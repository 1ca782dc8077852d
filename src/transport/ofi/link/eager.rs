//! Payloads that come at once: to receives with buffers of the link's own, which stay posted. Each is copied from there, which takes
//! less time than agreeing on a place for it.

use std::io;
use std::time::Instant;

use super::super::bulk::CHECKSUM;
use super::super::limits::{EAGER, RETRY, SLOTS, STALL};
use super::super::sys::{CompletionError, Label};
use super::super::wire::OfiContent;
use super::OfiLink;
use super::arriving::{ArrivingPayload, OfiInbox, PayloadState, Slot, Slots, arrived, broken};
use crate::transport::Sink;

impl OfiLink {
    /// Posts the receives, and tells the peer of them. Where the provider has no room there are fewer, or none.
    pub(super) fn open_slots(&self, inbox: &mut OfiInbox) -> io::Result<()> {
        let (bulk, first_tag) = (self.bulk()?, inbox.next_tags(SLOTS as u64));
        let mut count = 0;
        while count < SLOTS {
            let label = Label::Slot { link: self.number, slot: count as u8 };
            if bulk.receive_copied(vec![0; EAGER + CHECKSUM], first_tag + count as u64, label)?.is_some() {
                break;
            }
            count += 1;
        }
        inbox.slots = Slots { first_tag, all: (0..count).map(|_| Slot::Posted).collect() };
        if count > 0 {
            self.send_control(&OfiContent::Slots { tag: first_tag, count: count as u8, name: bulk.name() })?;
        }
        Ok(())
    }

    /// The peer announces a payload that it sends at once.
    pub(super) fn payload_comes(
        &self,
        inbox: &mut OfiInbox,
        number: u64,
        len: usize,
        covered: bool,
        slot: u8,
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        let target = inbox.announced_target(number, len, covered)?;
        let is_used =
            |payload: &ArrivingPayload| matches!(payload.state, PayloadState::Coming { slot: other, .. } if other == slot);
        if usize::from(slot) >= inbox.slots.all.len() || len > EAGER || inbox.payloads.iter().any(is_used) {
            return Err(broken("a payload to no receive"));
        }
        self.shared.begin_payload(&self.bulk()?);
        inbox.expect(ArrivingPayload { number, state: PayloadState::Coming { memory: target.memory, len, covered, slot } });
        self.settle_slot(inbox, slot, sink)?;
        if let Some(since) = inbox.last_progress {
            self.wants_timer(since + STALL);
        }
        Ok(())
    }

    /// A payload has come to a slot, or its receive has failed.
    pub(in super::super) fn slot_filled(
        &self,
        slot: u8,
        result: Result<usize, CompletionError>,
        buffer: Option<Vec<u8>>,
        sink: &mut dyn Sink,
    ) {
        if self.is_closed() {
            return;
        }
        self.hold();
        let mut inbox = self.inbox.lock();
        let (Some(place), Some(buffer)) = (inbox.slots.all.get_mut(usize::from(slot)), buffer) else { return };
        *place = Slot::Filled(result, buffer);
        let settled = self.settle_slot(&mut inbox, slot, sink);
        drop(inbox);
        if let Err(error) = settled {
            self.report_failure(error, sink);
        }
    }

    /// Takes the payload out of a slot, if it has come, and is announced.
    fn settle_slot(&self, inbox: &mut OfiInbox, slot: u8, sink: &mut dyn Sink) -> io::Result<()> {
        let OfiInbox { payloads, slots, .. } = &mut *inbox;
        let comes =
            |payload: &&mut ArrivingPayload| matches!(payload.state, PayloadState::Coming { slot: other, .. } if other == slot);
        let (Some(payload), Some(place)) = (payloads.iter_mut().find(comes), slots.all.get_mut(usize::from(slot))) else {
            return Ok(());
        };
        let PayloadState::Coming { memory, len, covered, .. } = &payload.state else { return Ok(()) };
        let (result, buffer) = match std::mem::replace(place, Slot::Posted) {
            Slot::Filled(result, buffer) => (result, buffer),
            other => {
                *place = other;
                return Ok(());
            }
        };
        let status = arrived(memory.as_ref(), *len, *covered, result, Some(&buffer))?;
        payload.state = PayloadState::Done(status);
        *place = Slot::Unposted(payload.number, buffer);
        inbox.last_progress = Some(Instant::now());
        self.bulk()?.end_payload();
        if self.post_slots(inbox)? {
            self.wants_timer(Instant::now() + RETRY);
        }
        inbox.report(self.key, sink);
        Ok(())
    }

    /// Posts receives again, and reports the payloads that had come to them. True when some must wait.
    pub(super) fn post_slots(&self, inbox: &mut OfiInbox) -> io::Result<bool> {
        let Slots { first_tag, all } = &mut inbox.slots;
        for (index, place) in all.iter_mut().enumerate() {
            let (number, buffer) = match std::mem::replace(place, Slot::Posted) {
                Slot::Unposted(number, buffer) => (number, buffer),
                other => {
                    *place = other;
                    continue;
                }
            };
            let label = Label::Slot { link: self.number, slot: index as u8 };
            if let Some(buffer) = self.bulk()?.receive_copied(buffer, *first_tag + index as u64, label)? {
                *place = Slot::Unposted(number, buffer);
                return Ok(true);
            }
            self.send_control(&OfiContent::Taken { number })?;
        }
        Ok(false)
    }
}
