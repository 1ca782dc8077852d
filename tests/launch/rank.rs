//! What each rank does, and how a test starts it.

use std::collections::BTreeSet;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use calomel::launch::{World, job_key};
use calomel::{Engine, Request};

use crate::support::{BOUND, Child, LISTEN, MARK, anywhere, configured, patience, say};

/// Milliseconds that a rank has to join.
pub const TIMEOUT: &str = "CALOMEL_TEST_TIMEOUT";

/// Set: the ranks' engines have the job's key.
pub const WITH_KEY: &str = "CALOMEL_TEST_WITH_KEY";

/// Starts one rank, with the variables of a launcher.
pub fn start(variables: &[(&str, &str)]) -> Child {
    Child::start("rank", variables)
}

/// Starts all ranks; `variables` of each.
pub fn start_all(size: usize, variables: impl Fn(usize) -> Vec<(&'static str, String)>) -> Vec<Child> {
    let start = |rank| {
        let variables = variables(rank);
        let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, &**value)).collect();
        start(&variables)
    };
    (0..size).map(start).collect()
}

/// All ranks have joined; they share values, call each other, and end.
#[track_caller]
pub fn assert_works(ranks: &mut [Child]) {
    let size = ranks.len();
    for (rank, child) in ranks.iter_mut().enumerate() {
        assert_eq!(child.hear("joined"), format!("{rank} of {size}"));
    }
    ranks.iter_mut().for_each(|child| child.tell("ring"));
    for child in &mut *ranks {
        assert_eq!(child.hear("ring"), "Ok(())");
    }
    ranks.iter_mut().for_each(|child| child.tell("end"));
    for child in ranks {
        assert!(child.wait(BOUND).success());
    }
}

/// In a child: joins, and follows orders from its standard input. Without one, all ranks do the same, and end.
pub fn run() {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let listen = std::env::var(LISTEN).unwrap_or_else(|_| anywhere());
    let listens = listen != "none";
    let mut builder = configured();
    if std::env::var(WITH_KEY).is_ok() {
        match job_key(timeout()) {
            Ok(key) => builder = builder.pre_shared_key(key),
            Err(error) => return say(&format!("failed {error:?}; {error}")),
        }
    }
    let engine = if listens { builder.listen(&*listen) } else { builder }.build().unwrap();
    if listens {
        say(&format!("address {}", engine.address()));
    }
    engine.define("square", |_: &Request, x: usize| x * x).unwrap();
    let timeout = timeout();
    let world = match World::from_env(&engine, timeout) {
        Ok(world) => world,
        Err(error) => return say(&format!("failed {error:?}; {error}")),
    };
    say(&format!("joined {} of {}", world.rank(), world.size()));
    if std::env::var("PMI_FD").is_ok() {
        say(&format!("ring {:?}", ring(&engine, &world)));
        return;
    }
    for order in std::io::stdin().lock().lines() {
        match &*order.unwrap() {
            "ring" => say(&format!("ring {:?}", ring(&engine, &world))),
            "barrier" => {
                say("waits");
                let result = world.barrier(BOUND * patience());
                say(&format!("barrier {result:?}"));
            }
            "again" => {
                let again = World::from_env(&engine, timeout).and_then(|world| ring(&engine, &world));
                say(&format!("again {:?}", again.map_err(|error| error.to_string())));
            }
            "end" => return,
            order => panic!("no order `{order}`"),
        }
    }
}

fn timeout() -> Duration {
    std::env::var(TIMEOUT).map_or(BOUND * patience(), |text| Duration::from_millis(text.parse().unwrap()))
}

fn ring(engine: &Engine, world: &World) -> calomel::Result<()> {
    let (rank, size) = (world.rank(), world.size());
    world.barrier(BOUND)?;
    let gathered = world.all_gather(format!("rank {rank}").as_bytes(), BOUND)?;
    let expected: Vec<Vec<u8>> = (0..size).map(|rank| format!("rank {rank}").into_bytes()).collect();
    assert_eq!(gathered, expected);
    let next = world.endpoint((rank + 1) % size);
    assert_eq!(engine.procedure::<usize, usize>("square").on(next).call(&rank)?, rank * rank);
    world.barrier(BOUND)
}

/// A directory that must be empty at the end, and is removed.
pub struct SharedDirectory(PathBuf);

impl SharedDirectory {
    pub fn new(name: &str) -> SharedDirectory {
        let path = std::env::temp_dir().join(format!("calomel-launch-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        SharedDirectory(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn variable(&self) -> String {
        format!("dir:{}", self.0.display())
    }

    #[track_caller]
    pub fn assert_empty(&self) {
        let left: Vec<_> = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `CALOMEL_RANK`, `CALOMEL_SIZE` and `CALOMEL_RENDEZVOUS`.
pub fn by_hand(rank: usize, size: usize, rendezvous: &str) -> Vec<(&'static str, String)> {
    let (rank, size) = (rank.to_string(), size.to_string());
    vec![("CALOMEL_RANK", rank), ("CALOMEL_SIZE", size), ("CALOMEL_RENDEZVOUS", rendezvous.to_owned())]
}

/// A port of this host that was free a moment ago, and that no other test has: the system may name the same one again.
pub fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if GIVEN.lock().unwrap().insert(port) {
            return port;
        }
    }
}

/// A rank that is to fail, with the error that it prints.
#[track_caller]
pub fn failure(child: &mut Child) -> String {
    let text = child.hear("failed");
    assert!(!text.contains(MARK));
    text
}
