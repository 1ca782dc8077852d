//! Memory in many pieces, and in large ones.

use calomel::{BulkMode, Segments};

use crate::pair::Pair;
use crate::support::*;

/// A thousand pieces of odd sizes, some of nothing; and as many bytes in three.
fn pieces() -> [Vec<Vec<u8>>; 2] {
    let mut random = Random(0x5e9);
    let many: Vec<Vec<u8>> = (0..1000).map(|n| pattern(n, [0, 1, 3, random.below(9000)][random.below(4)])).collect();
    let len: usize = many.iter().map(Vec::len).sum();
    let (first, second) = (len / 3 + 1, len / 7);
    let few = [first, second, len - first - second].iter().map(|len| vec![0u8; *len]).collect();
    [many, few]
}

fn a_thousand_pieces_against_three() {
    let pair = Pair::new();
    let [many, few] = pieces();
    let (all, nothing) = (many.concat(), few.concat());
    for (theirs, ours) in [(many.clone(), few.clone()), (few, many)] {
        // Out of either kind, into the other; the side which is full of bytes is the source.
        let pull = theirs.concat() == all;
        let theirs = pair.server.expose(Segments(theirs), BulkMode::ReadWrite).unwrap();
        let ours = pair.client.expose(Segments(ours), BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let moved = if pull { remote.pull_into(&ours) } else { remote.push_from(&ours) };
        assert_eq!(moved.unwrap(), all.len());
        let (theirs, ours) = (theirs.reclaim().0, ours.reclaim().0);
        assert!(theirs.concat() == all && ours.concat() == all, "pulled: {pull}");
        // And back, the other way round, with nothing but zeros.
        let zeros = |pieces: &[Vec<u8>]| pieces.iter().map(|piece| vec![0u8; piece.len()]).collect::<Vec<_>>();
        let (source, target) = (zeros(&theirs), ours);
        let source = pair.server.expose(Segments(source), BulkMode::ReadOnly).unwrap();
        let target = pair.client.expose(Segments(target), BulkMode::ReadWrite).unwrap();
        source.bulk().on(&pair.to_server).pull_into(&target).unwrap();
        assert!(target.reclaim().0.concat() == nothing);
    }
}

fn parts_across_pieces() {
    let pair = Pair::new();
    let [many, few] = pieces();
    let all = many.concat();
    let theirs = pair.server.expose(Segments(many), BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(Segments(few), BulkMode::ReadWrite).unwrap();
    let mut random = Random(0xba9);
    let mut model = vec![0u8; all.len()];
    for _ in 0..20 {
        let len = random.below(all.len() / 4) + 1;
        let (from, to) = (random.below(all.len() - len), random.below(all.len() - len));
        let part = theirs.bulk().slice(from, len).unwrap();
        part.on(&pair.to_server).start_pull_into(ours.slice(to, len).unwrap()).wait().0.unwrap();
        model[to..to + len].copy_from_slice(&all[from..from + len]);
    }
    assert!(ours.reclaim().0.concat() == model);
    assert!(theirs.reclaim().0.concat() == all);
}

fn move_both_ways(len: usize) {
    let pair = Pair::new();
    let (full, other) = (pattern(1, len), pattern(2, len));
    let theirs = pair.server.expose(full.clone(), BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(vec![0u8; len], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server).timeout(10 * BOUND);
    assert_eq!(remote.pull_into(&ours).unwrap(), len);
    let mut bytes = ours.reclaim();
    assert!(bytes == full);
    bytes.copy_from_slice(&other);
    let ours = pair.client.expose(bytes, BulkMode::ReadOnly).unwrap();
    assert_eq!(remote.push_from(&ours).unwrap(), len);
    assert!(theirs.reclaim() == other);
}

fn sixty_four_mebibytes() {
    move_both_ways((64 << 20) + 1);
}

on_device!(a_thousand_pieces_against_three, parts_across_pieces, sixty_four_mebibytes);

/// By itself: an emulated device takes a minute, and does nothing else meanwhile.
#[test]
#[ignore = "needs an RDMA device, and 3 GiB of memory: ci/verbs"]
fn a_gibibyte() {
    let _watchdog = Watchdog::start("segments::a_gibibyte");
    over(Carrier::Verbs, || move_both_ways(1 << 30));
}
