//! Work per byte: what a peer says costs time that is linear in what it has said, however much the engine holds already.

use std::collections::VecDeque;
use std::time::Duration;

use super::env::{Mem, TestEnv, TestLease, pattern};
use super::malformed::{declaring, request};
use super::net::{Net, TestCall, call, config, limits};
use super::raw::{self, frame};
use super::wire::{self, Message, Range, Stream};
use super::{Config, Failure, LeaseRange, LinkId, OutgoingBody, Output, PeerLimits, Reply, Status};
use crate::tests::measure::{independent, linear, processor_time};

const TOKEN: u128 = 0xabc;

/// An engine under attack, whose protocol gets bytes straight from the test.
struct Victim {
    net: Net,
    outputs: VecDeque<Output<TestEnv>>,
    /// What it sends goes out at once; else nobody reads it.
    read: bool,
    spent: Duration,
}

impl Victim {
    /// So patient that nothing ends by itself, and with limits that no attack here reaches.
    fn new(others: usize) -> Victim {
        let many = 1 << 20;
        let limits = PeerLimits { peer_requests: many, requests: many, peer_transfers: many, handshakes: many, ..limits() };
        let limits = PeerLimits { connections: many, peer_bytes: 1 << 40, bytes: 1 << 42, exposures: many, ..limits };
        let long = Duration::from_secs(1 << 20);
        let mut hosts = vec![(Config { limits, peer_timeout: long, connect: long, ..config() }, true)];
        hosts.extend(vec![(config(), true); others]);
        let mut net = Net::with(hosts);
        net.expose(0, TOKEN, vec![1; 1 << 20], true, true);
        Victim { net, outputs: VecDeque::new(), read: false, spent: Duration::ZERO }
    }

    /// A connection that has been greeted, with an engine of this incarnation.
    fn peer(&mut self, incarnation: u64) -> LinkId {
        let raw = self.net.raw_peer(0, incarnation);
        let (_, link) = self.net.raw_link(raw).unwrap();
        link
    }

    fn range(&self, transfer: u64) -> Range {
        Range { transfer, owner: self.net.hosts[0].incarnation, token: TOKEN.to_le_bytes(), offset: 0, len: 1 << 20 }
    }

    /// Counts the time of a step, and carries out what follows from it.
    fn step<R>(&mut self, step: impl FnOnce(&mut Net) -> R) -> R {
        let begin = processor_time();
        let result = step(&mut self.net);
        self.poll();
        self.spent += processor_time() - begin;
        result
    }

    fn poll(&mut self) {
        let proto = &mut self.net.hosts[0].proto;
        loop {
            proto.poll(&mut self.outputs);
            let Some(output) = self.outputs.pop_front() else { break };
            if let (Output::Transmit { link, bytes, .. }, true) = (output, self.read) {
                proto.handle_sent(link, bytes, false);
            }
        }
        let now = self.net.now;
        while proto.next_timeout().is_some_and(|at| at <= now) {
            proto.handle_timeout(now);
            proto.poll(&mut self.outputs);
            self.outputs.clear();
        }
    }

    /// Has the victim take these bytes, as many at a time as a transport brings.
    #[track_caller]
    fn hear(&mut self, link: LinkId, bytes: &[u8]) {
        self.hear_pieces(link, bytes, 64 << 10);
    }

    #[track_caller]
    fn hear_pieces(&mut self, link: LinkId, bytes: &[u8], piece: usize) {
        let (mut used, mut there) = (0, 0);
        while there < bytes.len() {
            there = bytes.len().min(there + piece);
            let now = self.net.now;
            let consumed = self.step(|net| net.hosts[0].proto.consume(link, &bytes[used..there], now));
            used += consumed.unwrap_or_else(|failure| panic!("{failure:?}")).used;
        }
    }
}

fn frames(numbers: impl IntoIterator<Item = u64>, message: impl Fn(u64) -> Message<'static>) -> Vec<u8> {
    numbers.into_iter().flat_map(|number| frame(&message(number), b"")).collect()
}

#[test]
fn pulls_that_are_aborted() {
    for backwards in [false, true] {
        linear("pulls that are aborted", 2_000, |n| {
            let mut victim = Victim::new(0);
            let link = victim.peer(9);
            let pulls = frames(0..n, |number| Message::Pull(victim.range(number)));
            victim.hear(link, &pulls);
            let abort = |number| Message::Abort { transfer: if backwards { n - 1 - number } else { number }, push: false };
            victim.hear(link, &frames(0..n, abort));
            victim.spent
        });
    }
}

/// Again and again, while the peer reads nothing: what was given up takes no room in the line either.
#[test]
fn one_pull_that_is_begun_and_aborted() {
    linear("one pull that is begun and aborted", 4_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        let (begin, end) = (Message::Pull(victim.range(7)), Message::Abort { transfer: 7, push: false });
        let both = [frame(&begin, b""), frame(&end, b"")].concat();
        victim.hear(link, &both.repeat(n as usize));
        assert_eq!(victim.net.hosts[0].proto.links[link].streams.pulls(), 0);
        victim.spent
    });
}

#[test]
fn pushes_that_are_aborted() {
    linear("pushes that are aborted", 4_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        let pushes = frames(0..n, |number| Message::Push(victim.range(number)));
        victim.hear(link, &pushes);
        victim.hear(link, &frames((0..n).rev(), |transfer| Message::Abort { transfer, push: true }));
        victim.spent
    });
}

#[test]
fn answers_that_are_cancelled() {
    linear("answers that are cancelled", 1_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        for number in 0..n {
            victim.hear(link, &frame(&request(number, 0), b""));
        }
        let requests: Vec<_> = (0..n).map(|number| victim.net.hosts[0].proto.links[link].requests[&number]).collect();
        let memory = Mem::new(vec![0; 1 << 10]);
        for request in requests {
            let reply = Reply { content: OutgoingBody::Large(memory.clone()), result: 0, shape: b"r", leases: Vec::new() };
            assert!(victim.step(|net| net.hosts[0].proto.respond(request, Ok(reply))).is_ok());
        }
        victim.hear(link, &frames((0..n).rev(), |call| Message::Cancel { call }));
        victim.spent
    });
}

#[test]
fn requests_that_are_announced_and_cancelled() {
    linear("requests that are announced and cancelled", 2_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        victim.hear(link, &frames(0..n, |call| request(call, 1)));
        victim.hear(link, &frames((0..n).rev(), |call| Message::Cancel { call }));
        victim.spent
    });
}

#[test]
fn what_is_answered_at_once() {
    type Said = (&'static str, fn(u64, &Victim) -> Message<'static>);
    let messages: [Said; 6] = [
        ("pings", |_, _| Message::Ping),
        ("pulls of what there is not", |n, victim| {
            Message::Pull(Range { token: u128::from(n).to_le_bytes(), ..victim.range(n) })
        }),
        ("shutdowns", |call, _| Message::Shutdown { call }),
        ("words of memory that was taken back", |n, _| Message::Revoked { token: u128::from(n).to_le_bytes() }),
        ("ends of transfers that there are not", |transfer, _| Message::Done { transfer, status: Status::Ok }),
        ("reports of calls that were not made", |_, _| Message::Handled { count: u32::MAX, calls: u32::MAX, bytes: u32::MAX }),
    ];
    for (what, message) in messages {
        for read in [false, true] {
            linear(what, 8_000, |n| {
                let mut victim = Victim { read, ..Victim::new(0) };
                let link = victim.peer(9);
                let bytes = frames(0..n, |number| message(number, &victim));
                victim.hear(link, &bytes);
                victim.spent
            });
        }
    }
}

#[test]
fn names() {
    linear("names of procedures", 2_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        let bytes: Vec<u8> = (0..n)
            .flat_map(|number| {
                let name = format!("name {number}");
                let message = declaring(number, number as u32 + 1, Some(&name));
                frame(&message, b"")
            })
            .collect();
        victim.hear(link, &bytes);
        victim.spent
    });
}

/// A frame that comes byte by byte is looked at each time, but not all of it.
#[test]
fn half_frames() {
    linear("half frames", 20_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        let body = vec![7; n as usize];
        victim.hear_pieces(link, &frame(&request(1, n), &body), 1);
        victim.spent
    });
}

/// An engine with `count` regions that were taken back, as far as they are remembered.
fn with_revoked(count: u64) -> Victim {
    let mut victim = Victim::new(0);
    for token in 0..u128::from(count) {
        victim.net.expose(0, TOKEN + 1 + token, vec![1], true, true);
        victim.net.revoke(0, TOKEN + 1 + token);
    }
    victim
}

#[test]
fn unknown_tokens() {
    for message in [0, 1] {
        independent("unknown tokens, and as many that were revoked", 256, |revoked| {
            let mut victim = with_revoked(revoked);
            let link = victim.peer(9);
            let unknown = |n: u64| (u128::from(n) << 64).to_le_bytes();
            let range = victim.range(0);
            let bytes = frames(1..4_000, |n| match message {
                0 => Message::Pull(Range { transfer: n, token: unknown(n), ..range }),
                _ => Message::Revoked { token: unknown(n) },
            });
            victim.hear(link, &bytes);
            victim.spent
        });
    }
}

/// Greetings with tickets that nobody was given, however many engines there are, of whichever incarnation.
#[test]
fn tickets_that_are_made_up() {
    for same in [false, true] {
        independent("made-up tickets, and as many engines that were met", 100, |met| {
            let mut victim = Victim::new(0);
            for number in 0..met {
                victim.peer(if same { 9 } else { 1000 + number });
            }
            let now = victim.net.now;
            for number in 0..200 {
                let hello = wire::Hello { resumption_token: Some(number), ..raw::hello(9) };
                let bytes = raw::greet(wire::VERSIONS, &hello);
                let link = victim.net.hosts[0].proto.handle_accepted("tcp://10.0.9.9:1".parse().unwrap(), now);
                victim.hear(link, &bytes);
                victim.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
            }
            victim.spent
        });
    }
}

/// Connections that greet while others do not.
#[test]
fn greetings_among_silent_ones() {
    independent("greetings, and as many connections that say nothing", 1_000, |silent| {
        let mut victim = Victim::new(0);
        let (now, remote): (_, crate::Address) = (victim.net.now, "tcp://10.0.9.9:1".parse().unwrap());
        for _ in 0..silent {
            victim.net.hosts[0].proto.handle_accepted(remote.clone(), now);
        }
        victim.poll();
        let greeting = raw::greet(wire::VERSIONS, &raw::hello(9));
        for _ in 0..500 {
            let link = victim.step(|net| net.hosts[0].proto.handle_accepted(remote.clone(), now));
            victim.hear(link, &greeting);
            victim.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
        }
        victim.spent
    });
}

/// Connections that come and go, while this engine has calls and transfers under way with another peer.
#[test]
fn connections_beside_calls() {
    independent("connections that come and go, and as many calls under way", 500, |calls| {
        let mut victim = Victim::new(1);
        for _ in 0..calls {
            victim.net.call(0, 1, TestCall { timeout: Duration::from_secs(1 << 20), ..call("x") });
        }
        victim.net.advance(Duration::from_secs(1));
        let (now, remote): (_, crate::Address) = (victim.net.now, "tcp://10.0.9.9:1".parse().unwrap());
        let hello = raw::greet(wire::VERSIONS, &raw::hello(9));
        for _ in 0..200 {
            let link = victim.step(|net| net.hosts[0].proto.handle_accepted(remote.clone(), now));
            victim.hear(link, &hello);
            // One call to it, so that there is something to end.
            let tag = victim.net.hosts[0].proto.lookup_incarnation(9).unwrap();
            victim.step(|net| net.call_peer(0, tag.id, call("x")));
            victim.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
        }
        victim.spent
    });
}

/// What this engine does by itself, while a peer has asked for much and reads nothing.
#[test]
fn own_work_beside_pulls_that_wait() {
    independent("own calls, and as many pulls that wait", 500, |pulls| {
        let mut victim = Victim::new(1);
        let link = victim.peer(9);
        let bytes = frames(0..pulls, |number| Message::Pull(victim.range(number)));
        victim.hear(link, &bytes);
        victim.spent = Duration::ZERO;
        let tag = victim.net.hosts[0].proto.lookup_incarnation(9).unwrap();
        for number in 0..200 {
            let op = victim.step(|net| net.call_peer(0, tag.id, call("x")));
            victim.step(|net| net.cancel(0, op));
            victim.net.expose(0, TOKEN + 1 + number, vec![1], true, true);
            victim.step(|net| net.revoke(0, TOKEN + 1 + number));
        }
        victim.spent
    });
}

/// Memory is taken back, however many are connected.
#[test]
fn revoking_beside_connections() {
    independent("taking memory back, and as many connections", 200, |connections| {
        let mut victim = Victim::new(0);
        for number in 0..connections {
            victim.peer(1000 + number);
        }
        for number in 0..500 {
            victim.net.expose(0, TOKEN + 1 + number, vec![1], true, true);
            victim.step(|net| net.hosts[0].proto.revoke(TOKEN + 1 + number));
        }
        victim.spent
    });
}

/// Gives a peer so many bulks, all of one memory or each of another.
fn with_leases(count: u64, one: bool) -> (Victim, LinkId) {
    let mut victim = Victim::new(0);
    let link = victim.peer(9);
    victim.hear(link, &frame(&request(1, 0), b""));
    let request = victim.net.hosts[0].proto.links[link].requests[&1];
    let token = |n: u64| if one { TOKEN } else { TOKEN + 1 + u128::from(n) };
    let leases = (0..count).map(|n| TestLease { token: token(n), number: n as u32 }).collect();
    let reply = Reply { content: OutgoingBody::Small(b""), result: 0, shape: b"r", leases };
    assert!(victim.step(|net| net.hosts[0].proto.respond(request, Ok(reply))).is_ok());
    victim.spent = Duration::ZERO;
    (victim, link)
}

#[test]
fn leases_that_are_released() {
    for one in [true, false] {
        linear("leases released from the last on", 4_000, |n| {
            let (mut victim, link) = with_leases(n, one);
            let release = |first| Message::Release(LeaseRange { first, count: 1 });
            victim.hear(link, &frames((0..n).rev(), release));
            victim.spent
        });
        // Of what there is not, of all, and of all again.
        linear("leases released by the hundred, over and over", 4_000, |n| {
            let (mut victim, link) = with_leases(n, one);
            let release = |first| Message::Release(LeaseRange { first: first % 100 * 40, count: u32::MAX });
            victim.hear(link, &frames((0..n).rev(), release));
            victim.spent
        });
        linear("leases of a peer that goes", 4_000, |n| {
            let (mut victim, link) = with_leases(n, one);
            victim.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
            victim.spent
        });
    }
}

/// Parts of streams that nobody waits for.
#[test]
fn data_for_nobody() {
    linear("data for nobody", 4_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        for id in 0..n {
            let now = victim.net.now;
            let data = frame(&Message::Data { stream: Stream::Pull, id, offset: 0, len: 1 }, b"");
            victim.hear(link, &data);
            victim.step(|net| net.hosts[0].proto.handle_payload_done(link, super::PayloadStatus::Whole, now));
        }
        victim.spent
    });
}

/// A peer that has much under way is hung up on.
#[test]
fn peers_that_go() {
    linear("requests, pulls and pushes of a peer that goes", 1_000, |n| {
        let mut victim = Victim::new(0);
        let link = victim.peer(9);
        let bytes = frames(0..n, |number| Message::Pull(victim.range(number)));
        victim.hear(link, &bytes);
        let bytes = frames(0..n, |number| Message::Push(victim.range(number)));
        victim.hear(link, &bytes);
        victim.hear(link, &frames(0..n, |call| request(call, 1)));
        let body = pattern(1, 100);
        victim.hear(link, &(n..2 * n).flat_map(|call| frame(&request(call, 100), &body)).collect::<Vec<u8>>());
        victim.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
        victim.spent
    });
}

/// Short calls of a peer, while one-way calls of many others wait for memory that handlers keep.
#[test]
fn short_calls_beside_calls_that_wait_for_memory() {
    independent("short calls, and as many peers whose one-way calls wait", 4, |waiting| {
        let mut victim = Victim::new(0);
        let host = &mut victim.net.hosts[0];
        host.proto.config.limits = PeerLimits { peer_bytes: 1 << 20, ..limits() };
        for number in 0..waiting {
            victim.net.hosts[0].values = 3 << 20;
            let raw = victim.net.raw_peer(0, 1000 + number);
            // One that is handled, and one that waits.
            for call in 0..2 {
                let Message::Request { call, declaration, provider, budget_us, leases, size, .. } = request(call, 3) else {
                    unreachable!()
                };
                let one_way = true;
                let message = Message::Request { call, procedure: 0, declaration, provider, budget_us, one_way, leases, size };
                victim.net.say(raw, &message, b"abc");
            }
        }
        assert_eq!(victim.net.hosts[0].inbox.len(), waiting as usize);
        assert_eq!(victim.net.hosts[0].proto.requests(), 2 * waiting as usize);
        let link = victim.peer(9);
        victim.read = true;
        for call in 0..1000 {
            victim.hear(link, &frame(&request(call, 3), b"abc"));
        }
        victim.spent
    });
}
