//! Tests of the bounded decoder: it agrees with postcard, and limits nesting, elements and memory.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet, LinkedList, VecDeque};
use std::ffi::CString;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU8, Wrapping};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Tree {
    Leaf,
    Node(Box<Tree>),
    Pair(Box<Tree>, Box<Tree>),
    Named { name: String, children: Vec<Tree>, by_key: BTreeMap<u8, Tree>, next: Option<Box<Tree>> },
}

/// A recursive type whose levels take much stack: many fields with drop glue each.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Wide {
    End,
    #[rustfmt::skip]
    Link {
        a: String, b: Vec<u64>, c: Option<String>, d: [u64; 32], e: (u8, u64, String), f: BTreeMap<u8, u8>,
        g: String, h: Vec<u64>, i: Option<String>, j: [u64; 32], k: (u8, u64, String), l: BTreeMap<u8, u8>,
        next: Box<Wide>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Unit;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Newtype(u32);

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Chain(Option<Box<Chain>>);

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Nest(Vec<Nest>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Borrowed<'a> {
    key: &'a str,
    #[serde(borrow)]
    value: &'a [u8],
    #[serde(borrow)]
    either: Cow<'a, str>,
    #[serde(borrow)]
    more: Vec<&'a str>,
    #[serde(borrow)]
    maybe: Option<&'a str>,
}

/// Runs a test with the stack size of an engine's threads.
fn on_a_small_stack(test: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(2 << 20).spawn(test).unwrap().join().unwrap();
}

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn error<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> String {
    decode::<T>(bytes).err().expect("an error")
}

#[track_caller]
fn check_round_trip<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: T) {
    let bytes = postcard::to_stdvec(&value).unwrap();
    assert_eq!(decode::<T>(&bytes).as_ref(), Ok(&value));
    assert_eq!(postcard::from_bytes::<T>(&bytes), Ok(value));
    for cut in 0..bytes.len().min(100) {
        let plain = postcard::from_bytes::<T>(&bytes[..cut]).unwrap_err();
        assert_eq!(decode::<T>(&bytes[..cut]), Err(format!("{plain} ({cut} bytes)")));
    }
    let longer = [&bytes[..], &[7, 7]].concat();
    assert_eq!(decode::<T>(&longer), Err(format!("2 of {} bytes are left over", longer.len())));
}

#[test]
fn values_decode_as_encoded() {
    check_round_trip(true);
    check_round_trip((i8::MIN, i16::MIN, i32::MIN, i64::MIN, i128::MIN, isize::MIN));
    check_round_trip((u8::MAX, u16::MAX, u32::MAX, u64::MAX, u128::MAX, usize::MAX));
    check_round_trip((f32::MIN_POSITIVE, f64::INFINITY, '\0', 'ß', '🦀'));
    check_round_trip(("héllo".to_string(), String::new(), Box::<str>::from("boxed"), CString::new("c").unwrap()));
    check_round_trip(((), Unit, Newtype(9), Wrapping(9u8), NonZeroU8::MIN));
    check_round_trip((Some(Some(1u8)), Some(None::<u8>), None::<Option<u8>>, Some(()), Some(Unit)));
    check_round_trip((Ok::<u8, String>(1), Err::<u8, String>("no".into())));
    check_round_trip(([1u64, 2, 3], [(); 3], [0u8; 0], [[1u8; 2]; 32]));
    check_round_trip((vec![1u8, 2, 3], vec![u64::MAX; 300], vec![(); 5], vec![Vec::<()>::new(); 5], vec![vec![Some(1i32)]]));
    check_round_trip((VecDeque::from([1]), LinkedList::from([2]), HashSet::from([3, 4]), Box::<[u8]>::from([5])));
    check_round_trip((HashMap::from([("a".to_string(), vec![1.5f64])]), BTreeMap::from([((), Unit)])));
    check_round_trip((Arc::<str>::from("arc"), Rc::new(3), Duration::from_millis(1500), 1..5u8));
    check_round_trip(("127.0.0.1:80".parse::<SocketAddr>().unwrap(), "::1".parse::<IpAddr>().unwrap()));
    let leaf = || Box::new(Tree::Leaf);
    let node = Tree::Node(Box::new(Tree::Pair(leaf(), leaf())));
    let by_key = BTreeMap::from([(1, node.clone()), (2, Tree::Leaf)]);
    check_round_trip(Tree::Named { name: "root".into(), children: vec![node, Tree::Leaf], by_key, next: Some(leaf()) });
}

#[test]
fn borrowed_values_point_into_the_bytes() {
    let value =
        Borrowed { key: "key", value: &[1, 2, 3], either: "either".into(), more: vec!["one", "two"], maybe: Some("maybe") };
    let bytes = postcard::to_stdvec(&value).unwrap();
    let back: Borrowed<'_> = decode(&bytes).unwrap();
    assert_eq!(back, value);
    for piece in [back.key.as_bytes(), back.value, back.more[1].as_bytes(), back.maybe.unwrap().as_bytes()] {
        assert!(bytes.as_ptr_range().contains(&piece.as_ptr()));
    }
    assert!(matches!(back.either, Cow::Borrowed(_)));
}

#[test]
fn bytes_that_postcard_refuses_are_refused() {
    /// A type that needs a self-describing format.
    #[derive(Debug, PartialEq)]
    struct Any;
    impl<'de> Deserialize<'de> for Any {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Any, D::Error> {
            assert!(!deserializer.is_human_readable());
            deserializer.deserialize_any(de::IgnoredAny).map(|_| Any)
        }
    }
    for error in [error::<Any>(&[0]), error::<de::IgnoredAny>(&[0])] {
        assert!(error.contains("Any` can only be read from a format that describes itself"), "{error}");
    }
    assert_eq!(error::<std::result::Result<u8, u8>>(&[2]), "variant 2 is none of the type's (1 bytes)");
    assert_eq!(error::<bool>(&[2]), format!("{} (1 bytes)", Error::DeserializeBadBool));
    assert_eq!(error::<Option<u8>>(&[2]), format!("{} (1 bytes)", Error::DeserializeBadOption));
    assert_eq!(error::<String>(&[1, 0xff]), format!("{} (2 bytes)", Error::DeserializeBadUtf8));
    assert_eq!(error::<Tree>(&[9]), "variant 9 is none of the type's (1 bytes)");
    assert_eq!(error::<u8>(&[]), format!("{} (0 bytes)", Error::DeserializeUnexpectedEnd));
    assert_eq!(error::<CatchAll>(&[9]), "variant 9 is none of the type's (1 bytes)");
    assert_eq!(error::<Vec<CatchAll>>(&[2, 0, 9]), "variant 9 is none of the type's (3 bytes)");
}

/// Discards the error of its content.
fn or_default<'de, D: de::Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> std::result::Result<T, D::Error> {
    Ok(T::deserialize(deserializer).unwrap_or_default())
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Lenient<T: DeserializeOwned + Default> {
    #[serde(deserialize_with = "or_default")]
    content: T,
}

#[test]
fn errors_that_an_element_discards_are_not_forgotten() {
    let lenient = |content: &str| Lenient { content: content.to_owned() };
    let list = vec![lenient("ab"), lenient("")];
    assert_eq!(decode(&postcard::to_stdvec(&list).unwrap()), Ok(list));
    let lists = (vec![lenient("\0\u{2}")], vec![Vec::<u8>::new()]);
    assert_eq!(decode(&postcard::to_stdvec(&lists).unwrap()), Ok(lists));
    let map = BTreeMap::from([(1, lenient("ab"))]);
    assert_eq!(decode(&postcard::to_stdvec(&map).unwrap()), Ok(map));
    assert_eq!(error::<Vec<Lenient<Option<CatchAll>>>>(&[2, 1, 0, 1, 9]), "variant 9 is none of the type's (5 bytes)");
}

/// Too long, too large and cut ones, too, and at each distance from the end: as all of a list, as fields, and where their error is
/// discarded.
#[test]
fn numbers_are_decoded_as_postcard_does() {
    fn compare_as<T: Serialize + DeserializeOwned + Default>(number: &[u8], behind: u8) {
        let rest = [&[behind][..], &vec![1; behind.into()]].concat();
        compare::<(u8, T)>(&[&[0], number].concat());
        compare::<(u8, T, Vec<u8>)>(&[&[0], number, &rest].concat());
        compare::<Vec<T>>(&[&[1 + behind], number, &rest[1..]].concat());
        let twice = [number, &[1], number].concat();
        compare::<(Vec<(T, bool, T)>, Vec<u8>)>(&[&[2], &twice[..], &twice, &rest].concat());
        compare::<(Lenient<T>, Vec<u8>)>(&[number, &rest].concat());
        compare::<Vec<Lenient<T>>>(&[&[2 + behind], number, number, &rest[1..]].concat());
    }
    fn compare_all(number: &[u8]) {
        for behind in 0..=12 {
            compare_as::<u16>(number, behind);
            compare_as::<u32>(number, behind);
            compare_as::<u64>(number, behind);
            compare_as::<i16>(number, behind);
            compare_as::<i32>(number, behind);
            compare_as::<i64>(number, behind);
            compare_as::<usize>(number, behind);
        }
    }
    for bits in 0..u64::BITS {
        for number in [1 << bits, (1 << bits) - 1, 0x9e37_79b9_7f4a_7c15_u64 >> bits] {
            compare_all(&postcard::to_stdvec(&number).unwrap());
        }
    }
    compare_all(&postcard::to_stdvec(&u64::MAX).unwrap());
    for more in 0..=11 {
        for byte in [0x80, 0xff] {
            let bytes = vec![byte; more];
            compare_all(&bytes);
            for last in [0, 1, 2, 3, 4, 0x0f, 0x10, 0x7f] {
                compare_all(&[&bytes[..], &[last]].concat());
            }
        }
    }
}

/// With the levels that are left, not with those of its own.
#[test]
fn elements_may_be_as_deep_as_other_values() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Thrice<T>(((T,),));
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Deep<T> {
        below: Vec<Deep<T>>,
        elements: Vec<Thrice<T>>,
    }
    on_a_small_stack(|| {
        let mut deepest = 0;
        for depth in 20..MAX_DEPTH as usize {
            // The number is 0, or the text is empty.
            let bytes = [&vec![1; depth][..], &[0, 1, 0], &vec![0; depth]].concat();
            let fits = decode::<Deep<u8>>(&bytes).is_ok();
            assert_eq!(decode::<Deep<String>>(&bytes).is_ok(), fits, "{depth}");
            deepest = if fits { depth } else { deepest };
        }
        assert!((21..MAX_DEPTH as usize - 1).contains(&deepest), "{deepest}");
    });
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum CatchAll {
    First,
    #[serde(other)]
    Other,
}

#[test]
fn nesting_beyond_the_limit_is_refused() {
    const DEEP: usize = MAX_DEPTH as usize;
    let too_deep = || format!("nested deeper than {MAX_DEPTH} levels");
    // The innermost `Leaf` is a level too.
    let ones = |count| [vec![1; count], vec![0]].concat();
    on_a_small_stack(move || {
        assert!(decode::<Tree>(&ones(DEEP - 1)).is_ok());
        assert_eq!(error::<Tree>(&ones(DEEP)), too_deep());
        assert_eq!(error::<Tree>(&ones(10 << 20)), too_deep());
        assert_eq!(error::<Tree>(&[3, 0, 1].repeat(1 << 20)), too_deep());
        // Two levels each: the newtype, and the option or sequence in it. `None` is not a level.
        assert!(decode::<Nest>(&ones(DEEP / 2 - 1)).is_ok());
        assert_eq!(error::<Nest>(&ones(DEEP / 2)), too_deep());
        assert!(decode::<Chain>(&ones(DEEP / 2 - 1)).is_ok());
        assert_eq!(error::<Chain>(&ones(DEEP / 2)), too_deep());
        assert_eq!(error::<Nest>(&vec![1; 1 << 20]), too_deep());
        assert_eq!(error::<Chain>(&vec![1; 1 << 20]), too_deep());
        // As an element. The list is a level, too.
        assert!(decode::<Vec<Chain>>(&ones(DEEP / 2 - 1)).is_ok());
        assert_eq!(error::<Vec<Chain>>(&ones(DEEP / 2 + 1)), too_deep());
        assert_eq!(error::<Vec<Chain>>(&vec![1; 1 << 20]), too_deep());
        assert_eq!(error::<BTreeMap<u8, Chain>>(&vec![1; 1 << 20]), too_deep());
    });
}

#[test]
fn deepest_nesting_fits_a_small_stack() {
    on_a_small_stack(|| {
        let empty = [vec![0; 3], vec![0; 32], vec![0; 4]].concat();
        let link = [&[1], &empty[..], &empty[..]].concat();
        let links = |count| [link.repeat(count), vec![0]].concat();
        // The last of the links has values in it, one level further down.
        let deepest = links(MAX_DEPTH as usize - 2);
        assert!(decode::<Wide>(&deepest).is_ok());
        assert!(error::<Wide>(&links(1000)).starts_with("nested deeper"));
    });
}

#[test]
fn long_list_counts_as_one_level() {
    check_round_trip(vec![Some(Newtype(1)); 10_000]);
    check_round_trip((0..10_000u32).map(|key| (key, Some(vec![Unit]))).collect::<BTreeMap<_, _>>());
}

#[test]
fn zero_sized_elements_beyond_the_bound_are_refused() {
    let started = Instant::now();
    for length in [u64::MAX, u64::MAX / 2, 1 << 40, FREE_ELEMENTS as u64 + 11] {
        let bytes = varint(length);
        let too_many = format!("more elements than {} bytes can hold", bytes.len());
        assert_eq!(error::<Vec<()>>(&bytes), too_many);
        assert_eq!(error::<Vec<Unit>>(&bytes), too_many);
        assert_eq!(error::<Vec<[(); 4]>>(&bytes), too_many);
        assert_eq!(error::<HashSet<()>>(&bytes), too_many);
        assert_eq!(error::<HashMap<(), ()>>(&bytes), too_many);
        assert_eq!(error::<BTreeMap<(), Unit>>(&bytes), too_many);
        assert_eq!(error::<Vec<u64>>(&bytes), too_many);
    }
    // Each of these is within the bounds, but all together are not.
    let half = varint(FREE_ELEMENTS as u64 / 2);
    let nested = [varint(1000), half.repeat(1000)].concat();
    assert_eq!(error::<Vec<Vec<()>>>(&nested), format!("more elements than {} bytes can hold", nested.len()));
    assert!(error::<(Vec<()>, Vec<()>, Vec<()>)>(&half.repeat(3)).starts_with("more elements"));
    assert!(decode::<(Vec<()>, Vec<()>)>(&half.repeat(2)).is_ok());
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn announced_length_is_not_a_size_hint_beyond_the_bytes() {
    /// Checks the size hint of a map.
    struct Hints;
    impl<'de> Deserialize<'de> for Hints {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Hints, D::Error> {
            deserializer.deserialize_map(Hints)
        }
    }
    impl<'de> Visitor<'de> for Hints {
        type Value = Hints;
        fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str("a map")
        }
        fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> std::result::Result<Hints, A::Error> {
            assert_eq!(map.size_hint(), Some(3));
            while map.next_entry::<(), ()>()?.is_some() {}
            assert_eq!(map.size_hint(), Some(0));
            Ok(Hints)
        }
    }
    let bytes = varint(FREE_ELEMENTS as u64);
    assert_eq!(bytes.len(), 3);
    assert!(decode::<Hints>(&bytes).is_ok());
}

#[test]
fn exceeded_bound_fails_though_the_type_ignores_its_error() {
    #[derive(Debug)]
    struct Careless;
    impl<'de> Deserialize<'de> for Careless {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Careless, D::Error> {
            let _ = Vec::<()>::deserialize(deserializer);
            Ok(Careless)
        }
    }
    assert_eq!(error::<Careless>(&varint(u64::MAX)), "more elements than 10 bytes can hold");
}

/// The heap memory of a value, as the decoder accounts it.
fn memory<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) -> usize {
    let bytes = postcard::to_stdvec(value).unwrap();
    let (decoded, memory) = decode_within::<T>(&bytes, &mut |_| Some(usize::MAX)).unwrap();
    assert_eq!(decoded, *value);
    memory
}

#[allow(clippy::large_enum_variant)]
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Large {
    None,
    All(Box<[u64; 32]>, [u64; 30]),
}

#[test]
fn memory_of_values_is_accounted() {
    const N: usize = 1000;
    assert_eq!(memory(&(1u64, 2u8, Some(3u32), (4, 5))), 0);
    assert_eq!(memory(&[7u64; 32]), 0);
    assert_eq!(memory(&vec![7u64; N]), 8 * N + ALLOCATION);
    assert_eq!(memory(&vec![[7f64; 3]; N]), 24 * N + ALLOCATION);
    assert_eq!(memory(&vec![(); N]), ALLOCATION);
    assert_eq!(memory(&Vec::<String>::new()), 0);
    assert_eq!(memory(&vec![String::new(); N]), 24 * N + ALLOCATION);
    assert_eq!(memory(&vec!["a".to_owned(); N]), (24 + ALLOCATION) * N + ALLOCATION);
    assert_eq!(memory(&vec![Vec::<u8>::new(); N]), 24 * N + ALLOCATION);
    assert_eq!(memory(&vec![vec![7u8]; N]), (24 + ALLOCATION + 1) * N + ALLOCATION);
    assert_eq!(memory(&vec![None::<[u64; 32]>; N]), size_of::<Option<[u64; 32]>>() * N + ALLOCATION);
    // In a list, and in boxes: what is in a box is counted where it is larger than the box.
    assert_eq!(memory(&(0..N).map(|_| Large::None).collect::<Vec<_>>()), size_of::<Large>() * N + ALLOCATION);
    let boxed = |_| Box::new(Large::None);
    assert_eq!(memory(&(0..N).map(boxed).collect::<Vec<_>>()), (8 + size_of::<Large>() + ALLOCATION) * N + ALLOCATION);
    let some = |_| Some(Box::new((1u8, [7u64; 4])));
    assert_eq!(memory(&(0..N).map(some).collect::<Vec<_>>()), (8 + 40 + ALLOCATION) * N + ALLOCATION);
    // Two boxes next to each other are two.
    assert_eq!(memory(&vec![(Box::new([7u8; 30]), Box::new([7u8; 30])); N]), (16 + 2 * (30 + ALLOCATION)) * N + ALLOCATION);
    let map = (0..N).map(|n| (format!("{n}"), 7u32)).collect::<HashMap<_, _>>();
    assert_eq!(memory(&map), (2 * (24 + 4) + ENTRY + ALLOCATION) * N + 9 * (24 + 4) + ALLOCATION);
    assert_eq!(memory(&(0..200).collect::<HashSet<u16>>()), (2 * 2 + ENTRY) * 200 + 9 * 2 + ALLOCATION);
    assert_eq!(memory(&(0..200).collect::<VecDeque<u16>>()), 2 * 200 + ALLOCATION);
    assert_eq!(memory(&(0..200).collect::<LinkedList<u16>>()), (2 + ALLOCATION) * 200 + ALLOCATION);
}

/// What is reserved before the first element is decoded is bounded, whatever reserves it.
#[test]
fn own_visitors_are_told_to_expect_few_elements() {
    #[derive(Debug)]
    struct Reserving(usize);
    impl<'de> Deserialize<'de> for Reserving {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Reserving, D::Error> {
            struct Own;
            impl<'de> Visitor<'de> for Own {
                type Value = Reserving;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("a list")
                }
                fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Reserving, A::Error> {
                    let hint = list.size_hint().unwrap();
                    while list.next_element::<Option<u8>>()?.is_some() {}
                    Ok(Reserving(hint))
                }
            }
            deserializer.deserialize_seq(Own)
        }
    }
    let bytes = |count| postcard::to_stdvec(&vec![None::<u8>; count]).unwrap();
    assert_eq!(decode::<Reserving>(&bytes(300)).unwrap().0, 300);
    assert_eq!(decode::<Reserving>(&bytes(100_000)).unwrap().0, MAX_EXPECTED);
    // Serde's own are told all, so that a list need not grow.
    assert_eq!(decode::<Vec<Option<u8>>>(&bytes(100_000)).unwrap().capacity(), 100_000);
}

/// A level may take more of the stack than `MAX_DEPTH` allows for.
#[test]
#[cfg_attr(miri, ignore)]
fn large_levels_do_not_overflow_the_stack() {
    #[derive(Debug, Serialize, Deserialize)]
    struct Large {
        data: [[[u8; 32]; 32]; 16],
        next: Option<Box<Large>>,
    }
    #[derive(Debug, Serialize, Deserialize)]
    struct Listed {
        data: [[[u8; 32]; 32]; 16],
        next: Vec<Listed>,
    }
    let level = |more| [&[0; 16 << 10][..], &[more]].concat();
    let bytes = |levels: usize| [level(1).repeat(levels - 1), level(0)].concat();
    let decode_in_a_thread = |levels| {
        let bytes = bytes(levels);
        // An option and a list of at most one are the same bytes.
        let decode = move || (decode::<Large>(&bytes).map(|_| ()), decode::<Listed>(&bytes).map(|_| ()));
        std::thread::Builder::new().stack_size(2 << 20).spawn(decode).unwrap().join().unwrap()
    };
    assert_eq!(decode_in_a_thread(2), (Ok(()), Ok(())));
    let (boxed, listed) = decode_in_a_thread(60);
    assert!(boxed.unwrap_err().contains("of the stack") && listed.unwrap_err().contains("of the stack"));
}

/// Its boxes hold values of its own size, so what lies around a box says nothing of what is in it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Branch {
    pad: Option<[u64; 32]>,
    left: Option<Box<Branch>>,
    right: Option<Box<Branch>>,
}

#[allow(clippy::large_enum_variant)]
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Link {
    End([u64; 20]),
    More(Box<Link>),
    Next { rest: Box<Link> },
    Both(Box<Link>, ()),
}

/// A level of them takes most of its stack for the struct itself, also where nothing is optimized.
#[test]
#[cfg_attr(miri, ignore = "its variables do not lie on a stack")]
fn nested_structs_take_little_stack_beside_themselves() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Level {
        content: [[u8; 32]; 32],
        next: Option<Box<Level>>,
    }
    let wrap = |next, content| Some(Box::new(Level { content: [[content; 32]; 32], next }));
    let levels = (0..60).fold(None, wrap);
    let bytes = postcard::to_stdvec(&levels).unwrap();
    assert_eq!(decode::<Option<Box<Level>>>(&bytes).as_ref(), Ok(&levels));
}

#[test]
fn memory_of_recursive_values_is_accounted() {
    fn tree(depth: u32) -> Option<Box<Branch>> {
        (depth > 0).then(|| Box::new(Branch { pad: None, left: tree(depth - 1), right: tree(depth - 1) }))
    }
    assert_eq!(memory(&tree(10)), (size_of::<Branch>() + ALLOCATION) * 1023);
    assert_eq!(memory(&tree(10).unwrap()), (size_of::<Branch>() + ALLOCATION) * 1023);
    assert_eq!(memory(&*tree(10).unwrap()), (size_of::<Branch>() + ALLOCATION) * 1022);
    let forest = (0..10).map(|_| *tree(3).unwrap()).collect::<Vec<_>>();
    assert_eq!(memory(&forest), size_of::<Branch>() * 10 + ALLOCATION + (size_of::<Branch>() + ALLOCATION) * 60);

    let chain = (0..30).fold(Link::End([7; 20]), |chain, i| match (i % 3, Box::new(chain)) {
        (0, chain) => Link::More(chain),
        (1, rest) => Link::Next { rest },
        (_, chain) => Link::Both(chain, ()),
    });
    assert_eq!(memory(&chain), (size_of::<Link>() + ALLOCATION) * 30);
}

/// The last error is reported, whether the impl or the bytes made it; not one that an impl has ignored.
#[test]
fn errors_of_an_impl_are_reported() {
    #[derive(Debug)]
    struct Lenient;
    impl<'de> Deserialize<'de> for Lenient {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Lenient, D::Error> {
            let _ = bool::deserialize(deserializer);
            Ok(Lenient)
        }
    }
    #[derive(Debug)]
    struct Never;
    impl<'de> Deserialize<'de> for Never {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Never, D::Error> {
            let byte = u8::deserialize(deserializer)?;
            Err(de::Error::custom(format_args!("never {byte}{}", "!".repeat(usize::from(byte)))))
        }
    }
    #[derive(Debug)]
    struct Whatever;
    impl<'de> Deserialize<'de> for Whatever {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Whatever, D::Error> {
            let _ = Never::deserialize(deserializer);
            Ok(Whatever)
        }
    }
    assert!(decode::<Lenient>(&[2]).is_ok() && decode::<(Lenient, u8)>(&[2, 3]).is_ok());
    assert_eq!(error::<Never>(&[3]), "never 3!!! (1 bytes)");
    assert_eq!(error::<(Lenient, Never)>(&[2, 1]), "never 1! (2 bytes)");
    assert_eq!(error::<(Whatever, bool)>(&[1, 2]), format!("{} (2 bytes)", postcard::Error::DeserializeBadBool));
    assert!(decode::<Whatever>(&[1]).is_ok());
    assert_eq!(error::<(Whatever, u8)>(&[1]), format!("{} (1 bytes)", postcard::Error::DeserializeUnexpectedEnd));
    assert!(decode::<Whatever>(&[1]).is_ok());
    assert_eq!(error::<Whatever>(&[1, 2]), "1 of 2 bytes are left over");
    assert_eq!(error::<NonZeroU8>(&[0]), "invalid value: integer `0`, expected a nonzero u8 (1 bytes)");
    assert_eq!(error::<Never>(&[250, 1]), format!("never 250{} (2 bytes)", "!".repeat(250)));
    assert_eq!(error::<[Never; 2]>(&[255, 1]).len(), "never 255 (2 bytes)".len() + 255);
}

/// A thread that ends may still decode, in destructors that run after that of the text.
#[test]
fn errors_are_reported_when_a_thread_ends() {
    struct Late(std::sync::mpsc::Sender<(String, String)>);
    impl Drop for Late {
        fn drop(&mut self) {
            let _ = self.0.send((error::<bool>(&[2]), error::<NonZeroU8>(&[0])));
        }
    }
    thread_local! {
        static LATE: std::cell::OnceCell<Late> = const { std::cell::OnceCell::new() };
    }
    let (sender, receiver) = std::sync::mpsc::channel();
    let refuse_late = || {
        // Destructors run in the reverse order of first use.
        LATE.with(|late| late.set(Late(sender)).ok());
        error::<NonZeroU8>(&[0]);
    };
    std::thread::spawn(refuse_late).join().unwrap();
    let (bool, zero) = receiver.recv().unwrap();
    assert_eq!(bool, format!("{} (1 bytes)", postcard::Error::DeserializeBadBool));
    assert_eq!(zero, format!("{} (1 bytes)", postcard::Error::SerdeDeCustom));
}

#[test]
fn memory_beyond_the_free_amount_is_requested() {
    let bytes = postcard::to_stdvec(&vec![String::new(); 100_000]).unwrap();
    // Granted step by step.
    let mut asked = Vec::new();
    let given = decode_within::<Vec<String>>(&bytes, &mut |memory| {
        asked.push(memory);
        (memory <= 3_000_000).then_some(2 * memory)
    });
    assert_eq!(given.unwrap().1, 2_400_000 + ALLOCATION);
    assert!(asked.len() < 10 && asked[0] > free_memory(bytes.len()) && asked[0] < free_memory(bytes.len()) + 100, "{asked:?}");
    let refused = decode_within::<Vec<String>>(&bytes, &mut |memory| (memory <= 1_000_000).then_some(1_000_000));
    assert_eq!(refused.unwrap_err(), "the values in 100003 bytes would take more than 1000000 bytes of memory");
    // Values that take hardly more memory than their bytes, and small values, are not asked about.
    let numbers = postcard::to_stdvec(&vec![f64::MAX; 100]).unwrap();
    let text = postcard::to_stdvec(&"a".repeat(100_000)).unwrap();
    let few = postcard::to_stdvec(&vec![String::new(); 40]).unwrap();
    let large = postcard::to_stdvec(&vec![f64::MAX; 100_000]).unwrap();
    let plain = postcard::to_stdvec(&vec![7u8; 100_000]).unwrap();
    assert!(decode_within::<Vec<f64>>(&large, &mut |memory| panic!("{memory} bytes")).is_ok());
    assert!(decode_within::<Vec<u8>>(&plain, &mut |memory| panic!("{memory} bytes")).is_ok());
    assert!(decode_within::<Vec<f64>>(&numbers, &mut |memory| panic!("{memory} bytes")).is_ok());
    assert!(decode_within::<String>(&text, &mut |memory| panic!("{memory} bytes")).is_ok());
    assert!(decode_within::<Vec<String>>(&few, &mut |memory| panic!("{memory} bytes")).is_ok());
}

#[test]
fn false_length_of_a_list_of_numbers_reserves_no_memory() {
    // 2^40 numbers in 6 bytes; and as many as there are bytes, of 8 bytes each.
    let long = [0x80, 0x80, 0x80, 0x80, 0x80, 0x20];
    assert!(decode::<Vec<u8>>(&long).unwrap_err().starts_with("more elements"));
    let floats = [&[100][..], &[0; 100]].concat();
    let asked = |memory: usize| panic!("{memory} bytes are asked for");
    assert!(decode_within::<Vec<f64>>(&floats, &mut |memory| asked(memory)).is_err());
    // What 2,000 numbers of a byte each take in memory is asked for before it is reserved.
    let numbers = [&[0xd0, 0x0f][..], &[0; 2000]].concat();
    let mut requests = Vec::new();
    let mut refuse = |memory: usize| {
        requests.push(memory);
        None
    };
    assert!(decode_within::<Vec<u64>>(&numbers, &mut refuse).unwrap_err().contains("memory"));
    assert!(requests.len() == 1 && requests[0] >= 16_000, "{requests:?}");
}

/// What decoding a long value of this type takes at best, if its memory lies so far behind the bytes that it is decoded from, by the
/// last bits of their addresses. The allocator mostly returns what was freed last, so each round begins where the last one's lay. `None`:
/// it never does, as those of sanitizers.
fn fastest<T: DeserializeOwned + AsRef<[u8]>>(content: &[u8], behind: usize) -> Option<Duration> {
    let head = varint(content.len() as u64);
    let mut memory = vec![0; head.len() + content.len() + copy::PAGE];
    let mut last = 0;
    let mut times = Vec::new();
    for _ in 0..1000 {
        let at = copy::distance(memory.as_ptr().addr() + head.len() + behind, last);
        let content_at = at + head.len();
        memory[at..content_at].copy_from_slice(&head);
        memory[content_at..content_at + content.len()].copy_from_slice(content);
        let bytes = &memory[at..content_at + content.len()];
        let begun = Instant::now();
        let value: T = decode(bytes).unwrap();
        let took = begun.elapsed();
        assert!(value.as_ref() == content);
        last = value.as_ref().as_ptr().addr();
        if copy::distance(memory.as_ptr().addr() + content_at, last) == behind {
            times.push(took);
        }
    }
    times.into_iter().min()
}

/// Serde's own visitors copy what they are shown by `rep movsb`, which some processors execute a byte at a time at such distances.
/// On others this holds anyway.
#[test]
#[cfg_attr(miri, ignore = "it measures time")]
fn long_texts_and_bytes_decode_as_fast_wherever_they_lie() {
    let text = "x".repeat(64 << 10);
    let cstring = CString::new(text.clone()).unwrap();
    struct Terminated(CString);
    impl AsRef<[u8]> for Terminated {
        fn as_ref(&self) -> &[u8] {
            self.0.as_bytes()
        }
    }
    impl<'de> Deserialize<'de> for Terminated {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Terminated, D::Error> {
            CString::deserialize(deserializer).map(Terminated)
        }
    }
    for (apart, close) in [
        (fastest::<String>(text.as_bytes(), 256), fastest::<String>(text.as_bytes(), 8)),
        (fastest::<Vec<u8>>(text.as_bytes(), 256), fastest::<Vec<u8>>(text.as_bytes(), 8)),
        (fastest::<Terminated>(cstring.as_bytes(), 256), fastest::<Terminated>(cstring.as_bytes(), 8)),
    ] {
        let (Some(apart), Some(close)) = (apart, close) else {
            println!("skipped: the allocator returns other memory each time");
            return;
        };
        assert!(close < 3 * apart, "{apart:?}, {close:?}");
    }
}

/// Compares the result with that of plain postcard, except for the bounds.
fn compare<'a, T: Deserialize<'a> + Serialize>(bytes: &'a [u8]) {
    let ours = decode::<T>(bytes);
    let len = bytes.len();
    match (postcard::take_from_bytes::<T>(bytes), ours) {
        // Compares the encodings, since a NaN is not equal to itself.
        (Ok((plain, [])), Ok(ours)) => {
            assert_eq!(postcard::to_stdvec(&plain).unwrap(), postcard::to_stdvec(&ours).unwrap());
        }
        (Ok((_, rest)), Err(ours)) => assert_eq!(ours, format!("{} of {len} bytes are left over", rest.len())),
        (Err(plain), Err(ours)) => {
            let bound = ours.starts_with("more elements") || ours.starts_with("variant ");
            // Postcard does not keep what the type says.
            let custom = plain == postcard::Error::SerdeDeCustom && ours.ends_with(&format!(" ({len} bytes)"));
            assert!(ours == format!("{plain} ({len} bytes)") || bound || custom, "{plain} but {ours}");
        }
        (Ok(_), Ok(_)) => panic!("left-over bytes were accepted"),
        (Err(plain), Ok(_)) => panic!("accepted what is {plain}"),
    }
}

fn tree() -> impl Strategy<Value = Tree> {
    let pair = |tree: BoxedStrategy<Tree>| {
        (tree.clone(), tree).prop_map(|(one, other)| Tree::Pair(Box::new(one), Box::new(other))).boxed()
    };
    Just(Tree::Leaf).boxed().prop_recursive(6, 64, 4, move |inner| {
        let fields = (any::<String>(), prop::collection::vec(inner.clone(), 0..4), prop::option::of(inner.clone()));
        let named = fields.prop_map(|(name, children, next)| Tree::Named {
            name,
            by_key: (0..).zip(children.clone()).collect(),
            children,
            next: next.map(Box::new),
        });
        prop_oneof![inner.clone().prop_map(|tree| Tree::Node(Box::new(tree))), pair(inner), named]
    })
}

/// Decoded without an account where it is an element of a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Flat {
    Unit,
    Newtype(Newtype),
    Tuple(i16, Option<bool>, Unit),
    Struct { at: [f64; 2], next: Option<Box<u8>> },
    Chained(Option<Box<Flat>>),
}

/// Random bytes; small ones are plausible lengths and variants.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        prop::collection::vec(0u8..4, 0..90),
        prop::collection::vec(prop_oneof![4 => 0u8..8, 1 => any::<u8>()], 0..200),
    ]
}

proptest! {
    #[test]
    fn random_bytes_decode_as_postcard_decodes_them(bytes in bytes()) {
        compare::<u128>(&bytes);
        compare::<(i8, i16, i32, i64, i128, bool, char)>(&bytes);
        compare::<(String, f64, Option<f32>)>(&bytes);
        compare::<Borrowed<'_>>(&bytes);
        compare::<Vec<u8>>(&bytes);
        compare::<Vec<(u8, Vec<Option<String>>)>>(&bytes);
        compare::<BTreeMap<u16, Vec<i64>>>(&bytes);
        compare::<BTreeMap<String, Newtype>>(&bytes);
        compare::<std::result::Result<SocketAddr, Duration>>(&bytes);
        compare::<CString>(&bytes);
        compare::<Vec<(i8, i16, i32, i64, bool)>>(&bytes);
        compare::<Vec<(u8, u16, u32, u64)>>(&bytes);
        compare::<Vec<Option<std::result::Result<(f32, [u8; 3]), (f64, char)>>>>(&bytes);
        compare::<Vec<(i128, u128)>>(&bytes);
        compare::<Vec<Flat>>(&bytes);
        compare::<BTreeMap<u8, Flat>>(&bytes);
        compare::<Vec<(Flat, String)>>(&bytes);
        compare::<Vec<NonZeroU8>>(&bytes);
    }

    #[test]
    fn random_bytes_never_panic(bytes in bytes()) {
        let _ = decode::<Tree>(&bytes);
        let _ = decode::<Wide>(&bytes);
        let _ = decode::<Nest>(&bytes);
        let _ = decode::<Chain>(&bytes);
        let _ = decode::<Vec<Tree>>(&bytes);
        let _ = decode::<(Vec<()>, Vec<Vec<Unit>>)>(&bytes);
        let _ = decode::<HashMap<(), Vec<()>>>(&bytes);
        let _ = decode::<de::IgnoredAny>(&bytes);
    }

    #[test]
    fn trees_decode_as_encoded(tree in tree()) {
        let bytes = postcard::to_stdvec(&tree).unwrap();
        compare::<Tree>(&bytes);
        prop_assert_eq!(decode::<Tree>(&bytes), Ok(tree));
    }

    #[test]
    fn records_decode_as_encoded(
        value: (Vec<u8>, Vec<u64>, String, Option<(i32, i128)>, std::result::Result<char, bool>),
        map: HashMap<String, Vec<Option<u16>>>,
    ) {
        let bytes = postcard::to_stdvec(&(&value, &map)).unwrap();
        prop_assert_eq!(decode(&bytes), Ok((value, map)));
    }
}
