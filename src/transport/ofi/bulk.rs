//! The bulk endpoint of a link: payloads travel between the two of a link, each to a receive of its own.
//!
//! What a provider does with memory can only be stopped by closing its endpoint. So each link has one of its own, and a peer that
//! stalls in the middle of a payload costs no other peer its link.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::port::{PeerName, Port};
use super::sys::{Endpoint, Label, LoanHost, Posted};
use crate::memory::Slice;
use crate::sync::Mutex;

/// The link that a bulk endpoint belongs to.
pub(super) trait BulkOwner: Send + Sync {
    /// The endpoint was closed: ends the link.
    fn bulk_failed(&self, cause: io::Error);
    /// `BulkEndpoint::check_deadline` is to be called then.
    fn bulk_deadline(&self, at: Instant);
}

pub(super) struct BulkEndpoint {
    endpoint: Endpoint,
    port: Arc<Port>,
    owner: Weak<dyn BulkOwner>,
    /// The peer's bulk endpoint, once it is known.
    peer: Mutex<Option<PeerName>>,
    /// When memory that is wanted back is taken by force.
    deadline: Mutex<Option<Instant>>,
}

/// The outcome of a post.
pub(super) enum PayloadPosted {
    /// A completion follows.
    Begun,
    /// As `Begun`, for a copy of the memory, or in place of memory that is gone.
    Copied,
    /// There is no room now, or no connection yet.
    Busy,
    Gone,
}

impl BulkEndpoint {
    pub(super) fn open(port: &Arc<Port>, owner: Weak<dyn BulkOwner>, remote: SocketAddr) -> io::Result<Arc<BulkEndpoint>> {
        let endpoint = port.open_beside(remote)?;
        let (peer, deadline) = (Mutex::default(), Mutex::default());
        Ok(Arc::new(BulkEndpoint { endpoint, port: port.clone(), owner, peer, deadline }))
    }

    /// Its address.
    pub(super) fn name(&self) -> &[u8] {
        self.endpoint.name().bytes()
    }

    /// The peer's bulk endpoint is at this address, which must be of the host that the link leads to.
    pub(super) fn set_peer(&self, name: &[u8], host: SocketAddr) -> io::Result<()> {
        let mut slot = self.peer.lock();
        if slot.as_ref().is_some_and(|peer| peer.name().bytes() == name) {
            return Ok(());
        }
        let foreign = || io::Error::new(io::ErrorKind::InvalidData, "it names a bulk endpoint that is not its own");
        if slot.is_some() {
            return Err(foreign());
        }
        let peer = PeerName::insert(&self.port, name)?;
        if peer.socket().ip() != host.ip() {
            return Err(foreign());
        }
        *slot = Some(peer);
        Ok(())
    }

    /// Posts a receive for a payload: straight into the memory, if `copy` is not set.
    pub(super) fn receive(
        self: &Arc<Self>,
        memory: &Slice,
        tag: u64,
        label: Label,
        extra: usize,
        copy: bool,
    ) -> io::Result<PayloadPosted> {
        let peer = self.peer.lock();
        let Some(from) = peer.as_ref().map(PeerName::address) else { return Err(io::ErrorKind::NotConnected.into()) };
        if !copy && !memory.may_lapse {
            match self.endpoint.receive_lent(from, memory, tag, label, self.clone())? {
                Posted::Begun => return Ok(PayloadPosted::Begun),
                Posted::Busy(()) => return Ok(PayloadPosted::Busy),
                Posted::Gone => return Ok(PayloadPosted::Gone),
                Posted::Fragmented => {}
            }
        } else if memory.is_over() {
            return Ok(PayloadPosted::Gone);
        }
        Ok(match self.endpoint.receive_from(from, vec![0; memory.len + extra], tag, label)? {
            Posted::Begun => PayloadPosted::Copied,
            _ => PayloadPosted::Busy,
        })
    }

    /// Sends a payload: straight from the memory, if `copy` is not set. In place of memory that is gone, an empty one is sent.
    pub(super) fn send(
        self: &Arc<Self>,
        memory: &Slice,
        tag: u64,
        label: Label,
        covered: bool,
        copy: bool,
    ) -> io::Result<PayloadPosted> {
        let peer = self.peer.lock();
        let Some(to) = peer.as_ref().map(PeerName::address) else { return Err(io::ErrorKind::NotConnected.into()) };
        if !copy && !covered && !memory.may_lapse {
            match self.endpoint.send_lent(to, memory, tag, label, self.clone())? {
                Posted::Begun => return Ok(PayloadPosted::Begun),
                Posted::Busy(()) => return Ok(PayloadPosted::Busy),
                Posted::Gone | Posted::Fragmented => {}
            }
        }
        let mut bytes = vec![0; memory.len];
        if memory.read(&mut bytes) {
            if covered {
                let sum = crc32c::crc32c(&bytes);
                bytes.extend_from_slice(&sum.to_le_bytes());
            }
        } else {
            bytes.clear();
        }
        Ok(match self.endpoint.send(to, bytes, tag, label)? {
            Posted::Begun => PayloadPosted::Copied,
            _ => PayloadPosted::Busy,
        })
    }

    /// Closes it: ends all payloads, and all loans.
    pub(super) fn close(&self) {
        self.endpoint.close();
        let peer = self.peer.lock().take();
        drop(peer);
    }

    /// Takes memory back by force that the peer has kept for too long after it was wanted back. Returns when to look again.
    pub(super) fn check_deadline(&self, now: Instant) -> Option<Instant> {
        let mut deadline = self.deadline.lock();
        if !self.endpoint.withholds_memory() {
            *deadline = None;
        }
        let due = (*deadline)?;
        if now < due {
            return Some(due);
        }
        *deadline = None;
        drop(deadline);
        self.end_by_force();
        None
    }
}

impl LoanHost for BulkEndpoint {
    fn collect(&self) {
        self.port.collect_from_outside();
    }

    fn end_by_force(&self) {
        self.close();
        if let Some(owner) = self.owner.upgrade() {
            let cause = "it has stalled in the middle of a transfer whose memory was wanted back";
            owner.bulk_failed(io::Error::new(io::ErrorKind::TimedOut, cause));
        }
    }

    fn reclaiming(&self, until: Instant) {
        self.deadline.lock().get_or_insert(until);
        if let Some(owner) = self.owner.upgrade() {
            owner.bulk_deadline(until);
        }
    }
}
