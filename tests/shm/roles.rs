//! The role of the other process: one engine with procedures for every test, which follows orders.

use std::fmt::Write as _;
use std::io::BufRead;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuffer, EngineBuilder, Exposed, Request};

use crate::support::*;

/// A group whose members may connect.
pub const GROUP: &str = "CALOMEL_TEST_GROUP";
/// Set: the engine is not reached through shared memory at its tcp address.
pub const NO_UPGRADE: &str = "CALOMEL_TEST_NO_UPGRADE";
/// Set: the system forbids this process to read another's memory.
pub const FORBID: &str = "CALOMEL_TEST_FORBID";

pub fn run(role: &str) {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    match role {
        "engine" => engine(),
        "few descriptors" => crate::limits::few_descriptors(),
        "fork" => crate::memory::fork(),
        "freed" => crate::memory::freed(),
        "stranger" => crate::strangers::run(),
        other => panic!("no role `{other}`"),
    }
}

/// Starts [`engine`], which listens; returns its address, too.
pub fn start(settings: &[(&str, &str)]) -> (Child, String) {
    start_as(settings, |_| ())
}

pub fn start_as(settings: &[(&str, &str)], configure: impl FnOnce(&mut std::process::Command)) -> (Child, String) {
    let mut child = Child::start_as("engine", settings, configure);
    let address = child.hear("address");
    (child, address)
}

enum Memory {
    Own(Exposed<Vec<u8>>),
    Shared(Exposed<EngineBuffer>),
}

fn configure() -> EngineBuilder {
    let mut builder = configured();
    if let Ok(group) = std::env::var(GROUP) {
        builder = builder.shm_group(group.parse().unwrap());
    }
    if std::env::var(NO_UPGRADE).is_ok() {
        builder = builder.same_host_upgrade(false);
    }
    match std::env::var(LISTEN).as_deref() {
        Ok("none") => builder,
        Ok(address) => builder.listen(address),
        Err(_) => builder.listen(anywhere()),
    }
}

fn engine() {
    if std::env::var(FORBID).is_ok() {
        crate::limits::forbid_reading_processes();
    }
    let engine = configure().build().unwrap();
    define(&engine);
    let address = engine.addresses().first().map_or("none".to_owned(), |address| address.to_string());
    say(&format!("address {address}"));
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        match order.split_once(' ').unwrap() {
            ("add", address) => say(&format!("sum {}", add(&engine, address))),
            ("hello", address) => {
                let endpoint = engine.lookup(address).unwrap();
                let result = engine.procedure::<(), ()>("hello").on(&endpoint).call(&());
                say(&format!("hello {result:?}"));
            }
            // Until it is killed.
            ("pulls", rest) => {
                let (shared, address) = rest.split_once(' ').unwrap();
                let endpoint = engine.lookup(address).unwrap();
                let shown = engine.procedure::<bool, Bulk>("shown");
                let bulk = shown.on(&endpoint).call(&(shared == "shared")).unwrap();
                let mut bytes = vec![0u8; bulk.len()];
                say("begins");
                loop {
                    bulk.on(&endpoint).pull_into(&mut bytes).unwrap();
                }
            }
            (order, _) => panic!("no order `{order}`"),
        }
    }
    std::process::exit(0);
}

/// Calls `add`: the sum and its transport, or the error.
pub fn add(engine: &Engine, address: &str) -> String {
    let endpoint = engine.lookup(address).unwrap();
    match engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)) {
        Ok(sum) => format!("{sum} by {:?}", endpoint.transport()),
        Err(error) => error.to_string(),
    }
}

/// The value of bytes that should all be the same.
pub fn uniform(bytes: &[u8]) -> Result<u8, String> {
    let first = bytes[0];
    match bytes.iter().position(|b| *b != first) {
        None => Ok(first),
        Some(at) => {
            let mut text = String::new();
            let _ = write!(text, "{first} at first, {} at {at} of {}", bytes[at], bytes.len());
            Err(text)
        }
    }
}

pub fn define(engine: &Engine) {
    define_add(engine);
    let kept: Arc<Mutex<Vec<Option<Memory>>>> = Arc::default();
    let keep = kept.clone();
    // Memory of this process, full of a byte.
    engine
        .define("open", move |request: &Request, (byte, len, shared): (u8, usize, bool)| -> Bulk {
            let engine = request.engine();
            let memory = if shared {
                let mut buffer = engine.alloc(len);
                buffer.fill(byte);
                Memory::Shared(engine.expose(buffer, BulkMode::ReadWrite).unwrap())
            } else {
                Memory::Own(engine.expose(vec![byte; len], BulkMode::ReadWrite).unwrap())
            };
            let bulk = match &memory {
                Memory::Own(exposed) => exposed.bulk(),
                Memory::Shared(exposed) => exposed.bulk(),
            };
            keep.lock().unwrap().push(Some(memory));
            bulk
        })
        .unwrap();
    let keep = kept.clone();
    // Reclaims and overwrites opened memory; returns how long that took, in milliseconds.
    engine
        .define("reclaim", move |_: &Request, (index, byte): (usize, u8)| -> u64 {
            let memory = keep.lock().unwrap()[index].take().unwrap();
            let begin = Instant::now();
            match memory {
                Memory::Own(exposed) => exposed.reclaim().fill(byte),
                Memory::Shared(exposed) => exposed.reclaim().fill(byte),
            }
            begin.elapsed().as_millis() as u64
        })
        .unwrap();
    // Memory that stays exposed.
    let shown = [false, true].map(|shared| {
        let mut buffer = if shared { engine.alloc(32 << 20) } else { engine.alloc(0) };
        buffer.fill(3);
        (engine.expose_read_only(vec![3u8; if shared { 0 } else { 32 << 20 }]).unwrap(), engine.expose_read_only(buffer).unwrap())
    });
    engine
        .define("shown", move |_: &Request, shared: bool| -> Bulk {
            if shared { shown[1].1.bulk() } else { shown[0].0.bulk() }
        })
        .unwrap();
    engine.define("swallow", |_: &Request, bytes: Vec<u8>| bytes.len()).unwrap();
    engine.define("big", |_: &Request, len: usize| pattern(9, len)).unwrap();
    engine
        .define("fetch", |request: &Request, (bulk, shared): (Bulk, bool)| -> Result<u8, String> {
            if shared {
                let buffer = request.engine().alloc(bulk.len());
                let exposed = request.engine().expose(buffer, BulkMode::ReadWrite).unwrap();
                let (result, back) = bulk.on(request.endpoint()).start_pull_into(exposed).wait();
                result.map_err(|e| e.to_string())?;
                return uniform(&back.reclaim());
            }
            let mut bytes = vec![0u8; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut bytes).map_err(|e| e.to_string())?;
            uniform(&bytes)
        })
        .unwrap();
    engine
        .define("fill", |request: &Request, (bulk, byte, shared): (Bulk, u8, bool)| -> Result<usize, String> {
            if shared {
                let mut buffer = request.engine().alloc(bulk.len());
                buffer.fill(byte);
                let exposed = request.engine().expose(buffer, BulkMode::ReadOnly).unwrap();
                return bulk.on(request.endpoint()).start_push_from(exposed).wait().0.map_err(|e| e.to_string());
            }
            bulk.on(request.endpoint()).push_from(&vec![byte; bulk.len()]).map_err(|e| e.to_string())
        })
        .unwrap();
    engine
        .define("call back", |request: &Request, ()| -> Result<u32, String> {
            let add = request.engine().procedure::<(u32, u32), u32>("add");
            add.on(request.endpoint()).call(&(3, 4)).map_err(|e| e.to_string())
        })
        .unwrap();
}

/// A client's view of such an engine.
pub struct Far {
    pub engine: Engine,
    pub to: Endpoint,
}

impl Far {
    pub fn new(engine: &Engine, address: &str) -> Far {
        Far { engine: engine.clone(), to: engine.lookup(address).unwrap() }
    }

    pub fn open(&self, byte: u8, len: usize, shared: bool) -> Bulk {
        self.engine.procedure::<(u8, usize, bool), Bulk>("open").on(&self.to).call(&(byte, len, shared)).unwrap()
    }

    /// In milliseconds.
    #[track_caller]
    pub fn reclaim(&self, index: usize, byte: u8) -> u64 {
        self.engine.procedure::<(usize, u8), u64>("reclaim").on(&self.to).call(&(index, byte)).unwrap()
    }

    #[track_caller]
    pub fn assert_serves(&self) {
        assert_serves(&self.engine, &self.to);
        let bulk = self.open(5, 300_000, false);
        let mut copy = vec![0u8; 300_000];
        assert_eq!(bulk.on(&self.to).pull_into(&mut copy).unwrap(), 300_000);
        assert_eq!(uniform(&copy), Ok(5));
    }
}
