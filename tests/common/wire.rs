//! calomel's messages, encoded by hand: for tests in which a peer is not an engine.

use serde::{Deserialize, Serialize};

pub const MAGIC: &[u8; 8] = b"calomel\0";
/// The version of the protocol.
pub const VERSION: u16 = 6;
/// The encoded shape of a type about which nothing is known.
pub const ANYTHING: u8 = 32;
/// Kinds of handshake messages.
pub const HELLO: u8 = 0;
pub const CHALLENGE: u8 = 1;
pub const PROOF: u8 = 2;
pub const REFUSAL: u8 = 3;
/// Length of a frame's prefix: checksum, length of the frame, length of the message.
pub const PREFIX_LEN: usize = 12;
/// Length of the prefix of a handshake message: magic, versions, length, checksum, kind.
pub const PIECE_LEN: usize = 21;

/// The fixed part of a handshake message: magic, lowest and highest version, length of the rest.
pub fn preamble(low: u16, high: u16, len: u32) -> Vec<u8> {
    [&MAGIC[..], &low.to_le_bytes(), &high.to_le_bytes(), &len.to_le_bytes()].concat()
}

/// A handshake message.
pub fn piece(kind: u8, rest: &[u8]) -> Vec<u8> {
    let preamble = preamble(VERSION, VERSION, 5 + rest.len() as u32);
    let sum = crc32c::crc32c(&[&preamble[..], &[kind], rest].concat());
    [&preamble[..], &sum.to_le_bytes(), &[kind], rest].concat()
}

/// The hello of an engine that accepts messages up to this size, does not listen, and has no resumption token.
pub fn greeting(incarnation: u64, max_message: u64) -> Vec<u8> {
    let hello = (incarnation, max_message, Vec::<String>::new(), None::<u128>, false);
    piece(HELLO, &postcard::to_stdvec(&hello).unwrap())
}

/// A frame of an encoded message and its body.
pub fn frame(message: &[u8], body: &[u8]) -> Vec<u8> {
    let lengths = [((message.len() + body.len()) as u32).to_le_bytes(), (message.len() as u32).to_le_bytes()].concat();
    let sum = crc32c::crc32c(&[&lengths, message].concat());
    [&sum.to_le_bytes()[..], &lengths, message, body].concat()
}

/// A message of an open link. Its body follows it in the frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    Refuse {
        call: u64,
        status: Status,
    },
    Cancel {
        call: u64,
    },
    Done {
        transfer: u64,
        status: Status,
    },
    Abort {
        transfer: u64,
        push: bool,
    },
    Ping,
    Pong,
    Goodbye,
    Revoked {
        token: [u8; 16],
    },
    Ticket {
        ticket: u128,
    },
    Handled {
        count: u32,
        calls: u32,
        bytes: u32,
    },
    Shutdown {
        call: u64,
    },
    Echo {
        call: u64,
    },
    Identify {
        call: u64,
        provider: u16,
    },
    TraceContext {
        trace_id: [u8; 16],
        parent_id: [u8; 8],
        flags: u8,
        state: String,
    },
    Idle {
        received: u64,
        exposes: bool,
    },
    IdleAgreed,
    InUse,
    List {
        call: u64,
        is_answer: bool,
        head: u64,
        width: u8,
    },
    // These have layouts of their own.
    #[serde(skip)]
    Request {
        call: u64,
        procedure: u32,
        declaration: Option<(String, Vec<u8>)>,
        provider: u16,
        budget_us: u64,
        one_way: bool,
        leases: (u64, u32),
        size: u64,
    },
    #[serde(skip)]
    Response {
        call: u64,
        result: u32,
        shape: Vec<u8>,
        leases: (u64, u32),
        released: (u64, u32),
        size: u64,
    },
    #[serde(skip)]
    Release {
        first: u64,
        count: u32,
    },
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

impl Message {
    /// A call whose arguments take `size` bytes, in the same frame or in chunks, with an unknown type.
    pub fn call(call: u64, name: &str, size: usize) -> Message {
        Message::Request {
            call,
            procedure: 0,
            declaration: Some((name.to_owned(), vec![ANYTHING])),
            provider: 0,
            budget_us: 10_000_000,
            one_way: false,
            leases: (0, 0),
            size: size as u64,
        }
    }

    /// An answer whose result takes `size` bytes.
    pub fn answer(call: u64, size: usize) -> Message {
        Message::Response { call, result: 0, shape: vec![ANYTHING], leases: (0, 0), released: (0, 0), size: size as u64 }
    }

    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size } => {
                let flags = u8::from(*one_way) | u8::from(declaration.is_some()) << 1;
                let mut bytes = [&[0x80, flags][..], &provider.to_le_bytes(), &procedure.to_le_bytes()].concat();
                bytes.extend([*call, *budget_us, *size, leases.0].map(u64::to_le_bytes).concat());
                bytes.extend(leases.1.to_le_bytes());
                bytes.extend(declaration.iter().flat_map(|declaration| postcard::to_stdvec(declaration).unwrap()));
                bytes
            }
            Message::Response { call, result, shape, leases, released, size } => {
                let flags = u8::from(!shape.is_empty()) << 1 | u8::from(released.1 > 0) << 2;
                let mut bytes = [&[0x81, flags, 0, 0][..], &result.to_le_bytes()].concat();
                bytes.extend([*call, *size, leases.0].map(u64::to_le_bytes).concat());
                bytes.extend(leases.1.to_le_bytes());
                if released.1 > 0 {
                    bytes.extend([&released.0.to_le_bytes()[..], &released.1.to_le_bytes()].concat());
                }
                if !shape.is_empty() {
                    bytes.extend(postcard::to_stdvec(shape).unwrap());
                }
                bytes
            }
            Message::Release { first, count } => [&[0x85, 0, 0, 0][..], &count.to_le_bytes(), &first.to_le_bytes()].concat(),
            Message::Pull(range) => range.bytes(0x82),
            Message::Push(range) => range.bytes(0x83),
            Message::Data { stream, id, offset, len } => {
                [&[0x84, *stream as u8, 0, 0][..], &len.to_le_bytes(), &id.to_le_bytes(), &offset.to_le_bytes()].concat()
            }
            other => postcard::to_stdvec(other).unwrap(),
        }
    }

    /// The message at the beginning of a frame's content, and what is behind it.
    pub fn take(bytes: &[u8]) -> Option<(Message, &[u8])> {
        let number = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        let declares = bytes.get(1).is_some_and(|flags| flags & 2 != 0);
        Some(match bytes.first()? {
            0x80 => {
                let provider = u16::from_le_bytes(bytes.get(2..4)?.try_into().ok()?);
                let (call, budget_us, size, leases) = (number(8)?, number(16)?, number(24)?, (number(32)?, word(40)?));
                let (declaration, left) = behind(declares, bytes.get(44..)?)?;
                let (procedure, one_way) = (word(4)?, bytes[1] & 1 != 0);
                (Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size }, left)
            }
            0x81 => {
                let (call, size, leases) = (number(8)?, number(16)?, (number(24)?, word(32)?));
                let releases = bytes[1] & 4 != 0;
                let released = if releases { (number(36)?, word(44)?) } else { (0, 0) };
                let (shape, left) = behind(declares, bytes.get(if releases { 48 } else { 36 }..)?)?;
                let (result, shape) = (word(4)?, shape.unwrap_or_default());
                (Message::Response { call, result, shape, leases, released, size }, left)
            }
            0x82 | 0x83 => {
                let token = bytes.get(20..36)?.try_into().ok()?;
                let range = Range { transfer: number(4)?, owner: number(12)?, token, offset: number(36)?, len: number(44)? };
                (if bytes[0] == 0x82 { Message::Pull(range) } else { Message::Push(range) }, &bytes[52..])
            }
            0x84 => {
                let stream = [Stream::Pull, Stream::Push, Stream::Request, Stream::Response][usize::from(bytes[1])];
                (Message::Data { stream, len: word(4)?, id: number(8)?, offset: number(16)? }, &bytes[24..])
            }
            0x85 => (Message::Release { first: number(8)?, count: word(4)? }, bytes.get(16..)?),
            _ => postcard::take_from_bytes(bytes).ok()?,
        })
    }

    /// A frame with this message.
    pub fn frame(&self, body: &[u8]) -> Vec<u8> {
        frame(&self.bytes(), body)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Pull,
    Push,
    Request,
    Response,
}

/// A range of exposed memory that a transfer concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    pub transfer: u64,
    pub owner: u64,
    pub token: [u8; 16],
    pub offset: u64,
    pub len: u64,
}

impl Range {
    fn bytes(&self, kind: u8) -> Vec<u8> {
        let mut bytes = [&[kind, 0, 0, 0][..], &self.transfer.to_le_bytes(), &self.owner.to_le_bytes(), &self.token].concat();
        bytes.extend([self.offset, self.len].map(u64::to_le_bytes).concat());
        bytes
    }

    /// The whole range of a bulk, taken from the bulk's encoding.
    pub fn of(transfer: u64, bulk: &calomel::Bulk) -> Range {
        let bytes = postcard::to_stdvec(bulk).unwrap();
        let (bytes, _) = postcard::take_from_bytes::<&[u8]>(&bytes).unwrap();
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        Range { transfer, owner: number(32), token: bytes[..16].try_into().unwrap(), offset: number(16), len: number(24) }
    }
}

/// A bulk as it travels.
#[derive(Clone, Debug)]
pub struct Described {
    pub token: [u8; 16],
    pub offset: u64,
    pub len: u64,
    pub mode: calomel::BulkMode,
    pub segments: u32,
    pub owner: u64,
    pub addresses: Vec<String>,
    pub lease: Option<u32>,
    /// One of the two, at most.
    pub content: Option<Vec<u8>>,
    pub keys: Option<Vec<u8>>,
}

impl Described {
    /// Where the mode is in the bytes.
    pub const MODE_AT: usize = 48;

    /// Memory of one segment, with no lease, of an engine that does not listen.
    pub fn new(token: [u8; 16], len: u64, mode: calomel::BulkMode, owner: u64) -> Described {
        let (addresses, lease, content, keys) = (Vec::new(), None, None, None);
        Described { token, offset: 0, len, mode, segments: 1, owner, addresses, lease, content, keys }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = [&self.token[..], &[self.offset, self.len, self.owner].map(u64::to_le_bytes).concat()].concat();
        bytes.extend([self.segments, self.lease.unwrap_or(u32::MAX)].map(u32::to_le_bytes).concat());
        let (behind, rest) = match (&self.content, &self.keys) {
            (Some(content), _) => (1, &content[..]),
            (None, Some(keys)) => (2, &keys[..]),
            (None, None) => (0, &[][..]),
        };
        bytes.extend([self.mode as u8, behind, self.addresses.len().min(255) as u8]);
        for address in &self.addresses {
            if address.len() >= 128 {
                bytes.push(128 | (address.len() >> 8) as u8);
            }
            bytes.push(address.len() as u8);
            bytes.extend(address.as_bytes());
        }
        bytes.extend(rest);
        bytes
    }
}

impl Serialize for Described {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.bytes())
    }
}

/// What the flags say is behind the fields of a message.
fn behind<T: serde::de::DeserializeOwned>(declares: bool, bytes: &[u8]) -> Option<(Option<T>, &[u8])> {
    if !declares {
        return Some((None, bytes));
    }
    postcard::take_from_bytes(bytes).ok().map(|(value, left)| (Some(value), left))
}

/// How the other side's part of an operation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    Ok,
    NoSuchProcedure,
    NoSuchProvider,
    NoResponse,
    Panicked(String),
    Failed(String),
    Decode(String),
    TypeMismatch { expected: String, found: String },
    TooLarge { size: u64, limit: u64 },
    Busy(String),
    AccessDenied(String),
    Revoked,
    OutOfRange { offset: u64, len: u64, size: u64 },
    Restarted,
    Finalizing,
    Encode(String),
    Checksum,
}
