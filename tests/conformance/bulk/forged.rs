//! Forged handles give no access to other memory.

use calomel::{Bulk, BulkMode, Engine};

use crate::support::{Net, Pair, Random, all_are};

const INSIDE: u8 = 0xaa;
const LEN: usize = 20_000;

/// The serialized bulk with each single bit flipped, if it still decodes as a bulk.
fn with_one_bit_flipped(bulk: &Bulk) -> Vec<(usize, Bulk)> {
    let bytes = postcard::to_stdvec(bulk).unwrap();
    let mut forged = Vec::new();
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok(bulk) = postcard::from_bytes::<Bulk>(&bytes) {
            forged.push((bit, bulk));
        }
    }
    forged
}

/// The server's memory between two other exposures, so that a misplaced byte shows.
fn guarded(server: &Engine, mode: BulkMode) -> [calomel::Exposed<Vec<u8>>; 3] {
    let other = || server.expose(vec![0x11u8; LEN], BulkMode::ReadWrite).unwrap();
    let inside = server.expose(vec![INSIDE; LEN], mode).unwrap();
    [other(), inside, other()]
}

#[track_caller]
fn assert_refused(bit: usize, error: &calomel::Error) {
    use calomel::Error::{AccessDenied, Decode, Disconnected, OutOfRange, PeerRestarted, Revoked, Timeout, Unreachable};
    // A wrong owner may be looked up elsewhere and not be found, but that must not end in a timeout.
    assert!(!matches!(error, Timeout { .. } | Disconnected { .. }), "bit {bit}: {error}");
    let refused = matches!(
        error,
        AccessDenied { .. } | OutOfRange { .. } | PeerRestarted { .. } | Revoked { .. } | Decode { .. } | Unreachable { .. }
    );
    assert!(refused, "bit {bit}: {error:?}");
}

fn pull_with_a_flipped_bit_reads_no_other_memory(net: &Net) {
    let pair = net.pair_with(|b| b.eager_bulk_limit(0));
    let [_before, inside, _after] = guarded(&pair.server, BulkMode::ReadOnly);
    let mut refused = 0;
    for bulk in [inside.bulk(), inside.bulk().slice(100, 1000).unwrap()] {
        for (bit, forged) in with_one_bit_flipped(&bulk) {
            let mut copy = vec![0u8; 2 * LEN];
            match forged.on(&pair.to_server).pull_into(&mut copy) {
                // The holder may choose another length or offset within the memory.
                Ok(moved) => {
                    assert!(moved <= LEN, "bit {bit}");
                    assert!(all_are(&copy[..moved], INSIDE), "bit {bit}");
                    assert!(all_are(&copy[moved..], 0), "bit {bit}");
                }
                Err(error) => {
                    assert_refused(bit, &error);
                    refused += 1;
                }
            }
        }
    }
    assert!(refused >= 2 * 128, "only {refused} flips of a token of 128 bits were refused");
    assert!(all_are(&inside.reclaim(), INSIDE));
}

fn push_with_a_flipped_bit_writes_no_other_memory(net: &Net) {
    let pair = net.pair();
    let [before, inside, after] = guarded(&pair.server, BulkMode::WriteOnly);
    for (bit, forged) in with_one_bit_flipped(&inside.bulk()) {
        match forged.on(&pair.to_server).push_from(&vec![INSIDE; 2 * LEN]) {
            Ok(moved) => assert!(moved <= LEN, "bit {bit}"),
            Err(error) => assert_refused(bit, &error),
        }
    }
    assert!(all_are(&before.reclaim(), 0x11));
    assert!(inside.reclaim() == vec![INSIDE; LEN]);
    assert!(all_are(&after.reclaim(), 0x11));
}

fn forged_mode_grants_no_access(net: &Net) {
    // The owner checks the mode, not the initiator: flipping the bit that says "readable" does not grant access.
    let pair = net.pair();
    let [_before, secret, _after] = guarded(&pair.server, BulkMode::WriteOnly);
    let [_, fixed, _] = guarded(&pair.server, BulkMode::ReadOnly);
    let mut modes = 0;
    for (bit, forged) in with_one_bit_flipped(&secret.bulk()) {
        modes += u32::from(forged.mode() != BulkMode::WriteOnly);
        let mut copy = vec![0u8; LEN];
        let error = forged.on(&pair.to_server).pull_into(&mut copy).map(|n| (bit, n)).unwrap_err();
        assert_refused(bit, &error);
        assert!(all_are(&copy, 0), "bit {bit}");
    }
    for (bit, forged) in with_one_bit_flipped(&fixed.bulk()) {
        modes += u32::from(forged.mode() != BulkMode::ReadOnly);
        let error = forged.on(&pair.to_server).push_from(&vec![0u8; LEN]).map(|n| (bit, n)).unwrap_err();
        assert_refused(bit, &error);
    }
    assert!(modes > 0, "no flip changed the mode: this test tests nothing");
    assert!(fixed.reclaim() == vec![INSIDE; LEN]);
}

fn bulk_of_random_bytes_grants_no_access(net: &Net) {
    let pair = net.pair();
    let [before, inside, after] = guarded(&pair.server, BulkMode::ReadWrite);
    let template = postcard::to_stdvec(&inside.bulk()).unwrap();
    let mut random = Random(0xc0ffee);
    for _ in 0..2000 {
        let mut bytes = template.clone();
        for _ in 0..=random.below(4) {
            let at = random.below(bytes.len());
            bytes[at] = random.next() as u8;
        }
        bytes.truncate(template.len() - random.below(3) * random.below(2));
        let Ok(forged) = postcard::from_bytes::<Bulk>(&bytes) else { continue };
        let mut copy = vec![0u8; LEN];
        if let Ok(moved) = forged.on(&pair.to_server).pull_into(&mut copy) {
            assert!(moved <= LEN && all_are(&copy[..moved], INSIDE));
        }
        let _ = forged.on(&pair.to_server).push_from(&vec![INSIDE; LEN]);
    }
    assert!(all_are(&before.reclaim(), 0x11));
    assert!(inside.reclaim() == vec![INSIDE; LEN]);
    assert!(all_are(&after.reclaim(), 0x11));
}

fn argument_that_is_no_bulk_is_a_decode_error(net: &Net) {
    // As an RPC argument: bytes that are no bulk are a decode error, and the server stays usable.
    let pair: Pair = net.pair();
    pair.server.define("length", |_: &calomel::Request, bulk: Bulk| bulk.len()).unwrap();
    let exposed = pair.client.expose(vec![0u8; 5000], BulkMode::ReadOnly).unwrap();
    let length = pair.client.procedure::<Bulk, usize>("length");
    for (bit, forged) in with_one_bit_flipped(&exposed.bulk()) {
        if let Err(error) = length.on(&pair.to_server).call(&forged) {
            assert!(matches!(error, calomel::Error::Decode { .. }), "bit {bit}: {error:?}");
        }
    }
    assert_eq!(length.on(&pair.to_server).call(&exposed.bulk()).unwrap(), 5000);
}

suite![
    pull_with_a_flipped_bit_reads_no_other_memory,
    push_with_a_flipped_bit_writes_no_other_memory,
    forged_mode_grants_no_access,
    bulk_of_random_bytes_grants_no_access,
    argument_that_is_no_bulk_is_a_decode_error,
];
