//! The memory and leases that the protocol handles in these tests, and their random numbers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::{Carrier, Declaration, Env, Injected, Lease, Memory, TrailingList};

pub enum TestEnv {}

impl Env for TestEnv {
    type Memory = Mem;
    type Waiter = Op;
    type Lease = TestLease;
    type Verdicts = ();
    type Carrier = TestCarrier;

    fn body_memory(len: usize, _: Option<&Declaration<TestEnv>>, list: Option<TrailingList>) -> Mem {
        LISTS.with_borrow_mut(|lists| lists.push(list));
        LIVE.set(LIVE.get() + len);
        TOTAL.set(TOTAL.get() + len);
        LARGEST.set(LARGEST.get().max(len));
        // Zeroed pages are committed when they are written: announced sizes alone take no memory.
        Mem::of(TestBlock { bytes: RefCell::new(vec![0; len]), open: Cell::new(true), counted: len }, len)
    }
}

/// Takes what is sent at once.
#[derive(Clone)]
pub struct TestCarrier {
    pub taken: Rc<RefCell<Vec<u8>>>,
    /// Its answer.
    pub says: Rc<Cell<Injected>>,
    pub gathers: bool,
    pub takes_system_calls: bool,
}

impl Default for TestCarrier {
    fn default() -> TestCarrier {
        TestCarrier { taken: Rc::default(), says: Rc::new(Cell::new(Injected::Yes)), gathers: false, takes_system_calls: false }
    }
}

impl Carrier for TestCarrier {
    fn injects(&self) -> bool {
        true
    }

    fn inject(&self, bytes: &[u8]) -> Injected {
        if self.says.get() != Injected::No {
            self.taken.borrow_mut().extend_from_slice(bytes);
        }
        self.says.get()
    }

    fn gathers(&self) -> bool {
        self.gathers
    }

    fn takes_system_calls(&self) -> bool {
        self.takes_system_calls
    }
}

/// The number of a call or a transfer, unique in a test.
pub type Op = u64;

thread_local! {
    /// Bytes that the protocol has allocated and not yet freed; the largest allocation; the sum of all.
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
    static TOTAL: Cell<usize> = const { Cell::new(0) };
    /// What the bodies end with that they are for.
    static LISTS: RefCell<Vec<Option<TrailingList>>> = const { RefCell::new(Vec::new()) };
}

/// Bytes that the protocol allocated on this thread and has not freed.
pub fn live() -> usize {
    LIVE.get()
}

/// The largest allocation since the last call, and the sum of all.
pub fn allocated() -> (usize, usize) {
    (LARGEST.take(), TOTAL.take())
}

/// What the large bodies end with that memory was asked for since the last call.
#[cfg(test)]
pub fn lists() -> Vec<Option<TrailingList>> {
    LISTS.take()
}

/// Memory with a gate, as the engine's regions have: once it is closed, it is neither read nor written.
#[derive(Clone)]
pub struct Mem {
    block: Rc<TestBlock>,
    offset: usize,
    len: usize,
    /// For memory of one operation: whether the operation has ended.
    ended: Option<Rc<Cell<bool>>>,
}

struct TestBlock {
    bytes: RefCell<Vec<u8>>,
    open: Cell<bool>,
    /// Bytes that the protocol allocated; 0 for memory of the test.
    counted: usize,
}

impl Drop for TestBlock {
    fn drop(&mut self) {
        LIVE.set(LIVE.get() - self.counted);
    }
}

impl Mem {
    pub fn new(bytes: Vec<u8>) -> Mem {
        let len = bytes.len();
        Mem::of(TestBlock { bytes: RefCell::new(bytes), open: Cell::new(true), counted: 0 }, len)
    }

    fn of(block: TestBlock, len: usize) -> Mem {
        Mem { block: Rc::new(block), offset: 0, len, ended: None }
    }

    /// Closes the gate.
    pub fn close(&self) {
        self.block.open.set(false);
    }

    pub fn is_open(&self) -> bool {
        self.block.open.get() && !self.ended.as_ref().is_some_and(|ended| ended.get())
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.block.bytes.borrow()[self.offset..self.offset + self.len].to_vec()
    }

    pub fn byte(&self, at: usize) -> u8 {
        assert!(at < self.len);
        self.block.bytes.borrow()[self.offset + at]
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len, "a write outside of the memory");
        assert!(self.is_open(), "a write to memory that is closed");
        let start = self.offset + at;
        self.block.bytes.borrow_mut()[start..start + bytes.len()].copy_from_slice(bytes);
    }
}

impl Memory for Mem {
    fn len(&self) -> usize {
        self.len
    }

    fn part(&self, offset: usize, len: usize) -> Option<Mem> {
        (offset.checked_add(len)? <= self.len).then(|| Mem { offset: self.offset + offset, len, ..self.clone() })
    }

    fn for_one_operation(&self) -> Mem {
        Mem { ended: Some(Rc::default()), ..self.clone() }
    }

    fn end(&self) {
        if let Some(ended) = &self.ended {
            ended.set(true);
        }
    }
}

/// The lease that is kept while a peer holds a bulk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestLease {
    pub token: u128,
    pub number: u32,
}

impl Lease for TestLease {
    fn token(&self) -> u128 {
        self.token
    }
}

/// `len` bytes that differ with `seed` and offset. The period is a prime, so that an offset by a power of two shows.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let block: Vec<u8> = (0..len.min(4099)).map(|_| random.next() as u8).collect();
    let mut bytes = block.repeat(len.div_ceil(4099));
    bytes.truncate(len);
    bytes
}

/// splitmix64: the same numbers on every platform.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() % end as u64) as usize }
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len()))
    }
}
