//! An endpoint for messages, at one address of this host, with its posted receives; links share it.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::backlog::Backlog;
use super::limits::{LINGER, MESSAGE, NAP, SHORT_NAP, STRANGERS};
use super::provider;
use super::self_test::RmaLimits;
use super::station::Station;
use super::sys::{EndpointName, Label, PeerAddress, Posted, RegisteredRegion, RemoteRights};
use crate::address::OfiProvider;
use crate::fork::CreatorProcess;
use crate::memory::Region;
use crate::random;
use crate::sync::Mutex;

/// The tag of messages. Payloads have other ones.
const MESSAGE_TAG: u64 = 0;
/// Buffers that are kept for reuse.
const KEPT: usize = 64;

pub(super) struct Port {
    pub station: Station,
    /// Links are accepted.
    pub listens: AtomicBool,
    /// The port at which diallers may watch this engine; 0 for none, and where they are connected to it already.
    pub watch: u16,
    /// Peers may reach memory through it by RMA.
    pub rma: Option<RmaTarget>,
    /// Receives that are posted, and those that there should be.
    posted: AtomicUsize,
    wanted: AtomicUsize,
    /// Sends that have not completed.
    sending: AtomicUsize,
    spare: Mutex<Vec<Vec<u8>>>,
    peers: Mutex<Peers>,
    next_backlog: AtomicU64,
    process: CreatorProcess,
}

/// What a port is to peers that reach memory by RMA.
pub(super) struct RmaTarget {
    /// By which keys name it: random, so that those of another engine are not taken for its own.
    pub number: u64,
    limits: RmaLimits,
}

#[derive(Default)]
struct Peers {
    /// Addresses of peers, in use, or with messages on their way.
    known: HashMap<EndpointName, KnownPeer>,
    /// What the provider keeps for each, by its number.
    backlogs: HashMap<u64, Arc<Backlog>>,
}

struct KnownPeer {
    address: PeerAddress,
    /// How many use it.
    users: usize,
    backlog: Arc<Backlog>,
}

/// The address of a peer's endpoint, in use.
pub(super) struct PeerName {
    port: Weak<Port>,
    name: EndpointName,
    socket: SocketAddr,
    address: PeerAddress,
    backlog: Arc<Backlog>,
}

/// The address of an endpoint that a peer names, and where that is, if the name tells. An error when it is not that of another
/// endpoint which `station` can reach, as far as can be seen.
pub(super) fn checked_name(name: &[u8], station: &Station) -> io::Result<(EndpointName, Option<SocketAddr>)> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("it names an address that {what}"));
    if station.has_opaque_names() {
        // The address vector checks its length.
        return Ok((EndpointName::opaque(name).ok_or_else(|| invalid("is empty or too long"))?, None));
    }
    let name = EndpointName::from_bytes(name).ok_or_else(|| invalid("is no socket address"))?;
    let socket = name.socket().ok_or_else(|| invalid("is no socket address"))?;
    if socket.ip().is_unspecified() || socket.ip().is_multicast() || socket.port() == 0 {
        return Err(invalid("can't be reached"));
    }
    if socket.is_ipv4() != station.socket.is_ipv4() {
        return Err(invalid("is of another kind"));
    }
    Ok((name, Some(socket)))
}

impl PeerName {
    pub(super) fn of_socket(port: &Arc<Port>, socket: SocketAddr) -> io::Result<PeerName> {
        PeerName::insert(port, EndpointName::of(socket).bytes(), None)
    }

    /// An error when the bytes are not the address of another endpoint. `socket`: where the peer is, if its name does not tell.
    pub(super) fn insert(port: &Arc<Port>, name: &[u8], socket: Option<SocketAddr>) -> io::Result<PeerName> {
        let (name, told) = checked_name(name, &port.station)?;
        let socket = told.or(socket).ok_or(io::ErrorKind::InvalidInput)?;
        let mut peers = port.peers.lock();
        let Peers { known, backlogs } = &mut *peers;
        let peer = match known.get_mut(&name) {
            Some(peer) => peer,
            None => {
                let address = port.station.av.insert(&name)?;
                let id = port.next_backlog.fetch_add(1, Ordering::Relaxed);
                let backlog = Arc::new(Backlog::new(id, name.clone()));
                backlogs.insert(id, backlog.clone());
                known.entry(name.clone()).or_insert(KnownPeer { address, users: 0, backlog })
            }
        };
        peer.users += 1;
        let (address, backlog) = (peer.address, peer.backlog.clone());
        Ok(PeerName { port: Arc::downgrade(port), name, socket, address, backlog })
    }

    pub(super) fn name(&self) -> &EndpointName {
        &self.name
    }

    pub(super) fn address(&self) -> PeerAddress {
        self.address
    }

    pub(super) fn socket(&self) -> SocketAddr {
        self.socket
    }

    pub(super) fn backlog(&self) -> &Arc<Backlog> {
        &self.backlog
    }
}

impl Drop for PeerName {
    fn drop(&mut self) {
        let Some(port) = self.port.upgrade().filter(|port| !port.process.is_forked_child()) else { return };
        let mut peers = port.peers.lock();
        if let Some(peer) = peers.known.get_mut(&self.name) {
            peer.users -= 1;
            port.forget_unused(&mut peers, &self.name);
        }
    }
}

impl Port {
    /// `rma`: peers may reach memory through it, with these limits.
    pub(super) fn open(station: Station, listens: bool, watch: u16, rma: Option<RmaLimits>) -> io::Result<Arc<Port>> {
        let number = u64::from_ne_bytes(random::from_system()?).max(1);
        let port = Arc::new(Port {
            station,
            listens: AtomicBool::new(listens),
            watch,
            rma: rma.map(|limits| RmaTarget { number, limits }),
            posted: AtomicUsize::new(0),
            wanted: AtomicUsize::new(STRANGERS),
            sending: AtomicUsize::new(0),
            spare: Mutex::default(),
            peers: Mutex::default(),
            next_backlog: AtomicU64::new(0),
            process: CreatorProcess::this(),
        });
        port.post_receives()?;
        Ok(port)
    }

    pub(super) fn inject(&self) -> usize {
        self.station.domain.info.inject
    }

    pub(super) fn name(&self) -> &EndpointName {
        self.station.endpoint.name()
    }

    /// Longest payload that is sent in messages.
    pub(super) fn longest_in_messages(&self) -> usize {
        provider::longest_in_messages(self.station.provider)
    }

    /// Registers memory for RMA by peers. `None` where that is not possible with these rights, or its gate is closed.
    pub(super) fn register(&self, region: &Region, rights: RemoteRights) -> Option<io::Result<(u64, Arc<RegisteredRegion>)>> {
        let RmaTarget { number, .. } = self.rma.as_ref().filter(|rma| rma.limits.allow(rights))?;
        let registered = RegisteredRegion::of(region, &self.station.endpoint, *number, rights)?;
        Some(registered.map(|registered| (*number, registered)))
    }

    /// How long the driver may sleep, if there is no descriptor, or it may miss an event.
    pub(super) fn nap(&self) -> Option<Duration> {
        let (links, has_descriptor) = (self.wanted.load(Ordering::Relaxed) > STRANGERS, self.station.has_descriptor());
        // No event tells when the provider has room for receives again.
        let has_events = has_descriptor && !provider::may_miss_events(self.station.provider) && !self.lacks_receives();
        if has_events || !self.is_in_use() {
            return None;
        }
        Some(if links && !has_descriptor { SHORT_NAP } else { NAP })
    }

    /// Posts so many receives for the messages of a link.
    pub(super) fn add_receives(&self, count: usize) -> io::Result<()> {
        // The provider may have no room for all of them: then messages wait, and it is tried again with each that is handled.
        self.wanted.fetch_add(count, Ordering::AcqRel);
        self.post_receives().inspect_err(|_| self.remove_receives(count))
    }

    /// The link has ended: its receives are not posted again.
    pub(super) fn remove_receives(&self, count: usize) {
        self.wanted.fetch_sub(count, Ordering::AcqRel);
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.listens.load(Ordering::Relaxed) || self.wanted.load(Ordering::Relaxed) > STRANGERS
    }

    /// Sends a message that is no longer than `inject`; false when there is no room.
    pub(super) fn inject_message(&self, to: PeerAddress, message: &[u8]) -> io::Result<bool> {
        self.station.endpoint.inject(to, message, MESSAGE_TAG)
    }

    /// Sends a message; returns it when there is no room. The label comes back with the completion.
    pub(super) fn send(&self, to: PeerAddress, message: Vec<u8>, label: Label) -> io::Result<Option<Vec<u8>>> {
        // Counted first: it may complete before this returns.
        self.sending.fetch_add(1, Ordering::AcqRel);
        let posted = self.station.endpoint.send(to, message, MESSAGE_TAG, label);
        match posted {
            Ok(Posted::Begun) => Ok(None),
            Ok(Posted::Busy(message)) => {
                self.sending.fetch_sub(1, Ordering::AcqRel);
                Ok(Some(message))
            }
            Ok(_) => Err(io::ErrorKind::Other.into()),
            Err(error) => {
                self.sending.fetch_sub(1, Ordering::AcqRel);
                Err(error)
            }
        }
    }

    /// Messages that are being sent.
    pub(super) fn sending(&self) -> usize {
        self.sending.load(Ordering::Acquire)
    }

    /// True while messages are being sent.
    pub(super) fn is_sending(&self) -> bool {
        self.sending() > 0
    }

    fn lacks_receives(&self) -> bool {
        self.posted.load(Ordering::Relaxed) < self.wanted.load(Ordering::Relaxed)
    }

    /// Posts the receives for which the provider had no room.
    pub(super) fn replenish(&self) {
        if self.lacks_receives()
            && let Err(error) = self.post_receives()
            && error.kind() != io::ErrorKind::NotConnected
        {
            self.station.log_failure(&error);
        }
    }

    fn post_receives(&self) -> io::Result<()> {
        while self.lacks_receives() {
            let buffer = self.spare.lock().pop().unwrap_or_else(|| vec![0; MESSAGE]);
            if !self.post_receive(buffer)? {
                break;
            }
        }
        Ok(())
    }

    fn post_receive(&self, buffer: Vec<u8>) -> io::Result<bool> {
        match self.station.endpoint.receive(buffer, MESSAGE_TAG, Label::Message)? {
            Posted::Begun => {
                self.posted.fetch_add(1, Ordering::Relaxed);
                Ok(true)
            }
            Posted::Busy(buffer) => {
                self.keep(buffer);
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    fn keep(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.lock();
        if spare.len() < KEPT {
            spare.push(buffer);
        }
    }

    /// A message has left, or was lost. `Some`: links to this peer wait for that.
    pub(super) fn message_sent(&self, label: Label) -> Option<Arc<Backlog>> {
        self.sending.fetch_sub(1, Ordering::AcqRel);
        let Label::Sent { backlog, number } = label else { return None };
        let mut peers = self.peers.lock();
        let backlog = peers.backlogs.get(&backlog)?.clone();
        let awaited = backlog.note_left(number);
        self.forget_unused(&mut peers, &backlog.name);
        awaited.then_some(backlog)
    }

    /// Forgets a peer that no link uses. One that reads nothing stays known while the provider keeps messages for it: with a new
    /// link, it is not sent more than the old one left room for. Other providers than `tcp` may never report what they keep for
    /// a peer that has died, so they do without that.
    fn forget_unused(&self, peers: &mut Peers, name: &EndpointName) {
        let stays = |peer: &KnownPeer| peer.users > 0 || self.station.provider == OfiProvider::Tcp && peer.backlog.len() > 0;
        if peers.known.get(name).is_some_and(|peer| !stays(peer))
            && let Some(peer) = peers.known.remove(name)
        {
            peers.backlogs.remove(&peer.backlog.id);
            self.station.av.remove(peer.address);
        }
    }

    /// A message was received, and handled: its buffer receives another one.
    pub(super) fn message_received(&self, buffer: Vec<u8>) {
        self.posted.fetch_sub(1, Ordering::AcqRel);
        if self.lacks_receives() {
            self.keep(buffer);
            self.replenish();
        }
    }

    /// Closes the port once its messages are sent, within a bound. No completions are reported any more.
    pub(super) fn finish(&self) {
        let until = Instant::now() + LINGER;
        while self.is_sending() && Instant::now() < until {
            self.drain();
            std::thread::yield_now();
        }
        self.station.close();
    }

    /// Handles completions where nothing is reported any more.
    pub(super) fn drain(&self) {
        let completions = self.station.take_completions().unwrap_or_default();
        completions.iter().filter(|done| done.is_send).for_each(|done| {
            self.message_sent(done.label);
        });
    }
}
