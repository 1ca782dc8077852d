//! Tests that apply to each socket-based transport.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::Address;
use crate::memory::{Region, Slice};
use crate::sync::Mutex;

use super::{
    Consumed, KernelCopyPolicy, Link, LinkKey, Loopback, PayloadStatus, Reactor, Sent, Shm, ShmOptions, Sink, Tcp, TcpOptions,
    TransportDriver,
};

/// Dials a listener of the same transport, runs `attached` on the link and `afterwards` on the transport, and checks that the
/// link was dropped.
fn check_link_is_dropped(
    make: impl Fn(Reactor) -> Box<dyn TransportDriver>,
    address: &str,
    attached: impl Fn(&dyn Link),
    afterwards: impl FnOnce(Box<dyn TransportDriver>) -> Option<Box<dyn TransportDriver>>,
) {
    let poll = mio::Poll::new().unwrap();
    let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
    let transport = make(Reactor { registry: poll.registry().try_clone().unwrap(), waker, first_token: 1 });
    let address = transport.listen(&address.parse().unwrap()).unwrap();
    let attached_link: Mutex<Option<Weak<dyn Link>>> = Mutex::new(None);
    let connecting = transport.connect(LinkKey(1), &address, &|link| {
        *attached_link.lock() = Some(Arc::downgrade(&link));
        attached(&*link);
    });
    connecting.unwrap();
    let _transport = afterwards(transport);
    let link = attached_link.lock().take().unwrap();
    assert!(link.upgrade().is_none(), "{address}: the link is still referenced, so its socket is open");
}

fn check_closed_link_is_dropped(make: impl Fn(Reactor) -> Box<dyn TransportDriver>, address: &str) {
    check_link_is_dropped(make, address, |link| link.close(), Some);
}

fn check_unclosed_link_is_dropped_with_its_transport(make: impl Fn(Reactor) -> Box<dyn TransportDriver>, address: &str) {
    check_link_is_dropped(make, address, |_| (), |_| None);
}

fn tcp(reactor: Reactor) -> Box<dyn TransportDriver> {
    let options = TcpOptions {
        peer_timeout: Duration::from_secs(10),
        #[cfg(feature = "tls")]
        tls: None,
    };
    Box::new(Tcp::new(reactor, options).unwrap())
}

fn shm(reactor: Reactor) -> Box<dyn TransportDriver> {
    Box::new(Shm::new(reactor, ShmOptions { group: None, lending: KernelCopyPolicy::Measured, local_addresses: false }).unwrap())
}

#[test]
fn tcp_link_closed_at_once_is_dropped() {
    check_closed_link_is_dropped(tcp, "tcp://127.0.0.1:0");
}

#[test]
fn shm_link_closed_at_once_is_dropped() {
    check_closed_link_is_dropped(shm, "shm://");
}

#[test]
fn unclosed_tcp_link_is_dropped_with_its_transport() {
    check_unclosed_link_is_dropped_with_its_transport(tcp, "tcp://127.0.0.1:0");
}

#[test]
fn unclosed_shm_link_is_dropped_with_its_transport() {
    check_unclosed_link_is_dropped_with_its_transport(shm, "shm://");
}

/// Counts what is reported.
#[derive(Default)]
struct Counts {
    connected: bool,
    arrived: usize,
    sent: usize,
    closed: bool,
}

impl Sink for Counts {
    fn accepted(&mut self, _: Address) -> LinkKey {
        unreachable!("it does not listen")
    }
    fn attach(&mut self, _: LinkKey, _: Arc<dyn Link>) {}
    fn connected(&mut self, _: LinkKey) {
        self.connected = true;
    }
    fn chunk(&mut self, _: LinkKey, _: usize) {}
    fn bytes(&mut self, _: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        self.arrived += bytes.len();
        Some(Consumed { used: bytes.len(), target: None })
    }
    fn payload_done(&mut self, _: LinkKey, _: PayloadStatus) {}
    fn heard(&mut self, _: LinkKey) {}
    fn sent(&mut self, _: LinkKey, _: Vec<u8>, _: bool) {
        self.sent += 1;
    }
    fn returned(&mut self, _: LinkKey) {}
    fn rma_capable(&mut self, _: LinkKey) {}
    fn rma_done(&mut self, _: LinkKey, _: u64, _: io::Result<()>) {}
    fn closed(&mut self, _: LinkKey, _: io::Error) {
        self.closed = true;
    }
}

/// A tcp link to a peer that speaks no protocol, and its driver.
struct TcpRig {
    poll: mio::Poll,
    transport: Box<dyn TransportDriver>,
    link: Arc<dyn Link>,
    peer: TcpStream,
    counts: Counts,
}

impl TcpRig {
    fn new() -> TcpRig {
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let transport = tcp(Reactor { registry: poll.registry().try_clone().unwrap(), waker, first_token: 1 });
        let (link, peer) = TcpRig::dial(&*transport, 1);
        let mut rig = TcpRig { poll, transport, link, peer, counts: Counts::default() };
        rig.sleep_until("it is connected", |counts| counts.connected);
        assert!(rig.transport.park());
        rig
    }

    fn dial(transport: &dyn TransportDriver, key: u64) -> (Arc<dyn Link>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::tcp(listener.local_addr().unwrap());
        let link = Mutex::new(None);
        transport.connect(LinkKey(key), &address, &|attached| *link.lock() = Some(attached)).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let link = link.lock().take().unwrap();
        (link, peer)
    }

    /// Another link of the transport.
    fn other(&mut self, key: u64) -> (Arc<dyn Link>, TcpStream) {
        self.counts.connected = false;
        let other = TcpRig::dial(&*self.transport, key);
        self.sleep_until("it is connected", |counts| counts.connected);
        other
    }

    /// Waits in the reactor, and handles its events; false when there were none.
    fn sleep(&mut self, time: Duration) -> bool {
        let mut events = mio::Events::with_capacity(8);
        while let Err(error) = self.poll.poll(&mut events, Some(time)) {
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        }
        events.iter().for_each(|event| self.transport.ready(event.token().0, event, &mut self.counts));
        !events.is_empty()
    }

    fn sleep_until(&mut self, what: &str, done: impl Fn(&Counts) -> bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while !done(&self.counts) {
            assert!(self.sleep(end.saturating_duration_since(Instant::now())), "the reactor does not report that {what}");
        }
    }

    fn poll_until(&mut self, what: &str, done: impl Fn(&Counts) -> bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while !done(&self.counts) {
            assert!(Instant::now() < end, "polling does not show that {what}");
            for _ in 0..100 {
                self.transport.poll(&mut self.counts);
            }
            self.sleep(Duration::ZERO);
        }
    }

    /// Sends a byte, and stops the reactor from reporting the answer.
    fn ask_muted(&mut self) {
        assert!(matches!(self.link.send(vec![1], None), Sent::All(_)));
        self.transport.mute();
        self.peer.read_exact(&mut [0]).unwrap();
    }

    /// Sends more than the socket takes.
    fn send_much(&self) {
        assert!(matches!(self.link.send(vec![0; MUCH], None), Sent::Later));
    }

    /// The peer reads that.
    fn read_much(&self) -> std::thread::JoinHandle<()> {
        self.read(MUCH)
    }

    fn read(&self, len: usize) -> std::thread::JoinHandle<()> {
        let mut peer = self.peer.try_clone().unwrap();
        std::thread::spawn(move || peer.read_exact(&mut vec![0; len]).unwrap())
    }
}

const MUCH: usize = 32 << 20;

/// Has the link move bulk data while `others` bring something: from then on they take turns.
fn mix(rig: &mut TcpRig, others: &mut [(Arc<dyn Link>, TcpStream)]) {
    let bulk = |rig: &TcpRig| assert!(matches!(rig.link.send(vec![0; 64 << 10], None), Sent::All(_)));
    let before = rig.counts.arrived;
    let reading = rig.read(2 * (64 << 10));
    bulk(rig);
    rig.transport.poll(&mut rig.counts);
    for (_, peer) in &mut *others {
        peer.write_all(&[1]).unwrap();
    }
    for (link, _) in &*others {
        assert!(matches!(link.send(vec![1], None), Sent::All(_)));
    }
    bulk(rig);
    let end = Instant::now() + Duration::from_secs(10);
    while rig.counts.arrived < before + others.len() {
        assert!(Instant::now() < end, "the others bring nothing");
        rig.transport.poll(&mut rig.counts);
        rig.sleep(Duration::ZERO);
    }
    reading.join().unwrap();
}

/// A link that moves bulk data takes turns beside one that brings something, and goes on at each poll, though the reactor reports
/// nothing of it, and though more links are polled than are read without it.
#[test]
fn tcp_link_with_bulk_data_takes_turns_beside_one_that_brings_something() {
    for others in [1, 6] {
        let mut rig = TcpRig::new();
        let mut others: Vec<_> = (0..others).map(|number| rig.other(2 + number)).collect();
        // Alone, a link sends as much as the socket takes.
        rig.send_much();
        let reading = rig.read_much();
        rig.poll_until("it is sent", |counts| counts.sent == 1);
        reading.join().unwrap();
        mix(&mut rig, &mut others);
        assert!(matches!(rig.link.send(vec![0; MUCH], None), Sent::AtNextPoll));
        assert!(!rig.transport.park(), "the driver may sleep beside a send that no reactor reports");
        let reading = rig.read_much();
        rig.poll_until("the rest is sent", |counts| counts.sent == 2);
        reading.join().unwrap();
        assert!(rig.transport.park());
        // When the others have been silent for a while, it is not kept from sending.
        rig.send_much();
    }
}

/// A send that has stopped for others blocks at a later poll: the reactor then reports that it can go on, also where it was told not to
/// before.
#[test]
fn tcp_link_that_has_stopped_and_then_blocks_goes_on_by_the_reactor() {
    for muted in [false, true] {
        let mut rig = TcpRig::new();
        let mut others = [rig.other(2)];
        if muted {
            rig.ask_muted();
            assert!(rig.transport.park());
        }
        mix(&mut rig, &mut others);
        assert!(matches!(rig.link.send(vec![0; MUCH], None), Sent::AtNextPoll));
        let end = Instant::now() + Duration::from_secs(10);
        while !rig.transport.park() {
            assert!(Instant::now() < end, "the socket takes all of it");
            rig.transport.poll(&mut rig.counts);
        }
        let reading = rig.read_much();
        rig.sleep_until("the rest is sent", |counts| counts.sent == 1);
        reading.join().unwrap();
    }
}

#[test]
fn muted_tcp_link_is_polled_and_reported_again_once_it_is_parked() {
    let mut rig = TcpRig::new();
    for round in 0..3 {
        let before = rig.counts.arrived;
        rig.ask_muted();
        rig.peer.write_all(&[2]).unwrap();
        assert!(!rig.sleep(Duration::from_millis(20)), "round {round}: the reactor reports a muted link");
        rig.poll_until("the answer arrives", |counts| counts.arrived == before + 1);
        // One before it is parked, and one afterwards.
        rig.peer.write_all(&[3]).unwrap();
        assert!(rig.transport.park());
        rig.sleep_until("a byte arrives that was there before", |counts| counts.arrived == before + 2);
        assert!(rig.transport.park());
        assert!(!rig.sleep(Duration::from_millis(1)), "round {round}: there is nothing to report");
        rig.peer.write_all(&[4]).unwrap();
        rig.sleep_until("a byte arrives", |counts| counts.arrived == before + 3);
        assert!(rig.transport.park());
    }
    rig.ask_muted();
    rig.peer.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(rig.transport.park());
    rig.sleep_until("the peer is gone", |counts| counts.closed);
}

#[test]
fn muted_tcp_link_reports_an_end_that_is_found_by_polling() {
    let mut rig = TcpRig::new();
    rig.ask_muted();
    rig.peer.shutdown(std::net::Shutdown::Both).unwrap();
    rig.poll_until("the peer is gone", |counts| counts.closed);
    assert!(rig.transport.park());
}

#[test]
fn tcp_link_that_was_muted_sends_what_the_socket_did_not_take() {
    // Begun after the link was muted, or before, and continued by the reactor or by polling.
    for (after, polled) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut rig = TcpRig::new();
        rig.ask_muted();
        if after {
            assert!(rig.transport.park());
        }
        rig.send_much();
        let reader = rig.read_much();
        if polled {
            rig.poll_until("all is sent", |counts| counts.sent == 1);
        } else {
            assert!(rig.transport.park());
            rig.sleep_until("the socket takes more", |counts| counts.sent == 1);
        }
        reader.join().unwrap();
    }
}

/// Accepts a link over `loop`, and looks at each arrival what the sender has been told by then.
struct LoopReceiver<'a> {
    sender: &'a Loopback,
    told: Counts,
    /// For each arrival, how many sends had been reported to the sender.
    sent_before: Vec<usize>,
    accepted: Option<Arc<dyn Link>>,
}

impl Sink for LoopReceiver<'_> {
    fn accepted(&mut self, _: Address) -> LinkKey {
        LinkKey(2)
    }
    fn attach(&mut self, _: LinkKey, link: Arc<dyn Link>) {
        self.accepted = Some(link);
    }
    fn connected(&mut self, _: LinkKey) {}
    fn chunk(&mut self, _: LinkKey, _: usize) {}
    fn bytes(&mut self, _: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        self.sender.poll(&mut self.told);
        self.sent_before.push(self.told.sent);
        Some(Consumed { used: bytes.len(), target: None })
    }
    fn payload_done(&mut self, _: LinkKey, _: PayloadStatus) {}
    fn heard(&mut self, _: LinkKey) {}
    fn sent(&mut self, _: LinkKey, _: Vec<u8>, _: bool) {}
    fn returned(&mut self, _: LinkKey) {}
    fn rma_capable(&mut self, _: LinkKey) {}
    fn rma_done(&mut self, _: LinkKey, _: u64, _: io::Result<()>) {}
    fn closed(&mut self, _: LinkKey, _: io::Error) {}
}

/// A send that ends later ends when the receiver has handled it, not what is before it: were it reported sooner, the next send could
/// overtake it.
#[test]
fn loop_send_is_reported_when_it_is_handled_and_not_what_is_before_it() {
    let poll = mio::Poll::new().unwrap();
    let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
    let make = || Loopback::new(Reactor { registry: poll.registry().try_clone().unwrap(), waker: waker.clone(), first_token: 1 });
    let (sender, listener) = (make(), make());
    let address = listener.listen(&"loop://".parse().unwrap()).unwrap();
    let link = Mutex::new(None);
    sender.connect(LinkKey(1), &address, &|attached| *link.lock() = Some(attached)).unwrap();
    let link = link.lock().take().unwrap();
    let mut receiver = LoopReceiver { sender: &sender, told: Counts::default(), sent_before: Vec::new(), accepted: None };
    listener.poll(&mut receiver);
    sender.poll(&mut receiver.told);
    assert!(receiver.told.connected);

    let payload = || Some(Slice::whole(&Region::from_vec(vec![7])));
    assert!(matches!(link.send(vec![1], None), Sent::All(_)));
    assert!(matches!(link.send(vec![2], payload()), Sent::Later));
    listener.poll(&mut receiver);
    assert_eq!(receiver.sent_before, [0, 0], "the send with the payload was reported before it was handled");
    sender.poll(&mut receiver.told);
    assert_eq!(receiver.told.sent, 1);
    // The other order.
    assert!(matches!(link.send(vec![3], payload()), Sent::Later));
    listener.poll(&mut receiver);
    assert!(matches!(link.send(vec![4], None), Sent::All(_)));
    listener.poll(&mut receiver);
    assert_eq!(receiver.sent_before, [0, 0, 1, 2]);
    sender.poll(&mut receiver.told);
    assert_eq!(receiver.told.sent, 2);
}
