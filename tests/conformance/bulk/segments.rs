//! Several buffers as the segments of one bulk, borrowed and owned, and access in elements.

use bytemuck::{Pod, Zeroable};
use calomel::{Bulk, BulkMode, Error, ExposedSlice, Request, Segments};

use crate::assert_error;
use crate::support::{Net, Pair, pattern, travelled};

#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct Particle {
    position: [f64; 3],
    id: u64,
}

// SAFETY: zeros are valid for all of the fields.
#[allow(unsafe_code)]
unsafe impl Zeroable for Particle {}
// SAFETY: any bytes are valid for all of the fields, there is no padding between them, and the layout is fixed.
#[allow(unsafe_code)]
unsafe impl Pod for Particle {}

/// `invert`: inverts each bit of a bulk, and returns its number of segments and bytes. `fetch`: returns a bulk's bytes.
fn define(pair: &Pair) {
    pair.server
        .define("invert", |request: &Request, bulk: Bulk| {
            let mut bytes = vec![0u8; bulk.len()];
            let remote = bulk.on(request.endpoint());
            remote.pull_into(&mut bytes).unwrap();
            bytes.iter_mut().for_each(|byte| *byte = !*byte);
            (bulk.segment_count(), remote.push_from(&bytes).unwrap())
        })
        .unwrap();
    pair.server
        .define("fetch", |request: &Request, bulk: Bulk| {
            let mut bytes = vec![0u8; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut bytes).unwrap();
            bytes
        })
        .unwrap();
}

fn borrowed_slices_of_different_types_are_one_bulk(net: &Net) {
    let pair = net.pair();
    define(&pair);
    let (mut a, mut b, mut c) = (pattern(1, 70_001), vec![1.5f64; 3000], [7u16; 3]);
    let mut one = Particle { position: [1.0, 2.0, 3.0], id: 9 };
    let invert = pair.client.procedure::<Bulk, (usize, usize)>("invert");
    let bytes = 70_000 + 24_000 + 6 + 32;
    let answer = pair.client.scope(|s| {
        let bulk = s.expose((&mut a[..70_000], &mut b, &mut c, &mut one), BulkMode::ReadWrite)?;
        assert_eq!((bulk.len(), bulk.segment_count()), (bytes, 4));
        invert.on(&pair.to_server).call(&bulk)
    });
    assert_eq!(answer.unwrap(), (4, bytes));
    assert!(a[..70_000].iter().zip(pattern(1, 70_000)).all(|(a, old)| *a == !old) && a[70_000] == pattern(1, 70_001)[70_000]);
    assert!(b.iter().all(|b| b.to_bits() == !1.5f64.to_bits()));
    assert_eq!((c, one.id), ([!7; 3], !9));
}

fn borrowed_text_and_numbers_are_one_bulk(net: &Net) {
    let pair = net.pair();
    define(&pair);
    let fetch = pair.client.procedure::<Bulk, Vec<u8>>("fetch");
    let (numbers, name, flags) = (vec![0x0201u16, 0x0403], String::from("name"), [true, false]);
    for repeat in [1, 2000] {
        // Read-only segments may overlap, and stay readable here.
        let text = "ab".repeat(repeat);
        let fetched = pair.client.scope(|s| {
            let bulk = s.expose_read_only((&numbers, &numbers[1..], text.as_str(), &name, &flags, &'!'))?;
            assert_eq!((bulk.segment_count(), numbers[0]), (6, 0x0201));
            fetch.on(&pair.to_server).call(&bulk)
        });
        let expected = [&[1, 2, 3, 4, 3, 4], text.as_bytes(), b"name\x01\0!\0\0\0"].concat();
        assert!(fetched.unwrap() == expected);
    }
}

fn lists_of_borrowed_slices_are_one_bulk(net: &Net) {
    let pair = net.pair();
    define(&pair);
    let invert = pair.client.procedure::<Bulk, (usize, usize)>("invert");
    let mut rows = pattern(2, 100 * 1000);
    let before = rows.clone();
    // Every other row, as a strided transfer has it.
    let answer = pair.client.scope(|s| {
        let odd: Vec<&mut [u8]> = rows.chunks_mut(1000).skip(1).step_by(2).collect();
        let bulk = s.expose(odd, BulkMode::ReadWrite)?;
        invert.on(&pair.to_server).call(&bulk)
    });
    assert_eq!(answer.unwrap(), (50, 50_000));
    for (i, (row, old)) in rows.chunks(1000).zip(before.chunks(1000)).enumerate() {
        assert!(row.iter().zip(old).all(|(new, old)| *new == if i % 2 == 1 { !old } else { *old }), "row {i}");
    }
    // Arrays of slices, arrays of references to owners, and tuples in lists; no segment at all is an empty bulk.
    let (mut a, mut b) = (vec![1u32; 5], vec![2u32; 6]);
    let lens = pair.client.scope(|s| {
        let array = s.expose([&mut a[..2], &mut b[1..]], BulkMode::ReadWrite)?;
        let nested = s.expose_read_only(vec![("x", &[1u8, 2][..]), ("yz", &[3][..])])?;
        let none = s.expose_read_only(Vec::<&[u8]>::new())?;
        assert_eq!(none.segment_count(), 0);
        let fetch = pair.client.procedure::<Bulk, Vec<u8>>("fetch");
        assert_eq!(fetch.on(&pair.to_server).call(&nested)?, b"x\x01\x02yz\x03");
        assert_eq!(fetch.on(&pair.to_server).call(&none)?, b"");
        Ok((array.len(), array.segment_count(), nested.segment_count()))
    });
    assert_eq!(lens.unwrap(), (28, 2, 4));
}

fn single_values_are_exposed_as_before(net: &Net) {
    let engine = net.client();
    let (mut list, mut array, mut value) = (vec![0u16; 3], [0u32; 3], 0u64);
    let (mut boxed, mut memory) = (vec![0u8; 3].into_boxed_slice(), engine.alloc(100_000));
    let lens = engine.scope(|s| {
        let mode = BulkMode::ReadWrite;
        let list = [s.expose(&mut list[..1], mode)?, s.expose(&mut boxed, mode)?, s.expose(&mut memory, mode)?];
        let more = [s.expose(&mut array, mode)?, s.expose(&mut value, mode)?];
        Ok(list.iter().chain(&more).map(|bulk| (bulk.len(), bulk.segment_count())).collect::<Vec<_>>())
    });
    assert_eq!(lens.unwrap(), [(2, 1), (3, 1), (100_000, 1), (12, 1), (8, 1)]);
}

fn up_to_twelve_segments_of_different_types(net: &Net) {
    let pair = net.pair();
    define(&pair);
    let fetch = pair.client.procedure::<Bulk, Vec<u8>>("fetch");
    let owned = (vec![1u8], [2u8], vec![3u16], [4u8], vec![5u8], [6u8], [7u8], [8u8], [9u8], [10u8], [11u8], vec![12u32]);
    let exposed = pair.client.expose(owned, BulkMode::ReadWrite).unwrap();
    let all = [1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0];
    assert_eq!(fetch.on(&pair.to_server).call(&exposed.bulk()).unwrap(), all);
    assert_eq!(exposed.segment_lens(), [1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 4]);
    exposed.segment(11).unwrap().write_elements_at(0, &[77u32]).unwrap();
    assert_eq!(exposed.reclaim().11, [77]);
    let fetched = pair.client.scope(|s| {
        let bulk = s.expose_read_only((&1u8, &2u8, &3u16, &4u8, &5u8, &6u8, &7u8, &8u8, &9u8, &10u8, &11u8, &12u32))?;
        fetch.on(&pair.to_server).call(&bulk)
    });
    assert_eq!(fetched.unwrap(), all);
}

fn segment_of_an_exposure_is_transferred_alone(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose(pattern(3, 90_000), BulkMode::ReadOnly).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    let buffers = Segments(vec![vec![0u8; 10], vec![], vec![0u8; 90_000], vec![0u8; 4]]);
    let ours = pair.client.expose(buffers, BulkMode::ReadWrite).unwrap();
    assert_eq!((ours.segment_count(), ours.segment_lens()), (4, vec![10, 0, 90_000, 4]));
    let large: ExposedSlice = ours.segment(2).unwrap();
    assert_eq!((&remote >> &large).unwrap(), 90_000);
    assert_eq!(ours.segment(1).unwrap().len(), 0);
    assert_eq!((remote >> ours.segment(3).unwrap()).unwrap(), 4);
    let error = ours.segment(4).unwrap_err();
    assert!(matches!(error, Error::NoSuchSegment { index: 4, count: 4 }), "{error:?}");
    assert_eq!(error.to_string(), "there is no segment 4: the memory has 4 segments");
    let Segments(parts) = ours.reclaim();
    assert!(parts[0] == [0; 10] && parts[2] == pattern(3, 90_000) && parts[3] == pattern(3, 4));
    let mut byte = [0u8];
    assert_error!(large.read_at(0, &mut byte), Error::Revoked { .. });
    assert_error!(large.write_elements_at(0, &[1u64]), Error::Revoked { .. });
}

fn elements_are_counted_in_elements(net: &Net) {
    let pair = net.pair();
    let theirs = pair.server.expose((0..1000u32).collect::<Vec<_>>(), BulkMode::ReadWrite).unwrap();
    let remote = travelled(&theirs.bulk()).on(&pair.to_server);
    let ours = pair.client.expose(vec![0u32; 1000], BulkMode::ReadWrite).unwrap();
    // Elements 100..110 there become elements 20..30 here.
    let (from, to) = (remote.slice_of::<u32>(100, 10).unwrap(), ours.slice_of::<u32>(20, 10).unwrap());
    assert_eq!((&from >> &to).unwrap(), 40);
    assert_eq!((to.slice_of::<u32>(1, 2).unwrap() << from.slice_of::<u32>(9, 1).unwrap()).unwrap(), 4);
    let mut read = [0u32; 12];
    ours.read_elements_at(19, &mut read).unwrap();
    assert_eq!(read, [0, 100, 109, 102, 103, 104, 105, 106, 107, 108, 109, 0]);
    to.read_elements_at(8, &mut read[..2]).unwrap();
    assert_eq!(read[..2], [108, 109]);
    // The same bytes as elements of another type: this one has 32 bytes.
    let pair_of = [Particle { position: [0.5; 3], id: 1 }, Particle { position: [1.5; 3], id: 2 }];
    ours.write_elements_at(1, &pair_of).unwrap();
    let mut particle = [pair_of[0]];
    ours.slice(64, 32).unwrap().read_elements_at(0, &mut particle).unwrap();
    assert_eq!(particle, [pair_of[1]]);
    assert_eq!(ours.reclaim()[7..8], [0]);
    assert_eq!(theirs.bulk().slice_of::<u16>(1999, 1).unwrap().len(), 2);
}

fn elements_beyond_the_end_are_out_of_range(net: &Net) {
    let pair = net.pair();
    // 10 bytes: two whole `u32`, and two bytes that belong to none.
    let ours = pair.client.expose(vec![0u8; 10], BulkMode::ReadWrite).unwrap();
    let bulk = ours.bulk();
    let remote = bulk.on(pair.client.lookup(pair.server.address()).unwrap());
    let slice = ours.slice(0, 10).unwrap();
    assert_eq!(bulk.slice_of::<u32>(1, 1).unwrap().len(), 4);
    assert_eq!(bulk.slice_of::<u32>(2, 0).unwrap().len(), 0);
    let huge = usize::MAX / 2;
    for (first, count, bytes) in
        [(0, 3, (0, 12)), (2, 1, (8, 4)), (3, 0, (12, 0)), (huge, 1, (usize::MAX, 4)), (1, huge, (4, usize::MAX))]
    {
        let errors = [
            bulk.slice_of::<u32>(first, count).map(drop),
            remote.slice_of::<u32>(first, count).map(drop),
            ours.slice_of::<u32>(first, count).map(drop),
            slice.slice_of::<u32>(first, count).map(drop),
        ];
        for error in errors {
            let Err(Error::OutOfRange { offset, len, size: 10 }) = error else { panic!("{error:?}") };
            assert_eq!((offset, len), bytes, "{first} {count}");
        }
    }
    assert_error!(ours.read_elements_at(2, &mut [0u32]), Error::OutOfRange { offset: 8, len: 4, size: 10 });
    assert_error!(ours.write_elements_at(huge, &[0u32]), Error::OutOfRange { .. });
    assert_error!(slice.read_elements_at(1, &mut [0u64]), Error::OutOfRange { offset: 8, len: 8, size: 10 });
    assert_error!(slice.write_at(10, &[0]), Error::OutOfRange { offset: 10, len: 1, size: 10 });
    assert_eq!(ours.reclaim(), [0; 10]);
}

suite![
    borrowed_slices_of_different_types_are_one_bulk,
    borrowed_text_and_numbers_are_one_bulk,
    lists_of_borrowed_slices_are_one_bulk,
    single_values_are_exposed_as_before,
    up_to_twelve_segments_of_different_types,
    segment_of_an_exposure_is_transferred_alone,
    elements_are_counted_in_elements,
    elements_beyond_the_end_are_out_of_range,
];
