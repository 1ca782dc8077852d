//! One socket: what is being sent, and what is being received.
//!
//! On the wire a payload is followed by one byte, which says whether it is what the sender's memory held: memory may be
//! taken back while half of a payload is out, and what was announced has to be sent all the same.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::super::{Landed, Link, LinkKey, Place, Sent, Sink, Taken};
use super::sending::{Sending, WHOLE};
use super::session::Session;
use super::sys::{self, Outgoing};
use super::{Scratch, Shared};
use crate::Scheme;
use crate::memory::Slice;

/// Besides payload, what a read takes in at most while one arrives: the next frames' beginning.
const BEHIND_PAYLOAD: usize = 4 << 10;
/// A link gives way to others after so many bytes; after fewer where they are not payload: there may be thousands of calls in
/// what one read takes in.
const FAIR: usize = 1 << 20;
const FAIR_FRAMES: usize = 32 << 10;

pub(super) struct TcpLink {
    key: LinkKey,
    token: usize,
    fd: RawFd,
    stream: Mutex<mio::net::TcpStream>,
    shared: Arc<Shared>,
    connected: AtomicBool,
    closed: AtomicBool,
    /// The last read may have left something in the socket.
    more: AtomicBool,
    /// Read directly, or going to be.
    hot: AtomicBool,
    /// The end of the stream has been announced: nothing more will be, so it must be read up to there.
    ending: AtomicBool,
    /// Bytes that the socket has taken, ever.
    written: AtomicU64,
    sending: Mutex<Option<Sending>>,
    receiving: Mutex<Receiving>,
    /// Where all of that is encrypted.
    session: Option<Box<Session>>,
}

#[derive(Default)]
struct Receiving {
    /// The beginning of a frame.
    partial: Vec<u8>,
    payload: Option<Payload>,
}

/// A payload that is arriving.
struct Payload {
    place: Place,
    got: usize,
    /// The target was there whenever some of it arrived.
    valid: bool,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Received {
    pub any: bool,
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
        shared: Arc<Shared>,
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
            hot: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            written: AtomicU64::new(0),
            sending: Mutex::new(None),
            receiving: Mutex::default(),
            session: session.map(Box::new),
        }
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

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    pub(super) fn set_hot(&self, hot: bool) {
        self.hot.store(hot, Ordering::Relaxed);
    }

    pub(super) fn is_secure(&self) -> bool {
        self.session.is_some()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    pub(super) fn may_have_more(&self) -> bool {
        self.more.load(Ordering::Relaxed)
    }

    /// True when the socket is connected now, and the peer has shown who it is where that is asked for; false when that is
    /// not so yet.
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
        let done = self.session.as_ref().map_or(Ok(true), |session| session.shake(self.fd))?;
        self.connected.store(done, Ordering::Relaxed);
        Ok(done)
    }

    /// The socket has taken so many bytes.
    fn count(&self, n: usize) {
        self.written.fetch_add(n as u64, Ordering::Release);
    }

    /// Writes what the socket takes; true when all of it is out.
    fn write(&self, sending: &mut Sending) -> io::Result<bool> {
        if let Some(session) = &self.session {
            return session.write(self.fd, sending, |n| self.count(n));
        }
        let head = sending.bytes.len();
        let payload = sending.payload.as_ref().map_or(0, |slice| slice.len + 1);
        while sending.written < head + payload {
            let skip = sending.written.saturating_sub(head);
            // When only the last byte is missing, the payload's part is empty.
            let outgoing = Outgoing {
                bytes: &sending.bytes[sending.written.min(head)..],
                payload: sending.payload.as_ref().map(|slice| (slice, skip)),
                tail: WHOLE,
            };
            match sys::send(self.fd, &outgoing, &mut sending.valid) {
                Ok(n) => {
                    sending.written += n;
                    self.count(n);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Goes on with a send that found no room, if there is one. True when that brought it to its end.
    pub(super) fn resume(&self, sink: &mut dyn Sink) -> bool {
        let mut slot = self.sending.lock();
        let Some(mut sending) = slot.take() else {
            if let Some(session) = &self.session {
                session.flush(self.fd, |n| self.count(n));
            }
            return false;
        };
        match self.write(&mut sending) {
            Ok(false) => {
                *slot = Some(sending);
                false
            }
            Ok(true) => {
                drop(slot);
                sink.sent(self.key, sending.bytes, false);
                true
            }
            Err(error) => {
                // What has arrived is read first; the end of that is the end of the link.
                tracing::debug!(target: "calomel::tcp", %error, "a send failed");
                self.expect_end();
                false
            }
        }
    }

    fn lose(&self, cause: io::Error, sink: &mut dyn Sink) {
        if !self.closed.load(Ordering::Acquire) {
            self.close();
            sink.closed(self.key, cause);
        }
    }

    /// Reads until the socket is empty, or others should have their turn.
    pub(super) fn receive(&self, scratch: &mut Scratch, sink: &mut dyn Sink) -> Received {
        let mut received = Received::default();
        if self.closed.load(Ordering::Acquire) {
            return Received { closed: true, ..received };
        }
        let mut receiving = self.receiving.lock();
        let (mut total, mut frames) = (0, 0);
        self.more.store(false, Ordering::Relaxed);
        loop {
            let Scratch { bytes, plain } = scratch;
            let read = match &self.session {
                None => receiving.read(self.fd, bytes),
                Some(session) => {
                    plain.clear();
                    let looked = session.read(self.fd, bytes, plain, |n| self.count(n));
                    looked.map(|looked| Read { total: looked.total, in_scratch: 0, more: looked.more })
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
                self.lose(io::Error::new(io::ErrorKind::ConnectionAborted, "it closed the connection"), sink);
                received.closed = true;
                break;
            }
            received.any = true;
            total += n.total;
            let came = if self.session.is_some() { &plain[..] } else { &bytes[..n.in_scratch] };
            // What is decrypted lies together; while a payload arrives, it is mostly that.
            frames += if receiving.payload.is_some() { came.len().min(BEHIND_PAYLOAD) } else { came.len() };
            if !receiving.feed(self.key, came, sink) || self.closed.load(Ordering::Acquire) {
                received.closed = true;
                break;
            }
            if !n.more && !self.ending.load(Ordering::Relaxed) {
                // The socket was emptied; the reactor tells of what comes next.
                break;
            }
            if total >= FAIR || frames >= FAIR_FRAMES {
                received.more = true;
                self.more.store(true, Ordering::Relaxed);
                break;
            }
        }
        if received.any && receiving.payload.is_some() {
            sink.heard(self.key);
        }
        received
    }
}

struct Read {
    total: usize,
    in_scratch: usize,
    /// There may be more.
    more: bool,
}

impl Receiving {
    /// One read: to where the payload belongs, if one is arriving, and what is behind it to the scratch buffer.
    fn read(&mut self, fd: RawFd, scratch: &mut [u8]) -> io::Result<Read> {
        if let Some(payload) = &mut self.payload {
            let left = payload.place.len - payload.got;
            if let Some(target) = payload.place.target.as_ref().filter(|_| payload.valid && left > 0) {
                let rest = &mut scratch[..BEHIND_PAYLOAD];
                match sys::receive(fd, target, payload.got, rest)? {
                    Some(arrived) => {
                        payload.got += arrived.placed;
                        let total = arrived.placed + arrived.rest;
                        return Ok(Read { total, in_scratch: arrived.rest, more: total == arrived.asked });
                    }
                    None => payload.valid = false,
                }
            }
        }
        let n = sys::receive_plain(fd, scratch)?;
        Ok(Read { total: n, in_scratch: n, more: n == scratch.len() })
    }

    /// Takes in bytes from the scratch buffer. False when the link was closed because of them.
    fn feed(&mut self, key: LinkKey, mut data: &[u8], sink: &mut dyn Sink) -> bool {
        loop {
            if let Some(payload) = &mut self.payload {
                let n = data.len().min(payload.place.len - payload.got);
                payload.take(&data[..n]);
                data = &data[n..];
                if payload.got < payload.place.len {
                    return true;
                }
                let Some((trailer, rest)) = data.split_first() else { return true };
                let landed = match (payload.valid, *trailer == WHOLE) {
                    (_, false) => Landed::SourceGone,
                    (false, true) => Landed::TargetGone,
                    (true, true) => Landed::Whole,
                };
                data = rest;
                self.payload = None;
                sink.placed(key, landed);
            }
            if data.is_empty() && self.partial.is_empty() {
                return true;
            }
            let Some(place) = self.frames(key, &mut data, sink) else { return false };
            match place {
                Some(place) => self.payload = Some(Payload { place, got: 0, valid: true }),
                None => return true,
            }
        }
    }

    /// Offers frames to the sink; what is left of the data is behind a payload's place, or kept for later. `None`: the link
    /// was closed.
    fn frames(&mut self, key: LinkKey, data: &mut &[u8], sink: &mut dyn Sink) -> Option<Option<Place>> {
        if self.partial.is_empty() {
            let Taken { used, place } = sink.bytes(key, data)?;
            *data = &data[used..];
            if place.is_none() {
                self.partial.extend_from_slice(data);
                *data = &[];
            }
            return Some(place);
        }
        let before = self.partial.len();
        self.partial.extend_from_slice(data);
        let Taken { used, place } = sink.bytes(key, &self.partial)?;
        if place.is_none() {
            self.partial.drain(..used);
            *data = &[];
            if self.partial.is_empty() {
                // An idle link keeps no buffer.
                self.partial = Vec::new();
            }
        } else {
            // A frame that was not complete before ends within the new data.
            *data = &data[used.saturating_sub(before)..];
            self.partial = Vec::new();
        }
        Some(place)
    }
}

impl Payload {
    fn take(&mut self, bytes: &[u8]) {
        if let Some(target) = self.place.target.as_ref().filter(|_| self.valid && !bytes.is_empty()) {
            let part = target.part(self.got, bytes.len());
            self.valid = part.is_some_and(|part| part.write(bytes));
        }
        self.got += bytes.len();
    }
}

impl Link for TcpLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        if !self.hot.load(Ordering::Relaxed) && !self.hot.swap(true, Ordering::Relaxed) {
            self.shared.warm(self.token);
        }
        let mut slot = self.sending.lock();
        let mut sending = Sending::new(bytes, payload);
        match self.write(&mut sending) {
            Ok(true) => Sent::All(sending.bytes),
            Ok(false) => {
                *slot = Some(sending);
                Sent::Later
            }
            Err(error) => Sent::Failed(error),
        }
    }

    fn scheme(&self) -> Scheme {
        Scheme::Tcp
    }

    fn acknowledged(&self) -> u64 {
        // Read first: what is written meanwhile may make the difference too small, never too large.
        let written = self.written.load(Ordering::Acquire);
        match sys::unacknowledged(self.fd) {
            // All of it is there: what happens next is up to the peer itself, and no longer to its system.
            0 => 0,
            unacknowledged => written.saturating_sub(unacknowledged),
        }
    }

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
        let mut stream = self.stream.lock();
        let _ = self.shared.registry.deregister(&mut *stream);
        // What was sent is still delivered; the socket itself closes with the last reference to this link.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        *self.sending.lock() = None;
    }
}
