//! Calls of peers, from their arrival to the answer.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::calls::{InboundBody, MAX_BUDGET, OutgoingBody, check_leases};
use super::one_way::{MAX_COST, OneWayRequest};
use super::refusals::{Cause, Dropped};
use super::streams::OutStream;
use super::wire::{BorrowedBytes, Message, Status, Stream};
use super::{
    Body, Declaration, EngineStage, Env, Failure, LeaseRange, LinkId, Memory, Output, PeerTag, Proto, RequestId, broken,
};

/// A call of a peer: from the arrival of its first byte to the answer.
pub(super) struct InboundRequest<E: Env> {
    pub link: LinkId,
    call: u64,
    pub one_way: Option<OneWayRequest>,
    provider: u16,
    deadline: Option<Instant>,
    /// Its caller no longer takes the answer; its handler may still be running.
    cancelled: bool,
    /// Its caller is gone, and it waits for its handler or is being handled: it takes memory until that is over. If it was to
    /// be answered, it is `cancelled`, too.
    pub is_orphan: bool,
    /// Bytes of its body, of its own declaration, and for the values in it.
    pub cost: usize,
    /// Those for the values.
    pub values: usize,
    /// Memory for its values that it has waited for, if it has; and the call itself while it waits.
    pub wants: usize,
    pub parked: Option<Box<Incoming<E>>>,
    pub body: Option<InboundBody<E>>,
}

impl<E: Env> InboundRequest<E> {
    /// Whether it counts in `Proto::left_behind`.
    pub(super) fn is_left_behind(&self) -> bool {
        self.is_orphan && self.one_way.is_some()
    }
}

/// A call of a peer, ready for its handler.
pub(crate) struct Incoming<E: Env> {
    pub request: RequestId,
    pub link: LinkId,
    pub peer: Arc<PeerTag>,
    pub provider: u16,
    /// The procedure, and the type of the arguments.
    pub declaration: Arc<Declaration<E>>,
    pub deadline: Option<Instant>,
    pub one_way: bool,
    /// It was handed out before, and then parked to wait for memory.
    pub again: bool,
    pub body: Body<E::Memory>,
    pub leases: LeaseRange,
}

/// An answer to be sent.
pub(crate) struct Reply<'a, E: Env> {
    pub content: OutgoingBody<'a, E::Memory>,
    /// This engine's number for the shape of the result; zero for none.
    pub result: u32,
    pub shape: &'a [u8],
    pub leases: Vec<E::Lease>,
}

fn empty_response(call: u64) -> Message<'static> {
    Message::Response { call, result: 0, shape: BorrowedBytes(&[]), leases: LeaseRange::default(), size: 0 }
}

impl<E: Env> Proto<E> {
    pub(super) fn handle_echo(&mut self, id: LinkId, call: u64) {
        self.links[id].queue_control(&empty_response(call));
        self.mark_ready(id);
    }

    pub(super) fn handle_identify(&mut self, id: LinkId, call: u64, provider: u16) {
        match self.identities.get(&provider) {
            Some(identity) => {
                let size = identity.len() as u64;
                let message =
                    Message::Response { call, result: 0, shape: BorrowedBytes(&[]), leases: LeaseRange::default(), size };
                self.links[id].queue_control_with(&message, identity.as_bytes());
            }
            None => self.links[id].queue_control(&Message::Refuse { call, status: Status::NoSuchProvider }),
        }
        self.mark_ready(id);
    }

    pub(super) fn handle_shutdown(&mut self, id: LinkId, call: u64) {
        if self.config.remote_shutdown {
            self.links[id].queue_control(&empty_response(call));
            self.outputs.push_back(Output::ShutdownAsked);
        } else {
            self.links[id].queue_control(&Message::Refuse { call, status: Cause::Shutdown.status() });
            self.refused(id, || "shutdown".to_owned(), Cause::Shutdown);
        }
        self.mark_ready(id);
    }

    pub(super) fn handle_request(
        &mut self,
        id: LinkId,
        message: Message<'_>,
        body: Option<&[u8]>,
        now: Instant,
    ) -> Result<(), Failure> {
        let Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size } = message else {
            return Ok(());
        };
        // Also if the request is refused: later ones use the number.
        let declaration = self.links[id].declarations.procedure(procedure, declaration)?;
        check_leases(leases, size)?;
        let own = if procedure == 0 { declaration.name.len() + declaration.shape.len() } else { 0 };
        let cost = usize::try_from(size).unwrap_or(usize::MAX).saturating_add(own);
        let one_way = if one_way {
            Some(self.one_way(id, procedure, cost, body.is_none_or(|body| body.len() as u64 == size))?)
        } else {
            None
        };
        let refusal = if body.is_none() {
            Some(Status::Checksum)
        } else if self.stage != EngineStage::Running {
            Some(Status::Finalizing)
        } else if size > self.config.max_message as u64 {
            Some(Status::TooLarge { size, limit: self.config.max_message as u64 })
        } else if one_way.is_some_and(|one_way| one_way.cost.is_some()) {
            None
        } else {
            self.admit_request(id, cost).err()
        };
        let link = &mut self.links[id];
        if let Some(status) = refusal {
            match one_way {
                Some(OneWayRequest { cost: cost @ Some(_), .. }) => {
                    // The caller knows the limit, and refuses such a call itself.
                    if !matches!(status, Status::TooLarge { .. }) {
                        self.note_dropped(id, procedure, Dropped::Refused(status));
                    }
                    self.one_way_over(id, cost);
                }
                _ => {
                    link.queue_control(&Message::Refuse { call, status });
                    if one_way.is_some() {
                        self.report_to_refused(id);
                    }
                }
            }
            self.release(id, leases);
            self.mark_ready(id);
            return Ok(());
        }
        let body = body.unwrap_or_default();
        let is_whole = body.len() as u64 == size;
        // Checked before anything is kept of the request: only its handler ends one that is not arriving.
        if !is_whole && !body.is_empty() {
            return Err(broken(format!("{} bytes of a body of {size}", body.len())));
        }
        let Entry::Vacant(entry) = link.requests.entry(call) else {
            return Err(broken(format!("call {call} was made twice")));
        };
        let deadline = now.checked_add(Duration::from_micros(budget_us).min(MAX_BUDGET));
        let request = self.requests.insert(InboundRequest {
            link: id,
            call,
            one_way,
            provider,
            deadline,
            cancelled: false,
            is_orphan: false,
            cost,
            values: 0,
            wants: 0,
            parked: None,
            body: None,
        });
        entry.insert(request);
        link.account.requests += cost;
        self.bytes += cost;
        if one_way.is_some_and(|one_way| one_way.cost.is_none()) {
            link.window.admit();
            // The caller waits to learn that the call is accepted.
            link.queue_control(&Message::Response {
                call,
                result: 0,
                shape: BorrowedBytes(&[]),
                leases: LeaseRange::default(),
                size: 0,
            });
            self.mark_ready(id);
        }
        if is_whole {
            self.deliver(request, declaration, Body::Small(body.to_vec()), leases);
        } else {
            let memory = E::Memory::allocate(size as usize);
            self.requests[request].body = Some(InboundBody { memory, arrived: 0, declaration: Some(declaration), leases });
        }
        self.watch(id, now);
        Ok(())
    }

    pub(super) fn request_arrived(&mut self, id: LinkId, number: u64, len: usize) {
        let Some(&key) = self.links[id].requests.get(&number) else { return };
        let Some(arriving) = &mut self.requests[key].body else { return };
        arriving.arrived += len;
        if arriving.arrived == arriving.memory.len() {
            let Some(InboundBody { memory, declaration: Some(declaration), leases, .. }) = self.requests[key].body.take() else {
                return;
            };
            self.deliver(key, declaration, Body::Large(memory), leases);
        }
    }

    /// Takes the credit that a one-way call costs. An error if its caller does not have that much.
    fn one_way(&mut self, id: LinkId, procedure: u32, cost: usize, is_whole: bool) -> Result<OneWayRequest, Failure> {
        let cost = if is_whole && cost <= MAX_COST { Some(cost as u32) } else { None };
        if let Some(cost) = cost {
            self.links[id].window.enter(cost)?;
        }
        Ok(OneWayRequest { procedure, cost })
    }

    /// The body of a request was corrupted in transit: no handler gets it.
    pub(super) fn refuse_damaged(&mut self, id: LinkId, number: u64) {
        let request = self.links[id].requests.get(&number).and_then(|key| self.requests.get(*key));
        let Some(one_way) = request.map(|request| request.one_way) else { return };
        self.handle_cancel(id, number);
        match one_way {
            Some(OneWayRequest { procedure, .. }) => self.note_dropped(id, procedure, Dropped::Checksum),
            None => {
                self.links[id].queue_control(&Message::Refuse { call: number, status: Status::Checksum });
                self.mark_ready(id);
            }
        }
    }

    /// The one place where a request ends.
    fn remove_request(&mut self, key: RequestId) -> Option<InboundRequest<E>> {
        let request = self.requests.remove(key)?;
        self.bytes -= request.cost;
        if request.is_left_behind() {
            self.left_behind = (self.left_behind.0 - 1, self.left_behind.1 - request.cost);
        }
        if let Some(link) = self.links.get_mut(request.link) {
            link.requests.remove(&request.call);
            if request.body.is_some() {
                link.discard_inbound(Stream::Request, request.call);
            }
            link.account.requests -= request.cost;
            link.cancelled -= usize::from(request.cancelled);
        }
        self.parked.freed(if request.is_orphan { LinkId::default() } else { request.link }, request.values > 0);
        Some(request)
    }

    /// The caller is gone.
    pub(super) fn orphan(&mut self, key: RequestId) {
        let Some(request) = self.requests.get_mut(key) else { return };
        if request.body.is_some() {
            let (link, one_way) = (request.link, request.one_way);
            self.remove_request(key);
            if let Some(OneWayRequest { procedure, .. }) = one_way {
                self.note_dropped(link, procedure, Dropped::Connection);
            }
        } else {
            // Its handler has it, or will get it: a peer must not pile up requests by reconnecting.
            request.is_orphan = true;
            if request.one_way.is_some() {
                // It has no answer, so it is handled as if its caller were there.
                self.left_behind = (self.left_behind.0 + 1, self.left_behind.1 + request.cost);
                return;
            }
            request.cancelled = true;
        }
        self.outputs.push_back(Output::Cancelled { request: key });
    }

    fn deliver(&mut self, key: RequestId, declaration: Arc<Declaration<E>>, body: Body<E::Memory>, leases: LeaseRange) {
        let request = &self.requests[key];
        let Some(peer) = self.links[request.link].peer.and_then(|peer| self.peers.get(peer)) else { return };
        self.outputs.push_back(Output::Request(Incoming {
            request: key,
            link: request.link,
            peer: peer.tag.clone(),
            provider: request.provider,
            declaration,
            deadline: request.deadline,
            one_way: request.one_way.is_some(),
            again: false,
            body,
            leases,
        }));
    }

    pub(super) fn handle_cancel(&mut self, id: LinkId, number: u64) {
        let link = &mut self.links[id];
        // The answer may already be on its way out.
        link.streams.end(Stream::Response, number);
        if let Some(&key) = link.requests.get(&number) {
            let Some(request) = self.requests.get_mut(key) else { return };
            if request.body.is_none() {
                // It counts against the limit until its handler is done with it.
                if !std::mem::replace(&mut request.cancelled, true) {
                    link.cancelled += 1;
                }
                self.outputs.push_back(Output::Cancelled { request: key });
                return;
            }
            let one_way = request.one_way;
            if let Some(InboundBody { leases, .. }) = self.remove_request(key).and_then(|request| request.body) {
                self.release(id, leases);
            }
            if let Some(OneWayRequest { cost, .. }) = one_way {
                self.one_way_over(id, cost);
            }
            // No handler will end it, and finalizing may wait for its end.
            self.outputs.push_back(Output::Cancelled { request: key });
        }
    }

    /// How many requests are in progress, including those that are still arriving.
    pub(crate) fn requests(&self) -> usize {
        self.requests.values().filter(|request| !request.cancelled).count()
    }

    /// False when the caller no longer takes an answer.
    pub(crate) fn is_wanted(&self, request: RequestId) -> bool {
        self.requests.get(request).is_some_and(|request| !request.cancelled)
    }

    /// Answers a request. An error says why the caller does not get this reply.
    pub(crate) fn respond(&mut self, request: RequestId, reply: Result<Reply<'_, E>, Status>) -> Result<(), Failure> {
        let mut reply = reply;
        let leases = reply.as_mut().map(|reply| std::mem::take(&mut reply.leases)).unwrap_or_default();
        let known = self.remove_request(request);
        let Some(InboundRequest { link: id, call, one_way, cancelled, cost, .. }) = known else {
            self.outputs.extend(leases.into_iter().map(Output::LeaseReleased));
            return Err(Failure::Cancelled);
        };
        if let Some(OneWayRequest { procedure, cost }) = one_way {
            self.outputs.extend(leases.into_iter().map(Output::LeaseReleased));
            match reply {
                Ok(_) | Err(Status::NoResponse) => {}
                Err(status) => self.note_dropped(id, procedure, Dropped::Refused(status)),
            }
            self.one_way_over(id, cost);
            return if cancelled { Err(Failure::Cancelled) } else { Ok(()) };
        }
        if cancelled {
            self.outputs.extend(leases.into_iter().map(Output::LeaseReleased));
            return Err(Failure::Cancelled);
        }
        let limit = self.config.max_message.min(self.links[id].peer_max_message);
        let reply = match reply {
            Ok(reply) if reply.content.len() > limit => {
                Err(Status::TooLarge { size: reply.content.len() as u64, limit: limit as u64 })
            }
            Ok(reply) => self.admit_answer(id, reply.content.len(), cost).map(|()| reply),
            Err(status) => Err(status),
        };
        let outcome = match reply {
            Ok(reply) => {
                let leases = if leases.is_empty() { LeaseRange::default() } else { self.lease(id, leases) };
                let link = &mut self.links[id];
                let size = reply.content.len() as u64;
                let (result, is_new) = link.declared.add(reply.result, reply.shape.len());
                let shape = BorrowedBytes(if is_new { reply.shape } else { &[] });
                let message = Message::Response { call, result, shape, leases, size };
                link.queue_response(&message, reply.content.inline());
                if let OutgoingBody::Large(memory) = reply.content {
                    link.streams.add(OutStream { kind: Stream::Response, id: call, memory, sent: 0, token: None });
                }
                Ok(())
            }
            Err(status) => {
                let outcome = match &status {
                    Status::TooLarge { size, limit } => Err(Failure::TooLarge { size: *size, limit: *limit }),
                    Status::Busy(_) => Err(Failure::Refused(status.clone())),
                    _ => Ok(()),
                };
                self.links[id].queue_control(&Message::Refuse { call, status });
                self.outputs.extend(leases.into_iter().map(Output::LeaseReleased));
                outcome
            }
        };
        self.mark_ready(id);
        outcome
    }
}
