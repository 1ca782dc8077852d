//! Memory that is reclaimed, and processes that are killed, in the middle of a transfer.

use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, EngineBuilder, Error, Request, Tls};

use crate::authority::{Authority, Identity};
use crate::support::*;

const LEN: usize = 8 << 20;

pub fn configured(tls: Tls) -> EngineBuilder {
    Engine::builder().tls(tls)
}

/// `reclaim` waits neither for the peer nor for bytes in transit; a pull that reads from the memory afterwards fails, and the
/// connection stays open.
#[test]
fn reclaim_during_a_pull_sends_no_later_writes() {
    let _watchdog = Watchdog::start("memory::reclaim_during_a_pull_sends_no_later_writes");
    let authority = Authority::new();
    let server = configured(authority.tls()).listen("tcp://127.0.0.1:0").build().unwrap();
    define_add(&server);
    let client = configured(authority.tls()).build().unwrap();
    let to = client.lookup(server.address()).unwrap();
    assert_serves(&client, &to);
    let mut random = Random(3);
    let (mut interrupted, mut longest) = (0, Duration::ZERO);
    for _ in 0..8 {
        let theirs = server.expose(pattern(1, LEN), BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&to);
        let pull = remote.start_pull_into(client.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap());
        std::thread::sleep(Duration::from_micros(random.below(20_000) as u64));
        let begin = Instant::now();
        let mut back = theirs.reclaim();
        longest = longest.max(begin.elapsed());
        // The owner has it exclusively: no later write is sent.
        back.fill(0xee);
        let (result, mine) = pull.wait();
        let bytes = mine.reclaim();
        match result {
            Ok(len) => assert!(len == LEN && bytes == pattern(1, LEN), "bytes that were written after `reclaim`"),
            Err(Error::Revoked { .. }) => {
                interrupted += 1;
                let right = |(byte, there): (&u8, &u8)| byte == there || *byte == 0;
                assert!(bytes.iter().zip(&pattern(1, LEN)).all(right), "bytes that were written after `reclaim`");
            }
            Err(other) => panic!("{other:?}"),
        }
        assert_serves(&client, &to);
    }
    assert!(interrupted > 0, "nothing was interrupted: this test tests nothing");
    assert!(longest < patience() * Duration::from_millis(500), "{longest:?}");
}

#[test]
fn reclaim_during_a_push_allows_no_later_writes() {
    let _watchdog = Watchdog::start("memory::reclaim_during_a_push_allows_no_later_writes");
    let authority = Authority::new();
    let server = configured(authority.tls()).listen("tcp://127.0.0.1:0").build().unwrap();
    define_add(&server);
    let client = configured(authority.tls()).build().unwrap();
    let to = client.lookup(server.address()).unwrap();
    assert_serves(&client, &to);
    let mut random = Random(4);
    let mut interrupted = 0;
    for _ in 0..8 {
        let theirs = server.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        let mine = client.expose_read_only(vec![0xaau8; LEN]).unwrap();
        let push = theirs.bulk().on(&to).start_push_from(mine);
        std::thread::sleep(Duration::from_micros(random.below(20_000) as u64));
        let mut back = theirs.reclaim();
        back.fill(7);
        match push.wait().0 {
            Ok(_) => {}
            Err(Error::Revoked { .. }) => interrupted += 1,
            Err(other) => panic!("{other:?}"),
        }
        assert!(all_are(&back, 7), "it was written after `reclaim`");
        assert_serves(&client, &to);
    }
    assert!(interrupted > 0, "nothing was interrupted: this test tests nothing");
}

const CA: &str = "CALOMEL_TEST_CA";
const CERTIFICATE: &str = "CALOMEL_TEST_CERTIFICATE";
const KEY: &str = "CALOMEL_TEST_KEY";

/// In a child: an engine that exposes memory, and serves until it is killed.
pub fn role() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let identity = Identity { certificate: variable(CERTIFICATE), key: variable(KEY), der: Vec::new() };
    let tls = identity.of(Tls::trusting(variable(CA).as_bytes()).unwrap());
    let engine = configured(tls).listen("tcp://127.0.0.1:0").build().unwrap();
    let exposed = engine.expose(pattern(1, LEN), BulkMode::ReadWrite).unwrap();
    let bulk = exposed.bulk();
    engine.define("bulk", move |_: &Request, ()| bulk.clone()).unwrap();
    say(&format!("address {}", engine.address()));
    std::thread::sleep(3 * BOUND);
}

#[test]
fn killed_peer_ends_transfers_with_an_error() {
    let _watchdog = Watchdog::start("memory::killed_peer_ends_transfers_with_an_error");
    let authority = Authority::new();
    let client = configured(authority.tls()).build().unwrap();
    for round in 0..6 {
        let identity = authority.identity(&["127.0.0.1"]);
        let (ca, Identity { certificate, key, .. }) = (authority.pem(), identity);
        let mut child = Child::start("tls", &[(CA, &ca), (CERTIFICATE, &certificate), (KEY, &key)]);
        let to = client.lookup(child.hear("address").as_str()).unwrap();
        let bulk: Bulk = client.procedure::<(), Bulk>("bulk").on(&to).call(&()).unwrap();
        let begin = Instant::now();
        let killed = std::thread::scope(|scope| {
            let transfers = scope.spawn(|| {
                let mut bytes = vec![0u8; LEN];
                loop {
                    let result = if round % 2 == 0 { bulk.on(&to).pull_into(&mut bytes) } else { bulk.on(&to).push_from(&bytes) };
                    if let Err(error) = result {
                        return error;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(20 + 31 * round));
            child.signal(libc::SIGKILL);
            transfers.join().unwrap()
        });
        // Lost in the middle of a transfer, or unreachable for the next.
        assert!(killed.is_disconnected(), "{killed:?}");
        assert!(begin.elapsed() < patience() * 2 * NOTICED, "{:?}", begin.elapsed());
    }
    client.finalize().unwrap();
}
