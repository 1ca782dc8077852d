//! The format of messages. Numbers are little-endian.
//!
//! ```text
//!  0     1        4          8            16         20        22       24
//!  kind  nothing  sequence   receiver's   handled    place of  nothing  content
//!                 number     link                    part 2
//!
//! part 2:  0     1        2          4          and so on, to the end of the message
//!          kind  nothing  length of  content
//!                         content
//! ```
//!
//! Where part 2 begins is 0 if the content is the only part. The messages that open a link have one part.
//!
//! A link numbers its messages in sequence: the provider may lose messages without a word, and a gap ends the link. `handled`
//! is how many of the receiver's messages the sender has handled since the link began, of those that take credit.
//!
//! A dialler also connects by TCP to the listener, which answers a greeting, once; both are of a fixed length. After that nothing
//! is sent there.
//!
//! ```text
//!            0      8         12        13       14      16           24
//! greeting:  magic  versions  provider  nothing          incarnation  number of the link, 8 bytes
//! answer:    magic  versions  provider  nothing  length  name, 128 bytes
//!                                                of name
//! ```

use std::io;

use super::sys::{MAX_NAME, RemoteExtent};
use crate::address::OfiProvider;
use crate::text::clipped;

pub(super) const HEADER: usize = 24;
/// What each further part has besides its content.
const PART: usize = 4;
/// Where the header says at which byte the second part begins.
const SECOND: usize = 20;
/// What an announcement has besides the bytes of the stream, with a name of this length.
pub(super) const fn announcement(name: usize) -> usize {
    HEADER + 14 + name
}

const MAGIC: [u8; 8] = *b"calomofi";
/// Longest reason of a refusal, in bytes.
const REASON: usize = 200;

/// What each message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OfiHeader {
    pub sequence: u32,
    /// Identifies the link at its receiver, which has chosen this number at random. 0 in a hello.
    pub to: u64,
    pub handled: u32,
}

/// The parameters of a link's end. Its layout is the same in every version; bytes behind the address are for later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OfiHello<'a> {
    /// Lowest and highest protocol version that the engine supports.
    pub versions: (u16, u16),
    /// Longest message that it accepts.
    pub message: u32,
    /// Messages for which it has room.
    pub credits: u16,
    pub incarnation: u64,
    /// The sender's number of the link.
    pub link: u64,
    /// Of the side that accepts: the TCP port at which the dialler may watch it; 0 for none, or where it is connected already.
    pub watch: u16,
    /// Identifies, in keys, the sender's endpoint that peers reach memory through by RMA; 0 for none.
    pub rma: u64,
    /// The address of the sender's endpoint, since providers don't tell it.
    pub name: &'a [u8],
}

impl OfiHello<'_> {
    /// True when both support a common version.
    pub(super) fn suits(&self, spoken: (u16, u16)) -> bool {
        suit(self.versions, spoken)
    }
}

/// Content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OfiContent<'a> {
    /// A peer dials.
    Hello(OfiHello<'a>),
    /// The answer to it.
    Accept(OfiHello<'a>),
    /// The other answer: the versions that the sender supports, and the reason.
    Refuse { versions: (u16, u16), reason: &'a [u8] },
    /// Part of the byte stream.
    Bytes(&'a [u8]),
    /// Part of the payload that the byte stream has announced, with its checksum if it has one.
    Payload { bytes: &'a [u8], sum: Option<u32> },
    /// There is no payload, or no more of it: its memory has been reclaimed.
    SourceGone,
    /// With these bytes, the byte stream announces a payload, which goes from this bulk endpoint to the receiver's, once that is
    /// ready.
    Announce { number: u64, len: u32, covered: bool, name: &'a [u8], bytes: &'a [u8] },
    /// As `Announce`, but the payload is on its way, to the receive of this slot, behind those that were announced for it before.
    Eager { number: u64, len: u32, covered: bool, slot: u8, bytes: &'a [u8] },
    /// Receives are posted for payloads that come at once, at this bulk endpoint: so many slots, with tags from this one on.
    Slots { tag: u64, count: u8, name: &'a [u8] },
    /// Credit, and nothing else.
    Credit,
    /// A receive is posted for the payload of this number, at this bulk endpoint, with this tag.
    Ready { number: u64, tag: u64, name: &'a [u8] },
    /// The payload of this number has arrived, or is not wanted.
    Taken { number: u64 },
    /// The payloads of this slot have arrived, and its next receive is posted.
    Emptied { slot: u8 },
    /// The last message.
    Bye,
}

/// Most payloads that go to a slot at once.
pub(super) const MOST_TOGETHER: usize = 8;

/// What goes beside the payloads to a slot: how many there are, and which of them are left out, since their memory is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub count: usize,
    gone: u64,
}

impl Load {
    pub(super) fn of(count: usize) -> Load {
        Load { count, gone: 0 }
    }

    pub(super) fn leave_out(&mut self, index: usize) {
        self.gone |= 1 << index;
    }

    pub(super) fn has(&self, index: usize) -> bool {
        self.gone & (1 << index) == 0
    }

    pub(super) fn encode(self) -> u64 {
        self.count as u64 | self.gone << 8
    }

    /// `None`: there are none, or more than there can be.
    pub(super) fn decode(data: u64) -> Option<Load> {
        let (count, gone) = ((data & 0xff) as usize, data >> 8);
        let possible = (1..=MOST_TOGETHER).contains(&count) && gone < 1 << count;
        possible.then_some(Load { count, gone })
    }
}

impl OfiContent<'_> {
    /// True for those that open a link, or refuse one: they are alone in a message, and in no sequence.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self, OfiContent::Hello(_) | OfiContent::Accept(_) | OfiContent::Refuse { .. })
    }

    /// True for those that take a credit: a message with such parts takes one.
    pub(super) fn is_credited(&self) -> bool {
        use OfiContent::{Announce, Bytes, Eager, Payload, SourceGone};
        matches!(self, Bytes(_) | Payload { .. } | SourceGone | Announce { .. } | Eager { .. })
    }

    fn kind(&self) -> u8 {
        match self {
            OfiContent::Hello(_) => 1,
            OfiContent::Accept(_) => 2,
            OfiContent::Refuse { .. } => 3,
            OfiContent::Bytes(_) => 4,
            OfiContent::Payload { sum: None, .. } => 5,
            OfiContent::Payload { sum: Some(_), .. } => 6,
            OfiContent::SourceGone => 7,
            OfiContent::Announce { covered: false, .. } => 8,
            OfiContent::Announce { covered: true, .. } => 9,
            OfiContent::Credit => 10,
            OfiContent::Ready { .. } => 11,
            OfiContent::Taken { .. } => 12,
            OfiContent::Bye => 13,
            OfiContent::Eager { covered: false, .. } => 14,
            OfiContent::Eager { covered: true, .. } => 15,
            OfiContent::Slots { .. } => 16,
            OfiContent::Emptied { .. } => 17,
        }
    }
}

/// Encodes a message of one part: appends it.
pub(super) fn encode(header: OfiHeader, content: &OfiContent<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(&[content.kind(), 0, 0, 0]);
    out.extend_from_slice(&header.sequence.to_le_bytes());
    out.extend_from_slice(&header.to.to_le_bytes());
    out.extend_from_slice(&header.handled.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    put_content(content, out);
}

/// Adds a part to a message. False when it would be longer than `longest` then, and is as it was.
pub(super) fn add_part(content: &OfiContent<'_>, longest: usize, message: &mut Vec<u8>) -> bool {
    let at = message.len();
    message.extend_from_slice(&[content.kind(), 0, 0, 0]);
    put_content(content, message);
    let (Ok(place), Ok(len)) = (u16::try_from(at), u16::try_from(message.len() - at - PART)) else {
        message.truncate(at);
        return false;
    };
    if message.len() > longest {
        message.truncate(at);
        return false;
    }
    message[at + 2..at + PART].copy_from_slice(&len.to_le_bytes());
    if message[SECOND..SECOND + 2] == [0, 0] {
        message[SECOND..SECOND + 2].copy_from_slice(&place.to_le_bytes());
    }
    true
}

/// Sets what a message that is complete reports as handled.
pub(super) fn set_handled(message: &mut [u8], handled: u32) {
    message[16..20].copy_from_slice(&handled.to_le_bytes());
}

fn put_content(content: &OfiContent<'_>, out: &mut Vec<u8>) {
    let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
    match *content {
        OfiContent::Hello(hello) | OfiContent::Accept(hello) => {
            put(&MAGIC);
            put(&hello.versions.0.to_le_bytes());
            put(&hello.versions.1.to_le_bytes());
            put(&hello.message.to_le_bytes());
            put(&hello.credits.to_le_bytes());
            put(&(hello.name.len() as u16).to_le_bytes());
            put(&hello.incarnation.to_le_bytes());
            put(&hello.link.to_le_bytes());
            put(&hello.watch.to_le_bytes());
            put(&[0; 2]);
            put(&hello.rma.to_le_bytes());
            put(hello.name);
        }
        OfiContent::Refuse { versions, reason } => {
            put(&MAGIC);
            put(&versions.0.to_le_bytes());
            put(&versions.1.to_le_bytes());
            put(reason);
        }
        OfiContent::Bytes(bytes) | OfiContent::Payload { bytes, sum: None } => put(bytes),
        OfiContent::Payload { bytes, sum: Some(sum) } => {
            put(&sum.to_le_bytes());
            put(bytes);
        }
        OfiContent::SourceGone | OfiContent::Credit | OfiContent::Bye => {}
        OfiContent::Announce { number, len, name, bytes, .. } => {
            put(&number.to_le_bytes());
            put(&len.to_le_bytes());
            put(&(name.len() as u16).to_le_bytes());
            put(name);
            put(bytes);
        }
        OfiContent::Ready { number, tag, name } => {
            put(&number.to_le_bytes());
            put(&tag.to_le_bytes());
            put(name);
        }
        OfiContent::Taken { number } => put(&number.to_le_bytes()),
        OfiContent::Emptied { slot } => put(&[slot, 0]),
        OfiContent::Eager { number, len, slot, bytes, .. } => {
            put(&number.to_le_bytes());
            put(&len.to_le_bytes());
            put(&[slot, 0]);
            put(bytes);
        }
        OfiContent::Slots { tag, count, name } => {
            put(&tag.to_le_bytes());
            put(&[count, 0]);
            put(name);
        }
    }
}

/// The reason of a refusal, as it is sent.
pub(super) fn reason(text: &str) -> &[u8] {
    clipped(text, REASON).as_bytes()
}

/// Takes fields off the beginning of a message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }

    /// A further part of a message, which belongs to a link, and what is behind it.
    fn part(mut self) -> Option<(OfiContent<'a>, &'a [u8])> {
        let [kind, _] = self.take()?;
        let len = usize::from(self.u16()?);
        let (content, rest) = self.0.split_at_checked(len)?;
        let content = parse_content(kind, content)?;
        (!content.is_opening()).then_some((content, rest))
    }

    fn hello(mut self) -> Option<OfiHello<'a>> {
        (self.take::<8>()? == MAGIC).then_some(())?;
        let versions = (self.u16()?, self.u16()?);
        let (message, credits, name) = (self.u32()?, self.u16()?, usize::from(self.u16()?));
        let (incarnation, link) = (self.u64()?, self.u64()?);
        let (watch, _, rma) = (self.u16()?, self.u16()?, self.u64()?);
        let name = self.0.get(..name)?;
        let possible = versions.0 <= versions.1 && message as usize >= 256 && credits >= 2 && link != 0;
        possible.then_some(OfiHello { versions, message, credits, incarnation, link, watch, rma, name })
    }
}

/// The keys of memory that is registered at several endpoints: for each its number, the number of segments, and these, of three
/// numbers each.
pub(super) fn encode_keys(target: u64, extents: &[RemoteExtent], out: &mut Vec<u8>) {
    out.extend_from_slice(&target.to_le_bytes());
    out.extend_from_slice(&(extents.len() as u64).to_le_bytes());
    for RemoteExtent { address, len, key } in extents {
        [address, len, key].into_iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
    }
}

/// The keys that are valid at an endpoint, for `len` bytes of the exposure from `offset` on; `None` where there are none. They may
/// be forged: the owner's device checks each access, and only the arithmetic is checked here.
pub(super) fn decode_keys(keys: &[u8], target: u64, offset: u64, len: u64) -> Option<Vec<RemoteExtent>> {
    let mut fields = Fields(keys);
    let (mut skip, mut left) = (offset, len);
    loop {
        let (at, count) = (fields.u64()?, fields.u64()?);
        if at != target {
            let size = usize::try_from(count).ok()?.checked_mul(3 * size_of::<u64>())?;
            fields = Fields(fields.0.get(size..)?);
            continue;
        }
        let mut extents = Vec::new();
        for _ in 0..count {
            if left == 0 {
                break;
            }
            let (address, whole, key) = (fields.u64()?, fields.u64()?, fields.u64()?);
            if skip >= whole {
                skip -= whole;
                continue;
            }
            let take = left.min(whole - skip);
            let address = address.checked_add(skip)?;
            address.checked_add(take)?;
            extents.push(RemoteExtent { address, len: take, key });
            skip = 0;
            left -= take;
        }
        return (left == 0).then_some(extents);
    }
}

/// The number of the link that a message is for, though the rest of it may be malformed.
pub(super) fn receiver(message: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(message.get(8..16)?.try_into().ok()?))
}

/// Decodes a message: its first part, and the others, which are decoded one by one.
pub(super) fn decode(message: &[u8]) -> io::Result<(OfiHeader, OfiContent<'_>, FurtherParts<'_>)> {
    parse(message).ok_or_else(malformed)
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it sent a malformed message")
}

fn parse(message: &[u8]) -> Option<(OfiHeader, OfiContent<'_>, FurtherParts<'_>)> {
    let mut fields = Fields(message);
    let [kind, ..] = fields.take::<4>()?;
    let header = OfiHeader { sequence: fields.u32()?, to: fields.u64()?, handled: fields.u32()? };
    let (second, _) = (usize::from(fields.u16()?), fields.u16()?);
    let end = if second == 0 { message.len() } else { second };
    let content = parse_content(kind, message.get(HEADER..end)?)?;
    let further = message.get(end..)?;
    // A second part is within the message.
    let is_right = second == 0 || !further.is_empty() && !content.is_opening();
    is_right.then_some(())?;
    Some((header, content, FurtherParts(further)))
}

/// The parts of a message behind the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FurtherParts<'a>(&'a [u8]);

impl FurtherParts<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'a> Iterator for FurtherParts<'a> {
    /// An error is the last item.
    type Item = io::Result<OfiContent<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let fields = Fields(std::mem::take(&mut self.0));
        if fields.0.is_empty() {
            return None;
        }
        let part = fields.part().map(|(content, rest)| {
            self.0 = rest;
            content
        });
        Some(part.ok_or_else(malformed))
    }
}

fn parse_content(kind: u8, content: &[u8]) -> Option<OfiContent<'_>> {
    let mut fields = Fields(content);
    Some(match kind {
        1 => OfiContent::Hello(fields.hello()?),
        2 => OfiContent::Accept(fields.hello()?),
        3 => {
            (fields.take::<8>()? == MAGIC).then_some(())?;
            let versions = (fields.u16()?, fields.u16()?);
            OfiContent::Refuse { versions, reason: fields.0.get(..REASON).unwrap_or(fields.0) }
        }
        4 => OfiContent::Bytes(fields.0),
        5 => OfiContent::Payload { bytes: fields.0, sum: None },
        6 => {
            let sum = fields.u32()?;
            OfiContent::Payload { bytes: fields.0, sum: Some(sum) }
        }
        7 => fields.end().map(|()| OfiContent::SourceGone)?,
        8 | 9 => {
            let (number, len) = (fields.u64()?, fields.u32()?);
            let size = usize::from(fields.u16()?);
            let (name, bytes) = fields.0.split_at_checked(size)?;
            OfiContent::Announce { number, len, covered: kind == 9, name, bytes }
        }
        10 => fields.end().map(|()| OfiContent::Credit)?,
        11 => {
            let (number, tag) = (fields.u64()?, fields.u64()?);
            OfiContent::Ready { number, tag, name: fields.0 }
        }
        12 => {
            let number = fields.u64()?;
            fields.end().map(|()| OfiContent::Taken { number })?
        }
        13 => fields.end().map(|()| OfiContent::Bye)?,
        14 | 15 => {
            let (number, len, [slot, _]) = (fields.u64()?, fields.u32()?, fields.take()?);
            OfiContent::Eager { number, len, covered: kind == 15, slot, bytes: fields.0 }
        }
        16 => {
            let (tag, [count, _]) = (fields.u64()?, fields.take()?);
            OfiContent::Slots { tag, count, name: fields.0 }
        }
        17 => {
            let [slot, _] = fields.take()?;
            fields.end().map(|()| OfiContent::Emptied { slot })?
        }
        _ => return None,
    })
}

pub(super) const GREETING: usize = 32;
pub(super) const ANSWER: usize = 16 + MAX_NAME;

/// What a dialler sends at the listener's TCP port. It says which link the connection belongs to: only the listener is told its
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub versions: (u16, u16),
    /// `None`: one that this version does not know.
    pub provider: Option<OfiProvider>,
    /// The dialler's incarnation, and its number of the link, as in its hello.
    pub link: (u64, u64),
}

/// What a listener answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GreetingAnswer<'a> {
    pub versions: (u16, u16),
    pub provider: Option<OfiProvider>,
    /// The name of its endpoint. Empty where the dialler knows it, or can't use it.
    pub name: &'a [u8],
}

/// True when two sides support a common version.
pub(super) fn suit(here: (u16, u16), there: (u16, u16)) -> bool {
    here.0 <= there.1 && here.1 >= there.0
}

const CODES: [(OfiProvider, u8); OfiProvider::ALL.len()] = [
    (OfiProvider::Tcp, 1),
    (OfiProvider::TcpRxm, 2),
    (OfiProvider::Verbs, 3),
    (OfiProvider::Cxi, 4),
    (OfiProvider::Opx, 5),
    (OfiProvider::Efa, 6),
];

/// What greetings and answers begin with.
fn preface(versions: (u16, u16), provider: Option<OfiProvider>) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&versions.0.to_le_bytes());
    out[10..12].copy_from_slice(&versions.1.to_le_bytes());
    out[12] = CODES.iter().find(|(known, _)| Some(*known) == provider).map_or(0, |(_, code)| *code);
    out
}

impl<'a> Fields<'a> {
    fn preface(&mut self) -> Option<((u16, u16), Option<OfiProvider>)> {
        (self.take::<8>()? == MAGIC).then_some(())?;
        let versions = (self.u16()?, self.u16()?);
        let [code, _] = self.take()?;
        let provider = CODES.iter().find(|(_, known)| *known == code).map(|(provider, _)| *provider);
        (versions.0 <= versions.1).then_some((versions, provider))
    }
}

impl Greeting {
    pub(super) fn encode(&self) -> [u8; GREETING] {
        let mut out = [0; GREETING];
        out[..16].copy_from_slice(&preface(self.versions, self.provider));
        out[16..24].copy_from_slice(&self.link.0.to_le_bytes());
        out[24..].copy_from_slice(&self.link.1.to_le_bytes());
        out
    }

    /// `None`: a stranger sends something else.
    pub(super) fn decode(bytes: &[u8; GREETING]) -> Option<Greeting> {
        let mut fields = Fields(bytes);
        let (versions, provider) = fields.preface()?;
        let [_, _] = fields.take()?;
        let link = (fields.u64()?, fields.u64()?);
        (link.1 != 0).then_some(Greeting { versions, provider, link })
    }
}

impl<'a> GreetingAnswer<'a> {
    /// The name is no longer than `MAX_NAME`.
    pub(super) fn encode(&self) -> [u8; ANSWER] {
        let (mut out, name) = ([0; ANSWER], self.name.get(..MAX_NAME).unwrap_or(self.name));
        out[..16].copy_from_slice(&preface(self.versions, self.provider));
        out[14..16].copy_from_slice(&(name.len() as u16).to_le_bytes());
        out[16..16 + name.len()].copy_from_slice(name);
        out
    }

    pub(super) fn decode(bytes: &'a [u8; ANSWER]) -> Option<GreetingAnswer<'a>> {
        let mut fields = Fields(bytes);
        let (versions, provider) = fields.preface()?;
        let len = usize::from(fields.u16()?);
        Some(GreetingAnswer { versions, provider, name: fields.0.get(..len)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: OfiHello<'_> = OfiHello {
        versions: (1, 1),
        message: 4096,
        credits: 16,
        incarnation: 7 << 60,
        link: 9 << 50,
        watch: 77,
        rma: 3 << 40,
        name: b"sixteen bytes...",
    };

    fn encoded(content: &OfiContent<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        encode(OfiHeader { sequence: 3, to: 5, handled: 1 << 31 }, content, &mut out);
        out
    }

    #[test]
    fn messages_come_back_as_they_were() {
        let contents = [
            OfiContent::Hello(HERE),
            OfiContent::Accept(HERE),
            OfiContent::Refuse { versions: (2, 3), reason: b"no" },
            OfiContent::Bytes(b"some"),
            OfiContent::Payload { bytes: b"", sum: None },
            OfiContent::Payload { bytes: b"some", sum: Some(0xfedc_ba98) },
            OfiContent::SourceGone,
            OfiContent::Announce { number: 1 << 40, len: u32::MAX, covered: true, name: b"name", bytes: b"" },
            OfiContent::Announce { number: 0, len: 1, covered: false, name: b"", bytes: b"the last" },
            OfiContent::Credit,
            OfiContent::Ready { number: 7, tag: 1 << 47, name: b"name" },
            OfiContent::Taken { number: 8 },
            OfiContent::Bye,
            OfiContent::Eager { number: 9, len: 1 << 16, covered: false, slot: 3, bytes: b"" },
            OfiContent::Eager { number: 1 << 60, len: 0, covered: true, slot: 255, bytes: b"the last" },
            OfiContent::Slots { tag: 1 << 47, count: 4, name: b"name" },
            OfiContent::Emptied { slot: 200 },
        ];
        for content in contents {
            let bytes = encoded(&content);
            let (header, decoded, further) = decode(&bytes).unwrap();
            assert_eq!((header.sequence, header.to, header.handled), (3, 5, 1 << 31));
            assert_eq!((decoded, further.count()), (content, 0));
            for len in 0..HEADER {
                assert!(decode(&bytes[..len]).is_err(), "{len} bytes of {content:?}");
            }
        }
    }

    #[test]
    fn parts_of_a_message_come_back_in_their_order() {
        let parts = [
            OfiContent::Taken { number: 8 },
            OfiContent::Bytes(b""),
            OfiContent::Ready { number: 7, tag: 1 << 47, name: b"name" },
            OfiContent::Payload { bytes: &[7; 100], sum: None },
            OfiContent::Bye,
        ];
        for count in 1..=parts.len() {
            let mut message = encoded(&parts[0]);
            parts[1..count].iter().for_each(|part| assert!(add_part(part, 500, &mut message)));
            set_handled(&mut message, 9);
            let (header, first, further) = decode(&message).unwrap();
            assert_eq!((header.sequence, header.to, header.handled), (3, 5, 9));
            let all: Vec<_> = std::iter::once(first).chain(further.map(Result::unwrap)).collect();
            assert_eq!(all, parts[..count]);
        }
        // One that is too long leaves the message as it was.
        let mut message = encoded(&parts[0]);
        let before = message.clone();
        assert!(!add_part(&parts[3], before.len() + PART + 99, &mut message));
        assert_eq!(message, before);
        assert!(add_part(&parts[3], before.len() + PART + 100, &mut message));
    }

    #[test]
    fn malformed_parts_are_refused() {
        let parts = [OfiContent::Taken { number: 1 }, OfiContent::Bytes(b"some"), OfiContent::Credit];
        let mut message = encoded(&parts[0]);
        parts[1..].iter().for_each(|part| assert!(add_part(part, 500, &mut message)));
        let is_right = |message: &[u8]| decode(message).is_ok_and(|(_, _, mut further)| further.all(|part| part.is_ok()));
        assert!(is_right(&message));
        let second = usize::from(message[SECOND]);
        // Where the second part begins: elsewhere, at the end, and beyond it.
        for place in (1..message.len() + 3).filter(|place| *place != second).chain([usize::from(u16::MAX)]) {
            let mut wrong = message.clone();
            wrong[SECOND..SECOND + 2].copy_from_slice(&(place as u16).to_le_bytes());
            assert!(!is_right(&wrong), "part 2 at byte {place}");
        }
        for (at, value) in [(second, 99), (second, 1), (second, 3), (second + 2, 3), (second + 2, 5), (second + 3, 1)] {
            let mut wrong = message.clone();
            wrong[at] = value;
            assert!(!is_right(&wrong), "{value} at byte {at}");
        }
        for len in second + 1..message.len() {
            let ends_with_a_part = len == message.len() - PART;
            assert_eq!(is_right(&message[..len]), ends_with_a_part, "{len} bytes");
        }
        // What opens a link is alone, so that what is behind it may be for later versions.
        let mut message = encoded(&OfiContent::Hello(HERE));
        assert!(add_part(&parts[0], 500, &mut message));
        assert!(!is_right(&message));
    }

    #[test]
    fn greetings_and_answers_come_back_as_they_were() {
        for provider in OfiProvider::ALL.map(Some).into_iter().chain([None]) {
            let greeting = Greeting { versions: (1, 3), provider, link: (7 << 60, 9 << 50) };
            assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
            for name in [&b""[..], b"a name", &[0xee; MAX_NAME]] {
                let answer = GreetingAnswer { versions: (2, 2), provider, name };
                assert_eq!(GreetingAnswer::decode(&answer.encode()), Some(answer));
            }
        }
    }

    #[test]
    fn hostile_greetings_and_answers_are_refused() {
        let greeting = Greeting { versions: (1, 3), provider: Some(OfiProvider::Cxi), link: (1, 2) };
        let answer = GreetingAnswer { versions: (1, 3), provider: Some(OfiProvider::Cxi), name: b"a name" };
        for at in 0..8 {
            let (mut foreign, mut other) = (greeting.encode(), answer.encode());
            foreign[at] ^= 0x20;
            other[at] ^= 0x20;
            assert_eq!((Greeting::decode(&foreign), GreetingAnswer::decode(&other)), (None, None));
        }
        assert_eq!(Greeting::decode(&Greeting { versions: (3, 2), ..greeting }.encode()), None);
        assert_eq!(Greeting::decode(&Greeting { link: (1, 0), ..greeting }.encode()), None, "0 is no link");
        assert_eq!(GreetingAnswer::decode(&GreetingAnswer { versions: (3, 2), ..answer }.encode()), None);
        for len in [MAX_NAME as u16 + 1, u16::MAX] {
            let mut long = answer.encode();
            long[14..16].copy_from_slice(&len.to_le_bytes());
            assert_eq!(GreetingAnswer::decode(&long), None, "a name of {len} bytes");
        }
        let mut unknown = greeting.encode();
        unknown[12] = 77;
        assert_eq!(Greeting::decode(&unknown).unwrap().provider, None);
        for filler in [0, 0xff, b'G'] {
            assert_eq!((Greeting::decode(&[filler; GREETING]), GreetingAnswer::decode(&[filler; ANSWER])), (None, None));
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let of_fixed_length = [
            OfiContent::SourceGone,
            OfiContent::Credit,
            OfiContent::Bye,
            OfiContent::Taken { number: 1 },
            OfiContent::Emptied { slot: 1 },
        ];
        for content in of_fixed_length {
            let mut bytes = encoded(&content);
            bytes.push(0);
            assert!(decode(&bytes).is_err(), "{content:?} with a byte too many");
        }
        for content in [OfiContent::Hello(HERE), OfiContent::Taken { number: 1 }] {
            let bytes = encoded(&content);
            assert!(decode(&bytes[..bytes.len() - 1]).is_err(), "{content:?} with a byte too few");
        }
        assert!(decode(&[18; 64]).is_err());
    }

    #[test]
    fn impossible_hellos_are_refused() {
        for hello in [
            OfiHello { versions: (3, 2), ..HERE },
            OfiHello { message: 8, ..HERE },
            OfiHello { credits: 0, ..HERE },
            OfiHello { link: 0, ..HERE },
        ] {
            assert!(decode(&encoded(&OfiContent::Hello(hello))).is_err(), "{hello:?}");
        }
        let mut foreign = encoded(&OfiContent::Hello(HERE));
        foreign[HEADER] ^= 1;
        assert!(decode(&foreign).is_err());
        // Bytes of a later version are ignored.
        let mut later = encoded(&OfiContent::Hello(HERE));
        later.extend_from_slice(b"more");
        assert_eq!(decode(&later).unwrap().1, OfiContent::Hello(HERE));
        assert!(OfiHello { versions: (1, 5), ..HERE }.suits((5, 7)));
        assert!(!OfiHello { versions: (1, 4), ..HERE }.suits((5, 7)));
    }

    #[test]
    fn keys_name_the_part_of_the_memory_that_is_accessed() {
        let [one, two] = [(1000, 10, 1), (5000, 20, 2)].map(|(address, len, key)| RemoteExtent { address, len, key });
        let mut keys = Vec::new();
        encode_keys(4, &[two], &mut keys);
        encode_keys(5, &[one, two], &mut keys);
        assert_eq!(decode_keys(&keys, 5, 0, 30), Some(vec![one, two]));
        let middle = vec![RemoteExtent { address: 1008, len: 2, key: 1 }, RemoteExtent { address: 5000, len: 3, key: 2 }];
        assert_eq!(decode_keys(&keys, 5, 8, 5), Some(middle));
        assert_eq!(decode_keys(&keys, 5, 10, 20), Some(vec![two]));
        assert_eq!(decode_keys(&keys, 5, 8, 23), None, "more than there is");
        assert_eq!(decode_keys(&keys, 6, 0, 1), None, "another endpoint");
        assert_eq!(decode_keys(&keys[..keys.len() - 1], 5, 0, 30), None, "cut off");
        assert_eq!(decode_keys(&keys, 5, u64::MAX, 1), None);
        let end = RemoteExtent { address: u64::MAX, len: u64::MAX, key: 0 };
        let mut lie = Vec::new();
        encode_keys(1, &[end, end], &mut lie);
        assert_eq!(decode_keys(&lie, 1, 5, 5), None, "an address beyond the last");
        let mut endless = Vec::new();
        encode_keys(1, &[], &mut endless);
        endless[8..].fill(0xff);
        assert_eq!((decode_keys(&endless, 1, 0, 1), decode_keys(&endless, 2, 0, 1)), (None, None));
    }
}
