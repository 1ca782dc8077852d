//! What the engines of a process write on a signal, where the environment asks for that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
use signal_hook::flag::register_conditional_default;
use signal_hook::iterator::Signals;

use super::stats_file::{STATS_SIGNAL_VARIABLE, STATS_VARIABLE};
use super::{Engine, EngineDump, EngineShared, Stats};
use crate::fork::{forked_flag, is_flagged_child};
use crate::sync::Mutex;

/// The signals that it can be. Their default is to end the process, so a program that wants to live has no other use for them.
const SIGNALS: [(&str, i32); 4] = [("HUP", SIGHUP), ("QUIT", SIGQUIT), ("USR1", SIGUSR1), ("USR2", SIGUSR2)];

/// An engine whose lock was not free for this long is written as one that hangs.
const LIMIT: Duration = Duration::from_secs(2);

/// An engine that writes when the signal arrives.
struct WatchedEngine {
    shared: Weak<EngineShared>,
    /// A thread asks it, and may do so for ever.
    asked: Arc<AtomicBool>,
}

static ENGINES: Mutex<Vec<WatchedEngine>> = Mutex::new(Vec::new());

/// What is written of an engine: one of these.
#[derive(Serialize)]
#[serde(untagged)]
enum SignalDump {
    Whole { stats: Box<Stats>, dump: Box<Option<EngineDump>> },
    Hanging { process: u32, engine: u64, hangs: &'static str },
}

impl EngineShared {
    /// Has the engine write on a signal, if the environment names one. The first one makes the process watch for it.
    pub(crate) fn write_on_signal(self: &Arc<Self>) {
        static WATCHING: OnceLock<bool> = OnceLock::new();
        // The thread of the parent does not exist there, and may have held a lock.
        if is_flagged_child() {
            return;
        }
        let Some(name) = std::env::var_os(STATS_SIGNAL_VARIABLE) else { return };
        let start = || {
            let started = start(&name.to_string_lossy(), self.statistics.file.is_some());
            if let Err(reason) = &started {
                let value = name.display();
                tracing::warn!(
                    target: "calomel::engine", variable = STATS_SIGNAL_VARIABLE, %value, reason,
                    "an environment variable has no effect"
                );
            }
            started.is_ok()
        };
        if *WATCHING.get_or_init(start) {
            let mut engines = ENGINES.lock();
            engines.retain(|watched| watched.shared.strong_count() > 0);
            engines.push(WatchedEngine { shared: Arc::downgrade(self), asked: Arc::default() });
        }
    }
}

fn start(name: &str, has_file: bool) -> Result<(), String> {
    let short = name.strip_prefix("SIG").unwrap_or(name);
    let known = SIGNALS.iter().find(|(known, _)| *known == short);
    let (_, signal) = *known.ok_or("it can be HUP, QUIT, USR1 or USR2")?;
    if !has_file {
        return Err(format!("{STATS_VARIABLE} does not name a file"));
    }
    let status = fs::read_to_string("/proc/self/status").map_err(|error| format!("/proc/self/status: {error}"))?;
    if !has_default(&status, signal) {
        return Err("the program handles or ignores this signal itself".to_owned());
    }
    let text = |error: io::Error| error.to_string();
    // Registered first, and so run first: a forked child, which has the handlers but not the thread, ends by the signal as if
    // there were no handler, and does not write to the parent's pipe.
    register_conditional_default(signal, forked_flag()).map_err(text)?;
    let mut signals = Signals::new([signal]).map_err(text)?;
    let wait = move || signals.forever().for_each(|_| write_all());
    thread::Builder::new().name("calomel-signal".to_owned()).spawn(wait).map_err(text)?;
    Ok(())
}

/// Whether the process neither handles nor ignores a signal, by its `/proc/self/status`.
fn has_default(status: &str, signal: i32) -> bool {
    let is_in = |set: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(':'));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_none_or(|mask| mask >> (signal - 1) & 1 == 1)
    };
    !is_in("SigCgt") && !is_in("SigIgn")
}

fn write_all() {
    let engines: Vec<_> = {
        let engines = ENGINES.lock();
        engines.iter().filter_map(|watched| Some((watched.shared.upgrade()?, watched.asked.clone()))).collect()
    };
    for (shared, dump) in ask(&engines, LIMIT) {
        let Some(path) = dump_path(&shared) else { continue };
        match write_whole(&path, &dump) {
            Ok(()) => {
                tracing::info!(target: "calomel::engine", path = %path.display(), "statistics and dump written on a signal")
            }
            Err(error) => tracing::warn!(target: "calomel::engine", %error, path = %path.display(), "can't write statistics"),
        }
    }
}

/// Asks each engine on a thread of its own, since one that is stuck inside the library answers never.
fn ask(engines: &[(Arc<EngineShared>, Arc<AtomicBool>)], limit: Duration) -> Vec<(Arc<EngineShared>, SignalDump)> {
    let mut answers = Vec::new();
    for (shared, asked) in engines.iter().filter(|(shared, _)| !shared.finalizing().is_done()) {
        let (answer, answered) = mpsc::channel();
        answers.push((shared, answered));
        if asked.swap(true, Ordering::Acquire) {
            continue;
        }
        let (shared, flag) = (shared.clone(), asked.clone());
        let question = move || {
            let engine = Engine::from_shared(shared);
            let (stats, dump) = (Box::new(engine.stats()), Box::new(engine.dump()));
            flag.store(false, Ordering::Release);
            // It may be too late.
            answer.send(SignalDump::Whole { stats, dump }).ok();
        };
        if thread::Builder::new().name("calomel-dump".to_owned()).spawn(question).is_err() {
            asked.store(false, Ordering::Release);
        }
    }
    let until = Instant::now() + limit;
    let answer = |(shared, answered): (&Arc<EngineShared>, mpsc::Receiver<SignalDump>)| {
        let dump = answered.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap_or(SignalDump::Hanging {
            process: std::process::id(),
            engine: shared.statistics.number,
            hangs: "a lock of the engine was not free in time",
        });
        (shared.clone(), dump)
    };
    answers.into_iter().map(answer).collect()
}

/// A file for each engine: the name of the statistics' file, completed by the process and the engine.
fn dump_path(shared: &EngineShared) -> Option<PathBuf> {
    let mut name = shared.statistics.file.as_ref()?.to_string_lossy().into_owned();
    for part in ["%p", "%e"] {
        if !name.contains(part) {
            name.push('.');
            name.push_str(part);
        }
    }
    Some(shared.expand(&(name + ".dump")))
}

/// Replaces the file, so that a reader finds the whole of the old one or of the new one.
fn write_whole(path: &Path, dump: &SignalDump) -> io::Result<()> {
    let mut text = serde_json::to_vec(dump)?;
    text.push(b'\n');
    let mut new = path.to_owned();
    new.as_mut_os_string().push(".new");
    // One that was left by a process of the same id. A new file can't be a link that another user has laid there.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = File::create_new(&new)?.write_all(&text).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        fs::remove_file(&new).ok();
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_has_its_default_where_no_mask_has_it() {
        let status = |ignored: &str, caught: &str| format!("Name:\tx\nSigIgn:\t{ignored}\nSigCgt:\t{caught}\nCapInh:\t0\n");
        let free = "0000000000001000";
        assert!(has_default(&status(free, free), SIGUSR1));
        assert!(!has_default(&status(free, "0000000000000200"), SIGUSR1));
        assert!(!has_default(&status("0000000000000a00", free), SIGUSR1));
        assert!(!has_default(&status("0000000000000a00", free), SIGUSR2));
        assert!(!has_default("", SIGUSR1));
    }

    #[test]
    fn an_engine_that_is_stuck_does_not_hold_up_the_others() {
        let engines = [Engine::server("loop://").unwrap(), Engine::server("loop://").unwrap()];
        let watched: Vec<_> = engines.iter().map(|engine| (engine.shared().clone(), Arc::default())).collect();
        let is_whole = |limit| -> Vec<bool> {
            ask(&watched, limit).iter().map(|(_, dump)| matches!(dump, SignalDump::Whole { .. })).collect()
        };
        let patient = Duration::from_secs(20);
        assert_eq!(is_whole(patient), [true, true]);
        engines[0].shared().core.with_proto(|_| {
            // Twice: it is asked once.
            for _ in 0..2 {
                assert_eq!(is_whole(Duration::from_millis(500)), [false, true]);
            }
        });
        let begin = Instant::now();
        while !is_whole(patient)[0] {
            assert!(begin.elapsed() < patient);
        }
        engines[0].finalize().unwrap();
        assert_eq!(is_whole(patient), [true]);
    }
}
