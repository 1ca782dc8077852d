//! What both ends say to each other over shared memory: words that count up, and a ring of bytes.

use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use super::shared::Shared;

/// Cache lines each way, so messages that can be on their way at a time.
pub const LINES: usize = 64;
/// Where the client's lines, the server's and the ring's two begin.
const OUT: usize = 0;
const BACK: usize = OUT + LINES;
const HEAD: usize = BACK + LINES;
const TAIL: usize = HEAD + 1;

/// Bytes of the ring, few enough to stay in a cache.
const RING: usize = 256 << 10;
/// What is copied before the other side is told, so that both copy at a time.
const CHUNK: usize = 16 << 10;

/// Before a round: nothing has been said.
pub fn reset(shared: &Shared) {
    for number in 0..=TAIL {
        shared.line(number).store(0, Ordering::Release);
    }
}

/// The client's line for its message of this number.
pub fn out(shared: &Shared, message: usize) -> &AtomicU64 {
    shared.line(OUT + message % LINES)
}

/// The server's line for its answer of this number.
pub fn back(shared: &Shared, message: usize) -> &AtomicU64 {
    shared.line(BACK + message % LINES)
}

/// Says that message `message` is there.
pub fn tell(line: &AtomicU64, message: usize) {
    line.store(message as u64 + 1, Ordering::Release);
}

pub fn told(line: &AtomicU64, message: usize) -> bool {
    line.load(Ordering::Acquire) > message as u64
}

/// Spins until message `message` is there.
pub fn hear(line: &AtomicU64, message: usize) {
    spin_until(|| told(line, message));
}

/// Spins so often, which takes longer than an exchange, before it lets others have the core: where they want it, two
/// sides that spin would see each other only once in a time slice.
const SPINS: u32 = 1 << 10;

fn spin_until(ready: impl Fn() -> bool) {
    let mut spins = 0u32;
    while !ready() {
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(SPINS) { thread::yield_now() } else { spin_loop() }
    }
}

/// Copies `bytes` into the ring, behind the `position` bytes that went before.
pub fn send(shared: &Shared, position: usize, bytes: &[u8]) {
    let (head, tail) = (shared.line(HEAD), shared.line(TAIL));
    let mut at = position;
    for chunk in chunks(position, bytes.len()) {
        let end = at + chunk;
        spin_until(|| end - tail.load(Ordering::Acquire) as usize <= RING);
        shared.write(at % RING, &bytes[at - position..end - position]);
        head.store(end as u64, Ordering::Release);
        at = end;
    }
}

/// Copies as many bytes out of the ring.
pub fn receive(shared: &Shared, position: usize, bytes: &mut [u8]) {
    let (head, tail) = (shared.line(HEAD), shared.line(TAIL));
    let mut at = position;
    for chunk in chunks(position, bytes.len()) {
        let end = at + chunk;
        spin_until(|| head.load(Ordering::Acquire) as usize >= end);
        shared.read(at % RING, &mut bytes[at - position..end - position]);
        tail.store(end as u64, Ordering::Release);
        at = end;
    }
}

/// The lengths in which `len` bytes behind `position` go through the ring: no longer than a chunk, none around the end.
fn chunks(position: usize, len: usize) -> impl Iterator<Item = usize> {
    let mut at = position;
    let end = position + len;
    std::iter::from_fn(move || {
        let next = CHUNK.min(end - at).min(RING - at % RING);
        at += next;
        (next > 0).then_some(next)
    })
}
