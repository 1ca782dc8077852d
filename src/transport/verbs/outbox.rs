//! The sending side of a link: messages, which take the peer's credits, and staged segments, which the peer reads.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::device::{Device, SENT};
use super::limits::{CREDITS, MESSAGE, SENDS, STAGE, STAGED, UNCREDITED};
use super::slab::Slab;
use super::sys::{AccessFlags, Opcode, Qp, WorkRequest};
use super::wire::{self, HEADER, MessageContent, MessageHeader, StagedSegment};
use crate::memory::Slice;

/// One message in so many is signalled.
const SIGNALLED: usize = SENDS / 4;
/// Control messages that may wait.
const CONTROL: usize = 16;
/// Data that needs more messages than this is staged.
const IN_MESSAGES: usize = 4;

/// A frame and its payload, partly sent.
pub(super) struct VerbsSend {
    pub bytes: Vec<u8>,
    at: usize,
    payload: Option<Slice>,
}

impl VerbsSend {
    pub(super) fn new(bytes: Vec<u8>, payload: Option<Slice>) -> VerbsSend {
        VerbsSend { bytes, at: 0, payload }
    }
}

pub(super) struct VerbsOutbox {
    /// `None` when the link has ended.
    pub qp: Option<Qp>,
    device: Arc<Device>,
    /// Buffers of outstanding messages.
    slots: Slab,
    next: usize,
    free: usize,
    /// Signalled messages by number, and how many messages complete with each.
    signalled: VecDeque<(u64, usize)>,
    unsignalled: usize,
    /// Credits: messages that the peer has room for; and how many it granted at first.
    credits: u16,
    most: u16,
    /// Messages that the peer may send.
    granted: u16,
    /// Longest message that the peer accepts.
    longest: usize,
    /// Credits to be returned to the peer.
    owed: u16,
    /// The peer's staged segments that have been read, to be reported.
    read: u16,
    /// Staging buffers that the peer reads, the oldest first; and those that it has read. No other link uses them: another peer
    /// that has seen their keys can't read their content.
    staged: VecDeque<Slab>,
    spare: Vec<Slab>,
    /// Control messages, which go first.
    control: VecDeque<MessageContent<'static>>,
    pub pending: Option<VerbsSend>,
    /// Number of the farewell.
    bye: Option<u64>,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl VerbsOutbox {
    pub(super) fn new(qp: Qp, device: &Arc<Device>) -> io::Result<VerbsOutbox> {
        Ok(VerbsOutbox {
            qp: Some(qp),
            device: device.clone(),
            slots: Slab::new(&device.pd, SENDS * MESSAGE, AccessFlags::default())?,
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

    /// The peer's parameters have arrived.
    pub(super) fn open(&mut self, credits: u16, longest: u32) {
        self.credits = credits;
        self.most = credits;
        self.longest = MESSAGE.min(longest as usize);
    }

    /// Takes what the peer reports with a message. An error when the peer breaks a rule.
    pub(super) fn take_header(&mut self, header: MessageHeader, content: &MessageContent<'_>) -> io::Result<()> {
        self.credits = self.credits.saturating_add(header.credits);
        if self.credits > self.most {
            return Err(broken("it returns more credits than were used"));
        }
        match content {
            // These are limited only by what they report: an empty one could come without end.
            MessageContent::Credit if header.credits == 0 && header.read == 0 => {
                return Err(broken("it sent a message that reports nothing"));
            }
            content if content.is_credited() => {
                self.granted =
                    self.granted.checked_sub(1).ok_or_else(|| broken("it sends more messages than it has credits for"))?;
            }
            _ => {}
        }
        for _ in 0..header.read {
            let stage = self.staged.pop_front().ok_or_else(|| broken("it reports reading more than was staged"))?;
            self.spare.push(stage);
        }
        Ok(())
    }

    /// A message has completed, and all before it. False for a number of another link.
    pub(super) fn ended(&mut self, number: u64) -> bool {
        let Some(at) = self.signalled.iter().position(|(other, _)| *other == number) else { return false };
        self.free += self.signalled.drain(..=at).map(|(_, count)| count).sum::<usize>();
        true
    }

    /// There is room for one more message of the peer. An error when it had no credit for that many.
    pub(super) fn return_credit(&mut self) -> io::Result<()> {
        self.owed += 1;
        if self.owed > CREDITS { Err(broken("it sends more messages than it has credits for")) } else { Ok(()) }
    }

    pub(super) fn count_read(&mut self) {
        self.read = self.read.saturating_add(1);
    }

    /// Queues a control message. An error when the peer causes more of them than it reads.
    pub(super) fn queue_control(&mut self, content: MessageContent<'static>) -> io::Result<()> {
        self.control.push_back(content);
        if self.control.len() > CONTROL { Err(broken("it causes control messages and does not read them")) } else { Ok(()) }
    }

    /// Ends it: the caller drops the queue pair, and after it the buffers that the peer may have been reading.
    pub(super) fn close(&mut self) -> (Option<Qp>, Vec<Slab>) {
        self.spare.extend(self.staged.drain(..));
        (self.qp.take(), std::mem::take(&mut self.spare))
    }

    /// True when everything that was staged has been read, and nothing waits.
    pub(super) fn is_flushed(&self) -> bool {
        self.staged.is_empty() && self.pending.is_none()
    }

    /// Sends the farewell, once; true when it has arrived.
    pub(super) fn farewell(&mut self) -> io::Result<bool> {
        match self.bye {
            None => {
                self.bye = Some(self.post(&MessageContent::Bye, true)?);
                Ok(false)
            }
            Some(number) => Ok(!self.signalled.iter().any(|(other, _)| *other == number)),
        }
    }

    /// Sends returned credits in a message of their own, if they are due and no other message took them along.
    pub(super) fn report(&mut self) -> io::Result<()> {
        if (self.owed >= CREDITS / 2 || self.read > 0) && self.free > 0 && self.qp.is_some() && self.bye.is_none() {
            self.post(&MessageContent::Credit, false)?;
        }
        Ok(())
    }

    fn may_send(&self) -> bool {
        self.credits > 0 && self.free > usize::from(UNCREDITED)
    }

    /// Sends control messages, and then the pending frame, which is returned when all of it has been sent.
    pub(super) fn resume(&mut self) -> io::Result<Option<VerbsSend>> {
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

    /// Sends control messages. They take no credit: the peer may return none before it has read them. True when none is left.
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
    pub(super) fn write(&mut self, sending: &mut VerbsSend) -> io::Result<bool> {
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
                self.post(&MessageContent::Bytes(part), false)?;
                sending.at += part.len();
            } else if self.staged.len() < STAGED {
                let part = &sending.bytes[sending.at..sending.at + left.min(STAGE)];
                let staged = self.stage(part.len(), &mut |place| {
                    place.copy_from_slice(part);
                    true
                })?;
                sending.at += part.len();
                let Some(staged) = staged else { return Err(broken("data can't be staged")) };
                self.credits -= 1;
                self.post(&MessageContent::StagedBytes(staged), false)?;
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
            let content = if payload.read(&mut bytes) { MessageContent::Payload(&bytes) } else { MessageContent::SourceGone };
            self.credits -= 1;
            self.post(&content, false)?;
        } else if self.staged.len() < STAGED {
            if payload.len > STAGE {
                return Err(broken("a payload that is longer than agreed"));
            }
            let staged = self.stage(payload.len, &mut |place| payload.read(place))?;
            let content = staged.map_or(MessageContent::SourceGone, MessageContent::StagedPayload);
            self.credits -= 1;
            self.post(&content, false)?;
        } else {
            return Ok(false);
        }
        sending.payload = None;
        Ok(true)
    }

    /// Fills a staging buffer, which the peer reads; `None` when there is nothing to fill it with.
    fn stage(&mut self, len: usize, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> io::Result<Option<StagedSegment>> {
        let mut stage = match self.spare.pop() {
            Some(stage) => stage,
            None => Slab::new(&self.device.pd, STAGE, AccessFlags { remote_read: true, ..AccessFlags::default() })?,
        };
        // SAFETY: no peer knows its key, or the peer that does has read it: no device writes it.
        if !fill(unsafe { stage.write(0, len) }) {
            self.spare.push(stage);
            return Ok(None);
        }
        let staged = StagedSegment { address: stage.address(0), key: stage.remote_key(), len: len as u32 };
        self.staged.push_back(stage);
        Ok(Some(staged))
    }

    /// Posts one message, with the credits and reads to report; returns its number.
    fn post(&mut self, content: &MessageContent<'_>, signalled: bool) -> io::Result<u64> {
        let Some(qp) = &self.qp else { return Err(io::ErrorKind::NotConnected.into()) };
        if self.free == 0 {
            return Err(broken("no send buffer is free"));
        }
        let header = MessageHeader { credits: std::mem::take(&mut self.owed), read: std::mem::take(&mut self.read) };
        self.granted += header.credits;
        let at = self.next * MESSAGE;
        // SAFETY: no device writes there: the slab is not registered for that.
        let len = wire::encode(header, content, unsafe { self.slots.write(at, MESSAGE) });
        let number = SENT | self.device.number();
        let signalled = signalled || self.unsignalled + 1 == SIGNALLED;
        let work = WorkRequest { id: number, opcode: Opcode::Send, sges: &[self.slots.sge(at, len)], signalled };
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
