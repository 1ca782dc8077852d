//! Fuzz targets for the decoding of calls: arguments, shapes of types, and bulks.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::sync::LazyLock;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bounded;
use crate::engine::encode_message;
use crate::fuzzing::script::{Script, script, written};
use crate::proto::{LeaseRange, LinkId, wire};
use crate::shape::{DeclarationNumbers, Encoded, Knowledge, Shape};
use crate::{Bulk, BulkMode, Engine};

/// A recursive type with all kinds of variants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum FuzzTree {
    Leaf,
    Number(u64, i32),
    Node(Box<FuzzTree>),
    Pair(Box<FuzzTree>, Box<FuzzTree>),
    Named { name: String, children: Vec<FuzzTree>, by_key: BTreeMap<u8, FuzzTree>, next: Option<Box<FuzzTree>> },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct FuzzRecord {
    id: u128,
    flag: bool,
    letter: char,
    name: String,
    bytes: Vec<u8>,
    rows: Vec<Vec<(u16, String)>>,
    nothing: Vec<()>,
    maybe: Option<Option<u8>>,
    outcome: Result<VecDeque<i64>, String>,
    fixed: [u8; 4],
    time: Duration,
}

/// Decoded without accounts, for most of its values, where it is an element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum FuzzCell {
    Empty,
    Numbers(u16, i64, u32),
    At { place: [u8; 3], is: Option<bool>, time: Duration },
    Next(Option<Box<FuzzCell>>),
    Named(String),
}

#[derive(Debug, Deserialize)]
struct FuzzBorrowed<'a> {
    key: &'a str,
    #[serde(borrow)]
    value: &'a [u8],
    #[serde(borrow)]
    more: Vec<&'a str>,
}

/// Bytes as arguments of several types. Each decoded value encodes and decodes to itself.
pub fn arguments(bytes: &[u8]) {
    check_round_trip::<FuzzTree>(bytes);
    check_round_trip::<FuzzRecord>(bytes);
    check_round_trip::<Vec<FuzzRecord>>(bytes);
    check_round_trip::<BTreeMap<String, Vec<FuzzTree>>>(bytes);
    check_round_trip::<(u8, i128, Option<String>, Box<str>)>(bytes);
    if let Ok(FuzzBorrowed { key, value, more }) = bounded::decode::<FuzzBorrowed<'_>>(bytes) {
        let inside = |piece: &[u8]| bytes.as_ptr_range().contains(&piece.as_ptr()) || piece.is_empty();
        assert!(inside(key.as_bytes()) && inside(value) && more.iter().all(|text| inside(text.as_bytes())));
    }
    // Postcard itself must accept what the bounded decoder accepts, with the same value.
    if let Ok(record) = bounded::decode::<FuzzRecord>(bytes) {
        assert_eq!(postcard::from_bytes::<FuzzRecord>(bytes).ok(), Some(record));
    }
    check_round_trip::<Vec<FuzzCell>>(bytes);
    if let Ok(cells) = bounded::decode::<BTreeMap<u8, FuzzCell>>(bytes) {
        assert_eq!(postcard::from_bytes::<BTreeMap<u8, FuzzCell>>(bytes).ok(), Some(cells));
    }
    if let Ok(cells) = bounded::decode::<Vec<FuzzCell>>(bytes) {
        check_elements(&cells);
        assert_eq!(postcard::from_bytes::<Vec<FuzzCell>>(bytes).ok(), Some(cells));
    }
}

/// A list is encoded as postcard does, and shows of its type what it shows by itself, also when it is known from before.
fn check_elements(cells: &Vec<FuzzCell>) {
    let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
    let shape = Shape::of_value(cells);
    for _ in 0..2 {
        let mut bytes = Vec::new();
        let declared = knowledge.encode(cells, &mut bytes, &numbers).expect("what was decoded can be encoded");
        assert_eq!(bytes, encoded(cells));
        let Encoded::As(declared) = declared else { panic!("one type does not contradict itself") };
        assert_eq!(Shape::decode(&declared.shape).as_ref(), Some(&shape));
    }
}

fn check_round_trip<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    let Ok(value) = bounded::decode::<T>(bytes) else { return };
    let mut again = Vec::new();
    wire::encode(&value, &mut again).expect("what was decoded can be encoded");
    assert_eq!(bounded::decode::<T>(&again).as_ref(), Ok(&value));
}

/// The shape of a peer's arguments, as bytes: it encodes and decodes to itself, its text is short, and comparing it with
/// those of types, and with itself, takes bounded time.
pub fn shapes(bytes: &[u8]) {
    static TYPES: LazyLock<Vec<Shape>> = LazyLock::new(|| {
        vec![
            Shape::of_type::<FuzzTree>(),
            Shape::of_type::<FuzzRecord>(),
            Shape::of_type::<Vec<FuzzTree>>(),
            Shape::of_type::<(u8, String)>(),
        ]
    });
    let Some(shape) = Shape::decode(bytes) else { return };
    let mut again = Vec::new();
    shape.encode(&mut again);
    assert_eq!(Shape::decode(&again).as_ref(), Some(&shape));
    assert!(shape.to_string().len() <= 400, "{shape}");
    for of_type in TYPES.iter() {
        let _ = of_type.accepts(&shape) || shape.accepts(of_type);
    }
    let _ = shape.accepts(&shape);
}

script! {
    /// How a received bulk is used.
    struct Use { leases: u8, first: u64, offset: u64, len: u64 }
}

/// Bulks from a peer: decoded with leases or without, sliced, and forwarded.
pub fn bulk(mut bytes: &[u8]) {
    static ENGINE: LazyLock<Engine> = LazyLock::new(|| Engine::client("loop").expect("an engine"));
    let shared = ENGINE.shared();
    let what = Use::read(&mut bytes);
    let leases = LeaseRange { first: what.first, count: u32::from(what.leases) };
    let decoded = crate::engine::decoding(shared, LinkId::default(), leases, || bounded::decode::<Vec<Bulk>>(bytes));
    let Ok(bulks) = decoded else { return };
    for bulk in &bulks {
        assert!(format!("{bulk:?}").len() < 2000 + bytes.len());
        let (offset, len) = (what.offset as usize, what.len as usize);
        let inside = offset.checked_add(len).is_some_and(|end| end <= bulk.len());
        match bulk.slice(offset, len) {
            Ok(part) => {
                assert!(inside && part.len() == len && part.mode() == bulk.mode());
                check_forwarded(&part);
            }
            // A range whose end overflows is refused, too.
            Err(_) => assert!(!inside || bulk.slice(0, 0).is_err() || overflows(bulk, what.offset)),
        }
        check_forwarded(bulk);
    }
}

/// The peer chooses the offset of the bulk, so that the end of a part may overflow.
fn overflows(bulk: &Bulk, offset: u64) -> bool {
    bulk.slice(usize::try_from(offset).unwrap_or(usize::MAX), 0).is_err()
}

/// A bulk that is forwarded decodes to the same bulk.
fn check_forwarded(bulk: &Bulk) {
    let shared = LazyLock::force(&NEXT_ENGINE).shared();
    let (mut bytes, mut held) = (Vec::new(), Vec::new());
    encode_message(bulk, &mut bytes, &mut held, shared, &Knowledge::new(None)).expect("a bulk can be encoded");
    let leases = LeaseRange { first: 0, count: held.len() as u32 };
    let again = crate::engine::decoding(shared, LinkId::default(), leases, || bounded::decode::<Bulk>(&bytes)).expect("a bulk");
    assert_eq!((again.len(), again.mode(), again.segment_count()), (bulk.len(), bulk.mode(), bulk.segment_count()));
    assert_eq!(format!("{again:?}"), format!("{bulk:?}"));
}

static NEXT_ENGINE: LazyLock<Engine> = LazyLock::new(|| Engine::client("loop").expect("an engine"));

fn encoded<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(value, &mut bytes).expect("it can be encoded");
    bytes
}

fn trees() -> [FuzzTree; 2] {
    let leaf = || Box::new(FuzzTree::Leaf);
    let node = FuzzTree::Node(Box::new(FuzzTree::Pair(leaf(), Box::new(FuzzTree::Number(1 << 40, -5)))));
    let by_key = BTreeMap::from([(1, node.clone()), (2, FuzzTree::Leaf)]);
    [node.clone(), FuzzTree::Named { name: "root".into(), children: vec![node, FuzzTree::Leaf], by_key, next: Some(leaf()) }]
}

fn record() -> FuzzRecord {
    FuzzRecord {
        id: 1 << 100,
        flag: true,
        letter: 'ß',
        name: "name".into(),
        bytes: vec![1, 2, 3],
        rows: vec![vec![(300, "cell".into())], vec![]],
        nothing: vec![(); 5],
        maybe: Some(None),
        outcome: Ok(VecDeque::from([-1, 2])),
        fixed: [4; 4],
        time: Duration::from_millis(1500),
    }
}

fn cells() -> Vec<FuzzCell> {
    let at = FuzzCell::At { place: [1, 2, 3], is: Some(true), time: Duration::from_millis(1500) };
    let next = FuzzCell::Next(Some(Box::new(FuzzCell::Next(None))));
    vec![FuzzCell::Empty, FuzzCell::Numbers(300, -1 << 40, 7), at, next, FuzzCell::Named("cell".into())]
}

pub(crate) fn seeds_of_arguments() -> Vec<(&'static str, Vec<u8>)> {
    let [node, root] = trees();
    let map = BTreeMap::from([("key".to_owned(), vec![FuzzTree::Leaf, node.clone()])]);
    vec![
        ("tree", encoded(&root)),
        ("node", encoded(&node)),
        ("record", encoded(&record())),
        ("map", encoded(&map)),
        ("borrowed", encoded(&("key", &[1u8, 2][..], vec!["one", "two"]))),
        ("cells", encoded(&cells())),
        ("free", encoded(&(1u8, vec![(); 5000]))),
    ]
}

pub(crate) fn seeds_of_shapes() -> Vec<(&'static str, Vec<u8>)> {
    let of = |shape: Shape| {
        let mut bytes = Vec::new();
        shape.encode(&mut bytes);
        bytes
    };
    vec![
        ("tree_type", of(Shape::of_type::<FuzzTree>())),
        ("record_type", of(Shape::of_type::<FuzzRecord>())),
        ("tree_value", of(Shape::of_value(&trees()[1]))),
        ("record_value", of(Shape::of_value(&record()))),
        ("array", of(Shape::of_type::<([u64; 32], Vec<u8>, Option<bool>)>())),
    ]
}

pub(crate) fn seeds_of_bulk() -> Vec<(&'static str, Vec<u8>)> {
    let engine = Engine::server("loop://").expect("an engine");
    let plain = engine.expose(vec![7u8; 100], BulkMode::ReadWrite).expect("exposed");
    let content = engine.expose_read_only(b"content".to_vec()).expect("exposed");
    let seed = |what: Use, bulks: &[Bulk]| {
        let mut bytes = Vec::new();
        encode_message(bulks, &mut bytes, &mut Vec::new(), engine.shared(), &Knowledge::new(None)).expect("encoded");
        [written(&[what]), bytes].concat()
    };
    let part = Use { leases: 2, first: 5, offset: 10, len: 20 };
    vec![
        ("one", seed(part.clone(), &[plain.bulk()])),
        ("content", seed(Use { offset: 1, len: 3, ..part.clone() }, &[content.bulk()])),
        ("two", seed(part.clone(), &[plain.bulk(), content.bulk().slice(2, 3).expect("inside")])),
        ("no_leases", seed(Use { leases: 0, ..part }, &[plain.bulk()])),
    ]
}
