//! `loop://`: the transport between engines in one process. Each has a queue; a payload is copied once, from memory to memory.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use crate::sync::Mutex;

use super::{Capabilities, Consumed, Credentials, Link, LinkKey, PayloadStatus, Reactor, Sent, Sink, TransportDriver};
use crate::deferred_log::defer;
use crate::memory::{self, CopyOutcome, CopyPath, Slice};
use crate::{Address, Error, Result, Transport};

/// The names under which engines of this process listen.
static LISTENERS: LazyLock<Mutex<HashMap<String, Weak<LoopInbox>>>> = LazyLock::new(Mutex::default);
static NEXT_NAME: AtomicU64 = AtomicU64::new(1);

/// If more items wait in an inbox, sends complete only when the receiver has handled them.
const INBOX_LIMIT: usize = 1024;
/// Most items handled in one poll, so that other transports get their turns.
const BATCH: usize = 256;

enum LoopItem {
    /// A peer dials; this is its end.
    Dial(Arc<LoopEnd>),
    /// The peer has accepted; the end is connected.
    Connected(Arc<LoopEnd>),
    /// Bytes, and a payload, for this end.
    Bytes {
        to: Arc<LoopEnd>,
        bytes: Vec<u8>,
        payload: Option<Slice>,
        /// The receiver must report that it has handled them.
        owed: bool,
    },
    /// A send of this end is complete.
    Sent(Arc<LoopEnd>, Vec<u8>),
    Closed(Arc<LoopEnd>),
}

/// The queue of one engine.
struct LoopInbox {
    state: Mutex<LoopInboxState>,
    /// The number of items; changes only with `state` locked.
    len: AtomicUsize,
    waker: Arc<mio::Waker>,
}

#[derive(Default)]
struct LoopInboxState {
    items: VecDeque<LoopItem>,
    parked: bool,
}

impl LoopInbox {
    fn put(&self, item: LoopItem) {
        let wake = {
            let mut state = self.state.lock();
            state.items.push_back(item);
            self.len.store(state.items.len(), Ordering::Release);
            std::mem::take(&mut state.parked)
        };
        if wake && let Err(error) = self.waker.wake() {
            defer(move || tracing::error!(target: "calomel::loop", %error, "can't wake a parked engine"));
        }
    }

    fn is_long(&self) -> bool {
        self.len.load(Ordering::Relaxed) > INBOX_LIMIT
    }

    fn take(&self) -> Option<LoopItem> {
        if self.len.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let item = state.items.pop_front();
        self.len.store(state.items.len(), Ordering::Release);
        item
    }
}

/// One end of a link, with a reference to the other.
struct LoopEnd {
    key: LinkKey,
    inbox: Weak<LoopInbox>,
    /// The dialling end has none until it is accepted.
    peer: OnceLock<Weak<LoopEnd>>,
    state: Mutex<LoopEndState>,
}

#[derive(Default)]
struct LoopEndState {
    closed: bool,
    /// Bytes that the sink has not consumed yet.
    rest: Vec<u8>,
    /// An empty buffer from the receiver, for reuse.
    spare: Vec<u8>,
}

impl LoopEnd {
    /// `None` once it is closed.
    fn key(&self) -> Option<LinkKey> {
        (!self.state.lock().closed).then_some(self.key)
    }

    fn peer(&self) -> Option<Arc<LoopEnd>> {
        self.peer.get().and_then(Weak::upgrade)
    }
}

/// Keeps an end alive, as a [`Link`].
struct LoopLink(Arc<LoopEnd>);

impl Link for LoopLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        let closed = || Sent::Failed(io::Error::new(io::ErrorKind::ConnectionReset, "the other end is closed"));
        let Some(peer) = self.0.peer() else { return closed() };
        let Some(inbox) = peer.inbox.upgrade() else { return closed() };
        // The receiver reads the payload's memory, so the send is complete only after that. A sender waits for a receiver that
        // is far behind, too. An item says itself that it is owed: the receiver may still be at the one before.
        let owed = payload.is_some() || inbox.is_long();
        let spare = {
            let mut state = self.0.state.lock();
            if state.closed {
                return closed();
            }
            std::mem::take(&mut state.spare)
        };
        inbox.put(LoopItem::Bytes { to: peer, bytes, payload, owed });
        if owed { Sent::Later } else { Sent::All(spare) }
    }

    fn scheme(&self) -> Transport {
        Transport::Loop
    }

    fn is_local(&self) -> bool {
        true
    }

    fn process(&self) -> Option<Credentials> {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Some(Credentials { pid: rustix::process::getpid().as_raw_nonzero().get(), uid, gid })
    }

    /// What is sent is in the peer's queue at once: nothing is in flight.
    fn acknowledged(&self) -> u64 {
        0
    }

    fn close(&self) {
        self.0.state.lock().closed = true;
        let peer = self.0.peer();
        if let Some((peer, inbox)) = peer.and_then(|peer| peer.inbox.upgrade().map(|inbox| (peer, inbox))) {
            inbox.put(LoopItem::Closed(peer));
        }
    }
}

pub(crate) struct Loopback {
    inbox: Arc<LoopInbox>,
    names: Mutex<Vec<String>>,
}

impl Loopback {
    pub(crate) fn new(reactor: Reactor) -> Loopback {
        let inbox = LoopInbox { state: Mutex::default(), len: AtomicUsize::new(0), waker: reactor.waker };
        Loopback { inbox: Arc::new(inbox), names: Mutex::default() }
    }

    fn end(&self, key: LinkKey, peer: OnceLock<Weak<LoopEnd>>) -> Arc<LoopEnd> {
        Arc::new(LoopEnd { key, inbox: Arc::downgrade(&self.inbox), peer, state: Mutex::default() })
    }

    fn handle(&self, item: LoopItem, sink: &mut dyn Sink) {
        match item {
            LoopItem::Dial(dialler) => {
                let Some(inbox) = dialler.inbox.upgrade() else { return };
                let remote = Address::loopback("");
                let key = sink.accepted(remote);
                let accepted = self.end(key, OnceLock::from(Arc::downgrade(&dialler)));
                // It was dialled once.
                let _ = dialler.peer.set(Arc::downgrade(&accepted));
                sink.attach(key, Arc::new(LoopLink(accepted)));
                inbox.put(LoopItem::Connected(dialler));
            }
            LoopItem::Connected(end) => {
                if let Some(key) = end.key() {
                    sink.connected(key);
                }
            }
            LoopItem::Bytes { to, bytes, payload, owed } => self.deliver(&to, bytes, payload, owed, sink),
            LoopItem::Sent(end, buffer) => {
                if let Some(key) = end.key() {
                    sink.sent(key, buffer, false);
                }
            }
            LoopItem::Closed(end) => {
                if let Some(key) = end.key() {
                    end.state.lock().closed = true;
                    sink.closed(key, io::Error::new(io::ErrorKind::ConnectionReset, "the other end was closed"));
                }
            }
        }
    }

    fn deliver(&self, to: &Arc<LoopEnd>, mut bytes: Vec<u8>, payload: Option<Slice>, owed: bool, sink: &mut dyn Sink) {
        let key = to.key;
        let mut rest = {
            let mut state = to.state.lock();
            if state.closed {
                return;
            }
            std::mem::take(&mut state.rest)
        };
        let data = if rest.is_empty() {
            &bytes
        } else {
            rest.extend_from_slice(&bytes);
            &rest
        };
        let Some(Consumed { used, target: receive_target }) = sink.bytes(key, data) else { return };
        if used < data.len() {
            let left = data[used..].to_vec();
            to.state.lock().rest = left;
        }
        if let (Some(receive_target), Some(source)) = (receive_target, payload) {
            let status = match receive_target.memory {
                None => PayloadStatus::Whole,
                Some(target) => match memory::copy(&source, &target, CopyPath::for_transfer(receive_target.total)) {
                    CopyOutcome::All => PayloadStatus::Whole,
                    CopyOutcome::SourceClosed => PayloadStatus::SourceGone,
                    CopyOutcome::TargetClosed => PayloadStatus::TargetGone,
                },
            };
            sink.payload_done(key, status);
        }
        let Some(from) = to.peer() else { return };
        bytes.clear();
        if !owed {
            from.state.lock().spare = bytes;
        } else if let Some(inbox) = from.inbox.upgrade() {
            inbox.put(LoopItem::Sent(from, bytes));
        }
    }
}

impl TransportDriver for Loopback {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: Transport::Loop }
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        Ok(address.clone())
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        let name = match address.rest() {
            "" => format!("calomel-{}", NEXT_NAME.fetch_add(1, Ordering::Relaxed)),
            name => name.to_owned(),
        };
        let mut listeners = LISTENERS.lock();
        listeners.retain(|_, inbox| inbox.strong_count() > 0);
        if listeners.contains_key(&name) {
            return Err(Error::AddressInUse { address: address.clone() });
        }
        listeners.insert(name.clone(), Arc::downgrade(&self.inbox));
        let address = Address::loopback(&name);
        self.names.lock().push(name);
        Ok(address)
    }

    fn stop_listening(&self) {
        let mut listeners = LISTENERS.lock();
        for name in self.names.lock().drain(..) {
            listeners.remove(&name);
        }
    }

    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        let listener = LISTENERS.lock().get(address.rest()).and_then(Weak::upgrade).ok_or_else(|| {
            io::Error::new(io::ErrorKind::ConnectionRefused, "no engine listens under this name in this process")
        })?;
        let end = self.end(key, OnceLock::new());
        attach(Arc::new(LoopLink(end.clone())));
        listener.put(LoopItem::Dial(end));
        Ok(())
    }

    fn poll(&self, sink: &mut dyn Sink) -> bool {
        let mut any = false;
        for _ in 0..BATCH {
            let Some(item) = self.inbox.take() else { break };
            any = true;
            self.handle(item, sink);
        }
        any
    }

    fn ready(&self, _token: usize, _event: &mio::event::Event, _sink: &mut dyn Sink) {}

    fn park(&self) -> bool {
        let mut state = self.inbox.state.lock();
        state.parked = state.items.is_empty();
        state.parked
    }

    fn unpark(&self) {
        self.inbox.state.lock().parked = false;
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.stop_listening();
    }
}
