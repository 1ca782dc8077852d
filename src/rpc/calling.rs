//! Which handler a thread runs: the calls that it makes meanwhile are counted by it.

use std::cell::Cell;

use crate::engine::HandledCalls;
use crate::progress::{Core, in_job};

thread_local! {
    /// The number of the procedure whose handler runs on this thread; 0 for none.
    static CALLING_HANDLER: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, this thread runs a handler, or polls the future of an async one.
pub(super) struct CallingHandler {
    outer: u32,
}

impl CallingHandler {
    pub(super) fn enter(calls: Option<&HandledCalls>) -> CallingHandler {
        CallingHandler { outer: CALLING_HANDLER.replace(calls.map_or(0, |calls| calls.number)) }
    }
}

impl Drop for CallingHandler {
    fn drop(&mut self) {
        CALLING_HANDLER.set(self.outer);
    }
}

/// The [`HandledCalls::number`] of the handler of this engine that runs on this thread; 0 for none.
pub(super) fn calling_handler(core: &Core) -> u32 {
    let number = CALLING_HANDLER.try_with(Cell::get).unwrap_or(0);
    if number > 0 && in_job(core) { number } else { 0 }
}
