//! A host between adversaries and one honest peer, all driven by a script. Whatever the script is: nothing panics, memory
//! that is not exposed to an adversary is neither read nor written, allocations are bounded, operations with the honest peer
//! succeed, each operation ends exactly once, and at the end nothing is left over.

mod seeds;
mod steps;

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use super::super::link::PeerLink;
use super::env::{Mem, Op, TestEnv, TestLease, allocated, live};
use super::fuzzing::modest;
use super::host::{self, ArrivedRequest, OperationId, TestOutcome, served};
use super::net::{Net, TestCall, call};
use super::raw::{Raw, encode_hello, hello};
use super::wire::{self, BorrowedBytes, Declare, Frame, Hello, MAGIC, Message, ParsedHandshake, Range, Stream};
use super::{AccessPolicy, Config, LeaseRange, LinkId, Memory, Mode, PeerId, PeerLimits, Remote, Status, wire_id};
use crate::fuzzing::script::read_all;
pub(crate) use seeds::seeds;
use steps::*;

const STEPS: usize = 120;
const SLOTS: usize = 6;
/// Payloads of the host and its honest peer come in chunks of this size, so that streams of several chunks take little time.
const CHUNK: usize = 4096;
/// Longest payload that an adversary sends, and longest buffer that is exposed.
const LONG: usize = 20_000;
/// The content of all memory that must not reach an adversary.
const SECRET: u8 = 0xd5;
/// The content of all payloads of adversaries, except in random bytes.
const PAYLOAD: u8 = 0x77;
/// The token of the memory that the honest peer exposes.
const HONEST: u128 = 0x4041_4243;
/// The token of memory of the host that is never sent.
const HIDDEN: u128 = 0xfeed_0000_0000_0000_0000_0000_0000_beef;

/// Memory that the host exposes.
struct Slot {
    token: u128,
    memory: Mem,
    mode: Mode,
    /// For the honest peer only.
    only: bool,
    before: Vec<u8>,
}

/// The expected result of an operation of the host.
enum Check {
    Anything,
    /// Pulled from an adversary: if it succeeds, all bytes are there.
    Fetched,
    Answered(Vec<u8>),
    Pulled(Vec<u8>),
    Pushed,
}

struct BegunOperation {
    op: Op,
    check: Check,
    /// The block that has the operation's memory in its middle, and whether it is a pull.
    surrounding: Option<(Mem, bool)>,
}

/// Bytes on either side of a transfer's memory.
const AROUND: usize = 32;

struct Scene {
    net: Net,
    adversaries: Vec<Raw>,
    listener: PeerId,
    slots: Vec<Option<Slot>>,
    tokens: Vec<u128>,
    begun: Vec<BegunOperation>,
    /// Numbers of operations at the host.
    known: Vec<u64>,
    /// How many bytes of each stream each adversary has sent.
    sent: HashMap<(usize, Stream, u64), u64>,
    held: Vec<(LinkId, LeaseRange)>,
    hidden: Mem,
    honest: Mem,
    next: u32,
    wires: usize,
    /// An adversary has sent bytes that may decode as anything.
    sent_random_bytes: bool,
}

/// Runs a script.
pub fn conversation(bytes: &[u8]) {
    let mut scene = Scene::new();
    for step in read_all::<Step>(bytes, STEPS) {
        scene.step(&step);
        scene.check_invariants();
    }
    scene.finish();
}

/// `len` bytes that differ with `seed` and offset; cut from one buffer to be fast.
fn test_bytes(seed: u64, len: usize) -> Vec<u8> {
    static ALL: LazyLock<Vec<u8>> = LazyLock::new(|| super::env::pattern(1, LONG + 4096));
    ALL[seed as usize % 4096..][..len].to_vec()
}

fn text(n: u64) -> String {
    ["", "echo", "other", "ünïcödé"][n as usize % 4].repeat(1 + n as usize / 64 % 2)
}

impl Scene {
    fn new() -> Scene {
        // The honest peer refuses no request.
        let idle_timeout = Some(Duration::from_secs(2));
        let patient = Config { limits: PeerLimits { peer_requests: 1000, ..modest().limits }, idle_timeout, ..modest() };
        let mut net = Net::with(vec![(Config { remote_shutdown: true, idle_timeout, ..modest() }, true), (patient, true)]);
        net.hosts[1].echo = true;
        let hidden = net.expose(0, HIDDEN, vec![SECRET; 1000], true, true);
        let honest = net.expose(1, HONEST, test_bytes(1, LONG), true, false);
        let listener = net.test_peer(0);
        let slots = (0..SLOTS).map(|_| None).collect();
        let mut scene = Scene {
            net,
            adversaries: Vec::new(),
            listener,
            slots,
            tokens: vec![1; SLOTS],
            begun: Vec::new(),
            known: Vec::new(),
            sent: HashMap::new(),
            held: Vec::new(),
            hidden,
            honest,
            next: 0,
            wires: 0,
            sent_random_bytes: false,
        };
        // One adversary that dialled, and one that the host dialled.
        scene.net.raw_dial(0);
        scene.call(&Target::Listener, 1, 10, false, 30_000, 0);
        scene.visit(0, 1);
        scene.net.advance(scene.net.settings.delay);
        scene.check_invariants();
        for raw in scene.adversaries.clone() {
            scene.net.send_bytes(raw, encode_hello(wire::VERSIONS, &hello(50 + raw.wire as u64)));
        }
        scene.check_invariants();
        allocated();
        scene
    }

    fn number(&self, number: &Number) -> u64 {
        match *number {
            Number::Known { which } => {
                let at = self.known.len().checked_sub(1 + usize::from(which) % self.known.len().max(1));
                at.map_or(1, |at| self.known[at])
            }
            Number::Small { n } => u64::from(n),
            Number::Top { below } => u64::MAX - u64::from(below),
            Number::Power { n } => 1 << (n % 64),
            Number::Any { n } => n,
        }
    }

    fn size(&self, size: &Size) -> u64 {
        match size {
            Size::Small { n } => u64::from(*n),
            Size::Middle { n } => u64::from(*n),
            Size::Chunk { more } => (CHUNK + usize::from(*more)) as u64 - 3,
            Size::Large { n } => u64::from(*n),
            Size::Number { n } => self.number(n),
        }
    }

    /// The length of memory or of a body that the host really allocates.
    fn len(&self, size: &Size) -> usize {
        (self.size(size) % (LONG as u64 + 1)) as usize
    }

    fn token(&self, token: &Token) -> u128 {
        match token {
            Token::Slot { n } => self.tokens[usize::from(*n) % SLOTS],
            Token::Honest => HONEST,
            Token::Any { n } => u128::from(*n),
        }
    }

    fn leases(&self, leased: &Leased) -> LeaseRange {
        LeaseRange { first: self.number(&leased.first), count: self.size(&leased.count) as u32 }
    }

    fn status(&self, word: &Word) -> Status {
        let size = self.size(&word.size);
        match word.kind % 16 {
            0 => Status::Ok,
            1 => Status::NoSuchProcedure,
            2 => Status::NoSuchProvider,
            3 => Status::NoResponse,
            4 => Status::Panicked(text(size)),
            5 => Status::Failed(text(size)),
            6 => Status::Decode(text(size)),
            7 => Status::TypeMismatch { expected: text(size), found: text(size / 4) },
            8 => Status::TooLarge { size, limit: size / 2 },
            9 => Status::Busy(text(size)),
            10 => Status::AccessDenied(text(size)),
            11 => Status::Revoked,
            12 => Status::OutOfRange { offset: size, len: size / 2, size },
            13 => Status::Restarted,
            14 => Status::Finalizing,
            _ => Status::Encode(text(size)),
        }
    }

    fn range(&mut self, extent: &Extent) -> Range {
        let transfer = self.number(&extent.transfer);
        self.known.push(transfer);
        Range {
            transfer,
            owner: self.net.hosts[0].incarnation.wrapping_add(u64::from(extent.stale)),
            token: self.token(&extent.token).to_le_bytes(),
            offset: self.size(&extent.offset),
            len: self.size(&extent.len),
        }
    }

    /// Encodes what an adversary sends.
    fn encode_message(&mut self, sender: usize, input: &AdversaryMessage) -> Vec<u8> {
        const BODY: [u8; 256] = [0x5a; 256];
        self.sent_random_bytes |= matches!(input, AdversaryMessage::RandomBytes { .. } | AdversaryMessage::Framed { .. });
        let claimed = |scene: &Scene, claim: &Claim, len: u8| match claim {
            Claim::True => u64::from(len),
            Claim::False { size } => scene.size(size),
        };
        let shape_of = |len: &u8| BorrowedBytes(&BODY[..usize::from(*len) % 9]);
        let state;
        let (message, body) = match input {
            AdversaryMessage::Request { call, procedure, name, budget, how, shape, leases, body, claim } => {
                let call = self.number(call);
                self.known.push(call);
                let name = [None, Some("echo"), Some("other"), Some("")][usize::from(*name) % 4];
                let declaration = name.map(|name| Declare { name, shape: shape_of(shape) });
                let message = Message::Request {
                    call,
                    procedure: u32::from(*procedure) % 4,
                    declaration,
                    provider: u16::from(how >> 4),
                    budget_us: self.number(budget),
                    one_way: how & 1 == 1,
                    leases: self.leases(leases),
                    size: claimed(self, claim, *body),
                };
                (message, &BODY[..usize::from(*body)])
            }
            AdversaryMessage::Response { call, shape, leases, body, claim } => {
                let (call, leases, size) = (self.number(call), self.leases(leases), claimed(self, claim, *body));
                let (result, shape) = (u32::from(*shape) / 64, shape_of(shape));
                // With those that it has sent, and with others.
                let released = if body % 4 == 3 { leases } else { LeaseRange::default() };
                (Message::Response { call, result, shape, leases, released, size }, &BODY[..usize::from(*body)])
            }
            AdversaryMessage::Refuse { call, status } => {
                (Message::Refuse { call: self.number(call), status: self.status(status) }, &BODY[..0])
            }
            AdversaryMessage::Cancel { call } => (Message::Cancel { call: self.number(call) }, &BODY[..0]),
            AdversaryMessage::Pull { range } => (Message::Pull(self.range(range)), &BODY[..0]),
            AdversaryMessage::Push { range } => (Message::Push(self.range(range)), &BODY[..0]),
            AdversaryMessage::Done { transfer, status } => {
                (Message::Done { transfer: self.number(transfer), status: self.status(status) }, &BODY[..0])
            }
            AdversaryMessage::Abort { transfer, push } => {
                (Message::Abort { transfer: self.number(transfer), push: *push }, &BODY[..0])
            }
            AdversaryMessage::Data { stream, id, offset, len, good } => {
                return self.data(sender, *stream, id, offset, len, *good);
            }
            AdversaryMessage::Ping => (Message::Ping, &BODY[..0]),
            AdversaryMessage::Pong => (Message::Pong, &BODY[..0]),
            AdversaryMessage::Goodbye => (Message::Goodbye, &BODY[..0]),
            AdversaryMessage::Release { leases } => (Message::Release(self.leases(leases)), &BODY[..0]),
            AdversaryMessage::Revoked { token } => (Message::Revoked { token: self.token(token).to_le_bytes() }, &BODY[..0]),
            AdversaryMessage::ResumptionToken { token_number } => {
                (Message::ResumptionToken { token: self.number(token_number).into() }, &BODY[..0])
            }
            AdversaryMessage::Handled { count } => {
                let count = self.number(count) as u32;
                (Message::Handled { count, calls: count, bytes: count }, &BODY[..0])
            }
            AdversaryMessage::Shutdown { call } => (Message::Shutdown { call: self.number(call) }, &BODY[..0]),
            AdversaryMessage::TraceContext { ids, flags, state: part, times } => {
                state = String::from_utf8_lossy(part).repeat(usize::from(*times));
                let (trace_id, parent_id) = ([ids & 0xf; 16], [ids >> 4; 8]);
                (Message::TraceContext { trace_id, parent_id, flags: *flags, state: &state }, &BODY[..0])
            }
            AdversaryMessage::Idle { true_count, exposes } => {
                let received = self.net.received(self.adversaries[sender]).len() as u64 + u64::from(!true_count);
                (Message::Idle { received, exposes: *exposes }, &BODY[..0])
            }
            AdversaryMessage::IdleAgreed => (Message::IdleAgreed, &BODY[..0]),
            AdversaryMessage::InUse => (Message::InUse, &BODY[..0]),
            AdversaryMessage::List { call, is_answer, head, width } => {
                let (call, head) = (self.number(call), self.number(head));
                (Message::List { call, is_answer: *is_answer, head, width: *width }, &BODY[..0])
            }
            AdversaryMessage::RandomBytes { bytes } => return bytes.clone(),
            AdversaryMessage::Framed { bytes, head } => return super::fuzzing::framed(bytes, *head),
        };
        // Some bodies have checksums, and some of those are wrong.
        let mut bytes = Vec::new();
        wire::put(&mut bytes, &message, body, body.len() % 2 == 1);
        if body.len() % 4 == 3 {
            let sum = bytes.len() - 4;
            bytes[sum..].fill(0xff);
        }
        bytes
    }

    fn data(&mut self, sender: usize, stream: u8, id: &Number, offset: &Offset, len: &Size, good: bool) -> Vec<u8> {
        let stream = [Stream::Pull, Stream::Push, Stream::Request, Stream::Response][usize::from(stream) % 4];
        let id = self.number(id);
        let len = self.size(len);
        let sent = self.sent.entry((sender, stream, id)).or_default();
        let offset = match offset {
            Offset::Next => *sent,
            Offset::At { size } => {
                let size = size.clone();
                self.size(&size)
            }
        };
        // A payload that is too long is announced and not sent.
        let whole = len <= LONG as u64;
        let mut bytes = Vec::new();
        wire::put(&mut bytes, &Message::Data { stream, id, offset, len: len as u32 }, &[], false);
        if whole {
            *self.sent.entry((sender, stream, id)).or_default() = offset.wrapping_add(len);
            bytes.resize(bytes.len() + len as usize, PAYLOAD);
            bytes.push(u8::from(good));
        }
        bytes
    }

    fn adversary(&self, sender: u8) -> (usize, Raw) {
        let at = usize::from(sender) % self.adversaries.len();
        (at, self.adversaries[at])
    }

    fn peer(&mut self, target: &Target) -> PeerId {
        match target {
            Target::Honest => self.net.peer(0, 1),
            Target::Listener => self.listener,
            Target::Adversary { which } => {
                let (_, raw) = self.adversary(*which);
                let link = self.net.raw_link(raw).and_then(|(_, link)| self.net.hosts[0].proto.links.get(link));
                link.and_then(|link| link.peer).unwrap_or(self.listener)
            }
        }
    }

    fn new_leases(&mut self, count: u8) -> Vec<TestLease> {
        let from = self.next;
        self.next += u32::from(count);
        (from..self.next).map(|number| TestLease { token: self.tokens[number as usize % SLOTS], number }).collect()
    }

    /// Records an operation of the host.
    fn record(&mut self, op: Op, check: Check, surrounding: Option<(Mem, bool)>) {
        match self.net.hosts[0].ids.get(&op) {
            Some(OperationId::Call(id)) => self.known.push(wire_id(*id)),
            Some(OperationId::Transfer(id)) => self.known.push(wire_id(*id)),
            None => {}
        }
        self.begun.push(BegunOperation { op, check, surrounding });
    }

    fn call(&mut self, target: &Target, procedure: u8, len: usize, one_way: bool, patience: u16, leases: u8) {
        let peer = self.peer(target);
        let procedure = u32::from(procedure % 3);
        let name = ["echo", "other", "third"][procedure as usize];
        let body = test_bytes(7, len);
        // Each bulk takes at least this much of the body.
        let leases = self.new_leases((len / 32).min(usize::from(leases % 4)) as u8);
        let patient = patience >= 1000 && *target == Target::Honest;
        let check = if patient && !one_way { Check::Answered(served(&body)) } else { Check::Anything };
        let timeout = Duration::from_millis(patience.into());
        let op = self.net.call_peer(0, peer, TestCall { procedure, name, one_way, timeout, leases, ..call(body) });
        self.record(op, check, None);
    }

    fn transfer(&mut self, pull: bool, target: &Target, (token, offset): (u128, u64), len: usize, patience: u16) {
        let peer = self.peer(target);
        let owner = self.net.hosts[0].proto.peers.get(peer).and_then(|peer| peer.incarnation).unwrap_or(51);
        let surrounding = Mem::new(vec![SECRET; len + 2 * AROUND]);
        let near = surrounding.part(AROUND, len).expect("it lies inside");
        if !pull && len > 0 {
            near.write(0, &vec![0x11; len]);
        }
        let inside = usize::try_from(offset).ok().and_then(|offset| Some(offset..offset.checked_add(len)?));
        let expected = inside.and_then(|range| test_bytes(1, LONG).get(range).map(<[u8]>::to_vec));
        let check = match expected {
            Some(expected) if pull && *target == Target::Honest && token == HONEST && patience >= 1000 => Check::Pulled(expected),
            _ if pull && *target != Target::Honest => Check::Fetched,
            _ if pull => Check::Anything,
            _ => Check::Pushed,
        };
        let remote = Remote { peer, owner, token, offset, keys: None };
        let op = self.net.transfer_to(0, pull, remote, &near, Duration::from_millis(patience.into()));
        self.record(op, check, Some((surrounding, pull)));
    }

    fn expose(&mut self, slot: u8, len: usize, mode: u8) {
        let at = usize::from(slot) % SLOTS;
        self.revoke(slot);
        self.next += 1;
        let token = u128::from(self.next) << 64 | 7;
        let access = Mode { read: mode & 1 == 0, write: mode & 2 == 2 };
        let only = mode & 12 == 12;
        // Readable memory shows where it comes from.
        let before = if access.read && !only { test_bytes(token as u64, len) } else { vec![SECRET; len] };
        let memory = self.net.expose(0, token, before.clone(), access.read, access.write);
        if only {
            let peer = self.net.peer(0, 1);
            self.net.hosts[0].proto.expose(
                token,
                memory.clone(),
                access,
                &AccessPolicy { only: Some(peer), ..AccessPolicy::default() },
            );
        }
        self.tokens[at] = token;
        self.slots[at] = Some(Slot { token, memory, mode: access, only, before });
    }

    fn revoke(&mut self, slot: u8) {
        if let Some(slot) = self.slots[usize::from(slot) % SLOTS].take() {
            slot.check();
            self.net.revoke(0, slot.token);
            let pushed = |link: &PeerLink<TestEnv>| link.pushes.values().any(|push| push.token == slot.token);
            assert!(!self.net.hosts[0].proto.links.values().any(pushed), "a push into revoked memory goes on");
        }
    }

    /// The honest peer calls the host, and pulls from a slot.
    fn visit(&mut self, slot: u8, len: usize) {
        let leases = self.new_leases((len / 32).min(2) as u8);
        self.net.call(1, 0, TestCall { leases, ..call(test_bytes(3, len)) });
        let Some(slot) = &self.slots[usize::from(slot) % SLOTS] else { return };
        let near = Mem::new(vec![0; len.min(slot.memory.len())]);
        let token = slot.token;
        self.net.pull(1, 0, token, 0, &near);
    }

    fn answer(&mut self, which: u8, reply: Result<(usize, u8), Status>) {
        let waiting = self.net.hosts[0].inbox.len();
        if waiting == 0 {
            return;
        }
        let ArrivedRequest { request, link, leases, .. } = self.net.hosts[0].inbox.swap_remove(usize::from(which) % waiting);
        self.held.push((link, leases));
        match reply {
            Ok((len, leases)) => {
                let leases = self.new_leases((len / 32).min(usize::from(leases % 4)) as u8);
                let body = test_bytes(5, len);
                self.net.with_host(0, |host| {
                    host.leased.extend(leases.iter().cloned());
                    let _ = host.proto.respond(request, Ok(&mut host::reply(&body, leases)));
                });
            }
            Err(status) => self.net.with_host(0, |host| host.refuse(request, status)),
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Send { sender, what } => {
                let (at, raw) = self.adversary(*sender);
                let bytes = self.encode_message(at, what);
                self.net.send_bytes(raw, bytes);
            }
            Step::SendBuffered { sender, what } => {
                let (at, raw) = self.adversary(*sender);
                let bytes = self.encode_message(at, what);
                self.net.queue_bytes(raw, bytes);
            }
            Step::Dial => drop(self.net.raw_dial(0)),
            Step::Handshake { sender, incarnation, token_number, claims, limit } => {
                let (_, raw) = self.adversary(*sender);
                // Its own, another adversary's, the honest peer's, or the host's.
                let incarnation = match incarnation % 8 {
                    0 => self.net.hosts[0].incarnation,
                    1 => self.net.hosts[1].incarnation,
                    n => 50 + u64::from(n),
                };
                let claimed: [&[&str]; 4] = [
                    &[],
                    &["tcp://10.0.9.9:7000"],
                    &["tcp://10.0.0.2:7000", "tcp://10.0.9.9:1"],
                    &["shm://x", "tcp://0.0.0.0:9"],
                ];
                let addresses = claimed[usize::from(*claims) % 4].iter().map(|address| address.parse().expect("an address"));
                let token_number = (claims & 4 == 4).then(|| self.number(token_number).into());
                let max_message = if claims & 8 == 8 { self.size(limit) } else { 1 << 20 };
                let checksums = claims & 16 == 16;
                let hello =
                    Hello { incarnation, max_message, addresses: addresses.collect(), resumption_token: token_number, checksums };
                self.net.send_bytes(raw, encode_hello(wire::VERSIONS, &hello));
            }
            Step::HangUp { sender } => {
                let (_, raw) = self.adversary(*sender);
                self.net.disconnect(raw);
            }
            Step::Call { target, procedure, len, one_way, patience, leases } => {
                self.call(target, *procedure, self.len(len), *one_way, *patience, *leases);
            }
            Step::Pull { target, token, offset, len, patience } => {
                self.transfer(true, target, (self.token(token), self.size(offset)), self.len(len), *patience);
            }
            Step::Push { target, token, offset, len, patience } => {
                self.transfer(false, target, (self.token(token), self.size(offset)), self.len(len), *patience);
            }
            Step::Expose { slot, len, mode } => self.expose(*slot, self.len(len), *mode),
            Step::Revoke { slot } => self.revoke(*slot),
            Step::Answer { which, len, leases } => self.answer(*which, Ok((self.len(len), *leases))),
            Step::Refuse { which, status } => self.answer(*which, Err(self.status(status))),
            Step::CancelOperation { which } => {
                let at = usize::from(*which) % self.begun.len();
                let begun = &mut self.begun[at];
                if !self.net.hosts[0].is_done(begun.op) {
                    begun.check = Check::Anything;
                    self.net.cancel(0, begun.op);
                }
            }
            Step::ReleaseLeases { which } => {
                if !self.held.is_empty() {
                    let (link, leases) = self.held.swap_remove(usize::from(*which) % self.held.len());
                    self.net.with_host(0, |host| host.proto.release(link, leases));
                }
            }
            Step::Visit { slot, len } => self.visit(*slot, self.len(len)),
            Step::Wait { ms } => self.net.advance(Duration::from_millis((ms % 5000).into())),
            Step::Cut { sender } => {
                let (_, raw) = self.adversary(*sender);
                self.net.cut(raw.wire);
            }
            Step::Drain => self.net.with_host(0, |host| host.proto.begin_shutdown()),
        }
    }

    /// Checks what must hold after each step.
    fn check_invariants(&mut self) {
        while self.wires < self.net.wires.len() {
            let wire = &self.net.wires[self.wires];
            for end in &wire.ends {
                if let (Some(host), Some(link)) = (self.net.hosts.get_mut(end.host), end.link) {
                    host.proto.set_chunk(link, CHUNK);
                }
            }
            self.adversaries.extend(self.net.raw_at(self.wires));
            self.wires += 1;
        }
        let limit = modest();
        let (largest, total) = allocated();
        assert!(largest <= limit.max_message, "{largest} bytes were allocated at once, {total} in all");
        // Announced bodies: as many as requests may be in progress on each link, and one for each call of the host.
        let most = (self.adversaries.len() + 1) * limit.limits.peer_requests + self.begun.len();
        assert!(live() <= most * limit.max_message, "{} bytes are kept", live());
        let waiting = self.net.hosts[0].inbox.len();
        assert!(waiting <= (self.net.wires.len()) * limit.limits.peer_requests, "{waiting} requests wait");
        assert!(self.hidden.bytes() == [SECRET; 1000], "memory was written without its token");
        for slot in self.slots.iter().flatten() {
            slot.check();
        }
        for begun in &self.begun {
            begun.check_around();
        }
    }

    fn finish(mut self) {
        // No secret byte has been sent to an adversary.
        for raw in &self.adversaries {
            let received = self.net.received(*raw);
            assert!(!received.chunks_exact(8).any(|bytes| bytes == [SECRET; 8]), "an adversary received secret bytes");
            check_received(received);
        }
        self.net.hosts[0].echo = true;
        for raw in self.adversaries.clone() {
            self.net.disconnect(raw);
        }
        for (link, leases) in std::mem::take(&mut self.held) {
            self.net.with_host(0, |host| host.proto.release(link, leases));
        }
        while !self.net.hosts[0].inbox.is_empty() {
            self.answer(0, Ok((0, 0)));
        }
        // From now on no adversary accepts connections.
        self.net.test_address = None;
        let still = self.net.call(0, 1, call("still there?"));
        self.net.advance(Duration::from_secs(70));
        assert_eq!(self.net.hosts[0].body(still), served(b"still there?"));
        for (link, leases) in std::mem::take(&mut self.held) {
            self.net.with_host(0, |host| host.proto.release(link, leases));
        }
        // Leases that came with responses.
        for number in 0..2 {
            let ends = self.net.hosts[number].outcomes.values().flatten();
            let came = ends.filter_map(|end| match end {
                TestOutcome::Answered { link, leases, .. } => Some((*link, *leases)),
                _ => None,
            });
            for (link, leases) in came.collect::<Vec<_>>() {
                self.net.with_host(number, |host| host.proto.release(link, leases));
            }
        }
        for slot in 0..SLOTS as u8 {
            self.revoke(slot);
        }
        self.net.revoke(0, HIDDEN);
        self.net.revoke(1, HONEST);
        for begun in &self.begun {
            begun.check_around();
            let outcome = self.net.hosts[0].outcome(begun.op);
            assert!(outcome.is_some(), "operation {} has not ended", begun.op);
            match (&begun.check, outcome) {
                (Check::Answered(expected), Some(TestOutcome::Answered { body, .. })) => assert_eq!(body, expected),
                (Check::Pulled(expected), Some(TestOutcome::Transferred(len))) => {
                    let (surrounding, _) = begun.surrounding.as_ref().expect("a transfer has memory");
                    assert_eq!(surrounding.bytes()[AROUND..AROUND + len], expected[..]);
                }
                (Check::Answered(_) | Check::Pulled(_), other) => panic!("operation with the honest peer: {other:?}"),
                (Check::Fetched, Some(TestOutcome::Transferred(len))) if !self.sent_random_bytes => {
                    let (surrounding, _) = begun.surrounding.as_ref().expect("a transfer has memory");
                    assert!(
                        surrounding.bytes()[AROUND..AROUND + len] == vec![PAYLOAD; *len],
                        "a pull succeeded with bytes missing"
                    );
                }
                (Check::Anything | Check::Fetched | Check::Pushed, _) => {}
            }
        }
        assert!(self.honest.bytes() == test_bytes(1, LONG), "the memory of the honest peer has changed");
        self.net.end();
    }
}

/// The host sends well-formed messages, whatever it receives.
fn check_received(received: &[u8]) {
    let mut at = 0;
    while received[at..].starts_with(&MAGIC) {
        let ParsedHandshake::Message(_, len) = wire::parse_handshake(&received[at..], true) else {
            panic!("the host sent a malformed handshake message")
        };
        at += len;
    }
    while let Ok(Frame::Whole(message, _, len)) = wire::take(received.get(at..).unwrap_or_default()) {
        at += len;
        if let Message::Data { len, .. } = message {
            at += len as usize + 1;
        }
    }
    assert!(at >= received.len(), "the host sent a malformed frame");
}

impl Slot {
    /// Memory that adversaries may not write is unchanged.
    fn check(&self) {
        if !self.mode.write || self.only {
            assert!(self.memory.bytes() == self.before, "memory was written without write access");
        }
    }
}

impl BegunOperation {
    fn check_around(&self) {
        let Some((surrounding, pull)) = &self.surrounding else { return };
        let bytes = surrounding.bytes();
        let (head, tail) = (&bytes[..AROUND], &bytes[bytes.len() - AROUND..]);
        assert!(head == [SECRET; AROUND] && tail == [SECRET; AROUND], "memory outside of the transfer was written");
        if !pull {
            let sent = &bytes[AROUND..bytes.len() - AROUND];
            assert!(sent.iter().all(|byte| *byte == 0x11), "the source of a push has changed");
        }
    }
}
