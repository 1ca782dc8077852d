//! Statistics of an engine, as its users see them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::statistics::{CallCounts, CallPath, ErrorCounts, Histogram};
use super::{Engine, EngineShared};
use crate::Address;
use crate::proto::{LimitCounts, PeerStats, Refusals, TransferDirection, TransportStats, nanoseconds};

/// What an engine has counted and measured since it was made; made by [`Engine::stats`].
///
/// Written as JSON, durations are numbers of nanoseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Stats {
    /// The id of the engine's process.
    pub process: u32,
    /// The number of the engine within its process; the first has number 1.
    pub engine: u64,
    /// The addresses at which peers reach the engine.
    pub addresses: Vec<Address>,
    /// For how long the engine has existed.
    #[serde(with = "nanoseconds")]
    pub uptime: Duration,
    /// Whether calls, handlers and transfers are measured: see
    /// [`EngineBuilder::statistics`](crate::EngineBuilder::statistics). If not, these three lists are empty.
    pub measured: bool,
    /// The calls that this engine has made and that have ended, by procedure, provider and the procedure that made them.
    pub calls: Vec<CallStats>,
    /// The calls of peers, by provider and procedure.
    pub handlers: Vec<HandlerStats>,
    /// Calls of peers that named a procedure or a provider which is not defined.
    pub unknown_procedures: u64,
    /// The transfers that this engine has made and that have ended, by direction and size. Those of peers are counted among
    /// the traffic.
    pub transfers: Vec<TransferStats>,
    /// The peers that the engine knows.
    pub peers: Vec<PeerStats>,
    /// The connections, by transport.
    pub transports: Vec<TransportStats>,
    /// Regions that are exposed now.
    pub exposed_regions: u64,
    /// Their bytes.
    pub exposed_bytes: u64,
    /// How often the engine's limits were reached.
    pub limits: LimitCounts,
    /// What peers were refused.
    pub refusals: Refusals,
    /// How often a thread of the engine, or one that waited for it, has slept until the next event. With
    /// [`Progress::External`](crate::Progress::External), the sleeps of the program's own event loop are not among them.
    pub sleeps: u64,
    /// Entries of the lists that were left out of statistics which a peer has sent: see
    /// [`Endpoint::stats`](crate::Endpoint::stats).
    pub left_out: u64,
}

/// The calls of one procedure that an engine has made, as [`Stats`] has them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CallStats {
    /// The procedure that was called.
    pub procedure: String,
    /// The provider that was called.
    pub provider: u16,
    /// The procedure of this engine whose handler has made the calls; `None` for calls outside handlers. A call that a handler
    /// makes on a thread of its own is outside. `(others)` stands for all that are called in more than 64 different ways.
    pub parent: Option<String>,
    /// How many have ended, well or not.
    pub calls: u64,
    /// How many of them have failed, by the name of the [`Error`](crate::Error): `Timeout`, `Failed` and so on.
    pub errors: BTreeMap<String, u64>,
    /// Bytes of the arguments.
    pub sent_bytes: u64,
    /// Bytes of the results.
    pub received_bytes: u64,
    /// The time from the call until its response had arrived; of a one-way call, until it was sent. Calls that were never sent
    /// are not among them.
    pub time: Latency,
}

/// The calls of peers to one procedure, as [`Stats`] has them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HandlerStats {
    /// The procedure. `(others)` stands for those that were defined after 4096 others.
    pub procedure: String,
    /// The provider that defines it.
    pub provider: u16,
    /// How many were answered, or were one-way and have been handled.
    pub calls: u64,
    /// How many of them have failed, by the name of the [`Error`](crate::Error) that the caller gets. `Cancelled`: the caller
    /// no longer took the answer.
    pub errors: BTreeMap<String, u64>,
    /// Bytes of the arguments.
    pub received_bytes: u64,
    /// Bytes of the results.
    pub sent_bytes: u64,
    /// The time from the arrival until the handler began. It is as exact as the engine's clock, which the engine reads every few
    /// microseconds.
    pub waiting: Latency,
    /// The time from the beginning of the handler until it has answered and returned, decoding and encoding included. Of a
    /// handler that answers later ([`Engine::define_async`], [`Engine::define_deferred`]): from the arrival until the answer.
    pub running: Latency,
}

/// The transfers of one direction and size class that an engine has made, as [`Stats`] has them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TransferStats {
    /// Pull or push.
    pub direction: TransferDirection,
    /// The largest length of the class, in bytes: 4 KiB, 64 KiB, 1 MiB, 16 MiB, or [`u64::MAX`].
    pub up_to: u64,
    /// How many have ended, well or not.
    pub transfers: u64,
    /// Bytes that were transferred.
    pub bytes: u64,
    /// How many have failed, by the name of the [`Error`](crate::Error).
    pub errors: BTreeMap<String, u64>,
    /// The time that they took.
    pub time: Latency,
}

/// A distribution of durations. They are counted in buckets, four for each power of two, so a quantile is up to a quarter above
/// the exact one. What takes more than 4.5 minutes is counted in one bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Latency {
    /// How many durations there are.
    pub count: u64,
    /// Their sum.
    #[serde(with = "nanoseconds")]
    pub total: Duration,
    /// The median.
    #[serde(with = "nanoseconds")]
    pub p50: Duration,
    /// Nine of ten are not above it.
    #[serde(with = "nanoseconds")]
    pub p90: Duration,
    /// 99 of 100 are not above it.
    #[serde(with = "nanoseconds")]
    pub p99: Duration,
    /// The longest; exact.
    #[serde(with = "nanoseconds")]
    pub max: Duration,
    /// The buckets that are not empty, in order: their upper ends in nanoseconds, and how many durations are below that and not
    /// in an earlier bucket.
    pub buckets: Vec<(u64, u64)>,
}

impl Latency {
    fn new(histogram: &Histogram) -> Latency {
        let buckets: Vec<(u64, u64)> = histogram.buckets().collect();
        let (total, max) = (Duration::from_nanos(histogram.total), Duration::from_nanos(histogram.max));
        let count = buckets.iter().map(|(_, count)| count).sum();
        let mut latency = Latency { count, total, max, buckets, ..Latency::default() };
        latency.p50 = latency.quantile(0.5);
        latency.p90 = latency.quantile(0.9);
        latency.p99 = latency.quantile(0.99);
        latency
    }

    /// The mean; zero where there is none.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(u64::try_from(self.total.as_nanos()).unwrap_or(u64::MAX).checked_div(self.count).unwrap_or(0))
    }

    /// The duration that this part of them is not above: 0.999 for all but one in a thousand. Zero where there are none.
    pub fn quantile(&self, part: f64) -> Duration {
        let rank = ((self.count as f64 * part).ceil() as u64).max(1);
        let mut below = 0;
        let bucket = self.buckets.iter().find(|(_, count)| {
            below += count;
            below >= rank
        });
        bucket.map_or(self.max, |(end, _)| self.max.min(Duration::from_nanos(*end)))
    }
}

fn by_kind(errors: &ErrorCounts) -> BTreeMap<String, u64> {
    errors.iter().map(|(kind, count)| (kind.to_owned(), count)).collect()
}

impl Stats {
    /// Cuts the lists, so that they fit into a message: what takes part in the most calls is kept.
    pub(crate) fn bounded(mut self) -> Stats {
        const MOST: usize = 256;
        fn cut<T, K: Ord>(list: &mut Vec<T>, weight: impl Fn(&T) -> K) -> u64 {
            if list.len() <= MOST {
                return 0;
            }
            list.sort_by_key(|entry| std::cmp::Reverse(weight(entry)));
            let left_out = list.len() - MOST;
            list.truncate(MOST);
            left_out as u64
        }
        self.left_out = cut(&mut self.calls, |call| call.calls)
            + cut(&mut self.handlers, |handler| handler.calls)
            + cut(&mut self.peers, |peer| peer.traffic.calls + peer.traffic.requests);
        self
    }
}

impl EngineShared {
    pub(crate) fn stats(&self) -> Stats {
        if self.core.is_forked() {
            // Its tables may be locked by threads that the child does not have.
            return Stats::default();
        }
        let handled = self.statistics.all_handled();
        let names: HashMap<u32, &str> = handled.iter().map(|handled| (handled.number, &*handled.name)).collect();
        // Procedures of one name, with different types, are counted together.
        let mut calls: BTreeMap<(String, u16, Option<String>), CallCounts> = BTreeMap::new();
        for (name, CallPath { provider, parent }, counts) in self.procedures.calls() {
            let parent = if parent == CallPath::OTHERS { Some("(others)") } else { names.get(&parent).copied() };
            calls.entry((name.to_string(), provider, parent.map(str::to_owned))).or_default().add(&counts);
        }
        let calls = calls.into_iter().map(|((procedure, provider, parent), counts)| CallStats {
            procedure,
            provider,
            parent,
            calls: counts.calls,
            errors: by_kind(&counts.errors),
            sent_bytes: counts.sent_bytes,
            received_bytes: counts.received_bytes,
            time: Latency::new(&counts.time),
        });
        let handlers = handled.iter().map(|handled| {
            let counts = handled.snapshot();
            HandlerStats {
                procedure: handled.name.to_string(),
                provider: handled.provider,
                calls: counts.calls,
                errors: by_kind(&counts.errors),
                received_bytes: counts.received_bytes,
                sent_bytes: counts.sent_bytes,
                waiting: Latency::new(&counts.waiting),
                running: Latency::new(&counts.running),
            }
        });
        let transfers = self.statistics.transfers().into_iter().map(|((direction, up_to), counts)| TransferStats {
            direction,
            up_to,
            transfers: counts.transfers,
            bytes: counts.bytes,
            errors: by_kind(&counts.errors),
            time: Latency::new(&counts.time),
        });
        let (calls, handlers, transfers) = (calls.collect(), handlers.collect(), transfers.collect());
        let addresses = self.addresses();
        self.core.with_proto(|proto| {
            let (regions, bytes) = proto.exposed_memory();
            Stats {
                process: std::process::id(),
                engine: self.statistics.number,
                addresses,
                uptime: self.statistics.began.elapsed(),
                measured: self.statistics.is_on(),
                calls,
                handlers,
                unknown_procedures: self.statistics.unknown.load(Ordering::Relaxed),
                transfers,
                peers: proto.peer_stats(),
                transports: proto.transport_stats(),
                exposed_regions: regions as u64,
                exposed_bytes: bytes as u64,
                limits: proto.limited(),
                refusals: proto.refusals(),
                sleeps: self.core.sleeps(),
                left_out: 0,
            }
        })
    }
}

impl Engine {
    /// What this engine has counted and measured since it was made: calls, handlers, transfers, peers, connections, exposed
    /// memory, limits and refusals. It takes locks that calls take, for a moment, and can be called at any time, also after the
    /// engine was finalized. In a forked child it is empty.
    ///
    /// ```
    /// use calomel::{Engine, Request};
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let server = Engine::server("loop://")?;
    /// server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y)?;
    /// let client = Engine::client("loop")?;
    /// client.procedure::<(i32, i32), i32>("sum").on(&client.lookup(server.address())?).call(&(40, 2))?;
    ///
    /// let stats = client.stats();
    /// let sum = &stats.calls[0];
    /// assert_eq!((&*sum.procedure, sum.calls), ("sum", 1));
    /// println!("half of the calls took {:?} or less, the longest {:?}", sum.time.p50, sum.time.max);
    /// # Ok(())
    /// # }
    /// ```
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }
}
