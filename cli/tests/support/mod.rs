//! Starts the command, and gives it a terminal.

// No suite uses all of it.
#![allow(dead_code)]

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// Longer than any of these commands takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_calomel"));
    command.args(arguments).stdin(Stdio::null()).env_remove("CALOMEL_PRE_SHARED_KEY_FILE");
    command
}

pub fn run(arguments: &[&str]) -> (i32, String, String) {
    finish(command(arguments))
}

/// Runs it to its end, or kills it.
pub fn finish(mut command: Command) -> (i32, String, String) {
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = process.id();
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if wait.recv_timeout(PATIENCE).is_err() {
            Command::new("kill").args(["-9", &id.to_string()]).status().ok();
            panic!("the command did not end");
        }
    });
    let mut output = [String::new(), String::new()];
    let [out, err] = &mut output;
    let (mut stdout, mut stderr) = (process.stdout.take().unwrap(), process.stderr.take().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| stdout.read_to_string(out).unwrap());
        stderr.read_to_string(err).unwrap();
    });
    let status = process.wait().unwrap();
    done.send(()).ok();
    watchdog.join().unwrap();
    let [out, err] = output;
    (status.code().unwrap_or(-1), out, err)
}

pub fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A terminal: the side of this process, and that of the command.
pub fn pseudo_terminal() -> (OwnedFd, File) {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap();
    let side = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    (terminal, side)
}

/// Waits until the condition holds.
#[track_caller]
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(begin.elapsed() < PATIENCE / 2, "not in time: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
