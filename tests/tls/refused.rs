//! Who is let in, and what is said to who is not.

use std::time::{Duration, Instant};

use calomel::{Endpoint, Engine, Error, Request, Tls};

use crate::assert_error;
use crate::authority::Authority;
use crate::common::*;

const ANYWHERE: &str = "tcp://127.0.0.1:0";

fn server(tls: Option<Tls>) -> Engine {
    let builder = Engine::builder().same_host_upgrade(false).listen(ANYWHERE);
    let engine = tls.into_iter().fold(builder, |builder, tls| builder.tls(tls)).build().unwrap();
    engine.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    engine
}

fn client(tls: Option<Tls>) -> Engine {
    let builder = Engine::builder().same_host_upgrade(false);
    tls.into_iter().fold(builder, |builder, tls| builder.tls(tls)).build().unwrap()
}

fn call(client: &Engine, to: &Endpoint) -> calomel::Result<u32> {
    client.procedure::<u32, u32>("double").on(to).call(&21)
}

/// What a call from one to the other ends with; neither waits for long, and the server serves on.
#[track_caller]
fn outcome(server_tls: Option<Tls>, client_tls: Option<Tls>) -> calomel::Result<u32> {
    let (server, client) = (server(server_tls.clone()), client(client_tls));
    let to = client.lookup(server.address()).unwrap();
    let begin = Instant::now();
    let result = call(&client, &to);
    assert!(begin.elapsed() < patience() * Duration::from_secs(3), "{:?}", begin.elapsed());
    client.finalize().unwrap();
    server.finalize().unwrap();
    result
}

#[track_caller]
fn assert_denied(result: calomel::Result<u32>, words: &str) {
    match result {
        Err(Error::AccessDenied { reason, .. }) if reason.contains(words) => {}
        other => panic!("expected a denial with `{words}`: {other:?}"),
    }
}

#[track_caller]
fn assert_unreachable(result: calomel::Result<u32>, words: &str) {
    match result {
        Err(Error::Unreachable { reason, .. }) if reason.contains(words) => {}
        other => panic!("expected an unreachable peer with `{words}`: {other:?}"),
    }
}

#[test]
fn both_sides_show_who_they_are() {
    let _watchdog = Watchdog::start("refused::both_sides_show_who_they_are");
    let authority = Authority::new();
    assert_eq!(outcome(Some(authority.tls()), Some(authority.tls())).unwrap(), 42);
}

#[test]
fn a_client_that_shows_nothing() {
    let _watchdog = Watchdog::start("refused::a_client_that_shows_nothing");
    let authority = Authority::new();
    let denied = outcome(Some(authority.tls()), Some(authority.trusted()));
    assert_denied(denied, "wants to see a certificate");
    let open = authority.tls().anonymous_clients(true);
    assert_eq!(outcome(Some(open.clone()), Some(authority.trusted())).unwrap(), 42);
    // What is shown must be good all the same.
    let foreign = Authority::new().identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(open), Some(foreign)), "does not accept this engine's certificate");
}

#[test]
fn a_server_that_somebody_else_has_signed() {
    let _watchdog = Watchdog::start("refused::a_server_that_somebody_else_has_signed");
    let (authority, other) = (Authority::new(), Authority::new());
    let server = other.identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(server), Some(authority.tls())), "UnknownIssuer");
}

#[test]
fn a_client_that_somebody_else_has_signed() {
    let _watchdog = Watchdog::start("refused::a_client_that_somebody_else_has_signed");
    let (authority, other) = (Authority::new(), Authority::new());
    let client = other.identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(authority.tls()), Some(client)), "does not accept this engine's certificate: UnknownCA");
}

#[test]
fn an_authority_that_only_has_the_name_of_the_trusted_one() {
    let _watchdog = Watchdog::start("refused::an_authority_that_only_has_the_name_of_the_trusted_one");
    let (authority, other) = (Authority::called("the same"), Authority::called("the same"));
    let forged = || other.identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(forged()), Some(authority.tls())), "its certificate is not accepted: BadSignature");
    assert_denied(outcome(Some(authority.tls()), Some(forged())), "does not accept this engine's certificate");
}

#[test]
fn certificates_whose_time_is_over() {
    let _watchdog = Watchdog::start("refused::certificates_whose_time_is_over");
    let authority = Authority::new();
    let over = || authority.expired(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(over()), Some(authority.tls())), "expired");
    assert_denied(outcome(Some(authority.tls()), Some(over())), "CertificateExpired");
}

#[test]
fn a_server_of_another_name() {
    let _watchdog = Watchdog::start("refused::a_server_of_another_name");
    let authority = Authority::new();
    let named = |name: &str| authority.identity(&[name]).of(authority.trusted());
    // By default it is the address that counts.
    assert_denied(outcome(Some(named("calomel.example")), Some(authority.tls())), "not valid for name");
    assert_denied(outcome(Some(named("127.0.0.2")), Some(authority.tls())), "not valid for name");
    let expecting = |name: &str| authority.tls().server_name(name).unwrap();
    assert_eq!(outcome(Some(named("calomel.example")), Some(expecting("calomel.example"))).unwrap(), 42);
    assert_denied(outcome(Some(named("other.example")), Some(expecting("calomel.example"))), "calomel.example");
    assert_eq!(outcome(Some(named("10.1.2.3")), Some(expecting("10.1.2.3"))).unwrap(), 42);
}

#[test]
fn a_plain_client() {
    let _watchdog = Watchdog::start("refused::a_plain_client");
    let authority = Authority::new();
    assert_unreachable(outcome(Some(authority.tls().anonymous_clients(true)), None), "TLS");
}

#[test]
fn a_plain_server() {
    let _watchdog = Watchdog::start("refused::a_plain_server");
    let authority = Authority::new();
    assert_unreachable(outcome(None, Some(authority.tls())), "does not speak TLS");
}

/// Who is refused leaves nothing behind, and those that are not are served meanwhile and after.
#[test]
fn who_is_refused_is_in_nobodys_way() {
    let _watchdog = Watchdog::start("refused::who_is_refused_is_in_nobodys_way");
    let authority = Authority::new();
    let server = server(Some(authority.tls()));
    let good = client(Some(authority.tls()));
    let to = good.lookup(server.address()).unwrap();
    for round in 0..30 {
        let bad = if round % 2 == 0 { client(Some(authority.trusted())) } else { client(None) };
        let there = bad.lookup(server.address()).unwrap();
        let error = call(&bad, &there).unwrap_err();
        assert!(matches!(error, Error::AccessDenied { .. } | Error::Unreachable { .. }), "{error:?}");
        assert_eq!(call(&good, &to).unwrap(), 42);
        bad.finalize().unwrap();
    }
}

/// A shortcut would lead around the certificates: there is none, whichever side speaks TLS.
#[test]
fn nobody_gets_around_it() {
    let _watchdog = Watchdog::start("refused::nobody_gets_around_it");
    let authority = Authority::new();
    let secure = Engine::builder().same_host_upgrade(true).tls(authority.tls()).listen(ANYWHERE).build().unwrap();
    secure.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    let plain = Engine::builder().same_host_upgrade(true).listen(ANYWHERE).build().unwrap();
    plain.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    assert_unreachable(call(&plain, &plain.lookup(secure.address()).unwrap()), "TLS");
    assert_unreachable(call(&secure, &secure.lookup(plain.address()).unwrap()), "TLS");
}

#[test]
fn what_can_not_work_is_said_when_it_is_built() {
    let _watchdog = Watchdog::start("refused::what_can_not_work_is_said_when_it_is_built");
    let authority = Authority::new();
    let built = Engine::builder().tls(authority.trusted()).listen(ANYWHERE).build();
    assert_error!(built, Error::Unsupported { reason, .. } if reason.contains("certificate"));
    // Elsewhere it needs none.
    Engine::builder().tls(authority.trusted()).listen("loop://").build().unwrap();
    let identity = authority.identity(&["127.0.0.1"]);
    let other = authority.identity(&["127.0.0.1"]);
    let (certificate, key) = (identity.certificate.as_bytes(), identity.key.as_bytes());
    assert_error!(Tls::trusting(b"nonsense"), Error::Io { .. });
    assert_error!(Tls::trusting(key), Error::Io { .. });
    assert_error!(authority.trusted().identity(b"", key), Error::Io { .. });
    assert_error!(authority.trusted().identity(certificate, b""), Error::Io { .. });
    assert_error!(authority.trusted().identity(certificate, certificate), Error::Io { .. });
    assert_error!(authority.trusted().identity(certificate, other.key.as_bytes()), Error::Io { .. });
    assert_error!(authority.trusted().server_name("no name"), Error::Io { .. });
    let broken = identity.certificate.replacen("\nMI", "\n!!", 1);
    assert_ne!(broken, identity.certificate);
    assert_error!(Tls::trusting(broken.as_bytes()), Error::Io { .. });
}

#[test]
fn the_key_is_not_shown() {
    let authority = Authority::new();
    let identity = authority.identity(&["127.0.0.1"]);
    let shown = format!("{:?}", identity.of(authority.trusted()));
    assert!(shown.contains("identity: true"), "{shown}");
    assert!(shown.len() < 200 && !shown.contains("PRIVATE"), "{shown}");
}

#[test]
fn ipv6_addresses_are_names_too() {
    let _watchdog = Watchdog::start("refused::ipv6_addresses_are_names_too");
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let authority = Authority::new();
    let server = Engine::builder().tls(authority.tls()).listen("tcp://[::1]:0").build().unwrap();
    server.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    let client = client(Some(authority.tls()));
    assert_eq!(call(&client, &client.lookup(server.address()).unwrap()).unwrap(), 42);
    let other = Authority::new();
    let client = self::client(Some(other.tls()));
    assert_denied(call(&client, &client.lookup(server.address()).unwrap()), "UnknownIssuer");
}

/// Who decides on a call knows by which certificate the caller was let in.
#[test]
fn the_hook_sees_the_certificate() {
    let _watchdog = Watchdog::start("refused::the_hook_sees_the_certificate");
    let authority = Authority::new();
    let (known, other) = (authority.identity(&["127.0.0.1"]), authority.identity(&["127.0.0.1"]));
    let der = known.der.clone();
    let tls = authority.tls().anonymous_clients(true);
    let builder = Engine::builder().tls(tls).authorize(move |caller| caller.certificate().is_some_and(|shown| *shown == *der));
    let server = builder.listen(ANYWHERE).build().unwrap();
    server.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    for (tls, allowed) in
        [(known.of(authority.trusted()), true), (other.of(authority.trusted()), false), (authority.trusted(), false)]
    {
        let client = client(Some(tls));
        let result = call(&client, &client.lookup(server.address()).unwrap());
        match result {
            Ok(42) if allowed => {}
            Err(Error::AccessDenied { .. }) if !allowed => {}
            other => panic!("{allowed}: {other:?}"),
        }
    }
}
