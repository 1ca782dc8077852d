//! An attacker in the network that cuts connections and changes bytes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use calomel::{BulkMode, Endpoint, Engine, EngineBuilder, Error, Exposed, Request, Writable};

use crate::authority::Authority;
use crate::common::mitm::{Fate, Tally, meddle};
use crate::common::*;

const LEN: usize = 300_000;

struct Service {
    engine: Engine,
    source: Exposed<Vec<u8>, Writable>,
    target: Exposed<Vec<u8>, Writable>,
}

fn configured(authority: &Authority) -> EngineBuilder {
    Engine::builder().peer_timeout(Duration::from_secs(1)).connect_timeout(Duration::from_secs(2)).tls(authority.tls())
}

impl Service {
    fn new(authority: &Authority) -> Service {
        let engine = configured(authority).listen("tcp://127.0.0.1:0").build().unwrap();
        engine.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
        let source = engine.expose(pattern(1, LEN), BulkMode::ReadWrite).unwrap();
        let target = engine.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        Service { engine, source, target }
    }

    fn socket(&self) -> SocketAddr {
        self.engine.address().to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
    }

    /// One operation of each kind. An operation that succeeds has delivered the right bytes.
    fn round(&self, client: &Engine, to: &Endpoint, seed: u64) -> calomel::Result<()> {
        for len in [100, 60_000] {
            let sent = pattern(seed, len);
            let back = client.procedure::<Vec<u8>, Vec<u8>>("echo").on(to).call(&sent)?;
            assert!(back == sent, "a call returned bytes that were not sent");
        }
        let mut bytes = vec![0u8; LEN];
        self.source.bulk().on(to).pull_into(&mut bytes)?;
        assert!(bytes == pattern(1, LEN), "a pull returned bytes that were not there");
        let mine = pattern(seed, LEN);
        self.target.bulk().on(to).push_from(&mine)?;
        self.target.read_at(0, &mut bytes).unwrap();
        assert!(bytes == mine, "a push wrote bytes that were not sent");
        Ok(())
    }
}

/// Errors of a round whose bytes were cut or changed. In the handshake, that can look like an invalid certificate.
#[track_caller]
fn assert_explained(error: &Error, when: &str) {
    assert!(error.is_disconnected() || matches!(error, Error::AccessDenied { .. }), "{when}: {error:?}");
}

/// The bytes of one round in both directions, handshake included.
fn measure(service: &Service, authority: &Authority) -> usize {
    let tally = Arc::new(Tally::default());
    let address = meddle(service.socket(), &tally, || [Fate::default(), Fate::default()]);
    let client = configured(authority).build().unwrap();
    service.round(&client, &client.lookup(&address).unwrap(), 1).unwrap();
    client.finalize().unwrap();
    tally.bytes.load(Ordering::SeqCst)
}

#[test]
fn connection_cut_at_any_byte_ends_its_operations_only() {
    let _watchdog = Watchdog::start("network::connection_cut_at_any_byte_ends_its_operations_only");
    let authority = Authority::new();
    let service = Service::new(&authority);
    let total = measure(&service, &authority);
    assert!(total > 2 * LEN, "{total}");
    let (ends, tally) = (Arc::new(AtomicUsize::new(0)), Arc::new(Tally::default()));
    let here = ends.clone();
    let address = meddle(service.socket(), &tally, move || {
        let end = here.load(Ordering::SeqCst);
        // One direction or the other.
        let fate = Fate { end_after: end / 2, ..Fate::default() };
        if end % 2 == 0 { [fate, Fate::default()] } else { [Fate::default(), fate] }
    });
    let mut random = Random(0xc07);
    let mut cuts = 0;
    for round in 0..120 {
        // Through both handshakes, then anywhere.
        let end = if round < 80 { 2 * 50 * (round / 2) + round % 2 } else { random.below(total) };
        ends.store(end, Ordering::SeqCst);
        let client = configured(&authority).build().unwrap();
        let to = client.lookup(&address).unwrap();
        let begin = Instant::now();
        match service.round(&client, &to, round as u64) {
            Ok(()) => {}
            Err(error) => {
                assert_explained(&error, &format!("cut after {end}"));
                cuts += 1;
            }
        }
        assert!(begin.elapsed() < patience() * Duration::from_secs(5), "cut after {end}: {:?}", begin.elapsed());
        client.finalize().unwrap();
    }
    assert!(cuts > 80, "{cuts}");
    ends.store(usize::MAX - 1, Ordering::SeqCst);
    let client = configured(&authority).build().unwrap();
    service.round(&client, &client.lookup(&address).unwrap(), 5).unwrap();
}

/// The end of a stream that an attacker cut is told apart from one that its sender announced.
#[test]
fn truncated_stream_is_reported_as_truncated() {
    let _watchdog = Watchdog::start("network::truncated_stream_is_reported_as_truncated");
    let authority = Authority::new();
    let service = Service::new(&authority);
    let tally = Arc::new(Tally::default());
    let address = meddle(service.socket(), &tally, || {
        // After the handshake, in the middle of the response.
        [Fate::default(), Fate { end_after: 100_000, ..Fate::default() }]
    });
    let client = configured(&authority).build().unwrap();
    let to = client.lookup(&address).unwrap();
    let mut bytes = vec![0u8; LEN];
    match service.source.bulk().on(&to).pull_into(&mut bytes) {
        Err(Error::Disconnected { reason, .. }) if reason.contains("without the end that TLS demands") => {}
        other => panic!("{other:?}"),
    }
    // An engine that ends announces the end, which gives another error.
    let server = configured(&authority).listen("tcp://127.0.0.1:0").build().unwrap();
    let gate = Gate::default();
    let entered = gate.clone();
    server
        .define("wait", move |request: &Request, ()| {
            entered.open();
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < Duration::from_millis(500) {
                std::thread::sleep(Duration::from_millis(1));
            }
        })
        .unwrap();
    let to = client.lookup(server.address()).unwrap();
    let pending = client.procedure::<(), ()>("wait").on(&to).start(&()).unwrap();
    gate.wait();
    // Sends nothing else: this is how it finds the end of the stream.
    server.finalize().unwrap();
    let _ = pending.wait();
    let error = client.procedure::<(), ()>("wait").on(&to).call(&()).unwrap_err();
    assert!(!error.to_string().contains("without the end"), "{error}");
}

#[test]
fn flipped_bits_end_the_connection() {
    let _watchdog = Watchdog::start("network::flipped_bits_end_the_connection");
    let authority = Authority::new();
    let service = Service::new(&authority);
    let total = measure(&service, &authority);
    let (flips, tally) = (Arc::new(AtomicUsize::new(0)), Arc::new(Tally::default()));
    let here = flips.clone();
    let address = meddle(service.socket(), &tally, move || {
        let flip = here.load(Ordering::SeqCst);
        let fate = Fate { flip_at: Some(flip / 2), seed: flip as u64, ..Fate::default() };
        if flip % 2 == 0 { [fate, Fate::default()] } else { [Fate::default(), fate] }
    });
    let mut random = Random(0xf11b);
    let mut failed = 0;
    for round in 0..80 {
        let flip = if round < 40 { random.below(2 * 3000) } else { random.below(total) };
        flips.store(flip, Ordering::SeqCst);
        let before = tally.flips.load(Ordering::SeqCst);
        let client = configured(&authority).build().unwrap();
        let to = client.lookup(&address).unwrap();
        let result = service.round(&client, &to, round);
        let flipped = tally.flips.load(Ordering::SeqCst) > before;
        match result {
            // A bit that TLS does not check, such as the version of a plaintext record, changes no data.
            Ok(()) => {}
            Err(error) => {
                assert!(flipped, "nothing was flipped: {error}");
                assert_explained(&error, &format!("flipped at {flip}"));
                failed += 1;
            }
        }
        client.finalize().unwrap();
    }
    assert!(failed > 60, "{failed} of {} flips", tally.flips.load(Ordering::SeqCst));
    service.engine.finalize().unwrap();
}
