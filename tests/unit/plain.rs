//! Tests of sequences that are encoded and decoded as a whole: the bytes and the errors are postcard's, and code of a type's own
//! keeps its say.

use std::fmt::{self, Debug};

use proptest::prelude::*;
use serde::de::{DeserializeOwned, SeqAccess};
use serde::{Serialize, Serializer};

use super::*;
use crate::rpc::decode;
use crate::shape::{DeclarationNumbers, Encoded, Knowledge, Shape};

/// Encodes as an engine does: with nothing known of the type, and then with what the first value has shown.
fn encode<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
    let bytes = [(); 2].map(|()| {
        let mut bytes = vec![9];
        assert!(matches!(knowledge.encode(value, &mut bytes, &numbers), Ok(Encoded::As(_))));
        assert_eq!(bytes[0], 9);
        bytes.split_off(1)
    });
    assert_eq!(bytes[0], bytes[1]);
    let [bytes, _] = bytes;
    bytes
}

/// Checks that a list and each of its beginnings is encoded as postcard does, as a `Vec` and as a slice, and comes back.
fn check<T: Plain + Serialize + DeserializeOwned>(list: &[T]) {
    for len in (0..list.len().min(20)).chain([list.len()]) {
        let list = &list[..len];
        let bytes = postcard::to_stdvec(list).unwrap();
        assert_eq!(encode(list), bytes);
        assert_eq!(encode(&list.to_vec()), bytes);
        assert_eq!(Shape::of_value(list), Shape::of_value(&list.iter().collect::<std::collections::VecDeque<_>>()));
        assert!(decoder_is_used::<Vec<T>>());
        // Compared by their encoding, since a NaN is not equal to itself.
        assert_eq!(postcard::to_stdvec(&decode::<Vec<T>>(&bytes).unwrap()).unwrap(), bytes);
        assert_eq!(postcard::to_stdvec(&decode::<(Box<[T]>, u8)>(&[&bytes[..], &[7]].concat()).unwrap().0).unwrap(), bytes);
        for cut in 0..bytes.len().min(200) {
            let cause = postcard::from_bytes::<Vec<T>>(&bytes[..cut]).err().unwrap();
            assert_eq!(decode::<Vec<T>>(&bytes[..cut]).err(), Some(format!("{cause} ({cut} bytes)")));
        }
    }
}

/// Whether `T` is decoded by this module.
fn decoder_is_used<T: DeserializeOwned>() -> bool {
    struct Asks;
    impl<'de> Deserializer<'de> for Asks {
        type Error = Visited;

        fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> std::result::Result<V::Value, Visited> {
            Err(Visited(decoder::<V>().map(|_| TypeId::of::<Asks>())))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
        }
    }
    matches!(T::deserialize(Asks), Err(Visited(Some(_))))
}

#[test]
fn lists_of_numbers_have_the_bytes_of_postcard() {
    check(&(0..=255).collect::<Vec<u8>>());
    check(&(-128..=127).collect::<Vec<i8>>());
    check(&[true, false, true, true, false]);
    check(&[0.0, -0.0, 1.5, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE]);
    check(&[0.0, -0.0, 1.5, f64::NAN, f64::NEG_INFINITY, f64::MAX]);
    check(&[[0.0, f32::NAN], [1.5, -0.0]]);
    check(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0], [f32::NAN; 3]]);
    check(&[[0.5f32; 4], [1.5; 4]]);
    check(&[[0.0, f64::MAX], [f64::NAN, -0.0]]);
    check(&[[1f64, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0; 3]]);
    check(&[[0.5f64; 4], [1.5; 4]]);
    check(&[[1u8; 16], [200; 16]]);
    check(&[[7u8; 32], [0; 32], [255; 32]]);
    // At each border between lengths, and with runs of short numbers before and after.
    let numbers: Vec<u64> =
        (0..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit, 1, 2, 3, 4, 5, 6, 7, 8, 9]).chain([u64::MAX]).collect();
    check(&numbers);
    check(&numbers.iter().map(|number| *number as i64).collect::<Vec<i64>>());
    check(&numbers.iter().map(|number| -(*number as i128) as i64).collect::<Vec<i64>>());
    check(&numbers.iter().map(|number| *number as usize).collect::<Vec<usize>>());
    check(&numbers.iter().map(|number| *number as isize).collect::<Vec<isize>>());
    check(&numbers.iter().map(|number| *number as u32).collect::<Vec<u32>>());
    check(&numbers.iter().map(|number| *number as i32).collect::<Vec<i32>>());
    check(&numbers.iter().map(|number| *number as u16).collect::<Vec<u16>>());
    check(&numbers.iter().map(|number| *number as i16).collect::<Vec<i16>>());
}

#[track_caller]
fn check_in_place<A: Serialize + ?Sized>(value: &A) {
    let content = InPlace::of(&value).expect("its bytes lie in memory as they are sent");
    assert_eq!([&content.head(), content.bytes].concat(), postcard::to_stdvec(value).unwrap());
    assert_eq!(Shape::of_value(&content), Shape::of_value(value));
}

/// As `check_in_place`, and then with what owns the bytes alone.
#[track_caller]
fn check_taken<R: Serialize + 'static>(value: R) {
    check_in_place(&value);
    let encoded = postcard::to_stdvec(&value).unwrap();
    let content = InPlace::of(&&value).unwrap().without_bytes();
    let memory = InPlace::take(value);
    assert_eq!([&content.head(), (*memory).as_ref()].concat(), encoded);
}

#[test]
fn memory_that_is_taken_is_hardly_longer_than_its_content() {
    for len in [0, 1, 1000, 79_000, 80_000, 100_000] {
        let mut list = Vec::with_capacity(100_000);
        list.resize(len, 7u8);
        let list = fitted(list);
        assert_eq!(list, vec![7; len]);
        assert!(list.capacity() <= len + len / 4, "{} for {len} bytes", list.capacity());
    }
}

#[test]
fn bytes_in_memory_are_those_on_the_wire_and_show_the_same_shape() {
    for len in [1, 127, 128, 20_000] {
        check_taken(vec![7u8; len]);
        check_in_place(&vec![7u8; len][..]);
        check_taken(vec![-7i8; len]);
        check_taken(vec![true; len]);
        check_taken(vec![0.5f32; len]);
        check_taken(vec![0.5f64; len]);
        check_in_place(&vec![0.5f64; len][..]);
        check_taken(vec![[0.5f32, 1.0]; len]);
        check_taken(vec![[0.5f32, 1.0, 2.0]; len]);
        check_taken(vec![[0.5f32; 4]; len]);
        check_taken(vec![[0.5f64, 1.0]; len]);
        check_taken(vec![[0.5f64, 1.0, 2.0]; len]);
        check_taken(vec![[0.5f64; 4]; len]);
        check_taken(vec![[7u8; 16]; len]);
        check_taken(vec![[7u8; 32]; len]);
        check_in_place(&vec![[7u8; 32]; len][..]);
        check_taken("ä".repeat(len));
        check_in_place(&"ä".repeat(len)[..]);
        check_taken(Some(vec![7u8; len]));
        check_taken(Some(vec![true; len]));
        check_taken(Some(vec![[0.5f64, 1.0, 2.0]; len]));
        check_taken(Some("ä".repeat(len)));
    }
}

/// What these encode may lie elsewhere, or not for as long as the value.
#[test]
fn other_types_are_copied() {
    assert!(InPlace::of(&&vec![7u64; 100]).is_none());
    assert!(InPlace::of(&&vec!['a'; 100]).is_none());
    assert!(InPlace::of(&&[7u8; 100]).is_none());
    assert!(InPlace::of(&&[0.5f64; 3]).is_none());
    assert!(InPlace::of(&&vec![(0.5f64, 0.5f64); 100]).is_none());
    assert!(InPlace::of(&&(vec![7u8; 100],)).is_none());
    assert!(InPlace::of(&&None::<Vec<u8>>).is_none());
    assert!(InPlace::of(&&None::<String>).is_none());
    assert!(InPlace::of(&&Some(vec![7u64; 100])).is_none());
    assert!(InPlace::of(&&Some(Some(vec![7u8; 100]))).is_none());
    assert!(InPlace::of(&&Ok::<_, ()>(vec![7u8; 100])).is_none());
    assert!(InPlace::of(&&Box::new(vec![7u8; 100])).is_none());
    assert!(InPlace::of(&&std::sync::Mutex::new(String::new())).is_none());
}

#[test]
fn type_with_an_encoding_of_its_own_keeps_it() {
    #[derive(Debug, PartialEq, Clone, Copy)]
    #[repr(transparent)]
    struct Digit(u8);

    impl Serialize for Digit {
        fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
            serializer.serialize_u8(self.0 + b'0')
        }
    }

    impl<'de> Deserialize<'de> for Digit {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Digit, D::Error> {
            Ok(Digit(u8::deserialize(deserializer)? - b'0'))
        }
    }

    let digits = vec![Digit(4), Digit(2)];
    assert_eq!(encode(&digits), [2, b'4', b'2']);
    assert_eq!(decode::<Vec<Digit>>(&[2, b'4', b'2']).unwrap(), digits);
    assert!(!decoder_is_used::<Vec<Digit>>());
    // A set of numbers is no `Vec`.
    assert!(!decoder_is_used::<std::collections::HashSet<u8>>());
    // The memory of structs and tuples may have another order, or gaps.
    assert!(!decoder_is_used::<Vec<(f32, f32)>>());
    assert!(!decoder_is_used::<Vec<[u16; 3]>>() && !decoder_is_used::<[f64; 3]>());
    assert!(!decoder_is_used::<Vec<u128>>() && !decoder_is_used::<Vec<char>>() && !decoder_is_used::<String>());
}

/// Elements one by one, as arrays are encoded and decoded that are not known as such.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(transparent)]
struct OneByOne<T>(T);

impl<T: Serialize> Serialize for OneByOne<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneByOne<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<OneByOne<T>, D::Error> {
        T::deserialize(deserializer).map(OneByOne)
    }
}

#[derive(Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Newtype<A>(A);

/// Checks an array alone, as a field behind and before others, within others, in a list, and in a newtype.
fn check_array<T, const N: usize>(array: [T; N])
where
    T: Copy + Serialize + DeserializeOwned,
    [T; N]: Serialize + DeserializeOwned + 'static,
    [OneByOne<T>; N]: Serialize,
{
    let alone = array.map(OneByOne);
    assert!(array_of(&array).is_some() && array_of(&alone).is_none());
    assert!(is_plain_array::<[T; N]>());
    let bytes = encode(&array);
    assert_eq!(bytes, postcard::to_stdvec(&array).unwrap());
    assert_eq!(encode(&(1u8, array, true)), [&[1], &bytes[..], &[1]].concat());
    let named = (Newtype(array), 1u8, Some(Newtype(array)));
    assert_eq!(encode(&named), postcard::to_stdvec(&named).unwrap());
    assert_eq!(Shape::of_value(&named), Shape::of_value(&(alone, 1u8, Some(alone))));
    let keys = vec![Newtype(Newtype(array)); 20];
    assert_eq!(encode(&keys), postcard::to_stdvec(&keys).unwrap());
    assert_eq!(Shape::of_value(&keys), Shape::of_value(&vec![alone; 20]));
    let again = decode::<Vec<Newtype<Newtype<[T; N]>>>>(&encode(&keys)).unwrap();
    assert_eq!(encode(&again), encode(&keys));
    let list = (vec![Some([array; 2])], Box::new(array), [array.to_vec(), vec![]]);
    assert_eq!(encode(&list), postcard::to_stdvec(&list).unwrap());
    assert_eq!(Shape::of_value(&array), Shape::of_value(&alone));
    let nested = (3u64, [array; 3], Some(array));
    assert_eq!(Shape::of_value(&nested), Shape::of_value(&(3u64, [alone; 3], Some(alone))));
    // Compared by their encoding, since a NaN is not equal to itself.
    let again = decode::<(u64, [[T; N]; 3], Option<[T; N]>)>(&encode(&nested)).unwrap();
    assert_eq!(postcard::to_stdvec(&again).unwrap(), encode(&nested));
    let again = decode::<(Vec<Option<[[T; N]; 2]>>, Box<[T; N]>, [Vec<T>; 2])>(&encode(&list)).unwrap();
    assert_eq!(postcard::to_stdvec(&again).unwrap(), encode(&list));
    for cut in 0..bytes.len() {
        let cause = postcard::from_bytes::<[T; N]>(&bytes[..cut]).err().unwrap();
        assert_eq!(decode::<[T; N]>(&bytes[..cut]).err(), Some(format!("{cause} ({cut} bytes)")));
    }
    let more = [&bytes[..], &[0]].concat();
    assert_eq!(decode::<[T; N]>(&more).err(), Some(format!("1 of {} bytes are left over", more.len())));
}

#[test]
fn arrays_of_bytes_and_floats_have_the_bytes_of_postcard() {
    macro_rules! check {
        ($($len:literal)*) => {$(
            check_array::<u8, $len>(std::array::from_fn(|place| (place * 9) as u8));
            check_array::<f32, $len>(std::array::from_fn(|place| place as f32 / 9.0));
            check_array::<f64, $len>(std::array::from_fn(|place| place as f64 / 9.0));
        )*};
    }
    check!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32);
    check_array([f32::NAN, -0.0, f32::MIN_POSITIVE]);
    check_array([f64::NAN, f64::NEG_INFINITY, -0.0, 0.1]);
}

#[test]
fn other_arrays_are_encoded_element_by_element() {
    assert!(array_of(&[1u16; 3]).is_none() && array_of(&[true; 3]).is_none() && array_of(&[0u8; 0]).is_none());
    assert!(array_of(&(1.0f64, 2.0f64)).is_none() && array_of(&[1.0f64, 2.0][..]).is_none() && array_of("a text").is_none());
    assert!(array_of(&vec![1u8; 3]).is_none() && array_of(&Some([1u8; 3])).is_none() && array_of(&u32::MAX).is_none());
    assert!(!is_plain_array::<[u16; 3]>() && !is_plain_array::<(f64, f64)>() && !is_plain_array::<Vec<u8>>());
    assert!(!is_plain_array::<[bool; 3]>() && !is_plain_array::<[OneByOne<u8>; 3]>());
}

/// An array where another tuple was before, or the other way round, is declared as it is.
#[test]
fn array_may_contradict_what_was_known() {
    #[derive(Serialize)]
    #[serde(untagged)]
    enum Either {
        Three([f64; 3]),
        Four([f64; 4]),
        Floats([f32; 3]),
        Named(Newtype<[f32; 4]>),
        Words((f64, f64, u64)),
        Number(f64),
    }
    use Either::{Floats, Four, Named, Number, Three, Words};
    let named = Named(Newtype([3.5; 4]));
    let values = [Three([1.0; 3]), Four([2.0; 4]), Floats([3.0; 3]), named, Words((4.0, 5.0, 6)), Number(7.0)];
    for first in &values {
        let (knowledge, numbers) = (Knowledge::new(None), DeclarationNumbers::default());
        let mut bytes = Vec::new();
        assert!(matches!(knowledge.encode(first, &mut bytes, &numbers), Ok(Encoded::As(_))));
        for value in &values {
            bytes.clear();
            let same = std::ptr::eq(first, value);
            match knowledge.encode(value, &mut bytes, &numbers) {
                Ok(Encoded::As(_)) => assert!(same),
                Ok(Encoded::Unlike) => assert!(!same),
                Err(error) => panic!("{error}"),
            }
            bytes.clear();
            let declared = knowledge.encode_alone(value, &mut bytes, &numbers).unwrap();
            assert_eq!(bytes, postcard::to_stdvec(value).unwrap());
            assert_eq!(Shape::decode(&declared.shape), Some(Shape::of_value(value)));
        }
    }
}

/// A field that is an array, written and read backwards by code of its own.
#[test]
fn code_of_a_field_keeps_its_say() {
    mod backwards {
        use super::*;

        pub fn serialize<S: Serializer>(array: &[u8; 3], serializer: S) -> std::result::Result<S::Ok, S::Error> {
            let [a, b, c] = *array;
            (c, b, a).serialize(serializer)
        }

        pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<[u8; 3], D::Error> {
            struct Backwards;

            impl<'de> Visitor<'de> for Backwards {
                type Value = [u8; 3];

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("three bytes")
                }

                fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> std::result::Result<[u8; 3], A::Error> {
                    let mut next = || elements.next_element().map(Option::unwrap);
                    let (c, b, a) = (next()?, next()?, next()?);
                    Ok([a, b, c])
                }
            }

            deserializer.deserialize_tuple(3, Backwards)
        }
    }

    #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
    struct Field {
        #[serde(with = "backwards")]
        array: [u8; 3],
        other: [u8; 3],
    }

    let field = Field { array: [1, 2, 3], other: [4, 5, 6] };
    assert_eq!(encode(&field), [3, 2, 1, 4, 5, 6]);
    assert_eq!(decode::<Field>(&[3, 2, 1, 4, 5, 6]).unwrap(), field);
}

/// A list of numbers that is read backwards.
#[derive(Debug, PartialEq)]
struct Reversed(Vec<u8>);

impl<'de> Deserialize<'de> for Reversed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Reversed, D::Error> {
        struct Backwards;

        impl<'de> Visitor<'de> for Backwards {
            type Value = Vec<u8>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of numbers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> std::result::Result<Vec<u8>, A::Error> {
                let mut list = Vec::new();
                while let Some(element) = elements.next_element()? {
                    list.insert(0, element);
                }
                Ok(list)
            }
        }

        deserializer.deserialize_seq(Backwards).map(Reversed)
    }
}

#[test]
fn visitor_of_a_type_of_its_own_visits_the_elements() {
    assert_eq!(decode::<Reversed>(&[3, 1, 2, 3]).unwrap(), Reversed(vec![3, 2, 1]));
    assert!(!decoder_is_used::<Reversed>());
}

fn compare<T: Plain + Serialize + DeserializeOwned + Debug>(bytes: &[u8]) {
    let ours = decode::<(Vec<T>, Vec<T>)>(bytes);
    match postcard::take_from_bytes::<(Vec<T>, Vec<T>)>(bytes) {
        Ok((theirs, rest)) => {
            assert_eq!(ours.is_ok(), rest.is_empty(), "{ours:?}");
            if let Ok(ours) = ours {
                assert_eq!(postcard::to_stdvec(&ours).unwrap(), postcard::to_stdvec(&theirs).unwrap());
            }
        }
        Err(_) => assert!(ours.is_err(), "{ours:?}"),
    }
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_as_postcard_does(
        first in 0u8..30,
        bytes in prop::collection::vec(prop_oneof![0u8..3, 0x78u8..0x88, 0xf8u8..=0xff, any::<u8>()], 0..80),
    ) {
        let bytes = [&[first][..], &bytes].concat();
        compare::<bool>(&bytes);
        compare::<u8>(&bytes);
        compare::<i8>(&bytes);
        compare::<u16>(&bytes);
        compare::<i16>(&bytes);
        compare::<u32>(&bytes);
        compare::<i32>(&bytes);
        compare::<u64>(&bytes);
        compare::<i64>(&bytes);
        compare::<usize>(&bytes);
        compare::<isize>(&bytes);
        compare::<f32>(&bytes);
        compare::<f64>(&bytes);
        compare::<[f32; 2]>(&bytes);
        compare::<[f64; 3]>(&bytes);
        compare::<[u8; 16]>(&bytes);
    }

    #[test]
    fn any_numbers_are_encoded_as_postcard_does(list in prop::collection::vec(prop_oneof![0u64..300, 100u64..20_000, any::<u64>()], 0..80)) {
        prop_assert_eq!(encode(&list), postcard::to_stdvec(&list).unwrap());
        let signed: Vec<i64> = list.iter().map(|number| *number as i64).collect();
        prop_assert_eq!(encode(&signed), postcard::to_stdvec(&signed).unwrap());
        let short: Vec<i16> = list.iter().map(|number| *number as i16).collect();
        prop_assert_eq!(encode(&short), postcard::to_stdvec(&short).unwrap());
    }
}
