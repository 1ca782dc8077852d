//! Wire format below the protocol: parameters that are exchanged when a connection is made, and messages.
//!
//! Numbers are little endian. A message is a [`MessageHeader`] and a [`MessageContent`].

use std::io;

use crate::text::clipped;

const MAGIC: [u8; 8] = *b"calverbs";

/// Length of a [`CmHello`]: the connection manager carries at most 56 bytes.
const HELLO: usize = 36;
/// Length of a [`MessageHeader`].
pub(super) const HEADER: usize = 8;

/// Parameters of one side, sent as private data of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CmHello {
    /// Lowest and highest version of the protocol that it supports. A change of this format is one of the protocol.
    pub versions: (u16, u16),
    /// Longest message that it accepts, in bytes.
    pub message: u32,
    /// Messages that it has room for.
    pub credits: u16,
    /// Reads that it answers at a time.
    pub reads: u8,
    /// The engine's incarnation.
    pub incarnation: u64,
    /// Identifies the memory keys that are valid on this connection: those of one device of one engine.
    pub domain: u64,
}

/// What is wrong with a [`CmHello`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HelloError {
    /// It does not start with the magic number.
    Foreign,
    /// No common version; the lowest and the highest that the peer supports.
    Version(u16, u16),
    /// Impossible numbers.
    Malformed,
}

impl CmHello {
    pub fn encode(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.versions.0.to_le_bytes());
        out[10..12].copy_from_slice(&self.versions.1.to_le_bytes());
        out[12..16].copy_from_slice(&self.message.to_le_bytes());
        out[16..18].copy_from_slice(&self.credits.to_le_bytes());
        out[18] = self.reads;
        out[20..28].copy_from_slice(&self.incarnation.to_le_bytes());
        out[28..36].copy_from_slice(&self.domain.to_le_bytes());
        out
    }

    /// The first twelve bytes keep their layout in every version; bytes after the last field are for later ones. The connection
    /// manager may append zeros.
    pub fn decode(bytes: &[u8], spoken: (u16, u16)) -> Result<CmHello, HelloError> {
        let Some((magic, rest)) = bytes.split_first_chunk::<8>() else { return Err(HelloError::Foreign) };
        if *magic != MAGIC || rest.len() < 4 {
            return Err(HelloError::Foreign);
        }
        let versions = (number(bytes, 8) as u16, (number(bytes, 8) >> 16) as u16);
        if versions.0 > spoken.1 || versions.1 < spoken.0 || versions.0 > versions.1 {
            return Err(HelloError::Version(versions.0, versions.1));
        }
        if bytes.len() < HELLO {
            return Err(HelloError::Malformed);
        }
        let hello = CmHello {
            versions,
            message: number(bytes, 12) as u32,
            credits: number(bytes, 16) as u16,
            reads: bytes[18],
            incarnation: number(bytes, 20),
            domain: number(bytes, 28),
        };
        let possible = hello.message as usize >= 256 && hello.credits >= 2;
        if possible { Ok(hello) } else { Err(HelloError::Malformed) }
    }
}

/// Longest reason of a refusal, in bytes: the connection manager carries 148 in all.
const REASON: usize = 120;

/// Private data of a rejection: the versions that this side supports, and the reason.
pub(super) fn encode_refusal(versions: (u16, u16), reason: &str) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&versions.0.to_le_bytes());
    out.extend_from_slice(&versions.1.to_le_bytes());
    out.extend_from_slice(clipped(reason, REASON).as_bytes());
    out
}

/// The reason of a rejection.
pub(super) fn decode_refusal(bytes: &[u8], spoken: (u16, u16)) -> Result<String, HelloError> {
    match CmHello::decode(bytes, spoken) {
        Err(objection @ (HelloError::Foreign | HelloError::Version(..))) => Err(objection),
        _ => {
            let text = bytes.get(12..).unwrap_or_default();
            let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
            Ok(text[..end].utf8_chunks().map(|chunk| chunk.valid()).collect())
        }
    }
}

/// Up to eight bytes as a number.
fn number(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// A number of four bytes.
fn short(bytes: &[u8], at: usize) -> u32 {
    number(bytes, at) as u32
}

/// Starts every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageHeader {
    /// Credits that the sender returns.
    pub credits: u16,
    /// Staged segments that the sender has read, the oldest first.
    pub read: u16,
}

/// Memory of the sender's that holds data for the receiver to read, until the receiver reports that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StagedSegment {
    pub address: u64,
    pub key: u32,
    pub len: u32,
}

/// The sender's end of an RMA queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QpOffer {
    /// Both ends count the queue pairs that replace each other.
    pub generation: u32,
    pub queue_pair: u32,
    /// First packet sequence number (PSN).
    pub first: u32,
}

/// Content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageContent<'a> {
    /// Nothing but the header.
    Credit,
    /// Part of the byte stream.
    Bytes(&'a [u8]),
    /// Part of the byte stream, to be read from the sender's memory.
    StagedBytes(StagedSegment),
    /// The payload that the byte stream has announced.
    Payload(&'a [u8]),
    StagedPayload(StagedSegment),
    /// There is no payload: its memory has been reclaimed.
    SourceGone,
    /// The sender's end of an RMA queue pair, to connect to.
    Offer(QpOffer),
    /// The sender has connected its end of this generation.
    RmaConnected(u32),
    /// The last message.
    Bye,
}

impl MessageContent<'_> {
    /// True for messages that take a credit.
    pub(super) fn is_credited(&self) -> bool {
        use MessageContent::{Bye, Credit, Offer, RmaConnected};
        !matches!(self, Credit | Offer(_) | RmaConnected(_) | Bye)
    }

    fn tag(&self) -> u8 {
        match self {
            MessageContent::Credit => 0,
            MessageContent::Bytes(_) => 1,
            MessageContent::StagedBytes(_) => 2,
            MessageContent::Payload(_) => 3,
            MessageContent::StagedPayload(_) => 4,
            MessageContent::SourceGone => 5,
            MessageContent::Offer(_) => 6,
            MessageContent::RmaConnected(_) => 7,
            MessageContent::Bye => 8,
        }
    }
}

/// Encodes a message, which must fit; returns its length.
pub(super) fn encode(header: MessageHeader, content: &MessageContent<'_>, out: &mut [u8]) -> usize {
    out[0] = content.tag();
    out[1] = 0;
    out[2..4].copy_from_slice(&header.credits.to_le_bytes());
    out[4..6].copy_from_slice(&header.read.to_le_bytes());
    out[6..8].fill(0);
    let mut at = HEADER;
    let mut put = |bytes: &[u8]| {
        out[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    match content {
        MessageContent::Credit | MessageContent::SourceGone | MessageContent::Bye => {}
        MessageContent::Bytes(bytes) | MessageContent::Payload(bytes) => put(bytes),
        MessageContent::StagedBytes(staged) | MessageContent::StagedPayload(staged) => {
            put(&staged.address.to_le_bytes());
            put(&staged.key.to_le_bytes());
            put(&staged.len.to_le_bytes());
        }
        MessageContent::Offer(offer) => {
            [offer.generation, offer.queue_pair, offer.first].iter().for_each(|number| put(&number.to_le_bytes()));
        }
        MessageContent::RmaConnected(generation) => put(&generation.to_le_bytes()),
    }
    at
}

/// Decodes a message.
pub(super) fn decode(message: &[u8]) -> io::Result<(MessageHeader, MessageContent<'_>)> {
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "it sent a malformed message");
    let Some((head, rest)) = message.split_first_chunk::<HEADER>() else { return Err(malformed()) };
    let header = MessageHeader { credits: number(head, 2) as u16, read: number(head, 4) as u16 };
    let sized = |len: usize| if rest.len() == len { Ok(()) } else { Err(malformed()) };
    let staged = || {
        sized(16)?;
        Ok::<_, io::Error>(StagedSegment { address: number(rest, 0), key: short(rest, 8), len: short(rest, 12) })
    };
    let content = match head[0] {
        0 => sized(0).map(|()| MessageContent::Credit)?,
        1 => MessageContent::Bytes(rest),
        2 => MessageContent::StagedBytes(staged()?),
        3 => MessageContent::Payload(rest),
        4 => MessageContent::StagedPayload(staged()?),
        5 => sized(0).map(|()| MessageContent::SourceGone)?,
        6 => {
            sized(12)?;
            MessageContent::Offer(QpOffer { generation: short(rest, 0), queue_pair: short(rest, 4), first: short(rest, 8) })
        }
        7 => {
            sized(4)?;
            MessageContent::RmaConnected(short(rest, 0))
        }
        8 => sized(0).map(|()| MessageContent::Bye)?,
        _ => return Err(malformed()),
    };
    Ok((header, content))
}

/// A segment of a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteSegment {
    pub address: u64,
    pub len: u64,
    pub key: u32,
}

/// Appends the keys of one exposure that are valid in a domain.
pub(super) fn encode_keys(domain: u64, remote_segments: &[RemoteSegment], out: &mut Vec<u8>) {
    out.extend_from_slice(&domain.to_le_bytes());
    out.extend_from_slice(&(remote_segments.len() as u32).to_le_bytes());
    for segment in remote_segments {
        out.extend_from_slice(&segment.address.to_le_bytes());
        out.extend_from_slice(&segment.len.to_le_bytes());
        out.extend_from_slice(&segment.key.to_le_bytes());
    }
}

const REMOTE_SEGMENT: usize = 20;

/// The keys that are valid in a domain, for `len` bytes of the exposure from `offset` on; `None` where there are none. They may
/// be forged: the owner's device checks each access, and only the arithmetic is checked here.
pub(super) fn decode_keys(keys: &[u8], domain: u64, offset: u64, len: u64) -> Option<Vec<RemoteSegment>> {
    let mut rest = keys;
    let found = loop {
        let (head, behind) = rest.split_first_chunk::<12>()?;
        let size = (short(head, 8) as usize).checked_mul(REMOTE_SEGMENT)?;
        let (body, next) = behind.split_at_checked(size)?;
        if number(head, 0) == domain {
            break body;
        }
        rest = next;
    };
    let (mut skip, mut left) = (offset, len);
    let mut remote_segments = Vec::new();
    for entry in found.chunks_exact(REMOTE_SEGMENT) {
        if left == 0 {
            break;
        }
        let whole = RemoteSegment { address: number(entry, 0), len: number(entry, 8), key: short(entry, 16) };
        if skip >= whole.len {
            skip -= whole.len;
            continue;
        }
        let take = left.min(whole.len - skip);
        let address = whole.address.checked_add(skip)?;
        address.checked_add(take)?;
        remote_segments.push(RemoteSegment { address, len: take, key: whole.key });
        skip = 0;
        left -= take;
    }
    (left == 0).then_some(remote_segments)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPOKEN: (u16, u16) = (1, 1);
    const HERE: CmHello =
        CmHello { versions: SPOKEN, message: 4096, credits: 16, reads: 16, incarnation: 7 << 60, domain: 9 << 50 };

    fn decode_here(bytes: &[u8]) -> Result<CmHello, HelloError> {
        CmHello::decode(bytes, SPOKEN)
    }

    #[test]
    fn a_hello_is_understood_with_zeros_behind_it() {
        let mut bytes = HERE.encode().to_vec();
        assert_eq!(decode_here(&bytes), Ok(HERE));
        bytes.resize(56, 0);
        assert_eq!(decode_here(&bytes), Ok(HERE));
    }

    #[test]
    fn what_is_no_hello_is_told_from_another_version() {
        assert_eq!(decode_here(b""), Err(HelloError::Foreign));
        assert_eq!(decode_here(b"calverbs"), Err(HelloError::Foreign));
        assert_eq!(decode_here(&[0; 56]), Err(HelloError::Foreign));
        let later = CmHello { versions: (2, 5), ..HERE }.encode();
        assert_eq!(decode_here(&later), Err(HelloError::Version(2, 5)));
        assert_eq!(decode_here(&later[..12]), Err(HelloError::Version(2, 5)));
        assert_eq!(decode_here(&HERE.encode()[..20]), Err(HelloError::Malformed));
        assert_eq!(decode_here(&CmHello { credits: 0, ..HERE }.encode()), Err(HelloError::Malformed));
        assert_eq!(decode_here(&CmHello { message: 8, ..HERE }.encode()), Err(HelloError::Malformed));
    }

    #[test]
    fn a_refusal_tells_why() {
        let mut bytes = encode_refusal(SPOKEN, "there is no room");
        bytes.resize(148, 0);
        assert_eq!(decode_refusal(&bytes, SPOKEN), Ok("there is no room".to_owned()));
        assert_eq!(decode_refusal(&bytes, (3, 4)), Err(HelloError::Version(1, 1)));
        assert_eq!(decode_refusal(&[], SPOKEN), Err(HelloError::Foreign));
        let long = "ä".repeat(100);
        assert_eq!(decode_refusal(&encode_refusal(SPOKEN, &long), SPOKEN), Ok("ä".repeat(60)));
    }

    #[test]
    fn messages_come_back_as_they_were() {
        let staged = StagedSegment { address: u64::MAX - 5, key: 0xdead_beef, len: 77 };
        let contents = [
            MessageContent::Credit,
            MessageContent::Bytes(b"some"),
            MessageContent::StagedBytes(staged),
            MessageContent::Payload(b""),
            MessageContent::StagedPayload(staged),
            MessageContent::SourceGone,
            MessageContent::Offer(QpOffer { generation: 3, queue_pair: 0x0012_3456, first: 99 }),
            MessageContent::RmaConnected(4),
            MessageContent::Bye,
        ];
        for content in contents {
            let header = MessageHeader { credits: 513, read: 2 };
            let mut out = [0xff; 64];
            let len = encode(header, &content, &mut out);
            assert_eq!(decode(&out[..len]).unwrap(), (header, content));
            if !matches!(content, MessageContent::Bytes(_) | MessageContent::Payload(_)) {
                assert!(decode(&out[..len + 1]).is_err(), "{content:?} with a byte too many");
                assert!(decode(&out[..len - 1]).is_err(), "{content:?} with a byte too few");
            }
        }
        assert!(decode(&[9, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(decode(&[]).is_err());
    }

    #[test]
    fn keys_of_a_range_are_found_in_their_domain() {
        let (one, two) = (RemoteSegment { address: 1000, len: 10, key: 1 }, RemoteSegment { address: 5000, len: 20, key: 2 });
        let mut keys = Vec::new();
        encode_keys(4, &[two], &mut keys);
        encode_keys(5, &[one, two], &mut keys);
        assert_eq!(decode_keys(&keys, 5, 0, 30), Some(vec![one, two]));
        let middle = vec![RemoteSegment { address: 1008, len: 2, key: 1 }, RemoteSegment { address: 5000, len: 3, key: 2 }];
        assert_eq!(decode_keys(&keys, 5, 8, 5), Some(middle));
        assert_eq!(decode_keys(&keys, 5, 10, 20), Some(vec![two]));
        assert_eq!(decode_keys(&keys, 5, 8, 23), None, "more than there is");
        assert_eq!(decode_keys(&keys, 6, 0, 1), None, "another domain");
        assert_eq!(decode_keys(&keys[..keys.len() - 1], 5, 0, 1), None, "cut off");
        assert_eq!(decode_keys(&keys, 5, u64::MAX, 1), None);
        let end = RemoteSegment { address: u64::MAX, len: u64::MAX, key: 0 };
        let mut lie = Vec::new();
        encode_keys(1, &[end, end], &mut lie);
        assert_eq!(decode_keys(&lie, 1, 5, 5), None, "an address beyond the last");
    }
}
