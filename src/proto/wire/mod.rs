//! The wire format: what engines send to each other, as bytes.
//!
//! A connection begins with a handshake, of pieces whose first sixteen bytes keep their layout in every version. Then come
//! frames: a prefix of three words, little endian (a checksum, two lengths), a [`Message`], the message's body, if it has one,
//! and, on request, a checksum of the body. Six messages have fixed layouts, the others postcard's format. A
//! [`Message::Data`] is followed by `len` bytes of payload outside the frame, so that they can be read straight into their
//! target. Checksums are CRC-32C: they detect corruption by a network or a memory, not forgery.

mod fixed;
mod handshake;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::text::clipped;
use crate::{checksum, copy};

pub(crate) use fixed::RELEASE_FRAME;
#[cfg(any(test, fuzzing))]
pub(crate) use handshake::PREAMBLE_LEN;
pub(crate) use handshake::{HandshakeMessage, Hello, ParsedHandshake, Refusal, encode_handshake, parse_handshake};

/// Versions of the protocol that this crate supports, lowest and highest.
pub(crate) const VERSIONS: (u16, u16) = (6, 6);
pub(crate) const MAGIC: [u8; 8] = *b"calomel\0";
/// Longest hello: far more than sixteen addresses and the numbers usually take.
pub(crate) const MAX_HELLO: usize = 16 << 10;
/// Longest frame. Larger messages travel as [`Message::Data`], so this bounds what a peer can make this engine buffer.
pub(crate) const MAX_FRAME: usize = 1 << 20;
/// Longest name of a procedure, in bytes.
pub(crate) const MAX_NAME: usize = 1 << 10;

/// Bytes that serde passes on as one piece (a plain `&[u8]` would go byte by byte).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BorrowedBytes<'a>(pub &'a [u8]);

impl Serialize for BorrowedBytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for BorrowedBytes<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<BorrowedBytes<'a>, D::Error> {
        struct Borrow;
        impl<'de> Visitor<'de> for Borrow {
            type Value = &'de [u8];
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_borrowed_bytes<E: serde::de::Error>(self, v: &'de [u8]) -> Result<&'de [u8], E> {
                Ok(v)
            }
        }
        deserializer.deserialize_bytes(Borrow).map(BorrowedBytes)
    }
}

/// Numbers of the leases that a message hands over: `count` of them from `first` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseRange {
    pub first: u64,
    pub count: u32,
}

impl LeaseRange {
    /// Both ranges as one, where they are adjacent or one is empty.
    pub(crate) fn joined(self, other: LeaseRange) -> Option<LeaseRange> {
        let (low, high) = if self.first <= other.first { (self, other) } else { (other, self) };
        if low.count == 0 || high.count == 0 {
            return Some(if low.count == 0 { high } else { low });
        }
        let adjacent = low.first.checked_add(u64::from(low.count)) == Some(high.first);
        let count = low.count.checked_add(high.count).filter(|_| adjacent)?;
        Some(LeaseRange { first: low.first, count })
    }
}

/// Which bytes a [`Message::Data`] brings. The number beside it is the operation's, chosen by the side that began it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stream {
    /// What the receiver asked for with `Pull`.
    Pull,
    /// What the sender announced with `Push`.
    Push,
    /// The body of the sender's `Request`.
    Request,
    /// The body of the sender's `Response`.
    Response,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message<'a> {
    Refuse {
        call: u64,
        status: Status,
    },
    /// The caller no longer takes an answer.
    Cancel {
        call: u64,
    },
    /// The owner has completed or refused a transfer.
    Done {
        transfer: u64,
        status: Status,
    },
    /// The initiator has given a transfer up.
    Abort {
        transfer: u64,
        push: bool,
    },
    Ping,
    Pong,
    /// The engine is being finalized; nothing follows.
    Goodbye,
    /// The owner has revoked this memory; copies of its content are stale.
    Revoked {
        token: [u8; 16],
    },
    /// The token to show when the receiver dials the sender again.
    ResumptionToken {
        token: u128,
    },
    /// So many one-way calls have been handled; the receiver gets credit for so many calls, of so many bytes.
    Handled {
        count: u32,
        calls: u32,
        bytes: u32,
    },
    /// Asks the peer to finalize itself; answered like a request.
    Shutdown {
        call: u64,
    },
    /// Answered like a request, by the protocol itself.
    Echo {
        call: u64,
    },
    /// Asks what a provider of the peer is. The body of the answer is a text.
    Identify {
        call: u64,
        provider: u16,
    },
    /// The trace that the next `Request` belongs to, and the span that made it. A message of its own, so that a request without
    /// a trace is no longer for that.
    TraceContext {
        trace_id: [u8; 16],
        parent_id: [u8; 8],
        flags: u8,
        /// Up to 512 printable characters of ASCII.
        state: &'a str,
    },
    /// From the side that dialled the link: it is unused, and could be closed. The sender has received so many bytes on it.
    Idle {
        received: u64,
        /// The sender exposes memory, which the receiver may want to reach later.
        exposes: bool,
    },
    /// The sender of `Idle` may close the link, if it has sent nothing since.
    IdleAgreed,
    /// An answer to `Idle`, or to `IdleAgreed`: the link is not to be closed.
    InUse,
    /// The body of the `Request` of this number, or of the `Response`, which is behind this, ends with a list. A message of its own, since
    /// few have one.
    List {
        call: u64,
        is_answer: bool,
        /// As in [`TrailingList`](crate::payload::TrailingList).
        head: u64,
        width: u8,
    },
    // These have layouts of their own: see `fixed`. They come last, since serde does not count them when it reads.
    /// A call. The body is behind it, or follows as `Data` when it is shorter than `size`.
    #[serde(skip)]
    Request {
        call: u64,
        /// The caller's number for name and type; zero: for this call only.
        procedure: u32,
        /// What the number stands for: with the first call on a connection that uses it.
        declaration: Option<Declare<'a>>,
        provider: u16,
        /// The time left until the caller's deadline, in microseconds.
        budget_us: u64,
        one_way: bool,
        leases: LeaseRange,
        size: u64,
    },
    #[serde(skip)]
    Response {
        call: u64,
        /// The sender's number for the type of the result; zero: for this answer only.
        result: u32,
        /// The shape of that type, with the first answer on a connection that uses the number; else empty.
        shape: BorrowedBytes<'a>,
        leases: LeaseRange,
        /// As in `Release`.
        released: LeaseRange,
        size: u64,
    },
    /// The sender no longer holds the bulks that came with these leases.
    #[serde(skip)]
    Release(LeaseRange),
    #[serde(skip)]
    Pull(Range),
    #[serde(skip)]
    Push(Range),
    #[serde(skip)]
    Data {
        stream: Stream,
        id: u64,
        offset: u64,
        len: u32,
    },
}

/// A procedure and the shape of its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Declare<'a> {
    pub name: &'a str,
    #[serde(borrow)]
    pub shape: BorrowedBytes<'a>,
}

/// A range of exposed memory that a transfer concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub transfer: u64,
    /// The incarnation that exposed the memory; a restarted engine has another.
    pub owner: u64,
    pub token: [u8; 16],
    pub offset: u64,
    pub len: u64,
}

/// The result of the other side's part of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Status {
    Ok,
    NoSuchProcedure,
    NoSuchProvider,
    NoResponse,
    Panicked(String),
    Failed(String),
    Decode(String),
    TypeMismatch {
        expected: String,
        found: String,
    },
    TooLarge {
        size: u64,
        limit: u64,
    },
    Busy(String),
    AccessDenied(String),
    Revoked,
    OutOfRange {
        offset: u64,
        len: u64,
        size: u64,
    },
    Restarted,
    Finalizing,
    /// The result could not be encoded.
    Encode(String),
    /// The data was corrupted in transit.
    Checksum,
}

impl Status {
    /// Cuts a long text off, so that a status always fits into a frame.
    pub(crate) fn clip(mut text: String) -> String {
        const LIMIT: usize = 4 << 10;
        if text.len() > LIMIT {
            text.truncate(clipped(&text, LIMIT).len());
            text.push('…');
        }
        text
    }
}

/// A postcard flavor that appends to a vector.
struct AppendFlavor<'a>(&'a mut Vec<u8>);

impl postcard::ser_flavors::Flavor for AppendFlavor<'_> {
    type Output = ();
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// Appends a value in postcard's format.
pub(crate) fn encode<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) -> postcard::Result<()> {
    postcard::serialize_with_flavor(value, AppendFlavor(out))
}

/// The prefix of a frame: checksum of what follows up to the body, length of all that follows the prefix, that of the message.
pub(crate) const PREFIX_LEN: usize = 12;
/// A bit beside the length of the message: a checksum of the body follows it.
const COVERED: u32 = 1 << 31;
const SUM_LEN: usize = 4;
/// Messages up to this length, as nearly all are, are checked before their bodies have arrived.
const EARLY: usize = 4 << 10;

/// Appends a frame of `message` and `body`, with a checksum of the body if `covered`.
pub(crate) fn put(out: &mut Vec<u8>, message: &Message<'_>, body: &[u8], covered: bool) {
    let start = out.len();
    out.reserve(ROOM + body.len());
    out.extend_from_slice(&[0; PREFIX_LEN]);
    fixed::encode(message, out);
    let inside = start + PREFIX_LEN;
    let end = out.len();
    let head = (end - inside) as u32;
    copy::append(body, out);
    let covered = covered && !body.is_empty();
    if covered {
        out.extend_from_slice(&checksum::crc32c(body).to_le_bytes());
    }
    let len = u32::try_from(out.len() - inside).expect("what goes into a frame is bounded by the eager limit");
    let head = if covered { head | COVERED } else { head };
    out[start + 4..inside].copy_from_slice(&(u64::from(head) << 32 | u64::from(len)).to_le_bytes());
    let sum = checksum::crc32c(&out[start + 4..end]);
    out[start..start + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Room for most messages without their bodies.
const ROOM: usize = 64;

/// The first frame of some bytes.
#[cfg(any(test, fuzzing))]
#[derive(Debug)]
pub(crate) enum Frame<'a> {
    Incomplete,
    /// The message, its body, and how many bytes the frame took.
    Whole(Message<'a>, &'a [u8], usize),
    /// As `Whole`, but the body was corrupted in transit.
    #[cfg_attr(fuzzing, allow(dead_code, reason = "fuzz targets read whole frames only"))]
    Damaged(Message<'a>, usize),
}

/// What is wrong with a frame, so that nothing behind it can be read either.
#[derive(Debug)]
pub(crate) enum FrameError {
    /// It violates the protocol.
    Broken(String),
    /// It was corrupted in transit.
    Damaged,
}

/// Whether a checksum is right. A fuzzer would hardly ever guess one: for it a single value is wrong.
fn is_sound(sum: u32, bytes: &[u8]) -> bool {
    sum == checksum::crc32c(bytes) || cfg!(fuzzing) && sum != u32::MAX
}

/// As [`take_into`], in one value.
#[cfg(any(test, fuzzing))]
pub(crate) fn take(bytes: &[u8]) -> Result<Frame<'_>, FrameError> {
    let mut message = Message::Ping;
    Ok(match take_into(bytes, &mut message)? {
        None => Frame::Incomplete,
        Some((Some(body), len)) => Frame::Whole(message, body, len),
        Some((None, len)) => Frame::Damaged(message, len),
    })
}

/// Decodes the first frame, whose message is written to its place. `None` for an incomplete frame; else the body, unless it was
/// corrupted in transit, and how many bytes the frame took. It allocates nothing but the texts of a status, which are no longer than
/// the frame.
#[expect(clippy::type_complexity, reason = "a type of its own would say no more")]
pub(crate) fn take_into<'a>(bytes: &'a [u8], message: &mut Message<'a>) -> Result<Option<(Option<&'a [u8]>, usize)>, FrameError> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_LEN>() else { return Ok(None) };
    let word = |at: usize| u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]);
    let (sum, len, head) = (word(0), word(4) as usize, word(8));
    let (covered, head) = (head & COVERED != 0, (head & !COVERED) as usize);
    if len > MAX_FRAME {
        return Err(FrameError::Broken(format!("a frame of {len} bytes exceeds the limit of {MAX_FRAME} bytes")));
    }
    if head > len {
        return Err(FrameError::Broken(format!("a message of {head} bytes in a frame of {len}")));
    }
    let Some(encoded) = rest.get(..head) else { return Ok(None) };
    let body = rest.get(head..len);
    // A corrupted length is not waited for; nor is much checked again each time that a little more of the body has arrived.
    if (body.is_some() || head <= EARLY) && !is_sound(sum, &bytes[SUM_LEN..PREFIX_LEN + head]) {
        return Err(FrameError::Damaged);
    }
    let Some(body) = body else { return Ok(None) };
    let left = fixed::take(encoded, message)
        .map_err(|error| FrameError::Broken(format!("a frame of {len} bytes has no valid message: {error}")))?;
    if !left.is_empty() {
        return Err(FrameError::Broken(format!("{} bytes follow the message", left.len())));
    }
    if !covered {
        return Ok(Some((Some(body), PREFIX_LEN + len)));
    }
    let Some((covered, sum)) = body.split_last_chunk::<SUM_LEN>() else {
        return Err(FrameError::Broken("a body that is shorter than its checksum".to_owned()));
    };
    Ok(Some((is_sound(u32::from_le_bytes(*sum), covered).then_some(covered), PREFIX_LEN + len)))
}
