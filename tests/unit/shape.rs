//! Tests of shapes: what types and values show, which shapes a type accepts, and the limits of their encoding.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet, LinkedList, VecDeque};
use std::ffi::{CString, OsString};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::{NonZeroI8, NonZeroU32, NonZeroU128, Wrapping};
use std::ops::{Bound, Range, RangeInclusive};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, IgnoredAny, SeqAccess, VariantAccess, Visitor,
};
use serde::ser::{SerializeStruct, SerializeTuple, Serializer};
use serde::{Deserialize, Serialize};

use super::*;

#[path = "shape/choosy.rs"]
mod choosy;
#[path = "shape/lists.rs"]
mod lists;

fn text_of<T: DeserializeOwned>() -> String {
    Shape::of_type::<T>().to_string()
}

fn text<T: Serialize + ?Sized>(value: &T) -> String {
    Shape::of_value(value).to_string()
}

fn encoded(shape: &Shape) -> Vec<u8> {
    let mut bytes = Vec::new();
    shape.encode(&mut bytes);
    bytes
}

/// Encodes and decodes a shape, which must not change.
fn sent(shape: &Shape) -> Shape {
    let received = Shape::decode(&encoded(shape)).unwrap_or_else(|| panic!("cannot decode {shape}"));
    assert_eq!(&received, shape);
    received
}

/// Asserts that a value is encoded as postcard does, and that the receiver's type accepts its shape.
#[track_caller]
fn round_trips_as<A: Serialize, B: DeserializeOwned>(value: &A) {
    let (ty, shape) = (sent(&Shape::of_type::<B>()), sent(&Shape::of_value(value)));
    assert!(ty.accepts(&shape), "{ty} refuses {shape}");
    let (mut encoded, bytes) = (Vec::new(), postcard::to_stdvec(value).unwrap());
    encoder::encode_alone(value, &mut encoded).unwrap();
    assert_eq!(encoded, bytes, "as {shape}");
    let (_, rest) = postcard::take_from_bytes::<B>(&bytes).unwrap();
    assert!(rest.is_empty());
}

#[track_caller]
fn round_trips<T: Serialize + DeserializeOwned>(value: T) {
    round_trips_as::<T, T>(&value);
}

#[track_caller]
fn refused<B: DeserializeOwned>(value: &(impl Serialize + ?Sized)) {
    let (ty, shape) = (sent(&Shape::of_type::<B>()), sent(&Shape::of_value(value)));
    assert!(!ty.accepts(&shape), "{ty} accepts {shape}");
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Point {
    x: f64,
    y: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Unit;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Empty {}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Meters(f64);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Pair(i32, String);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Wrapper<T> {
    inner: T,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Event {
    Quit,
    Key(char),
    Click(i32, i32),
    Resize { width: u32, height: u32 },
    Nested(Inner),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Inner {
    A(Vec<u8>),
    B { point: Option<Point> },
    C,
}

/// An array longer than serde's own, as serde-big-array writes and reads it.
struct Array<const N: usize>([u8; N]);

impl<const N: usize> Serialize for Array<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut elements = serializer.serialize_tuple(N)?;
        for element in &self.0 {
            elements.serialize_element(element)?;
        }
        elements.end()
    }
}

impl<'de, const N: usize> Deserialize<'de> for Array<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<const N: usize>;
        impl<'de, const N: usize> Visitor<'de> for Reader<N> {
            type Value = Array<N>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{N} bytes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Array<N>, A::Error> {
                let mut array = [0; N];
                for element in &mut array {
                    *element = elements.next_element()?.ok_or_else(|| de::Error::custom("too short"))?;
                }
                Ok(Array(array))
            }
        }
        deserializer.deserialize_tuple(N, Reader)
    }
}

fn events() -> Vec<Event> {
    vec![
        Event::Quit,
        Event::Key('x'),
        Event::Click(1, 2),
        Event::Resize { width: 1, height: 2 },
        Event::Nested(Inner::A(vec![1])),
        Event::Nested(Inner::B { point: None }),
        Event::Nested(Inner::B { point: Some(Point::default()) }),
        Event::Nested(Inner::C),
    ]
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Tree {
    value: u32,
    children: Vec<Tree>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum List {
    Cons(u32, Box<List>),
    Nil,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Expr {
    Add(Box<Expr>, Box<Expr>),
    Neg(Box<Expr>),
    Call { name: String, arguments: Vec<Expr> },
    Literal(i32),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Chain {
    before: u8,
    next: Option<Box<Chain>>,
    after: String,
}

mod other {
    use super::*;

    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub enum Expr {
        Add(Box<Expr>, Box<Expr>),
        Neg(Box<Expr>),
        Call { name: String, arguments: Vec<Expr> },
        Literal(i64),
    }

    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub enum Event {
        Quit,
        Key(char),
        Click(i32, i32),
        Resize { width: u32, height: u32, depth: u32 },
        Nested(Inner),
    }

    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub enum Inner {
        A(Vec<u8>),
        B { point: Option<(f64, f64)> },
    }

    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub enum Renamed {
        Stop,
        Key(char),
    }

    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub struct SamePoint {
        pub x: f64,
        pub y: f64,
    }
}

#[test]
fn text_of_a_type_is_readable() {
    assert_eq!(text_of::<(i32, i32)>(), "(i32, i32)");
    assert_eq!(text_of::<Point>(), "Point { x: f64, y: f64 }");
    assert_eq!(text_of::<Vec<u8>>(), "[u8]");
    assert_eq!(text_of::<()>(), "()");
    assert_eq!(text_of::<(Meters,)>(), "(f64,)");
    assert_eq!(text_of::<Pair>(), "(i32, str)");
    assert_eq!(text_of::<[u8; 32]>(), "[u8; 32]");
    assert_eq!(text_of::<(u8, [[f32; 3]; 8])>(), "(u8, [(f32, f32, f32); 8])");
    assert_eq!(text_of::<(u8, u8, u8, u8, u8, u8, u16)>(), "(6 × u8, u16)");
    assert_eq!(text_of::<HashMap<String, Option<usize>>>(), "{str: Option<u64>}");
    assert_eq!(text_of::<Option<Option<bool>>>(), "Option<Option<bool>>");
    assert_eq!(text_of::<Empty>(), "Empty {}");
    assert_eq!(
        text_of::<Event>(),
        "Event::{Quit, Key(char), Click(i32, i32), Resize { width: u32, height: u32 }, \
         Nested(Inner::{A([u8]), B { point: Option<Point { x: f64, y: f64 }> }, C})}"
    );
    assert_eq!(text_of::<Tree>(), "Tree { value: u32, children: [Tree] }");
    assert_eq!(text_of::<List>(), "List::{Cons(u32, List), Nil}");
    assert_eq!(text_of::<Expr>(), "Expr::{Add(Expr, Expr), Neg(Expr), Call { name: str, arguments: [Expr] }, Literal(i32)}");
    assert_eq!(text_of::<Chain>(), "Chain { before: u8, next: Option<Chain>, after: str }");
    assert_eq!(text_of::<IgnoredAny>(), "?");
}

#[test]
fn text_of_a_value_is_readable() {
    assert_eq!(text(&Event::Click(1, 2)), "Event::Click(i32, i32)");
    assert_eq!(text(&Event::Resize { width: 1, height: 1 }), "Event::Resize { width: u32, height: u32 }");
    assert_eq!(text(&Event::Quit), "Event::Quit");
    assert_eq!(text(&[Event::Quit, Event::Key('a')][..]), "[Event::{Quit, Key(char)}]");
    assert_eq!(text(&Vec::<u32>::new()), "[?]");
    assert_eq!(text(&None::<u32>), "Option<?>");
    assert_eq!(text(&Array([7u8; 1024])), "[u8; 1024]");
}

#[test]
fn long_text_is_clipped() {
    let long = text(&vec![[events(), events()]; 4].iter().map(|e| (e, [0u8; 9], "", e, "", e)).collect::<Vec<_>>());
    assert!(long.len() <= 310 && long.ends_with('…'), "{long}");
}

#[test]
fn plain_values_are_accepted_by_their_type() {
    round_trips(());
    round_trips(true);
    round_trips((1i8, 2i16, 3i32, 4i64, 5i128, 6isize));
    round_trips((1u8, 2u16, 3u32, 4u64, 5u128, 6usize));
    round_trips((1.5f32, 2.5f64, 'ß', String::from("text")));
    round_trips_as::<usize, u64>(&1);
    round_trips_as::<i64, isize>(&-1);
    round_trips((0u8, 1u16, 2u32, 3u64, 4i8, 5i16, 6i32, 7i64, 8f32, 9f64, 'a', true, (), 13u8, 14u16, 15u32));
    round_trips([0u8; 0]);
    round_trips([1u16; 32]);
    round_trips([[(1u8, 2u16); 3]; 4]);
    round_trips(Unit);
    round_trips(Empty {});
    round_trips(Meters(1.0));
    round_trips(Pair(1, "a".into()));
    round_trips(Wrapper { inner: Wrapper { inner: Wrapper { inner: 1u8 } } });
    round_trips((Wrapper { inner: 1u8 }, Wrapper { inner: "a".to_string() }, Wrapper { inner: Wrapper { inner: () } }));
    round_trips_as::<_, other::SamePoint>(&Point::default());
}

#[test]
fn std_values_are_accepted_by_their_type() {
    round_trips(vec![1u8, 2, 3]);
    round_trips(Vec::<String>::new());
    round_trips(vec![vec![], vec![vec![1u8]], vec![vec![], vec![]]]);
    round_trips(VecDeque::from([1, 2]));
    round_trips(LinkedList::from([1, 2]));
    round_trips_as::<_, Vec<i32>>(&BinaryHeap::from([1, 2]));
    round_trips_as::<_, BTreeSet<char>>(&HashSet::from(['a', 'b']));
    round_trips(HashMap::from([(1u8, "a".to_string())]));
    round_trips(BTreeMap::from([((1, 'a'), vec![Some(1u8), None])]));
    round_trips(BTreeMap::<String, Event>::new());
    round_trips_as::<_, Vec<u32>>(&&[1u32, 2][..]);
    round_trips(Some(1u8));
    round_trips(None::<String>);
    round_trips((None::<Option<u8>>, Some(None::<u8>), Some(Some(1u8))));
    round_trips(Ok::<u8, String>(1));
    round_trips(Err::<u8, String>("no".into()));
    round_trips(Box::new(1u8));
    round_trips(Arc::new(String::new()));
    round_trips(Rc::new([1u8, 2]));
    round_trips(Arc::<str>::from("a"));
    round_trips(Box::<[u16]>::from([1, 2]));
    round_trips_as::<_, String>(&"text");
    round_trips_as::<_, Cow<'static, str>>(&Cow::Borrowed("text"));
    round_trips(Cow::<[u8]>::Borrowed(&[1, 2]));
    round_trips(PhantomData::<Event>);
    round_trips(Wrapping(1u8));
    round_trips(std::cmp::Reverse(1u8));
    round_trips(Cell::new(1u8));
    round_trips(Mutex::new(String::new()));
    round_trips(AtomicU32::new(0));
    round_trips((NonZeroU32::MIN, NonZeroI8::MAX, Some(NonZeroU128::MAX), None::<NonZeroU32>, 7u8));
    round_trips(Duration::from_millis(1500));
    round_trips((SystemTime::now(), UNIX_EPOCH, 1u8));
    round_trips(1..3u8);
    round_trips((RangeInclusive::new(1.0, 2.0), Range { start: 'a', end: 'b' }, 1.., ..2));
    round_trips((Bound::<u8>::Unbounded, Bound::Included(1u8), Bound::Excluded("a".to_string())));
    round_trips(PathBuf::from("/tmp"));
    round_trips(OsString::from("a"));
    round_trips(CString::new("a").unwrap());
    round_trips((IpAddr::from([127, 0, 0, 1]), IpAddr::from(Ipv6Addr::LOCALHOST), Ipv4Addr::LOCALHOST, 1u8));
    round_trips(("127.0.0.1:80".parse::<SocketAddr>().unwrap(), "[::1]:80".parse::<SocketAddr>().unwrap()));
}

#[test]
fn enums_and_recursive_values_are_accepted_by_their_type() {
    for event in events() {
        round_trips((event.clone(), 7u8));
        round_trips(vec![event]);
    }
    round_trips(events());
    round_trips([events(), vec![], events()]);
    let tree = |children| Tree { value: 1, children };
    round_trips(tree(vec![]));
    round_trips((tree(vec![tree(vec![]), tree(vec![tree(vec![]), tree(vec![tree(vec![])])])]), 1u8));
    round_trips((List::Cons(1, Box::new(List::Cons(2, Box::new(List::Nil)))), 'a'));
    let literal = |value| Box::new(Expr::Literal(value));
    round_trips(Expr::Add(
        literal(1),
        Box::new(Expr::Neg(Box::new(Expr::Call { name: "f".into(), arguments: vec![*literal(1), Expr::Neg(literal(2))] }))),
    ));
    let chain = |next| Chain { before: 1, next, after: String::new() };
    round_trips(chain(Some(Box::new(chain(Some(Box::new(chain(None))))))));
}

#[test]
fn borrowing_types_are_traced() {
    #[derive(Serialize, Deserialize)]
    struct Borrowed<'a> {
        #[serde(borrow)]
        text: &'a str,
        bytes: &'a [u8],
        #[serde(borrow)]
        cow: Cow<'a, str>,
    }
    let value = Borrowed { text: "a", bytes: &[1], cow: "b".into() };
    let ty = Shape::of_type::<Borrowed<'_>>();
    assert_eq!(ty.to_string(), "Borrowed { text: str, bytes: bytes, cow: str }");
    assert!(ty.accepts(&Shape::of_value(&value)));
    assert!(!ty.accepts(&Shape::of_value(&("a", "b", "c"))));
    assert!(Shape::of_type::<&[u8]>().accepts(&Shape::of_value(&vec![1u8])));
    assert!(!Shape::of_type::<&[u8]>().accepts(&Shape::of_value(&vec![1i8])));
    assert!(!Shape::of_type::<&[u8]>().accepts(&Shape::of_value("text")));
    assert!(!Shape::of_type::<&str>().accepts(&Shape::of_value(&vec![1u8])));
}

/// Encodes as serde_bytes does.
struct Blob(Vec<u8>);

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

#[test]
fn bytes_are_accepted_as_a_sequence_of_u8() {
    round_trips_as::<_, Vec<u8>>(&Blob(vec![1, 2]));
    refused::<Vec<u16>>(&Blob(vec![1]));
    refused::<String>(&Blob(vec![1]));
    refused::<(u8, u8)>(&Blob(vec![1, 2]));
}

#[test]
fn different_types_are_refused() {
    refused::<(i64, i64)>(&(1i32, 2i32));
    refused::<(i32, i32)>(&(1i64, 2i64));
    refused::<Vec<u32>>("text");
    refused::<String>(&vec![1u32]);
    refused::<String>(&vec![1u8]);
    refused::<u32>(&1i32);
    refused::<u8>(&true);
    refused::<bool>(&1u8);
    refused::<char>("a");
    refused::<f32>(&1f64);
    refused::<u32>(&'a');
    refused::<u64>(&1u128);
    refused::<()>(&1u8);
    refused::<u8>(&());
    refused::<(u8,)>(&1u8);
    refused::<(u8, u8)>(&(1u8, 2u8, 3u8));
    refused::<(u8, u8, u16)>(&(1u8, 2u16, 3u16));
    refused::<[u8; 3]>(&[1u8; 4]);
    refused::<[u8; 4]>(&vec![1u8; 4]);
    refused::<Vec<u8>>(&[1u8; 4]);
    refused::<Vec<(u8, u8)>>(&HashMap::from([(1u8, 2u8)]));
    refused::<HashMap<u8, u8>>(&vec![(1u8, 2u8)]);
    refused::<HashMap<u8, u16>>(&HashMap::from([(1u8, 2u8)]));
    refused::<HashMap<u16, u8>>(&HashMap::from([(1u8, 2u8)]));
    refused::<Vec<u8>>(&vec![1i8]);
    refused::<Option<u8>>(&1u8);
    refused::<u8>(&Some(1u8));
    refused::<u8>(&None::<u8>);
    refused::<Option<u8>>(&Some(1u16));
    refused::<Option<u8>>(&Some(Some(1u8)));
    refused::<Option<Option<u8>>>(&Some(1u8));
    refused::<Result<u8, String>>(&Ok::<u16, String>(1));
    refused::<Result<u8, String>>(&Err::<u8, u8>(1));
    refused::<Result<u8, String>>(&Some(1u8));
    refused::<NonZeroU32>(&1u64);
    refused::<Duration>(&1u64);
    refused::<SystemTime>(&Duration::ZERO);
    refused::<IpAddr>(&Ipv4Addr::LOCALHOST);
    refused::<(f64, f64)>(&Point::default());
    refused::<Point>(&(1.0, 2.0));
    refused::<Meters>(&1f32);
    refused::<Vec<Meters>>(&vec![1f32]);
    refused::<Vec<Vec<u8>>>(&vec![vec![], vec![], vec![1i8]]);
    refused::<Vec<Vec<u8>>>(&Vec::<String>::from(["a".to_string()]));
    refused::<(Vec<u8>, u8)>(&(Vec::<u16>::new(), 1u16));
}

#[test]
fn different_structs_are_refused() {
    #[derive(Serialize, Deserialize)]
    struct More {
        x: f64,
        y: f64,
        z: f64,
    }
    #[derive(Serialize, Deserialize)]
    struct Reordered {
        y: f64,
        x: f64,
    }
    #[derive(Serialize, Deserialize)]
    struct Renamed {
        x: f64,
        why: f64,
    }
    #[derive(Serialize, Deserialize)]
    struct Retyped {
        x: f64,
        y: f32,
    }
    refused::<More>(&Point::default());
    refused::<Point>(&More { x: 0.0, y: 0.0, z: 0.0 });
    refused::<Reordered>(&Point::default());
    refused::<Point>(&Renamed { x: 0.0, why: 0.0 });
    refused::<Point>(&Retyped { x: 0.0, y: 0.0 });
    refused::<Vec<Option<Point>>>(&vec![None, Some(Retyped { x: 0.0, y: 0.0 })]);
    refused::<Wrapper<Wrapper<u8>>>(&Wrapper { inner: 1u8 });
    refused::<Wrapper<Wrapper<u8>>>(&Wrapper { inner: Wrapper { inner: 1u16 } });
    refused::<Empty>(&Point::default());
}

#[test]
fn different_enums_are_refused() {
    refused::<other::Event>(&Event::Resize { width: 1, height: 1 });
    refused::<Event>(&other::Event::Resize { width: 1, height: 1, depth: 1 });
    refused::<Vec<Event>>(&[other::Event::Quit, other::Event::Resize { width: 1, height: 1, depth: 1 }][..]);
    refused::<other::Event>(&Event::Nested(Inner::B { point: Some(Point::default()) }));
    refused::<other::Event>(&Event::Nested(Inner::C));
    refused::<other::Renamed>(&Event::Quit);
    refused::<Event>(&other::Renamed::Stop);
    refused::<Expr>(&List::Nil);
    refused::<u32>(&Event::Quit);
    refused::<Event>(&0u32);
    // Variants that both have in common are accepted.
    round_trips_as::<_, other::Event>(&Event::Click(1, 2));
    round_trips_as::<_, Event>(&other::Renamed::Key('a'));
}

#[test]
fn difference_deep_in_a_recursive_type_is_refused() {
    let literal = Box::new(other::Expr::Literal(1));
    refused::<Expr>(&other::Expr::Neg(Box::new(other::Expr::Neg(literal.clone()))));
    refused::<Expr>(&other::Expr::Call { name: String::new(), arguments: vec![other::Expr::Add(literal.clone(), literal)] });
    #[derive(Serialize)]
    struct Chain2 {
        before: u8,
        next: Option<Box<Chain3>>,
        after: String,
    }
    #[derive(Serialize)]
    struct Chain3 {
        before: u8,
        next: Option<Box<Chain2>>,
        after: u32,
    }
    let last = Chain3 { before: 1, next: None, after: 1 };
    refused::<Chain>(&Chain2 { before: 1, next: Some(Box::new(last)), after: String::new() });
}

#[test]
fn serde_attributes_are_followed() {
    #[derive(Serialize, Deserialize)]
    struct Attributed {
        #[serde(skip)]
        _cache: u64,
        #[serde(rename = "identifier")]
        id: u32,
        #[serde(default)]
        extra: Vec<u8>,
    }
    assert_eq!(text_of::<Attributed>(), "Attributed { identifier: u32, extra: [u8] }");
    round_trips(Attributed { _cache: 1, id: 2, extra: vec![] });

    #[derive(Serialize, Deserialize)]
    #[serde(transparent)]
    struct Transparent {
        inner: u32,
    }
    round_trips_as::<_, u32>(&Transparent { inner: 1 });

    #[derive(Serialize, Deserialize)]
    #[serde(from = "(u8, String)", into = "(u8, String)")]
    #[derive(Clone)]
    struct Converted(u8, String);
    impl From<(u8, String)> for Converted {
        fn from((a, b): (u8, String)) -> Self {
            Converted(a, b)
        }
    }
    impl From<Converted> for (u8, String) {
        fn from(value: Converted) -> Self {
            (value.0, value.1)
        }
    }
    round_trips(vec![Converted(1, "a".into())]);
}

#[test]
fn aliases_are_accepted_and_other_names_are_not() {
    #[derive(Serialize, Deserialize)]
    struct Old {
        mail: String,
        age: u8,
    }
    #[derive(Serialize, Deserialize)]
    struct New {
        #[serde(alias = "mail", alias = "e_mail")]
        email: String,
        age: u8,
    }
    #[derive(Serialize, Deserialize)]
    struct Third {
        email: String,
        years: u8,
    }
    round_trips(New { email: String::new(), age: 1 });
    round_trips_as::<_, New>(&Old { mail: String::new(), age: 1 });
    refused::<Old>(&New { email: String::new(), age: 1 });
    refused::<New>(&Third { email: String::new(), years: 1 });

    #[derive(Serialize, Deserialize)]
    enum Command {
        #[serde(alias = "Begin")]
        Start,
        Stop(u8),
    }
    #[derive(Serialize, Deserialize)]
    enum OldCommand {
        Begin,
        Halt(u8),
    }
    round_trips((Command::Start, Command::Stop(1), 2u8));
    round_trips_as::<_, Command>(&OldCommand::Begin);
    refused::<Command>(&OldCommand::Halt(1));
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "u32")]
struct Even(u32);

impl TryFrom<u32> for Even {
    type Error = String;
    fn try_from(value: u32) -> Result<Self, String> {
        if value.is_multiple_of(2) { Ok(Even(value)) } else { Err(format!("{value} is odd")) }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String")]
struct Never(String);

impl TryFrom<String> for Never {
    type Error = String;
    fn try_from(_: String) -> Result<Self, String> {
        Err("never".into())
    }
}

#[test]
fn types_with_validation_are_traced() {
    #[derive(Clone, Debug, Deserialize)]
    #[serde(try_from = "Limits")]
    struct Checked {
        _low: u8,
    }
    #[derive(Clone, Debug, Serialize, Deserialize)]
    struct Limits {
        low: u8,
        high: u8,
    }
    impl TryFrom<Limits> for Checked {
        type Error = String;
        fn try_from(limits: Limits) -> Result<Self, String> {
            if limits.low < limits.high { Ok(Checked { _low: limits.low }) } else { Err("empty".into()) }
        }
    }
    assert_eq!(text_of::<(Even, Even, u8)>(), "(u32, u32, u8)");
    assert_eq!(text_of::<(Wrapper<Even>, Vec<Even>, Option<Even>, u8)>(), "(Wrapper { inner: u32 }, [u32], Option<u32>, u8)");
    assert_eq!(text_of::<(Checked, Vec<Checked>, u8)>(), "(Limits { low: u8, high: u8 }, [Limits { low: u8, high: u8 }], u8)");

    #[derive(Deserialize)]
    enum Choice {
        _Bad(Never),
        _Good(Even),
    }
    #[derive(Deserialize)]
    struct Behind {
        _option: Option<Never>,
        _list: Vec<Never>,
        _map: HashMap<u8, Never>,
        _choice: Choice,
        _last: u8,
    }
    assert_eq!(
        text_of::<Behind>(),
        "Behind { _option: Option<str>, _list: [str], _map: {u8: str}, _choice: Choice::{_Bad(str), _Good(u32)}, _last: u8 }"
    );
}

#[test]
fn part_behind_an_untraceable_type_is_unknown() {
    #[derive(Serialize, Deserialize)]
    struct User {
        id: u32,
        mail: Never,
        age: u8,
    }
    let ty = Shape::of_type::<(User, u8)>();
    let user = User { id: 1, mail: Never(String::new()), age: 1 };
    assert!(ty.accepts(&Shape::of_value(&(&user, 1u8))), "{ty}");
    assert!(!ty.accepts(&Shape::of_value(&(&user, 1u8, 1u8))));
    #[derive(Serialize)]
    struct Wide {
        id: u64,
        mail: String,
        age: u8,
    }
    assert!(!ty.accepts(&Shape::of_value(&(&Wide { id: 1, mail: String::new(), age: 1 }, 1u8))), "{ty}");
}

#[test]
fn type_that_postcard_cannot_decode_is_unknown() {
    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Untagged {
        Number(u32),
        Text(String),
    }
    #[derive(Serialize, Deserialize)]
    #[serde(tag = "t", content = "c")]
    enum Adjacent {
        A,
        B(u32),
        C { x: u8 },
    }
    #[derive(Serialize, Deserialize)]
    #[serde(tag = "t")]
    enum Internal {
        A,
        B { x: u8 },
    }
    fn passes<T: Serialize + DeserializeOwned>(value: T) {
        assert!(Shape::of_type::<T>().accepts(&Shape::of_value(&value)), "{}", text_of::<T>());
    }
    passes(vec![Untagged::Number(1), Untagged::Text(String::new())]);
    passes((Adjacent::A, Adjacent::B(1), Adjacent::C { x: 1 }));
    passes((Internal::A, Internal::B { x: 1 }));
    assert_eq!(text(&[None, Some(Untagged::Number(1)), None][..]), "[Option<u32>]");
    #[derive(Serialize)]
    #[serde(untagged)]
    enum Either {
        Left { left: Option<u8> },
        Right { right: Option<u8> },
    }
    assert_eq!(text(&[Either::Left { left: None }, Either::Right { right: None }][..]), "[?]");
    let mixed = [(None::<u8>, Untagged::Number(1)), (None, Untagged::Text(String::new()))];
    assert_eq!(text(&mixed[..]), "[(Option<?>, mixed)]");
}

#[test]
fn elements_of_different_types_are_mixed() {
    #[derive(Clone, Serialize)]
    #[serde(untagged)]
    enum Any {
        Number(u32),
        Text(String),
        List(Vec<u8>),
        Point(Point),
        Sum(f64, f64),
        Three(u8, u8, u8),
        More { x: f64, y: f64, z: f64 },
        Renamed { a: f64, b: f64 },
    }
    let (number, text_) = (Any::Number(1), Any::Text("a".into()));
    let mixed = [number.clone(), text_.clone()];
    assert_eq!(text(&mixed[..]), "[mixed]");
    refused::<Vec<u32>>(&mixed[..]);
    refused::<Vec<String>>(&mixed[..]);
    assert!(Shape::of_type::<Vec<IgnoredAny>>().accepts(&sent(&Shape::of_value(&mixed[..]))));
    assert_eq!(text(&[Some(&number), None, Some(&text_)][..]), "[Option<mixed>]");
    assert_eq!(text(&BTreeMap::from([(1, &number), (2, &text_)])), "{i32: mixed}");
    assert_eq!(text(&[Any::Point(Point::default()), Any::Sum(0.0, 0.0)][..]), "[mixed]");
    assert_eq!(text(&[Any::Sum(0.0, 0.0), Any::Three(1, 2, 3)][..]), "[mixed]");
    assert_eq!(text(&[Any::Three(1, 2, 3), Any::Sum(0.0, 0.0)][..]), "[mixed]");
    assert_eq!(text(&[Any::More { x: 0.0, y: 0.0, z: 0.0 }, Any::Point(Point::default())][..]), "[mixed]");
    // These shapes are ambiguous, so that the receiver may accept them.
    assert_eq!(text(&(&number, &text_)), "(?, ?)");
    assert_eq!(text(&[[&number, &text_]][..]), "[(?, ?)]");
    assert_eq!(text(&[Any::Point(Point::default()), Any::Renamed { a: 0.0, b: 0.0 }][..]), "[?]");
    #[derive(Serialize)]
    #[serde(untagged)]
    enum Bytes {
        List(Vec<u8>),
        Blob(Blob),
    }
    round_trips_as::<_, Vec<Vec<u8>>>(&vec![Bytes::List(vec![1]), Bytes::Blob(Blob(vec![1])), Bytes::List(vec![1])]);
}

/// A text that can't be made is an error, and no panic.
#[test]
fn a_display_that_fails() {
    struct Fails;
    impl std::fmt::Display for Fails {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            Err(std::fmt::Error)
        }
    }
    impl Serialize for Fails {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_str(self)
        }
    }
    postcard::to_stdvec(&Fails).unwrap_err();
    assert!(encoder::encode_alone(&Fails, &mut Vec::new()).is_err());
}

/// A list whose first element is of another type than the others, with hand-written serde code.
#[test]
fn hand_written_list_of_several_types_is_accepted() {
    struct Titled(Vec<String>);
    impl Serialize for Titled {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            use serde::ser::SerializeSeq;
            let mut elements = serializer.serialize_seq(Some(1 + self.0.len()))?;
            elements.serialize_element(&7u32)?;
            self.0.iter().try_for_each(|text| elements.serialize_element(text))?;
            elements.end()
        }
    }
    impl<'de> Deserialize<'de> for Titled {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Reader;
            impl<'de> Visitor<'de> for Reader {
                type Value = Titled;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("a number and texts")
                }
                fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Titled, A::Error> {
                    elements.next_element::<u32>()?.ok_or_else(|| de::Error::custom("too short"))?;
                    let mut texts = Vec::new();
                    while let Some(text) = elements.next_element()? {
                        texts.push(text);
                    }
                    Ok(Titled(texts))
                }
            }
            deserializer.deserialize_seq(Reader)
        }
    }
    round_trips((Titled(vec!["a".into(), "b".into()]), 1u8));
    round_trips(vec![Titled(vec![]), Titled(vec!["a".into()])]);
}

#[test]
fn part_whose_type_depends_on_a_value_is_unknown() {
    /// Reads a flag, then a number or a text.
    struct Flagged;
    impl<'de> Deserialize<'de> for Flagged {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Reader;
            impl<'de> Visitor<'de> for Reader {
                type Value = Flagged;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("a flag and a value")
                }
                fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Flagged, A::Error> {
                    match parts.next_element()? {
                        Some(true) => parts.next_element::<u32>()?.map(drop),
                        _ => parts.next_element::<String>()?.map(drop),
                    };
                    Ok(Flagged)
                }
            }
            deserializer.deserialize_tuple(2, Reader)
        }
    }
    let ty = Shape::of_type::<(Flagged, u8)>();
    assert_eq!(ty.to_string(), "((bool, ?), u8)");

    /// Reads a number, then that many more.
    struct Counted;
    impl<'de> Deserialize<'de> for Counted {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Reader;
            impl<'de> Visitor<'de> for Reader {
                type Value = Counted;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("a number and values")
                }
                fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Counted, A::Error> {
                    for _ in 0..parts.next_element::<u8>()?.unwrap() {
                        parts.next_element::<u8>()?;
                    }
                    Ok(Counted)
                }
            }
            deserializer.deserialize_tuple(usize::MAX, Reader)
        }
    }
    assert_eq!(text_of::<(Counted, u8)>(), "(?, u8)");

    /// Reads until the end.
    struct Rest;
    impl<'de> Deserialize<'de> for Rest {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Reader;
            impl<'de> Visitor<'de> for Reader {
                type Value = Rest;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("values")
                }
                fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Rest, A::Error> {
                    let mut values: Vec<u8> = Vec::with_capacity(parts.size_hint().unwrap_or(0));
                    while let Some(value) = parts.next_element()? {
                        values.push(value);
                    }
                    Ok(Rest)
                }
            }
            deserializer.deserialize_tuple(usize::MAX, Reader)
        }
    }
    assert_eq!(text_of::<(u8, Rest)>(), "(u8, ?)");
}

/// A hand-written enum with `LAST + 1` variants, one of which the reader refuses.
struct Code<const LAST: u32, const MISSING: u32>(u32);

const CODES: &[&str] = &["code"; 5000];

impl<const LAST: u32, const MISSING: u32> Serialize for Code<LAST, MISSING> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_newtype_variant("Code", self.0, CODES[self.0 as usize], &self.0)
    }
}

impl<'de, const LAST: u32, const MISSING: u32> Deserialize<'de> for Code<LAST, MISSING> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<const MISSING: u32>;
        impl<'de, const MISSING: u32> Visitor<'de> for Reader<MISSING> {
            type Value = u32;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a code")
            }
            fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<u32, A::Error> {
                let (index, content) = access.variant_seed(Index::<MISSING>)?;
                content.newtype_variant::<u32>()?;
                Ok(index)
            }
        }
        struct Index<const MISSING: u32>;
        impl<'de, const MISSING: u32> DeserializeSeed<'de> for Index<MISSING> {
            type Value = u32;
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u32, D::Error> {
                let index = u32::deserialize(deserializer)?;
                if index == MISSING { Err(de::Error::custom("gone")) } else { Ok(index) }
            }
        }
        let names = &CODES[..=LAST as usize];
        deserializer.deserialize_enum("Code", names, Reader::<MISSING>).map(Code)
    }
}

#[test]
fn enums_with_missing_or_many_variants_are_traced() {
    round_trips((Code::<4, 2>(4), 1u8));
    round_trips((Code::<4, 4>(3), 1u8));
    assert_eq!(Shape::of_type::<Code<4, 4>>().nodes(), 5);
    assert_eq!(text_of::<(Code<0, 0>, u8)>(), "(?, ?)");

    struct Retyped(u32);
    impl Serialize for Retyped {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_newtype_variant("Code", self.0, "code", &1u64)
        }
    }
    round_trips((Code::<399, 400>(399), 1u8));
    assert_eq!(Shape::of_type::<(Code<399, 400>, u8)>().nodes(), 403);
    refused::<(Code<399, 400>, u8)>(&(Retyped(399), 1u8));
    refused::<(Code<399, 400>, u8)>(&(Retyped(400), 1u8));

    // Too many for the shape: the rest of the type is known nevertheless.
    assert_eq!(text_of::<(Code<4999, 5000>, u8)>(), "(?, u8)");
}

#[test]
fn odd_implementations_are_unknown() {
    struct ReadsNothing;
    impl<'de> Deserialize<'de> for ReadsNothing {
        fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Ok(ReadsNothing)
        }
    }
    assert_eq!(text_of::<(u8, ReadsNothing, u16)>(), "(u8, ?, u16)");

    struct Refuses;
    impl<'de> Deserialize<'de> for Refuses {
        fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Err(de::Error::custom("no"))
        }
    }
    assert_eq!(text_of::<(u8, Option<Refuses>, u16)>(), "(u8, Option<?>, u16)");
    assert_eq!(text_of::<(u8, Refuses, u16)>(), "(u8, ?, ?)");

    #[derive(Deserialize)]
    enum Void {}
    #[derive(Deserialize)]
    struct Endless {
        _next: Box<Endless>,
    }
    #[derive(Deserialize)]
    struct EndlessNewtype(#[allow(dead_code)] Box<EndlessNewtype>);
    #[derive(Deserialize)]
    enum OnlyItself {
        _Again(Box<OnlyItself>),
    }
    assert_eq!(text_of::<Result<u8, Void>>(), "Result::{Ok(u8), Err(Void::{})}");
    assert_eq!(text_of::<(u8, Option<Endless>, u8)>(), "(u8, Option<Endless { _next: Endless }>, u8)");
    assert_eq!(text_of::<Option<EndlessNewtype>>(), "Option<?>");
    assert_eq!(text_of::<(OnlyItself,)>(), "(OnlyItself::_Again(OnlyItself),)");
}

#[test]
fn panic_in_a_type_ends_its_trace() {
    #[derive(Deserialize)]
    #[serde(from = "u8")]
    struct Panics;
    impl From<u8> for Panics {
        fn from(_: u8) -> Self {
            panic!("this panic belongs to a test")
        }
    }
    assert_eq!(text_of::<(String, Panics, u8)>(), "(str, u8, ?)");
}

#[test]
fn recursion_without_names_is_bounded() {
    struct Nest;
    impl<'de> Deserialize<'de> for Nest {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            <Option<Box<(Nest, Nest)>>>::deserialize(deserializer).map(|_| Nest)
        }
    }
    let ty = sent(&Shape::of_type::<Nest>());
    assert!(ty.to_string().starts_with("Option<(Option<(Option<"), "{ty}");

    #[derive(Serialize, Deserialize)]
    struct Rose(Vec<Rose>);
    assert_eq!(text_of::<Rose>(), "[…]");
    round_trips(Rose(vec![Rose(vec![]), Rose(vec![Rose(vec![])])]));
    refused::<Rose>(&vec![vec![vec![1u8]]]);

    fn nest(depth: usize) -> List {
        if depth == 0 { List::Nil } else { List::Cons(1, Box::new(nest(depth - 1))) }
    }
    round_trips(nest(200));
}

#[test]
fn recursive_type_is_traced_in_few_runs() {
    thread_local!(static READ: Cell<u32> = const { Cell::new(0) });
    #[derive(Deserialize)]
    #[serde(from = "i32")]
    struct Number;
    impl From<i32> for Number {
        fn from(_: i32) -> Self {
            READ.set(READ.get() + 1);
            Number
        }
    }
    #[derive(Deserialize)]
    enum Term {
        _Sum(Box<Term>, Box<Term>),
        _Negative(Box<Term>),
        _Call(Vec<Term>, Option<Box<Term>>),
        _Number(Number),
    }
    let ty = text_of::<Term>();
    assert_eq!(ty, "Term::{_Sum(Term, Term), _Negative(Term), _Call([Term], Option<Term>), _Number(i32)}");
    assert!(READ.get() < 100, "{}", READ.get());

    #[derive(Deserialize)]
    struct Fork {
        _left: Option<Box<Fork>>,
        _right: Vec<Fork>,
        _number: Number,
    }
    READ.set(0);
    assert_eq!(text_of::<Fork>(), "Fork { _left: Option<Fork>, _right: [Fork], _number: i32 }");
    assert!(READ.get() < 100, "{}", READ.get());
}

#[test]
fn many_types_that_contain_each_other_are_bounded() {
    macro_rules! mutual {
        ($($name:ident)*) => { mutual! { @ [$($name)*] $($name)* } };
        (@ $all:tt $($name:ident)*) => { $(mutual! { # $name $all })* };
        (# $name:ident [$($other:ident)*]) => {
            #[derive(Clone, Debug, Default, Serialize, Deserialize)]
            #[allow(non_snake_case)]
            struct $name { $($other: Vec<$other>,)* leaf: u8 }
        };
    }
    mutual! { A B C D E F G H I J K L }
    let ty = sent(&Shape::of_type::<A>());
    assert!(ty.nodes() > 100, "{}", ty.nodes());
    round_trips(A::default());
    round_trips(A { B: vec![B { C: vec![C::default()], ..B::default() }], ..A::default() });
    refused::<A>(&B { A: vec![], ..B::default() }.A.iter().map(|_| 1).chain([1u8]).collect::<Vec<_>>());
}

#[test]
fn large_types_are_traced_within_bounds() {
    #[derive(Serialize, Deserialize)]
    struct Large {
        a: [[[u8; 32]; 32]; 32],
        b: u8,
    }
    // A million elements of zero size: the first arrays suffice, and what follows them is traced.
    let million = Shape::of_value(&([[[[(); 32]; 32]; 32]; 32], "a"));
    assert_eq!(million.to_string(), "([[[[(); 32]; 32]; 32]; 32], str)");
    assert!(sent(&Shape::of_type::<([[[[(); 32]; 32]; 32]; 32], String)>()).accepts(&million));
    // 32 768 elements are more steps than a trace has.
    assert_eq!(text_of::<[[u8; 32]; 32]>(), "[[u8; 32]; 32]");
    assert_eq!(text_of::<(Array<10_000>, u8)>(), "([u8; 10000], u8)");
    round_trips((Array([1; 5000]), 1u8));
    refused::<Array<2000>>(&Array([1; 2001]));
    let ty = Shape::of_type::<Large>();
    assert!(ty.accepts(&Shape::of_value(&Large { a: [[[0; 32]; 32]; 32], b: 1 })), "{ty}");
}

fn is_complete(value: &(impl Serialize + ?Sized)) -> bool {
    let mut known = encoder::encode_alone(value, &mut Vec::new()).unwrap();
    known.finish();
    known.is_complete()
}

#[test]
fn shape_is_complete_when_all_types_are_seen() {
    #[track_caller]
    fn complete(value: &(impl Serialize + ?Sized), expected: bool) {
        assert_eq!(is_complete(value), expected, "{}", text(value));
    }
    complete(&(1u8, "a", Point::default(), Array([1u8; 40])), true);
    complete(&Array([1u8; 1025]), true);
    complete(&vec![1u8], true);
    complete(&Vec::<u8>::new(), false);
    complete(&vec![vec![], vec![1u8]], true);
    complete(&Some(1u8), true);
    complete(&None::<u8>, false);
    complete(&vec![None, Some(1u8)], true);
    complete(&HashMap::from([(1u8, Some(1u8))]), true);
    complete(&HashMap::from([(1u8, None::<u8>)]), false);
    complete(&Event::Quit, false);
    complete(&Ok::<u8, u8>(1), false);
    complete(&Tree::default(), false);
    complete(&Tree { value: 1, children: vec![Tree::default()] }, true);
    complete(&(), true);
}

#[test]
fn shapes_of_huge_values_keep_the_limits() {
    let wide: Vec<(u32, Vec<Event>)> = (0..100).map(|i| (i, events())).collect();
    sent(&Shape::of_value(&wide));
    sent(&Shape::of_value(&vec![wide; 40]));

    struct Wide(usize);
    impl Serialize for Wide {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut fields = serializer.serialize_struct("Wide", self.0)?;
            for i in 0..self.0 {
                match i % 2 {
                    0 => fields.serialize_field("number", &1u8)?,
                    _ => fields.serialize_field("text", "a")?,
                }
            }
            fields.end()
        }
    }
    assert_eq!(sent(&Shape::of_value(&Wide(1023))).nodes(), 1024);
    assert_eq!(sent(&Shape::of_value(&Wide(1024))), Shape::Unknown);
    // There is no room for the last one.
    assert_eq!(sent(&Shape::of_value(&(Wide(1021), 1u8))).nodes(), 1024);
    assert_eq!(text(&(1u8, Wide(1022), 1u8)), "?");
    sent(&Shape::of_value(&[Wide(700), Wide(700)]));
    sent(&Shape::of_value(&(Wide(700), 'a', Wide(700), 'b', Wide(200))));

    struct Tall(usize);
    impl Serialize for Tall {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            match self.0 {
                0 => serializer.serialize_unit(),
                n if n % 3 == 0 => serializer.serialize_some(&Tall(n - 1)),
                n if n % 3 == 1 => serializer.serialize_newtype_variant("Tall", 0, "V", &Tall(n - 1)),
                n => {
                    use serde::ser::SerializeTupleVariant;
                    let mut content = serializer.serialize_tuple_variant("Tall", 1, "W", 1)?;
                    content.serialize_field(&Tall(n - 1))?;
                    content.end()
                }
            }
        }
    }
    for tall in 0..100 {
        sent(&Shape::of_value(&Tall(tall)));
    }
    let long = "a_name_of_22_bytes_äöü".repeat(9).leak() as &'static str;
    assert_eq!(name(long).len(), 128);
}

#[test]
fn shape_beyond_the_limits_is_not_decoded() {
    assert_eq!(Shape::decode(&[]), None);
    // Trailing bytes, unknown tags, an `Up` beyond the root, a run of nothing, variants out of order.
    assert_eq!(Shape::decode(&[0, 0]), None);
    assert_eq!(Shape::decode(&[17]), None);
    assert_eq!(Shape::decode(&[41]), None);
    assert_eq!(Shape::decode(&[33, 39, 2]), None);
    assert_eq!(Shape::decode(&[33, 39, 0]), None);
    assert_eq!(Shape::decode(&[36, 1, 0, 0]), None);
    assert_eq!(Shape::decode(&[38, 0, 2, 1, 0, 16, 1, 0, 16]), None);
    assert!(Shape::decode(&[38, 0, 2, 0, 0, 16, 1, 0, 16]).is_some());
    let nested = |depth| [vec![33; depth], vec![0]].concat();
    assert!(Shape::decode(&nested(32)).is_some());
    assert_eq!(Shape::decode(&nested(33)), None);
    assert_eq!(Shape::decode(&nested(1_000_000)), None);
    let wide = |count: usize| {
        let mut bytes = vec![36, (count % 128) as u8 | 128, (count / 128) as u8];
        bytes.extend((0..count).flat_map(|i| [1, (i % 2) as u8]));
        bytes
    };
    assert!(Shape::decode(&wide(1023)).is_some());
    assert_eq!(Shape::decode(&wide(1024)), None);
    // A length of 2^32 - 1, and no content.
    assert_eq!(Shape::decode(&[36, 255, 255, 255, 255, 15]), None);
    let named = |length: u8| [&[37, length | 128, length >> 7][..], &vec![b'a'; length.into()], &[0]].concat();
    assert!(Shape::decode(&named(128)).is_some());
    assert_eq!(Shape::decode(&named(129)), None);
    assert_eq!(Shape::decode(&[37, 1, 0xff, 0]), None);
}

#[test]
fn crafted_shape_is_compared_in_bounded_time() {
    #[derive(Deserialize)]
    struct Branch(#[allow(dead_code)] Option<Box<Branch>>, #[allow(dead_code)] u8, #[allow(dead_code)] Option<Box<Branch>>);
    let ty = Shape::of_type::<Branch>();
    let mut crafted = Shape::Leaf(Leaf::U8);
    for _ in 0..15 {
        let branch = Shape::Tuple(vec![
            Run { count: 1, shape: Shape::Option(Box::new(crafted.clone())) },
            Run { count: 1, shape: Shape::Leaf(Leaf::U8) },
            Run { count: 1, shape: Shape::Option(Box::new(Shape::Unknown)) },
        ]);
        crafted = branch;
    }
    // Well formed, but different at the end of the chain.
    assert!(!ty.accepts(&sent(&crafted)));
    // Every level would be compared three times, 3¹⁵ in all. The receiver stops and refuses.
    let mut many = Shape::Unknown;
    for _ in 0..15 {
        many = Shape::Tuple(vec![Run { count: 3, shape: Shape::Option(Box::new(many)) }]);
    }
    let run = Run { count: 1, shape: Shape::Option(Box::new(Shape::Up(2))) };
    let recursive = Shape::Tuple(vec![run.clone(), run.clone(), run]);
    assert!(!recursive.accepts(&sent(&many)));
}

fn any_leaf() -> impl Strategy<Value = Shape> {
    prop_oneof![
        Just(Shape::Unknown),
        Just(Shape::Leaf(Leaf::Bool)),
        Just(Shape::Leaf(Leaf::U8)),
        Just(Shape::Leaf(Leaf::I128)),
        Just(Shape::Leaf(Leaf::Str)),
        Just(Shape::Leaf(Leaf::Bytes)),
        Just(Shape::Leaf(Leaf::Unit)),
    ]
}

fn any_name() -> impl Strategy<Value = Name> {
    "[a-zä]{0,5}".prop_map(Cow::Owned)
}

/// Shapes without `Up`.
fn any_shape() -> impl Strategy<Value = Shape> {
    any_leaf().prop_recursive(6, 128, 6, |inner| {
        let fields = prop::collection::vec((any_name(), inner.clone()), 0..6);
        let variants = prop::collection::btree_map(0u32..300, (any_name(), inner.clone()), 0..6);
        let runs = prop::collection::vec((1u32..200, inner.clone()), 0..6);
        prop_oneof![
            inner.clone().prop_map(|shape| Shape::Option(Box::new(shape))),
            inner.clone().prop_map(|shape| Shape::Seq(Box::new(shape))),
            (inner.clone(), inner).prop_map(|parts| Shape::Map(Box::new(parts))),
            runs.prop_map(|runs| { Shape::Tuple(runs.into_iter().map(|(count, shape)| Run { count, shape }).collect(),) }),
            (any_name(), fields).prop_map(|(name, fields)| {
                Shape::Struct(name, fields.into_iter().map(|(name, shape)| Field { name, shape }).collect())
            }),
            (any_name(), variants).prop_map(|(name, variants)| {
                let variants = variants.into_iter();
                let variants = variants.map(|(index, (name, content))| Variant { index, name, content });
                Shape::Enum(name, variants.collect())
            }),
        ]
    })
}

fn any_expr() -> impl Strategy<Value = Expr> {
    any::<i32>().prop_map(Expr::Literal).prop_recursive(6, 40, 4, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| Expr::Add(Box::new(a), Box::new(b))),
            inner.clone().prop_map(|a| Expr::Neg(Box::new(a))),
            ("[a-z]{0,4}", prop::collection::vec(inner, 0..4)).prop_map(|(name, arguments)| Expr::Call { name, arguments }),
        ]
    })
}

type Incomplete = (Vec<Option<u8>>, Option<Vec<bool>>, BTreeMap<u8, Vec<(u8, char)>>);

fn any_incomplete() -> impl Strategy<Value = Incomplete> {
    let pairs = prop::collection::vec(any::<(u8, char)>(), 0..2);
    (
        prop::collection::vec(any::<Option<u8>>(), 0..3),
        prop::option::of(prop::collection::vec(any::<bool>(), 0..2)),
        prop::collection::btree_map(any::<u8>(), pairs, 0..3),
    )
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Some(shape) = Shape::decode(&bytes) {
            prop_assert!(shape.nodes() <= bytes.len());
            sent(&shape);
        }
    }

    /// Bytes that are mostly tags and small numbers get further.
    #[test]
    fn likely_bytes_are_decoded_or_refused(
        bytes in prop::collection::vec(prop_oneof![0u8..4, 32u8..41, Just(255u8)], 0..60),
    ) {
        if let Some(shape) = Shape::decode(&bytes) {
            sent(&shape);
            let _ = (shape.to_string(), shape.accepts(&shape));
        }
    }

    #[test]
    fn damaged_shapes_are_decoded_or_refused(shape in any_shape(), at: prop::sample::Index, byte: u8) {
        let mut bytes = encoded(&shape);
        *at.get_mut(&mut bytes) = byte;
        if let Some(shape) = Shape::decode(&bytes) {
            sent(&shape);
        }
        for end in 0..bytes.len() {
            let _ = Shape::decode(&bytes[..end]);
        }
    }

    #[test]
    fn decoded_shape_equals_and_accepts_itself(shape in any_shape()) {
        prop_assert!(shape.accepts(&sent(&shape)));
        prop_assert!(Shape::Unknown.accepts(&shape) && shape.accepts(&Shape::Unknown));
        prop_assert!(shape.to_string().len() <= 310);
    }

    /// Each value is declared by a shape that the type accepts. Values seen before don't need a new declaration.
    #[test]
    fn value_seen_before_has_the_same_number(exprs in prop::collection::vec(any_expr(), 1..5)) {
        let (knowledge, numbers, ty) = (Knowledge::new(None), DeclarationNumbers::default(), Shape::of_type::<Expr>());
        let mut last = 0;
        for (n, expr) in exprs.iter().chain(&exprs).enumerate() {
            let mut bytes = Vec::new();
            let Ok(Encoded::As(declared)) = knowledge.encode(expr, &mut bytes, &numbers) else { panic!("not encoded") };
            prop_assert_eq!(bytes, postcard::to_stdvec(expr).unwrap());
            prop_assert!(ty.accepts(&Shape::decode(&declared.shape).unwrap()));
            prop_assert!(declared.number == last || n < exprs.len());
            last = declared.number;
        }
    }

    /// A complete shape stands for the other values of its type: where it is accepted, they are.
    #[test]
    fn complete_shape_is_accepted_like_all_values_of_its_type(a in any_incomplete(), b in any_incomplete()) {
        let (complete, a, b) = (is_complete(&a), Shape::of_value(&a), Shape::of_value(&b));
        if complete {
            prop_assert!(a.accepts(&b) && b.accepts(&a));
            prop_assert!(Shape::of_type::<Incomplete>().accepts(&b));
            for other in [
                Shape::of_type::<(Vec<Option<u8>>, Option<Vec<u16>>, BTreeMap<u8, Vec<(u8, char)>>)>(),
                Shape::of_type::<(Vec<Option<u8>>, Option<Vec<bool>>, BTreeMap<u8, Vec<(u8, u8)>>)>(),
            ] {
                prop_assert!(!other.accepts(&a));
            }
        }
    }

    #[test]
    fn random_values_are_accepted_by_their_type(
        numbers: (u8, i16, u32, i64, u128),
        others: (i8, u16, i32, u64, i128, f32, f64, char, bool),
        texts in prop::collection::vec("[a-zß]{0,4}", 0..5),
        map in prop::collection::btree_map(any::<u16>(), any::<Option<(f32, char)>>(), 0..5),
        results in prop::collection::vec(any::<Result<u8, i8>>(), 0..5),
        nested in prop::collection::vec(prop::collection::vec(any::<Option<[bool; 3]>>(), 0..4), 0..4),
        array: [Option<u8>; 5],
    ) {
        round_trips((numbers, others, texts, map, results, nested, array));
    }

    #[test]
    fn random_expressions_are_accepted_by_their_type(exprs in prop::collection::vec(any_expr(), 0..4)) {
        round_trips(exprs);
    }
}

#[allow(dead_code)]
fn assert_traits() {
    fn is<T: Clone + PartialEq + Debug + std::fmt::Display + Send + Sync>() {}
    is::<Shape>();
}

/// A recursive enum: elements of a list lead back to the type that they are in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Plan {
    Step(u8),
    All(Vec<Plan>),
    Rows(Vec<Vec<Plan>>),
    Named(BTreeMap<u8, Plan>),
    Late(String),
}

/// The shape that the last of these values is declared with, after the others.
#[track_caller]
fn declared_after<T: Serialize>(values: &[T]) -> Shape {
    let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
    let mut last = None;
    for value in values {
        let mut bytes = Vec::new();
        let shape = match knowledge.encode(value, &mut bytes, &numbers).unwrap() {
            Encoded::As(declared) => declared.shape.clone(),
            Encoded::Unlike => knowledge.encode_alone(value, &mut bytes, &numbers).unwrap().shape.clone(),
        };
        last = Shape::decode(&shape);
    }
    last.unwrap()
}

#[test]
fn new_variant_in_a_recursive_list_is_declared() {
    use Plan::*;
    let late = || Late("x".to_owned());
    for [first, second] in [
        [All(vec![Step(1)]), All(vec![Step(1), late()])],
        [Rows(vec![vec![Step(1)]]), Rows(vec![vec![Step(1)], vec![late()]])],
        [Rows(vec![vec![Step(1)]]), Rows(vec![vec![Step(1), late()]])],
        [Named(BTreeMap::from([(1, Step(1))])), Named(BTreeMap::from([(1, Step(1)), (2, late())]))],
    ] {
        // An inner list of the same type shares the node of the outer one.
        let (first, second) = (All(vec![first]), All(vec![second]));
        let shape = declared_after(&[first, second]);
        assert!(encoded(&shape).windows(4).any(|part| part == b"Late"), "{shape}");
    }
}

#[test]
fn fields_with_different_serializers_are_declared_separately() {
    fn short<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(*value as u8)
    }
    fn text<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.to_string())
    }
    #[derive(Serialize)]
    struct Two(#[serde(serialize_with = "short")] u64, #[serde(serialize_with = "text")] u64);
    let shape = declared_after(&[Two(1, 2), Two(3, 4)]);
    assert_eq!(shape.to_string(), "(u8, str)");
}

/// A `Serialize` that writes another type each time is declared as what it has written.
#[test]
fn value_of_changing_type_is_declared_as_written() {
    struct Fickle(Cell<u8>);
    impl Serialize for Fickle {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            self.0.set(self.0.get() + 1);
            if self.0.get().is_multiple_of(2) { serializer.serialize_u8(7) } else { serializer.serialize_str("seven") }
        }
    }
    let (knowledge, numbers, mut bytes) = (Knowledge::new(None), DeclarationNumbers::default(), Vec::new());
    assert!(matches!(knowledge.encode(&1u8, &mut bytes, &numbers), Ok(Encoded::As(_))));
    bytes.clear();
    let fickle = Fickle(Cell::new(0));
    assert!(matches!(knowledge.encode(&fickle, &mut bytes, &numbers), Ok(Encoded::Unlike)), "a text is no u8");
    bytes.clear();
    let declared = knowledge.encode_alone(&fickle, &mut bytes, &numbers).unwrap();
    let shape = Shape::decode(&declared.shape).unwrap();
    assert_eq!((shape, &bytes[..]), (Shape::of_type::<u8>(), &[7][..]));
}

/// Values that differ from the first in the same way share one declaration number.
#[test]
fn values_alike_share_one_declaration_number() {
    let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
    let number = |value: u8| knowledge.encode_alone(&value, &mut Vec::new(), &numbers).unwrap().number;
    let first = number(0);
    assert_ne!(first, 0);
    assert!((0..200).all(|value| number(value) == first));
}
