//! A subscriber that keeps what is logged. There is one for a process, so a suite that uses it is a program of its own.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, MutexGuard, Once};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps the lines of these targets, and of this level and more urgent ones; of a span, its beginning.
struct KeepsLines {
    targets: &'static str,
    level: Level,
}

/// Keeps what is logged from now on. `targets`: how they begin.
pub fn keep(targets: &'static str, level: Level) {
    static SET: Once = Once::new();
    SET.call_once(|| tracing::subscriber::set_global_default(KeepsLines { targets, level }).unwrap());
}

/// Each has its level, its target, and its fields, the message among them.
pub fn lines() -> MutexGuard<'static, Vec<String>> {
    LINES.lock().unwrap()
}

/// Whether a line has all of these parts.
pub fn has(parts: &[&str]) -> bool {
    lines().iter().any(|line| parts.iter().all(|part| line.contains(part)))
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for KeepsLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with(self.targets) && *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::from_level(self.level))
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        lines().push(format!("a span: {attributes:?}"));
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} {}", event.metadata().level(), event.metadata().target()));
        event.record(&mut line);
        lines().push(line.0);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
