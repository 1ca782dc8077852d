//! One trace through three processes, each with an exporter of OpenTelemetry's: the span of a call is the parent of its handler's
//! span in the next process, and that the parent of the calls that the handler makes.
//!
//! A test starts this program again as each of the processes: with `CALOMEL_TEST_ROLE` set, the test [`child`] plays that role.

// Signals to processes are the system's.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../processes/support.rs"]
#[macro_use]
mod support;
mod roles;

use support::{BOUND, Child, Watchdog, eventually};

/// Not a test, but the other process; does nothing when the suite runs.
#[test]
fn child() {
    if let Ok(role) = std::env::var(support::ROLE) {
        support::over_parents_carrier(|| roles::run(&role));
    }
}

/// A span that a process has finished, as its line has it.
#[derive(Clone, Debug)]
struct Finished {
    process: &'static str,
    trace: String,
    id: String,
    parent: String,
    parent_is_remote: bool,
    kind: String,
    status: String,
    state: String,
    procedure: String,
    name: String,
}

impl Finished {
    fn parse(process: &'static str, line: &str) -> Finished {
        let mut parts = line.splitn(9, '|').map(str::to_owned);
        let mut next = || parts.next().unwrap_or_else(|| panic!("a line without its fields: {line}"));
        Finished {
            process,
            trace: next(),
            id: next(),
            parent: next(),
            parent_is_remote: next() == "true",
            kind: next(),
            status: next(),
            state: next(),
            procedure: next(),
            name: next(),
        }
    }

    fn is(&self, process: &str, kind: &str, name: &str) -> bool {
        (self.process, &*self.kind, &*self.name) == (process, kind, name)
    }
}

/// Processes `a`, which calls `b`, which calls `c`.
struct Chain {
    a: Child,
    b: Child,
    c: Child,
}

impl Chain {
    fn start() -> Chain {
        let mut c = Child::start("c", &[]);
        let address = c.hear("address");
        let mut b = Child::start("b", &[(roles::NEXT, &address)]);
        let address = b.hear("address");
        let mut a = Child::start("a", &[(roles::NEXT, &address)]);
        a.hear("ready");
        Chain { a, b, c }
    }

    /// Has `a` make the call of this name within a span of its own, and returns its outcome with the trace's number.
    fn run(&mut self, name: &str) -> (String, String) {
        self.a.tell(name);
        let done = self.a.hear("done");
        let (trace, outcome) = done.split_once(' ').unwrap();
        (trace.to_owned(), outcome.to_owned())
    }

    /// All spans that the three have finished so far.
    fn spans(&mut self) -> Vec<Finished> {
        let mut all = Vec::new();
        for (process, child) in [("a", &mut self.a), ("b", &mut self.b), ("c", &mut self.c)] {
            child.tell("spans");
            child.hear("all");
            all.extend(child.said_of(&["span"]).iter().map(|line| Finished::parse(process, line.strip_prefix("span ").unwrap())));
        }
        all
    }

    /// Waits until the spans of a trace are finished: handlers may end later than their calls.
    #[track_caller]
    fn trace(&mut self, trace: &str, is_complete: impl Fn(&[Finished]) -> bool) -> Vec<Finished> {
        let mut found = Vec::new();
        let mut complete = || {
            found = self.spans();
            found.retain(|span| span.trace == trace);
            is_complete(&found)
        };
        eventually("the trace is complete", &mut complete);
        // There is not one more.
        assert!(complete(), "{found:#?}");
        found
    }

    fn end(mut self) {
        for child in [&mut self.a, &mut self.b, &mut self.c] {
            child.tell("end");
            assert!(child.wait(BOUND).success());
        }
    }
}

#[track_caller]
fn one<'a>(spans: &'a [Finished], process: &str, kind: &str, name: &str) -> &'a Finished {
    let found: Vec<_> = spans.iter().filter(|span| span.is(process, kind, name)).collect();
    let [one] = found[..] else { panic!("{} spans `{name}` of kind {kind} in {process}: {spans:#?}", found.len()) };
    one
}

#[track_caller]
fn assert_child(of: &Finished, child: &Finished, is_remote: bool) {
    assert_eq!((&child.parent, child.parent_is_remote), (&of.id, is_remote), "{child:#?} is no child of {of:#?}");
    assert_eq!(child.trace, of.trace);
}

fn one_trace_goes_through_three_processes() {
    let _watchdog = Watchdog::start("one_trace_goes_through_three_processes");
    let mut chain = Chain::start();
    // Handlers of each kind in the middle, and a call with a large argument.
    for relay in roles::RELAYS {
        let (trace, outcome) = chain.run(relay);
        assert_eq!(outcome, "ok 42", "{relay}");
        let spans = chain.trace(&trace, |spans| spans.len() == 7);
        let begin = one(&spans, "a", "Internal", "program");
        let first = one(&spans, "a", "Client", relay);
        let handler = one(&spans, "b", "Server", relay);
        assert_child(begin, first, false);
        assert_child(first, handler, true);
        for name in ["leaf", "note"] {
            let call = one(&spans, "b", "Client", name);
            assert_child(handler, call, false);
            assert_child(call, one(&spans, "c", "Server", name), true);
        }
        for span in &spans {
            assert_eq!(span.status, "Unset", "{span:#?}");
            // The state that the first process has set goes on to the last.
            assert_eq!(span.state, "vendor=1", "{span:#?}");
            assert_eq!(span.procedure, if span.kind == "Internal" { "" } else { &*span.name });
        }
    }
    chain.end();
}

fn failed_call_has_failed_spans() {
    let _watchdog = Watchdog::start("failed_call_has_failed_spans");
    let mut chain = Chain::start();
    let (trace, outcome) = chain.run("relay to a failure");
    assert!(outcome.contains("no leaf today"), "{outcome}");
    let spans = chain.trace(&trace, |spans| spans.len() == 5);
    let (first, second) = ("relay to a failure", "failing leaf");
    for (process, kind, name) in
        [("a", "Client", first), ("b", "Server", first), ("b", "Client", second), ("c", "Server", second)]
    {
        let span = one(&spans, process, kind, name);
        assert!(span.status.starts_with("Error") && span.status.contains("no leaf today"), "{span:#?}");
    }
    assert_child(one(&spans, "b", "Client", second), one(&spans, "c", "Server", second), true);
    let (trace, outcome) = chain.run("relay to a panic");
    assert!(outcome.contains("leaf fell"), "{outcome}");
    let spans = chain.trace(&trace, |spans| spans.len() == 5);
    let panicked = one(&spans, "c", "Server", "panicking leaf");
    assert!(panicked.status.contains("leaf fell"), "{panicked:#?}");
    chain.end();
}

/// A retried call has a span for each attempt; all of them are in the trace.
fn each_attempt_is_in_the_trace() {
    let _watchdog = Watchdog::start("each_attempt_is_in_the_trace");
    let mut chain = Chain::start();
    let (trace, outcome) = chain.run("retried");
    assert_eq!(outcome, "ok 3");
    let handlers = |spans: &[Finished]| spans.iter().filter(|span| span.is("b", "Server", "retried")).count();
    let spans = chain.trace(&trace, |spans| handlers(spans) == 3);
    let begin = one(&spans, "a", "Internal", "program");
    // On a busy machine an attempt may end before it is handled.
    let attempts: Vec<_> = spans.iter().filter(|span| span.is("a", "Client", "retried")).collect();
    assert!(attempts.len() >= 3, "{spans:#?}");
    assert_eq!(attempts.iter().filter(|span| span.status == "Unset").count(), 1, "{spans:#?}");
    for attempt in &attempts {
        assert_child(begin, attempt, false);
    }
    for handler in spans.iter().filter(|span| span.process == "b") {
        let attempt = attempts.iter().find(|attempt| attempt.id == handler.parent);
        assert_child(attempt.unwrap_or_else(|| panic!("{spans:#?}")), handler, true);
        assert_eq!(handler.status == "Unset", attempt.unwrap().status == "Unset", "{spans:#?}");
    }
    chain.end();
}

over_each!(one_trace_goes_through_three_processes, failed_call_has_failed_spans, each_attempt_is_in_the_trace);
