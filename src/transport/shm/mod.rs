//! `shm://`: the transport between engines on one host. They connect over a local socket without a file. Frames go through
//! rings in shared memory; bulk data goes through the rings too, or the receiver copies it from the peer's memory where that is
//! faster.
//!
//! Sockets, descriptors and memory have no names in the file system, so a killed process leaves nothing behind.

mod blocks;
mod connection;
mod copy_choice;
#[cfg(any(all(test, not(few_tests)), fuzzing))]
pub(crate) mod fuzzing;
mod handshake;
mod link;
mod loans;
mod mailbox;
mod process;
mod ring_path;
mod segment;
mod sys;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crate::sync::Mutex;
use mio::unix::SourceFd;
use mio::{Interest, Token};
use rustix::event::EventfdFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags};

use super::accept_retry::AcceptRetry;
use super::{Capabilities, Link, LinkKey, Reactor, Sink, TransportDriver, source_towards};
use crate::deferred_log::defer;
use crate::{Address, Error, Result, Transport, random};
use handshake::{Admission, ControlPacket, ShmHello};
use link::ShmLink;
use loans::Lingering;
pub(crate) use mailbox::KernelCopyPolicy;

/// Rings that are polled without a doorbell. To poll one costs a few nanoseconds.
const MAX_POLLED: usize = 64;
/// Beyond that number, a ring that was empty so many times in a row is polled no longer: it waits for its doorbell.
const COOL_AFTER: u32 = 64;
/// A ring that was empty so many times in a row is removed from the polled ones when the driver parks.
const COLD_AFTER: u32 = 100_000;
/// Connections that may wait to be accepted; the system may allow fewer.
const BACKLOG: i32 = 4096;

/// Added to the token of a link's socket.
const PROCESS: usize = 1;
const DOORBELL: usize = 2;

/// The settings of the transport.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShmOptions {
    /// A group whose members may connect too; without one, only the engine's own user may.
    pub group: Option<u32>,
    pub lending: KernelCopyPolicy,
    /// Engines that listen on another transport of this host are reached over shm (the same-host upgrade).
    pub local_addresses: bool,
}

pub(crate) struct Shm {
    shared: Arc<ShmShared>,
    options: ShmOptions,
    polled: Mutex<PolledShmLinks>,
    /// The number of polled links.
    polled_count: AtomicUsize,
    accept_retry: AcceptRetry,
}

/// What only the driver uses.
struct PolledShmLinks {
    links: Vec<PolledShmLink>,
    /// Where frames are read to.
    scratch: Vec<u8>,
}

struct PolledShmLink {
    link: Arc<ShmLink>,
    empty: u32,
}

/// What links share with their transport.
struct ShmShared {
    registry: mio::Registry,
    waker: Arc<mio::Waker>,
    first_token: usize,
    entries: Mutex<ShmSockets>,
    /// Links to poll, by token: a thread that is not the driver has work for them.
    scheduled: Mutex<Vec<usize>>,
    has_scheduled: AtomicBool,
    /// Loans of links that are over.
    lingering: Mutex<Vec<Lingering>>,
    copy_policy: KernelCopyPolicy,
    admission: Admission,
    /// The engine may read memory of other processes in place.
    direct: bool,
    /// A random word at a fixed address: a peer that can read it there can read the rest of the memory too.
    nonce: Box<u64>,
}

#[derive(Default)]
struct ShmSockets {
    next: usize,
    links: HashMap<usize, Arc<ShmLink>>,
    listeners: HashMap<usize, OwnedFd>,
}

impl ShmShared {
    /// A token for a socket; the next two are for the pidfd of the peer's process and for the doorbell.
    fn token(&self) -> usize {
        let mut entries = self.entries.lock();
        entries.next += 4;
        self.first_token + entries.next
    }

    /// The hello for a peer. A peer of another user may not read this process's memory, so it gets no address.
    fn hello(&self, own_user: bool) -> ShmHello {
        if own_user { ShmHello::new(*self.nonce, (&raw const *self.nonce).addr() as u64) } else { ShmHello::new(0, 0) }
    }

    /// Registers a pidfd that reports the death of a process; `None` where that is not possible.
    fn watch(&self, pid: i32, token: usize, socket: &OwnedFd) -> Option<OwnedFd> {
        let handle = rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        // While its socket is open the process lives, so the number has not been reused.
        let mut poll = [rustix::event::PollFd::new(socket, rustix::event::PollFlags::HUP)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&now))).ok()? > 0 {
            return None;
        }
        self.registry.register(&mut SourceFd(&handle.as_raw_fd()), Token(token + PROCESS), Interest::READABLE).ok()?;
        Some(handle)
    }

    /// Registers an `eventfd` as doorbell; `None` where none can be created: then the peer uses the socket.
    fn doorbell(&self, token: usize) -> Option<OwnedFd> {
        let doorbell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        self.registry.register(&mut SourceFd(&doorbell.as_raw_fd()), Token(token + DOORBELL), Interest::READABLE).ok()?;
        Some(doorbell)
    }

    /// Schedules a link for the driver's next poll.
    fn schedule(&self, token: usize) {
        self.scheduled.lock().push(token);
        self.has_scheduled.store(true, Ordering::SeqCst);
        if let Err(error) = self.waker.wake() {
            defer(move || tracing::error!(target: "calomel::shm", %error, "can't wake a parked engine"));
        }
    }

    /// Keeps loans that outlive their link, and ends those that are over: called when a link is added or closed, or a
    /// process dies.
    fn linger(&self, more: Vec<Lingering>) {
        let mut lingering = self.lingering.lock();
        lingering.extend(more);
        lingering.retain(|lingering| !lingering.settle());
    }

    fn remove(&self, link: &ShmLink) {
        let removed = self.entries.lock().links.remove(&link.token);
        if removed.is_some() {
            // It is closed soon, which deregisters it as well.
            let _ = self.registry.deregister(&mut SourceFd(&link.socket.as_raw_fd()));
            // The peer may keep it open.
            if let Some(doorbell) = link.doorbell.get() {
                let _ = self.registry.deregister(&mut SourceFd(&doorbell.as_raw_fd()));
            }
        }
    }
}

fn failed(what: &str, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Whether an address belongs to this host.
fn is_own(address: SocketAddr) -> bool {
    let v4 = address.is_ipv4();
    // A bind succeeds only for an own address, unless `ip_nonlocal_bind` permits any.
    let own = || {
        let name = format!("/proc/sys/net/{}/ip_nonlocal_bind", if v4 { "ipv4" } else { "ipv6" });
        let any = std::fs::read_to_string(name).is_ok_and(|text| text.trim() != "0");
        !any && UdpSocket::bind((address.ip(), 0)).is_ok()
    };
    // Packets to an address of this host mostly have that address as their source, too.
    address.ip().is_loopback() || source_towards(address).is_ok_and(|source| source == address.ip()) || own()
}

/// True for a name that stands for an address of another transport, as [`Shm::local_addresses`] derives them.
fn stands_for_another(address: &Address) -> bool {
    address.rest().split_once(':').is_some_and(|(scheme, _)| Transport::parse(scheme).is_some())
}

/// The abstract name of the socket.
fn name(address: &Address) -> io::Result<SocketAddrUnix> {
    if address.rest().is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the name is empty"));
    }
    let name = format!("calomel/{}", address.rest());
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| {
        let reason = format!("a name of {} bytes is too long", address.rest().len());
        io::Error::new(io::ErrorKind::InvalidInput, reason)
    })
}

impl Shm {
    pub(crate) fn new(reactor: Reactor, options: ShmOptions) -> Result<Shm> {
        let nonce = random::from_system().map_err(|error| Error::io("can't get random numbers from the system", error))?;
        let Reactor { registry, waker, first_token } = reactor;
        let admission = Admission { uid: rustix::process::geteuid().as_raw(), group: options.group };
        Ok(Shm {
            shared: Arc::new(ShmShared {
                registry,
                waker,
                first_token,
                entries: Mutex::default(),
                scheduled: Mutex::default(),
                has_scheduled: AtomicBool::new(false),
                lingering: Mutex::default(),
                copy_policy: options.lending,
                admission,
                direct: options.lending != KernelCopyPolicy::Never,
                nonce: Box::new(u64::from_ne_bytes(nonce)),
            }),
            options,
            polled: Mutex::new(PolledShmLinks { links: Vec::new(), scratch: vec![0; connection::MAX_BODY] }),
            polled_count: AtomicUsize::new(0),
            accept_retry: AcceptRetry::default(),
        })
    }

    fn add(&self, link: ShmLink, attach: &mut dyn FnMut(Arc<dyn Link>)) -> io::Result<()> {
        self.shared.linger(Vec::new());
        let link = Arc::new(link);
        // `close` removes it again, and may be called as soon as it is attached.
        self.shared.entries.lock().links.insert(link.token, link.clone());
        attach(link.clone());
        let registered =
            self.shared.registry.register(&mut SourceFd(&link.socket.as_raw_fd()), Token(link.token), Interest::READABLE);
        registered.inspect_err(|_| drop(self.shared.entries.lock().links.remove(&link.token)))
    }

    fn accept(&self, token: usize, sink: &mut dyn Sink) {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let accepted = match self.shared.entries.lock().listeners.get(&token) {
                Some(listener) => rustix::net::accept_with(listener, flags),
                None => return,
            };
            match accepted {
                Ok(socket) => self.admit(socket, sink),
                Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(error) => return self.accept_retry.note(token, &error.into()),
            }
        }
    }

    fn admit(&self, socket: OwnedFd, sink: &mut dyn Sink) {
        let credentials = match sys::credentials(socket.as_fd()) {
            Ok(credentials) => credentials,
            Err(error) => {
                return defer(move || tracing::warn!(target: "calomel::shm", %error, "can't read the credentials of a peer"));
            }
        };
        if let Some(reason) = self.shared.admission.objection(credentials, &socket) {
            let (pid, uid) = (credentials.pid, credentials.uid);
            defer(move || tracing::warn!(target: "calomel::shm", pid, uid, "a peer is refused by access control"));
            // Best effort: the peer may have closed the socket.
            let _ = handshake::send(&socket, &ControlPacket::Refused { reason }, &[]);
            return;
        }
        let token = self.shared.token();
        let remote = Address::shm(&format!("pid-{}-{}", credentials.pid, token - self.shared.first_token));
        let key = sink.accepted(remote);
        let link = ShmLink::accept(key, token, socket, self.shared.clone());
        if let Err(error) = self.add(link, &mut |link| sink.attach(key, link)) {
            sink.closed(key, error);
        }
    }

    fn activate(&self, link: &Arc<ShmLink>) {
        let PolledShmLinks { links, .. } = &mut *self.polled.lock();
        if !links.iter().any(|entry| Arc::ptr_eq(&entry.link, link)) {
            link.awake();
            links.push(PolledShmLink { link: link.clone(), empty: 0 });
            self.polled_count.store(links.len(), Ordering::Relaxed);
        }
    }

    /// Adds the links that other threads have scheduled to the polled ones.
    fn take_scheduled(&self) {
        if self.shared.has_scheduled.load(Ordering::Relaxed) && self.shared.has_scheduled.swap(false, Ordering::SeqCst) {
            let scheduled = std::mem::take(&mut *self.shared.scheduled.lock());
            for token in scheduled {
                let link = self.shared.entries.lock().links.get(&token).cloned();
                link.iter().for_each(|link| self.activate(link));
            }
        }
    }
}

impl Drop for Shm {
    /// Drops links that were never closed, such as one accepted while the engine ended: each link and `shared` hold a reference
    /// to the other. Their sockets are closed, not shut down: a forked child has them too.
    fn drop(&mut self) {
        let links = std::mem::take(&mut self.shared.entries.lock().links);
        drop(links);
    }
}

impl TransportDriver for Shm {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: Transport::Shm }
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        match name(address) {
            Ok(_) => Ok(address.clone()),
            Err(error) => Err(Error::InvalidAddress { text: address.to_string(), reason: error.to_string() }),
        }
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        let address = if address.rest().is_empty() {
            let number = random::from_system().map_err(|error| Error::io("can't choose a name", error))?;
            Address::shm(&format!("calomel-{}-{:016x}", std::process::id(), u64::from_ne_bytes(number)))
        } else {
            address.clone()
        };
        let name = self.resolve(&address).and_then(|_| name(&address).map_err(|error| Error::io("the name", error)))?;
        let failed = |error: rustix::io::Errno| match error {
            rustix::io::Errno::ADDRINUSE => Error::AddressInUse { address: address.clone() },
            error => Error::io(format!("can't listen at {address}"), error.into()),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
        rustix::net::bind(&listener, &name).map_err(failed)?;
        rustix::net::listen(&listener, BACKLOG).map_err(failed)?;
        let token = self.shared.token();
        let registered = self.shared.registry.register(&mut SourceFd(&listener.as_raw_fd()), Token(token), Interest::READABLE);
        registered.map_err(|error| Error::io(format!("can't listen at {address}"), error))?;
        self.shared.entries.lock().listeners.insert(token, listener);
        Ok(address)
    }

    fn local_addresses(&self, address: &Address, dialled: bool) -> Vec<Address> {
        let Some(socket) = address.socket().filter(|_| self.options.local_addresses) else {
            return Vec::new();
        };
        let at = |ip: IpAddr| Address::shm(&format!("{}:{ip}:{}", address.scheme().name(), socket.port()));
        if !dialled {
            return vec![at(socket.ip())];
        }
        // A socket that listens on all IPv6 addresses mostly accepts IPv4 too; never the other way round.
        let all = [at(Ipv4Addr::UNSPECIFIED.into()), at(Ipv6Addr::UNSPECIFIED.into())];
        let all = &all[usize::from(socket.is_ipv6())..];
        if is_own(socket) { [&[at(socket.ip())], all].concat() } else { Vec::new() }
    }

    fn stop_listening(&self) {
        for (_, listener) in self.shared.entries.lock().listeners.drain() {
            // It is closed right away, which deregisters it as well.
            let _ = self.shared.registry.deregister(&mut SourceFd(&listener.as_raw_fd()));
        }
    }

    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &name(address)?).map_err(|error| match error {
            rustix::io::Errno::AGAIN => failed("the listener's queue is full", error),
            rustix::io::Errno::CONNREFUSED => {
                io::Error::new(io::ErrorKind::ConnectionRefused, "no engine listens under this name on this host")
            }
            error => error.into(),
        })?;
        // Any process of this host can take the name that stands for a tcp address. So its owner must run as the own user,
        // whatever group may connect; this is checked before the first byte is sent.
        let admission = self.shared.admission;
        let admission = if stands_for_another(address) { Admission { group: None, ..admission } } else { admission };
        if let Some(reason) = admission.objection(sys::credentials(socket.as_fd())?, &socket) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        let link = ShmLink::dial(key, self.shared.token(), socket, self.shared.clone());
        self.add(link.map_err(|error| failed("can't create the shared-memory segment", error))?, &mut |link| attach(link))
    }

    fn poll(&self, sink: &mut dyn Sink) -> bool {
        self.take_scheduled();
        if self.accept_retry.is_any() {
            self.accept_retry.due().into_iter().for_each(|token| self.accept(token, sink));
        }
        if self.polled_count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // Only the driver takes this lock, and the sink does not; user code runs after the poll.
        let PolledShmLinks { links, scratch } = &mut *self.polled.lock();
        let many = links.len() > MAX_POLLED;
        let mut any = false;
        links.retain_mut(|entry| {
            let something = entry.link.turn(scratch, sink);
            any |= something;
            entry.empty = if something { 0 } else { entry.empty.saturating_add(1) };
            let idle = many && entry.empty > COOL_AFTER && entry.link.fall_asleep();
            !entry.link.is_closed() && !idle
        });
        self.polled_count.store(links.len(), Ordering::Relaxed);
        any
    }

    fn ready(&self, token: usize, _event: &mio::event::Event, sink: &mut dyn Sink) {
        if self.shared.entries.lock().listeners.contains_key(&token) {
            return self.accept(token, sink);
        }
        let of = (token - self.shared.first_token) % 4;
        if of == PROCESS {
            self.shared.linger(Vec::new());
        }
        let link = self.shared.entries.lock().links.get(&(token - of)).cloned();
        let Some(link) = link else { return };
        match of {
            PROCESS => link.end(io::Error::new(io::ErrorKind::ConnectionReset, "the peer's process died")),
            DOORBELL => {}
            _ => link.packets(sink),
        }
        if !link.is_closed() {
            self.activate(&link);
        }
    }

    fn next_alarm(&self) -> Option<Instant> {
        self.accept_retry.next()
    }

    fn park(&self) -> bool {
        let PolledShmLinks { links, .. } = &mut *self.polled.lock();
        if self.shared.has_scheduled.load(Ordering::SeqCst) {
            return false;
        }
        if !links.iter().all(|entry| entry.link.fall_asleep()) {
            links.iter().for_each(|entry| entry.link.awake());
            return false;
        }
        links.retain(|entry| entry.empty < COLD_AFTER);
        self.polled_count.store(links.len(), Ordering::Relaxed);
        true
    }

    fn unpark(&self) {
        self.polled.lock().links.iter().for_each(|entry| entry.link.awake());
    }

    #[cfg(test)]
    fn is_locked(&self) -> bool {
        self.polled.is_held()
    }
}
