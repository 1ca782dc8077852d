//! Numbers as postcard has them: seven bits to a byte, the lowest first, and in each byte a bit that says whether another follows.
//!
//! How many bytes a number takes can rarely be foreseen: of hashes, identifiers and samples it varies from one to the next. Code
//! that branches on it waits for wrong guesses of the processor, some 5 ns each. So elements of lists are encoded, and most numbers
//! decoded, a word at a time, and their length is computed. Branches ask only for what neighbours are likely to have in common: that
//! they take a byte, or two, or more than eight.

use postcard::{Error, Result};

/// Numbers that are encoded before their bytes are copied into the message.
const BLOCK: usize = 32;
/// Numbers that are encoded together, if all take two bytes or all take one; and those of one byte that are decoded together.
const FOUR: usize = 4;
const EIGHT: usize = 8;
/// Most bytes of a number.
pub(super) const LONGEST: usize = 10;
/// The bit of each byte that says whether another one follows.
const MORE: u64 = 0x8080_8080_8080_8080;
/// These bits of four numbers of two bytes each.
const PAIRS: u64 = 0x0080_0080_0080_0080;
/// Of a number below 2^14 in 16 bits, four of them in a word: its upper seven bits.
const UPPER: u64 = 0x3f80_3f80_3f80_3f80;
const LOWER: u64 = 0x007f_007f_007f_007f;
/// The bit behind these 14.
const BEYOND: u64 = 0x4000_4000_4000_4000;
/// What eight bytes of a number hold.
const WORD_BITS: u32 = 56;

/// Spreads 56 bits over eight bytes, seven to each.
#[inline]
fn spread(number: u64) -> u64 {
    let spread = (number & 0x0000_0000_0fff_ffff) | (number & 0x00ff_ffff_f000_0000) << 4;
    let spread = (spread & 0x0000_3fff_0000_3fff) | (spread & 0x0fff_c000_0fff_c000) << 2;
    (spread & LOWER) | (spread & UPPER) << 1
}

/// Gathers the lower seven bits of eight bytes.
#[inline]
fn gathered(word: u64) -> u64 {
    let gathered = (word & LOWER) | (word >> 1) & UPPER;
    let gathered = (gathered & 0x0000_3fff_0000_3fff) | (gathered >> 2) & 0x0fff_c000_0fff_c000;
    (gathered & 0x0000_0000_0fff_ffff) | (gathered >> 4) & 0x00ff_ffff_f000_0000
}

/// Puts numbers into a word, so many bits for each.
#[inline]
fn packed(numbers: [u64; FOUR], bits: u32) -> u64 {
    numbers[0] | numbers[1] << bits | numbers[2] << (2 * bits) | numbers[3] << (3 * bits)
}

pub(super) fn encode_numbers<T: Copy>(elements: &[T], to_wire: impl Fn(T) -> u64, out: &mut Vec<u8>) {
    out.reserve(elements.len());
    let mut bytes = [0; BLOCK * LONGEST];
    for block in elements.chunks(BLOCK) {
        let mut len = 0;
        let (fours, rest) = block.as_chunks::<FOUR>();
        for four in fours {
            // Neighbours are mostly alike: numbers that all take a byte, or all take two.
            let numbers = four.map(&to_wire);
            let all = numbers[0] | numbers[1] | numbers[2] | numbers[3];
            if all < 1 << 14 {
                let pairs = packed(numbers, 16);
                if (pairs + UPPER) & BEYOND == BEYOND {
                    let pairs = (pairs & LOWER) | PAIRS | (pairs & UPPER) << 1;
                    bytes[len..len + 2 * FOUR].copy_from_slice(&pairs.to_le_bytes());
                    len += 2 * FOUR;
                    continue;
                }
                if all < 1 << 7 {
                    bytes[len..len + FOUR].copy_from_slice(&(packed(numbers, 8) as u32).to_le_bytes());
                    len += FOUR;
                    continue;
                }
            }
            numbers.into_iter().for_each(|number| len += encode_in_place(number, &mut bytes[len..]));
        }
        rest.iter().for_each(|element| len += encode_in_place(to_wire(*element), &mut bytes[len..]));
        out.extend_from_slice(&bytes[..len]);
    }
}

/// Encodes a number at the front of this room, which has at least [`LONGEST`] bytes, of which any may be overwritten. Returns how many
/// bytes it takes.
#[inline]
pub(super) fn encode_in_place(number: u64, room: &mut [u8]) -> usize {
    let [low @ .., next, last] = room.first_chunk_mut::<LONGEST>().expect("there is room for any number");
    let (number, high) = (number & ((1 << WORD_BITS) - 1), number >> WORD_BITS);
    if high == 0 {
        let before_last = (u64::BITS - 1 - (number | 1).leading_zeros()) / 7;
        *low = (spread(number) | MORE & ((1 << (8 * before_last)) - 1)).to_le_bytes();
        before_last as usize + 1
    } else {
        // The number's bit 63 takes a tenth byte. As the upper bit of the ninth it also says that there is one.
        *low = (spread(number) | MORE).to_le_bytes();
        (*next, *last) = (high as u8, (high >> 7) as u8);
        9 + (high >> 7) as usize
    }
}

/// Encodes a number at the end of the bytes.
#[inline]
pub(super) fn encode_number(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// As `encode_number`.
pub(super) fn encode_u128(mut value: u128, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A number of at most `BITS` bits at the front of the bytes, as postcard decodes it. Lengths, and the numbers of variants, mostly take
/// a byte. It is inlined always, so that a caller can keep `rest` in registers, and is little code.
#[inline(always)]
pub(crate) fn decode_number<const BITS: u32>(rest: &mut &[u8]) -> Result<u64> {
    let (number, len) = match **rest {
        [byte @ ..0x80, ..] => (byte.into(), 1),
        _ => decode_longer::<BITS>(rest),
    };
    let Some(behind) = rest.get(len..) else {
        let (error, behind) = refusal::<BITS>(rest);
        *rest = behind;
        return Err(error);
    };
    *rest = behind;
    Ok(number)
}

/// More bytes than there are: there is no number.
const NONE: usize = usize::MAX;

/// A number, and how many bytes it takes, or [`NONE`].
#[inline(never)]
fn decode_longer<const BITS: u32>(bytes: &[u8]) -> (u64, usize) {
    if let [low @ 0x80..=0xff, high @ ..0x80, ..] = bytes {
        return (u64::from(low & 0x7f) | u64::from(*high) << 7, 2);
    }
    if let Some(bytes) = bytes.first_chunk() {
        return decode_word::<BITS>(bytes);
    }
    decode_bytes::<BITS>(bytes).unwrap_or_else(|_| no_number())
}

/// As `decode_longer`, also where the bytes end within the number.
fn decode_bytes<const BITS: u32>(bytes: &[u8]) -> Result<(u64, usize)> {
    let mut number = 0;
    for (len, shift) in (1..).zip((0..BITS).step_by(7)) {
        let byte = *bytes.get(len - 1).ok_or(Error::DeserializeUnexpectedEnd)?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            let fits = shift + 7 <= BITS || u32::from(byte) >> (BITS - shift) == 0;
            return if fits { Ok((number, len)) } else { Err(Error::DeserializeBadVarint) };
        }
    }
    Err(Error::DeserializeBadVarint)
}

/// Why there is no number, and the bytes behind those that were read: a type may discard the error, and go on.
#[cold]
fn refusal<const BITS: u32>(bytes: &[u8]) -> (Error, &[u8]) {
    let error = decode_bytes::<BITS>(bytes).err().unwrap_or(Error::DeserializeBadVarint);
    (error, bytes.get(BITS.div_ceil(7) as usize..).unwrap_or_default())
}

/// Called, and not a value that is selected: the processor guesses that it is not called, and goes on with the next number before it
/// knows all of this one.
#[cold]
#[inline(never)]
fn no_number() -> (u64, usize) {
    (0, NONE)
}

/// As `decode_longer`. A number need not take the fewest bytes.
#[inline]
fn decode_word<const BITS: u32>(bytes: &[u8; LONGEST]) -> (u64, usize) {
    const { assert!(matches!(BITS, 16 | 32 | 64)) }
    let [low @ .., next, last] = bytes;
    let most = BITS.div_ceil(7).min(8);
    let word = u64::from_le_bytes(*low);
    let ends = !word & MORE;
    let (number, len, fits) = if BITS <= WORD_BITS || ends != 0 {
        // Where no byte is the last one, this finds the eighth, which is too many for so few bits.
        let before_last = (ends | 1 << 63).trailing_zeros() & !7;
        let number = gathered(word & (u64::MAX >> (WORD_BITS - before_last)) & (u64::MAX >> (64 - 8 * most)));
        (number, before_last as usize / 8 + 1, BITS > WORD_BITS || before_last < 8 * most && number >> BITS == 0)
    } else {
        let has_tenth = next >> 7;
        let last = last & has_tenth.wrapping_neg();
        let number = gathered(word) | u64::from(next & 0x7f) << WORD_BITS | u64::from(last) << (WORD_BITS + 7);
        (number, 9 + usize::from(has_tenth), last <= 1)
    };
    if fits { (number, len) } else { no_number() }
}

pub(super) fn decode_numbers<const BITS: u32, T: Copy>(
    count: usize,
    rest: &mut &[u8],
    from_wire: impl Fn(u64) -> T,
) -> Result<Vec<T>> {
    let mut elements = Vec::with_capacity(count);
    let mut from = *rest;
    while let Some(left) = count.checked_sub(elements.len()).filter(|left| *left > 0) {
        if let Some((bytes, behind)) = from.split_first_chunk::<EIGHT>().filter(|_| left >= EIGHT) {
            let word = u64::from_le_bytes(*bytes);
            if word & MORE == PAIRS {
                let pairs = (word & LOWER) | (word >> 1) & UPPER;
                elements.extend_from_slice(&[0, 16, 32, 48].map(|shift| from_wire((pairs >> shift) & 0xffff)));
                from = behind;
                continue;
            }
            if word & MORE == 0 {
                elements.extend_from_slice(&bytes.map(|byte| from_wire(byte.into())));
                from = behind;
                continue;
            }
        }
        let (number, len) = match from.first_chunk() {
            Some(bytes) => decode_word::<BITS>(bytes),
            None => decode_longer::<BITS>(from),
        };
        from = from.get(len..).ok_or_else(|| refusal::<BITS>(from).0)?;
        elements.push(from_wire(number));
    }
    *rest = from;
    Ok(elements)
}

/// Zigzag encoding, which keeps small negative numbers short.
#[inline]
pub(super) fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

#[inline]
pub(crate) fn unzigzag(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}
