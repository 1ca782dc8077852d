//! A peer made by hand: it speaks the transport's protocol down to the words in shared memory, and may break it anywhere.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::common::wire;
pub use crate::common::wire::{Message, Stream};

pub const HEAD: usize = 4096;
pub const RING: usize = 128 << 10;
pub const LEN: usize = HEAD + RING;
pub const MAX_BODY: usize = RING / 4 - 64;
const VERSION: u16 = 3;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Hello {
    pub magic: [u8; 8],
    pub version: u16,
    pub nonce: u64,
    pub nonce_at: u64,
}

/// Where another process finds the word by which it checks that it can read this one's memory.
static NONCE: u64 = 0x0123_4567_89ab_cdef;

impl Hello {
    pub fn valid() -> Hello {
        Hello { magic: *b"calm-shm", version: VERSION, nonce: NONCE, nonce_at: (&raw const NONCE) as u64 }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Packet {
    Doorbell,
    Hello(Hello),
    Welcome { hello: Hello, reads: bool },
    Ready { reads: bool },
    Refused { reason: String },
    Block { id: u64, len: u64 },
}

pub const BYTES: u64 = 1;
pub const LOAN: u64 = 2;
pub const PAYLOAD: u64 = 3;
pub const PAYLOAD_PAST_CACHES: u64 = 6;
pub const GONE: u64 = 4;
pub const FORGET: u64 = 5;

/// A word of a segment.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    Taken,
    Waiting,
    Granted(usize),
    Reading(usize),
    Finished(usize),
}

impl Word {
    fn offset(self) -> usize {
        match self {
            Word::Taken => 0,
            Word::Waiting => 128,
            Word::Granted(slot) => 192 + 8 * slot,
            Word::Reading(slot) => 192 + 128 + 8 * slot,
            Word::Finished(slot) => 192 + 256 + 8 * slot,
        }
    }
}

/// Memory of a descriptor, unmapped when dropped.
pub struct Mapped {
    address: *mut u8,
    len: usize,
}

// SAFETY: an address and a length; what is there is shared with other processes anyway.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub fn new(fd: BorrowedFd<'_>, len: usize, write: bool) -> Mapped {
        let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        // SAFETY: no address is asked for, so no mapping is replaced.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        assert_ne!(address, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Mapped { address: address.cast(), len }
    }

    /// Another engine's segment.
    pub fn of(fd: &OwnedFd) -> Mapped {
        Mapped::new(fd.as_fd(), LEN, false)
    }

    /// A copy of the current content.
    pub fn bytes(&self) -> Vec<u8> {
        let byte = |at: usize| {
            let source = self.address.wrapping_add(at);
            // SAFETY: it lies in the mapping.
            unsafe { source.read_volatile() }
        };
        (0..self.len).map(byte).collect()
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len);
        let word = self.address.wrapping_add(offset).cast::<AtomicU64>();
        // SAFETY: it lies in the mapping, which begins on a page, and lives as long as `self`.
        unsafe { &*word }
    }

    /// Into the ring; wraps at its end.
    fn write(&self, at: usize, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            let target = self.address.wrapping_add(HEAD + (at + i) % RING);
            // SAFETY: it lies in the mapping, which is writable; the other side must cope with any content.
            unsafe { target.write_volatile(*byte) };
        }
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let byte = |i: usize| {
            let source = self.address.wrapping_add(HEAD + (at + i) % RING);
            // SAFETY: it lies in the mapping.
            unsafe { source.read_volatile() }
        };
        (0..len).map(byte).collect()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and is no longer used.
        assert_eq!(unsafe { libc::munmap(self.address.cast(), self.len) }, 0);
    }
}

/// An anonymous file of this length, sealed or not.
pub fn memory(len: u64, sealed: bool) -> OwnedFd {
    // SAFETY: the name is a text that ends with 0; makes a descriptor.
    let fd = unsafe { libc::memfd_create(c"forged".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    assert!(fd >= 0);
    // SAFETY: the descriptor was made above, and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::fs::ftruncate(&fd, len).unwrap();
    if sealed {
        rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW).unwrap();
    }
    fd
}

fn socket_name(address: &str) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(format!("calomel/{}", address.strip_prefix("shm://").unwrap()).as_bytes()).unwrap()
}

fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Listens as an engine would.
pub fn listen(address: &str) -> OwnedFd {
    let listener = socket();
    rustix::net::bind(&listener, &socket_name(address)).unwrap();
    rustix::net::listen(&listener, 10).unwrap();
    listener
}

/// One end of a connection.
pub struct Forged {
    pub socket: OwnedFd,
    fd: OwnedFd,
    pub mine: Mapped,
    pub theirs: Option<Mapped>,
    /// Where the next record goes, and where theirs is expected.
    pub at: usize,
    pub theirs_at: usize,
    pub incarnation: u64,
    /// The other side's hello.
    pub hello: Option<Hello>,
}

impl Forged {
    fn new(socket: OwnedFd) -> Forged {
        let fd = memory(LEN as u64, true);
        let mine = Mapped::new(fd.as_fd(), LEN, true);
        Forged { socket, fd, mine, theirs: None, at: 0, theirs_at: 0, incarnation: rand::random(), hello: None }
    }

    pub fn dial(address: &str) -> Forged {
        let socket = socket();
        rustix::net::connect(&socket, &socket_name(address)).unwrap();
        Forged::new(socket)
    }

    pub fn accept(listener: &OwnedFd) -> Forged {
        Forged::new(rustix::net::accept_with(listener, SocketFlags::CLOEXEC).unwrap())
    }

    /// Dials, and completes the connection up to the first record; `reads` is whether it claims to read the peer's memory.
    pub fn connect(address: &str, reads: bool) -> Forged {
        Forged::connect_as(address, reads, Hello::valid())
    }

    pub fn connect_as(address: &str, reads: bool, hello: Hello) -> Forged {
        let mut this = Forged::dial(address);
        let fd = this.fd.try_clone().unwrap();
        this.send(&Packet::Hello(hello), &[fd.as_fd()]);
        let (packet, fds) = this.receive().expect("a welcome packet");
        let Packet::Welcome { hello, .. } = packet else { panic!("{packet:?}") };
        this.hello = Some(hello);
        this.theirs = Some(Mapped::new(fds[0].as_fd(), LEN, false));
        this.send(&Packet::Ready { reads }, &[]);
        this
    }

    /// The other end of `connect`, for a peer that was dialled.
    pub fn welcome(&mut self, reads: bool) {
        let (packet, fds) = self.receive().expect("a hello packet");
        let Packet::Hello(hello) = packet else { panic!("{packet:?}") };
        self.hello = Some(hello);
        self.theirs = Some(Mapped::of(&fds[0]));
        let fd = self.fd.try_clone().unwrap();
        self.send(&Packet::Welcome { hello: Hello::valid(), reads }, &[fd.as_fd()]);
    }

    /// As `connect`, and completes the handshake.
    pub fn after_handshake(address: &str, reads: bool) -> Forged {
        Forged::after_handshake_as(address, reads, Hello::valid())
    }

    pub fn after_handshake_as(address: &str, reads: bool, hello: Hello) -> Forged {
        let mut this = Forged::connect_as(address, reads, hello);
        this.shake_hands();
        let theirs = this.take(BYTES);
        assert!(theirs.starts_with(b"calomel\0"));
        this
    }

    pub fn shake_hands(&mut self) {
        self.put(BYTES, &wire::greeting(self.incarnation, 64 << 20));
    }

    pub fn segment(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn send(&self, packet: &Packet, fds: &[BorrowedFd<'_>]) {
        self.send_raw(&postcard::to_stdvec(packet).unwrap(), fds);
    }

    /// Ignores errors: the other side may have hung up.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let _ = rustix::net::sendmsg(&self.socket, &[io::IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// False if nothing arrives in time.
    fn wait(&self, time: Duration) -> bool {
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        rustix::event::poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&time)).unwrap() > 0
    }

    /// The next packet other than a doorbell; `None`: the other side has hung up.
    #[track_caller]
    pub fn receive(&self) -> Option<(Packet, Vec<OwnedFd>)> {
        loop {
            assert!(self.wait(Duration::from_secs(5)), "the peer neither sends nor hangs up");
            match self.receive_one()? {
                (Packet::Doorbell, _) => {}
                packet => return Some(packet),
            }
        }
    }

    /// The next packet other than a doorbell, if it has arrived.
    pub fn receive_now(&self) -> Option<(Packet, Vec<OwnedFd>)> {
        while self.wait(Duration::ZERO) {
            match self.receive_one()? {
                (Packet::Doorbell, _) => {}
                packet => return Some(packet),
            }
        }
        None
    }

    /// The next packet, with its descriptors; `None`: the other side has hung up.
    fn receive_one(&self) -> Option<(Packet, Vec<OwnedFd>)> {
        let mut bytes = [0; 1000];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [io::IoSliceMut::new(&mut bytes)];
        let n = match rustix::net::recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::CONNRESET) => return None,
            Err(error) => panic!("{error}"),
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                fds.extend(some);
            }
        }
        if n == 0 {
            return None;
        }
        Some((postcard::from_bytes(&bytes[..n]).unwrap(), fds))
    }

    /// Waits for the other side to hang up; returns the reason that it sent, if any.
    #[track_caller]
    pub fn hung_up(&self) -> Option<String> {
        let (mut reason_given, begin) = (None, Instant::now());
        while let Some((packet, _)) = self.receive() {
            if let Packet::Refused { reason } = packet {
                reason_given = Some(reason);
            }
            assert!(begin.elapsed() < Duration::from_secs(5), "the peer does not hang up");
        }
        reason_given
    }

    pub fn set(&self, word: Word, value: u64) {
        self.mine.word(word.offset()).store(value, Ordering::SeqCst);
        self.ring_doorbell();
    }

    /// Writes a word of the ring.
    pub fn overwrite_word(&self, at: usize, value: u64) {
        self.mine.word(HEAD + at % RING).store(value, Ordering::SeqCst);
    }

    pub fn get(&self, word: Word) -> u64 {
        self.theirs.as_ref().unwrap().word(word.offset()).load(Ordering::SeqCst)
    }

    pub fn ring_doorbell(&self) {
        let _ = rustix::net::send(&self.socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Whether a record of this length would overwrite nothing that the other side has not read.
    pub fn has_room(&self, len: usize) -> bool {
        let next = self.at + (8 + len).next_multiple_of(64) + 64;
        next as u64 <= self.get(Word::Taken) + RING as u64
    }

    /// True when the other side has closed its socket. Doorbells and packets are discarded.
    pub fn has_hung_up(&self) -> bool {
        loop {
            if !self.wait(Duration::ZERO) {
                return false;
            }
            match rustix::net::recv(&self.socket, &mut [0u8; 1000], RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return true,
                Ok(_) => {}
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub fn put(&mut self, kind: u64, body: &[u8]) {
        self.put_header(kind << 32 | body.len() as u64, body);
    }

    pub fn put_header(&mut self, header: u64, body: &[u8]) {
        self.mine.write(self.at + 8, body);
        let next = self.at + (8 + body.len()).next_multiple_of(64);
        self.mine.word(HEAD + next % RING).store(0, Ordering::SeqCst);
        self.mine.word(HEAD + self.at % RING).store(header, Ordering::SeqCst);
        self.at = next;
        self.ring_doorbell();
    }

    /// Writes two records so that the first becomes visible together with the second.
    pub fn put_two(&mut self, first: (u64, &[u8]), second: (u64, &[u8])) {
        let after = |at: usize, body: &[u8]| at + (8 + body.len()).next_multiple_of(64);
        let (at, behind) = (self.at, after(self.at, first.1));
        let next = after(behind, second.1);
        self.mine.write(at + 8, first.1);
        self.mine.write(behind + 8, second.1);
        self.mine.word(HEAD + next % RING).store(0, Ordering::SeqCst);
        self.mine.word(HEAD + behind % RING).store(second.0 << 32 | second.1.len() as u64, Ordering::SeqCst);
        self.mine.word(HEAD + at % RING).store(first.0 << 32 | first.1.len() as u64, Ordering::SeqCst);
        self.at = next;
        self.ring_doorbell();
    }

    /// Sends a message as a frame of its own.
    pub fn send_message(&mut self, message: &Message, body: &[u8]) {
        self.put(BYTES, &message.frame(body));
    }

    /// Calls `name`; the rest of its `size` bytes of arguments follows if `body` is shorter.
    pub fn call(&mut self, call: u64, name: &str, size: usize, body: &[u8]) {
        let message = Message::call(call, name, size);
        self.send_message(&message, body);
    }

    /// Announces `len` bytes of the arguments of call 1.
    pub fn announce(&mut self, len: usize) {
        self.call(1, "swallow", 1 << 20, &[]);
        self.send_message(&Message::Data { stream: Stream::Request, id: 1, offset: 0, len: len as u32 }, &[]);
    }

    /// Sends a loan of pieces: block, address and length.
    pub fn send_loan(&mut self, slot: u64, id: u64, pieces: &[[u64; 3]]) {
        if slot < 16 {
            self.set(Word::Granted(slot as usize), id);
        }
        let words = [slot, id].into_iter().chain(pieces.iter().flatten().copied());
        let body: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        self.put(LOAN, &body);
    }

    /// The next record, if it has arrived: kind and body.
    pub fn try_next(&mut self) -> Option<(u64, Vec<u8>)> {
        let theirs = self.theirs.as_ref()?;
        let header = theirs.word(HEAD + self.theirs_at % RING).load(Ordering::SeqCst);
        if header == 0 {
            return None;
        }
        let (kind, len) = (header >> 32, header as u32 as usize);
        let body = theirs.read(self.theirs_at + 8, len);
        self.theirs_at += (8 + len).next_multiple_of(64);
        self.set(Word::Taken, self.theirs_at as u64);
        Some((kind, body))
    }

    /// Waits for the next record: kind and body.
    #[track_caller]
    pub fn next(&mut self) -> (u64, Vec<u8>) {
        let begin = Instant::now();
        loop {
            if let Some(record) = self.try_next() {
                return record;
            }
            assert!(begin.elapsed() < Duration::from_secs(5), "no record");
            std::thread::yield_now();
        }
    }

    /// The next record of this kind; others are discarded.
    #[track_caller]
    pub fn take(&mut self, kind: u64) -> Vec<u8> {
        loop {
            let (found, body) = self.next();
            if found == kind {
                return body;
            }
        }
    }

    /// The next loan of the other side: slot, number and pieces.
    #[track_caller]
    pub fn take_loan(&mut self) -> (usize, u64, Vec<u64>) {
        let body = self.take(LOAN);
        let words: Vec<u64> = body.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        (words[0] as usize, words[1], words[2..].to_vec())
    }
}
