//! `calomel top`, on a terminal as a person uses it, and for scripts.

mod support;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use calomel::{Engine, Request};
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};

use support::{PATIENCE, command, eventually, finish, json, pseudo_terminal, run};

fn server() -> Engine {
    serve("tcp://127.0.0.1:0")
}

fn serve(address: &str) -> Engine {
    let server = Engine::builder().listen(address).remote_stats(true).build().unwrap();
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    server.define_try("fail", |_: &Request, (): ()| -> Result<(), String> { Err("so".to_owned()) }).unwrap();
    server
}

/// A client that calls all the time, until it is dropped.
struct Load {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn on(server: &Engine) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let (end, address) = (stop.clone(), server.address());
        let thread = thread::spawn(move || {
            let client = Engine::client("tcp").unwrap();
            let peer = client.lookup(address).unwrap();
            let (sum, fail) = (client.procedure::<(i32, i32), i32>("sum"), client.procedure::<(), ()>("fail"));
            while !end.load(Ordering::SeqCst) {
                (0..10).for_each(|x| assert_eq!(sum.on(&peer).call(&(x, 1)).unwrap(), x + 1));
                fail.on(&peer).call(&()).unwrap_err();
                thread::sleep(Duration::from_millis(1));
            }
        });
        Load { stop, thread: Some(thread) }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// `calomel top` on a terminal, whose content is known. Killed when it is dropped.
struct Top {
    process: Child,
    terminal: File,
    side: File,
    before: Termios,
    screen: Arc<Mutex<vt100::Parser>>,
    reader: Option<JoinHandle<()>>,
}

impl Top {
    fn start(arguments: &[&str]) -> Top {
        let (terminal, side) = pseudo_terminal();
        tcsetwinsize(&side, size(40, 120)).unwrap();
        let before = tcgetattr(&side).unwrap();
        let mut command = command(&[&["top", "--interval", "100ms"], arguments].concat());
        let own = || Stdio::from(OwnedFd::from(side.try_clone().unwrap()));
        let process = command.stdin(own()).stdout(own()).stderr(own()).env("TERM", "xterm-256color").spawn().unwrap();
        let terminal = File::from(terminal);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(40, 120, 0)));
        let (drawn, mut output) = (screen.clone(), terminal.try_clone().unwrap());
        let reader = thread::spawn(move || {
            let (mut bytes, mut pending) = ([0; 4096], Vec::new());
            // A terminal whose other side is closed fails to be read.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                pending.extend_from_slice(&bytes[..count]);
                let whole = whole_frames(&pending);
                drawn.lock().unwrap().process(&pending[..whole]);
                pending.drain(..whole);
            }
            drawn.lock().unwrap().process(&pending);
        });
        Top { process, terminal, side, before, screen, reader: Some(reader) }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// The line of the screen that has this, once it satisfies the condition.
    #[track_caller]
    fn line(&self, part: &str, condition: impl Fn(&str) -> bool) -> String {
        let find = || self.text().lines().find(|line| line.contains(part) && condition(line)).map(str::to_owned);
        let begin = std::time::Instant::now();
        loop {
            if let Some(line) = find() {
                return line;
            }
            assert!(begin.elapsed() < PATIENCE / 2, "no such line with {part:?}:\n{}", self.text());
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn press(&mut self, keys: &[u8]) {
        self.terminal.write_all(keys).unwrap();
    }

    /// Its end, after which the terminal must be as it was.
    fn end(mut self) -> (ExitStatus, String) {
        let status = eventually("the command ends", || self.process.try_wait().unwrap());
        let after = tcgetattr(&self.side).unwrap();
        let modes = |of: &Termios| (of.local_modes, of.input_modes, of.output_modes);
        assert_eq!(modes(&after), modes(&self.before));
        assert!(after.local_modes.contains(LocalModes::ECHO | LocalModes::ICANON));
        // The last of what it has drawn.
        self.side.write_all(b"\r\nthe shell again").unwrap();
        self.line("the shell again", |_| true);
        let screen = self.screen.lock().unwrap();
        assert!(!screen.screen().alternate_screen() && !screen.screen().hide_cursor());
        let text = screen.screen().contents();
        drop(screen);
        (status, text)
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
        // The reader ends when the last copy of the other side is closed.
        self.side = File::open("/dev/null").unwrap();
        self.reader.take().unwrap().join().unwrap();
    }
}

/// How much of this has no part of a frame that goes on: a terminal shows a frame whole, or not yet.
fn whole_frames(bytes: &[u8]) -> usize {
    const BEGIN: &[u8] = b"\x1b[?2026h";
    const END: &[u8] = b"\x1b[?2026l";
    let place = |of: &[u8], from: usize| bytes[from..].windows(of.len()).position(|found| found == of).map(|at| from + at);
    let mut whole = 0;
    while let Some(begin) = place(BEGIN, whole) {
        let Some(end) = place(END, begin) else { return begin };
        whole = end + END.len();
    }
    // The next frame's mark may have come in part.
    let cut = (1..BEGIN.len()).rev().find(|&length| bytes[whole..].ends_with(&BEGIN[..length]));
    bytes.len() - cut.unwrap_or(0)
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

#[test]
fn figures_move_until_a_key_ends_it() {
    let server = server();
    let load = Load::on(&server);
    let mut top = Top::start(&[&server.address().to_string()]);
    let calls = |line: &str| line.split_whitespace().last().unwrap().parse::<u64>().unwrap();
    let line = top.line("handles sum", |line| calls(line) > 0);
    assert!(!line.contains(" 0.00 /s"), "{line}");
    // More of them, and never fewer.
    let first = calls(&line);
    top.line("handles sum", |line| calls(line) > first);
    top.line("handles fail", |line| line.contains("/s") && calls(line) > 0);
    top.line("peers 2", |line| line.contains("connections"));
    top.line("refusals: none", |line| line.contains("limits reached: none"));
    // The bars of the chart.
    top.line("\u{2588}", |_| true);
    // The order of the procedures.
    let place = |top: &Top, name: &str| top.text().find(name).unwrap_or(usize::MAX);
    eventually("most calls first", || (place(&top, "handles sum") < place(&top, "handles fail")).then_some(()));
    for order in ["p99", "errors"] {
        top.press(b"s");
        top.line("order: ", |line| line.contains(order));
    }
    eventually("most errors first", || (place(&top, "handles fail") < place(&top, "handles sum")).then_some(()));
    // And so it stays when new figures come.
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(25));
        assert!(place(&top, "handles fail") < place(&top, "handles sum"), "{}", top.text());
    }
    // A smaller terminal has all that matters.
    tcsetwinsize(&top.side, size(20, 80)).unwrap();
    top.screen.lock().unwrap().screen_mut().set_size(20, 80);
    eventually("it is drawn in the new size", || {
        let text = top.text();
        (text.lines().last()?.starts_with("q quit") && text.contains("handles sum") && text.lines().count() == 20).then_some(())
    });
    // What has ended, ends here too: the figures are those of the last interval.
    drop(load);
    top.line("handles sum", |line| line.contains(" 0.00 /s") && line.contains(" - "));
    top.press(b"q");
    let (status, text) = top.end();
    assert!(status.success(), "{status}: {text}");
}

#[test]
fn the_terminal_is_restored_however_it_ends() {
    let server = server();
    let address = server.address().to_string();
    for keys in [&b"\x03"[..], b"\x1b"] {
        let mut top = Top::start(&[&address]);
        top.line("q quit", |_| true);
        top.press(keys);
        let (status, _) = top.end();
        assert!(status.success(), "{keys:?}: {status}");
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let top = Top::start(&[&address]);
        top.line("q quit", |_| true);
        kill_process(Pid::from_child(&top.process), signal).unwrap();
        let (status, text) = top.end();
        assert!(status.code() == Some(1) && text.contains("error: ended by a signal"), "{status}: {text}");
    }
}

#[test]
fn a_peer_that_is_lost_is_found_again() {
    let server = server();
    let address = server.address();
    let top = Top::start(&["--timeout", "1s", "--no-same-host-upgrade", &address.to_string()]);
    top.line("handles sum", |_| true);
    server.finalize().unwrap();
    top.line("LOST, trying again: ", |_| true);
    // The last figures stay.
    top.line("handles sum", |_| true);
    let again = serve(&address.to_string());
    let load = Load::on(&again);
    eventually("it is found", || (!top.text().contains("LOST")).then_some(()));
    top.line("handles sum", |line| !line.contains(" 0.00 /s"));
    // One that no longer allows it ends the command.
    drop(load);
    again.finalize().unwrap();
    let _denying = Engine::server(address.to_string().as_str()).unwrap();
    let (status, text) = top.end();
    assert_eq!(status.code(), Some(3), "{text}");
}

#[test]
fn failures_have_their_exit_codes_and_draw_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    fs::write(&key, "fedcba9876543210").unwrap();
    let builder = || Engine::builder().listen("tcp://127.0.0.1:0");
    let closed = builder().build().unwrap();
    let locked = builder().remote_stats(true).pre_shared_key("0123456789abcdef").build().unwrap();
    let choosy = builder().remote_stats(true).authorize(|caller| caller.procedure() != "calomel.stats").build().unwrap();
    let gone = builder().remote_stats(true).build().unwrap();
    gone.finalize().unwrap();
    let [closed, locked, choosy, gone] = [&closed, &locked, &choosy, &gone].map(|engine| engine.address().to_string());
    let key = key.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 6] = [
        (&[&closed], 3, "statistics"),
        (&[&choosy], 3, &choosy),
        (&["--key-file", key, &locked], 3, &locked),
        (&[&locked], 3, &locked),
        (&["--timeout", "1s", &gone], 1, &gone),
        (&["nonsense://x"], 2, "nonsense"),
    ];
    for (arguments, code, part) in cases {
        let (found, text, error) = run(&[&["top"], arguments].concat());
        assert_eq!((found, text.as_str()), (code, ""), "{arguments:?}: {error}");
        assert!(error.contains(part) && !error.contains('\u{1b}'), "{error}");
    }
    // Nor on a terminal.
    let top = Top::start(&[&closed]);
    let (status, text) = top.end();
    assert_eq!(status.code(), Some(3));
    assert!(text.starts_with("error: ") && !text.contains("q quit"), "{text}");
}

#[test]
fn scripts_get_text_and_json() {
    let server = server();
    let _load = Load::on(&server);
    let address = server.address().to_string();
    // No terminal: one interval.
    for arguments in [&["top", &address][..], &["top", "--once", "--interval", "200ms", &address]] {
        let (code, text, error) = run(arguments);
        assert_eq!((code, error.as_str()), (0, ""));
        assert!(text.contains(&address) && !text.contains('\u{1b}'), "{text}");
        assert!(text.lines().any(|line| line.starts_with("handles  sum ")), "{text}");
    }
    let (code, text, _) = run(&["top", "--once", "--json", "--interval", "300ms", &address]);
    assert_eq!((code, text.lines().count()), (0, 1));
    let found = json(&text);
    let rows = found["procedures"].as_array().unwrap();
    let of = |name: &str| rows.iter().find(|row| row["procedure"] == name).unwrap();
    let (sum, fail) = (of("sum"), of("fail"));
    let figure = |row: &serde_json::Value, name: &str| row[name].as_f64().unwrap();
    assert!(figure(sum, "calls") > 0.0 && figure(&found, "requests") >= figure(sum, "calls"), "{found:#}");
    // Ten to one, but for those that the interval cuts off.
    let ratio = figure(sum, "calls") / figure(fail, "calls");
    assert!((5.0..20.0).contains(&ratio), "{found:#}");
    assert_eq!((figure(sum, "errors"), figure(fail, "errors")), (0.0, figure(fail, "calls")));
    assert!(figure(sum, "p50") > 0.0 && figure(sum, "p50") <= figure(sum, "p99"), "{found:#}");
    assert!((0.2..20.0).contains(&figure(&found, "interval")), "{found:#}");

    // A line for each interval, until the reader has read enough.
    let mut process = command(&["top", "--json", "--interval", "50ms", &address]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let all: Vec<f64> = (0..3).map(|_| json(&lines.next().unwrap().unwrap())["uptime"].as_f64().unwrap()).collect();
    drop(lines);
    assert!(all.is_sorted_by(|a, b| a < b), "{all:?}");
    assert!(eventually("it ends", || process.try_wait().unwrap()).success());

    let (code, help, _) = finish(command(&["top", "--help"]));
    assert!(code == 0 && help.contains("Examples:") && help.contains("--sort"), "{help}");
}
