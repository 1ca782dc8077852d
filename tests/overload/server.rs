//! The server, in a process of its own.

use std::io::Read;
use std::thread;
use std::time::Duration;

use calomel::{Address, Request};

use crate::memory;
use crate::support::{Child, anywhere, builder, define_add, say};

/// The limits of the server, in this order: connections, bytes for one peer, bytes in all; `-` for the default.
const LIMITS: &str = "CALOMEL_TEST_LIMITS";

pub struct Server {
    child: Child,
    pub address: Address,
    /// Resident memory when idle.
    pub idle: usize,
}

impl Server {
    pub fn start(limits: &str) -> Server {
        let mut child = Child::start("overload", &[(LIMITS, limits)]);
        let address: Address = child.hear("address").parse().unwrap();
        let idle = memory::resident(child.pid() as u32);
        Server { child, address, idle }
    }

    pub fn pid(&self) -> u32 {
        self.child.pid() as u32
    }

    /// The peak of resident memory above its idle level, since the peak was reset.
    pub fn grown(&self) -> usize {
        memory::peak(self.pid()).saturating_sub(self.idle)
    }
}

pub fn run(role: &str) {
    // SAFETY: this changes nothing but which signal the kernel sends when the parent ends.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    match role {
        "overload" => serve(),
        "soak" => crate::soak::run(),
        "reader" => crate::engines::read(),
        other => panic!("no role `{other}`"),
    }
}

fn serve() {
    memory::raise_file_limit();
    let limits = std::env::var(LIMITS).unwrap();
    let limits: Vec<Option<usize>> = limits.split_whitespace().map(|limit| limit.parse().ok()).collect();
    let [connections, peer_bytes, bytes] = limits[..] else { panic!("three limits are expected") };
    let builder = builder().listen(anywhere());
    let builder = match connections {
        Some(count) => builder.max_connections(count),
        None => builder,
    };
    let builder = match peer_bytes.zip(bytes) {
        Some((peer, all)) => builder.max_message_size(8 << 20).max_bytes_in_flight_per_peer(peer).max_bytes_in_flight(all),
        None => builder,
    };
    let engine = builder.build().unwrap();
    define_add(&engine);
    engine.define_borrowed::<[u8], _, _>("length", |_: &Request, bytes: &[u8]| bytes.len()).unwrap();
    engine.define("answer", |_: &Request, len: usize| "x".repeat(len)).unwrap();
    engine.define("slow", |_: &Request, _: String| thread::sleep(Duration::from_millis(20))).unwrap();
    let region = engine.expose_read_only(vec![1u8; 16 << 20]).unwrap();
    let bulk = region.bulk();
    engine.define("region", move |_: &Request, ()| bulk.clone()).unwrap();
    say(&format!("address {}", engine.address()));
    // The end of the input is the end of the parent.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(0);
}
