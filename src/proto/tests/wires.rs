//! Simulated connections: data in flight, and the receive state of a transport.

use std::collections::VecDeque;
use std::time::Instant;

use super::env::Mem;
use super::{LinkId, Memory, PayloadStatus};

/// A connection. End 0 dialled.
pub struct Wire {
    pub ends: [WireEnd; 2],
    /// Nothing arrives any more, and neither end is notified.
    pub frozen: bool,
}

pub struct WireEnd {
    pub host: usize,
    /// `None` before the connection is accepted, and after its end.
    pub link: Option<LinkId>,
    /// Data in flight from this end, and when it arrives.
    pub outgoing: VecDeque<(Instant, WireItem)>,
    pub receiving: WireReceiver,
    /// Bytes that the other side's system has received.
    pub delivered: u64,
    /// The bytes that arrived, if the test plays this end.
    pub received: Vec<u8>,
    /// The other end does not read what this end sends.
    pub unread: bool,
}

/// In place of a host: the test plays this end.
pub const TEST_PEER: usize = usize::MAX;

pub enum WireItem {
    Dial,
    Connected,
    Packet(WirePacket),
    Closed,
}

/// The data of one transmit: its bytes, its payload, and a trailing byte that tells whether the payload is complete, as on
/// tcp.
pub struct WirePacket {
    bytes: Vec<u8>,
    payload: Option<Mem>,
    out: usize,
    whole: bool,
    /// The sender is notified when all of it has arrived; else it was notified at once.
    pub report: bool,
}

impl WirePacket {
    /// The payload is read while it is sent.
    pub fn new(bytes: Vec<u8>, payload: Option<Mem>) -> WirePacket {
        WirePacket { bytes, payload, out: 0, whole: true, report: true }
    }

    /// The payload is read now: the transport has buffered all of it.
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

    /// At most the next `n` bytes, and whether these were the last.
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

/// The receive state of a transport between two reads.
#[derive(Default)]
pub struct WireReceiver {
    /// Bytes that were not consumed: the beginning of a frame.
    pub partial: Vec<u8>,
    pub payload: Option<WirePayload>,
}

/// A payload that is arriving.
pub struct WirePayload {
    target: Option<Mem>,
    len: usize,
    received_len: usize,
    whole: bool,
}

impl WirePayload {
    pub fn new(target: Option<Mem>, len: usize) -> WirePayload {
        WirePayload { target, len, received_len: 0, whole: true }
    }

    /// Writes bytes to the target; returns the status once the payload and its trailing byte have arrived.
    pub fn take(&mut self, data: &mut Vec<u8>) -> Option<PayloadStatus> {
        let n = data.len().min(self.len - self.received_len);
        if let Some(target) = self.target.as_ref().filter(|_| n > 0 && self.whole) {
            self.whole = target.is_open();
            if self.whole {
                target.write(self.received_len, &data[..n]);
            }
        }
        self.received_len += n;
        data.drain(..n);
        if self.received_len < self.len || data.is_empty() {
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
            received: Vec::new(),
            unread: false,
        }
    }
}
