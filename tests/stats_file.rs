//! `CALOMEL_STATS`: what the engines of a process write when they end, and on a signal. Run in child processes, which have the
//! variables.

// To fork.
#![allow(unsafe_code)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use calomel::{Engine, Request, Responder, Stats};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use signal_hook::consts::SIGUSR1;

use common::{BOUND, Watchdog, eventually};

const VARIABLE: &str = "CALOMEL_STATS";
const SIGNAL_VARIABLE: &str = "CALOMEL_STATS_SIGNAL";
/// What a child does that gets signals.
const ROLE: &str = "CALOMEL_TEST_ROLE";

/// A folder that is removed at the end.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Folder(std::env::temp_dir().join(format!("calomel-{name}-{}", std::process::id())));
        std::fs::create_dir_all(&folder.0).unwrap();
        folder
    }

    fn files(&self) -> Vec<String> {
        let names = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Not a test of its own: what the children run. Makes two engines, which call each other.
#[test]
fn child() {
    if let Ok(role) = std::env::var(ROLE) {
        return signalled_child(&role);
    }
    if std::env::var_os(VARIABLE).is_none() {
        return;
    }
    // Measured all the same.
    let server = Engine::builder().listen("loop://").statistics(false).build().unwrap();
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    let client = Engine::client("loop").unwrap();
    let sum = client.procedure::<(i32, i32), i32>("sum");
    assert_eq!(sum.on(client.lookup(server.address()).unwrap()).call(&(1, 2)).unwrap(), 3);
    client.finalize().unwrap();
    // The other one ends when it is dropped.
}

fn run_child(file: &str) -> u32 {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let mut child = child.args(["--exact", "child", "--quiet"]).env(VARIABLE, file).spawn().unwrap();
    let id = child.id();
    assert!(child.wait().unwrap().success());
    id
}

fn lines(path: &Path) -> Vec<Stats> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn each_engine_adds_a_line_to_the_file() {
    let folder = Folder::new("stats");
    // Several processes, one file.
    let shared = folder.0.join("all");
    let ids = [run_child(shared.to_str().unwrap()), run_child(shared.to_str().unwrap())];
    let found: Vec<(u32, u64)> = lines(&shared).iter().map(|stats| (stats.process, stats.engine)).collect();
    // The client, which is the second engine, ends first.
    assert_eq!(found, [(ids[0], 2), (ids[0], 1), (ids[1], 2), (ids[1], 1)]);
    // A file for each process, and for each engine.
    let id = run_child(folder.0.join("%p.%e.json").to_str().unwrap());
    let [client] = &lines(&folder.0.join(format!("{id}.2.json")))[..] else { panic!("not one line") };
    assert_eq!((&*client.calls[0].procedure, client.calls[0].calls, client.calls[0].time.count), ("sum", 1, 1));
    let [server] = &lines(&folder.0.join(format!("{id}.1.json")))[..] else { panic!("not one line") };
    assert_eq!((&*server.handlers[0].procedure, server.handlers[0].calls), ("sum", 1));
    assert_eq!((server.handlers[0].running.count, server.peers.len()), (1, 1));
    // A file that can't be written does no harm.
    run_child("/dev/null/no folder");
}

/// Makes two engines, one of which waits for the other; says so, and lives until its standard input ends.
fn signalled_child(role: &str) {
    let own = Arc::new(AtomicBool::new(false));
    if role == "own handler" {
        signal_hook::flag::register(SIGUSR1, own.clone()).unwrap();
    }
    let server = Engine::server("loop://").unwrap();
    server.define_deferred("stuck", |responder: Responder<()>, _: ()| std::mem::forget(responder)).unwrap();
    let client = Engine::client("loop").unwrap();
    let stuck = client.procedure::<(), ()>("stuck");
    let call = stuck.on(client.lookup(server.address()).unwrap()).timeout(4 * BOUND).start(&()).unwrap();
    eventually("the call is there", || server.dump().unwrap().requests.len() == 1);
    if role == "forks" {
        // SAFETY: the child calls only functions that are async-signal-safe.
        match unsafe { libc::fork() } {
            0 => loop {
                const HERE: &[u8] = b"\nforked\n";
                // SAFETY: it has no preconditions. Should the test fail, the child ends all the same.
                unsafe { libc::alarm(30) };
                // SAFETY: the bytes are there to be read.
                unsafe { libc::write(1, HERE.as_ptr().cast(), HERE.len()) };
                // SAFETY: it has no preconditions.
                unsafe { libc::pause() };
            },
            pid => {
                println!("\n{pid}");
                let mut status = 0;
                // SAFETY: the status is a place to write to.
                assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
                println!("{}", ExitStatus::from_raw(status).signal().unwrap());
            }
        }
    } else {
        println!("\nready");
    }
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    if role == "own handler" {
        println!("{}", own.load(Ordering::SeqCst));
    }
    drop(call);
    server.finalize().ok();
}

/// A child that gets signals; killed when it is dropped.
struct SignalledChild {
    process: Child,
    stdin: Option<ChildStdin>,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl SignalledChild {
    fn start(role: &str, variables: &[(&str, &str)]) -> SignalledChild {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--quiet", "--nocapture"]).env(ROLE, role).envs(variables.iter().copied());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let stdin = process.stdin.take();
        SignalledChild { process, stdin, lines }
    }

    /// The next line that the role prints, and not the harness.
    fn line(&mut self) -> String {
        let is_harness = |line: &String| line.is_empty() || line.starts_with("running ");
        self.lines.by_ref().map(Result::unwrap).find(|line| !is_harness(line)).unwrap()
    }

    fn signal(&self) {
        send(self.process.id().try_into().unwrap());
    }

    /// Its end, once its input has ended too.
    fn end(&mut self) -> ExitStatus {
        drop(self.stdin.take());
        self.process.wait().unwrap()
    }
}

impl Drop for SignalledChild {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn send(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::USR1).unwrap();
}

fn written(path: &Path) -> Option<Value> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// The file, when it is there.
fn await_file(path: &Path) -> Value {
    eventually("the file is written", || path.exists());
    written(path).unwrap()
}

#[test]
fn engines_write_what_hangs_on_a_signal() {
    let _watchdog = Watchdog::start("engines_write_what_hangs_on_a_signal");
    let folder = Folder::new("signal");
    let file = folder.0.join("all");
    let mut child = SignalledChild::start("", &[(VARIABLE, file.to_str().unwrap()), (SIGNAL_VARIABLE, "SIGUSR1")]);
    assert_eq!(child.line(), "ready");
    let of = |engine: u32| -> PathBuf { folder.0.join(format!("all.{}.{engine}.dump", child.process.id())) };
    let (server, client) = (of(1), of(2));
    let mut age = 0;
    for _ in 0..2 {
        child.signal();
        let found = await_file(&client);
        let call = &found["dump"]["calls"][0];
        assert_eq!((call["procedure"].as_str(), found["stats"]["engine"].as_u64()), (Some("stuck"), Some(2)), "{found}");
        let older = call["age"].as_u64().unwrap();
        assert!(older > age, "{older} after {age}");
        age = older;
        assert_eq!(await_file(&server)["dump"]["requests"][0]["state"], "handler");
        [&client, &server].into_iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }
    // A reader finds a whole file, while it is replaced again and again.
    let mut age = 0;
    for _ in 0..100 {
        child.signal();
        let begin = Instant::now();
        age = loop {
            let found = written(&client).and_then(|found| found["dump"]["calls"][0]["age"].as_u64());
            if let Some(newer) = found.filter(|newer| *newer > age) {
                break newer;
            }
            assert!(begin.elapsed() < BOUND, "no newer file");
        };
    }
    await_file(&server);
    assert!(!file.exists(), "no engine has ended");
    assert!(child.end().success());
    // At the end they add their lines as ever, and nothing is left over.
    assert_eq!(lines(&file).len(), 2);
    let names = [&file, &server, &client].map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
    assert_eq!(folder.files(), names);
}

#[test]
fn a_signal_that_is_not_asked_for_has_its_default() {
    let _watchdog = Watchdog::start("a_signal_that_is_not_asked_for_has_its_default");
    let folder = Folder::new("default");
    let file = folder.0.join("%e");
    let file = (VARIABLE, file.to_str().unwrap());
    // Not asked for; without a file; and a signal that it can't be.
    for variables in [&[file][..], &[(SIGNAL_VARIABLE, "USR1")], &[file, (SIGNAL_VARIABLE, "KILL")]] {
        let mut child = SignalledChild::start("", variables);
        assert_eq!(child.line(), "ready");
        child.signal();
        let end = child.process.wait().unwrap();
        assert_eq!(end.signal(), Some(SIGUSR1), "{variables:?}: {end}");
    }
    assert!(folder.files().is_empty(), "{:?}", folder.files());
}

#[test]
fn a_signal_that_the_program_handles_is_left_to_it() {
    let _watchdog = Watchdog::start("a_signal_that_the_program_handles_is_left_to_it");
    let folder = Folder::new("handled");
    let file = folder.0.join("%e");
    let variables = [(VARIABLE, file.to_str().unwrap()), (SIGNAL_VARIABLE, "USR1")];
    let mut child = SignalledChild::start("own handler", &variables);
    assert_eq!(child.line(), "ready");
    child.signal();
    std::thread::sleep(Duration::from_millis(300));
    drop(child.stdin.take());
    assert_eq!(child.line(), "true");
    assert!(child.end().success());
    assert_eq!(folder.files(), ["1", "2"], "their ends, and no dumps");
}

#[test]
fn a_forked_child_has_the_default() {
    let _watchdog = Watchdog::start("a_forked_child_has_the_default");
    let folder = Folder::new("forked");
    let file = folder.0.join("all");
    let mut child = SignalledChild::start("forks", &[(VARIABLE, file.to_str().unwrap()), (SIGNAL_VARIABLE, "USR1")]);
    // It is there when both have said so, in any order.
    let lines = [child.line(), child.line()];
    let forked = lines.iter().find_map(|line| line.parse().ok()).unwrap();
    assert!(lines.iter().any(|line| line == "forked"), "{lines:?}");
    send(forked);
    assert_eq!(child.line(), SIGUSR1.to_string());
    assert!(folder.files().is_empty(), "the parent was asked: {:?}", folder.files());
    // The parent still answers.
    child.signal();
    await_file(&folder.0.join(format!("all.{}.2.dump", child.process.id())));
    assert!(child.end().success());
}
