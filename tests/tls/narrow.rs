//! A slow network, which also stalls for a while.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{BulkMode, Endpoint, Engine, EngineBuilder, Error, Request};

use crate::authority::Authority;
use crate::support::*;

/// A proxy that forwards little at a time, in both directions.
#[derive(Clone)]
struct SlowLink {
    /// Largest piece at a time.
    piece: usize,
    /// Delay before each piece.
    delay: Duration,
    /// While set, nothing is forwarded.
    held: Arc<AtomicBool>,
    /// Bytes forwarded.
    passed: Arc<AtomicUsize>,
}

impl SlowLink {
    fn new(piece: usize) -> SlowLink {
        SlowLink { piece, delay: Duration::ZERO, held: Arc::default(), passed: Arc::default() }
    }

    /// Listens, and forwards to the engine; returns its address.
    fn to(&self, engine: &Engine) -> String {
        let target: SocketAddr = engine.address().to_string().strip_prefix("tcp://").unwrap().parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        keep_little(&listener);
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let link = self.clone();
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else { continue };
                keep_little(&near);
                keep_little(&far);
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to, link) = (from.try_clone().unwrap(), to.try_clone().unwrap(), link.clone());
                    to.set_nodelay(true).unwrap();
                    thread::spawn(move || link.pass_on(from, to));
                }
            }
        });
        address
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; self.piece];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            thread::sleep(self.delay);
            while self.held.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
            self.passed.fetch_add(n, Ordering::SeqCst);
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}

fn configured(authority: &Authority) -> EngineBuilder {
    Engine::builder().peer_timeout(HEARTBEAT).tls(authority.tls())
}

/// A long heartbeat: no slow peer is disconnected.
fn patient(authority: &Authority) -> EngineBuilder {
    configured(authority).peer_timeout(3 * BOUND).default_timeout(2 * BOUND)
}

fn server(authority: &Authority) -> Engine {
    let engine = configured(authority).listen("tcp://127.0.0.1:0").build().unwrap();
    engine.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
    engine
}

fn echo(client: &Engine, to: &Endpoint, len: usize) {
    let bytes = pattern(len as u64, len);
    let back = client.procedure::<Vec<u8>, Vec<u8>>("echo").on(to).call(&bytes).unwrap();
    assert!(back == bytes, "{len}");
}

/// Records arrive in parts, and payloads begin and end in any of them.
#[test]
fn records_in_small_pieces_arrive() {
    let _watchdog = Watchdog::start("narrow::records_in_small_pieces_arrive");
    let authority = Authority::new();
    for checksums in [false, true] {
        let server = patient(&authority).payload_checksums(checksums).listen("tcp://127.0.0.1:0").build().unwrap();
        server.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
        for piece in [1, 2, 7, 1000, 16_000, 17_000, 50_000] {
            let client = patient(&authority).payload_checksums(checksums).build().unwrap();
            let to = client.lookup(SlowLink::new(piece).to(&server)).unwrap();
            for len in [0, 1, 100, 16_384, 40_000, 300_000] {
                // Byte by byte, so the payloads are short.
                let len = len.min(piece * 3000);
                echo(&client, &to, len);
                let theirs = server.expose(pattern(1, len), BulkMode::ReadWrite).unwrap();
                let mut bytes = vec![0u8; len];
                assert_eq!(theirs.bulk().on(&to).pull_into(&mut bytes).unwrap(), len);
                assert!(bytes == pattern(1, len), "a pull of {len} in pieces of {piece}");
                let bytes = pattern(2, len);
                assert_eq!(theirs.bulk().on(&to).push_from(&bytes).unwrap(), len);
                assert!(theirs.reclaim() == bytes, "a push of {len} in pieces of {piece}");
            }
            client.finalize().unwrap();
        }
        server.finalize().unwrap();
    }
}

/// The bytes of one transfer take more than twice the heartbeat, and liveness probes queue behind them.
#[test]
fn low_bandwidth_does_not_disconnect() {
    let _watchdog = Watchdog::start("narrow::low_bandwidth_does_not_disconnect");
    let authority = Authority::new();
    let server = server(&authority);
    let client = configured(&authority).build().unwrap();
    let link = SlowLink { delay: Duration::from_millis(50), ..SlowLink::new(64 << 10) };
    let to = client.lookup(link.to(&server)).unwrap();
    // At 64 KiB in 50 ms, 3 MiB take 2.4 s.
    let mut bytes = pattern(3, 3 << 20);
    let theirs = server.expose(vec![0u8; bytes.len()], BulkMode::ReadWrite).unwrap();
    let begin = Instant::now();
    assert_eq!(theirs.bulk().on(&to).push_from(&bytes).unwrap(), bytes.len());
    assert!(begin.elapsed() > 2 * HEARTBEAT, "the network was not slow: this test tests nothing");
    bytes.fill(0);
    assert_eq!(theirs.bulk().on(&to).pull_into(&mut bytes).unwrap(), bytes.len());
    assert!(bytes == pattern(3, 3 << 20));
}

/// Of memory that a peer pulls and does not read, the sender reads no more than is encrypted at a time: the rest still belongs
/// to its owner.
#[test]
fn reclaimed_memory_of_a_stalled_pull_is_not_read() {
    let _watchdog = Watchdog::start("narrow::reclaimed_memory_of_a_stalled_pull_is_not_read");
    const LEN: usize = 24 << 20;
    const UNTOUCHED: u8 = 0xcc;
    let authority = Authority::new();
    let server = patient(&authority).listen("tcp://127.0.0.1:0").build().unwrap();
    server.define("echo", |_: &Request, bytes: Vec<u8>| bytes).unwrap();
    let client = patient(&authority).build().unwrap();
    let link = SlowLink::new(64 << 10);
    let to = client.lookup(link.to(&server)).unwrap();
    echo(&client, &to, 10);
    let mut cut_inside = 0;
    // A reclaim right between two chunks would prove nothing.
    for _ in 0..4 {
        let theirs = server.expose(vec![1u8; LEN], BulkMode::ReadWrite).unwrap();
        let before = link.passed.load(Ordering::SeqCst);
        let pull = theirs.bulk().on(&to).start_pull_into(client.expose(vec![UNTOUCHED; LEN], BulkMode::WriteOnly).unwrap());
        eventually("bytes are in transit", || link.passed.load(Ordering::SeqCst) > before + (1 << 20));
        link.held.store(true, Ordering::SeqCst);
        // Until the sender's kernel accepts no more, as far as can be observed; if this is too early, less has been read yet.
        thread::sleep(Duration::from_millis(100));
        let mut back = theirs.reclaim();
        back.fill(2);
        link.held.store(false, Ordering::SeqCst);
        let (result, mine) = pull.wait();
        assert!(matches!(result, Err(Error::Revoked { .. })), "all of it was read before: {result:?}");
        let bytes = mine.reclaim();
        let count = |wanted: u8| bytes.iter().filter(|byte| **byte == wanted).count();
        let (read, zeroed) = (count(1), count(0));
        assert_eq!(read + zeroed + count(UNTOUCHED), LEN, "bytes that were written after `reclaim`");
        // The buffers of two sockets, and a chunk.
        assert!(read < LEN / 2, "{read} bytes were read");
        cut_inside += usize::from(zeroed > 0);
        echo(&client, &to, 100_000);
    }
    assert!(cut_inside > 0, "chunks are read as a whole");
}
