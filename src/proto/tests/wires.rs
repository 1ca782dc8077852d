//! Connections between hosts: what is on its way, and what a transport keeps of what arrived.

use std::collections::VecDeque;
use std::time::Instant;

use super::env::Mem;
use super::{LinkId, Memory, PayloadStatus};

/// A connection. End 0 dialled.
pub struct Wire {
    pub ends: [WireEnd; 2],
    /// Nothing arrives any more, and nobody is told.
    pub frozen: bool,
}

pub struct WireEnd {
    pub host: usize,
    /// `None` before the connection is accepted, and after its end.
    pub link: Option<LinkId>,
    /// What this end has sent, and when it arrives.
    pub outgoing: VecDeque<(Instant, WireItem)>,
    pub receiving: WireReceiver,
    /// Bytes that the other side's system has taken in.
    pub delivered: u64,
    /// What arrived at an end that is no host's.
    pub heard: Vec<u8>,
    /// What this end sends is not read by the other.
    pub unread: bool,
}

/// The host of an end that the test itself plays.
pub const NOBODY: usize = usize::MAX;

pub enum WireItem {
    Dial,
    Connected,
    Packet(WirePacket),
    Closed,
}

/// What one transmit put on the way: its bytes, its payload, and behind that a byte that says whether the payload was
/// there, as on tcp.
pub struct WirePacket {
    bytes: Vec<u8>,
    payload: Option<Mem>,
    out: usize,
    whole: bool,
    /// The sender is told when all of it has arrived; else it was told at once.
    pub report: bool,
}

impl WirePacket {
    /// A payload that is read while it is under way.
    pub fn new(bytes: Vec<u8>, payload: Option<Mem>) -> WirePacket {
        WirePacket { bytes, payload, out: 0, whole: true, report: true }
    }

    /// A payload that is read now: the transport has taken all of it at once.
    pub fn buffered(bytes: Vec<u8>, payload: Option<Mem>) -> WirePacket {
        let mut packet = WirePacket::new(bytes, payload);
        let len = packet.len();
        let (bytes, _) = packet.take(len);
        WirePacket { report: false, ..WirePacket::new(bytes, None) }
    }

    fn len(&self) -> usize {
        self.bytes.len() + self.payload.as_ref().map_or(0, |payload| payload.len() + 1)
    }

    /// Bytes that have not arrived yet.
    pub fn rest(&self) -> usize {
        self.len() - self.out
    }

    /// The next `n` bytes at most, and whether these were the last.
    pub fn take(&mut self, n: usize) -> (Vec<u8>, bool) {
        let end = self.len().min(self.out.saturating_add(n));
        let mut taken = Vec::with_capacity(end - self.out);
        let head = self.bytes.len();
        if self.out < head {
            taken.extend_from_slice(&self.bytes[self.out..end.min(head)]);
        }
        if let Some(payload) = self.payload.as_ref().filter(|_| end > head) {
            let from = self.out.saturating_sub(head);
            let to = (end - head).min(payload.len());
            self.whole &= payload.is_open();
            if from < to {
                match payload.part(from, to - from).filter(|_| self.whole) {
                    Some(part) => taken.extend(part.bytes()),
                    None => taken.resize(taken.len() + to - from, 0),
                }
            }
            if end - head > payload.len() {
                taken.push(u8::from(self.whole));
            }
        }
        self.out = end;
        (taken, end == self.len())
    }
}

/// What a transport remembers between two reads.
#[derive(Default)]
pub struct WireReceiver {
    /// Bytes that were offered and not taken: the beginning of a frame.
    pub partial: Vec<u8>,
    pub payload: Option<WirePayload>,
}

/// A payload that is arriving.
pub struct WirePayload {
    target: Option<Mem>,
    len: usize,
    got: usize,
    whole: bool,
}

impl WirePayload {
    pub fn new(target: Option<Mem>, len: usize) -> WirePayload {
        WirePayload { target, len, got: 0, whole: true }
    }

    /// Puts bytes where they belong; how the payload landed, once all of it and the byte behind it are here.
    pub fn take(&mut self, data: &mut Vec<u8>) -> Option<PayloadStatus> {
        let n = data.len().min(self.len - self.got);
        if let Some(target) = self.target.as_ref().filter(|_| n > 0 && self.whole) {
            self.whole = target.is_open();
            if self.whole {
                target.write(self.got, &data[..n]);
            }
        }
        self.got += n;
        data.drain(..n);
        if self.got < self.len || data.is_empty() {
            return None;
        }
        let trailer = data.remove(0);
        Some(match (trailer, self.whole) {
            (0, _) => PayloadStatus::SourceGone,
            (_, false) => PayloadStatus::TargetGone,
            (_, true) => PayloadStatus::Whole,
        })
    }
}

impl WireEnd {
    pub fn new(host: usize, link: Option<LinkId>) -> WireEnd {
        WireEnd {
            host,
            link,
            outgoing: VecDeque::new(),
            receiving: WireReceiver::default(),
            delivered: 0,
            heard: Vec::new(),
            unread: false,
        }
    }
}
