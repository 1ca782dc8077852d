//! The command over TLS: with certificates that are trusted, and with others.

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Stdio;

use calomel::{Engine, EngineBuilder, EngineConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose, PKCS_ED25519};
use tempfile::TempDir;

use support::{command, json, run};

/// Files of certificates and keys: two authorities, and what they have signed.
struct Files(TempDir);

impl Files {
    fn new() -> Files {
        let files = Files(tempfile::tempdir().unwrap());
        for name in ["trusted", "other"] {
            let mut params = CertificateParams::new([]).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
            let key = || KeyPair::generate_for(&PKCS_ED25519).unwrap();
            let authority = CertifiedIssuer::self_signed(params, key()).unwrap();
            files.write(name, &authority.pem());
            for valid_for in ["127.0.0.1", "storage.example"] {
                let key = key();
                let certificate = CertificateParams::new([valid_for.to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
                files.write(&format!("{name}-{valid_for}"), &certificate.pem());
                files.write(&format!("{name}-{valid_for}.key"), &key.serialize_pem());
            }
        }
        files
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        self.name(name)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A server that the first authority has signed.
    fn server(&self, valid_for: &str, change: impl FnOnce(&mut EngineConfig)) -> EngineBuilder {
        let mut config = EngineConfig::default();
        config.tls_ca = Some(self.path("trusted"));
        config.tls_certificate = Some(self.path(&format!("trusted-{valid_for}")));
        config.tls_key = Some(self.path(&format!("trusted-{valid_for}.key")));
        change(&mut config);
        config.builder().unwrap().listen("tcp://127.0.0.1:0")
    }

    /// The options of a client that trusts an authority, and shows a certificate.
    fn options(&self, ca: &str, identity: Option<&str>) -> Vec<String> {
        let mut options = vec!["--ca".to_owned(), self.name(ca)];
        if let Some(identity) = identity {
            let key = format!("{identity}.key");
            options.extend(["--certificate".to_owned(), self.name(identity), "--private-key".to_owned(), self.name(&key)]);
        }
        options
    }
}

/// Runs a command with options; an address, and what else it takes, comes last.
fn run_with(arguments: &[&str], options: &[String]) -> (i32, String, String) {
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    run(&[&arguments[..1], &options, &arguments[1..]].concat())
}

fn ping(server: &Engine, options: &[String]) -> (i32, String, String) {
    run_with(&["ping", "--count", "1", "--timeout", "5s", "--json", &server.address().to_string()], options)
}

const OWN: Option<&str> = Some("trusted-127.0.0.1");

#[test]
fn ping_trusts_and_is_trusted() {
    let files = Files::new();
    let server = files.server("127.0.0.1", |_| ()).build().unwrap();
    let (code, text, error) = ping(&server, &files.options("trusted", OWN));
    assert_eq!((code, error.as_str()), (0, ""));
    // Not shared memory, which has no certificates.
    assert_eq!(json(&text)["transport"], "tcp");
    let anonymous = files.server("127.0.0.1", |config| config.tls_anonymous_clients = true).build().unwrap();
    assert_eq!(ping(&anonymous, &files.options("trusted", None)).0, 0);

    // The server is not trusted; the client shows nothing, or what the server does not trust.
    let address = server.address().to_string();
    for (ca, identity) in [("other", OWN), ("trusted", None), ("trusted", Some("other-127.0.0.1"))] {
        let (code, text, error) = ping(&server, &files.options(ca, identity));
        assert_eq!((code, text.as_str()), (3, ""), "{ca}, {identity:?}: {error}");
        assert!(error.starts_with("error: ") && error.contains(&address), "{error}");
        assert!(error.to_lowercase().contains("certificate"), "{error}");
    }
    assert_eq!(ping(&anonymous, &files.options("other", None)).0, 3);
}

#[test]
fn a_name_is_checked() {
    let files = Files::new();
    let server = files.server("storage.example", |_| ()).build().unwrap();
    let named = |name: &str| [files.options("trusted", OWN), vec!["--server-name".to_owned(), name.to_owned()]].concat();
    assert_eq!(ping(&server, &named("storage.example")).0, 0);
    // Without a name it is the address.
    for options in [named("another.example"), files.options("trusted", OWN)] {
        let (code, _, error) = ping(&server, &options);
        assert_eq!(code, 3, "{error}");
        assert!(error.contains("name"), "{error}");
    }
}

#[test]
fn both_sides_use_tls_or_none() {
    let files = Files::new();
    let with = files.server("127.0.0.1", |_| ()).build().unwrap();
    let without = Engine::server("tcp://127.0.0.1:0").unwrap();
    for (server, options) in [(&with, vec![]), (&without, files.options("trusted", OWN))] {
        let (code, _, error) = ping(server, &options);
        assert!(code == 1 && error.contains(&server.address().to_string()), "{code} {error}");
    }
}

#[test]
fn keys_and_access_control_hold_over_tls() {
    let files = Files::new();
    let (right, wrong) = (files.write("right", "0123456789abcdef"), files.write("wrong", "fedcba9876543210"));
    let server = files.server("127.0.0.1", |_| ()).pre_shared_key("0123456789abcdef").build().unwrap();
    let with_key = |key: &str| [files.options("trusted", OWN), vec!["--key-file".to_owned(), key.to_owned()]].concat();
    assert_eq!(ping(&server, &with_key(&right)).0, 0);
    for options in [with_key(&wrong), files.options("trusted", OWN)] {
        let (code, _, error) = ping(&server, &options);
        assert_eq!(code, 3, "{error}");
    }
    // Statistics, where they are denied and where they are not.
    for (allowed, expected) in [(false, 3), (true, 0)] {
        let server = files.server("127.0.0.1", |config| config.remote_stats = allowed).build().unwrap();
        let address = server.address().to_string();
        let (code, text, error) = run_with(&["top", "--once", "--interval", "100ms", &address], &files.options("trusted", OWN));
        assert_eq!(code, expected, "{error}");
        assert_eq!(text.contains("calomel.stats"), allowed, "{text}");
    }
}

#[test]
fn bench_measures_over_tls() {
    let files = Files::new();
    let quick = ["bench", "--time", "2ms", "--sizes", "64KiB", "--in-flight", "4"];
    // Both processes on this machine: the second one gets the same options.
    let (code, text, error) = run_with(&[&quick[..], &["--transports", "tcp"]].concat(), &files.options("trusted", OWN));
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(text.lines().count() > 4 && text.lines().skip(1).all(|line| line.starts_with("tcp")), "{text}");

    // One serves, and refuses peers as any engine does.
    let options = files.options("trusted", OWN);
    let mut serve = command(&["bench", "--serve", "tcp://127.0.0.1:0"]);
    let mut server = serve.args(&options).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
    let measured = [("trusted", OWN), ("other", OWN), ("trusted", Some("other-127.0.0.1"))]
        .map(|(ca, identity)| run_with(&[&quick[..], &[&*address]].concat(), &files.options(ca, identity)));
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(measured.map(|(code, ..)| code), [0, 3, 3]);
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let files = Files::new();
    let server = files.server("127.0.0.1", |_| ()).build().unwrap();
    let text = files.write("text", "no certificate\n");
    let missing = files.name("missing");
    for (option, file) in [("--ca", &text), ("--ca", &missing), ("--certificate", &text), ("--private-key", &missing)] {
        let mut options = files.options("trusted", OWN);
        let place = options.iter().position(|known| known == option).unwrap();
        options[place + 1] = file.clone();
        let (code, _, error) = ping(&server, &options);
        assert!(code == 1 && error.contains(file.as_str()), "{option} {file}: {code} {error}");
    }
    // Some options need others.
    let [ca, own, key] = ["trusted", "trusted-127.0.0.1", "trusted-127.0.0.1.key"].map(|name| files.name(name));
    for wrong in [
        &["--certificate", &own, "--private-key", &key][..],
        &["--ca", &ca, "--certificate", &own],
        &["--server-name", "storage.example"],
    ] {
        let options: Vec<String> = wrong.iter().map(|part| (*part).to_owned()).collect();
        assert_eq!(ping(&server, &options).0, 2, "{wrong:?}");
    }
}
