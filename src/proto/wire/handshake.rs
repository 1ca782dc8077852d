//! The wire format of the handshake.
//!
//! ```text
//!   preamble:  magic (8)  lowest version (2)  highest version (2)  length of what follows (4)
//!   then:      checksum of all the rest, preamble included (4)  kind (1)  and by kind:
//!              0  a hello
//!              1  a challenge: 32 random bytes
//!              2  a proof: 32 bytes that only an engine with the key can make, and the digest of the hello that follows
//!              3  a refusal: one byte, the reason
//!              4  as 0, from the side that dials a lane of a connection that exists
//! ```
//! Without a key there is one hello each way. With one, the dialled side sends no more than a challenge, and collects no more
//! than 85 bytes, before the other side has proved itself:
//!
//! ```text
//!   dialling ── challenge ─────▶ dialled
//!            ◀───── challenge ──
//!            ── proof, hello ──▶
//!            ◀── proof, hello ──
//! ```

use serde::{Deserialize, Serialize};

use super::super::keys::{DIGEST_LEN, Digest, NONCE_LEN, Nonce};
use super::{MAGIC, MAX_HELLO, VERSIONS, encode};

/// Magic, lowest version, highest version, length of what follows.
pub(crate) const PREAMBLE_LEN: usize = 16;
/// Checksum and kind.
const HEAD_LEN: usize = 5;

const HELLO: u8 = 0;
const CHALLENGE: u8 = 1;
const PROOF: u8 = 2;
const REFUSAL: u8 = 3;
const LANE: u8 = 4;

/// What an engine sends about itself when a link begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Random, new with each engine.
    pub incarnation: u64,
    /// Largest message taken, in bytes.
    pub max_message: u64,
    /// The addresses at which the engine listens, best first.
    pub addresses: Vec<crate::Address>,
    /// From an engine that has met the other before: the token that it was given then. The side that was dialled shows it only
    /// to a peer that has shown one.
    pub resumption_token: Option<u128>,
    /// Whether it wants checksums of bodies and payloads, from both sides.
    pub checksums: bool,
}

/// Why a link is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is no version that both support.
    Version = 1,
    /// A key is required.
    KeyWanted = 2,
    /// The key is another one.
    OtherKey = 3,
    /// The refusing engine has no key, and was sent a challenge.
    NoKey = 4,
    /// The limit of connections is reached.
    Busy = 5,
    /// The challenge is one of this engine's own, and nothing shows that the engine has dialled itself.
    Reflected = 6,
}

impl Refusal {
    fn of(byte: u8) -> Option<Refusal> {
        use Refusal::{Busy, KeyWanted, NoKey, OtherKey, Reflected, Version};
        [Version, KeyWanted, OtherKey, NoKey, Busy, Reflected].into_iter().find(|refusal| *refusal as u8 == byte)
    }
}

/// One piece of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeMessage {
    Hello(Hello),
    Lane(Hello),
    Challenge(Nonce),
    /// The proof, and the digest of the hello.
    Proof(Digest, Digest),
    Refusal(Refusal),
}

/// What a peer's first bytes are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ParsedHandshake {
    /// More bytes are needed.
    Incomplete,
    /// Not this protocol.
    Foreign,
    /// It was corrupted in transit.
    Damaged,
    /// No version in common: the peer's lowest and highest.
    Version(u16, u16),
    /// A hello without a proof, where a key is required.
    Unproved,
    /// The message, and how many bytes it took.
    Message(HandshakeMessage, usize),
}

/// Encodes a piece of the handshake of an engine that supports `versions`.
pub(crate) fn encode_handshake(versions: (u16, u16), message: &HandshakeMessage) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&versions.0.to_le_bytes());
    out.extend_from_slice(&versions.1.to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    match message {
        HandshakeMessage::Hello(hello) | HandshakeMessage::Lane(hello) => {
            out.push(if matches!(message, HandshakeMessage::Lane(_)) { LANE } else { HELLO });
            encode(hello, &mut out).expect("a hello is made of integers and strings");
        }
        HandshakeMessage::Challenge(nonce) => {
            out.push(CHALLENGE);
            out.extend_from_slice(nonce);
        }
        HandshakeMessage::Proof(proof, digest) => {
            out.push(PROOF);
            out.extend_from_slice(proof);
            out.extend_from_slice(digest);
        }
        HandshakeMessage::Refusal(refusal) => out.extend_from_slice(&[REFUSAL, *refusal as u8]),
    }
    let len = (out.len() - PREAMBLE_LEN) as u32;
    out[PREAMBLE_LEN - 4..PREAMBLE_LEN].copy_from_slice(&len.to_le_bytes());
    let sum = sum(&out);
    out[PREAMBLE_LEN..PREAMBLE_LEN + 4].copy_from_slice(&sum.to_le_bytes());
    out
}

fn sum(piece: &[u8]) -> u32 {
    let sum = crc32c::crc32c(&piece[..PREAMBLE_LEN]);
    crc32c::crc32c_append(sum, &piece[PREAMBLE_LEN + 4..])
}

/// Decodes a piece of the handshake from the first bytes of a link. A hello that may not come yet is not waited for.
pub(crate) fn parse_handshake(bytes: &[u8], may_be_hello: bool) -> ParsedHandshake {
    let known = bytes.len().min(MAGIC.len());
    if bytes[..known] != MAGIC[..known] {
        return ParsedHandshake::Foreign;
    }
    let Some(preamble) = bytes.first_chunk::<PREAMBLE_LEN>() else { return ParsedHandshake::Incomplete };
    let number = |at: usize| u16::from_le_bytes([preamble[at], preamble[at + 1]]);
    let (low, high) = (number(8), number(10));
    if low > VERSIONS.1 || high < VERSIONS.0 || low > high {
        return ParsedHandshake::Version(low, high);
    }
    let len = u32::from_le_bytes([preamble[12], preamble[13], preamble[14], preamble[15]]) as usize;
    if !(HEAD_LEN..=MAX_HELLO).contains(&len) {
        return ParsedHandshake::Foreign;
    }
    let Some(kind) = bytes.get(PREAMBLE_LEN + 4) else { return ParsedHandshake::Incomplete };
    let expected = match *kind {
        HELLO | LANE if !may_be_hello => return ParsedHandshake::Unproved,
        HELLO | LANE => len,
        CHALLENGE => HEAD_LEN + NONCE_LEN,
        PROOF => HEAD_LEN + 2 * DIGEST_LEN,
        REFUSAL => HEAD_LEN + 1,
        _ => return ParsedHandshake::Foreign,
    };
    if len != expected {
        return ParsedHandshake::Foreign;
    }
    let Some(piece) = bytes.get(..PREAMBLE_LEN + len) else { return ParsedHandshake::Incomplete };
    if !cfg!(fuzzing) && piece[PREAMBLE_LEN..PREAMBLE_LEN + 4] != sum(piece).to_le_bytes() {
        return ParsedHandshake::Damaged;
    }
    let rest = &piece[PREAMBLE_LEN + HEAD_LEN..];
    let message = match *kind {
        HELLO => postcard::from_bytes(rest).ok().map(HandshakeMessage::Hello),
        LANE => postcard::from_bytes(rest).ok().map(HandshakeMessage::Lane),
        CHALLENGE => rest.try_into().ok().map(HandshakeMessage::Challenge),
        PROOF => {
            rest.split_first_chunk().and_then(|(proof, digest)| Some(HandshakeMessage::Proof(*proof, digest.try_into().ok()?)))
        }
        _ => Refusal::of(rest[0]).map(HandshakeMessage::Refusal),
    };
    message.map_or(ParsedHandshake::Foreign, |message| ParsedHandshake::Message(message, piece.len()))
}
