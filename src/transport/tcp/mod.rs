//! `tcp://`: the transport over tcp sockets, one for each link, with or without TLS.

#[cfg(any(all(test, not(few_tests)), fuzzing))]
pub(crate) mod fuzzing;
#[cfg(feature = "tls")]
mod handshakes;
mod link;
#[cfg(feature = "tls")]
mod session;
#[cfg(not(feature = "tls"))]
#[path = "no_session.rs"]
mod session;
mod stream;
mod sys;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use mio::{Interest, Token};

use super::accept_retry::AcceptRetry;
use super::{Capabilities, Link, LinkKey, Reactor, Sink, TransportDriver, resolve, resolve_to_listen};
use crate::deferred_log::defer;
use crate::{Address, Error, Result, Transport};
#[cfg(feature = "tls")]
use handshakes::{Authenticated, Handshakes};
use link::{ReadProgress, TcpLink};
use session::Session;

/// Sockets that are polled, that is, read without waiting for the reactor. For more than a few, the reactor is cheaper.
const MAX_POLLED: usize = 4;
/// A polled socket that was empty so many times in a row is left to the reactor.
const COOL_AFTER: u32 = 1024;
/// So many bytes of a link in a poll are bulk data. When another link brings less beside them, all links take turns for so many
/// polls: it may have small calls, which would wait for up to a megabyte each time.
const BULK: usize = 16 << 10;
const MIXED: u32 = 16;
/// Connections that may wait to be accepted; the kernel may allow fewer. It ignores further ones, and their clients try again
/// after a second.
const BACKLOG: i32 = 4096;
/// Connections that are accepted at a time. The earlier ones are read in between, so few connections wait for their handshake
/// without having been read.
const MAX_ACCEPTED: usize = 64;
/// Most bytes of one read, besides payload.
const SCRATCH: usize = 64 << 10;

pub(crate) struct Tcp {
    shared: Arc<TcpShared>,
    /// Links that may have more to read, received something recently, or were sent something.
    polled: Mutex<Vec<Arc<TcpLink>>>,
    scratch: Mutex<Scratch>,
    accept_retry: AcceptRetry,
    keep_alive: Duration,
    /// With TLS: the connections whose TLS handshake is not over.
    #[cfg(feature = "tls")]
    handshakes: Option<Handshakes>,
}

/// The settings of the transport.
pub(crate) struct TcpOptions {
    /// After so long without acknowledgement the kernel, too, drops a peer.
    pub peer_timeout: Duration,
    /// With TLS: its settings, and the time limit of a handshake.
    #[cfg(feature = "tls")]
    pub tls: Option<(crate::tls::Tls, Duration)>,
}

/// The buffers into which links are read sequentially.
struct Scratch {
    bytes: Vec<u8>,
    /// Decrypted bytes.
    plain: Vec<u8>,
}

/// What links share with their transport.
struct TcpShared {
    registry: mio::Registry,
    first_token: usize,
    entries: Mutex<TcpSockets>,
    /// Tokens of links that were sent something: an answer may follow, and is read fastest by polling.
    pending: Mutex<Vec<usize>>,
    /// For how many more polls links have to take turns; changed by the driver.
    mixed: AtomicU32,
    /// The token of the link that has moved bulk data in the last poll; 0 for none, and `usize::MAX` for several.
    bulk: AtomicUsize,
    /// There is something to poll. Only the driver clears it.
    busy: AtomicBool,
}

#[derive(Default)]
struct TcpSockets {
    next: usize,
    links: HashMap<usize, Arc<TcpLink>>,
    listeners: HashMap<usize, mio::net::TcpListener>,
}

impl TcpShared {
    fn token(&self) -> usize {
        let mut entries = self.entries.lock();
        entries.next += 1;
        self.first_token + entries.next
    }

    /// A link has lately brought something while another was moving bulk data.
    fn is_mixed(&self) -> bool {
        self.mixed.load(Ordering::Relaxed) > 0
    }

    fn mark_pending(&self, token: usize) {
        self.pending.lock().push(token);
        self.busy.store(true, Ordering::Release);
    }
}

impl Tcp {
    pub(crate) fn new(reactor: Reactor, options: TcpOptions) -> Result<Tcp> {
        let Reactor { registry, first_token, .. } = reactor;
        #[cfg(feature = "tls")]
        let handshakes = options.tls.map(|(tls, limit)| {
            // The first token is reserved for the timer of handshakes.
            Handshakes::new(session::Secure::new(&tls)?, limit, &registry, first_token)
        });
        Ok(Tcp {
            #[cfg(feature = "tls")]
            handshakes: handshakes.transpose()?,
            shared: Arc::new(TcpShared {
                registry,
                first_token,
                entries: Mutex::default(),
                pending: Mutex::default(),
                mixed: AtomicU32::new(0),
                bulk: AtomicUsize::new(0),
                busy: AtomicBool::new(false),
            }),
            polled: Mutex::default(),
            scratch: Mutex::new(Scratch { bytes: vec![0; SCRATCH], plain: Vec::new() }),
            accept_retry: AcceptRetry::default(),
            keep_alive: options.peer_timeout,
        })
    }

    fn add(
        &self,
        key: LinkKey,
        stream: mio::net::TcpStream,
        session: Option<Session>,
        connected: bool,
        attach: &mut dyn FnMut(Arc<dyn Link>),
    ) -> io::Result<()> {
        let token = self.shared.token();
        let link = Arc::new(TcpLink::new(key, token, stream, session, connected, self.shared.clone()));
        // `close` removes it again, and may be called as soon as it is attached.
        self.shared.entries.lock().links.insert(token, link.clone());
        attach(link.clone());
        if connected {
            self.set_up(&link);
        }
        let registered = link
            .with_stream(|stream| self.shared.registry.register(stream, Token(token), Interest::READABLE | Interest::WRITABLE));
        if let Err(error) = registered {
            self.shared.entries.lock().links.remove(&token);
            return Err(error);
        }
        Ok(())
    }

    /// Sets options that need a connected socket. A failure is logged, and the connection is kept.
    fn set_up(&self, link: &TcpLink) {
        let idle = self.keep_alive.max(Duration::from_secs(1));
        let interval = (idle / 3).max(Duration::from_secs(1));
        let keep_alive = socket2::TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(3);
        let done = link.with_stream(|stream| {
            stream.set_nodelay(true)?;
            let socket = socket2::SockRef::from(&*stream);
            socket.set_tcp_keepalive(&keep_alive)?;
            socket.set_tcp_user_timeout(Some(idle))
        });
        if let Err(error) = done {
            defer(move || tracing::debug!(target: "calomel::tcp", %error, "can't set a socket option"));
        }
    }

    fn accept(&self, token: usize, sink: &mut dyn Sink) {
        for _ in 0..MAX_ACCEPTED {
            let accepted = match self.shared.entries.lock().listeners.get(&token) {
                Some(listener) => listener.accept(),
                None => return,
            };
            match accepted {
                Ok((stream, remote)) => {
                    #[cfg(feature = "tls")]
                    if let Some(handshakes) = &self.handshakes {
                        handshakes.add(self.shared.token(), stream, remote, &self.shared.registry);
                        continue;
                    }
                    let key = sink.accepted(Address::tcp(remote));
                    let added = self.add(key, stream, None, true, &mut |link| sink.attach(key, link));
                    if let Err(error) = added {
                        sink.closed(key, error);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) => {}
                Err(error) => {
                    self.accept_retry.note(token, &error);
                    self.shared.busy.store(true, Ordering::Release);
                    return;
                }
            }
        }
        // The reactor reports the listener again, behind its other events.
        if let Some(listener) = self.shared.entries.lock().listeners.get_mut(&token)
            && let Err(error) = self.shared.registry.reregister(listener, Token(token), Interest::READABLE)
        {
            defer(move || tracing::error!(target: "calomel::tcp", %error, "can't register a listener again"));
        }
    }

    /// Continues a handshake; false when the token belongs to none.
    #[cfg(feature = "tls")]
    fn continue_handshake(&self, handshakes: &Handshakes, token: usize, sink: &mut dyn Sink) -> bool {
        let registry = &self.shared.registry;
        if token == self.shared.first_token {
            handshakes.expire(registry);
            return true;
        }
        if !handshakes.has(token) {
            return false;
        }
        if let Some(Authenticated { stream, remote, session }) = handshakes.advance(token, registry) {
            let key = sink.accepted(Address::tcp(remote));
            let link = Arc::new(TcpLink::new(key, token, stream, Some(session), true, self.shared.clone()));
            // It is registered under this token already, and its events so far were reported.
            self.shared.entries.lock().links.insert(token, link.clone());
            sink.attach(key, link.clone());
            self.set_up(&link);
            let received = self.receive(&link, sink);
            if !received.closed {
                self.activate(&link, received.more);
            }
        }
        true
    }

    /// The TLS session for a connection to this address.
    #[cfg(feature = "tls")]
    fn session(&self, socket: std::net::SocketAddr) -> io::Result<Option<Session>> {
        self.handshakes.as_ref().map(|handshakes| handshakes.secure.dial(socket.ip())).transpose()
    }

    #[cfg(not(feature = "tls"))]
    fn session(&self, _: std::net::SocketAddr) -> io::Result<Option<Session>> {
        Ok(None)
    }

    /// Reads a link. If it brings a little while another moves bulk data, all take turns from then on.
    fn receive(&self, link: &TcpLink, sink: &mut dyn Sink) -> ReadProgress {
        let received = link.receive(&mut self.scratch.lock(), sink);
        let bulk = self.shared.bulk.load(Ordering::Relaxed);
        if received.any && received.bytes < BULK && bulk != 0 && bulk != link.token() {
            self.shared.mixed.store(MIXED, Ordering::Relaxed);
        }
        received
    }

    fn activate(&self, link: &Arc<TcpLink>, more: bool) {
        let mut polled = self.polled.lock();
        // There may be thousands, so only a link that is marked as polled is searched for.
        if link.is_polled() && polled.iter().any(|other| Arc::ptr_eq(other, link)) {
            link.note_poll(true);
        } else if more || polled.len() < MAX_POLLED {
            link.set_polled(true);
            link.note_poll(true);
            polled.push(link.clone());
            self.shared.busy.store(true, Ordering::Release);
        } else {
            link.set_polled(false);
        }
    }

    /// Activates the links that were sent something since the last poll.
    fn activate_pending(&self) {
        let pending = std::mem::take(&mut *self.shared.pending.lock());
        for token in pending {
            let link = self.shared.entries.lock().links.get(&token).cloned();
            if let Some(link) = link {
                self.activate(&link, link.may_have_more());
            }
        }
    }
}

impl Drop for Tcp {
    /// Drops links that were never closed, such as one accepted while the engine ended: each link and `shared` hold a reference
    /// to the other. Their sockets are closed, not shut down: a forked child has them too.
    fn drop(&mut self) {
        let links = std::mem::take(&mut self.shared.entries.lock().links);
        drop(links);
    }
}

impl TransportDriver for Tcp {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: Transport::Tcp }
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        Ok(Address::tcp(resolve(address)?))
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        let socket = resolve_to_listen(address)?;
        #[cfg(feature = "tls")]
        if let Some(handshakes) = &self.handshakes {
            handshakes.secure.check_listening(&format!("listening at {address}"))?;
        }
        let mut listener = mio::net::TcpListener::bind(socket).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => Error::AddressInUse { address: address.clone() },
            _ => Error::io(format!("can't listen at {address}"), error),
        })?;
        let failed = |error| Error::io(format!("can't listen at {address}"), error);
        rustix::net::listen(&listener, BACKLOG).map_err(|error| failed(error.into()))?;
        let bound = listener.local_addr().map_err(failed)?;
        let token = self.shared.token();
        self.shared.registry.register(&mut listener, Token(token), Interest::READABLE).map_err(failed)?;
        self.shared.entries.lock().listeners.insert(token, listener);
        Ok(Address::tcp(bound))
    }

    fn stop_listening(&self) {
        for (_, mut listener) in self.shared.entries.lock().listeners.drain() {
            // It is closed right away, which deregisters it as well.
            let _ = self.shared.registry.deregister(&mut listener);
        }
        #[cfg(feature = "tls")]
        self.handshakes.iter().for_each(|handshakes| handshakes.clear(&self.shared.registry));
    }

    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        let socket = address.socket().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a resolved address"))?;
        let session = self.session(socket)?;
        let stream = mio::net::TcpStream::connect(socket)?;
        self.add(key, stream, session, false, &mut |link| attach(link))
    }

    fn poll(&self, sink: &mut dyn Sink) -> bool {
        if !self.shared.busy.load(Ordering::Acquire) {
            return false;
        }
        self.shared.busy.store(false, Ordering::Release);
        // What becomes pending from here on sets it again.
        self.activate_pending();
        let links: smallvec::SmallVec<[Arc<TcpLink>; MAX_POLLED]> = self.polled.lock().iter().cloned().collect();
        let mut any = false;
        if self.accept_retry.is_any() {
            self.shared.busy.store(true, Ordering::Release);
            self.accept_retry.due().into_iter().for_each(|token| self.accept(token, sink));
        }
        let mut reads = smallvec::SmallVec::<[ReadProgress; MAX_POLLED]>::new();
        self.shared.mixed.store(self.shared.mixed.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
        let mut bulk = 0;
        for link in &links {
            any |= link.resume(sink);
            let received = self.receive(link, sink);
            any |= received.any || link.may_have_more();
            if received.bytes + link.take_written() >= BULK {
                bulk = if bulk == 0 { link.token() } else { usize::MAX };
            }
            reads.push(received);
        }
        // Only the driver removes links, and new ones are appended: so both lists have the same order.
        let many = links.len() > MAX_POLLED;
        let mut reads = links.iter().zip(reads).peekable();
        let mut polled = self.polled.lock();
        polled.retain(|entry| {
            let Some((link, received)) = reads.next_if(|(link, _)| Arc::ptr_eq(link, entry)) else { return true };
            let empty = link.note_poll(received.any);
            // With many polled links, an empty read is enough: thousands of peers may have sent something once.
            let idle = empty > if many { 0 } else { COOL_AFTER };
            let stays = !received.closed && (!idle || link.may_have_more());
            stays || !link.leave()
        });
        self.shared.bulk.store(bulk, Ordering::Relaxed);
        if !polled.is_empty() {
            self.shared.busy.store(true, Ordering::Release);
        }
        any
    }

    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink) {
        if self.shared.entries.lock().listeners.contains_key(&token) {
            return self.accept(token, sink);
        }
        #[cfg(feature = "tls")]
        if let Some(handshakes) = &self.handshakes
            && self.continue_handshake(handshakes, token, sink)
        {
            return;
        }
        let Some(link) = self.shared.entries.lock().links.get(&token).cloned() else { return };
        let connecting = !link.is_connected();
        if connecting {
            match link.finish_connecting() {
                Ok(true) => {
                    self.set_up(&link);
                    sink.connected(link.key());
                }
                Ok(false) => return,
                Err(error) => {
                    link.close();
                    return sink.closed(link.key(), error);
                }
            }
        }
        if event.is_writable() {
            link.resume(sink);
            if link.may_have_more() {
                self.activate(&link, true);
            }
        }
        let ended = event.is_read_closed() || event.is_error();
        if event.is_readable() || ended || link.is_ending() || connecting && link.is_secure() {
            if ended {
                link.expect_end();
            }
            let received = self.receive(&link, sink);
            if !received.closed {
                self.activate(&link, received.more);
            }
        }
    }

    fn next_alarm(&self) -> Option<Instant> {
        self.accept_retry.next()
    }

    fn park(&self) -> bool {
        self.activate_pending();
        let mut polled = self.polled.lock();
        // Sockets that may have more must be read first: the reactor is edge-triggered.
        let more = polled.iter().any(|link| link.may_have_more());
        if !more {
            polled.retain(|link| !link.leave());
        }
        polled.is_empty()
    }

    fn unpark(&self) {}

    fn mute(&self) {
        self.activate_pending();
        for link in self.polled.lock().iter() {
            if let Err(error) = link.mute(true) {
                defer(move || tracing::debug!(target: "calomel::tcp", %error, "can't take a socket off the reactor"));
            }
        }
    }

    #[cfg(test)]
    fn is_locked(&self) -> bool {
        self.polled.is_held() || self.scratch.is_held()
    }
}
