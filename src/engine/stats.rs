//! Statistics of an engine, as its users see them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::statistics::{CallCounts, CallPath, ErrorCounts};
use super::{Engine, EngineShared};
use crate::Address;
use crate::latency::{Latency, nanoseconds};
use crate::proto::{LimitCounts, PeerCalls, PeerId, PeerStats, Refusals, TransferDirection, TransportStats};

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
    /// makes on a thread of its own is outside. `(others)` stands for calls in further ways,
    /// where a procedure was called in more than 1024: each peer, provider and calling procedure is a way.
    pub parent: Option<String>,
    /// How many have ended, well or not.
    pub calls: u64,
    /// How many of them have failed, by the name of the [`Error`](crate::Error): `Timeout`, `Failed` and so on.
    pub errors: BTreeMap<String, u64>,
    /// Bytes of the arguments.
    pub sent_bytes: u64,
    /// Bytes of the results.
    pub received_bytes: u64,
    /// The time from when a call's arguments were encoded until its response had arrived; of a one-way call, until it was sent.
    /// Calls that were never sent are not among them.
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
        let mut by_peer: HashMap<PeerId, PeerCalls> = HashMap::new();
        for (name, CallPath { peer, provider, parent }, counts) in self.procedures.calls() {
            let to_peer = by_peer.entry(peer).or_default();
            to_peer.time.add(&counts.time);
            counts.errors.iter().for_each(|(kind, count)| *to_peer.errors.entry(kind.to_owned()).or_default() += count);
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
            let (transports, peers) = proto.connection_stats(&by_peer);
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
                peers,
                transports,
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
