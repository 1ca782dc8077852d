//! Lines for the log from where something is locked.
//!
//! A subscriber is user code: it may use the engine that logs. So a line waits on its thread until the thread holds no lock of
//! this library any more, which is when it has carried out what the protocol asked for, or has left the transports.

use std::cell::{Cell, RefCell};

type LogLine = Box<dyn FnOnce()>;

thread_local! {
    static ANY: Cell<bool> = const { Cell::new(false) };
    static LINES: RefCell<Vec<LogLine>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a line until [`flush`] on this thread. On a thread that is ending, it is dropped.
pub(crate) fn defer(line: impl FnOnce() + 'static) {
    let kept = LINES.try_with(|lines| lines.borrow_mut().push(Box::new(line)));
    if kept.is_ok() {
        ANY.set(true);
    }
}

/// True when lines wait.
pub(crate) fn any() -> bool {
    ANY.get()
}

/// Writes what waits. Nothing may be locked.
pub(crate) fn flush() {
    if ANY.get() {
        write();
    }
}

#[cold]
fn write() {
    ANY.set(false);
    // A line that is written may bring others about.
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
    fn lines_wait_until_they_are_flushed() {
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
