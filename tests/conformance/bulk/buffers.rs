//! Every buffer type can be exposed and transferred, and is returned by `reclaim`.

// `bytemuck` derives these if its feature is enabled; without it they are implemented by hand.
#![allow(unsafe_code)]

use std::sync::Arc;

use bytemuck::{NoUninit, Pod, Zeroable};
use calomel::{BufferPool, Bulk, BulkMode, EngineBuffer, Exposed, PooledBuffer, Segments};

use crate::support::{Net, Pair, all_are, pattern};

#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct Particle {
    position: [f64; 3],
    charge: i32,
    id: u32,
}

// SAFETY: numbers, for which zero is a valid value.
unsafe impl Zeroable for Particle {}
// SAFETY: numbers in C layout without padding: three of 8 bytes, two of 4.
unsafe impl Pod for Particle {}

/// Not all bit patterns are valid, so peers may only read it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(u8)]
enum Colour {
    Red = 1,
    Green = 2,
}

// SAFETY: one byte, always initialized.
unsafe impl NoUninit for Colour {}

/// Pulls the whole bulk from the server.
pub fn pulled(pair: &Pair, bulk: Bulk) -> Vec<u8> {
    let mut bytes = vec![0u8; bulk.len()];
    assert_eq!(bulk.on(&pair.to_server).pull_into(&mut bytes).unwrap(), bytes.len());
    bytes
}

/// Pushes `bytes` to the server.
pub fn push(pair: &Pair, bulk: Bulk, bytes: &[u8]) {
    assert_eq!(bulk.on(&pair.to_server).push_from(bytes).unwrap(), bytes.len());
}

fn vectors_boxes_and_arrays_are_exposed(net: &Net) {
    let pair = net.pair();
    let bytes = pattern(1, 24);

    let vector: Exposed<Vec<u64>> = pair.server.expose(vec![0u64; 3], BulkMode::ReadWrite).unwrap();
    push(&pair, vector.bulk(), &bytes);
    assert_eq!(pulled(&pair, vector.bulk()), bytes);
    assert_eq!(bytemuck::cast_slice::<u64, u8>(&vector.reclaim()), bytes);

    let boxed: Exposed<Box<[i16]>> = pair.server.expose(vec![0i16; 12].into(), BulkMode::ReadWrite).unwrap();
    push(&pair, boxed.bulk(), &bytes);
    assert_eq!(pulled(&pair, boxed.bulk()), bytes);
    assert_eq!(bytemuck::cast_slice::<i16, u8>(&boxed.reclaim()), bytes);

    let array: Exposed<[f32; 6]> = pair.server.expose([0f32; 6], BulkMode::ReadWrite).unwrap();
    push(&pair, array.bulk(), &bytes);
    assert_eq!(pulled(&pair, array.bulk()), bytes);
    assert_eq!(bytemuck::bytes_of(&array.reclaim()), bytes);
}

fn moved_exposure_of_an_array_stays_valid(net: &Net) {
    let pair = net.pair();
    let exposed = pair.server.expose([1u8; 4096], BulkMode::ReadWrite).unwrap();
    let bulk = exposed.bulk();
    // Into a box, into a vector, through a thread.
    let moved = std::thread::spawn(move || vec![Box::new(exposed)]).join().unwrap();
    push(&pair, bulk.clone(), &[2u8; 100]);
    let exposed = *moved.into_iter().next().unwrap();
    assert_eq!(pulled(&pair, bulk)[..101], [[2u8; 100].as_slice(), &[1]].concat());
    assert_eq!(exposed.reclaim()[..101], [[2u8; 100].as_slice(), &[1]].concat());
}

fn structs_of_plain_data_are_exposed(net: &Net) {
    let pair = net.pair();
    let particles: Vec<Particle> = (0..100).map(|i| Particle { position: [f64::from(i); 3], charge: -i, id: i as u32 }).collect();
    let theirs = pair.server.expose(vec![Particle::zeroed(); 100], BulkMode::ReadWrite).unwrap();
    let remote = theirs.bulk().on(&pair.to_server);
    assert_eq!(remote.push_from(&particles).unwrap(), 3200);
    let mut copy = vec![Particle::zeroed(); 100];
    assert_eq!(remote.pull_into(&mut copy).unwrap(), 3200);
    assert_eq!(copy, particles);
    assert_eq!(theirs.reclaim(), particles);
}

fn single_values_are_exposed(net: &Net) {
    let pair = net.pair();
    let particle = Particle { position: [1.0, 2.0, 3.0], charge: -4, id: 5 };
    let exposed: Exposed<Box<Particle>> = pair.server.expose(Box::new(Particle::zeroed()), BulkMode::ReadWrite).unwrap();
    push(&pair, exposed.bulk(), bytemuck::bytes_of(&particle));
    assert_eq!(pulled(&pair, exposed.bulk()), bytemuck::bytes_of(&particle));
    assert_eq!(*exposed.reclaim(), particle);
    let colour = pair.server.expose_read_only(Box::new(Colour::Green)).unwrap();
    assert_eq!(pulled(&pair, colour.bulk()), [2]);
    assert_eq!(*colour.view(), Colour::Green);
}

fn struct_of_arrays_is_exposed_as_the_tuple_of_its_fields(net: &Net) {
    struct Gas {
        mass: Vec<f32>,
        velocity: Vec<[f64; 3]>,
    }
    let pair = net.pair();
    let Gas { mass, velocity } = Gas { mass: vec![1.0; 1000], velocity: vec![[0.0; 3]; 1000] };
    let exposed = pair.server.expose((mass, velocity), BulkMode::ReadWrite).unwrap();
    let velocities = exposed.bulk().slice(4000, 24_000).unwrap();
    assert_eq!(exposed.segment_lens(), [4000, 24_000]);
    let pushed = velocities.slice_of::<[f64; 3]>(999, 1).unwrap().on(&pair.to_server).push_from(&[1.0, 2.0, 3.0]);
    assert_eq!(pushed.unwrap(), 24);
    let (mass, velocity) = exposed.reclaim();
    let gas = Gas { mass, velocity };
    assert!(gas.mass.len() == 1000 && gas.velocity[998..] == [[0.0; 3], [1.0, 2.0, 3.0]]);
}

fn buffers_of_readable_types_are_exposed_read_only(net: &Net) {
    let pair = net.pair();
    let colours = pair.server.expose_read_only(vec![Colour::Red, Colour::Green]).unwrap();
    assert_eq!(pulled(&pair, colours.bulk()), [1, 2]);
    assert_eq!(colours.view(), [Colour::Red, Colour::Green]);
    let flags = pair.server.expose_read_only([true, false, true]).unwrap();
    assert_eq!(pulled(&pair, flags.bulk()), [1, 0, 1]);
    assert_eq!(flags.reclaim(), [true, false, true]);
    let letters = pair.server.expose_read_only(vec!['a', 'ß'].into_boxed_slice()).unwrap();
    assert_eq!(letters.bulk().len(), 8);
    assert_eq!(*letters.view(), ['a', 'ß']);
    // Any of these can also be the plain slice of a push.
    let target = pair.server.expose(vec![0u8; 2], BulkMode::WriteOnly).unwrap();
    target.bulk().on(&pair.to_server).push_from(&[true, true][..]).unwrap();
    assert_eq!(target.reclaim(), [1, 1]);
}

fn exposed_texts_are_viewed(net: &Net) {
    let pair = net.pair();
    let name: Exposed<String> = pair.server.expose_read_only(String::from("Matthieu")).unwrap();
    assert_eq!(name.view(), "Matthieu");
    assert_eq!(pulled(&pair, name.bulk()), b"Matthieu");
    assert_eq!(name.reclaim(), "Matthieu");
    let long = pair.server.expose_read_only("ß".repeat(50_000)).unwrap();
    assert_eq!(pulled(&pair, long.bulk()), long.view().as_bytes());
    let empty = pair.server.expose_read_only(String::new()).unwrap();
    assert_eq!(pulled(&pair, empty.bulk()), b"");
    for text in ["short", &"long".repeat(2000)] {
        let (boxed, shared): (Box<str>, Arc<str>) = (text.into(), text.into());
        let (boxed, exposed) =
            (pair.server.expose_read_only(boxed).unwrap(), pair.server.expose_read_only(shared.clone()).unwrap());
        assert!(boxed.view() == text && pulled(&pair, boxed.bulk()) == text.as_bytes());
        assert!(exposed.view() == text && pulled(&pair, exposed.bulk()) == text.as_bytes());
        assert!(Arc::ptr_eq(&exposed.reclaim(), &shared));
    }
    let fixed = pair.server.expose_read_only("static").unwrap();
    assert_eq!(fixed.view(), "static");
    assert_eq!(pulled(&pair, fixed.bulk()), b"static");
}

fn shared_and_static_slices_are_exposed(net: &Net) {
    static PRIMES: [u32; 4] = [2, 3, 5, 7];
    let pair = net.pair();
    let shared: Arc<[u16]> = (0..10_000).collect();
    let exposed: Exposed<Arc<[u16]>> = pair.server.expose_read_only(shared.clone()).unwrap();
    assert_eq!(pulled(&pair, exposed.bulk()), bytemuck::cast_slice::<u16, u8>(&shared));
    assert_eq!(exposed.view(), &*shared);
    assert!(Arc::ptr_eq(&exposed.reclaim(), &shared));
    let mut list = Arc::new(vec![1u64; 1000]);
    let exposed: Exposed<Arc<Vec<u64>>> = pair.server.expose_read_only(list.clone()).unwrap();
    Arc::make_mut(&mut list)[0] = 2;
    assert!(pulled(&pair, exposed.bulk()) == bytemuck::cast_slice::<u64, u8>(&[1; 1000]) && exposed.view() == [1; 1000]);
    let primes: Exposed<&'static [u32]> = pair.server.expose_read_only(&PRIMES[..]).unwrap();
    assert_eq!(pulled(&pair, primes.bulk()), bytemuck::cast_slice::<u32, u8>(&PRIMES));
    assert_eq!(primes.view(), PRIMES);
    assert_eq!(primes.reclaim(), PRIMES);
}

fn engine_memory_is_exposed(net: &Net) {
    let pair = net.pair();
    let mut buffer: EngineBuffer = pair.server.alloc(100_000);
    assert!(buffer.len() == 100_000 && all_are(&buffer, 0));
    buffer[5] = 1;
    let exposed = pair.server.expose(buffer, BulkMode::ReadWrite).unwrap();
    assert_eq!(pulled(&pair, exposed.bulk())[4..7], [0, 1, 0]);
    push(&pair, exposed.bulk(), &pattern(1, 100_000));
    let buffer = exposed.reclaim();
    assert!(*buffer == *pattern(1, 100_000));
    assert!(pair.server.alloc(0).is_empty());
    let read_only = pair.server.expose_read_only(buffer).unwrap();
    assert!(read_only.view() == pattern(1, 100_000));
}

/// Transfers of more than the processors' caches hold may be copied another way than short ones.
fn long_transfers_move_each_byte(net: &Net) {
    const LEN: usize = (17 << 20) + 5;
    let pair = net.pair();
    let filled = |first: usize| {
        let mut bytes = vec![0u8; LEN];
        bytes.chunks_mut(4099).enumerate().for_each(|(number, chunk)| chunk.fill((first + number) as u8));
        bytes
    };
    let mut buffer = pair.server.alloc(LEN);
    buffer.copy_from_slice(&filled(1));
    let exposed = pair.server.expose(buffer, BulkMode::ReadWrite).unwrap();
    assert!(pulled(&pair, exposed.bulk()) == filled(1));
    // At other places of a page, and of a cache line.
    let mut bytes = vec![0u8; LEN];
    let part = exposed.bulk().slice(3, LEN - 10).unwrap();
    assert_eq!(part.on(&pair.to_server).pull_into(&mut bytes[5..]).unwrap(), LEN - 10);
    assert!(bytes[5..LEN - 5] == filled(1)[3..LEN - 7] && bytes[..5] == [0; 5] && bytes[LEN - 5..] == [0; 5]);
    push(&pair, exposed.bulk(), &filled(2));
    assert!(*exposed.reclaim() == *filled(2));
}

fn pooled_buffers_return_to_their_pool(net: &Net) {
    let pair = net.pair();
    let pool: BufferPool = pair.server.buffer_pool(4096, 2);
    assert_eq!(pool.available(), 2);
    let mut first: PooledBuffer = pool.take().unwrap();
    let second = pool.take().unwrap();
    assert!(pool.take().is_none());
    assert_eq!((first.len(), pool.available()), (4096, 0));
    first[0] = 42;
    let exposed = pair.server.expose(first, BulkMode::ReadWrite).unwrap();
    assert_eq!(pulled(&pair, exposed.bulk())[0], 42);
    drop(second);
    assert_eq!(pool.available(), 1);
    drop(exposed);
    assert_eq!(pool.available(), 2);
    let exposed = pair.server.expose(pool.take().unwrap(), BulkMode::WriteOnly).unwrap();
    push(&pair, exposed.bulk(), &[7; 4096]);
    let buffer = exposed.reclaim();
    assert_eq!(*buffer, [7; 4096]);
    drop(pool);
    drop(buffer);
}

fn tuples_form_one_address_space(net: &Net) {
    let pair = net.pair();
    let two = pair.server.expose((vec![1u8, 2], [3u16, 4]), BulkMode::ReadWrite).unwrap();
    assert_eq!(two.bulk().segment_count(), 2);
    assert_eq!(pulled(&pair, two.bulk()), [1, 2, 3, 0, 4, 0]);
    push(&pair, two.bulk(), &[9; 6]);
    assert_eq!(two.reclaim(), (vec![9, 9], [0x909; 2]));

    let three = pair.server.expose((vec![1u8], Box::<[u8]>::from([2]), pair.server.alloc(1)), BulkMode::ReadWrite).unwrap();
    assert_eq!(pulled(&pair, three.bulk()), [1, 2, 0]);
    push(&pair, three.bulk(), &[4, 5, 6]);
    let (a, b, c) = three.reclaim();
    assert_eq!((a[0], b[0], c[0]), (4, 5, 6));

    let four = pair.server.expose_read_only((String::from("ab"), [b'c'], vec![b'd'], Arc::<[u8]>::from(*b"ef"))).unwrap();
    assert_eq!(four.bulk().segment_count(), 4);
    assert_eq!(pulled(&pair, four.bulk()), b"abcdef");
    assert_eq!(four.reclaim().0, "ab");
}

fn segments_form_one_address_space(net: &Net) {
    let pair = net.pair();
    let (header, body) = (vec![1u32, 2], vec![3u32, 4, 5]);
    let many: Exposed<Segments<Vec<u32>>> =
        pair.server.expose(Segments(vec![header, Vec::new(), body]), BulkMode::ReadWrite).unwrap();
    assert_eq!((many.len(), many.bulk().segment_count()), (20, 3));
    assert_eq!(pulled(&pair, many.bulk()), bytemuck::cast_slice::<u32, u8>(&[1, 2, 3, 4, 5]));
    let across = many.bulk().slice(6, 4).unwrap();
    push(&pair, across, &[0xff; 4]);
    assert_eq!(many.reclaim().0, [vec![1, 0xffff_0002], vec![], vec![0xffff, 4, 5]]);

    let thousand = Segments((0..1000u32).map(|i| vec![i as u8; (i % 7) as usize]).collect());
    let flat = thousand.0.concat();
    let exposed = pair.server.expose(thousand, BulkMode::ReadWrite).unwrap();
    assert_eq!(pulled(&pair, exposed.bulk()), flat);
    push(&pair, exposed.bulk(), &pattern(4, flat.len()));
    assert_eq!(exposed.reclaim().0.concat(), pattern(4, flat.len()));

    let none = pair.server.expose(Segments(Vec::<Vec<u8>>::new()), BulkMode::ReadWrite).unwrap();
    assert!(none.is_empty() && pulled(&pair, none.bulk()).is_empty());
    let texts = pair.server.expose_read_only(Segments(vec![String::from("one "), String::from("two")])).unwrap();
    assert_eq!(pulled(&pair, texts.bulk()), b"one two");
}

fn transfers_at_every_alignment_copy_the_bytes(net: &Net) {
    // Bytes pushed from and pulled into every alignment.
    let pair = net.pair();
    let theirs = pair.server.expose(vec![0u64; 16], BulkMode::ReadWrite).unwrap();
    let data = pattern(3, 128);
    for offset in 0..16 {
        let remote = theirs.bulk().on(&pair.to_server).slice(offset, 100).unwrap();
        assert_eq!(remote.push_from(&data[offset..offset + 100]).unwrap(), 100);
        let mut copy = [0u8; 128];
        assert_eq!(remote.pull_into(&mut copy[16 - offset..116 - offset]).unwrap(), 100);
        assert!(copy[16 - offset..116 - offset] == data[offset..offset + 100]);
        assert!(all_are(&copy[..16 - offset], 0) && all_are(&copy[116 - offset..], 0));
    }
}

suite![
    vectors_boxes_and_arrays_are_exposed,
    moved_exposure_of_an_array_stays_valid,
    structs_of_plain_data_are_exposed,
    single_values_are_exposed,
    struct_of_arrays_is_exposed_as_the_tuple_of_its_fields,
    buffers_of_readable_types_are_exposed_read_only,
    exposed_texts_are_viewed,
    shared_and_static_slices_are_exposed,
    engine_memory_is_exposed,
    long_transfers_move_each_byte,
    pooled_buffers_return_to_their_pool,
    tuples_form_one_address_space,
    segments_form_one_address_space,
    transfers_at_every_alignment_copy_the_bytes,
];
