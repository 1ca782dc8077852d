//! What engines say to each other, as bytes.
//!
//! A connection begins with a [`Greeting`] each way, whose first sixteen bytes keep their layout in every version. Then
//! come frames: a length of four bytes, little endian, and that many bytes of a [`Message`] in postcard's format with the
//! message's body, if it has one, behind it. A [`Message::Data`] is followed by `len` bytes of payload outside the frame,
//! so that they can be read straight to where they belong.

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Versions of the protocol that this crate speaks, lowest and highest.
pub(crate) const VERSIONS: (u16, u16) = (1, 1);
pub(crate) const MAGIC: [u8; 8] = *b"calomel\0";
/// Magic, lowest version, highest version, length of the hello.
pub(crate) const PREAMBLE_LEN: usize = 16;
/// Longest hello: eight addresses of 300 bytes and the numbers fit many times.
pub(crate) const MAX_HELLO: usize = 16 << 10;
/// Longest frame. Larger messages travel as [`Message::Data`], so this bounds what a peer can make us buffer.
pub(crate) const MAX_FRAME: usize = 1 << 20;
/// Longest name of a procedure, in bytes.
pub(crate) const MAX_NAME: usize = 1 << 10;
/// Most procedures that one connection can name.
pub(crate) const MAX_NAMES: usize = 1 << 16;

/// Bytes that serde passes on as one piece (a plain `&[u8]` would go byte by byte).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes<'a>(pub &'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Bytes<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes<'a>, D::Error> {
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
        deserializer.deserialize_bytes(Borrow).map(Bytes)
    }
}

/// Numbers of the leases that a message hands over: `count` of them from `first` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leases {
    pub first: u64,
    pub count: u32,
}

/// Which bytes a [`Message::Data`] brings. The number beside it is the operation's, given by whoever began it.
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
        /// The caller's number for the procedure, tied to `name` by the first call on a connection.
        procedure: u32,
        #[serde(borrow)]
        name: Option<&'a str>,
        provider: u16,
        /// Time that the caller still gives the call, in microseconds.
        budget_us: u64,
        one_way: bool,
        want_shape: bool,
        #[serde(borrow)]
        shape: Bytes<'a>,
        leases: Leases,
        size: u64,
    },
    Response {
        call: u64,
        #[serde(borrow)]
        shape: Bytes<'a>,
        leases: Leases,
        size: u64,
    },
    Refuse {
        call: u64,
        status: Status,
    },
    /// The caller takes no answer any more.
    Cancel {
        call: u64,
    },
    Pull(Range),
    Push(Range),
    /// The owner's last word on a transfer.
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
    /// Bulks that came with these leases are no longer held.
    Release(Leases),
    /// The owner took this memory back; copies of its content are stale.
    Revoked {
        token: [u8; 16],
    },
    /// To be shown when the receiver dials the sender again.
    Ticket {
        ticket: u64,
    },
    /// So many one-way calls have been handled.
    Handled {
        count: u32,
    },
    /// Asks the peer to finalize itself; answered like a request.
    Shutdown {
        call: u64,
    },
}

/// A range of exposed memory that a transfer concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Range {
    pub transfer: u64,
    /// The engine that exposed the memory: a successor at its address is another.
    pub owner: u64,
    pub token: [u8; 16],
    pub offset: u64,
    pub len: u64,
}

/// How the other side's part of an operation ended.
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
}

impl Status {
    /// Text from here on is cut off, so that a status always fits into a frame.
    pub(crate) fn clip(mut text: String) -> String {
        const LIMIT: usize = 4 << 10;
        if text.len() > LIMIT {
            text.truncate(text.floor_char_boundary(LIMIT));
            text.push('…');
        }
        text
    }
}

/// What an engine says of itself when a connection begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Random, new with each engine.
    pub incarnation: u64,
    /// Largest message taken, in bytes.
    pub max_message: u64,
    /// Where the engine listens, best first.
    pub addresses: Vec<crate::Address>,
    /// From an engine that dials one which it has met before: the ticket that it was given then.
    pub ticket: Option<u64>,
}

/// The start of a peer's bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    /// More bytes are needed.
    Incomplete,
    /// Not this protocol at all.
    Foreign,
    /// A version that is not spoken here: the peer's lowest and highest.
    Version(u16, u16),
    /// The hello, and how many bytes it took.
    Hello(Hello, usize),
}

/// A postcard flavor that appends to a vector.
struct Append<'a>(&'a mut Vec<u8>);

impl postcard::ser_flavors::Flavor for Append<'_> {
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
    postcard::serialize_with_flavor(value, Append(out))
}

/// Appends a frame of `message` and `body`.
pub(crate) fn put(out: &mut Vec<u8>, message: &Message<'_>, body: &[u8]) {
    let start = out.len();
    out.reserve(ROOM + body.len());
    out.extend_from_slice(&[0; 4]);
    if !put_short(out, message) {
        encode(message, out).expect("messages are made of integers, strings and bytes, which postcard always takes");
    }
    out.extend_from_slice(body);
    let len = u32::try_from(out.len() - start - 4).expect("what goes into a frame is bounded by the eager limit");
    out[start..start + 4].copy_from_slice(&len.to_le_bytes());
}

/// What most messages take, without their bodies.
const ROOM: usize = 64;

/// As `encode`, for the two messages that every call takes: postcard needs some 800 instructions for one of them, this a
/// tenth. False for the others.
fn put_short(out: &mut Vec<u8>, message: &Message<'_>) -> bool {
    match message {
        Message::Request { call, procedure, name: None, provider, budget_us, one_way, want_shape, shape, leases, size } => {
            let mut short = Short::new(0);
            [*call, u64::from(*procedure), 0, u64::from(*provider), *budget_us].into_iter().for_each(|n| short.number(n));
            [u64::from(*one_way), u64::from(*want_shape), shape.0.len() as u64].into_iter().for_each(|n| short.number(n));
            short.append_to(out);
            out.extend_from_slice(shape.0);
            let mut short = Short::new_without_tag();
            [leases.first, u64::from(leases.count), *size].into_iter().for_each(|n| short.number(n));
            short.append_to(out);
            true
        }
        Message::Response { call, shape, leases, size } => {
            let mut short = Short::new(1);
            [*call, shape.0.len() as u64].into_iter().for_each(|n| short.number(n));
            short.append_to(out);
            out.extend_from_slice(shape.0);
            let mut short = Short::new_without_tag();
            [leases.first, u64::from(leases.count), *size].into_iter().for_each(|n| short.number(n));
            short.append_to(out);
            true
        }
        _ => false,
    }
}

/// Numbers in postcard's format: seven bits a byte, the lowest first, the top bit saying that more follow.
struct Short {
    bytes: [u8; 96],
    len: usize,
}

impl Short {
    /// Begins with the number of a variant.
    fn new(tag: u8) -> Short {
        let mut short = Short::new_without_tag();
        short.number(u64::from(tag));
        short
    }

    fn new_without_tag() -> Short {
        Short { bytes: [0; 96], len: 0 }
    }

    /// A number takes ten bytes at most, and there are nine of them at most.
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes[self.len] = number as u8 | 0x80;
            self.len += 1;
            number >>= 7;
        }
        self.bytes[self.len] = number as u8;
        self.len += 1;
    }

    fn append_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes[..self.len]);
    }
}

/// The first frame of `bytes`.
#[derive(Debug)]
pub(crate) enum Frame<'a> {
    Incomplete,
    /// The message, its body, and how many bytes the frame took.
    Whole(Message<'a>, &'a [u8], usize),
}

/// Takes the first frame apart; an error says what is wrong with it. Nothing is allocated but the texts of a status, which
/// are no longer than the frame.
pub(crate) fn take(bytes: &[u8]) -> Result<Frame<'_>, String> {
    let Some((len, rest)) = bytes.split_first_chunk::<4>() else { return Ok(Frame::Incomplete) };
    let len = u32::from_le_bytes(*len) as usize;
    if len > MAX_FRAME {
        return Err(format!("a frame of {len} bytes exceeds the limit of {MAX_FRAME} bytes"));
    }
    let Some(frame) = rest.get(..len) else { return Ok(Frame::Incomplete) };
    match postcard::take_from_bytes(frame) {
        Ok((message, body)) => Ok(Frame::Whole(message, body, 4 + len)),
        Err(error) => Err(format!("a frame of {len} bytes that is no message: {error}")),
    }
}

/// The greeting of an engine that speaks `versions`.
pub(crate) fn greet(versions: (u16, u16), hello: &Hello) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&versions.0.to_le_bytes());
    out.extend_from_slice(&versions.1.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    encode(hello, &mut out).expect("a hello is made of integers and strings");
    let len = (out.len() - PREAMBLE_LEN) as u32;
    out[PREAMBLE_LEN - 4..PREAMBLE_LEN].copy_from_slice(&len.to_le_bytes());
    out
}

/// Reads a greeting from the first bytes of a connection.
pub(crate) fn greeting(bytes: &[u8]) -> Greeting {
    let known = bytes.len().min(MAGIC.len());
    if bytes[..known] != MAGIC[..known] {
        return Greeting::Foreign;
    }
    let Some(preamble) = bytes.first_chunk::<PREAMBLE_LEN>() else { return Greeting::Incomplete };
    let number = |at: usize| u16::from_le_bytes([preamble[at], preamble[at + 1]]);
    let (low, high) = (number(8), number(10));
    if low > VERSIONS.1 || high < VERSIONS.0 || low > high {
        return Greeting::Version(low, high);
    }
    let len = u32::from_le_bytes([preamble[12], preamble[13], preamble[14], preamble[15]]) as usize;
    if len > MAX_HELLO {
        return Greeting::Foreign;
    }
    let Some(hello) = bytes.get(PREAMBLE_LEN..PREAMBLE_LEN + len) else { return Greeting::Incomplete };
    match postcard::from_bytes::<Hello>(hello) {
        Ok(hello) => Greeting::Hello(hello, PREAMBLE_LEN + len),
        Err(error) => {
            tracing::debug!(target: "calomel::proto", %error, "a hello that can't be decoded");
            Greeting::Foreign
        }
    }
}
