//! Adversarial peers, which speak to an engine by libfabric's own messages.

#[path = "ofi/names.rs"]
mod names;
#[path = "ofi/payloads.rs"]
mod payloads;
#[path = "ofi/rma.rs"]
mod rma;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use mio::Token;

use super::limits::{CREDITS, MESSAGE, MOST_KEPT};
use super::outbox::{FrameProgress, OfiOutbox, OfiSend};
use super::port::{PeerName, Port};
use super::provider;
use super::station::Station;
use super::sys::{EndpointName, Label, LoanHost, PeerAddress, Posted, Purpose};
use super::wire::{self, OfiContent, OfiHeader, OfiHello};
use crate::address::OfiProvider;
use crate::memory::{Region, Slice};
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

fn station() -> (Station, mio::Poll) {
    let poll = mio::Poll::new().unwrap();
    let at = "127.0.0.1:0".parse().unwrap();
    let info = provider::at(OfiProvider::Tcp, at, Purpose::Messages).unwrap();
    (Station::open(OfiProvider::Tcp, info, at, poll.registry(), Token(0)).unwrap(), poll)
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
        Raw::to(engine.address().socket().unwrap())
    }

    fn to(socket: SocketAddr) -> Raw {
        let (station, poll) = station();
        let to = station.av.insert(&EndpointName::of(socket)).unwrap();
        for _ in 0..64 {
            station.endpoint.receive(vec![0; MESSAGE], 0, Label::Message).unwrap();
        }
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Raw { station, to, number: NEXT.fetch_add(1, Ordering::Relaxed), _poll: poll }
    }

    fn send(&self, message: &[u8]) {
        let begin = Instant::now();
        while !self.try_send(message) {
            assert!(begin.elapsed() < BOUND, "the provider takes nothing");
        }
    }

    /// False when the provider has no connection yet.
    fn try_send(&self, message: &[u8]) -> bool {
        let posted = self.station.endpoint.send(self.to, message.to_vec(), 0, Label::Message).unwrap();
        self.station.collect().unwrap();
        matches!(posted, Posted::Begun)
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
        OfiHello { versions: VERSIONS, message, credits, incarnation: 7, link: self.number, watch: 0, rma: 0, name }
    }

    /// Dials; returns the victim's number of the link.
    fn dial(&self) -> u64 {
        self.say(OfiHeader { sequence: 0, to: 0, handled: 0 }, &OfiContent::Hello(self.hello()));
        let answer = self.hear(BOUND).expect("an answer");
        match wire::decode(&answer).unwrap() {
            (header, OfiContent::Accept(accept), _) => {
                assert_eq!(header.to, self.number);
                accept.link
            }
            other => panic!("{other:?}"),
        }
    }
}

/// What a message consists of.
#[track_caller]
fn parts(message: &[u8]) -> Vec<OfiContent<'_>> {
    let (_, first, further) = wire::decode(message).unwrap();
    std::iter::once(first).chain(further.map(Result::unwrap)).collect()
}

/// Waits for the last message of the victim.
#[track_caller]
fn assert_ended(raw: &Raw, what: &str) {
    let begin = Instant::now();
    while begin.elapsed() < BOUND {
        if let Some(message) = raw.hear(Duration::from_millis(50))
            && parts(&message).contains(&OfiContent::Bye)
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
    let (header, OfiContent::Refuse { versions, .. }, _) = wire::decode(&answer).unwrap() else { panic!("{answer:?}") };
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
            (_, OfiContent::Accept(accept), _) => assert_eq!(accept.link, first),
            // On a busy machine the time for the handshake may be over.
            (_, OfiContent::Bye, _) => break,
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
    let announce = OfiContent::Announce { number: 0, len: 1 << 20, covered: false, name: name.bytes(), bytes: b"" };
    let cases: &[(&str, OfiHeader, OfiContent<'_>)] = &[
        ("a gap", OfiHeader { sequence: 1, to: 0, handled: 0 }, OfiContent::Credit),
        ("an old number", OfiHeader { sequence: u32::MAX, to: 0, handled: 0 }, OfiContent::Credit),
        ("handled messages that were not sent", OfiHeader { sequence: 0, to: 0, handled: 1000 }, OfiContent::Credit),
        ("a payload without a frame", OfiHeader { sequence: 0, to: 0, handled: 0 }, announce),
        (
            "a payload behind bytes of no protocol",
            OfiHeader { sequence: 0, to: 0, handled: 0 },
            OfiContent::Announce { number: 0, len: 1 << 20, covered: false, name: name.bytes(), bytes: &[0xee; 200] },
        ),
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
        (
            "a payload at once without a frame",
            OfiHeader { sequence: 0, to: 0, handled: 0 },
            OfiContent::Eager { number: 3, len: 100, covered: false, slot: 0, bytes: b"" },
        ),
        (
            "receives of another host",
            OfiHeader { sequence: 0, to: 0, handled: 0 },
            OfiContent::Slots { tag: 5, count: 4, name: elsewhere.bytes() },
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

/// The sending side of a link, to a peer that is connected, and reads nothing unless it is told to.
struct ToDeaf {
    out: OfiOutbox,
    peer: PeerName,
    port: Arc<Port>,
    deaf: Station,
    _polls: [mio::Poll; 2],
}

impl ToDeaf {
    fn connect() -> Option<ToDeaf> {
        if let Err(reason) = provider::available(OfiProvider::Tcp) {
            println!("skipped: {reason}");
            return None;
        }
        let ((station, poll), (deaf, deaf_poll)) = (station(), station());
        let port = Port::open(station, false, 0, None).unwrap();
        let peer = PeerName::of_socket(&port, deaf.socket).unwrap();
        let begin = Instant::now();
        // It takes the first message, since only this connects it.
        deaf.endpoint.receive(vec![0; MESSAGE], 0, Label::Message).unwrap();
        let (mut waiting, mut arrived) = (Some(vec![0; 10]), false);
        while !arrived {
            assert!(begin.elapsed() < BOUND, "the provider does not connect");
            waiting = waiting.and_then(|message| port.send(peer.address(), message, Label::Message).unwrap());
            arrived = deaf.take_completions().unwrap().iter().any(|done| !done.is_send);
            port.drain();
        }
        let mut out = OfiOutbox::new(Some(&peer));
        out.open(1, CREDITS as u16, MESSAGE as u32);
        Some(ToDeaf { out, peer, port, deaf, _polls: [poll, deaf_poll] })
    }

    fn kept(&self) -> u64 {
        self.peer.backlog().len()
    }

    /// The peer reads all that was sent.
    #[track_caller]
    fn read_all(&mut self) {
        let begin = Instant::now();
        while self.kept() > 0 {
            assert!(begin.elapsed() < BOUND, "{} messages do not leave", self.kept());
            self.deaf.endpoint.receive(vec![0; MESSAGE], 0, Label::Message).unwrap();
            self.deaf.take_completions().unwrap();
            self.port.drain();
            self.out.flush(&self.port).unwrap();
        }
    }
}

/// Frames with payloads, to a peer that takes short messages, and two at a time: the announcement has what is left of the frame.
#[test]
fn frames_are_cut_to_what_the_peer_takes() {
    const LONGEST: usize = 256;
    let Some(mut to) = ToDeaf::connect() else { return };
    let payload = Slice::whole(&Region::from_vec(vec![0; 100_000]));
    let (name, mut handled) = (vec![7; 128], 0);
    for len in [1, 89, 90, 91, 231, 232, 233, 500] {
        to.out.open(1, 2, LONGEST as u32);
        let frame: Vec<u8> = (0..len).map(|index| index as u8).collect();
        let mut sending = OfiSend::new(frame.clone(), Some(payload.clone()));
        let (begin, mut joined, mut announced) = (Instant::now(), Vec::new(), false);
        while !announced {
            let progress = to.out.write(&to.port, &mut sending, false, || Ok(name.clone())).unwrap();
            let sent_all = matches!(progress, FrameProgress::PayloadAnnounced);
            to.deaf.endpoint.receive(vec![0; MESSAGE], 0, Label::Message).unwrap();
            for message in to.deaf.take_completions().unwrap() {
                let bytes = &message.buffer.unwrap()[..message.result.unwrap()];
                assert!(bytes.len() <= LONGEST, "a message of {} bytes", bytes.len());
                for part in parts(bytes) {
                    match part {
                        OfiContent::Bytes(part) => joined.extend_from_slice(part),
                        OfiContent::Announce { len, name: of, bytes, .. } => {
                            assert_eq!((len as usize, of), (payload.len, &name[..]));
                            joined.extend_from_slice(bytes);
                            announced = true;
                        }
                        other => panic!("{other:?}"),
                    }
                }
                handled += 1;
                to.out.take_handled(handled).unwrap();
            }
            to.port.drain();
            assert!(begin.elapsed() < BOUND, "a frame of {len} bytes, all sent: {sent_all}");
        }
        assert!(joined == frame, "{len} bytes came as {}", joined.len());
    }
}

/// More than the buffers of the system take, in bytes.
const FLOOD: usize = 100 << 20;

#[test]
fn provider_keeps_little_for_a_peer_that_grants_credit_and_reads_nothing() {
    let Some(mut to) = ToDeaf::connect() else { return };
    let (mut frames, mut since) = (0u32, Instant::now());
    let mut stopped = None;
    while frames as usize * 8000 < FLOOD {
        let mut sending = OfiSend::new(vec![1; 8000], None);
        let progress = to.out.write(&to.port, &mut sending, false, || unreachable!()).unwrap();
        if matches!(progress, FrameProgress::Partly) {
            // What the system's buffers take may still be on its way to them.
            to.port.drain();
            if to.kept() >= MOST_KEPT && since.elapsed() > Duration::from_millis(300) {
                stopped = Some(sending);
                break;
            }
            continue;
        }
        (frames, since) = (frames + 1, Instant::now());
        to.out.take_handled(frames).unwrap();
        to.port.drain();
        assert!(to.kept() <= MOST_KEPT, "the provider keeps {} messages", to.kept());
    }
    let mut stopped = stopped.expect("the link sends on to a peer that reads nothing");
    assert_eq!(to.kept(), MOST_KEPT);
    // Once it reads, the link goes on.
    to.read_all();
    assert!(matches!(to.out.write(&to.port, &mut stopped, false, || unreachable!()).unwrap(), FrameProgress::All));
    to.out.send(&to.port, &OfiContent::Bye).unwrap();
    to.read_all();
}

#[test]
fn link_whose_peer_causes_messages_without_credit_and_reads_nothing_ends() {
    let Some(mut to) = ToDeaf::connect() else { return };
    let ready = OfiContent::Ready { number: 1, tag: 2, name: &[3; 16] };
    let failed = (0..250_000).find_map(|turn| {
        if turn % 32 == 0 {
            to.port.drain();
        }
        let sent = to.out.send(&to.port, &ready);
        assert!(to.kept() <= MOST_KEPT, "the provider keeps {} messages", to.kept());
        sent.err()
    });
    let error = failed.expect("the link takes on messages for a peer that reads nothing");
    assert!(error.to_string().contains("does not read them"), "{error}");
    // The link ends. Another one to the same peer has no room of its own.
    let _ = to.out.send(&to.port, &OfiContent::Bye);
    to.out.clear(&to.port);
    let kept = to.kept();
    assert!(kept <= MOST_KEPT + 1, "{kept}");
    let socket = to.deaf.socket;
    drop(std::mem::replace(&mut to.peer, PeerName::of_socket(&to.port, socket).unwrap()));
    for _ in 0..3 {
        to.peer = PeerName::of_socket(&to.port, socket).unwrap();
        to.out = OfiOutbox::new(Some(&to.peer));
        to.out.open(1, CREDITS as u16, MESSAGE as u32);
        to.out.send(&to.port, &ready).unwrap();
        to.out.send(&to.port, &OfiContent::Bye).unwrap();
        to.out.clear(&to.port);
        assert!(to.kept() <= MOST_KEPT + 1, "{}", to.kept());
    }
    to.read_all();
}

/// What an endpoint of the provider sends to another one: what asks for the connection, and the beginning of a long message; and
/// the length of the answer between the two.
fn recorded(engine: &Engine) -> (Vec<u8>, usize, Vec<u8>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (between, to) = (listener.local_addr().unwrap(), engine.address().socket().unwrap());
    let recorder = std::thread::spawn(move || {
        let (mut from, mut to) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
        from.set_read_timeout(Some(BOUND)).unwrap();
        to.set_read_timeout(Some(BOUND)).unwrap();
        let (mut request, mut answer, mut message) = (vec![0; 1000], vec![0; 1000], vec![0; MESSAGE / 2]);
        let requested = from.read(&mut request).unwrap();
        request.truncate(requested);
        to.write_all(&request).unwrap();
        let answered = to.read(&mut answer).unwrap();
        from.write_all(&answer[..answered]).unwrap();
        from.read_exact(&mut message).unwrap();
        (request, answered, message)
    });
    let (station, _poll) = station();
    let to = station.av.insert(&EndpointName::of(between)).unwrap();
    let mut message = Some(vec![0; MESSAGE]);
    while !recorder.is_finished() {
        if let Some(bytes) = message.take()
            && let Posted::Busy(bytes) = station.endpoint.send(to, bytes, 0, Label::Message).unwrap()
        {
            message = Some(bytes);
        }
        station.collect().unwrap();
    }
    recorder.join().unwrap()
}

#[test]
fn peers_that_go_in_the_middle_of_a_message_take_no_receive_with_them() {
    let Some(engine) = victim() else { return };
    let (request, answered, message) = recorded(&engine);
    let begins = |request: &[u8]| {
        let mut stream = TcpStream::connect(engine.address().socket().unwrap()).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream.write_all(request).unwrap();
        stream
    };
    for turn in 0..200u8 {
        // Each is another endpoint: the request ends with the port, and the process.
        let mut request = request.clone();
        let port = request.len() - 6;
        request[port..][..2].copy_from_slice(&[200, turn]);
        let mut stream = begins(&request);
        stream.read_exact(&mut vec![0; answered]).unwrap();
        stream.write_all(&message).unwrap();
    }
    // Part of a request, and something else.
    for turn in 0..request.len() {
        begins(&request[..turn]);
        begins(&vec![(turn * 37) as u8; 10 * turn]);
    }
    assert_serves(&engine);
    engine.finalize().unwrap();
}

/// An endpoint to which memory is lent.
struct Borrower {
    station: Station,
    _poll: mio::Poll,
}

impl LoanHost for Borrower {
    fn collect(&self) {
        self.station.collect().unwrap();
    }
    fn end_by_force(&self) {
        self.station.close();
    }
    fn reclaiming(&self, _until: Instant) {}
}

/// Memory, and an endpoint that receives into it, though nothing is sent.
fn lent() -> Option<(Arc<Region>, Arc<Borrower>, Arc<AtomicI32>)> {
    if let Err(reason) = provider::available(OfiProvider::Tcp) {
        println!("skipped: {reason}");
        return None;
    }
    let (station, poll) = station();
    let obstacle = station.endpoint.obstacle.clone();
    let peer = station.av.insert(&EndpointName::of("127.0.0.1:9".parse().unwrap())).unwrap();
    let (region, borrower) = (Region::from_vec(vec![1; 100]), Arc::new(Borrower { station, _poll: poll }));
    let host = Arc::downgrade(&borrower);
    let posted = borrower.station.endpoint.receive_lent(peer, &Slice::whole(&region), 1, Label::Message, host).unwrap();
    assert!(matches!(posted, Posted::Begun));
    Some((region, borrower, obstacle))
}

#[test]
fn memory_of_an_endpoint_that_is_busy_is_returned_once_it_is_closed() {
    for busy in [libc::EBUSY, libc::EAGAIN] {
        let Some((region, borrower, obstacle)) = lent() else { return };
        obstacle.store(busy, Ordering::SeqCst);
        borrower.station.close();
        // It is gone for all but those who want the memory back.
        drop(borrower);
        let (returned, closed) = mpsc::channel();
        let waiting = std::thread::spawn({
            let region = region.clone();
            move || {
                region.close();
                returned.send(()).unwrap();
            }
        });
        assert_eq!(closed.recv_timeout(Duration::from_millis(100)), Err(mpsc::RecvTimeoutError::Timeout));
        obstacle.store(0, Ordering::SeqCst);
        closed.recv_timeout(BOUND).expect("the memory is not returned");
        waiting.join().unwrap();
    }
}

#[test]
fn endpoint_that_was_busy_for_a_moment_is_closed() {
    let Some((region, borrower, obstacle)) = lent() else { return };
    obstacle.store(libc::EBUSY, Ordering::SeqCst);
    std::thread::scope(|s| {
        s.spawn(|| obstacle.store(0, Ordering::SeqCst));
        borrower.station.close();
    });
    region.close();
}

/// Memory that is not wanted back is no reason to end the process.
#[test]
fn endpoint_that_can_not_be_closed_keeps_what_was_lent_to_it() {
    let Some((region, borrower, obstacle)) = lent() else { return };
    let memory = Arc::downgrade(&region);
    obstacle.store(libc::EIO, Ordering::SeqCst);
    assert!(!borrower.station.close());
    assert!(!borrower.station.close(), "it is no more closed than before");
    drop((region, borrower));
    assert!(memory.upgrade().is_some(), "the provider may access memory that was freed");
}

/// Run as a process of its own by the test below.
#[test]
#[ignore = "ends the process"]
fn memory_that_is_never_released_is_waited_for() {
    let Some((region, borrower, obstacle)) = lent() else { return };
    obstacle.store(libc::EIO, Ordering::SeqCst);
    borrower.station.close();
    region.close();
    println!("returned");
}

#[test]
fn memory_that_is_never_released_is_not_returned() {
    if provider::available(OfiProvider::Tcp).is_err() {
        return;
    }
    let name = "transport::ofi::tests::memory_that_is_never_released_is_waited_for";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", "--ignored", "--nocapture", name]).output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{out}{error}");
    assert!(out.contains("running 1 test") && !out.contains("returned"), "{out}");
    assert!(error.contains("does not release memory"), "{error}");
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
