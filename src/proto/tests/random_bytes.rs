//! Random bytes, corrupt frames and adversarial messages on an open connection: nothing panics, allocations are bounded, and
//! other peers are not affected.

use proptest::prelude::*;

use super::arbitrary::KnownProcedures;
use super::env::{Mem, Random, allocated};
use super::host::{OperationId, served};
use super::net::{Net, call, config, few};
use super::raw::{self, Raw, frame, hello};
use super::wire::{self, Message};
use super::{Config, wire_id};

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

const TOKEN: u128 = 0xdead_beef;

/// A host with operations in progress, and an adversary that is connected to it.
struct RandomBytesScene {
    net: Net,
    raw: Raw,
    known: KnownProcedures,
    own: Mem,
    secret: Mem,
}

fn scene() -> RandomBytesScene {
    // Small limits, so that sizes that an adversary announces within them don't exhaust the test's memory.
    let modest = Config { max_message: 64 << 10, limits: few(8), ..config() };
    let mut net = Net::with(vec![(modest.clone(), true), (modest, true)]);
    net.hosts[1].echo = true;
    let own = net.expose(0, TOKEN, vec![1; 600 << 10], true, true);
    let secret = net.expose(0, TOKEN + 1, vec![2; 1000], true, true);
    let peer = net.test_peer(0);
    let mut ops = vec![net.call_peer(0, peer, call("x"))];
    net.advance(net.settings.delay);
    let raw = net.raw_dialled();
    net.send_bytes(raw, raw::encode_hello(wire::VERSIONS, &hello(7)));
    ops.push(net.call_peer(0, peer, call(vec![1; 50_000])));
    for pull in [true, false] {
        let remote = super::Remote { peer, owner: 7, token: 1, offset: 0, keys: None };
        ops.push(net.transfer_to(0, pull, remote, &Mem::new(vec![3; 100_000]), config().peer_timeout * 10));
    }
    net.run();
    let numbers = ops.iter().map(|op| match net.hosts[0].ids[op] {
        OperationId::Call(id) => wire_id(id),
        OperationId::Transfer(id) => wire_id(id),
    });
    let known = KnownProcedures { numbers: numbers.collect(), tokens: vec![TOKEN], owner: net.hosts[0].incarnation };
    allocated();
    RandomBytesScene { net, raw, known, own, secret }
}

impl RandomBytesScene {
    /// Sends bytes to the host, at once or in pieces.
    fn send_message(&mut self, random: &mut Random, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = if random.once_in(2) { rest.len() } else { 1 + random.below(rest.len()) };
            self.net.send_bytes(self.raw, rest[..n].to_vec());
            rest = &rest[n..];
        }
        for arrived in std::mem::take(&mut self.net.hosts[0].inbox) {
            if random.once_in(2) {
                self.net.with_host(0, |host| drop(host.answer(arrived.request, &arrived.body)));
            }
        }
    }

    fn check(mut self) {
        let limit = 64 << 10;
        let (largest, total) = allocated();
        assert!(largest <= limit, "{largest} bytes were allocated at once");
        // Announced bodies: no more at a time than requests may be in progress, and one for each call of the host.
        let live_bytes: usize = super::env::live();
        assert!(live_bytes <= 12 * limit, "{live_bytes} bytes are kept, {total} were allocated");
        assert!(self.secret.bytes().iter().all(|byte| *byte == 2), "memory was written without its token");
        assert_eq!(self.own.bytes().len(), 600 << 10);
        let op = self.net.call(0, 1, call("still there?"));
        self.net.advance(self.net.settings.delay * 20);
        assert_eq!(self.net.hosts[0].body(op), served(b"still there?"));
        self.net.disconnect(self.raw);
        self.net.hosts[0].inbox.clear();
        self.net.revoke(0, TOKEN);
        self.net.revoke(0, TOKEN + 1);
        self.net.end();
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn random_bytes_leave_the_host_working(seed: u64, bytes in prop::collection::vec(any::<u8>(), 0..500)) {
        let mut scene = scene();
        scene.send_message(&mut Random(seed), &bytes);
        scene.check();
    }

    /// Random bytes behind their length in four bytes.
    #[test]
    fn random_frames_leave_the_host_working(
        seed: u64,
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..30),
    ) {
        let mut scene = scene();
        let mut random = Random(seed);
        for inside in frames {
            let mut bytes = (inside.len() as u32).to_le_bytes().to_vec();
            bytes.extend_from_slice(&inside);
            scene.send_message(&mut random, &bytes);
        }
        scene.check();
    }

    /// Corrupt messages of an engine: bytes changed, cut off, repeated, left out.
    #[test]
    fn corrupt_frames_leave_the_host_working(seed: u64, count in 1..40usize) {
        let mut scene = scene();
        let mut random = Random(seed);
        let mut bytes = Vec::new();
        for _ in 0..count {
            let (message, body) = random.message(&scene.known);
            bytes.extend(frame(&message, body));
        }
        for _ in 0..=random.below(4) {
            let at = random.below(bytes.len());
            match random.below(4) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes.truncate(at + 1),
                2 => drop(bytes.drain(at..bytes.len().min(at + 1 + random.below(8)))),
                _ => bytes.extend_from_within(at..),
            }
            if bytes.is_empty() {
                break;
            }
        }
        scene.send_message(&mut random, &bytes);
        scene.check();
    }

    /// Well-framed messages about anything, with payloads of the right length, in any order.
    #[test]
    fn adversarial_messages_leave_the_host_working(seed: u64, count in 1..150usize) {
        let mut scene = scene();
        let mut random = Random(seed);
        let mut last = Vec::new();
        for _ in 0..count {
            let (message, body) = random.message(&scene.known);
            match &message {
                // The host knows these numbers from now on.
                Message::Request { call, .. } => scene.known.numbers.push(*call),
                Message::Pull(range) | Message::Push(range) => scene.known.numbers.push(range.transfer),
                _ => {}
            }
            let mut bytes = frame(&message, body);
            if let Message::Data { len, .. } = message {
                bytes.resize(bytes.len() + len as usize, 0x77);
                bytes.push(random.below(2) as u8);
            }
            if random.once_in(8) {
                bytes.extend_from_slice(&last);
            }
            scene.send_message(&mut random, &bytes);
            last = bytes;
            if random.once_in(20) {
                scene.net.advance(config().peer_timeout / 4);
            }
        }
        scene.check();
    }

    /// In place of the handshake, and within it.
    #[test]
    fn random_handshake_leaves_the_host_working(
        seed: u64,
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        kept in 0..40usize,
    ) {
        let mut scene = scene();
        let mut random = Random(seed);
        scene.net.disconnect(scene.raw);
        scene.raw = scene.net.raw_dial(0);
        let mut sent = raw::encode_hello(wire::VERSIONS, &hello(9));
        sent.truncate(kept);
        sent.extend_from_slice(&bytes);
        scene.send_message(&mut random, &sent);
        scene.check();
    }
}
