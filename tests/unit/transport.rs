//! Tests that apply to each socket-based transport.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::sync::Mutex;

use super::{KernelCopyPolicy, Link, LinkKey, Reactor, Shm, ShmOptions, Tcp, TcpOptions, TransportDriver};

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
