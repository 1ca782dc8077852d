//! Payloads, where they arrive.

use std::time::Instant;

use slotmap::KeyData;

use super::link::{PeerLink, broken};
use super::wire::Stream;
use super::{CallId, Env, Failure, LinkId, Memory, PayloadStatus, Proto, ReceiveTarget};

/// Longest payload of one `Data` that is taken.
pub(super) const MAX_CHUNK: usize = 4 << 20;
/// Payloads of a link that may be arriving at a time.
const MAX_INBOUND: usize = 64;

/// A payload that is arriving.
pub(super) struct InboundPayload {
    pub kind: Stream,
    pub id: u64,
    pub len: usize,
    /// There is an operation that wanted it. Of two in turn that a peer gives one number, the second has not got what the
    /// first was sent.
    pub wanted: bool,
}

impl<E: Env> PeerLink<E> {
    /// The operation is over: what is still arriving for it is nobody's.
    pub(super) fn discard_inbound(&mut self, kind: Stream, id: u64) {
        self.inbound.iter_mut().filter(|l| l.kind == kind && l.id == id).for_each(|l| l.wanted = false);
    }
}

impl<E: Env> Proto<E> {
    /// Where the payload of a `Data` belongs.
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
        let landings = &self.links[id].inbound;
        if landings.len() >= MAX_INBOUND {
            return Err(broken(format!("{MAX_INBOUND} payloads at a time")));
        }
        let coming: usize = landings.iter().filter(|l| l.wanted && l.kind == kind && l.id == number).map(|l| l.len).sum();
        // Chunks of one stream come in order; what does not is a lie, or meant for an operation that has ended.
        let (memory, arrived) = match kind {
            Stream::Pull => match self.transfers.get(KeyData::from_ffi(number).into()) {
                // What a device fetches, nobody was asked for.
                Some(transfer) if transfer.link == id && transfer.pull && transfer.moving.is_none() => {
                    (Some(&transfer.memory), transfer.moved)
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

    /// The first of the payloads that `consume` asked for has arrived.
    pub(crate) fn handle_payload_done(&mut self, id: LinkId, landed: PayloadStatus, now: Instant) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.last_heard = now;
        let Some(InboundPayload { kind, id: number, len, wanted: true }) = link.inbound.pop_front() else { return };
        match kind {
            Stream::Pull => self.pull_landed(id, number, len, landed),
            Stream::Push => self.push_landed(id, number, len, landed),
            Stream::Request if landed == PayloadStatus::Damaged => self.refuse_damaged(id, number),
            Stream::Response if landed == PayloadStatus::Damaged => {
                self.abandon_call(CallId::from(KeyData::from_ffi(number)), Failure::Checksum);
            }
            // The body of a message is the sender's own: only one who lies takes it away, and what it leaves is nobody's.
            Stream::Request | Stream::Response if landed != PayloadStatus::Whole => {
                self.close(id, broken("a message that was taken back".into()));
            }
            Stream::Request => self.request_landed(id, number, len),
            Stream::Response => self.response_arrived(id, number, len),
        }
    }
}
