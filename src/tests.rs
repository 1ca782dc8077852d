//! Engines over transports that fail by plan: whatever happens below, each call and each transfer ends in one result or in
//! one error within its time, bytes that are said to be there are the right ones, and engines live on.

mod devices;
mod instructions;
pub(crate) mod measure;
mod small;
mod work;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::transport::fault::{Dice, FaultPlan, Faults};
use crate::{Bulk, BulkMode, Endpoint, Engine, Error, Exposed, Request, Result, Writable};

/// What each call and each transfer may take.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How much later it may end on a machine that is busy.
const SLACK: Duration = Duration::from_millis(1500);
/// How long things go wrong.
const WEATHER: Duration = Duration::from_millis(600);
/// By then an engine has found out what was lost, and is as it was.
const RECOVERY: Duration = Duration::from_secs(10);
const THREADS: usize = 3;
const SEEDS: u64 = 2;
/// Bytes of a large argument, and of a large result.
const LARGE: usize = 100_000;
/// Bytes of a bulk: three chunks.
const BULK: usize = 600_000;

/// Letters, of which no two places look alike.
static LETTERS: LazyLock<String> = LazyLock::new(|| {
    let mut dice = Dice::new(7);
    (0..2 * BULK).map(|_| char::from(b'a' + dice.roll(26) as u8)).collect()
});

fn letters(at: usize, len: usize) -> &'static str {
    &LETTERS[at..at + len]
}

/// What a handler says that did something in turn: how many bytes, or whether its error is one that the plan explains, and
/// which.
type Told = std::result::Result<usize, (bool, String)>;

fn told(result: Result<usize>) -> Told {
    result.map_err(|error| (explained(&error), error.to_string()))
}

/// True for what may happen when links fail.
fn explained(error: &Error) -> bool {
    matches!(error, Error::Timeout { .. } | Error::Unreachable { .. } | Error::Disconnected { .. })
}

/// What the server has seen, and what it lends.
struct World {
    notes: Mutex<HashSet<u64>>,
    seen_twice: AtomicUsize,
    /// To be pulled from.
    lent: Exposed<String, crate::ReadOnly>,
    /// To be pushed into, one for each thread of the client.
    slots: Vec<Exposed<Vec<u8>, Writable>>,
}

fn serve(server: &Engine) -> Result<Arc<World>> {
    let slot = || server.expose(vec![0; BULK], BulkMode::WriteOnly);
    let world = Arc::new(World {
        notes: Mutex::default(),
        seen_twice: AtomicUsize::new(0),
        lent: server.expose_read_only(letters(0, BULK).to_owned())?,
        slots: (0..THREADS).map(|_| slot()).collect::<Result<_>>()?,
    });
    server.define("sum", |_: &Request, (x, y): (u64, u64)| x + y)?;
    server.define("shout", |_: &Request, text: String| text.to_ascii_uppercase())?;
    let noted = Arc::downgrade(&world);
    server.define("note", move |_: &Request, id: u64| {
        if let Some(world) = noted.upgrade()
            && !world.notes.lock().insert(id)
        {
            world.seen_twice.fetch_add(1, Ordering::SeqCst);
        }
    })?;
    let (lent, slots) = (world.lent.bulk(), world.slots.iter().map(Exposed::bulk).collect::<Vec<Bulk>>());
    server.define("lend", move |_: &Request, slot: Option<usize>| match slot {
        Some(slot) => slots[slot].clone(),
        None => lent.clone(),
    })?;
    server.define("fetch", |request: &Request, (bulk, at): (Bulk, usize)| {
        let mut got = vec![0; bulk.len()];
        let pulled = bulk.on(request.endpoint()).timeout(TIMEOUT).pull_into(&mut got);
        match pulled {
            Ok(_) if got != letters(at, got.len()).as_bytes() => Err((false, "pulled bytes are wrong".to_owned())),
            pulled => told(pulled),
        }
    })?;
    server.define("fill", |request: &Request, (bulk, at): (Bulk, usize)| {
        let len = bulk.len();
        told(bulk.on(request.endpoint()).timeout(TIMEOUT).push_from(letters(at, len)))
    })?;
    server.define("ask_back", |request: &Request, (x, y): (u64, u64)| {
        let sum = request.engine().procedure::<(u64, u64), u64>("sum");
        told(sum.on(request.endpoint()).timeout(TIMEOUT).call(&(x, y)).map(|sum| sum as usize))
    })?;
    Ok(world)
}

/// What a client does.
const DEEDS: u64 = 9;

struct Client<'a> {
    engine: &'a Engine,
    server: &'a Endpoint,
    world: &'a World,
    next_note: &'a AtomicU64,
    links_fail: bool,
    slot: usize,
    dice: Dice,
}

impl Client<'_> {
    fn roll(&mut self, below: usize) -> usize {
        self.dice.roll(below as u64) as usize
    }

    /// Sees to it that something ends in time.
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

    /// Calls a handler that does something in turn, which may fail as this call may.
    fn call_told<A: serde::Serialize>(&self, name: &str, arguments: &A) -> Result<Option<usize>> {
        match self.call::<A, Told>(name, arguments)? {
            Ok(count) => Ok(Some(count)),
            Err((explained, error)) => {
                assert!(explained, "{name}: {error}");
                Ok(None)
            }
        }
    }

    /// Does one thing, and checks what comes of it; false when a handler could not do what it was asked.
    fn act(&mut self, deed: u64) -> Result<bool> {
        let at = self.roll(BULK);
        let len = 1 + self.roll(BULK);
        match deed {
            0 => {
                let (x, y) = (at as u64, len as u64);
                assert_eq!(self.call::<_, u64>("sum", &(x, y))?, x + y);
            }
            1 => {
                let text = letters(at, LARGE);
                assert!(self.call::<_, String>("shout", &text)? == text.to_ascii_uppercase(), "an answer is wrong");
            }
            2 => {
                let id = self.next_note.fetch_add(1, Ordering::SeqCst);
                let note = self.engine.procedure::<u64, ()>("note").on(self.server).timeout(TIMEOUT);
                self.in_time("note", || note.notify(&id))?;
            }
            3 => {
                let bulk: Bulk = self.call("lend", &None::<usize>)?;
                let at = at.min(BULK - 1);
                let part = bulk.slice(at, len.min(BULK - at))?.on(self.server).timeout(TIMEOUT);
                let mut got = vec![0; part.len()];
                let pulled = self.in_time("pull", || part.pull_into(&mut got))?;
                assert_eq!(pulled, got.len());
                assert!(got == letters(at, pulled).as_bytes(), "pulled bytes are wrong");
            }
            4 => {
                let bulk: Bulk = self.call("lend", &Some(self.slot))?;
                let whole = bulk.on(self.server).timeout(TIMEOUT);
                let pushed = self.in_time("push", || whole.push_from(letters(at, len).as_bytes()))?;
                assert_eq!(pushed, len);
                let mut got = vec![0; len];
                self.world.slots[self.slot].read_at(0, &mut got)?;
                assert!(got == letters(at, len).as_bytes(), "pushed bytes are wrong");
            }
            5 => {
                let lent = self.engine.expose_read_only(letters(at, len).to_owned())?;
                let Some(pulled) = self.call_told("fetch", &(lent.bulk(), at))? else { return Ok(false) };
                assert_eq!(pulled, len);
            }
            6 => {
                let lent = self.engine.expose(vec![0u8; len], BulkMode::WriteOnly)?;
                let Some(pushed) = self.call_told("fill", &(lent.bulk(), at))? else { return Ok(false) };
                assert_eq!(pushed, len);
                assert!(lent.reclaim() == letters(at, len).as_bytes(), "filled bytes are wrong");
            }
            7 => {
                let (x, y) = (at as u64, len as u64);
                let Some(sum) = self.call_told("ask_back", &(x, y))? else { return Ok(false) };
                assert_eq!(sum, at + len);
            }
            _ => {
                // Several at once, and one that nobody waits for.
                let shout = self.engine.procedure::<&str, String>("shout").on(self.server).timeout(TIMEOUT);
                drop(shout.start(&letters(at, LARGE))?);
                let texts = [letters(at, 10), letters(at, LARGE), letters(at, 1000)];
                let started = texts.iter().map(|text| shout.start(text)).collect::<Result<Vec<_>>>()?;
                let answers = self.in_time("three calls", || crate::Pending::wait_all(started));
                for (text, answer) in texts.iter().zip(answers) {
                    assert!(answer? == text.to_ascii_uppercase(), "an answer is wrong");
                }
            }
        }
        Ok(true)
    }

    /// Acts until a moment; how often that went well.
    fn act_until(&mut self, end: Instant) -> usize {
        let mut done = 0;
        while Instant::now() < end {
            let deed = self.dice.roll(DEEDS);
            match self.act(deed) {
                Ok(well) => {
                    assert!(well || self.links_fail, "deed {deed} failed at the server");
                    done += usize::from(well);
                }
                Err(error) => assert!(self.links_fail && explained(&error), "deed {deed}: {error}"),
            }
        }
        done
    }

    /// Everything works again.
    fn act_well(&mut self) {
        let end = Instant::now() + RECOVERY;
        for deed in 0..DEEDS {
            loop {
                match self.act(deed) {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(error) => assert!(explained(&error), "deed {deed}: {error}"),
                }
                assert!(Instant::now() < end, "deed {deed} does not work again");
            }
        }
    }
}

/// Ends the process when a test hangs, and tells the seed when one fails.
struct Watched {
    what: String,
    _ended: mpsc::Sender<()>,
}

impl Watched {
    fn new(what: String) -> Watched {
        let (_ended, ended) = mpsc::channel::<()>();
        let hung = format!("{what} hangs");
        std::thread::spawn(move || {
            if ended.recv_timeout(Duration::from_secs(60)) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{hung}");
                std::process::abort();
            }
        });
        Watched { what, _ended }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed: {}", self.what);
        }
    }
}

/// Waits for something that comes by itself.
fn comes<T: std::fmt::Debug>(what: &str, look: impl Fn() -> T, is_there: impl Fn(&T) -> bool) {
    let end = Instant::now() + RECOVERY;
    loop {
        let seen = look();
        if is_there(&seen) {
            return;
        }
        assert!(Instant::now() < end, "{what}: {seen:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a mixed load while things go wrong; how often it went well, and how much went wrong.
fn weather(address: &str, kernel_copy: bool, plan: FaultPlan, seed: u64) -> Result<(usize, usize)> {
    let _watched = Watched::new(format!("seed {seed} at {address} with {plan:?}"));
    let faults = [Faults::new(seed, plan), Faults::new(!seed, plan)];
    let builder = |faults: &Faults| {
        let builder = Engine::builder().default_timeout(TIMEOUT).wrap(faults.wrapping());
        let builder = builder.same_host_upgrade(false).shm_kernel_copy(kernel_copy);
        if plan.silent > 0 {
            builder.heartbeat(Duration::from_millis(150)).connect_timeout(Duration::from_millis(300))
        } else {
            builder
        }
    };
    let server = builder(&faults[0]).listen(address).build()?;
    let client = builder(&faults[1]).build()?;
    client.define("sum", |_: &Request, (x, y): (u64, u64)| x + y)?;
    let world = serve(&server)?;
    let endpoint = client.lookup(server.address())?;
    let next_note = AtomicU64::new(0);
    let thread = |slot: usize| Client {
        engine: &client,
        server: &endpoint,
        world: &world,
        next_note: &next_note,
        links_fail: plan.refused + plan.cut + plan.silent > 0,
        slot,
        dice: Dice::new(seed + slot as u64),
    };

    let end = Instant::now() + WEATHER;
    let done: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|slot| scope.spawn(move || thread(slot).act_until(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).sum()
    });
    let wrong = faults.iter().map(Faults::count).sum();
    faults.iter().for_each(Faults::end);
    thread(0).act_well();
    let last = next_note.load(Ordering::SeqCst) - 1;
    comes("the last note", || world.notes.lock().contains(&last), |there| *there);
    assert_eq!(world.seen_twice.load(Ordering::SeqCst), 0, "one-way calls that were handled twice");

    // Nothing is left over while both engines live, but what was looked up and what is exposed; and nothing at all after.
    let exposures = format!("{} exposures", THREADS + 1);
    comes("left over at the client", || client.leftovers(), Vec::is_empty);
    comes("left over at the server", || server.leftovers(), |left| left.iter().all(|left| *left == exposures));
    assert_eq!(world.lent.view(), letters(0, BULK));
    for engine in [&client, &server] {
        engine.finalize()?;
        assert_eq!(engine.leftovers(), Vec::<String>::new());
    }
    assert_eq!(faults.each_ref().map(Faults::links), [0, 0], "links that were not closed");
    Ok((done, wrong))
}

fn fault_matrix(address: &str, kernel_copy: bool, plan: FaultPlan) -> Result<()> {
    let (mut done, mut wrong) = (0, 0);
    for seed in 1..=SEEDS {
        let (well, not) = weather(address, kernel_copy, plan, seed)?;
        done += well;
        wrong += not;
    }
    assert!(done > 0 && wrong > 0, "{done} things went well, {wrong} wrong");
    Ok(())
}

/// Links are not broken, but slow and piecemeal: nothing fails.
const NO_ROOM: FaultPlan = FaultPlan { refused: 0, cut: 0, silent: 0, held: 400 };
/// Links end in the middle of everything.
const CUTS: FaultPlan = FaultPlan { refused: 200, cut: 850, silent: 0, held: 0 };
/// Links stay, and say nothing any more.
const SILENCE: FaultPlan = FaultPlan { refused: 0, cut: 0, silent: 850, held: 0 };
const EVERYTHING: FaultPlan = FaultPlan { refused: 100, cut: 600, silent: 100, held: 200 };

macro_rules! fault_matrix {
    ($($name:ident: $plan:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn over_loop() -> Result<()> {
                super::fault_matrix("loop://", true, $plan)
            }

            #[test]
            fn over_tcp() -> Result<()> {
                super::fault_matrix("tcp://127.0.0.1:0", true, $plan)
            }

            #[test]
            fn over_shm() -> Result<()> {
                super::fault_matrix("shm://", true, $plan)
            }

            #[test]
            fn over_shm_alone() -> Result<()> {
                super::fault_matrix("shm://", false, $plan)
            }
        }
    )*};
}

fault_matrix! {
    no_room: NO_ROOM;
    cuts: CUTS;
    silence: SILENCE;
    everything: EVERYTHING;
}

/// A waker that looks at the locks of the engines that it may be woken by.
struct LockedOut(Arc<crate::progress::Core>, std::sync::mpsc::Sender<bool>);

impl std::task::Wake for LockedOut {
    fn wake(self: Arc<Self>) {
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.0.assert_unlocked()));
        let _ = self.1.send(found.is_ok());
    }
}

#[test]
fn hooks_and_wakers_run_while_nothing_is_locked() {
    for address in ["loop://", "tcp://127.0.0.1:0", "shm://"] {
        let core: Arc<std::sync::OnceLock<std::sync::Weak<crate::progress::Core>>> = Arc::default();
        let own = core.clone();
        // A hook that panics denies the call.
        let decide = move |_: &crate::Caller<'_>| {
            own.get().unwrap().upgrade().unwrap().assert_unlocked();
            true
        };
        let server = Engine::builder().listen(address).same_host_upgrade(false).authorize(decide).build().unwrap();
        core.set(Arc::downgrade(&server.shared().core)).unwrap();
        server.define("twice", |_: &Request, n: u32| 2 * n).unwrap();
        let client = Engine::builder().same_host_upgrade(false).build().unwrap();
        let twice = client.procedure::<u32, u32>("twice");
        let peer = client.lookup(server.address()).unwrap();
        for round in 0..50u64 {
            // Now and then both sides sleep, and the reactor tells.
            if round % 5 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(twice.on(&peer).call(&21).unwrap(), 42);
            let (tell, told) = std::sync::mpsc::channel();
            let waker = std::task::Waker::from(Arc::new(LockedOut(client.shared().core.clone(), tell)));
            let mut pending = twice.on(&peer).start(&1).unwrap();
            let mut context = std::task::Context::from_waker(&waker);
            if std::pin::Pin::new(&mut pending).poll(&mut context).is_pending() {
                assert!(told.recv_timeout(Duration::from_secs(20)).unwrap(), "a waker ran with a lock held, over {address}");
            }
        }
    }
}
