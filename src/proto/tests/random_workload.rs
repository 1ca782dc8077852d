//! Random workloads of all operations and faults: each operation ends exactly once, with the right bytes or with an error,
//! and at the end nothing is left over.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::devices::keys;
use super::env::{Mem, Op, Random, TestLease, pattern};
use super::host::{ArrivedRequest, TestOutcome, reply, served};
use super::net::{Net, TestCall, call, config, few};
use super::{Config, LeaseRange, LinkId, Mode, Remote, Status};

const HOSTS: usize = 3;
const STEPS: usize = 4000;

struct Workload {
    net: Net,
    random: Random,
    next: u64,
    /// Host, incarnation and number of each operation, and its result if it succeeds.
    begun: Vec<(usize, u64, Op, ExpectedResult)>,
    /// Bodies that have reached a handler.
    delivered: HashSet<u64>,
    /// Leases that hosts hold.
    held: Vec<(usize, u64, LinkId, LeaseRange)>,
    /// Calls whose leases are among those.
    leases_recorded: HashSet<Op>,
    counts: HashMap<&'static str, usize>,
}

enum ExpectedResult {
    Call { number: u64, len: usize, one_way: bool },
    Pull { near: Mem, expected: Vec<u8> },
    Push { far: Mem, source: Mem },
}

/// Prints the seed if the test fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the workload of seed {} failed", self.0);
        }
    }
}

#[test]
fn every_operation_ends_exactly_once() {
    let mut counts = HashMap::new();
    for seed in seeds() {
        let _seed = Seed(seed);
        for (what, count) in workload(seed) {
            *counts.entry(what).or_insert(0) += count;
        }
    }
    // A workload without successes, or without failures, tests nothing.
    for what in ["answered", "pulled", "pushed", "rma", "failed", "restarts", "cuts", "idle"] {
        assert!(counts.get(what).is_some_and(|count| *count > 10), "too few {what}: {counts:?}");
    }
}

/// `CALOMEL_WORKLOAD_SEEDS=from..to` selects other seeds than the default ones.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("CALOMEL_WORKLOAD_SEEDS") else { return 0..12 };
    let (from, to) = text.split_once("..").expect("CALOMEL_WORKLOAD_SEEDS is a range, such as 5..6");
    from.parse().unwrap()..to.parse().unwrap()
}

fn workload(seed: u64) -> HashMap<&'static str, usize> {
    let mut random = Random(seed);
    let idle_timeout = [None, Some(Duration::from_millis(1)), Some(Duration::from_millis(20))][seed as usize % 3];
    let config = Config { max_message: 600 << 10, limits: few(50), lanes: 2, worth_a_lane: 20_000, idle_timeout, ..config() };
    let mut net = Net::with(vec![(config, true); HOSTS]);
    net.random = Some(Random(seed + 1));
    net.settings.piece = [7, 1000, 40_000, 300_000][random.below(4)];
    net.settings.report_late = random.once_in(2);
    net.settings.injects = random.once_in(2);
    net.settings.devices = random.once_in(2);
    net.settings.lanes = random.once_in(2);
    // Tiny pieces take many steps.
    let most = if net.settings.piece < 100 { 2000 } else { 500_000 };
    let mut workload = Workload {
        net,
        random,
        next: 1,
        begun: Vec::new(),
        delivered: HashSet::new(),
        held: Vec::new(),
        leases_recorded: HashSet::new(),
        counts: HashMap::new(),
    };
    for _ in 0..STEPS {
        workload.step(most);
    }
    workload.finish()
}

impl Workload {
    fn step(&mut self, most: usize) {
        let host = self.random.below(HOSTS);
        let other = (host + 1 + self.random.below(HOSTS - 1)) % HOSTS;
        match self.random.below(1000) {
            0..100 => self.call(host, other, most),
            100..150 => self.transfer(host, other, most),
            150..170 => {
                if let Some(op) = self.random.pick(&self.net.hosts[host].begun).copied() {
                    self.net.cancel(host, op);
                }
            }
            170..300 => self.answer(host, most),
            300..330 => self.release_lease(),
            330..340 => self.revoke(host),
            340..344 => self.cut(),
            344..346 => {
                let wire = self.random.below(self.net.wires.len());
                if let Some(wire) = self.net.wires.get_mut(wire) {
                    wire.frozen = true;
                }
            }
            346 if self.random.once_in(2) => {
                let notified = self.random.once_in(2);
                self.net.restart(host, notified);
                self.count("restarts");
            }
            347 => self.net.black_hole = self.random.once_in(3),
            348..420 => {
                let time = Duration::from_micros(self.random.below(300) as u64);
                self.net.advance(time);
            }
            420 => self.net.advance(Duration::from_millis(self.random.below(2000) as u64)),
            _ => {
                if !self.net.step() {
                    self.net.advance(self.net.settings.delay / 3);
                }
            }
        }
        self.record_leases();
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_insert(0) += 1;
    }

    fn len(&mut self, most: usize) -> usize {
        match self.random.below(4) {
            0 => 0,
            1 => self.random.below(100),
            2 => self.random.below(20_000).min(most),
            _ => self.random.below(most),
        }
    }

    fn new_leases(&mut self, host: usize) -> Vec<TestLease> {
        let tokens: Vec<u128> = self.net.hosts[host].exposed.keys().copied().collect();
        let count = if self.random.once_in(3) { self.random.below(3) } else { 0 };
        (0..count)
            .map(|_| {
                self.next += 1;
                TestLease { token: self.random.pick(&tokens).copied().unwrap_or(1), number: self.next as u32 }
            })
            .collect()
    }

    /// Calls with a body that begins with its number, if there is room for that.
    fn call(&mut self, from: usize, to: usize, most: usize) {
        let (number, len) = (self.next, self.len(most));
        self.next += 1;
        let one_way = self.random.once_in(6);
        let timeout = Duration::from_millis(self.random.below(4000) as u64);
        let procedure = self.random.below(4) as u32;
        let name = ["a", "b", "c", "d"][procedure as usize];
        let leases = if len < 100 { Vec::new() } else { self.new_leases(from) };
        let what = TestCall { procedure, name, timeout, one_way, leases, ..call(body(number, len)) };
        let op = self.net.call(from, to, what);
        self.begun.push((from, self.net.hosts[from].incarnation, op, ExpectedResult::Call { number, len, one_way }));
    }

    fn transfer(&mut self, from: usize, owner: usize, most: usize) {
        let (token, len) = (u128::from(self.next), self.len(most));
        self.next += 1;
        let timeout = Duration::from_millis(self.random.below(4000) as u64);
        let peer = self.net.peer(from, owner);
        let offset = self.random.below(100) as u64;
        let keys = self.random.once_in(2).then(|| keys(token, Mode { read: true, write: true }));
        let remote = Remote { peer, owner: self.net.hosts[owner].incarnation, token, offset, keys };
        let pull = self.random.once_in(2);
        let source = pattern(token as u64, len + 200);
        let far = self.net.expose(owner, token, source.clone(), true, true);
        let near = Mem::new(vec![0x33; len]);
        let op = self.net.transfer_to(from, pull, remote, &near, timeout);
        let check = if pull {
            ExpectedResult::Pull { near, expected: source[offset as usize..][..len].to_vec() }
        } else {
            // The local memory is closed during the push.
            if self.random.once_in(10) {
                near.close();
            }
            ExpectedResult::Push { far, source: near }
        };
        self.begun.push((from, self.net.hosts[from].incarnation, op, check));
    }

    fn answer(&mut self, host: usize, most: usize) {
        let waiting = self.net.hosts[host].inbox.len();
        if waiting == 0 {
            return;
        }
        let at = self.random.below(waiting);
        let arrived = self.net.hosts[host].inbox.swap_remove(at);
        self.end_request(host, arrived, most);
    }

    fn end_request(&mut self, host: usize, arrived: ArrivedRequest, _most: usize) {
        if let Some(number) = arrived.body.first_chunk::<8>() {
            let number = u64::from_le_bytes(*number);
            assert!(self.delivered.insert(number), "a request was delivered twice");
            assert!(arrived.body == body(number, arrived.body.len()), "the arguments are corrupt");
        }
        self.held.push((host, self.net.hosts[host].incarnation, arrived.link, arrived.leases));
        if self.random.once_in(8) {
            return self.net.with_host(host, |host| host.refuse(arrived.request, Status::Failed("no".into())));
        }
        let leases = if arrived.body.len() < 100 { Vec::new() } else { self.new_leases(host) };
        let answer = served(&arrived.body);
        self.net.with_host(host, |host| {
            host.leased.extend(leases.iter().cloned());
            let mut reply = reply(&answer, leases.clone());
            let _ = host.proto.respond(arrived.request, Ok(&mut reply));
        });
    }

    fn release_lease(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let (host, incarnation, link, leases) = self.held.swap_remove(self.random.below(self.held.len()));
        if self.net.hosts[host].incarnation == incarnation {
            self.net.with_host(host, |host| host.proto.release(link, leases));
        }
    }

    fn revoke(&mut self, host: usize) {
        let mut tokens: Vec<u128> = self.net.hosts[host].exposed.keys().copied().collect();
        tokens.sort_unstable();
        if let Some(token) = self.random.pick(&tokens).copied() {
            self.net.revoke(host, token);
        }
    }

    fn cut(&mut self) {
        let wire = self.random.below(self.net.wires.len());
        if wire < self.net.wires.len() {
            match self.random.below(3) {
                0 => self.net.cut(wire),
                side => self.net.cut_at(wire, side - 1),
            }
            self.count("cuts");
        }
    }

    /// Records leases that came with responses.
    fn record_leases(&mut self) {
        for host in &self.net.hosts {
            for (op, ends) in &host.outcomes {
                if let [TestOutcome::Answered { leases, link, .. }] = ends[..]
                    && leases.count > 0
                    && self.leases_recorded.insert(*op)
                {
                    let number = self.net.hosts.iter().position(|other| std::ptr::eq(other, host)).unwrap_or(0);
                    self.held.push((number, host.incarnation, link, leases));
                }
            }
        }
    }

    fn finish(mut self) -> HashMap<&'static str, usize> {
        // Answers all requests, releases all leases, and lets all deadlines pass.
        self.net.black_hole = false;
        for _ in 0..3 {
            self.net.advance(Duration::from_secs(5));
            for host in 0..HOSTS {
                for arrived in std::mem::take(&mut self.net.hosts[host].inbox) {
                    self.end_request(host, arrived, 0);
                }
            }
            self.record_leases();
            while !self.held.is_empty() {
                self.release_lease();
            }
        }
        for host in 0..HOSTS {
            while !self.net.hosts[host].exposed.is_empty() {
                self.revoke(host);
            }
        }
        for (host, incarnation, op, check) in std::mem::take(&mut self.begun) {
            if self.net.hosts[host].incarnation == incarnation {
                let what = check.holds(self.net.hosts[host].outcome(op));
                self.count(what);
            }
        }
        self.counts.insert("rma", self.net.rma_completed);
        self.counts.insert("idle", self.net.hosts.iter().map(|host| host.idle).sum());
        // A connection that only one side has lost stays in use, if there are leases of memory to the other.
        self.net.advance(Duration::from_secs(1));
        for host in &mut self.net.hosts {
            let wires = &self.net.wires;
            let frozen = |link: &LinkId| host.wires.get(link).is_some_and(|(wire, _)| wires[*wire].frozen);
            let left: Vec<LinkId> = host.proto.links.keys().filter(|link| !frozen(link)).collect();
            assert!(left.is_empty() || host.config.idle_timeout.is_none(), "{left:?} are not closed");
            host.proto.config.idle_timeout = None;
        }
        self.net.end();
        self.counts
    }
}

fn body(number: u64, len: usize) -> Vec<u8> {
    let mut body = pattern(number, len);
    if let Some(head) = body.first_chunk_mut::<8>() {
        *head = number.to_le_bytes();
    }
    body
}

impl ExpectedResult {
    fn holds(&self, outcome: Option<&TestOutcome>) -> &'static str {
        match (self, outcome) {
            (_, Some(TestOutcome::Failed(_))) => "failed",
            (ExpectedResult::Call { one_way: true, .. }, Some(TestOutcome::Answered { .. })) => "noticed",
            (ExpectedResult::Call { number, len, .. }, Some(TestOutcome::Answered { body: answer, .. })) => {
                assert!(*answer == served(&body(*number, *len)), "the response is corrupt");
                "answered"
            }
            (ExpectedResult::Pull { near, expected }, Some(TestOutcome::Transferred(len))) => {
                assert_eq!(*len, expected.len());
                assert!(near.bytes() == *expected, "the pulled bytes are wrong");
                "pulled"
            }
            (ExpectedResult::Push { far, source }, Some(TestOutcome::Transferred(len))) => {
                assert!(far.bytes().windows((*len).max(1)).any(|part| part == source.bytes()) || *len == 0);
                "pushed"
            }
            (_, other) => panic!("{other:?}"),
        }
    }
}
