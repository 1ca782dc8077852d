//! The command as a person uses it: what it prints, and its exit codes.

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::process::{Output, Stdio};
use std::time::Instant;

use calomel::Engine;

use support::{PATIENCE, command, finish, json, pseudo_terminal, run};

#[test]
fn info_lists_each_transport_with_the_reason_if_it_is_missing() {
    let (code, text, _) = run(&["info"]);
    assert_eq!(code, 0);
    for name in ["tcp", "shm", "verbs", "loop", "ofi+tcp"] {
        assert!(text.lines().any(|line| line.trim_start().starts_with(name)), "{text}");
    }
    assert!(text.contains("open files"), "{text}");

    let (code, text, _) = run(&["info", "--json"]);
    assert_eq!(code, 0);
    let info = json(&text);
    let tcp = &info["transports"][0];
    assert_eq!((&tcp["transport"], &tcp["unavailable"]), (&"tcp".into(), &serde_json::Value::Null));
    let verbs = &info["transports"][2];
    assert!(cfg!(feature = "verbs") || verbs["unavailable"].as_str().unwrap().contains("feature"), "{verbs}");
    assert!(info["addresses"][0].as_str().unwrap().starts_with("tcp://"), "{text}");
}

#[test]
fn ping_measures_round_trips() {
    let server = Engine::server("tcp://127.0.0.1:0").unwrap();
    let address = server.address().to_string();
    let (code, text, error) = run(&["ping", "--count", "5", "--interval", "1ms", &address]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(text.starts_with(&format!("connected to {address} over shm in ")), "{text}");
    assert!(text.contains("5 round trips, 0 lost: min "), "{text}");
    let count = |line: &str| line.split_whitespace().rev().find_map(|word| word.parse::<usize>().ok()).unwrap();
    let in_bars: usize = text.lines().skip(2).map(count).sum();
    assert_eq!(in_bars, 5, "{text}");

    let (code, text, _) = run(&["ping", "--json", "--no-same-host-upgrade", "--count", "3", "--interval", "0", &address]);
    assert_eq!(code, 0);
    let report = json(&text);
    assert_eq!((report["transport"].as_str(), report["sent"].as_u64(), report["lost"].as_u64()), (Some("tcp"), Some(3), Some(0)));
    let [min, median, max] = ["min", "median", "max"].map(|name| report["round_trip"][name].as_u64().unwrap());
    assert!(0 < min && min <= median && median <= max, "{text}");
}

#[test]
fn ping_fails_in_time_where_no_engine_answers() {
    // A port that was free a moment ago.
    let server = Engine::server("tcp://127.0.0.1:0").unwrap();
    let address = server.address().to_string();
    server.finalize().unwrap();
    let begin = Instant::now();
    let (code, text, error) = run(&["ping", "--timeout", "1s", &address]);
    assert_eq!((code, text.as_str()), (1, ""));
    assert!(error.starts_with("error: ") && error.contains(&address), "{error}");
    assert!(begin.elapsed() < PATIENCE / 2);

    // One that accepts, and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", silent.local_addr().unwrap());
    let (code, _, error) = run(&["ping", "--timeout", "300ms", "--no-same-host-upgrade", &address]);
    assert_eq!(code, 1, "{error}");
    // However many round trips were asked for, and however long each may take.
    let begin = Instant::now();
    let (code, text, error) = run(&["ping", "--deadline", "300ms", "--timeout", "50s", "--no-same-host-upgrade", &address]);
    assert_eq!((code, text.as_str()), (1, ""));
    assert!(error.contains("not done within 300ms") && begin.elapsed() < PATIENCE / 2, "{error}");
}

#[test]
fn ping_proves_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (write("right", "0123456789abcdef\n"), write("wrong", "fedcba9876543210\n"));
    let (short, empty) = (write("short", "0123\n"), write("empty", "\n"));
    let server = Engine::builder().listen("tcp://127.0.0.1:0").pre_shared_key("0123456789abcdef").build().unwrap();
    let address = server.address().to_string();
    let ping = |key: Option<&str>| {
        let mut command = command(&["ping", "--count", "1", &address]);
        key.map(|key| command.args(["--key-file", key]));
        finish(command)
    };
    assert_eq!(ping(Some(&right)).0, 0);
    for key in [Some(&*wrong), None] {
        let (code, _, error) = ping(key);
        assert_eq!(code, 3, "{error}");
    }
    for (key, reason) in [(&short, "4 bytes"), (&empty, "0 bytes"), (&"/nonexistent/key".to_owned(), "/nonexistent/key")] {
        let (code, _, error) = ping(Some(key));
        assert!(code == 1 && error.contains(reason), "{code} {error}");
    }
    let mut by_environment = command(&["ping", "--count", "1", &address]);
    by_environment.env("CALOMEL_PRE_SHARED_KEY_FILE", &right);
    assert_eq!(finish(by_environment).0, 0);
}

#[test]
fn wrong_usage_has_an_exit_code_of_its_own() {
    let wrong: [&[&str]; 7] = [
        &[],
        &["pong"],
        &["ping"],
        &["ping", "nonsense://x"],
        &["ping", "--interval", "1h", "tcp://127.0.0.1:1"],
        &["bench", "--sizes", "1.5", "tcp://127.0.0.1:1"],
        &["bench", "--serve", "tcp://127.0.0.1:0", "--compare", "a", "b"],
    ];
    for arguments in wrong {
        let (code, text, error) = run(arguments);
        assert_eq!((code, text.as_str()), (2, ""), "{arguments:?}: {error}");
        assert!(!error.is_empty());
    }
}

#[test]
fn live_line_is_drawn_on_a_terminal_only() {
    let server = Engine::server("tcp://127.0.0.1:0").unwrap();
    let address = server.address().to_string();
    let (terminal, side) = pseudo_terminal();
    let mut command = command(&["ping", "--count", "4", "--interval", "120ms", &address]);
    let mut process = command.stdout(Stdio::piped()).stderr(side).env("TERM", "xterm").spawn().unwrap();
    // Drops this process's copy of the terminal's other side: reading ends with the command.
    drop(command);
    let mut drawn = Vec::new();
    // A terminal whose other side is closed fails to be read.
    File::from(terminal).read_to_end(&mut drawn).ok();
    let mut text = String::new();
    process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(process.wait().unwrap().success());
    let drawn = String::from_utf8_lossy(&drawn);
    assert!(drawn.contains("0 lost"), "{drawn:?}");
    assert!(!text.contains('\u{1b}') && text.contains("4 round trips"), "{text:?}");
}

#[test]
fn bench_measures_and_writes_reports() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (figures, page) = (file("figures.json"), file("report.html"));
    let quick = ["bench", "--time", "5ms", "--sizes", "4KiB,128MiB", "--in-flight", "4", "--json", &figures, "--html", &page];
    let (code, text, error) = run(&quick);
    assert_eq!((code, error.as_str()), (0, ""));
    let report = json(&fs::read_to_string(&figures).unwrap());
    let rows = report["rows"].as_array().unwrap();
    // On each transport: two of empty calls, one of arguments, as a message can't have 128 MiB, two of pulls, and of pushes.
    let of = |transport: &str| rows.iter().filter(|row| row["transport"] == transport).count();
    assert_eq!((of("tcp"), of("shm"), rows.len()), (7, 7, 14), "{text}");
    assert!(rows.iter().all(|row| row["times"]["median"].as_u64().unwrap() > 0));
    assert_eq!(text.lines().count(), 1 + rows.len(), "{text}");
    let page = fs::read_to_string(&page).unwrap();
    assert_eq!(page.matches("<svg").count(), 4);
    assert_eq!(page.matches("<tr>").count(), 1 + rows.len());
    assert!(!page.contains("src=") && !page.contains("href="), "it needs no other file");

    let (code, text, _) = run(&["bench", "--compare", &figures, &figures]);
    assert_eq!((code, text.lines().count()), (0, 1 + rows.len()));
    assert!(text.lines().skip(1).all(|line| line.ends_with("1.00")), "{text}");
    let broken = file("broken.json");
    fs::write(&broken, "{}").unwrap();
    let (code, _, error) = run(&["bench", "--compare", &figures, &broken]);
    assert!(code == 1 && error.contains(&broken), "{error}");
}

#[test]
fn bench_measures_a_server_elsewhere() {
    let mut serve = command(&["bench", "--serve", "tcp://127.0.0.1:0"]);
    let mut server = serve.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(server.stdout.as_mut().unwrap()), &mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
    let (code, text, error) = run(&["bench", "--time", "2ms", "--sizes", "1KiB", "--no-same-host-upgrade", &address]);
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(text.lines().skip(1).all(|line| line.starts_with("tcp")), "{text}");

    // It is gone.
    let (code, _, error) = run(&["bench", "--no-same-host-upgrade", &address]);
    assert!(code == 1 && error.contains(&address), "{error}");
}

#[test]
fn completions_and_manual_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, text, _) = run(&["completions", shell]);
        assert!(code == 0 && text.contains("ping"), "{text}");
    }
    let (code, text, _) = run(&["man"]);
    assert!(code == 0 && text.starts_with(".ie") && text.contains("calomel"), "{text}");
    let Output { status, stdout, .. } = command(&["ping", "--help"]).output().unwrap();
    assert!(status.success() && String::from_utf8_lossy(&stdout).contains("Examples:"));
}
