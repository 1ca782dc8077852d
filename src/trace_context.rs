//! The trace that a call belongs to, as the W3C's recommendation Trace Context defines it.

use std::fmt;

use crate::text::from_hex;

/// The trace that a call belongs to, and the span that made it: what the headers `traceparent` and `tracestate` of the
/// [W3C's Trace Context](https://www.w3.org/TR/trace-context/) hold. It travels with calls, one-way or not, and takes no bytes
/// where there is none.
///
/// With the feature `opentelemetry` the library takes it from the caller's span, and gives it to the handler's. Without that
/// feature, or beside it, [`Call::trace_context`](crate::Call::trace_context) sets it, and
/// [`Request::trace_context`](crate::Request::trace_context) has that of the caller. Its `Display` is a `traceparent`.
///
/// ```
/// use calomel::{Engine, Request, TraceContext};
///
/// # fn main() -> calomel::Result<()> {
/// let server = Engine::server("loop://")?;
/// server.define("trace", |request: &Request, ()| request.trace_context().map(ToString::to_string))?;
///
/// let client = Engine::client("loop")?;
/// let trace = client.procedure::<(), Option<String>>("trace").on(&client.lookup(server.address())?);
/// let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// let context = TraceContext::parse(text, "").expect("it is a traceparent");
/// assert_eq!(trace.clone().trace_context(context).call(&())?.as_deref(), Some(text));
/// assert_eq!(trace.call(&())?, None);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace_id: [u8; 16],
    parent_id: [u8; 8],
    flags: u8,
    state: Box<str>,
}

impl TraceContext {
    /// The longest `tracestate` that travels, in bytes; a longer one is left out.
    pub const MAX_STATE: usize = 512;

    /// A trace, one of its spans, and its flags, without a `tracestate`. `None` where one of the two is all zeros, which stands
    /// for none.
    pub fn new(trace_id: [u8; 16], parent_id: [u8; 8], flags: u8) -> Option<TraceContext> {
        let is_valid = trace_id != [0; 16] && parent_id != [0; 8];
        is_valid.then(|| TraceContext { trace_id, parent_id, flags, state: Box::default() })
    }

    /// The same with a `tracestate`. One that is longer than [`MAX_STATE`](TraceContext::MAX_STATE), or has other characters than
    /// printable ones of ASCII, is left out: the trace goes on without it.
    pub fn with_state(mut self, state: &str) -> TraceContext {
        if is_state(state) {
            self.state = state.into();
        }
        self
    }

    /// Reads a `traceparent`, with a `tracestate` or an empty text. `None` where the first is malformed.
    pub fn parse(traceparent: &str, tracestate: &str) -> Option<TraceContext> {
        let mut parts = traceparent.trim().splitn(5, '-');
        let version = from_hex::<1>(parts.next()?)?[0];
        let (trace_id, parent_id) = (from_hex(parts.next()?)?, from_hex(parts.next()?)?);
        let [flags] = from_hex(parts.next()?)?;
        // A later version may have more behind these.
        if version == 0xff || (version == 0 && parts.next().is_some()) {
            return None;
        }
        Some(TraceContext::new(trace_id, parent_id, flags)?.with_state(tracestate.trim()))
    }

    /// What a peer has sent; an error says what is wrong with it.
    pub(crate) fn received(trace_id: [u8; 16], parent_id: [u8; 8], flags: u8, state: &str) -> Result<TraceContext, &'static str> {
        if !is_state(state) {
            return Err("a trace context whose state is too long, or not printable");
        }
        let context = TraceContext::new(trace_id, parent_id, flags).ok_or("a trace context without a trace or a span")?;
        Ok(context.with_state(state))
    }

    /// The number of the trace.
    pub fn trace_id(&self) -> [u8; 16] {
        self.trace_id
    }

    /// The number of the span that made the call.
    pub fn parent_id(&self) -> [u8; 8] {
        self.parent_id
    }

    /// The flags; the lowest bit says that the trace is recorded.
    pub fn flags(&self) -> u8 {
        self.flags
    }

    /// True when the caller records the trace.
    pub fn is_sampled(&self) -> bool {
        self.flags & 1 == 1
    }

    /// The `tracestate`; empty where there is none.
    pub fn state(&self) -> &str {
        &self.state
    }
}

/// Printable, so that it can stand in a header or in a log.
fn is_state(state: &str) -> bool {
    state.len() <= TraceContext::MAX_STATE && state.bytes().all(|byte| (0x20..0x7f).contains(&byte))
}

impl fmt::Display for TraceContext {
    /// The `traceparent`, of version 00.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace_id, parent_id) = (u128::from_be_bytes(self.trace_id), u64::from_be_bytes(self.parent_id));
        write!(f, "00-{trace_id:032x}-{parent_id:016x}-{:02x}", self.flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn traceparent_is_read_and_written() {
        let context = TraceContext::parse(TEXT, "vendor=1,other=2").unwrap();
        assert_eq!(context.to_string(), TEXT);
        assert_eq!((context.trace_id()[0], context.parent_id()[7], context.flags()), (0x0a, 0x31, 1));
        assert!(context.is_sampled());
        assert_eq!(context.state(), "vendor=1,other=2");
        assert!(!TraceContext::parse(&TEXT.replace("-01", "-00"), "").unwrap().is_sampled());
        // Versions to come begin the same.
        let later = TEXT.replacen("00", "cc", 1) + "-and-more";
        assert_eq!(TraceContext::parse(&later, "").unwrap().to_string(), TEXT);
    }

    #[test]
    fn malformed_traceparent_is_none() {
        let zero_trace = "00-00000000000000000000000000000000-b7ad6b7169203331-01";
        let zero_span = "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01";
        let invalid = [TEXT.replacen("00", "ff", 1), TEXT.to_uppercase(), format!("{TEXT}-00"), TEXT.replace('7', "g")];
        for text in ["", "00", "00---", zero_trace, zero_span, &TEXT[..54]].into_iter().chain(invalid.iter().map(String::as_str))
        {
            assert_eq!(TraceContext::parse(text, ""), None, "{text}");
        }
        assert_eq!(TraceContext::parse(&TEXT.replace('7', "ü"), ""), None);
    }

    #[test]
    fn state_that_does_not_fit_is_left_out() {
        let context = |state: &str| TraceContext::parse(TEXT, state).unwrap();
        let longest = "x".repeat(TraceContext::MAX_STATE);
        assert_eq!(context(&longest).state(), longest);
        for state in [&*format!("{longest}x"), "a=1\r\nanother: header", "ü=1"] {
            assert_eq!(context(state).state(), "");
            assert!(TraceContext::received([1; 16], [1; 8], 0, state).is_err());
        }
        assert!(TraceContext::received([0; 16], [1; 8], 0, "").is_err());
        assert!(TraceContext::received([1; 16], [0; 8], 0, "").is_err());
    }
}
