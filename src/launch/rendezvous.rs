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
    /// Those that have come, by rank.
    present: Vec<Option<Attendance>>,
    /// All have come.
    roster: Option<Roster>,
    /// Rank 0 has given up.
    late: Option<String>,
}

/// A rank that has come.
struct Attendance {
    attendee: Attendee,
    /// `None` for rank 0 itself.
    reply: Option<Responder<MeetingReply>>,
}

impl Attendance {
    /// It still waits: a rank may die, or give up and come again.
    fn waits(&self) -> bool {
        self.reply.as_ref().is_none_or(|reply| !reply.request().is_cancelled())
    }
}

impl Meeting {
    fn arrive(&self, reply: Responder<MeetingReply>, attendee: Attendee) {
        // Responses are sent, and responders dropped, without the lock.
        let (answers, gone) = {
            let mut state = self.state.lock();
            match self.decline(&state, &attendee) {
                Some(answer) => (vec![(reply, answer)], Vec::new()),
                None => {
                    let rank = attendee.rank as usize;
                    let before = state.present[rank].replace(Attendance { attendee, reply: Some(reply) });
                    let (answers, mut gone) = self.end(&mut state);
                    gone.extend(before);
                    (answers, gone)
                }
            }
        };
        drop(gone);
        self.send(answers);
    }

    /// The answer to a rank that need not wait for others.
    fn decline(&self, state: &MeetingState, attendee: &Attendee) -> Option<MeetingReply> {
        let Attendee { job, rank, size, address, ticket } = attendee;
        let wrong = |reason: String| Some(Err(Declined::Wrong(reason)));
        let expected = state.present.len();
        if *job != self.job {
            return wrong(format!("rank 0 belongs to the job `{}`, and this rank to `{job}`", self.job));
        }
        if *size as usize != expected {
            return wrong(format!("rank 0 was started as one of {expected}, and this rank as one of {size}"));
        }
        if let Some(late) = &state.late {
            return Some(Err(Declined::Late(late.clone())));
        }
        let Some(same_rank) = state.present.get(*rank as usize) else {
            return wrong(format!("there is no rank {rank} of {expected}"));
        };
        if let Some(other) = same_rank.as_ref().filter(|other| other.attendee.ticket != *ticket) {
            let twice = format!("two ranks have the number {rank}: they are at {} and {address}", other.attendee.address);
            if state.roster.is_some() {
                return Some(Err(Declined::Over(twice)));
            }
            if other.waits() {
                return wrong(twice);
            }
        }
        state.roster.clone().map(Ok)
    }

    /// Ends the meeting when all have come, and are there.
    fn end(&self, state: &mut MeetingState) -> (Vec<MeetingAnswer>, Vec<Attendance>) {
        if state.present.iter().any(Option::is_none) {
            return (Vec::new(), Vec::new());
        }
        let gone: Vec<Attendance> = state.present.iter_mut().filter_map(|one| one.take_if(|one| !one.waits())).collect();
        if !gone.is_empty() {
            return (Vec::new(), gone);
        }
        let addresses = state.present.iter().flatten().map(|one| one.attendee.address.clone()).collect();
        let roster = Roster { world: self.world, addresses };
        state.roster = Some(roster.clone());
        self.complete.notify_all();
        (state.take_replies().map(|reply| (reply, Ok(roster.clone()))).collect(), Vec::new())
    }

    /// A rank that is gone needs no answer.
    fn send(&self, answers: Vec<MeetingAnswer>) {
        for (reply, answer) in answers {
            let _ = reply.respond(&answer);
        }
    }

    /// Tells those that wait which ranks are missing.
    fn give_up(&self) -> String {
        let (late, answers) = {
            let mut state = self.state.lock();
            let is_missing = |(rank, one): (usize, &Option<Attendance>)| one.is_none().then(|| rank.to_string());
            let missing: Vec<String> = state.present.iter().enumerate().filter_map(is_missing).collect();
            let shown = missing.iter().take(10).cloned().collect::<Vec<_>>().join(", ");
            let dots = if missing.len() > 10 { ", …" } else { "" };
            let late = format!("{} of {} ranks have not come: {shown}{dots}", missing.len(), state.present.len());
            state.late = Some(late.clone());
            let answers = state.take_replies().map(|reply| (reply, Err(Declined::Late(late.clone())))).collect();
            (late, answers)
        };
        self.send(answers);
        late
    }
}

type MeetingAnswer = (Responder<MeetingReply>, MeetingReply);

impl MeetingState {
    fn take_replies(&mut self) -> impl Iterator<Item = Responder<MeetingReply>> {
        self.present.iter_mut().flatten().filter_map(|one| one.reply.take())
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
        let (job, size) = (own.job.clone(), own.size);
        let own = std::iter::once(Some(Attendance { attendee: own, reply: None }));
        let present = own.chain((1..size).map(|_| None)).collect();
        let state = MeetingState { present, roster: None, late: None };
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
    /// No rank waits for a rank 0 that has failed.
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

/// The side of the other ranks: tells rank 0 that this rank is there, and waits until all are. `find` looks where rank 0 is; its error is
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
                Err(NotMet::Wrong(reason)) => return Err(Error::Launch { what: variable.to_owned(), reason }),
                Err(NotMet::Late(reason)) => {
                    let what = format!("joining the world ({reason})");
                    return Err(Error::Timeout { peer: place.address, what, after: limit.timeout });
                }
                Err(NotMet::NotYet(reason)) => reason,
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
        Ok(Err(NotMet::Wrong(reason))) => Some(reason),
        _ => None,
    }
}

enum NotMet {
    Wrong(String),
    Late(String),
    NotYet(String),
}

fn ask(engine: &Engine, own: &Attendee, place: &MeetingPlace, limit: TimeLimit) -> Result<std::result::Result<Roster, NotMet>> {
    let peer = match look_up(engine, &place.address, limit)? {
        Ok(peer) => peer.provider(PROVIDER),
        Err(reason) => return Ok(Err(NotMet::NotYet(reason))),
    };
    let call = engine.procedure::<Attendee, MeetingReply>(&place.name).on(&peer).timeout(limit.left()).start(own)?;
    Ok(Err(match wait_any(engine, &mut vec![call]).1 {
        Ok(Ok(roster)) => return Ok(Ok(roster)),
        Ok(Err(Declined::Over(reason))) if place.may_be_stale => NotMet::NotYet(reason),
        Ok(Err(Declined::Wrong(reason) | Declined::Over(reason))) => NotMet::Wrong(reason),
        Ok(Err(Declined::Late(reason))) => NotMet::Late(reason),
        Err(Error::Timeout { .. }) => NotMet::NotYet(format!("rank 0 at {} waits for other ranks", place.address)),
        Err(error @ (Error::NoSuchProcedure { .. } | Error::NoSuchProvider { .. } | Error::NoResponse { .. })) => {
            NotMet::NotYet(error.to_string())
        }
        Err(error) if error.is_disconnected() || error.is_retryable() => NotMet::NotYet(error.to_string()),
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::Pending;

    const LONG: Duration = Duration::from_secs(20);

    fn attendee(rank: u32, ticket: u64) -> Attendee {
        let address = format!("tcp://10.0.0.{rank}:{ticket}").parse().unwrap();
        Attendee { job: "j".to_owned(), rank, size: 3, address, ticket }
    }

    fn meeting() -> (Engine, Host) {
        let engine = Engine::server("loop://").unwrap();
        let host = Host::open(&engine, "m", 7, attendee(0, 1)).unwrap();
        (engine, host)
    }

    fn come(engine: &Engine, own: &Attendee) -> Pending<MeetingReply> {
        let host = engine.lookup(engine.address()).unwrap().provider(PROVIDER);
        engine.procedure::<Attendee, MeetingReply>("m").on(&host).timeout(LONG).start(own).unwrap()
    }

    #[track_caller]
    fn eventually(host: &Host, condition: impl Fn(&MeetingState) -> bool) {
        let limit = TimeLimit::new(LONG);
        while !condition(&host.meeting.state.lock()) {
            assert!(!limit.is_over());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Before or after the last rank has come.
    #[test]
    fn rank_that_gives_up_can_come_again() {
        for comes_last in [false, true] {
            let (engine, host) = meeting();
            let first = come(&engine, &attendee(1, 1));
            eventually(&host, |state| state.present[1].is_some());
            drop(first);
            eventually(&host, |state| state.present[1].as_ref().is_some_and(|one| !one.waits()));
            let (one, two) = if comes_last {
                let two = come(&engine, &attendee(2, 1));
                eventually(&host, |state| state.present[1].is_none() && state.present[2].is_some());
                assert!(!two.is_ready());
                (come(&engine, &attendee(1, 2)), two)
            } else {
                let one = come(&engine, &attendee(1, 2));
                eventually(&host, |state| state.present[1].as_ref().is_some_and(|one| one.attendee.ticket == 2));
                (one, come(&engine, &attendee(2, 1)))
            };
            let own = attendee(0, 1).address;
            let roster = host.wait(&engine, &own, TimeLimit::new(LONG)).unwrap();
            assert_eq!(roster.addresses, [own, attendee(1, 2).address, attendee(2, 1).address]);
            for other in [one, two] {
                let same = other.wait().unwrap().unwrap();
                assert_eq!((same.world, same.addresses), (7, roster.addresses.clone()));
            }
            // An answer that was lost is given again; another rank of that number comes too late.
            let again = come(&engine, &attendee(1, 2)).wait().unwrap();
            assert_eq!(again.unwrap().addresses, roster.addresses);
            let twice = come(&engine, &attendee(1, 3)).wait().unwrap();
            assert!(matches!(&twice, Err(Declined::Over(reason)) if reason.contains("two ranks")), "{twice:?}");
        }
    }

    #[test]
    fn rank_that_does_not_belong_here_is_told() {
        let (engine, host) = meeting();
        let _one = come(&engine, &attendee(1, 1));
        eventually(&host, |state| state.present[1].is_some());
        for (wrong, part) in [
            (Attendee { job: "k".to_owned(), ..attendee(2, 1) }, "belongs to the job `j`"),
            (Attendee { size: 4, ..attendee(2, 1) }, "one of 3, and this rank as one of 4"),
            (attendee(3, 1), "no rank 3 of 3"),
            (attendee(u32::MAX, 1), "no rank 4294967295"),
            (attendee(1, 2), "two ranks have the number 1: they are at tcp://10.0.0.1:1 and tcp://10.0.0.1:2"),
            (attendee(0, 2), "two ranks have the number 0"),
        ] {
            let answer = come(&engine, &wrong).wait().unwrap();
            assert!(matches!(&answer, Err(Declined::Wrong(reason)) if reason.contains(part)), "{answer:?}");
        }
    }

    #[test]
    fn those_that_wait_hear_of_rank_0_giving_up() {
        let (engine, host) = meeting();
        let one = come(&engine, &attendee(1, 1));
        eventually(&host, |state| state.present[1].is_some());
        let begin = Instant::now();
        let error = host.wait(&engine, &engine.address(), TimeLimit::new(Duration::from_millis(50))).unwrap_err();
        assert!(begin.elapsed() >= Duration::from_millis(50));
        assert!(matches!(&error, Error::Timeout { what, .. } if what.contains("1 of 3 ranks have not come: 2")), "{error}");
        let answer = one.wait().unwrap();
        assert!(matches!(&answer, Err(Declined::Late(reason)) if reason.contains("not come: 2")), "{answer:?}");
        // The name is free for the next attempt.
        drop(host);
        Host::open(&engine, "m", 8, attendee(0, 2)).unwrap();
    }
}
