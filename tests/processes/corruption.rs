//! Corruption in transit, by a proxy that flips bits. With payload checksums, no corrupted payload is accepted.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use calomel::{BulkMode, Endpoint, Engine, Error, Exposed, Request, Writable};

use crate::common::mitm::{Fate, Tally, meddle};
use crate::support::*;

/// Longer than a chunk.
const LEN: usize = 700_000;
/// Bits to flip in each of the three configurations, unless the machine is very slow.
const FLIPS: usize = 1500;

struct Service {
    engine: Engine,
    source: Exposed<Vec<u8>, Writable>,
    target: Exposed<Vec<u8>, Writable>,
}

fn service(checksums: bool) -> Service {
    let engine = configured().payload_checksums(checksums).listen(anywhere()).build().unwrap();
    engine.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
    let source = engine.expose(pattern(1, LEN), BulkMode::ReadWrite).unwrap();
    let target = engine.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    Service { engine, source, target }
}

fn socket(engine: &Engine) -> SocketAddr {
    engine.address().to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
}

/// Outcomes of the operations of one run.
#[derive(Default)]
struct Seen {
    ok: usize,
    checksums: usize,
    disconnected: usize,
}

impl Seen {
    /// The value, if the operation succeeded.
    #[track_caller]
    fn note<T>(&mut self, result: calomel::Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.ok += 1;
                return Some(value);
            }
            Err(Error::Checksum { .. }) => self.checksums += 1,
            Err(error) if error.is_disconnected() => self.disconnected += 1,
            Err(other) => panic!("{other:?}"),
        }
        None
    }
}

impl Service {
    /// One operation of each kind that carries payloads. An operation that succeeds has delivered the right bytes.
    fn round(&self, client: &Engine, to: &Endpoint, seed: u64, seen: &mut Seen) {
        let mut bytes = vec![0u8; LEN];
        if let Some(len) = seen.note(self.source.bulk().on(to).pull_into(&mut bytes)) {
            assert!(len == LEN && bytes == pattern(1, LEN), "a pull of corrupted bytes succeeded");
        }
        let mine = pattern(seed, LEN);
        if seen.note(self.target.bulk().on(to).push_from(&mine)).is_some() {
            let mut there = vec![0u8; LEN];
            self.target.read_at(0, &mut there).unwrap();
            assert!(there == mine, "a push of corrupted bytes succeeded");
        }
        for len in [100, 10_000, 200_000] {
            let sent = pattern(seed ^ 7, len);
            let echo = client.procedure::<Vec<u8>, Vec<u8>>("echo").on(to).call(&sent);
            if let Some(back) = seen.note(echo) {
                assert!(back == sent, "corrupted bytes of a call were accepted");
            }
        }
    }
}

#[test]
fn flipped_bits_are_reported_as_checksum_errors_or_disconnects() {
    let _watchdog = Watchdog::start("corruption::flipped_bits_are_reported_as_checksum_errors_or_disconnects");
    // Checksums apply when either side asks for them: first the server does, then the client. Frequent flips hit frame heads,
    // too.
    for (server_asks, flip_every, seed) in [(true, 300_000, 1), (false, 300_000, 1 << 40), (true, 5_000, 1 << 41)] {
        let service = service(server_asks);
        let seeds = AtomicU64::new(seed);
        let tally = Arc::new(Tally::default());
        let address = meddle(socket(&service.engine), &tally, move || {
            let seed = seeds.fetch_add(2, Ordering::SeqCst);
            [seed, seed + 1].map(|seed| Fate { flip_every, seed, ..Fate::default() })
        });
        let client = configured().payload_checksums(!server_asks).build().unwrap();
        let to = client.lookup(&address).unwrap();
        let mut seen = Seen::default();
        let mut rounds = 0;
        let begin = Instant::now();
        while tally.flips.load(Ordering::SeqCst) < FLIPS && begin.elapsed() < Duration::from_secs(15) {
            rounds += 1;
            service.round(&client, &to, rounds, &mut seen);
        }
        // Most flips hit payloads; a checksum error for a payload does not cost the connection.
        assert!(seen.checksums > seen.disconnected, "{} {}", seen.checksums, seen.disconnected);
        assert!(tally.flips.load(Ordering::SeqCst) > 100, "fewer than 100 flips in 15 s");
        eprintln!(
            "{rounds} rounds, {} flips: {} succeeded, {} checksums, {} connections lost",
            tally.flips.load(Ordering::SeqCst),
            seen.ok,
            seen.checksums,
            seen.disconnected
        );
        assert_lives(&service.engine);
        client.finalize().unwrap();
        service.engine.finalize().unwrap();
    }
}

type Halves = ([u8; 32], [u8; 32]);

/// Without payload checksums, frame heads still have one: a call gets the response to itself, or an error.
#[test]
fn flipped_bits_without_payload_checksums_never_swap_responses() {
    let _watchdog = Watchdog::start("corruption::flipped_bits_without_payload_checksums_never_swap_responses");
    let service = service(false);
    let seeds = AtomicU64::new(77);
    let tally = Arc::new(Tally::default());
    let address = meddle(socket(&service.engine), &tally, move || {
        let seed = seeds.fetch_add(2, Ordering::SeqCst);
        // Early in each connection, so in the handshake and in frame heads.
        [seed, seed + 1].map(|seed| Fate { flip_at: Some(Random(seed).below(2500)), seed, ..Fate::default() })
    });
    service.engine.define("halves", |_: &Request, halves: Halves| halves).unwrap();
    let mut changed = 0;
    for round in 0..300u64 {
        let client = configured().build().unwrap();
        let to = client.lookup(&address).unwrap();
        for i in 0..20 {
            let sent: Halves = [0, 1].map(|half| pattern(40 * round + 2 * i + half, 32).try_into().unwrap()).into();
            let back = client.procedure::<Halves, Halves>("halves").on(&to).timeout(Duration::from_secs(3)).call(&sent);
            let Ok(back) = back else { break };
            let bits = |(a, b): (&[u8; 32], &[u8; 32])| a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
            let differing = bits((&sent.0, &back.0)) + bits((&sent.1, &back.1));
            // One flip in the request and one in the response; the response to another call differs in half of all bits.
            assert!(differing <= 2, "{differing} bits differ");
            changed += usize::from(differing > 0);
        }
        client.finalize().unwrap();
    }
    let flips = tally.flips.load(Ordering::SeqCst);
    assert!(flips > 300 && changed > 0 && changed < flips, "{flips} flips, {changed} in bodies");
    service.engine.finalize().unwrap();
}
