//! Payloads that come at once: to receives with buffers of the link's own, which stay posted. Each is copied from there, which takes
//! less time than agreeing on a place for it. Several that leave at the same time come together.

use std::io;
use std::time::Instant;

use super::super::bulk::CHECKSUM;
use super::super::limits::{EAGER, RETRY, SLOT, SLOTS, STALL};
use super::super::sys::Label;
use super::super::wire::{Load, MOST_TOGETHER, OfiContent};
use super::OfiLink;
use super::arriving::{ArrivingPayload, OfiInbox, PayloadState, Slot, SlotContent, Slots, arrived, broken, received};
use crate::transport::{PayloadStatus, Sink};

impl OfiLink {
    /// Posts the receives, and tells the peer of them. Where the provider has no room there are fewer, or none.
    pub(super) fn open_slots(&self, inbox: &mut OfiInbox) -> io::Result<()> {
        let (bulk, first_tag) = (self.bulk()?, inbox.next_tags(SLOTS as u64));
        let mut count = 0;
        while count < SLOTS && bulk.station.endpoint.takes_data() {
            let label = Label::Slot { link: self.number, slot: count as u8 };
            let buffer = vec![0; SLOT + MOST_TOGETHER * CHECKSUM];
            if bulk.receive_copied(buffer, first_tag + count as u64, label)?.is_some() {
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
        let expected = inbox.payloads.iter().filter(|payload| payload.comes_to(slot)).count();
        if usize::from(slot) >= inbox.slots.all.len() || len > EAGER || expected >= MOST_TOGETHER {
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

    /// Payloads have come to a slot, or its receive has failed.
    pub(in super::super) fn slot_filled(&self, slot: u8, content: SlotContent, sink: &mut dyn Sink) {
        if self.is_closed() {
            return;
        }
        self.hold();
        let mut inbox = self.inbox.lock();
        let Some(place) = inbox.slots.all.get_mut(usize::from(slot)) else { return };
        *place = Slot::Filled(content);
        let settled = self.settle_slot(&mut inbox, slot, sink);
        drop(inbox);
        if let Err(error) = settled {
            self.report_failure(error, sink);
        }
    }

    /// Takes the payloads out of a slot, once they have come, and all are announced.
    fn settle_slot(&self, inbox: &mut OfiInbox, slot: u8, sink: &mut dyn Sink) -> io::Result<()> {
        let OfiInbox { payloads, slots, .. } = &mut *inbox;
        let Some(place) = slots.all.get_mut(usize::from(slot)) else { return Ok(()) };
        let Slot::Filled(SlotContent { result, buffer, load }) = place else { return Ok(()) };
        let got = received(*result)?;
        let load = Load::decode(*load).ok_or_else(|| broken("payloads without their number"))?;
        let expected = payloads.iter().filter(|payload| payload.comes_to(slot)).count();
        if expected > load.count {
            return Err(broken("fewer payloads than announced"));
        }
        if expected < load.count {
            return Ok(());
        }
        let mut rest = buffer.get(..got).unwrap_or_default();
        for (index, payload) in payloads.iter_mut().filter(|payload| payload.comes_to(slot)).enumerate() {
            let PayloadState::Coming { memory, len, covered, .. } = &payload.state else { continue };
            let mut status = PayloadStatus::SourceGone;
            if load.has(index) {
                let size = len + if *covered { CHECKSUM } else { 0 };
                let (bytes, behind) =
                    rest.split_at_checked(size).ok_or_else(|| broken("payloads of other lengths than announced"))?;
                status = arrived(memory.as_ref(), *len, *covered, Ok(size), Some(bytes))?;
                rest = behind;
            }
            payload.state = PayloadState::Done(status);
        }
        if !rest.is_empty() {
            return Err(broken("payloads of other lengths than announced"));
        }
        *place = Slot::Unposted(std::mem::take(buffer));
        inbox.last_progress = Some(Instant::now());
        let bulk = self.bulk()?;
        (0..load.count).for_each(|_| bulk.end_payload());
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
            let buffer = match std::mem::replace(place, Slot::Posted) {
                Slot::Unposted(buffer) => buffer,
                other => {
                    *place = other;
                    continue;
                }
            };
            let label = Label::Slot { link: self.number, slot: index as u8 };
            if let Some(buffer) = self.bulk()?.receive_copied(buffer, *first_tag + index as u64, label)? {
                *place = Slot::Unposted(buffer);
                return Ok(true);
            }
            self.send_control(&OfiContent::Emptied { slot: index as u8 })?;
        }
        Ok(false)
    }
}
