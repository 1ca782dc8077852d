//! Slices of exposed memory, and slices of slices.

use calomel::{Bulk, BulkMode, Error, ExposedSlice};

use crate::assert_error;
use crate::support::{Net, all_are, pattern, travelled};

fn slice_transfers_only_its_range(net: &Net) {
    let pair = net.pair();
    let data = pattern(1, 1000);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let part: Bulk = theirs.bulk().slice(3, 45).unwrap();
    assert_eq!((part.len(), part.mode()), (45, BulkMode::ReadWrite));
    let mut copy = vec![0u8; 100];
    assert_eq!(part.on(&pair.to_server).pull_into(&mut copy).unwrap(), 45);
    assert!(copy[..45] == data[3..48] && all_are(&copy[45..], 0));
    assert_eq!(part.on(&pair.to_server).push_from(&vec![1u8; 1000]).unwrap(), 45);
    let after = theirs.reclaim();
    assert!(after[..3] == data[..3] && after[3..48] == [1; 45] && after[48..] == data[48..]);
}

fn offsets_of_nested_slices_add_up(net: &Net) {
    let pair = net.pair();
    let data = pattern(2, 1000);
    let theirs = pair.server.expose((data[..300].to_vec(), data[300..].to_vec()), BulkMode::ReadOnly).unwrap();
    let part = theirs.bulk().slice(100, 500).unwrap().slice(50, 400).unwrap();
    let part = travelled(&part).slice(100, 200).unwrap();
    let mut copy = vec![0u8; 200];
    assert_eq!(part.on(&pair.to_server).pull_into(&mut copy).unwrap(), 200);
    assert!(copy == data[250..450]);
    // The same by slicing the remote bulk.
    let remote = theirs.bulk().on(&pair.to_server).slice(200, 300).unwrap().slice(50, 200).unwrap();
    assert_eq!(remote.len(), 200);
    copy.fill(0);
    assert_eq!(remote.pull_into(&mut copy).unwrap(), 200);
    assert!(copy == data[250..450]);
    // And empty slices at either end.
    for (offset, len) in [(0, 0), (200, 0), (199, 1), (0, 1)] {
        let tiny = part.slice(offset, len).unwrap();
        assert_eq!((tiny.len(), tiny.is_empty()), (len, len == 0));
        let mut byte = vec![0u8; len];
        assert_eq!(tiny.on(&pair.to_server).pull_into(&mut byte).unwrap(), len);
        assert!(byte == data[250 + offset..250 + offset + len]);
    }
}

fn slice_beyond_the_end_is_out_of_range(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u8; 100], BulkMode::ReadWrite).unwrap();
    let (bulk, remote) = (theirs.bulk(), theirs.bulk().on(&pair.to_server));
    let cases = [
        (0, 101),
        (100, 1),
        (101, 0),
        (99, 2),
        (1, usize::MAX),
        (usize::MAX, 1),
        (usize::MAX, usize::MAX),
        (usize::MAX - 50, 100),
    ];
    for (offset, len) in cases {
        for result in
            [bulk.slice(offset, len).map(|_| ()), theirs.slice(offset, len).map(|_| ()), remote.slice(offset, len).map(|_| ())]
        {
            let error = result.unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&len.to_string()) && text.contains("100"), "{text}");
            assert_error!(Err::<(), _>(error), Error::OutOfRange { offset: o, len: l, size: 100, .. } if (o, l) == (offset, len));
        }
    }
    let inner = bulk.slice(20, 50).unwrap();
    assert_error!(inner.slice(0, 51), Error::OutOfRange { size: 50, .. });
    assert_error!(inner.slice(51, 0), Error::OutOfRange { .. });
    let inner = theirs.slice(20, 50).unwrap();
    assert_eq!(inner.len(), 50);
    assert_error!(theirs.read_at(99, &mut [0; 2]), Error::OutOfRange { offset: 99, len: 2, size: 100, .. });
    assert_error!(theirs.write_at(101, &[]), Error::OutOfRange { .. });
    assert_error!(theirs.write_at(usize::MAX, &[1, 2]), Error::OutOfRange { .. });
}

fn slice_of_local_memory_is_pulled_into_and_pushed_from(net: &Net) {
    let pair = net.pair();
    let data = pattern(3, 1000);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose((vec![0u8; 100], vec![0u8; 100]), BulkMode::ReadWrite).unwrap();
    let part: ExposedSlice = ours.slice(13, 145).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!(remote.pull_into(&part).unwrap(), 145);
    let (result, part) = remote.slice(500, 500).unwrap().start_push_from(part).wait();
    assert_eq!(result.unwrap(), 145);
    drop(part);
    let (a, b) = ours.reclaim();
    let flat = [a, b].concat();
    assert!(flat[..13] == [0; 13] && flat[13..158] == data[..145] && flat[158..] == [0; 42]);
    assert!(theirs.reclaim()[500..645] == data[..145]);
}

fn slice_of_read_only_memory_is_pushed_from(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u8; 5], BulkMode::WriteOnly).unwrap();
    let text = pair.client.expose_read_only(String::from("hello world")).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!(remote.push_from(text.slice(6, 5).unwrap()).unwrap(), 5);
    assert_eq!(theirs.reclaim(), b"world");
    assert_eq!(text.view(), "hello world");
}

fn slice_of_reclaimed_memory_fails_with_revoked(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![1u8; 10_000], BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(vec![0u8; 100], BulkMode::ReadWrite).unwrap();
    let part = ours.slice(10, 50).unwrap();
    assert_eq!(ours.reclaim(), [0; 100]);
    let remote = theirs.bulk().on(&pair.to_server);
    assert_error!(remote.pull_into(&part), Error::Revoked { .. });
    assert_error!(remote.push_from(&part), Error::Revoked { .. });
    let (result, _part) = remote.start_pull_into(part).wait();
    assert_error!(result, Error::Revoked { .. });
    assert!(theirs.reclaim() == [1; 10_000]);
}

fn disjoint_slices_are_transferred_concurrently(net: &Net) {
    const PARTS: usize = 16;
    let pair = net.pair();
    let data = pattern(4, PARTS * 100_000);
    let theirs = pair.server.expose_read_only(data.clone()).unwrap();
    let ours = pair.client.expose(vec![0u8; data.len()], BulkMode::WriteOnly).unwrap();
    // Part i is pulled from the opposite end.
    let transfers: Vec<_> = (0..PARTS)
        .map(|i| {
            let from = theirs.bulk().slice((PARTS - 1 - i) * 100_000, 100_000).unwrap();
            from.on(&pair.to_server).start_pull_into(ours.slice(i * 100_000, 100_000).unwrap())
        })
        .collect();
    for transfer in transfers {
        assert_eq!(transfer.wait().0.unwrap(), 100_000);
    }
    let ours = ours.reclaim();
    for i in 0..PARTS {
        let j = PARTS - 1 - i;
        assert!(ours[i * 100_000..(i + 1) * 100_000] == data[j * 100_000..(j + 1) * 100_000]);
    }
}

suite![
    slice_transfers_only_its_range,
    offsets_of_nested_slices_add_up,
    slice_beyond_the_end_is_out_of_range,
    slice_of_local_memory_is_pulled_into_and_pushed_from,
    slice_of_read_only_memory_is_pushed_from,
    slice_of_reclaimed_memory_fails_with_revoked,
    disjoint_slices_are_transferred_concurrently,
];
