//! Calls that this engine makes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slotmap::KeyData;

use super::link::PeerLink;
use super::one_way::MAX_COST;
use super::streams::OutStream;
use super::tables::{self, Chained, Neighbours};
use super::wire::{BorrowedBytes, Declare, MAX_NAME, Message, Status, Stream};
use super::{Body, CallId, Declaration, Env, Failure, LeaseRange, LinkId, Memory, Output, PeerId, Proto, broken, wire_id};

/// ```text
///   sent ──▶ answered with a small result / refused / timed out / cancelled / link lost ──▶ done
///     └────▶ a large result is arriving ──▶ done, in the same ways
/// ```
pub(super) struct OutgoingCall<E: Env> {
    pub waiter: E::Waiter,
    pub link: LinkId,
    /// When its timer fires, if it has one.
    timer: Option<Instant>,
    /// There is no result: the call is done once its request is on an open link or, if it was `announced`, once the peer has
    /// accepted it.
    one_way: bool,
    announced: bool,
    /// Length of the arguments.
    size: usize,
    /// Memory that is exposed for this call.
    exposed: Vec<u128>,
    pub answer: Option<InboundBody<E>>,
    neighbours: Neighbours<CallId>,
}

impl<E: Env> Chained<CallId> for OutgoingCall<E> {
    fn neighbours(&mut self) -> &mut Neighbours<CallId> {
        &mut self.neighbours
    }
}

/// The body of a large message, while it arrives.
pub(super) struct InboundBody<E: Env> {
    pub memory: E::Memory,
    pub arrived: usize,
    /// The declaration of its type.
    pub declaration: Option<Arc<Declaration<E>>>,
    pub leases: LeaseRange,
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

/// The body of a message to be sent.
pub(crate) enum OutgoingBody<'a, M> {
    Small(&'a [u8]),
    Large(M),
}

impl<M: Memory> OutgoingBody<'_, M> {
    pub(super) fn len(&self) -> usize {
        match self {
            OutgoingBody::Small(bytes) => bytes.len(),
            OutgoingBody::Large(memory) => memory.len(),
        }
    }

    pub(super) fn inline(&self) -> &[u8] {
        match self {
            OutgoingBody::Small(bytes) => bytes,
            OutgoingBody::Large(_) => &[],
        }
    }
}

/// A call to be made.
pub(crate) struct CallSpec<'a, E: Env> {
    pub peer: PeerId,
    /// This engine's number for the name and the shape of the arguments; zero for none.
    pub procedure: u32,
    pub name: &'a str,
    pub shape: &'a [u8],
    pub provider: u16,
    pub content: OutgoingBody<'a, E::Memory>,
    pub leases: Vec<E::Lease>,
    pub deadline: Instant,
    /// Whether the protocol has to watch the deadline; else the waiter does.
    pub timed: bool,
    pub one_way: bool,
    pub waiter: E::Waiter,
}

impl<E: Env> CallSpec<'_, E> {
    /// The credit that a one-way call takes on this link; `None` if it is to be announced.
    fn cost(&self, link: &PeerLink<E>) -> Option<u32> {
        let OutgoingBody::Small(body) = self.content else { return None };
        let declared = self.name.len() + self.shape.len();
        let own = if link.declared.has_number(self.procedure, declared) { 0 } else { declared };
        let cost = body.len() + own;
        (cost <= MAX_COST).then_some(cost as u32)
    }
}

/// A call that was not made.
pub(crate) enum Rejected<'a, E: Env> {
    /// The peer has not handled, or answered, enough one-way calls to take one of this cost (`None`: one that is announced).
    /// Call again after [`Proto::await_credit`].
    NoCredit(Box<CallSpec<'a, E>>, Option<u32>),
    Failed(Failure),
}

/// The answer to a call, or the body of an incoming one.
pub(crate) struct Answer<E: Env> {
    pub link: LinkId,
    pub body: Body<E::Memory>,
    /// The declaration of the result's type, if there is one.
    pub declaration: Option<Arc<Declaration<E>>>,
    pub leases: LeaseRange,
}

/// A bulk takes more than 16 bytes of the message that it is in, so a message can't have more leases than that allows.
pub(super) fn check_leases(leases: LeaseRange, size: u64) -> Result<(), Failure> {
    if u64::from(leases.count) > size / 16 {
        return Err(broken(format!("{} leases with a message of {size} bytes", leases.count)));
    }
    Ok(())
}

/// Longest time limit that travels with a call; longer ones are cut to this.
pub(super) const MAX_BUDGET: Duration = Duration::from_secs(1 << 32);

impl<E: Env> Proto<E> {
    pub(crate) fn call<'a>(&mut self, spec: CallSpec<'a, E>, now: Instant) -> Result<CallId, Rejected<'a, E>> {
        let id = match self.link_to(spec.peer, now) {
            Ok(id) => id,
            Err(failure) => return Err(self.fail(spec.leases, failure)),
        };
        let size = spec.content.len();
        let link = &mut self.links[id];
        let limit = self.config.max_message.min(link.peer_max_message);
        if size > limit {
            return Err(self.fail(spec.leases, Failure::TooLarge { size: size as u64, limit: limit as u64 }));
        }
        if spec.name.len() > MAX_NAME {
            // No peer can define it, and a peer that reads it ends the connection.
            let failure = Failure::TooLarge { size: spec.name.len() as u64, limit: MAX_NAME as u64 };
            return Err(self.fail(spec.leases, failure));
        }
        let cost = if spec.one_way { spec.cost(link) } else { None };
        if spec.one_way && !link.outgoing.has(cost) {
            return Err(Rejected::NoCredit(Box::new(spec), cost));
        }
        let announced = spec.one_way && cost.is_none();
        let timer = spec.timed.then_some(spec.deadline);
        let (exposed, leases) = if spec.leases.is_empty() {
            (Vec::new(), LeaseRange::default())
        } else {
            let exposed = self.bind_to_call(id, &spec.leases, spec.one_way.then_some(spec.deadline));
            (exposed, self.lease(id, spec.leases))
        };
        let call = OutgoingCall {
            waiter: spec.waiter,
            link: id,
            timer,
            one_way: spec.one_way,
            announced,
            size,
            exposed,
            answer: None,
            neighbours: Neighbours::default(),
        };
        let call = tables::chain(&mut self.calls, &mut self.links[id].last_call, call);
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
        link.queue_frame(&message, spec.content.inline());
        link.pending += 1;
        if let Some(cost) = cost {
            link.outgoing.spend(cost);
        }
        if let OutgoingBody::Large(memory) = spec.content {
            link.streams.add(OutStream { kind: Stream::Request, id: wire_id(call), memory, sent: 0, token: None });
        }
        let open = link.is_open();
        // A caller that blocks has nothing more to send.
        self.may_send_later = link.may_wait() && (spec.timed || spec.one_way);
        if let Some(at) = timer {
            self.set_deadline(call, at);
        }
        self.watch(id, now);
        self.mark_ready(id);
        if cost.is_some() && open {
            self.end_one_way(call);
        }
        Ok(call)
    }

    /// A call that can't be made. Its leases are dropped where outputs are executed, not here, since dropping may have side
    /// effects.
    fn fail<'a>(&mut self, leases: Vec<E::Lease>, failure: Failure) -> Rejected<'a, E> {
        self.outputs.extend(leases.into_iter().map(Output::LeaseReleased));
        Rejected::Failed(failure)
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
        let (exposed, timer) = (Vec::new(), Some(deadline));
        let neighbours = Neighbours::default();
        let call = OutgoingCall {
            waiter,
            link: id,
            timer,
            one_way: false,
            announced: false,
            size: 0,
            exposed,
            answer: None,
            neighbours,
        };
        let call = tables::chain(&mut self.calls, &mut self.links[id].last_call, call);
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
    pub(super) fn end_call(&mut self, id: CallId, result: Result<Answer<E>, Failure>) {
        let Some(mut call) = self.calls.remove(id) else { return };
        if let Some(at) = call.timer {
            self.drop_deadline(id, at);
        }
        if let Some(link) = self.links.get_mut(call.link) {
            link.pending -= 1;
            tables::unchain(&mut self.calls, &mut link.last_call, call.neighbours());
            if !call.one_way || result.is_err() {
                link.streams.end(Stream::Request, wire_id(id));
            }
        }
        if let Some(InboundBody { leases, .. }) = call.answer {
            self.release(call.link, leases);
        }
        for token in call.exposed {
            self.end_for_call(token);
        }
        self.outputs.push_back(Output::CallDone { waiter: call.waiter, result });
    }

    fn end_one_way(&mut self, id: CallId) {
        let Some(OutgoingCall { link, .. }) = self.calls.get(id) else { return };
        let answer = Answer { link: *link, body: Body::Small(Vec::new()), declaration: None, leases: LeaseRange::default() };
        self.end_call(id, Ok(answer));
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

    pub(super) fn handle_response(&mut self, id: LinkId, message: Message<'_>, body: Option<&[u8]>) -> Result<(), Failure> {
        let Message::Response { call: number, result, shape, leases, size } = message else { return Ok(()) };
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
            let answer = Answer { link: id, body: Body::Small(body.to_vec()), declaration, leases };
            self.end_call(key, Ok(answer));
        } else if body.is_empty() && call.answer.is_none() {
            let memory = E::Memory::allocate(size as usize);
            call.answer = Some(InboundBody { memory, arrived: 0, declaration, leases });
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
            let Some(InboundBody { memory, declaration, leases, .. }) = call.answer.take() else { return };
            self.end_call(key, Ok(Answer { link: id, body: Body::Large(memory), declaration, leases }));
        }
    }
}
