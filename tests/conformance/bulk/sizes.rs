//! Bulks of every size around every limit, and chunks that do not divide evenly.

use calomel::{Bulk, BulkMode, Request, Segments};

use crate::support::{Net, pattern};

const EAGER: usize = 4096;

fn sizes() -> impl Iterator<Item = usize> {
    let powers = [EAGER, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20];
    let near = powers.into_iter().flat_map(|size| [size - 1, size, size + 1]);
    [0, 1, 2, 3, 7, 63, 64, 65, 1000, 123_457, 999_983].into_iter().chain(near)
}

fn bulks_of_every_size_are_pulled_and_pushed(net: &Net) {
    let pair = net.pair_with(|b| b.eager_limit(EAGER).eager_bulk_limit(EAGER));
    for len in sizes() {
        let data = pattern(len as u64, len);
        let theirs = pair.server.expose(vec![0u8; len], BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        assert_eq!(remote.push_from(&data).unwrap(), len);
        let ours = pair.client.expose(vec![0u8; len], BulkMode::ReadWrite).unwrap();
        assert_eq!(remote.pull_into(&ours).unwrap(), len);
        assert!(ours.reclaim() == data, "{len} bytes pulled");
        assert!(theirs.reclaim() == data, "{len} bytes pushed");
    }
}

fn bulks_of_every_size_are_transferred_by_a_handler(net: &Net) {
    let pair = net.pair_with(|b| b.eager_limit(EAGER).eager_bulk_limit(EAGER));
    pair.server
        .define("copy", |request: &Request, (from, to): (Bulk, Bulk)| {
            let mut bytes = vec![0u8; from.len()];
            from.on(request.endpoint()).pull_into(&mut bytes).unwrap();
            to.on(request.endpoint()).push_from(&bytes).unwrap()
        })
        .unwrap();
    let copy = pair.client.procedure::<(Bulk, Bulk), usize>("copy");
    for len in sizes() {
        let data = pattern(len as u64, len);
        let from = pair.client.expose_read_only(data.clone()).unwrap();
        let to = pair.client.expose(vec![0u8; len], BulkMode::WriteOnly).unwrap();
        assert_eq!(copy.on(&pair.to_server).call(&(from.bulk(), to.bulk())).unwrap(), len);
        assert!(to.reclaim() == data, "{len}");
    }
}

fn sixty_four_mebibytes_are_transferred(net: &Net) {
    const LEN: usize = (64 << 20) + 13;
    let pair = net.pair();
    let data = pattern(1, LEN);
    let theirs = pair.server.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!(remote.push_from(&data).unwrap(), LEN);
    let mut copy = vec![0u8; LEN];
    assert_eq!(remote.pull_into(&mut copy).unwrap(), LEN);
    assert!(copy == data);
    assert!(theirs.reclaim() == data);
}

fn sixty_four_mebibytes_in_a_thousand_segments_are_transferred(net: &Net) {
    let pair = net.pair();
    let lens = || (0..1000).map(|i| (67 << 10) + 37 * i);
    let len: usize = lens().sum();
    assert!(len > 64 << 20);
    let data = pattern(2, len);
    let segments = Segments(lens().map(|len| vec![0u8; len]).collect());
    let theirs = pair.server.expose(segments, BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose((data[..12_345].to_vec(), data[12_345..].to_vec()), BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!(remote.push_from(&ours).unwrap(), len);
    let mut copy = vec![0u8; len];
    assert_eq!(remote.pull_into(&mut copy).unwrap(), len);
    assert!(copy == data);
    assert!(theirs.reclaim().0.concat() == data);
}

fn ten_thousand_tiny_segments_are_transferred(net: &Net) {
    // More than any system call takes at once.
    let pair = net.pair();
    let data = pattern(3, 30_000);
    let segments = Segments(data.chunks(3).map(<[u8]>::to_vec).collect::<Vec<_>>());
    let theirs = pair.server.expose(segments, BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(Segments(vec![vec![0u8; 5]; 6000]), BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!(theirs.bulk().segment_count(), 10_000);
    assert_eq!(remote.pull_into(&ours).unwrap(), 30_000);
    assert!(ours.reclaim().0.concat() == data);
    let mut reversed = data;
    reversed.reverse();
    assert_eq!(remote.push_from(&reversed).unwrap(), 30_000);
    assert!(theirs.reclaim().0.concat() == reversed);
}

fn bytes_are_transferred_one_by_one(net: &Net) {
    let pair = net.pair();
    let data = pattern(4, 300);
    let theirs = pair.server.expose(vec![0u8; 300], BulkMode::ReadWrite).unwrap();
    for (i, byte) in data.chunks(1).enumerate() {
        let remote = theirs.bulk().slice(i, 1).unwrap().on(&pair.to_server);
        assert_eq!(remote.push_from(byte).unwrap(), 1);
    }
    let mut copy = [0u8; 300];
    for (i, byte) in copy.chunks_mut(1).enumerate() {
        let remote = theirs.bulk().on(&pair.to_server).slice(i, 1).unwrap();
        assert_eq!(remote.pull_into(byte).unwrap(), 1);
    }
    assert!(copy[..] == data);
}

suite![
    bulks_of_every_size_are_pulled_and_pushed,
    bulks_of_every_size_are_transferred_by_a_handler,
    sixty_four_mebibytes_are_transferred,
    sixty_four_mebibytes_in_a_thousand_segments_are_transferred,
    ten_thousand_tiny_segments_are_transferred,
    bytes_are_transferred_one_by_one,
];
