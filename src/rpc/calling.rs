//! The handler that a thread runs: the calls that it makes meanwhile are counted by it, and it notes what becomes of its own.

use std::cell::Cell;

use crate::engine::HandledCalls;
use crate::progress::{Core, in_job};

/// The handler that a thread runs, or ran last. A handler that waits lets other threads run those that arrive, so there is one
/// at a time.
struct HandlerNotes {
    /// The [`HandledCalls::number`] of its procedure; 0 while none runs.
    number: Cell<u32>,
    /// Bytes of its arguments.
    received: Cell<usize>,
    /// Bytes of its result; `UNANSWERED` before it has answered.
    sent: Cell<usize>,
    /// The kind of error that its caller gets.
    error: Cell<Option<&'static str>>,
}

const UNANSWERED: usize = usize::MAX;

thread_local! {
    static HANDLER_NOTES: HandlerNotes = const {
        HandlerNotes { number: Cell::new(0), received: Cell::new(0), sent: Cell::new(UNANSWERED), error: Cell::new(None) }
    };
}

/// While it lives, this thread runs a handler, or polls the future of an async one.
pub(super) struct CallingHandler {
    outer: u32,
}

impl CallingHandler {
    pub(super) fn enter(calls: Option<&HandledCalls>) -> CallingHandler {
        let number = calls.map_or(0, |calls| calls.number);
        CallingHandler { outer: HANDLER_NOTES.with(|notes| notes.number.replace(number)) }
    }
}

impl Drop for CallingHandler {
    fn drop(&mut self) {
        HANDLER_NOTES.with(|notes| notes.number.set(self.outer));
    }
}

/// A handler begins on this thread.
pub(super) fn note_begin() {
    HANDLER_NOTES.with(|notes| {
        notes.received.set(0);
        notes.sent.set(UNANSWERED);
        notes.error.set(None);
    });
}

/// Its arguments have arrived.
pub(super) fn note_received(bytes: usize) {
    HANDLER_NOTES.with(|notes| notes.received.set(bytes));
}

/// It has answered.
pub(super) fn note_sent(bytes: usize, error: Option<&'static str>) {
    HANDLER_NOTES.with(|notes| {
        notes.sent.set(bytes);
        notes.error.set(error);
    });
}

/// The handler has returned: counts what was noted of it.
pub(super) fn count(calls: &HandledCalls, waited: u64, ran: u64) {
    HANDLER_NOTES.with(|notes| {
        let sent = Some(notes.sent.get()).filter(|sent| *sent != UNANSWERED);
        calls.returned(notes.received.get(), sent, notes.error.get(), waited, ran);
    });
}

/// The [`HandledCalls::number`] of the handler of this engine that runs on this thread; 0 for none.
pub(super) fn calling_handler(core: &Core) -> u32 {
    let number = HANDLER_NOTES.with(|notes| notes.number.get());
    if number > 0 && in_job(core) { number } else { 0 }
}
