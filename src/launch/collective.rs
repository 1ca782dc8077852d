//! What the ranks do together, in a tree: values are collected towards rank 0, and the whole goes back down.
//!
//! ```text
//! parent                                        child
//! asks for the values of its subtree  -------->  answers when it has them
//!                                     <--------  asks for all values
//! answers when it has them
//! asks each child that has not asked  -------->  answers when it has all values
//! ```
//!
//! Both sides of an edge wait for an answer of the other, so each learns that the other has died as the caller of any call
//! does. The first failure ends the world: a rank that knows of it answers every question with it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::PROVIDER;
use super::wait::{Attempts, TimeLimit, wait_any};
use crate::sync::Mutex;
use crate::{Address, Endpoint, Engine, Error, Pending, Procedure, Responder, Result};

/// Ranks below each rank of the tree: 1,000 ranks are four levels, and each rank sends all values eight times at most.
const FAN_OUT: usize = 8;
/// The values of all ranks together, in bytes.
const TOTAL: usize = 4 << 20;

/// What is done together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Collective {
    Join,
    Barrier,
    AllGather,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::Join => "joining the world",
            Collective::Barrier => "barrier",
            Collective::AllGather => "all_gather",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum RankQuestion {
    /// Whether this is the rank.
    Hello,
    /// The values of the rank and those below it.
    Subtree,
    /// The values of all ranks.
    All,
    /// Whether the rank has the values of all ranks.
    Received,
}

/// What a rank asks of the next one in the tree, in either direction.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct RankAsk {
    question: RankQuestion,
    from: u32,
    to: u32,
    /// Operations are numbered.
    operation: u64,
    collective: Collective,
}

type RankValues = Vec<(u32, Vec<u8>)>;
pub(super) type RankReply = std::result::Result<RankValues, WorldFailure>;

/// Why a world has ended, as ranks tell each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum WorldFailure {
    /// A rank is dead, or has left.
    Lost { rank: u32, reason: String },
    /// A rank has not come by the deadline of another one.
    Late { rank: u32, after: Duration },
    /// A rank can't go on.
    Broken { rank: u32, message: String },
}

/// One rank's part of the tree.
pub(super) struct Member {
    rank: usize,
    addresses: Vec<Address>,
    state: Mutex<MemberState>,
}

#[derive(Default)]
struct MemberState {
    /// Of the operation in progress, or the next one.
    operation: u64,
    /// What this rank is doing.
    collective: Option<Collective>,
    /// The values of this rank and those below it, for the operation in progress.
    subtree: Option<RankValues>,
    /// The values of all ranks, of the operation before.
    newest: Option<(Collective, RankValues)>,
    /// The ranks that have got these, of those below this one.
    served: Vec<u32>,
    failure: Option<WorldFailure>,
    /// Questions that can't be answered yet: of the operation in progress, and the next one.
    waiting: Vec<(RankAsk, Responder<RankReply>)>,
}

impl MemberState {
    /// The answer, where there is one yet.
    fn answer(&mut self, rank: usize, ask: &RankAsk) -> Option<RankReply> {
        let broken = |message: String| Some(Err(WorldFailure::Broken { rank: rank as u32, message }));
        if ask.to as usize != rank {
            return broken(format!("it is rank {rank}, and rank {} takes it for rank {}", ask.from, ask.to));
        }
        let current = ask.operation == self.operation;
        let before = self.operation.checked_sub(1) == Some(ask.operation);
        let newest = self.newest.as_ref().filter(|_| before);
        let own = if current { self.collective } else { newest.map(|(collective, _)| *collective) };
        let differs = own.filter(|own| *own != ask.collective && ask.question != RankQuestion::Hello);
        if let Some(own) = differs {
            return broken(format!("it called {own} while rank {} called {}", ask.from, ask.collective));
        }
        let over = ask.operation < self.operation;
        match (ask.question, newest, &self.subtree, &self.failure) {
            (RankQuestion::Received, ..) if over => Some(Ok(Vec::new())),
            (RankQuestion::All, Some((_, values)), ..) => {
                // No longer than it has to be, whatever peers claim to be.
                if self.served.len() < FAN_OUT && !self.served.contains(&ask.from) {
                    self.served.push(ask.from);
                }
                Some(Ok(values.clone()))
            }
            (.., Some(failure)) => Some(Err(failure.clone())),
            (RankQuestion::Subtree, _, Some(values), None) if current => Some(Ok(values.clone())),
            (RankQuestion::Hello, ..) => Some(Ok(Vec::new())),
            _ if over => broken(format!("rank {} asks for operation {}, which is over", ask.from, ask.operation)),
            _ => None,
        }
    }
}

impl Member {
    pub(super) fn new(rank: usize, addresses: Vec<Address>) -> Arc<Member> {
        Arc::new(Member { rank, addresses, state: Mutex::default() })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// The next rank towards rank 0.
    fn parent(&self) -> Option<usize> {
        self.rank.checked_sub(1).map(|before| before / FAN_OUT)
    }

    fn children(&self) -> std::ops::Range<usize> {
        let size = self.addresses.len();
        let first = self.rank * FAN_OUT + 1;
        first.min(size)..(first + FAN_OUT).min(size)
    }

    /// Another rank asks: it is answered now or later.
    pub(super) fn asked(&self, reply: Responder<RankReply>, ask: RankAsk) {
        let answer = {
            let mut state = self.state.lock();
            let answer = state.answer(self.rank, &ask);
            match answer {
                Some(answer) => Some((reply, answer)),
                None => {
                    state.waiting.push((ask, reply));
                    None
                }
            }
        };
        // Without the lock, as below. A caller that is gone needs no answer.
        if let Some((reply, answer)) = answer {
            let _ = reply.respond(&answer);
        }
    }

    /// Changes the state, and answers what can be answered then.
    fn update<T>(&self, change: impl FnOnce(&mut MemberState) -> T) -> T {
        let (result, answers) = {
            let mut state = self.state.lock();
            let result = change(&mut state);
            let waiting = std::mem::take(&mut state.waiting);
            let mut answers = Vec::new();
            for (ask, reply) in waiting {
                match state.answer(self.rank, &ask) {
                    Some(answer) => answers.push((reply, Some(answer))),
                    // A caller that has given up, and may ask again.
                    None if reply.request().is_cancelled() => answers.push((reply, None)),
                    None => state.waiting.push((ask, reply)),
                }
            }
            (result, answers)
        };
        for (reply, answer) in answers {
            if let Some(answer) = answer {
                let _ = reply.respond(&answer);
            }
        }
        result
    }

    /// The number of the operation that begins; or why the world has ended.
    fn begin(&self, collective: Collective) -> std::result::Result<u64, WorldFailure> {
        self.update(|state| match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => {
                state.collective = Some(collective);
                Ok(state.operation)
            }
        })
    }

    /// The values of this rank and of those below it are there.
    fn offer(&self, values: RankValues) {
        self.update(|state| state.subtree = Some(values));
    }

    /// The values of all ranks are there. Returns the children that have not got them yet.
    fn finish(&self, collective: Collective, values: RankValues) -> Vec<usize> {
        self.update(|state| {
            state.operation += 1;
            state.collective = None;
            state.subtree = None;
            state.newest = Some((collective, values));
            state.served.clear();
        });
        let served = std::mem::take(&mut self.state.lock().served);
        self.children().filter(|child| !served.contains(&(*child as u32))).collect()
    }

    /// Ends the world, for all ranks that this one knows; returns the first failure that it knows of.
    fn fail(&self, failure: WorldFailure) -> WorldFailure {
        self.update(|state| state.failure.get_or_insert(failure).clone())
    }

    /// This rank takes part no more.
    pub(super) fn leave(&self) {
        self.fail(WorldFailure::Lost { rank: self.rank as u32, reason: "it has left the world".to_owned() });
        self.update(|state| state.newest = None);
    }

    fn address_of(&self, rank: u32) -> Address {
        let address = self.addresses.get(rank as usize).or_else(|| self.addresses.get(self.rank));
        address.cloned().unwrap_or_else(Address::nowhere)
    }

    fn error(&self, failure: WorldFailure, collective: Collective) -> Error {
        match failure {
            WorldFailure::Lost { rank, reason } => {
                let (peer, what) = (self.address_of(rank), collective.to_string());
                Error::Disconnected { peer, what, reason: format!("rank {rank}: {reason}") }
            }
            WorldFailure::Late { rank, after } => {
                Error::Timeout { peer: self.address_of(rank), what: format!("{collective}, waiting for rank {rank},"), after }
            }
            WorldFailure::Broken { rank, message } => {
                let (peer, name) = (self.address_of(rank), collective.to_string());
                Error::Failed { peer, name, message: format!("rank {rank}: {message}") }
            }
        }
    }
}

/// A rank's member, with what it takes to ask the others.
pub(super) struct Ranks {
    pub engine: Engine,
    pub member: Arc<Member>,
    pub endpoints: Vec<Endpoint>,
    pub ask: Procedure<RankAsk, RankReply>,
    /// Held during an operation.
    pub turn: Mutex<()>,
}

impl Ranks {
    /// Waits until the ranks next to this one in the tree have made the same world.
    pub(super) fn greet(&self, limit: TimeLimit) -> Result<()> {
        let neighbours = self.member.parent().into_iter().chain(self.member.children());
        for rank in neighbours {
            let mut attempts = Attempts::new();
            loop {
                let mut call = vec![self.start(rank, RankQuestion::Hello, 0, Collective::Join, limit)?];
                let error = match wait_any(&self.engine, &mut call).1 {
                    Ok(Ok(_)) => break,
                    Ok(Err(failure)) => return Err(self.fail(failure, Collective::Join)),
                    Err(error) => error,
                };
                let may_come = error.is_retryable()
                    || error.is_disconnected()
                    || matches!(error, Error::NoSuchProcedure { .. } | Error::NoSuchProvider { .. });
                if !may_come {
                    return Err(self.fail_with(rank, error, Collective::Join, limit));
                }
                if limit.is_over() {
                    self.member.fail(WorldFailure::Late { rank: rank as u32, after: limit.timeout });
                    let reason = if error.is_timeout() { String::new() } else { format!(" ({error})") };
                    let (peer, after) = (self.member.address_of(rank as u32), limit.timeout);
                    return Err(Error::Timeout {
                        peer,
                        what: format!("joining the world, waiting for rank {rank}{reason},"),
                        after,
                    });
                }
                attempts.pause(&self.engine, limit);
            }
        }
        Ok(())
    }

    /// Gives all ranks the values of all. Each rank calls this, in the same order.
    pub(super) fn gather(&self, collective: Collective, value: &[u8], limit: TimeLimit) -> Result<Vec<Vec<u8>>> {
        if self.engine.is_finalized() {
            return Err(Error::Finalized { what: collective.to_string() });
        }
        let Some(_turn) = self.turn.try_lock() else {
            let reason = "another thread of this rank waits in a barrier or all_gather: all ranks make these calls in one order";
            return Err(Error::Unsupported { what: collective.to_string(), reason: reason.to_owned() });
        };
        let member = &*self.member;
        let operation = member.begin(collective).map_err(|failure| member.error(failure, collective))?;
        let values = self.exchange(collective, operation, value, limit)?;
        let size = self.endpoints.len();
        if values.len() != size || values.iter().enumerate().any(|(index, (rank, _))| index != *rank as usize) {
            let message = format!("the values of {size} ranks are incomplete");
            return Err(self.fail(WorldFailure::Broken { rank: member.rank as u32, message }, collective));
        }
        let mut late = Vec::new();
        for child in member.finish(collective, values.clone()) {
            // Only so that this rank does not leave before the child has its answer: a child that is dead does not matter.
            late.extend(self.start(child, RankQuestion::Received, operation, collective, limit));
        }
        while !late.is_empty() {
            let _ = wait_any(&self.engine, &mut late);
        }
        Ok(values.into_iter().map(|(_, value)| value).collect())
    }

    /// The values of all ranks, in their order.
    fn exchange(&self, collective: Collective, operation: u64, value: &[u8], limit: TimeLimit) -> Result<RankValues> {
        let member = &*self.member;
        let own = member.rank as u32;
        let most = TOTAL / self.endpoints.len();
        if value.len() > most {
            let message = format!("its value of {} bytes exceeds the limit of {most} bytes", value.len());
            member.fail(WorldFailure::Broken { rank: own, message });
            let (peer, name) = (member.address_of(own), collective.to_string());
            return Err(Error::MessageTooLarge { peer, name, size: value.len(), limit: most });
        }
        let (parent, children) = (member.parent(), member.children());
        let mut missing = children.len();
        let (mut asked, mut calls) = (Vec::new(), Vec::new());
        let questions = parent.map(|parent| (parent, RankQuestion::All)).into_iter();
        for (rank, question) in questions.chain(children.map(|child| (child, RankQuestion::Subtree))) {
            asked.push(rank);
            calls.push(self.start(rank, question, operation, collective, limit)?);
        }
        let mut values = vec![(own, value.to_vec())];
        loop {
            if missing == 0 {
                values.sort_by_key(|(rank, _)| *rank);
                if parent.is_none() {
                    return Ok(values);
                }
                member.offer(std::mem::take(&mut values));
            }
            let (index, answer) = wait_any(&self.engine, &mut calls);
            let from = asked.remove(index);
            let received = match answer {
                Ok(Ok(received)) => received,
                Ok(Err(failure)) => return Err(self.fail(failure, collective)),
                Err(error) => return Err(self.fail_with(from, error, collective, limit)),
            };
            if parent == Some(from) {
                return Ok(received);
            }
            values.extend(received);
            missing -= 1;
        }
    }

    fn start(
        &self,
        to: usize,
        question: RankQuestion,
        operation: u64,
        collective: Collective,
        limit: TimeLimit,
    ) -> Result<Pending<RankReply>> {
        let ask = RankAsk { question, from: self.member.rank as u32, to: to as u32, operation, collective };
        let started = self.ask.on(self.endpoints[to].provider(PROVIDER)).timeout(limit.left()).start(&ask);
        started.map_err(|error| self.fail_with(to, error, collective, limit))
    }

    fn fail(&self, failure: WorldFailure, collective: Collective) -> Error {
        self.member.error(self.member.fail(failure), collective)
    }

    /// Ends the world, because a question to a rank has failed.
    fn fail_with(&self, to: usize, error: Error, collective: Collective, limit: TimeLimit) -> Error {
        let rank = to as u32;
        let gone = matches!(
            error,
            Error::NoSuchProcedure { .. } | Error::NoSuchProvider { .. } | Error::NoResponse { .. } | Error::PeerRestarted { .. }
        );
        let failure = match error {
            Error::Finalized { .. } => {
                self.member.leave();
                return Error::Finalized { what: collective.to_string() };
            }
            Error::Timeout { .. } => WorldFailure::Late { rank, after: limit.timeout },
            Error::Disconnected { reason, .. } => WorldFailure::Lost { rank, reason },
            error if gone || error.is_disconnected() => WorldFailure::Lost { rank, reason: error.to_string() },
            error => {
                let own = self.member.rank as u32;
                self.member.fail(WorldFailure::Broken { rank: own, message: error.to_string() });
                return error;
            }
        };
        self.fail(failure, collective)
    }
}
