//! Buffers of other crates, each of which is a feature.

// The constructors of maps of files are unsafe.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

use calomel::{BulkMode, Grant, Request, Segments};

use super::buffers::{pulled, push};
use crate::support::{Net, all_are, pattern};

fn bytes_are_exposed(net: &Net) {
    let pair = net.pair();
    for len in [10, 50_000] {
        let mut whole = bytes::BytesMut::zeroed(2 * len);
        let second = whole.split_off(len);
        let exposed = pair.server.expose(second, BulkMode::ReadWrite).unwrap();
        push(&pair, exposed.bulk(), &pattern(1, len));
        assert_eq!(pulled(&pair, exposed.bulk()), pattern(1, len));
        whole.fill(3);
        let second = exposed.reclaim();
        assert!(second == pattern(1, len) && all_are(&whole, 3));
        let shared = second.freeze();
        let exposed = pair.server.expose_read_only(shared.slice(1..)).unwrap();
        assert_eq!(pulled(&pair, exposed.bulk()), pattern(1, len)[1..]);
        assert_eq!(exposed.view(), &shared[1..]);
        // The way that the compiler's message names for types of other crates.
        let owner = bytes::Bytes::from_owner(std::collections::VecDeque::from(pattern(2, len)).make_contiguous().to_vec());
        assert_eq!(pulled(&pair, pair.server.expose_read_only(owner).unwrap().bulk()), pattern(2, len));
    }
}

fn memory_maps_are_exposed(net: &Net) {
    let pair = net.pair();
    static MAPS: AtomicUsize = AtomicUsize::new(0);
    let name = format!("calomel-map-{}-{}", std::process::id(), MAPS.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, pattern(1, 100_000)).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    // SAFETY: the file has no name any more, and only this test writes it, through one map at a time.
    let map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    let exposed = pair.server.expose(map, BulkMode::ReadWrite).unwrap();
    assert!(pulled(&pair, exposed.bulk()) == pattern(1, 100_000));
    push(&pair, exposed.bulk(), &pattern(2, 50_000));
    let map = exposed.reclaim();
    map.flush().unwrap();
    drop(map);
    // SAFETY: as above.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let exposed = pair.server.expose_read_only(map).unwrap();
    let expected = [&pattern(2, 50_000)[..], &pattern(1, 100_000)[50_000..]].concat();
    assert!(pulled(&pair, exposed.bulk()) == expected && exposed.view() == expected);
    drop(exposed);
    // For one peer.
    let (send, met) = std::sync::mpsc::channel();
    let meet = move |request: &Request, (): ()| send.send(request.endpoint().clone()).is_ok();
    pair.server.define("meet", meet).unwrap();
    assert!(pair.client.procedure::<(), bool>("meet").on(&pair.to_server).call(&()).unwrap());
    // SAFETY: as above.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let exposed = pair.server.expose_read_only_with(map, &Grant::new().only(met.recv().unwrap())).unwrap();
    assert!(pulled(&pair, exposed.bulk()) == expected);
    drop(exposed);
    // From a peer, into a map and out of one.
    let theirs = pair.server.expose(pattern(3, 100_000), BulkMode::ReadWrite).unwrap();
    // SAFETY: as above.
    let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    assert_eq!(theirs.bulk().on(&pair.to_server).pull_into(&mut map[..]).unwrap(), 100_000);
    assert!(map[..] == pattern(3, 100_000));
    drop(map);
    theirs.write_at(0, &[0; 100_000]).unwrap();
    // SAFETY: as above.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    assert_eq!(theirs.bulk().on(&pair.to_server).push_from(&map[..]).unwrap(), 100_000);
    assert!(theirs.reclaim() == pattern(3, 100_000));
    let anonymous = pair.server.expose(memmap2::MmapMut::map_anon(4096).unwrap(), BulkMode::WriteOnly).unwrap();
    push(&pair, anonymous.bulk(), &[7; 4096]);
    assert_eq!(anonymous.reclaim()[..], [7; 4096]);
}

fn arrays_are_exposed(net: &Net) {
    use ndarray::{Array, Array2, ShapeBuilder, s};
    let pair = net.pair();
    let array = Array2::from_shape_fn((3, 4), |(row, column)| (10 * row + column) as u16);
    let rows = [0u16, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23];
    let exposed = pair.server.expose(array.clone(), BulkMode::ReadWrite).unwrap();
    assert_eq!(pulled(&pair, exposed.bulk()), bytemuck::cast_slice::<u16, u8>(&rows));
    let row = exposed.bulk().slice_of::<u16>(4, 4).unwrap();
    push(&pair, row, &[1; 8]);
    assert_eq!(exposed.reclaim().row(1).to_vec(), [0x101; 4]);
    // Column by column: the bytes are those of memory.
    let mut columns = Array2::<u16>::zeros((3, 4).f());
    columns.assign(&array);
    let shared = columns.clone().into_shared();
    let exposed = pair.server.expose_read_only(shared.clone()).unwrap();
    assert_eq!(pulled(&pair, exposed.bulk())[..8], [0, 0, 10, 0, 20, 0, 1, 0]);
    assert_eq!(exposed.view()[(2, 3)], 23);
    let mut other = shared;
    other[(0, 0)] = 9;
    assert_eq!(pulled(&pair, exposed.bulk())[..2], [0, 0]);
    // With gaps, alone and as a part.
    let gaps = || array.clone().slice_move(s![.., ..;2]);
    let errors = [
        pair.server.expose(gaps(), BulkMode::ReadWrite).map(drop),
        pair.server.expose((vec![0u8], gaps()), BulkMode::ReadWrite).map(drop),
        pair.server.expose_read_only(Segments(vec![array.clone().into_shared(), gaps().into_shared()])).map(drop),
    ];
    for error in errors {
        let message = error.unwrap_err().to_string();
        let what = "exposing the buffer is not supported: an array of shape [3, 2] with strides [4, 2] is not contiguous";
        assert!(message.starts_with(what), "{message}");
    }
    let dense = gaps().as_standard_layout().into_owned();
    let exposed = pair.server.expose(dense, BulkMode::ReadOnly).unwrap();
    assert_eq!(pulled(&pair, exposed.bulk()), bytemuck::cast_slice::<u16, u8>(&[0u16, 2, 10, 12, 20, 22]));
    let empty = pair.server.expose(Array::<u8, _>::zeros((0, 5)), BulkMode::ReadWrite).unwrap();
    assert!(empty.is_empty());
}

suite![bytes_are_exposed, memory_maps_are_exposed, arrays_are_exposed];
