//! The load of each process, with a check of each result.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use calomel::{Bulk, BulkMode, Endpoint, Error, Pending};

use crate::content::{content, mistake, text};
use crate::journal::{Id, bound, loss};
use crate::serve::{BACK, Node};
use crate::support::{Random, block_on};

/// Threads of each process that call and transfer.
pub const THREADS: u32 = 3;

/// The content that only the process itself writes into its memory.
const OWN: u8 = 0xee;

/// One thread of a process.
pub struct Load {
    pub node: Arc<Node>,
    caller: u32,
    number: u32,
    /// Reseeded for each operation, so that the sequence does not depend on earlier results.
    random: Random,
}

type Operation = fn(&mut Load, usize, Duration);
/// The operations and their weights.
const OPERATIONS: &[(usize, Operation)] = &[
    (20, Load::call),
    (8, Load::tell),
    (6, Load::call_later),
    (8, Load::call_and_cancel),
    (6, Load::relay),
    (5, Load::call_many),
    (4, Load::call_async),
    (8, Load::export_for_reading),
    (6, Load::export_for_writing),
    (6, Load::forward),
    (8, Load::reclaim_while_pulled),
    (5, Load::reclaim_while_pushed),
    (12, Load::visit),
    (4, Load::scope),
    (4, Load::pull_briefly),
];

impl Load {
    pub fn new(node: &Arc<Node>, thread: u32) -> Load {
        Load { node: node.clone(), caller: node.caller_id(thread), number: 0, random: Random(0) }
    }

    pub fn run(&mut self, stop: &AtomicBool) {
        let seed = self.node.seed ^ Random(u64::from(self.caller)).next();
        for turn in 0.. {
            if stop.load(Ordering::SeqCst) {
                return;
            }
            self.random = Random(seed ^ Random(turn).next());
            let peer = (self.node.index + 1 + self.random.below(self.peers() - 1)) % self.peers();
            let limit = Duration::from_millis([20, 100, 300, 1000, 3000, 3000][self.random.below(6)]);
            let mut draw = self.random.below(OPERATIONS.iter().map(|(weight, _)| weight).sum());
            for (weight, operation) in OPERATIONS {
                if draw < *weight {
                    operation(self, peer, limit);
                    break;
                }
                draw -= weight;
            }
            self.node.reap(false);
            // While everything fails at once, slow down.
            thread::sleep(Duration::from_micros(self.random.below(2000) as u64));
        }
    }

    fn peers(&self) -> usize {
        self.node.peers.get().unwrap().len()
    }

    fn id(&mut self) -> Id {
        self.number += 1;
        (self.caller, self.number)
    }

    /// Mostly small, often around the eager limit, sometimes large.
    fn len(&mut self) -> usize {
        match self.random.below(20) {
            0 => 0,
            1..12 => self.random.below(300),
            12..15 => (16 << 10) - 40 + self.random.below(80),
            15..19 => self.random.below(200_000),
            _ => self.random.below(3 << 20),
        }
    }

    /// For bulks: seldom small.
    fn bulk_len(&mut self) -> usize {
        match self.random.below(10) {
            0 => self.random.below(5000),
            1..8 => self.random.below(600_000),
            _ => self.random.below(4 << 20),
        }
    }

    fn other(&mut self, than: usize) -> usize {
        let other = (than + 1 + self.random.below(self.peers() - 1)) % self.peers();
        // A relay to this process itself is allowed.
        if other == than { self.node.index } else { other }
    }

    fn timed<R>(
        &self,
        what: &str,
        peer: usize,
        limit: Duration,
        work: impl FnOnce(Endpoint) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let node = &self.node;
        node.journal.timed(|| format!("{what} at {peer} with {limit:?}"), limit, || work(node.endpoint(peer)?))
    }

    /// Records the end of a transfer of this thread.
    fn moved(&self, result: &Result<usize, Error>, expected: &[&str]) {
        self.node.journal.ended("transfer", result, expected);
        if let Ok(len) = result {
            self.node.journal.count("bytes", *len as u64);
        }
    }

    fn verify(&self, bytes: &[u8], seed: u64, offset: usize, what: &str) {
        match mistake(bytes, seed, offset) {
            None => self.node.journal.count("verified", bytes.len() as u64),
            Some(mistake) => loss(&format!("{what}: {mistake}")),
        }
    }

    fn expect(&self, found: u64, expected: u64, what: &str) {
        if found != expected {
            loss(&format!("the response of `{what}` is wrong: {found:x} instead of {expected:x}"));
        }
    }

    /// Checks that reclaimed memory is no longer written by others.
    fn assert_unwritten(&mut self, mut bytes: Vec<u8>, what: &str) {
        bytes.fill(OWN);
        thread::sleep(Duration::from_millis(self.random.below(20) as u64));
        if std::hint::black_box(&bytes[..]) != vec![OWN; bytes.len()] {
            loss(&format!("memory was written after {what}"));
        }
    }

    fn call(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len, back) = (self.id(), self.random.next(), self.len(), self.len());
        let sent = text(seed, len);
        let answer = self.timed("call", peer, limit, |to| {
            let echo = self.node.engine.procedure::<(Id, u64, usize, String), String>("echo");
            echo.on(to).timeout(limit).call(&(id, seed, back, sent))
        });
        self.node.journal.ended("call", &answer, &[]);
        if answer.is_ok_and(|answer| answer != text(seed ^ BACK, back)) {
            loss(&format!("the response of {back} bytes to call {id:x?} is wrong"));
        }
    }

    fn tell(&mut self, peer: usize, limit: Duration) {
        for _ in 0..1 + self.random.below(20) {
            let (id, seed, len) = (self.id(), self.random.next(), self.len().min(100_000));
            let result = self.timed("one-way call", peer, limit, |to| {
                let tell = self.node.engine.procedure::<(Id, u64, String), ()>("tell");
                tell.on(to).timeout(limit).notify(&(id, seed, text(seed, len)))
            });
            self.node.journal.ended("one-way call", &result, &[]);
        }
    }

    fn call_later(&mut self, peer: usize, limit: Duration) {
        let (id, seed, after, how) = (self.id(), self.random.next(), self.random.below(50) as u64, self.random.below(3) as u8);
        let answer = self.timed("deferred call", peer, limit, |to| {
            let later = self.node.engine.procedure::<(Id, u64, u64, u8), u64>("later");
            later.on(to).timeout(limit).call(&(id, seed, after, how))
        });
        // A peer that leaves drops the responder.
        self.node.journal.ended("deferred call", &answer, &["no response", "failed"]);
        if let Ok(answer) = answer {
            self.expect(answer, seed ^ BACK, "later");
            if how != 0 {
                loss("a response came from a responder that must not respond");
            }
        }
    }

    fn call_and_cancel(&mut self, peer: usize, limit: Duration) {
        let (id, seed) = (self.id(), self.random.next());
        let (millis, pause, how) = (self.random.below(60) as u64, self.random.below(40) as u64, self.random.below(3));
        let answer = self.timed("cancelled call", peer, limit, |to| {
            let doze = self.node.engine.procedure::<(Id, u64, u64), u64>("doze");
            let pending = doze.on(to).timeout(limit).start(&(id, seed, millis))?;
            if how < 2 {
                thread::sleep(Duration::from_millis(pause).min(limit));
            }
            match how {
                0 => pending.cancel(),
                1 => return Ok(None),
                _ => {}
            }
            pending.wait().map(Some)
        });
        self.node.journal.ended("cancelled call", &answer, &["cancelled"]);
        if let Ok(Some(answer)) = answer {
            self.expect(answer, seed ^ BACK, "doze");
        }
    }

    fn relay(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len, to) = (self.id(), self.random.next(), self.len(), self.other(peer));
        let answer = self.timed("relayed call", peer, limit, |at| {
            let relay = self.node.engine.procedure::<(Id, usize, u64, usize), Result<u64, String>>("relay");
            relay.on(at).timeout(limit).call(&(id, to, seed, len))
        });
        self.node.journal.ended("relayed call", &answer, &[]);
        if let Ok(Ok(answer)) = answer {
            self.expect(answer, len as u64, "relay");
        }
    }

    /// Several at a time, to several peers; results are taken as they arrive.
    fn call_many(&mut self, first: usize, limit: Duration) {
        let mut pendings = Vec::new();
        let mut seeds = Vec::new();
        let doze = self.node.engine.procedure::<(Id, u64, u64), u64>("doze");
        for more in 0..2 + self.random.below(20) {
            let (id, seed, millis) = (self.id(), self.random.next(), self.random.below(10) as u64);
            let peer = (first + more) % self.peers();
            let started = self.node.endpoint(peer).and_then(|to| doze.on(to).timeout(limit).start(&(id, seed, millis)));
            match started {
                Ok(pending) => {
                    pendings.push(pending);
                    seeds.push(seed);
                }
                failed => self.node.journal.ended("one of many calls", &failed.map(drop), &[]),
            }
        }
        while !pendings.is_empty() {
            let (index, answer) = self.node.journal.timed(
                || format!("one of many calls with {limit:?}"),
                limit,
                || Pending::wait_any(&mut pendings),
            );
            self.node.journal.ended("one of many calls", &answer, &[]);
            let seed = seeds.remove(index);
            if let Ok(answer) = answer {
                self.expect(answer, seed ^ BACK, "doze");
            }
        }
    }

    fn call_async(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len) = (self.id(), self.random.next(), self.len());
        let sent = text(seed, len);
        let answer = self.timed("awaited call", peer, limit, |to| {
            let echo = self.node.engine.procedure::<(Id, u64, usize, String), String>("echo");
            block_on(echo.on(to).timeout(limit).start(&(id, seed, 100, sent))?)
        });
        self.node.journal.ended("awaited call", &answer, &[]);
        if answer.is_ok_and(|answer| answer != text(seed ^ BACK, 100)) {
            loss(&format!("the response to awaited call {id:x?} is wrong"));
        }
    }

    /// The peer pulls from memory that is exposed here.
    fn export_for_reading(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len) = (self.id(), self.random.next(), self.bulk_len());
        let Ok(exposed) = self.node.engine.expose_read_only(content(seed, 0, len)) else { return };
        self.node.watch(exposed.released());
        let result = self.timed("exporting call", peer, limit, |to| {
            let fetch = self.node.engine.procedure::<(Id, Bulk, u64), Result<u64, String>>("fetch");
            fetch.on(to).timeout(limit).call(&(id, exposed.bulk(), seed))
        });
        self.node.journal.ended("exporting call", &result, &[]);
        if let Ok(Ok(moved)) = result {
            self.expect(moved, len as u64, "fetch");
        }
        self.verify(exposed.view(), seed, 0, "exposed read-only");
    }

    /// The peer pushes into memory that is exposed here.
    fn export_for_writing(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len) = (self.id(), self.random.next(), self.bulk_len());
        let Ok(exposed) = self.node.engine.expose(vec![0u8; len], BulkMode::WriteOnly) else { return };
        self.node.watch(exposed.released());
        let result = self.timed("filling call", peer, limit, |to| {
            let fill = self.node.engine.procedure::<(Id, Bulk, u64), Result<u64, String>>("fill");
            fill.on(to).timeout(limit).call(&(id, exposed.bulk(), seed))
        });
        self.node.journal.ended("filling call", &result, &[]);
        let bytes = exposed.reclaim();
        if let Ok(Ok(moved)) = result {
            self.expect(moved, len as u64, "fill");
            self.verify(&bytes, seed, 0, "pushed by a peer");
        }
        self.assert_unwritten(bytes, "it was reclaimed from a pusher");
    }

    /// A third process pulls it, from here.
    fn forward(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len, to) = (self.id(), self.random.next(), self.bulk_len(), self.other(peer));
        let Ok(exposed) = self.node.engine.expose(content(seed, 0, len), BulkMode::ReadOnly) else { return };
        self.node.watch(exposed.released());
        let result = self.timed("forwarding call", peer, limit, |at| {
            let forward = self.node.engine.procedure::<(Id, usize, Bulk, u64), Result<u64, String>>("forward");
            forward.on(at).timeout(limit).call(&(id, to, exposed.bulk(), seed))
        });
        self.node.journal.ended("forwarding call", &result, &[]);
        if let Ok(Ok(moved)) = result {
            self.expect(moved, len as u64, "forward");
        }
    }

    /// The memory is reclaimed while the peer pulls: the peer gets all of it, or an error.
    fn reclaim_while_pulled(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len, pause) = (self.id(), self.random.next(), self.bulk_len(), self.random.below(4000));
        let Ok(exposed) = self.node.engine.expose(content(seed, 0, len), BulkMode::ReadOnly) else { return };
        self.node.watch(exposed.released());
        let result = self.timed("call whose memory is reclaimed", peer, limit, |to| {
            let fetch = self.node.engine.procedure::<(Id, Bulk, u64), Result<u64, String>>("fetch");
            let pending = fetch.on(to).timeout(limit).start(&(id, exposed.bulk(), seed))?;
            thread::sleep(Duration::from_micros(pause as u64));
            self.node.journal.timed(|| "reclaiming".to_owned(), Duration::ZERO, || exposed.reclaim()).fill(OWN);
            self.node.journal.count("exposures reclaimed", 1);
            pending.wait()
        });
        self.node.journal.ended("exporting call", &result, &[]);
    }

    /// As `reclaim_while_pulled`, while the peer pushes.
    fn reclaim_while_pushed(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len, pause) = (self.id(), self.random.next(), self.bulk_len(), self.random.below(4000));
        let Ok(exposed) = self.node.engine.expose(vec![0u8; len], BulkMode::ReadWrite) else { return };
        self.node.watch(exposed.released());
        let mut bytes = Vec::new();
        let result = self.timed("filling call whose memory is reclaimed", peer, limit, |to| {
            let fill = self.node.engine.procedure::<(Id, Bulk, u64), Result<u64, String>>("fill");
            let pending = fill.on(to).timeout(limit).start(&(id, exposed.bulk(), seed))?;
            thread::sleep(Duration::from_micros(pause as u64));
            bytes = self.node.journal.timed(|| "reclaiming".to_owned(), Duration::ZERO, || exposed.reclaim());
            self.node.journal.count("exposures reclaimed", 1);
            bytes.fill(OWN);
            pending.wait()
        });
        self.node.journal.ended("filling call", &result, &[]);
        if std::hint::black_box(&bytes[..]) != vec![OWN; bytes.len()] {
            loss("memory was written after it was reclaimed");
        }
    }

    /// Opens memory at the peer, pulls it, pushes into it, and checks it.
    pub fn visit(&mut self, peer: usize, limit: Duration) {
        let len = self.bulk_len();
        let _ = self.visit_with(peer, limit, len);
    }

    pub fn visit_with(&mut self, peer: usize, limit: Duration, len: usize) -> Result<(), Error> {
        let (id, seed, second, how) = (self.id(), self.random.next(), self.random.next(), self.random.below(3) as u8);
        let engine = self.node.engine.clone();
        let opened = self.timed("opening call", peer, limit, |to| {
            let open = engine.procedure::<(Id, u64, usize, u8), Result<(u64, Bulk), String>>("open");
            open.on(to).timeout(limit).call(&(id, seed, len, how))
        });
        self.node.journal.ended("opening call", &opened, &[]);
        // The peer is leaving.
        let Ok((number, bulk)) = opened? else { return Ok(()) };
        let to = self.node.endpoint(peer)?;
        let remote = bulk.on(&to).timeout(limit);
        // The peer reclaims what has been open for too long.
        let late = ["revoked"];
        let mut bytes = vec![0u8; len];
        let result = self.timed("pull", peer, limit, |_| remote.pull_into(&mut bytes[..]));
        self.moved(&result, &late);
        if result.is_err() {
            self.assert_unwritten(bytes, "a pull had failed");
            return result.map(drop);
        }
        self.verify(&bytes, seed, 0, "pulled");
        let mut now = seed;
        if how < 2 {
            let source = engine.expose(content(second, 0, len), BulkMode::ReadOnly)?;
            let (result, source) = self.node.journal.timed(
                || format!("push at {peer} with {limit:?}"),
                limit,
                || remote.start_push_from(source).wait(),
            );
            self.moved(&result, &late);
            drop(source.reclaim());
            result?;
            now = second;
        }
        let offset = self.random.below(len + 1);
        let part = self.random.below(len - offset + 1);
        let wrong = self.timed("checking call", peer, limit, |to| {
            let check = engine.procedure::<(u64, u64, usize, usize), Option<String>>("check");
            check.on(to).timeout(limit).call(&(number, now, offset, part))
        });
        self.node.journal.ended("checking call", &wrong, &[]);
        if let Some(wrong) = wrong? {
            loss(&format!("pushed: {wrong}"));
        }
        self.node.journal.count("verified", part as u64);
        let mut slice = vec![0u8; part];
        let remote = remote.slice(offset, part)?;
        let result = self.timed("pull of a slice", peer, limit, |_| remote.pull_into(&mut slice[..]));
        self.moved(&result, &late);
        result?;
        self.verify(&slice, now, offset, "pulled, a slice");
        let closed = self
            .timed("closing call", peer, limit, |to| engine.procedure::<u64, ()>("close").on(to).timeout(limit).call(&number));
        self.node.journal.ended("closing call", &closed, &[]);
        closed
    }

    /// Memory that is borrowed for the time of a call.
    fn scope(&mut self, peer: usize, limit: Duration) {
        let (id, seed, len) = (self.id(), self.random.next(), self.bulk_len());
        let mut bytes = vec![0u8; len];
        let result = self.timed("call in a scope", peer, limit, |to| {
            let fill = self.node.engine.procedure::<(Id, Bulk, u64), Result<u64, String>>("fill");
            self.node.engine.scope(|scope| {
                let bulk = scope.expose(&mut bytes[..], BulkMode::ReadWrite)?;
                fill.on(to).timeout(limit).call(&(id, bulk, seed))
            })
        });
        self.node.journal.ended("filling call", &result, &[]);
        if let Ok(Ok(_)) = result {
            self.verify(&bytes, seed, 0, "pushed into a scope");
        }
        self.assert_unwritten(bytes, "a scope");
    }

    /// A pull with a deadline that it seldom meets.
    fn pull_briefly(&mut self, peer: usize, _: Duration) {
        let (id, seed, len) = (self.id(), self.random.next(), (1 << 20) + self.bulk_len());
        let limit = Duration::from_micros(100 + self.random.below(20_000) as u64);
        let opened = self.timed("opening call", peer, bound(), |to| {
            let open = self.node.engine.procedure::<(Id, u64, usize, u8), Result<(u64, Bulk), String>>("open");
            open.on(to).timeout(bound()).call(&(id, seed, len, 0))
        });
        self.node.journal.ended("opening call", &opened, &[]);
        let Ok(Ok((_, bulk))) = opened else { return };
        let mut bytes = vec![0u8; len];
        let result = self.timed("brief pull", peer, limit, |to| bulk.on(to).timeout(limit).pull_into(&mut bytes[..]));
        self.moved(&result, &["revoked"]);
        if result.is_ok() {
            self.verify(&bytes, seed, 0, "pulled with a short deadline");
        }
        self.assert_unwritten(bytes, "a brief pull");
    }
}
