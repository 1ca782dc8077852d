//! The procedures that each process serves. Each numbered operation is counted, and must be handled only once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuffer, Error, Exposed, ReadOnly, Released, Request, Responder};

use crate::content::{content, mistake, text};
use crate::journal::{Id, Journal, kind, loss};

/// The response to a call is made from another seed than its arguments.
pub const BACK: u64 = 0x5eed;
/// Memory that peers have opened and not closed is reclaimed after this time, even during transfers.
const KEPT: Duration = Duration::from_secs(3);
/// Longest time that a handler waits for others.
const PATIENCE: Duration = Duration::from_secs(3);

/// An error's kind, as it travels.
type Outcome = Result<u64, String>;

pub struct Node {
    pub engine: Engine,
    pub journal: Arc<Journal>,
    pub index: usize,
    pub generation: u32,
    pub seed: u64,
    /// The addresses of the others, as this process reaches them. Requests may arrive before they are known.
    pub peers: OnceLock<Vec<String>>,
    opened: Mutex<HashMap<u64, (Instant, Opened)>>,
    next_opened: AtomicU64,
    next_nested: AtomicU32,
    /// Exposures whose bulks a peer may still hold.
    held: Mutex<Vec<Released>>,
}

enum Opened {
    Changing(Exposed<Vec<u8>>),
    Shared(Exposed<EngineBuffer>),
    Constant(Exposed<Vec<u8>, ReadOnly>),
}

impl Node {
    pub fn new(engine: Engine, journal: Arc<Journal>, index: usize, generation: u32, seed: u64) -> Arc<Node> {
        let node = Arc::new(Node {
            engine,
            journal,
            index,
            generation,
            seed,
            peers: OnceLock::new(),
            opened: Mutex::default(),
            next_opened: AtomicU64::new(0),
            next_nested: AtomicU32::new(0),
            held: Mutex::default(),
        });
        define_calls(&node);
        define_transfers(&node);
        node
    }

    /// Identifies a thread of this process.
    pub fn caller_id(&self, thread: u32) -> u32 {
        (self.index as u32) << 24 | self.generation << 8 | thread
    }

    /// An id for a call by a handler.
    pub fn nested_id(&self) -> Id {
        (self.caller_id(0xff), self.next_nested.fetch_add(1, Ordering::Relaxed))
    }

    pub fn endpoint(&self, peer: usize) -> Result<Endpoint, Error> {
        self.engine.lookup(&self.peers.wait()[peer][..])
    }

    /// Remembers memory whose bulks peers may hold.
    pub fn watch(&self, released: Released) {
        let mut held = self.held.lock().unwrap();
        held.retain(|released| !released.is_released());
        held.push(released);
    }

    pub fn held(&self) -> usize {
        let mut held = self.held.lock().unwrap();
        held.retain(|released| !released.is_released());
        held.len()
    }

    /// Reclaims what has been open for long, or all of it.
    pub fn reap(&self, all: bool) {
        let mut opened = self.opened.lock().unwrap();
        let old: Vec<u64> =
            opened.iter().filter(|(_, (since, _))| all || since.elapsed() > KEPT).map(|(number, _)| *number).collect();
        let taken: Vec<_> = old.into_iter().filter_map(|number| opened.remove(&number)).collect();
        drop(opened);
        drop(taken);
    }

    pub fn opened(&self) -> usize {
        self.opened.lock().unwrap().len()
    }

    fn remaining(&self, request: &Request) -> Duration {
        request.remaining().min(PATIENCE)
    }

    /// Records the end of a handler's transfer: its bytes, or the error.
    fn moved(&self, result: Result<usize, Error>) -> Outcome {
        // The caller reclaims its memory when it gives up, or at random.
        self.journal.ended("handlers' transfer", &result, &["revoked", "cancelled"]);
        let len = result.map_err(|error| kind(&error).to_owned())? as u64;
        self.journal.count("bytes", len);
        Ok(len)
    }

    fn verify(&self, bytes: &[u8], seed: u64, offset: usize, what: &str) {
        match mistake(bytes, seed, offset) {
            None => self.journal.count("verified", bytes.len() as u64),
            Some(mistake) => loss(&format!("{what}: {mistake}")),
        }
    }

    fn open(&self, seed: u64, len: usize, how: u8) -> Result<(u64, Bulk), Error> {
        self.reap(false);
        let bytes = content(seed, 0, len);
        let (memory, bulk) = match how {
            0 => {
                let exposed = self.engine.expose(bytes, BulkMode::ReadWrite)?;
                self.watch(exposed.released());
                let bulk = exposed.bulk();
                (Opened::Changing(exposed), bulk)
            }
            1 => {
                let mut buffer = self.engine.alloc(len);
                buffer.copy_from_slice(&bytes);
                let exposed = self.engine.expose(buffer, BulkMode::ReadWrite)?;
                self.watch(exposed.released());
                let bulk = exposed.bulk();
                (Opened::Shared(exposed), bulk)
            }
            _ => {
                let exposed = self.engine.expose_read_only(bytes)?;
                self.watch(exposed.released());
                let bulk = exposed.bulk();
                (Opened::Constant(exposed), bulk)
            }
        };
        let number = self.next_opened.fetch_add(1, Ordering::Relaxed);
        self.opened.lock().unwrap().insert(number, (Instant::now(), memory));
        Ok((number, bulk))
    }

    /// The first mismatch in memory that was opened; none if it has been reclaimed.
    fn check(&self, number: u64, seed: u64, offset: usize, len: usize) -> Option<String> {
        let mut bytes = vec![0u8; len];
        match &self.opened.lock().unwrap().get(&number)?.1 {
            Opened::Changing(exposed) => exposed.read_at(offset, &mut bytes).unwrap(),
            Opened::Shared(exposed) => exposed.read_at(offset, &mut bytes).unwrap(),
            Opened::Constant(exposed) => exposed.read_at(offset, &mut bytes).unwrap(),
        }
        mistake(&bytes, seed, offset)
    }

    fn close(&self, number: u64) {
        let taken = self.opened.lock().unwrap().remove(&number);
        match taken {
            Some((_, Opened::Changing(exposed))) => exposed.reclaim().fill(0xcc),
            Some((_, Opened::Shared(exposed))) => exposed.reclaim().fill(0xcc),
            Some((_, Opened::Constant(exposed))) => exposed.reclaim().fill(0xcc),
            None => {}
        }
    }
}

fn define_calls(node: &Arc<Node>) {
    let engine = &node.engine;
    let at = node.clone();
    engine
        .define("echo", move |_: &Request, (id, seed, back, sent): (Id, u64, usize, String)| -> String {
            at.journal.handles("echo", id);
            if sent != text(seed, sent.len()) {
                loss(&format!("the arguments of call {id:x?} are wrong"));
            }
            text(seed ^ BACK, back)
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("tell", move |_: &Request, (id, seed, sent): (Id, u64, String)| {
            at.journal.handles("tell", id);
            at.journal.count("one-way calls handled", 1);
            if sent != text(seed, sent.len()) {
                loss(&format!("the arguments of one-way call {id:x?} are wrong"));
            }
        })
        .unwrap();
    let at = node.clone();
    engine
        .define_deferred("later", move |reply: Responder<u64>, (id, seed, after, how): (Id, u64, u64, u8)| {
            at.journal.handles("later", id);
            let answer = move || match how {
                // The caller no longer waits for the response, or the engine ends.
                0 => drop(reply.respond(&(seed ^ BACK))),
                1 => reply.fail("requested by the caller"),
                _ => drop(reply),
            };
            // An engine that ends drops the queued closure, and with it the responder.
            let _ = at.engine.timer(Duration::from_millis(after), answer);
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("doze", move |request: &Request, (id, seed, millis): (Id, u64, u64)| -> u64 {
            at.journal.handles("doze", id);
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(millis) && !request.is_cancelled() {
                thread::sleep(Duration::from_millis(1));
            }
            seed ^ BACK
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("relay", move |request: &Request, (id, to, seed, len): (Id, usize, u64, usize)| -> Outcome {
            at.journal.handles("relay", id);
            let limit = at.remaining(request);
            let answer = at.journal.timed(
                || format!("nested call at {to}"),
                limit,
                || {
                    let echo = at.engine.procedure::<(Id, u64, usize, String), String>("echo");
                    echo.on(at.endpoint(to)?).timeout(limit).call(&(at.nested_id(), seed, len, text(seed, len)))
                },
            );
            at.journal.ended("nested call", &answer, &[]);
            let answer = answer.map_err(|error| kind(&error).to_owned())?;
            if answer != text(seed ^ BACK, len) {
                loss("the response of a nested call is wrong");
            }
            Ok(len as u64)
        })
        .unwrap();
}

fn define_transfers(node: &Arc<Node>) {
    let engine = &node.engine;
    let at = node.clone();
    engine
        .define_async("fetch", move |request: Request, (id, bulk, seed): (Id, Bulk, u64)| {
            let at = at.clone();
            async move {
                at.journal.handles("fetch", id);
                let local = at.engine.expose(vec![0u8; bulk.len()], BulkMode::ReadWrite);
                let local = local.map_err(|error| kind(&error).to_owned())?;
                let remote = bulk.on(request.endpoint()).timeout(at.remaining(&request));
                let (result, local) = remote.start_pull_into(local).await;
                let len = at.moved(result)?;
                at.verify(&local.reclaim(), seed, 0, "pulled by a peer's async handler");
                Ok::<u64, String>(len)
            }
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("fill", move |request: &Request, (id, bulk, seed): (Id, Bulk, u64)| -> Outcome {
            at.journal.handles("fill", id);
            let bytes = content(seed, 0, bulk.len());
            let limit = at.remaining(request);
            let remote = bulk.on(request.endpoint()).timeout(limit);
            at.moved(at.journal.timed(|| "a handler's push".to_owned(), limit, || remote.push_from(&bytes[..])))
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("forward", move |request: &Request, (id, to, bulk, seed): (Id, usize, Bulk, u64)| -> Outcome {
            at.journal.handles("forward", id);
            let limit = at.remaining(request);
            let result = at.journal.timed(
                || format!("forwarding a bulk to {to}"),
                limit,
                || {
                    let fetch = at.engine.procedure::<(Id, Bulk, u64), Outcome>("fetch from its owner");
                    fetch.on(at.endpoint(to)?).timeout(limit).call(&(at.nested_id(), bulk, seed))
                },
            );
            at.journal.ended("nested call", &result, &[]);
            result.map_err(|error| kind(&error).to_owned())?
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("fetch from its owner", move |request: &Request, (id, bulk, seed): (Id, Bulk, u64)| -> Outcome {
            at.journal.handles("fetch from its owner", id);
            let limit = at.remaining(request);
            let mut bytes = vec![0u8; bulk.len()];
            let result = at.journal.timed(
                || "pull of a forwarded bulk".to_owned(),
                limit,
                || bulk.origin(request.engine())?.timeout(limit).pull_into(&mut bytes[..]),
            );
            let len = at.moved(result)?;
            at.verify(&bytes, seed, 0, "pulled from the owner of a forwarded bulk");
            Ok(len)
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("open", move |_: &Request, (id, seed, len, how): (Id, u64, usize, u8)| -> Result<(u64, Bulk), String> {
            at.journal.handles("open", id);
            at.open(seed, len, how).map_err(|error| kind(&error).to_owned())
        })
        .unwrap();
    let at = node.clone();
    engine
        .define("check", move |_: &Request, (number, seed, offset, len): (u64, u64, usize, usize)| -> Option<String> {
            at.check(number, seed, offset, len)
        })
        .unwrap();
    let at = node.clone();
    engine.define("close", move |_: &Request, number: u64| at.close(number)).unwrap();
}
