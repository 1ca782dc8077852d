//! The protocol's fuzz targets: frames, handshakes, and whole conversations.

use std::time::Duration;

use super::super::keys::{self, PreSharedKey, Role};
pub use super::conversation::conversation;
pub(crate) use super::conversation::seeds as seeds_of_conversation;
use super::env::{allocated, live};
use super::host::served;
use super::net::{Net, call, config};
use super::raw::{Raw, encode_hello, frame, hello};
use super::wire::{
    self, BorrowedBytes, Declare, Frame, HandshakeMessage, Hello, Message, ParsedHandshake, Range, Refusal, Stream,
};
use super::{Config, LeaseRange, PeerLimits, Status};
use crate::fuzzing::script::{Script, script, written};

/// Small limits, so that sizes that an adversary announces within them don't exhaust the fuzzer's memory.
pub(super) fn modest() -> Config {
    Config { max_message: 64 << 10, limits: PeerLimits { peer_requests: 8, ..config().limits }, ..config() }
}

/// Decodes frames from the bytes while there are any, and handshake messages. Each one encodes and decodes to itself.
pub fn frames(bytes: &[u8]) {
    for proved in [true, false] {
        check_handshake_round_trip(bytes, proved);
    }
    let mut rest = bytes;
    while let Ok(Frame::Whole(message, body, len)) = wire::take(rest) {
        assert!(len <= rest.len() && body.len() < len);
        for covered in [true, false] {
            let mut again = Vec::new();
            wire::put(&mut again, &message, body, covered);
            let Ok(Frame::Whole(same, same_body, all)) = wire::take(&again) else { panic!("{message:?} does not decode") };
            assert_eq!((&same, same_body, all), (&message, body, again.len()));
        }
        rest = &rest[len..];
    }
}

fn check_handshake_round_trip(bytes: &[u8], proved: bool) {
    match wire::parse_handshake(bytes, proved) {
        ParsedHandshake::Message(sent, len) => {
            let is_hello = matches!(sent, HandshakeMessage::Hello(_) | HandshakeMessage::Lane(_));
            assert!(len <= bytes.len() && (proved || !is_hello));
            let again = wire::encode_handshake(wire::VERSIONS, &sent);
            assert_eq!(wire::parse_handshake(&again, proved), ParsedHandshake::Message(sent, again.len()));
        }
        ParsedHandshake::Version(low, high) => assert!(low > wire::VERSIONS.1 || high < wire::VERSIONS.0 || low > high),
        ParsedHandshake::Unproved => assert!(!proved),
        ParsedHandshake::Incomplete | ParsedHandshake::Foreign | ParsedHandshake::Damaged => {}
    }
}

/// A frame with this content, which need not be a message; its first `head` bytes are announced as the message.
pub(super) fn framed(inside: &[u8], head: u8) -> Vec<u8> {
    let head = usize::from(head).min(inside.len());
    let mut covered = (inside.len() as u32).to_le_bytes().to_vec();
    covered.extend_from_slice(&(head as u32).to_le_bytes());
    covered.extend_from_slice(inside);
    [&crc32c::crc32c(&covered[..8 + head]).to_le_bytes()[..], &covered].concat()
}

script! {
    /// A connection of a peer that need not authenticate.
    struct UnknownPeer {
        /// Which side dials.
        dialled: bool,
        /// 0: the host requires no key. Else it does, and the peer has it (1), has another (2), or sends no proof (3).
        key: u8,
        /// It asks for checksums.
        checksums: bool,
        /// This many bytes of a correct handshake precede the input.
        magic: u8,
        /// The length in that handshake message is corrected to the length of the input.
        whole: bool,
        /// The most bytes that arrive at a time; 0 for all of them.
        piece: u8,
        /// At the end the peer disconnects; else it stays silent.
        hangs_up: bool,
    }
}

const SECRET: &[u8] = b"a secret of more than sixteen bytes";
/// A challenge and a proof: the most that is buffered of a peer that has not proved that it has the key.
const UNPROVED: usize = wire::PREAMBLE_LEN + 5 + 64;

/// Sends the messages of a proof; true if the key was the right one.
fn prove(net: &mut Net, raw: Raw, input: &UnknownPeer) -> bool {
    let ours = wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Challenge([7; 32]));
    net.send_bytes(raw, ours.clone());
    let received = net.received(raw).to_vec();
    let ParsedHandshake::Message(HandshakeMessage::Challenge(_), len) = wire::parse_handshake(&received, false) else {
        panic!("a challenge gets no challenge in reply")
    };
    let theirs = &received[..len];
    // A host that dials proves itself first.
    let answered = match wire::parse_handshake(&received[len..], false) {
        ParsedHandshake::Message(HandshakeMessage::Proof(_, digest), _) => Some(digest),
        _ => None,
    };
    assert_eq!(answered.is_some(), input.dialled);
    let handshake = encode_hello(wire::VERSIONS, &Hello { checksums: input.checksums, ..hello(9) });
    let digest = keys::digest(&handshake);
    let (challenges, side) =
        if input.dialled { ([theirs, &ours[..]], Role::Dialled) } else { ([&ours[..], theirs], Role::Dialling) };
    let secret = if input.key % 4 == 1 { SECRET } else { b"another secret of so many bytes" };
    let proof = PreSharedKey::new(secret.to_vec())
        .prove(side, &keys::Transcript { challenges, answered: answered.as_ref(), hello: &digest });
    net.send_bytes(raw, wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Proof(proof, digest)));
    net.send_bytes(raw, handshake);
    secret == SECRET
}

/// A connection that begins with these bytes, or with a part of a handshake and these, on either side and in pieces.
pub fn greeting(mut bytes: &[u8]) {
    let input = UnknownPeer::read(&mut bytes);
    let keyed = input.key % 4 != 0;
    let mut sent = encode_hello(wire::VERSIONS, &hello(9));
    sent.truncate(usize::from(input.magic) % (sent.len() + 1));
    let head = sent.len();
    sent.extend_from_slice(bytes);
    if input.whole && head == wire::PREAMBLE_LEN {
        sent[head - 4..head].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    }
    allocated();
    let config = Config { key: keyed.then(|| PreSharedKey::new(SECRET.to_vec())), ..modest() };
    let mut net = Net::with(vec![(config.clone(), true), (config, true)]);
    net.echo_everywhere();
    let mut own = None;
    let raw = if input.dialled {
        let peer = net.test_peer(0);
        own = Some(net.call_peer(0, peer, call("x")));
        net.advance(net.settings.delay);
        net.raw_dialled()
    } else {
        net.raw_dial(0)
    };
    let mut proved = !keyed;
    if matches!(input.key % 4, 1 | 2) {
        proved = prove(&mut net, raw, &input);
        assert!(proved != net.is_shut(raw), "a wrong proof was accepted, or a right one refused");
    }
    let piece = if input.piece == 0 { sent.len().max(1) } else { usize::from(input.piece) };
    for piece in sent.chunks(piece) {
        net.send_bytes(raw, piece.to_vec());
        let kept = net.buffered(raw);
        let most = if proved { wire::PREFIX_LEN + wire::MAX_FRAME } else { UNPROVED };
        assert!(kept <= most, "{kept} bytes are buffered for an unauthenticated peer");
        let open = net.raw_link(raw).and_then(|(_, link)| net.hosts[0].proto.links.get(link)).is_some_and(|link| link.is_open());
        assert!(proved || !open, "a peer without the key was accepted");
    }
    assert!(proved || net.hosts[0].proto.requests() == 0 && allocated().1 == 0, "memory is held for a peer without the key");
    let (largest, total) = allocated();
    assert!(largest <= modest().max_message, "{largest} bytes were allocated at once, {total} in all");
    assert!(live() <= (modest().limits.peer_requests + 1) * modest().max_message, "{} bytes are kept", live());
    let other = net.call(0, 1, call("still there?"));
    net.advance(Duration::from_millis(10));
    assert_eq!(net.hosts[0].body(other), served(b"still there?"));
    if input.hangs_up {
        net.disconnect(raw);
    }
    net.settle();
    assert!(own.is_none_or(|op| net.hosts[0].is_done(op)));
    if !net.is_shut(raw) {
        // Its handshake succeeded, and nothing is expected of it.
        net.disconnect(raw);
    }
    net.end();
}

pub(crate) fn seeds_of_frames() -> Vec<(&'static str, Vec<u8>)> {
    let leases = LeaseRange { first: 3, count: 1 };
    let request = |declaration| Message::Request {
        call: 1 << 32 | 1,
        procedure: 1,
        declaration,
        provider: 0,
        budget_us: 30_000_000,
        one_way: false,
        leases,
        size: 20,
    };
    let range = Range { transfer: 1 << 32 | 2, owner: 7, token: [9; 16], offset: 100, len: 1 << 20 };
    let calls = [
        frame(&request(Some(Declare { name: "echo", shape: BorrowedBytes(b"\x0e") })), &[5; 20]),
        frame(&request(None), &[6; 20]),
        frame(
            &Message::Response { call: 1 << 32 | 1, result: 1, shape: BorrowedBytes(b"\x0e"), leases, released: leases, size: 3 },
            b"yes",
        ),
        frame(&Message::Cancel { call: 1 << 32 | 1 }, b""),
        frame(&Message::TraceContext { trace_id: [3; 16], parent_id: [4; 8], flags: 1, state: "vendor=1" }, b""),
    ];
    let transfers = [
        frame(&Message::Pull(range), b""),
        frame(&Message::Push(range), b""),
        frame(&Message::Data { stream: Stream::Pull, id: range.transfer, offset: 0, len: 1 << 19 }, b""),
        frame(&Message::Done { transfer: range.transfer, status: Status::Ok }, b""),
        frame(&Message::Abort { transfer: range.transfer, push: true }, b""),
        frame(&Message::Release(leases), b""),
        frame(&Message::Revoked { token: [9; 16] }, b""),
    ];
    let texts = || "text".to_owned();
    let refusals = [
        Status::Panicked(texts()),
        Status::TypeMismatch { expected: texts(), found: texts() },
        Status::TooLarge { size: 1 << 30, limit: 1 << 20 },
        Status::OutOfRange { offset: 1, len: 2, size: 3 },
        Status::Busy(texts()),
    ];
    let refusals = refusals.map(|status| frame(&Message::Refuse { call: 5, status }, b""));
    let rest = [
        frame(&Message::Ping, b""),
        frame(&Message::Pong, b""),
        frame(&Message::ResumptionToken { token: 77 }, b""),
        frame(&Message::Handled { count: 512, calls: 512, bytes: 1 << 16 }, b""),
        frame(&Message::Shutdown { call: 4 }, b""),
        frame(&Message::Idle { received: 1000, exposes: true }, b""),
        frame(&Message::IdleAgreed, b""),
        frame(&Message::InUse, b""),
        frame(&Message::List { call: 1 << 32 | 1, is_answer: true, head: 13, width: 8 }, b""),
        frame(&Message::Goodbye, b""),
    ];
    let all = [("calls", calls.concat()), ("transfers", transfers.concat()), ("refusals", refusals.concat())];
    all.into_iter()
        .chain([("rest", rest.concat()), ("greeting", full_handshake()), ("lane", lane()), ("pieces", pieces())])
        .collect()
}

fn full_hello() -> Hello {
    let addresses = ["tcp://10.0.9.9:7000", "shm://other"].map(|address| address.parse().expect("an address"));
    Hello { addresses: addresses.to_vec(), resumption_token: Some(5), checksums: true, ..hello(9) }
}

fn full_handshake() -> Vec<u8> {
    encode_hello(wire::VERSIONS, &full_hello())
}

/// The handshake of a lane, whose token the host has not given.
fn lane() -> Vec<u8> {
    wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Lane(full_hello()))
}

/// The other handshake messages, and a frame with a checksum of its body.
fn pieces() -> Vec<u8> {
    let pieces = [
        HandshakeMessage::Challenge([1; 32]),
        HandshakeMessage::Proof([2; 32], [3; 32]),
        HandshakeMessage::Refusal(Refusal::Busy),
    ];
    let mut bytes: Vec<u8> = pieces.into_iter().flat_map(|sent| wire::encode_handshake(wire::VERSIONS, &sent)).collect();
    wire::put(&mut bytes, &Message::Ping, b"covered", true);
    bytes
}

pub(crate) fn seeds_of_greeting() -> Vec<(&'static str, Vec<u8>)> {
    let seed = |input: UnknownPeer, bytes: &[u8]| [written(&[input]), bytes.to_vec()].concat();
    let plain = UnknownPeer { dialled: false, key: 0, checksums: true, magic: 0, whole: false, piece: 0, hangs_up: true };
    let full = full_handshake();
    let more = [frame(&Message::ResumptionToken { token: 1 }, b""), frame(&Message::Ping, b"")].concat();
    let and_more = [&full[..], &more].concat();
    let another = encode_hello((7, 9), &hello(1));
    vec![
        ("accepted", seed(UnknownPeer { piece: 1, ..plain.clone() }, &full)),
        ("dialled", seed(UnknownPeer { dialled: true, hangs_up: false, ..plain.clone() }, &and_more)),
        (
            "hello",
            seed(UnknownPeer { magic: wire::PREAMBLE_LEN as u8, whole: true, ..plain.clone() }, &full[wire::PREAMBLE_LEN..]),
        ),
        ("lane", seed(plain.clone(), &lane())),
        ("lane_dialled", seed(UnknownPeer { dialled: true, ..plain.clone() }, &lane())),
        ("version", seed(UnknownPeer { dialled: true, ..plain.clone() }, &another)),
        ("proved", seed(UnknownPeer { key: 1, ..plain.clone() }, &more)),
        ("proved_dialled", seed(UnknownPeer { key: 1, dialled: true, ..plain.clone() }, &more)),
        ("another_key", seed(UnknownPeer { key: 2, ..plain.clone() }, &more)),
        ("unproved", seed(UnknownPeer { key: 3, piece: 7, ..plain.clone() }, &pieces())),
        ("foreign", seed(plain, b"HTTP/1.1 400 Bad Request\r\n\r\n")),
    ]
}
