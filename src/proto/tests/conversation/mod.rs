//! A host among liars, and one honest peer: what each of them does is a script. Whatever it is, nothing panics, memory that
//! is not exposed for it is neither written nor told, little is allocated, what is done with the honest peer succeeds, each
//! operation ends exactly once, and in the end nothing is left over.

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
use super::raw::{Raw, greet, hello};
use super::wire::{self, BorrowedBytes, Declare, Frame, Hello, MAGIC, Message, ParsedHandshake, Range, Stream};
use super::{AccessPolicy, Config, LeaseRange, LinkId, Memory, Mode, PeerId, PeerLimits, Remote, Status, wire_id};
use crate::fuzzing::script::read_all;
pub(crate) use seeds::seeds;
use steps::*;

const STEPS: usize = 120;
const SLOTS: usize = 6;
/// Payloads of the host and its honest peer come in chunks of this size, so that several take little time.
const CHUNK: usize = 4096;
/// Longest payload that a liar sends, or buffer that is exposed.
const LONG: usize = 20_000;
/// What is never told to a liar.
const SECRET: u8 = 0xd5;
/// Of this all payloads of liars are made, but for noise.
const PAYLOAD: u8 = 0x77;
/// What is exposed at the honest peer.
const HONEST: u128 = 0x4041_4243;
/// Exposed at the host, and nobody is told.
const HIDDEN: u128 = 0xfeed_0000_0000_0000_0000_0000_0000_beef;

/// Exposed at the host.
struct Slot {
    token: u128,
    memory: Mem,
    mode: Mode,
    /// For the honest peer only.
    only: bool,
    before: Vec<u8>,
}

/// What an operation of the host must have done.
enum Check {
    Anything,
    /// From a liar: all of it, whatever it is.
    Fetched,
    Answered(Vec<u8>),
    Pulled(Vec<u8>),
    Pushed,
}

struct BegunOperation {
    op: Op,
    check: Check,
    /// All of the block that the operation's memory is in the middle of.
    around: Option<(Mem, bool)>,
}

/// Bytes on either side of a transfer's memory.
const AROUND: usize = 32;

struct Scene {
    net: Net,
    liars: Vec<Raw>,
    listener: PeerId,
    slots: Vec<Option<Slot>>,
    tokens: Vec<u128>,
    begun: Vec<BegunOperation>,
    /// Numbers that mean something at the host.
    known: Vec<u64>,
    /// How much of each stream each liar has sent.
    sent: HashMap<(usize, Stream, u64), u64>,
    held: Vec<(LinkId, LeaseRange)>,
    hidden: Mem,
    honest: Mem,
    next: u32,
    wires: usize,
    /// Somebody has said what may be anything.
    noisy: bool,
}

/// Plays a script.
pub fn conversation(bytes: &[u8]) {
    let mut scene = Scene::new();
    for step in read_all::<Step>(bytes, STEPS) {
        scene.step(&step);
        scene.look();
    }
    scene.finish();
}

/// `len` bytes that differ with `seed` and with their place; made once, since there are many.
fn stretch(seed: u64, len: usize) -> Vec<u8> {
    static ALL: LazyLock<Vec<u8>> = LazyLock::new(|| super::env::pattern(1, LONG + 4096));
    ALL[seed as usize % 4096..][..len].to_vec()
}

fn text(n: u64) -> String {
    ["", "echo", "other", "ünïcödé"][n as usize % 4].repeat(1 + n as usize / 64 % 2)
}

impl Scene {
    fn new() -> Scene {
        // The honest peer takes whatever it is asked for.
        let patient = Config { limits: PeerLimits { peer_requests: 1000, ..modest().limits }, ..modest() };
        let mut net = Net::with(vec![(Config { remote_shutdown: true, ..modest() }, true), (patient, true)]);
        net.hosts[1].echo = true;
        let hidden = net.expose(0, HIDDEN, vec![SECRET; 1000], true, true);
        let honest = net.expose(1, HONEST, stretch(1, LONG), true, false);
        let listener = net.played_peer(0);
        let slots = (0..SLOTS).map(|_| None).collect();
        let mut scene = Scene {
            net,
            liars: Vec::new(),
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
            noisy: false,
        };
        // One who has dialled, and one who was dialled.
        scene.net.raw_dial(0);
        scene.call(&Whom::Listener, 1, 10, false, 30_000, 0);
        scene.visit(0, 1);
        scene.net.advance(scene.net.settings.delay);
        scene.look();
        for raw in scene.liars.clone() {
            scene.net.say_bytes(raw, greet(wire::VERSIONS, &hello(50 + raw.wire as u64)));
        }
        scene.look();
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

    /// Of what really is there.
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

    /// What a liar says, as bytes.
    fn saying(&mut self, who: usize, saying: &Saying) -> Vec<u8> {
        const BODY: [u8; 256] = [0x5a; 256];
        self.noisy |= matches!(saying, Saying::Noise { .. } | Saying::Framed { .. });
        let claimed = |scene: &Scene, claim: &Claim, len: u8| match claim {
            Claim::True => u64::from(len),
            Claim::False { size } => scene.size(size),
        };
        let shape_of = |len: &u8| BorrowedBytes(&BODY[..usize::from(*len) % 9]);
        let (message, body) = match saying {
            Saying::Request { call, procedure, name, budget, how, shape, leases, body, claim } => {
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
            Saying::Response { call, shape, leases, body, claim } => {
                let (call, leases, size) = (self.number(call), self.leases(leases), claimed(self, claim, *body));
                (
                    Message::Response { call, result: u32::from(*shape) / 64, shape: shape_of(shape), leases, size },
                    &BODY[..usize::from(*body)],
                )
            }
            Saying::Refuse { call, status } => {
                (Message::Refuse { call: self.number(call), status: self.status(status) }, &BODY[..0])
            }
            Saying::Cancel { call } => (Message::Cancel { call: self.number(call) }, &BODY[..0]),
            Saying::Pull { range } => (Message::Pull(self.range(range)), &BODY[..0]),
            Saying::Push { range } => (Message::Push(self.range(range)), &BODY[..0]),
            Saying::Done { transfer, status } => {
                (Message::Done { transfer: self.number(transfer), status: self.status(status) }, &BODY[..0])
            }
            Saying::Abort { transfer, push } => (Message::Abort { transfer: self.number(transfer), push: *push }, &BODY[..0]),
            Saying::Data { stream, id, offset, len, good } => return self.data(who, *stream, id, offset, len, *good),
            Saying::Ping => (Message::Ping, &BODY[..0]),
            Saying::Pong => (Message::Pong, &BODY[..0]),
            Saying::Goodbye => (Message::Goodbye, &BODY[..0]),
            Saying::Release { leases } => (Message::Release(self.leases(leases)), &BODY[..0]),
            Saying::Revoked { token } => (Message::Revoked { token: self.token(token).to_le_bytes() }, &BODY[..0]),
            Saying::Ticket { ticket } => (Message::ResumptionToken { token: self.number(ticket).into() }, &BODY[..0]),
            Saying::Handled { count } => {
                let count = self.number(count) as u32;
                (Message::Handled { count, calls: count, bytes: count }, &BODY[..0])
            }
            Saying::Shutdown { call } => (Message::Shutdown { call: self.number(call) }, &BODY[..0]),
            Saying::Noise { bytes } => return bytes.clone(),
            Saying::Framed { bytes, head } => return super::fuzzing::framed(bytes, *head),
        };
        // Some bodies have checksums, and of those some a wrong one.
        let mut bytes = Vec::new();
        wire::put(&mut bytes, &message, body, body.len() % 2 == 1);
        if body.len() % 4 == 3 {
            let sum = bytes.len() - 4;
            bytes[sum..].fill(0xff);
        }
        bytes
    }

    fn data(&mut self, who: usize, stream: u8, id: &Number, offset: &Offset, len: &Size, good: bool) -> Vec<u8> {
        let stream = [Stream::Pull, Stream::Push, Stream::Request, Stream::Response][usize::from(stream) % 4];
        let id = self.number(id);
        let len = self.size(len);
        let sent = self.sent.entry((who, stream, id)).or_default();
        let offset = match offset {
            Offset::Next => *sent,
            Offset::At { size } => {
                let size = size.clone();
                self.size(&size)
            }
        };
        // What is too much to be sent is said and not sent.
        let whole = len <= LONG as u64;
        let mut bytes = Vec::new();
        wire::put(&mut bytes, &Message::Data { stream, id, offset, len: len as u32 }, &[], false);
        if whole {
            *self.sent.entry((who, stream, id)).or_default() = offset.wrapping_add(len);
            bytes.resize(bytes.len() + len as usize, PAYLOAD);
            bytes.push(u8::from(good));
        }
        bytes
    }

    fn liar(&self, who: u8) -> (usize, Raw) {
        let at = usize::from(who) % self.liars.len();
        (at, self.liars[at])
    }

    fn peer(&mut self, whom: &Whom) -> PeerId {
        match whom {
            Whom::Honest => self.net.peer(0, 1),
            Whom::Listener => self.listener,
            Whom::Liar { which } => {
                let (_, raw) = self.liar(*which);
                let link = self.net.raw_link(raw).and_then(|(_, link)| self.net.hosts[0].proto.links.get(link));
                link.and_then(|link| link.peer).unwrap_or(self.listener)
            }
        }
    }

    fn tickets(&mut self, count: u8) -> Vec<TestLease> {
        let from = self.next;
        self.next += u32::from(count);
        (from..self.next).map(|number| TestLease { token: self.tokens[number as usize % SLOTS], number }).collect()
    }

    /// Takes note of an operation of the host's.
    fn began(&mut self, op: Op, check: Check, around: Option<(Mem, bool)>) {
        match self.net.hosts[0].ids.get(&op) {
            Some(OperationId::Call(id)) => self.known.push(wire_id(*id)),
            Some(OperationId::Transfer(id)) => self.known.push(wire_id(*id)),
            None => {}
        }
        self.begun.push(BegunOperation { op, check, around });
    }

    fn call(&mut self, whom: &Whom, procedure: u8, len: usize, one_way: bool, patience: u16, leases: u8) {
        let peer = self.peer(whom);
        let procedure = u32::from(procedure % 3);
        let name = ["echo", "other", "third"][procedure as usize];
        let body = stretch(7, len);
        // What one lease stands for takes more than that.
        let leases = self.tickets((len / 32).min(usize::from(leases % 4)) as u8);
        let patient = patience >= 1000 && *whom == Whom::Honest;
        let check = if patient && !one_way { Check::Answered(served(&body)) } else { Check::Anything };
        let timeout = Duration::from_millis(patience.into());
        let op = self.net.call_peer(0, peer, TestCall { procedure, name, one_way, timeout, leases, ..call(body) });
        self.began(op, check, None);
    }

    fn transfer(&mut self, pull: bool, whom: &Whom, (token, offset): (u128, u64), len: usize, patience: u16) {
        let peer = self.peer(whom);
        let owner = self.net.hosts[0].proto.peers.get(peer).and_then(|peer| peer.incarnation).unwrap_or(51);
        let around = Mem::new(vec![SECRET; len + 2 * AROUND]);
        let near = around.part(AROUND, len).expect("it lies inside");
        if !pull && len > 0 {
            near.write(0, &vec![0x11; len]);
        }
        let inside = usize::try_from(offset).ok().and_then(|offset| Some(offset..offset.checked_add(len)?));
        let expected = inside.and_then(|range| stretch(1, LONG).get(range).map(<[u8]>::to_vec));
        let check = match expected {
            Some(expected) if pull && *whom == Whom::Honest && token == HONEST && patience >= 1000 => Check::Pulled(expected),
            _ if pull && *whom != Whom::Honest => Check::Fetched,
            _ if pull => Check::Anything,
            _ => Check::Pushed,
        };
        let remote = Remote { peer, owner, token, offset, keys: None };
        let op = self.net.transfer_to(0, pull, remote, &near, Duration::from_millis(patience.into()));
        self.began(op, check, Some((around, pull)));
    }

    fn expose(&mut self, slot: u8, len: usize, mode: u8) {
        let at = usize::from(slot) % SLOTS;
        self.revoke(slot);
        self.next += 1;
        let token = u128::from(self.next) << 64 | 7;
        let access = Mode { read: mode & 1 == 0, write: mode & 2 == 2 };
        let only = mode & 12 == 12;
        // What may be read shows where it comes from.
        let before = if access.read && !only { stretch(token as u64, len) } else { vec![SECRET; len] };
        let memory = self.net.expose(0, token, before.clone(), access.read, access.write);
        if only {
            let peer = self.net.peer(0, 1);
            self.net.hosts[0].proto.expose(
                token,
                memory.clone(),
                access,
                AccessPolicy { only: Some(peer), ..AccessPolicy::default() },
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
            assert!(!self.net.hosts[0].proto.links.values().any(pushed), "a push into memory that was taken back goes on");
        }
    }

    /// What the honest peer wants of the host.
    fn visit(&mut self, slot: u8, len: usize) {
        let leases = self.tickets((len / 32).min(2) as u8);
        self.net.call(1, 0, TestCall { leases, ..call(stretch(3, len)) });
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
                let leases = self.tickets((len / 32).min(usize::from(leases % 4)) as u8);
                let body = stretch(5, len);
                self.net.with_host(0, |host| {
                    host.leased.extend(leases.iter().cloned());
                    let _ = host.proto.respond(request, Ok(host::reply(&body, leases)));
                });
            }
            Err(status) => self.net.with_host(0, |host| host.refuse(request, status)),
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Say { who, what } => {
                let (at, raw) = self.liar(*who);
                let bytes = self.saying(at, what);
                self.net.say_bytes(raw, bytes);
            }
            Step::Mumble { who, what } => {
                let (at, raw) = self.liar(*who);
                let bytes = self.saying(at, what);
                self.net.mumble(raw, bytes);
            }
            Step::Dial => drop(self.net.raw_dial(0)),
            Step::Greet { who, incarnation, ticket, claims, limit } => {
                let (_, raw) = self.liar(*who);
                // Its own, another liar's, the honest peer's, the host's.
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
                let ticket = (claims & 4 == 4).then(|| self.number(ticket).into());
                let max_message = if claims & 8 == 8 { self.size(limit) } else { 1 << 20 };
                let checksums = claims & 16 == 16;
                let hello =
                    Hello { incarnation, max_message, addresses: addresses.collect(), resumption_token: ticket, checksums };
                self.net.say_bytes(raw, greet(wire::VERSIONS, &hello));
            }
            Step::HangUp { who } => {
                let (_, raw) = self.liar(*who);
                self.net.hang_up(raw);
            }
            Step::Call { whom, procedure, len, one_way, patience, leases } => {
                self.call(whom, *procedure, self.len(len), *one_way, *patience, *leases);
            }
            Step::Pull { whom, token, offset, len, patience } => {
                self.transfer(true, whom, (self.token(token), self.size(offset)), self.len(len), *patience);
            }
            Step::Push { whom, token, offset, len, patience } => {
                self.transfer(false, whom, (self.token(token), self.size(offset)), self.len(len), *patience);
            }
            Step::Expose { slot, len, mode } => self.expose(*slot, self.len(len), *mode),
            Step::Revoke { slot } => self.revoke(*slot),
            Step::Answer { which, len, leases } => self.answer(*which, Ok((self.len(len), *leases))),
            Step::Decline { which, status } => self.answer(*which, Err(self.status(status))),
            Step::Abandon { which } => {
                let at = usize::from(*which) % self.begun.len();
                let begun = &mut self.begun[at];
                if !self.net.hosts[0].is_done(begun.op) {
                    begun.check = Check::Anything;
                    self.net.cancel(0, begun.op);
                }
            }
            Step::LetGo { which } => {
                if !self.held.is_empty() {
                    let (link, leases) = self.held.swap_remove(usize::from(*which) % self.held.len());
                    self.net.with_host(0, |host| host.proto.release(link, leases));
                }
            }
            Step::Visit { slot, len } => self.visit(*slot, self.len(len)),
            Step::Wait { ms } => self.net.advance(Duration::from_millis((ms % 5000).into())),
            Step::Cut { who } => {
                let (_, raw) = self.liar(*who);
                self.net.cut(raw.wire);
            }
            Step::Drain => self.net.with_host(0, |host| host.proto.begin_shutdown()),
        }
    }

    /// After each step.
    fn look(&mut self) {
        while self.wires < self.net.wires.len() {
            let wire = &self.net.wires[self.wires];
            for end in &wire.ends {
                if let (Some(host), Some(link)) = (self.net.hosts.get_mut(end.host), end.link) {
                    host.proto.set_chunk(link, CHUNK);
                }
            }
            self.liars.extend(self.net.raw_at(self.wires));
            self.wires += 1;
        }
        let limit = modest();
        let (largest, total) = allocated();
        assert!(largest <= limit.max_message, "{largest} bytes were allocated at once, {total} in all");
        // Bodies that are claimed: as many as requests may be in progress on each link, and one for each call of the host's.
        let most = (self.liars.len() + 1) * limit.limits.peer_requests + self.begun.len();
        assert!(live() <= most * limit.max_message, "{} bytes are kept", live());
        let waiting = self.net.hosts[0].inbox.len();
        assert!(waiting <= (self.net.wires.len()) * limit.limits.peer_requests, "{waiting} requests wait");
        assert!(self.hidden.bytes() == [SECRET; 1000], "memory was written whose token nobody knows");
        for slot in self.slots.iter().flatten() {
            slot.check();
        }
        for begun in &self.begun {
            begun.check_around();
        }
    }

    fn finish(mut self) {
        // Nothing that was never to be told has been told.
        for raw in &self.liars {
            let heard = self.net.heard(*raw);
            assert!(!heard.chunks_exact(8).any(|bytes| bytes == [SECRET; 8]), "a liar was told what it must not know");
            check_heard(heard);
        }
        self.net.hosts[0].echo = true;
        for raw in self.liars.clone() {
            self.net.hang_up(raw);
        }
        for (link, leases) in std::mem::take(&mut self.held) {
            self.net.with_host(0, |host| host.proto.release(link, leases));
        }
        while !self.net.hosts[0].inbox.is_empty() {
            self.answer(0, Ok((0, 0)));
        }
        // Nobody is at the other end of what is dialled now.
        self.net.played = None;
        let still = self.net.call(0, 1, call("still there?"));
        self.net.advance(Duration::from_secs(70));
        assert_eq!(self.net.hosts[0].body(still), served(b"still there?"));
        for (link, leases) in std::mem::take(&mut self.held) {
            self.net.with_host(0, |host| host.proto.release(link, leases));
        }
        // What came with answers.
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
                (Check::Pulled(expected), Some(TestOutcome::Moved(len))) => {
                    let (around, _) = begun.around.as_ref().expect("a transfer has memory");
                    assert_eq!(around.bytes()[AROUND..AROUND + len], expected[..]);
                }
                (Check::Answered(_) | Check::Pulled(_), other) => panic!("with an honest peer: {other:?}"),
                (Check::Fetched, Some(TestOutcome::Moved(len))) if !self.noisy => {
                    let (around, _) = begun.around.as_ref().expect("a transfer has memory");
                    assert!(around.bytes()[AROUND..AROUND + len] == vec![PAYLOAD; *len], "a pull is done, and a part is missing");
                }
                (Check::Anything | Check::Fetched | Check::Pushed, _) => {}
            }
        }
        assert!(self.honest.bytes() == stretch(1, LONG), "the honest peer's memory is not what it was");
        self.net.end();
    }
}

/// What the host says is well formed, whatever it is told.
fn check_heard(heard: &[u8]) {
    let mut at = 0;
    while heard[at..].starts_with(&MAGIC) {
        let ParsedHandshake::Message(_, len) = wire::parse_handshake(&heard[at..], true) else {
            panic!("the host greets nobody so")
        };
        at += len;
    }
    while let Ok(Frame::Whole(message, _, len)) = wire::take(heard.get(at..).unwrap_or_default()) {
        at += len;
        if let Message::Data { len, .. } = message {
            at += len as usize + 1;
        }
    }
    assert!(at >= heard.len(), "the host says no message");
}

impl Slot {
    /// Whom it was exposed for it may have been written by, nobody else.
    fn check(&self) {
        if !self.mode.write || self.only {
            assert!(self.memory.bytes() == self.before, "memory was written that is not exposed for that");
        }
    }
}

impl BegunOperation {
    fn check_around(&self) {
        let Some((around, pull)) = &self.around else { return };
        let bytes = around.bytes();
        let (head, tail) = (&bytes[..AROUND], &bytes[bytes.len() - AROUND..]);
        assert!(head == [SECRET; AROUND] && tail == [SECRET; AROUND], "memory around a transfer's was written");
        if !pull {
            let sent = &bytes[AROUND..bytes.len() - AROUND];
            assert!(sent.iter().all(|byte| *byte == 0x11), "what was pushed has changed");
        }
    }
}
