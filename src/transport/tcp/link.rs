//! A tcp link: one socket, with its pending send and its receiver.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mio::{Interest, Token};

use super::super::{Link, LinkKey, Sent, Sink, closed_by_peer};
use super::session::Session;
use super::stream::{BEHIND_PAYLOAD, Read, TcpReceiver, TcpSend};
use super::{Scratch, TcpShared, sys};
use crate::Transport;
use crate::deferred_log::defer;
use crate::memory::Slice;
use crate::sync::Mutex;

/// Most bytes that a link reads in one turn, and most that it reads, and writes, beside others that bring something; fewer if they
/// are frames, since one read may contain thousands of calls.
const MAX_TURN: usize = 1 << 20;
const MAX_TURN_BESIDE_OTHERS: usize = 64 << 10;
const MAX_WRITTEN_BESIDE_OTHERS: usize = 32 << 10;
const MAX_TURN_FRAMES: usize = 32 << 10;

pub(super) struct TcpLink {
    key: LinkKey,
    token: usize,
    fd: RawFd,
    stream: Mutex<mio::net::TcpStream>,
    shared: Arc<TcpShared>,
    connected: AtomicBool,
    closed: AtomicBool,
    /// The last read may have left something in the socket.
    more: AtomicBool,
    /// The link is polled, or pending.
    polled: AtomicBool,
    /// A send has stopped at the end of a turn: the reactor does not report that it can go on.
    stopped: AtomicBool,
    /// How many polls in a row have brought nothing.
    empty: AtomicU32,
    /// The reactor has reported the end of the stream and reports no more, so the socket must be read up to its end.
    ending: AtomicBool,
    /// Bytes that the socket has accepted since it was created.
    written: AtomicU64,
    /// How many of them `take_written` has returned.
    counted: AtomicU64,
    sending: Mutex<PendingSend>,
    receiving: Mutex<TcpReceiver>,
    /// Payloads have checksums.
    covered: AtomicBool,
    /// Why this side ends the link, if it does so while the engine lives on.
    abandoned: Mutex<Option<io::Error>>,
    /// The TLS session, if any.
    session: Option<Box<Session>>,
}

/// What the socket has not accepted yet.
#[derive(Default)]
struct PendingSend {
    send: Option<TcpSend>,
    /// The reactor does not report that the socket accepts more.
    unreported: bool,
    /// It reports nothing: the driver polls the link, and continues the send besides.
    muted: bool,
}

/// How far a write got.
enum TcpWritten {
    All,
    /// The socket accepts no more.
    Blocked,
    /// It was enough for a turn.
    Stopped,
}

#[derive(Clone, Copy, Default)]
pub(super) struct ReadProgress {
    pub any: bool,
    pub bytes: usize,
    pub more: bool,
    pub closed: bool,
}

impl TcpLink {
    pub(super) fn new(
        key: LinkKey,
        token: usize,
        stream: mio::net::TcpStream,
        session: Option<Session>,
        connected: bool,
        shared: Arc<TcpShared>,
    ) -> TcpLink {
        TcpLink {
            key,
            token,
            fd: stream.as_raw_fd(),
            stream: Mutex::new(stream),
            shared,
            connected: AtomicBool::new(connected),
            closed: AtomicBool::new(false),
            more: AtomicBool::new(false),
            polled: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            empty: AtomicU32::new(0),
            ending: AtomicBool::new(false),
            written: AtomicU64::new(0),
            counted: AtomicU64::new(0),
            sending: Mutex::default(),
            receiving: Mutex::default(),
            covered: AtomicBool::new(false),
            abandoned: Mutex::default(),
            session: session.map(Box::new),
        }
    }

    pub(super) fn token(&self) -> usize {
        self.token
    }

    pub(super) fn key(&self) -> LinkKey {
        self.key
    }

    pub(super) fn with_stream<R>(&self, f: impl FnOnce(&mut mio::net::TcpStream) -> R) -> R {
        f(&mut self.stream.lock())
    }

    pub(super) fn expect_end(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }

    /// Ends the link for this cause: what has arrived is read first.
    fn abandon(&self, cause: io::Error) {
        *self.abandoned.lock() = Some(cause);
        self.expect_end();
        let _ = self.stream.lock().shutdown(std::net::Shutdown::Both);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    pub(super) fn set_polled(&self, polled: bool) {
        self.polled.store(polled, Ordering::Relaxed);
    }

    pub(super) fn is_polled(&self) -> bool {
        self.polled.load(Ordering::Relaxed)
    }

    /// A poll has brought something, or the link is polled from now on; or a poll has brought nothing. Returns how many in a row have
    /// brought nothing.
    pub(super) fn note_poll(&self, any: bool) -> u32 {
        let empty = if any { 0 } else { self.empty.load(Ordering::Relaxed).saturating_add(1) };
        self.empty.store(empty, Ordering::Relaxed);
        empty
    }

    pub(super) fn is_secure(&self) -> bool {
        self.session.is_some()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// It must be polled: the reactor does not report what there is to read, or to write.
    pub(super) fn may_have_more(&self) -> bool {
        self.more.load(Ordering::Relaxed) || self.stopped.load(Ordering::Relaxed)
    }

    /// Bytes that the socket has accepted since the last call.
    pub(super) fn take_written(&self) -> usize {
        let written = self.written.load(Ordering::Relaxed);
        written.wrapping_sub(self.counted.swap(written, Ordering::Relaxed)) as usize
    }

    /// True when the socket is connected and a TLS handshake, if any, is over; false when not yet.
    pub(super) fn finish_connecting(&self) -> io::Result<bool> {
        {
            let stream = self.stream.lock();
            if let Some(error) = stream.take_error()? {
                return Err(error);
            }
            match stream.peer_addr() {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let done = self.session.as_ref().map_or(Ok(true), |session| session.advance_handshake(self.fd))?;
        self.connected.store(done, Ordering::Relaxed);
        Ok(done)
    }

    /// Counts bytes that the socket has accepted.
    fn count(&self, n: usize) {
        self.written.fetch_add(n as u64, Ordering::Release);
    }

    /// Writes what the socket accepts; beside others that bring something, as much as a turn allows.
    fn write(&self, sending: &mut TcpSend) -> io::Result<TcpWritten> {
        let mut left = if self.shared.is_mixed() { MAX_WRITTEN_BESIDE_OTHERS } else { usize::MAX };
        self.stopped.store(false, Ordering::Relaxed);
        loop {
            // What TLS has buffered counts as written, and must be sent.
            if let Some(session) = &self.session
                && !session.send(self.fd, |n| self.count(n))?
            {
                return Ok(TcpWritten::Blocked);
            }
            if sending.is_done() {
                return Ok(TcpWritten::All);
            }
            if left == 0 {
                self.stopped.store(true, Ordering::Relaxed);
                return Ok(TcpWritten::Stopped);
            }
            let written = match &self.session {
                Some(session) => session.encrypt(sending, left),
                None => sending.send(self.fd, left).inspect(|n| self.count(*n)),
            };
            match written {
                Ok(n) => left = left.saturating_sub(n),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(TcpWritten::Blocked),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Continues a pending send, if there is one. True when it is complete now.
    pub(super) fn resume(&self, sink: &mut dyn Sink) -> bool {
        let mut pending = self.sending.lock();
        let Some(mut sending) = pending.send.take() else {
            if let Some(session) = &self.session {
                // The next read or write reports an error.
                let _ = session.send(self.fd, |n| self.count(n));
            }
            return false;
        };
        match self.write(&mut sending) {
            Ok(TcpWritten::All) => {
                drop(pending);
                sink.sent(self.key, sending.bytes, false);
                true
            }
            Ok(written) => {
                // It may have stopped when it began, and block only now.
                if matches!(written, TcpWritten::Blocked)
                    && let Err(error) = self.report(&mut pending)
                {
                    self.abandon(error);
                }
                pending.send = Some(sending);
                false
            }
            Err(error) => {
                // What has arrived is read first; reading then reports the end of the link.
                defer(move || tracing::debug!(target: "calomel::tcp", %error, "a send failed"));
                self.expect_end();
                false
            }
        }
    }

    /// Makes the reactor report nothing of the socket, so that it must be polled, or what arrives again. It then reports also what
    /// is so already; so it is told to report that the socket accepts more only where something waits for that.
    pub(super) fn mute(&self, muted: bool) -> io::Result<()> {
        // A TLS session may have something of its own to write, for which the reactor must report that it can.
        if self.is_secure() || !self.is_connected() || self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut pending = self.sending.lock();
        if pending.muted == muted {
            return Ok(());
        }
        let registry = &self.shared.registry;
        let waits = !muted && pending.send.is_some();
        let changed = self.with_stream(|stream| match (muted, waits) {
            (true, _) => registry.deregister(stream),
            (false, true) => registry.register(stream, Token(self.token), Interest::READABLE | Interest::WRITABLE),
            (false, false) => registry.register(stream, Token(self.token), Interest::READABLE),
        });
        // Another thread may have closed it.
        if !self.closed.load(Ordering::Acquire) {
            changed?;
        }
        (pending.muted, pending.unreported) = (muted, !waits);
        Ok(())
    }

    /// Leaves the link to the reactor, which reports also what has arrived already. False when it can't, and the link must be polled
    /// once more: then it ends.
    pub(super) fn leave(&self) -> bool {
        let left = self.mute(false);
        let is_left = left.is_ok();
        match left {
            Ok(()) => self.set_polled(false),
            Err(error) => self.abandon(error),
        }
        is_left
    }

    /// Something waits until the socket accepts more: the reactor must report that, unless the link is muted.
    fn report(&self, pending: &mut PendingSend) -> io::Result<()> {
        if pending.unreported && !pending.muted {
            let interest = Interest::READABLE | Interest::WRITABLE;
            self.with_stream(|stream| self.shared.registry.reregister(stream, Token(self.token), interest))?;
            pending.unreported = false;
        }
        Ok(())
    }

    fn lose(&self, cause: io::Error, sink: &mut dyn Sink) {
        if !self.closed.load(Ordering::Acquire) {
            self.close();
            sink.closed(self.key, cause);
        }
    }

    /// Reads until the socket is empty, or the turn is over.
    pub(super) fn receive(&self, scratch: &mut Scratch, sink: &mut dyn Sink) -> ReadProgress {
        let mut received = ReadProgress::default();
        let turn = if self.shared.is_mixed() { MAX_TURN_BESIDE_OTHERS } else { MAX_TURN };
        if self.closed.load(Ordering::Acquire) {
            return ReadProgress { closed: true, ..received };
        }
        let mut receiving = self.receiving.lock();
        let mut frames = 0;
        self.more.store(false, Ordering::Relaxed);
        loop {
            let Scratch { bytes, plain } = scratch;
            let read = match &self.session {
                None => receiving.read(self.fd, bytes),
                Some(session) => {
                    plain.clear();
                    let read = session.read(self.fd, bytes, plain, |n| self.count(n));
                    read.map(|read| Read { total: read.total, in_scratch: 0, more: read.more })
                }
            };
            let n = match read {
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.lose(error, sink);
                    received.closed = true;
                    break;
                }
            };
            if n.total == 0 {
                let cause = self.abandoned.lock().take();
                self.lose(cause.unwrap_or_else(closed_by_peer), sink);
                received.closed = true;
                break;
            }
            received.any = true;
            received.bytes += n.total;
            let arrived = if self.session.is_some() { &plain[..] } else { &bytes[..n.in_scratch] };
            // Decrypted bytes are not split into frames and payload; while a payload arrives, they are mostly payload.
            frames += if receiving.has_payload() { arrived.len().min(BEHIND_PAYLOAD) } else { arrived.len() };
            match receiving.feed(self.key, arrived, &self.covered, sink) {
                Ok(open) if open && !self.closed.load(Ordering::Acquire) => {}
                Ok(_) => {
                    received.closed = true;
                    break;
                }
                Err(error) => {
                    self.lose(error, sink);
                    received.closed = true;
                    break;
                }
            }
            if !n.more && !self.ending.load(Ordering::Relaxed) {
                // The socket is empty; the reactor reports what arrives next.
                break;
            }
            if received.bytes >= turn || frames >= MAX_TURN_FRAMES {
                received.more = true;
                self.more.store(true, Ordering::Relaxed);
                break;
            }
        }
        if received.any && receiving.has_payload() {
            sink.heard(self.key);
        }
        received
    }
}

impl Link for TcpLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        if !self.polled.load(Ordering::Relaxed) && !self.polled.swap(true, Ordering::Relaxed) {
            self.shared.mark_pending(self.token);
        }
        let mut pending = self.sending.lock();
        let mut sending = TcpSend::new(bytes, payload, self.covered.load(Ordering::Relaxed));
        match self.write(&mut sending) {
            Ok(TcpWritten::All) => Sent::All(sending.bytes),
            Ok(TcpWritten::Blocked) => {
                // Where that fails, the link ends, and the send with it.
                if let Err(error) = self.report(&mut pending) {
                    self.abandon(error);
                }
                pending.send = Some(sending);
                Sent::Later
            }
            Ok(TcpWritten::Stopped) => {
                pending.send = Some(sending);
                self.shared.mark_pending(self.token);
                Sent::AtNextPoll
            }
            Err(error) => Sent::Failed(error),
        }
    }

    fn takes_system_calls(&self) -> bool {
        true
    }

    fn scheme(&self) -> Transport {
        Transport::Tcp
    }

    /// Both addresses of a connection are equal only if both ends are on this host.
    fn is_local(&self) -> bool {
        self.with_stream(|stream| match (stream.local_addr(), stream.peer_addr()) {
            (Ok(own), Ok(peer)) => own.ip() == peer.ip() || peer.ip().is_loopback(),
            _ => false,
        })
    }

    fn cover_payloads(&self) {
        self.covered.store(true, Ordering::Relaxed);
    }

    fn acknowledged(&self) -> u64 {
        // Loaded first: a concurrent write can make the difference too small, not too large.
        let written = self.written.load(Ordering::Acquire);
        match sys::unacknowledged(self.fd) {
            // The peer's kernel has all of it; nothing is in flight.
            0 => 0,
            unacknowledged => written.saturating_sub(unacknowledged),
        }
    }

    #[cfg(feature = "tls")]
    fn certificate(&self) -> Option<Arc<[u8]>> {
        self.session.as_ref().and_then(|session| session.certificate())
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(session) = self.session.as_ref().filter(|_| self.is_connected()) {
            session.close(self.fd);
        }
        self.shared.entries.lock().links.remove(&self.token);
        self.with_stream(|stream| {
            let _ = self.shared.registry.deregister(stream);
            // The kernel still delivers what was sent; the socket itself closes with the last reference to this link.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        });
        self.sending.lock().send = None;
    }
}
