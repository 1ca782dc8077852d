//! The handler that a thread runs: the calls that it makes meanwhile are counted by it, and it reports what it did with its own.

use std::cell::Cell;

use crate::engine::HandledCalls;
use crate::progress::{Core, HandlerReport, in_job};

/// What a thread runs.
#[derive(Clone, Copy, Default)]
struct RunningCall {
    /// The [`HandledCalls::number`] of the procedure whose handler runs; 0 for none.
    number: u32,
    report: HandlerReport,
}

thread_local! {
    static RUNNING_CALL: Cell<RunningCall> = const {
        Cell::new(RunningCall { number: 0, report: HandlerReport { received: 0, answered: false, sent: 0, error: None } })
    };
}

/// While it lives, this thread runs a handler, or polls the future of an async one.
pub(super) struct CallingHandler {
    outer: RunningCall,
}

impl CallingHandler {
    pub(super) fn enter(calls: Option<&HandledCalls>) -> CallingHandler {
        let number = calls.map_or(0, |calls| calls.number);
        CallingHandler { outer: RUNNING_CALL.replace(RunningCall { number, ..RunningCall::default() }) }
    }

    /// What was noted since.
    pub(super) fn report(&self) -> HandlerReport {
        RUNNING_CALL.get().report
    }
}

impl Drop for CallingHandler {
    fn drop(&mut self) {
        RUNNING_CALL.set(self.outer);
    }
}

/// Notes in the report of the handler that this thread runs.
pub(super) fn note(change: impl FnOnce(&mut HandlerReport)) {
    let mut running = RUNNING_CALL.get();
    change(&mut running.report);
    RUNNING_CALL.set(running);
}

/// The [`HandledCalls::number`] of the handler of this engine that runs on this thread; 0 for none.
pub(super) fn calling_handler(core: &Core) -> u32 {
    let number = RUNNING_CALL.try_with(|running| running.get().number).unwrap_or(0);
    if number > 0 && in_job(core) { number } else { 0 }
}
