//! One engine of a test: its protocol, and what the protocol has output.

use crate::address::Interfaces;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::env::{Mem, Op, TestCarrier, TestEnv, TestLease};
use super::{
    Answer, Body, CallId, Config, Failure, Incoming, LeaseRange, LinkId, Log, Memory, OutgoingBody, PeerId, PeerTag, Placed,
    Proto,
};
use super::{Reply, RequestId, Status, TrailingList, TransferId};
use crate::{Address, TraceContext};

pub struct Host {
    pub proto: Proto<TestEnv>,
    pub config: Config,
    pub incarnation: u64,
    pub address: Address,
    pub listens: bool,
    /// The wire and side of each link.
    pub wires: HashMap<LinkId, (usize, usize)>,
    /// What carries each link, where bytes may be sent at once.
    pub carriers: HashMap<LinkId, TestCarrier>,
    /// Requests are answered at once, with [`served`].
    pub echo: bool,
    /// Requests that wait for the test to answer them.
    pub inbox: Vec<ArrivedRequest>,
    pub begun: Vec<Op>,
    pub ids: HashMap<Op, OperationId>,
    pub outcomes: HashMap<Op, Vec<TestOutcome>>,
    pub cancelled: Vec<RequestId>,
    pub unleased: Vec<TestLease>,
    pub leased: Vec<TestLease>,
    pub stale: Vec<u128>,
    /// Lines that the protocol has output for the log.
    pub log: Vec<Log>,
    /// Requests that were delivered to this host.
    pub delivered: HashSet<RequestId>,
    /// The bodies of one-way calls, in the order of their delivery.
    pub notices: Vec<Vec<u8>>,
    pub shutdowns: usize,
    /// The peers that are reported as connected.
    pub connected: HashSet<PeerId>,
    /// How many connections are reported as closed because they were idle.
    pub idle: usize,
    /// Links whose payloads are to have checksums.
    pub covered: Vec<LinkId>,
    /// How many sleeping peers were to be woken.
    pub woken: usize,
    /// How many transmits the host has been asked for.
    pub transmits: usize,
    /// How many of them another one follows at once.
    pub followed: usize,
    pub exposed: HashMap<u128, Mem>,
    /// Memory that the values in each request take; those of one-way calls that find none wait for it.
    pub values: usize,
    /// References that keep the host's peers from being forgotten.
    pub tags: HashMap<Address, Arc<PeerTag>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationId {
    Call(CallId),
    Transfer(TransferId),
}

/// How an operation ended.
#[derive(Debug)]
pub enum TestOutcome {
    Answered { body: Vec<u8>, shape: Vec<u8>, leases: LeaseRange, link: LinkId },
    Transferred(usize),
    Failed(Failure),
}

/// A request that was delivered.
#[derive(Debug)]
pub struct ArrivedRequest {
    pub request: RequestId,
    pub link: LinkId,
    pub peer: Arc<PeerTag>,
    pub name: String,
    pub provider: u16,
    pub body: Vec<u8>,
    pub large: bool,
    pub shape: Vec<u8>,
    pub one_way: bool,
    pub deadline: Option<Instant>,
    pub leases: LeaseRange,
    pub trace: Option<TraceContext>,
}

/// The response of a host with `echo`.
pub fn served(body: &[u8]) -> Vec<u8> {
    body.iter().map(|byte| byte ^ 0x5a).collect()
}

/// Bodies longer than this travel as streams.
pub const EAGER: usize = 16 << 10;

/// The declaration number of the type of every response. Procedures have others.
const RESULT: u32 = 1 << 20;

/// A response; all responses have the same type.
pub fn reply(body: &[u8], leases: Vec<TestLease>) -> Reply<'_, TestEnv> {
    Reply { content: content(body), result: RESULT, shape: b"r", leases }
}

/// The body as the engine passes it to the protocol.
pub fn content(body: &[u8]) -> OutgoingBody<'_, Mem> {
    if body.len() > EAGER { OutgoingBody::Large(Mem::new(body.to_vec()), list_of(body.len())) } else { OutgoingBody::Small(body) }
}

/// What a large body of this length ends with: some have a list.
pub fn list_of(len: usize) -> Option<TrailingList> {
    len.is_multiple_of(2).then_some(TrailingList { head: 1 + len as u64 % 7, width: 1 })
}

fn body_of(body: &Body<Mem>) -> (Vec<u8>, bool) {
    match body {
        Body::Small(bytes) => (bytes.to_vec(), false),
        Body::Large(memory) => {
            assert_eq!(memory.len(), memory.bytes().len());
            (memory.bytes(), true)
        }
    }
}

impl Host {
    pub fn new(number: usize, incarnation: u64, config: Config, listens: bool) -> Host {
        let address: Address = format!("tcp://10.0.0.{}:7000", number + 1).parse().unwrap();
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&incarnation.to_le_bytes());
        let mut proto = Proto::new(config.clone(), incarnation, seed);
        if listens {
            proto.set_addresses(vec![address.clone()], &Interfaces::default());
        }
        Host {
            proto,
            config,
            incarnation,
            address,
            listens,
            wires: HashMap::new(),
            carriers: HashMap::new(),
            echo: false,
            inbox: Vec::new(),
            begun: Vec::new(),
            ids: HashMap::new(),
            outcomes: HashMap::new(),
            cancelled: Vec::new(),
            unleased: Vec::new(),
            leased: Vec::new(),
            stale: Vec::new(),
            log: Vec::new(),
            delivered: HashSet::new(),
            notices: Vec::new(),
            shutdowns: 0,
            connected: HashSet::new(),
            idle: 0,
            covered: Vec::new(),
            woken: 0,
            transmits: 0,
            followed: 0,
            exposed: HashMap::new(),
            values: 0,
            tags: HashMap::new(),
        }
    }

    pub fn call_done(&mut self, op: Op, result: Result<Placed<Answer<TestEnv>>, Failure>) {
        let outcome = match result {
            Ok(answer) => {
                let (answer, _) = answer.take();
                let (body, _) = body_of(&answer.body);
                let shape = answer.declaration.map_or_else(Vec::new, |declaration| declaration.shape.to_vec());
                TestOutcome::Answered { body, shape, leases: answer.leases, link: answer.link }
            }
            Err(failure) => TestOutcome::Failed(failure),
        };
        self.outcomes.entry(op).or_default().push(outcome);
    }

    pub fn transfer_done(&mut self, op: Op, result: Result<usize, Failure>) {
        let outcome = result.map_or_else(TestOutcome::Failed, TestOutcome::Transferred);
        self.outcomes.entry(op).or_default().push(outcome);
    }

    pub fn request(&mut self, incoming: Placed<Incoming<TestEnv>>) {
        self.delivered.insert(incoming.request);
        if self.values > 0 {
            match self.proto.admit_values(incoming.request, self.values) {
                Ok(_) => {}
                Err(Status::Busy(_)) if incoming.one_way => return self.proto.park(incoming, self.values),
                Err(status) => {
                    self.proto.release(incoming.link, incoming.leases);
                    return self.refuse(incoming.request, status);
                }
            }
        }
        let (incoming, _) = incoming.take();
        let (body, large) = body_of(&incoming.body);
        if incoming.one_way {
            self.notices.push(body.clone());
        }
        let arrived = ArrivedRequest {
            request: incoming.request,
            link: incoming.link,
            peer: incoming.peer,
            name: incoming.declaration.name.to_string(),
            provider: incoming.provider,
            body,
            large,
            shape: incoming.declaration.shape.to_vec(),
            one_way: incoming.one_way,
            deadline: incoming.deadline,
            leases: incoming.leases,
            trace: incoming.trace.as_deref().cloned(),
        };
        if self.echo {
            self.proto.release(arrived.link, arrived.leases);
            let answer = served(&arrived.body);
            // It is no error if the caller has disconnected meanwhile.
            let _ = self.answer(arrived.request, &answer);
        } else {
            self.inbox.push(arrived);
        }
    }

    pub fn answer(&mut self, request: RequestId, body: &[u8]) -> Result<(), Failure> {
        self.proto.respond(request, Ok(&mut reply(body, Vec::new())))
    }

    pub fn refuse(&mut self, request: RequestId, status: Status) {
        let _ = self.proto.respond(request, Err(status));
    }

    /// Takes the first request that waits.
    #[track_caller]
    pub fn take(&mut self) -> ArrivedRequest {
        assert!(!self.inbox.is_empty(), "no request has arrived");
        self.inbox.remove(0)
    }

    /// How the operation ended, or `None` while it is in progress; panics if it has ended twice.
    #[track_caller]
    pub fn outcome(&self, op: Op) -> Option<&TestOutcome> {
        let ends = self.outcomes.get(&op)?;
        assert_eq!(ends.len(), 1, "operation {op} ended {} times: {ends:?}", ends.len());
        ends.first()
    }

    pub fn is_done(&self, op: Op) -> bool {
        self.outcomes.contains_key(&op)
    }

    /// The body of the response; panics if the call did not succeed.
    #[track_caller]
    pub fn body(&self, op: Op) -> &[u8] {
        match self.outcome(op) {
            Some(TestOutcome::Answered { body, .. }) => body,
            other => panic!("operation {op} was not answered: {other:?}"),
        }
    }

    /// Why an operation failed; panics if it did not fail.
    #[track_caller]
    pub fn failure(&self, op: Op) -> &Failure {
        match self.outcome(op) {
            Some(TestOutcome::Failed(failure)) => failure,
            other => panic!("operation {op} did not fail: {other:?}"),
        }
    }

    /// How many of these the protocol reports as left over.
    pub fn left(&self, what: &str) -> usize {
        let left = self.proto.leftovers();
        let found = left.iter().find_map(|left| left.strip_suffix(what)?.strip_suffix(' ')?.parse().ok());
        found.unwrap_or(0)
    }

    /// Violations of what must hold for every host at the end of a test.
    pub fn inspect(&self) -> Vec<String> {
        let mut violations = self.proto.leftovers();
        for op in &self.begun {
            let ends = self.outcomes.get(op).map_or(0, Vec::len);
            if ends != 1 {
                violations.push(format!("operation {op} ended {ends} times"));
            }
        }
        if self.outcomes.len() > self.begun.len() {
            violations.push("operations ended that were never started".to_owned());
        }
        let sorted = |leases: &[TestLease]| {
            let mut numbers: Vec<_> = leases.iter().map(|lease| lease.number).collect();
            numbers.sort_unstable();
            numbers
        };
        if sorted(&self.leased) != sorted(&self.unleased) {
            violations.push(format!("leases granted {:?}, returned {:?}", sorted(&self.leased), sorted(&self.unleased)));
        }
        if let Some(at) = self.proto.next_timeout() {
            violations.push(format!("a timer, for {at:?}"));
        }
        for (id, request) in &self.proto.requests {
            if request.body.is_none() && !self.delivered.contains(&id) {
                violations.push(format!("{id:?} is kept without having been delivered to a handler"));
            }
        }
        for request in &self.cancelled {
            if self.proto.is_wanted(*request) {
                violations.push(format!("{request:?} was cancelled, but counts as wanted"));
            }
        }
        violations
    }
}

/// Asserts that an operation failed with an error that matches the pattern.
macro_rules! assert_failed {
    ($host:expr, $op:expr, $pattern:pat $(if $guard:expr)?) => {
        match $host.failure($op) {
            $pattern $(if $guard)? => {}
            other => panic!("expected {}, not {other:?}", stringify!($pattern)),
        }
    };
}
pub(super) use assert_failed;
