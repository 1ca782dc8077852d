//! One link: a conversation with one peer's endpoint, by messages that both number in sequence.

mod arriving;
mod dialling;
mod eager;
mod leaving;
mod rma;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use super::OfiShared;
use super::backlog::Backlog;
use super::bulk::{BulkEndpoint, BulkOwner};
use super::limits::{CHUNK, CREDITS, EAGER, GRACE, HELLO_AGAIN, LINGER, MESSAGE, RECEIVES, REPLIES, RETRY, RETRY_SLOWLY};
use super::outbox::{FrameProgress, OfiOutbox, OfiSend};
use super::port::{PeerName, Port};
use super::wire::{FurtherParts, OfiContent, OfiHeader, OfiHello};
use crate::address::OfiProvider;
use crate::deferred_log::defer;
use crate::memory::Slice;
use crate::sync::Mutex;
use crate::transport::{Link, LinkKey, OtherVersion, RemoteKeys, Sent, Sink, closed_by_peer};
use crate::{Address, Transport, random};
use arriving::OfiInbox;
pub(super) use arriving::SlotContent;
use dialling::Dialling;
use leaving::Leaving;
use rma::RmaTransfers;

pub(super) struct OfiLink {
    pub key: LinkKey,
    /// By which the peer's messages name it: random, so that only the peer knows it.
    pub number: u64,
    me: Weak<OfiLink>,
    shared: Arc<OfiShared>,
    port: Arc<Port>,
    /// Where the peer is.
    remote: SocketAddr,
    /// The peer's endpoint, once its name is known.
    peer: OnceLock<PeerName>,
    /// For a link that was accepted: the peer's incarnation, and its number of the link.
    pub accepted_as: Option<(u64, u64)>,
    connected: AtomicBool,
    closed: AtomicBool,
    /// When closing began.
    closing: Mutex<Option<Instant>>,
    /// The shared timer calls [`OfiLink::on_timer`].
    timed: AtomicBool,
    /// Payloads have checksums.
    covered: AtomicBool,
    dialling: Mutex<Option<Dialling>>,
    cause: Mutex<Option<io::Error>>,
    /// The peer's process has ended: when the link ends, too.
    ended: Mutex<Option<Instant>>,
    /// When the peer's hello was answered last.
    answered: Mutex<Option<Instant>>,
    out: Mutex<OfiOutbox>,
    /// Payloads that the peer is ready for.
    leaving: Mutex<Leaving>,
    inbox: Mutex<OfiInbox>,
    bulk: Mutex<Option<Arc<BulkEndpoint>>>,
    /// What the keys of the peer's memory name its endpoint by, where RMA is possible.
    target: OnceLock<u64>,
    rma: Mutex<RmaTransfers>,
}

impl OfiLink {
    pub(super) fn new(
        shared: &Arc<OfiShared>,
        port: &Arc<Port>,
        key: LinkKey,
        remote: SocketAddr,
        peer: Option<PeerName>,
        accepted_as: Option<(u64, u64)>,
    ) -> io::Result<Arc<OfiLink>> {
        let number = u64::from_ne_bytes(random::from_system()?).max(1);
        let first_tag = u64::from_ne_bytes(random::from_system()?);
        port.add_receives(RECEIVES)?;
        let out = OfiOutbox::new(peer.as_ref());
        let link = Arc::new_cyclic(|me| OfiLink {
            key,
            number,
            me: me.clone(),
            shared: shared.clone(),
            port: port.clone(),
            remote,
            peer: peer.map_or_else(OnceLock::new, OnceLock::from),
            accepted_as,
            connected: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            closing: Mutex::default(),
            timed: AtomicBool::new(false),
            covered: AtomicBool::new(false),
            dialling: Mutex::default(),
            cause: Mutex::default(),
            ended: Mutex::default(),
            answered: Mutex::default(),
            out: Mutex::new(out),
            leaving: Mutex::default(),
            inbox: Mutex::new(OfiInbox::new(first_tag)),
            bulk: Mutex::default(),
            target: OnceLock::new(),
            rma: Mutex::default(),
        });
        shared.add(&link);
        Ok(link)
    }

    /// A peer has dialled.
    pub(super) fn accept(shared: &Arc<OfiShared>, port: &Arc<Port>, hello: OfiHello<'_>, peer: PeerName, sink: &mut dyn Sink) {
        let (remote, accepted_as) = (peer.socket(), (hello.incarnation, hello.link));
        let key = sink.accepted(Address::ofi(port.station.provider, remote));
        match OfiLink::new(shared, port, key, remote, Some(peer), Some(accepted_as)) {
            Ok(link) => {
                shared.watch.lock().accepted(accepted_as, link.number);
                link.out.lock().open(hello.link, hello.credits, hello.message);
                link.connected.store(true, Ordering::Release);
                sink.attach(key, link.clone());
                link.accept_again();
                sink.chunk(key, CHUNK);
                link.peer_is_target(hello.rma, sink);
            }
            Err(error) => sink.closed(key, error),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether its messages go through this port.
    pub(super) fn is_of(&self, port: &Arc<Port>) -> bool {
        Arc::ptr_eq(&self.port, port)
    }

    /// Whether the provider keeps its messages with these.
    pub(super) fn sends_with(&self, backlog: &Arc<Backlog>) -> bool {
        self.peer.get().is_some_and(|peer| Arc::ptr_eq(peer.backlog(), backlog))
    }

    /// Whether its peer is at this address.
    pub(super) fn is_from(&self, ip: IpAddr) -> bool {
        self.remote.ip() == ip
    }

    pub(super) fn provider(&self) -> OfiProvider {
        self.port.station.provider
    }

    /// The process of the peer has ended. What it sent before is handled first, since it may arrive on another way.
    pub(super) fn peer_has_ended(&self) {
        let at = Instant::now() + GRACE;
        self.ended.lock().get_or_insert(at);
        self.wants_timer(at);
    }

    fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    /// This side's parameters.
    fn hello(&self) -> OfiHello<'_> {
        OfiHello {
            versions: self.shared.versions,
            message: MESSAGE as u32,
            credits: CREDITS as u16,
            incarnation: self.shared.incarnation,
            link: self.number,
            watch: self.port.watch,
            rma: self.port.rma.as_ref().map_or(0, |rma| rma.number),
            name: self.port.name().bytes(),
        }
    }

    /// Dials: where the name of the peer's endpoint is not known, the peer is asked for it first.
    pub(super) fn dial(&self) {
        let known = self.peer.get().is_some();
        let begun = if known { self.say_hello() } else { self.shared.greet(self, self.remote, true) };
        if let Err(error) = begun {
            self.fail(error);
        }
    }

    /// The peer has told the name of its endpoint.
    pub(super) fn peer_is_named(&self, name: &[u8], sink: &mut dyn Sink) {
        if self.is_closed() {
            return;
        }
        let named = PeerName::insert(&self.port, name, Some(self.remote)).and_then(|peer| {
            *self.out.lock() = OfiOutbox::new(Some(&peer));
            // It is told once.
            let _ = self.peer.set(peer);
            self.say_hello()
        });
        if let Err(error) = named {
            self.report_failure(error, sink);
        }
    }

    /// The hello is repeated until there is an answer.
    fn say_hello(&self) -> io::Result<()> {
        let now = Instant::now();
        *self.dialling.lock() = Some(Dialling::new(now, self.provider(), self.remote));
        self.out.lock().send_hello(&self.port, &OfiContent::Hello(self.hello()))?;
        self.wants_timer(now + RETRY);
        Ok(())
    }

    /// Answers a hello.
    pub(super) fn accept_again(&self) {
        let now = Instant::now();
        let mut answered = self.answered.lock();
        // What a dialler does not read stays with the provider.
        let is_early = answered.is_some_and(|answered| now.saturating_duration_since(answered) < HELLO_AGAIN / 2);
        if self.is_closed() || is_early {
            return;
        }
        *answered = Some(now);
        drop(answered);
        let sent = self.out.lock().send_hello(&self.port, &OfiContent::Accept(self.hello()));
        self.check_sent(sent);
    }

    /// The peer has accepted.
    fn accepted(&self, hello: OfiHello<'_>, sink: &mut dyn Sink) -> io::Result<()> {
        if self.is_connected() {
            // It has answered twice.
            return Ok(());
        }
        if !hello.suits(self.shared.versions) {
            return Err(other_version(hello.versions));
        }
        *self.dialling.lock() = None;
        self.out.lock().open(hello.link, hello.credits, hello.message);
        self.connected.store(true, Ordering::Release);
        // Where names are opaque, the connection is there.
        if hello.watch != 0
            && !self.port.station.has_opaque_names()
            && let Err(error) = self.shared.greet(self, SocketAddr::new(self.remote.ip(), hello.watch), false)
        {
            defer(move || tracing::debug!(target: "calomel::ofi", %error, "a peer can't be watched"));
        }
        sink.connected(self.key);
        sink.chunk(self.key, CHUNK);
        self.peer_is_target(hello.rma, sink);
        Ok(())
    }

    fn refused(&self, versions: (u16, u16), reason: &[u8]) -> io::Result<()> {
        if self.is_connected() {
            return Ok(());
        }
        let spoken = self.shared.versions;
        if versions.0 > spoken.1 || versions.1 < spoken.0 {
            return Err(other_version(versions));
        }
        let reason: String = reason.utf8_chunks().map(|chunk| chunk.valid()).collect();
        Err(io::Error::new(io::ErrorKind::ConnectionRefused, format!("the peer refuses the connection: {reason}")))
    }

    /// The link has failed; the driver reports it. Callable from any thread.
    pub(super) fn fail(&self, cause: io::Error) {
        self.cause.lock().get_or_insert(cause);
        self.shared.schedule(self.me.upgrade());
    }

    /// Fails the link if a message could not be sent, and looks after those that the provider had no room for.
    fn check_sent(&self, sent: io::Result<()>) {
        if let Err(error) = sent {
            return self.fail(error);
        }
        if self.out.lock().blocked_since().is_some() {
            self.wants_timer(Instant::now() + RETRY);
        }
    }

    /// Reports the end of the link, once.
    pub(super) fn report_failure(&self, cause: io::Error, sink: &mut dyn Sink) {
        if self.is_closed() {
            return;
        }
        // What has told no name of an endpoint is no peer.
        if cause.kind() == io::ErrorKind::InvalidData && self.peer.get().is_some() {
            let (cause, remote) = (cause.to_string(), self.remote);
            let what = "a link is closed: its peer broke the protocol";
            defer(move || tracing::warn!(target: "calomel::ofi", cause, %remote, "{what}"));
        }
        self.close();
        sink.closed(self.key, cause);
    }

    /// Reports a failure that was noticed where it could not be reported.
    pub(super) fn report_pending_failure(&self, sink: &mut dyn Sink) {
        let cause = self.cause.lock().take();
        if let Some(cause) = cause {
            self.report_failure(cause, sink);
        }
    }

    /// A message of the peer has arrived.
    pub(super) fn message(&self, header: OfiHeader, content: OfiContent<'_>, further: FurtherParts<'_>, sink: &mut dyn Sink) {
        if self.is_closed() {
            return;
        }
        let taken = match content {
            OfiContent::Accept(hello) => self.accepted(hello, sink),
            OfiContent::Refuse { versions, reason } => self.refused(versions, reason),
            // The answer to the hello was lost, and comes again.
            _ if !self.is_connected() => Ok(()),
            content => self.take_message(header, content, further, sink),
        };
        if let Err(error) = taken {
            self.report_failure(error, sink);
        }
    }

    fn take_message(
        &self,
        header: OfiHeader,
        first: OfiContent<'_>,
        further: FurtherParts<'_>,
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        let mut credited = first.is_credited();
        {
            let mut inbox = self.inbox.lock();
            inbox.check_sequence(header.sequence)?;
            {
                let mut out = self.out.lock();
                out.take_handled(header.handled)?;
                if credited {
                    out.check_credit()?;
                }
            }
            for part in std::iter::once(Ok(first)).chain(further) {
                let part = part?;
                if part.is_credited() && !credited {
                    self.out.lock().check_credit()?;
                    credited = true;
                }
                self.take_part(&mut inbox, part, sink)?;
                if self.is_closed() {
                    return Ok(());
                }
            }
        }
        if credited {
            let sent = self.out.lock().count_handled(&self.port);
            self.check_sent(sent);
        }
        self.resume(sink)
    }

    fn take_part(&self, inbox: &mut OfiInbox, part: OfiContent<'_>, sink: &mut dyn Sink) -> io::Result<()> {
        match part {
            OfiContent::Bytes(bytes) => _ = inbox.feed(self.key, bytes, sink)?,
            OfiContent::Payload { bytes, sum } => inbox.deliver(self.key, Some((bytes, sum)), sink)?,
            OfiContent::SourceGone => inbox.deliver(self.key, None, sink)?,
            OfiContent::Announce { number, len, covered, name, bytes } => {
                if bytes.is_empty() || inbox.feed(self.key, bytes, sink)? {
                    self.payload_announced(inbox, number, len as usize, covered, name, sink)?;
                }
            }
            OfiContent::Eager { number, len, covered, slot, bytes } => {
                if bytes.is_empty() || inbox.feed(self.key, bytes, sink)? {
                    self.payload_comes(inbox, number, len as usize, covered, slot, sink)?;
                }
            }
            OfiContent::Slots { tag, count, name } => self.peer_has_slots(tag, count, name)?,
            OfiContent::Ready { number, tag, name } => self.peer_is_ready(number, tag, name)?,
            OfiContent::Taken { number } => self.payload_taken(number, sink)?,
            OfiContent::Emptied { slot } => self.slot_is_emptied(slot, sink)?,
            OfiContent::Bye => return Err(closed_by_peer()),
            OfiContent::Credit | OfiContent::Hello(_) | OfiContent::Accept(_) | OfiContent::Refuse { .. } => {}
        }
        Ok(())
    }

    /// What it sends from now on waits for the end of the driver's pass, and goes out together.
    pub(super) fn hold(&self) {
        if self.out.lock().hold() {
            self.shared.add_held(self.me.upgrade());
        }
    }

    /// It has sent or received a large payload.
    pub(super) fn has_bulk(&self) -> bool {
        self.opened_bulk().is_some()
    }

    fn opened_bulk(&self) -> Option<Arc<BulkEndpoint>> {
        self.bulk.lock().clone()
    }

    /// The driver's pass is over, or this link has waited long enough for more to say. False when it waits on.
    pub(super) fn release_held(&self, long_enough: bool) -> bool {
        if self.is_closed() {
            return true;
        }
        let released = self.out.lock().release(&self.port, long_enough);
        let sent = released.and_then(|released| self.send_eager().map(|()| released));
        let released = *sent.as_ref().unwrap_or(&true);
        self.check_sent(sent.map(drop));
        released
    }

    /// The provider keeps fewer of its messages.
    pub(super) fn continue_sending(&self, sink: &mut dyn Sink) {
        if self.is_closed() {
            return;
        }
        let flushed = self.out.lock().flush(&self.port);
        if let Err(error) = flushed.map(drop).and_then(|()| self.resume(sink)) {
            self.report_failure(error, sink);
        }
    }

    /// Continues with what waited for credit, or for the provider.
    fn resume(&self, sink: &mut dyn Sink) -> io::Result<()> {
        let (sent, lent) = {
            let mut out = self.out.lock();
            let Some(mut sending) = out.pending.take() else { return Ok(()) };
            match self.write(&mut out, &mut sending)? {
                FrameProgress::Partly => {
                    out.pending = Some(sending);
                    drop(out);
                    // The provider may have had no room.
                    self.check_sent(Ok(()));
                    return Ok(());
                }
                FrameProgress::All => (sending, false),
                FrameProgress::PayloadAnnounced => (sending, true),
            }
        };
        self.send_eager()?;
        self.check_sent(Ok(()));
        sink.sent(self.key, sent.bytes, lent);
        Ok(())
    }

    fn begin_send(&self, mut sending: OfiSend) -> io::Result<Sent> {
        let (written, waits) = {
            let mut out = self.out.lock();
            let written = self.write(&mut out, &mut sending)?;
            if matches!(written, FrameProgress::Partly) {
                out.pending = Some(sending);
                drop(out);
                self.check_sent(Ok(()));
                return Ok(Sent::Later);
            }
            let waits = out.begins_to_wait();
            if waits {
                // Under the lock: the driver must not take this link for one that is listed before it is.
                self.shared.add_held(self.me.upgrade());
            }
            (written, waits)
        };
        if waits && self.shared.parked.load(Ordering::SeqCst) {
            // The driver has gone to sleep meanwhile, and may not have seen it.
            self.shared.release_held(true);
        }
        self.check_sent(self.send_eager());
        Ok(if matches!(written, FrameProgress::All) { Sent::All(sending.bytes) } else { Sent::Lent(sending.bytes) })
    }

    fn write(&self, out: &mut OfiOutbox, sending: &mut OfiSend) -> io::Result<FrameProgress> {
        let covered = self.covered.load(Ordering::Relaxed);
        let written = out.write(&self.port, sending, covered, || {
            let bulk = self.bulk()?;
            Ok(bulk.name().to_vec())
        })?;
        if matches!(written, FrameProgress::PayloadAnnounced) {
            self.shared.begin_payload(&self.bulk()?);
        }
        Ok(written)
    }

    /// The link's bulk endpoint, opened when it is first needed.
    fn bulk(&self) -> io::Result<Arc<BulkEndpoint>> {
        let mut slot = self.bulk.lock();
        if let Some(bulk) = &*slot {
            return Ok(bulk.clone());
        }
        if self.is_closed() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let bulk = self.shared.open_bulk(&self.port, self.remote, self.me.clone(), false)?;
        self.port.add_receives(REPLIES)?;
        Ok(slot.insert(bulk).clone())
    }

    /// [`OfiLink::on_timer`] is to be called then, or earlier.
    pub(super) fn wants_timer(&self, at: Instant) {
        let new = !self.timed.swap(true, Ordering::AcqRel);
        self.shared.set_timer(new.then(|| self.me.upgrade()).flatten(), at);
    }

    /// Continues with what waits for the provider, or for a time. Returns when to call it again.
    pub(super) fn on_timer(&self, now: Instant, sink: &mut dyn Sink) -> Option<Instant> {
        // What is set from now on is seen below, or by the next call.
        self.timed.store(false, Ordering::Release);
        self.timer(now, sink).unwrap_or_else(|error| {
            self.report_failure(error, sink);
            None
        })
    }

    fn timer(&self, now: Instant, sink: &mut dyn Sink) -> io::Result<Option<Instant>> {
        if self.is_closed() {
            return Ok(self.linger(now));
        }
        let mut next = Vec::new();
        let ended = *self.ended.lock();
        if ended.is_some_and(|due| now >= due) {
            return Err(closed_by_peer());
        }
        next.extend(ended);
        {
            let mut dialling = self.dialling.lock();
            if let Some(dialling) = &mut *dialling {
                if dialling.is_due(now)? {
                    self.out.lock().send_hello(&self.port, &OfiContent::Hello(self.hello()))?;
                }
                next.push(dialling.next(now));
            }
        }
        {
            let mut out = self.out.lock();
            out.flush(&self.port)?;
            // A peer that takes nothing for long may be dead: the engine's heartbeat decides that.
            let pace = |since: Instant| if now > since + HELLO_AGAIN { RETRY_SLOWLY } else { RETRY };
            next.extend(out.blocked_since().map(|since| now + pace(since)));
        }
        if self.retry_payloads(sink)? {
            next.push(now + RETRY);
        }
        next.extend(self.check_transfers(now, sink));
        let bulk = self.bulk.lock().clone();
        next.extend(bulk.and_then(|bulk| bulk.check_deadline(now)));
        next.extend(self.inbox.lock().check_stall(now)?);
        Ok(next.into_iter().min())
    }

    /// Sends what is left of a closed link, within a bound. Returns when to call it again; `None`: all is sent.
    pub(super) fn linger(&self, now: Instant) -> Option<Instant> {
        let mut closing = self.closing.lock();
        let since = (*closing)?;
        let flushed = self.out.lock().flush(&self.port).unwrap_or(true);
        if !flushed && now < since + LINGER {
            return Some(now + RETRY);
        }
        *closing = None;
        self.out.lock().clear(&self.port);
        self.shared.lingering(-1);
        self.release();
        None
    }

    /// The link does not need its port any more.
    fn release(&self) {
        self.port.remove_receives(RECEIVES);
        self.shared.close_unused_ports();
    }
}

pub(super) fn other_version((low, high): (u16, u16)) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, OtherVersion { low, high })
}

impl BulkOwner for OfiLink {
    fn bulk_failed(&self, bulk: &BulkEndpoint, cause: io::Error) {
        if bulk.rma {
            self.end_transfers_of(bulk, &cause);
        } else {
            self.fail(cause);
        }
    }

    fn bulk_collected(&self) {
        self.shared.wake();
    }

    fn bulk_deadline(&self, at: Instant) {
        self.wants_timer(at);
    }
}

impl Link for OfiLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        if self.is_closed() {
            return Sent::Failed(io::Error::new(io::ErrorKind::NotConnected, "the link is closed"));
        }
        self.begin_send(OfiSend::new(bytes, payload)).unwrap_or_else(|error| {
            let reported = io::Error::new(error.kind(), error.to_string());
            self.fail(error);
            Sent::Failed(reported)
        })
    }

    fn more_follows(&self) {
        // A driver that sleeps does not look after what waits.
        if self.gathers() && !self.shared.parked.load(Ordering::SeqCst) {
            self.out.lock().expect_more();
        }
    }

    /// Those that go to a slot. Others are cut into messages, which are full without company.
    fn gathers(&self) -> bool {
        self.port.longest_in_messages() < EAGER
    }

    fn scheme(&self) -> Transport {
        Transport::Ofi(self.provider())
    }

    fn is_local(&self) -> bool {
        let (own, peer) = (self.port.station.socket.ip(), self.remote.ip());
        own == peer || peer.is_loopback()
    }

    fn cover_payloads(&self) {
        self.covered.store(true, Ordering::Relaxed);
    }

    /// Unknown: the provider reports when it has taken a message, not what the peer's has acknowledged.
    fn acknowledged(&self) -> u64 {
        0
    }

    fn begin_rma(&self, operation: u64, pull: bool, local: &Slice, keys: &RemoteKeys, offset: u64) -> bool {
        self.begin_transfer(operation, pull, local, keys, offset)
    }

    fn end_rma(&self, operation: u64) {
        self.stop_transfer(operation);
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let lingers = {
            let mut out = self.out.lock();
            out.pending = None;
            let said = self.is_connected()
                && out.send(&self.port, &OfiContent::Bye).and_then(|()| out.release(&self.port, true)).is_ok();
            said && out.blocked_since().is_some()
        };
        let now = Instant::now();
        if lingers {
            *self.closing.lock() = Some(now);
            self.shared.lingering(1);
        } else {
            self.out.lock().clear(&self.port);
        }
        *self.leaving.lock() = Leaving::default();
        self.close_rma();
        let bulk = self.bulk.lock().take();
        if let Some(bulk) = bulk {
            self.port.remove_receives(REPLIES);
            bulk.close();
            self.shared.forget_bulk(&bulk);
        }
        self.shared.remove(self);
        if lingers {
            self.wants_timer(now);
        } else {
            self.release();
        }
    }
}
