//! What the other process does.

use std::collections::VecDeque;
use std::io::BufRead;
use std::sync::{Arc, Mutex};

use calomel::{Bulk, BulkMode, Endpoint, Engine, Exposed, Request};

use crate::pair::patient;
use crate::support::*;

pub fn run(role: &str) {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    match role {
        "owner" => owner(),
        "port goes down" => crate::addresses::port_goes_down(),
        "little may be locked" => crate::limits::little_may_be_locked(),
        "fork" => crate::dying::fork(false),
        "fork, and drop" => crate::dying::fork(true),
        leftovers => crate::leftovers::run(leftovers),
    }
}

type Kept = Arc<Mutex<VecDeque<Exposed<Vec<u8>>>>>;

/// An engine that lends memory, takes it back, and calls its peers, as it is told by calls.
fn owner() {
    let engine = match std::env::var(LISTEN).as_deref() {
        Ok(address) => patient().listen(address),
        Err(_) => patient().listen(anywhere()),
    };
    let engine = engine.build().unwrap();
    define_add(&engine);
    let kept = Kept::default();
    let keep = kept.clone();
    engine
        .define("lend", move |request: &Request, (byte, len): (u8, usize)| {
            let exposed = request.engine().expose(vec![byte; len], BulkMode::ReadWrite).unwrap();
            let bulk = exposed.bulk();
            keep.lock().unwrap().push_back(exposed);
            bulk
        })
        .unwrap();
    // The oldest; true if all of it is this byte.
    engine
        .define("take back", move |_: &Request, byte: u8| {
            let oldest = kept.lock().unwrap().pop_front().unwrap();
            all_are(&oldest.reclaim(), byte)
        })
        .unwrap();
    engine
        .define("pull", |request: &Request, bulk: Bulk| {
            let local = request.engine().expose(vec![0u8; bulk.len()], BulkMode::ReadWrite).unwrap();
            say("pulling");
            let (result, _) = bulk.on(request.endpoint()).start_pull_into(local).wait();
            result.map_err(|error| error.to_string())
        })
        .unwrap();
    engine
        .define("push", |request: &Request, (byte, bulk): (u8, Bulk)| {
            let bytes = vec![byte; bulk.len()];
            say("pushing");
            bulk.on(request.endpoint()).push_from(&bytes).map_err(|error| error.to_string())
        })
        .unwrap();
    say(&format!("address {}", engine.address()));
    // It serves until the parent tells it to end, or is gone.
    let mut order = String::new();
    std::io::stdin().lock().read_line(&mut order).unwrap();
    if order.trim_end() == "finalize" {
        engine.finalize().unwrap();
        return say("finalized");
    }
    std::process::exit(0);
}

/// [`owner`] in another process, and this one's way there.
pub struct Owner {
    pub child: Child,
    pub engine: Engine,
    pub to: Endpoint,
}

impl Owner {
    pub fn start(engine: &Engine) -> Owner {
        Owner::start_at(engine, &anywhere())
    }

    pub fn start_at(engine: &Engine, address: &str) -> Owner {
        let mut child = Child::start("owner", &[(LISTEN, address)]);
        let to = engine.lookup(child.hear("address")).unwrap();
        assert_serves(engine, &to);
        Owner { child, engine: engine.clone(), to }
    }

    #[track_caller]
    pub fn lend(&self, byte: u8, len: usize) -> Bulk {
        self.engine.procedure::<(u8, usize), Bulk>("lend").on(&self.to).call(&(byte, len)).unwrap()
    }

    #[track_caller]
    pub fn take_back(&self, byte: u8) {
        assert!(self.engine.procedure::<u8, bool>("take back").on(&self.to).call(&byte).unwrap(), "not all of it is {byte}");
    }

    /// Asserts that transfers do without the other process: it is stopped meanwhile.
    #[track_caller]
    pub fn assert_one_sided(&self) {
        let bulk = self.lend(7, 200_000);
        let mut copy = vec![0u8; 200_000];
        // The first that is moved may find the devices still busy with what was before.
        eventually("a first transfer succeeds", || bulk.on(&self.to).pull_into(&mut copy).is_ok());
        self.child.signal(libc::SIGSTOP);
        copy.fill(0);
        let pulled = bulk.on(&self.to).pull_into(&mut copy);
        let pushed = bulk.on(&self.to).push_from(&vec![8u8; 200_000]);
        self.child.signal(libc::SIGCONT);
        assert_eq!((pulled.unwrap(), pushed.unwrap()), (200_000, 200_000));
        assert!(all_are(&copy, 7));
        self.take_back(8);
    }
}
