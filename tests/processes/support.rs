//! Child processes: started, given orders, stopped, and never left behind.

// Each suite uses what it needs.
#![allow(dead_code)]

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Address, Endpoint, Engine, EngineBuilder, Error, Request};

pub use crate::common::*;

/// One `#[test]` over tcp, one over shared memory, one through libfabric, and one over an RDMA device, for each of these
/// functions.
#[allow(unused_macros)]
macro_rules! over_each {
    ($($test:ident),* $(,)?) => {
        over_each!(@ over_tcp, Tcp, $($test),*);
        over_each!(@ over_shm, Shm, $($test),*);
        #[cfg(feature = "verbs")]
        over_each!(@ on_device, $($test),*);
        #[cfg(feature = "ofi")]
        over_each!(@ over_ofi, Ofi, $($test),*);
    };
    // Few machines have a device, so these tests are ignored, with the reason.
    (@ on_device, $($test:ident),*) => {
        mod over_verbs {
            $(
                #[test]
                #[ignore = "needs an RDMA device: ci/verbs"]
                fn $test() {
                    $crate::support::over($crate::support::Carrier::Verbs, super::$test);
                }
            )*
        }
    };
    (@ $module:ident, $carrier:ident, $($test:ident),*) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    $crate::support::over($crate::support::Carrier::$carrier, super::$test);
                }
            )*
        }
    };
}

pub const ROLE: &str = "CALOMEL_TEST_ROLE";
/// The address that a child listens at; unset: any; `none`: it does not listen.
pub const LISTEN: &str = "CALOMEL_TEST_LISTEN";
/// The [`Carrier`] of a child's engines.
const CARRIER: &str = "CALOMEL_TEST_CARRIER";
/// The signal that a child sends itself in the middle of a transfer.
pub const STRIKE: &str = "CALOMEL_TEST_STRIKE";
/// Marks the lines that a child prints for its parent, among those of the harness.
pub const MARK: &str = "@@ ";

pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// The end of a peer is known by then.
pub const NOTICED: Duration = Duration::from_secs(3);

/// The transport between the engines of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    Tcp,
    Shm,
    /// Shared memory, where the system forbids processes to read each other's.
    ShmNoKernelCopy,
    /// The RDMA device that the environment names.
    Verbs,
    /// Sockets, by way of libfabric.
    Ofi,
}

thread_local! {
    /// The carrier of the test that runs on this thread.
    static CURRENT: Cell<Carrier> = const { Cell::new(Carrier::Tcp) };
}

/// Runs a test over this carrier, with its children.
pub fn over(carrier: Carrier, test: fn()) {
    over_with(carrier, test);
}

/// As `over`, for a test that is a closure.
pub fn over_with(carrier: Carrier, test: impl FnOnce()) {
    if carrier == Carrier::Ofi && !has_fabric("ofi+tcp") {
        return;
    }
    CURRENT.set(carrier);
    test();
}

/// Whether an RDMA device transfers the bytes.
pub fn is_over_verbs() -> bool {
    CURRENT.get() == Carrier::Verbs
}

/// Descriptors that may be left over: the provider `tcp` of libfabric 2.1 keeps the socket of a peer that was connecting to an
/// endpoint when that was closed.
pub fn spared_descriptors() -> usize {
    if CURRENT.get() == Carrier::Ofi { 12 } else { 0 }
}

/// In a child: runs a role over the carrier of its parent's test.
pub fn over_parents_carrier(role: impl FnOnce()) {
    let carriers = [Carrier::Tcp, Carrier::Shm, Carrier::ShmNoKernelCopy, Carrier::Verbs, Carrier::Ofi];
    let wanted = std::env::var(CARRIER).unwrap();
    CURRENT.set(carriers.into_iter().find(|carrier| format!("{carrier:?}") == wanted).unwrap());
    role();
}

/// Any address to listen at.
pub fn anywhere() -> String {
    match CURRENT.get() {
        Carrier::Tcp => "tcp://127.0.0.1:0".to_owned(),
        Carrier::Shm | Carrier::ShmNoKernelCopy => "shm://".to_owned(),
        Carrier::Verbs => verbs_address(0),
        Carrier::Ofi => fabric_address("ofi+tcp"),
    }
}

/// An address where no engine listens.
pub fn nowhere() -> String {
    match CURRENT.get() {
        Carrier::Tcp => format!("tcp://{}", std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()),
        Carrier::Shm | Carrier::ShmNoKernelCopy => format!("shm://absent-{}", std::process::id()),
        Carrier::Verbs => verbs_address(1),
        Carrier::Ofi => {
            format!("ofi+tcp://{}", std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
        }
    }
}

/// An engine that uses only the test's carrier.
pub fn builder() -> EngineBuilder {
    let carrier = CURRENT.get();
    let upgrade = matches!(carrier, Carrier::Shm | Carrier::ShmNoKernelCopy);
    Engine::builder().same_host_upgrade(upgrade).shm_kernel_copy(carrier != Carrier::ShmNoKernelCopy)
}

/// The settings of every engine here.
pub fn configured() -> EngineBuilder {
    builder().peer_timeout(HEARTBEAT).connect_timeout(Duration::from_secs(2)).finalize_timeout(Duration::from_secs(1))
}

pub fn server() -> Engine {
    configured().listen(anywhere()).build().unwrap()
}

pub fn client() -> Engine {
    configured().build().unwrap()
}

/// In a child: prints a line for the parent, at once, whatever the harness does with the output.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{MARK}{text}").unwrap();
    out.flush().unwrap();
}

/// `add`, to check that an engine serves.
pub fn define_add(engine: &Engine) {
    engine.define("add", |_: &Request, (x, y): (u32, u32)| x + y).unwrap();
}

#[track_caller]
pub fn assert_serves(engine: &Engine, endpoint: &Endpoint) {
    let sum = engine.procedure::<(u32, u32), u32>("add").on(endpoint).call(&(1, 2));
    assert_eq!(sum.unwrap(), 3);
}

/// The engine can still call others, be called by others, and transfer bulks, whatever happened to one peer.
#[track_caller]
pub fn assert_lives(engine: &Engine) {
    let other = server();
    define_add(&other);
    assert_serves(engine, &engine.lookup(other.address()).unwrap());
    let exposed = other.expose_read_only(pattern(1, 100_000)).unwrap();
    let mut copy = vec![0u8; 100_000];
    exposed.bulk().on(engine.lookup(other.address()).unwrap()).pull_into(&mut copy).unwrap();
    assert!(copy == exposed.view());
    if !engine.addresses().is_empty() {
        let registration = engine.define("alive?", |_: &Request, n: u32| n + 1).unwrap();
        let endpoint = other.lookup(engine.address()).unwrap();
        assert_eq!(other.procedure::<u32, u32>("alive?").on(&endpoint).call(&1).unwrap(), 2);
        registration.remove();
    }
}

/// The error of an operation whose peer is gone, within the time limit.
#[track_caller]
pub fn assert_disconnected<T>(result: calomel::Result<T>, since: Instant) {
    let took = since.elapsed();
    match result.map(|_| "a success") {
        Err(Error::Disconnected { .. }) => {}
        other => panic!("after {took:?}: {other:?}"),
    }
    assert!(took < NOTICED, "took {took:?}");
}

/// The kernel at a proxy acknowledges bytes that are only in its buffers, as no network does, so these are small.
pub fn keep_little(socket: &impl AsRawFd) {
    for option in [libc::SO_RCVBUF, libc::SO_SNDBUF] {
        let size: libc::c_int = 32 << 10;
        let len = size_of_val(&size) as libc::socklen_t;
        // SAFETY: the option's value is valid for `len` bytes, for as long as the call lasts.
        let done = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const size).cast(), len) };
        assert_eq!(done, 0);
    }
}

/// Another process of this program.
pub struct Child {
    process: std::process::Child,
    lines: mpsc::Receiver<String>,
    unread: Vec<String>,
}

impl Child {
    /// Starts a role, with further environment variables.
    pub fn start(role: &str, settings: &[(&str, &str)]) -> Child {
        Child::start_as(role, settings, |_| ())
    }

    /// As `start`; `configure` changes the command.
    pub fn start_as(role: &str, settings: &[(&str, &str)], configure: impl FnOnce(&mut Command)) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child", "--nocapture", "--test-threads", "1"])
            .env(ROLE, role)
            .env(CARRIER, format!("{:?}", CURRENT.get()))
            .envs(settings.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        configure(&mut command);
        let mut process = command.spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let output = process.stdout.take().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { break };
                if let Some((_, text)) = line.split_once(MARK) {
                    let _ = sender.send(text.to_owned());
                }
            }
        });
        Child { process, lines, unread: Vec::new() }
    }

    /// An engine that listens, and its address.
    pub fn server(settings: &[(&str, &str)]) -> (Child, Address) {
        let mut child = Child::start("peer", settings);
        let address = child.hear("address").parse().unwrap();
        (child, address)
    }

    /// An engine that does not listen.
    pub fn client() -> Child {
        let mut child = Child::start("peer", &[(LISTEN, "none")]);
        child.hear("ready");
        child
    }

    /// Waits for a line of the child that begins with `word`; returns the rest of it.
    #[track_caller]
    pub fn hear(&mut self, word: &str) -> String {
        let begin = Instant::now();
        let after = |line: &String| {
            let rest = line.strip_prefix(word)?;
            (rest.is_empty() || rest.starts_with(' ')).then(|| rest.trim_start().to_owned())
        };
        loop {
            if let Some(at) = self.unread.iter().position(|line| after(line).is_some()) {
                return after(&self.unread.remove(at)).unwrap();
            }
            match self.lines.recv_timeout((patience() * BOUND).saturating_sub(begin.elapsed())) {
                Ok(line) => self.unread.push(line),
                Err(error) => panic!("waiting for `{word}`: {error}; received {:?}", self.unread),
            }
        }
    }

    /// The lines of the child so far that begin with one of these words.
    pub fn said_of(&mut self, words: &[&str]) -> Vec<String> {
        self.unread.extend(self.lines.try_iter());
        let of_these = |line: &mut String| words.contains(&line.split(' ').next().unwrap_or_default());
        self.unread.extract_if(.., of_these).collect()
    }

    /// Gives the child an order.
    #[track_caller]
    pub fn tell(&mut self, order: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{order}").unwrap();
    }

    pub fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    /// Sends a signal, and waits until it has had its effect.
    #[track_caller]
    pub fn signal(&self, signal: i32) {
        // SAFETY: the child is not waited for before this value is dropped, so the process id is still its own.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
        match signal {
            libc::SIGCONT => eventually("the process goes on", || self.is_running()),
            _ => eventually("the signal arrived", || !self.is_running()),
        }
    }

    /// False for a process that is stopped or dead.
    pub fn is_running(&self) -> bool {
        is_running(self.pid())
    }

    /// When the process stops or dies, watched from now on.
    pub fn struck(&self) -> thread::JoinHandle<Instant> {
        let pid = self.pid();
        thread::spawn(move || {
            let begin = Instant::now();
            while is_running(pid) && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_micros(500));
            }
            Instant::now()
        })
    }

    /// Waits for the process to end by itself.
    #[track_caller]
    pub fn wait(&mut self, bound: Duration) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(begin.elapsed() < bound, "the process runs on; it printed {:?}", self.lines.try_iter().collect::<Vec<_>>());
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Works on stopped processes, too; on a dead one it does nothing.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may contain anything; the state follows it.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, None | Some('T' | 't' | 'Z' | 'X' | 'x'))
}

/// What a process holds for its links: descriptors, mappings of shared memory, and threads other than handlers'. (The number of
/// handler threads may vary: a progress thread is replaced while it runs a handler.)
pub fn holdings(pid: i32) -> (usize, usize, usize) {
    let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    let threads = names.filter(|name| name.trim() != "calomel-handler").count();
    (count("fd"), maps.lines().filter(|line| line.contains("memfd:")).count(), threads)
}
