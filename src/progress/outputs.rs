//! What the protocol has asked for, on its way to be done.

use std::cell::Cell;
use std::collections::VecDeque;

use super::Live;
use crate::proto::Output;

/// What the protocol has asked for. The memory is the thread's, and used again.
pub(super) struct Outputs {
    pub queue: VecDeque<Output<Live>>,
    /// Bytes of payloads that have been sent on the way.
    pub moved: usize,
}

thread_local! {
    static OUTPUTS: Cell<VecDeque<Output<Live>>> = const { Cell::new(VecDeque::new()) };
}

/// A thread keeps room for so many outputs.
const KEEP: usize = 256;

impl Outputs {
    pub(super) fn new() -> Outputs {
        Outputs { queue: OUTPUTS.try_with(Cell::take).unwrap_or_default(), moved: 0 }
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        if self.queue.is_empty() && self.queue.capacity() <= KEEP {
            // On a thread that is ending there is no place for it.
            let _ = OUTPUTS.try_with(|outputs| outputs.set(std::mem::take(&mut self.queue)));
        }
    }
}
