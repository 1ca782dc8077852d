//! One end of a shared-memory link: its handshake, its polls and its end.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::sync::Mutex;
use smallvec::SmallVec;

use super::super::{Credentials, Injected, Link, LinkKey, Sent, Sink, closed_by_peer};
use super::ShmShared;
use super::connection::{Connection, ProtocolViolation};
use super::handshake::{self, ControlPacket, Fds, PacketRead, ShmHello};
use super::mailbox::{ShmInbox, ShmOutbox, Turn, Written};
use super::process::{Doorbell, ShmPeer};
use super::segment::{RING, SharedSegment};
use super::sys;
use crate::Transport;
use crate::deferred_log::defer;
use crate::memory::Slice;

/// Longest payload, and so the most that a frame behind it waits for (some 5 µs). Twice and half as much were measured to be no
/// faster.
const CHUNK: usize = 128 << 10;

/// Packets read in one turn, and at most for one record: a peer that sends more does not delay other links.
const PACKETS: usize = 64;
const FETCHED: usize = 1024;

pub(super) struct ShmLink {
    key: LinkKey,
    /// The token of the socket; those of the pidfd and of the doorbell follow it.
    pub token: usize,
    pub socket: Arc<OwnedFd>,
    shared: Arc<ShmShared>,
    /// The `eventfd` that the peer writes to wake this side.
    pub doorbell: OnceLock<OwnedFd>,
    /// Set once the peer's segment is known.
    connection: OnceLock<Arc<Connection>>,
    stage: Mutex<ShmStage>,
    closed: AtomicBool,
    /// Why the link ends. What the peer sent before is still read.
    ending: Mutex<Option<io::Error>>,
    /// `ending` may be set; read without its lock.
    ends: AtomicBool,
    /// The socket may hold more packets.
    more: AtomicBool,
    /// The ring position up to which records are still read when the link ends.
    final_position: OnceLock<u64>,
    /// The handshake is over.
    opened: AtomicBool,
    /// The outbox waits for the peer, for room or for the end of a loan, or for the driver.
    waiting: AtomicBool,
    outbox: Mutex<Option<ShmOutbox>>,
    /// Used by the driver; other threads only look whether something has arrived.
    inbox: Mutex<Option<ShmInbox>>,
}

/// ```text
///   dialled:   Dialled ──Welcome──▶ Open        accepted:  Accepted ──Hello──▶ Welcomed ──Ready──▶ Open
/// ```
enum ShmStage {
    Dialled(Arc<SharedSegment>),
    Accepted,
    Welcomed,
    Open,
}

impl ShmLink {
    /// Creates the end that dials.
    pub(super) fn dial(key: LinkKey, token: usize, socket: OwnedFd, shared: Arc<ShmShared>) -> io::Result<ShmLink> {
        let (fd, mine) = SharedSegment::create()?;
        let doorbell = shared.doorbell(token);
        let own_user = sys::credentials(socket.as_fd())?.uid == shared.admission.uid;
        let hello = ControlPacket::Hello(shared.hello(own_user));
        match handshake::send(&socket, &hello, &hello_descriptors(&fd, doorbell.as_ref())) {
            // The peer has closed the socket already: its `Refused` has the reason, and is read as usual.
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            sent => sent?,
        }
        let link = ShmLink::new(key, token, socket, shared, ShmStage::Dialled(mine));
        doorbell.map(|doorbell| link.doorbell.set(doorbell));
        Ok(link)
    }

    /// Creates the end that was dialled.
    pub(super) fn accept(key: LinkKey, token: usize, socket: OwnedFd, shared: Arc<ShmShared>) -> ShmLink {
        ShmLink::new(key, token, socket, shared, ShmStage::Accepted)
    }

    fn new(key: LinkKey, token: usize, socket: OwnedFd, shared: Arc<ShmShared>, stage: ShmStage) -> ShmLink {
        ShmLink {
            key,
            token,
            socket: Arc::new(socket),
            shared,
            doorbell: OnceLock::new(),
            connection: OnceLock::new(),
            stage: Mutex::new(stage),
            closed: AtomicBool::new(false),
            ending: Mutex::new(None),
            ends: AtomicBool::new(false),
            more: AtomicBool::new(false),
            final_position: OnceLock::new(),
            opened: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            outbox: Mutex::new(None),
            inbox: Mutex::new(None),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends the link as soon as all that has arrived is read.
    pub(super) fn end(&self, cause: io::Error) {
        self.ending.lock().get_or_insert(cause);
        self.ends.store(true, Ordering::Release);
    }

    fn lose(&self, cause: io::Error, sink: &mut dyn Sink) {
        if !self.is_closed() {
            if cause.kind() == io::ErrorKind::InvalidData {
                let pid = self.connection.get().map(|connection| connection.peer.pid);
                let cause = cause.to_string();
                defer(move || tracing::warn!(target: "calomel::shm", pid, cause, "protocol violation: the link is closed"));
            }
            self.close();
            sink.closed(self.key, cause);
        }
    }

    /// Reads the packets of the socket, [`PACKETS`] at most; the rest is left to the next turn.
    pub(super) fn packets(&self, sink: &mut dyn Sink) {
        self.more.store(false, Ordering::Relaxed);
        for _ in 0..PACKETS {
            if self.is_closed() {
                return;
            }
            match handshake::receive(&self.socket) {
                Ok(PacketRead::Nothing) => return,
                Ok(PacketRead::End) => {
                    return self.end(closed_by_peer());
                }
                Ok(PacketRead::Packet(packet, fds)) => {
                    if let Err(error) = self.packet(packet, fds, sink) {
                        return self.lose(error, sink);
                    }
                }
                Err(error) => return self.lose(error, sink),
            }
        }
        self.more.store(true, Ordering::Relaxed);
    }

    fn packet(&self, packet: ControlPacket, fds: Fds, sink: &mut dyn Sink) -> io::Result<()> {
        let broken = || io::Error::from(ProtocolViolation);
        let mut stage = self.stage.lock();
        match (&*stage, packet) {
            (_, ControlPacket::Doorbell) => Ok(()),
            (ShmStage::Dialled(mine), ControlPacket::Welcome { hello, reads }) => {
                let connection = self.establish(mine.clone(), hello, fds)?;
                connection.lends.store(reads && self.shared.direct && connection.peer.own_user, Ordering::Relaxed);
                handshake::send(&self.socket, &ControlPacket::Ready { reads: connection.reads }, &[])?;
                *stage = ShmStage::Open;
                drop(stage);
                self.open(connection);
                self.opened.store(true, Ordering::Release);
                sink.chunk(self.key, CHUNK);
                sink.connected(self.key);
                Ok(())
            }
            (ShmStage::Dialled(_), ControlPacket::Refused { reason }) => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("it refused the connection: {reason}")))
            }
            (ShmStage::Accepted, ControlPacket::Hello(hello)) => {
                let established = SharedSegment::create().and_then(|(own, mine)| Ok((own, self.establish(mine, hello, fds)?)));
                let (own, connection) = established.inspect_err(|error| {
                    // Best effort: the peer may have closed the socket.
                    let _ = handshake::send(&self.socket, &ControlPacket::Refused { reason: error.to_string() }, &[]);
                })?;
                let welcome =
                    ControlPacket::Welcome { hello: self.shared.hello(connection.peer.own_user), reads: connection.reads };
                self.open(connection);
                if let Some(doorbell) = self.shared.doorbell(self.token) {
                    let _ = self.doorbell.set(doorbell);
                }
                handshake::send(&self.socket, &welcome, &hello_descriptors(&own, self.doorbell.get()))?;
                *stage = ShmStage::Welcomed;
                Ok(())
            }
            (ShmStage::Welcomed, ControlPacket::Ready { reads }) => {
                *stage = ShmStage::Open;
                drop(stage);
                if let Some(connection) = self.connection.get() {
                    connection.lends.store(reads && self.shared.direct && connection.peer.own_user, Ordering::Relaxed);
                }
                self.opened.store(true, Ordering::Release);
                sink.chunk(self.key, CHUNK);
                Ok(())
            }
            (ShmStage::Open | ShmStage::Welcomed, ControlPacket::Block { id, len }) => {
                let mut inbox = self.inbox.lock();
                let own_user = self.connection.get().is_some_and(|connection| connection.peer.own_user);
                let (Some(fd), Some(inbox), true) = (fds.first(), &mut *inbox, own_user) else { return Err(broken()) };
                inbox.add_block(id, len, fd)
            }
            _ => Err(broken()),
        }
    }

    /// Checks the peer's hello and maps its segment.
    fn establish(&self, mine: Arc<SharedSegment>, hello: ShmHello, fds: Fds) -> io::Result<Arc<Connection>> {
        if let Some(objection) = hello.objection() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, objection));
        }
        let mut fds = fds.into_iter();
        let fd = fds.next().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it sent no shared memory"))?;
        let theirs = SharedSegment::attach(fd.as_fd())?;
        let Credentials { pid, uid, .. } = sys::credentials(self.socket.as_fd())?;
        // The other holders of an `eventfd` can make a writer wait, so it is accepted only from the own user.
        let own_user = uid == self.shared.admission.uid;
        let doorbell = fds.next().filter(|_| own_user).and_then(Doorbell::new);
        let handle = self.shared.watch(pid, self.token, &self.socket);
        // A peer can make reads of its memory wait, too, so memory is read only of the own user.
        let may_read = self.shared.direct && own_user && pid != 0;
        let reads = may_read && sys::read_word(pid, hello.nonce_at).is_ok_and(|found| found == hello.nonce);
        if may_read && !reads {
            defer(move || tracing::info!(target: "calomel::shm", pid, "can't read the peer's memory: using the ring"));
        }
        let peer = ShmPeer {
            own_user,
            socket: self.socket.clone(),
            pid,
            handle,
            nonce: (hello.nonce, hello.nonce_at),
            doorbell,
            cut: AtomicBool::new(false),
        };
        Ok(Arc::new(Connection::new(mine, theirs, peer, reads)))
    }

    fn open(&self, connection: Arc<Connection>) {
        *self.outbox.lock() = Some(ShmOutbox::new(&connection, self.shared.copy_policy));
        *self.inbox.lock() = Some(ShmInbox::new(&connection));
        let _ = self.connection.set(connection);
    }

    /// Continues a pending send and reads what has arrived. True when there was anything.
    pub(super) fn turn(&self, scratch: &mut [u8], sink: &mut dyn Sink) -> bool {
        let more = self.more.load(Ordering::Relaxed);
        if more {
            self.packets(sink);
        }
        let Some(connection) = self.connection.get().filter(|_| self.opened.load(Ordering::Acquire)) else {
            return self.finish(sink) || more;
        };
        let mut any = more;
        any |= self.waiting.load(Ordering::Acquire) && self.resume(connection, sink);
        let turn = {
            let mut slot = self.inbox.lock();
            let Some(inbox) = &mut *slot else { return false };
            if self.ends.load(Ordering::Acquire) {
                // What it sent before the end fits into its ring. Anything beyond that is not read.
                let last = *self.final_position.get_or_init(|| inbox.taken() + RING);
                if inbox.taken() > last {
                    drop(slot);
                    return self.finish(sink);
                }
            }
            inbox.turn(self.key, connection, scratch, sink, &mut |inbox| self.fetch(connection, inbox))
        };
        match turn {
            Ok(Turn::Nothing) => {}
            Ok(Turn::Something) => any = true,
            Ok(Turn::Closed) => return true,
            Err(error) => {
                self.lose(error, sink);
                return true;
            }
        }
        any || self.finish(sink)
    }

    /// Closes a link that is ending, once everything is read.
    fn finish(&self, sink: &mut dyn Sink) -> bool {
        if !self.ends.load(Ordering::Acquire) {
            return false;
        }
        let cause = self.ending.lock().take();
        cause.is_some_and(|cause| {
            self.lose(cause, sink);
            true
        })
    }

    /// Receives blocks that the peer has sent over the socket: records refer to them already.
    fn fetch(&self, connection: &Connection, inbox: &mut ShmInbox) {
        if !connection.peer.own_user {
            return;
        }
        for _ in 0..FETCHED {
            let failed = match handshake::receive(&self.socket) {
                Ok(PacketRead::Packet(ControlPacket::Block { id, len }, fds)) if !fds.is_empty() => {
                    inbox.add_block(id, len, &fds[0])
                }
                Ok(PacketRead::Packet(..)) => Ok(()),
                Ok(PacketRead::Nothing) => return,
                Ok(PacketRead::End) => return self.end(closed_by_peer()),
                Err(error) => Err(error),
            };
            if let Err(error) = failed {
                defer(move || tracing::warn!(target: "calomel::shm", %error, "can't receive a shared block of a peer"));
            }
        }
    }

    /// Continues what waited for the peer. True when there was anything to report.
    fn resume(&self, connection: &Arc<Connection>, sink: &mut dyn Sink) -> bool {
        let (returned, sent) = {
            let mut slot = self.outbox.lock();
            let Some(outbox) = &mut *slot else { return false };
            let returned = outbox.loans.sweep(connection);
            let mut sent = None;
            if let Some(mut sending) = outbox.pending.take() {
                match outbox.write(connection, &mut sending, || self.has_no_arrivals()) {
                    Ok(Written::All) => sent = Some((sending.bytes, false)),
                    Ok(Written::Lent) => sent = Some((sending.bytes, true)),
                    Ok(Written::Part) => outbox.pending = Some(sending),
                    Err(violation) => self.end(violation.into()),
                }
            }
            self.note_waiting(connection, outbox);
            (returned, sent)
        };
        connection.wake_peer();
        let any = returned > 0 || sent.is_some();
        for _ in 0..returned {
            sink.returned(self.key);
        }
        if let Some((bytes, lent)) = sent {
            sink.sent(self.key, bytes, lent);
        }
        any
    }

    /// Nothing has arrived that waits for the driver. While the driver reads, that is no reason to stop sending.
    fn has_no_arrivals(&self) -> bool {
        !self.inbox.try_lock().is_some_and(|inbox| inbox.as_ref().is_some_and(ShmInbox::has_work))
    }

    fn note_waiting(&self, connection: &Connection, outbox: &ShmOutbox) {
        let waiting = outbox.is_waiting();
        self.waiting.store(waiting, Ordering::Release);
        connection.set_waiting(waiting);
    }

    /// Asks the peer to ring from now on. False when there is something to do already.
    pub(super) fn fall_asleep(&self) -> bool {
        if self.more.load(Ordering::Relaxed) {
            return false;
        }
        // Before the handshake is over the ring is not read, so it keeps no driver awake.
        let Some(connection) = self.connection.get().filter(|_| self.opened.load(Ordering::Acquire)) else {
            return !self.ends.load(Ordering::Acquire);
        };
        connection.fall_asleep();
        let has_something = self.ends.load(Ordering::Acquire)
            || self.inbox.lock().as_ref().is_some_and(ShmInbox::has_work)
            || self.waiting.load(Ordering::Acquire) && self.can_resume(connection);
        if has_something {
            connection.awake();
        }
        !has_something
    }

    /// True when something that waited for the peer could continue; it is reported by the next turn.
    fn can_resume(&self, connection: &Arc<Connection>) -> bool {
        self.outbox.lock().as_mut().is_some_and(|outbox| outbox.can_continue(connection))
    }

    pub(super) fn awake(&self) {
        if let Some(connection) = self.connection.get() {
            connection.awake();
        }
    }
}

/// The descriptors that go with a hello.
fn hello_descriptors<'a>(segment: &'a OwnedFd, doorbell: Option<&'a OwnedFd>) -> SmallVec<[BorrowedFd<'a>; 2]> {
    std::iter::once(segment).chain(doorbell).map(AsFd::as_fd).collect()
}

impl Link for ShmLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        if self.is_closed() {
            return Sent::Failed(io::Error::new(io::ErrorKind::NotConnected, "the link is closed"));
        }
        // Before the handshake there is no ring to write to.
        let Some(connection) = self.connection.get() else { return Sent::All(bytes) };
        let sent = {
            let mut slot = self.outbox.lock();
            let Some(outbox) = &mut *slot else { return Sent::All(bytes) };
            let mut sending = outbox.begin(bytes, payload);
            let written = outbox.write(connection, &mut sending, || self.has_no_arrivals());
            let sent = match written {
                Ok(Written::All) => Sent::All(sending.bytes),
                Ok(Written::Lent) => Sent::Lent(sending.bytes),
                Ok(Written::Part) => {
                    outbox.pending = Some(sending);
                    Sent::Later
                }
                Err(violation) => {
                    self.end(violation.into());
                    self.shared.schedule(self.token);
                    Sent::Failed(ProtocolViolation.into())
                }
            };
            if outbox.is_waiting() {
                self.note_waiting(connection, outbox);
                // The peer may have made room before it could see that this side waits: then it does not ring.
                if connection.is_asleep() && outbox.can_continue(connection) {
                    self.shared.schedule(self.token);
                }
            }
            sent
        };
        connection.wake_peer();
        sent
    }

    fn injects(&self) -> bool {
        true
    }

    fn inject(&self, bytes: &[u8]) -> Injected {
        let Some(connection) = self.connection.get().filter(|_| !self.is_closed()) else { return Injected::No };
        // Another user's process may make reads of its memory wait, and with them all that the caller's lock is for.
        if !connection.peer.own_user {
            return Injected::No;
        }
        // Another thread may be closing the link.
        let sent = self.outbox.try_lock().is_some_and(|mut slot| slot.as_mut().is_some_and(|outbox| outbox.inject(bytes)));
        match sent {
            false => Injected::No,
            true if connection.peer_sleeps().is_some() => Injected::PeerSleeps,
            true => Injected::Yes,
        }
    }

    fn wake_peer(&self) {
        if let Some(connection) = self.connection.get() {
            connection.wake_peer();
        }
    }

    fn scheme(&self) -> Transport {
        Transport::Shm
    }

    fn is_local(&self) -> bool {
        true
    }

    fn process(&self) -> Option<Credentials> {
        sys::credentials(self.socket.as_fd()).ok()
    }

    /// What is sent is in the peer's reach at once: nothing is in flight.
    fn acknowledged(&self) -> u64 {
        0
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.shared.remove(self);
        if let (Some(connection), Some(outbox)) = (self.connection.get(), self.outbox.lock().as_mut()) {
            let lingering = outbox.end(connection);
            self.shared.linger(lingering);
        }
        // The peer still reads what is in the ring; the socket itself closes with the last reference to it.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}

impl std::fmt::Debug for ShmLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShmLink({:?}, socket {})", self.key, self.socket.as_raw_fd())
    }
}
