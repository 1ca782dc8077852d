//! Tests of lists: what their elements show together, and how many there are.

use std::cell::Cell;

use serde::ser::{SerializeMap, SerializeSeq, SerializeTuple};

use super::*;

/// A receiver would take what follows for the missing elements, or the last elements for what follows.
#[test]
fn values_that_have_another_length_than_they_say_are_refused() {
    struct Liar(usize, usize, bool);
    impl Serialize for Liar {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            if self.2 {
                let mut map = serializer.serialize_map(Some(self.0))?;
                (0..self.1).try_for_each(|n| map.serialize_entry(&n, "x"))?;
                return map.end();
            }
            let mut list = serializer.serialize_seq(Some(self.0))?;
            (0..self.1).try_for_each(|n| list.serialize_element(&n))?;
            list.end()
        }
    }
    struct Iterates(usize, usize);
    impl Iterator for Iterates {
        type Item = u8;
        fn next(&mut self) -> Option<u8> {
            self.1 = self.1.checked_sub(1)?;
            Some(7)
        }
        fn size_hint(&self) -> (usize, Option<usize>) {
            (self.0, Some(self.0))
        }
    }
    impl Serialize for Iterates {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_seq(Iterates(self.0, self.1))
        }
    }
    fn is_encoded(value: impl Serialize) -> bool {
        let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
        let first = knowledge.encode(&value, &mut Vec::new(), &numbers).is_ok();
        assert_eq!(knowledge.encode(&value, &mut Vec::new(), &numbers).is_ok(), first);
        assert_eq!(knowledge.encode_alone(&value, &mut Vec::new(), &numbers).is_ok(), first);
        first
    }
    for (said, has) in [(0, 0), (0, 1), (1, 0), (3, 3), (3, 2), (2, 3), (200, 200), (usize::MAX, 0), (40, 41)] {
        assert_eq!(is_encoded(Liar(said, has, false)), said == has, "a list of {has} that says {said}");
        assert_eq!(is_encoded(Liar(said, has, true)), said == has, "a map of {has} that says {said}");
        assert_eq!(is_encoded((Liar(said, has, false), 7u8)), said == has, "a list of {has} that says {said}");
        assert_eq!(is_encoded(Iterates(said, has)), said == has, "an iterator of {has} that says {said}");
    }
}

/// A list that hands its elements to the serializer one by one.
struct OneByOne<'a, T>(&'a [T]);

impl<T: Serialize> Serialize for OneByOne<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        self.0.iter().try_for_each(|element| list.serialize_element(&element))?;
        list.end()
    }
}

/// A list that hands over all, as a `Vec` does. Lists within it may be of a type that a `Vec` has around them, and this one has not.
struct AllAtOnce<'a, T>(&'a [T]);

impl<T: Serialize> Serialize for AllAtOnce<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0)
    }
}

/// Parts that may contradict each other.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum Mixed {
    Number(u8),
    Text(String),
    Maybe(Option<u16>),
    Pair(u8, u32),
    List(Vec<Mixed>),
}

fn mixed() -> impl Strategy<Value = Mixed> {
    let leaf = prop_oneof![
        any::<u8>().prop_map(Mixed::Number),
        "[a-c]{0,3}".prop_map(Mixed::Text),
        any::<Option<u16>>().prop_map(Mixed::Maybe),
        any::<(u8, u32)>().prop_map(|(a, b)| Mixed::Pair(a, b)),
    ];
    leaf.prop_recursive(3, 20, 6, |part| proptest::collection::vec(part, 0..6).prop_map(Mixed::List))
}

fn plan() -> impl Strategy<Value = Plan> {
    let leaf = prop_oneof![3 => any::<u8>().prop_map(Plan::Step), 1 => "[a-c]{0,3}".prop_map(Plan::Late)];
    leaf.prop_recursive(4, 40, 6, |part| {
        prop_oneof![
            proptest::collection::vec(part.clone(), 0..6).prop_map(Plan::All),
            proptest::collection::vec(proptest::collection::vec(part.clone(), 0..4), 0..4).prop_map(Plan::Rows),
            proptest::collection::btree_map(any::<u8>(), part, 0..4).prop_map(Plan::Named),
        ]
    })
}

/// The receiver's type differs in what follows the list.
#[test]
fn what_follows_a_recursive_list_is_declared() {
    use Term::*;
    let call = |arguments| Call { name: "f".to_owned(), arguments, at: 100 };
    let many = |first: Term| std::iter::once(first).chain((0..40).map(|_| call(vec![]))).collect::<Vec<_>>();
    for last in [call(many(Number(1))), Tuple(many(Number(1)), 7), Lines(self::Lines { lines: many(Number(1)), result: Some(1) })]
    {
        let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
        let list = vec![last];
        let Encoded::As(declared) = knowledge.encode(&list, &mut Vec::new(), &numbers).unwrap() else { panic!("{list:?}") };
        let shape = Shape::decode(&declared.shape).unwrap();
        assert!(!shape.to_string().contains('?'), "{shape}");
        assert_eq!(shape, Shape::of_value(&list));
        assert!(Shape::of_type::<Vec<Term>>().accepts(&shape), "{shape}");
    }
}

/// Recursive by way of lists in the middle of structs, tuples and variants, which are still being learned when their lists are.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Term {
    Number(u32),
    Call { name: String, arguments: Vec<Term>, at: u32 },
    Tuple(Vec<Term>, u8),
    Lines(Lines),
    Pair([Vec<Term>; 2]),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Lines {
    lines: Vec<Term>,
    result: Option<u64>,
}

fn term() -> impl Strategy<Value = Term> {
    any::<u32>().prop_map(Term::Number).prop_recursive(4, 60, 6, |part| {
        let list = || proptest::collection::vec(part.clone(), 0..20);
        prop_oneof![
            ("[a-c]{0,3}", list(), any::<u32>()).prop_map(|(name, arguments, at)| Term::Call { name, arguments, at }),
            (list(), any::<u8>()).prop_map(|(list, last)| Term::Tuple(list, last)),
            (list(), any::<Option<u64>>()).prop_map(|(lines, result)| Term::Lines(Lines { lines, result })),
            (list(), list()).prop_map(|(first, second)| Term::Pair([first, second])),
        ]
    })
}

/// What the first elements of a list have shown is known before the others. That changes nothing of what the list shows.
#[track_caller]
fn shows_the_same_one_by_one<T: Serialize>(lists: &[Vec<T>]) {
    fn declared<T: Serialize>(list: &T, (knowledge, numbers): &(Knowledge, DeclarationNumbers)) -> (bool, Vec<u8>, Arc<[u8]>) {
        let mut bytes = Vec::new();
        match knowledge.encode(list, &mut bytes, numbers).unwrap() {
            Encoded::As(declared) => (true, bytes, declared.shape.clone()),
            Encoded::Unlike => {
                bytes.clear();
                let declared = knowledge.encode_alone(list, &mut bytes, numbers).unwrap();
                (false, bytes, declared.shape.clone())
            }
        }
    }
    let of_all = (Knowledge::new(None), DeclarationNumbers::default());
    let of_each = (Knowledge::new(None), DeclarationNumbers::default());
    for list in lists {
        let (all, each) = (declared(&AllAtOnce(list), &of_all), declared(&OneByOne(list), &of_each));
        assert_eq!(all, each, "{:?} and {:?}", Shape::decode(&all.2), Shape::decode(&each.2));
        assert_eq!(all.1, postcard::to_stdvec(list).unwrap());
    }
}

/// What elements of one type may be without lists, maps and bytes within them.
#[derive(Clone, Debug, Serialize)]
enum Form {
    Empty,
    Byte(u8),
    Signed(i8, i16, i32, i64),
    Large { below: i128, above: u128, at: (u16, u32, u64) },
    Floats(f32, [f64; 3], [f32; 32]),
    Text(String),
    Inner(Option<Inner>, Option<Box<Form>>),
    Digits([u16; 3]),
}

#[derive(Clone, Debug, Serialize)]
struct Inner {
    letter: char,
    is: bool,
    unit: (),
    marker: Marker,
    number: Wrapped,
    shown: Shown,
}

#[derive(Clone, Debug, Serialize)]
struct Marker;

#[derive(Clone, Debug, Serialize)]
struct Wrapped(u32);

/// Serialized as the text that it is displayed as.
#[derive(Clone, Debug)]
struct Shown(u8);

impl Serialize for Shown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

fn form() -> impl Strategy<Value = Form> {
    let inner = any::<(char, bool, u32, u8)>().prop_map(|(letter, is, number, shown)| Inner {
        letter,
        is,
        unit: (),
        marker: Marker,
        number: Wrapped(number),
        shown: Shown(shown),
    });
    // Some of them take as much as fits into the room for elements, and more.
    let text = prop_oneof![9 => "[a-c]{0,3}", 1 => (0..6000usize).prop_map(|len| "x".repeat(len))];
    let flat = prop_oneof![
        Just(Form::Empty),
        any::<u8>().prop_map(Form::Byte),
        any::<(i8, i16, i32, i64)>().prop_map(|(a, b, c, d)| Form::Signed(a, b, c, d)),
        any::<(i128, u128, (u16, u32, u64))>().prop_map(|(below, above, at)| Form::Large { below, above, at }),
        any::<(f32, [f64; 3])>().prop_map(|(a, b)| Form::Floats(a, b, [a; 32])),
        text.prop_map(Form::Text),
        any::<[u16; 3]>().prop_map(Form::Digits),
        proptest::option::of(inner.clone()).prop_map(|inner| Form::Inner(inner, None)),
    ];
    (flat.clone(), proptest::option::weighted(0.1, (proptest::option::of(inner), flat))).prop_map(|(flat, inner)| match inner {
        Some((inner, form)) => Form::Inner(inner, Some(Box::new(form))),
        None => flat,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Of one form, of few, and of all; those that come late show something new behind many that do not.
    #[test]
    fn flat_elements_are_encoded_as_one_by_one(
        alike in proptest::collection::vec(any::<(u8, [f64; 3], i32)>(), 0..300),
        texts in proptest::collection::vec(proptest::option::of("[a-z]{0,40}"), 0..300),
        forms in proptest::collection::vec(form(), 0..100),
        late in form(),
    ) {
        let many = vec![Form::Byte(1); 150];
        shows_the_same_one_by_one(&[alike.clone(), alike]);
        shows_the_same_one_by_one(&[texts.clone(), texts]);
        shows_the_same_one_by_one(&[[many.clone(), vec![late], many].concat(), forms.clone(), forms]);
    }
}

/// As a bulk, whose `Serialize` takes a lease.
#[derive(Clone)]
struct Counted<'a>(&'a Cell<usize>);

impl Serialize for Counted<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.set(self.0.get() + 1);
        serializer.serialize_newtype_struct("Counted", &Raw(1))
    }
}

#[test]
fn elements_with_bytes_are_serialized_once() {
    #[derive(Clone, Serialize)]
    enum Either<'a> {
        One(u8),
        Counted(Counted<'a>),
        Named { a: u8, b: Counted<'a> },
        Two(u8, Counted<'a>),
    }
    let count = Cell::new(0);
    fn encode_all<T: Serialize>(count: &Cell<usize>, lists: &[(usize, Vec<T>)]) {
        let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
        for (expected, list) in lists.iter().chain(lists) {
            count.set(0);
            assert!(matches!(knowledge.encode(list, &mut Vec::new(), &numbers).unwrap(), Encoded::As(_)));
            assert_eq!(count.get(), *expected);
        }
    }
    let none = vec![None; 20];
    encode_all(&count, &[(0, none.clone()), (1, [&none[..], &[Some(Counted(&count))], &none].concat()), (0, none)]);
    let none = vec![None; 20];
    encode_all(&count, &[(0, none.clone()), (1, [none, vec![Some((1u8, Counted(&count)))]].concat())]);
    let one = vec![Either::One(1); 20];
    for other in [Either::Counted(Counted(&count)), Either::Named { a: 1, b: Counted(&count) }, Either::Two(1, Counted(&count))] {
        encode_all(&count, &[(0, one.clone()), (1, [&one[..], &[other], &one].concat()), (0, one.clone())]);
    }
    encode_all(&count, &[(20, vec![Counted(&count); 20]), (30, vec![Counted(&count); 30])]);
    encode_all(&count, &[(20, vec![(7u8, [Counted(&count)]); 20])]);
}

#[derive(Clone, Debug)]
struct Raw(u8);

impl Serialize for Raw {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&[self.0; 2])
    }
}

/// Texts that do not fit into what is left of the room, some of which are followed by nothing.
#[test]
fn an_element_that_discards_the_errors_of_its_parts_is_encoded_whole() {
    #[derive(Clone, Debug)]
    struct Lenient(String, u8);
    impl Serialize for Lenient {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut parts = serializer.serialize_tuple(2)?;
            let _ = parts.serialize_element(&self.0);
            match self.1 {
                0 => parts.serialize_element(&())?,
                _ => _ = parts.serialize_element(&self.1),
            }
            parts.end()
        }
    }
    for last in 0..2 {
        let list = |step: usize| (0..60).map(|len| Lenient("x".repeat(len * step), last)).collect::<Vec<_>>();
        shows_the_same_one_by_one(&[list(1), list(7), list(100)]);
    }
    let mut list = vec![Lenient("ab".to_owned(), 1); 40];
    list[20].1 = 0;
    shows_the_same_one_by_one(&[vec![Lenient(String::new(), 1); 40], list]);
}

#[test]
fn an_element_is_dropped_before_the_next_is_made() {
    struct Elements(Cell<u32>);
    struct Element<'a>(&'a Cell<u32>);
    impl Drop for Element<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }
    impl Serialize for Element<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            (self.0.get(), 0.5).serialize(serializer)
        }
    }
    impl Serialize for Elements {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_seq((0..40).map(|_| {
                self.0.set(self.0.get() + 1);
                assert_eq!(self.0.get(), 1);
                Element(&self.0)
            }))
        }
    }
    let (knowledge, numbers, elements) = (Knowledge::new(None), DeclarationNumbers::default(), Elements(Cell::new(0)));
    for _ in 0..3 {
        let mut bytes = Vec::new();
        assert!(knowledge.encode(&elements, &mut bytes, &numbers).is_ok());
        assert_eq!(bytes, postcard::to_stdvec(&vec![(1u32, 0.5); 40]).unwrap());
    }
}

/// A type whose values differ in what they show: a receiver may have it as an untagged enum.
#[test]
fn elements_that_differ_from_those_before_are_encoded_as_one_by_one() {
    /// Its variants have the numbers of a `Form`'s.
    #[derive(Clone, Debug, Serialize)]
    enum Twin {
        #[allow(dead_code)]
        Empty,
        Octet(u8),
    }
    #[derive(Clone, Debug, Serialize)]
    #[serde(untagged)]
    enum Untagged {
        Pair(u8, u8),
        Longer(u8, u8, u8),
        Other(u16, u8),
        Named {
            a: u8,
            b: u8,
        },
        Renamed {
            a: u8,
            c: u8,
        },
        Fewer {
            a: u8,
        },
        Two {
            a: [u8; 2],
        },
        Three {
            a: [u8; 3],
        },
        Text(String),
        Maybe(Option<u8>),
        Array([u8; 2]),
        Array3([u8; 3]),
        Bytes(Raw),
        Of(Form),
        Like(Twin),
        Skips {
            a: u8,
            #[serde(skip_serializing_if = "Option::is_none")]
            b: Option<u8>,
        },
    }
    use Untagged::*;
    let all = [
        Pair(1, 2),
        Longer(1, 2, 3),
        Other(1, 2),
        Named { a: 1, b: 2 },
        Renamed { a: 1, c: 2 },
        Fewer { a: 1 },
        Two { a: [1, 2] },
        Three { a: [1, 2, 3] },
        Text("ab".to_owned()),
        Maybe(Some(1)),
        Array([1, 2]),
        Array3([1, 2, 3]),
        Bytes(Raw(7)),
        Of(Form::Byte(1)),
        Like(Twin::Octet(1)),
    ];
    for known in &all {
        for other in &all {
            let many = vec![known.clone(); 20];
            let with_other = [&many[..], std::slice::from_ref(other), &many].concat();
            shows_the_same_one_by_one(&[many.clone(), with_other, many]);
        }
    }
    // The others may not hide that a field is left out.
    let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
    let mut list = vec![Fewer { a: 1 }; 20];
    assert!(knowledge.encode(&list, &mut Vec::new(), &numbers).is_ok());
    list.push(Skips { a: 1, b: None });
    assert!(knowledge.encode(&list, &mut Vec::new(), &numbers).is_err());
}

proptest! {
    #[test]
    fn lists_show_what_their_elements_show(
        mixed in proptest::collection::vec(proptest::collection::vec(mixed(), 0..20), 1..4),
        plans in proptest::collection::vec(proptest::collection::vec(plan(), 0..20), 1..4),
        terms in proptest::collection::vec(proptest::collection::vec(term(), 0..20), 1..4),
        rows in proptest::collection::vec(proptest::collection::vec((any::<Option<u8>>(), any::<Result<u8, String>>()), 0..40), 1..4),
    ) {
        shows_the_same_one_by_one(&mixed);
        shows_the_same_one_by_one(&plans);
        shows_the_same_one_by_one(&terms);
        shows_the_same_one_by_one(&rows);
    }
}
