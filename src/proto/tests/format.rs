//! The wire format: encoded messages decode to the same message, and all other bytes are an error.

use proptest::prelude::*;

use super::arbitrary::KnownProcedures;
use super::env::Random;
use super::raw::encode_hello;
use super::wire::{
    self, Frame, FrameError, HandshakeMessage, Hello, MAGIC, MAX_FRAME, MAX_HELLO, Message, PREAMBLE_LEN, PREFIX_LEN,
    ParsedHandshake, Refusal, Status, VERSIONS, put, take,
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

    /// Each byte of a message is replaced, left out or doubled. What is still a message has no other encoding, except that
    /// postcard accepts numbers that are longer than they need be.
    #[test]
    fn malformed_message_is_refused_or_has_no_other_encoding(seed: u64) {
        let mut random = Random(seed);
        let (message, _) = random.message(&KnownProcedures::default());
        let encoded = |message: &Message<'_>| {
            let mut frame = Vec::new();
            put(&mut frame, message, &[], false);
            frame.split_off(PREFIX_LEN)
        };
        let sent = encoded(&message);
        for at in 0..sent.len() {
            let (before, behind) = (&sent[..at], &sent[at + 1..]);
            let instead: [&[u8]; 14] = [
                &[], &[0], &[1], &[2], &[3], &[0x7f], &[0x80], &[0x81], &[0xff], &[sent[at]], &[sent[at], 0],
                &[sent[at] | 0x80, 0], &[sent[at] | 0x80, 1], &[sent[at] | 0x80, 2],
            ];
            for instead in instead {
                let bytes = [before, instead, behind].concat();
                match take(&framed(&bytes, bytes.len())) {
                    Ok(Frame::Whole(message, [], _)) => {
                        let again = encoded(&message);
                        let by_postcard = match message {
                            Message::Request { declaration: Some(_), .. } => 44,
                            Message::Response { shape, .. } if !shape.0.is_empty() => 36,
                            Message::Request { .. } | Message::Response { .. } | Message::Pull(_) | Message::Push(_)
                            | Message::Data { .. } | Message::Release(_) => bytes.len(),
                            _ => 0,
                        };
                        prop_assert!(again.len() <= bytes.len(), "{:?}", bytes);
                        prop_assert_eq!(&again[..by_postcard], &bytes[..by_postcard]);
                    }
                    Err(FrameError::Broken(_)) => {}
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                }
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
fn encoding_of_version_5_is_unchanged() {
    use super::wire::{BorrowedBytes, Declare, Message, Range, Stream};
    let (request, leases) = ([0x80, 2, 7, 0, 2, 0, 0, 0], super::LeaseRange { first: 5, count: 1 });
    let message = Message::Request {
        call: 300,
        procedure: 2,
        declaration: Some(Declare { name: "f", shape: BorrowedBytes(b"s") }),
        provider: 7,
        budget_us: 1,
        one_way: false,
        leases,
        size: 3,
    };
    let number = u64::to_le_bytes;
    let first = [&number(5)[..], &[1, 0, 0, 0]].concat();
    let head = [&request, &number(300)[..], &number(1), &number(3), &first, &[1, b'f', 1, b's']].concat();
    let mut bytes = Vec::new();
    put(&mut bytes, &message, b"abc", true);
    assert_eq!(bytes[4..12], [55, 0, 0, 0, 48, 0, 0, 0x80]);
    assert_eq!(bytes[12..60], head);
    assert_eq!(bytes[60..63], *b"abc");
    assert_eq!(bytes[..4], crc32c::crc32c(&bytes[4..60]).to_le_bytes());
    // CRC-32C of "abc".
    assert_eq!(bytes[63..], 0x364b_3fb7_u32.to_le_bytes());
    let encoded = |message: &Message<'_>| {
        let mut bytes = Vec::new();
        put(&mut bytes, message, b"abc", false);
        assert_eq!(bytes[4..12], number((bytes.len() as u64 - 12) | ((bytes.len() as u64 - 15) << 32)));
        bytes[12..bytes.len() - 3].to_vec()
    };
    assert_eq!(encoded(&message), head);
    let one_way = |one_way| {
        let none = super::LeaseRange::default();
        Message::Request { call: 1, procedure: 0, declaration: None, provider: 0, budget_us: 0, one_way, leases: none, size: 3 }
    };
    let plain = [&[0x80, 0, 0, 0, 0, 0, 0, 0, 1][..], &[0; 15], &number(3), &[0; 12]].concat();
    assert_eq!(encoded(&one_way(false)), plain);
    assert_eq!(encoded(&one_way(true)), [&[0x80, 1][..], &plain[2..]].concat());
    let (none, some) = (super::LeaseRange::default(), super::LeaseRange { first: 7, count: 2 });
    let released = [&number(7)[..], &[2, 0, 0, 0]].concat();
    for (shape, released, flags, behind) in [
        (&b""[..], none, 0, vec![]),
        (b"s", none, 2, b"\x01s".to_vec()),
        (b"", some, 4, released.clone()),
        (b"s", some, 6, [&released[..], b"\x01s"].concat()),
    ] {
        let response = Message::Response { call: 300, result: 4, shape: BorrowedBytes(shape), leases, released, size: 3 };
        let fields = [&[0x81, flags, 0, 0, 4, 0, 0, 0][..], &number(300), &number(3), &first, &behind].concat();
        assert_eq!(encoded(&response), fields);
    }
    let release = Message::Release(leases);
    assert_eq!(encoded(&release), [&[0x85, 0, 0, 0, 1, 0, 0, 0][..], &number(5)].concat());
    let mut frame = Vec::new();
    put(&mut frame, &release, &[], true);
    assert_eq!(frame.len(), wire::RELEASE_FRAME);
    let range = Range { transfer: 1, owner: 2, token: [9; 16], offset: 3, len: 4 };
    let fields = [&number(1)[..], &number(2), &[9; 16], &number(3), &number(4)].concat();
    assert_eq!(encoded(&Message::Pull(range)), [&[0x82, 0, 0, 0][..], &fields].concat());
    assert_eq!(encoded(&Message::Push(range)), [&[0x83, 0, 0, 0][..], &fields].concat());
    for (stream, byte) in [(Stream::Pull, 0), (Stream::Push, 1), (Stream::Request, 2), (Stream::Response, 3)] {
        let data = Message::Data { stream, id: 6, offset: 7, len: 8 };
        assert_eq!(encoded(&data), [&[0x84, byte, 0, 0, 8, 0, 0, 0][..], &number(6), &number(7)].concat());
    }
    // The other messages are postcard's: the number of a variant, and fields.
    assert_eq!(encoded(&Message::Refuse { call: 300, status: Status::NoResponse }), [0, 0xac, 2, 3]);
    assert_eq!(encoded(&Message::Cancel { call: 1 }), [1, 1]);
    assert_eq!(encoded(&Message::Done { transfer: 1, status: Status::Ok }), [2, 1, 0]);
    assert_eq!(encoded(&Message::Ping), [4]);
    assert_eq!(encoded(&Message::InUse), [16]);
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
