//! The statistics of an engine, in the recorder of the crate `metrics` that the program has installed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Once;
use std::time::Duration;

use metrics::{Key, KeyName, Label, Level, Metadata, Recorder, with_recorder};

use super::{CallStats, Engine, HandlerStats, Stats, TransferStats};
use crate::latency::Latency;
use crate::proto::{LimitCounts, Refusals, Traffic, TransportStats};
use crate::sync::Mutex;

/// Upper ends of the buckets that are published, as powers of two of nanoseconds: 1 µs to 69 s. `Latency` has four to a power of
/// two, which would be a series of the recorder each.
const BOUNDS: std::ops::RangeInclusive<u32> = 10..=36;

/// Most entries of each list that have labels of their own. A recorder never forgets a series, and each entry takes some 35.
const MAX_APART: usize = 512;

/// What stands for the other entries.
const OTHERS: &str = "(others)";

static METADATA: Metadata<'static> = Metadata::new("calomel", Level::INFO, Some(module_path!()));

#[derive(Clone, Copy, PartialEq)]
enum MetricKind {
    Counter,
    Gauge,
}
use MetricKind::{Counter, Gauge};

/// The buckets, the sum and the number of a histogram.
struct LatencyNames {
    bucket: &'static str,
    sum: &'static str,
    count: &'static str,
}

macro_rules! latency_names {
    ($name:literal) => {
        LatencyNames { bucket: concat!($name, "_bucket"), sum: concat!($name, "_sum"), count: concat!($name, "_count") }
    };
}

const CALL_DURATION: LatencyNames = latency_names!("calomel_call_duration_seconds");
const HANDLER_WAITING: LatencyNames = latency_names!("calomel_handler_waiting_seconds");
const HANDLER_DURATION: LatencyNames = latency_names!("calomel_handler_duration_seconds");
const TRANSFER_DURATION: LatencyNames = latency_names!("calomel_transfer_duration_seconds");

const HISTOGRAMS: &[(LatencyNames, &str)] = &[
    (CALL_DURATION, "the time from a call until its response had arrived"),
    (HANDLER_WAITING, "the time that calls of peers waited for their handlers"),
    (HANDLER_DURATION, "the time that handlers took"),
    (TRANSFER_DURATION, "the time that pulls and pushes of this engine took"),
];

const METRICS: &[(&str, MetricKind, &str)] = &[
    ("calomel_calls_total", Counter, "Calls of this engine that have ended, well or not."),
    ("calomel_call_errors_total", Counter, "Calls of this engine that have failed, by the name of the error."),
    ("calomel_call_sent_bytes_total", Counter, "Bytes of the arguments of this engine's calls."),
    ("calomel_call_received_bytes_total", Counter, "Bytes of the results of this engine's calls."),
    ("calomel_handled_calls_total", Counter, "Calls of peers that were answered, or were one-way and have been handled."),
    ("calomel_handler_errors_total", Counter, "Calls of peers that have failed, by the name of the error."),
    ("calomel_handler_received_bytes_total", Counter, "Bytes of the arguments of peers' calls."),
    ("calomel_handler_sent_bytes_total", Counter, "Bytes of the results of peers' calls."),
    ("calomel_unknown_procedures_total", Counter, "Calls of peers to a procedure or a provider that is not defined."),
    (
        "calomel_transfers_total",
        Counter,
        "Pulls and pushes of this engine that have ended, by the largest length of their class.",
    ),
    ("calomel_transfer_errors_total", Counter, "Pulls and pushes of this engine that have failed, by the name of the error."),
    ("calomel_transferred_bytes_total", Counter, "Bytes that this engine has pulled and pushed."),
    ("calomel_sent_bytes_total", Counter, "Bytes sent, by transport: messages with their heads, and bulk data."),
    ("calomel_received_bytes_total", Counter, "Bytes received, by transport: messages with their heads, and bulk data."),
    ("calomel_transport_calls_total", Counter, "Calls of this engine, by transport."),
    ("calomel_transport_requests_total", Counter, "Calls of peers that were accepted, by transport."),
    (
        "calomel_transport_transfers_total",
        Counter,
        "Pulls and pushes of this engine that succeeded over a connection, by transport.",
    ),
    ("calomel_transport_transferred_bytes_total", Counter, "Bytes of these transfers, including those that a device moved."),
    (
        "calomel_transport_served_transfers_total",
        Counter,
        "Pulls and pushes that peers began, without those that a device carries out alone.",
    ),
    ("calomel_connections", Gauge, "Connections that are open."),
    ("calomel_connections_dialled_total", Counter, "Connections that this engine dialled, and that were opened."),
    ("calomel_connections_accepted_total", Counter, "Connections that were accepted and opened."),
    ("calomel_connections_failed_total", Counter, "Connections that ended before they were open."),
    ("calomel_connections_ended_total", Counter, "Open connections that have ended."),
    ("calomel_peers", Gauge, "Peers that the engine knows."),
    ("calomel_waiting_operations", Gauge, "Calls and transfers of this engine that wait for a peer."),
    ("calomel_handling_requests", Gauge, "Calls of peers that arrive, wait for their handlers, or are being handled."),
    ("calomel_exposed_regions", Gauge, "Regions of memory that are exposed."),
    ("calomel_exposed_bytes", Gauge, "Bytes of memory that are exposed."),
    ("calomel_limits_reached_total", Counter, "How often the engine's limits were reached."),
    ("calomel_refusals_total", Counter, "What peers were refused, by cause."),
    ("calomel_sleeps_total", Counter, "How often a thread of the engine has slept until the next event."),
    ("calomel_uptime_seconds", Gauge, "For how long the engine has existed."),
];

/// The procedure, the provider, and the procedure that made the calls.
type EntryKey = (String, u16, Option<String>);

/// The entries of each list that have labels of their own. They keep them, since a counter must not fall.
#[derive(Default)]
pub(super) struct PublishedEntries {
    calls: Mutex<BTreeSet<EntryKey>>,
    handlers: Mutex<BTreeSet<EntryKey>>,
}

/// The entries by their labels: one each, and all that are beyond the limit together.
fn grouped<'s, T>(
    list: &'s [T],
    key: impl Fn(&T) -> EntryKey,
    apart: &Mutex<BTreeSet<EntryKey>>,
) -> BTreeMap<EntryKey, Vec<&'s T>> {
    let mut apart = apart.lock();
    let mut groups: BTreeMap<EntryKey, Vec<&'s T>> = BTreeMap::new();
    for entry in list {
        let key = key(entry);
        let is_apart = apart.contains(&key) || apart.len() < MAX_APART && apart.insert(key.clone());
        groups.entry(if is_apart { key } else { (OTHERS.to_owned(), 0, None) }).or_default().push(entry);
    }
    groups
}

fn entry_labels((procedure, provider, parent): EntryKey) -> Vec<Label> {
    let mut labels = vec![Label::new("procedure", procedure), Label::new("provider", provider.to_string())];
    labels.extend(parent.map(|parent| Label::new("parent", parent)));
    labels
}

struct Publisher<'a> {
    recorder: &'a dyn Recorder,
    engine: Label,
}

impl Publisher<'_> {
    fn key(&self, name: &'static str, labels: &[Label]) -> Key {
        let mut all = vec![self.engine.clone()];
        all.extend_from_slice(labels);
        Key::from_parts(KeyName::from_const_str(name), all)
    }

    fn counter(&self, name: &'static str, labels: &[Label], value: u64) {
        self.recorder.register_counter(&self.key(name, labels), &METADATA).absolute(value);
    }

    fn gauge(&self, name: &'static str, labels: &[Label], value: f64) {
        self.recorder.register_gauge(&self.key(name, labels), &METADATA).set(value);
    }

    /// A counter with one more label, for each of the counts.
    fn counters<'c>(
        &self,
        name: &'static str,
        labels: &[Label],
        label: &'static str,
        counts: impl Iterator<Item = (&'c str, u64)>,
    ) {
        for (value, count) in counts {
            let mut labels = labels.to_vec();
            labels.push(Label::new(label, value.to_owned()));
            self.counter(name, &labels, count);
        }
    }

    fn errors<'c>(&self, name: &'static str, labels: &[Label], of: impl Iterator<Item = &'c BTreeMap<String, u64>>) {
        let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
        of.flatten().for_each(|(error, count)| *sums.entry(error).or_default() += count);
        self.counters(name, labels, "error", sums.into_iter());
    }

    /// The sum of some distributions, as Prometheus has histograms: each bucket counts all that is not above its end.
    fn latency<'c>(&self, names: &LatencyNames, labels: &[Label], of: impl Iterator<Item = &'c Latency>) {
        let (mut count, mut total, mut buckets) = (0, Duration::ZERO, BTreeMap::new());
        for latency in of {
            count += latency.count;
            total += latency.total;
            latency.buckets.iter().for_each(|(end, count)| *buckets.entry(*end).or_insert(0) += count);
        }
        let mut buckets = buckets.into_iter().peekable();
        let mut below = 0;
        let bucket = |end: String, count| {
            let mut labels = labels.to_vec();
            labels.push(Label::new("le", end));
            self.counter(names.bucket, &labels, count);
        };
        for power in BOUNDS {
            while let Some((_, more)) = buckets.next_if(|(end, _)| *end <= 1 << power) {
                below += more;
            }
            bucket(((1u64 << power) as f64 / 1e9).to_string(), below);
        }
        bucket("+Inf".to_owned(), count);
        self.gauge(names.sum, labels, total.as_secs_f64());
        self.counter(names.count, labels, count);
    }

    fn calls(&self, key: EntryKey, of: &[&CallStats]) {
        let labels = &entry_labels(key);
        self.counter("calomel_calls_total", labels, of.iter().map(|call| call.calls).sum());
        self.counter("calomel_call_sent_bytes_total", labels, of.iter().map(|call| call.sent_bytes).sum());
        self.counter("calomel_call_received_bytes_total", labels, of.iter().map(|call| call.received_bytes).sum());
        self.errors("calomel_call_errors_total", labels, of.iter().map(|call| &call.errors));
        self.latency(&CALL_DURATION, labels, of.iter().map(|call| &call.time));
    }

    fn handlers(&self, key: EntryKey, of: &[&HandlerStats]) {
        let labels = &entry_labels(key);
        self.counter("calomel_handled_calls_total", labels, of.iter().map(|handler| handler.calls).sum());
        self.counter("calomel_handler_received_bytes_total", labels, of.iter().map(|handler| handler.received_bytes).sum());
        self.counter("calomel_handler_sent_bytes_total", labels, of.iter().map(|handler| handler.sent_bytes).sum());
        self.errors("calomel_handler_errors_total", labels, of.iter().map(|handler| &handler.errors));
        self.latency(&HANDLER_WAITING, labels, of.iter().map(|handler| &handler.waiting));
        self.latency(&HANDLER_DURATION, labels, of.iter().map(|handler| &handler.running));
    }

    fn transfers(&self, stats: &TransferStats) {
        let direction = format!("{:?}", stats.direction).to_lowercase();
        let up_to = if stats.up_to == u64::MAX { "+Inf".to_owned() } else { stats.up_to.to_string() };
        let labels = &[Label::new("direction", direction), Label::new("up_to_bytes", up_to)];
        self.counter("calomel_transfers_total", labels, stats.transfers);
        self.counter("calomel_transferred_bytes_total", labels, stats.bytes);
        self.errors("calomel_transfer_errors_total", labels, std::iter::once(&stats.errors));
        self.latency(&TRANSFER_DURATION, labels, std::iter::once(&stats.time));
    }

    fn transport(&self, stats: &TransportStats) {
        let labels = &[Label::new("transport", stats.transport.to_string())];
        self.gauge("calomel_connections", labels, stats.open as f64);
        self.counter("calomel_connections_dialled_total", labels, stats.dialled);
        self.counter("calomel_connections_accepted_total", labels, stats.accepted);
        self.counter("calomel_connections_failed_total", labels, stats.failed);
        self.counter("calomel_connections_ended_total", labels, stats.ended);
        let Traffic { received_bytes, sent_bytes, calls, requests, transfers, transferred_bytes, served_transfers } =
            stats.traffic;
        self.counter("calomel_sent_bytes_total", labels, sent_bytes);
        self.counter("calomel_received_bytes_total", labels, received_bytes);
        self.counter("calomel_transport_calls_total", labels, calls);
        self.counter("calomel_transport_requests_total", labels, requests);
        self.counter("calomel_transport_transfers_total", labels, transfers);
        self.counter("calomel_transport_transferred_bytes_total", labels, transferred_bytes);
        self.counter("calomel_transport_served_transfers_total", labels, served_transfers);
    }

    /// What has no label but the engine.
    fn whole(&self, stats: &Stats) {
        self.counter("calomel_unknown_procedures_total", &[], stats.unknown_procedures);
        self.gauge("calomel_peers", &[], stats.peers.len() as f64);
        self.gauge("calomel_waiting_operations", &[], stats.peers.iter().map(|peer| peer.waiting).sum::<u64>() as f64);
        self.gauge("calomel_handling_requests", &[], stats.peers.iter().map(|peer| peer.handling).sum::<u64>() as f64);
        self.gauge("calomel_exposed_regions", &[], stats.exposed_regions as f64);
        self.gauge("calomel_exposed_bytes", &[], stats.exposed_bytes as f64);
        self.counter("calomel_sleeps_total", &[], stats.sleeps);
        self.gauge("calomel_uptime_seconds", &[], stats.uptime.as_secs_f64());
    }

    fn limits(&self, limits: LimitCounts) {
        let LimitCounts { connections, handshakes, requests, answers, transfers, ended, exposures } = limits;
        let counts = [
            ("connections", connections),
            ("handshakes", handshakes),
            ("requests", requests),
            ("answers", answers),
            ("transfers", transfers),
            ("ended", ended),
            ("exposures", exposures),
        ];
        self.counters("calomel_limits_reached_total", &[], "limit", counts.into_iter());
    }

    fn refusals(&self, refusals: Refusals) {
        let Refusals { unknown_token, revoked, restarted, other_peer, other_call, expired, used_up, .. } = refusals;
        let Refusals { mode, range, quota, shutdown, calls, connections, one_way, busy, .. } = refusals;
        let counts = [
            ("unknown_token", unknown_token),
            ("revoked", revoked),
            ("restarted", restarted),
            ("other_peer", other_peer),
            ("other_call", other_call),
            ("expired", expired),
            ("used_up", used_up),
            ("mode", mode),
            ("range", range),
            ("quota", quota),
            ("shutdown", shutdown),
            ("calls", calls),
            ("connections", connections),
            ("one_way", one_way),
            ("busy", busy),
        ];
        self.counters("calomel_refusals_total", &[], "cause", counts.into_iter());
    }
}

fn describe(recorder: &dyn Recorder) {
    let describe = |name: &'static str, kind, text: String| {
        let name = KeyName::from_const_str(name);
        // Without a unit: the names have them, and recorders may append them.
        match kind {
            Counter => recorder.describe_counter(name, None, text.into()),
            Gauge => recorder.describe_gauge(name, None, text.into()),
        }
    };
    METRICS.iter().for_each(|(name, kind, text)| describe(name, *kind, (*text).to_owned()));
    for (names, text) in HISTOGRAMS {
        describe(names.bucket, Counter, format!("Histogram of {text}: how many took `le` seconds or less."));
        describe(names.sum, Gauge, format!("Sum of {text}."));
        describe(names.count, Counter, format!("Count of {text}."));
    }
}

impl Engine {
    /// Publishes [`Engine::stats`] to the recorder of the crate [`metrics`](https://docs.rs/metrics) that the program has
    /// installed, such as Prometheus'. Call it before each scrape, or every few seconds; calls and transfers themselves do
    /// nothing for it. Without a recorder it does nothing. The chapter on monitoring of the book lists the metrics.
    ///
    /// Each has the label `engine`, the number of the engine in its process. Labels name procedures, providers, transports and
    /// errors, and never peers: peers can't add series to the recorder. Of calls and of handlers, 512 entries have labels of
    /// their own; the rest is counted as the procedure `(others)`.
    ///
    /// The first call in a process describes the metrics to the recorder, so install that before.
    ///
    /// In a forked child it does nothing.
    ///
    /// ```
    /// use calomel::Engine;
    /// use metrics_exporter_prometheus::PrometheusBuilder;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let recorder = PrometheusBuilder::new().install_recorder()?;
    /// let engine = Engine::server("loop://")?;
    /// engine.publish_metrics();
    /// assert!(recorder.render().contains(r#"calomel_peers{engine="1"} 0"#));
    /// # Ok(())
    /// # }
    /// ```
    pub fn publish_metrics(&self) {
        static DESCRIBED: Once = Once::new();
        if self.shared.core.is_forked() {
            return;
        }
        let (stats, entries) = (self.stats(), &self.shared.published);
        // A recorder is code of the program: it runs where no lock is held.
        let calls = grouped(&stats.calls, |call| (call.procedure.clone(), call.provider, call.parent.clone()), &entries.calls);
        let handlers = grouped(&stats.handlers, |handler| (handler.procedure.clone(), handler.provider, None), &entries.handlers);
        with_recorder(|recorder| {
            DESCRIBED.call_once(|| describe(recorder));
            let publisher = Publisher { recorder, engine: Label::new("engine", stats.engine.to_string()) };
            calls.into_iter().for_each(|(key, of)| publisher.calls(key, &of));
            handlers.into_iter().for_each(|(key, of)| publisher.handlers(key, &of));
            stats.transfers.iter().for_each(|transfers| publisher.transfers(transfers));
            stats.transports.iter().for_each(|transport| publisher.transport(transport));
            publisher.limits(stats.limits);
            publisher.refusals(stats.refusals);
            publisher.whole(&stats);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_beyond_the_limit_are_counted_together_and_stay_there() {
        let apart = Mutex::default();
        let key = |number: &u32| (number.to_string(), 7, None);
        let many: Vec<u32> = (0..2 * MAX_APART as u32).collect();
        let groups = grouped(&many, key, &apart);
        assert_eq!(groups.len(), MAX_APART + 1);
        assert_eq!(groups[&(OTHERS.to_owned(), 0, None)].len(), MAX_APART);
        // In another order, each is where it was.
        let reversed: Vec<u32> = many.iter().rev().copied().collect();
        let again = grouped(&reversed, key, &apart);
        assert!(again.keys().eq(groups.keys()));
    }
}
