//! Work per byte: a peer's messages cost time linear in their bytes, whatever state the engine holds.

use std::collections::VecDeque;
use std::time::Duration;

use slotmap::KeyData;

use super::env::{Mem, TestEnv, TestLease, pattern};
use super::malformed::{declaring, request};
use super::net::{Net, TestCall, call, config, limits};
use super::raw::{self, frame};
use super::wire::{self, Message, Range, Stream};
use super::{Config, Failure, LeaseRange, LinkId, OutgoingBody, Output, PeerLimits, Reply, RequestId, Status};
use crate::proto::admission::Parked;
use crate::tests::measure::{independent, linear, processor_time};

const TOKEN: u128 = 0xabc;

/// An engine under attack; its protocol gets bytes straight from the test.
struct EngineUnderTest {
    net: Net,
    outputs: VecDeque<Output<TestEnv>>,
    /// The peer reads what the engine sends; else nothing is sent.
    read: bool,
    spent: Duration,
}

impl EngineUnderTest {
    /// The engine has timeouts and limits that no attack here reaches.
    fn new(others: usize) -> EngineUnderTest {
        let many = 1 << 20;
        let limits = PeerLimits { peer_requests: many, requests: many, peer_transfers: many, handshakes: many, ..limits() };
        let limits = PeerLimits { connections: many, peer_bytes: 1 << 40, bytes: 1 << 42, exposures: many, ..limits };
        let long = Duration::from_secs(1 << 20);
        let mut hosts = vec![(Config { limits, peer_timeout: long, connect: long, ..config() }, true)];
        hosts.extend(vec![(config(), true); others]);
        let mut net = Net::with(hosts);
        net.expose(0, TOKEN, vec![1; 1 << 20], true, true);
        EngineUnderTest { net, outputs: VecDeque::new(), read: false, spent: Duration::ZERO }
    }

    /// An open connection with an engine of this incarnation.
    fn peer(&mut self, incarnation: u64) -> LinkId {
        let raw = self.net.raw_peer(0, incarnation);
        let (_, link) = self.net.raw_link(raw).unwrap();
        link
    }

    fn range(&self, transfer: u64) -> Range {
        Range { transfer, owner: self.net.hosts[0].incarnation, token: TOKEN.to_le_bytes(), offset: 0, len: 1 << 20 }
    }

    /// Measures a step and the polling of its outputs.
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

    /// Passes these bytes to the protocol, as many at a time as a transport reads.
    #[track_caller]
    fn receive(&mut self, link: LinkId, bytes: &[u8]) {
        self.receive_in_pieces(link, bytes, 64 << 10);
    }

    #[track_caller]
    fn receive_in_pieces(&mut self, link: LinkId, bytes: &[u8], piece: usize) {
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
fn aborted_pulls_take_linear_time() {
    for backwards in [false, true] {
        linear("pulls that are aborted", 2_000, |n| {
            let mut engine = EngineUnderTest::new(0);
            let link = engine.peer(9);
            let pulls = frames(0..n, |number| Message::Pull(engine.range(number)));
            engine.receive(link, &pulls);
            let abort = |number| Message::Abort { transfer: if backwards { n - 1 - number } else { number }, push: false };
            engine.receive(link, &frames(0..n, abort));
            engine.spent
        });
    }
}

/// The peer reads nothing: aborted pulls leave the send queue.
#[test]
fn repeated_aborted_pull_takes_linear_time() {
    linear("one pull that is begun and aborted", 4_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        let (begin, end) = (Message::Pull(engine.range(7)), Message::Abort { transfer: 7, push: false });
        let both = [frame(&begin, b""), frame(&end, b"")].concat();
        engine.receive(link, &both.repeat(n as usize));
        assert_eq!(engine.net.hosts[0].proto.links[link].streams.pulls, 0);
        engine.spent
    });
}

#[test]
fn aborted_pushes_take_linear_time() {
    linear("pushes that are aborted", 4_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        let pushes = frames(0..n, |number| Message::Push(engine.range(number)));
        engine.receive(link, &pushes);
        engine.receive(link, &frames((0..n).rev(), |transfer| Message::Abort { transfer, push: true }));
        engine.spent
    });
}

#[test]
fn cancelled_responses_take_linear_time() {
    linear("answers that are cancelled", 1_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        for number in 0..n {
            engine.receive(link, &frame(&request(number, 0), b""));
        }
        let requests: Vec<_> = (0..n).map(|number| engine.net.hosts[0].proto.links[link].requests[&number]).collect();
        let memory = Mem::new(vec![0; 1 << 10]);
        for request in requests {
            let mut reply =
                Reply { content: OutgoingBody::Large(memory.clone(), None), result: 0, shape: b"r", leases: Vec::new() };
            assert!(engine.step(|net| net.hosts[0].proto.respond(request, Ok(&mut reply))).is_ok());
        }
        engine.receive(link, &frames((0..n).rev(), |call| Message::Cancel { call }));
        engine.spent
    });
}

#[test]
fn cancelled_requests_take_linear_time() {
    linear("requests that are announced and cancelled", 2_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        engine.receive(link, &frames(0..n, |call| request(call, 1)));
        engine.receive(link, &frames((0..n).rev(), |call| Message::Cancel { call }));
        engine.spent
    });
}

#[test]
fn messages_answered_at_once_take_linear_time() {
    type Flood = (&'static str, fn(u64, &EngineUnderTest) -> Message<'static>);
    let messages: [Flood; 7] = [
        ("proposals to close the connection", |received, _| Message::Idle { received, exposes: false }),
        ("pings", |_, _| Message::Ping),
        ("pulls of unknown tokens", |n, engine| Message::Pull(Range { token: u128::from(n).to_le_bytes(), ..engine.range(n) })),
        ("shutdowns", |call, _| Message::Shutdown { call }),
        ("notifications of revoked memory", |n, _| Message::Revoked { token: u128::from(n).to_le_bytes() }),
        ("ends of unknown transfers", |transfer, _| Message::Done { transfer, status: Status::Ok }),
        ("reports of unknown calls", |_, _| Message::Handled { count: u32::MAX, calls: u32::MAX, bytes: u32::MAX }),
    ];
    for (what, message) in messages {
        for read in [false, true] {
            linear(what, 8_000, |n| {
                let mut engine = EngineUnderTest { read, ..EngineUnderTest::new(0) };
                let link = engine.peer(9);
                let bytes = frames(0..n, |number| message(number, &engine));
                engine.receive(link, &bytes);
                engine.spent
            });
        }
    }
}

#[test]
fn declarations_take_linear_time() {
    linear("names of procedures", 2_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        let bytes: Vec<u8> = (0..n)
            .flat_map(|number| {
                let name = format!("name {number}");
                let message = declaring(number, number as u32 + 1, Some(&name));
                frame(&message, b"")
            })
            .collect();
        engine.receive(link, &bytes);
        engine.spent
    });
}

/// A frame that arrives byte by byte is not decoded from its start for each byte.
#[test]
fn frame_in_single_bytes_takes_linear_time() {
    linear("half frames", 20_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        let body = vec![7; n as usize];
        engine.receive_in_pieces(link, &frame(&request(1, n), &body), 1);
        engine.spent
    });
}

/// An engine with `count` revoked regions, as far as they are remembered.
fn with_revoked(count: u64) -> EngineUnderTest {
    let mut engine = EngineUnderTest::new(0);
    for token in 0..u128::from(count) {
        engine.net.expose(0, TOKEN + 1 + token, vec![1], true, true);
        engine.net.revoke(0, TOKEN + 1 + token);
    }
    engine
}

#[test]
fn unknown_tokens_take_time_independent_of_revoked_ones() {
    for message in [0, 1] {
        independent("unknown tokens, and as many that were revoked", 256, |revoked| {
            let mut engine = with_revoked(revoked);
            let link = engine.peer(9);
            let unknown = |n: u64| (u128::from(n) << 64).to_le_bytes();
            let range = engine.range(0);
            let bytes = frames(1..4_000, |n| match message {
                0 => Message::Pull(Range { transfer: n, token: unknown(n), ..range }),
                _ => Message::Revoked { token: unknown(n) },
            });
            engine.receive(link, &bytes);
            engine.spent
        });
    }
}

/// Hellos with made-up resumption tokens, beside many known engines, of the same or of other incarnations.
#[test]
fn made_up_resumption_tokens_take_time_independent_of_known_engines() {
    for same in [false, true] {
        independent("made-up tickets, and as many known engines", 100, |known| {
            let mut engine = EngineUnderTest::new(0);
            for number in 0..known {
                engine.peer(if same { 9 } else { 1000 + number });
            }
            let now = engine.net.now;
            for number in 0..200 {
                let hello = wire::Hello { resumption_token: Some(number), ..raw::hello(9) };
                let bytes = raw::encode_hello(wire::VERSIONS, &hello);
                let link = engine.net.hosts[0].proto.handle_accepted("tcp://10.0.9.9:1".parse().unwrap(), now);
                engine.receive(link, &bytes);
                engine.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
            }
            engine.spent
        });
    }
}

/// Handshakes beside connections that stay silent.
#[test]
fn handshakes_take_time_independent_of_silent_connections() {
    independent("handshakes, and as many silent connections", 1_000, |silent| {
        let mut engine = EngineUnderTest::new(0);
        let (now, remote): (_, crate::Address) = (engine.net.now, "tcp://10.0.9.9:1".parse().unwrap());
        for _ in 0..silent {
            engine.net.hosts[0].proto.handle_accepted(remote.clone(), now);
        }
        engine.poll();
        let hello = raw::encode_hello(wire::VERSIONS, &raw::hello(9));
        for _ in 0..500 {
            let link = engine.step(|net| net.hosts[0].proto.handle_accepted(remote.clone(), now));
            engine.receive(link, &hello);
            engine.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
        }
        engine.spent
    });
}

/// Connections that open and close while this engine has calls in progress with another peer.
#[test]
fn connections_take_time_independent_of_calls_in_progress() {
    independent("connections that open and close, and as many calls in progress", 500, |calls| {
        let mut engine = EngineUnderTest::new(1);
        for _ in 0..calls {
            engine.net.call(0, 1, TestCall { timeout: Duration::from_secs(1 << 20), ..call("x") });
        }
        engine.net.advance(Duration::from_secs(1));
        let (now, remote): (_, crate::Address) = (engine.net.now, "tcp://10.0.9.9:1".parse().unwrap());
        let hello = raw::encode_hello(wire::VERSIONS, &raw::hello(9));
        for _ in 0..200 {
            let link = engine.step(|net| net.hosts[0].proto.handle_accepted(remote.clone(), now));
            engine.receive(link, &hello);
            // One call to it, so that closing has something to end.
            let tag = engine.net.hosts[0].proto.lookup_incarnation(9).unwrap();
            engine.step(|net| net.call_peer(0, tag.id, call("x")));
            engine.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
        }
        engine.spent
    });
}

/// The engine's own operations beside many pulls of a peer that reads nothing.
#[test]
fn own_operations_take_time_independent_of_waiting_pulls() {
    independent("own calls, and as many pulls that wait", 500, |pulls| {
        let mut engine = EngineUnderTest::new(1);
        let link = engine.peer(9);
        let bytes = frames(0..pulls, |number| Message::Pull(engine.range(number)));
        engine.receive(link, &bytes);
        engine.spent = Duration::ZERO;
        let tag = engine.net.hosts[0].proto.lookup_incarnation(9).unwrap();
        for number in 0..200 {
            let op = engine.step(|net| net.call_peer(0, tag.id, call("x")));
            engine.step(|net| net.cancel(0, op));
            engine.net.expose(0, TOKEN + 1 + number, vec![1], true, true);
            engine.step(|net| net.revoke(0, TOKEN + 1 + number));
        }
        engine.spent
    });
}

/// Revocations beside many connections.
#[test]
fn revocations_take_time_independent_of_connections() {
    independent("revocations, and as many connections", 200, |connections| {
        let mut engine = EngineUnderTest::new(0);
        for number in 0..connections {
            engine.peer(1000 + number);
        }
        for number in 0..500 {
            engine.net.expose(0, TOKEN + 1 + number, vec![1], true, true);
            engine.step(|net| net.hosts[0].proto.revoke(TOKEN + 1 + number));
        }
        engine.spent
    });
}

/// Sends a peer this many bulks, all of one memory or each of another.
fn with_leases(count: u64, one: bool) -> (EngineUnderTest, LinkId) {
    let mut engine = EngineUnderTest::new(0);
    let link = engine.peer(9);
    engine.receive(link, &frame(&request(1, 0), b""));
    let request = engine.net.hosts[0].proto.links[link].requests[&1];
    let token = |n: u64| if one { TOKEN } else { TOKEN + 1 + u128::from(n) };
    let leases = (0..count).map(|n| TestLease { token: token(n), number: n as u32 }).collect();
    let mut reply = Reply { content: OutgoingBody::Small(b""), result: 0, shape: b"r", leases };
    assert!(engine.step(|net| net.hosts[0].proto.respond(request, Ok(&mut reply))).is_ok());
    engine.spent = Duration::ZERO;
    (engine, link)
}

#[test]
fn released_leases_take_linear_time() {
    for one in [true, false] {
        linear("leases released from the last on", 4_000, |n| {
            let (mut engine, link) = with_leases(n, one);
            let release = |first| Message::Release(LeaseRange { first, count: 1 });
            engine.receive(link, &frames((0..n).rev(), release));
            engine.spent
        });
        // Ranges that include leases released before.
        linear("leases released by the hundred, over and over", 4_000, |n| {
            let (mut engine, link) = with_leases(n, one);
            let release = |first| Message::Release(LeaseRange { first: first % 100 * 40, count: u32::MAX });
            engine.receive(link, &frames((0..n).rev(), release));
            engine.spent
        });
        linear("leases of a peer that disconnects", 4_000, |n| {
            let (mut engine, link) = with_leases(n, one);
            engine.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
            engine.spent
        });
    }
}

/// Chunks of unknown streams.
#[test]
fn data_of_unknown_streams_takes_linear_time() {
    linear("data of unknown streams", 4_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        for id in 0..n {
            let now = engine.net.now;
            let data = frame(&Message::Data { stream: Stream::Pull, id, offset: 0, len: 1 }, b"");
            engine.receive(link, &data);
            engine.step(|net| net.hosts[0].proto.handle_payload_done(link, super::PayloadStatus::Whole, now));
        }
        engine.spent
    });
}

/// A peer with many operations in progress is disconnected.
#[test]
fn disconnecting_a_busy_peer_takes_linear_time() {
    linear("requests, pulls and pushes of a peer that disconnects", 1_000, |n| {
        let mut engine = EngineUnderTest::new(0);
        let link = engine.peer(9);
        let bytes = frames(0..n, |number| Message::Pull(engine.range(number)));
        engine.receive(link, &bytes);
        let bytes = frames(0..n, |number| Message::Push(engine.range(number)));
        engine.receive(link, &bytes);
        engine.receive(link, &frames(0..n, |call| request(call, 1)));
        let body = pattern(1, 100);
        engine.receive(link, &(n..2 * n).flat_map(|call| frame(&request(call, 100), &body)).collect::<Vec<u8>>());
        engine.step(|net| net.hosts[0].proto.close(link, Failure::Cancelled));
        engine.spent
    });
}

/// Short calls of a peer, while one-way calls of many others wait for memory that handlers keep.
#[test]
fn short_calls_beside_calls_that_wait_for_memory() {
    independent("short calls, and as many peers whose one-way calls wait", 4, |waiting| {
        let mut victim = EngineUnderTest::new(0);
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
                victim.net.send_message(raw, &message, b"abc");
            }
        }
        assert_eq!(victim.net.hosts[0].inbox.len(), waiting as usize);
        assert_eq!(victim.net.hosts[0].proto.requests(), 2 * waiting as usize);
        let link = victim.peer(9);
        victim.read = true;
        for call in 0..1000 {
            victim.receive(link, &frame(&request(call, 3), b"abc"));
        }
        victim.spent
    });
}

/// The end of a connection costs the same however many others have calls that wait.
#[test]
fn connections_whose_calls_wait_for_memory_close_in_linear_time() {
    linear("links that close while calls of each wait", 2_000, |n| {
        let mut parked = Parked::default();
        let links: Vec<LinkId> = (1..=n).map(|number| LinkId::from(KeyData::from_ffi(1 << 32 | number))).collect();
        links.iter().for_each(|link| parked.add(*link, RequestId::default(), 1, false));
        let begin = processor_time();
        links.iter().rev().for_each(|link| parked.orphan(*link));
        let spent = processor_time() - begin;
        assert_eq!(parked.bytes(LinkId::default()), (n as usize, n as usize));
        spent
    });
}
