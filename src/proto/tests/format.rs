//! The wire format: what goes in comes out, and what never went in is an error, not a surprise.

use proptest::prelude::*;

use super::arbitrary::Known;
use super::env::Random;
use super::wire::{
    Frame, Greeting, Hello, MAGIC, MAX_FRAME, MAX_HELLO, PREAMBLE_LEN, Status, VERSIONS, encode, greet, greeting, put, take,
};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(2000))]

    /// Every message, behind others and in front of others.
    #[test]
    fn messages_come_out_as_they_went_in(seed: u64, before in prop::collection::vec(any::<u8>(), 0..20)) {
        let mut random = Random(seed);
        let (message, body) = random.message(&Known::default());
        let mut bytes = before.clone();
        put(&mut bytes, &message, body);
        // Written by hand or not, it is postcard's format.
        let mut by_postcard = Vec::new();
        prop_assert!(encode(&message, &mut by_postcard).is_ok());
        prop_assert_eq!(&bytes[before.len() + 4..bytes.len() - body.len()], &by_postcard[..]);
        let end = bytes.len();
        bytes.extend_from_slice(&before);
        for cut in before.len()..end {
            match take(&bytes[before.len()..cut]) {
                Ok(Frame::Incomplete) => {}
                other => prop_assert!(false, "a frame cut short at {cut} of {end}: {other:?}"),
            }
        }
        match take(&bytes[before.len()..]) {
            Ok(Frame::Whole(found, found_body, len)) => {
                prop_assert_eq!(found, message);
                prop_assert_eq!(found_body, body);
                prop_assert_eq!(len, end - before.len());
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(Frame::Whole(_, body, len)) = take(&bytes) {
            prop_assert!(len <= bytes.len() && body.len() <= len);
        }
        // The same as the inside of a frame.
        let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
        framed.extend_from_slice(&bytes);
        match take(&framed) {
            Ok(Frame::Whole(_, _, len)) => prop_assert_eq!(len, framed.len()),
            Ok(Frame::Incomplete) => prop_assert!(false, "all of it is there"),
            Err(reason) => prop_assert!(!reason.is_empty()),
        }
    }

    #[test]
    fn greetings_come_out_as_they_went_in(incarnation: u64, max_message: u64, ticket: Option<u64>, ports in prop::collection::vec(any::<u16>(), 0..8)) {
        let addresses = ports.iter().map(|port| format!("tcp://10.0.0.1:{port}").parse().unwrap()).collect();
        let hello = Hello { incarnation, max_message, addresses, ticket };
        let bytes = greet(VERSIONS, &hello);
        for cut in 0..bytes.len() {
            prop_assert_eq!(greeting(&bytes[..cut]), Greeting::Incomplete);
        }
        let len = bytes.len();
        let longer = [bytes, vec![1, 2, 3]].concat();
        prop_assert_eq!(greeting(&longer), Greeting::Hello(hello, len));
    }

    #[test]
    fn any_bytes_are_a_greeting_or_foreign(bytes in prop::collection::vec(any::<u8>(), 0..100), versions: (u16, u16)) {
        let _ = greeting(&bytes);
        let mut behind = MAGIC.to_vec();
        behind.extend_from_slice(&versions.0.to_le_bytes());
        behind.extend_from_slice(&versions.1.to_le_bytes());
        behind.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        behind.extend_from_slice(&bytes);
        let (low, high) = versions;
        let spoken = low <= VERSIONS.1 && high >= VERSIONS.0 && low <= high;
        match greeting(&behind) {
            Greeting::Version(l, h) => prop_assert!(!spoken && (l, h) == versions),
            Greeting::Incomplete => prop_assert!(false, "all of it is there"),
            Greeting::Foreign | Greeting::Hello(..) => prop_assert!(spoken),
        }
    }
}

#[test]
fn frames_have_a_longest() {
    let mut bytes = (MAX_FRAME as u32).to_le_bytes().to_vec();
    assert!(matches!(take(&bytes), Ok(Frame::Incomplete)));
    bytes[..4].copy_from_slice(&(MAX_FRAME as u32 + 1).to_le_bytes());
    assert!(take(&bytes).is_err_and(|reason| reason.contains(&MAX_FRAME.to_string())));
}

#[test]
fn greetings_have_a_longest() {
    let mut bytes = greet(VERSIONS, &super::raw::hello(1));
    bytes.truncate(PREAMBLE_LEN);
    for (len, foreign) in [(MAX_HELLO, false), (MAX_HELLO + 1, true), (u32::MAX as usize, true)] {
        bytes[12..16].copy_from_slice(&(len as u32).to_le_bytes());
        let expected = if foreign { Greeting::Foreign } else { Greeting::Incomplete };
        assert_eq!(greeting(&bytes), expected);
    }
}

/// A status with whatever text still fits into a frame, and is cut between characters.
#[test]
fn texts_are_clipped() {
    for text in ["x".repeat(MAX_FRAME), "ü".repeat(MAX_FRAME), "€".repeat(4096 / 3), "🦀".repeat(1025), String::new()] {
        let clipped = Status::clip(text.clone());
        assert!(clipped.len() <= (4 << 10) + 3);
        assert_eq!(clipped == text, text.len() <= 4 << 10);
    }
}

/// A byte of the format that changes is a new version: what is written down here must not change without one.
#[test]
fn the_format_is_what_it_was() {
    use super::wire::{Bytes, Message};
    let mut bytes = Vec::new();
    let message = Message::Request {
        call: 300,
        procedure: 2,
        name: Some("f"),
        provider: 7,
        budget_us: 1,
        one_way: false,
        want_shape: true,
        shape: Bytes(b"s"),
        leases: super::Leases { first: 5, count: 1 },
        size: 3,
    };
    put(&mut bytes, &message, b"abc");
    let expected = [18, 0, 0, 0, 0, 0xac, 2, 2, 1, 1, b'f', 7, 1, 0, 1, 1, b's', 5, 1, 3, b'a', b'b', b'c'];
    assert_eq!(bytes[4..], expected[4..]);
    assert_eq!(bytes[0] as usize, expected.len() - 4);
    let hello = Hello { incarnation: 1, max_message: 2, addresses: vec!["tcp://h:1".parse().unwrap()], ticket: None };
    let greeting = greet((1, 1), &hello);
    assert_eq!(greeting[..PREAMBLE_LEN], *b"calomel\0\x01\0\x01\0\x0e\0\0\0");
}
