//! The wire format: what engines send to each other, as bytes.
//!
//! A connection begins with a handshake, of pieces whose first sixteen bytes keep their layout in every version. Then come
//! frames: a prefix of three words, little endian (a checksum, two lengths), a [`Message`] in postcard's format, and the
//! message's body, if it has one. A [`Message::Data`] is followed by `len` bytes of payload outside the frame, so that they can
//! be read straight into their target. Checksums are CRC-32C: they detect corruption by a network or a memory, not forgery.

mod frame;
mod handshake;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::text::clipped;

pub(crate) use frame::{Frame, FrameError, put, take};
pub(crate) use handshake::{HandshakeMessage, Hello, ParsedHandshake, Refusal, encode_handshake, parse_handshake};
#[cfg(any(test, fuzzing))]
pub(crate) use {frame::PREFIX_LEN, handshake::PREAMBLE_LEN};

/// Versions of the protocol that this crate supports, lowest and highest.
pub(crate) const VERSIONS: (u16, u16) = (3, 3);
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

/// Which bytes a [`Message::Data`] brings. The number beside it is the operation's, chosen by the side that began it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// A call. The body is behind it, or follows as `Data` when it is shorter than `size`.
    Request {
        call: u64,
        /// The caller's number for name and type; zero: for this call only.
        procedure: u32,
        /// What the number stands for: with the first call on a connection that uses it.
        #[serde(borrow)]
        declaration: Option<Declare<'a>>,
        provider: u16,
        /// The time left until the caller's deadline, in microseconds.
        budget_us: u64,
        one_way: bool,
        leases: LeaseRange,
        size: u64,
    },
    Response {
        call: u64,
        /// The sender's number for the type of the result; zero: for this answer only.
        result: u32,
        /// The shape of that type, with the first answer on a connection that uses the number; else empty.
        #[serde(borrow)]
        shape: BorrowedBytes<'a>,
        leases: LeaseRange,
        size: u64,
    },
    Refuse {
        call: u64,
        status: Status,
    },
    /// The caller no longer takes an answer.
    Cancel {
        call: u64,
    },
    Pull(Range),
    Push(Range),
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
    Data {
        stream: Stream,
        id: u64,
        offset: u64,
        len: u32,
    },
    Ping,
    Pong,
    /// The engine is being finalized; nothing follows.
    Goodbye,
    /// The sender no longer holds the bulks that came with these leases.
    Release(LeaseRange),
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
}

/// A procedure and the shape of its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Declare<'a> {
    pub name: &'a str,
    #[serde(borrow)]
    pub shape: BorrowedBytes<'a>,
}

/// A range of exposed memory that a transfer concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
