//! What engines say to each other, made by hand: for peers that are none.

pub const MAGIC: &[u8; 8] = b"calomel\0";
/// The version of the protocol that engines speak.
pub const VERSION: u16 = 2;
/// Kinds of pieces of a greeting.
pub const HELLO: u8 = 0;
pub const CHALLENGE: u8 = 1;
pub const PROOF: u8 = 2;
pub const REFUSAL: u8 = 3;
/// What stands before a frame: checksum, length of the frame, length of the message.
pub const PREFIX_LEN: usize = 12;
/// What stands before what a piece of a greeting says: magic, versions, length, checksum, kind.
pub const PIECE_LEN: usize = 21;

/// The fixed part of a greeting: magic, lowest and highest version, length of what follows.
pub fn preamble(low: u16, high: u16, len: u32) -> Vec<u8> {
    [&MAGIC[..], &low.to_le_bytes(), &high.to_le_bytes(), &len.to_le_bytes()].concat()
}

/// A piece of a greeting.
pub fn piece(kind: u8, rest: &[u8]) -> Vec<u8> {
    let preamble = preamble(VERSION, VERSION, 5 + rest.len() as u32);
    let sum = crc32c::crc32c(&[&preamble[..], &[kind], rest].concat());
    [&preamble[..], &sum.to_le_bytes(), &[kind], rest].concat()
}

/// The greeting of an engine that takes messages up to this size, listens nowhere, and has no ticket.
pub fn greeting(incarnation: u64, max_message: u64) -> Vec<u8> {
    let hello = (incarnation, max_message, Vec::<String>::new(), None::<u64>, false);
    piece(HELLO, &postcard::to_stdvec(&hello).unwrap())
}

/// A frame of an encoded message and its body.
pub fn frame(message: &[u8], body: &[u8]) -> Vec<u8> {
    let lengths = [((message.len() + body.len()) as u32).to_le_bytes(), (message.len() as u32).to_le_bytes()].concat();
    let sum = crc32c::crc32c(&[&lengths, message].concat());
    [&sum.to_le_bytes()[..], &lengths, message, body].concat()
}
