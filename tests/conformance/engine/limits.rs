//! Limits of what an engine holds for its peers: each limit is reached, excess is refused, other peers are still served, and
//! everything that ends, in any way, makes room. Each test fills the limits many times, so a leak would show.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuilder, Error, Grant, Pending, Request, Responder};

use crate::assert_error;
use crate::support::{Gate, Net, eventually, patience, pattern, rounds, travelled};

/// The limits under test admit so much for one peer, and twice that in total.
const MOST: usize = 4;

fn is_busy<T>(result: &calomel::Result<T>) -> bool {
    matches!(result, Err(error @ Error::Busy { reason, .. }) if error.is_retryable() && reason.contains("limit"))
}

#[track_caller]
fn assert_busy<T>(result: calomel::Result<T>) {
    assert!(is_busy(&result), "expected to be refused, got {:?}", result.map(|_| "a success"));
}

async fn panics(_: Request, _: String) {
    panic!("on purpose")
}

/// A server that holds requests until the test releases them.
struct Server {
    engine: Engine,
    held: Arc<Mutex<Vec<Numbered>>>,
    notes: Arc<AtomicUsize>,
}

/// A request that is held, and its number.
type Numbered = (u64, Responder<()>);

/// The number of requests that the test does not wait for.
const STRAY: u64 = 0;

impl Server {
    fn new(net: &Net, limit: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Server {
        let engine = net.server_with(|builder| limit(builder).authorize(|caller| caller.procedure() != "denied"));
        let (held, notes) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicUsize>::default());
        let (keep, note) = (held.clone(), notes.clone());
        let hold = move |reply: Responder<()>, (number, _): (u64, String)| keep.lock().unwrap().push((number, reply));
        engine.define_deferred("hold", hold).unwrap();
        engine.define("length", |_: &Request, text: String| text.len()).unwrap();
        let count = move |_: &Request, _: String| {
            note.fetch_add(1, Ordering::SeqCst);
        };
        engine.define("note", count).unwrap();
        engine.define("panics", |_: &Request, _: String| -> () { panic!("on purpose") }).unwrap();
        engine.define_deferred("panics deferred", |_: Responder<()>, _: String| panic!("on purpose")).unwrap();
        engine.define_async("panics later", panics).unwrap();
        engine.define("denied", |_: &Request, _: String| ()).unwrap();
        engine.define("of another type", |_: &Request, _: (u64, u64)| ()).unwrap();
        Server { engine, held, notes }
    }

    fn holds(&self, number: u64) -> bool {
        self.held.lock().unwrap().iter().any(|(held, _)| *held == number)
    }

    /// Removes the requests with this number.
    fn take(&self, number: u64) -> Vec<Responder<()>> {
        let (taken, rest) = self.held.lock().unwrap().drain(..).partition::<Vec<_>, _>(|(held, _)| *held == number);
        self.held.lock().unwrap().extend(rest);
        taken.into_iter().map(|(_, reply)| reply).collect()
    }
}

/// A client, and its endpoint of the server.
struct Caller {
    engine: Engine,
    to: Endpoint,
}

/// Requests that are held: the calls, and their responders.
struct Held {
    calls: Vec<Pending<()>>,
    replies: Vec<Responder<()>>,
}

impl Caller {
    /// An engine that ends when it is dropped, not with the test.
    fn new(net: &Net, server: &Engine) -> Caller {
        Caller::of(net.builder().build().unwrap(), server)
    }

    fn of(engine: Engine, server: &Engine) -> Caller {
        let to = engine.lookup(server.address()).unwrap();
        Caller { engine, to }
    }

    fn start(&self, name: &str, size: usize) -> Pending<()> {
        self.engine.procedure::<String, ()>(name).on(&self.to).start(&"x".repeat(size)).unwrap()
    }

    fn hold(&self, number: u64, size: usize) -> Pending<()> {
        let hold = self.engine.procedure::<(u64, String), ()>("hold");
        hold.on(&self.to).start(&(number, "x".repeat(size))).unwrap()
    }

    fn notify(&self, name: &str, size: usize) {
        self.engine.procedure::<String, ()>(name).on(&self.to).notify(&"x".repeat(size)).unwrap();
    }

    fn length(&self, size: usize) -> calomel::Result<usize> {
        self.engine.procedure::<String, usize>("length").on(&self.to).call(&"x".repeat(size))
    }

    #[track_caller]
    fn assert_served(&self, size: usize) {
        assert_eq!(self.length(size).unwrap(), size);
    }

    /// Holds so many requests, once ended ones are no longer counted.
    #[track_caller]
    fn fill(&self, server: &Server, count: usize, size: usize) -> Held {
        static NEXT: AtomicU64 = AtomicU64::new(STRAY + 1);
        let mut calls: Vec<(u64, Pending<()>)> = Vec::new();
        eventually("as many are admitted as ever", || {
            calls.resize_with(count, || {
                let number = NEXT.fetch_add(1, Ordering::Relaxed);
                (number, self.hold(number, size))
            });
            eventually("each is held or refused", || calls.iter().all(|(number, call)| call.is_ready() || server.holds(*number)));
            let (refused, held): (Vec<_>, Vec<_>) = calls.drain(..).partition(|(_, call)| call.is_ready());
            refused.into_iter().for_each(|(_, call)| assert_busy(call.wait()));
            calls = held;
            drop(server.take(STRAY));
            calls.len() == count
        });
        let replies = calls.iter().flat_map(|(number, _)| server.take(*number)).collect();
        Held { calls: calls.into_iter().map(|(_, call)| call).collect(), replies }
    }

    /// Calls of this size and large one-way calls are refused. Small one-way calls have credit, and are handled.
    #[track_caller]
    fn assert_refused(&self, server: &Server, size: usize) {
        let notes = server.notes.load(Ordering::SeqCst);
        let has_credit = size <= 16 << 10;
        for _ in 0..3 {
            assert_busy(self.length(size));
            assert_busy(self.hold(STRAY, size).wait());
            let note = self.engine.procedure::<String, ()>("note").on(&self.to).notify(&"x".repeat(size));
            if has_credit { note.unwrap() } else { assert_busy(note) }
        }
        assert_busy(self.length(size));
        let expected = notes + if has_credit { 3 } else { 0 };
        eventually("one-way calls are handled", || server.notes.load(Ordering::SeqCst) >= expected);
        assert_eq!(server.notes.load(Ordering::SeqCst), expected);
    }

    /// Requests that end in other ways than by an answer, also many at once.
    fn churn(&self, server: &Server, size: usize) {
        for name in ["panics", "panics deferred", "panics later", "denied", "of another type", "nothing"] {
            assert!(self.start(name, size).wait().is_err());
            let many: Vec<_> = (0..2 * MOST).map(|_| self.start(name, size)).collect();
            many.into_iter().for_each(|call| assert!(call.wait().is_err()));
            self.notify(name, size);
        }
        let hold = self.engine.procedure::<(u64, String), ()>("hold").on(&self.to);
        for wait in [0, 1, 5] {
            let result = hold.clone().timeout(Duration::from_millis(wait)).call(&(STRAY, "x".repeat(size)));
            assert!(is_busy(&result) || matches!(result, Err(Error::Timeout { .. })), "{result:?}");
        }
        // Dropped at every stage.
        for begun in 0..5 {
            let calls: Vec<_> = (0..MOST).map(|_| self.hold(STRAY, size)).collect();
            thread::sleep(Duration::from_micros(100 * begun));
            drop(calls);
        }
        eventually("there is room again", || {
            drop(server.take(STRAY));
            self.length(size).is_ok()
        });
    }
}

/// How held requests end.
#[derive(Clone, Copy, Debug)]
enum End {
    Answered,
    Failed,
    Forgotten,
    Cancelled,
    Dropped,
    Gone,
}

const ENDS: [End; 6] = [End::Answered, End::Failed, End::Forgotten, End::Cancelled, End::Dropped, End::Gone];

#[track_caller]
fn await_given_up(replies: &[Responder<()>]) {
    eventually("the responders know that their calls have ended", || replies.iter().all(|reply| reply.request().is_cancelled()));
}

impl End {
    /// What `caller` has given up is counted until its handler has ended; before that, `while_given_up` runs.
    fn end_requests(self, net: &Net, server: &Server, caller: &mut Caller, held: Held, while_given_up: impl Fn(&Caller)) {
        let Held { calls, replies } = held;
        match self {
            End::Answered => {
                replies.into_iter().for_each(|reply| reply.respond(&()).unwrap());
                calls.into_iter().for_each(|call| call.wait().unwrap());
            }
            End::Failed => {
                replies.into_iter().for_each(|reply| reply.fail("on purpose"));
                calls.into_iter().for_each(|call| assert_error!(call.wait(), Error::Failed { .. }));
            }
            End::Forgotten => {
                drop(replies);
                calls.into_iter().for_each(|call| assert_error!(call.wait(), Error::NoResponse { .. }));
            }
            End::Cancelled => {
                calls.iter().for_each(Pending::cancel);
                calls.into_iter().for_each(|call| assert_error!(call.wait(), Error::Cancelled { .. }));
                await_given_up(&replies);
                while_given_up(caller);
                replies.into_iter().for_each(|reply| assert!(reply.respond(&()).is_err()));
            }
            End::Dropped => {
                drop(calls);
                await_given_up(&replies);
                while_given_up(caller);
            }
            End::Gone => {
                let next = Caller::new(net, &server.engine);
                std::mem::replace(caller, next).engine.finalize().unwrap();
                await_given_up(&replies);
            }
        }
    }
}

/// Each end twice: after itself, and after each other; once where the machine is emulated.
fn ends() -> impl Iterator<Item = End> {
    ENDS.into_iter().chain(ENDS.into_iter().rev()).take(if patience() > 1 { ENDS.len() } else { 2 * ENDS.len() })
}

/// One peer has reached its limit: it gets no more, but other peers do.
fn of_one_peer(net: &Net, size: usize, small_ones_pass: bool, limit: impl FnOnce(EngineBuilder) -> EngineBuilder) {
    let server = Server::new(net, limit);
    let (mut one, other) = (Caller::new(net, &server.engine), Caller::new(net, &server.engine));
    for how in ends() {
        let held = one.fill(&server, MOST, size);
        one.assert_refused(&server, size);
        if small_ones_pass {
            one.assert_served(1);
        }
        other.assert_served(size);
        how.end_requests(net, &server, &mut one, held, |one| one.assert_refused(&server, size));
        one.churn(&server, size);
    }
}

fn requests_beyond_one_peers_limit_are_refused(net: &Net) {
    of_one_peer(net, 10, false, |builder| builder.max_requests_per_peer(MOST));
    // Requests that arrive in chunks.
    of_one_peer(net, 100_000, false, |builder| builder.max_requests_per_peer(MOST));
}

/// The accounted bytes of `MOST` requests of a size, with their type declarations: not enough for one more.
fn bytes_of_most(size: usize) -> usize {
    (MOST + 1) * size - size / 30
}

fn bytes_beyond_one_peers_limit_are_refused(net: &Net) {
    for size in [3_000, 100_000] {
        let bytes = bytes_of_most(size);
        of_one_peer(net, size, true, |builder| builder.max_message_size(2 * size).max_bytes_in_flight_per_peer(bytes));
    }
}

/// A greedy peer takes all that is available: other peers still get their share. Only what disconnected peers left behind
/// blocks all others, until its handlers have ended.
fn of_all_peers(net: &Net, size: usize, limit: impl FnOnce(EngineBuilder) -> EngineBuilder) {
    let server = Server::new(net, limit);
    let (mut greedy, mut other) = (Caller::new(net, &server.engine), Caller::new(net, &server.engine));
    for (round, how) in ends().enumerate() {
        // Both are connected, so that half of it is the share of each.
        greedy.churn(&server, size);
        other.churn(&server, size);
        let held = greedy.fill(&server, 2 * MOST, size);
        greedy.assert_refused(&server, size);
        let mut shared = other.fill(&server, MOST, size);
        other.assert_refused(&server, size);
        greedy.assert_refused(&server, size);
        if round % 2 == 0 {
            how.end_requests(net, &server, &mut greedy, held, |greedy| greedy.assert_refused(&server, size));
            greedy.assert_served(size);
            continue;
        }
        let next = Caller::new(net, &server.engine);
        std::mem::replace(&mut greedy, next).engine.finalize().unwrap();
        await_given_up(&held.replies);
        // The only peer left may have as much again.
        let more = other.fill(&server, MOST, size);
        other.assert_refused(&server, size);
        greedy.assert_refused(&server, size);
        drop(held);
        greedy.assert_served(size);
        shared.calls.extend(more.calls);
        shared.replies.extend(more.replies);
        how.end_requests(net, &server, &mut other, shared, |_| ());
    }
}

fn requests_beyond_the_limit_of_all_peers_are_refused(net: &Net) {
    of_all_peers(net, 10, |builder| builder.max_requests(2 * MOST));
}

fn bytes_beyond_the_limit_of_all_peers_are_refused(net: &Net) {
    for size in [10_000, 100_000] {
        let bytes = 2 * MOST * size + size / 2;
        of_all_peers(net, size, |builder| builder.max_message_size(2 * size).max_bytes_in_flight(bytes));
    }
}

#[track_caller]
fn assert_not_connected<T>(result: calomel::Result<T>) {
    let error = result.map(drop).unwrap_err();
    assert!(error.is_retryable() && error.is_disconnected(), "{error}");
    assert_error!(Err::<(), _>(error), Error::Unreachable { .. } | Error::Disconnected { .. });
}

/// A connection above the limit is refused, repeatedly, without disturbing the others; each that ends makes room, whether
/// finalized or dropped.
fn connections_beyond_the_limit_are_refused(net: &Net) {
    let server = Server::new(net, |builder| builder.max_connections(MOST));
    let elsewhere = Server::new(net, |builder| builder);
    let mut inside: Vec<Caller> = (0..MOST).map(|_| Caller::new(net, &server.engine)).collect();
    inside.iter().for_each(|caller| caller.assert_served(1));
    let exposed = server.engine.expose_read_only(pattern(1, 1 << 20)).unwrap();
    for round in 0..rounds(24) {
        let outside = Caller::new(net, &server.engine);
        (0..3).for_each(|_| assert_not_connected(outside.length(1)));
        inside.iter().for_each(|caller| assert!(caller.to.is_connected()));
        inside.iter().for_each(|caller| caller.assert_served(1));
        // Connections that the server itself makes are not counted.
        Caller::of(server.engine.clone(), &elsewhere.engine).assert_served(1);
        let leaver = inside.remove(round / 4 % MOST);
        match round % 4 {
            0 => leaver.engine.finalize().unwrap(),
            1 => drop(leaver),
            2 => {
                let _held = leaver.fill(&server, 3, 10);
                leaver.engine.finalize().unwrap();
            }
            _ => {
                let target = leaver.engine.expose(vec![0u8; 1 << 20], BulkMode::WriteOnly).unwrap();
                let pull = travelled(&exposed.bulk()).on(&leaver.to).start_pull_into(target);
                leaver.engine.finalize().unwrap();
                drop(pull.wait());
            }
        }
        eventually("there is room", || outside.length(1).is_ok());
        inside.push(outside);
    }
}

/// A client that stops reading for a while: its `authorize` hook blocks.
struct Stalling {
    caller: Caller,
    gates: Arc<Mutex<(Gate, Gate)>>,
}

impl Stalling {
    fn new(net: &Net, server: &Engine) -> Stalling {
        let gates = Arc::<Mutex<(Gate, Gate)>>::default();
        let here = gates.clone();
        let decide = move |caller: &calomel::Caller<'_>| {
            if caller.procedure() == "stall" {
                let (stalled, go_on) = here.lock().unwrap().clone();
                stalled.open();
                go_on.wait();
            }
            true
        };
        let engine = net.client_with(|builder| builder.authorize(decide));
        let stall = |request: &Request, (): ()| {
            request.engine().procedure::<(), ()>("stall").on(request.endpoint()).notify(&()).unwrap();
        };
        server.define("have it stall", stall).unwrap();
        let caller = Caller::of(engine, server);
        // A call that waits for the connection drives, and would run the hook on the test's thread.
        caller.to.ping(Duration::from_secs(20)).unwrap();
        Stalling { caller, gates }
    }

    /// From now on it reads nothing, until the gate is opened. It can still start calls, and send.
    fn stall(&self) -> Gate {
        let gates = <(Gate, Gate)>::default();
        *self.gates.lock().unwrap() = gates.clone();
        self.caller.engine.procedure::<(), ()>("have it stall").on(&self.caller.to).notify(&()).unwrap();
        gates.0.wait();
        gates.1
    }

    /// Waits until the server has handled everything that was sent so far, over other connections, too: the second call is read in a
    /// later pass than the first, and in between all connections are.
    fn await_handled(&self, server: &Server) {
        for _ in 0..2 {
            let before = server.notes.load(Ordering::SeqCst);
            let call = self.caller.start("note", 0);
            // Checking the call has it sent.
            eventually("it has been handled", || !call.is_ready() && server.notes.load(Ordering::SeqCst) > before);
        }
    }
}

/// More than the buffers of a connection hold while the peer does not read.
const LONG: usize = 48 << 20;

/// Answers wait for a caller that does not read them, up to the limit in bytes. Others become refusals.
fn answers_beyond_the_limit_become_refusals(net: &Net) {
    const ANSWER: usize = 1 << 20;
    const CALLS: usize = LONG / ANSWER;
    let server = Server::new(net, |builder| builder.max_message_size(2 * ANSWER).max_bytes_in_flight_per_peer(MOST * ANSWER));
    let asked = Arc::<Mutex<Vec<Responder<String>>>>::default();
    let keep = asked.clone();
    server.engine.define_deferred("ask", move |reply: Responder<String>, (): ()| keep.lock().unwrap().push(reply)).unwrap();
    let (slow, other) = (Stalling::new(net, &server.engine), Caller::new(net, &server.engine));
    let text = "x".repeat(ANSWER - 100);
    for round in 0..rounds(6).max(3) {
        let ask = slow.caller.engine.procedure::<(), String>("ask").on(&slow.caller.to);
        let calls: Vec<_> = (0..CALLS).map(|_| ask.start(&()).unwrap()).collect();
        eventually("all have come", || {
            calls.iter().for_each(|call| assert!(!call.is_ready()));
            asked.lock().unwrap().len() == CALLS
        });
        let go_on = slow.stall();
        let replies = std::mem::take(&mut *asked.lock().unwrap());
        let results: Vec<_> = replies.into_iter().map(|reply| reply.respond(&text)).collect();
        let refused = results.iter().filter(|result| is_busy(result)).count();
        assert!(refused > 0 && CALLS - refused >= MOST - 1, "{refused} of {CALLS} are refused");
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), CALLS - refused);
        other.assert_served(ANSWER);
        if round % 3 == 2 {
            // No caller waits for the answers any more.
            drop(calls);
            go_on.open();
            continue;
        }
        go_on.open();
        let results: Vec<_> = calls.into_iter().map(Pending::wait).collect();
        assert_eq!(results.iter().filter(|result| is_busy(result)).count(), refused);
        assert!(results.into_iter().flatten().all(|answer| answer == text));
    }
}

/// A peer that does not read may have only so many pulls in progress. Each of them is too long to be completed by the
/// connection's buffers alone, even if the first fills them before the others arrive.
fn pulls_beyond_one_peers_limit_are_refused(net: &Net) {
    const PART: usize = 12 << 20;
    let server = Server::new(net, |builder| builder.max_transfers_per_peer(MOST));
    let (slow, other) = (Stalling::new(net, &server.engine), Caller::new(net, &server.engine));
    // With a grant, so that no device accesses the memory directly.
    let grant = Grant::new().quota(u64::MAX);
    let exposed = server.engine.expose_read_only_with(pattern(1, LONG), &grant).unwrap();
    let bulk = travelled(&exposed.bulk());
    let (part_of_it, small) = (bulk.slice(0, PART).unwrap(), bulk.slice(0, 1000).unwrap());
    // Pushes that are given up write zeros there, too.
    let pushed_to = server.engine.expose_with(vec![0u8; PART], BulkMode::WriteOnly, &grant).unwrap();
    let space = travelled(&pushed_to.bulk());
    let to = &slow.caller.to;
    // Over devices and fabrics, a client that does not read gets no credits back, and has 16, less those that it was owed: a second
    // try may take the last.
    let has_credits = net.scheme() == "verbs" || net.scheme().starts_with("ofi+");
    let tries = if has_credits { 1 } else { 20 };
    let local = |len: usize| slow.caller.engine.expose(pattern(1, len), BulkMode::ReadWrite).unwrap();
    for round in 0..rounds(6).max(2) {
        // All pull into the same memory: the bytes are the same.
        let target = slow.caller.engine.expose(vec![0u8; LONG], BulkMode::WriteOnly).unwrap();
        let start = |bulk: &Bulk| bulk.on(to).start_pull_into(target.slice(0, bulk.len()).unwrap());
        let go_on = slow.stall();
        let pulls: Vec<_> = (0..MOST).map(|_| start(&bulk)).collect();
        // Short pulls may take another connection, and overtake them.
        slow.await_handled(&server);
        // While the connection's buffers fill, and when they are full.
        let mut beyond = Vec::new();
        for _ in 0..tries {
            beyond.extend([&bulk, &part_of_it, &small].map(start));
            slow.await_handled(&server);
        }
        let mut part = vec![0u8; 1000];
        assert_eq!(small.on(&other.to).pull_into(&mut part[..]).unwrap(), 1000);
        assert_eq!(space.on(&other.to).push_from(&part[..]).unwrap(), 1000);
        assert!(part == pattern(1, 1000));
        other.assert_served(1);
        if round % 2 == 0 {
            pulls.iter().for_each(|pull| pull.cancel());
        }
        go_on.open();
        for (result, _) in beyond.into_iter().map(|transfer| transfer.wait()) {
            assert_busy(result);
        }
        for (result, _) in pulls.into_iter().map(|pull| pull.wait()) {
            match round % 2 {
                0 => assert_error!(result, Error::Cancelled { .. }),
                _ => assert_eq!(result.unwrap(), LONG),
            }
        }
        assert!(round % 2 == 0 || target.reclaim() == exposed.view());
        // Started, and given up at once or a little later.
        for micros in [0, 50, 500, 2000] {
            let [pull, push] = [&part_of_it, &space].map(|bulk| bulk.on(to).timeout(Duration::from_micros(micros)));
            for result in [pull.start_pull_into(local(PART)).wait().0, push.start_push_from(local(PART)).wait().0] {
                assert!(is_busy(&result) || matches!(result, Ok(_) | Err(Error::Timeout { .. })), "{result:?}");
            }
            eventually("there is room", || small.on(to).pull_into(&mut part[..]).is_ok());
        }
        // Requests that were given up may still be in transit; those that were waited for have ended.
        let mut pieces: Vec<Vec<u8>> = vec![vec![0; 1000]; MOST];
        eventually("there is room for all", || {
            let pulls: Vec<_> = pieces.iter().map(|piece| small.on(to).start_pull_into(local(piece.len()))).collect();
            let results: Vec<_> = pulls.into_iter().map(|pull| pull.wait().0).collect();
            results.iter().all(|result| is_busy(result) || matches!(result, Ok(1000))) && results.iter().all(Result::is_ok)
        });
        pieces.clear();
    }
}

/// Pushes from several threads at once, of which one may be in progress.
fn pushes_beyond_one_peers_limit_are_refused(net: &Net) {
    const LEN: usize = 4 << 20;
    let server = Server::new(net, |builder| builder.max_transfers_per_peer(1));
    let (one, other) = (Caller::new(net, &server.engine), Caller::new(net, &server.engine));
    let grant = Grant::new().quota(u64::MAX);
    let exposed = server.engine.expose_with(vec![0u8; LEN], BulkMode::WriteOnly, &grant).unwrap();
    let (bulk, bytes) = (travelled(&exposed.bulk()), pattern(2, LEN));
    for _ in 0..rounds(5) {
        eventually("one comes while another is in progress", || {
            let push = || bulk.on(&one.to).push_from(&bytes[..]);
            let results: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(push)).collect();
                assert_eq!(bulk.on(&other.to).push_from(&bytes[..]).unwrap(), LEN);
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(results.iter().any(|result| matches!(result, Ok(LEN))));
            let refused = results.iter().filter(|result| is_busy(result)).count();
            assert!(results.iter().filter(|result| result.is_ok()).count() + refused == results.len(), "{results:?}");
            refused > 0
        });
        (0..3).for_each(|_| assert_eq!(bulk.on(&one.to).push_from(&bytes[..]).unwrap(), LEN));
    }
    assert!(exposed.reclaim() == bytes);
}

/// Every kind of exposure counts until it is reclaimed or dropped, or its owner is.
fn exposures_beyond_the_limit_are_refused(net: &Net) {
    let server = Server::new(net, |builder| builder.max_exposures(MOST));
    let other = Caller::new(net, &server.engine);
    let elsewhere = Server::new(net, |builder| builder);
    let there = elsewhere.engine.expose_read_only(pattern(1, 8 << 20)).unwrap();
    let to_elsewhere = server.engine.lookup(elsewhere.engine.address()).unwrap();
    server.engine.define("keep", |request: &Request, bulk: Bulk| drop((request.remaining(), bulk))).unwrap();
    let writable = || server.engine.expose(vec![3u8; 100_000], BulkMode::ReadWrite);
    let full = || {
        assert_busy(writable());
        assert_busy(server.engine.expose_read_only("a text".to_owned()));
        assert_busy(server.engine.expose_with(vec![1u8], BulkMode::ReadOnly, &Grant::new().once()));
        let mut borrowed = [0u8; 10];
        assert_busy(server.engine.scope(|scope| scope.expose(&mut borrowed, BulkMode::ReadWrite).map(drop)));
    };
    for round in 0..30 {
        let mut first = Vec::new();
        first.extend((1..MOST).map(|_| writable().unwrap()));
        let text = server.engine.expose_read_only("a text".repeat(1000)).unwrap();
        full();
        // Peers can use the existing exposures, and this engine can use those of others.
        let mut copy = vec![0u8; 100_000];
        let bulk = travelled(&first[0].bulk());
        assert_eq!(bulk.on(&other.to).pull_into(&mut copy[..]).unwrap(), 100_000);
        assert_eq!(bulk.on(&other.to).push_from(&copy[..]).unwrap(), 100_000);
        assert_eq!(travelled(&there.bulk()).on(&to_elsewhere).pull_into(&mut copy[..]).unwrap(), 100_000);
        other.assert_served(100_000);
        full();
        match round % 5 {
            0 => {
                first.into_iter().for_each(|exposed| drop(exposed.reclaim()));
                assert_eq!(text.reclaim().len(), 6000);
            }
            1 => drop((first, text)),
            2 => {
                // During a transfer, which ends.
                let pull =
                    bulk.on(&other.to).start_pull_into(other.engine.expose(vec![0u8; 100_000], BulkMode::WriteOnly).unwrap());
                drop((first, text));
                assert!(matches!(pull.wait().0, Ok(100_000) | Err(Error::Revoked { .. })));
            }
            3 => {
                // A transfer owns the exposure, and is waited for, cancelled, or dropped.
                let start = |local| travelled(&there.bulk()).on(&to_elsewhere).start_pull_into(local);
                let mut transfers: Vec<_> = first.into_iter().map(start).collect();
                full();
                drop(transfers.pop());
                transfers[0].cancel();
                transfers.into_iter().for_each(|transfer| drop(transfer.wait()));
                drop(text);
            }
            _ => {
                // An exposure whose bulk a peer had, and dropped.
                drop(text);
                let grant = Grant::new().for_one_call().expires_after(Duration::from_millis(1));
                let exposed = server.engine.expose_with(vec![1u8; 1000], BulkMode::ReadOnly, &grant).unwrap();
                full();
                let keep = server.engine.procedure::<Bulk, ()>("keep").on(&to_elsewhere);
                drop(keep.call(&exposed.bulk()));
                // Its grant has expired, but it still counts.
                full();
                drop((exposed, first));
            }
        }
        server.engine.scope(|scope| scope.expose(&mut copy, BulkMode::ReadWrite).map(drop)).unwrap();
    }
}

/// Limits of zero.
fn limits_of_zero_admit_nothing(net: &Net) {
    let refusing = |limit: fn(EngineBuilder) -> EngineBuilder| {
        let server = Server::new(net, limit);
        let caller = Caller::new(net, &server.engine);
        (server, caller)
    };
    for limit in [|builder: EngineBuilder| builder.max_requests(0), |builder: EngineBuilder| builder.max_requests_per_peer(0)] {
        let (server, caller) = refusing(limit);
        caller.assert_refused(&server, 1);
        // It can still call others.
        let back = Server::new(net, |builder| builder);
        Caller::of(server.engine.clone(), &back.engine).assert_served(1);
    }
    let (server, caller) = refusing(|builder| builder.max_transfers_per_peer(0));
    let exposed = server.engine.expose_with(vec![1u8; 10], BulkMode::ReadWrite, &Grant::new().quota(100)).unwrap();
    let bulk = travelled(&exposed.bulk());
    for len in [0, 10] {
        let part = bulk.slice(0, len).unwrap();
        assert_busy(part.on(&caller.to).pull_into(&mut [0u8; 10][..]));
        assert_busy(part.on(&caller.to).push_from(&[0u8; 10][..]));
    }
    caller.assert_served(1);
    assert_eq!(exposed.reclaim(), [1; 10]);
    let (server, caller) = refusing(|builder| builder.max_connections(0));
    (0..3).for_each(|_| assert_not_connected(caller.length(1)));
    let (back, _) = refusing(|builder| builder);
    Caller::of(server.engine.clone(), &back.engine).assert_served(1);
    let (server, caller) = refusing(|builder| builder.max_exposures(0));
    assert_busy(server.engine.expose(vec![1u8; 10], BulkMode::ReadWrite));
    caller.assert_served(1);
}

suite!(
    requests_beyond_one_peers_limit_are_refused,
    requests_beyond_the_limit_of_all_peers_are_refused,
    bytes_beyond_one_peers_limit_are_refused,
    bytes_beyond_the_limit_of_all_peers_are_refused,
    answers_beyond_the_limit_become_refusals,
    connections_beyond_the_limit_are_refused,
    pulls_beyond_one_peers_limit_are_refused,
    pushes_beyond_one_peers_limit_are_refused,
    exposures_beyond_the_limit_are_refused,
    limits_of_zero_admit_nothing,
);
