//! One end of a connection, from its handshake on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::super::{Credentials, Link, LinkKey, Sent, Sink};
use super::ShmShared;
use super::connection::Connection;
use super::handshake::{self, ControlPacket, Fds, PacketRead, ShmHello};
use super::inbox::{ShmInbox, Turn};
use super::outbox::{ShmOutbox, Written};
use super::process::{Doorbell, ShmPeer};
use super::ring::ProtocolViolation;
use super::segment::{RING, SharedSegment};
use super::sys;
use crate::Scheme;
use crate::deferred_log::defer;
use crate::memory::Slice;

/// Longest payload: frames behind it wait for no more (some 5 µs). Twice and half as much were measured to be no faster.
const CHUNK: usize = 128 << 10;

/// Packets taken at a time, and at most for one record: whoever sends more stops nobody else.
const PACKETS: usize = 64;
const FETCHED: usize = 1024;

pub(super) struct ShmLink {
    key: LinkKey,
    /// Of the socket; those of the process's handle and of the bell are the next ones.
    pub token: usize,
    pub socket: Arc<OwnedFd>,
    shared: Arc<ShmShared>,
    /// What the other side writes to wake this one.
    pub doorbell: OnceLock<OwnedFd>,
    /// What the other side is; when it is known.
    connection: OnceLock<Arc<Connection>>,
    stage: Mutex<ShmStage>,
    closed: AtomicBool,
    /// The other side is gone, or must go: what it has said before is still taken.
    ending: Mutex<Option<io::Error>>,
    /// There may be something in `ending`.
    ends: AtomicBool,
    /// There may be more packets.
    more: AtomicBool,
    /// Up to where the ring is still taken when the other side is gone.
    last_words: OnceLock<u64>,
    /// The handshake is over.
    opened: AtomicBool,
    /// Something of the outbox waits for the other side.
    waits: AtomicBool,
    outbox: Mutex<Option<ShmOutbox>>,
    /// Used by whoever drives.
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
    /// The end that dials.
    pub(super) fn dial(key: LinkKey, token: usize, socket: OwnedFd, shared: Arc<ShmShared>) -> io::Result<ShmLink> {
        let (fd, mine) = SharedSegment::create()?;
        let bell = shared.doorbell(token);
        let own_user = sys::credentials(socket.as_fd())?.uid == shared.admission.uid;
        match handshake::send(&socket, &ControlPacket::Hello(shared.hello(own_user)), &introduction(&fd, bell.as_ref())) {
            // It has hung up already: what it said before that tells why, and is read as always.
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            sent => sent?,
        }
        let link = ShmLink::new(key, token, socket, shared, ShmStage::Dialled(mine));
        bell.map(|bell| link.doorbell.set(bell));
        Ok(link)
    }

    /// The end that was dialled.
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
            last_words: OnceLock::new(),
            opened: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            outbox: Mutex::new(None),
            inbox: Mutex::new(None),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The link ends when what has arrived is taken.
    pub(super) fn end(&self, cause: io::Error) {
        self.ending.lock().get_or_insert(cause);
        self.ends.store(true, Ordering::Release);
    }

    fn lose(&self, cause: io::Error, sink: &mut dyn Sink) {
        if !self.is_closed() {
            if cause.kind() == io::ErrorKind::InvalidData {
                let pid = self.connection.get().map(|line| line.peer.pid);
                let cause = cause.to_string();
                defer(move || tracing::warn!(target: "calomel::shm", pid, cause, "a peer is hung up on"));
            }
            self.close();
            sink.closed(self.key, cause);
        }
    }

    /// Takes what the socket has; what is more than some is left to the next turn.
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
            (_, ControlPacket::Bell) => Ok(()),
            (ShmStage::Dialled(mine), ControlPacket::Welcome { hello, reads }) => {
                let line = self.establish(mine.clone(), hello, fds)?;
                line.lends.store(reads && self.shared.direct && line.peer.own_user, Ordering::Relaxed);
                handshake::send(&self.socket, &ControlPacket::Ready { reads: line.reads }, &[])?;
                *stage = ShmStage::Open;
                drop(stage);
                self.open(line);
                self.opened.store(true, Ordering::Release);
                sink.chunk(self.key, CHUNK);
                sink.connected(self.key);
                Ok(())
            }
            (ShmStage::Dialled(_), ControlPacket::Refused { reason }) => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("it refused the connection: {reason}")))
            }
            (ShmStage::Accepted, ControlPacket::Hello(hello)) => {
                let begun = SharedSegment::create().and_then(|(own, mine)| Ok((own, self.establish(mine, hello, fds)?)));
                let (own, line) = begun.inspect_err(|error| {
                    // It hears the reason, if it listens at all.
                    let _ = handshake::send(&self.socket, &ControlPacket::Refused { reason: error.to_string() }, &[]);
                })?;
                let welcome = ControlPacket::Welcome { hello: self.shared.hello(line.peer.own_user), reads: line.reads };
                self.open(line);
                if let Some(bell) = self.shared.doorbell(self.token) {
                    let _ = self.doorbell.set(bell);
                }
                handshake::send(&self.socket, &welcome, &introduction(&own, self.doorbell.get()))?;
                *stage = ShmStage::Welcomed;
                Ok(())
            }
            (ShmStage::Welcomed, ControlPacket::Ready { reads }) => {
                *stage = ShmStage::Open;
                drop(stage);
                if let Some(line) = self.connection.get() {
                    line.lends.store(reads && self.shared.direct && line.peer.own_user, Ordering::Relaxed);
                }
                self.opened.store(true, Ordering::Release);
                sink.chunk(self.key, CHUNK);
                Ok(())
            }
            (ShmStage::Open | ShmStage::Welcomed, ControlPacket::Block { id, len }) => {
                let mut inbox = self.inbox.lock();
                let own_user = self.connection.get().is_some_and(|line| line.peer.own_user);
                let (Some(fd), Some(inbox), true) = (fds.first(), &mut *inbox, own_user) else { return Err(broken()) };
                inbox.add_block(id, len, fd)
            }
            _ => Err(broken()),
        }
    }

    /// Looks at what the other side says of itself.
    fn establish(&self, mine: Arc<SharedSegment>, hello: ShmHello, fds: Fds) -> io::Result<Arc<Connection>> {
        if let Some(objection) = hello.objection() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, objection));
        }
        let mut fds = fds.into_iter();
        let fd = fds.next().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it sent no shared memory"))?;
        let theirs = SharedSegment::attach(fd.as_fd())?;
        let Credentials { pid, uid, .. } = sys::credentials(self.socket.as_fd())?;
        // Who has the descriptor can have its writer wait: that is for nobody but the own user.
        let own_user = uid == self.shared.admission.uid;
        let bell = fds.next().filter(|_| own_user).and_then(Doorbell::new);
        let handle = self.shared.watch(pid, self.token, &self.socket);
        // A peer can have the read of its memory wait, too: also this one is for the own user only.
        let may_read = self.shared.direct && own_user && pid != 0;
        let reads = may_read && sys::read_word(pid, hello.nonce_at).is_ok_and(|found| found == hello.nonce);
        if may_read && !reads {
            defer(
                move || tracing::info!(target: "calomel::shm", pid, "the system does not let this process read a peer's memory: bulk data goes through shared memory"),
            );
        }
        let peer = ShmPeer {
            own_user,
            socket: self.socket.clone(),
            pid,
            handle,
            nonce: (hello.nonce, hello.nonce_at),
            doorbell: bell,
            cut: AtomicBool::new(false),
        };
        Ok(Arc::new(Connection::new(mine, theirs, peer, reads)))
    }

    fn open(&self, line: Arc<Connection>) {
        *self.outbox.lock() = Some(ShmOutbox::new(&line, self.shared.traffic.clone()));
        *self.inbox.lock() = Some(ShmInbox::new(&line));
        let _ = self.connection.set(line);
    }

    /// Sends what waits, takes what has come. True when there was anything.
    pub(super) fn turn(&self, scratch: &mut [u8], sink: &mut dyn Sink) -> bool {
        let more = self.more.load(Ordering::Relaxed);
        if more {
            self.packets(sink);
        }
        let Some(line) = self.connection.get().filter(|_| self.opened.load(Ordering::Acquire)) else {
            return self.finish(sink) || more;
        };
        let mut any = more;
        any |= self.waits.load(Ordering::Acquire) && self.resume(line, sink);
        let turn = {
            let mut slot = self.inbox.lock();
            let Some(inbox) = &mut *slot else { return false };
            if self.ends.load(Ordering::Acquire) {
                // What it had said before fits into its ring. Who goes on talking is not listened to.
                let last = *self.last_words.get_or_init(|| inbox.taken() + RING);
                if inbox.taken() > last {
                    drop(slot);
                    return self.finish(sink);
                }
            }
            inbox.turn(self.key, line, scratch, sink, &mut |inbox| self.fetch(line, inbox))
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

    /// The end of a link of which everything has been taken.
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

    /// Brings blocks that the peer has sent, and refers to already.
    fn fetch(&self, line: &Connection, inbox: &mut ShmInbox) {
        if !line.peer.own_user {
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
                defer(move || tracing::warn!(target: "calomel::shm", %error, "shared memory of a peer can't be had"));
            }
        }
    }

    /// Goes on with what waited for the other side. True when there was anything to report.
    fn resume(&self, line: &Arc<Connection>, sink: &mut dyn Sink) -> bool {
        let (returned, sent) = {
            let mut slot = self.outbox.lock();
            let Some(outbox) = &mut *slot else { return false };
            let returned = outbox.loans.sweep(line);
            let mut sent = None;
            if let Some(mut sending) = outbox.pending.take() {
                match outbox.write(line, &mut sending) {
                    Ok(Written::All) => sent = Some((sending.bytes, false)),
                    Ok(Written::Lent) => sent = Some((sending.bytes, true)),
                    Ok(Written::Part) => outbox.pending = Some(sending),
                    Err(nonsense) => self.end(nonsense.into()),
                }
            }
            self.note_waiting(line, outbox);
            (returned, sent)
        };
        line.wake_peer();
        let any = returned > 0 || sent.is_some();
        for _ in 0..returned {
            sink.returned(self.key);
        }
        if let Some((bytes, lent)) = sent {
            sink.sent(self.key, bytes, lent);
        }
        any
    }

    fn note_waiting(&self, line: &Connection, outbox: &ShmOutbox) {
        let waiting = outbox.is_waiting();
        self.waits.store(waiting, Ordering::Release);
        line.set_waiting(waiting);
    }

    /// From now on the other side rings; unless there is something to do already.
    pub(super) fn fall_asleep(&self) -> bool {
        if self.more.load(Ordering::Relaxed) {
            return false;
        }
        // What is in the ring before the handshake is over waits for that, and so does whoever drives.
        let Some(line) = self.connection.get().filter(|_| self.opened.load(Ordering::Acquire)) else {
            return !self.ends.load(Ordering::Acquire);
        };
        line.fall_asleep();
        let has_something = self.ends.load(Ordering::Acquire)
            || self.inbox.lock().as_ref().is_some_and(ShmInbox::has_work)
            || self.waits.load(Ordering::Acquire) && self.can_resume(line);
        if has_something {
            line.awake();
        }
        !has_something
    }

    /// True when something that waited for the other side could go on. What that brings is reported later.
    fn can_resume(&self, line: &Arc<Connection>) -> bool {
        self.outbox.lock().as_mut().is_some_and(|outbox| outbox.could_go_on(line))
    }

    pub(super) fn shares_processor(&self) -> bool {
        self.connection.get().is_some_and(|line| line.shares_processor())
    }

    pub(super) fn awake(&self) {
        if let Some(line) = self.connection.get() {
            line.awake();
        }
    }
}

/// What goes with a hello.
fn introduction<'a>(segment: &'a OwnedFd, bell: Option<&'a OwnedFd>) -> SmallVec<[BorrowedFd<'a>; 2]> {
    std::iter::once(segment).chain(bell).map(AsFd::as_fd).collect()
}

pub(super) fn closed_by_peer() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "it closed the connection")
}

impl Link for ShmLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        if self.is_closed() {
            return Sent::Failed(io::Error::new(io::ErrorKind::NotConnected, "the link is closed"));
        }
        // Before the handshake there is nobody to say anything to.
        let Some(line) = self.connection.get() else { return Sent::All(bytes) };
        let sent = {
            let mut slot = self.outbox.lock();
            let Some(outbox) = &mut *slot else { return Sent::All(bytes) };
            let mut sending = outbox.begin(bytes, payload);
            let written = outbox.write(line, &mut sending);
            let sent = match written {
                Ok(Written::All) => Sent::All(sending.bytes),
                Ok(Written::Lent) => Sent::Lent(sending.bytes),
                Ok(Written::Part) => {
                    outbox.pending = Some(sending);
                    Sent::Later
                }
                Err(nonsense) => {
                    self.end(nonsense.into());
                    self.shared.schedule(self.token);
                    Sent::Failed(ProtocolViolation.into())
                }
            };
            if outbox.is_waiting() {
                self.note_waiting(line, outbox);
                // The peer may have been done with it before it could know that somebody waits.
                if line.is_asleep() && outbox.could_go_on(line) {
                    self.shared.schedule(self.token);
                }
            }
            sent
        };
        line.wake_peer();
        sent
    }

    fn scheme(&self) -> Scheme {
        Scheme::Shm
    }

    fn is_local(&self) -> bool {
        true
    }

    fn process(&self) -> Option<Credentials> {
        sys::credentials(self.socket.as_fd()).ok()
    }

    /// What is sent is there: nothing is on its way.
    fn acknowledged(&self) -> u64 {
        0
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.shared.remove(self);
        if let (Some(line), Some(outbox)) = (self.connection.get(), self.outbox.lock().as_mut()) {
            let lingering = outbox.end(line);
            self.shared.linger(lingering);
        }
        // What is in the ring is still taken; the socket itself closes with the last reference to it.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}

impl std::fmt::Debug for ShmLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShmLink({:?}, socket {})", self.key, self.socket.as_raw_fd())
    }
}
