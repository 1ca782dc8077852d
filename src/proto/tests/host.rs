//! One engine of a test: its protocol, and all that the protocol told it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::env::{Mem, Op, TestEnv, TestLease};
use super::{Answer, Body, CallId, Config, Failure, Incoming, LeaseRange, LinkId, Log, Memory, OutgoingBody, PeerTag, Proto};
use super::{Reply, RequestId, Status, TransferId};
use crate::Address;

pub struct Host {
    pub proto: Proto<TestEnv>,
    pub config: Config,
    pub incarnation: u64,
    pub address: Address,
    pub listens: bool,
    /// Where this end of each link is: wire and side.
    pub wires: HashMap<LinkId, (usize, usize)>,
    /// Requests are answered as they come, with [`served`].
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
    /// Refusals that were to be logged.
    pub log: Vec<Log>,
    /// Requests that this host has heard of: it will answer them, or has.
    pub delivered: HashSet<RequestId>,
    pub shutdowns: usize,
    /// Links whose payloads are to have checksums.
    pub covered: Vec<LinkId>,
    pub exposed: HashMap<u128, Mem>,
    /// Memory that the values in each request take; those of one-way calls that find none wait for it.
    pub values: usize,
    /// Peers that the host holds on to.
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
    Moved(usize),
    Failed(Failure),
}

/// A request as it came.
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
}

/// What an echoing host answers.
pub fn served(body: &[u8]) -> Vec<u8> {
    body.iter().map(|byte| byte ^ 0x5a).collect()
}

/// Bodies longer than this travel as streams.
pub const EAGER: usize = 16 << 10;

/// The number of the type of every answer. Procedures have others.
const RESULT: u32 = 1 << 20;

/// An answer, of the type that all of them are.
pub fn reply(body: &[u8], leases: Vec<TestLease>) -> Reply<'_, TestEnv> {
    Reply { content: content(body), result: RESULT, shape: b"r", leases }
}

/// The body as the engine hands it to the protocol.
pub fn content(body: &[u8]) -> OutgoingBody<'_, Mem> {
    if body.len() > EAGER { OutgoingBody::Large(Mem::new(body.to_vec())) } else { OutgoingBody::Small(body) }
}

fn body_of(body: &Body<Mem>) -> (Vec<u8>, bool) {
    match body {
        Body::Small(bytes) => (bytes.clone(), false),
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
            proto.set_addresses(vec![address.clone()]);
        }
        Host {
            proto,
            config,
            incarnation,
            address,
            listens,
            wires: HashMap::new(),
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
            shutdowns: 0,
            covered: Vec::new(),
            exposed: HashMap::new(),
            values: 0,
            tags: HashMap::new(),
        }
    }

    pub fn answered(&mut self, op: Op, result: Result<Answer<TestEnv>, Failure>) {
        let outcome = match result {
            Ok(answer) => {
                let (body, _) = body_of(&answer.body);
                let shape = answer.declaration.map_or_else(Vec::new, |declaration| declaration.shape.to_vec());
                TestOutcome::Answered { body, shape, leases: answer.leases, link: answer.link }
            }
            Err(failure) => TestOutcome::Failed(failure),
        };
        self.outcomes.entry(op).or_default().push(outcome);
    }

    pub fn moved(&mut self, op: Op, result: Result<usize, Failure>) {
        let outcome = result.map_or_else(TestOutcome::Failed, TestOutcome::Moved);
        self.outcomes.entry(op).or_default().push(outcome);
    }

    pub fn request(&mut self, incoming: Incoming<TestEnv>) {
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
        let (body, large) = body_of(&incoming.body);
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
        };
        if self.echo {
            self.proto.release(arrived.link, arrived.leases);
            let answer = served(&arrived.body);
            // That the caller has gone meanwhile is no error here.
            let _ = self.answer(arrived.request, &answer);
        } else {
            self.inbox.push(arrived);
        }
    }

    pub fn answer(&mut self, request: RequestId, body: &[u8]) -> Result<(), Failure> {
        self.proto.respond(request, Ok(reply(body, Vec::new())))
    }

    pub fn refuse(&mut self, request: RequestId, status: Status) {
        let _ = self.proto.respond(request, Err(status));
    }

    /// The first request that has the test's attention next.
    #[track_caller]
    pub fn take(&mut self) -> ArrivedRequest {
        assert!(!self.inbox.is_empty(), "no request has arrived");
        self.inbox.remove(0)
    }

    /// How the operation ended, `None` while it has not; a second end is an error at once.
    #[track_caller]
    pub fn outcome(&self, op: Op) -> Option<&TestOutcome> {
        let ends = self.outcomes.get(&op)?;
        assert_eq!(ends.len(), 1, "operation {op} ended {} times: {ends:?}", ends.len());
        ends.first()
    }

    pub fn is_done(&self, op: Op) -> bool {
        self.outcomes.contains_key(&op)
    }

    /// The body of the answer to a call that was answered.
    #[track_caller]
    pub fn body(&self, op: Op) -> &[u8] {
        match self.outcome(op) {
            Some(TestOutcome::Answered { body, .. }) => body,
            other => panic!("operation {op} was not answered: {other:?}"),
        }
    }

    /// Why an operation failed.
    #[track_caller]
    pub fn failure(&self, op: Op) -> &Failure {
        match self.outcome(op) {
            Some(TestOutcome::Failed(failure)) => failure,
            other => panic!("operation {op} did not fail: {other:?}"),
        }
    }

    /// How many of these the protocol says are left over.
    pub fn left(&self, what: &str) -> usize {
        let left = self.proto.leftovers();
        let found = left.iter().find_map(|left| left.strip_suffix(what)?.strip_suffix(' ')?.parse().ok());
        found.unwrap_or(0)
    }

    /// What must hold of every host at the end of a test.
    pub fn inspect(&self) -> Vec<String> {
        let mut wrong = self.proto.leftovers();
        for op in &self.begun {
            let ends = self.outcomes.get(op).map_or(0, Vec::len);
            if ends != 1 {
                wrong.push(format!("operation {op} ended {ends} times"));
            }
        }
        if self.outcomes.len() > self.begun.len() {
            wrong.push("operations ended that nobody began".to_owned());
        }
        let sorted = |tickets: &[TestLease]| {
            let mut numbers: Vec<_> = tickets.iter().map(|ticket| ticket.number).collect();
            numbers.sort_unstable();
            numbers
        };
        if sorted(&self.leased) != sorted(&self.unleased) {
            wrong.push(format!("leases given {:?}, come back {:?}", sorted(&self.leased), sorted(&self.unleased)));
        }
        if let Some(at) = self.proto.next_timeout() {
            wrong.push(format!("a timer, for {at:?}"));
        }
        for (id, request) in &self.proto.requests {
            if request.body.is_none() && !self.delivered.contains(&id) {
                wrong.push(format!("{id:?} is kept for a handler that has never heard of it"));
            }
        }
        for request in &self.cancelled {
            if self.proto.is_wanted(*request) {
                wrong.push(format!("{request:?} was cancelled, and is wanted"));
            }
        }
        wrong
    }
}

/// Asserts that an operation failed in this way.
macro_rules! assert_failed {
    ($host:expr, $op:expr, $pattern:pat $(if $guard:expr)?) => {
        match $host.failure($op) {
            $pattern $(if $guard)? => {}
            other => panic!("expected {}, not {other:?}", stringify!($pattern)),
        }
    };
}
pub(super) use assert_failed;
