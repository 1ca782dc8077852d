//! The wire format: encoded messages decode to the same message, and all other bytes are an error.

use proptest::prelude::*;

use super::arbitrary::KnownProcedures;
use super::env::Random;
use super::raw::encode_hello;
use super::wire::{
    self, Frame, FrameError, HandshakeMessage, Hello, MAGIC, MAX_FRAME, MAX_HELLO, Message, PREAMBLE_LEN, PREFIX_LEN,
    ParsedHandshake, Refusal, Status, VERSIONS, encode, put, take,
};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(2000))]

    /// Every message, with other bytes before and behind it.
    #[test]
    fn encoded_message_decodes_to_itself(seed: u64, covered: bool, before in prop::collection::vec(any::<u8>(), 0..20)) {
        let mut random = Random(seed);
        let (message, body) = random.message(&KnownProcedures::default());
        let mut bytes = before.clone();
        put(&mut bytes, &message, body, covered);
        // The hand-written encoder follows postcard's format.
        let mut by_postcard = Vec::new();
        prop_assert!(encode(&message, &mut by_postcard).is_ok());
        prop_assert!(bytes[before.len() + PREFIX_LEN..].starts_with(&by_postcard));
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

    /// Every flipped bit is detected, except in a body without a checksum.
    #[test]
    fn flipped_bit_is_detected(seed: u64, covered: bool) {
        let mut random = Random(seed);
        let (message, body) = random.message(&KnownProcedures::default());
        let mut sent = Vec::new();
        put(&mut sent, &message, body, covered);
        let (end, head) = (sent.len(), sent.len() - body.len() - if covered && !body.is_empty() { 4 } else { 0 });
        for bit in 0..8 * end {
            let mut bytes = sent.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            match take(&bytes) {
                // A corrupt length: the frame is incomplete or too long.
                Ok(Frame::Incomplete) => prop_assert!((4..PREFIX_LEN).contains(&(bit / 8))),
                Err(FrameError::Broken(_)) => prop_assert!((4..PREFIX_LEN).contains(&(bit / 8))),
                Err(FrameError::Damaged) => prop_assert!(bit / 8 < head),
                Ok(Frame::Damaged(found, len)) => {
                    prop_assert!(covered && bit / 8 >= head);
                    prop_assert_eq!((found, len), (message.clone(), end));
                }
                Ok(Frame::Whole(found, ..)) => {
                    prop_assert!(!covered && bit / 8 >= head);
                    prop_assert_eq!(found, message.clone());
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_decode_to_a_message_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        head in 0usize..300,
    ) {
        if let Ok(Frame::Whole(_, body, len)) = take(&bytes) {
            prop_assert!(len <= bytes.len() && body.len() <= len);
        }
        // The same bytes as the content of a frame.
        let framed = framed(&bytes, head);
        match take(&framed) {
            Ok(Frame::Whole(_, _, len) | Frame::Damaged(_, len)) => prop_assert_eq!(len, framed.len()),
            Ok(Frame::Incomplete) => prop_assert!(false, "all of it is there"),
            Err(FrameError::Broken(reason)) => prop_assert!(!reason.is_empty()),
            Err(FrameError::Damaged) => prop_assert!(false, "the checksum is right"),
        }
    }

    /// The hand-written decoder agrees with postcard, also on malformed input: each byte is replaced, left out or doubled, and
    /// numbers are longer than they need be.
    #[test]
    fn malformed_message_decodes_as_postcard_decodes_it(seed: u64) {
        let mut random = Random(seed);
        let (message, _) = random.message(&KnownProcedures::default());
        let mut sent = Vec::new();
        prop_assert!(encode(&message, &mut sent).is_ok());
        for at in 0..sent.len() {
            let (before, behind) = (&sent[..at], &sent[at + 1..]);
            let instead: [&[u8]; 14] = [
                &[], &[0], &[1], &[2], &[3], &[0x7f], &[0x80], &[0x81], &[0xff], &[sent[at]], &[sent[at], 0],
                &[sent[at] | 0x80, 0], &[sent[at] | 0x80, 1], &[sent[at] | 0x80, 2],
            ];
            for instead in instead {
                let bytes = [before, instead, behind].concat();
                let expected = postcard::take_from_bytes::<Message<'_>>(&bytes).ok().filter(|(_, left)| left.is_empty());
                let framed = framed(&bytes, bytes.len());
                let found = match take(&framed) {
                    Ok(Frame::Whole(message, [], _)) => Some(message),
                    Err(FrameError::Broken(_)) => None,
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                };
                prop_assert_eq!(found, expected.map(|(message, _)| message), "{:?}", bytes);
            }
        }
    }

    #[test]
    fn encoded_handshake_decodes_to_itself(
        incarnation: u64,
        max_message: u64,
        resumption_token: Option<u128>,
        ports in prop::collection::vec(any::<u16>(), 0..8),
        nonce: [u8; 32],
        digest: [u8; 32],
    ) {
        let addresses = ports.iter().map(|port| format!("tcp://10.0.0.1:{port}").parse().unwrap()).collect();
        let hello = Hello { incarnation, max_message, addresses, resumption_token, checksums: ports.is_empty() };
        for sent in [
            HandshakeMessage::Hello(hello),
            HandshakeMessage::Challenge(nonce),
            HandshakeMessage::Proof(nonce, digest),
            HandshakeMessage::Refusal(Refusal::OtherKey),
        ] {
            let bytes = wire::encode_handshake(VERSIONS, &sent);
            for cut in 0..bytes.len() {
                prop_assert_eq!(wire::parse_handshake(&bytes[..cut], true), ParsedHandshake::Incomplete);
            }
            for bit in 8 * PREAMBLE_LEN..8 * bytes.len() {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                let found = wire::parse_handshake(&damaged, true);
                prop_assert!(!matches!(found, ParsedHandshake::Message(..)), "flipped bit {} is not detected", bit);
            }
            let len = bytes.len();
            let longer = [bytes, vec![1, 2, 3]].concat();
            prop_assert_eq!(wire::parse_handshake(&longer, true), ParsedHandshake::Message(sent, len));
        }
    }

    #[test]
    fn arbitrary_handshake_with_another_version_is_a_version_mismatch(
        bytes in prop::collection::vec(any::<u8>(), 0..100),
        versions: (u16, u16),
        proved: bool,
    ) {
        let _ = wire::parse_handshake(&bytes, proved);
        let mut behind = MAGIC.to_vec();
        behind.extend_from_slice(&versions.0.to_le_bytes());
        behind.extend_from_slice(&versions.1.to_le_bytes());
        behind.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        behind.extend_from_slice(&bytes);
        let (low, high) = versions;
        let spoken = low <= VERSIONS.1 && high >= VERSIONS.0 && low <= high;
        match wire::parse_handshake(&behind, proved) {
            ParsedHandshake::Version(l, h) => prop_assert!(!spoken && (l, h) == versions),
            ParsedHandshake::Incomplete => prop_assert!(false, "all of it is there"),
            _ => prop_assert!(spoken),
        }
    }
}

/// Wraps bytes in a frame with correct lengths and checksum; the first `head` bytes are its message.
fn framed(bytes: &[u8], head: usize) -> Vec<u8> {
    let head = head.min(bytes.len());
    let lengths = [(bytes.len() as u32).to_le_bytes(), (head as u32).to_le_bytes()].concat();
    let sum = crc32c::crc32c(&[&lengths[..], &bytes[..head]].concat());
    [&sum.to_le_bytes()[..], &lengths, bytes].concat()
}

#[test]
fn frame_beyond_the_longest_is_broken() {
    let prefix = |len: usize, head: usize| {
        let words = [0, len as u32, head as u32];
        words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
    };
    assert!(matches!(take(&prefix(MAX_FRAME, 1)), Ok(Frame::Incomplete)));
    let broken = |bytes: &[u8]| match take(bytes) {
        Err(FrameError::Broken(reason)) => reason,
        other => panic!("{other:?}"),
    };
    assert!(broken(&prefix(MAX_FRAME + 1, 1)).contains(&MAX_FRAME.to_string()));
    assert!(broken(&prefix(10, 11)).contains("11"));
}

#[test]
fn handshake_beyond_the_longest_is_foreign() {
    let mut bytes = encode_hello(VERSIONS, &super::raw::hello(1));
    bytes.truncate(PREAMBLE_LEN + 5);
    for (len, foreign) in [(MAX_HELLO, false), (MAX_HELLO + 1, true), (u32::MAX as usize, true), (4, true)] {
        bytes[12..16].copy_from_slice(&(len as u32).to_le_bytes());
        let expected = if foreign { ParsedHandshake::Foreign } else { ParsedHandshake::Incomplete };
        assert_eq!(wire::parse_handshake(&bytes, true), expected);
    }
    // A hello before the proof is refused without waiting for the rest of it.
    bytes[12..16].copy_from_slice(&100u32.to_le_bytes());
    assert_eq!(wire::parse_handshake(&bytes, false), ParsedHandshake::Unproved);
}

/// A long text in a status is cut between characters.
#[test]
fn long_status_text_is_clipped() {
    for text in ["x".repeat(MAX_FRAME), "ü".repeat(MAX_FRAME), "€".repeat(4096 / 3), "🦀".repeat(1025), String::new()] {
        let clipped = Status::clip(text.clone());
        assert!(clipped.len() <= (4 << 10) + 3);
        assert_eq!(clipped == text, text.len() <= 4 << 10);
    }
}

/// A change of the format needs a new version: the bytes here change only together with it.
#[test]
fn encoding_of_version_1_is_unchanged() {
    use super::wire::{BorrowedBytes, Declare, Message};
    let mut bytes = Vec::new();
    let message = Message::Request {
        call: 300,
        procedure: 2,
        declaration: Some(Declare { name: "f", shape: BorrowedBytes(b"s") }),
        provider: 7,
        budget_us: 1,
        one_way: false,
        leases: super::LeaseRange { first: 5, count: 1 },
        size: 3,
    };
    put(&mut bytes, &message, b"abc", true);
    let expected =
        [0, 0, 0, 0, 22, 0, 0, 0, 15, 0, 0, 0x80, 0, 0xac, 2, 2, 1, 1, b'f', 1, b's', 7, 1, 0, 5, 1, 3, b'a', b'b', b'c'];
    assert_eq!(bytes[4..bytes.len() - 4], expected[4..]);
    assert_eq!(bytes[..4], crc32c::crc32c(&bytes[4..27]).to_le_bytes());
    // CRC-32C of "abc".
    assert_eq!(bytes[bytes.len() - 4..], 0x364b_3fb7_u32.to_le_bytes());
    let mut bare = Vec::new();
    put(&mut bare, &message, b"abc", false);
    assert_eq!(bare[4..12], [18, 0, 0, 0, 15, 0, 0, 0]);
    assert_eq!(bare[12..], expected[12..]);
    let hello = HandshakeMessage::Hello(Hello {
        incarnation: 1,
        max_message: 2,
        addresses: vec!["tcp://h:1".parse().unwrap()],
        resumption_token: None,
        checksums: true,
    });
    let handshake = wire::encode_handshake((1, 1), &hello);
    assert_eq!(handshake[..PREAMBLE_LEN], *b"calomel\0\x01\0\x01\0\x14\0\0\0");
    assert_eq!(handshake[PREAMBLE_LEN + 4..], *b"\0\x01\x02\x01\x09tcp://h:1\0\x01");
}
