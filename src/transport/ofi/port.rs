//! An endpoint for messages, at one address of this host, with its posted receives; links share it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use mio::unix::SourceFd;
use mio::{Interest, Token};

use super::OfiShared;
use super::limits::{CREDITS, LINGER, MESSAGE, STRANGERS, UNCREDITED};
use super::provider;
use super::sys::{Av, Completion, Cq, Domain, Endpoint, Info, Label, PeerAddress, Posted, SocketName};
use crate::address::OfiProvider;
use crate::deferred_log::defer;
use crate::sync::Mutex;
use crate::transport::source_towards;

/// The tag of messages. Payloads have other ones.
const MESSAGE_TAG: u64 = 0;
/// Completions that are handled in one poll, so that other transports get their turns.
const MAX_TURN: usize = 256;
/// Buffers that are kept for reuse.
const KEPT: usize = 64;
/// Receives for the messages of one link.
const PER_LINK: usize = CREDITS as usize + UNCREDITED;

pub(super) struct Port {
    pub provider: OfiProvider,
    /// Where it is bound; may be a wildcard address.
    pub socket: SocketAddr,
    /// Links are accepted.
    pub listens: AtomicBool,
    shared: Arc<OfiShared>,
    token: Token,
    /// Completions that are not handled yet, in their order.
    completions: Mutex<VecDeque<Completion>>,
    /// Receives that are posted, and those that there should be.
    posted: AtomicUsize,
    wanted: AtomicUsize,
    /// Sends that have not completed.
    sending: AtomicUsize,
    spare: Mutex<Vec<Vec<u8>>>,
    /// Addresses of peers, and how many use them.
    peers: Mutex<HashMap<SocketName, (PeerAddress, usize)>>,
    // In the order in which they are closed.
    endpoint: Endpoint,
    cq: Arc<Cq>,
    av: Arc<Av>,
    domain: Arc<Domain>,
}

/// The address of a peer's endpoint, in use.
pub(super) struct PeerName {
    port: Weak<Port>,
    name: SocketName,
    socket: SocketAddr,
    address: PeerAddress,
}

impl PeerName {
    pub(super) fn of_socket(port: &Arc<Port>, socket: SocketAddr) -> io::Result<PeerName> {
        PeerName::insert(port, SocketName::of(socket).bytes())
    }

    /// An error when the bytes are not the address of another endpoint.
    pub(super) fn insert(port: &Arc<Port>, name: &[u8]) -> io::Result<PeerName> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("it names an address that {what}"));
        let name = SocketName::from_bytes(name).ok_or_else(|| invalid("is no socket address"))?;
        let socket = name.socket().ok_or_else(|| invalid("is no socket address"))?;
        if socket.ip().is_unspecified() || socket.ip().is_multicast() || socket.port() == 0 {
            return Err(invalid("can't be reached"));
        }
        if socket.is_ipv4() != port.socket.is_ipv4() {
            return Err(invalid("is of another kind"));
        }
        let mut peers = port.peers.lock();
        let entry = match peers.get_mut(&name) {
            Some(entry) => entry,
            None => {
                let address = port.av.insert(&name)?;
                peers.entry(name.clone()).or_insert((address, 0))
            }
        };
        entry.1 += 1;
        Ok(PeerName { port: Arc::downgrade(port), name, socket, address: entry.0 })
    }

    pub(super) fn address(&self) -> PeerAddress {
        self.address
    }

    pub(super) fn name(&self) -> &SocketName {
        &self.name
    }

    pub(super) fn socket(&self) -> SocketAddr {
        self.socket
    }
}

impl Drop for PeerName {
    fn drop(&mut self) {
        let Some(port) = self.port.upgrade().filter(|port| !port.shared.is_forked_child()) else { return };
        let mut peers = port.peers.lock();
        if let Some(entry) = peers.get_mut(&self.name) {
            entry.1 -= 1;
            if entry.1 == 0 {
                peers.remove(&self.name);
                port.av.remove(self.address);
            }
        }
    }
}

impl Port {
    pub(super) fn open(
        provider: OfiProvider,
        info: Info,
        listens: bool,
        token: Token,
        shared: &Arc<OfiShared>,
    ) -> io::Result<Arc<Port>> {
        let domain = Domain::open(info)?;
        let (av, cq) = (Av::open(&domain)?, Cq::open(&domain)?);
        let endpoint = Endpoint::open(&domain, &domain.info, &av, &cq)?;
        let socket = endpoint.name().socket().ok_or(io::ErrorKind::Other)?;
        let port = Arc::new(Port {
            provider,
            socket,
            listens: AtomicBool::new(listens),
            shared: shared.clone(),
            token,
            completions: Mutex::default(),
            posted: AtomicUsize::new(0),
            wanted: AtomicUsize::new(STRANGERS),
            sending: AtomicUsize::new(0),
            spare: Mutex::default(),
            peers: Mutex::default(),
            endpoint,
            cq,
            av,
            domain,
        });
        port.post_receives()?;
        if let Some(fd) = port.cq.fd {
            shared.registry.register(&mut SourceFd(&fd), token, Interest::READABLE)?;
        }
        Ok(port)
    }

    pub(super) fn inject(&self) -> usize {
        self.domain.info.inject
    }

    pub(super) fn name(&self) -> &SocketName {
        self.endpoint.name()
    }

    /// Payloads are copied through own buffers.
    pub(super) fn copies_payloads(&self) -> bool {
        provider::copies_payloads(self.provider)
    }

    /// Longest payload that is sent in messages.
    pub(super) fn longest_in_messages(&self) -> usize {
        provider::longest_in_messages(self.provider)
    }

    /// The driver must not sleep for long: there is no descriptor, or it may miss an event.
    pub(super) fn naps(&self) -> bool {
        (self.cq.fd.is_none() || provider::may_miss_events(self.provider)) && self.is_in_use()
    }

    /// Another endpoint of the same domain, at any port of the address from which packets to `remote` come.
    pub(super) fn open_beside(&self, remote: SocketAddr) -> io::Result<Endpoint> {
        let ip = if self.socket.ip().is_unspecified() { source_towards(remote)? } else { self.socket.ip() };
        let info = self.domain.info.at(SocketAddr::new(ip, 0))?;
        Endpoint::open(&self.domain, &info, &self.av, &self.cq)
    }

    /// Posts the receives for the messages of one more link.
    pub(super) fn admit_link(&self) -> io::Result<()> {
        // The provider may have no room for all of them: then messages wait, and it is tried again with each that is handled.
        self.wanted.fetch_add(PER_LINK, Ordering::AcqRel);
        self.post_receives()
    }

    /// A link has ended: its receives are not posted again.
    pub(super) fn release_link(&self) {
        self.wanted.fetch_sub(PER_LINK, Ordering::AcqRel);
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.listens.load(Ordering::Relaxed) || self.wanted.load(Ordering::Relaxed) > STRANGERS
    }

    /// Sends a message that is no longer than `inject`; false when there is no room.
    pub(super) fn inject_message(&self, to: PeerAddress, message: &[u8]) -> io::Result<bool> {
        self.endpoint.inject(to, message, MESSAGE_TAG)
    }

    /// Sends a message; returns it when there is no room.
    pub(super) fn send(&self, to: PeerAddress, message: Vec<u8>) -> io::Result<Option<Vec<u8>>> {
        // Counted first: it may complete before this returns.
        self.sending.fetch_add(1, Ordering::AcqRel);
        let posted = self.endpoint.send(to, message, MESSAGE_TAG, Label::Message);
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

    /// True while messages are being sent.
    pub(super) fn is_sending(&self) -> bool {
        self.sending.load(Ordering::Acquire) > 0
    }

    fn post_receives(&self) -> io::Result<()> {
        while self.posted.load(Ordering::Relaxed) < self.wanted.load(Ordering::Relaxed) {
            let buffer = self.spare.lock().pop().unwrap_or_else(|| vec![0; MESSAGE]);
            if !self.post_receive(buffer)? {
                break;
            }
        }
        Ok(())
    }

    fn post_receive(&self, buffer: Vec<u8>) -> io::Result<bool> {
        match self.endpoint.receive(buffer, MESSAGE_TAG, Label::Message)? {
            Posted::Begun => {
                self.posted.fetch_add(1, Ordering::Relaxed);
                Ok(true)
            }
            Posted::Busy(buffer) => {
                let mut spare = self.spare.lock();
                if spare.len() < KEPT {
                    spare.push(buffer);
                }
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    /// Takes completions from the provider, which ends the loans among them. Any thread may call it.
    fn collect(&self, most: usize) -> io::Result<bool> {
        let mut completions = self.completions.lock();
        let mut found = Vec::new();
        while found.len() < most && self.cq.poll(&mut found)? {}
        completions.extend(found);
        Ok(!completions.is_empty())
    }

    /// As `collect`, on a thread that does not drive: the driver handles the completions.
    pub(super) fn collect_from_outside(&self) {
        match self.collect(MAX_TURN) {
            Ok(false) => {}
            Ok(true) => self.shared.wake(),
            Err(error) => self.log_failure(&error),
        }
    }

    pub(super) fn log_failure(&self, error: &io::Error) {
        let (provider, error) = (self.provider, error.to_string());
        defer(move || tracing::error!(target: "calomel::ofi", %provider, error, "the provider fails"));
    }

    /// What has completed since the last call.
    pub(super) fn take_completions(&self) -> io::Result<VecDeque<Completion>> {
        if !self.collect(MAX_TURN)? {
            return Ok(VecDeque::new());
        }
        let completions = std::mem::take(&mut *self.completions.lock());
        Ok(completions)
    }

    /// A message was sent, or not.
    pub(super) fn message_sent(&self) {
        self.sending.fetch_sub(1, Ordering::AcqRel);
    }

    /// A message was received, and handled: its buffer receives another one.
    pub(super) fn message_received(&self, buffer: Vec<u8>) {
        self.posted.fetch_sub(1, Ordering::AcqRel);
        if self.posted.load(Ordering::Relaxed) < self.wanted.load(Ordering::Relaxed)
            && let Err(error) = self.post_receive(buffer).and_then(|_| self.post_receives())
            && error.kind() != io::ErrorKind::NotConnected
        {
            self.log_failure(&error);
        }
    }

    /// The receive of a message has ended with its endpoint.
    pub(super) fn receive_canceled(&self) {
        self.posted.fetch_sub(1, Ordering::AcqRel);
    }

    /// True when the driver may sleep until the descriptor is readable.
    pub(super) fn park(&self) -> bool {
        if !self.completions.lock().is_empty() {
            return false;
        }
        let Some(fd) = self.cq.fd else { return true };
        if !self.cq.try_wait() {
            return false;
        }
        // The reactor reports changes only: this has it report a descriptor that is readable already.
        let registered = self.shared.registry.reregister(&mut SourceFd(&fd), self.token, Interest::READABLE);
        if let Err(error) = registered {
            self.log_failure(&error);
        }
        true
    }

    /// Closes the port once its messages are sent, within a bound. No completions are reported any more.
    pub(super) fn finish(&self) {
        let until = Instant::now() + LINGER;
        while self.is_sending() && Instant::now() < until {
            self.drain();
            std::thread::yield_now();
        }
        self.close();
    }

    /// No completions are reported any more, and all operations end.
    pub(super) fn close(&self) {
        if let Some(fd) = self.cq.fd {
            let _ = self.shared.registry.deregister(&mut SourceFd(&fd));
        }
        self.endpoint.close();
        // The operations of closed endpoints are freed as they complete.
        while self.collect(MAX_TURN).unwrap_or(false) {
            self.completions.lock().clear();
        }
    }

    /// Handles completions where nothing is reported any more.
    pub(super) fn drain(&self) {
        if self.collect(MAX_TURN).unwrap_or(false) {
            let completions = std::mem::take(&mut *self.completions.lock());
            let sent = completions.iter().filter(|done| done.is_send && done.label == Label::Message).count();
            self.sending.fetch_sub(sent, Ordering::AcqRel);
        }
    }

    #[cfg(test)]
    pub(super) fn is_locked(&self) -> bool {
        self.completions.is_held()
    }
}
