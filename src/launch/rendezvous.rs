//! Where all ranks tell rank 0 their addresses, and get those of all.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::PROVIDER;
use super::wait::{Attempts, TURN, TimeLimit, wait_any};
use crate::sync::{Condvar, Mutex};
use crate::{Address, Endpoint, Engine, Error, Registration, Request, Responder, Result};

/// A rank that comes to the meeting.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Attendee {
    pub job: String,
    pub rank: u32,
    pub size: u32,
    pub address: Address,
    /// Distinguishes what comes again, since an answer was lost, from another attempt.
    pub ticket: u64,
}

/// The end of the meeting.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Roster {
    /// A number for the world, which no other one has.
    pub world: u64,
    /// In the order of the ranks.
    pub addresses: Vec<Address>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Declined {
    /// This rank does not belong here.
    Wrong(String),
    /// All ranks have come, and others of their numbers.
    Over(String),
    /// Some ranks have not come by rank 0's deadline.
    Late(String),
}

type MeetingReply = std::result::Result<Roster, Declined>;

/// Rank 0's list of those that have come.
struct Meeting {
    job: String,
    world: u64,
    state: Mutex<MeetingState>,
    complete: Condvar,
}

struct MeetingState {
    /// By rank.
    seats: Vec<Option<Attendee>>,
    waiting: Vec<(u32, Responder<MeetingReply>)>,
    /// All have come.
    roster: Option<Roster>,
    /// Rank 0 has given up.
    late: Option<String>,
}

impl Meeting {
    fn arrive(&self, reply: Responder<MeetingReply>, attendee: Attendee) {
        let answers = {
            let mut state = self.state.lock();
            match self.seat(&mut state, &attendee) {
                Some(answer) => vec![(reply, answer)],
                None => {
                    state.waiting.push((attendee.rank, reply));
                    self.answers(&mut state)
                }
            }
        };
        self.send(answers);
    }

    /// An answer where this rank need not wait for the others.
    fn seat(&self, state: &mut MeetingState, attendee: &Attendee) -> Option<MeetingReply> {
        let Attendee { job, rank, size, address, ticket } = attendee;
        let wrong = |reason: String| Some(Err(Declined::Wrong(reason)));
        let seats = state.seats.len();
        if *job != self.job {
            return wrong(format!("rank 0 belongs to the job `{}`, and this rank to `{job}`", self.job));
        }
        if *size as usize != seats {
            return wrong(format!("rank 0 was started as one of {seats}, and this rank as one of {size}"));
        }
        let waits = |of: &Responder<MeetingReply>| !of.request().is_cancelled();
        let other_waits = state.waiting.iter().any(|(seated, reply)| seated == rank && waits(reply));
        let Some(seat) = state.seats.get_mut(*rank as usize) else {
            return wrong(format!("there is no rank {rank} of {seats}"));
        };
        if let Some(seated) = seat.as_ref().filter(|seated| seated.ticket != *ticket) {
            let twice = format!("two ranks have the number {rank}: they are at {} and {address}", seated.address);
            if state.roster.is_some() {
                return Some(Err(Declined::Over(twice)));
            }
            // One that does not wait any more has been started again.
            if other_waits || *rank == 0 {
                return wrong(twice);
            }
        }
        if let Some(roster) = &state.roster {
            return Some(Ok(roster.clone()));
        }
        if let Some(late) = &state.late {
            return Some(Err(Declined::Late(late.clone())));
        }
        *seat = Some(attendee.clone());
        None
    }

    /// Ends the meeting when all have come.
    fn answers(&self, state: &mut MeetingState) -> Vec<(Responder<MeetingReply>, MeetingReply)> {
        if state.seats.iter().any(Option::is_none) {
            return Vec::new();
        }
        let addresses = state.seats.iter().flatten().map(|seated| seated.address.clone()).collect();
        let roster = Roster { world: self.world, addresses };
        state.roster = Some(roster.clone());
        self.complete.notify_all();
        std::mem::take(&mut state.waiting).into_iter().map(|(_, reply)| (reply, Ok(roster.clone()))).collect()
    }

    /// Without the lock. A rank that is gone needs no answer.
    fn send(&self, answers: Vec<(Responder<MeetingReply>, MeetingReply)>) {
        for (reply, answer) in answers {
            let _ = reply.respond(&answer);
        }
    }

    fn give_up(&self) -> String {
        let (late, answers) = {
            let mut state = self.state.lock();
            let missing: Vec<String> =
                (0..state.seats.len()).filter(|rank| state.seats[*rank].is_none()).map(|rank| rank.to_string()).collect();
            let shown = missing.iter().take(10).cloned().collect::<Vec<_>>().join(", ");
            let dots = if missing.len() > 10 { ", …" } else { "" };
            let late = format!("{} of {} ranks have not come: {shown}{dots}", missing.len(), state.seats.len());
            state.late = Some(late.clone());
            let waiting = std::mem::take(&mut state.waiting);
            (late.clone(), waiting.into_iter().map(|(_, reply)| (reply, Err(Declined::Late(late.clone())))).collect())
        };
        self.send(answers);
        late
    }
}

/// Rank 0's side of a meeting. Its name stays in use when all have come, and is free again when not.
pub(super) struct Host {
    meeting: Arc<Meeting>,
    registration: Registration,
}

impl Host {
    /// # Errors
    /// [`Error::AlreadyDefined`] for a name that was used before with this engine.
    pub(super) fn open(engine: &Engine, name: &str, world: u64, own: Attendee) -> Result<Host> {
        let mut seats = vec![None; own.size as usize];
        let job = own.job.clone();
        if let Some(seat) = seats.first_mut() {
            *seat = Some(own);
        }
        let state = MeetingState { seats, waiting: Vec::new(), roster: None, late: None };
        let meeting = Arc::new(Meeting { job, world, state: Mutex::new(state), complete: Condvar::default() });
        let host = meeting.clone();
        let registration =
            engine.provider(PROVIDER).define_deferred(name, move |reply, attendee| host.arrive(reply, attendee))?;
        Ok(Host { meeting, registration })
    }

    /// Waits until all ranks have come.
    pub(super) fn wait(&self, engine: &Engine, own: &Address, limit: TimeLimit) -> Result<Roster> {
        loop {
            let state = self.meeting.state.lock();
            if let Some(roster) = &state.roster {
                return Ok(roster.clone());
            }
            if engine.is_finalized() {
                return Err(Error::Finalized { what: "joining the world".to_owned() });
            }
            let left = limit.left();
            if left.is_zero() {
                drop(state);
                let what = format!("joining the world ({})", self.meeting.give_up());
                return Err(Error::Timeout { peer: own.clone(), what, after: limit.timeout });
            }
            drop(state);
            if engine.progress(left.min(TURN)).is_err() {
                let state = self.meeting.state.lock();
                if state.roster.is_none() {
                    // In turns, since nothing wakes this thread when the engine is finalized.
                    drop(self.meeting.complete.wait_for(state, left.min(TURN)));
                }
            }
        }
    }
}

impl Drop for Host {
    /// Nobody waits for a rank 0 that has failed.
    fn drop(&mut self) {
        let all_came = self.meeting.state.lock().roster.is_some();
        if !all_came {
            self.registration.remove();
            self.meeting.give_up();
        }
    }
}

/// Takes the name at a rank other than 0, so that the next world has another one at all ranks.
pub(super) fn take_name(engine: &Engine, name: &str, rank: u32) -> Result<Registration> {
    let decline = move |_: &Request, _: Attendee| -> MeetingReply {
        Err(Declined::Wrong(format!("rank {rank} was asked, which is not rank 0")))
    };
    engine.provider(PROVIDER).define(name, decline)
}

/// The place where rank 0 is: its address, and the name of the meeting.
pub(super) struct MeetingPlace {
    pub address: Address,
    pub name: String,
    /// What is found there may be of another time: it is looked for again.
    pub may_be_stale: bool,
}

/// The side of the other ranks: tells rank 0 who is there, and waits until all are. `find` looks where rank 0 is; its error is
/// for `what` it found instead.
pub(super) fn attend(
    engine: &Engine,
    own: &Attendee,
    variable: &str,
    limit: TimeLimit,
    mut find: impl FnMut() -> Result<std::result::Result<MeetingPlace, String>>,
) -> Result<Roster> {
    let mut attempts = Attempts::new();
    loop {
        let obstacle = match find()? {
            Err(obstacle) => obstacle,
            Ok(place) => match ask(engine, own, &place, limit)? {
                Ok(roster) => return Ok(roster),
                Err(NoSeat::Wrong(reason)) => return Err(Error::Launch { what: variable.to_owned(), reason }),
                Err(NoSeat::Late(reason)) => {
                    let what = format!("joining the world ({reason})");
                    return Err(Error::Timeout { peer: place.address, what, after: limit.timeout });
                }
                Err(NoSeat::NotYet(reason)) => reason,
            },
        };
        if limit.is_over() {
            let what = format!("joining the world as rank {} of {} ({variable}: {obstacle})", own.rank, own.size);
            return Err(Error::Timeout { peer: own.address.clone(), what, after: limit.timeout });
        }
        attempts.pause(engine, limit);
    }
}

/// Why this rank 0 can't take the place of the one that is there, if that one lives.
pub(super) fn other_host(engine: &Engine, own: &Attendee, place: &MeetingPlace, limit: TimeLimit) -> Option<String> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let limit = TimeLimit::new(limit.left().min(PATIENCE));
    match ask(engine, own, place, limit) {
        Ok(Err(NoSeat::Wrong(reason))) => Some(reason),
        _ => None,
    }
}

enum NoSeat {
    Wrong(String),
    Late(String),
    NotYet(String),
}

fn ask(engine: &Engine, own: &Attendee, place: &MeetingPlace, limit: TimeLimit) -> Result<std::result::Result<Roster, NoSeat>> {
    let peer = match look_up(engine, &place.address, limit)? {
        Ok(peer) => peer.provider(PROVIDER),
        Err(reason) => return Ok(Err(NoSeat::NotYet(reason))),
    };
    let call = engine.procedure::<Attendee, MeetingReply>(&place.name).on(&peer).timeout(limit.left()).start(own)?;
    Ok(Err(match wait_any(engine, &mut vec![call]).1 {
        Ok(Ok(roster)) => return Ok(Ok(roster)),
        Ok(Err(Declined::Over(reason))) if place.may_be_stale => NoSeat::NotYet(reason),
        Ok(Err(Declined::Wrong(reason) | Declined::Over(reason))) => NoSeat::Wrong(reason),
        Ok(Err(Declined::Late(reason))) => NoSeat::Late(reason),
        Err(Error::Timeout { .. }) => NoSeat::NotYet(format!("rank 0 at {} waits for other ranks", place.address)),
        Err(error @ (Error::NoSuchProcedure { .. } | Error::NoSuchProvider { .. } | Error::NoResponse { .. })) => {
            NoSeat::NotYet(error.to_string())
        }
        Err(error) if error.is_disconnected() || error.is_retryable() => NoSeat::NotYet(error.to_string()),
        Err(error) => return Err(error),
    }))
}

/// An endpoint, or why there is none yet: a name may have no address so far.
pub(super) fn look_up(engine: &Engine, address: &Address, limit: TimeLimit) -> Result<std::result::Result<Endpoint, String>> {
    let found = if address.is_host_name() {
        let (engine, address) = (engine.clone(), address.clone());
        limit.run(move || engine.lookup(address))?
    } else {
        Some(engine.lookup(address))
    };
    match found {
        Some(Ok(endpoint)) => Ok(Ok(endpoint)),
        Some(Err(error @ Error::Unreachable { .. })) => Ok(Err(error.to_string())),
        Some(Err(error)) => Err(error),
        None => Ok(Err(format!("the host name in {address} was not resolved in time"))),
    }
}
