//! Runs every example as a user would, and checks its output.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime};
use std::{env, fs, thread};

/// The time limit of an example, which takes a moment: one that exceeds it has hung.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// One test per example: it succeeds, and prints these lines among others. An example that needs a feature is tested with it.
macro_rules! examples {
    ($($(#[$feature:meta])? $test:ident: $example:literal prints [$($line:literal),* $(,)?];)*) => {
        $(
            $(#[$feature])?
            #[test]
            fn $test() {
                let output = Running::start($example, &[]).finish();
                output.assert_success();
                $(output.assert_line($line);)*
            }
        )*

        #[test]
        fn every_example_has_a_test() {
            let tested = BTreeSet::from([$($example.to_owned()),*]);
            assert_eq!(example_names(), tested);
        }
    };
}

examples! {
    hello: "01_hello" prints ["Hello, Matthieu!"];
    sum: "02_sum" prints ["42 + 63 = 105", "Statistics { count: 3, sum: 9.0, mean: 3.0 }"];
    closures_and_state: "03_closures_and_state" prints [
        "the next ticket is number 101",
        r#"visitors: {"client 1", "client 2", "client 3", "client 4"}"#,
    ];
    errors_and_timeouts: "04_errors_and_timeouts" prints ["the server still works: 84 / 2 = 42"];
    async_handlers: "05_async_handlers" prints ["3² + 4² = 25, 5² + 12² = 169"];
    one_way: "06_one_way" prints [
        r#"the server logged ["one", "three", "two"]"#,
        "the server summed up 100000 numbers to 5000050000",
    ];
    providers: "07_providers" prints ["Hello, Matthieu! Bonjour, Matthieu!"];
    #[cfg(feature = "macros")]
    service: "08_service" prints [r#"today: Ok("write an example")"#, "imported 2700 bytes", "2600 characters"];
    expose_vec_and_string: "09_expose_vec_and_string" prints ["MATTHIEU...."];
    slices_and_segments: "10_slices_and_segments" prints [
        "the server was given [3, 10, 20]",
        "afterwards the message is [[1, 2, 6], [20, 40, 30, 40]]",
    ];
    scoped_memory: "11_scoped_memory" prints ["[7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0]", "revoked: true"];
    started_transfers: "12_started_transfers" prints [
        "the first 12 bytes are the words [0, 1, 2]",
        "4 parts arrived, 1048576 words",
    ];
    stop: "13_stop" prints [r#"the server stopped: ["prefinalize", "finalize"]"#];
    same_host: "14_same_host" prints [
        "Tcp address, reached by Some(Shm)",
        "Shm address, reached by Some(Shm)"
    ];
    restricted_memory: "15_restricted_memory" prints ["pulled 4 bytes", "used up: 2, revoked: 2"];
    trust: "16_trust" prints [
        "with the key, read: 42",
        "with the key, write: this caller may not call it",
        "without the key: it wants a key, and this engine has none",
    ];
    key_value_store: "17_key_value_store" prints ["400 values are stored, and all were read back"];
    ring_all_reduce: "18_ring_all_reduce" prints ["each of 4 ranks has the sums of 64 MiB"];
    #[cfg(feature = "tokio")]
    ring_all_reduce_tokio: "19_ring_all_reduce_tokio" prints ["each of 4 ranks has the sums of 64 MiB"];
    #[cfg(feature = "memmap2")]
    checkpoint: "20_checkpoint" prints ["rank 1 is back at step 4"];
    daemon: "25_daemon" prints [
        "stored and read back: calomel",
        "the service: ended",
        "it has ended by itself: true",
    ];
    log_stream: "21_log_stream" prints ["patient: 10000 lines sent, 0 dropped", "hurried: some lines were dropped: true"];
    event_loop: "22_event_loop" prints [
        "the engine answered 42",
        "the socket said: hello from the same loop",
        "the timer ticked: true",
    ];
    world: "23_world" prints ["hello, rank 0, from rank 0 of 1"];
    all_to_all: "24_all_to_all" prints ["1 ranks, 0 pairs called and pulled 64 KiB"];
    do_rdma: "do_rdma" prints [
        "[server] pulled 6 of 9 bytes: Matthi",
        "[client] the sum of [1, 4, 2, 5, 6, 3, 5, 3, 2, 5] is 36",
        "[server] copied 45 bytes from offset 3 there to offset 13 here, and no other",
        "[client] the server copied a slice of 45 bytes",
        "[client] all of it went over Shm",
        "[client] asked the server to stop",
        "[server] stopped",
    ];
}

#[test]
fn do_rdma_started_by_hand_succeeds() {
    let mut server = Running::start("do_rdma", &["server"]);
    let address = server.read_after("listening on ");

    let client = Running::start("do_rdma", &["client", &address]).finish();
    client.assert_success();
    client.assert_line("the sum of [1, 4, 2, 5, 6, 3, 5, 3, 2, 5] is 36");
    client.assert_line("the server copied a slice of 45 bytes");

    let server = server.finish();
    server.assert_success();
    server.assert_line("pulled 6 of 9 bytes: Matthi");
    server.assert_line("copied 45 bytes from offset 3 there to offset 13 here, and no other");
    server.assert_line("stopped");
}

#[test]
fn do_rdma_listens_at_the_given_address() {
    let mut server = Running::start("do_rdma", &["server", "tcp://localhost:0"]);
    let address = server.read_after("listening on ");
    Running::start("do_rdma", &["client", &address]).finish().assert_success();
    server.finish().assert_success();
}

#[test]
fn do_rdma_reports_its_errors() {
    for (arguments, message) in [
        (&["client", "tcp://127.0.0.1:1"][..], "127.0.0.1:1"), // port 1 has no listener
        (&["client", "nonsense"], "nonsense"),
        (&["client", "loop://here"], "loop://here can't be reached from another process"),
        (&["server", "loop://here"], "loop://here can't be reached from another process"),
        (&["both"], "usage: do_rdma"),
    ] {
        let output = Running::start("do_rdma", arguments).finish();
        assert_eq!(output.code, Some(1), "{arguments:?}: {output:#?}");
        let found = output.lines.iter().any(|line| line.starts_with("error: ") && line.contains(message));
        assert!(found, "{arguments:?} should print {message:?}: {output:#?}");
    }
}

#[test]
fn daemon_tells_systemd_when_it_is_ready_and_when_it_ends() {
    let name = format!("calomel-examples-{}", std::process::id());
    let systemd = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).expect("a name")).expect("a socket");
    systemd.set_read_timeout(Some(TIME_LIMIT)).expect("a time limit");
    let told = || {
        let mut state = [0; 100];
        let length = systemd.recv(&mut state).expect("it tells systemd");
        String::from_utf8_lossy(&state[..length]).into_owned()
    };
    let environment = [("NOTIFY_SOCKET", &*format!("@{name}")), ("CALOMEL_LISTEN", "tcp://127.0.0.1:0")];
    let mut daemon = Running::start_in("25_daemon", &["serve"], &environment);
    assert_eq!(told(), "READY=1");
    // It listens by then.
    let address = daemon.read_after("listening at ");
    let client = calomel::Engine::client("tcp").expect("an engine");
    client.lookup(&*address).and_then(|peer| peer.ping(TIME_LIMIT)).expect("it answers");
    Command::new("kill").arg(daemon.process.id().to_string()).status().expect("a signal");
    assert_eq!(told(), "STOPPING=1");
    let output = daemon.finish();
    output.assert_success();
    output.assert_line("ended");
}

/// The names of the programs in the folder of examples.
fn example_names() -> BTreeSet<String> {
    let files = fs::read_dir(env!("CARGO_MANIFEST_DIR")).expect("the folder of the examples");
    let programs = files.map(|file| file.expect("its entries").path()).filter(|file| file.extension() == Some("rs".as_ref()));
    programs.map(|file| file.file_stem().expect("a file name").to_string_lossy().into_owned()).collect()
}

/// An example that runs, in a process group of its own. Dropped early, it is killed with all processes that it started.
struct Running {
    example: &'static str,
    process: Child,
    /// The lines of both its outputs. The channel ends when the example does.
    printed: Receiver<String>,
    lines: Vec<String>,
    deadline: Instant,
    waited_for: bool,
}

/// An example that has ended.
#[derive(Debug)]
#[expect(dead_code, reason = "the name is there to be printed")]
struct Output {
    example: &'static str,
    code: Option<i32>,
    lines: Vec<String>,
}

impl Running {
    fn start(example: &'static str, arguments: &[&str]) -> Self {
        Running::start_in(example, arguments, &[])
    }

    /// With further variables in its environment.
    fn start_in(example: &'static str, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut process = Command::new(binary(example))
            .args(arguments)
            .envs(environment.iter().copied())
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{example} does not start: {error}"));
        let (print, printed) = mpsc::channel();
        collect(process.stdout.take(), print.clone());
        collect(process.stderr.take(), print);
        let deadline = Instant::now() + TIME_LIMIT;
        Running { example, process, printed, lines: Vec::new(), deadline, waited_for: false }
    }

    /// Waits for the line with this prefix, and returns the rest of it.
    fn read_after(&mut self, prefix: &str) -> String {
        while let Some(line) = self.next_line() {
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.to_owned();
            }
        }
        panic!("{} ended without printing {prefix:?}: {:#?}", self.example, self.lines);
    }

    fn finish(mut self) -> Output {
        while self.next_line().is_some() {}
        let status = self.process.wait().expect("an example that was started");
        self.waited_for = true;
        Output { example: self.example, code: status.code(), lines: std::mem::take(&mut self.lines) }
    }

    fn next_line(&mut self) -> Option<String> {
        match self.printed.recv_timeout(self.deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                self.lines.push(line.clone());
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("{} still runs after {TIME_LIMIT:?}: {:#?}", self.example, self.lines)
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.waited_for {
            return;
        }
        // Not waited for yet, so the number of its group is not reused. The standard library kills one process only.
        let group = format!("kill -KILL -{}", self.process.id());
        Command::new("sh").args(["-c", &group]).status().ok();
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

impl Output {
    fn assert_success(&self) {
        assert_eq!(self.code, Some(0), "{self:#?}");
    }

    fn assert_line(&self, line: &str) {
        assert!(self.lines.iter().any(|printed| printed == line), "no line {line:?} in {self:#?}");
    }
}

fn collect(output: Option<impl Read + Send + 'static>, print: Sender<String>) {
    let output = output.expect("a piped output");
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if print.send(line).is_err() {
                break;
            }
        }
    });
}

/// The path of the example's binary. A plain `cargo test` has built it; `cargo test --test examples` has not, and may find one
/// that is out of date.
fn binary(example: &str) -> PathBuf {
    let this = env::current_exe().expect("the path of this test");
    let profile = this.ancestors().nth(2).expect("TARGET/PROFILE/deps/THIS");
    let binary = profile.join("examples").join(example);

    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let changed = newest(&folder.join("../src")).max(newest(&folder.join(example).with_extension("rs")));
    if !binary.exists() || newest(&binary) < changed {
        static BUILD: Once = Once::new();
        BUILD.call_once(|| build_examples(profile));
    }
    assert!(binary.exists(), "{} was not built", binary.display());
    binary
}

fn build_examples(profile_folder: &Path) {
    let target = profile_folder.parent().expect("TARGET/PROFILE");
    let profile = match profile_folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    // The features that this test was built with.
    let features = [
        ("macros", cfg!(feature = "macros")),
        ("memmap2", cfg!(feature = "memmap2")),
        ("tokio", cfg!(feature = "tokio")),
        ("ofi", cfg!(feature = "ofi")),
        ("verbs", cfg!(feature = "verbs")),
    ];
    let features: Vec<&str> = features.into_iter().filter_map(|(feature, used)| used.then_some(feature)).collect();
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--examples", "--profile", profile, "--features", &features.join(","), "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo");
    assert!(status.success(), "the examples do not build: {status}");
}

/// The last change of the file, or of any file below the folder.
fn newest(path: &Path) -> SystemTime {
    let Ok(about) = fs::metadata(path) else { return SystemTime::UNIX_EPOCH };
    if !about.is_dir() {
        return about.modified().expect("a file system that keeps times");
    }
    let files = fs::read_dir(path).expect("a folder of sources").map(|file| file.expect("its entries").path());
    files.map(|file| newest(&file)).max().unwrap_or(SystemTime::UNIX_EPOCH)
}
