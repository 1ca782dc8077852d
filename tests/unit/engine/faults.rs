//! Engines over transports with injected faults: each call and each transfer ends once, in time, with the right bytes or an
//! error that the faults explain, and the engines keep working.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use crate::sync::Mutex;

use crate::transport::fault::{Dice, FaultPlan, Faults};
use crate::{Bulk, BulkMode, Endpoint, Engine, Error, Exposed, PeerEvent, Request, Result, Writable};

/// The timeout of each call and each transfer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How much later it may end on a busy machine.
const SLACK: Duration = Duration::from_millis(1500);
/// How long faults are injected.
const FAULT_PERIOD: Duration = Duration::from_millis(600);
/// Within this time after the faults an engine works as before.
const RECOVERY: Duration = Duration::from_secs(10);
const THREADS: usize = 3;
const SEEDS: u64 = 2;
/// Bytes of a large argument, and of a large result.
const LARGE: usize = 100_000;
/// Bytes of a bulk: more than one chunk.
const BULK: usize = 600_000;

/// Random letters, so that each offset has different content.
static LETTERS: LazyLock<String> = LazyLock::new(|| {
    let mut dice = Dice::new(7);
    (0..2 * BULK).map(|_| char::from(b'a' + dice.roll(26) as u8)).collect()
});

fn letters(at: usize, len: usize) -> &'static str {
    &LETTERS[at..at + len]
}

/// The result of a handler that made a call or a transfer: how many bytes, or the error and whether the faults explain it.
type HandlerResult = std::result::Result<usize, (bool, String)>;

fn handler_result(result: Result<usize>) -> HandlerResult {
    result.map_err(|error| (explained(&error), error.to_string()))
}

/// True for errors that failing links cause.
fn explained(error: &Error) -> bool {
    matches!(error, Error::Timeout { .. } | Error::Unreachable { .. } | Error::Disconnected { .. })
}

/// What the server has received, and what it exposes.
struct ServerState {
    notes: Mutex<HashSet<u64>>,
    seen_twice: AtomicUsize,
    /// Memory for pulls.
    exported: Exposed<String, crate::ReadOnly>,
    /// Memory for pushes, one for each thread of the client.
    slots: Vec<Exposed<Vec<u8>, Writable>>,
}

fn serve(server: &Engine) -> Result<Arc<ServerState>> {
    let slot = || server.expose(vec![0; BULK], BulkMode::WriteOnly);
    let state = Arc::new(ServerState {
        notes: Mutex::default(),
        seen_twice: AtomicUsize::new(0),
        exported: server.expose_read_only(letters(0, BULK).to_owned())?,
        slots: (0..THREADS).map(|_| slot()).collect::<Result<_>>()?,
    });
    server.define("sum", |_: &Request, (x, y): (u64, u64)| x + y)?;
    server.define("uppercase", |_: &Request, text: String| text.to_ascii_uppercase())?;
    let noted = Arc::downgrade(&state);
    server.define("note", move |_: &Request, id: u64| {
        if let Some(state) = noted.upgrade()
            && !state.notes.lock().insert(id)
        {
            state.seen_twice.fetch_add(1, Ordering::SeqCst);
        }
    })?;
    let (exported, slots) = (state.exported.bulk(), state.slots.iter().map(Exposed::bulk).collect::<Vec<Bulk>>());
    server.define("export", move |_: &Request, slot: Option<usize>| match slot {
        Some(slot) => slots[slot].clone(),
        None => exported.clone(),
    })?;
    server.define("fetch", |request: &Request, (bulk, at): (Bulk, usize)| {
        let mut got = vec![0; bulk.len()];
        let pulled = bulk.on(request.endpoint()).timeout(TIMEOUT).pull_into(&mut got);
        match pulled {
            Ok(_) if got != letters(at, got.len()).as_bytes() => Err((false, "pulled bytes are wrong".to_owned())),
            pulled => handler_result(pulled),
        }
    })?;
    server.define("fill", |request: &Request, (bulk, at): (Bulk, usize)| {
        let len = bulk.len();
        handler_result(bulk.on(request.endpoint()).timeout(TIMEOUT).push_from(letters(at, len)))
    })?;
    server.define("call_back", |request: &Request, (x, y): (u64, u64)| {
        let sum = request.engine().procedure::<(u64, u64), u64>("sum");
        handler_result(sum.on(request.endpoint()).timeout(TIMEOUT).call(&(x, y)).map(|sum| sum as usize))
    })?;
    Ok(state)
}

/// The number of operations that a client chooses from.
const OPERATIONS: u64 = 9;
/// That of the one-way call.
const NOTE: u64 = 2;

struct Client<'a> {
    engine: &'a Engine,
    server: &'a Endpoint,
    state: &'a ServerState,
    next_note: &'a AtomicU64,
    links_fail: bool,
    slot: usize,
    dice: Dice,
}

impl Client<'_> {
    fn roll(&mut self, below: usize) -> usize {
        self.dice.roll(below as u64) as usize
    }

    /// Asserts that an operation ends in time.
    fn in_time<T>(&self, what: &str, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        let took = began.elapsed();
        assert!(took < TIMEOUT + SLACK, "{what} took {took:?}");
        result
    }

    fn call<A: serde::Serialize, R: serde::de::DeserializeOwned>(&self, name: &str, arguments: &A) -> Result<R> {
        let call = self.engine.procedure::<A, R>(name).on(self.server).timeout(TIMEOUT);
        self.in_time(name, || call.call(arguments))
    }

    /// Calls a handler that makes a call or a transfer itself, which may fail as this call may.
    fn call_nested<A: serde::Serialize>(&self, name: &str, arguments: &A) -> Result<Option<usize>> {
        match self.call::<A, HandlerResult>(name, arguments)? {
            Ok(count) => Ok(Some(count)),
            Err((explained, error)) => {
                assert!(explained, "{name}: {error}");
                Ok(None)
            }
        }
    }

    /// Runs one operation, and checks its result; false if the operation of its handler failed.
    fn run_operation(&mut self, operation: u64) -> Result<bool> {
        let at = self.roll(BULK);
        let len = 1 + self.roll(BULK);
        match operation {
            0 => {
                let (x, y) = (at as u64, len as u64);
                assert_eq!(self.call::<_, u64>("sum", &(x, y))?, x + y);
            }
            1 => {
                let text = letters(at, LARGE);
                assert!(self.call::<_, String>("uppercase", &text)? == text.to_ascii_uppercase(), "a response is wrong");
            }
            NOTE => {
                let id = self.next_note.fetch_add(1, Ordering::SeqCst);
                let note = self.engine.procedure::<u64, ()>("note").on(self.server).timeout(TIMEOUT);
                self.in_time("note", || note.notify(&id))?;
            }
            3 => {
                let bulk: Bulk = self.call("export", &None::<usize>)?;
                let at = at.min(BULK - 1);
                let part = bulk.slice(at, len.min(BULK - at))?.on(self.server).timeout(TIMEOUT);
                let mut got = vec![0; part.len()];
                let pulled = self.in_time("pull", || part.pull_into(&mut got))?;
                assert_eq!(pulled, got.len());
                assert!(got == letters(at, pulled).as_bytes(), "pulled bytes are wrong");
            }
            4 => {
                let bulk: Bulk = self.call("export", &Some(self.slot))?;
                let whole = bulk.on(self.server).timeout(TIMEOUT);
                let pushed = self.in_time("push", || whole.push_from(letters(at, len).as_bytes()))?;
                assert_eq!(pushed, len);
                let mut got = vec![0; len];
                self.state.slots[self.slot].read_at(0, &mut got)?;
                assert!(got == letters(at, len).as_bytes(), "pushed bytes are wrong");
            }
            5 => {
                let exported = self.engine.expose_read_only(letters(at, len).to_owned())?;
                let Some(pulled) = self.call_nested("fetch", &(exported.bulk(), at))? else { return Ok(false) };
                assert_eq!(pulled, len);
            }
            6 => {
                let exported = self.engine.expose(vec![0u8; len], BulkMode::WriteOnly)?;
                let Some(pushed) = self.call_nested("fill", &(exported.bulk(), at))? else { return Ok(false) };
                assert_eq!(pushed, len);
                assert!(exported.reclaim() == letters(at, len).as_bytes(), "filled bytes are wrong");
            }
            7 => {
                let (x, y) = (at as u64, len as u64);
                let Some(sum) = self.call_nested("call_back", &(x, y))? else { return Ok(false) };
                assert_eq!(sum, at + len);
            }
            _ => {
                // Several at once, and one that is dropped.
                let uppercase = self.engine.procedure::<&str, String>("uppercase").on(self.server).timeout(TIMEOUT);
                drop(uppercase.start(&letters(at, LARGE))?);
                let texts = [letters(at, 10), letters(at, LARGE), letters(at, 1000)];
                let started = texts.iter().map(|text| uppercase.start(text)).collect::<Result<Vec<_>>>()?;
                let answers = self.in_time("three calls", || crate::Pending::wait_all(started));
                for (text, answer) in texts.iter().zip(answers) {
                    assert!(answer? == text.to_ascii_uppercase(), "a response is wrong");
                }
            }
        }
        Ok(true)
    }

    /// Runs random operations until `end`; returns how many succeeded.
    fn run_operations_until(&mut self, end: Instant) -> usize {
        let mut done = 0;
        while Instant::now() < end {
            let operation = self.dice.roll(OPERATIONS);
            match self.run_operation(operation) {
                Ok(succeeded) => {
                    assert!(succeeded || self.links_fail, "operation {operation} failed at the server");
                    done += usize::from(succeeded);
                }
                Err(error) => assert!(self.links_fail && explained(&error), "operation {operation}: {error}"),
            }
        }
        done
    }

    /// Asserts that every operation succeeds again.
    fn assert_recovered(&mut self) {
        let end = Instant::now() + RECOVERY;
        for operation in 0..OPERATIONS {
            loop {
                match self.run_operation(operation) {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(error) => assert!(explained(&error), "operation {operation}: {error}"),
                }
                assert!(Instant::now() < end, "operation {operation} does not work again");
            }
        }
    }
}

/// Aborts the process when a test hangs, and prints the seed when one fails.
struct Watched {
    what: String,
    _end_signal: mpsc::Sender<()>,
}

impl Watched {
    fn new(what: String) -> Watched {
        let (_end_signal, ended) = mpsc::channel::<()>();
        let hung = format!("{what} hangs");
        std::thread::spawn(move || {
            if ended.recv_timeout(Duration::from_secs(60)) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{hung}");
                std::process::abort();
            }
        });
        Watched { what, _end_signal }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed: {}", self.what);
        }
    }
}

/// Waits until a condition holds.
fn wait_for<T: std::fmt::Debug>(what: &str, read: impl Fn() -> T, is_there: impl Fn(&T) -> bool) {
    let end = Instant::now() + RECOVERY;
    loop {
        let seen = read();
        if is_there(&seen) {
            return;
        }
        assert!(Instant::now() < end, "{what}: {seen:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a mixed load while faults are injected; returns how many operations succeeded, and how many faults occurred.
fn run_with_faults(address: &str, kernel_copy: bool, plan: FaultPlan, seed: u64) -> Result<(usize, usize)> {
    let _watched = Watched::new(format!("seed {seed} at {address} with {plan:?}"));
    let faults = [Faults::new(seed, plan), Faults::new(!seed, plan)];
    let builder = |faults: &Faults| {
        let builder = Engine::builder().default_timeout(TIMEOUT).wrap(faults.wrapping());
        let builder = builder.same_host_upgrade(false).shm_kernel_copy(kernel_copy);
        if plan.silent > 0 {
            builder.peer_timeout(Duration::from_millis(150)).connect_timeout(Duration::from_millis(300))
        } else {
            builder
        }
    };
    let lost = Arc::new(AtomicUsize::new(0));
    let count_lost = |lost: &Arc<AtomicUsize>| {
        let lost = lost.clone();
        move |event| {
            lost.fetch_add(usize::from(matches!(event, PeerEvent::Lost { .. })), Ordering::SeqCst);
        }
    };
    let server = builder(&faults[0]).listen(address).on_peer_event(count_lost(&lost)).build()?;
    let client = builder(&faults[1]).on_peer_event(count_lost(&lost)).build()?;
    client.define("sum", |_: &Request, (x, y): (u64, u64)| x + y)?;
    let state = serve(&server)?;
    let endpoint = client.lookup(server.address())?;
    let next_note = AtomicU64::new(0);
    let thread = |slot: usize| Client {
        engine: &client,
        server: &endpoint,
        state: &state,
        next_note: &next_note,
        links_fail: plan.refused + plan.cut + plan.silent > 0,
        slot,
        dice: Dice::new(seed + slot as u64),
    };

    let end = Instant::now() + FAULT_PERIOD;
    let done: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|slot| scope.spawn(move || thread(slot).run_operations_until(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).sum()
    });
    let wrong = faults.iter().map(Faults::count).sum();
    faults.iter().for_each(Faults::end);
    thread(0).assert_recovered();
    // A note arrives while the connection holds. On a busy machine it may not: an engine that gets no processor for the peer timeout
    // is taken for dead.
    let end = Instant::now() + RECOVERY;
    loop {
        let before = lost.load(Ordering::SeqCst);
        let noted = thread(0).run_operation(NOTE);
        let id = next_note.load(Ordering::SeqCst) - 1;
        let is_there = || state.notes.lock().contains(&id);
        if noted.is_ok() {
            wait_for("the note", || (is_there(), lost.load(Ordering::SeqCst) > before), |(there, lost)| *there || *lost);
            if is_there() {
                break;
            }
        }
        assert!(Instant::now() < end, "no note arrives: {noted:?}");
    }
    assert_eq!(state.seen_twice.load(Ordering::SeqCst), 0, "one-way calls were handled twice");
    assert!(thread(0).links_fail || lost.load(Ordering::SeqCst) == 0, "a connection was lost that no fault had cut");

    // While both engines live, only what is exposed is left over; after finalize, nothing.
    let exposures = format!("{} exposures", THREADS + 1);
    wait_for("left over at the client", || client.leftovers(), Vec::is_empty);
    wait_for("left over at the server", || server.leftovers(), |left| left.iter().all(|left| *left == exposures));
    assert_eq!(state.exported.view(), letters(0, BULK));
    for engine in [&client, &server] {
        engine.finalize()?;
        assert_eq!(engine.leftovers(), Vec::<String>::new());
    }
    assert_eq!(faults.each_ref().map(Faults::links), [0, 0], "links were not closed");
    Ok((done, wrong))
}

fn run_seeds(address: &str, kernel_copy: bool, plan: FaultPlan) -> Result<()> {
    let (mut done, mut wrong) = (0, 0);
    for seed in 1..=SEEDS {
        let (succeeded, faults) = run_with_faults(address, kernel_copy, plan, seed)?;
        done += succeeded;
        wrong += faults;
    }
    assert!(done > 0 && wrong > 0, "{done} operations succeeded, {wrong} faults occurred");
    Ok(())
}

/// Links are slow, and send in pieces: nothing fails.
const PARTIAL_SENDS: FaultPlan = FaultPlan { refused: 0, cut: 0, silent: 0, held: 400 };
/// Links end at random.
const CUT_LINKS: FaultPlan = FaultPlan { refused: 200, cut: 850, silent: 0, held: 0 };
/// Links stay open, and deliver nothing any more.
const SILENT_LINKS: FaultPlan = FaultPlan { refused: 0, cut: 0, silent: 850, held: 0 };
const ALL_FAULTS: FaultPlan = FaultPlan { refused: 100, cut: 600, silent: 100, held: 200 };

macro_rules! fault_matrix {
    ($($name:ident: $plan:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn over_loop() -> Result<()> {
                super::run_seeds("loop://", true, $plan)
            }

            #[test]
            fn over_tcp() -> Result<()> {
                super::run_seeds("tcp://127.0.0.1:0", true, $plan)
            }

            #[test]
            fn over_shm() -> Result<()> {
                super::run_seeds("shm://", true, $plan)
            }

            #[test]
            fn over_shm_alone() -> Result<()> {
                super::run_seeds("shm://", false, $plan)
            }
        }
    )*};
}

fault_matrix! {
    partial_sends: PARTIAL_SENDS;
    cut_links: CUT_LINKS;
    silent_links: SILENT_LINKS;
    all_faults: ALL_FAULTS;
}
