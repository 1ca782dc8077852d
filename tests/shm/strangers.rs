//! Peers of another user that `shm_group` admits, and that are hostile. They neither map nor read memory of this user, and get
//! none of its addresses; this side never touches their memory, since they decide how long a read of it lasts.
//!
//! These tests need to be root, to start a process of another user.

use std::io::BufRead;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Engine};

use crate::common::wire::{Range, Status};
use crate::forged::*;
use crate::memory_descriptors::Collector;
use crate::roles::add;
use crate::support::*;

const OTHER_USER: u32 = 65534;
const LEN: usize = 256 << 10;
const PAGE: usize = 4096;

/// The other process, which runs as another user in this one's group; `None`, with the reason on standard error, where that is
/// impossible.
fn stranger() -> Option<Child> {
    over(Carrier::Shm, || ());
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: it takes root to start a process of another user");
        return None;
    }
    let mut child = Child::start("stranger", &[]);
    child.hear("is another user");
    Some(child)
}

fn engine() -> Engine {
    let engine = configured().shm_group(0).listen("shm://").build().unwrap();
    define_add(&engine);
    engine
}

/// The other process: it follows orders.
pub fn run() {
    let stalling = Stalling::new();
    // SAFETY: takes numbers and no list; the process has one thread that matters.
    let left = unsafe { libc::setgroups(0, std::ptr::null()) } == 0 && unsafe { libc::setgid(0) } == 0;
    // SAFETY: takes a number.
    assert!(left && unsafe { libc::setuid(OTHER_USER) } == 0);
    // SAFETY: takes numbers. Changing the user has cleared this.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    say("is another user");
    let mut kept = Vec::new();
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        let words: Vec<&str> = order.split(' ').collect();
        match words[..] {
            ["collect", address, range, begin, end] => {
                let bytes: Vec<u8> = range.as_bytes().chunks(2).map(|two| hex(std::str::from_utf8(two).unwrap())).collect();
                let range: Range = postcard::from_bytes(&bytes).unwrap();
                let mut collector = Collector::new(Forged::after_handshake(address, true));
                assert_eq!(collector.pull(range), Status::Ok);
                let within = begin.parse::<u64>().unwrap()..end.parse().unwrap();
                let hello = collector.peer.hello.unwrap();
                let words = collector.loans.iter().flat_map(|body| body.windows(8));
                let addresses = words.filter(|word| within.contains(&u64::from_le_bytes((*word).try_into().unwrap()))).count();
                let (loans, descriptors) = (collector.loans.len(), collector.kept.len());
                say(&format!(
                    "got {descriptors} descriptors, {loans} loans, {addresses} addresses, hello {:x} {:x}",
                    hello.nonce, hello.nonce_at
                ));
                kept.push(collector);
            }
            ["loan", address] => {
                let (nonce, memory) = (Fresh::new(), Fresh::new());
                // A page that has never been touched reads as zeros.
                let hello = Hello { nonce: 0, nonce_at: nonce.address(), ..Hello::valid() };
                let mut peer = Forged::after_handshake_as(address, true, hello);
                peer.announce(PAGE);
                peer.send_loan(0, 1, &[[0, memory.address(), PAGE as u64]]);
                peer.hung_up();
                say(&format!("touched {} {}", nonce.is_touched(), memory.is_touched()));
            }
            ["share", address] => {
                let mut peer = Forged::after_handshake(address, true);
                let fd = memory(PAGE as u64, true);
                peer.send(&Packet::Block { id: 3, len: PAGE as u64 }, &[std::os::fd::AsFd::as_fd(&fd)]);
                peer.announce(PAGE);
                peer.send_loan(0, 1, &[[3, 0, PAGE as u64]]);
                peer.hung_up();
                say("shared");
            }
            ["stall", address, what] => {
                let Some(stalling) = &stalling else {
                    say("stalls never");
                    continue;
                };
                let honest = Hello::valid();
                let at = |wanted: &str, other: u64| if what == wanted { stalling.0 } else { other };
                let hello = Hello { nonce_at: at("nonce", honest.nonce_at), ..honest };
                let peer = Forged::dial(address);
                peer.send(&Packet::Hello(hello), &[peer.segment()]);
                say("stalls");
                if what == "loan" {
                    let mut peer = Forged::after_handshake_as(address, true, hello);
                    peer.announce(PAGE);
                    peer.send_loan(0, 1, &[[0, stalling.0, PAGE as u64]]);
                    peer.hung_up();
                }
                drop(peer);
            }
            // Listens at the name that belongs to another engine's address.
            ["answer", address] => {
                let listener = listen(address);
                say("listens");
                let peer = Forged::accept(&listener);
                let mut bytes = [0; 1000];
                let n = rustix::net::recv(&peer.socket, &mut bytes, rustix::net::RecvFlags::empty()).map_or(0, |(n, _)| n);
                say(&format!("received {n} bytes"));
            }
            ["welcome", address] => {
                let listener = listen(address);
                say("listens");
                let mut peer = Forged::accept(&listener);
                peer.welcome(true);
                let hello = peer.hello.unwrap();
                say(&format!("hello {:x} {:x}", hello.nonce, hello.nonce_at));
            }
            _ => panic!("no order `{order}`"),
        }
    }
    std::process::exit(0);
}

fn hex(text: &str) -> u8 {
    u8::from_str_radix(text, 16).unwrap()
}

/// A page that has never been touched.
struct Fresh(*mut libc::c_void);

impl Fresh {
    fn new() -> Fresh {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: no address is asked for, so no mapping is replaced.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        let fresh = Fresh(address);
        assert!(!fresh.is_touched());
        fresh
    }

    fn address(&self) -> u64 {
        self.0.addr() as u64
    }

    /// True when any process has read or written it.
    fn is_touched(&self) -> bool {
        let mut resident = 0u8;
        // SAFETY: the range is the page, and there is room for the answer for one.
        assert_eq!(unsafe { libc::mincore(self.0, PAGE, &raw mut resident) }, 0);
        resident & 1 == 1
    }
}

/// The address of a page that can't be read: an access blocks until this process ends.
struct Stalling(u64);

impl Stalling {
    /// `None` where the system lacks userfaultfd.
    fn new() -> Option<Stalling> {
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        // SAFETY: takes a number; makes a descriptor, which stays open until the process ends.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        let mut api = [0xaau64, 0, 0];
        let page = Fresh::new();
        // Faults of pages that are missing.
        let mut register = [page.address(), PAGE as u64, 1, 0];
        // SAFETY: the request takes three words, and there are three.
        let known = unsafe { libc::ioctl(fd, API, api.as_mut_ptr()) } == 0;
        // SAFETY: the request takes four words, and there are four.
        (known && unsafe { libc::ioctl(fd, REGISTER, register.as_mut_ptr()) } == 0).then(|| Stalling(page.address()))
    }
}

#[test]
fn member_of_another_user_gets_no_descriptors_and_no_addresses() {
    let _watchdog = Watchdog::start("strangers::member_of_another_user_gets_no_descriptors_and_no_addresses");
    let Some(mut stranger) = stranger() else { return };
    let engine = engine();
    let shared = engine.alloc(LEN);
    let own = vec![5u8; LEN];
    let mut order = |bulk: &calomel::Bulk, begin: usize| {
        let range: String = postcard::to_stdvec(&Range::of(1, bulk)).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        stranger.tell(&format!("collect {} {range} {begin} {}", engine.address(), begin + LEN));
        assert_eq!(stranger.hear("got"), "0 descriptors, 0 loans, 0 addresses, hello 0 0");
    };
    let begins = [shared.as_ptr().addr(), own.as_ptr().addr()];
    let shared = engine.expose_read_only(shared).unwrap();
    order(&shared.bulk(), begins[0]);
    let own = engine.expose(own, BulkMode::ReadWrite).unwrap();
    order(&own.bulk(), begins[1]);
    // Several at a time: between processes of one user, these payloads would travel by loans.
    for _ in 0..4 {
        order(&own.bulk(), begins[1]);
    }
    assert_lives(&engine);
}

#[test]
fn dialled_member_of_another_user_gets_no_address() {
    let _watchdog = Watchdog::start("strangers::dialled_member_of_another_user_gets_no_address");
    let Some(mut stranger) = stranger() else { return };
    let engine = engine();
    let address = format!("shm://stranger-{}", std::process::id());
    stranger.tell(&format!("welcome {address}"));
    stranger.hear("listens");
    let to = engine.lookup(&address).unwrap();
    engine.procedure::<(u32, u32), u32>("add").on(&to).call(&(1, 2)).unwrap_err();
    assert_eq!(stranger.hear("hello"), "0 0");
}

#[test]
fn memory_of_member_of_another_user_is_never_touched() {
    let _watchdog = Watchdog::start("strangers::memory_of_member_of_another_user_is_never_touched");
    let Some(mut stranger) = stranger() else { return };
    let engine = engine();
    stranger.tell(&format!("loan {}", engine.address()));
    assert_eq!(stranger.hear("touched"), "false false", "the word that the hello names, and the loan");
    stranger.tell(&format!("share {}", engine.address()));
    stranger.hear("shared");
    assert_lives(&engine);
}

#[test]
fn unreadable_memory_of_member_delays_no_other_peer() {
    let _watchdog = Watchdog::start("strangers::unreadable_memory_of_member_delays_no_other_peer");
    for what in ["nonce", "loan"] {
        let Some(mut stranger) = stranger() else { return };
        let (engine, client) = (engine(), client());
        let to = client.lookup(engine.address()).unwrap();
        assert_serves(&client, &to);
        stranger.tell(&format!("stall {} {what}", engine.address()));
        if stranger.hear("stalls") == "never" {
            return eprintln!("skipped: the system has no userfaultfd");
        }
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(2) {
            let call = Instant::now();
            assert_serves(&client, &to);
            assert!(call.elapsed() < Duration::from_secs(5), "{what}: {:?}", call.elapsed());
        }
    }
}

#[test]
fn name_held_by_another_user_is_bypassed_by_tcp() {
    let _watchdog = Watchdog::start("strangers::name_held_by_another_user_is_bypassed_by_tcp");
    let Some(mut stranger) = stranger() else { return };
    let server = configured().same_host_upgrade(false).listen("tcp://127.0.0.1:0").build().unwrap();
    define_add(&server);
    let address = server.address().to_string();
    // It listens at the name that belongs to the server's address, and is in the group that this engine admits.
    stranger.tell(&format!("answer shm://tcp:{}", address.strip_prefix("tcp://").unwrap()));
    stranger.hear("listens");
    let client = configured().shm_group(0).build().unwrap();
    assert_eq!(add(&client, &address), "3 by Some(Tcp)");
    assert_eq!(stranger.hear("received"), "0 bytes");
}
