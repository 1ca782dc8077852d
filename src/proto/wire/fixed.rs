//! The messages that each call, each transfer and each bulk needs, in layouts of their own: little endian, each field at a fixed place.
//! postcard would take some ten times the instructions. The first byte tells them from the other messages, which begin with
//! the number of their variant.

use super::{BorrowedBytes, LeaseRange, Message, PREFIX_LEN, Range, Stream, encode as encode_by_postcard};

const REQUEST: u8 = 0x80;
const RESPONSE: u8 = 0x81;
const PULL: u8 = 0x82;
const PUSH: u8 = 0x83;
const DATA: u8 = 0x84;
const RELEASE: u8 = 0x85;

/// Flags of a request.
const ONE_WAY: u8 = 1;
/// A declaration, or the shape of a result, is behind the fields.
const DECLARES: u8 = 2;
/// Leases that are released are behind the fields of a response.
const RELEASES: u8 = 4;

// The lengths, and four, are multiples of eight where that costs nothing: the checksum of whole words takes the least. Fields
// are read and written at constant places, which compiles to one instruction for each.
const REQUEST_LEN: usize = 44;
const RESPONSE_LEN: usize = 36;
const RANGE_LEN: usize = 52;
const DATA_LEN: usize = 24;
const RELEASE_LEN: usize = 16;
const RELEASED_LEN: usize = 12;

/// Bytes of a frame of `Release`.
pub(crate) const RELEASE_FRAME: usize = PREFIX_LEN + RELEASE_LEN;

/// Appends a message.
pub(super) fn encode(message: &Message<'_>, out: &mut Vec<u8>) {
    match message {
        Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size } => {
            let mut head = [0; REQUEST_LEN];
            let flags = if *one_way { ONE_WAY } else { 0 } | if declaration.is_some() { DECLARES } else { 0 };
            // At once, since the checksum reads it so, and next.
            let first = u64::from(REQUEST) | u64::from(flags) << 8 | u64::from(*provider) << 16 | u64::from(*procedure) << 32;
            head[..8].copy_from_slice(&first.to_le_bytes());
            head[8..16].copy_from_slice(&call.to_le_bytes());
            head[16..24].copy_from_slice(&budget_us.to_le_bytes());
            head[24..32].copy_from_slice(&size.to_le_bytes());
            head[32..40].copy_from_slice(&leases.first.to_le_bytes());
            head[40..44].copy_from_slice(&leases.count.to_le_bytes());
            out.extend_from_slice(&head);
            if let Some(declaration) = declaration {
                by_postcard(declaration, out);
            }
        }
        Message::Response { call, result, shape, leases, released, size } => {
            let (declares, releases) = (!shape.0.is_empty(), released.count > 0);
            let mut head = [0; RESPONSE_LEN];
            let flags = if declares { DECLARES } else { 0 } | if releases { RELEASES } else { 0 };
            head[..8].copy_from_slice(&(u64::from(RESPONSE) | u64::from(flags) << 8 | u64::from(*result) << 32).to_le_bytes());
            head[8..16].copy_from_slice(&call.to_le_bytes());
            head[16..24].copy_from_slice(&size.to_le_bytes());
            head[24..32].copy_from_slice(&leases.first.to_le_bytes());
            head[32..36].copy_from_slice(&leases.count.to_le_bytes());
            out.extend_from_slice(&head);
            if releases {
                let mut behind = [0; RELEASED_LEN];
                behind[..8].copy_from_slice(&released.first.to_le_bytes());
                behind[8..].copy_from_slice(&released.count.to_le_bytes());
                out.extend_from_slice(&behind);
            }
            if declares {
                by_postcard(shape, out);
            }
        }
        Message::Pull(range) => out.extend_from_slice(&encoded_range(PULL, range)),
        Message::Push(range) => out.extend_from_slice(&encoded_range(PUSH, range)),
        Message::Data { stream, id, offset, len } => {
            let mut head = [0; DATA_LEN];
            head[..8].copy_from_slice(&(u64::from(DATA) | (*stream as u64) << 8 | u64::from(*len) << 32).to_le_bytes());
            head[8..16].copy_from_slice(&id.to_le_bytes());
            head[16..24].copy_from_slice(&offset.to_le_bytes());
            out.extend_from_slice(&head);
        }
        Message::Release(LeaseRange { first, count }) => {
            let mut head = [0; RELEASE_LEN];
            head[0] = RELEASE;
            head[4..8].copy_from_slice(&count.to_le_bytes());
            head[8..16].copy_from_slice(&first.to_le_bytes());
            out.extend_from_slice(&head);
        }
        message => by_postcard(message, out),
    }
}

fn encoded_range(kind: u8, range: &Range) -> [u8; RANGE_LEN] {
    let mut head = [0; RANGE_LEN];
    head[0] = kind;
    head[4..12].copy_from_slice(&range.transfer.to_le_bytes());
    head[12..20].copy_from_slice(&range.owner.to_le_bytes());
    head[20..36].copy_from_slice(&range.token);
    head[36..44].copy_from_slice(&range.offset.to_le_bytes());
    head[44..52].copy_from_slice(&range.len.to_le_bytes());
    head
}

fn by_postcard<T: serde::Serialize>(value: &T, out: &mut Vec<u8>) {
    encode_by_postcard(value, out).expect("messages are made of integers, strings and bytes, which postcard always takes");
}

/// Decodes a message, and returns what is behind it. The message is written to its place field by field: moved in a `Result`, it would
/// be copied in pieces that differ from those that were stored, and processors wait for such stores before they load.
pub(super) fn take<'a>(bytes: &'a [u8], message: &mut Message<'a>) -> postcard::Result<&'a [u8]> {
    match bytes.first() {
        Some(&REQUEST) => {
            let (head, left) = split::<REQUEST_LEN>(bytes)?;
            let (flags, provider) = (head[1], u16::from_le_bytes([head[2], head[3]]));
            let (procedure, call, budget_us, size) = (word(head, 4), number(head, 8), number(head, 16), number(head, 24));
            let leases = LeaseRange { first: number(head, 32), count: word(head, 40) };
            let one_way = flags & ONE_WAY != 0;
            let (declaration, left) = match flags & !ONE_WAY {
                0 => (None, left),
                DECLARES => postcard::take_from_bytes(left).map(|(declaration, left)| (Some(declaration), left))?,
                _ => return Err(postcard::Error::DeserializeBadEncoding),
            };
            *message = Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size };
            Ok(left)
        }
        Some(&RESPONSE) => {
            let (head, left) = split::<RESPONSE_LEN>(bytes)?;
            let (result, call, size) = (word(head, 4), number(head, 8), number(head, 16));
            let leases = LeaseRange { first: number(head, 24), count: word(head, 32) };
            let (declares, releases) = (head[1] & DECLARES != 0, head[1] & RELEASES != 0);
            let (released, left) = if releases {
                let (behind, left) = split::<RELEASED_LEN>(left)?;
                (LeaseRange { first: number(behind, 0), count: word(behind, 8) }, left)
            } else {
                (LeaseRange::default(), left)
            };
            let (shape, left) = if declares { postcard::take_from_bytes(left)? } else { (BorrowedBytes(&[]), left) };
            let unknown = head[1] & !(DECLARES | RELEASES) | head[2] | head[3];
            if unknown != 0 || declares == shape.0.is_empty() || releases == (released.count == 0) {
                return Err(postcard::Error::DeserializeBadEncoding);
            }
            *message = Message::Response { call, result, shape, leases, released, size };
            Ok(left)
        }
        Some(&kind @ (PULL | PUSH)) => {
            let (head, left) = split::<RANGE_LEN>(bytes)?;
            if head[1..4] != [0; 3] {
                return Err(postcard::Error::DeserializeBadEncoding);
            }
            let mut token = [0; 16];
            token.copy_from_slice(&head[20..36]);
            let (transfer, owner, offset, len) = (number(head, 4), number(head, 12), number(head, 36), number(head, 44));
            let range = Range { transfer, owner, token, offset, len };
            *message = if kind == PULL { Message::Pull(range) } else { Message::Push(range) };
            Ok(left)
        }
        Some(&DATA) => {
            let (head, left) = split::<DATA_LEN>(bytes)?;
            let stream = match [head[1], head[2], head[3]] {
                [0, 0, 0] => Stream::Pull,
                [1, 0, 0] => Stream::Push,
                [2, 0, 0] => Stream::Request,
                [3, 0, 0] => Stream::Response,
                _ => return Err(postcard::Error::DeserializeBadEncoding),
            };
            *message = Message::Data { stream, len: word(head, 4), id: number(head, 8), offset: number(head, 16) };
            Ok(left)
        }
        Some(&RELEASE) => {
            let (head, left) = split::<RELEASE_LEN>(bytes)?;
            if head[1..4] != [0; 3] {
                return Err(postcard::Error::DeserializeBadEncoding);
            }
            *message = Message::Release(LeaseRange { first: number(head, 8), count: word(head, 4) });
            Ok(left)
        }
        _ => take_other(bytes, message),
    }
}

#[inline(never)]
fn take_other<'a>(bytes: &'a [u8], message: &mut Message<'a>) -> postcard::Result<&'a [u8]> {
    let left;
    (*message, left) = postcard::take_from_bytes(bytes)?;
    Ok(left)
}

#[inline]
fn split<const LEN: usize>(bytes: &[u8]) -> postcard::Result<(&[u8; LEN], &[u8])> {
    bytes.split_first_chunk().ok_or(postcard::Error::DeserializeUnexpectedEnd)
}

#[inline]
fn word<const LEN: usize>(head: &[u8; LEN], at: usize) -> u32 {
    u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
}

#[inline]
fn number<const LEN: usize>(head: &[u8; LEN], at: usize) -> u64 {
    u64::from(word(head, at)) | u64::from(word(head, at + 4)) << 32
}
