//! Calls: what one engine asks, from the request to the answer, at the side that calls and at the side that is called.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slotmap::KeyData;

use super::link::{MayWait, PeerLink};
use super::one_way::{MAX_COST, OneWayRequest};
use super::refusals::{Cause, Dropped};
use super::streams::{OutStream, OutgoingBody};
use super::tables::{self, Chained, Neighbours};
use super::wire::{BorrowedBytes, Declare, MAX_NAME, Message, Status, Stream};
use super::{
    Answer, Body, CallId, Declaration, EngineStage, Env, Failure, Incoming, LeaseRange, LinkId, Memory, Output, PeerId, Placed,
    Proto, RequestId, broken, wire_id,
};
use crate::TraceContext;

/// ```text
///   sent ──▶ answered with a small result / refused / timed out / cancelled / link lost ──▶ done
///     └────▶ a large result is arriving ──▶ done, in the same ways
/// ```
pub(super) struct OutgoingCall<E: Env> {
    pub waiter: E::Waiter,
    pub link: LinkId,
    /// See [`CallSpec::label`].
    pub label: u32,
    pub provider: u16,
    pub began: Instant,
    pub deadline: Instant,
    /// A timer watches the deadline.
    timed: bool,
    /// There is no result: the call is done once its request is on an open link or, if it was `announced`, once the peer has
    /// accepted it.
    pub one_way: bool,
    announced: bool,
    /// Length of the arguments.
    size: usize,
    /// Memory that is exposed for this call.
    exposed: Vec<u128>,
    pub answer: Option<Box<InboundBody<E>>>,
    neighbours: Neighbours<CallId>,
}

impl<E: Env> Chained<CallId> for OutgoingCall<E> {
    fn neighbours(&mut self) -> &mut Neighbours<CallId> {
        &mut self.neighbours
    }
}

/// The body of a large message, while it arrives. Most have none, so it is kept apart from the call.
pub(super) struct InboundBody<E: Env> {
    pub memory: E::Memory,
    pub arrived: usize,
    /// The declaration of its type.
    pub declaration: Option<Arc<Declaration<E>>>,
    pub leases: LeaseRange,
    /// Of a request.
    trace: Option<Arc<TraceContext>>,
}

/// What an engine asks a peer, besides calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Question {
    /// Whether it is there.
    Echo,
    /// What a provider of it is.
    Identity(u16),
    /// To finalize itself.
    Shutdown,
}

/// A call to be made.
pub(crate) struct CallSpec<'a, E: Env> {
    pub peer: PeerId,
    /// What the user of the protocol identifies the procedure by, in a dump; zero for none.
    pub label: u32,
    /// This engine's number for the name and the shape of the arguments; zero for none.
    pub procedure: u32,
    pub name: &'a str,
    pub shape: &'a [u8],
    pub provider: u16,
    pub content: OutgoingBody<'a, E::Memory>,
    pub leases: Vec<E::Lease>,
    pub deadline: Instant,
    /// The trace that it belongs to.
    pub trace: Option<&'a TraceContext>,
    /// Whether the protocol has to watch the deadline; else the waiter does.
    pub timed: bool,
    pub one_way: bool,
    pub waiter: &'a E::Waiter,
}

impl<E: Env> CallSpec<'_, E> {
    /// The credit that a one-way call takes on this link; `None` if it is to be announced.
    fn cost(&self, link: &PeerLink<E>) -> Option<u32> {
        let OutgoingBody::Small(body) = &self.content else { return None };
        let declared = self.name.len() + self.shape.len();
        let own = if link.declared.has_number(self.procedure, declared) { 0 } else { declared };
        let cost = body.len() + own + state_len(self.trace);
        (cost <= MAX_COST).then_some(cost as u32)
    }
}

/// A call that was not made.
pub(crate) enum Rejected {
    /// The peer has not handled, or answered, enough one-way calls to take one of this cost (`None`: one that is announced).
    /// Call again, with the same, after [`Proto::await_credit`].
    NoCredit(Option<u32>),
    Failed(Box<Failure>),
}

/// A bulk takes more than 16 bytes of the message that it is in, so a message can't have more leases than that allows.
fn check_leases(leases: LeaseRange, size: u64) -> Result<(), Failure> {
    if u64::from(leases.count) > size / 16 {
        return Err(broken(format!("{} leases with a message of {size} bytes", leases.count)));
    }
    Ok(())
}

/// What a trace context adds to the cost of a request: all of it but what each one has.
fn state_len(trace: Option<&TraceContext>) -> usize {
    trace.map_or(0, |trace| trace.state().len())
}

/// Longest time limit that travels with a call; longer ones are cut to this.
const MAX_BUDGET: Duration = Duration::from_secs(1 << 32);

/// A call of a peer: from the arrival of its first byte to the answer.
pub(super) struct InboundRequest<E: Env> {
    pub link: LinkId,
    call: u64,
    /// The number by which its caller has declared it.
    pub procedure: u32,
    pub began: Instant,
    pub one_way: Option<OneWayRequest>,
    pub provider: u16,
    pub deadline: Option<Instant>,
    /// Its caller no longer takes the answer; its handler may still be running.
    pub cancelled: bool,
    /// Its caller is gone, and it waits for its handler or is being handled: it takes memory until that is over. If it was to
    /// be answered, it is `cancelled`, too.
    pub is_orphan: bool,
    /// Bytes of its body, of its own declaration, and for the values in it.
    pub cost: usize,
    /// Those for the values.
    pub values: usize,
    /// Memory for its values that it has waited for, if it has; and the call itself while it waits.
    pub wants: usize,
    pub parked: Option<Placed<Incoming<E>>>,
    pub body: Option<Box<InboundBody<E>>>,
}

impl<E: Env> InboundRequest<E> {
    /// Whether it counts in `Proto::left_behind`.
    pub(super) fn is_left_behind(&self) -> bool {
        self.is_orphan && self.one_way.is_some()
    }
}

/// An answer to be sent.
pub(crate) struct Reply<'a, E: Env> {
    pub content: OutgoingBody<'a, E::Memory>,
    /// This engine's number for the shape of the result; zero for none.
    pub result: u32,
    pub shape: &'a [u8],
    pub leases: Vec<E::Lease>,
}

/// The caller makes the call.
impl<E: Env> Proto<E> {
    /// Makes a call, and takes its leases, also if it fails; unless there is no credit for it: then it can be made again.
    pub(crate) fn call(&mut self, spec: &mut CallSpec<'_, E>, now: Instant) -> Result<CallId, Rejected> {
        let id = match self.link_to(spec.peer, now) {
            Ok(id) => id,
            Err(failure) => return Err(self.fail(spec, failure)),
        };
        let size = spec.content.len();
        let link = &mut self.links[id];
        let limit = self.config.max_message.min(link.peer_max_message);
        if size > limit {
            return Err(self.fail(spec, Failure::TooLarge { size: size as u64, limit: limit as u64 }));
        }
        if spec.name.len() > MAX_NAME {
            // No peer can define it, and a peer that reads it ends the connection.
            let failure = Failure::TooLarge { size: spec.name.len() as u64, limit: MAX_NAME as u64 };
            return Err(self.fail(spec, failure));
        }
        let cost = if spec.one_way { spec.cost(link) } else { None };
        if spec.one_way && !link.outgoing.has(cost) {
            return Err(Rejected::NoCredit(cost));
        }
        let announced = spec.one_way && cost.is_none();
        let (exposed, leases) = if spec.leases.is_empty() {
            (Vec::new(), LeaseRange::default())
        } else {
            let leases = std::mem::take(&mut spec.leases);
            let exposed = self.bind_to_call(id, &leases, spec.one_way.then_some(spec.deadline));
            (exposed, self.lease(id, leases))
        };
        let make = |neighbours| OutgoingCall {
            waiter: spec.waiter.clone(),
            link: id,
            label: spec.label,
            provider: spec.provider,
            began: now,
            deadline: spec.deadline,
            timed: spec.timed,
            one_way: spec.one_way,
            announced,
            size,
            exposed,
            answer: None,
            neighbours,
        };
        let call = tables::chain(&mut self.calls, &mut self.links[id].last_call, make);
        let budget = spec.deadline.saturating_duration_since(now).min(MAX_BUDGET);
        let link = &mut self.links[id];
        // From here on the number stands for this procedure: this frame arrives before all that use the number.
        let (procedure, is_new) = link.declared.add(spec.procedure, spec.name.len() + spec.shape.len());
        let message = Message::Request {
            call: wire_id(call),
            procedure,
            declaration: is_new.then_some(Declare { name: spec.name, shape: BorrowedBytes(spec.shape) }),
            provider: spec.provider,
            budget_us: (budget.as_micros() as u64).max(1),
            one_way: spec.one_way,
            leases,
            size: size as u64,
        };
        if let Some(trace) = spec.trace {
            link.queue_trace(trace);
        }
        if matches!(spec.content, OutgoingBody::Large(..)) {
            link.queue_list(Stream::Request, wire_id(call), &spec.content, leases);
        }
        link.queue_frame(&message, spec.content.inline());
        link.pending += 1;
        link.traffic.calls += 1;
        if let Some(cost) = cost {
            link.outgoing.spend(cost);
        }
        if let OutgoingBody::Large(memory, _) = &spec.content {
            let memory = memory.clone();
            link.streams.add(OutStream { kind: Stream::Request, id: wire_id(call), memory, sent: 0, token: None });
        }
        let open = link.is_open();
        // A caller that blocks has nothing more to send.
        let may_wait = link.may_wait(0);
        self.may_send_later = if spec.timed || spec.one_way { may_wait } else { MayWait::No };
        if spec.timed {
            self.set_deadline(call, spec.deadline);
        }
        self.watch(id, now);
        self.mark_ready(id);
        if cost.is_some() && open {
            self.end_one_way(call);
        }
        Ok(call)
    }

    /// Calls and transfers of this engine that have not ended.
    pub(crate) fn operations_in_progress(&self) -> usize {
        self.calls.len() + self.transfers.len()
    }

    /// A call that can't be made. Its leases are dropped where outputs are executed, not here, since dropping may have side
    /// effects.
    fn fail(&mut self, spec: &mut CallSpec<'_, E>, failure: Failure) -> Rejected {
        self.outputs.extend(spec.leases.drain(..).map(Output::LeaseReleased));
        Rejected::Failed(Box::new(failure))
    }

    /// Asks the peer itself, below its procedures.
    pub(crate) fn ask(
        &mut self,
        peer: PeerId,
        question: Question,
        deadline: Instant,
        waiter: E::Waiter,
        now: Instant,
    ) -> Result<CallId, Failure> {
        let id = self.link_to(peer, now)?;
        let make = |neighbours| OutgoingCall {
            waiter,
            link: id,
            label: 0,
            provider: 0,
            began: now,
            deadline,
            timed: true,
            one_way: false,
            announced: false,
            size: 0,
            exposed: Vec::new(),
            answer: None,
            neighbours,
        };
        let call = tables::chain(&mut self.calls, &mut self.links[id].last_call, make);
        self.set_deadline(call, deadline);
        let call_number = wire_id(call);
        let message = match question {
            Question::Echo => Message::Echo { call: call_number },
            Question::Identity(provider) => Message::Identify { call: call_number, provider },
            Question::Shutdown => Message::Shutdown { call: call_number },
        };
        self.links[id].queue_frame(&message, &[]);
        self.links[id].pending += 1;
        self.watch(id, now);
        self.mark_ready(id);
        Ok(call)
    }
}

/// An answer with a body of so many bytes, of no declared type.
fn untyped_response(call: u64, size: u64) -> Message<'static> {
    let none = LeaseRange::default();
    Message::Response { call, result: 0, shape: BorrowedBytes(&[]), leases: none, released: none, size }
}

fn empty_response(call: u64) -> Message<'static> {
    untyped_response(call, 0)
}

/// The peer that is called handles the request, and answers.
impl<E: Env> Proto<E> {
    pub(super) fn handle_request(
        &mut self,
        id: LinkId,
        message: &Message<'_>,
        body: Option<&[u8]>,
        now: Instant,
    ) -> Result<(), Failure> {
        let &Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size } = message else {
            return Ok(());
        };
        // Also if the request is refused: later ones use the number.
        let trace = if self.traces.is_empty() { None } else { self.take_trace(id) };
        let declaration = self.links[id].declarations.procedure(procedure, declaration)?;
        check_leases(leases, size)?;
        let own = if procedure == 0 { declaration.name.len() + declaration.shape.len() } else { 0 };
        let cost = usize::try_from(size).unwrap_or(usize::MAX).saturating_add(own + state_len(trace.as_deref()));
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
        if let Some(status) = refusal {
            self.release(id, leases);
            match one_way {
                Some(OneWayRequest { cost: cost @ Some(_), .. }) => {
                    // The caller knows the limit, and refuses such a call itself.
                    if !matches!(status, Status::TooLarge { .. }) {
                        self.note_dropped(id, procedure, Dropped::Refused(status));
                    }
                    self.one_way_over(id, cost);
                }
                _ => {
                    // What was handled before the refusal is reported before it: its caller need not try again for that.
                    if one_way.is_some() {
                        self.report_to_refused(id);
                    }
                    self.links[id].queue_control(&Message::Refuse { call, status });
                }
            }
            self.mark_ready(id);
            return Ok(());
        }
        let body = body.unwrap_or_default();
        let is_whole = body.len() as u64 == size;
        // Checked before anything is kept of the request: only its handler ends one that is not arriving.
        if !is_whole && !body.is_empty() {
            return Err(broken(format!("{} bytes of a body of {size}", body.len())));
        }
        let link = &mut self.links[id];
        let Entry::Vacant(entry) = link.requests.entry(call) else {
            return Err(broken(format!("call {call} was made twice")));
        };
        let deadline = now.checked_add(Duration::from_micros(budget_us).min(MAX_BUDGET));
        let request = self.requests.insert(InboundRequest {
            link: id,
            call,
            procedure,
            began: now,
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
        link.traffic.requests += 1;
        self.bytes += cost;
        if one_way.is_some_and(|one_way| one_way.cost.is_none()) {
            link.window.admit();
            // The caller waits to learn that the call is accepted.
            link.queue_control(&empty_response(call));
            self.mark_ready(id);
        }
        if is_whole {
            self.deliver(request, declaration, leases, trace, |place| place.fill(body));
        } else {
            let memory = self.links[id].memory_for_body(Stream::Request, call, size as usize, leases, Some(&declaration));
            let body = InboundBody { memory, arrived: 0, declaration: Some(declaration), leases, trace };
            self.requests[request].body = Some(Box::new(body));
        }
        self.watch(id, now);
        Ok(())
    }

    pub(super) fn request_arrived(&mut self, id: LinkId, number: u64, len: usize) {
        let Some(&key) = self.links[id].requests.get(&number) else { return };
        let Some(arriving) = &mut self.requests[key].body else { return };
        arriving.arrived += len;
        if arriving.arrived == arriving.memory.len() {
            let arrived = self.requests[key].body.take().map(|body| *body);
            let Some(InboundBody { memory, declaration: Some(declaration), leases, trace, .. }) = arrived else { return };
            self.deliver(key, declaration, leases, trace, |place| *place = Body::Large(memory));
        }
    }

    /// Takes the credit that a one-way call costs. An error if its caller does not have that much.
    fn one_way(&mut self, id: LinkId, procedure: u32, cost: usize, is_whole: bool) -> Result<OneWayRequest, Failure> {
        let cost = if is_whole && cost <= MAX_COST { Some(cost as u32) } else { None };
        if let Some(cost) = cost {
            self.take_credit(id, cost)?;
        }
        Ok(OneWayRequest { procedure, cost })
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

    /// Hands a request out; `fill` fills in the body, in its place, since to move it takes longer.
    fn deliver(
        &mut self,
        key: RequestId,
        declaration: Arc<Declaration<E>>,
        leases: LeaseRange,
        trace: Option<Arc<TraceContext>>,
        fill: impl FnOnce(&mut Body<E::Memory>),
    ) {
        let request = &self.requests[key];
        let Some(peer) = self.links[request.link].peer.and_then(|peer| self.peers.get(peer)) else { return };
        let place = E::request_place();
        let incoming = Incoming {
            request: key,
            link: request.link,
            peer: peer.tag.clone(),
            provider: request.provider,
            declaration,
            deadline: request.deadline,
            one_way: request.one_way.is_some(),
            again: false,
            stamp: 0,
            trace,
            body: Body::empty(),
            leases,
        };
        let mut incoming = Placed::new(place, incoming);
        fill(&mut incoming.body);
        self.outputs.push_back(Output::Request(incoming));
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
            if let Some(body) = self.remove_request(key).and_then(|request| request.body) {
                self.release(id, body.leases);
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

    /// When the first of a request arrived; `None` for one that has ended.
    pub(crate) fn arrival(&self, request: RequestId) -> Option<Instant> {
        self.requests.get(request).map(|request| request.began)
    }

    /// False when the caller no longer takes an answer.
    pub(crate) fn is_wanted(&self, request: RequestId) -> bool {
        self.requests.get(request).is_some_and(|request| !request.cancelled)
    }

    /// Answers a request. An error says why the caller does not get this reply.
    pub(crate) fn respond(&mut self, request: RequestId, mut reply: Result<&mut Reply<'_, E>, Status>) -> Result<(), Failure> {
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
                let released = std::mem::take(&mut link.released);
                let message = Message::Response { call, result, shape, leases, released, size };
                if matches!(reply.content, OutgoingBody::Large(..)) {
                    link.queue_list(Stream::Response, call, &reply.content, leases);
                }
                link.queue_response(&message, reply.content.inline());
                if let OutgoingBody::Large(memory, _) = &reply.content {
                    let memory = memory.clone();
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
        self.may_send_later = self.links[id].answer_may_wait();
        self.mark_ready(id);
        outcome
    }

    pub(super) fn handle_echo(&mut self, id: LinkId, call: u64) {
        self.links[id].queue_control(&empty_response(call));
        self.mark_ready(id);
    }

    pub(super) fn handle_identify(&mut self, id: LinkId, call: u64, provider: u16) {
        match self.identities.get(&provider) {
            Some(identity) => {
                let size = identity.len() as u64;
                self.links[id].queue_control_with(&untyped_response(call, size), identity.as_bytes());
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
}

/// The answer is back at the caller.
impl<E: Env> Proto<E> {
    pub(super) fn handle_response(&mut self, id: LinkId, message: &Message<'_>, body: Option<&[u8]>) -> Result<(), Failure> {
        let &Message::Response { call: number, result, shape, leases, released, size } = message else { return Ok(()) };
        // Before the call ends: its caller may drop memory whose bulks the peer has let go.
        if released.count > 0 {
            self.handle_release(id, released);
        }
        // Also if the answer is dropped: later ones use the number.
        let declaration = self.links[id].declarations.result(result, shape.0)?;
        let key = CallId::from(KeyData::from_ffi(number));
        let Some(call) = self.calls.get_mut(key).filter(|call| call.link == id) else {
            // It was cancelled, or timed out: the answer and its leases are not wanted.
            self.abandoned_answered(id, number, true);
            self.release(id, leases);
            return Ok(());
        };
        check_leases(leases, size)?;
        if call.announced {
            if size > 0 {
                return Err(broken(format!("an answer of {size} bytes to a one-way call")));
            }
            // It is accepted, and its body goes on.
            self.links[id].outgoing.out += 1;
        }
        let Some(body) = body else {
            self.release(id, leases);
            self.end_call(key, Err(Failure::Checksum));
            return Ok(());
        };
        let limit = self.config.max_message as u64;
        if size > limit {
            self.release(id, leases);
            self.abandon_call(key, Failure::TooLarge { size, limit });
        } else if body.len() as u64 == size {
            let answer = Answer { link: id, body: Body::empty(), declaration, leases };
            let mut answer = Placed::new(E::answer_place(), answer);
            answer.body.fill(body);
            self.end_call(key, Ok(answer));
        } else if body.is_empty() && call.answer.is_none() {
            let memory = self.links[id].memory_for_body(Stream::Response, number, size as usize, leases, declaration.as_deref());
            call.answer = Some(Box::new(InboundBody { memory, arrived: 0, declaration, leases, trace: None }));
        } else {
            return Err(broken(format!("{} bytes of a body of {size}", body.len())));
        }
        Ok(())
    }

    pub(super) fn response_arrived(&mut self, id: LinkId, number: u64, len: usize) {
        let key = CallId::from(KeyData::from_ffi(number));
        let Some(call) = self.calls.get_mut(key).filter(|call| call.link == id) else { return };
        let Some(answer) = &mut call.answer else { return };
        answer.arrived += len;
        if answer.arrived == answer.memory.len() {
            let Some(answer) = call.answer.take() else { return };
            let InboundBody { memory, declaration, leases, .. } = *answer;
            let answer = Answer { link: id, body: Body::Large(memory), declaration, leases };
            self.end_call(key, Ok(Placed::new(E::answer_place(), answer)));
        }
    }

    /// The peer refuses a call. A refusal of a call of another link is ignored.
    pub(super) fn handle_refuse(&mut self, id: LinkId, number: u64, status: Status) {
        let key = CallId::from(KeyData::from_ffi(number));
        if let Some(call) = self.calls.get(key).filter(|call| call.link == id) {
            if call.announced {
                self.links[id].outgoing.refused();
            }
            self.end_call(key, Err(Failure::Refused(status)));
        } else {
            self.abandoned_answered(id, number, false);
        }
    }

    /// Gives a call up, at its deadline or because its result is no longer wanted, and sends `Cancel`.
    pub(crate) fn abandon_call(&mut self, call: CallId, failure: Failure) {
        let Some(&OutgoingCall { link, announced, .. }) = self.calls.get(call) else { return };
        if announced {
            // The peer may accept it before it reads `Cancel`, and then reports it as handled.
            self.links[link].outgoing.abandoned.insert(wire_id(call));
        }
        self.links[link].queue_frame(&Message::Cancel { call: wire_id(call) }, &[]);
        self.end_call(call, Err(failure));
        self.mark_ready(link);
    }

    /// The one place where a call ends.
    pub(super) fn end_call(&mut self, id: CallId, result: Result<Placed<Answer<E>>, Failure>) {
        let Some(mut call) = self.calls.remove(id) else { return };
        if call.timed {
            self.drop_deadline(id, call.deadline);
        }
        if let Some(link) = self.links.get_mut(call.link) {
            link.pending -= 1;
            tables::unchain(&mut self.calls, &mut link.last_call, call.neighbours());
            if !call.one_way || result.is_err() {
                link.streams.end(Stream::Request, wire_id(id));
            }
        }
        if let Some(answer) = call.answer {
            self.release(call.link, answer.leases);
        }
        for token in call.exposed {
            self.end_for_call(token);
        }
        let result = result.map_err(Box::new);
        self.outputs.push_back(Output::CallDone { waiter: call.waiter, result });
    }

    fn end_one_way(&mut self, id: CallId) {
        let Some(OutgoingCall { link, .. }) = self.calls.get(id) else { return };
        let answer = Answer { link: *link, body: Body::empty(), declaration: None, leases: LeaseRange::default() };
        self.end_call(id, Ok(Placed::new(E::answer_place(), answer)));
    }

    /// The link is open, and the peer's limit is known: ends the one-way calls, which are now sent, and the calls that are too
    /// large.
    pub(super) fn refuse_too_large(&mut self, id: LinkId) {
        let limit = self.links[id].peer_max_message;
        for call in tables::chained(&mut self.calls, self.links[id].last_call) {
            let Some(&OutgoingCall { size, one_way, announced, .. }) = self.calls.get(call) else { continue };
            let one_way = one_way && !announced;
            if size > limit {
                self.abandon_call(call, Failure::TooLarge { size: size as u64, limit: limit as u64 });
            } else if one_way {
                self.end_one_way(call);
            }
        }
    }
}
