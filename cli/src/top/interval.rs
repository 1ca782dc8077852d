//! What a remote engine did between two of its statistics.

use std::collections::BTreeMap;
use std::time::Duration;

use calomel::{Latency, Stats, Traffic};
use clap::ValueEnum;
use serde::Serialize;

/// Rates are per second, times in nanoseconds.
#[derive(Clone, Serialize)]
pub(super) struct Interval {
    pub address: String,
    pub transport: Option<String>,
    /// The process and the number of the engine within it.
    pub process: u32,
    pub engine: u64,
    /// In seconds.
    pub uptime: f64,
    pub interval: f64,
    /// Whether the engine measures calls and handlers: if not, `procedures` is empty.
    pub measured: bool,
    /// Calls that the engine made.
    pub calls: f64,
    /// Calls of peers to it.
    pub requests: f64,
    pub sent_bytes: f64,
    pub received_bytes: f64,
    /// Bytes that it pulled and pushed, also by a device.
    pub transferred_bytes: f64,
    pub procedures: Vec<ProcedureRates>,
    pub peers: Vec<PeerRates>,
    /// Open ones, by transport.
    pub connections: BTreeMap<String, u64>,
    /// Calls and transfers of the engine that wait for peers, and calls of peers that are not answered.
    pub waiting: u64,
    pub handling: u64,
    pub exposed_regions: u64,
    pub exposed_bytes: u64,
    /// Since the engine was made; only those that are not zero.
    pub limits: BTreeMap<String, u64>,
    pub refusals: BTreeMap<String, u64>,
    /// Entries that the engine has left out of its lists.
    pub left_out: u64,
}

/// A procedure that the engine handles, or calls.
#[derive(Clone, Serialize)]
pub(super) struct ProcedureRates {
    /// Handled by the engine; else called by it.
    pub handled: bool,
    pub procedure: String,
    pub provider: u16,
    /// The procedure whose handler calls it.
    pub parent: Option<String>,
    pub calls: f64,
    pub errors: f64,
    /// Of the interval; `None` where it has no calls. For handlers the time that they ran.
    pub p50: Option<u64>,
    pub p99: Option<u64>,
    /// Since the engine was made.
    pub all_calls: u64,
    pub all_errors: u64,
}

#[derive(Clone, Serialize)]
pub(super) struct PeerRates {
    pub address: String,
    pub transport: Option<String>,
    /// In both directions.
    pub calls: f64,
    pub sent_bytes: f64,
    pub received_bytes: f64,
    pub waiting: u64,
    pub handling: u64,
}

/// The order of the procedures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Order {
    /// Most calls per second first.
    Rate,
    /// Slowest first, by the 99th percentile.
    P99,
    /// Most errors per second first, and then most errors.
    Errors,
    /// By name.
    Name,
}

impl Order {
    pub(super) fn next(self) -> Order {
        match self {
            Order::Rate => Order::P99,
            Order::P99 => Order::Errors,
            Order::Errors => Order::Name,
            Order::Name => Order::Rate,
        }
    }

    pub(super) fn sort(self, procedures: &mut [ProcedureRates]) {
        let name = |one: &ProcedureRates| (one.procedure.clone(), one.provider, !one.handled);
        procedures.sort_by_cached_key(name);
        match self {
            Order::Rate => procedures.sort_by(|a, b| b.calls.total_cmp(&a.calls)),
            Order::P99 => procedures.sort_by_key(|one| std::cmp::Reverse(one.p99)),
            Order::Errors => {
                procedures.sort_by(|a, b| b.errors.total_cmp(&a.errors).then(b.all_errors.cmp(&a.all_errors)));
            }
            Order::Name => {}
        }
    }
}

/// The counts of a procedure.
struct Counts<'a> {
    calls: u64,
    errors: u64,
    time: &'a Latency,
}

/// Whether it handles, the procedure, the provider, the parent.
type ProcedureKey<'a> = (bool, &'a str, u16, Option<&'a str>);

fn counts(stats: &Stats) -> BTreeMap<ProcedureKey<'_>, Counts<'_>> {
    let handlers = stats.handlers.iter().map(|handler| {
        let counts = Counts { calls: handler.calls, errors: handler.errors.values().sum(), time: &handler.running };
        ((true, &*handler.procedure, handler.provider, None), counts)
    });
    let calls = stats.calls.iter().map(|call| {
        let counts = Counts { calls: call.calls, errors: call.errors.values().sum(), time: &call.time };
        ((false, &*call.procedure, call.provider, call.parent.as_deref()), counts)
    });
    handlers.chain(calls).collect()
}

/// The distribution of what is in the second one and not in the first.
fn added(before: Option<&Latency>, after: &Latency) -> Latency {
    let old: BTreeMap<u64, u64> = before.map(|before| before.buckets.iter().copied().collect()).unwrap_or_default();
    let buckets = after.buckets.iter().map(|(end, count)| (*end, count.saturating_sub(old.get(end).copied().unwrap_or(0))));
    let mut latency = Latency::default();
    latency.buckets = buckets.filter(|(_, count)| *count > 0).collect();
    latency.count = latency.buckets.iter().map(|(_, count)| count).sum();
    latency.max = after.max;
    latency
}

/// The counts that are not zero of a type with nothing but counts.
fn nonzero(counts: &impl Serialize) -> BTreeMap<String, u64> {
    let fields = serde_json::to_value(counts).ok().and_then(|value| value.as_object().cloned()).unwrap_or_default();
    let count = |(name, value): (String, serde_json::Value)| Some((name, value.as_u64().filter(|count| *count > 0)?));
    fields.into_iter().filter_map(count).collect()
}

fn traffic(stats: &Stats) -> [u64; 5] {
    stats.transports.iter().fold([0; 5], |sum, transport| {
        let Traffic { calls, requests, sent_bytes, received_bytes, transferred_bytes, .. } = transport.traffic;
        let own = [calls, requests, sent_bytes, received_bytes, transferred_bytes];
        std::array::from_fn(|index| sum[index] + own[index])
    })
}

/// Whether the second one is of the same engine as the first, and later.
pub(super) fn continues(before: &Stats, after: &Stats) -> bool {
    (before.process, before.engine) == (after.process, after.engine) && after.uptime > before.uptime
}

/// What happened between the two, which are of one engine.
pub(super) fn interval(before: &Stats, after: &Stats, address: &str, transport: Option<String>, order: Order) -> Interval {
    let time = after.uptime.saturating_sub(before.uptime).max(Duration::from_micros(1)).as_secs_f64();
    let rate = |before: u64, after: u64| after.saturating_sub(before) as f64 / time;
    let old = counts(before);
    let procedures = counts(after).into_iter().map(|(key, new)| {
        // One that was left out before may have had any number of calls.
        let unknown = before.left_out > 0 && !old.contains_key(&key);
        let (calls, errors, time) = match old.get(&key) {
            Some(old) => (old.calls, old.errors, Some(old.time)),
            None if unknown => (new.calls, new.errors, Some(new.time)),
            None => (0, 0, None),
        };
        let latency = added(time, new.time);
        let quantile = |part| (latency.count > 0).then(|| latency.quantile(part).as_nanos() as u64);
        let (handled, procedure, provider, parent) = key;
        ProcedureRates {
            handled,
            procedure: procedure.to_owned(),
            provider,
            parent: parent.map(str::to_owned),
            calls: rate(calls, new.calls),
            errors: rate(errors, new.errors),
            p50: quantile(0.5),
            p99: quantile(0.99),
            all_calls: new.calls,
            all_errors: new.errors,
        }
    });
    let mut procedures: Vec<ProcedureRates> = procedures.collect();
    order.sort(&mut procedures);
    let old: BTreeMap<_, Traffic> = before.peers.iter().map(|peer| (&peer.address, peer.traffic)).collect();
    let peers = after.peers.iter().map(|peer| {
        let new = peer.traffic;
        let old = old.get(&peer.address).copied().unwrap_or(if before.left_out > 0 { new } else { Traffic::default() });
        PeerRates {
            address: peer.address.to_string(),
            transport: peer.transport.map(|transport| transport.to_string()),
            calls: rate(old.calls, new.calls) + rate(old.requests, new.requests),
            sent_bytes: rate(old.sent_bytes, new.sent_bytes),
            received_bytes: rate(old.received_bytes, new.received_bytes),
            waiting: peer.waiting,
            handling: peer.handling,
        }
    });
    let mut peers: Vec<PeerRates> = peers.collect();
    peers.sort_by(|a, b| b.calls.total_cmp(&a.calls).then(b.sent_bytes.total_cmp(&a.sent_bytes)));
    let (old, new) = (traffic(before), traffic(after));
    let [calls, requests, sent_bytes, received_bytes, transferred_bytes] =
        std::array::from_fn(|index| rate(old[index], new[index]));
    Interval {
        address: address.to_owned(),
        transport,
        process: after.process,
        engine: after.engine,
        uptime: after.uptime.as_secs_f64(),
        interval: time,
        measured: after.measured,
        calls,
        requests,
        sent_bytes,
        received_bytes,
        transferred_bytes,
        procedures,
        waiting: peers.iter().map(|peer| peer.waiting).sum(),
        handling: peers.iter().map(|peer| peer.handling).sum(),
        peers,
        connections: after.transports.iter().map(|transport| (transport.transport.to_string(), transport.open)).collect(),
        exposed_regions: after.exposed_regions,
        exposed_bytes: after.exposed_bytes,
        limits: nonzero(&after.limits),
        refusals: nonzero(&after.refusals),
        left_out: after.left_out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latency(buckets: &[(u64, u64)]) -> Latency {
        let mut latency = Latency::default();
        (latency.buckets, latency.max) = (buckets.to_vec(), Duration::from_nanos(1 << 30));
        latency
    }

    #[test]
    fn quantiles_are_those_of_the_interval() {
        let before = latency(&[(1000, 990), (2000, 10)]);
        let after = latency(&[(1000, 990), (2000, 20), (4000, 90)]);
        let found = added(Some(&before), &after);
        assert_eq!((found.count, found.buckets.clone()), (100, vec![(2000, 10), (4000, 90)]));
        assert_eq!(found.quantile(0.5), Duration::from_nanos(4000));
        assert_eq!(added(None, &before).count, 1000);
        assert_eq!(added(Some(&after), &after).count, 0);
    }

    #[test]
    fn an_engine_that_was_restarted_does_not_continue() {
        let stats = |engine, seconds| {
            let mut stats = Stats::default();
            (stats.engine, stats.uptime) = (engine, Duration::from_secs(seconds));
            stats
        };
        assert!(continues(&stats(1, 5), &stats(1, 6)));
        assert!(!continues(&stats(1, 5), &stats(2, 6)));
        assert!(!continues(&stats(1, 5), &stats(1, 2)));
    }

    #[test]
    fn procedures_are_in_the_order_that_was_asked_for() {
        let one = |procedure: &str, calls, p99, errors| ProcedureRates {
            handled: true,
            procedure: procedure.to_owned(),
            provider: 0,
            parent: None,
            calls,
            errors,
            p50: p99,
            p99,
            all_calls: 1,
            all_errors: 0,
        };
        let mut all = [one("b", 2.0, None, 0.0), one("c", 1.0, Some(7), 1.0), one("a", 2.0, Some(9), 0.5)];
        let mut names = |order: Order| {
            order.sort(&mut all);
            all.iter().map(|one| &*one.procedure).collect::<String>()
        };
        let orders = [Order::Rate, Order::P99, Order::Errors, Order::Name];
        assert_eq!(orders.map(&mut names), ["abc", "acb", "cab", "abc"]);
        assert!(orders.iter().zip(orders.iter().cycle().skip(1)).all(|(order, next)| order.next() == *next));
    }
}
