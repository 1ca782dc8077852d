//! A segment of eight lines, each with a header and other content. The content is written and read as plain memory, so loom
//! fails when accesses overlap or are not ordered.

use loom::cell::UnsafeCell;

use crate::memory::{CopyPath, ReadAccess, WriteAccess};
use crate::sync::atomic::{AtomicU64, Ordering, fence};

pub(super) const LINE: u64 = 64;
const LINES: usize = 8;
pub(super) const RING: u64 = LINE * LINES as u64;
pub(super) const SLOTS: usize = 1;
pub(super) const CLOSED: u64 = u64::MAX;

#[derive(Default)]
pub(super) struct CacheLine(pub AtomicU64);

#[derive(Default)]
pub(super) struct Plain(pub std::sync::atomic::AtomicU64);

pub(super) struct Words {
    pub taken: CacheLine,
    pub asleep: CacheLine,
    pub waiting: CacheLine,
    /// These two are irrelevant for the order of events.
    pub processor: Plain,
    pub wanted: Plain,
    pub granted: [AtomicU64; SLOTS],
    pub reading: [AtomicU64; SLOTS],
    pub finished: [AtomicU64; SLOTS],
}

pub(super) fn see(word: &AtomicU64) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

type Content = [u8; LINE as usize];

/// The first word of a line: a header, or a part of the body of a record that began before.
pub(super) struct Word {
    word: AtomicU64,
    /// The whole line, as bodies use it.
    content: UnsafeCell<Content>,
}

impl Word {
    pub(super) fn load(&self, ordering: Ordering) -> u64 {
        self.word.load(ordering)
    }

    pub(super) fn store(&self, header: u64, ordering: Ordering) {
        // This overwrites the first eight bytes of a body, which may still be read there.
        self.content.with_mut(|_| ());
        self.word.store(header, ordering);
    }
}

pub(super) struct SharedSegment {
    words: Words,
    lines: [Word; LINES],
}

// SAFETY: loom checks all accesses.
unsafe impl Sync for SharedSegment {}
// SAFETY: as above.
unsafe impl Send for SharedSegment {}

impl SharedSegment {
    pub(super) fn new() -> SharedSegment {
        let none = || std::array::from_fn(|_| AtomicU64::default());
        let (taken, asleep, waiting) = Default::default();
        let (processor, wanted) = Default::default();
        let words = Words { taken, asleep, waiting, processor, wanted, granted: none(), reading: none(), finished: none() };
        let line = |_| Word { word: AtomicU64::new(0), content: UnsafeCell::new([0; LINE as usize]) };
        SharedSegment { words, lines: std::array::from_fn(line) }
    }

    pub(super) fn words(&self) -> &Words {
        &self.words
    }

    pub(super) fn header(&self, at: u64) -> &Word {
        assert!(at.is_multiple_of(LINE));
        &self.lines[(at % RING / LINE) as usize]
    }

    /// The lines that the body of `len` bytes at `at` covers, each with the body's offset in it, and its length there.
    fn lines(&self, at: u64, len: usize) -> impl Iterator<Item = (usize, usize, &Word)> {
        let end = at + len as u64;
        let step = move |at: &u64| Some((at / LINE + 1) * LINE).filter(|next| *next < end);
        std::iter::successors(Some(at), step).map(move |at| {
            let line = self.header(at / LINE * LINE);
            ((at % LINE) as usize, ((at / LINE + 1) * LINE).min(end) as usize - at as usize, line)
        })
    }

    pub(super) fn write(&self, at: u64, bytes: &[u8], _: CopyPath) {
        let mut bytes = bytes;
        for (start, len, line) in self.lines(at, bytes.len()) {
            let (now, rest) = bytes.split_at(len);
            // SAFETY: loom checks the cell.
            line.content.with_mut(|content| unsafe { (&mut *content)[start..start + len].copy_from_slice(now) });
            if start == 0 {
                // The word that a reader would take for a header here.
                line.word.store(9 << 32, Ordering::Relaxed);
            }
            bytes = rest;
        }
    }

    pub(super) fn read(&self, at: u64, out: &mut [u8]) {
        let mut out = out;
        for (start, len, line) in self.lines(at, out.len()) {
            let (now, rest) = std::mem::take(&mut out).split_at_mut(len);
            // SAFETY: loom checks the cell.
            line.content.with(|content| now.copy_from_slice(unsafe { &(&*content)[start..start + len] }));
            out = rest;
        }
    }

    pub(super) fn write_memory(&self, _: u64, _: &ReadAccess<'_>, _: usize, _: usize, _: CopyPath) {
        unreachable!("payloads travel by loans");
    }

    pub(super) fn read_memory(&self, _: u64, _: &WriteAccess<'_>, _: usize, _: usize) {
        unreachable!("payloads travel by loans");
    }
}
