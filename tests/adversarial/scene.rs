//! A victim, honest peers of it, and the state that must hold after each case.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, Endpoint, Engine, Request};

use crate::adversary::Adversary;
use crate::common::wire::{Message, Range, Status};
use crate::support::*;
use crate::victim::{BOUND_TO_ONE, GONE, HONEST, KEY, Kind, LEN, PATIENT, SECRET, WRITE_ONLY, full_of};

/// What the victim's allocator may keep of the memory that an adversary made it allocate, in KiB.
const KEPT: u64 = 96 << 10;

/// The expected outcome of a case.
pub enum Then {
    /// The victim closes the connection.
    HangsUp,
    /// The victim continues the connection.
    Continues,
    /// This many requests end, all with this status; the victim continues the connection.
    EndsWith(&'static str, usize),
    /// The adversary ends the connection.
    Leaves,
}

pub struct Case {
    pub name: &'static str,
    pub run: fn(&mut Adversary, &Scene),
    pub then: Then,
}

pub const fn case(name: &'static str, then: Then, run: fn(&mut Adversary, &Scene)) -> Case {
    Case { name, run, then }
}

pub struct Scene {
    /// Dropped first.
    honest_load: HonestLoad,
    child: RefCell<Child>,
    pub pid: i32,
    pub address: String,
    bulks: Vec<Bulk>,
    /// Exposed to the honest peer alone.
    pub bound: Bulk,
    /// It listens, and the victim always has operations in progress with it.
    pub honest: Engine,
    pub to: Endpoint,
    /// What it exposes for every peer to read.
    pub theirs: calomel::Exposed<Vec<u8>, calomel::ReadOnly>,
    before: (usize, usize, usize),
    rss_before: u64,
}

/// A client that calls and pulls all the time, and counts.
struct HonestLoad {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl HonestLoad {
    fn start(engine: Engine, address: &str, read_only: Bulk) -> HonestLoad {
        let (rounds, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (counter, stopped, address) = (rounds.clone(), stop.clone(), address.to_owned());
        let thread = thread::spawn(move || {
            let to = engine.lookup(&address).unwrap();
            let (expected, mut bytes) = (pattern(1, LEN), vec![0u8; LEN]);
            while !stopped.load(Ordering::SeqCst) {
                assert_serves(&engine, &to);
                bytes.fill(0);
                assert_eq!(read_only.on(&to).pull_into(&mut bytes).unwrap(), LEN);
                assert!(bytes == expected);
                counter.fetch_add(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(2));
            }
            assert!(to.is_connected());
        });
        HonestLoad { rounds, stop, thread: Some(thread) }
    }
}

impl Drop for HonestLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.take().map(thread::JoinHandle::join);
        assert!(thread::panicking() || ended.is_none_or(|ended| ended.is_ok()), "an honest peer was not served");
    }
}

/// The victim's report.
struct Seen {
    begun: u64,
    ended: u64,
    rounds: u64,
    notes: u64,
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// Whether `all` contains `part`.
fn contains(all: &[u8], part: &[u8]) -> bool {
    // SAFETY: both are valid for their lengths, and only read.
    !unsafe { libc::memmem(all.as_ptr().cast(), all.len(), part.as_ptr().cast(), part.len()) }.is_null()
}

fn resident(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

impl Scene {
    pub fn new() -> Scene {
        Scene::with(None)
    }

    pub fn with(key: Option<&str>) -> Scene {
        let settings: Vec<_> = key.map(|key| (KEY, key)).into_iter().collect();
        let mut child = Child::start("victim", &settings);
        let address = child.hear("address");
        let bulks: Vec<Bulk> = (0..5).map(|_| postcard::from_bytes(&unhex(&child.hear("bulk"))).unwrap()).collect();
        let builder = || match key {
            Some(key) => configured().peer_timeout(PATIENT).pre_shared_key(key),
            None => configured().peer_timeout(PATIENT),
        };
        let honest = builder().listen(anywhere()).build().unwrap();
        define_add(&honest);
        honest.define("identify", |_: &Request, ()| HONEST.to_vec()).unwrap();
        let exposed = honest.expose_read_only(full_of(HONEST)).unwrap();
        let to = honest.lookup(&address).unwrap();
        let bound = honest.procedure::<Bulk, Bulk>("meet").on(&to).call(&exposed.bulk()).unwrap();
        let honest_load = HonestLoad::start(builder().build().unwrap(), &address, bulks[Kind::ReadOnly as usize].clone());
        let pid = child.pid();
        let mut scene = Scene {
            child: RefCell::new(child),
            pid,
            address,
            bulks,
            bound,
            honest,
            to,
            theirs: exposed,
            honest_load,
            before: (0, 0, 0),
            rss_before: 0,
        };
        // What is made once and kept does not count.
        if key.is_none() {
            for _ in 0..3 {
                Adversary::engaged(&scene.address);
            }
        }
        // It dials other engines, including itself.
        scene.dial(&scene.address, 0);
        eventually("everything that was begun has ended", || {
            let seen = scene.state();
            seen.begun == seen.ended && seen.rounds > 2
        });
        let mut before = holdings(pid);
        eventually("it settles", || {
            thread::sleep(Duration::from_millis(100));
            let now = holdings(pid);
            std::mem::replace(&mut before, now) == now
        });
        scene.before = before;
        scene.rss_before = resident(pid);
        scene
    }

    /// The whole of one of the victim's exposures.
    pub fn range(&self, transfer: u64, kind: Kind) -> Range {
        Range::of(transfer, &self.bulks[kind as usize])
    }

    /// The victim's incarnation, beside its address.
    pub fn incarnation(&self) -> u64 {
        self.range(0, Kind::ReadOnly).owner
    }

    #[track_caller]
    fn state(&self) -> Seen {
        let mut child = self.child.borrow_mut();
        child.tell("report");
        let reply = child.hear("state");
        let mut words = reply.splitn(5, ' ');
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        let seen = Seen { begun: number(), ended: number(), rounds: number(), notes: number() };
        let wrong = words.next().unwrap();
        assert!(wrong.is_empty(), "{wrong}");
        seen
    }

    /// The incarnation of the honest peer.
    pub fn honest_incarnation(&self) -> u64 {
        Range::of(0, &self.theirs.bulk()).owner
    }

    /// How many one-way calls have been handled.
    pub fn notes(&self) -> u64 {
        self.state().notes
    }

    /// How many bytes the victim has allocated, and the peak since the last report.
    pub fn allocated(&self) -> (usize, usize) {
        let mut child = self.child.borrow_mut();
        child.tell("allocated");
        let reply = child.hear("has");
        let (now, peak) = reply.split_once(' ').unwrap();
        (now.parse().unwrap(), peak.parse().unwrap())
    }

    /// Has the victim dial an address, and start a call, a one-way call, a pull and a push.
    pub fn dial(&self, address: &str, incarnation: u64) {
        self.child.borrow_mut().tell(&format!("dial {incarnation} {address}"));
    }

    /// How many rounds of honest peers have been served.
    pub fn served(&self) -> u64 {
        self.honest_load.rounds.load(Ordering::SeqCst)
    }

    /// Resident memory of the victim, in KiB, above its level at the start.
    pub fn grown(&self) -> u64 {
        resident(self.pid).saturating_sub(self.rss_before)
    }

    /// Processor time that the victim has used: what other tests do on the same processors is no part of it.
    /// Two ticks (20 ms) less at most.
    pub fn processor_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap();
        // The name, in parentheses, may contain spaces. Times in user and in kernel mode are fields 14 and 15, the state field 3.
        let fields = stat.rsplit_once(") ").unwrap().1.split(' ').skip(14 - 3).take(2);
        let ticks: u64 = fields.map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
    }

    /// Honest peers are served now.
    #[track_caller]
    pub fn assert_serves(&self) {
        let before = self.served();
        assert_serves(&self.honest, &self.to);
        eventually("honest peers are served", || self.served() > before + 1);
    }

    /// Nothing received was secret from the adversary.
    #[track_caller]
    pub fn assert_kept_to_itself(&self, received: &[u8]) {
        for (what, mark) in
            [("secret", SECRET), ("write-only", WRITE_ONLY), ("bound", BOUND_TO_ONE), ("gone", GONE), ("another's", HONEST)]
        {
            assert!(!contains(received, &mark), "the adversary has read {what} memory");
        }
        let secret = self.range(0, Kind::Secret).token;
        assert!(!contains(received, &secret), "the adversary has received the token of the secret memory");
    }

    /// The adversary is gone: the victim is in the same state as before.
    #[track_caller]
    pub fn assert_unharmed(&self, received: &[u8]) {
        self.assert_kept_to_itself(received);
        let begin = Instant::now();
        loop {
            let (seen, now) = (self.state(), holdings(self.pid));
            let done = seen.begun == seen.ended;
            let back = now.0 <= self.before.0 && now.1 <= self.before.1 && now.2 <= self.before.2 + 3;
            if done && back && self.grown() <= KEPT {
                break;
            }
            let late = begin.elapsed() > patience() * Duration::from_secs(8);
            let (begun, ended, grown, before) = (seen.begun, seen.ended, self.grown(), self.before);
            assert!(!late, "{ended} of {begun} operations have ended; {before:?} before, {now:?} now; {grown} KiB more");
            thread::sleep(Duration::from_millis(2));
        }
        self.assert_serves();
        assert!(self.to.is_connected(), "the honest peer's connection has ended");
    }

    /// The honest peer can access the memory that is exposed to it alone.
    #[track_caller]
    pub fn assert_bound_is_reached(&self) {
        let mut bytes = vec![0u8; LEN];
        assert_eq!(self.bound.on(&self.to).pull_into(&mut bytes).unwrap(), LEN);
        assert!(bytes == full_of(BOUND_TO_ONE));
    }
}

/// Prints the outcome of a case.
pub fn report(case: &str, outcome: &str, begin: Instant) {
    println!("{case}: {outcome} ({} ms)", begin.elapsed().as_millis());
}

fn name_of(status: &Status) -> String {
    let text = format!("{status:?}");
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned()
}

/// The side that dialled the connection of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    ByAdversary,
    ByVictim,
}

/// Runs each case on a connection of its own, with operations of the victim in progress on it.
pub fn table(group: &'static str, begun: Begun, cases: &[Case]) {
    let _watchdog = Watchdog::start(group);
    let (mut scene, mut failed) = (Scene::new(), Vec::new());
    for Case { name, run, then } in cases {
        let (begin, served) = (Instant::now(), scene.served());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut adversary = match begun {
                Begun::ByAdversary => Adversary::engaged(&scene.address),
                Begun::ByVictim => Adversary::dialled(|address, incarnation| scene.dial(address, incarnation)),
            };
            run(&mut adversary, &scene);
            let outcome = match then {
                Then::HangsUp => {
                    adversary.assert_hung_up();
                    "the victim hangs up".to_owned()
                }
                Then::Continues => {
                    adversary.assert_listens();
                    "ignored".to_owned()
                }
                Then::EndsWith(expected, count) => {
                    let reply: Vec<String> = adversary.statuses(*count).iter().map(name_of).collect();
                    assert!(
                        reply.len() == *count && reply.iter().all(|status| status == expected),
                        "{count} {expected}: {reply:?}"
                    );
                    format!("{count} times {expected}")
                }
                Then::Leaves => "the adversary disconnects".to_owned(),
            };
            let received = std::mem::take(&mut adversary.received);
            drop(adversary);
            scene.assert_unharmed(&received);
            assert!(scene.served() > served);
            outcome
        }));
        match outcome {
            Ok(outcome) => report(&format!("{group}: {name}"), &outcome, begin),
            Err(_) => {
                println!("{group}: {name}: FAILED");
                failed.push(name);
                // The other cases get a new victim.
                let harmed = std::mem::replace(&mut scene, Scene::new());
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(harmed)));
            }
        }
    }
    assert!(failed.is_empty(), "{group}: {failed:?}");
    scene.assert_bound_is_reached();
}

/// The frames of a call of `add`.
pub fn call_of_add(number: u64) -> Vec<u8> {
    let body = postcard::to_stdvec(&(1u32, 2u32)).unwrap();
    Message::call(number, "add", body.len()).frame(&body)
}
