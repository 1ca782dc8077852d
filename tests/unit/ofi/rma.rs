//! The test that decides on RMA, and what RMA promises where it has passed.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::super::limits::{RMA_FAILURES, RMA_STALL, SELF_TEST, STALL_FAILURES};
use super::super::self_test;
use super::{BOUND, provider};
use crate::address::OfiProvider;
use crate::{BulkMode, Endpoint, Engine, Error, Grant, Progress};

/// Where the device of `ci/softroce` is.
fn device() -> IpAddr {
    std::env::var("CALOMEL_VERBS").expect("an RDMA device").parse().unwrap()
}

fn socket(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, 0)
}

/// libfabric has a cache of registrations unless `FI_MR_CACHE_MAX_COUNT` is 0.
fn has_cache() -> bool {
    std::env::var("FI_MR_CACHE_MAX_COUNT").is_err()
}

/// Software stands in for devices: it goes on writing what was revoked.
#[test]
fn the_test_of_a_provider_finds_that_software_writes_on() {
    for name in [OfiProvider::Cxi, OfiProvider::Opx] {
        if let Err(reason) = provider::available(name) {
            println!("skipped: {reason}");
            continue;
        }
        let begin = Instant::now();
        let outcome = self_test::run(name, "127.0.0.1:0".parse().unwrap());
        println!("{name}: {outcome:?} after {:?}", begin.elapsed());
        assert!(begin.elapsed() < SELF_TEST + BOUND);
        let reason = outcome.unwrap_err();
        // A busy machine may not come that far.
        assert!(["does not stop a transfer", "not done after"].iter().any(|found| reason.contains(found)), "{reason}");
    }
}

/// Lines of the log, as text.
#[derive(Clone, Default)]
struct Lines(std::sync::Arc<crate::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_log_says_which_way_bulk_data_goes_and_why() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        assert_eq!(self_test::log(OfiProvider::Verbs, Err("for a reason".to_owned())), None);
        let limits = self_test::RmaLimits { write_only: true };
        assert_eq!(self_test::log(OfiProvider::Efa, Ok(limits)), Some(limits));
        crate::deferred_log::flush();
    });
    let text = String::from_utf8(lines.0.lock().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    for (line, parts) in
        lines.iter().zip([["provider=verbs", "rma=false", "for a reason"], ["provider=efa", "rma=true", "passed"]])
    {
        assert!(line.contains("INFO calomel::ofi: how bulk data goes"), "{line}");
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
}

#[test]
#[ignore = "needs an RDMA device: ci/ofi --softroce"]
fn a_cache_of_registrations_rules_rma_out() {
    let begin = Instant::now();
    let outcome = self_test::run(OfiProvider::Verbs, socket(device()));
    println!("{outcome:?} after {:?}", begin.elapsed());
    match outcome {
        Ok(_) => assert!(!has_cache(), "memory is open after its registration was closed, and the test has not noticed"),
        Err(reason) => assert!(has_cache(), "{reason}"),
    }
}

/// An engine that exposes memory, another one, and the first one as that sees it.
struct Pair {
    owner: Engine,
    client: Engine,
    to_owner: Endpoint,
}

impl Pair {
    fn new(owner: Engine) -> Pair {
        let client = Engine::builder().same_host_upgrade(false).default_timeout(BOUND).build().unwrap();
        let to_owner = client.lookup(owner.address()).unwrap();
        Pair { owner, client, to_owner }
    }

    fn at(address: &str) -> Pair {
        Pair::new(Engine::builder().listen(address).same_host_upgrade(false).default_timeout(BOUND).build().unwrap())
    }

    /// Over the stand-in, where there is one. The owner's engine is idle but while `driven` drives it.
    fn with_an_idle_owner() -> Option<Pair> {
        let owner = Engine::builder().listen(STAND_IN).same_host_upgrade(false).progress(Progress::External);
        has_stand_in().then(|| Pair::new(owner.build().unwrap()))
    }

    /// Runs this on a thread of its own. The owner's engine stands still for a while, and then is driven until it has returned.
    #[track_caller]
    fn driven(&self, still: Duration, waits: &mut (dyn FnMut() -> crate::Result<usize> + Send)) -> crate::Result<usize> {
        std::thread::scope(|scope| {
            let waits = scope.spawn(waits);
            std::thread::sleep(still);
            assert!(still.is_zero() || !waits.is_finished(), "it needs no engine of the owner: this test tests nothing");
            while !waits.is_finished() {
                self.owner.progress(Duration::from_millis(1)).unwrap();
            }
            waits.join().unwrap()
        })
    }

    /// Transfers that the owner has taken part in.
    fn served(&self) -> u64 {
        self.owner.stats().peers.iter().map(|peer| peer.traffic.served_transfers).sum()
    }

    /// Moves some bytes, both ways; how many of these two transfers the owner has taken part in.
    #[track_caller]
    fn served_of_two(&self, len: usize, grant: &Grant) -> u64 {
        let before = self.served();
        let exposed = self.owner.expose_with(vec![7u8; len], BulkMode::ReadWrite, grant).unwrap();
        let remote = exposed.bulk().on(&self.to_owner);
        let mut here = vec![0u8; len];
        assert_eq!(remote.pull_into(&mut here[..]).unwrap(), len);
        assert!(here.iter().all(|byte| *byte == 7), "{len} bytes");
        let bytes: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        assert_eq!(remote.push_from(&bytes[..]).unwrap(), len);
        assert!(exposed.reclaim() == bytes, "{len} bytes");
        self.served() - before
    }
}

/// Data goes by RMA, and what no device may do is left to the owner.
fn data_goes_by_rma(address: &str) {
    let pair = Pair::at(address);
    // Connects; no keys are known before.
    pair.served_of_two(100, &Grant::new());
    for len in [1, 4096, 200_000, (3 << 20) + 5] {
        assert_eq!(pair.served_of_two(len, &Grant::new()), 0, "{len} bytes");
    }
    // Restrictions are the owner's to check.
    assert_eq!(pair.served_of_two(200_000, &Grant::new().quota(1 << 20)), 2);
    assert_eq!(pair.served_of_two(200_000, &Grant::new().expires_after(BOUND)), 2);
    // Several segments, on either side, of which a part is moved.
    let parts = || (vec![1u8; 1000], vec![2u8; 70_000], vec![3u8; 5]);
    let (theirs, ours) = (
        pair.owner.expose(parts(), BulkMode::ReadOnly).unwrap(),
        pair.client.expose(vec![0u8; 71_000], BulkMode::ReadWrite).unwrap(),
    );
    let before = pair.served();
    let remote = theirs.bulk().slice(999, 70_005).unwrap().on(&pair.to_owner);
    let (result, ours) = remote.start_pull_into(ours.slice(500, 70_005).unwrap()).wait();
    assert_eq!((result.unwrap(), pair.served() - before), (70_005, 0));
    drop(ours);
}

/// Modes are enforced, by the provider or by the owner; revoked memory is refused with the reason, and harms no other.
fn what_is_not_allowed_is_refused(address: &str) {
    const LEN: usize = 300_000;
    let pair = Pair::at(address);
    pair.served_of_two(100, &Grant::new());
    for round in 0..3 {
        let read_only = pair.owner.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
        let denied = read_only.bulk().on(&pair.to_owner).push_from(&vec![2u8; LEN][..]).unwrap_err();
        assert!(matches!(denied, Error::AccessDenied { .. }), "{denied}");
        let write_only = pair.owner.expose(vec![1u8; LEN], BulkMode::WriteOnly).unwrap();
        let mut here = vec![0u8; LEN];
        let denied = write_only.bulk().on(&pair.to_owner).pull_into(&mut here[..]).unwrap_err();
        assert!(matches!(denied, Error::AccessDenied { .. }), "{denied}");
        assert!(here.iter().all(|byte| *byte == 0));
        assert!(read_only.reclaim().iter().chain(&write_only.reclaim()).all(|byte| *byte == 1));
        let revoked = pair.owner.expose(vec![1u8; LEN], BulkMode::ReadWrite).unwrap();
        let remote = revoked.bulk().on(&pair.to_owner);
        let mut bytes = revoked.reclaim();
        bytes.fill(4);
        for result in [remote.pull_into(&mut here[..]), remote.push_from(&vec![2u8; LEN][..])] {
            let gone = result.unwrap_err();
            assert!(matches!(gone, Error::Revoked { .. }), "{gone}");
        }
        assert!(bytes.iter().all(|byte| *byte == 4) && here.iter().all(|byte| *byte == 0));
        assert_eq!(pair.served_of_two(LEN, &Grant::new()), 0, "round {round}");
    }
    assert!(pair.to_owner.is_connected());
}

/// In unit tests the stand-in of `ofi+cxi` counts as a device. It does not stop what is under way, which is not tested here.
const STAND_IN: &str = "ofi+cxi://127.0.0.1:0";

fn has_stand_in() -> bool {
    provider::available(OfiProvider::Cxi).inspect_err(|reason| println!("skipped: {reason}")).is_ok()
}

#[test]
fn data_goes_by_rma_over_the_stand_in() {
    if has_stand_in() {
        data_goes_by_rma(STAND_IN);
    }
}

#[test]
fn what_is_not_allowed_is_refused_over_the_stand_in() {
    if has_stand_in() {
        what_is_not_allowed_is_refused(STAND_IN);
    }
}

#[test]
fn data_with_checksums_goes_in_messages() {
    if !has_stand_in() {
        return;
    }
    let builder = Engine::builder().listen(STAND_IN).same_host_upgrade(false).payload_checksums(true);
    let pair = Pair::new(builder.build().unwrap());
    pair.served_of_two(100, &Grant::new());
    assert_eq!(pair.served_of_two(200_000, &Grant::new()), 2);
}

/// The owner's engine does nothing for a while, so the provider keeps this side's memory, until the endpoint is closed.
#[test]
fn memory_that_is_taken_back_by_force_costs_no_link() {
    const LEN: usize = 16 << 20;
    let Some(pair) = Pair::with_an_idle_owner() else { return };
    let theirs = pair.owner.expose(vec![7u8; LEN], BulkMode::ReadOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_owner);
    let pull = || {
        let mut here = vec![0u8; LEN];
        pair.driven(Duration::ZERO, &mut || remote.pull_into(&mut here[..])).unwrap();
        assert!(here.iter().all(|byte| *byte == 7));
    };
    // The first one connects, and the second one connects for RMA.
    (0..2).for_each(|_| pull());
    for _ in 0..3 {
        let ours = pair.client.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        let transfer = remote.start_pull_into(ours.slice(0, LEN).unwrap());
        let begin = Instant::now();
        drop(ours.reclaim());
        println!("reclaimed after {:?}", begin.elapsed());
        assert!(begin.elapsed() > Duration::from_millis(200), "the provider has kept nothing: this test tests nothing");
        assert!(begin.elapsed() < BOUND);
        assert!(pair.to_owner.is_connected());
        let mut transfer = Some(transfer);
        let result = pair.driven(Duration::ZERO, &mut || transfer.take().unwrap().wait().0);
        assert!(matches!(result, Err(Error::Revoked { .. })), "{result:?}");
        assert!(pair.to_owner.is_connected());
        pull();
    }
}

/// Where each transfer by RMA is refused, the link does without it for a while.
#[test]
fn a_link_goes_on_without_rma_where_that_never_succeeds() {
    const LEN: usize = 300_000;
    if !has_stand_in() {
        return;
    }
    let pair = Pair::at(STAND_IN);
    pair.served_of_two(100, &Grant::new());
    let mut here = vec![0u8; LEN];
    for failures in [RMA_FAILURES - 1, RMA_FAILURES] {
        for _ in 0..failures {
            let revoked = pair.owner.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
            let remote = revoked.bulk().on(&pair.to_owner);
            drop(revoked);
            assert!(matches!(remote.pull_into(&mut here[..]), Err(Error::Revoked { .. })));
        }
        let without_rma = if failures == RMA_FAILURES { 2 } else { 0 };
        assert_eq!(pair.served_of_two(LEN, &Grant::new()), without_rma, "after {failures} failures");
    }
    // Another link has it.
    let other = Pair::at(STAND_IN);
    other.served_of_two(100, &Grant::new());
    assert_eq!(other.served_of_two(LEN, &Grant::new()), 0);
}

#[test]
fn a_transfer_by_rma_that_stalls_goes_by_its_owner() {
    const LEN: usize = 16 << 20;
    let Some(pair) = Pair::with_an_idle_owner() else { return };
    let theirs = pair.owner.expose(vec![7u8; LEN], BulkMode::ReadOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_owner);
    // How many of the transfers the owner has taken part in. Its engine stands still for a while.
    let pulled = |still: Duration| {
        let (before, mut here) = (pair.served(), vec![0u8; LEN]);
        assert_eq!(pair.driven(still, &mut || remote.pull_into(&mut here[..])).unwrap(), LEN);
        assert!(here.iter().all(|byte| *byte == 7));
        pair.served() - before
    };
    // The first one connects, and the second one connects for RMA.
    (0..2).for_each(|_| _ = pulled(Duration::ZERO));
    assert_eq!(pulled(Duration::ZERO), 0);
    for _ in 0..RMA_FAILURES / STALL_FAILURES {
        assert_eq!(pulled(RMA_STALL + RMA_STALL / 6), 1, "its owner is asked once it has stalled");
    }
    // It is not tried again.
    assert_eq!(pulled(Duration::ZERO), 1);
    assert!(pair.to_owner.is_connected());
}

/// A device asks those who try keys for nothing else.
#[test]
fn data_of_engines_with_a_key_goes_in_messages() {
    if !has_stand_in() {
        return;
    }
    let guarded = || Engine::builder().same_host_upgrade(false).default_timeout(BOUND).pre_shared_key("for this test only");
    let (owner, client) = (guarded().listen(STAND_IN).build().unwrap(), guarded().build().unwrap());
    let to_owner = client.lookup(owner.address()).unwrap();
    let pair = Pair { owner, client, to_owner };
    pair.served_of_two(100, &Grant::new());
    assert_eq!(pair.served_of_two(200_000, &Grant::new()), 2);
}

#[test]
#[ignore = "needs an RDMA device: ci/ofi --softroce"]
fn data_goes_by_rma_over_a_device() {
    let address = format!("ofi+verbs://{}:0", device());
    if !has_cache() {
        return data_goes_by_rma(&address);
    }
    let pair = Pair::at(&address);
    pair.served_of_two(100, &Grant::new());
    assert_eq!(pair.served_of_two(200_000, &Grant::new()), 2, "with a cache all goes in messages");
}

#[test]
#[ignore = "needs an RDMA device: ci/ofi --softroce"]
fn what_is_not_allowed_is_refused_over_a_device() {
    assert!(!has_cache(), "FI_MR_CACHE_MAX_COUNT=0 is to be set");
    what_is_not_allowed_is_refused(&format!("ofi+verbs://{}:0", device()));
}

/// The owner's engine does nothing meanwhile.
#[test]
#[ignore = "needs an RDMA device: ci/ofi --softroce"]
fn an_owner_takes_no_part_over_a_device() {
    const LEN: usize = 200_000;
    assert!(!has_cache(), "FI_MR_CACHE_MAX_COUNT=0 is to be set");
    let builder = Engine::builder().listen(&*format!("ofi+verbs://{}:0", device())).progress(Progress::External);
    let pair = Pair::new(builder.same_host_upgrade(false).handler_threads(0).build().unwrap());
    let exposed = pair.owner.expose(vec![7u8; LEN], BulkMode::ReadWrite).unwrap();
    let remote = exposed.bulk().on(&pair.to_owner);
    let mut here = vec![0u8; LEN];
    // The first one connects, and the second one connects for RMA.
    for _ in 0..2 {
        std::thread::scope(|scope| {
            let first = scope.spawn(|| remote.pull_into(&mut here[..]));
            while !first.is_finished() {
                pair.owner.progress(Duration::from_millis(1)).unwrap();
            }
            first.join().unwrap().unwrap();
        });
    }
    here.fill(0);
    assert_eq!(remote.pull_into(&mut here[..]).unwrap(), LEN);
    assert!(here.iter().all(|byte| *byte == 7));
    assert_eq!(remote.push_from(&vec![8u8; LEN][..]).unwrap(), LEN);
    assert!(exposed.reclaim().iter().all(|byte| *byte == 8));
}

/// Reclaimed in the middle of a transfer.
#[test]
#[ignore = "needs an RDMA device: ci/ofi --softroce"]
fn memory_that_is_reclaimed_is_not_touched_over_a_device() {
    const LEN: usize = 64 << 20;
    assert!(!has_cache(), "FI_MR_CACHE_MAX_COUNT=0 is to be set");
    let pair = Pair::at(&format!("ofi+verbs://{}:0", device()));
    pair.served_of_two(100, &Grant::new());
    let begun = |memory: &crate::Exposed<Vec<u8>>| {
        let (begin, mut byte) = (Instant::now(), [0u8]);
        while byte == [0] {
            assert!(begin.elapsed() < BOUND, "nothing is moved");
            memory.read_at(0, &mut byte).unwrap();
            std::thread::yield_now();
        }
    };
    // The target of a push.
    let theirs = pair.owner.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
    let transfer = theirs.bulk().on(&pair.to_owner).start_push_from(ours);
    begun(&theirs);
    let bytes = theirs.reclaim();
    let snapshot = bytes.clone();
    assert!(bytes[LEN - 1] == 0, "the transfer was over before: this test tests nothing");
    let result = transfer.wait().0;
    assert!(matches!(result, Err(Error::Revoked { .. })), "{result:?}");
    assert!(bytes == snapshot, "it was written after it had been reclaimed");
    // The source of a pull, and its target.
    for of_owner in [true, false] {
        let theirs = pair.owner.expose(vec![1u8; LEN], BulkMode::ReadOnly).unwrap();
        let ours = pair.client.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        let whole = ours.slice(0, LEN).unwrap();
        let transfer = theirs.bulk().on(&pair.to_owner).start_pull_into(whole);
        begun(&ours);
        let bytes = if of_owner {
            theirs.reclaim().fill(2);
            let result = transfer.wait().0;
            assert!(matches!(result, Err(Error::Revoked { .. })), "{result:?}");
            ours.reclaim()
        } else {
            let bytes = ours.reclaim();
            let snapshot = bytes.clone();
            assert!(transfer.wait().0.is_err());
            assert!(bytes == snapshot, "it was written after it had been reclaimed");
            bytes
        };
        assert!(bytes[LEN - 1] == 0, "the transfer was over before: this test tests nothing");
        assert!(!bytes.contains(&2), "bytes came that were written after the memory had been reclaimed");
    }
    assert_eq!(pair.served_of_two(200_000, &Grant::new()), 0);
}
