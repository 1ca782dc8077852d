//! Any serde type can be an argument and a result.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet, LinkedList, VecDeque};
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU8, NonZeroU64, Wrapping};
use std::ops::{Bound, Range};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use calomel::{Address, Request};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::support::{Net, Pair};

/// Calls a procedure that returns its argument, with each value.
fn echo<T>(pair: &Pair, values: impl IntoIterator<Item = T>)
where
    T: Serialize + DeserializeOwned + PartialEq + Debug + Send + 'static,
{
    let name = std::any::type_name::<T>();
    let registration = pair.server.define(name, |_: &Request, value: T| value).unwrap();
    let echo = pair.client.procedure::<T, T>(name);
    for value in values {
        assert_eq!(echo.on(&pair.to_server).call(&value).unwrap(), value, "{name}");
    }
    registration.remove();
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone, Default)]
struct Named {
    id: u32,
    name: String,
    tags: Vec<String>,
    inner: Option<Box<Named>>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Unit;
#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Newtype(u64);
#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Pairwise(i8, String);
#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Empty {}
#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Generic<A, B> {
    a: A,
    b: Vec<B>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
enum Shape {
    Nothing,
    Circle(f64),
    Line(i32, i32),
    Rectangle { width: u16, height: u16 },
    Group(Vec<Shape>),
    Named(Named),
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Tree {
    value: i64,
    children: Vec<Tree>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
#[serde(rename_all = "camelCase")]
struct Attributes {
    some_field: u8,
    #[serde(skip)]
    skipped: u32,
    #[serde(with = "millis")]
    span: Duration,
    #[serde(rename = "else")]
    other: Transparent,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
#[serde(transparent)]
struct Transparent {
    only: u16,
}

mod millis {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub fn serialize<S: Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(d.as_millis() as u64)
    }
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        u64::deserialize(d).map(Duration::from_millis)
    }
}

fn numbers_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    echo(&pair, [0, 1, u8::MAX]);
    echo(&pair, [i8::MIN, -1, i8::MAX]);
    echo(&pair, [0, u16::MAX]);
    echo(&pair, [i16::MIN, i16::MAX]);
    echo(&pair, [0, 127, 128, u32::MAX]);
    echo(&pair, [i32::MIN, i32::MAX]);
    echo(&pair, [0, u64::MAX]);
    echo(&pair, [i64::MIN, i64::MAX]);
    echo(&pair, [0, 1 << 64, u128::MAX]);
    echo(&pair, [i128::MIN, -1, i128::MAX]);
    echo(&pair, [0, usize::MAX]);
    echo(&pair, [isize::MIN, isize::MAX]);
    echo(&pair, [0.0, -0.5, f32::MAX, f32::INFINITY, f32::MIN_POSITIVE]);
    echo(&pair, [0.0, f64::MIN, f64::NEG_INFINITY, f64::EPSILON]);
    echo(&pair, [NonZeroU8::MIN, NonZeroU8::MAX]);
    echo(&pair, [NonZeroU64::MIN, NonZeroU64::MAX]);
    echo(&pair, [Wrapping(5u32)]);
    echo(&pair, [true, false]);
    echo(&pair, ['a', 'ß', '\0', char::MAX]);
    pair.server.define("nan", |_: &Request, x: f64| x).unwrap();
    assert!(pair.client.procedure::<f64, f64>("nan").on(&pair.to_server).call(&f64::NAN).unwrap().is_nan());
}

fn texts_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    echo(&pair, ["", "text", "Grüße, 世界 \u{10ffff}\0"].map(String::from));
    echo(&pair, [Box::<str>::from("boxed")]);
    echo(&pair, [Arc::<str>::from("shared")]);
    echo(&pair, [Cow::<'static, str>::Owned("cow".into())]);
    echo(&pair, [PathBuf::from("/some/where")]);
}

fn units_and_tuples_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    echo(&pair, [()]);
    echo(&pair, [Unit]);
    echo(&pair, [Empty {}]);
    echo(&pair, [(1u8,)]);
    echo(&pair, [(1u8, -2i16, 3u32, -4i64, 5u128, 'x', true, 0.5f32, String::from("nine"), ())]);
    echo(&pair, [((((), 1u8), [2u16; 3]), (Some(3u32), (4u64,)))]);
    echo(&pair, [[0u8; 32]]);
    echo::<[String; 2]>(&pair, [["a".into(), "b".into()]]);
    echo::<[u64; 0]>(&pair, [[]]);
}

fn options_and_results_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    echo(&pair, [None, Some(1u32)]);
    echo(&pair, [None, Some(None), Some(Some(()))]);
    echo::<Result<u32, String>>(&pair, [Ok(1), Err("no".into())]);
    echo::<Result<(), ()>>(&pair, [Ok(()), Err(())]);
    echo::<Option<Result<Vec<u8>, Option<Named>>>>(&pair, [None, Some(Ok(vec![1])), Some(Err(Some(Named::default())))]);
}

fn collections_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    echo::<Vec<u64>>(&pair, [vec![], vec![1], (0..1000).collect()]);
    echo::<Vec<()>>(&pair, [vec![(); 100]]);
    echo::<Vec<Vec<Vec<i32>>>>(&pair, [vec![vec![], vec![vec![1, 2], vec![]]]]);
    echo::<VecDeque<u8>>(&pair, [(0..50).collect()]);
    echo::<LinkedList<String>>(&pair, [LinkedList::from(["a".to_owned(), "b".to_owned()])]);
    echo::<HashMap<String, Vec<u32>>>(&pair, [HashMap::new(), (0..50).map(|i| (i.to_string(), vec![i])).collect()]);
    echo::<BTreeMap<(u8, char), Option<f64>>>(&pair, [[((1, 'a'), None), ((2, 'b'), Some(0.5))].into()]);
    echo::<HashSet<i64>>(&pair, [(-5..5).collect()]);
    echo::<BTreeSet<String>>(&pair, [["z".to_owned(), "a".to_owned()].into()]);
    echo::<Box<[u16]>>(&pair, [Box::from([1, 2, 3])]);
    pair.server.define("heap", |_: &Request, heap: BinaryHeap<u32>| heap.into_sorted_vec()).unwrap();
    let heap = pair.client.procedure::<BinaryHeap<u32>, Vec<u32>>("heap");
    assert_eq!(heap.on(&pair.to_server).call(&[3, 1, 2].into()).unwrap(), [1, 2, 3]);
}

fn structs_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    let inner = Named { id: 1, name: "inner".into(), tags: vec!["t".into(); 3], inner: None };
    let outer = Named { id: 2, inner: Some(Box::new(inner.clone())), ..Named::default() };
    echo(&pair, [inner, outer]);
    echo(&pair, [Newtype(u64::MAX)]);
    echo(&pair, [Pairwise(-1, "one".into())]);
    echo(&pair, [Generic { a: Unit, b: vec![Some('x'), None] }]);
    echo(&pair, [Generic { a: Some(1u8), b: vec![Newtype(1)] }]);
    let attributes = Attributes { some_field: 1, skipped: 0, span: Duration::from_millis(1500), other: Transparent { only: 7 } };
    echo(&pair, [attributes]);
}

fn enums_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    let group = Shape::Group(vec![Shape::Nothing, Shape::Group(vec![Shape::Circle(0.5)]), Shape::Line(-1, 1)]);
    echo(
        &pair,
        [Shape::Nothing, Shape::Circle(1.5), Shape::Rectangle { width: 1, height: 2 }, group, Shape::Named(Named::default())],
    );
    echo::<Vec<Shape>>(&pair, [vec![Shape::Nothing, Shape::Line(1, 2)]]);
}

fn recursive_types_are_returned_unchanged(net: &Net) {
    fn tree(depth: i64) -> Tree {
        Tree { value: depth, children: (0..2.min(depth)).map(|_| tree(depth - 1)).collect() }
    }
    let pair = net.pair();
    echo(&pair, [tree(0), tree(1), tree(8)]);
}

fn times_addresses_and_ranges_are_returned_unchanged(net: &Net) {
    let pair = net.pair();
    echo(&pair, [Duration::ZERO, Duration::MAX, Duration::from_nanos(1)]);
    echo::<SystemTime>(&pair, [UNIX_EPOCH + Duration::from_secs(1)]);
    echo::<IpAddr>(&pair, ["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()]);
    echo::<SocketAddr>(&pair, ["[::1]:80".parse().unwrap()]);
    echo::<Range<u32>>(&pair, std::iter::once(1..5));
    echo(&pair, [Bound::Included(1u8), Bound::Unbounded]);
    echo::<Address>(&pair, [pair.server.address(), "shm://x".parse().unwrap()]);
}

fn borrowed_and_shared_pointers_are_accepted(net: &Net) {
    let pair = net.pair();
    echo(&pair, [Arc::new(Named::default())]);
    echo(&pair, [Box::new(Newtype(1))]);
    // A type that is not `Send` can still be an argument: it is used on the thread that decodes it.
    pair.server.define("rc", |_: &Request, n: Rc<u32>| *n + 1).unwrap();
    assert_eq!(pair.client.procedure::<Rc<u32>, u32>("rc").on(&pair.to_server).call(&Rc::new(1)).unwrap(), 2);
}

fn bulks_inside_other_types_are_usable(net: &Net) {
    #[derive(Serialize, Deserialize)]
    struct Work {
        name: String,
        inputs: Vec<calomel::Bulk>,
        output: Option<calomel::Bulk>,
    }
    let pair = net.pair();
    pair.server
        .define("join", |request: &Request, work: Work| -> Result<usize, String> {
            let fail = |e: calomel::Error| e.to_string();
            let mut joined = work.name.into_bytes();
            for input in &work.inputs {
                let mut part = vec![0u8; input.len()];
                input.on(request.endpoint()).pull_into(&mut part).map_err(fail)?;
                joined.extend(part);
            }
            let output = work.output.ok_or("no output")?;
            output.on(request.endpoint()).push_from(&joined).map_err(fail)
        })
        .unwrap();
    let parts: Vec<_> =
        ["ab", "", "cde"].map(|part| pair.client.expose_read_only(part.to_owned()).unwrap()).into_iter().collect();
    let output = pair.client.expose(vec![0u8; 6], calomel::BulkMode::WriteOnly).unwrap();
    let work =
        |output: Option<calomel::Bulk>| Work { name: "_".into(), inputs: parts.iter().map(|part| part.bulk()).collect(), output };
    let join = pair.client.procedure::<Work, Result<usize, String>>("join");
    assert_eq!(join.on(&pair.to_server).call(&work(None)).unwrap(), Err("no output".into()));
    assert_eq!(join.on(&pair.to_server).call(&work(Some(output.bulk()))).unwrap(), Ok(6));
    assert_eq!(output.reclaim(), b"_abcde");
}

suite![
    numbers_are_returned_unchanged,
    texts_are_returned_unchanged,
    units_and_tuples_are_returned_unchanged,
    options_and_results_are_returned_unchanged,
    collections_are_returned_unchanged,
    structs_are_returned_unchanged,
    enums_are_returned_unchanged,
    recursive_types_are_returned_unchanged,
    times_addresses_and_ranges_are_returned_unchanged,
    borrowed_and_shared_pointers_are_accepted,
    bulks_inside_other_types_are_usable,
];
