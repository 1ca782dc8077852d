//! What the other process does, by role.

use std::io::BufRead;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, Exposed, Request};

pub use crate::support::say;
use crate::support::{LISTEN, STRIKE, anywhere, configured, define_add};

pub fn run(role: &str) {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    match role {
        "peer" => peer(),
        "leftovers" => crate::leftovers::run(),
        "idle" => crate::leftovers::idle(),
        "fork" => crate::leftovers::fork(),
        "forks" => crate::forking::run(),
        "forks-often" => crate::forking::run_often(),
        "forks-idle" => crate::forking::run_idle(),
        "notify and end" => crate::goodbye::notify_and_end(),
        "answer and end" => crate::goodbye::answer_and_end(),
        "siblings" => crate::siblings::run(),
        "talker" => crate::signals::talk(),
        "under signals" => crate::signals::run_under_signals(),
        other => panic!("no role `{other}`"),
    }
}

/// Sends this process the signal that its parent chose.
fn signal_self() {
    let signal = std::env::var(STRIKE).unwrap().parse().unwrap();
    // SAFETY: a signal to this process, which is meant to stop it or end it.
    unsafe { libc::kill(std::process::id() as i32, signal) };
}

/// Sends the signal as soon as a byte of the memory is no longer zero: in the middle of the transfer that fills it.
fn signal_when_touched(memory: Arc<Exposed<Vec<u8>>>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let begin = Instant::now();
        let mut byte = [0u8];
        while byte[0] == 0 && begin.elapsed() < Duration::from_secs(20) {
            memory.read_at(0, &mut byte).unwrap();
        }
        signal_self();
    })
}

/// An engine whose procedures can be interrupted; it follows orders from its standard input.
fn peer() {
    let builder = configured();
    let engine = match std::env::var(LISTEN).as_deref() {
        Ok("none") => builder,
        Ok(address) => builder.listen(address),
        Err(_) => builder.listen(anywhere()),
    };
    let engine = engine.build().unwrap();
    define_add(&engine);
    define_calls(&engine);
    define_transfers(&engine);
    if engine.addresses().is_empty() {
        say("ready");
    } else {
        say(&format!("address {}", engine.address()));
    }
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        match order.split_once(' ').unwrap_or((&order, "")) {
            ("call", rest) => {
                let (name, address) = rest.split_once(' ').unwrap();
                let procedure = engine.procedure::<(), ()>(name);
                let endpoint = engine.lookup(address).unwrap();
                thread::spawn(move || {
                    let begin = Instant::now();
                    let result = procedure.on(&endpoint).call(&());
                    say(&format!("result {} {:?}", begin.elapsed().as_millis(), result.map_err(|e| e.to_string())));
                });
            }
            ("briefly", address) => {
                let endpoint = engine.lookup(address).unwrap();
                let hang = engine.procedure::<(), ()>("hang").on(&endpoint).timeout(Duration::from_millis(200));
                let started = hang.start(&()).unwrap();
                thread::spawn(move || say(&format!("brief {:?}", started.wait().map_err(|e| e.to_string()))));
                thread::spawn(move || say(&format!("brief {:?}", hang.call(&()).map_err(|e| e.to_string()))));
            }
            ("add", address) => {
                let endpoint = engine.lookup(address).unwrap();
                let sum = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2));
                say(&format!("sum {sum:?}"));
            }
            ("finalize", _) => {
                engine.finalize().unwrap();
                return say("finalized");
            }
            ("exit", _) => std::process::exit(0),
            (order, _) => panic!("no order `{order}`"),
        }
    }
    std::process::exit(0);
}

fn define_calls(engine: &Engine) {
    engine
        .define("hang", |request: &Request, ()| {
            say("entered");
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < Duration::from_secs(30) {
                thread::sleep(Duration::from_millis(1));
            }
            if request.is_cancelled() {
                say("cancelled");
            }
        })
        .unwrap();
    engine.define("exit", |_: &Request, ()| -> () { std::process::exit(0) }).unwrap();
    engine.define("abort", |_: &Request, ()| -> () { std::process::abort() }).unwrap();
}

fn define_transfers(engine: &Engine) {
    // Memory once exposed stays so.
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = kept.clone();
    engine
        .define("open", move |request: &Request, (byte, len): (u8, usize)| {
            let exposed = Arc::new(request.engine().expose(vec![byte; len], BulkMode::ReadWrite).unwrap());
            let bulk = exposed.bulk();
            keep.lock().unwrap().push(exposed);
            bulk
        })
        .unwrap();
    let keep = kept.clone();
    engine
        .define("open, signalled when touched", move |request: &Request, len: usize| {
            let exposed = Arc::new(request.engine().expose(vec![0u8; len], BulkMode::ReadWrite).unwrap());
            let bulk = exposed.bulk();
            signal_when_touched(exposed.clone());
            keep.lock().unwrap().push(exposed);
            bulk
        })
        .unwrap();
    engine
        .define("pull, signalled when touched", |request: &Request, bulk: Bulk| {
            let local = Arc::new(request.engine().expose(vec![0u8; bulk.len()], BulkMode::ReadWrite).unwrap());
            let watch = signal_when_touched(local.clone());
            let whole = local.slice(0, local.len()).unwrap();
            let (result, _) = bulk.on(request.endpoint()).start_pull_into(whole).wait();
            let _ = watch.join();
            result.map_err(|e| e.to_string())
        })
        .unwrap();
    engine
        .define("push", |request: &Request, (byte, bulk): (u8, Bulk)| {
            let bytes = vec![byte; bulk.len()];
            bulk.on(request.endpoint()).push_from(&bytes).map_err(|e| e.to_string())
        })
        .unwrap();
}
