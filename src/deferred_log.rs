//! Deferred log lines, for code that holds a lock.
//!
//! A subscriber is user code: it may use the engine that logs. So a line waits on its thread until the thread holds no lock of
//! this library: until it has executed the outputs of the protocol, or has left the transports.

use std::cell::{Cell, RefCell};

type LogLine = Box<dyn FnOnce()>;

thread_local! {
    static HAS_LINES: Cell<bool> = const { Cell::new(false) };
    static LINES: RefCell<Vec<LogLine>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a line until [`flush`] on this thread. On a thread that is ending, the line is dropped.
pub(crate) fn defer(line: impl FnOnce() + 'static) {
    let kept = LINES.try_with(|lines| lines.borrow_mut().push(Box::new(line)));
    if kept.is_ok() {
        HAS_LINES.set(true);
    }
}

/// True when lines wait on this thread.
pub(crate) fn any() -> bool {
    HAS_LINES.get()
}

/// Writes the lines that wait on this thread. The thread must hold no lock of this library.
pub(crate) fn flush() {
    if HAS_LINES.get() {
        write();
    }
}

#[cold]
fn write() {
    HAS_LINES.set(false);
    // Writing a line may defer others.
    let lines = LINES.try_with(RefCell::take).unwrap_or_default();
    lines.into_iter().for_each(|line| line());
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static WRITTEN: Cell<u32> = const { Cell::new(0) };
    }

    #[test]
    fn deferred_line_is_written_by_the_next_flush() {
        flush();
        defer(|| {
            WRITTEN.set(WRITTEN.get() + 1);
            defer(|| WRITTEN.set(WRITTEN.get() + 10));
        });
        assert!(any());
        assert_eq!(WRITTEN.get(), 0);
        flush();
        assert_eq!((WRITTEN.get(), any()), (1, true));
        flush();
        assert_eq!((WRITTEN.get(), any()), (11, false));
    }
}
