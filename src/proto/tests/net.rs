//! The network: carries out what the protocols ask for, in simulated time.

use std::time::{Duration, Instant};

use super::devices::DeviceMove;
use super::env::{Mem, Op, Random, TestLease, live};
use super::host::{Host, OperationId, content, served};
use super::wires::{Wire, WireItem};
use super::{AccessPolicy, CallSpec, Config, Failure, Mode, PeerId, PeerLimits, Rejected, Remote, Status};
use crate::Address;

/// Moments of time within which every story ends.
const MOMENTS: usize = 50_000;

pub struct Net {
    pub now: Instant,
    pub hosts: Vec<Host>,
    pub wires: Vec<Wire>,
    pub settings: NetSettings,
    /// What devices are at.
    pub moves: Vec<DeviceMove>,
    /// So many moves they have carried out.
    pub moved: usize,
    /// Which of the wires is next, where several have something; the first without it.
    pub random: Option<Random>,
    /// An address at which the test itself answers.
    pub played: Option<Address>,
    /// Whoever is dialled now does not answer at all.
    pub black_hole: bool,
    next_op: Op,
    next_incarnation: u64,
}

pub struct NetSettings {
    pub delay: Duration,
    /// Most bytes that arrive at a time.
    pub piece: usize,
    /// How long each piece but the last keeps the line busy.
    pub pace: Duration,
    /// Transmits are reported as sent when all has arrived; else at once.
    pub report_late: bool,
    /// Devices at both ends of new connections can move what they have keys for.
    pub devices: bool,
    /// How long a move takes.
    pub move_takes: Duration,
    /// Devices fail in the middle of each move.
    pub moves_fail: bool,
}

/// A call to be made.
pub struct TestCall {
    pub procedure: u32,
    pub name: &'static str,
    pub body: Vec<u8>,
    pub shape: &'static [u8],
    pub timeout: Duration,
    pub one_way: bool,
    pub leases: Vec<TestLease>,
}

pub fn call(body: impl Into<Vec<u8>>) -> TestCall {
    let timeout = Duration::from_secs(30);
    TestCall { procedure: 1, name: "echo", body: body.into(), shape: b"s", timeout, one_way: false, leases: Vec::new() }
}

/// The numbers that most stories go by.
pub fn config() -> Config {
    Config {
        max_message: 4 << 20,
        peer_timeout: Duration::from_secs(3),
        connect: Duration::from_secs(2),
        limits: limits(),
        remote_shutdown: false,
        key: None,
        checksums: false,
    }
}

pub fn limits() -> PeerLimits {
    PeerLimits {
        connections: 1000,
        handshakes: 100,
        peer_requests: 2000,
        requests: 100_000,
        peer_transfers: 2000,
        peer_bytes: 64 << 20,
        bytes: 256 << 20,
        exposures: 10_000,
    }
}

/// So many requests of a peer.
pub fn few(peer_requests: usize) -> PeerLimits {
    PeerLimits { peer_requests, ..limits() }
}

impl Net {
    /// So many hosts, all of which listen.
    pub fn new(hosts: usize) -> Net {
        Net::with(vec![(config(), true); hosts])
    }

    /// Hosts with these numbers, which listen or don't.
    pub fn with(hosts: Vec<(Config, bool)>) -> Net {
        let mut net = Net {
            now: Instant::now(),
            hosts: Vec::new(),
            wires: Vec::new(),
            settings: NetSettings {
                delay: Duration::from_micros(50),
                piece: usize::MAX,
                pace: Duration::ZERO,
                report_late: true,
                devices: false,
                move_takes: Duration::from_micros(100),
                moves_fail: false,
            },
            moves: Vec::new(),
            moved: 0,
            random: None,
            played: None,
            black_hole: false,
            next_op: 0,
            next_incarnation: 0x1000,
        };
        for (number, (config, listens)) in hosts.into_iter().enumerate() {
            let incarnation = net.incarnation();
            net.hosts.push(Host::new(number, incarnation, config, listens));
        }
        net
    }

    /// Two hosts; the second answers what it is asked.
    pub fn pair() -> Net {
        let mut net = Net::new(2);
        net.hosts[1].echo = true;
        net
    }

    fn incarnation(&mut self) -> u64 {
        self.next_incarnation += 1;
        self.next_incarnation
    }

    pub fn peer(&mut self, from: usize, to: usize) -> PeerId {
        let address = self.hosts[to].address.clone();
        let host = &mut self.hosts[from];
        let tag = host.proto.lookup(&address);
        let id = tag.id;
        host.tags.insert(address, tag);
        id
    }

    fn op(&mut self, host: usize) -> Op {
        self.next_op += 1;
        self.hosts[host].begun.push(self.next_op);
        self.next_op
    }

    pub fn call(&mut self, from: usize, to: usize, call: TestCall) -> Op {
        let peer = self.peer(from, to);
        self.call_peer(from, peer, call)
    }

    pub fn call_peer(&mut self, from: usize, peer: PeerId, call: TestCall) -> Op {
        let op = self.op(from);
        let now = self.now;
        let host = &mut self.hosts[from];
        host.leased.extend(call.leases.iter().cloned());
        let spec = CallSpec {
            peer,
            procedure: call.procedure,
            name: call.name,
            shape: call.shape,
            provider: 0,
            content: content(&call.body),
            leases: call.leases,
            deadline: now + call.timeout,
            timed: true,
            one_way: call.one_way,
            waiter: op,
        };
        match host.proto.call(spec, now) {
            Ok(id) => drop(host.ids.insert(op, OperationId::Call(id))),
            Err(Rejected::NoCredit(again, _)) => {
                // The engine would wait. Here that is an end.
                host.unleased.extend(again.leases);
                host.answered(op, Err(Failure::Refused(Status::Busy("no credit".into()))));
            }
            Err(Rejected::Failed(failure)) => host.answered(op, Err(failure)),
        }
        self.pump(from);
        op
    }

    /// Moves `memory.len()` bytes between it and what `owner` exposed under the token.
    pub fn transfer(&mut self, from: usize, owner: usize, pull: bool, (token, offset): (u128, u64), memory: &Mem) -> Op {
        let peer = self.peer(from, owner);
        let remote = Remote { peer, owner: self.hosts[owner].incarnation, token, offset, keys: None };
        self.transfer_to(from, pull, remote, memory, Duration::from_secs(30))
    }

    pub fn transfer_to(&mut self, from: usize, pull: bool, remote: Remote, memory: &Mem, timeout: Duration) -> Op {
        let op = self.op(from);
        let now = self.now;
        let host = &mut self.hosts[from];
        match host.proto.transfer(pull, remote, memory.clone(), Some(now + timeout), op, now) {
            Ok(id) => {
                host.ids.insert(op, OperationId::Transfer(id));
            }
            Err(failure) => host.moved(op, Err(failure)),
        }
        self.pump(from);
        op
    }

    pub fn pull(&mut self, from: usize, owner: usize, token: u128, offset: u64, memory: &Mem) -> Op {
        self.transfer(from, owner, true, (token, offset), memory)
    }

    pub fn push(&mut self, from: usize, owner: usize, token: u128, offset: u64, memory: &Mem) -> Op {
        self.transfer(from, owner, false, (token, offset), memory)
    }

    pub fn cancel(&mut self, host: usize, op: Op) {
        let id = self.hosts[host].ids.get(&op).copied();
        self.with_host(host, |host| match id {
            Some(OperationId::Call(id)) => host.proto.abandon_call(id, Failure::Cancelled),
            Some(OperationId::Transfer(id)) => host.proto.abandon_transfer(id, Failure::Cancelled),
            None => {}
        });
    }

    pub fn expose(&mut self, host: usize, token: u128, bytes: Vec<u8>, read: bool, write: bool) -> Mem {
        self.expose_on_terms(host, token, bytes, Mode { read, write }, AccessPolicy::default())
    }

    pub fn expose_on_terms(&mut self, host: usize, token: u128, bytes: Vec<u8>, mode: Mode, terms: AccessPolicy) -> Mem {
        let memory = Mem::new(bytes);
        let host = &mut self.hosts[host];
        host.proto.expose(token, memory.clone(), mode, terms);
        host.exposed.insert(token, memory.clone());
        memory
    }

    /// Takes exposed memory back, as the engine does: peers are locked out, then the gate is closed.
    pub fn revoke(&mut self, host: usize, token: u128) {
        self.hosts[host].proto.revoke(token);
        if let Some(memory) = self.hosts[host].exposed.remove(&token) {
            memory.close();
        }
        self.pump(host);
    }

    /// Answers the first request that waits, as an echoing host would.
    #[track_caller]
    pub fn serve(&mut self, host: usize) {
        let arrived = self.hosts[host].take();
        self.hosts[host].proto.release(arrived.link, arrived.leases);
        let _ = self.hosts[host].answer(arrived.request, &served(&arrived.body));
        self.pump(host);
    }

    /// The handlers of all requests that wait end without an answer.
    pub fn drop_requests(&mut self, host: usize) {
        for arrived in std::mem::take(&mut self.hosts[host].inbox) {
            self.with_host(host, |host| {
                host.proto.release(arrived.link, arrived.leases);
                host.refuse(arrived.request, Status::NoResponse);
            });
        }
    }

    pub fn echo_everywhere(&mut self) {
        self.hosts.iter_mut().for_each(|host| host.echo = true);
    }

    /// Has everything answered that waits at a host, and settles.
    pub fn settle_until_served(&mut self, host: usize) {
        while !self.hosts[host].inbox.is_empty() {
            self.serve(host);
        }
        self.settle();
    }

    /// One step of a host's protocol, and what follows from it.
    pub fn with_host<R>(&mut self, host: usize, step: impl FnOnce(&mut Host) -> R) -> R {
        let result = step(&mut self.hosts[host]);
        self.pump(host);
        result
    }

    /// The wire of a link of a host to another: the one that new operations take.
    pub fn wire(&mut self, from: usize, to: usize) -> usize {
        let peer = self.peer(from, to);
        let host = &self.hosts[from];
        let link = host.proto.peers[peer].link.expect("the peer is connected");
        host.wires[&link].0
    }

    /// The connection is lost, and both ends learn of it.
    pub fn cut(&mut self, wire: usize) {
        self.cut_at(wire, 0);
        self.cut_at(wire, 1);
    }

    /// The connection is lost, and one end learns of it; the other still believes in it.
    pub fn cut_at(&mut self, wire: usize, side: usize) {
        self.wires[wire].frozen = true;
        let end = &mut self.wires[wire].ends[side];
        if let Some(link) = end.link.take() {
            let host = end.host;
            self.hosts[host].wires.remove(&link);
            let cause = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "cut by the test");
            self.hosts[host].proto.handle_closed(link, cause);
            self.pump(host);
        }
    }

    /// The host dies, and another engine begins at its address. Its connections end, and peers learn of it if `told`.
    pub fn restart(&mut self, number: usize, told: bool) {
        for wire in &mut self.wires {
            let Some(side) = wire.ends.iter().position(|end| end.host == number) else { continue };
            wire.ends[side].link = None;
            wire.frozen |= !told;
            wire.ends[side].outgoing.push_back((self.now, WireItem::Closed));
        }
        self.moves.retain(|each| each.host != number);
        let incarnation = self.incarnation();
        let (config, listens) = (self.hosts[number].config.clone(), self.hosts[number].listens);
        let echo = self.hosts[number].echo;
        self.hosts[number] = Host::new(number, incarnation, config, listens);
        self.hosts[number].echo = echo;
    }

    /// Lets time pass.
    pub fn advance(&mut self, time: Duration) {
        let until = self.now + time;
        for _ in 0..MOMENTS {
            self.run();
            match self.next_event().filter(|at| *at <= until) {
                Some(at) => self.move_to(at),
                None => {
                    self.now = until;
                    return;
                }
            }
        }
        panic!("too much happens in {time:?}");
    }

    /// Lets time pass until nothing is left that could happen.
    #[track_caller]
    pub fn settle(&mut self) {
        for _ in 0..MOMENTS {
            self.run();
            match self.next_event() {
                Some(at) => self.move_to(at),
                None => return,
            }
        }
        panic!("it never gets quiet");
    }

    /// Lets time pass until `done`, for no longer than `limit`; false when that was not enough.
    pub fn until(&mut self, limit: Duration, done: impl Fn(&Net) -> bool) -> bool {
        let end = self.now + limit;
        loop {
            self.run();
            if done(self) {
                return true;
            }
            match self.next_event().filter(|at| *at <= end) {
                Some(at) => self.move_to(at),
                None => return false,
            }
        }
    }

    /// Settles, and asserts that nothing is left over. Connections that are open at one end only, where nothing is waited
    /// for, are the system's to end: its keep-alive does.
    #[track_caller]
    pub fn end(mut self) {
        self.settle();
        for wire in 0..self.wires.len() {
            if self.wires[wire].frozen {
                self.cut(wire);
            }
        }
        self.settle();
        assert!(self.moves.is_empty(), "devices are still at something");
        for (number, host) in self.hosts.iter_mut().enumerate() {
            let wrong = host.inspect();
            assert!(wrong.is_empty(), "left over at host {number}: {wrong:#?}");
        }
        drop(self);
        assert_eq!(live(), 0, "bytes allocated and not freed");
    }

    fn move_to(&mut self, at: Instant) {
        self.now = self.now.max(at);
        self.run();
        for host in 0..self.hosts.len() {
            if self.hosts[host].proto.next_timeout().is_some_and(|due| due <= self.now) {
                self.hosts[host].proto.handle_timeout(self.now);
                self.pump(host);
            }
        }
    }
}
