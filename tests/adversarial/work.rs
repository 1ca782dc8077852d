//! Peers that make the most work of each byte, and those whose arguments become the most memory: both are in proportion to what
//! they have sent, and others are served meanwhile.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{BTreeMap, LinkedList};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, Request, Responder};
use serde::{Deserialize, Serialize};

use crate::adversary::Adversary;
use crate::common::wire::{self, Described, Message, Range, Status, Stream};
use crate::over_both;
use crate::scene::{Scene, report};
use crate::support::*;
use crate::victim::Kind;

/// Counts what is allocated, and the most of it ever.
pub struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

impl Counting {
    fn add(bytes: usize) {
        let now = ALLOCATED.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK.fetch_max(now, Ordering::Relaxed);
    }
}

// SAFETY: each method is the system's, called with what it was called with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Counting::add(layout.size());
        // SAFETY: the caller's promises are those that are asked for here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Counting::add(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above; it came from the same allocator.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Counting::add(size);
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// What is allocated now, in bytes, and the most since this was last asked.
pub fn allocated() -> (usize, usize) {
    let now = ALLOCATED.load(Ordering::Relaxed);
    (now, PEAK.swap(now, Ordering::Relaxed))
}

/// One byte in a message, and many in memory.
#[allow(clippy::large_enum_variant)]
#[derive(Serialize, Deserialize)]
enum Sparse {
    Nothing,
    Everything([u64; 32]),
}

type Kept = Arc<Mutex<Vec<(Responder<()>, Vec<String>)>>>;

/// What the victim serves for this.
pub fn define(engine: &Engine) {
    engine.define("texts", |_: &Request, list: Vec<String>| list.len()).unwrap();
    engine.define("lists", |_: &Request, list: Vec<Vec<u8>>| list.len()).unwrap();
    engine.define("boxes", |_: &Request, list: Vec<Option<Box<Sparse>>>| list.len()).unwrap();
    engine.define("sparse", |_: &Request, list: Vec<Sparse>| list.len()).unwrap();
    engine.define("linked", |_: &Request, list: LinkedList<u8>| list.len()).unwrap();
    engine.define("maps", |_: &Request, list: Vec<BTreeMap<u8, Sparse>>| list.len()).unwrap();
    engine.define("nothing", |_: &Request, list: Vec<()>| list.len()).unwrap();
    engine.define("bulks", |_: &Request, list: Vec<Bulk>| list.len()).unwrap();
    let kept = Kept::default();
    let here = kept.clone();
    engine.define_deferred("keep texts", move |to, list: Vec<String>| here.lock().unwrap().push((to, list))).unwrap();
    let here = kept.clone();
    engine.define("texts kept", move |_: &Request, ()| here.lock().unwrap().len()).unwrap();
    let let_go = move |_: &Request, ()| {
        let all = std::mem::take(&mut *kept.lock().unwrap());
        let count = all.len();
        all.into_iter().for_each(|(to, list)| {
            drop(list);
            let _ = to.respond(&());
        });
        count
    };
    engine.define("drop texts", let_go).unwrap();
}

/// What the victim holds for one peer at most: four of its largest messages, of 16 MiB.
const LIMIT: usize = 64 << 20;
/// The most that a peer's arguments may become, beside the half of it that lists which grow do not use yet.
const WORST: usize = 8 * LIMIT;

const MIB: usize = 1 << 20;

/// Calls with arguments of any length; the number of the call.
fn call(liar: &mut Adversary, number: u64, name: &str, arguments: &[u8], leases: u32) -> u64 {
    let mut message = Message::call(number, name, arguments.len());
    if let Message::Request { leases: given, budget_us, .. } = &mut message {
        *given = (number << 20, leases);
        // An unoptimized victim on a busy machine decodes for many seconds.
        *budget_us = 60_000_000;
    }
    if arguments.len() <= 16 << 10 {
        liar.tell(&message, arguments);
        return number;
    }
    liar.tell(&message, &[]);
    for (at, part) in arguments.chunks(MIB).enumerate() {
        liar.data(Stream::Request, number, (at * MIB) as u64, part);
    }
    number
}

/// A list of so many elements that are this.
fn list(count: usize, element: &[u8]) -> Vec<u8> {
    [&postcard::to_stdvec(&count).unwrap()[..], &element.repeat(count)].concat()
}

fn memory_after_decoding() {
    let _watchdog = Watchdog::start("work::memory_after_decoding");
    let scene = Scene::new();
    let before = scene.allocated().0;
    let mut number = 0;
    let lists: [(&str, Vec<u8>); 6] = [
        ("texts", list(15 * MIB, &[0])),
        ("lists", list(15 * MIB, &[0])),
        ("boxes", list(7 * MIB, &[1, 0])),
        ("sparse", list(15 * MIB, &[0])),
        ("linked", list(15 * MIB, &[0])),
        ("maps", list(5 * MIB, &[1, 0, 0])),
    ];
    for (name, arguments) in lists {
        let (begin, mut liar) = (Instant::now(), Adversary::after_handshake(&scene.address));
        scene.allocated();
        number += 1;
        call(&mut liar, number, name, &arguments, 0);
        let answer = liar.late_answer(number);
        let peak = scene.allocated().1 - before;
        assert!(peak < WORST, "{name}: {peak} bytes for {} of arguments", arguments.len());
        let Err(Status::Decode(reason)) = answer else { panic!("{name}: {answer:?}, with {peak} bytes") };
        // The name and a shape of one byte are declared for this call only, and count with it.
        let taken = arguments.len() + name.len() + 1;
        assert!(reason.contains(&LIMIT.to_string()) && reason.contains(&taken.to_string()), "{reason}");
        report(&format!("{} bytes of {name}", arguments.len()), &format!("refused at {} MiB", peak / MIB), begin);
        drop(liar);
        scene.assert_serves();
    }
    // Many of them, which stay: they count as long as their handler has them.
    let (begin, mut liar) = (Instant::now(), Adversary::after_handshake(&scene.address));
    scene.allocated();
    let empty = list(MIB - 10, &[0]);
    for _ in 0..40 {
        number += 1;
        call(&mut liar, number, "keep texts", &empty, 0);
    }
    let is_busy = |(message, _): &&(Message, Vec<u8>)| matches!(message, Message::Refuse { status: Status::Busy(_), .. });
    // It has all that it may have itself: another asks.
    let mut other = Adversary::after_handshake(&scene.address);
    let begun = Instant::now();
    let kept = loop {
        number += 1;
        call(&mut other, number, "texts kept", &[], 0);
        let kept: usize = postcard::from_bytes(&other.answer(number).unwrap()).unwrap();
        while liar.listen() {}
        if kept + liar.messages.iter().filter(is_busy).count() == 40 {
            break kept;
        }
        assert!(begun.elapsed() < patience() * BOUND, "{kept} lists are kept, and the others are not refused");
        thread::sleep(Duration::from_millis(10));
    };
    // None, if all of them have begun at the same time, and taken the room from each other.
    assert!(kept <= 20, "{kept} lists were kept");
    let peak = scene.allocated().1 - before;
    assert!(peak < WORST, "40 lists that stay: {peak} bytes");
    report("40 lists of a million empty texts, kept", &format!("{} MiB held", peak / MIB), begin);
    scene.assert_serves();
    number += 1;
    call(&mut other, number, "drop texts", &[], 0);
    assert_eq!(postcard::from_bytes::<usize>(&other.answer(number).unwrap()).unwrap(), kept);
    // What is honest is decoded, up to the largest message; by the same peer, when the others are gone.
    let texts = list(15 * MIB / 12, b"\x0bsome letters"[..12].as_ref());
    number += 1;
    call(&mut liar, number, "texts", &texts, 0);
    assert_eq!(postcard::from_bytes::<usize>(&liar.answer(number).unwrap()).unwrap(), 15 * MIB / 12);
    drop((liar, other));
    eventually("all of it is given back", || scene.allocated().0 < before + 16 * MIB);
    scene.assert_serves();
}

/// What an attack sends: how many bytes, when the victim has dealt with all of them.
type Attack = (&'static str, fn(&mut Adversary, &Scene) -> usize);

fn say(liar: &mut Adversary, bytes: &[u8]) -> usize {
    assert!(liar.channel.put(bytes, BOUND));
    bytes.len()
}

/// So many frames.
fn frames(count: u64, frame: impl Fn(u64) -> Message) -> Vec<u8> {
    (0..count).flat_map(|n| frame(n).frame(&[])).collect()
}

/// Bulks of these tokens, with content and a lease each.
fn bulks(count: u64, token: impl Fn(u64) -> u128, lease: impl Fn(u64) -> Option<u32>) -> Vec<u8> {
    let bulk = |n: u64| Described {
        lease: lease(n),
        content: Some(vec![7u8; 4]),
        ..Described::new(token(n).to_le_bytes(), 4, BulkMode::ReadOnly, 5)
    };
    postcard::to_stdvec(&(0..count).map(bulk).collect::<Vec<_>>()).unwrap()
}

fn answered(liar: &mut Adversary, name: &str, arguments: &[u8], leases: u32) -> usize {
    let number = u64::from(rand::random::<u32>());
    call(liar, number, name, arguments, leases);
    liar.answer(number).unwrap();
    arguments.len()
}

const ATTACKS: &[Attack] = &[
    ("pulls that are aborted", |liar, scene| {
        let pulls = frames(16_000, |n| Message::Pull(scene.range(n, Kind::ReadOnly)));
        let aborts = frames(16_000, |n| Message::Abort { transfer: 15_999 - n, push: false });
        say(liar, &pulls) + say(liar, &aborts)
    }),
    ("pushes that are aborted", |liar, scene| {
        let pushes = frames(16_000, |n| Message::Push(scene.range(n, Kind::ReadWrite)));
        let aborts = frames(16_000, |n| Message::Abort { transfer: 15_999 - n, push: true });
        say(liar, &pushes) + say(liar, &aborts)
    }),
    ("calls that are announced and cancelled", |liar, _| {
        let announced: Vec<u8> = (0..20_000)
            .flat_map(|n| {
                let mut message = Message::call(n, "swallow", 100_000);
                if let Message::Request { procedure, declaration, .. } = &mut message {
                    *procedure = 1;
                    *declaration = declaration.take().filter(|_| n == 0);
                }
                [message.frame(&[]), Message::Cancel { call: n }.frame(&[])].concat()
            })
            .collect();
        say(liar, &announced)
    }),
    ("tokens that there are not", |liar, scene| {
        let range = scene.range(0, Kind::ReadOnly);
        say(liar, &frames(20_000, |n| Message::Pull(Range { transfer: n, token: u128::from(n).to_le_bytes(), ..range })))
    }),
    ("words of memory that was taken back", |liar, _| {
        say(liar, &frames(40_000, |n| Message::Revoked { token: u128::from(n).to_le_bytes() }))
    }),
    ("pings", |liar, _| say(liar, &frames(40_000, |_| Message::Ping))),
    ("releases of what there is not", |liar, _| say(liar, &frames(40_000, |first| Message::Release { first, count: u32::MAX }))),
    ("names", |liar, _| {
        let named = (0..10_000).flat_map(|n| Message::call(n, &format!("name {n}"), 1).frame(&[1])).collect::<Vec<_>>();
        say(liar, &named)
    }),
    ("a frame in small pieces", |liar, _| {
        let frame = Message::call(1, "swallow", 400_000).frame(&vec![1; 400_000]);
        frame.chunks(400).map(|piece| say(liar, piece)).sum()
    }),
    ("bulks of one token", |liar, _| answered(liar, "bulks", &bulks(80_000, |_| 7, |n| Some(n as u32)), 80_000)),
    ("bulks with every other lease", |liar, _| {
        answered(liar, "bulks", &bulks(80_000, u128::from, |n| n.is_multiple_of(2).then_some(n as u32)), 80_000)
    }),
    ("lists of nothing", |liar, _| {
        (0..200).map(|_| answered(liar, "nothing", &postcard::to_stdvec(&16_000usize).unwrap(), 0) + 60).sum()
    }),
    ("empty texts", |liar, _| answered(liar, "texts", &list(2 * MIB, &[0]), 0)),
];

/// The most processor time that an attack may take, beside so much for each byte, in a debug build. What is quadratic takes ten
/// seconds and more. (How the work grows is measured exactly in the tests of the protocol.)
const IN_ANY_CASE: Duration = Duration::from_secs(3);
const FOR_A_BYTE: Duration = Duration::from_nanos(500);

/// How long honest calls take, until it is dropped.
struct Stopwatch {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<Vec<Duration>>>,
}

impl Stopwatch {
    fn start(scene: &Scene) -> Stopwatch {
        let (engine, to, stop) = (scene.honest.clone(), scene.to.clone(), Arc::<AtomicBool>::default());
        let stopped = stop.clone();
        let measure = move || {
            let mut took = Vec::new();
            while took.is_empty() || !stopped.load(Ordering::SeqCst) {
                let begin = Instant::now();
                assert_serves(&engine, &to);
                took.push(begin.elapsed());
                thread::sleep(Duration::from_millis(1));
            }
            took
        };
        Stopwatch { stop, thread: Some(thread::spawn(measure)) }
    }

    /// The median, and the worst.
    fn stop(mut self) -> (Duration, Duration) {
        self.stop.store(true, Ordering::SeqCst);
        let mut took = self.thread.take().unwrap().join().expect("an honest peer was not served");
        took.sort();
        (took[took.len() / 2], took[took.len() - 1])
    }
}

fn work_per_byte() {
    let _watchdog = Watchdog::start("work::work_per_byte");
    let scene = Scene::new();
    for (name, attack) in ATTACKS {
        let mut liar = Adversary::after_handshake(&scene.address);
        let stopwatch = Stopwatch::start(&scene);
        let (begin, before) = (Instant::now(), scene.processor_time());
        let bytes = attack(&mut liar, &scene);
        liar.assert_listens();
        let took = scene.processor_time() - before;
        let (median, worst) = stopwatch.stop();
        let others = format!("{took:?} of processor time; honest calls took {median:?}, {worst:?} at worst");
        report(&format!("{name}, {bytes} bytes"), &others, begin);
        assert!(
            took < patience() * (IN_ANY_CASE + FOR_A_BYTE * bytes as u32),
            "{name}: {took:?} of processor time for {bytes} bytes"
        );
        assert!(median < patience() * Duration::from_millis(200), "{name}: honest calls took {median:?}, {worst:?} at worst");
        assert!(worst < patience() * Duration::from_secs(4), "{name}: honest calls took {median:?}, {worst:?} at worst");
        drop(liar);
        scene.assert_serves();
    }
}

/// Connections that show resumption tokens which no engine has given out.
fn made_up_tickets() {
    let _watchdog = Watchdog::start("work::made_up_tickets");
    let scene = Scene::new();
    let begin = Instant::now();
    let stopwatch = Stopwatch::start(&scene);
    for n in 0..200u64 {
        let mut liar = Adversary::dial(&scene.address);
        let hello = (scene.honest_incarnation(), 1u64 << 20, Vec::<String>::new(), Some(u128::from(n)), false);
        liar.bytes(&wire::piece(wire::HELLO, &postcard::to_stdvec(&hello).unwrap()));
        liar.await_handshake();
    }
    let (median, worst) = stopwatch.stop();
    assert!(median < patience() * Duration::from_millis(200), "honest calls took {median:?}, {worst:?} at worst");
    scene.assert_serves();
    report("200 made-up tickets", &format!("honest calls took {median:?}, {worst:?} at worst"), begin);
}

over_both!(memory_after_decoding, work_per_byte, made_up_tickets);
