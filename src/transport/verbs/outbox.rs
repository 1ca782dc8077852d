//! What a link sends: messages, for which the other side has given credit, and staged pieces, which it reads.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::STAGED;
use super::device::{CREDITS, Device, MESSAGE, SENT, STAGE, UNCREDITED};
use super::memory::Slab;
use super::sys::{Access, Kind, Qp, Work};
use super::wire::{self, Content, HEADER, Header, Staged};
use crate::memory::Slice;

/// Messages that may be on their way.
pub(super) const SENDS: usize = 32;
/// The end of one in so many is told.
const SIGNALLED: usize = SENDS / 4;
/// What may wait to be said between the transports.
const CONTROL: usize = 16;
/// What takes more messages than this is staged.
const IN_MESSAGES: usize = 4;

/// Something that is being sent.
pub(super) struct Sending {
    pub bytes: Vec<u8>,
    at: usize,
    payload: Option<Slice>,
}

impl Sending {
    pub(super) fn new(bytes: Vec<u8>, payload: Option<Slice>) -> Sending {
        Sending { bytes, at: 0, payload }
    }
}

pub(super) struct Outbox {
    /// `None` when the link is over.
    pub qp: Option<Qp>,
    device: Arc<Device>,
    /// Messages that are on their way.
    slots: Slab,
    next: usize,
    free: usize,
    /// Messages whose end is told, by number, and how many end with each.
    signalled: VecDeque<(u64, usize)>,
    unsignalled: usize,
    /// Messages that the other side has room for; and how many it has said at first.
    credits: u16,
    most: u16,
    /// Messages that the other side may send.
    granted: u16,
    /// Longest message that the other side takes.
    longest: usize,
    /// Messages of the other side for which there is room again, and which have not been reported.
    owed: u16,
    /// Staged pieces of the other side that have been read, and not reported.
    read: u16,
    /// Pieces that the other side reads, the oldest first; and those that it has read. They are the link's alone: another peer
    /// that has seen their keys can't read what is in them.
    staged: VecDeque<Slab>,
    spare: Vec<Slab>,
    /// What is said between the transports, and goes first.
    control: VecDeque<Content<'static>>,
    pub pending: Option<Sending>,
    /// Number of the farewell.
    bye: Option<u64>,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl Outbox {
    pub(super) fn new(qp: Qp, device: &Arc<Device>) -> io::Result<Outbox> {
        Ok(Outbox {
            qp: Some(qp),
            device: device.clone(),
            slots: Slab::new(&device.pd, SENDS * MESSAGE, Access::default())?,
            next: 0,
            free: SENDS,
            signalled: VecDeque::new(),
            unsignalled: 0,
            credits: 0,
            most: 0,
            granted: CREDITS,
            longest: MESSAGE,
            owed: 0,
            read: 0,
            staged: VecDeque::new(),
            spare: Vec::new(),
            control: VecDeque::new(),
            pending: None,
            bye: None,
        })
    }

    /// The other side has said what it has room for.
    pub(super) fn open(&mut self, credits: u16, longest: u32) {
        self.credits = credits;
        self.most = credits;
        self.longest = MESSAGE.min(longest as usize);
    }

    /// A message has come: what the other side reports with it, and whether it may send it.
    pub(super) fn heed(&mut self, header: Header, content: &Content<'_>) -> io::Result<()> {
        self.credits = self.credits.saturating_add(header.credits);
        if self.credits > self.most {
            return Err(broken("it gives back credits that nobody took"));
        }
        match content {
            // Without a limit on them it could talk for ever: there is no more of them than there is of what they tell.
            Content::Credit if header.credits == 0 && header.read == 0 => {
                return Err(broken("it says that it has nothing to say"));
            }
            content if content.is_credited() => {
                self.granted = self.granted.checked_sub(1).ok_or_else(|| broken("it sends more than it was given credit for"))?;
            }
            _ => {}
        }
        for _ in 0..header.read {
            let stage = self.staged.pop_front().ok_or_else(|| broken("it has read what it was not given"))?;
            self.spare.push(stage);
        }
        Ok(())
    }

    /// A message has ended, and all before it. Others' numbers are not known here.
    pub(super) fn ended(&mut self, number: u64) -> bool {
        let Some(at) = self.signalled.iter().position(|(other, _)| *other == number) else { return false };
        self.free += self.signalled.drain(..=at).map(|(_, count)| count).sum::<usize>();
        true
    }

    /// There is room for one more message of the other side. An error when it was not given credit for that many.
    pub(super) fn owe(&mut self) -> io::Result<()> {
        self.owed += 1;
        if self.owed > CREDITS { Err(broken("it sends more than it was given credit for")) } else { Ok(()) }
    }

    pub(super) fn has_read(&mut self) {
        self.read = self.read.saturating_add(1);
    }

    /// Has something said that goes before what waits. An error when the other side makes this one talk without listening.
    pub(super) fn say(&mut self, content: Content<'static>) -> io::Result<()> {
        self.control.push_back(content);
        if self.control.len() > CONTROL { Err(broken("it offers lanes, and does not listen")) } else { Ok(()) }
    }

    /// Ends it: the queue pair, and then what the other side may have been reading, are to be dropped.
    pub(super) fn close(&mut self) -> (Option<Qp>, Vec<Slab>) {
        self.spare.extend(self.staged.drain(..));
        (self.qp.take(), std::mem::take(&mut self.spare))
    }

    /// True when all that was staged has been read, and nothing waits.
    pub(super) fn is_flushed(&self) -> bool {
        self.staged.is_empty() && self.pending.is_none()
    }

    /// Says farewell, once; true when that has arrived.
    pub(super) fn farewell(&mut self) -> io::Result<bool> {
        match self.bye {
            None => {
                self.bye = Some(self.post(&Content::Bye, true)?);
                Ok(false)
            }
            Some(number) => Ok(!self.signalled.iter().any(|(other, _)| *other == number)),
        }
    }

    /// Reports what has to be reported soon, if nothing has taken it along.
    pub(super) fn report(&mut self) -> io::Result<()> {
        if (self.owed >= CREDITS / 2 || self.read > 0) && self.free > 0 && self.qp.is_some() && self.bye.is_none() {
            self.post(&Content::Credit, false)?;
        }
        Ok(())
    }

    fn may_send(&self) -> bool {
        self.credits > 0 && self.free > usize::from(UNCREDITED)
    }

    /// Sends what has been said between the transports, and then what waits. Returns what is sent.
    pub(super) fn resume(&mut self) -> io::Result<Option<Sending>> {
        let Some(mut sending) = self.pending.take() else {
            self.send_control()?;
            return Ok(None);
        };
        if self.write(&mut sending)? {
            return Ok(Some(sending));
        }
        self.pending = Some(sending);
        Ok(None)
    }

    /// Sends what is said between the transports, for which no credit is taken: the other side may have none to give before it
    /// has heard that. True when nothing is left.
    pub(super) fn send_control(&mut self) -> io::Result<bool> {
        while let Some(content) = self.control.front().copied() {
            if self.free == 0 || self.qp.is_none() {
                return Ok(false);
            }
            self.post(&content, false)?;
            self.control.pop_front();
        }
        Ok(true)
    }

    /// Sends what there is room for; true when that was all.
    pub(super) fn write(&mut self, sending: &mut Sending) -> io::Result<bool> {
        if !self.send_control()? {
            return Ok(false);
        }
        let room = self.longest - HEADER;
        while sending.at < sending.bytes.len() {
            if !self.may_send() {
                return Ok(false);
            }
            let left = sending.bytes.len() - sending.at;
            if left <= IN_MESSAGES * room {
                let part = &sending.bytes[sending.at..sending.at + left.min(room)];
                self.credits -= 1;
                self.post(&Content::Bytes(part), false)?;
                sending.at += part.len();
            } else if self.staged.len() < STAGED {
                let part = &sending.bytes[sending.at..sending.at + left.min(STAGE)];
                let staged = self.stage(part.len(), &mut |place| {
                    place.copy_from_slice(part);
                    true
                })?;
                sending.at += part.len();
                let Some(staged) = staged else { return Err(broken("what is sent can't be staged")) };
                self.credits -= 1;
                self.post(&Content::StagedBytes(staged), false)?;
            } else {
                return Ok(false);
            }
        }
        let Some(payload) = &sending.payload else { return Ok(true) };
        if !self.may_send() {
            return Ok(false);
        }
        let payload = payload.clone();
        if payload.len <= room {
            let mut bytes = vec![0; payload.len];
            let content = if payload.read(&mut bytes) { Content::Payload(&bytes) } else { Content::SourceGone };
            self.credits -= 1;
            self.post(&content, false)?;
        } else if self.staged.len() < STAGED {
            if payload.len > STAGE {
                return Err(broken("a payload that is longer than agreed"));
            }
            let staged = self.stage(payload.len, &mut |place| payload.read(place))?;
            let content = staged.map_or(Content::SourceGone, Content::StagedPayload);
            self.credits -= 1;
            self.post(&content, false)?;
        } else {
            return Ok(false);
        }
        sending.payload = None;
        Ok(true)
    }

    /// Puts something where the other side can read it, until it says that it has. `None` when there is nothing to put there.
    fn stage(&mut self, len: usize, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> io::Result<Option<Staged>> {
        let mut stage = match self.spare.pop() {
            Some(stage) => stage,
            None => Slab::new(&self.device.pd, STAGE, Access { remote_read: true, ..Access::default() })?,
        };
        // SAFETY: nobody has been told of it, or whoever was has read it: no device writes it.
        if !fill(unsafe { stage.write(0, len) }) {
            self.spare.push(stage);
            return Ok(None);
        }
        let staged = Staged { address: stage.address(0), key: stage.remote_key(), len: len as u32 };
        self.staged.push_back(stage);
        Ok(Some(staged))
    }

    /// Sends one message, with what there is to report; its number.
    fn post(&mut self, content: &Content<'_>, signalled: bool) -> io::Result<u64> {
        let Some(qp) = &self.qp else { return Err(io::ErrorKind::NotConnected.into()) };
        if self.free == 0 {
            return Err(broken("more is sent than the other side has asked for"));
        }
        let header = Header { credits: std::mem::take(&mut self.owed), read: std::mem::take(&mut self.read) };
        self.granted += header.credits;
        let at = self.next * MESSAGE;
        // SAFETY: no device writes there: the slab is not registered for that.
        let len = wire::encode(header, content, unsafe { self.slots.write(at, MESSAGE) });
        let number = SENT | self.device.number();
        let signalled = signalled || self.unsignalled + 1 == SIGNALLED;
        let work = Work { id: number, kind: Kind::Send, pieces: &[self.slots.piece(at, len)], signalled };
        // SAFETY: the slot is registered, and free: what was in it before has ended. It is written again when this has ended.
        unsafe { qp.post(&[work]) }?;
        self.next = (self.next + 1) % SENDS;
        self.free -= 1;
        self.unsignalled += 1;
        if signalled {
            self.signalled.push_back((number, std::mem::take(&mut self.unsignalled)));
        }
        Ok(number)
    }
}
