//! `tcp://`: one socket a link.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(feature = "tls")]
mod handshakes;
mod link;
mod receiving;
mod sending;
#[cfg(feature = "tls")]
mod session;
#[cfg(not(feature = "tls"))]
#[path = "no_session.rs"]
mod session;
mod sys;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mio::{Interest, Token};
use parking_lot::Mutex;

use super::accept_retry::AcceptRetry;
use super::{Capabilities, Link, LinkKey, Reactor, Sink, Transport, resolve};
use crate::deferred_log::defer;
use crate::{Address, Error, Result, Scheme};
#[cfg(feature = "tls")]
use handshakes::{Handshakes, KnownSource};
use link::{ReadProgress, TcpLink};
use session::Session;

/// Sockets that are read directly, without asking the reactor first. More than a few, and asking is cheaper.
const MAX_HOT: usize = 4;
/// A hot socket that had nothing so many times in a row is left to the reactor.
const COOL_AFTER: u32 = 1024;
/// Connections that may wait to be accepted; the system may allow fewer. Beyond that it does not answer, and whoever dials
/// tries again after a second.
const BACKLOG: i32 = 4096;
/// Connections that are accepted at a time. What those have said that came before has its turn in between: so there are never
/// many that have not had the time to greet.
const MAX_ACCEPTED: usize = 64;
/// What one read takes in besides payload.
const SCRATCH: usize = 64 << 10;

pub(crate) struct Tcp {
    shared: Arc<TcpShared>,
    /// Links that may have more to read, or had something a moment ago, or were sent something.
    polled: Mutex<Vec<PolledTcpLink>>,
    scratch: Mutex<Scratch>,
    accept_retry: AcceptRetry,
    keep_alive: Duration,
    /// Where all connections are to be TLS: those that are not yet.
    #[cfg(feature = "tls")]
    handshakes: Option<Handshakes>,
}

/// What the transport is told.
pub(crate) struct TcpOptions {
    /// How long a peer may be unheard of before the system, too, gives it up.
    pub peer_timeout: Duration,
    /// What every connection is encrypted with, and how long it may take to agree on that.
    #[cfg(feature = "tls")]
    pub tls: Option<(crate::tls::Tls, Duration)>,
}

/// To where links are read, in turn.
struct Scratch {
    bytes: Vec<u8>,
    /// What is decrypted.
    plain: Vec<u8>,
}

struct PolledTcpLink {
    link: Arc<TcpLink>,
    empty: u32,
}

/// What links share with their transport.
struct TcpShared {
    registry: mio::Registry,
    first_token: usize,
    entries: Mutex<TcpSockets>,
    /// Links, by their tokens, that were sent something: an answer may follow, and is best read without asking the reactor.
    pending: Mutex<Vec<usize>>,
    /// There is something to poll. Cleared by whoever drives only.
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
            // The first token is nobody else's.
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
        // Closing takes it out again, and may come as soon as it is attached.
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

    /// Options that a socket takes once it is connected. None of them is worth losing the connection for.
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
            defer(move || tracing::debug!(target: "calomel::tcp", %error, "a socket option was refused"));
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
        // The reactor tells again, after what else it has to tell.
        if let Some(listener) = self.shared.entries.lock().listeners.get_mut(&token)
            && let Err(error) = self.shared.registry.reregister(listener, Token(token), Interest::READABLE)
        {
            defer(move || tracing::error!(target: "calomel::tcp", %error, "the reactor does not take a listener any more"));
        }
    }

    /// Goes on with handshakes, where the token is one of theirs.
    #[cfg(feature = "tls")]
    fn shake(&self, handshakes: &Handshakes, token: usize, sink: &mut dyn Sink) -> bool {
        let registry = &self.shared.registry;
        if token == self.shared.first_token {
            handshakes.expire(registry);
            return true;
        }
        if !handshakes.has(token) {
            return false;
        }
        if let Some(KnownSource { stream, remote, session }) = handshakes.go_on(token, registry) {
            let key = sink.accepted(Address::tcp(remote));
            let link = Arc::new(TcpLink::new(key, token, stream, Some(session), true, self.shared.clone()));
            // The reactor knows it by this token already, and has told what it knows.
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

    /// What a connection to this address begins with.
    #[cfg(feature = "tls")]
    fn session(&self, socket: std::net::SocketAddr) -> io::Result<Option<Session>> {
        self.handshakes.as_ref().map(|handshakes| handshakes.secure.dial(socket.ip())).transpose()
    }

    #[cfg(not(feature = "tls"))]
    fn session(&self, _: std::net::SocketAddr) -> io::Result<Option<Session>> {
        Ok(None)
    }

    /// Reads a link, and keeps it hot if that may be worth it. True when anything came.
    fn receive(&self, link: &Arc<TcpLink>, sink: &mut dyn Sink) -> ReadProgress {
        link.receive(&mut self.scratch.lock(), sink)
    }

    fn activate(&self, link: &Arc<TcpLink>, more: bool) {
        let mut hot = self.polled.lock();
        // There may be thousands: those that are not among them are not searched for.
        let among = if link.is_polled() { hot.iter_mut().find(|entry| Arc::ptr_eq(&entry.link, link)) } else { None };
        if let Some(entry) = among {
            entry.empty = 0;
        } else if more || hot.len() < MAX_HOT {
            link.set_polled(true);
            hot.push(PolledTcpLink { link: link.clone(), empty: 0 });
            self.shared.busy.store(true, Ordering::Release);
        } else {
            link.set_polled(false);
        }
    }

    /// What was sent something since the last poll.
    fn activate_pending(&self) {
        let warm = std::mem::take(&mut *self.shared.pending.lock());
        for token in warm {
            let link = self.shared.entries.lock().links.get(&token).cloned();
            if let Some(link) = link {
                self.activate(&link, false);
            }
        }
    }
}

impl Drop for Tcp {
    /// Lets go of links that nobody has closed, as one that was accepted while the engine ended: they and what they share with
    /// this hold each other. Their sockets end with them, and are not shut down: a forked child has them, too.
    fn drop(&mut self) {
        let links = std::mem::take(&mut self.shared.entries.lock().links);
        drop(links);
    }
}

impl Transport for Tcp {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: Scheme::Tcp }
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        Ok(Address::tcp(resolve(address)?))
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        let socket = resolve(address)?;
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
        // Whatever comes from here on says so again.
        self.activate_pending();
        let links: smallvec::SmallVec<[Arc<TcpLink>; MAX_HOT]> = self.polled.lock().iter().map(|hot| hot.link.clone()).collect();
        let mut any = false;
        if self.accept_retry.is_any() {
            self.shared.busy.store(true, Ordering::Release);
            self.accept_retry.due().into_iter().for_each(|token| self.accept(token, sink));
        }
        let mut looked_at = smallvec::SmallVec::<[ReadProgress; MAX_HOT]>::new();
        for link in &links {
            any |= link.resume(sink);
            let received = self.receive(link, sink);
            any |= received.any;
            looked_at.push(received);
        }
        // Only whoever drives takes any out, and what has joined stands behind: they are in the same order.
        let many = links.len() > MAX_HOT;
        let mut looked_at = links.iter().zip(looked_at).peekable();
        let mut hot = self.polled.lock();
        hot.retain_mut(|entry| {
            let Some((link, received)) = looked_at.next_if(|(link, _)| Arc::ptr_eq(link, &entry.link)) else { return true };
            entry.empty = if received.any { 0 } else { entry.empty + 1 };
            // Peers by the thousand that said much once are not looked at a thousand times more.
            let cold = entry.empty > if many { 0 } else { COOL_AFTER };
            let stays = !received.closed && (!cold || link.may_have_more());
            if !stays {
                link.set_polled(false);
            }
            stays
        });
        if !hot.is_empty() {
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
            && self.shake(handshakes, token, sink)
        {
            return;
        }
        let Some(link) = self.shared.entries.lock().links.get(&token).cloned() else { return };
        let connects = !link.is_connected();
        if connects {
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
        }
        if event.is_readable() || event.is_read_closed() || event.is_error() || link.is_ending() || connects && link.is_secure() {
            if event.is_read_closed() || event.is_error() {
                link.expect_end();
            }
            let received = self.receive(&link, sink);
            if !received.closed {
                self.activate(&link, received.more);
            }
        }
    }

    fn park(&self) -> bool {
        let mut hot = self.polled.lock();
        // What may have more must be read first: the reactor tells of news only.
        let more = hot.iter().any(|entry| entry.link.may_have_more());
        if !more {
            hot.drain(..).for_each(|entry| entry.link.set_polled(false));
        }
        !more
    }

    fn unpark(&self) {}

    #[cfg(test)]
    fn is_locked(&self) -> bool {
        self.polled.try_lock_for(super::IN_OTHER_HANDS).is_none() || self.scratch.try_lock_for(super::IN_OTHER_HANDS).is_none()
    }
}
