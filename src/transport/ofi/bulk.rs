//! The bulk endpoint of a link: payloads travel between the two of a link, each to a receive of its own. Where there is RMA, a
//! link has another one, which carries out its transfers.
//!
//! What a provider does with memory can only be stopped by closing its endpoint. So each link has one of its own, and a peer that
//! stalls in the middle of a payload costs no other peer its link.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::port::checked_name;
use super::provider;
use super::station::Station;
use super::sys::{EndpointName, Label, LoanHost, PATIENCE, PeerAddress, Posted, RemotePlace};
use super::wire::Load;
use crate::memory::Slice;
use crate::sync::Mutex;

/// The link that a bulk endpoint belongs to.
pub(super) trait BulkOwner: Send + Sync {
    /// The endpoint was closed: what it was for ends.
    fn bulk_failed(&self, bulk: &BulkEndpoint, cause: io::Error);
    /// Completions were collected, which the driver is to handle.
    fn bulk_collected(&self);
    /// `BulkEndpoint::check_deadline` is to be called then.
    fn bulk_deadline(&self, at: Instant);
}

pub(super) struct BulkEndpoint {
    pub station: Station,
    /// It carries out RMA.
    pub rma: bool,
    owner: Weak<dyn BulkOwner>,
    /// The peer's bulk endpoint, once it is known.
    peer: Mutex<Option<(EndpointName, PeerAddress)>>,
    /// Payloads that are under way, in either direction: while there are any the driver polls it.
    under_way: AtomicUsize,
}

/// The outcome of a post.
pub(super) enum PayloadPosted {
    /// A completion follows.
    Begun,
    /// There is no room now, or no connection yet.
    Busy,
    /// The memory is not there any more.
    Gone,
}

/// The end of a link whose provider does not go on.
pub(super) fn fails(error: &io::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, format!("the provider fails: {error}"))
}

/// Bytes behind a payload that has a checksum.
pub(super) const CHECKSUM: usize = 4;

impl BulkEndpoint {
    pub(super) fn open(station: Station, owner: Weak<dyn BulkOwner>, rma: bool) -> Arc<BulkEndpoint> {
        let (peer, under_way) = (Mutex::default(), AtomicUsize::new(0));
        Arc::new(BulkEndpoint { station, rma, owner, peer, under_way })
    }

    /// A payload is under way from now on. True when it is the only one.
    pub(super) fn begin_payload(&self) -> bool {
        self.under_way.fetch_add(1, Ordering::AcqRel) == 0
    }

    pub(super) fn end_payload(&self) {
        self.under_way.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn is_active(&self) -> bool {
        self.under_way.load(Ordering::Acquire) > 0
    }

    /// Its address.
    pub(super) fn name(&self) -> &[u8] {
        self.station.endpoint.name().bytes()
    }

    /// The peer's bulk endpoint is at this address, which must be of the host that the link leads to, if it tells its host.
    pub(super) fn set_peer(&self, name: &[u8], host: SocketAddr) -> io::Result<()> {
        let mut slot = self.peer.lock();
        if slot.as_ref().is_some_and(|(known, _)| known.bytes() == name) {
            return Ok(());
        }
        let (name, socket) = checked_name(name, &self.station)?;
        if slot.is_some() || socket.is_some_and(|socket| socket.ip() != host.ip()) {
            let what = "it names a bulk endpoint that is not its own";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let address = self.station.av.insert(&name)?;
        *slot = Some((name, address));
        Ok(())
    }

    fn as_host(self: &Arc<Self>) -> Weak<dyn LoanHost> {
        let own: Weak<BulkEndpoint> = Arc::downgrade(self);
        own
    }

    fn peer(&self) -> io::Result<PeerAddress> {
        let peer = self.peer.lock();
        peer.as_ref().map(|(_, address)| *address).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Whether a payload is copied through a buffer of its own: where its memory can't be lent, or has a checksum, which must
    /// be that of the bytes which are sent.
    fn copies(&self, memory: &Slice, covered: bool) -> bool {
        covered || memory.may_lapse || provider::copies_payloads(self.station.provider)
    }

    /// Posts a receive for a payload, straight into its memory where that can be lent.
    pub(super) fn receive(self: &Arc<Self>, memory: &Slice, tag: u64, label: Label, covered: bool) -> io::Result<PayloadPosted> {
        let from = self.peer()?;
        if !self.copies(memory, covered) {
            match self.station.endpoint.receive_lent(from, memory, tag, label, self.as_host())? {
                Posted::Begun => return Ok(PayloadPosted::Begun),
                Posted::Busy(()) => return Ok(PayloadPosted::Busy),
                Posted::Gone => return Ok(PayloadPosted::Gone),
                Posted::Fragmented => {}
            }
        } else if memory.is_over() {
            return Ok(PayloadPosted::Gone);
        }
        let buffer = vec![0; memory.len + if covered { CHECKSUM } else { 0 }];
        Ok(match self.station.endpoint.receive_from(from, buffer, tag, label)? {
            Posted::Begun => PayloadPosted::Begun,
            _ => PayloadPosted::Busy,
        })
    }

    /// Posts a receive of any payload of the peer with this tag, into a buffer; returns it when there is no room.
    pub(super) fn receive_copied(&self, buffer: Vec<u8>, tag: u64, label: Label) -> io::Result<Option<Vec<u8>>> {
        match self.station.endpoint.receive_from(self.peer()?, buffer, tag, label)? {
            Posted::Begun => Ok(None),
            Posted::Busy(buffer) => Ok(Some(buffer)),
            _ => Err(io::ErrorKind::Other.into()),
        }
    }

    /// Sends payloads, straight from their memory where that can be lent. Those whose memory is gone are left out, which `Load`
    /// says where they go to a slot; a payload that goes alone is empty then.
    pub(super) fn send(
        self: &Arc<Self>,
        memory: &[&Slice],
        tag: u64,
        label: Label,
        covered: bool,
        to_slot: bool,
    ) -> io::Result<PayloadPosted> {
        let (to, endpoint) = (self.peer()?, &self.station.endpoint);
        let mut load = Load::of(memory.len());
        if !memory.iter().any(|memory| self.copies(memory, covered)) {
            let data = to_slot.then(|| load.encode());
            match endpoint.send_lent(to, memory, tag, data, label, self.as_host())? {
                Posted::Begun => return Ok(PayloadPosted::Begun),
                Posted::Busy(()) => return Ok(PayloadPosted::Busy),
                Posted::Gone | Posted::Fragmented => {}
            }
        }
        let mut bytes = Vec::with_capacity(memory.iter().map(|memory| memory.len + CHECKSUM).sum());
        for (index, memory) in memory.iter().enumerate() {
            let at = bytes.len();
            bytes.resize(at + memory.len, 0);
            if !memory.read(&mut bytes[at..]) {
                bytes.truncate(at);
                load.leave_out(index);
            } else if covered {
                let sum = crc32c::crc32c(&bytes[at..]);
                bytes.extend_from_slice(&sum.to_le_bytes());
            }
        }
        let posted = if to_slot {
            endpoint.send_with_data(to, bytes, tag, load.encode(), label)?
        } else {
            endpoint.send(to, bytes, tag, label)?
        };
        Ok(if matches!(posted, Posted::Begun) { PayloadPosted::Begun } else { PayloadPosted::Busy })
    }

    /// Begins to read the memory from a peer's, or to write it there, by RMA.
    pub(super) fn access(
        self: &Arc<Self>,
        pull: bool,
        memory: &Slice,
        remote: RemotePlace,
        label: Label,
    ) -> io::Result<PayloadPosted> {
        let peer = self.peer()?;
        Ok(match self.station.endpoint.access_lent(pull, peer, remote, memory, label, self.as_host())? {
            Posted::Begun => PayloadPosted::Begun,
            Posted::Busy(()) => PayloadPosted::Busy,
            Posted::Gone | Posted::Fragmented => PayloadPosted::Gone,
        })
    }

    /// Closes it: ends all payloads, and all loans. False where the provider does not close it.
    pub(super) fn close(&self) -> bool {
        self.station.close()
    }

    /// The link can't go on without it.
    pub(super) fn fail(&self, cause: io::Error) {
        if let Some(owner) = self.owner.upgrade() {
            owner.bulk_failed(self, cause);
        }
    }

    /// The provider fails, and would fail again at once.
    pub(super) fn give_up(&self, error: &io::Error) {
        self.station.log_failure(error);
        self.close();
        self.fail(fails(error));
    }

    /// Takes memory back by force that the peer has kept for too long after it was wanted back. Returns when to look again.
    pub(super) fn check_deadline(&self, now: Instant) -> Option<Instant> {
        let due = self.station.endpoint.withheld_since()? + PATIENCE;
        if now < due {
            return Some(due);
        }
        self.end_by_force();
        None
    }
}

impl LoanHost for BulkEndpoint {
    fn collect(&self) {
        match self.station.collect() {
            Ok(0) => {}
            Ok(_) => {
                if let Some(owner) = self.owner.upgrade() {
                    owner.bulk_collected();
                }
            }
            Err(error) => self.give_up(&error),
        }
    }

    fn end_by_force(&self) {
        self.close();
        let cause = "it has stalled in the middle of a transfer whose memory was wanted back";
        self.fail(io::Error::new(io::ErrorKind::TimedOut, cause));
    }

    fn reclaiming(&self, until: Instant) {
        if let Some(owner) = self.owner.upgrade() {
            owner.bulk_deadline(until);
        }
    }
}
