//! Peers that do not finish their TLS handshakes, and peers that do not speak TLS at all.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use calomel::{Engine, Request};

use crate::authority::Authority;
use crate::common::*;

/// How long a TLS handshake may take here.
const LIMIT: Duration = Duration::from_millis(1500);

fn server(authority: &Authority, limit: Duration) -> Engine {
    let builder = Engine::builder().connect_timeout(limit).tls(authority.tls());
    let engine = builder.listen("tcp://127.0.0.1:0").build().unwrap();
    engine.define("double", |_: &Request, n: u32| 2 * n).unwrap();
    engine
}

fn socket(engine: &Engine) -> SocketAddr {
    engine.address().to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
}

/// A new client is served in good time.
#[track_caller]
fn assert_serves_new_clients(authority: &Authority, server: &Engine) {
    let begin = Instant::now();
    let client = Engine::builder().tls(authority.tls()).build().unwrap();
    let to = client.lookup(server.address()).unwrap();
    assert_eq!(client.procedure::<u32, u32>("double").on(&to).call(&21).unwrap(), 42);
    client.finalize().unwrap();
    assert!(begin.elapsed() < patience() * Duration::from_secs(3), "{:?}", begin.elapsed());
}

/// Waits until the other side has ended the connection; discards what it sends before.
#[track_caller]
fn assert_ended(stream: &mut TcpStream, what: &str) {
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let mut thrown = [0; 4096];
    loop {
        match stream.read(&mut thrown) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => return,
            Err(error) => panic!("{what}: {error}"),
        }
    }
}

/// The first bytes of a real handshake, as a client sends them.
fn client_hello(authority: &Authority) -> Vec<u8> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let builder = Engine::builder().connect_timeout(Duration::from_secs(2)).tls(authority.tls());
    let client = builder.build().unwrap();
    let to = client.lookup(format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
    let pending = client.procedure::<u32, u32>("double").on(&to).start(&1).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let mut hello = vec![0; 4096];
    let n = stream.read(&mut hello).unwrap();
    hello.truncate(n);
    drop((pending, stream));
    client.finalize().unwrap();
    hello
}

/// A stream that stops at one of several points of the handshake.
fn half_handshake(server: &Engine, hello: &[u8], i: usize) -> TcpStream {
    let mut stream = TcpStream::connect(socket(server)).unwrap();
    let part = [0, 1, 5, hello.len() / 2, hello.len()][i % 5];
    stream.write_all(&hello[..part]).unwrap();
    stream
}

#[test]
fn half_handshakes_above_the_limit_replace_the_oldest() {
    let _watchdog = Watchdog::start("hostile::half_handshakes_above_the_limit_replace_the_oldest");
    let authority = Authority::new();
    // Their time limit is longer than this test.
    let server = server(&authority, 10 * BOUND);
    let hello = client_hello(&authority);
    let mut streams: Vec<TcpStream> = Vec::new();
    for i in 0..600 {
        streams.push(half_handshake(&server, &hello, i));
        if i % 100 == 99 {
            assert_serves_new_clients(&authority, &server);
        }
    }
    // The oldest made room for the youngest.
    for stream in &mut streams[..300] {
        assert_ended(stream, "a handshake above the limit");
    }
    server.finalize().unwrap();
    for stream in &mut streams {
        assert_ended(stream, "a handshake whose engine is gone");
    }
}

#[test]
fn stalled_handshakes_time_out() {
    let _watchdog = Watchdog::start("hostile::stalled_handshakes_time_out");
    let authority = Authority::new();
    let server = server(&authority, LIMIT);
    let hello = client_hello(&authority);
    // Not all at the same time.
    for _ in 0..3 {
        let mut streams: Vec<TcpStream> = (0..20).map(|i| half_handshake(&server, &hello, i)).collect();
        let begin = Instant::now();
        assert_serves_new_clients(&authority, &server);
        let (early, late) = streams.split_at_mut(10);
        early.iter_mut().for_each(|stream| assert_ended(stream, "a stalled handshake"));
        let after = begin.elapsed();
        assert!(after > LIMIT / 2 && after < patience() * (LIMIT + Duration::from_secs(5)), "{after:?}");
        late.iter_mut().for_each(|stream| assert_ended(stream, "a stalled handshake"));
    }
    server.finalize().unwrap();
}

/// Sending a byte now and then does not extend the time of a handshake.
#[test]
fn slow_handshakes_time_out() {
    let _watchdog = Watchdog::start("hostile::slow_handshakes_time_out");
    let authority = Authority::new();
    let server = server(&authority, LIMIT);
    let hello = client_hello(&authority);
    let mut stream = TcpStream::connect(socket(&server)).unwrap();
    let begin = Instant::now();
    for byte in hello {
        if stream.write_all(&[byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(30));
        assert!(begin.elapsed() < patience() * (LIMIT + Duration::from_secs(3)), "the handshake has no time limit");
    }
    assert!(begin.elapsed() >= LIMIT, "{:?}", begin.elapsed());
    assert_ended(&mut stream, "a slow handshake");
    assert_serves_new_clients(&authority, &server);
}

#[test]
fn connections_without_tls_are_refused() {
    let _watchdog = Watchdog::start("hostile::connections_without_tls_are_refused");
    let authority = Authority::new();
    let server = server(&authority, LIMIT);
    let hello = client_hello(&authority);
    let mut random = Random(11);
    for round in 0..200 {
        let mut stream = TcpStream::connect(socket(&server)).unwrap();
        let mut bytes = match round % 4 {
            0 => b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            1 => (0..random.below(5000)).map(|_| random.next() as u8).collect(),
            // A record that claims to be long, and another.
            2 => [&[0x16, 3, 1, 0x40, 0][..], &[1, 0xff, 0xff, 0xff], &vec![0; 0x4000 - 4]].concat().repeat(6),
            _ => hello.clone(),
        };
        if round % 4 == 3 {
            let bit = random.below(8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        assert_ended(&mut stream, "garbage");
        if round % 50 == 0 {
            assert_serves_new_clients(&authority, &server);
        }
    }
    assert_serves_new_clients(&authority, &server);
    server.finalize().unwrap();
}

/// A peer that was refused and keeps sending is read only for a bounded time.
#[test]
fn refused_peer_that_keeps_sending_is_disconnected() {
    let _watchdog = Watchdog::start("hostile::refused_peer_that_keeps_sending_is_disconnected");
    let authority = Authority::new();
    let server = server(&authority, LIMIT);
    let mut stream = TcpStream::connect(socket(&server)).unwrap();
    stream.set_write_timeout(Some(BOUND)).unwrap();
    let begin = Instant::now();
    let mut sent = 0;
    while stream.write_all(&[b'x'; 4096]).is_ok() {
        sent += 4096;
        assert!(begin.elapsed() < BOUND && sent < 100 << 20, "{sent} bytes were read");
    }
    // The same for a peer that sends nothing more.
    let mut silent = TcpStream::connect(socket(&server)).unwrap();
    silent.write_all(&[b'x'; 100]).unwrap();
    let mut alert = [0; 7];
    silent.read_exact(&mut alert).unwrap();
    assert_eq!(alert[0], 0x15, "{alert:?}");
    assert_ended(&mut silent, "a refused peer");
    eventually("the connection is closed", || silent.write_all(b"x").is_err());
    assert!(begin.elapsed() < patience() * (LIMIT + Duration::from_secs(10)), "{:?}", begin.elapsed());
    assert_serves_new_clients(&authority, &server);
}
