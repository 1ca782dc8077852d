//! Spans of calls and of their handlers, the trace that joins them, and the log lines about those that are slow.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use tracing::field::Empty;
use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};
use tracing::span::Entered;
use tracing::{Level, Span};

use crate::engine::{Endpoint, EngineShared, MonitoredCall};
use crate::{Error, TraceContext};

/// The level of the spans.
const LEVEL: Level = Level::DEBUG;

/// Whether there may be a span to make, or one whose trace is to be passed on. One comparison, as it is asked for each call.
#[inline]
fn is_on() -> bool {
    // The program's own spans may be of any level, and their traces travel even if those of this library are filtered out.
    let least = if cfg!(feature = "opentelemetry") { LevelFilter::ERROR } else { LevelFilter::from_level(LEVEL) };
    least <= STATIC_MAX_LEVEL && least <= LevelFilter::current()
}

/// A span of target `calomel::rpc`, with the fields of both sides. The level of a span has to be a constant.
macro_rules! rpc_span {
    ($name:literal, $kind:literal, $procedure:expr, $provider:expr, $peer:expr, $one_way:expr $(, $parent:tt: $none:expr)?) => {
        tracing::span!(
            target: "calomel::rpc",
            $($parent: $none,)?
            LEVEL,
            $name,
            procedure = $procedure,
            provider = $provider,
            peer = %$peer,
            one_way = $one_way,
            error = Empty,
            "error.type" = Empty,
            "rpc.system.name" = "calomel",
            "rpc.method" = $procedure,
            "otel.name" = $procedure,
            "otel.kind" = $kind,
            "otel.status_code" = Empty,
            "otel.status_description" = Empty,
        )
    };
}

fn record_end(span: &Span, error: Option<&Error>) {
    if let Some(error) = error {
        let text = error.to_string();
        span.record("error", tracing::field::display(&text));
        span.record("error.type", error.kind());
        span.record("otel.status_code", "ERROR");
        span.record("otel.status_description", &*text);
    }
}

/// The span of a call, its trace, and when it began: `None` where none of that is wanted.
#[derive(Default)]
pub(super) struct CallSpan(Option<Box<OpenCall>>);

struct OpenCall {
    span: Span,
    /// What travels with the call.
    trace: Option<TraceContext>,
    /// Where slow calls are logged.
    began: Option<Instant>,
}

impl CallSpan {
    /// A call begins. `given`: the trace that the program has set for it.
    #[inline]
    pub(super) fn begin(
        shared: &EngineShared,
        procedure: &str,
        peer: &Endpoint,
        one_way: bool,
        given: Option<&TraceContext>,
    ) -> CallSpan {
        if !is_on() && given.is_none() && shared.config.slow_calls.is_none() {
            return CallSpan(None);
        }
        CallSpan::open(shared, procedure, peer, one_way, given)
    }

    #[cold]
    fn open(shared: &EngineShared, procedure: &str, peer: &Endpoint, one_way: bool, given: Option<&TraceContext>) -> CallSpan {
        let began = shared.config.slow_calls.map(|_| Instant::now());
        let span = rpc_span!("call", "client", procedure, peer.provider_id(), peer.address(), one_way);
        let trace = trace_of(&span, given);
        let wanted = began.is_some() || trace.is_some() || !span.is_disabled();
        CallSpan(wanted.then(|| Box::new(OpenCall { span, trace, began })))
    }

    /// What travels with the call.
    pub(super) fn trace(&self) -> Option<&TraceContext> {
        self.0.as_ref()?.trace.as_ref()
    }

    /// Whether the end of the call is of interest.
    pub(super) fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// The call has ended: at `ended` on the engine's clock, where that is known.
    #[inline]
    pub(super) fn end(&self, shared: &EngineShared, procedure: &str, peer: &Endpoint, ended: Option<u64>, error: Option<&Error>) {
        if let Some(open) = &self.0 {
            open.end(shared, procedure, peer, ended, error);
        }
    }
}

impl OpenCall {
    #[cold]
    fn end(&self, shared: &EngineShared, procedure: &str, peer: &Endpoint, ended: Option<u64>, error: Option<&Error>) {
        record_end(&self.span, error);
        let (Some(began), Some(threshold)) = (self.began, shared.config.slow_calls) else { return };
        let now = Instant::now();
        // A result may be taken long after it has arrived.
        let late = ended.map_or(0, |ended| shared.core.clock_at(now).saturating_sub(ended));
        let took = now.saturating_duration_since(began).saturating_sub(std::time::Duration::from_nanos(late));
        if took < threshold {
            return;
        }
        let Some(omitted) = shared.slow_log.next(now) else { return };
        tracing::info!(
            target: "calomel::rpc", parent: &self.span, procedure, provider = peer.provider_id(), peer = %peer.address(), ?took,
            ?threshold, error = error.map(tracing::field::display), omitted, "slow call"
        );
    }
}

/// The span of a handler, and when it began: `None` where none of that is wanted. Shared by its responder and by what runs it.
#[derive(Clone, Default)]
pub(super) struct HandlerSpan(Option<Arc<OpenHandler>>);

struct OpenHandler {
    span: Span,
    /// Where slow handlers are logged.
    began: Option<Instant>,
}

impl HandlerSpan {
    /// A handler begins.
    #[inline]
    pub(super) fn begin<'a>(
        shared: &EngineShared,
        call: impl FnOnce() -> MonitoredCall<'a>,
        trace: Option<&TraceContext>,
    ) -> HandlerSpan {
        if !is_on() && shared.config.slow_calls.is_none() {
            return HandlerSpan(None);
        }
        HandlerSpan::open(shared, &call(), trace)
    }

    #[cold]
    fn open(shared: &EngineShared, call: &MonitoredCall<'_>, trace: Option<&TraceContext>) -> HandlerSpan {
        let began = shared.config.slow_calls.map(|_| Instant::now());
        let MonitoredCall { procedure, provider, peer, one_way, .. } = *call;
        // Not a child of the current span: this thread may be one that waits in a call of the program meanwhile.
        let span = rpc_span!("handle", "server", procedure, provider, peer.address(), one_way, parent: None);
        if let Some(trace) = trace {
            continue_trace(&span, trace);
        }
        let wanted = began.is_some() || !span.is_disabled();
        HandlerSpan(wanted.then(|| Arc::new(OpenHandler { span, began })))
    }

    /// Makes the span the current one, so that the calls and the log lines of the handler are within it.
    #[inline]
    pub(super) fn enter(&self) -> Option<Entered<'_>> {
        self.0.as_ref().map(|open| open.span.enter())
    }

    /// Runs the program's code within the span.
    #[inline]
    pub(super) fn run<T>(&self, work: impl FnOnce() -> T) -> std::thread::Result<T> {
        let _entered = self.enter();
        catch_unwind(AssertUnwindSafe(work))
    }

    /// The call was answered, or a one-way call was handled.
    #[inline]
    pub(super) fn end<'a>(&self, call: impl FnOnce() -> MonitoredCall<'a>, error: Option<&Error>) {
        if let Some(open) = &self.0 {
            open.end(&call(), error);
        }
    }
}

impl OpenHandler {
    #[cold]
    fn end(&self, call: &MonitoredCall<'_>, error: Option<&Error>) {
        record_end(&self.span, error);
        let MonitoredCall { procedure, provider, peer, .. } = *call;
        let shared = peer.shared();
        let (Some(began), Some(threshold)) = (self.began, shared.config.slow_calls) else { return };
        let now = Instant::now();
        let took = now.saturating_duration_since(began);
        if took < threshold {
            return;
        }
        let Some(omitted) = shared.slow_log.next(now) else { return };
        tracing::info!(
            target: "calomel::rpc", parent: &self.span, procedure, provider, peer = %peer.address(), ?took, ?threshold,
            error = error.map(tracing::field::display), omitted, "slow handler"
        );
    }
}

#[cfg(feature = "opentelemetry")]
use with_opentelemetry::{continue_trace, trace_of};

#[cfg(feature = "opentelemetry")]
mod with_opentelemetry {
    use opentelemetry::trace::{SpanContext, TraceContextExt as _, TraceState};
    use opentelemetry::{Context, SpanId, TraceFlags, TraceId};
    use tracing::Span;
    use tracing_opentelemetry::OpenTelemetrySpanExt as _;

    use crate::TraceContext;

    /// The trace that a call passes on, with its span as the parent; else with the program's, where that of the call is filtered
    /// out.
    pub(super) fn trace_of(span: &Span, given: Option<&TraceContext>) -> Option<TraceContext> {
        if let Some(given) = given {
            continue_trace(span, given);
            return recorded_by(span).or_else(|| Some(given.clone()));
        }
        recorded_by(span).or_else(|| recorded_by(&Span::current()))
    }

    /// Makes a span that has not begun a part of a trace of another process.
    pub(super) fn continue_trace(span: &Span, trace: &TraceContext) {
        // It is valid by its own rules, so it is by those of OpenTelemetry; one that is not would only be left out.
        let state = trace.state().parse::<TraceState>().unwrap_or_default();
        let (trace_id, span_id) = (TraceId::from_bytes(trace.trace_id()), SpanId::from_bytes(trace.parent_id()));
        let parent = SpanContext::new(trace_id, span_id, TraceFlags::new(trace.flags()), true, state);
        // An error means that no layer records the span.
        let _ = span.set_parent(Context::new().with_remote_span_context(parent));
    }

    /// The trace as OpenTelemetry's layer has it for a span; `None` where there is no such layer, or it leaves the span out.
    fn recorded_by(span: &Span) -> Option<TraceContext> {
        let context = span.context();
        let span = context.span();
        let recorded = span.span_context();
        let (trace_id, span_id) = (recorded.trace_id().to_bytes(), recorded.span_id().to_bytes());
        let trace = TraceContext::new(trace_id, span_id, recorded.trace_flags().to_u8())?;
        Some(trace.with_state(&recorded.trace_state().header()))
    }
}

#[cfg(not(feature = "opentelemetry"))]
fn trace_of(_span: &Span, given: Option<&TraceContext>) -> Option<TraceContext> {
    given.cloned()
}

#[cfg(not(feature = "opentelemetry"))]
fn continue_trace(_span: &Span, _trace: &TraceContext) {}
