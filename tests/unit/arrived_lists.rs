//! Tests of lists that have arrived in memory of their own: they decode as from one piece, and take the memory over.

use std::collections::{BTreeMap, HashSet, LinkedList, VecDeque};
use std::fmt::Debug;

use serde::Serialize;

use super::*;
use crate::memory::{Region, Slice as Memory};
use crate::payload::TrailingList;
use crate::shape::{DeclarationNumbers, Encoded, Knowledge, trailing_list};

/// The message as it arrives where its elements, which consist of numbers of so many bytes, get memory of their own.
#[allow(unsafe_code)]
fn arrived(bytes: &[u8], head: usize, number: usize) -> ReceivedMessage {
    // SAFETY: all of it is written next.
    let region = unsafe { Region::for_list(head, bytes.len() - head, number) };
    assert!(Memory::whole(&region).write(bytes));
    region.take_message()
}

/// Decodes the message as it arrives in two pieces; whether it has taken over the second.
fn decode_list<T: DeserializeOwned>(bytes: &[u8], head: usize, number: usize) -> (Result<(T, usize), String>, bool) {
    let mut message = arrived(bytes, head, number);
    let mut asked = Vec::new();
    let decoded = decode_message::<T>(&mut message, &Verdicts::default(), &mut |memory| {
        asked.push(memory);
        Some(memory)
    });
    let taken = message.list().is_some();
    if !taken {
        assert_eq!(*message, *bytes, "the message is whole");
    }
    let mut asked_for_whole = Vec::new();
    let _ = decode_within::<T>(bytes, &mut |memory| {
        asked_for_whole.push(memory);
        Some(memory)
    });
    assert_eq!(asked, asked_for_whole);
    (decoded, taken)
}

/// What is sent decodes from two pieces to the same as from one, and takes over the second where it should.
#[track_caller]
fn check_as<S: Serialize + ?Sized, T: DeserializeOwned + PartialEq + Debug>(sent: &S, value: &T, should_take: bool) {
    let (mut bytes, knowledge, numbers) = (Vec::new(), Knowledge::new(None), DeclarationNumbers::default());
    // The first value of a type takes another way through the encoder.
    let lists = [(), ()].map(|()| {
        bytes.clear();
        assert!(matches!(knowledge.encode(sent, &mut bytes, &numbers), Ok(Encoded::As(_))));
        trailing_list().expect("it ends with a list")
    });
    assert_eq!(lists[0], lists[1]);
    assert_eq!(bytes, postcard::to_stdvec(sent).unwrap());
    let (head, width) = lists[0].head_of(bytes.len()).expect("the list can be used");
    let whole = decode_within::<T>(&bytes, &mut |_| Some(usize::MAX));
    assert_eq!(whole.as_ref().map(|(decoded, _)| decoded), Ok(value));
    assert_eq!(decode_list::<T>(&bytes, head, width), (whole, should_take));
}

#[track_caller]
fn check_list<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T, should_take: bool) {
    check_as(value, value, should_take);
}

/// A type of a program's own, which asks for bytes.
#[derive(Debug, PartialEq, Serialize)]
struct Bytes(#[serde(serialize_with = "as_bytes")] Vec<u8>);

fn as_bytes<S: serde::Serializer>(bytes: &[u8], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Bytes, D::Error> {
        struct Visit;
        impl de::Visitor<'_> for Visit {
            type Value = Bytes;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> std::result::Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }
            fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> std::result::Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
        }
        deserializer.deserialize_byte_buf(Visit)
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Blob(Vec<u8>);

/// It borrows while it is decoded, and owns what it has then.
#[derive(Debug, PartialEq, Serialize)]
struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Name, D::Error> {
        <&str>::deserialize(deserializer).map(|name| Name(name.to_owned()))
    }
}

/// As programs send it: what it is, and where it belongs.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Put<T> {
    key: String,
    tags: Vec<u16>,
    checksum: [u8; 16],
    value: T,
}

fn put<T>(value: T) -> Put<T> {
    Put { key: "key/17".to_owned(), tags: vec![1, 300], checksum: [9; 16], value }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Command {
    Get(String),
    Put { key: String, value: Vec<u8> },
}

#[test]
fn lists_take_over_the_memory_that_they_have_arrived_in() {
    for len in [16 << 10, 20_001] {
        check_list(&vec![7u8; len], true);
        check_list(&vec![-7i8; len], true);
        check_list(&vec![0.5f32; len], true);
        check_list(&vec![0.5f64; len], true);
        check_list(&vec![[0.5f32, 1.0]; len], true);
        check_list(&vec![[0.5f32, 1.0, 2.0]; len], true);
        check_list(&vec![[0.5f64; 4]; len], true);
        check_list(&vec![[7u8; 16]; len], true);
        check_list(&vec![[7u8; 32]; len], true);
        check_list(&"a\u{e4}".repeat(len), true);
        check_list(&Some(vec![0.5f64; len]), true);
        check_list(&Some("a\u{e4}".repeat(len)), true);
        check_list(&Bytes(vec![7; len]), true);
        check_list(&Some(Bytes(vec![7; len])), true);
        check_list(&Blob(vec![7; len]), true);
        check_list(&Box::<[u8]>::from(vec![7; len]), true);
        check_list(&Box::<str>::from("a".repeat(len)), true);
        // They are decoded from one piece.
        check_list(&Name("a".repeat(len)), false);
        check_as(&vec![7u8; len], &VecDeque::from(vec![7u8; len]), false);
        check_as(&vec![0.5f64; len], &LinkedList::from_iter(vec![0.5f64; len]), false);
        check_as(&vec![7u8; len], &HashSet::from([7u8]), false);
    }
}

/// What comes before the list is decoded from the first piece.
#[test]
fn lists_at_the_end_of_other_values_take_over_their_memory() {
    let (len, text) = (20_000, "a\u{e4}".repeat(20_000));
    check_list(&("key".to_owned(), vec![7u8; len]), true);
    check_list(&(String::new(), vec![7u8; len]), true);
    check_list(&(7u64, text.clone()), true);
    check_list(&((1u8, [0.5f32; 3]), Some('x'), vec![0.5f32; len]), true);
    check_list(&(vec![1.0f64; 3], vec![0.5f64; len]), true);
    // The last of two long ones.
    check_list(&(vec![1u8; len], vec![0.5f64; len]), true);
    // Fields without bytes are behind it.
    check_list(&(vec![7u8; len], (), [(); 3], std::marker::PhantomData::<u64>), true);
    check_list(&(vec!["a".to_owned(), "b".to_owned()], BTreeMap::from([(1u8, "c".to_owned())]), vec![7i8; len]), true);
    check_list(&put(vec![7u8; len]), true);
    check_list(&put(vec![[0.5f64; 3]; len]), true);
    check_list(&put(text.clone()), true);
    check_list(&put(Some(Blob(vec![7; len]))), true);
    check_list(&put(Bytes(vec![7; len])), true);
    check_list(&Command::Put { key: "k".to_owned(), value: vec![7; len] }, true);
    check_list(&vec![("a".to_owned(), vec![1u8; 3]), ("b".to_owned(), vec![7u8; len])], true);
    check_list(&vec![vec![0.5f32; 3], vec![0.5f32; len]], true);
    check_list(&Ok::<_, String>(vec![7u8; len]), true);
    check_list(&Box::new(put(Box::<[u8]>::from(vec![7; len]))), true);
    check_as(&put(vec![7u8; len]), &put(VecDeque::from(vec![7u8; len])), false);
    check_list(&put(Name(text)), false);
}

#[test]
fn other_values_end_with_no_list() {
    fn list_of<T: Serialize>(value: &T) -> Option<TrailingList> {
        let (mut bytes, knowledge, numbers) = (Vec::new(), Knowledge::new(None), DeclarationNumbers::default());
        assert!(matches!(knowledge.encode(value, &mut bytes, &numbers), Ok(Encoded::As(_))));
        let first = trailing_list();
        assert!(knowledge.encode_alone(value, &mut Vec::new(), &numbers).is_ok());
        assert_eq!(trailing_list(), first);
        first
    }
    let len = 20_000;
    assert_eq!(list_of(&vec![7u8; len]), Some(TrailingList { head: 3, width: 1 }));
    assert_eq!(list_of(&vec![7u8; 5000]), None, "it is short");
    assert_eq!(list_of(&(vec![7u8; len], 1u8)), None, "there is something behind it");
    assert_eq!(list_of(&(vec![7u8; len], String::new())), None);
    assert_eq!(list_of(&vec![7u32; len]), None, "the bytes are not those in memory");
    assert_eq!(list_of(&vec![true; len]), None, "not any byte is a `bool`");
    assert_eq!(list_of(&vec![[1.0f32; 2]; len]), Some(TrailingList { head: 3, width: 4 }));
    assert_eq!(list_of(&()), None);
}

#[test]
fn only_a_long_list_behind_little_gets_memory_of_its_own() {
    let place = |head, width| TrailingList { head, width };
    let little = cfg!(target_endian = "little");
    for (list, body, expected) in [
        (place(3, 1), 20_003, Some((3, 1))),
        (place(3, 8), 16_003, None),
        (place(3, 8), 24_003, little.then_some((3, 8))),
        (place(3, 4), 24_005, None),
        (place(3, 2), 24_003, None),
        (place(3, 0), 24_003, None),
        (place(3, 255), 24_003, None),
        (place(0, 1), 20_000, None),
        (place(20_000, 1), 20_000, None),
        (place(20_001, 1), 20_000, None),
        (place(u64::MAX, 1), 20_000, None),
        (place(5000, 1), 25_000, Some((5000, 1))),
        (place(5001, 1), 25_001, None),
        (place(64 << 10, 1), 10 << 20, Some((64 << 10, 1))),
        (place((64 << 10) + 1, 1), 10 << 20, None),
        (place(1, 1), usize::MAX, Some((1, 1))),
    ] {
        assert_eq!(list.head_of(body), expected, "{list:?} of {body}");
    }
}

/// Whatever the bytes are, and wherever they are cut, there is the value, or the error, of the bytes in one piece.
#[test]
fn messages_in_two_pieces_decode_as_in_one() {
    fn check<T: DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
        let whole = decode_within::<T>(bytes, &mut |_| Some(usize::MAX));
        for number in [1, 4, 8] {
            // There is none without elements.
            for head in (0..bytes.len()).filter(|head| (bytes.len() - head).is_multiple_of(number)) {
                let (decoded, _) = decode_list::<T>(bytes, head, number);
                assert_eq!(decoded, whole, "{bytes:?}, {head} and {number}");
            }
        }
    }
    let messages: [&[u8]; 14] = [
        &[],
        &[0],
        &[1],
        &[1, 4, b'a', b'b', b'c', b'd'],
        &[4, b'a', b'b', b'c', b'd'],
        &[4, b'a', b'b', b'c', 0xff],
        &[0x84, 0, b'a', b'b', b'c', b'd'],
        &[0x84, 0x80, 0x80, 0, b'a', b'b', b'c', b'd'],
        &[3, b'a', b'b', b'c', b'd'],
        &[5, b'a', b'b', b'c', b'd'],
        &[0xff, 0xff, 0xff, 0xff, b'a', b'b', b'c', b'd'],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, b'a', b'b', b'c', b'd'],
        &[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0],
        &[1, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f],
    ];
    for bytes in messages {
        check::<Vec<u8>>(bytes);
        check::<Vec<f32>>(bytes);
        check::<Vec<f64>>(bytes);
        check::<Vec<[f32; 2]>>(bytes);
        check::<Vec<u64>>(bytes);
        check::<Vec<bool>>(bytes);
        check::<String>(bytes);
        check::<Option<String>>(bytes);
        check::<Option<Vec<u8>>>(bytes);
        check::<Bytes>(bytes);
        check::<Blob>(bytes);
        check::<Name>(bytes);
        check::<(u8, Vec<u8>)>(bytes);
        check::<(Vec<u8>, u8)>(bytes);
        check::<VecDeque<u8>>(bytes);
        check::<u8>(bytes);
        check::<()>(bytes);
    }
}

/// In memory it is much more than in a message.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Cache {
    #[serde(skip)]
    rows: [[[u64; 32]; 32]; 4],
}

fn cache() -> Cache {
    Cache { rows: Default::default() }
}

/// Once it has given its list away, it can't be decoded again: it is refused no memory from then on.
#[test]
fn message_whose_list_is_taken_is_refused_no_memory() {
    fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T, head: usize) {
        let bytes = postcard::to_stdvec(value).unwrap();
        for granted in 0..3 {
            let (mut message, mut asked) = (arrived(&bytes, head, 1), 0);
            loop {
                let mut left = granted;
                let decoded = decode_message::<T>(&mut message, &Verdicts::default(), &mut |memory| {
                    left -= 1;
                    (left >= 0).then_some(memory)
                });
                match decoded {
                    Ok((decoded, _)) => break assert_eq!(&decoded, value),
                    Err(reason) => assert!(reason.contains("memory"), "{reason}"),
                }
                asked += 1;
                assert!(asked < 2, "nothing asks for memory before the list is taken");
            }
        }
    }
    let text = "a".repeat(20_000);
    check(&(text.clone(), Box::new(cache())), 3);
    check(&(vec![7u8; 20_000], Box::new(cache())), 3);
    check(&BTreeMap::from([(text, cache())]), 4);
}

/// It would panic with each message.
#[test]
fn type_that_panics_on_an_error_gets_the_next_message_in_one_piece() {
    #[derive(Debug)]
    struct Strict;
    impl<'de> Deserialize<'de> for Strict {
        fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> std::result::Result<Strict, D::Error> {
            VecDeque::<u8>::deserialize(deserializer).map_err(|error| error.to_string()).expect("a list");
            Ok(Strict)
        }
    }
    let bytes = postcard::to_stdvec(&vec![7u8; 20_000]).unwrap();
    let verdicts = Verdicts::default();
    verdicts.note_long();
    assert!(verdicts.takes_lists());
    let mut message = arrived(&bytes, 3, 1);
    let decoded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        decode_message::<Strict>(&mut message, &verdicts, &mut |memory| Some(memory))
    }));
    assert!(decoded.is_err() && !verdicts.takes_lists());
}

/// A message whose values find no memory now is decoded once more, later.
#[test]
fn message_that_is_refused_memory_stays_whole() {
    let bytes = postcard::to_stdvec(&vec![7u8; 3000]).unwrap();
    let mut message = arrived(&bytes, 2, 1);
    let verdicts = Verdicts::default();
    let refused = decode_message::<LinkedList<u8>>(&mut message, &verdicts, &mut |_| None);
    assert!(refused.unwrap_err().contains("memory"));
    assert_eq!(decode_message::<Vec<u8>>(&mut message, &verdicts, &mut |_| None).map(|(list, _)| list), Ok(vec![7; 3000]));
}
