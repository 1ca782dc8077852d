//! Adversarial peers, which speak to an engine by libfabric's own messages.

#[path = "ofi/names.rs"]
mod names;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mio::Token;

use super::limits::{CREDITS, MESSAGE};
use super::provider;
use super::station::Station;
use super::sys::{EndpointName, Label, PeerAddress};
use super::wire::{self, OfiContent, OfiHeader, OfiHello};
use crate::address::OfiProvider;
use crate::proto::wire::VERSIONS;
use crate::{Engine, Request};

const BOUND: Duration = Duration::from_secs(10);

/// An engine that serves, or `None` with a line where libfabric is missing.
fn victim() -> Option<Engine> {
    if let Err(reason) = provider::available(OfiProvider::Tcp) {
        println!("skipped: {reason}");
        return None;
    }
    let builder = Engine::builder().listen("ofi+tcp://127.0.0.1:0").same_host_upgrade(false);
    let engine = builder.connect_timeout(Duration::from_millis(500)).build().unwrap();
    engine.define("add", |_: &Request, (x, y): (u32, u32)| x + y).unwrap();
    Some(engine)
}

#[track_caller]
fn assert_serves(engine: &Engine) {
    let client = Engine::builder().same_host_upgrade(false).build().unwrap();
    let to = client.lookup(engine.address()).unwrap();
    assert_eq!(client.procedure::<(u32, u32), u32>("add").on(&to).call(&(1, 2)).unwrap(), 3);
    client.finalize().unwrap();
}

/// An endpoint that sends whatever it likes.
struct Raw {
    station: Station,
    to: PeerAddress,
    /// Its number of the link.
    number: u64,
    _poll: mio::Poll,
}

impl Raw {
    fn towards(engine: &Engine) -> Raw {
        let poll = mio::Poll::new().unwrap();
        let at = "127.0.0.1:0".parse().unwrap();
        let info = provider::at(OfiProvider::Tcp, at).unwrap();
        let station = Station::open(OfiProvider::Tcp, info, at, poll.registry(), Token(0)).unwrap();
        let to = station.av.insert(&EndpointName::of(engine.address().socket().unwrap())).unwrap();
        for _ in 0..64 {
            station.endpoint.receive(vec![0; MESSAGE], 0, Label::Message).unwrap();
        }
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Raw { station, to, number: NEXT.fetch_add(1, Ordering::Relaxed), _poll: poll }
    }

    fn send(&self, message: &[u8]) {
        let begin = Instant::now();
        loop {
            let posted = self.station.endpoint.send(self.to, message.to_vec(), 0, Label::Message).unwrap();
            if matches!(posted, super::sys::Posted::Begun) {
                return;
            }
            assert!(begin.elapsed() < BOUND, "the provider takes nothing");
            self.station.collect().unwrap();
        }
    }

    fn say(&self, header: OfiHeader, content: &OfiContent<'_>) {
        let mut message = Vec::new();
        wire::encode(header, content, &mut message);
        self.send(&message);
    }

    /// The next message that comes within the time.
    fn hear(&self, within: Duration) -> Option<Vec<u8>> {
        let begin = Instant::now();
        while begin.elapsed() < within {
            for done in self.station.take_completions().unwrap() {
                if let (false, Some(buffer), Ok(len)) = (done.is_send, done.buffer, done.result) {
                    return Some(buffer[..len].to_vec());
                }
            }
            std::thread::yield_now();
        }
        None
    }

    fn hello(&self) -> OfiHello<'_> {
        let name = self.station.endpoint.name().bytes();
        let (message, credits) = (MESSAGE as u32, CREDITS as u16);
        OfiHello { versions: VERSIONS, message, credits, incarnation: 7, link: self.number, watch: 0, name }
    }

    /// Dials; returns the victim's number of the link.
    fn dial(&self) -> u64 {
        self.say(OfiHeader { sequence: 0, to: 0, handled: 0 }, &OfiContent::Hello(self.hello()));
        let answer = self.hear(BOUND).expect("an answer");
        match wire::decode(&answer).unwrap() {
            (header, OfiContent::Accept(accept)) => {
                assert_eq!(header.to, self.number);
                accept.link
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Waits for the last message of the victim.
#[track_caller]
fn assert_ended(raw: &Raw, what: &str) {
    let begin = Instant::now();
    while begin.elapsed() < BOUND {
        if let Some(message) = raw.hear(Duration::from_millis(50))
            && matches!(wire::decode(&message), Ok((_, OfiContent::Bye)))
        {
            return;
        }
    }
    panic!("the link did not end after {what}");
}

#[test]
fn what_belongs_to_no_link_is_dropped() {
    let Some(engine) = victim() else { return };
    let raw = Raw::towards(&engine);
    raw.send(&[]);
    raw.send(&[0xff; 300]);
    for kind in 0..=20 {
        let mut message = vec![kind, 0, 0, 0];
        message.resize(100, 0x5a);
        (0..100).step_by(7).for_each(|len| raw.send(&message[..len]));
    }
    let header = OfiHeader { sequence: 0, to: 77, handled: 0 };
    raw.say(header, &OfiContent::Bytes(&[1; 100]));
    raw.say(header, &OfiContent::Ready { number: 0, tag: 1, name: b"" });
    // More than the victim's receive buffers hold.
    raw.send(&vec![4; 3 * MESSAGE]);
    assert_serves(&engine);
    assert_eq!(raw.hear(Duration::from_millis(50)), None);
    engine.finalize().unwrap();
}

#[test]
fn hello_from_an_impossible_address_is_dropped() {
    let Some(engine) = victim() else { return };
    let raw = Raw::towards(&engine);
    let header = OfiHeader { sequence: 0, to: 0, handled: 0 };
    for address in ["0.0.0.0:7", "224.0.0.1:7", "127.0.0.1:0", "[::1]:7"] {
        let name = EndpointName::of(address.parse().unwrap());
        raw.say(header, &OfiContent::Hello(OfiHello { name: name.bytes(), ..raw.hello() }));
    }
    raw.say(header, &OfiContent::Hello(OfiHello { name: b"no address", ..raw.hello() }));
    assert_eq!(raw.hear(Duration::from_millis(100)), None);
    assert_serves(&engine);
    engine.finalize().unwrap();
}

#[test]
fn hello_of_another_version_is_refused_with_the_versions() {
    let Some(engine) = victim() else { return };
    let raw = Raw::towards(&engine);
    let header = OfiHeader { sequence: 0, to: 0, handled: 0 };
    raw.say(header, &OfiContent::Hello(OfiHello { versions: (900, 901), ..raw.hello() }));
    let answer = raw.hear(BOUND).expect("an answer");
    let (header, OfiContent::Refuse { versions, .. }) = wire::decode(&answer).unwrap() else { panic!("{answer:?}") };
    assert_eq!((header.to, versions), (raw.number, VERSIONS));
    assert_serves(&engine);
    engine.finalize().unwrap();
}

#[test]
fn repeated_hello_makes_one_link() {
    let Some(engine) = victim() else { return };
    let raw = Raw::towards(&engine);
    let first = raw.dial();
    let (begin, mut answers) = (Instant::now(), 0);
    // A dialler that is honest repeats it every 200 ms; what others do not read stays with the provider.
    while begin.elapsed() < Duration::from_millis(250) {
        raw.say(OfiHeader { sequence: 0, to: 0, handled: 0 }, &OfiContent::Hello(raw.hello()));
        let Some(answer) = raw.hear(Duration::from_millis(1)) else { continue };
        match wire::decode(&answer).unwrap() {
            (_, OfiContent::Accept(accept)) => assert_eq!(accept.link, first),
            // On a busy machine the time for the handshake may be over.
            (_, OfiContent::Bye) => break,
            other => panic!("{other:?}"),
        }
        answers += 1;
    }
    assert!(answers <= 1 + begin.elapsed().as_millis() / 100, "{answers} answers in {:?}", begin.elapsed());
    engine.finalize().unwrap();
}

#[test]
fn link_whose_peer_breaks_the_rules_ends() {
    let Some(engine) = victim() else { return };
    let name = EndpointName::of("127.0.0.1:7".parse().unwrap());
    let elsewhere = EndpointName::of("10.99.0.1:7".parse().unwrap());
    let announce = OfiContent::Announce { number: 0, len: 1 << 20, covered: false, name: name.bytes() };
    let cases: &[(&str, OfiHeader, OfiContent<'_>)] = &[
        ("a gap", OfiHeader { sequence: 1, to: 0, handled: 0 }, OfiContent::Credit),
        ("an old number", OfiHeader { sequence: u32::MAX, to: 0, handled: 0 }, OfiContent::Credit),
        ("handled messages that were not sent", OfiHeader { sequence: 0, to: 0, handled: 1000 }, OfiContent::Credit),
        ("a payload without a frame", OfiHeader { sequence: 0, to: 0, handled: 0 }, announce),
        (
            "an inline payload without a frame",
            OfiHeader { sequence: 0, to: 0, handled: 0 },
            OfiContent::Payload { bytes: &[1; 50], sum: None },
        ),
        ("no payload without a frame", OfiHeader { sequence: 0, to: 0, handled: 0 }, OfiContent::SourceGone),
        (
            "a receive for nothing",
            OfiHeader { sequence: 0, to: 0, handled: 0 },
            OfiContent::Ready { number: 3, tag: 5, name: elsewhere.bytes() },
        ),
        ("the arrival of nothing", OfiHeader { sequence: 0, to: 0, handled: 0 }, OfiContent::Taken { number: 3 }),
        ("bytes of no protocol", OfiHeader { sequence: 0, to: 0, handled: 0 }, OfiContent::Bytes(&[0xee; 200])),
    ];
    for (what, header, content) in cases {
        let raw = Raw::towards(&engine);
        let link = raw.dial();
        raw.say(OfiHeader { to: link, ..*header }, content);
        assert_ended(&raw, what);
    }
    // A message of the link that is malformed.
    let raw = Raw::towards(&engine);
    let link = raw.dial();
    let mut message = vec![99, 0, 0, 0, 0, 0, 0, 0];
    message.extend_from_slice(&link.to_le_bytes());
    raw.send(&message);
    assert_ended(&raw, "a malformed message");
    assert_serves(&engine);
    engine.finalize().unwrap();
}

#[test]
fn link_without_a_handshake_ends_in_time() {
    let Some(engine) = victim() else { return };
    let raws: Vec<Raw> = (0..4).map(|_| Raw::towards(&engine)).collect();
    for raw in &raws {
        raw.dial();
    }
    raws.iter().for_each(|raw| assert_ended(raw, "the time limit"));
    assert_serves(&engine);
    engine.finalize().unwrap();
}

#[test]
fn unknown_provider_and_busy_port_are_errors() {
    let Some(engine) = victim() else { return };
    let again = Engine::builder().listen(engine.address()).build();
    assert!(matches!(again, Err(crate::Error::AddressInUse { .. })), "{again:?}");
    // An address of a documentation network is no address of this host.
    let begin = Instant::now();
    let foreign = Engine::builder().listen("ofi+tcp://192.0.2.1:0").build().unwrap_err();
    assert!(foreign.to_string().contains("192.0.2.1"), "{foreign}");
    let absent = Engine::builder().listen("ofi+efa://127.0.0.1:0").build().unwrap_err();
    assert!(absent.to_string().contains("no provider \"efa\""), "{absent}");
    assert!(begin.elapsed() < BOUND);
    engine.finalize().unwrap();
}
