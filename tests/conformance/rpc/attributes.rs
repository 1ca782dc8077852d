//! What serde's attributes do over a format that does not describe itself: they work, or the first call that needs more says what
//! is missing.

use std::collections::BTreeMap;
use std::fmt::Debug;

use calomel::{Error, MessageSide, Request};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::support::{Net, Pair};

/// Has a value sent as arguments and back as a result.
fn echo<T: Serialize + DeserializeOwned + Debug + 'static>(pair: &Pair, value: &T) -> calomel::Result<T> {
    let name = std::any::type_name::<T>();
    let _ = pair.server.define(name, |_: &Request, value: T| value);
    pair.client.procedure::<T, T>(name).on(&pair.to_server).call(value)
}

#[track_caller]
fn works<T: Serialize + DeserializeOwned + PartialEq + Debug + 'static>(pair: &Pair, values: impl IntoIterator<Item = T>) {
    for value in values {
        for _ in 0..2 {
            assert_eq!(echo(pair, &value).unwrap(), value);
        }
    }
}

/// The value can't be encoded, and the error says why.
#[track_caller]
fn cannot_be_sent<T: Serialize + DeserializeOwned + Debug + 'static>(pair: &Pair, value: T, words: &[&str]) {
    match echo(pair, &value).unwrap_err() {
        Error::Encode { side: MessageSide::Arguments, reason, .. } => assert_ours(&reason, words),
        other => panic!("{other:?}"),
    }
}

/// The type can't be decoded, be it an argument or a result, and the error says why.
#[track_caller]
fn cannot_be_received<T: Serialize + DeserializeOwned + Debug + 'static>(pair: &Pair, value: fn() -> T) {
    match echo(pair, &value()).unwrap_err() {
        Error::Decode { side: MessageSide::Arguments, reason, .. } => assert_ours(&reason, &["describes itself", "untagged"]),
        other => panic!("{other:?}"),
    }
    let name = format!("get {}", std::any::type_name::<T>());
    let registration = pair.server.define(&name, move |_: &Request, ()| value()).unwrap();
    match pair.client.procedure::<(), T>(&name).on(&pair.to_server).call(&()).unwrap_err() {
        Error::Decode { side: MessageSide::Result, reason, .. } => assert_ours(&reason, &["describes itself", "untagged"]),
        other => panic!("{other:?}"),
    }
    registration.remove();
}

#[track_caller]
fn assert_ours(reason: &str, words: &[&str]) {
    assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
    assert!(!reason.to_lowercase().contains("postcard"), "{reason}");
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Inner {
    x: u8,
    text: String,
}

fn inner() -> Inner {
    Inner { x: 1, text: "text".into() }
}

fn flatten(net: &Net) {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Flat {
        before: u8,
        #[serde(flatten)]
        inner: Inner,
    }
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Rest {
        before: u8,
        #[serde(flatten)]
        rest: BTreeMap<String, u8>,
    }
    let pair = net.pair();
    cannot_be_sent(&pair, Flat { before: 1, inner: inner() }, &["flatten", "field of its own"]);
    cannot_be_sent(&pair, Rest { before: 1, rest: BTreeMap::new() }, &["flatten"]);
}

fn untagged(net: &Net) {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(untagged)]
    enum Untagged {
        Number(u32),
        Inner(Inner),
    }
    let pair = net.pair();
    cannot_be_received(&pair, || Untagged::Number(1));
    cannot_be_received(&pair, || Untagged::Inner(inner()));
    cannot_be_received(&pair, || (1u8, vec![Untagged::Number(1)]));
}

/// A sender's value is compared as it is, so what another type would take for its own is refused.
fn untagged_values_at_another_type(net: &Net) {
    #[derive(Debug, Serialize)]
    #[serde(untagged)]
    enum Untagged {
        Number(u32),
        Text(String),
    }
    let pair = net.pair();
    pair.server.define("number", |_: &Request, (n, last): (u32, u8)| n + u32::from(last)).unwrap();
    let number = pair.client.procedure::<(Untagged, u8), u32>("number").on(&pair.to_server);
    for n in 0..200 {
        assert_eq!(number.call(&(Untagged::Number(n), 1)).unwrap(), n + 1);
        let refused = number.call(&(Untagged::Text("a".into()), 1));
        assert!(matches!(refused, Err(Error::TypeMismatch { .. })), "{refused:?}");
    }
}

/// Each part is compared, not only the first of its kind: what a list or a map has shown before says nothing of the next element.
fn elements_of_another_shape(net: &Net) {
    #[derive(Debug, Serialize)]
    #[serde(untagged)]
    enum Untagged {
        Number(u32),
        Text(String),
        Inner(Inner),
    }
    #[derive(Debug, Serialize)]
    struct Row<T> {
        cell: T,
    }
    #[derive(Debug, Deserialize)]
    struct NumberRow {
        cell: u32,
    }
    let (number, text, pair) = (|| Untagged::Number(7), || Untagged::Text("a".into()), net.pair());
    let sum = |numbers: &mut dyn Iterator<Item = u32>| numbers.sum::<u32>();
    pair.server.define("list", move |_: &Request, list: Vec<u32>| sum(&mut list.into_iter())).unwrap();
    pair.server.define("rows", move |_: &Request, rows: Vec<NumberRow>| sum(&mut rows.iter().map(|row| row.cell))).unwrap();
    pair.server.define("pairs", move |_: &Request, pairs: Vec<(u8, u32)>| sum(&mut pairs.iter().map(|pair| pair.1))).unwrap();
    pair.server.define("options", move |_: &Request, list: Vec<Option<u32>>| sum(&mut list.into_iter().flatten())).unwrap();
    pair.server.define("lists", move |_: &Request, lists: Vec<Vec<u32>>| sum(&mut lists.into_iter().flatten())).unwrap();
    pair.server.define("values", move |_: &Request, map: BTreeMap<u8, u32>| sum(&mut map.into_values())).unwrap();
    pair.server.define("keys", move |_: &Request, map: BTreeMap<u32, u8>| sum(&mut map.into_keys())).unwrap();

    /// `same` is what the receiver takes for its own; `mixed` has something else in it.
    #[track_caller]
    fn told_apart<T: Serialize + Debug + 'static>(pair: &Pair, name: &str, same: T, mixed: T) {
        let procedure = pair.client.procedure::<T, u32>(name).on(&pair.to_server);
        for _ in 0..2 {
            assert_eq!(procedure.call(&same).unwrap(), 14);
            let refused = procedure.call(&mixed);
            assert!(matches!(refused, Err(Error::TypeMismatch { side: MessageSide::Arguments, .. })), "{mixed:?}: {refused:?}");
        }
        // Nothing is known before this one.
        let procedure = pair.client.procedure::<T, u32>(name).on(&pair.to_server);
        let refused = procedure.call(&mixed);
        assert!(
            matches!(refused, Err(Error::TypeMismatch { side: MessageSide::Arguments, .. })),
            "at first, {mixed:?}: {refused:?}"
        );
    }
    told_apart(&pair, "list", vec![number(), number()], vec![number(), text()]);
    told_apart(&pair, "list", vec![number(), number()], vec![number(), Untagged::Inner(inner())]);
    let row = |cell| Row { cell };
    told_apart(&pair, "rows", vec![row(number()), row(number())], vec![row(number()), row(text())]);
    told_apart(&pair, "pairs", vec![(1u8, number()), (1, number())], vec![(1u8, number()), (2, text())]);
    told_apart(&pair, "options", vec![Some(number()), None, Some(number())], vec![Some(number()), None, Some(text())]);
    told_apart(&pair, "lists", vec![vec![number()], vec![number()]], vec![vec![number()], vec![text()]]);
    told_apart(&pair, "lists", vec![vec![number(), number()]], vec![vec![number(), text()]]);
    told_apart(&pair, "values", BTreeMap::from([(1u8, number()), (2, number())]), BTreeMap::from([(1u8, number()), (2, text())]));

    /// Keys in an order of their own.
    #[derive(Debug)]
    struct Entries(Vec<(Untagged, u8)>);
    impl Serialize for Entries {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
        }
    }
    let keys = |second| Entries(vec![(Untagged::Number(6), 1), (second, 1)]);
    told_apart(&pair, "keys", keys(Untagged::Number(8)), keys(text()));
}

/// Untagged enums in tuples and arrays may be what the receiver has several types for.
fn elements_of_tuples_of_other_shapes(net: &Net) {
    #[derive(Debug, Serialize)]
    #[serde(untagged)]
    enum Untagged {
        Number(u32),
        Text(String),
    }
    let pair = net.pair();
    pair.server.define("both", |_: &Request, list: Vec<(u32, String)>| list.len() as u32).unwrap();
    let both = pair.client.procedure::<Vec<(Untagged, Untagged)>, u32>("both").on(&pair.to_server);
    let element = || (Untagged::Number(1), Untagged::Text("a".into()));
    for _ in 0..3 {
        assert_eq!(both.call(&vec![element(), element()]).unwrap(), 2);
    }
}

fn internally_tagged(net: &Net) {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind")]
    enum Tagged {
        Nothing,
        Inner(Inner),
        Fields { a: u8 },
    }
    let pair = net.pair();
    cannot_be_received(&pair, || Tagged::Nothing);
    cannot_be_received(&pair, || Tagged::Inner(inner()));
    cannot_be_received(&pair, || Tagged::Fields { a: 1 });
}

fn adjacently_tagged(net: &Net) {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind", content = "value")]
    enum Tagged {
        Nothing,
        Number(u64),
        Inner(Inner),
        Fields { a: u8 },
    }
    let pair = net.pair();
    cannot_be_received(&pair, || Tagged::Nothing);
    cannot_be_received(&pair, || Tagged::Number(7));
    cannot_be_received(&pair, || Tagged::Inner(inner()));
    cannot_be_received(&pair, || Tagged::Fields { a: 1 });
}

fn json_values(net: &Net) {
    let pair = net.pair();
    cannot_be_received(&pair, || serde_json::json!({ "x": [1, 2.5, "three", null] }));
    cannot_be_received(&pair, || serde_json::Value::Null);
}

fn fields_that_are_left_out(net: &Net) {
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Sparse {
        #[serde(skip_serializing_if = "Option::is_none", default)]
        first: Option<u32>,
        second: u32,
    }
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Choice {
        Sparse {
            #[serde(skip_serializing_if = "Vec::is_empty", default)]
            list: Vec<u8>,
            number: u8,
        },
    }
    let pair = net.pair();
    // At first all is there.
    works(&pair, [Sparse { first: Some(1), second: 2 }]);
    let words = ["`first`", "Sparse", "skip_serializing_if", "remove"];
    cannot_be_sent(&pair, Sparse { first: None, second: 2 }, &words);
    cannot_be_sent(&pair, Choice::Sparse { list: Vec::new(), number: 1 }, &["`list`", "skip_serializing_if"]);
    works(&pair, [Sparse { first: Some(1), second: 2 }]);
    // From a handler.
    pair.server.define("sparse", |_: &Request, first| Sparse { first, second: 7 }).unwrap();
    let sparse = pair.client.procedure::<Option<u32>, Sparse>("sparse").on(&pair.to_server);
    assert_eq!(sparse.call(&Some(1)).unwrap().second, 7);
    match sparse.call(&None).unwrap_err() {
        Error::Encode { side: MessageSide::Result, reason, .. } => assert_ours(&reason, &["`first`"]),
        other => panic!("{other:?}"),
    }
}

fn defaults_skips_and_names(net: &Net) {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Full {
        #[serde(default)]
        first: u32,
        #[serde(skip)]
        cache: u64,
        #[serde(rename = "else")]
        other: u8,
        #[serde(default = "seven")]
        last: u8,
    }
    fn seven() -> u8 {
        7
    }
    #[derive(Debug, Serialize)]
    struct Shorter {
        first: u32,
        #[serde(rename = "else")]
        other: u8,
    }
    #[derive(Debug, Serialize)]
    struct Older {
        number: u32,
    }
    #[derive(Debug, Deserialize)]
    struct Newer {
        #[serde(alias = "number", alias = "nr")]
        count: u32,
    }
    let pair = net.pair();
    works(&pair, [Full { first: 1, cache: 0, other: 2, last: 3 }]);
    // What is not sent is not made up: the types differ.
    pair.server.define("full", |_: &Request, full: Full| full.last).unwrap();
    let refused = pair.client.procedure::<Shorter, u8>("full").on(&pair.to_server).call(&Shorter { first: 1, other: 2 });
    assert!(matches!(refused, Err(Error::TypeMismatch { side: MessageSide::Arguments, .. })), "{refused:?}");
    pair.server.define("newer", |_: &Request, newer: Newer| newer.count).unwrap();
    assert_eq!(pair.client.procedure::<Older, u32>("newer").on(&pair.to_server).call(&Older { number: 5 }).unwrap(), 5);
    // Strict about unknown fields, or not: there are none.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "camelCase")]
    struct Strict {
        some_field: u8,
    }
    works(&pair, [Strict { some_field: 1 }]);
}

suite![
    flatten,
    untagged,
    untagged_values_at_another_type,
    elements_of_another_shape,
    elements_of_tuples_of_other_shapes,
    internally_tagged,
    adjacently_tagged,
    json_values,
    fields_that_are_left_out,
    defaults_skips_and_names,
];
