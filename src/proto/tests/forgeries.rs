//! Messages that are well framed, and lies.

use std::time::Duration;

use super::env::{Mem, allocated};
use super::host::{assert_failed, served};
use super::net::{Net, call, config};
use super::raw::{Raw, hello};
use super::wire::{self, Bytes, MAX_FRAME, MAX_NAME, Message, Range, Stream};
use super::{Config, Failure, Leases, Status};

const CHUNK: usize = 256 << 10;
const SECOND: Duration = Duration::from_secs(1);
const TOKEN: u128 = 0xabc;
const STREAMS: [Stream; 4] = [Stream::Pull, Stream::Push, Stream::Request, Stream::Response];

pub fn request(call: u64, size: u64) -> Message<'static> {
    Message::Request {
        call,
        procedure: 1,
        name: Some("echo"),
        provider: 0,
        budget_us: 1_000_000,
        one_way: false,
        want_shape: false,
        shape: Bytes(b""),
        leases: Leases::default(),
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

/// A liar, connected to a host that also talks to an honest peer.
fn scene() -> (Net, Raw) {
    let mut net = Net::new(2);
    net.hosts[0].echo = true;
    net.hosts[1].echo = true;
    let raw = net.raw_peer(0, 1);
    (net, raw)
}

/// The host still does what it is for, and holds nothing of the liar's once that has gone.
#[track_caller]
fn unharmed(mut net: Net, raw: Raw) {
    net.echo_everywhere();
    let ops = [net.call(0, 1, call(vec![1; 100_000])), net.call(1, 0, call("hello"))];
    net.hang_up(raw);
    net.settle();
    assert_eq!(net.hosts[0].body(ops[0]).len(), 100_000);
    assert_eq!(net.hosts[1].body(ops[1]), served(b"hello"));
    net.end();
}

/// Nothing is known of such an operation: payloads go nowhere, words are ignored, and the connection lives.
#[test]
fn operations_that_nobody_began() {
    let (mut net, raw) = scene();
    for id in [0, 1, 1 << 32, 1 << 32 | 1, u64::MAX, 0x1_0000_0001] {
        for stream in STREAMS {
            for (offset, len) in [(0, 0), (0, 5), (77, CHUNK), (u64::MAX, 3)] {
                net.say_bytes(raw, data(stream, id, offset, &vec![7; len]));
            }
        }
        net.say(raw, &Message::Done { transfer: id, status: Status::Ok }, b"");
        net.say(raw, &Message::Done { transfer: id, status: Status::Revoked }, b"");
        net.say(raw, &Message::Refuse { call: id, status: Status::NoResponse }, b"");
        net.say(raw, &Message::Cancel { call: id }, b"");
        net.say(raw, &Message::Abort { transfer: id, push: true }, b"");
        net.say(raw, &Message::Abort { transfer: id, push: false }, b"");
        net.say(raw, &Message::Revoked { token: u128::from(id).to_le_bytes() }, b"");
        for count in [0, 1, u32::MAX] {
            let leases = Leases { first: id, count };
            net.say(raw, &Message::Release(leases), b"");
            let answer = Message::Response { call: id, shape: Bytes(b"?"), leases, size: 3 };
            net.say(raw, &answer, b"abc");
        }
        net.say(raw, &Message::Pong, b"");
    }
    assert!(!net.is_shut(raw));
    assert_eq!(allocated().1, 0);
    unharmed(net, raw);
}

/// The connection is closed on those who break the protocol, with everything of theirs.
#[test]
fn lies_that_end_the_connection() {
    let long = "x".repeat(MAX_NAME + 1);
    let bare = |name: Option<&'static str>| match request(5, 0) {
        Message::Request { call, provider, budget_us, shape, leases, size, .. } => {
            let (one_way, want_shape) = (false, false);
            Message::Request { call, procedure: 9, name, provider, budget_us, one_way, want_shape, shape, leases, size }
        }
        _ => unreachable!(),
    };
    let named = |name| match request(5, 0) {
        Message::Request { call, provider, budget_us, shape, leases, size, .. } => {
            let (one_way, want_shape) = (false, false);
            Message::Request {
                call,
                procedure: 1,
                name: Some(name),
                provider,
                budget_us,
                one_way,
                want_shape,
                shape,
                leases,
                size,
            }
        }
        _ => unreachable!(),
    };
    let frames: Vec<(&str, Vec<u8>)> = vec![
        ("a name that was never told", super::raw::frame(&bare(None), b"")),
        ("a name that is too long", super::raw::frame(&named(&long), b"")),
        ("another name", super::raw::frame(&named("other"), b"")),
        ("a call made twice", super::raw::frame(&request(1, 0), b"")),
        ("part of a body", super::raw::frame(&request(5, 10), b"abc")),
        ("more than the body", super::raw::frame(&request(5, 1), b"abc")),
        (
            "a chunk that is too long",
            super::raw::frame(&Message::Data { stream: Stream::Push, id: 8, offset: 0, len: CHUNK as u32 + 1 }, b""),
        ),
        (
            "a chunk of nearly everything",
            super::raw::frame(&Message::Data { stream: Stream::Push, id: 8, offset: 0, len: u32::MAX }, b""),
        ),
        ("a chunk in the wrong place", data(Stream::Request, 2, 1, b"abc")),
        ("a chunk beyond the end", data(Stream::Request, 2, 0, &[0; 101])),
        ("a chunk before the beginning", data(Stream::Push, 3, u64::MAX, b"abc")),
        ("a push beyond the end", data(Stream::Push, 3, 0, &[0; 11])),
        ("a frame that is too long", (MAX_FRAME as u32 + 1).to_le_bytes().to_vec()),
        ("no message", vec![3, 0, 0, 0, 250, 1, 1]),
        ("an empty frame", vec![0, 0, 0, 0]),
    ];
    for (what, bytes) in frames {
        let (mut net, raw) = scene();
        net.hosts[0].echo = false;
        let far = net.expose(0, TOKEN, vec![9; 1000], true, true);
        // Things in progress: a request, another that is arriving, and a push.
        net.say(raw, &request(1, 0), b"");
        net.say(raw, &request(2, 100), b"");
        let begun = Message::Push(range(&net, 3, 10));
        net.say(raw, &begun, b"");
        assert!(!net.is_shut(raw));
        net.say_bytes(raw, bytes);
        assert!(net.is_shut(raw), "{what}");
        let known = net.hosts[0].take().request;
        assert!(net.hosts[0].cancelled.contains(&known), "{what}: what was in progress is over");
        assert_eq!(far.bytes(), [9; 1000], "{what}");
        net.hosts[0].inbox.clear();
        net.revoke(0, TOKEN);
        unharmed(net, raw);
    }
}

#[test]
fn a_push_that_is_begun_twice() {
    let (mut net, raw) = scene();
    net.expose(0, TOKEN, vec![9; 1000], true, true);
    let begun = Message::Push(range(&net, 3, 10));
    net.say(raw, &begun, b"");
    net.say(raw, &begun, b"");
    assert!(net.is_shut(raw));
    net.revoke(0, TOKEN);
    unharmed(net, raw);
}

/// A peer may name as many procedures as the limit says.
#[test]
fn too_many_names() {
    let (mut net, raw) = scene();
    net.hosts[0].echo = true;
    let mut bytes = Vec::new();
    for procedure in 0..wire::MAX_NAMES as u32 + 1 {
        let Message::Request { provider, budget_us, shape, leases, size, .. } = request(0, 0) else { unreachable!() };
        let (call, name, one_way, want_shape) = (procedure.into(), Some("n"), true, false);
        let message = Message::Request { call, procedure, name, provider, budget_us, one_way, want_shape, shape, leases, size };
        wire::put(&mut bytes, &message, b"");
        if procedure as usize == wire::MAX_NAMES - 1 {
            net.say_bytes(raw, std::mem::take(&mut bytes));
            assert!(!net.is_shut(raw));
        }
    }
    net.say_bytes(raw, bytes);
    assert!(net.is_shut(raw));
    unharmed(net, raw);
}

/// Sizes are checked before anything is allocated for them.
#[test]
fn sizes_that_are_claimed() {
    let few = Config { max_requests: 3, ..config() };
    let mut net = Net::with(vec![(few.clone(), true), (few, true)]);
    let raw = net.raw_peer(0, 1);
    allocated();
    for size in [u64::MAX, 1 << 62, 1 << 40, config().max_message as u64 + 1] {
        net.say(raw, &request(size, size), b"");
    }
    assert_eq!(allocated(), (0, 0));
    // Within the limits a claim is believed, but only so often.
    for number in 1..10 {
        net.say(raw, &request(number, config().max_message as u64), b"");
    }
    let (largest, total) = allocated();
    assert!(largest <= config().max_message && total <= 3 * config().max_message);
    assert!(!net.is_shut(raw));
    unharmed(net, raw);
}

/// An answer that claims more than this engine takes ends the call, not the engine.
#[test]
fn an_answer_that_claims_too_much() {
    let mut net = Net::pair();
    let peer = net.played_peer(0);
    let mut ops = Vec::new();
    ops.push(net.call_peer(0, peer, call("x")));
    net.advance(SECOND / 100);
    let raw = net.raw_dialled();
    net.say_bytes(raw, wire::greet(wire::VERSIONS, &hello(1)));
    allocated();
    for size in [u64::MAX, config().max_message as u64 + 1] {
        let number = last_call(&net, raw);
        let answer = Message::Response { call: number, shape: Bytes(b""), leases: Leases::default(), size };
        net.say(raw, &answer, b"");
        let op = ops[ops.len() - 1];
        assert_failed!(net.hosts[0], op, Failure::TooLarge { size: s, .. } if *s == size);
        ops.push(net.call_peer(0, peer, call("again")));
        net.advance(SECOND / 100);
    }
    assert_eq!(allocated(), (0, 0));
    assert!(!net.is_shut(raw));
    unharmed(net, raw);
}

fn last_call(net: &Net, raw: Raw) -> u64 {
    let mut number = 0;
    net.each_heard(raw, |message| {
        if let Message::Request { call, .. } = message {
            number = *call;
        }
    });
    number
}

/// Numbers are easily guessed; an operation is ended only by the peer that it is with.
#[test]
fn nobody_ends_what_others_do() {
    let mut net = Net::new(2);
    net.hosts[1].echo = false;
    net.expose(1, TOKEN, vec![7; 1000], true, true);
    let raw = net.raw_peer(0, 1);
    let op = net.call(0, 1, call("for the honest peer"));
    net.advance(SECOND / 1000);
    net.settings.delay = SECOND / 1000;
    let near = Mem::new(vec![0; 1000]);
    let pull = net.pull(0, 1, TOKEN, 0, &near);
    let number = |id: super::host::Id| match id {
        super::host::Id::Call(id) => super::wire_id(id),
        super::host::Id::Transfer(id) => super::wire_id(id),
    };
    let (call_id, pull_id) = (number(net.hosts[0].ids[&op]), number(net.hosts[0].ids[&pull]));
    let mut bytes =
        super::raw::frame(&Message::Response { call: call_id, shape: Bytes(b""), leases: Leases::default(), size: 3 }, b"lie");
    wire::put(&mut bytes, &Message::Refuse { call: call_id, status: Status::NoResponse }, b"");
    wire::put(&mut bytes, &Message::Done { transfer: pull_id, status: Status::Revoked }, b"");
    bytes.extend(data(Stream::Pull, pull_id, 0, &[66; 1000]));
    bytes.extend(data(Stream::Response, call_id, 0, b"lie"));
    net.settings.delay = Duration::ZERO;
    net.say_bytes(raw, bytes);
    assert!(!net.hosts[0].is_done(op) && !net.hosts[0].is_done(pull), "ended by somebody else");
    assert_eq!(near.bytes(), [0; 1000]);
    net.settle_until_served(1);
    assert_eq!(near.bytes(), [7; 1000]);
    assert_eq!(net.hosts[0].body(op), served(b"for the honest peer"));
    net.revoke(1, TOKEN);
    unharmed(net, raw);
}

/// A payload for an operation that is begun while the payload arrives: it was sent before it was asked for.
#[test]
fn a_payload_that_comes_before_its_operation() {
    let mut net = Net::new(2);
    net.hosts[1].echo = true;
    net.expose(1, TOKEN, vec![7; 1000], true, true);
    // What numbers will be like is learned from those that were.
    let first = net.pull(0, 1, TOKEN, 0, &Mem::new(vec![0; 1000]));
    net.settle();
    let super::host::Id::Transfer(id) = net.hosts[0].ids[&first] else { unreachable!() };
    for guess in (0..4)
        .map(|version| super::wire_id(id) + (version << 33))
        .chain([super::wire_id(id) + (2 << 32), super::wire_id(id) + (1 << 32)])
    {
        let raw = net.raw_peer(0, 50);
        let mut bytes = data(Stream::Pull, guess, 0, &[66; 1000]);
        let last = bytes.pop().unwrap();
        net.say_bytes(raw, bytes);
        let near = Mem::new(vec![0; 1000]);
        let pull = net.pull(0, 1, TOKEN, 0, &near);
        net.settings.delay = Duration::ZERO;
        net.say_bytes(raw, vec![last]);
        net.settings.delay = Duration::from_micros(50);
        net.settle();
        assert!(matches!(net.hosts[0].outcome(pull), Some(super::host::Outcome::Moved(1000))));
        assert_eq!(near.bytes(), [7; 1000], "done, and nothing was moved");
        net.hang_up(raw);
    }
    net.revoke(1, TOKEN);
    net.end();
}

/// Asking is cheap, and so is what is kept of it: nobody makes an engine hold much more than they have sent.
#[test]
fn those_who_ask_and_do_not_read() {
    let (mut net, raw) = scene();
    net.expose(0, TOKEN, vec![9; 1000], true, true);
    // Nothing that the host says gets anywhere.
    net.settings.report_late = true;
    let pull = Message::Pull(range(&net, 3, 1000));
    let mut bytes = Vec::new();
    for _ in 0..20_000 {
        wire::put(&mut bytes, &Message::Ping, b"");
        wire::put(&mut bytes, &pull, b"");
        wire::put(&mut bytes, &Message::Pull(Range { token: [1; 16], ..range(&net, 4, 10) }), b"");
    }
    let sent = bytes.len();
    let Some(link) = net.wires[raw.wire].ends[1].link else { panic!("connected") };
    let now = net.now;
    // Straight into the protocol, whose output nobody carries out.
    match net.hosts[0].proto.consume(link, &bytes, now) {
        Ok(consumed) => assert!(consumed.used <= sent),
        Err(failure) => net.hosts[0].proto.close(link, failure),
    }
    let kept = net.hosts[0].left("bytes to send") + net.hosts[0].left("streams") * size_of::<super::link::OutStream<Mem>>();
    assert!(kept <= 8 * sent, "{kept} bytes are kept for {sent} that came");
    net.with_host(0, |host| host.proto.close(link, Failure::Cancelled));
    net.revoke(0, TOKEN);
    unharmed(net, raw);
}
