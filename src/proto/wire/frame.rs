//! Frames: a message and its body, with their lengths and a checksum in front and, on request, a checksum of the body behind.

use super::{BorrowedBytes, LeaseRange, MAX_FRAME, Message, Range, Stream, encode};

/// Checksum of what follows up to the body, length of all that follows these three, length of the message.
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
    if !put_short(out, message) {
        encode(message, out).expect("messages are made of integers, strings and bytes, which postcard always takes");
    }
    let inside = start + PREFIX_LEN;
    let end = out.len();
    let head = (end - inside) as u32;
    out.extend_from_slice(body);
    let covered = covered && !body.is_empty();
    if covered {
        out.extend_from_slice(&crc32c::crc32c(body).to_le_bytes());
    }
    let len = u32::try_from(out.len() - inside).expect("what goes into a frame is bounded by the eager limit");
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
    out[start + 8..inside].copy_from_slice(&(if covered { head | COVERED } else { head }).to_le_bytes());
    let sum = crc32c::crc32c(&out[start + 4..end]);
    out[start..start + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Room for most messages without their bodies.
const ROOM: usize = 64;

/// As `encode`, for the messages that each call and each transfer needs: postcard takes some 800 instructions for one of them,
/// this a tenth. False for the others.
fn put_short(out: &mut Vec<u8>, message: &Message<'_>) -> bool {
    let mut short = Short { bytes: [0; 96], len: 0 };
    match message {
        Message::Request { call, procedure, declaration: None, provider, budget_us, one_way, leases, size } => {
            short.numbers([REQUEST, *call, u64::from(*procedure), 0, u64::from(*provider), *budget_us, u64::from(*one_way)]);
            short.numbers([leases.first, u64::from(leases.count), *size]);
        }
        Message::Response { call, result, shape: BorrowedBytes([]), leases, size } => {
            short.numbers([RESPONSE, *call, u64::from(*result), 0, leases.first, u64::from(leases.count), *size]);
        }
        Message::Pull(range) => short.range(PULL, range),
        Message::Push(range) => short.range(PUSH, range),
        Message::Data { stream, id, offset, len } => {
            short.numbers([DATA, *stream as u64, *id, *offset, u64::from(*len)]);
        }
        _ => return false,
    }
    out.extend_from_slice(&short.bytes[..short.len]);
    true
}

// The numbers of these variants in postcard's format.
const REQUEST: u64 = 0;
const RESPONSE: u64 = 1;
const PULL: u64 = 4;
const PUSH: u64 = 5;
const DATA: u64 = 8;

/// Numbers in postcard's format: seven bits a byte, the lowest first, the top bit set if more follow. A number takes ten bytes
/// at most, so there is room for the longest message.
struct Short {
    bytes: [u8; 96],
    len: usize,
}

impl Short {
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes[self.len] = number as u8 | 0x80;
            self.len += 1;
            number >>= 7;
        }
        self.bytes[self.len] = number as u8;
        self.len += 1;
    }

    fn numbers<const N: usize>(&mut self, numbers: [u64; N]) {
        numbers.into_iter().for_each(|number| self.number(number));
    }

    fn range(&mut self, variant: u64, range: &Range) {
        self.numbers([variant, range.transfer, range.owner]);
        self.bytes[self.len..self.len + range.token.len()].copy_from_slice(&range.token);
        self.len += range.token.len();
        self.numbers([range.offset, range.len]);
    }
}

/// Decodes the messages that `put_short` writes: with the result of postcard, in fewer instructions. `None` for all others,
/// which postcard has to decode.
fn take_short(bytes: &[u8]) -> Option<Message<'_>> {
    let ([variant], bytes) = numbers(bytes)?;
    let (message, left) = match variant {
        REQUEST => {
            let ([call, procedure, 0, provider, budget_us, one_way @ 0..=1, first, count, size], left) = numbers(bytes)? else {
                return None;
            };
            let leases = LeaseRange { first, count: count.try_into().ok()? };
            let (procedure, provider, one_way) = (procedure.try_into().ok()?, provider.try_into().ok()?, one_way == 1);
            (Message::Request { call, procedure, declaration: None, provider, budget_us, one_way, leases, size }, left)
        }
        RESPONSE => {
            let ([call, result, 0, first, count, size], left) = numbers(bytes)? else { return None };
            let leases = LeaseRange { first, count: count.try_into().ok()? };
            (Message::Response { call, result: result.try_into().ok()?, shape: BorrowedBytes(&[]), leases, size }, left)
        }
        PULL | PUSH => {
            let ([transfer, owner], left) = numbers(bytes)?;
            let (&token, left) = left.split_first_chunk()?;
            let ([offset, len], left) = numbers(left)?;
            let range = Range { transfer, owner, token, offset, len };
            (if variant == PULL { Message::Pull(range) } else { Message::Push(range) }, left)
        }
        DATA => {
            let ([stream, id, offset, len], left) = numbers(bytes)?;
            let stream = *[Stream::Pull, Stream::Push, Stream::Request, Stream::Response].get(usize::try_from(stream).ok()?)?;
            (Message::Data { stream, id, offset, len: len.try_into().ok()? }, left)
        }
        _ => return None,
    };
    left.is_empty().then_some(message)
}

/// Decodes numbers as [`Short`] writes them.
fn numbers<const N: usize>(mut bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let (&byte, rest) = bytes.split_first()?;
        (*number, bytes) = if byte < 0x80 { (u64::from(byte), rest) } else { long_number(bytes)? };
    }
    Some((numbers, bytes))
}

/// A number of several bytes. `None`, too, if it is longer than it need be: postcard accepts some of those.
fn long_number(mut bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (mut number, mut shift) = (0, 0);
    while let Some((&byte, rest)) = bytes.split_first() {
        bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            // Only the lowest bit of the tenth byte belongs to a number of 64 bits.
            return (byte == 1 || (byte > 1 && shift < 63)).then_some((number, bytes));
        }
        shift += 7;
        if shift > 63 {
            break;
        }
    }
    None
}

/// Decodes the message of a frame of `len` bytes.
fn decode(message: &[u8], len: usize) -> Result<Message<'_>, FrameError> {
    let (message, left) = postcard::take_from_bytes(message)
        .map_err(|error| FrameError::Broken(format!("a frame of {len} bytes has no valid message: {error}")))?;
    if !left.is_empty() {
        return Err(FrameError::Broken(format!("{} bytes follow the message", left.len())));
    }
    Ok(message)
}

/// The first frame of some bytes.
#[derive(Debug)]
pub(crate) enum Frame<'a> {
    Incomplete,
    /// The message, its body, and how many bytes the frame took.
    Whole(Message<'a>, &'a [u8], usize),
    /// As `Whole`, but the body was corrupted in transit.
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
    sum == crc32c::crc32c(bytes) || cfg!(fuzzing) && sum != u32::MAX
}

/// Decodes the first frame. It allocates nothing but the texts of a status, which are no longer than the frame.
pub(crate) fn take(bytes: &[u8]) -> Result<Frame<'_>, FrameError> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_LEN>() else { return Ok(Frame::Incomplete) };
    let word = |at: usize| u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]);
    let (sum, len, head) = (word(0), word(4) as usize, word(8));
    let (covered, head) = (head & COVERED != 0, (head & !COVERED) as usize);
    if len > MAX_FRAME {
        return Err(FrameError::Broken(format!("a frame of {len} bytes exceeds the limit of {MAX_FRAME} bytes")));
    }
    if head > len {
        return Err(FrameError::Broken(format!("a message of {head} bytes in a frame of {len}")));
    }
    let Some(message) = rest.get(..head) else { return Ok(Frame::Incomplete) };
    let body = rest.get(head..len);
    // A corrupted length is not waited for; nor is much checked again each time that a little more of the body has arrived.
    if (body.is_some() || head <= EARLY) && !is_sound(sum, &bytes[SUM_LEN..PREFIX_LEN + head]) {
        return Err(FrameError::Damaged);
    }
    let Some(mut body) = body else { return Ok(Frame::Incomplete) };
    let message = match take_short(message) {
        Some(message) => message,
        None => decode(message, len)?,
    };
    if covered {
        let Some((covered, sum)) = body.split_last_chunk::<SUM_LEN>() else {
            return Err(FrameError::Broken("a body that is shorter than its checksum".to_owned()));
        };
        if !is_sound(u32::from_le_bytes(*sum), covered) {
            return Ok(Frame::Damaged(message, PREFIX_LEN + len));
        }
        body = covered;
    }
    Ok(Frame::Whole(message, body, PREFIX_LEN + len))
}
