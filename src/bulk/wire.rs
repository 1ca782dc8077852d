//! How a bulk is encoded: as one piece of bytes, which takes half of the instructions that serde takes field by field; in formats
//! for people, as text of lower-case hexadecimal digits. Numbers are little-endian.
//!
//! ```text
//! 0      16      24   32           40        44     48    49
//! token  offset  len  incarnation  segments  lease  mode  what is behind the addresses
//!
//! 50         51
//! number of  length, text   length, text   ...   content, or keys, to the end
//! addresses
//! ```
//! A length up to 127 has one byte, a longer one two: 128 and the higher bits, then the lower eight bits.

use serde::{Deserialize, Serialize, Serializer};
use smallvec::SmallVec;

use super::mode::BulkMode;
use crate::engine::AddressTexts;
use crate::text::hex;

const HEAD: usize = 50;
/// Stands for the index of a lease where there is none.
const NO_LEASE: u32 = u32::MAX;

/// The bytes of most bulks.
pub(super) type BulkBytes = SmallVec<[u8; 256]>;

/// What is behind the addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind<'a> {
    Nothing,
    Content(&'a [u8]),
    /// The devices' keys, behind their checksum.
    Keys(&'a [u8]),
}

/// A bulk as it is encoded.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BulkFields<'a> {
    pub token: u128,
    pub offset: u64,
    pub len: u64,
    /// Of the engine that exposes the memory.
    pub incarnation: u64,
    pub segments: u32,
    /// Index of this bulk's lease among those of the message.
    pub lease: Option<u32>,
    pub mode: BulkMode,
    pub behind: Behind<'a>,
}

impl BulkFields<'_> {
    /// With the owner's addresses, as [`AddressTexts`] encodes them.
    pub(super) fn encode(&self, addresses: &[u8]) -> BulkBytes {
        let BulkFields { token, offset, len, incarnation, segments, lease, mode, behind } = self;
        let mut head = [0; HEAD];
        head[..16].copy_from_slice(&token.to_le_bytes());
        head[16..24].copy_from_slice(&offset.to_le_bytes());
        head[24..32].copy_from_slice(&len.to_le_bytes());
        head[32..40].copy_from_slice(&incarnation.to_le_bytes());
        head[40..44].copy_from_slice(&segments.to_le_bytes());
        head[44..48].copy_from_slice(&lease.unwrap_or(NO_LEASE).to_le_bytes());
        head[48] = match mode {
            BulkMode::ReadOnly => 0,
            BulkMode::WriteOnly => 1,
            BulkMode::ReadWrite => 2,
        };
        let (what, rest) = match *behind {
            Behind::Nothing => (0, &[][..]),
            Behind::Content(content) => (1, content),
            Behind::Keys(keys) => (2, keys),
        };
        head[49] = what;
        let mut bytes = BulkBytes::from_slice(&head);
        bytes.extend_from_slice(addresses);
        bytes.extend_from_slice(rest);
        bytes
    }
}

impl<'a> BulkFields<'a> {
    /// `None` for bytes that are no bulk.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<(BulkFields<'a>, AddressTexts)> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let number = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let mode = match head[48] {
            0 => BulkMode::ReadOnly,
            1 => BulkMode::WriteOnly,
            2 => BulkMode::ReadWrite,
            _ => return None,
        };
        let (addresses, rest) = AddressTexts::take(rest)?;
        let behind = match head[49] {
            0 if rest.is_empty() => Behind::Nothing,
            1 => Behind::Content(rest),
            2 => Behind::Keys(rest),
            _ => return None,
        };
        let fields = BulkFields {
            token: u128::from(number(0)) | u128::from(number(8)) << 64,
            offset: number(16),
            len: number(24),
            incarnation: number(32),
            segments: word(40),
            lease: Some(word(44)).filter(|lease| *lease != NO_LEASE),
            mode,
            behind,
        };
        Some((fields, addresses))
    }
}

/// What serde sees of a bulk. It is no mere piece of bytes, so calls that take those for bulks are refused.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Bulk")]
pub(super) struct EncodedBulk<B> {
    pub exposed_memory: B,
}

/// Bytes; in formats for people text.
pub(super) struct Piece<'a>(pub &'a [u8]);

impl Serialize for Piece<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Not all formats for people have bytes.
        if serializer.is_human_readable() {
            return serializer.serialize_str(&hex(self.0));
        }
        serializer.serialize_bytes(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;
    use crate::{Bulk, Engine};

    fn fields(behind: Behind<'_>) -> BulkFields<'_> {
        BulkFields {
            token: u128::MAX - 5,
            offset: 1 << 40,
            len: 3,
            incarnation: u64::MAX - 1,
            segments: 7,
            lease: Some(0),
            mode: BulkMode::ReadWrite,
            behind,
        }
    }

    #[test]
    fn fields_are_decoded_as_they_were_encoded() {
        let none = BulkFields { lease: None, mode: BulkMode::WriteOnly, ..fields(Behind::Nothing) };
        let content = BulkFields { mode: BulkMode::ReadOnly, ..fields(Behind::Content(&[1, 2, 3])) };
        for fields in [none, content, fields(Behind::Keys(&[9; 300])), fields(Behind::Content(&[]))] {
            for addresses in [&[0][..], &[1, 7, b's', b'h', b'm', b':', b'/', b'/', b'a'], &[2, 0, 0]] {
                let bytes = fields.encode(addresses);
                let (decoded, texts) = BulkFields::decode(&bytes).unwrap();
                assert_eq!(decoded, fields);
                assert_eq!(Some(texts), AddressTexts::take(addresses).map(|(texts, _)| texts));
            }
        }
    }

    #[test]
    fn bytes_that_are_no_bulk_are_refused() {
        let bytes = fields(Behind::Nothing).encode(&[1, 1, b'a']);
        for len in 0..bytes.len() {
            assert!(BulkFields::decode(&bytes[..len]).is_none(), "{len} bytes");
        }
        let with = |at: usize, byte: u8| {
            let mut changed = bytes.clone();
            changed[at] = byte;
            BulkFields::decode(&changed).is_some()
        };
        assert!((0..3).all(|mode| with(48, mode)) && (3..=255).all(|mode| !with(48, mode)));
        assert!((0..3).all(|behind| with(49, behind)) && (3..=255).all(|behind| !with(49, behind)));
        // Nothing is to be behind the addresses.
        assert!(BulkFields::decode(&[&bytes[..], &[0]].concat()).is_none());
    }

    /// A program may keep bulks in other formats than that of messages, some of which have no bytes, or no text to borrow.
    #[test]
    fn bulk_in_another_format_is_the_same_bulk() {
        let engine = Engine::server("loop://").unwrap();
        let exposed = engine.expose(vec![7u8; 100], BulkMode::ReadWrite).unwrap();
        let part = exposed.bulk().slice(10, 20).unwrap();
        let text = serde_json::to_string(&part).unwrap();
        assert!(text.starts_with(r#"{"exposed_memory":""#), "{text}");
        let again: Bulk = serde_json::from_str(&text.replacen('0', "\\u0030", 1)).unwrap();
        assert_eq!(format!("{again:?}"), format!("{part:?}"));
        let mut copy = [0u8; 20];
        assert_eq!(again.on(engine.lookup(engine.address()).unwrap()).pull_into(&mut copy).unwrap(), 20);
        assert_eq!(copy, [7; 20]);
        for (what, with) in [(":\"", ":\"0"), (":\"", ":\"x"), ("exposed_memory", "memory")] {
            assert!(serde_json::from_str::<Bulk>(&text.replace(what, with)).is_err(), "{what} as {with}");
        }
        assert!(serde_json::from_str::<Bulk>(r#"{"exposed_memory":""}"#).is_err());
    }

    /// Calls that take a mere piece of bytes for a bulk, or one for the other, are refused; what is behind a bulk is known, too.
    #[test]
    fn shape_of_a_bulk_is_known_as_that_of_a_bulk() {
        let shape = Shape::of_type::<(Bulk, Option<Bulk>, u16)>();
        assert_eq!(shape.to_string(), "(Bulk { exposed_memory: bytes }, Option<Bulk { exposed_memory: bytes }>, u16)");
        let engine = Engine::client("loop").unwrap();
        let exposed = engine.expose(vec![7u8; 100], BulkMode::ReadWrite).unwrap();
        let bulk = Shape::of_value(&exposed.bulk());
        assert!(Shape::of_type::<Bulk>().accepts(&bulk));
        assert!(!Shape::of_type::<Vec<u8>>().accepts(&bulk) && !Shape::of_type::<String>().accepts(&bulk));
        assert!(!Shape::of_type::<Bulk>().accepts(&Shape::of_value(&vec![1u8; 60])));
    }
}
