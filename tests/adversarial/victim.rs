//! The victim: it serves, has memory exposed in each mode, has operations of its own in progress with peers that ask for that,
//! and reports to its parent.

use std::io::BufRead;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use calomel::{Bulk, BulkMode, Endpoint, Engine, Error, Exposed, ReadOnly, Request};

use crate::adversary::MOVED;
use crate::common::wire::Described;
use crate::support::*;

/// Set: the key that the victim shares with its peers.
pub const KEY: &str = "CALOMEL_TEST_KEY";

/// The content of the victim's memory, so that any piece of it can be recognized.
pub const SECRET: [u8; 16] = *b"\x93never-exposed!\x93";
pub const WRITE_ONLY: [u8; 16] = *b"\x94not-to-be-read\x94";
pub const BOUND_TO_ONE: [u8; 16] = *b"\x95not-for-others\x95";
pub const GONE: [u8; 16] = *b"\x96was-reclaimed!\x96";
/// Known to the honest peer only.
pub const HONEST: [u8; 16] = *b"\x97of-honest-peer\x97";

pub const LEN: usize = 100_000;

pub fn full_of(mark: [u8; 16]) -> Vec<u8> {
    let mut bytes = mark.repeat(LEN.div_ceil(mark.len()));
    bytes.truncate(LEN);
    bytes
}

/// The memory whose bulks the victim prints for its parent, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read and write; its token is never sent to a peer.
    Secret,
    ReadOnly,
    WriteOnly,
    ReadWrite,
    /// Reclaimed.
    Gone,
}

struct Memory {
    secret: Exposed<Vec<u8>>,
    read_only: Exposed<Vec<u8>, ReadOnly>,
    write_only: Exposed<Vec<u8>>,
    read_write: Exposed<Vec<u8>>,
    bound: Option<Exposed<Vec<u8>>>,
    /// Unexposed memory, allocated between the exposures.
    canaries: Vec<Vec<u8>>,
}

/// Operations that the victim has started with adversaries.
#[derive(Default)]
struct Operations {
    begun: AtomicU64,
    ended: AtomicU64,
    /// One-way calls that it has handled.
    notes: AtomicU64,
    wrong: Mutex<Vec<String>>,
    /// Round trips with the honest peer.
    rounds: AtomicU64,
}

impl Operations {
    /// Runs an operation on a thread of its own, and checks how it ends.
    fn begin(
        self: &Arc<Operations>,
        peer: &Endpoint,
        what: &'static str,
        run: impl FnOnce() -> Result<(), Error> + Send + 'static,
    ) {
        let (this, name) = (self.clone(), peer.address().to_string());
        self.begun.fetch_add(1, Ordering::SeqCst);
        thread::spawn(move || {
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
                // Errors of size and range contain numbers only; every other names the peer.
                Ok(Ok(()) | Err(Error::OutOfRange { .. } | Error::MessageTooLarge { .. })) => {}
                Ok(Err(error)) if error.to_string().contains(&name) => {}
                Ok(Err(error)) => this.wrong.lock().unwrap().push(format!("{what} with {name}: {error}")),
                Err(_) => this.wrong.lock().unwrap().push(format!("{what} with {name} panicked")),
            }
            this.ended.fetch_add(1, Ordering::SeqCst);
        });
    }

    fn note(&self, wrong: String) {
        self.wrong.lock().unwrap().push(wrong);
    }
}

/// Longer than any wait in these tests: a disconnect is never due to the peer timeout.
pub const PATIENT: Duration = Duration::from_secs(10);
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);

/// A pull into the middle of a buffer: the bytes around it must not change.
fn pull(bulk: &Bulk, peer: &Endpoint, len: usize) -> Result<(), Error> {
    const AROUND: usize = 256;
    let mut memory = vec![0xc5u8; len + 2 * AROUND];
    let pulled = bulk.on(peer).timeout(OPERATION_TIMEOUT).pull_into(&mut memory[AROUND..AROUND + len]);
    let (before, rest) = memory.split_at(AROUND);
    assert!(before.iter().chain(&rest[len..]).all(|byte| *byte == 0xc5), "it wrote beside the target");
    assert!(pulled.as_ref().is_ok_and(|n| *n <= len) || pulled.is_err());
    pulled.map(drop)
}

pub fn run() {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let mut builder = configured().peer_timeout(PATIENT).max_message_size(16 << 20).listen(anywhere());
    if let Ok(key) = std::env::var(KEY) {
        builder = builder.pre_shared_key(key);
    }
    let engine = builder.build().unwrap();
    let canaries = |n: usize| (0..n).map(|_| vec![0xcau8; 4096]);
    let mut between: Vec<Vec<u8>> = canaries(4).collect();
    let read_write = engine.expose(pattern(2, LEN), BulkMode::ReadWrite).unwrap();
    between.extend(canaries(4));
    let secret = engine.expose(full_of(SECRET), BulkMode::ReadWrite).unwrap();
    between.extend(canaries(4));
    let memory = Memory {
        secret,
        read_only: engine.expose_read_only(pattern(1, LEN)).unwrap(),
        write_only: engine.expose(full_of(WRITE_ONLY), BulkMode::WriteOnly).unwrap(),
        read_write,
        bound: None,
        canaries: between,
    };
    let gone = engine.expose(full_of(GONE), BulkMode::ReadWrite).unwrap();
    let gone_bulk = gone.bulk();
    let gone = gone.reclaim();
    let bulks = [memory.secret.bulk(), memory.read_only.bulk(), memory.write_only.bulk(), memory.read_write.bulk(), gone_bulk];
    let memory = Arc::new(Mutex::new(memory));
    let operations = Arc::new(Operations::default());
    let honest: Arc<Mutex<Option<(Endpoint, Bulk)>>> = Arc::default();
    define(&engine, &memory, &operations, &honest);
    say(&format!("address {}", engine.address()));
    for bulk in bulks {
        say(&format!("bulk {}", hex(&postcard::to_stdvec(&bulk).unwrap())));
    }
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        match order.split_once(' ').unwrap_or((&order, "")) {
            ("report", _) => say(&format!("state {}", state(&engine, &memory, &operations, &honest, &gone))),
            ("allocated", _) => {
                let (now, peak) = crate::work::allocated();
                say(&format!("has {now} {peak}"));
            }
            ("dial", address) => {
                let (incarnation, address) = address.split_once(' ').unwrap();
                let to = engine.lookup(address).unwrap();
                start_operations(&engine, &operations, &to, incarnation.parse().unwrap());
            }
            _ => panic!("no order `{order}`"),
        }
    }
    std::process::exit(0);
}

/// One of each operation with a peer, which has this incarnation.
fn start_operations(engine: &Engine, operations: &Arc<Operations>, to: &Endpoint, incarnation: u64) {
    let call = engine.procedure::<u32, Vec<u8>>("work").on(to).timeout(OPERATION_TIMEOUT);
    operations.begin(to, "a call", move || call.call(&1).map(drop));
    let note = engine.procedure::<u32, ()>("work").on(to).timeout(OPERATION_TIMEOUT);
    operations.begin(to, "a one-way call", move || note.notify(&1));
    // Memory that this engine has been given, as far as it knows.
    let bytes = postcard::to_stdvec(&described(incarnation, MOVED as u64)).unwrap();
    let bulk: Bulk = postcard::from_bytes(&bytes).unwrap();
    let (peer, theirs) = (to.clone(), bulk.clone());
    operations.begin(to, "a pull", move || pull(&theirs, &peer, MOVED));
    let peer = to.clone();
    operations.begin(to, "a push", move || bulk.on(&peer).timeout(OPERATION_TIMEOUT).push_from(&pattern(5, MOVED)).map(drop));
}

fn described(owner: u64, len: u64) -> Described {
    Described::new([7; 16], len, BulkMode::ReadWrite, owner)
}

fn define(
    engine: &Engine,
    memory: &Arc<Mutex<Memory>>,
    operations: &Arc<Operations>,
    honest: &Arc<Mutex<Option<(Endpoint, Bulk)>>>,
) {
    define_add(engine);
    crate::work::define(engine);
    engine.define("swallow", |_: &Request, bytes: Vec<u8>| bytes.len()).unwrap();
    engine.define("put", |_: &Request, (key, value): (String, Vec<u8>)| crate::lists::digest(&key, &value)).unwrap();
    engine.define("big", |_: &Request, len: usize| pattern(9, len.min(4 << 20))).unwrap();
    let slow = Arc::new(AtomicU64::new(0));
    let begun = slow.clone();
    engine
        .define("slow", move |_: &Request, ms: u64| {
            begun.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(ms.min(2000)));
        })
        .unwrap();
    engine.define("slow handlers begun", move |_: &Request, ()| slow.load(Ordering::SeqCst)).unwrap();
    let counted = operations.clone();
    let note = move |_: &Request, _: u32| {
        counted.notes.fetch_add(1, Ordering::SeqCst);
    };
    engine.define("note", note).unwrap();
    // The honest peer is the first to call; some memory is exposed to it alone.
    let (here, kept) = (memory.clone(), honest.clone());
    let rounds = operations.clone();
    engine
        .define("meet", move |request: &Request, theirs: Bulk| -> Bulk {
            let to = request.endpoint().clone();
            let exposed = request.engine().expose_to(&to, full_of(BOUND_TO_ONE), BulkMode::ReadWrite).unwrap();
            let bulk = exposed.bulk();
            here.lock().unwrap().bound = Some(exposed);
            *kept.lock().unwrap() = Some((to.clone(), theirs.clone()));
            let (engine, operations) = (request.engine().clone(), rounds.clone());
            thread::spawn(move || exchange_with_honest_peer(&engine, &to, &theirs, &operations));
            bulk
        })
        .unwrap();
    let begun = operations.clone();
    engine
        .define("engage", move |request: &Request, theirs: Bulk| {
            let to = request.endpoint();
            let call = request.engine().procedure::<u32, Vec<u8>>("work").on(to).timeout(OPERATION_TIMEOUT);
            begun.begin(to, "a call", move || call.call(&1).map(drop));
            let (peer, bulk, len) = (to.clone(), theirs.clone(), theirs.len().min(LEN));
            begun.begin(to, "a pull", move || pull(&bulk, &peer, len));
            let peer = to.clone();
            begun.begin(to, "a push", move || theirs.on(&peer).timeout(OPERATION_TIMEOUT).push_from(&pattern(5, len)).map(drop));
        })
        .unwrap();
    let begun = operations.clone();
    engine
        .define("engage more", move |request: &Request, ()| {
            let to = request.endpoint();
            let call = request.engine().procedure::<Vec<u8>, Vec<u8>>("work").on(to).timeout(OPERATION_TIMEOUT);
            begun.begin(to, "a large call", move || call.call(&vec![1; 4 << 20]).map(drop));
            let note = request.engine().procedure::<u32, ()>("work").on(to).timeout(OPERATION_TIMEOUT);
            begun.begin(to, "a one-way call", move || note.notify(&1));
        })
        .unwrap();
    // What a bulk leads to.
    engine
        .define("take", |request: &Request, (bulk, origin): (Bulk, bool)| -> Result<Vec<u8>, String> {
            let remote =
                if origin { bulk.origin(request.engine()).map_err(|e| e.to_string())? } else { bulk.on(request.endpoint()) };
            let mut bytes = vec![0u8; bulk.len().min(LEN)];
            let n = remote.timeout(Duration::from_secs(1)).pull_into(&mut bytes).map_err(|e| e.to_string())?;
            bytes.truncate(n);
            Ok(bytes)
        })
        .unwrap();
    engine
        .define("fill", |request: &Request, (bulk, origin): (Bulk, bool)| -> Result<usize, String> {
            let remote =
                if origin { bulk.origin(request.engine()).map_err(|e| e.to_string())? } else { bulk.on(request.endpoint()) };
            remote.timeout(Duration::from_secs(1)).push_from(&[0x66u8; 1000][..]).map_err(|e| e.to_string())
        })
        .unwrap();
    engine
        .define("part", |request: &Request, (bulk, offset, len): (Bulk, usize, usize)| -> Result<usize, String> {
            let part = bulk.slice(offset, len).map_err(|e| e.to_string())?;
            let mut bytes = vec![0u8; part.len().min(LEN)];
            part.on(request.endpoint()).timeout(Duration::from_secs(1)).pull_into(&mut bytes).map_err(|e| e.to_string())
        })
        .unwrap();
    // Keeps a bulk, to pull from its origin later; and exposes memory to its sender.
    type Kept = Vec<(Bulk, Exposed<Vec<u8>>)>;
    let kept: Arc<Mutex<Kept>> = Arc::default();
    let keep = kept.clone();
    engine
        .define("keep", move |request: &Request, bulk: Bulk| -> (usize, Bulk) {
            let exposed = request.engine().expose_to(request.endpoint(), full_of(BOUND_TO_ONE), BulkMode::ReadWrite).unwrap();
            let theirs = exposed.bulk();
            let mut kept = keep.lock().unwrap();
            kept.push((bulk, exposed));
            (kept.len() - 1, theirs)
        })
        .unwrap();
    engine
        .define("take kept", move |request: &Request, index: usize| -> Result<Vec<u8>, String> {
            let bulk = kept.lock().unwrap()[index].0.clone();
            let remote = bulk.origin(request.engine()).map_err(|e| e.to_string())?.timeout(Duration::from_secs(1));
            let mut bytes = vec![0u8; bulk.len().min(LEN)];
            remote.pull_into(&mut bytes).map_err(|e| e.to_string())?;
            Ok(bytes)
        })
        .unwrap();
    let here = memory.clone();
    engine.define("export", move |_: &Request, ()| here.lock().unwrap().read_only.bulk()).unwrap();
    let here = memory.clone();
    engine.define("is held", move |_: &Request, ()| !here.lock().unwrap().read_only.released().is_released()).unwrap();
}

/// Calls and pulls in a loop, so that there is always an operation in progress that others may name.
fn exchange_with_honest_peer(engine: &Engine, to: &Endpoint, bulk: &Bulk, operations: &Operations) {
    let identify = engine.procedure::<(), Vec<u8>>("identify");
    let mut bytes = vec![0u8; LEN];
    while !engine.is_finalized() {
        match identify.on(to).call(&()) {
            Ok(answer) if answer == HONEST => {}
            other => return operations.note(format!("the honest peer answers {other:?}")),
        }
        bytes.fill(0);
        match bulk.on(to).pull_into(&mut bytes) {
            Ok(LEN) if bytes == full_of(HONEST) => {}
            other => return operations.note(format!("a pull from the honest peer: {other:?}")),
        }
        operations.rounds.fetch_add(1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Compares all memory; returns the counters, and what went wrong.
fn state(
    engine: &Engine,
    memory: &Mutex<Memory>,
    operations: &Operations,
    honest: &Mutex<Option<(Endpoint, Bulk)>>,
    gone: &[u8],
) -> String {
    // The owner is found by its incarnation, too.
    if let Some((_, bulk)) = &*honest.lock().unwrap() {
        let mut start = [0u8; 16];
        let pulled = bulk.origin(engine).and_then(|remote| remote.timeout(Duration::from_secs(2)).pull_into(&mut start[..]));
        if !matches!(pulled, Ok(16)) || start != HONEST {
            operations.note(format!("what the honest peer exposes, found by its origin: {pulled:?}"));
        }
    }
    let memory = memory.lock().unwrap();
    let mut changed = Vec::new();
    let mut compare = |what: &str, exposed: &Exposed<Vec<u8>>, expected: &[u8]| {
        let mut bytes = vec![0u8; LEN];
        exposed.read_at(0, &mut bytes).unwrap();
        if bytes != expected {
            changed.push(what.to_owned());
        }
    };
    compare("secret", &memory.secret, &full_of(SECRET));
    compare("write-only", &memory.write_only, &full_of(WRITE_ONLY));
    compare("read-write", &memory.read_write, &pattern(2, LEN));
    if let Some(bound) = &memory.bound {
        compare("bound", bound, &full_of(BOUND_TO_ONE));
    }
    if memory.read_only.view() != pattern(1, LEN) {
        changed.push("read-only".to_owned());
    }
    if gone != full_of(GONE) {
        changed.push("reclaimed".to_owned());
    }
    if memory.canaries.iter().flatten().any(|byte| *byte != 0xca) {
        changed.push("unexposed".to_owned());
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    let wrong =
        [changed.iter().map(|what| format!("{what} memory has changed")).collect(), operations.wrong.lock().unwrap().clone()]
            .concat();
    let (begun, ended, rounds, notes) =
        (count(&operations.begun), count(&operations.ended), count(&operations.rounds), count(&operations.notes));
    format!("{begun} {ended} {rounds} {notes} {}", wrong.join("; "))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
