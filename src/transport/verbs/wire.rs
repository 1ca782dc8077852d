//! What the two ends of a connection say to each other below the protocol: when it begins, and with each message.
//!
//! Numbers are little endian. A message is a [`Header`] and what its kind needs.

use std::io;

const MAGIC: [u8; 8] = *b"calverbs";

/// Length of a [`Hello`]: the connection manager takes 56 bytes at most.
const HELLO: usize = 36;
/// Length of a [`Header`].
pub(super) const HEADER: usize = 8;

/// What an end says of itself, as private data of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Versions of the protocol that it speaks, lowest and highest. A change of this format is one of the protocol.
    pub versions: (u16, u16),
    /// Longest message that it takes.
    pub message: u32,
    /// Messages that it has room for.
    pub credits: u16,
    /// Reads that it answers at a time.
    pub reads: u8,
    /// The engine's incarnation.
    pub incarnation: u64,
    /// Names the memory keys that are good on this connection: those of one engine's one device.
    pub domain: u64,
}

/// What is wrong with a [`Hello`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Objection {
    /// It is none.
    Foreign,
    /// Another version: the lowest and the highest that is spoken there.
    Version(u16, u16),
    /// Numbers that can't be.
    Nonsense,
}

impl Hello {
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

    /// The first twelve bytes keep their layout in every version; what follows the rest is for later ones. The connection
    /// manager may append zeros.
    pub fn decode(bytes: &[u8], spoken: (u16, u16)) -> Result<Hello, Objection> {
        let Some((magic, rest)) = bytes.split_first_chunk::<8>() else { return Err(Objection::Foreign) };
        if *magic != MAGIC || rest.len() < 4 {
            return Err(Objection::Foreign);
        }
        let versions = (number(bytes, 8) as u16, (number(bytes, 8) >> 16) as u16);
        if versions.0 > spoken.1 || versions.1 < spoken.0 || versions.0 > versions.1 {
            return Err(Objection::Version(versions.0, versions.1));
        }
        if bytes.len() < HELLO {
            return Err(Objection::Nonsense);
        }
        let hello = Hello {
            versions,
            message: number(bytes, 12) as u32,
            credits: number(bytes, 16) as u16,
            reads: bytes[18],
            incarnation: number(bytes, 20),
            domain: number(bytes, 28),
        };
        let possible = hello.message as usize >= 256 && hello.credits >= 2;
        if possible { Ok(hello) } else { Err(Objection::Nonsense) }
    }
}

/// Longest reason of a refusal, in bytes: the connection manager takes 148 in all.
const REASON: usize = 120;

/// What a peer that is not wanted is told: the versions that are spoken here, and why.
pub(super) fn encode_refusal(versions: (u16, u16), reason: &str) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&versions.0.to_le_bytes());
    out.extend_from_slice(&versions.1.to_le_bytes());
    out.extend_from_slice(&reason.as_bytes()[..reason.floor_char_boundary(REASON)]);
    out
}

/// Why this side is not wanted.
pub(super) fn decode_refusal(bytes: &[u8], spoken: (u16, u16)) -> Result<String, Objection> {
    match Hello::decode(bytes, spoken) {
        Err(objection @ (Objection::Foreign | Objection::Version(..))) => Err(objection),
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

/// The last part of what this is may be nothing but its length, of four bytes.
fn short(bytes: &[u8], at: usize) -> u32 {
    number(bytes, at) as u32
}

/// Begins every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Messages for which the sender has room again.
    pub credits: u16,
    /// Staged pieces that the sender has read, the oldest first.
    pub read: u16,
}

/// Memory of the sender's that holds what the message would, and is there until it is told that it has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Staged {
    pub address: u64,
    pub key: u32,
    pub len: u32,
}

/// The sender's end of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// Lanes come one after another, when the one before is broken; both ends count them.
    pub lane: u32,
    pub queue_pair: u32,
    /// Number of the first packet.
    pub first: u32,
}

/// What a message brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content<'a> {
    /// Nothing but the header.
    Credit,
    /// Part of the stream of bytes.
    Bytes(&'a [u8]),
    /// The same, to be read from the sender's memory.
    StagedBytes(Staged),
    /// The payload that the bytes before have announced.
    Payload(&'a [u8]),
    StagedPayload(Staged),
    /// There is no payload: its memory was gone.
    SourceGone,
    /// The sender's end of a lane, to be connected.
    Offer(Offer),
    /// The sender has connected its end of the lane of this number.
    LaneUp(u32),
    /// Nothing follows.
    Bye,
}

impl Content<'_> {
    /// True for what takes a credit.
    pub(super) fn is_credited(&self) -> bool {
        !matches!(self, Content::Credit | Content::Offer(_) | Content::LaneUp(_) | Content::Bye)
    }

    fn tag(&self) -> u8 {
        match self {
            Content::Credit => 0,
            Content::Bytes(_) => 1,
            Content::StagedBytes(_) => 2,
            Content::Payload(_) => 3,
            Content::StagedPayload(_) => 4,
            Content::SourceGone => 5,
            Content::Offer(_) => 6,
            Content::LaneUp(_) => 7,
            Content::Bye => 8,
        }
    }
}

/// Writes a message, which must fit; its length.
pub(super) fn encode(header: Header, content: &Content<'_>, out: &mut [u8]) -> usize {
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
        Content::Credit | Content::SourceGone | Content::Bye => {}
        Content::Bytes(bytes) | Content::Payload(bytes) => put(bytes),
        Content::StagedBytes(staged) | Content::StagedPayload(staged) => {
            put(&staged.address.to_le_bytes());
            put(&staged.key.to_le_bytes());
            put(&staged.len.to_le_bytes());
        }
        Content::Offer(offer) => {
            [offer.lane, offer.queue_pair, offer.first].iter().for_each(|number| put(&number.to_le_bytes()));
        }
        Content::LaneUp(lane) => put(&lane.to_le_bytes()),
    }
    at
}

/// Takes a message apart.
pub(super) fn decode(message: &[u8]) -> io::Result<(Header, Content<'_>)> {
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "it sent a message that makes no sense");
    let Some((head, rest)) = message.split_first_chunk::<HEADER>() else { return Err(nonsense()) };
    let header = Header { credits: number(head, 2) as u16, read: number(head, 4) as u16 };
    let sized = |len: usize| if rest.len() == len { Ok(()) } else { Err(nonsense()) };
    let staged = || {
        sized(16)?;
        Ok::<_, io::Error>(Staged { address: number(rest, 0), key: short(rest, 8), len: short(rest, 12) })
    };
    let content = match head[0] {
        0 => sized(0).map(|()| Content::Credit)?,
        1 => Content::Bytes(rest),
        2 => Content::StagedBytes(staged()?),
        3 => Content::Payload(rest),
        4 => Content::StagedPayload(staged()?),
        5 => sized(0).map(|()| Content::SourceGone)?,
        6 => {
            sized(12)?;
            Content::Offer(Offer { lane: short(rest, 0), queue_pair: short(rest, 4), first: short(rest, 8) })
        }
        7 => {
            sized(4)?;
            Content::LaneUp(short(rest, 0))
        }
        8 => sized(0).map(|()| Content::Bye)?,
        _ => return Err(nonsense()),
    };
    Ok((header, content))
}

/// A stretch of a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub address: u64,
    pub len: u64,
    pub key: u32,
}

/// Appends the keys of one exposure that are good in a domain.
pub(super) fn encode_keys(domain: u64, stretches: &[Stretch], out: &mut Vec<u8>) {
    out.extend_from_slice(&domain.to_le_bytes());
    out.extend_from_slice(&(stretches.len() as u32).to_le_bytes());
    for stretch in stretches {
        out.extend_from_slice(&stretch.address.to_le_bytes());
        out.extend_from_slice(&stretch.len.to_le_bytes());
        out.extend_from_slice(&stretch.key.to_le_bytes());
    }
}

const STRETCH: usize = 20;

/// The keys that are good in a domain, from `offset` of the exposure on, `len` bytes of it; `None` where they are not among
/// them. Whoever wrote them may have lied: the owner's device checks each access, and nothing here is believed but numbers.
pub(super) fn decode_keys(keys: &[u8], domain: u64, offset: u64, len: u64) -> Option<Vec<Stretch>> {
    let mut rest = keys;
    let found = loop {
        let (head, behind) = rest.split_first_chunk::<12>()?;
        let size = (short(head, 8) as usize).checked_mul(STRETCH)?;
        let (body, next) = behind.split_at_checked(size)?;
        if number(head, 0) == domain {
            break body;
        }
        rest = next;
    };
    let (mut skip, mut left) = (offset, len);
    let mut stretches = Vec::new();
    for entry in found.chunks_exact(STRETCH) {
        if left == 0 {
            break;
        }
        let whole = Stretch { address: number(entry, 0), len: number(entry, 8), key: short(entry, 16) };
        if skip >= whole.len {
            skip -= whole.len;
            continue;
        }
        let take = left.min(whole.len - skip);
        let address = whole.address.checked_add(skip)?;
        address.checked_add(take)?;
        stretches.push(Stretch { address, len: take, key: whole.key });
        skip = 0;
        left -= take;
    }
    (left == 0).then_some(stretches)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPOKEN: (u16, u16) = (1, 1);
    const HERE: Hello = Hello { versions: SPOKEN, message: 4096, credits: 16, reads: 16, incarnation: 7 << 60, domain: 9 << 50 };

    fn decode_here(bytes: &[u8]) -> Result<Hello, Objection> {
        Hello::decode(bytes, SPOKEN)
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
        assert_eq!(decode_here(b""), Err(Objection::Foreign));
        assert_eq!(decode_here(b"calverbs"), Err(Objection::Foreign));
        assert_eq!(decode_here(&[0; 56]), Err(Objection::Foreign));
        let later = Hello { versions: (2, 5), ..HERE }.encode();
        assert_eq!(decode_here(&later), Err(Objection::Version(2, 5)));
        assert_eq!(decode_here(&later[..12]), Err(Objection::Version(2, 5)));
        assert_eq!(decode_here(&HERE.encode()[..20]), Err(Objection::Nonsense));
        assert_eq!(decode_here(&Hello { credits: 0, ..HERE }.encode()), Err(Objection::Nonsense));
        assert_eq!(decode_here(&Hello { message: 8, ..HERE }.encode()), Err(Objection::Nonsense));
    }

    #[test]
    fn a_refusal_tells_why() {
        let mut bytes = encode_refusal(SPOKEN, "there is no room");
        bytes.resize(148, 0);
        assert_eq!(decode_refusal(&bytes, SPOKEN), Ok("there is no room".to_owned()));
        assert_eq!(decode_refusal(&bytes, (3, 4)), Err(Objection::Version(1, 1)));
        assert_eq!(decode_refusal(&[], SPOKEN), Err(Objection::Foreign));
        let long = "ä".repeat(100);
        assert_eq!(decode_refusal(&encode_refusal(SPOKEN, &long), SPOKEN), Ok("ä".repeat(60)));
    }

    #[test]
    fn messages_come_back_as_they_were() {
        let staged = Staged { address: u64::MAX - 5, key: 0xdead_beef, len: 77 };
        let contents = [
            Content::Credit,
            Content::Bytes(b"some"),
            Content::StagedBytes(staged),
            Content::Payload(b""),
            Content::StagedPayload(staged),
            Content::SourceGone,
            Content::Offer(Offer { lane: 3, queue_pair: 0x0012_3456, first: 99 }),
            Content::LaneUp(4),
            Content::Bye,
        ];
        for content in contents {
            let header = Header { credits: 513, read: 2 };
            let mut out = [0xff; 64];
            let len = encode(header, &content, &mut out);
            assert_eq!(decode(&out[..len]).unwrap(), (header, content));
            if !matches!(content, Content::Bytes(_) | Content::Payload(_)) {
                assert!(decode(&out[..len + 1]).is_err(), "{content:?} with a byte too many");
                assert!(decode(&out[..len - 1]).is_err(), "{content:?} with a byte too few");
            }
        }
        assert!(decode(&[9, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(decode(&[]).is_err());
    }

    #[test]
    fn keys_of_a_range_are_found_in_their_domain() {
        let (one, two) = (Stretch { address: 1000, len: 10, key: 1 }, Stretch { address: 5000, len: 20, key: 2 });
        let mut keys = Vec::new();
        encode_keys(4, &[two], &mut keys);
        encode_keys(5, &[one, two], &mut keys);
        assert_eq!(decode_keys(&keys, 5, 0, 30), Some(vec![one, two]));
        let middle = vec![Stretch { address: 1008, len: 2, key: 1 }, Stretch { address: 5000, len: 3, key: 2 }];
        assert_eq!(decode_keys(&keys, 5, 8, 5), Some(middle));
        assert_eq!(decode_keys(&keys, 5, 10, 20), Some(vec![two]));
        assert_eq!(decode_keys(&keys, 5, 8, 23), None, "more than there is");
        assert_eq!(decode_keys(&keys, 6, 0, 1), None, "another domain");
        assert_eq!(decode_keys(&keys[..keys.len() - 1], 5, 0, 1), None, "cut off");
        assert_eq!(decode_keys(&keys, 5, u64::MAX, 1), None);
        let end = Stretch { address: u64::MAX, len: u64::MAX, key: 0 };
        let mut lie = Vec::new();
        encode_keys(1, &[end, end], &mut lie);
        assert_eq!(decode_keys(&lie, 1, 5, 5), None, "an address beyond the last");
    }
}
