//! What every transport has to hold.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::{KernelCopyPolicy, Link, LinkKey, Reactor, Shm, ShmOptions, Tcp, TcpOptions, Transport};

/// Dials a listener of its own; what is done with the link as soon as it is there, and afterwards with the transport. Then the
/// link is gone.
fn a_link_is_gone(
    make: impl Fn(Reactor) -> Box<dyn Transport>,
    address: &str,
    attached: impl Fn(&dyn Link),
    afterwards: impl FnOnce(Box<dyn Transport>) -> Option<Box<dyn Transport>>,
) {
    let poll = mio::Poll::new().unwrap();
    let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
    let transport = make(Reactor { registry: poll.registry().try_clone().unwrap(), waker, first_token: 1 });
    let address = transport.listen(&address.parse().unwrap()).unwrap();
    let seen: Mutex<Option<Weak<dyn Link>>> = Mutex::new(None);
    let dialled = transport.connect(LinkKey(1), &address, &|link| {
        *seen.lock() = Some(Arc::downgrade(&link));
        attached(&*link);
    });
    dialled.unwrap();
    let _transport = afterwards(transport);
    let seen = seen.lock().take().unwrap();
    assert!(seen.upgrade().is_none(), "{address}: the link is kept, and its socket with it");
}

/// Before it is in use.
fn a_link_that_is_closed_at_once_is_gone(make: impl Fn(Reactor) -> Box<dyn Transport>, address: &str) {
    a_link_is_gone(make, address, |link| link.close(), Some);
}

fn a_link_that_nobody_has_closed_goes_with_its_transport(make: impl Fn(Reactor) -> Box<dyn Transport>, address: &str) {
    a_link_is_gone(make, address, |_| (), |_| None);
}

fn tcp(reactor: Reactor) -> Box<dyn Transport> {
    let options = TcpOptions {
        peer_timeout: Duration::from_secs(10),
        #[cfg(feature = "tls")]
        tls: None,
    };
    Box::new(Tcp::new(reactor, options).unwrap())
}

fn shm(reactor: Reactor) -> Box<dyn Transport> {
    Box::new(Shm::new(reactor, ShmOptions { group: None, lending: KernelCopyPolicy::Crowded, local_addresses: false }).unwrap())
}

#[test]
fn a_tcp_link_that_is_closed_at_once_is_gone() {
    a_link_that_is_closed_at_once_is_gone(tcp, "tcp://127.0.0.1:0");
}

#[test]
fn an_shm_link_that_is_closed_at_once_is_gone() {
    a_link_that_is_closed_at_once_is_gone(shm, "shm://");
}

#[test]
fn a_tcp_link_that_nobody_has_closed_goes_with_its_transport() {
    a_link_that_nobody_has_closed_goes_with_its_transport(tcp, "tcp://127.0.0.1:0");
}

#[test]
fn an_shm_link_that_nobody_has_closed_goes_with_its_transport() {
    a_link_that_nobody_has_closed_goes_with_its_transport(shm, "shm://");
}
