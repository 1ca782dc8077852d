//! What arrives on a link: messages, and the payloads behind them.

use std::time::Instant;

use slotmap::KeyData;

use super::link::{InboundPayload, MAX_CHUNK};
use super::wire::{self, Frame, FrameError, Message, Stream};
use super::{CallId, Consumed, EngineStage, Env, Failure, LinkId, Memory, PayloadStatus, Proto, ReceiveTarget, broken};

/// Largest number of payloads of one link that may be arriving at once.
const MAX_INBOUND: usize = 64;

impl<E: Env> Proto<E> {
    /// Handles what it can of the bytes that arrived on a link. An error says how the peer broke the protocol; the caller
    /// closes the link with it.
    pub(crate) fn consume(&mut self, id: LinkId, bytes: &[u8], now: Instant) -> Result<Consumed<E::Memory>, Failure> {
        let mut used = 0;
        let Some(link) = self.links.get_mut(id) else {
            return Ok(Consumed { used: bytes.len(), target: None });
        };
        link.last_heard = now;
        // `bytes` begins with the incomplete frame again: counted as partial, too, it would count twice while the frame is
        // handled.
        if link.account.partial > 0 {
            link.account.partial = 0;
            self.recount(id);
        }
        while !self.links[id].is_open() {
            if self.links[id].closing {
                return Ok(Consumed { used: bytes.len(), target: None });
            }
            let Some(len) = self.handle_handshake(id, &bytes[used..], now)? else { return Ok(Consumed { used, target: None }) };
            used += len;
            if !self.links.contains_key(id) {
                return Ok(Consumed { used: bytes.len(), target: None });
            }
        }
        while used < bytes.len() {
            let (message, body, len) = match wire::take(&bytes[used..]) {
                Ok(Frame::Incomplete) => break,
                Ok(Frame::Whole(message, body, len)) => (message, Some(body), len),
                Ok(Frame::Damaged(message, len)) => (message, None, len),
                Err(FrameError::Broken(reason)) => return Err(broken(reason)),
                Err(FrameError::Damaged) => return Err(Failure::Checksum),
            };
            used += len;
            let may_have_body = matches!(message, Message::Request { .. } | Message::Response { .. });
            if !may_have_body && body != Some(&[]) {
                return Err(broken("a body behind a message that takes none".to_owned()));
            }
            if let Message::Data { stream, id: number, offset, len } = message {
                let target = self.receive_target(id, stream, number, offset, len as usize)?;
                self.watch(id, now);
                return Ok(Consumed { used, target: Some(target) });
            }
            self.handle_message(id, message, body, now)?;
            self.check_unrefusable_bytes(id)?;
            if !self.links.contains_key(id) {
                return Ok(Consumed { used: bytes.len(), target: None });
            }
        }
        if used < bytes.len() {
            self.keep_partial(id, bytes.len() - used, now)?;
        }
        Ok(Consumed { used, target: None })
    }

    /// `body` is `None` if it was corrupted in transit.
    fn handle_message(&mut self, id: LinkId, message: Message<'_>, body: Option<&[u8]>, now: Instant) -> Result<(), Failure> {
        if self.stage == EngineStage::Closed && message != Message::Goodbye {
            // No message is wanted any more, and no reply may be sent.
            return Ok(());
        }
        match message {
            Message::Request { .. } => return self.handle_request(id, message, body, now),
            Message::Response { .. } => self.handle_response(id, message, body)?,
            Message::Refuse { call, status } => self.handle_refuse(id, call, status),
            Message::Cancel { call } => self.handle_cancel(id, call),
            Message::Pull(range) => self.handle_pull(id, range, now)?,
            Message::Push(range) => self.handle_push(id, range, now)?,
            Message::Done { transfer, status } => self.handle_done(id, transfer, status),
            Message::Abort { transfer, push } => self.handle_abort(id, transfer, push),
            Message::Ping => {
                self.links[id].queue_control(&Message::Pong);
                self.mark_ready(id);
            }
            Message::Pong => {}
            Message::ResumptionToken { token } => self.handle_resumption_token(id, token),
            Message::Handled { count, calls, bytes } => self.handle_handled(id, count, calls, bytes),
            Message::Goodbye => {
                self.close(id, Failure::Disconnected { reason: "it was finalized".into() });
            }
            Message::Release(leases) => self.handle_release(id, leases),
            Message::Revoked { token } => self.handle_revoked(id, u128::from_le_bytes(token)),
            Message::Shutdown { call } => self.handle_shutdown(id, call),
            Message::Echo { call } => self.handle_echo(id, call),
            Message::Identify { call, provider } => self.handle_identify(id, call, provider),
            Message::Data { .. } => unreachable!("`consume` takes payloads itself"),
        }
        Ok(())
    }

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
                Some(push) => (Some(&push.memory), push.arrived),
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

    /// Part of a payload has arrived: the peer is alive.
    pub(crate) fn handle_heard(&mut self, id: LinkId, now: Instant) {
        if let Some(link) = self.links.get_mut(id) {
            link.last_heard = now;
        }
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
