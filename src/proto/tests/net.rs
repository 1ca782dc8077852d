//! The simulated network: executes the outputs of the protocols in simulated time.

use std::time::{Duration, Instant};

use super::devices::DeviceRma;
use super::env::{Mem, Op, Random, TestLease, live};
use super::host::{Host, OperationId, content, served};
use super::wires::{Wire, WireItem};
use super::{AccessPolicy, CallSpec, Config, Failure, Mode, PeerId, PeerLimits, Rejected, Remote, Status};
use crate::{Address, TraceContext};

/// Events within which every test must end.
const MAX_EVENTS: usize = 50_000;

pub struct Net {
    pub now: Instant,
    pub hosts: Vec<Host>,
    pub wires: Vec<Wire>,
    pub settings: NetSettings,
    /// RMA operations in progress.
    pub rma_operations: Vec<DeviceRma>,
    /// How many RMA operations have succeeded.
    pub rma_completed: usize,
    /// Chooses the next wire if several have data; without it, the first.
    pub random: Option<Random>,
    /// An address at which the test itself accepts connections.
    pub test_address: Option<Address>,
    /// Connection attempts get no reply at all.
    pub black_hole: bool,
    next_op: Op,
    next_incarnation: u64,
}

pub struct NetSettings {
    pub delay: Duration,
    /// Most bytes that arrive at a time.
    pub piece: usize,
    /// How long each piece but the last keeps the wire busy.
    pub pace: Duration,
    /// Transmits are reported as sent when all bytes have arrived; else at once.
    pub report_late: bool,
    /// New connections can send a few bytes at once.
    pub injects: bool,
    /// New connections have RMA devices at both ends.
    pub devices: bool,
    /// The transport keeps small messages waiting behind bulk data.
    pub lanes: bool,
    /// How long an RMA operation takes.
    pub rma_duration: Duration,
    /// Devices fail in the middle of each RMA operation.
    pub rma_fails: bool,
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
    pub trace: Option<TraceContext>,
    /// Memory that is sent in place of `body`, while its owner may still close it.
    pub memory: Option<Mem>,
}

pub fn call(body: impl Into<Vec<u8>>) -> TestCall {
    let timeout = Duration::from_secs(30);
    let (body, leases) = (body.into(), Vec::new());
    TestCall { procedure: 1, name: "echo", body, shape: b"s", timeout, one_way: false, leases, trace: None, memory: None }
}

/// The configuration of most tests.
pub fn config() -> Config {
    Config {
        max_message: 4 << 20,
        peer_timeout: Duration::from_secs(3),
        connect: Duration::from_secs(2),
        limits: limits(),
        remote_shutdown: false,
        key: None,
        checksums: false,
        idle_timeout: None,
        filters_dials: false,
        lanes: 1,
        worth_a_lane: super::WORTH_A_LANE,
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

/// Limits with this many requests per peer.
pub fn few(peer_requests: usize) -> PeerLimits {
    PeerLimits { peer_requests, ..limits() }
}

impl Net {
    /// This many hosts, which all listen.
    pub fn new(hosts: usize) -> Net {
        Net::with(vec![(config(), true); hosts])
    }

    /// Hosts with these configurations, which listen or don't.
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
                injects: false,
                devices: false,
                lanes: false,
                rma_duration: Duration::from_micros(100),
                rma_fails: false,
            },
            rma_operations: Vec::new(),
            rma_completed: 0,
            random: None,
            test_address: None,
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

    /// Two hosts; the second answers requests at once.
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
        let mut spec = CallSpec {
            peer,
            label: 0,
            procedure: call.procedure,
            name: call.name,
            shape: call.shape,
            provider: 0,
            content: call.memory.map_or_else(|| content(&call.body), |memory| super::OutgoingBody::Large(memory, None)),
            leases: call.leases,
            deadline: now + call.timeout,
            trace: call.trace.as_ref(),
            timed: true,
            one_way: call.one_way,
            waiter: &op,
        };
        match host.proto.call(&mut spec, now) {
            Ok(id) => drop(host.ids.insert(op, OperationId::Call(id))),
            Err(Rejected::NoCredit(_)) => {
                // The engine would wait. Here the call fails.
                host.unleased.append(&mut spec.leases);
                host.call_done(op, Err(Failure::Refused(Status::Busy("no credit".into()))));
            }
            Err(Rejected::Failed(failure)) => host.call_done(op, Err(*failure)),
        }
        self.pump(from);
        op
    }

    /// Transfers `memory.len()` bytes between it and what `owner` exposed under the token.
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
            Err(failure) => host.transfer_done(op, Err(failure)),
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
        self.expose_with_policy(host, token, bytes, Mode { read, write }, AccessPolicy::default())
    }

    pub fn expose_with_policy(&mut self, host: usize, token: u128, bytes: Vec<u8>, mode: Mode, policy: AccessPolicy) -> Mem {
        let memory = Mem::new(bytes);
        let host = &mut self.hosts[host];
        host.proto.expose(token, memory.clone(), mode, &policy);
        host.exposed.insert(token, memory.clone());
        memory
    }

    /// Revokes exposed memory, as the engine does: the token first, then the gate is closed.
    pub fn revoke(&mut self, host: usize, token: u128) {
        self.hosts[host].proto.revoke(token);
        if let Some(memory) = self.hosts[host].exposed.remove(&token) {
            memory.close();
        }
        self.pump(host);
    }

    /// Answers the first request that waits, as a host with `echo` does.
    #[track_caller]
    pub fn serve(&mut self, host: usize) {
        let arrived = self.hosts[host].take();
        self.hosts[host].proto.release(arrived.link, arrived.leases);
        let _ = self.hosts[host].answer(arrived.request, &served(&arrived.body));
        self.pump(host);
    }

    /// The handlers of all waiting requests end without a response.
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

    /// Answers all requests that wait at a host, and settles.
    pub fn settle_until_served(&mut self, host: usize) {
        while !self.hosts[host].inbox.is_empty() {
            self.serve(host);
        }
        self.settle();
    }

    /// One step of a host's protocol, and the execution of its outputs.
    pub fn with_host<R>(&mut self, host: usize, step: impl FnOnce(&mut Host) -> R) -> R {
        let result = step(&mut self.hosts[host]);
        self.pump(host);
        result
    }

    /// The wire from a host to another that new operations take.
    pub fn wire(&mut self, from: usize, to: usize) -> usize {
        let peer = self.peer(from, to);
        let host = &self.hosts[from];
        let link = host.proto.peers[peer].link.expect("the peer is connected");
        host.wires[&link].0
    }

    /// The connection is lost, and both ends are notified.
    pub fn cut(&mut self, wire: usize) {
        self.cut_at(wire, 0);
        self.cut_at(wire, 1);
    }

    /// The connection is lost, and one end is notified; for the other it looks open.
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

    /// The host dies, and another engine starts at its address. Its connections end, and peers are notified if `notified`.
    pub fn restart(&mut self, number: usize, notified: bool) {
        for wire in &mut self.wires {
            let Some(side) = wire.ends.iter().position(|end| end.host == number) else { continue };
            wire.ends[side].link = None;
            wire.frozen |= !notified;
            wire.ends[side].outgoing.push_back((self.now, WireItem::Closed));
        }
        self.rma_operations.retain(|each| each.host != number);
        let incarnation = self.incarnation();
        let (config, listens) = (self.hosts[number].config.clone(), self.hosts[number].listens);
        let echo = self.hosts[number].echo;
        self.hosts[number] = Host::new(number, incarnation, config, listens);
        self.hosts[number].echo = echo;
    }

    /// Lets time pass.
    pub fn advance(&mut self, time: Duration) {
        let until = self.now + time;
        for _ in 0..MAX_EVENTS {
            self.run();
            match self.next_event().filter(|at| *at <= until) {
                Some(at) => self.advance_to(at),
                None => {
                    self.now = until;
                    return;
                }
            }
        }
        panic!("more than {MAX_EVENTS} events in {time:?}");
    }

    /// Lets time pass until no event is left.
    #[track_caller]
    pub fn settle(&mut self) {
        for _ in 0..MAX_EVENTS {
            self.run();
            match self.next_event() {
                Some(at) => self.advance_to(at),
                None => return,
            }
        }
        panic!("more than {MAX_EVENTS} events");
    }

    /// Lets time pass until `done`, for at most `limit`; false if `done` does not hold then.
    pub fn until(&mut self, limit: Duration, done: impl Fn(&Net) -> bool) -> bool {
        let end = self.now + limit;
        loop {
            self.run();
            if done(self) {
                return true;
            }
            match self.next_event().filter(|at| *at <= end) {
                Some(at) => self.advance_to(at),
                None => return false,
            }
        }
    }

    /// Settles, and asserts that nothing is left over. Idle connections that are open at one end only are left to the
    /// keep-alive of the operating system.
    #[track_caller]
    pub fn end(mut self) {
        self.settle();
        for wire in 0..self.wires.len() {
            if self.wires[wire].frozen {
                self.cut(wire);
            }
        }
        self.settle();
        assert!(self.rma_operations.is_empty(), "RMA operations are in progress");
        for (number, host) in self.hosts.iter_mut().enumerate() {
            let violations = host.inspect();
            assert!(violations.is_empty(), "left over at host {number}: {violations:#?}");
        }
        drop(self);
        assert_eq!(live(), 0, "bytes allocated and not freed");
    }

    fn advance_to(&mut self, at: Instant) {
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
