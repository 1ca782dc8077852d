//! Payloads that are arriving: where their bytes go, and what happens when they are there.

use std::time::Instant;

use slotmap::KeyData;

use super::link::{PeerLink, broken};
use super::wire::Stream;
use super::{CallId, Env, Failure, LinkId, Memory, PayloadStatus, Proto, ReceiveTarget};

/// Longest payload of one `Data` that is accepted.
pub(super) const MAX_CHUNK: usize = 4 << 20;
/// Largest number of payloads of one link that may be arriving at once.
const MAX_INBOUND: usize = 64;

/// A payload that is arriving.
pub(super) struct InboundPayload {
    pub kind: Stream,
    pub id: u64,
    pub len: usize,
    /// An operation wants it. If a peer gives two operations in turn the same number, the second must not get what was sent for
    /// the first.
    pub wanted: bool,
}

impl<E: Env> PeerLink<E> {
    /// The operation is over: what is still arriving for it is discarded.
    pub(super) fn discard_inbound(&mut self, kind: Stream, id: u64) {
        self.inbound.iter_mut().filter(|l| l.kind == kind && l.id == id).for_each(|l| l.wanted = false);
    }
}

impl<E: Env> Proto<E> {
    /// Where the payload of a `Data` goes.
    pub(super) fn receive_target(
        &mut self,
        id: LinkId,
        kind: Stream,
        number: u64,
        offset: u64,
        len: usize,
    ) -> Result<ReceiveTarget<E::Memory>, Failure> {
        if len > MAX_CHUNK {
            return Err(broken(format!("a chunk of {len} bytes exceeds the limit of {MAX_CHUNK} bytes")));
        }
        let inbound = &self.links[id].inbound;
        if inbound.len() >= MAX_INBOUND {
            return Err(broken(format!("more than {MAX_INBOUND} payloads at a time")));
        }
        let coming: usize = inbound.iter().filter(|l| l.wanted && l.kind == kind && l.id == number).map(|l| l.len).sum();
        // Chunks of one stream come in order. One that does not breaks the protocol, or is for an operation that has ended.
        let (memory, arrived) = match kind {
            Stream::Pull => match self.transfers.get(KeyData::from_ffi(number).into()) {
                // The owner was not asked for what a device transfers.
                Some(transfer) if transfer.link == id && transfer.pull && transfer.rma.is_none() => {
                    (Some(&transfer.memory), transfer.arrived)
                }
                _ => (None, 0),
            },
            Stream::Response => match self.calls.get(KeyData::from_ffi(number).into()) {
                Some(call) if call.link == id => match &call.answer {
                    Some(answer) => (Some(&answer.memory), answer.arrived),
                    None => (None, 0),
                },
                _ => (None, 0),
            },
            Stream::Push => match self.links[id].pushes.get(&number) {
                Some(push) => (Some(&push.memory), push.landed),
                None => (None, 0),
            },
            Stream::Request => match self.links[id].requests.get(&number).and_then(|r| self.requests.get(*r)) {
                Some(request) => match &request.body {
                    Some(body) => (Some(&body.memory), body.arrived),
                    None => (None, 0),
                },
                None => (None, 0),
            },
        };
        let target = match memory {
            Some(memory) => {
                let arrived = arrived + coming;
                let part = usize::try_from(offset).ok().filter(|o| *o == arrived).and_then(|o| memory.part(o, len));
                Some(part.ok_or_else(|| broken(format!("a chunk of {len} bytes at {offset} where {arrived} was expected")))?)
            }
            None => None,
        };
        self.links[id].inbound.push_back(InboundPayload { kind, id: number, len, wanted: target.is_some() });
        Ok(ReceiveTarget { memory: target, len })
    }

    /// The first of the payloads that `consume` announced has arrived.
    pub(crate) fn handle_payload_done(&mut self, id: LinkId, status: PayloadStatus, now: Instant) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.last_heard = now;
        let Some(InboundPayload { kind, id: number, len, wanted: true }) = link.inbound.pop_front() else { return };
        match kind {
            Stream::Pull => self.pull_arrived(id, number, len, status),
            Stream::Push => self.push_arrived(id, number, len, status),
            Stream::Request if status == PayloadStatus::Damaged => self.refuse_damaged(id, number),
            Stream::Response if status == PayloadStatus::Damaged => {
                self.abandon_call(CallId::from(KeyData::from_ffi(number)), Failure::Checksum);
            }
            // The body of a message belongs to its sender: only a peer that breaks the protocol revokes it meanwhile.
            Stream::Request | Stream::Response if status != PayloadStatus::Whole => {
                self.close(id, broken("a message whose body was revoked".into()));
            }
            Stream::Request => self.request_arrived(id, number, len),
            Stream::Response => self.response_arrived(id, number, len),
        }
    }
}
