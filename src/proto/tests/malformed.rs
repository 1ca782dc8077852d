//! Well-framed messages that violate the protocol.

use std::time::Duration;

use super::super::tables::MAX_DECLARATIONS;
use super::env::{Mem, allocated};
use super::host::{OperationId, TestOutcome, assert_failed, served};
use super::net::{Net, TestCall, call};
use super::raw::{self, Raw, hello};
use super::wire::{self, BorrowedBytes, Declare, MAX_FRAME, MAX_NAME, Message, Range, Stream};
use super::{Failure, LeaseRange, Remote, Status, wire_id};

const CHUNK: usize = 512 << 10;
const MAX_CHUNK: usize = 4 << 20;
const SECOND: Duration = Duration::from_secs(1);
const TOKEN: u128 = 0xabc;
const STREAMS: [Stream; 4] = [Stream::Pull, Stream::Push, Stream::Request, Stream::Response];

pub fn request(call: u64, size: u64) -> Message<'static> {
    Message::Request {
        call,
        procedure: 0,
        declaration: Some(Declare { name: "echo", shape: BorrowedBytes(b"s") }),
        provider: 0,
        budget_us: 1_000_000,
        one_way: false,
        leases: LeaseRange::default(),
        size,
    }
}

fn data(stream: Stream, id: u64, offset: u64, payload: &[u8]) -> Vec<u8> {
    let len = payload.len() as u32;
    let mut bytes = super::raw::frame(&Message::Data { stream, id, offset, len }, &[]);
    bytes.extend_from_slice(payload);
    bytes.push(1);
    bytes
}

fn range(net: &Net, transfer: u64, len: u64) -> Range {
    Range { transfer, owner: net.hosts[0].incarnation, token: TOKEN.to_le_bytes(), offset: 0, len }
}

/// A frame with these lengths of the frame and of its message, and the matching checksum.
fn framed(bytes: &[u8], len: u32, head: u32) -> Vec<u8> {
    let rest = [&len.to_le_bytes()[..], &head.to_le_bytes(), bytes].concat();
    [&crc32c::crc32c(&rest).to_le_bytes()[..], &rest].concat()
}

/// An adversary connected to host 0; host 1 is an honest peer.
fn scene() -> (Net, Raw) {
    let mut net = Net::new(2);
    net.hosts[0].echo = true;
    net.hosts[1].echo = true;
    let raw = net.raw_peer(0, 1);
    (net, raw)
}

/// Asserts that the host still works, and holds nothing of the adversary once that has disconnected.
#[track_caller]
pub fn unharmed(mut net: Net, raw: Raw) {
    net.echo_everywhere();
    let ops = [net.call(0, 1, call(vec![1; 100_000])), net.call(1, 0, call("hello"))];
    net.disconnect(raw);
    net.settle();
    assert_eq!(net.hosts[0].body(ops[0]).len(), 100_000);
    assert_eq!(net.hosts[1].body(ops[1]), served(b"hello"));
    net.end();
}

/// Payloads of unknown operations are discarded, messages about them ignored, and the connection stays open.
#[test]
fn messages_about_unknown_operations_are_ignored() {
    let (mut net, raw) = scene();
    for id in [0, 1, 1 << 32, 1 << 32 | 1, u64::MAX, 0x1_0000_0001] {
        for stream in STREAMS {
            for (offset, len) in [(0, 0), (0, 5), (77, CHUNK), (u64::MAX, 3)] {
                net.send_bytes(raw, data(stream, id, offset, &vec![7; len]));
            }
        }
        net.send_message(raw, &Message::Done { transfer: id, status: Status::Ok }, b"");
        net.send_message(raw, &Message::Done { transfer: id, status: Status::Revoked }, b"");
        net.send_message(raw, &Message::Refuse { call: id, status: Status::NoResponse }, b"");
        net.send_message(raw, &Message::Cancel { call: id }, b"");
        net.send_message(raw, &Message::Abort { transfer: id, push: true }, b"");
        net.send_message(raw, &Message::Abort { transfer: id, push: false }, b"");
        net.send_message(raw, &Message::Revoked { token: u128::from(id).to_le_bytes() }, b"");
        for count in [0, 1, u32::MAX] {
            let leases = LeaseRange { first: id, count };
            net.send_message(raw, &Message::Release(leases), b"");
            let answer = Message::Response {
                call: id,
                result: 0,
                shape: BorrowedBytes(b"?"),
                leases,
                released: LeaseRange::default(),
                size: 3,
            };
            net.send_message(raw, &answer, b"abc");
        }
        net.send_message(raw, &Message::Pong, b"");
    }
    assert!(!net.is_shut(raw));
    assert_eq!(allocated().1, 0);
    unharmed(net, raw);
}

/// A call that uses a declaration number, and declares it or not.
pub fn declaring(call: u64, procedure: u32, name: Option<&str>) -> Message<'_> {
    let Message::Request { provider, budget_us, one_way, leases, size, .. } = request(0, 0) else { unreachable!() };
    let declaration = name.map(|name| Declare { name, shape: BorrowedBytes(b"s") });
    Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size }
}

fn trace_message(trace_id: [u8; 16], parent_id: [u8; 8], state: &str) -> Message<'_> {
    Message::TraceContext { trace_id, parent_id, flags: 1, state }
}

fn traced(trace_id: [u8; 16], parent_id: [u8; 8], state: &str) -> Vec<u8> {
    super::raw::frame(&trace_message(trace_id, parent_id, state), b"")
}

/// A protocol violation closes the connection, and ends everything on it.
#[test]
fn protocol_violation_ends_the_connection() {
    let long = "x".repeat(MAX_NAME + 1);
    let answer = |shape| Message::Response {
        call: 77,
        result: 3,
        shape: BorrowedBytes(shape),
        leases: LeaseRange::default(),
        released: LeaseRange::default(),
        size: 0,
    };
    let answers = [answer(b"r"), answer(b"r")].map(|message| super::raw::frame(&message, b""));
    let frames: Vec<(&str, Vec<u8>)> = vec![
        ("a number that was never declared", super::raw::frame(&declaring(5, 9, None), b"")),
        ("no number, and no declaration", super::raw::frame(&declaring(5, 0, None), b"")),
        ("a name that is too long", super::raw::frame(&declaring(5, 9, Some(&long)), b"")),
        ("a result that was never declared, of an unknown call", super::raw::frame(&answer(b""), b"")),
        ("a result that is declared twice", answers.concat()),
        ("a call made twice", super::raw::frame(&request(1, 0), b"")),
        ("part of a body", super::raw::frame(&request(5, 10), b"abc")),
        ("more than the body", super::raw::frame(&request(5, 1), b"abc")),
        (
            "a chunk that is too long",
            super::raw::frame(&Message::Data { stream: Stream::Push, id: 8, offset: 0, len: MAX_CHUNK as u32 + 1 }, b""),
        ),
        (
            "a chunk of nearly everything",
            super::raw::frame(&Message::Data { stream: Stream::Push, id: 8, offset: 0, len: u32::MAX }, b""),
        ),
        ("a chunk in the wrong place", data(Stream::Request, 2, 1, b"abc")),
        ("a chunk beyond the end", data(Stream::Request, 2, 0, &[0; 101])),
        ("a chunk before the beginning", data(Stream::Push, 3, u64::MAX, b"abc")),
        ("a push beyond the end", data(Stream::Push, 3, 0, &[0; 11])),
        ("a frame that is too long", framed(&[], MAX_FRAME as u32 + 1, 0)),
        ("a message longer than its frame", framed(&[1, 2, 3], 3, 4)),
        ("a frame with another checksum", vec![1, 2, 3, 4, 1, 0, 0, 0, 1, 0, 0, 0, 13]),
        ("something behind the message", framed(&[13, 13], 2, 2)),
        ("an unknown message", framed(&[250, 1, 1], 3, 3)),
        ("an empty frame", framed(&[], 0, 0)),
        ("a trace without a number", traced([0; 16], [1; 8], "")),
        ("a trace without a span", traced([1; 16], [0; 8], "")),
        ("a trace with a long state", traced([1; 16], [1; 8], &"x".repeat(513))),
        ("a trace with a state that is no header", traced([1; 16], [1; 8], "a=1\r\nb: 2")),
        ("a trace with a body", super::raw::frame(&trace_message([1; 16], [1; 8], ""), b"x")),
    ];
    for (what, bytes) in frames {
        let (mut net, raw) = scene();
        net.hosts[0].echo = false;
        let far = net.expose(0, TOKEN, vec![9; 1000], true, true);
        // Things in progress: a request, another that is arriving, and a push.
        net.send_message(raw, &request(1, 0), b"");
        net.send_message(raw, &request(2, 100), b"");
        let begun = Message::Push(range(&net, 3, 10));
        net.send_message(raw, &begun, b"");
        assert!(!net.is_shut(raw));
        net.send_bytes(raw, bytes);
        assert!(net.is_shut(raw), "{what}");
        let known = net.hosts[0].take().request;
        assert!(net.hosts[0].cancelled.contains(&known), "{what}: what was in progress is over");
        assert_eq!(far.bytes(), [9; 1000], "{what}");
        net.hosts[0].inbox.clear();
        // A delivered request ends with its handler; nothing is kept of the rest.
        net.with_host(0, |host| assert!(matches!(host.answer(known, b"late"), Err(Failure::Cancelled))));
        assert_eq!((net.hosts[0].proto.requests.len(), net.hosts[0].proto.bytes), (0, 0), "{what}");
        net.revoke(0, TOKEN);
        unharmed(net, raw);
    }
}

/// Even if the second declaration equals the first.
#[test]
fn number_declared_twice_ends_the_connection() {
    for name in ["echo", "other"] {
        let (mut net, raw) = scene();
        net.hosts[0].echo = true;
        net.send_message(raw, &declaring(6, 9, Some("echo")), b"");
        net.send_message(raw, &declaring(7, 9, None), b"");
        assert!(!net.is_shut(raw));
        net.send_message(raw, &declaring(8, 9, Some(name)), b"");
        assert!(net.is_shut(raw));
        unharmed(net, raw);
    }
}

#[test]
fn push_started_twice_ends_the_connection() {
    let (mut net, raw) = scene();
    net.expose(0, TOKEN, vec![9; 1000], true, true);
    let begun = Message::Push(range(&net, 3, 10));
    net.send_message(raw, &begun, b"");
    net.send_message(raw, &begun, b"");
    assert!(net.is_shut(raw));
    net.revoke(0, TOKEN);
    unharmed(net, raw);
}

/// A peer may use as many declarations as the limit allows.
#[test]
fn declaration_beyond_the_limit_ends_the_connection() {
    let (mut net, raw) = scene();
    net.hosts[0].echo = true;
    let mut bytes = Vec::new();
    for number in 1..MAX_DECLARATIONS as u32 + 2 {
        wire::put(&mut bytes, &declaring(number.into(), number, Some("n")), b"", false);
        if number as usize == MAX_DECLARATIONS {
            net.send_bytes(raw, std::mem::take(&mut bytes));
            assert!(!net.is_shut(raw));
        }
    }
    net.send_bytes(raw, bytes);
    assert!(net.is_shut(raw));
    unharmed(net, raw);
}

/// Operation numbers are easily guessed: only the peer of an operation can end it.
#[test]
fn message_about_another_peers_operation_has_no_effect() {
    let mut net = Net::new(2);
    net.hosts[1].echo = false;
    net.expose(1, TOKEN, vec![7; 1000], true, true);
    let raw = net.raw_peer(0, 1);
    let op = net.call(0, 1, call("for the honest peer"));
    net.advance(SECOND / 1000);
    net.settings.delay = SECOND / 1000;
    let near = Mem::new(vec![0; 1000]);
    let pull = net.pull(0, 1, TOKEN, 0, &near);
    let number = |id: OperationId| match id {
        OperationId::Call(id) => wire_id(id),
        OperationId::Transfer(id) => wire_id(id),
    };
    let (call_id, pull_id) = (number(net.hosts[0].ids[&op]), number(net.hosts[0].ids[&pull]));
    let mut bytes = super::raw::frame(
        &Message::Response {
            call: call_id,
            result: 0,
            shape: BorrowedBytes(b""),
            leases: LeaseRange::default(),
            released: LeaseRange::default(),
            size: 3,
        },
        b"lie",
    );
    wire::put(&mut bytes, &Message::Refuse { call: call_id, status: Status::NoResponse }, b"", false);
    wire::put(&mut bytes, &Message::Done { transfer: pull_id, status: Status::Revoked }, b"", false);
    bytes.extend(data(Stream::Pull, pull_id, 0, &[66; 1000]));
    bytes.extend(data(Stream::Response, call_id, 0, b"lie"));
    net.settings.delay = Duration::ZERO;
    net.send_bytes(raw, bytes);
    assert!(!net.hosts[0].is_done(op) && !net.hosts[0].is_done(pull), "ended by another peer");
    assert_eq!(near.bytes(), [0; 1000]);
    net.settle_until_served(1);
    assert_eq!(near.bytes(), [7; 1000]);
    assert_eq!(net.hosts[0].body(op), served(b"for the honest peer"));
    net.revoke(1, TOKEN);
    unharmed(net, raw);
}

/// A payload for an operation that starts while the payload arrives, from another peer and from the operation's own: it was
/// sent before it was requested, and is discarded.
#[test]
fn payload_sent_before_its_operation_is_discarded() {
    for from_another_peer in [true, false] {
        let mut net = Net::new(2);
        net.expose(1, TOKEN, vec![7; 1000], true, true);
        // The next number follows from the last one: a slot is used again two versions later.
        let first = net.pull(0, 1, TOKEN, 0, &Mem::new(vec![0; 1000]));
        net.settle();
        let OperationId::Transfer(id) = net.hosts[0].ids[&first] else { unreachable!() };
        let guess = wire_id(id) + (2 << 32);
        let peer = net.test_peer(0);
        let raw = if from_another_peer {
            net.raw_peer(0, 50)
        } else {
            let opens = net.call_peer(0, peer, TestCall { one_way: true, ..call("x") });
            net.advance(net.settings.delay);
            let raw = net.raw_dialled();
            net.send_bytes(raw, raw::encode_hello(wire::VERSIONS, &hello(50)));
            assert!(net.hosts[0].is_done(opens));
            raw
        };
        let mut bytes = data(Stream::Pull, guess, 0, &[66; 1000]);
        let last = bytes.pop().unwrap();
        net.send_bytes(raw, bytes);
        let near = Mem::new(vec![0; 1000]);
        let pull = if from_another_peer {
            net.pull(0, 1, TOKEN, 0, &near)
        } else {
            let remote = Remote { peer, owner: 50, token: TOKEN, offset: 0, keys: None };
            net.transfer_to(0, true, remote, &near, SECOND)
        };
        let OperationId::Transfer(id) = net.hosts[0].ids[&pull] else { unreachable!() };
        assert_eq!(wire_id(id), guess, "the guessed number is wrong");
        net.settings.delay = Duration::ZERO;
        net.send_bytes(raw, vec![last]);
        assert!(!net.hosts[0].is_done(pull), "done, though nothing was transferred");
        net.settings.delay = Duration::from_micros(50);
        net.settle();
        if from_another_peer {
            assert!(matches!(net.hosts[0].outcome(pull), Some(TestOutcome::Transferred(1000))));
            assert_eq!(near.bytes(), [7; 1000]);
        } else {
            assert_failed!(net.hosts[0], pull, Failure::Timeout | Failure::Disconnected { .. });
            assert_eq!(near.bytes(), [0; 1000]);
        }
        net.revoke(1, TOKEN);
        unharmed(net, raw);
    }
}

/// A peer's transfers end when their memory is revoked, though the peer sends and reads nothing more.
#[test]
fn stalled_transfers_of_revoked_memory_end() {
    let (mut net, raw) = scene();
    net.expose(0, TOKEN, vec![9; 4 << 20], true, true);
    let push = Message::Push(range(&net, 3, 1000));
    net.send_message(raw, &push, b"");
    assert_eq!(net.hosts[0].left("incoming pushes"), 1);
    let pull = Message::Pull(range(&net, 4, 4 << 20));
    net.settings.piece = 1000;
    net.settings.pace = SECOND / 10;
    net.send_message(raw, &pull, b"");
    assert_eq!(net.hosts[0].left("streams"), 1);
    net.revoke(0, TOKEN);
    assert_eq!(net.hosts[0].left("incoming pushes") + net.hosts[0].left("streams"), 0);
    net.settings.piece = usize::MAX;
    net.settings.pace = Duration::ZERO;
    net.advance(SECOND);
    let mut revoked = Vec::new();
    net.for_each_received(raw, |message| {
        if let Message::Done { transfer, status: Status::Revoked } = message {
            revoked.push(*transfer);
        }
    });
    revoked.sort_unstable();
    assert_eq!(revoked, [3, 4]);
    unharmed(net, raw);
}

/// What a peer that reads nothing makes an engine hold is bounded by a multiple of what it has sent.
#[test]
fn requests_of_a_peer_that_does_not_read_hold_bounded_memory() {
    let (mut net, raw) = scene();
    net.expose(0, TOKEN, vec![9; 1000], true, true);
    // Nothing that the host sends arrives.
    net.settings.report_late = true;
    let pull = Message::Pull(range(&net, 3, 1000));
    let mut bytes = Vec::new();
    for _ in 0..20_000 {
        wire::put(&mut bytes, &Message::Ping, b"", false);
        wire::put(&mut bytes, &pull, b"", false);
        wire::put(&mut bytes, &Message::Pull(Range { token: [1; 16], ..range(&net, 4, 10) }), b"", false);
    }
    let sent = bytes.len();
    let Some(link) = net.wires[raw.wire].ends[1].link else { panic!("connected") };
    let now = net.now;
    // Straight into the protocol, whose outputs are not executed.
    match net.hosts[0].proto.consume(link, &bytes, now) {
        Ok(consumed) => assert!(consumed.used <= sent),
        Err(failure) => net.hosts[0].proto.close(link, failure),
    }
    let kept = net.hosts[0].left("bytes to send") + net.hosts[0].left("streams") * size_of::<super::streams::OutStream<Mem>>();
    assert!(kept <= 8 * sent, "{kept} bytes are kept for {sent} that came");
    net.with_host(0, |host| host.proto.close(link, Failure::Cancelled));
    net.revoke(0, TOKEN);
    unharmed(net, raw);
}
