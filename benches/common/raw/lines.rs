//! Signals between both ends in shared memory: words that count up, one in each cache line, and a ring of bytes.

use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use super::shared::Shared;

/// Cache lines in each direction, and so the largest number of messages in flight.
pub const LINES: usize = 64;
/// The first of the client's lines, of the server's lines, and of the ring's two.
const OUT: usize = 0;
const BACK: usize = OUT + LINES;
const HEAD: usize = BACK + LINES;
const TAIL: usize = HEAD + 1;

/// Bytes of the ring, small enough to stay in a cache.
const RING: usize = 256 << 10;
/// Bytes copied before the other side is signalled, so that both sides copy at the same time.
const CHUNK: usize = 16 << 10;

/// Resets all words before a round.
pub fn reset(shared: &Shared) {
    for number in 0..=TAIL {
        shared.line(number).store(0, Ordering::Release);
    }
}

/// The client's cache line for its message with this number.
pub fn out(shared: &Shared, message: usize) -> &AtomicU64 {
    shared.line(OUT + message % LINES)
}

/// The server's cache line for its answer with this number.
pub fn back(shared: &Shared, message: usize) -> &AtomicU64 {
    shared.line(BACK + message % LINES)
}

/// Signals that message `message` is there.
pub fn signal(line: &AtomicU64, message: usize) {
    line.store(message as u64 + 1, Ordering::Release);
}

pub fn is_signalled(line: &AtomicU64, message: usize) -> bool {
    line.load(Ordering::Acquire) > message as u64
}

/// Spins until message `message` is there.
pub fn wait_for(line: &AtomicU64, message: usize) {
    spin_until(|| is_signalled(line, message));
}

/// Spins in vain before the thread yields the core. The limit takes longer than an exchange; without it, two sides that spin on
/// one core would see each other only once in a time slice.
const SPINS: u32 = 1 << 10;

fn spin_until(ready: impl Fn() -> bool) {
    let mut spins = 0u32;
    while !ready() {
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(SPINS) { thread::yield_now() } else { spin_loop() }
    }
}

/// Copies `bytes` into the ring, behind the `position` bytes copied before.
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

/// The lengths in which `len` bytes behind `position` go through the ring: at most a chunk, and none wraps around.
fn chunks(position: usize, len: usize) -> impl Iterator<Item = usize> {
    let mut at = position;
    let end = position + len;
    std::iter::from_fn(move || {
        let next = CHUNK.min(end - at).min(RING - at % RING);
        at += next;
        (next > 0).then_some(next)
    })
}
