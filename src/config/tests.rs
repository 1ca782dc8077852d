//! Tests of reading, writing, checking and overriding configurations, by one table of all fields.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::environment::{PREFIX, is_of_others};
use super::{EngineConfig, FIELDS, HiddenKey, LONGEST};
use crate::progress::Progress;
use crate::{Error, Transport};

/// Checks that the configuration has what the row sets.
type Check = fn(&EngineConfig) -> bool;

/// Sets a value that is not allowed.
type Change = fn(&mut EngineConfig);

/// For each field: a value, as in TOML and JSON and as in an environment variable, and what it sets.
const ROWS: &[(&str, &str, &str, Check)] = &[
    ("listen", r#"["tcp", "shm://a"]"#, "tcp,shm://a", |c| {
        c.listen.iter().map(ToString::to_string).collect::<Vec<_>>() == ["tcp://0.0.0.0:0", "shm://a"]
    }),
    ("advertise", r#"["tcp://a.example:1"]"#, "tcp://a.example:1", |c| {
        c.advertise.first().is_some_and(|address| address.to_string() == "tcp://a.example:1")
    }),
    ("transports", r#"["tcp", "loop"]"#, " tcp , loop ", |c| c.transports == [Transport::Tcp, Transport::Loop]),
    ("handler_threads", "0", "0", |c| c.handler_threads == 0),
    ("progress", r#""external""#, "external", |c| c.progress == Progress::External),
    ("default_timeout", r#""1m 30s""#, "1m 30s", |c| c.default_timeout == Duration::from_secs(90)),
    ("max_message_size", r#""8 MiB""#, "8 MiB", |c| c.max_message_size == 8 << 20),
    ("eager_limit", "1000", "1000", |c| c.eager_limit == 1000),
    ("eager_bulk_limit", r#""1000 B""#, "1000 B", |c| c.eager_bulk_limit == 1000),
    ("peer_timeout", "2", "2", |c| c.peer_timeout == Duration::from_secs(2)),
    ("connect_timeout", "0.25", "0.25", |c| c.connect_timeout == Duration::from_millis(250)),
    ("idle_timeout", r#""1m""#, "60", |c| c.idle_timeout == Some(Duration::from_secs(60))),
    ("finalize_timeout", r#""5ms""#, "5ms", |c| c.finalize_timeout == Duration::from_millis(5)),
    ("remote_shutdown", "true", "1", |c| c.remote_shutdown),
    ("statistics", "false", "0", |c| !c.statistics),
    ("remote_stats", "true", "1", |c| c.remote_stats),
    ("slow_calls", r#""500ms""#, "500ms", |c| c.slow_calls == Some(Duration::from_millis(500))),
    ("pre_shared_key_file", r#""/k""#, "/k", |c| c.pre_shared_key_file == Some(PathBuf::from("/k"))),
    ("payload_checksums", "true", "true", |c| c.payload_checksums),
    ("bulk_connections", "16", "16", |c| c.bulk_connections == 16),
    ("same_host_upgrade", "false", "0", |c| !c.same_host_upgrade),
    ("shm_group", "7", "7", |c| c.shm_group == Some(7)),
    ("shm_kernel_copy", "false", "false", |c| c.shm_kernel_copy == Some(false)),
    ("max_connections", "10", "10", |c| c.max_connections == 10),
    ("max_requests_per_peer", "11", "11", |c| c.max_requests_per_peer == 11),
    ("max_requests", "12", "12", |c| c.max_requests == 12),
    ("max_transfers_per_peer", "13", "13", |c| c.max_transfers_per_peer == 13),
    ("max_bytes_in_flight_per_peer", r#""1 GiB""#, "1 GiB", |c| c.max_bytes_in_flight_per_peer == Some(1 << 30)),
    ("max_bytes_in_flight", r#""2 GiB""#, "2 GiB", |c| c.max_bytes_in_flight == Some(2 << 30)),
    ("max_exposures", "14", "14", |c| c.max_exposures == 14),
    ("tls_ca", r#""ca.pem""#, "ca.pem", |c| c.tls_ca == Some(PathBuf::from("ca.pem"))),
    ("tls_certificate", r#""c.pem""#, "c.pem", |c| c.tls_certificate == Some(PathBuf::from("c.pem"))),
    ("tls_key", r#""k.pem""#, "k.pem", |c| c.tls_key == Some(PathBuf::from("k.pem"))),
    ("tls_server_name", r#""a.example""#, "a.example", |c| c.tls_server_name.as_deref() == Some("a.example")),
    ("tls_anonymous_clients", "true", "true", |c| c.tls_anonymous_clients),
];

fn toml(text: &str) -> EngineConfig {
    toml::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The configuration that TOML with all rows sets.
fn full() -> EngineConfig {
    toml(&ROWS.iter().map(|(field, value, ..)| format!("{field} = {value}\n")).collect::<String>())
}

fn variable(field: &str) -> String {
    format!("CALOMEL_{}", field.to_uppercase())
}

#[track_caller]
fn refused(result: crate::Result<impl Sized>, expected: &str, part: &str) {
    match result.err() {
        Some(Error::Config { field, reason }) => assert!(field == expected && reason.contains(part), "{field}: {reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_field_has_a_row_and_a_variable() {
    let written = serde_json::to_value(EngineConfig::default()).unwrap();
    let fields: BTreeSet<&str> = written.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(fields, FIELDS.iter().copied().collect());
    assert_eq!(fields, ROWS.iter().map(|(field, ..)| *field).collect());
    let variables: BTreeSet<String> = EngineConfig::variables().collect();
    assert!(FIELDS.iter().all(|field| variables.contains(&variable(field))) && variables.len() == FIELDS.len() + 1);
}

#[test]
fn every_field_is_read_alone() {
    let default = EngineConfig::default();
    for (field, value, text, check) in ROWS {
        assert!(!check(&default), "{field}: the row sets the default");
        let from_toml = toml(&format!("{field} = {value}"));
        let from_json: EngineConfig = serde_json::from_str(&format!("{{\"{field}\": {value}}}")).unwrap();
        let from_variable = default.clone().with_variables([(variable(field), text)]).unwrap();
        for config in [from_toml, from_json, from_variable] {
            assert!(check(&config), "{field}: {config:?}");
            // Nothing else is set.
            let mut reset = config;
            reset.adopt(field, EngineConfig::default());
            assert_eq!(reset, default);
        }
    }
}

#[test]
fn what_is_written_is_read_again() {
    let exact = EngineConfig {
        default_timeout: Duration::MAX,
        max_message_size: usize::MAX,
        eager_limit: 0,
        peer_timeout: Duration::new(3, 1_002_003),
        max_requests: usize::MAX,
        finalize_timeout: Duration::ZERO,
        ..EngineConfig::default()
    };
    for config in [EngineConfig::default(), full(), exact] {
        assert_eq!(toml(&::toml::to_string(&config).unwrap()), config);
        assert_eq!(serde_json::from_str::<EngineConfig>(&serde_json::to_string(&config).unwrap()).unwrap(), config);
        assert_eq!(postcard::from_bytes::<EngineConfig>(&postcard::to_stdvec(&config).unwrap()).unwrap(), config);
    }
    let written = ::toml::to_string(&full()).unwrap();
    for part in ["progress = \"external\"", "default_timeout = \"1m 30s\"", "max_message_size = \"8 MiB\"", "\"1000 B\""] {
        assert!(written.contains(part), "{written}");
    }
}

#[test]
fn durations_and_sizes_have_units() {
    for (text, expected) in [
        ("'30s'", Some(Duration::from_secs(30))),
        ("' 1h30m '", Some(Duration::from_secs(5400))),
        ("'2d'", Some(Duration::from_secs(172_800))),
        ("'1.5s'", Some(Duration::from_millis(1500))),
        ("'7 us 1ns'", Some(Duration::from_nanos(7001))),
        ("'3'", Some(Duration::from_secs(3))),
        ("1.5", Some(Duration::from_millis(1500))),
        ("''", None),
        ("'s'", None),
        ("'5mx'", None),
        ("'5 5s'", None),
        ("'1s 5'", None),
        ("'-1s'", None),
        ("'1.s'", None),
        ("'.5s'", None),
        ("'0.1ns'", None),
        ("'999999999999999999999999999d'", None),
        ("-1", None),
        ("-1.0", None),
        ("nan", None),
        ("true", None),
    ] {
        let read = toml::from_str::<EngineConfig>(&format!("default_timeout = {text}"));
        assert_eq!(read.ok().map(|config| config.default_timeout), expected, "{text}");
    }
    for (text, expected) in [
        ("64", Some(64)),
        ("'64'", Some(64)),
        ("'64 B'", Some(64)),
        ("'1.5KiB'", Some(1536)),
        ("'2 kB'", Some(2000)),
        ("'3 GB'", Some(3_000_000_000)),
        ("'1 TiB'", Some(1 << 40)),
        ("'64 mib'", None),
        ("'0.3 KiB'", None),
        ("'99999999999 TiB'", None),
        ("1.5", None),
        ("-1", None),
    ] {
        let read = toml::from_str::<EngineConfig>(&format!("max_message_size = {text}"));
        assert_eq!(read.ok().map(|config| config.max_message_size), expected, "{text}");
    }
}

#[test]
fn values_outside_of_their_range_are_refused() {
    let rows: &[(&str, &str, Change)] = &[
        ("eager_limit", "512 KiB", |c| c.eager_limit = (512 << 10) + 1),
        ("peer_timeout", "10ms to 365 days", |c| c.peer_timeout = Duration::from_millis(9)),
        ("peer_timeout", "365 days", |c| c.peer_timeout = LONGEST + Duration::from_nanos(1)),
        ("connect_timeout", "365 days", |c| c.connect_timeout = Duration::MAX),
        ("idle_timeout", "1ms to 365 days", |c| c.idle_timeout = Some(Duration::ZERO)),
        ("idle_timeout", "365 days", |c| c.idle_timeout = Some(Duration::MAX)),
        ("finalize_timeout", "365 days", |c| c.finalize_timeout = Duration::MAX),
        ("bulk_connections", "16", |c| c.bulk_connections = 17),
        ("max_bytes_in_flight_per_peer", "max_message_size", |c| c.max_bytes_in_flight_per_peer = Some(1)),
        ("max_bytes_in_flight", "max_message_size", |c| c.max_bytes_in_flight = Some(1)),
        ("pre_shared_key", "16 bytes", |c| c.key = Some(HiddenKey(b"short".into()))),
        ("tls_server_name", "tls", |c| c.tls_server_name = Some("a.example".into())),
        ("tls_anonymous_clients", "tls", |c| c.tls_anonymous_clients = true),
        #[cfg(feature = "tls")]
        ("tls_certificate", "`tls_key`", |c| (c.tls_ca, c.tls_certificate) = (Some("a".into()), Some("b".into()))),
        #[cfg(feature = "tls")]
        ("tls_key", "`tls_certificate`", |c| (c.tls_ca, c.tls_key) = (Some("a".into()), Some("b".into()))),
        #[cfg(not(feature = "tls"))]
        ("tls_ca", "without its feature", |c| c.tls_ca = Some("a".into())),
    ];
    for (field, part, spoil) in rows {
        let mut config = EngineConfig::default();
        spoil(&mut config);
        refused(config.validate(), field, part);
        refused(config.builder(), field, part);
    }
    let mut widest = full();
    (widest.tls_ca, widest.tls_certificate, widest.tls_key, widest.tls_server_name) = (None, None, None, None);
    widest.tls_anonymous_clients = false;
    (widest.eager_limit, widest.peer_timeout, widest.connect_timeout) = (512 << 10, LONGEST, Duration::ZERO);
    widest.validate().unwrap();
}

#[test]
fn variables_override_what_was_set_before() {
    let config = toml("handler_threads = 3\npeer_timeout = '3s'");
    let config = config.with_variables([("CALOMEL_HANDLER_THREADS", "5"), ("HANDLER_THREADS", "6"), ("PATH", "")]).unwrap();
    assert_eq!((config.handler_threads, config.peer_timeout), (5, Duration::from_secs(3)));
    let engine = config.builder().unwrap().handler_threads(7).build().unwrap();
    assert_eq!((engine.config().handler_threads, engine.config().peer_timeout), (7, Duration::from_secs(3)));
    let kept = config.clone().with_variables([("CALOMEL_HANDLER_THREADS", ""), ("CALOMEL_LISTEN", " ")]).unwrap();
    assert_eq!(kept, config);
}

#[test]
fn variables_that_are_wrong_are_named() {
    let with = |name: &str, value: &str| EngineConfig::default().with_variables([(name, value)]);
    refused(with("CALOMEL_PEER_TIMEOUT", "soon"), "CALOMEL_PEER_TIMEOUT", "\"5ms\"");
    refused(with("CALOMEL_PROGRESS", "fast"), "CALOMEL_PROGRESS", "adaptive");
    refused(with("CALOMEL_REMOTE_SHUTDOWN", "maybe"), "CALOMEL_REMOTE_SHUTDOWN", "true, 1, false or 0");
    refused(with("CALOMEL_LISTEN", "tcp://a:1,b"), "CALOMEL_LISTEN", "`b`");
    refused(with("CALOMEL_SHM_GROUP", "staff"), "CALOMEL_SHM_GROUP", "staff");
    refused(with("CALOMEL_LISTN", "tcp"), "CALOMEL_LISTN", "did you mean CALOMEL_LISTEN?");
    refused(with("CALOMEL_HANDLER_THREAD", "1"), "CALOMEL_HANDLER_THREAD", "CALOMEL_HANDLER_THREADS");
    // Those of launchers, of tests, and of other programs.
    let others =
        ["RANK", "SIZE", "RENDEZVOUS", "ENDPOINTS", "STATS", "STATS_SIGNAL", "VERBS", "ROUNDS", "TEST_PATIENCE", "BENCH_QUICK"];
    for other in others.into_iter().chain(["COLOUR"]) {
        assert_eq!(with(&format!("CALOMEL_{other}"), "1").unwrap(), EngineConfig::default());
    }
}

/// Else an engine that reads its configuration from the environment would log that the variable sets nothing.
#[test]
fn variables_that_the_documents_name_are_known() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut paths = vec![root.join("README.md"), root.join("CONTRIBUTING.md"), root.join("docs")];
    let mut found = BTreeSet::new();
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            paths.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let content = fs::read(path).unwrap();
        let text = String::from_utf8_lossy(&content);
        let names = text.split(PREFIX).skip(1).filter_map(|rest| {
            let end = rest.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')).unwrap_or(rest.len());
            (end > 0).then(|| rest[..end].to_owned())
        });
        found.extend(names);
    }
    // A mistake that the book shows.
    assert!(found.remove("LISTN") && found.len() > 10, "{found:?}");
    let variables: BTreeSet<String> = EngineConfig::variables().collect();
    found.retain(|name| !variables.contains(&format!("{PREFIX}{name}")) && !is_of_others(name));
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn fields_that_are_wrong_are_named() {
    let error = serde_json::from_str::<EngineConfig>(r#"{"handler_thread": 1}"#).unwrap_err().to_string();
    assert!(error.contains("`handler_thread`") && error.contains("`handler_threads`"), "{error}");
    let error = toml::from_str::<EngineConfig>("transports = ['pigeon']").unwrap_err().to_string();
    assert!(error.contains("pigeon") && error.contains("verbs"), "{error}");
}

const SECRET: &str = "sixteen bytes and more";

#[test]
fn a_key_is_neither_printed_nor_written() {
    let with = EngineConfig::default().with_variables([("CALOMEL_PRE_SHARED_KEY", SECRET)]).unwrap();
    assert_ne!(with, EngineConfig::default());
    let engine = with.builder().unwrap().build().unwrap();
    assert_eq!(engine.config().key, None);
    let texts = [
        format!("{with:?}"),
        format!("{:#?}", with.builder().unwrap()),
        ::toml::to_string(&with).unwrap(),
        serde_json::to_string(&with).unwrap(),
        String::from_utf8_lossy(&postcard::to_stdvec(&with).unwrap()).into_owned(),
        // A key in a file is a mistake.
        toml::from_str::<EngineConfig>(&format!("pre_shared_key = '{SECRET}'")).unwrap_err().message().to_owned(),
        EngineConfig::default().with_variables([("CALOMEL_PRE_SHARED_KEYS", SECRET)]).unwrap_err().to_string(),
        EngineConfig::default()
            .with_variables([("CALOMEL_PRE_SHARED_KEY", SECRET), ("CALOMEL_PRE_SHARED_KEY_FILE", "k")])
            .unwrap_err()
            .to_string(),
    ];
    for text in texts {
        assert!(!text.contains("sixteen"), "{text}");
    }
}

#[test]
fn a_key_is_read_from_its_file() {
    let path = std::env::temp_dir().join(format!("calomel-key-{}-{:?}", std::process::id(), std::thread::current().id()));
    let config = EngineConfig { pre_shared_key_file: Some(path.clone()), ..EngineConfig::default() };
    refused(config.load_key(), "pre_shared_key_file", "No such file");
    for (content, key) in [("\n", SECRET.to_owned()), ("\r\n", SECRET.to_owned()), ("\n\n", format!("{SECRET}\n"))] {
        fs::write(&path, format!("{SECRET}{content}")).unwrap();
        assert_eq!(config.load_key().unwrap(), Some(key.into_bytes()));
    }
    fs::write(&path, "fifteen bytes..\n").unwrap();
    let short = config.load_key();
    fs::remove_file(&path).unwrap();
    refused(short, "pre_shared_key_file", "15 bytes");
    // A variable with the key takes the place of the file, and the other way round.
    let with = config.clone().with_variables([("CALOMEL_PRE_SHARED_KEY", SECRET)]).unwrap();
    assert_eq!((with.load_key().unwrap(), &with.pre_shared_key_file), (Some(SECRET.into()), &None));
    let back = with.with_variables([("CALOMEL_PRE_SHARED_KEY_FILE", path.to_str().unwrap())]).unwrap();
    assert_eq!(back, config);
}

#[cfg(feature = "config")]
#[test]
fn errors_of_files_name_field_and_line() {
    refused(EngineConfig::from_toml("listen = ['tcp']\npeer_timeout = 'soon'"), "peer_timeout", "line 2");
    refused(EngineConfig::from_toml("\nlistn = ['tcp']"), "listn", "line 2");
    refused(EngineConfig::from_toml("handler_threads = 1\nprogress ="), "TOML", "line 2");
    refused(EngineConfig::from_json("{\n\"peer_timeout\": \"soon\"}"), "peer_timeout", "line 2");
    refused(EngineConfig::from_json("{\n\"progress\": 1, \"x\"}"), "JSON", "line 2");
    let hidden = EngineConfig::from_toml(&format!("pre_shared_key = '{SECRET}'")).unwrap_err().to_string();
    assert!(!hidden.contains("sixteen") && hidden.contains("`pre_shared_key_file`"), "{hidden}");

    let path = |end: &str| std::env::temp_dir().join(format!("calomel-config-{}.{end}", std::process::id()));
    assert!(matches!(EngineConfig::from_file(path("toml")), Err(Error::Io { .. })));
    assert!(matches!(EngineConfig::from_file(path("yaml")), Err(Error::Unsupported { .. })));
    for (end, text) in [("toml", "bulk_connections = -1"), ("json", "{\"bulk_connections\": -1}")] {
        fs::write(path(end), text).unwrap();
        let read = EngineConfig::from_file(path(end));
        fs::write(path(end), text.replace("-1", "2")).unwrap();
        let again = EngineConfig::from_file(path(end));
        fs::remove_file(path(end)).unwrap();
        refused(read, "bulk_connections", end);
        assert_eq!(again.unwrap().bulk_connections, 2);
    }
}

/// The examples of the book are read as they stand there.
#[test]
fn the_examples_in_the_book_are_read() {
    let chapter = include_str!("../../docs/src/deployment.md");
    let example = chapter.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let config = toml(example);
    config.validate().unwrap();
    assert_eq!((config.listen.len(), config.peer_timeout), (2, Duration::from_secs(90)));
    assert_eq!((config.progress, config.max_message_size), (Progress::Park, 16 << 20));
    let command = chapter.lines().find(|line| line.starts_with("CALOMEL_LISTEN=")).unwrap();
    let variables = command.split(' ').filter_map(|word| word.split_once('='));
    let config = EngineConfig::default().with_variables(variables).unwrap();
    assert!(config.remote_shutdown && config.listen.len() == 2 && config.peer_timeout == Duration::from_millis(500));
}
