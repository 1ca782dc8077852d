//! Pull and push with every API, between every kind of local and remote memory.

use std::time::Duration;

use calomel::{Bulk, BulkMode, Exposed, Request};

use crate::support::{Net, all_are, pattern, travelled};

fn pull_copies_the_peers_bytes_into_local_memory(net: &Net) {
    let pair = net.pair();
    let data = pattern(1, 10_000);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadOnly).unwrap();
    let ours: Exposed<Vec<u8>> = pair.client.expose(vec![0u8; 10_000], BulkMode::WriteOnly).unwrap();
    let bulk = travelled(&theirs.bulk());
    assert_eq!(bulk.on(&pair.to_server).pull_into(&ours).unwrap(), 10_000);
    assert!(ours.reclaim() == data);
    assert!(theirs.reclaim() == data);
}

fn push_copies_local_bytes_to_the_peer(net: &Net) {
    let pair = net.pair();
    let data = pattern(2, 10_000);
    let theirs = pair.server.expose(vec![0u8; 10_000], BulkMode::WriteOnly).unwrap();
    let ours = pair.client.expose(data.clone(), BulkMode::ReadOnly).unwrap();
    let bulk = travelled(&theirs.bulk());
    assert_eq!(bulk.on(&pair.to_server).push_from(&ours).unwrap(), 10_000);
    assert!(theirs.reclaim() == data);
    assert!(ours.reclaim() == data);
}

fn handler_pulls_and_pushes_its_callers_memory(net: &Net) {
    // The usual direction: the caller exposes, and the handler transfers.
    let pair = net.pair();
    pair.server
        .define("reverse", |request: &Request, (source, target): (Bulk, Bulk)| -> Result<usize, String> {
            let local = request.engine().expose(vec![0u8; source.len()], BulkMode::ReadWrite).map_err(|e| e.to_string())?;
            let from = source.on(request.endpoint());
            from.pull_into(&local).map_err(|e| e.to_string())?;
            let mut bytes = local.reclaim();
            bytes.reverse();
            let local = request.engine().expose(bytes, BulkMode::ReadOnly).map_err(|e| e.to_string())?;
            target.on(request.endpoint()).push_from(&local).map_err(|e| e.to_string())
        })
        .unwrap();
    let mut data = pattern(3, 123_457);
    let source = pair.client.expose_read_only(data.clone()).unwrap();
    let target = pair.client.expose(vec![0u8; data.len()], BulkMode::WriteOnly).unwrap();
    let reverse = pair.client.procedure::<(Bulk, Bulk), Result<usize, String>>("reverse");
    let moved = reverse.on(&pair.to_server).call(&(source.bulk(), target.bulk())).unwrap();
    assert_eq!(moved, Ok(data.len()));
    data.reverse();
    assert!(target.reclaim() == data);
}

fn operators_pull_and_push(net: &Net) {
    let pair = net.pair();
    let data = pattern(4, 5000);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(vec![0u8; 5000], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!((&remote >> &ours).unwrap(), 5000);
    ours.write_at(0, b"changed").unwrap();
    assert_eq!((&remote << &ours).unwrap(), 5000);
    assert_eq!((remote >> &ours.slice(1000, 7).unwrap()).unwrap(), 7);
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!((remote.slice(4990, 10).unwrap() << &ours.slice(0, 7).unwrap()).unwrap(), 7);
    let (theirs, ours) = (theirs.reclaim(), ours.reclaim());
    assert_eq!(&theirs[..7], b"changed");
    assert_eq!(&theirs[4990..4997], b"changed");
    assert!(theirs[7..4990] == data[7..4990] && theirs[4997..] == data[4997..]);
    assert_eq!(&ours[1000..1007], b"changed");
}

fn data_flows_along_the_arrow_whichever_side_is_written_first(net: &Net) {
    let pair = net.pair();
    let data = pattern(4, 5000);
    let theirs = pair.server.expose(data.clone(), BulkMode::ReadWrite).unwrap();
    let ours = pair.client.expose(vec![0u8; 5000], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    // Pulls, by reference and by value.
    assert_eq!((&ours << &remote).unwrap(), 5000);
    let mut copy = vec![0; 5000];
    ours.read_at(0, &mut copy).unwrap();
    assert!(copy == data);
    assert_eq!((&ours.slice(0, 10).unwrap() << remote.slice(90, 10).unwrap()).unwrap(), 10);
    assert_eq!((ours.slice(10, 10).unwrap() << remote.slice(4990, 10).unwrap()).unwrap(), 10);
    // Pushes.
    assert_eq!((&ours >> remote.slice(1000, 20).unwrap()).unwrap(), 20);
    assert_eq!((&ours.slice(0, 10).unwrap() >> remote.slice(2000, 10).unwrap()).unwrap(), 10);
    assert_eq!((ours.slice(10, 10).unwrap() >> &remote.slice(3000, 10).unwrap()).unwrap(), 10);
    // Memory that is exposed read-only is a source.
    let name = pair.client.expose_read_only(String::from("Matthieu")).unwrap();
    assert_eq!((&name >> remote.slice(0, 8).unwrap()).unwrap(), 8);
    let (theirs, ours) = (theirs.reclaim(), ours.reclaim());
    assert!(ours[..10] == data[90..100] && ours[10..20] == data[4990..] && ours[20..] == data[20..]);
    assert!(theirs[..8] == *b"Matthieu" && theirs[8..1000] == data[8..1000] && theirs[1000..1020] == ours[..20]);
    assert!(theirs[2000..2010] == ours[..10] && theirs[3000..3010] == ours[10..20]);
}

fn plain_slices_are_pulled_into_and_pushed_from(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u32; 1000], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let numbers: Vec<u32> = (0..1000).collect();
    assert_eq!(remote.push_from(&numbers).unwrap(), 4000);
    let mut copy = vec![0u32; 1000];
    assert_eq!(remote.pull_into(&mut copy).unwrap(), 4000);
    assert_eq!(copy, numbers);
    assert_eq!(remote.push_from(&numbers[500..]).unwrap(), 2000);
    let mut array = [0u32; 10];
    assert_eq!(remote.pull_into(&mut array[2..6]).unwrap(), 16);
    assert_eq!(array, [0, 0, 500, 501, 502, 503, 0, 0, 0, 0]);
    // Elements of another size: only the bytes count.
    let mut wide = [0u64; 3];
    assert_eq!(remote.pull_into(&mut wide[..]).unwrap(), 24);
    assert_eq!(bytemuck::cast_slice::<u64, u32>(&wide), [500, 501, 502, 503, 504, 505]);
    assert_eq!(remote.push_from(b"byte by byte".as_slice()).unwrap(), 12);
    assert_eq!(bytemuck::cast_slice::<u32, u8>(&theirs.reclaim())[..12], *b"byte by byte");
}

fn transfer_of_unequal_lengths_copies_the_smaller(net: &Net) {
    let pair = net.pair();
    let data = pattern(5, 1000);
    for (there, here) in [(1000, 1000), (1000, 1), (1, 1000), (999, 1000), (0, 10), (10, 0), (0, 0)] {
        let theirs = pair.server.expose(data[..there].to_vec(), BulkMode::ReadWrite).unwrap();
        let ours = pair.client.expose(vec![7u8; here], BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(&pair.to_server);
        let less = there.min(here);
        assert_eq!(remote.len(), there);
        assert_eq!(remote.pull_into(&ours).unwrap(), less, "{there} to {here}");
        let mut plain = vec![7u8; here];
        assert_eq!(remote.pull_into(&mut plain).unwrap(), less);
        assert_eq!(remote.push_from(&vec![9u8; here]).unwrap(), less);
        for copy in [ours.reclaim(), plain] {
            assert!(copy[..less] == data[..less] && all_are(&copy[less..], 7));
        }
        let theirs = theirs.reclaim();
        assert!(all_are(&theirs[..less], 9) && theirs[less..] == data[less..there]);
    }
}

fn bulk_knows_length_mode_and_segments(net: &Net) {
    let pair = net.pair();
    for mode in [BulkMode::ReadOnly, BulkMode::WriteOnly, BulkMode::ReadWrite] {
        let exposed = pair.server.expose((vec![1u16; 5], [0u32; 3], vec![0u8; 0]), mode).unwrap();
        let bulk = exposed.bulk();
        for bulk in [travelled(&bulk), bulk.clone(), bulk] {
            assert_eq!(bulk.len(), 22);
            assert_eq!(bulk.mode(), mode);
            assert!(!bulk.is_empty());
            assert_eq!(bulk.segment_count(), 3);
        }
        assert_eq!((exposed.len(), exposed.mode(), exposed.is_empty()), (22, mode, false));
    }
    let empty = pair.server.expose(Vec::<u64>::new(), BulkMode::ReadWrite).unwrap();
    assert!(empty.is_empty() && empty.bulk().is_empty() && empty.bulk().is_empty());
    let text = pair.server.expose_read_only(String::from("abc")).unwrap();
    assert_eq!((text.mode(), text.bulk().mode(), text.len()), (BulkMode::ReadOnly, BulkMode::ReadOnly, 3));
}

fn owner_reads_and_writes_exposed_memory(net: &Net) {
    let pair = net.pair();
    for mode in [BulkMode::ReadOnly, BulkMode::WriteOnly, BulkMode::ReadWrite] {
        let local = pair.server.expose((vec![0u8; 3], vec![0u8; 4]), mode).unwrap();
        local.write_at(1, &[1, 2, 3, 4, 5]).unwrap();
        let mut copy = [9u8; 7];
        local.read_at(0, &mut copy).unwrap();
        assert_eq!(copy, [0, 1, 2, 3, 4, 5, 0]);
        local.read_at(7, &mut []).unwrap();
        local.write_at(7, &[]).unwrap();
        assert_eq!(local.reclaim(), (vec![0, 1, 2], vec![3, 4, 5, 0]));
    }
    let text = pair.server.expose_read_only(String::from("Matthieu")).unwrap();
    let mut copy = [0u8; 3];
    text.read_at(2, &mut copy).unwrap();
    assert_eq!(&copy, b"tth");
    assert_eq!(text.view(), "Matthieu");
}

fn peer_pulls_what_the_owner_wrote_last(net: &Net) {
    let pair = net.pair();
    let local = pair.server.expose(vec![0u8; 64], BulkMode::ReadWrite).unwrap();
    let remote = local.bulk().on(&pair.to_server);
    let mut copy = [0u8; 64];
    for round in 0..100u8 {
        local.write_at(round as usize % 60, &[round; 4]).unwrap();
        remote.pull_into(&mut copy[..]).unwrap();
        assert_eq!(copy[round as usize % 60], round);
        remote.push_from(&[round.wrapping_add(100)][..]).unwrap();
        let mut first = [0];
        local.read_at(0, &mut first).unwrap();
        assert_eq!(first[0], round.wrapping_add(100));
    }
}

fn engine_transfers_with_its_own_bulks(net: &Net) {
    let server = net.server();
    let data = pattern(6, 70_000);
    let source = server.expose_read_only(data.clone()).unwrap();
    let target = server.expose(vec![0u8; 70_000], BulkMode::ReadWrite).unwrap();
    // Through its own address, and directly.
    let myself = server.lookup(server.address()).unwrap();
    assert_eq!(source.bulk().on(&myself).pull_into(&target).unwrap(), 70_000);
    let mut copy = vec![0u8; 70_000];
    assert_eq!(target.bulk().origin(&server).unwrap().pull_into(&mut copy).unwrap(), 70_000);
    assert!(copy == data);
    // Onto itself: as if through a copy.
    let first = target.bulk().slice(0, 60_000).unwrap().on(&myself);
    assert_eq!(first.push_from(target.slice(10_000, 60_000).unwrap()).unwrap(), 60_000);
    let target = target.reclaim();
    assert!(target[..60_000] == data[10_000..] && target[60_000..] == data[60_000..]);
}

fn transfer_within_its_timeout_succeeds(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(pattern(1, 50_000), BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server).timeout(Duration::from_secs(30));
    let mut copy = vec![0u8; 50_000];
    assert_eq!(remote.pull_into(&mut copy).unwrap(), 50_000);
    assert_eq!(remote.slice(1, 5).unwrap().push_from(&copy[..5]).unwrap(), 5);
    let remote = theirs.bulk().on(&pair.to_server).timeout(Duration::MAX);
    assert_eq!(remote.pull_into(&mut copy).unwrap(), 50_000);
}

fn transfer_without_a_connection_connects(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(pattern(8, 1000), BulkMode::ReadOnly).unwrap();
    assert!(!pair.to_server.is_connected());
    let mut copy = vec![0u8; 1000];
    theirs.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
    assert!(copy == pattern(8, 1000));
}

fn one_buffer_is_pulled_by_many_peers_at_once(net: &Net) {
    let server = net.server();
    let data = pattern(9, 300_000);
    let shared = server.expose_read_only(data.clone()).unwrap();
    std::thread::scope(|s| {
        for _ in 0..8 {
            let (bulk, data, address, client) = (shared.bulk(), &data, server.address(), net.client());
            s.spawn(move || {
                let endpoint = client.lookup(address).unwrap();
                for _ in 0..10 {
                    let mut copy = vec![0u8; data.len()];
                    bulk.on(&endpoint).pull_into(&mut copy).unwrap();
                    assert!(copy == *data);
                }
            });
        }
    });
    assert!(shared.view() == data);
}

suite![
    pull_copies_the_peers_bytes_into_local_memory,
    push_copies_local_bytes_to_the_peer,
    handler_pulls_and_pushes_its_callers_memory,
    operators_pull_and_push,
    data_flows_along_the_arrow_whichever_side_is_written_first,
    plain_slices_are_pulled_into_and_pushed_from,
    transfer_of_unequal_lengths_copies_the_smaller,
    bulk_knows_length_mode_and_segments,
    owner_reads_and_writes_exposed_memory,
    peer_pulls_what_the_owner_wrote_last,
    engine_transfers_with_its_own_bulks,
    transfer_within_its_timeout_succeeds,
    transfer_without_a_connection_connects,
    one_buffer_is_pulled_by_many_peers_at_once,
];
