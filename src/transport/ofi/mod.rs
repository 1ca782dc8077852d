//! `ofi+PROVIDER://`: fabrics by way of libfabric.
//!
//! A link is a conversation between two reliable datagram endpoints, which many links share; its large payloads go between two
//! further endpoints, straight from memory to memory: see README.md in this folder, which explains links, credits, payloads,
//! what providers do not do, and the order in which objects are closed.

mod backlog;
mod bulk;
mod dispatch;
mod limits;
mod link;
mod outbox;
mod port;
mod provider;
mod self_test;
mod station;
mod sys;
#[cfg(test)]
#[path = "../../../tests/unit/ofi.rs"]
mod tests;
mod watch;
mod wire;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use mio::Token;
use mio::net::TcpListener;

use super::{
    Capabilities, DeviceAccess, Link, LinkKey, Reactor, RemoteKeys, Sink, TransportDriver, resolve, resolve_to_listen,
    source_towards,
};
use crate::address::OfiProvider;
use crate::deferred_log::defer;
use crate::fork::CreatorProcess;
use crate::memory::Region;
use crate::sync::{Mutex, RwLock};
use crate::{Address, Error, Result, Transport};
use bulk::{BulkEndpoint, BulkOwner};
use limits::{LINGER, MOST_POLLS, MOST_SEGMENTS};
use link::OfiLink;
use port::{PeerName, Port};
use self_test::RmaLimits;
use station::Station;
use sys::{Info, Purpose, RemoteRights};
use watch::{Dialled, Home, Watch, WatchEvent};
use wire::{Greeting, OfiHello};

pub(crate) struct Ofi {
    shared: Arc<OfiShared>,
}

/// What links and ports share with their transport.
struct OfiShared {
    registry: mio::Registry,
    waker: Arc<mio::Waker>,
    first_token: usize,
    incarnation: u64,
    /// Lowest and highest protocol version that this engine supports.
    versions: (u16, u16),
    /// Peers must have a pre-shared key, for which a device does not ask.
    guarded: bool,
    ports: RwLock<Vec<Arc<Port>>>,
    /// Ports that there are, or were.
    count: AtomicUsize,
    /// How often a port was opened that is a target of RMA.
    targets: AtomicU32,
    /// Links by their numbers here.
    links: Mutex<BTreeMap<u64, Arc<OfiLink>>>,
    /// The numbers of accepted links, by the peer's incarnation and its number: a hello may arrive again.
    accepted: Mutex<HashMap<(u64, u64), u64>>,
    /// Bulk endpoints with payloads under way, which are polled.
    bulks: Mutex<Vec<Arc<BulkEndpoint>>>,
    watch: Mutex<Watch>,
    /// Links that have failed where it could not be reported.
    scheduled: Mutex<Vec<Arc<OfiLink>>>,
    /// Links whose messages wait for the end of the driver's pass, for company, or for a frame that is to follow; and how often
    /// the driver has polled since.
    held: Mutex<Vec<Arc<OfiLink>>>,
    /// `held` is not empty.
    has_held: AtomicBool,
    polls_since: AtomicU32,
    /// Links that wait for a time, and the next time.
    timed: Mutex<Vec<Arc<OfiLink>>>,
    alarm: Mutex<Option<Instant>>,
    /// There is an alarm.
    has_alarm: AtomicBool,
    /// No links are accepted any more: the engine ends.
    ending: AtomicBool,
    /// Closed links that have something left to send.
    lingering: AtomicUsize,
    /// `scheduled` is not empty, or completions were taken by a thread that does not drive.
    pending_flags: AtomicBool,
    parked: AtomicBool,
    process: CreatorProcess,
}

impl OfiShared {
    /// Has the driver poll.
    fn wake(&self) {
        self.pending_flags.store(true, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst)
            && let Err(error) = self.waker.wake()
        {
            defer(move || tracing::error!(target: "calomel::ofi", %error, "can't wake a parked engine"));
        }
    }

    fn schedule(&self, link: Option<Arc<OfiLink>>) {
        self.scheduled.lock().extend(link);
        self.wake();
    }

    /// Has the driver call [`OfiLink::release_held`].
    fn add_held(&self, link: Option<Arc<OfiLink>>) {
        let mut held = self.held.lock();
        held.extend(link);
        self.has_held.store(true, Ordering::SeqCst);
    }

    /// Has the links send what they have gathered.
    fn release_held(&self, long_enough: bool) {
        if !self.has_held.load(Ordering::Acquire) {
            return;
        }
        let mut held = {
            let mut held = self.held.lock();
            self.has_held.store(false, Ordering::Release);
            std::mem::take(&mut *held)
        };
        held.retain(|link| !link.release_held(long_enough));
        if held.is_empty() {
            self.polls_since.store(0, Ordering::Relaxed);
        } else {
            held.into_iter().for_each(|link| self.add_held(Some(link)));
        }
    }

    /// Has [`OfiLink::on_timer`] called at this time, for `link` and for those that were added before.
    fn set_timer(&self, link: Option<Arc<OfiLink>>, at: Instant) {
        if let Some(link) = link {
            self.timed.lock().push(link);
        }
        let mut alarm = self.alarm.lock();
        if alarm.is_none_or(|alarm| at < alarm) {
            *alarm = Some(at);
            self.has_alarm.store(true, Ordering::Release);
            drop(alarm);
            if self.parked.load(Ordering::SeqCst) {
                self.wake();
            }
        }
    }

    /// From now on a payload of this endpoint is under way.
    fn begin_payload(&self, bulk: &Arc<BulkEndpoint>) {
        if !bulk.begin_payload() {
            return;
        }
        {
            let mut bulks = self.bulks.lock();
            if !bulks.iter().any(|other| Arc::ptr_eq(other, bulk)) {
                bulks.push(bulk.clone());
            }
        }
        self.wake();
    }

    fn forget_bulk(&self, bulk: &Arc<BulkEndpoint>) {
        self.bulks.lock().retain(|other| !Arc::ptr_eq(other, bulk));
    }

    fn lingering(&self, change: isize) {
        self.lingering.fetch_add(change as usize, Ordering::AcqRel);
    }

    fn add(&self, link: &Arc<OfiLink>) {
        self.links.lock().insert(link.number, link.clone());
        if let Some(key) = link.accepted_as {
            self.accepted.lock().insert(key, link.number);
        }
    }

    fn remove(&self, link: &OfiLink) {
        let removed = self.links.lock().remove(&link.number);
        drop(removed);
        if let Some(key) = link.accepted_as {
            self.accepted.lock().remove(&key);
        }
        self.watch.lock().forget(link.number);
    }

    /// Closes the ports that no link needs, once the engine ends: its address is free then, and dials there are refused.
    fn close_unused_ports(&self) {
        if !self.ending.load(Ordering::Acquire) {
            return;
        }
        let unused: Vec<Arc<Port>> = self.ports.write().extract_if(.., |port| !port.is_in_use()).collect();
        unused.iter().for_each(|port| port.finish());
    }

    /// The port's provider has failed: it is not polled any more, and no address leads to it.
    fn give_up(&self, port: &Arc<Port>) {
        self.ports.write().retain(|other| !Arc::ptr_eq(other, port));
        self.watch.lock().forget_name(port.name().bytes());
        port.station.close();
    }

    fn link(&self, number: u64) -> Option<Arc<OfiLink>> {
        self.links.lock().get(&number).cloned()
    }

    fn accepted_link(&self, key: (u64, u64)) -> Option<Arc<OfiLink>> {
        let number = *self.accepted.lock().get(&key)?;
        self.link(number)
    }

    fn all_links(&self) -> Vec<Arc<OfiLink>> {
        self.links.lock().values().cloned().collect()
    }

    fn is_forked_child(&self) -> bool {
        self.process.is_forked_child()
    }

    fn all_ports(&self) -> Vec<Arc<Port>> {
        self.ports.read().clone()
    }

    /// Opens an endpoint at an address of this host.
    fn open(self: &Arc<Self>, provider: OfiProvider, socket: SocketAddr, listens: bool) -> io::Result<Arc<Port>> {
        let rma = self_test::rma_limits(provider, socket, self.guarded);
        // Another device than that which was tested may have no RMA.
        let target = rma.and_then(|limits| Some((provider::at(provider, socket, Purpose::RmaTarget).ok()?, Some(limits))));
        let (info, rma) = match target {
            Some(found) => found,
            None => (provider::at(provider, socket, Purpose::Messages)?, None),
        };
        if info.opaque_names {
            return self.open_under_a_name(provider, info, socket, listens, rma);
        }
        let station = self.open_station(provider, info, socket)?;
        let watch = if listens { self.listen_for_watchers(&station) } else { Ok(0) };
        let watch = watch.unwrap_or_else(|error| {
            defer(move || tracing::debug!(target: "calomel::ofi", %error, "peers can't watch this engine"));
            0
        });
        let port = Port::open(station, listens, watch, rma)?;
        self.add_port(&port);
        Ok(port)
    }

    /// As `open`: the provider chooses the name, and a listener tells it at the address.
    fn open_under_a_name(
        self: &Arc<Self>,
        provider: OfiProvider,
        info: Info,
        socket: SocketAddr,
        listens: bool,
        rma: Option<RmaLimits>,
    ) -> io::Result<Arc<Port>> {
        let listener = if listens { Some(TcpListener::bind(socket)?) } else { None };
        let at = listener.as_ref().map_or(Ok(socket), TcpListener::local_addr)?;
        let port = Port::open(self.open_station(provider, info, at)?, listens, 0, rma)?;
        self.add_port(&port);
        if let Some(listener) = listener {
            // Told only now: those who know the name may say hello at once.
            let told = self.answer_at(listener, provider, Some(port.name().bytes().to_vec()));
            told.inspect_err(|_| self.give_up(&port))?;
        }
        Ok(port)
    }

    fn add_port(&self, port: &Arc<Port>) {
        self.ports.write().push(port.clone());
        if port.rma.is_some() {
            self.targets.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn listen_for_watchers(&self, station: &Station) -> io::Result<u16> {
        let listener = TcpListener::bind(SocketAddr::new(station.socket.ip(), 0))?;
        let port = listener.local_addr()?.port();
        self.answer_at(listener, station.provider, None)?;
        Ok(port)
    }

    /// Answers greetings at this socket: with the name of the endpoint, where diallers have to ask for it.
    fn answer_at(&self, listener: TcpListener, provider: OfiProvider, name: Option<Vec<u8>>) -> io::Result<()> {
        let home = Home { provider, versions: self.versions, name };
        self.watch.lock().listen(&self.registry, self.token(), listener, home)
    }

    fn open_station(&self, provider: OfiProvider, info: Info, at: SocketAddr) -> io::Result<Station> {
        Station::open(provider, info, at, &self.registry, Token(self.token()))
    }

    /// A token of the reactor that is not in use.
    fn token(&self) -> usize {
        self.first_token + self.count.fetch_add(1, Ordering::Relaxed)
    }

    /// Connects to the TCP port of the peer of a link that is dialled, to watch it, or also to ask for the name of its endpoint.
    fn greet(&self, link: &OfiLink, peer: SocketAddr, asks: bool) -> io::Result<()> {
        let (provider, identity) = (Some(link.provider()), (self.incarnation, link.number));
        let greeting = Greeting { versions: self.versions, provider, link: identity };
        let dialled = Dialled { link: link.number, greeting, asks };
        self.watch.lock().dial(&self.registry, self.token(), peer, dialled)
    }

    /// The peer that says hello. An error where the name of its endpoint is not possible, or where it should have greeted and
    /// has not: what its name does not tell is known from that.
    fn peer_of(&self, port: &Arc<Port>, hello: &OfiHello<'_>) -> io::Result<PeerName> {
        if !port.station.has_opaque_names() {
            return PeerName::insert(port, hello.name, None);
        }
        let from = self.watch.lock().greeted_from((hello.incarnation, hello.link));
        let from = from.ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "it comes without a greeting"))?;
        PeerName::insert(port, hello.name, Some(from))
    }

    /// Closes connections of strangers that have had their time. Sets the timer for the others.
    fn tidy_watch(&self, now: Instant) {
        let next = {
            let mut watch = self.watch.lock();
            watch.tidy(&self.registry, now, || self.token());
            watch.next(now)
        };
        if let Some(at) = next {
            self.set_timer(None, at);
        }
    }

    /// A bulk endpoint for a link of this port, at the address from which packets to `remote` come; or one for its RMA.
    fn open_bulk(&self, port: &Port, remote: SocketAddr, owner: Weak<dyn BulkOwner>, rma: bool) -> io::Result<Arc<BulkEndpoint>> {
        let own = port.station.socket.ip();
        let ip = if own.is_unspecified() { source_towards(remote)? } else { own };
        let at = SocketAddr::new(ip, 0);
        let provider = port.station.provider;
        let info = if rma { provider::at(provider, at, Purpose::RmaInitiator)? } else { port.station.domain.info.at(at)? };
        Ok(BulkEndpoint::open(self.open_station(provider, info, at)?, owner, rma))
    }

    /// The endpoint from which this address is dialled.
    fn port_towards(self: &Arc<Self>, provider: OfiProvider, remote: SocketAddr) -> io::Result<Arc<Port>> {
        let source: IpAddr = source_towards(remote)?;
        // An endpoint with an opaque name is at no IP address.
        let suits = |port: &&Arc<Port>| {
            let Station { provider: of, socket, .. } = &port.station;
            *of == provider && (port.station.has_opaque_names() || socket.ip() == source)
        };
        if let Some(port) = self.ports.read().iter().find(suits) {
            return Ok(port.clone());
        }
        self.open(provider, SocketAddr::new(source, 0), false)
    }
}

impl Ofi {
    /// `guarded`: peers must have a pre-shared key.
    pub(crate) fn new(reactor: Reactor, incarnation: u64, versions: (u16, u16), guarded: bool) -> Ofi {
        let Reactor { registry, waker, first_token } = reactor;
        Ofi {
            shared: Arc::new(OfiShared {
                registry,
                waker,
                first_token,
                incarnation,
                versions,
                guarded,
                ports: RwLock::default(),
                count: AtomicUsize::new(0),
                targets: AtomicU32::new(0),
                links: Mutex::default(),
                accepted: Mutex::default(),
                bulks: Mutex::default(),
                watch: Mutex::default(),
                scheduled: Mutex::default(),
                held: Mutex::default(),
                has_held: AtomicBool::new(false),
                polls_since: AtomicU32::new(0),
                timed: Mutex::default(),
                alarm: Mutex::default(),
                has_alarm: AtomicBool::new(false),
                ending: AtomicBool::new(false),
                lingering: AtomicUsize::new(0),
                pending_flags: AtomicBool::new(false),
                parked: AtomicBool::new(false),
                process: CreatorProcess::this(),
            }),
        }
    }

    /// Reports failures, and ends of transfers, that were noticed elsewhere. True when there were any.
    fn run_scheduled(&self, sink: &mut dyn Sink) -> bool {
        if !self.shared.pending_flags.swap(false, Ordering::SeqCst) {
            return false;
        }
        let scheduled = std::mem::take(&mut *self.shared.scheduled.lock());
        for link in scheduled {
            link.report_transfers(sink);
            link.report_pending_failure(sink);
        }
        true
    }

    /// Calls the links whose time has come.
    fn run_timers(&self, sink: &mut dyn Sink) {
        if !self.shared.has_alarm.load(Ordering::Acquire) {
            return;
        }
        let now = Instant::now();
        {
            let mut alarm = self.shared.alarm.lock();
            if alarm.is_none_or(|alarm| now < alarm) {
                return;
            }
            *alarm = None;
            self.shared.has_alarm.store(false, Ordering::Release);
        }
        self.shared.tidy_watch(now);
        let timed = std::mem::take(&mut *self.shared.timed.lock());
        for link in timed {
            if let Some(at) = link.on_timer(now, sink) {
                link.wants_timer(at);
            }
        }
    }
}

fn provider_of(address: &Address) -> io::Result<OfiProvider> {
    match address.scheme() {
        Transport::Ofi(provider) => Ok(provider),
        other => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{other} is no transport of libfabric"))),
    }
}

impl TransportDriver for Ofi {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: Transport::Ofi(OfiProvider::Tcp) }
    }

    fn serves(&self, scheme: Transport) -> bool {
        matches!(scheme, Transport::Ofi(_))
    }

    fn available(&self, scheme: Transport) -> Result<()> {
        let Transport::Ofi(provider) = scheme else { return Ok(()) };
        provider::available(provider).map_err(|reason| Error::Unsupported { what: format!("transport {scheme}"), reason })
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        match address.scheme() {
            Transport::Ofi(provider) => Ok(Address::ofi(provider, resolve(address)?)),
            _ => Ok(address.clone()),
        }
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        let failed = |error| Error::io(format!("can't listen at {address}"), error);
        let provider = provider_of(address).map_err(failed)?;
        let socket = resolve_to_listen(address)?;
        let port = self.shared.open(provider, socket, true).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => Error::AddressInUse { address: address.clone() },
            _ => failed(error),
        })?;
        Ok(Address::ofi(provider, port.station.socket))
    }

    fn devices(&self) -> u32 {
        self.shared.targets.load(Ordering::Acquire)
    }

    /// Registers the memory at each port that is a target. Where a provider can't register it, it is moved by its owner.
    fn expose(&self, region: &Region, access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        let DeviceAccess { read, write, .. } = access;
        let mut keys = Vec::new();
        if region.len() > 0 && region.segment_count() <= MOST_SEGMENTS {
            for port in self.shared.all_ports() {
                match port.register(region, RemoteRights { read, write }) {
                    Some(Ok((number, registered))) => wire::encode_keys(number, registered.extents(), &mut keys),
                    Some(Err(error)) => defer(move || {
                        tracing::debug!(target: "calomel::ofi", %error, "memory can't be registered: its owner moves it");
                    }),
                    None => {}
                }
            }
        }
        Ok((!keys.is_empty()).then(|| keys.into()))
    }

    fn stop_listening(&self) {
        self.shared.ending.store(true, Ordering::Release);
        self.shared.watch.lock().stop_listening();
        self.shared.all_ports().iter().for_each(|port| port.listens.store(false, Ordering::Release));
        self.shared.close_unused_ports();
    }

    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        let provider = provider_of(address)?;
        let remote = address.socket().ok_or(io::ErrorKind::InvalidInput)?;
        let port = self.shared.port_towards(provider, remote)?;
        // Where names are opaque, the peer is asked for its.
        let peer = if port.station.has_opaque_names() { None } else { Some(PeerName::of_socket(&port, remote)?) };
        let link = OfiLink::new(&self.shared, &port, key, remote, peer, None)?;
        attach(link.clone());
        link.dial();
        self.shared.wake();
        Ok(())
    }

    fn poll(&self, sink: &mut dyn Sink) -> bool {
        let mut any = self.run_scheduled(sink);
        if self.shared.count.load(Ordering::Relaxed) == 0 {
            return any;
        }
        let ports: smallvec::SmallVec<[Arc<Port>; 4]> = self.shared.ports.read().iter().cloned().collect();
        for port in &ports {
            any |= dispatch::poll(&self.shared, port, sink);
        }
        let bulks: smallvec::SmallVec<[Arc<BulkEndpoint>; 4]> = self.shared.bulks.lock().iter().cloned().collect();
        for bulk in &bulks {
            any |= dispatch::poll_bulk(&self.shared, bulk, sink);
        }
        if !bulks.is_empty() {
            self.shared.bulks.lock().retain(|bulk| bulk.is_active());
        }
        // After what has arrived, which may be the last messages of a peer that has ended.
        self.run_timers(sink);
        if self.shared.has_held.load(Ordering::Acquire) {
            let polls = self.shared.polls_since.fetch_add(1, Ordering::Relaxed);
            self.shared.release_held(polls >= MOST_POLLS);
        }
        any
    }

    /// Ports are polled after each event.
    fn ready(&self, token: usize, _event: &mio::event::Event, sink: &mut dyn Sink) {
        let shared = &self.shared;
        let accepted = |link, from| shared.accepted_link(link).filter(|link| link.is_from(from)).map(|link| link.number);
        loop {
            let event = shared.watch.lock().ready(token, accepted);
            match event {
                WatchEvent::Accept => {
                    shared.watch.lock().accept(&shared.registry, token, || shared.token());
                    return shared.tidy_watch(Instant::now());
                }
                WatchEvent::Named { link, name } => {
                    if let Some(link) = shared.link(link) {
                        link.peer_is_named(&name, sink);
                    }
                    // It may have ended already.
                }
                WatchEvent::Failed { link, error } => {
                    if let Some(link) = shared.link(link) {
                        link.report_failure(error, sink);
                    }
                    return;
                }
                WatchEvent::Ended { link } => {
                    if let Some(link) = shared.link(link) {
                        link.peer_has_ended();
                    }
                    return;
                }
                WatchEvent::Nothing => return,
            }
        }
    }

    fn next_alarm(&self) -> Option<Instant> {
        if self.shared.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let nap = self.shared.ports.read().iter().filter_map(|port| port.nap()).min();
        let nap = nap.map(|nap| Instant::now() + nap);
        [nap, *self.shared.alarm.lock()].into_iter().flatten().min()
    }

    fn park(&self) -> bool {
        self.shared.release_held(true);
        self.shared.parked.store(true, Ordering::SeqCst);
        let bulks = self.shared.bulks.lock().clone();
        let quiet =
            self.shared.all_ports().iter().all(|port| port.station.park()) && bulks.iter().all(|bulk| bulk.station.park());
        // What another thread has gathered before it could see that this one sleeps.
        quiet && !self.shared.pending_flags.load(Ordering::SeqCst) && !self.shared.has_held.load(Ordering::SeqCst)
    }

    fn unpark(&self) {
        self.shared.parked.store(false, Ordering::SeqCst);
    }

    #[cfg(test)]
    fn is_locked(&self) -> bool {
        self.shared.all_ports().iter().any(|port| port.station.is_locked())
    }
}

impl Drop for Ofi {
    /// Messages are sent, within a bound; then all endpoints are closed.
    fn drop(&mut self) {
        if self.shared.is_forked_child() {
            return;
        }
        self.shared.all_links().iter().for_each(|link| link.close());
        let ports = std::mem::take(&mut *self.shared.ports.write());
        let until = Instant::now() + LINGER;
        let is_sending = || self.shared.lingering.load(Ordering::Acquire) > 0 || ports.iter().any(|port| port.is_sending());
        while is_sending() && Instant::now() < until {
            ports.iter().for_each(|port| port.drain());
            let closing = std::mem::take(&mut *self.shared.timed.lock());
            let now = Instant::now();
            let waits = closing.into_iter().filter(|link| link.linger(now).is_some());
            self.shared.timed.lock().extend(waits);
            std::thread::yield_now();
        }
        self.shared.timed.lock().clear();
        self.shared.scheduled.lock().clear();
        self.shared.held.lock().clear();
        self.shared.watch.lock().clear();
        ports.iter().for_each(|port| _ = port.station.close());
    }
}
