//! Workers that one process forks: each makes its own engine, and no secret or identifier is the same in two of them. Checked
//! on the wire, as an attacker would.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;

use calomel::{BulkMode, Engine, Request};

use crate::common::wire::{CHALLENGE, Message, PIECE_LEN, PREFIX_LEN, REFUSAL, Range, greeting, piece};
use crate::roles::say;
use crate::support::*;

const KEY: &str = "a key of more than sixteen bytes";
const WORKERS: usize = 3;
const EXPOSURES: usize = 4;

#[test]
fn forked_workers_share_no_secrets() {
    let _watchdog = Watchdog::start("forked_workers_share_no_secrets");
    let mut child = Child::start("siblings", &[]);
    child.hear("nothing is shared");
    assert!(child.wait(BOUND).success());
}

/// The role behind [`forked_workers_share_no_secrets`].
pub fn run() {
    // Workers of a process that has no engine, and of one that has made some; the process's own engines differ as well.
    let mut seen = Seen::default();
    let before = workers();
    let own = [keyed(), server()];
    let after = workers();
    for worker in before.iter().chain(&after) {
        seen.look_at(&worker.addresses);
    }
    own.iter().for_each(serve);
    seen.look_at(&own.each_ref().map(|engine| engine.address().to_string()));
    assert_eq!(seen.all.len(), seen.count, "something is the same in two engines: {:?}", seen.twice);
    // The first connection to each engine, on which it draws every number for the first time.
    let [first, others @ ..] = &workers()[..] else { unreachable!("there are some") };
    let recorded = recorded(&first.addresses[0]);
    for other in others {
        let kinds: Vec<u8> = replay(&other.addresses[0], &recorded).iter().map(|piece| piece[PIECE_LEN - 1]).collect();
        assert!(
            kinds == [CHALLENGE] || kinds == [CHALLENGE, REFUSAL],
            "the proof for another engine was accepted: pieces {kinds:?}"
        );
    }
    own.iter().for_each(|engine| engine.finalize().unwrap());
    say("nothing is shared");
}

fn keyed() -> Engine {
    configured().listen(anywhere()).pre_shared_key(KEY).build().unwrap()
}

fn serve(engine: &Engine) {
    define_add(engine);
    let memory: Vec<_> = (0..EXPOSURES).map(|_| engine.expose(vec![0u8; 8], BulkMode::ReadWrite).unwrap()).collect();
    engine.define("memory", move |_: &Request, ()| memory.iter().map(|each| each.bulk()).collect::<Vec<_>>()).unwrap();
}

/// A forked process with two engines, of which the first requires a key. It ends with this value.
struct Worker {
    addresses: [String; 2],
    pid: libc::pid_t,
    _stay: OwnedFd,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: a child of this process, which has not been waited for; and a pointer to a variable of the right type.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::waitpid(self.pid, &mut status, 0) }, self.pid);
    }
}

fn pipe() -> [OwnedFd; 2] {
    let mut ends = [0; 2];
    // SAFETY: the pointer is to an array of two.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: they have just been made, and have no other owner.
    ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) })
}

/// Forked sequentially, before any of them is waited for.
fn workers() -> Vec<Worker> {
    let started: Vec<_> = (0..WORKERS).map(|_| start()).collect();
    let begin = |(pid, reader, _stay): (libc::pid_t, OwnedFd, OwnedFd)| {
        let mut text = String::new();
        std::fs::File::from(reader).read_to_string(&mut text).unwrap();
        let addresses: Vec<String> = text.lines().map(str::to_owned).collect();
        Worker { addresses: addresses.try_into().unwrap_or_else(|_| panic!("a worker printed {text:?}")), pid, _stay }
    };
    started.into_iter().map(begin).collect()
}

fn start() -> (libc::pid_t, OwnedFd, OwnedFd) {
    let [[reader, writer], [stay, held]] = [pipe(), pipe()];
    // SAFETY: the child does what a user's worker would do, and ends without returning from here.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid > 0 {
        return (pid, reader, held);
    }
    drop((reader, held));
    let work = std::panic::AssertUnwindSafe(move || {
        let engines = [keyed(), server()];
        engines.iter().for_each(serve);
        let mut writer = std::fs::File::from(writer);
        engines.iter().for_each(|engine| writeln!(writer, "{}", engine.address()).unwrap());
        drop(writer);
        let mut gone = [libc::pollfd { fd: stay.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        // SAFETY: the pointer is to as many as it says.
        unsafe { libc::poll(gone.as_mut_ptr(), 1, 60_000) };
    });
    let code = if std::panic::catch_unwind(work).is_ok() { 0 } else { 101 };
    // SAFETY: ends the process, without running what belongs to its parent.
    unsafe { libc::_exit(code) }
}

/// Values that engines have sent, each of which must be unique.
#[derive(Default)]
struct Seen {
    all: HashSet<Vec<u8>>,
    twice: Vec<&'static str>,
    count: usize,
}

impl Seen {
    fn note(&mut self, what: &'static str, bytes: &[u8]) {
        self.count += 1;
        if !self.all.insert([what.as_bytes(), bytes].concat()) {
            self.twice.push(what);
        }
    }

    fn look_at(&mut self, [keyed, plain]: &[String; 2]) {
        let mut stream = dial(keyed);
        stream.write_all(&piece(CHALLENGE, &[1; 32])).unwrap();
        let challenge = take_piece(&mut stream);
        assert_eq!(challenge[PIECE_LEN - 1], CHALLENGE);
        self.note("a challenge", &challenge[PIECE_LEN..]);
        let mut stream = dial(plain);
        stream.write_all(&greeting(77, 1 << 20)).unwrap();
        let hello = take_piece(&mut stream);
        let (incarnation, _) = postcard::take_from_bytes::<u64>(&hello[PIECE_LEN..]).unwrap();
        self.note("an incarnation", &incarnation.to_le_bytes());
        stream.write_all(&Message::call(1, "memory", 0).frame(&[])).unwrap();
        loop {
            let (message, body) = take_frame(&mut stream);
            match message {
                Message::Ticket { ticket } => self.note("a resumption token", &ticket.to_le_bytes()),
                Message::Response { .. } => {
                    let bulks: Vec<calomel::Bulk> = postcard::from_bytes(&body).unwrap();
                    assert_eq!(bulks.len(), EXPOSURES);
                    return bulks.iter().for_each(|bulk| self.note("a token", &Range::of(0, bulk).token));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

fn dial(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream
}

fn take(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn length(bytes: &[u8]) -> usize {
    u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize
}

fn take_piece(stream: &mut TcpStream) -> Vec<u8> {
    let preamble = take(stream, 16);
    let rest = take(stream, length(&preamble[12..]));
    [preamble, rest].concat()
}

fn take_frame(stream: &mut TcpStream) -> (Message, Vec<u8>) {
    let prefix = take(stream, PREFIX_LEN);
    let frame = take(stream, length(&prefix[4..]));
    let (message, body) = frame.split_at(length(&prefix[8..]));
    (Message::take(message).unwrap().0, body.to_vec())
}

/// The complete messages of a handshake.
fn pieces(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut pieces = Vec::new();
    while bytes.len() >= PIECE_LEN && bytes.starts_with(crate::common::wire::MAGIC) {
        let len = 16 + length(&bytes[12..]);
        pieces.push(&bytes[..len.min(bytes.len())]);
        bytes = bytes.get(len..).unwrap_or_default();
    }
    pieces
}

/// The bytes that a client with the key sends to the engine at `address`.
fn recorded(address: &str) -> Vec<u8> {
    let target = address.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = format!("tcp://{}", listener.local_addr().unwrap());
    let recorder = thread::spawn(move || {
        let (near, far) = (listener.accept().unwrap().0, dial(&target));
        let (mut back, mut answers) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let answering = thread::spawn(move || {
            let _ = std::io::copy(&mut answers, &mut back);
            let _ = back.shutdown(Shutdown::Both);
        });
        let (mut near, mut far, mut recorded_bytes, mut buffer) = (near, far, Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = near.read(&mut buffer) {
            recorded_bytes.extend_from_slice(&buffer[..n]);
            if far.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = far.shutdown(Shutdown::Both);
        answering.join().unwrap();
        recorded_bytes
    });
    let client = configured().pre_shared_key(KEY).build().unwrap();
    let to = client.lookup(&proxy).unwrap();
    assert_serves(&client, &to);
    client.finalize().unwrap();
    recorder.join().unwrap()
}

/// Sends the messages of that handshake to another engine; returns those that it sends.
fn replay(address: &str, recorded_bytes: &[u8]) -> Vec<Vec<u8>> {
    let [challenge, proof, hello] = pieces(recorded_bytes)[..] else { panic!("a client with the key sends three messages") };
    let mut stream = dial(address);
    stream.write_all(challenge).unwrap();
    let theirs = take_piece(&mut stream);
    stream.write_all(&[proof, hello].concat()).unwrap();
    // An engine that accepted the proof has not ended the connection.
    let _ = stream.shutdown(Shutdown::Write);
    let mut received = Vec::new();
    // One that refused it may close with bytes unread, and its last bytes are lost.
    let _ = stream.read_to_end(&mut received);
    std::iter::once(theirs).chain(pieces(&received).into_iter().map(<[u8]>::to_vec)).collect()
}
