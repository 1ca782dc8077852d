//! Access control by certificates, and the errors of refused peers.

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

/// The result of a call from one to the other, which comes soon; the server still serves afterwards.
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
fn both_sides_show_their_certificates() {
    let _watchdog = Watchdog::start("refused::both_sides_show_their_certificates");
    let authority = Authority::new();
    assert_eq!(outcome(Some(authority.tls()), Some(authority.tls())).unwrap(), 42);
}

#[test]
fn client_without_a_certificate_is_refused_where_one_is_required() {
    let _watchdog = Watchdog::start("refused::client_without_a_certificate_is_refused_where_one_is_required");
    let authority = Authority::new();
    let denied = outcome(Some(authority.tls()), Some(authority.trusted()));
    assert_denied(denied, "wants to see a certificate");
    let open = authority.tls().anonymous_clients(true);
    assert_eq!(outcome(Some(open.clone()), Some(authority.trusted())).unwrap(), 42);
    // A certificate that is shown must be valid all the same.
    let foreign = Authority::new().identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(open), Some(foreign)), "does not accept this engine's certificate");
}

#[test]
fn server_of_another_authority_is_refused() {
    let _watchdog = Watchdog::start("refused::server_of_another_authority_is_refused");
    let (authority, other) = (Authority::new(), Authority::new());
    let server = other.identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(server), Some(authority.tls())), "UnknownIssuer");
}

#[test]
fn client_of_another_authority_is_refused() {
    let _watchdog = Watchdog::start("refused::client_of_another_authority_is_refused");
    let (authority, other) = (Authority::new(), Authority::new());
    let client = other.identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(authority.tls()), Some(client)), "does not accept this engine's certificate: UnknownCA");
}

#[test]
fn authority_with_the_trusted_name_and_another_key_is_refused() {
    let _watchdog = Watchdog::start("refused::authority_with_the_trusted_name_and_another_key_is_refused");
    let (authority, other) = (Authority::called("the same"), Authority::called("the same"));
    let forged = || other.identity(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(forged()), Some(authority.tls())), "its certificate is not accepted: BadSignature");
    assert_denied(outcome(Some(authority.tls()), Some(forged())), "does not accept this engine's certificate");
}

#[test]
fn expired_certificates_are_refused() {
    let _watchdog = Watchdog::start("refused::expired_certificates_are_refused");
    let authority = Authority::new();
    let over = || authority.expired(&["127.0.0.1"]).of(authority.trusted());
    assert_denied(outcome(Some(over()), Some(authority.tls())), "expired");
    assert_denied(outcome(Some(authority.tls()), Some(over())), "CertificateExpired");
}

#[test]
fn server_with_another_name_is_refused() {
    let _watchdog = Watchdog::start("refused::server_with_another_name_is_refused");
    let authority = Authority::new();
    let named = |name: &str| authority.identity(&[name]).of(authority.trusted());
    // By default, the certificate must be valid for the address that is dialled.
    assert_denied(outcome(Some(named("calomel.example")), Some(authority.tls())), "not valid for name");
    assert_denied(outcome(Some(named("127.0.0.2")), Some(authority.tls())), "not valid for name");
    let expecting = |name: &str| authority.tls().server_name(name).unwrap();
    assert_eq!(outcome(Some(named("calomel.example")), Some(expecting("calomel.example"))).unwrap(), 42);
    assert_denied(outcome(Some(named("other.example")), Some(expecting("calomel.example"))), "calomel.example");
    assert_eq!(outcome(Some(named("10.1.2.3")), Some(expecting("10.1.2.3"))).unwrap(), 42);
}

#[test]
fn client_without_tls_is_refused() {
    let _watchdog = Watchdog::start("refused::client_without_tls_is_refused");
    let authority = Authority::new();
    assert_unreachable(outcome(Some(authority.tls().anonymous_clients(true)), None), "TLS");
}

#[test]
fn server_without_tls_is_refused() {
    let _watchdog = Watchdog::start("refused::server_without_tls_is_refused");
    let authority = Authority::new();
    assert_unreachable(outcome(None, Some(authority.tls())), "does not speak TLS");
}

/// A refused peer leaves nothing behind, and others are served during and after the refusal.
#[test]
fn refused_peers_delay_no_other_peer() {
    let _watchdog = Watchdog::start("refused::refused_peers_delay_no_other_peer");
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

/// The upgrade to shared memory would bypass the certificates, so there is none, whichever side has TLS.
#[test]
fn tls_is_not_bypassed_by_shared_memory() {
    let _watchdog = Watchdog::start("refused::tls_is_not_bypassed_by_shared_memory");
    let authority = Authority::new();
    let secure = Engine::builder().same_host_upgrade(true).tls(authority.tls()).listen(ANYWHERE).build().unwrap();
    secure.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    let plain = Engine::builder().same_host_upgrade(true).listen(ANYWHERE).build().unwrap();
    plain.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    assert_unreachable(call(&plain, &plain.lookup(secure.address()).unwrap()), "TLS");
    assert_unreachable(call(&secure, &secure.lookup(plain.address()).unwrap()), "TLS");
}

#[test]
fn invalid_tls_configuration_is_an_error_at_build() {
    let _watchdog = Watchdog::start("refused::invalid_tls_configuration_is_an_error_at_build");
    let authority = Authority::new();
    let built = Engine::builder().tls(authority.trusted()).listen(ANYWHERE).build();
    assert_error!(built, Error::Unsupported { reason, .. } if reason.contains("certificate"));
    // Other transports need no certificate.
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
fn debug_output_hides_the_private_key() {
    let authority = Authority::new();
    let identity = authority.identity(&["127.0.0.1"]);
    let shown = format!("{:?}", identity.of(authority.trusted()));
    assert!(shown.contains("identity: true"), "{shown}");
    assert!(shown.len() < 200 && !shown.contains("PRIVATE"), "{shown}");
}

#[test]
fn certificate_for_ipv6_address_is_accepted() {
    let _watchdog = Watchdog::start("refused::certificate_for_ipv6_address_is_accepted");
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

/// The authorize hook sees the certificate of the caller.
#[test]
fn authorize_hook_sees_the_certificate() {
    let _watchdog = Watchdog::start("refused::authorize_hook_sees_the_certificate");
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
