//! Peers that speak another protocol, or another version of this one: they get no answer or a clear one, and no call waits for
//! them longer than its timeout.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Address, Engine, Error};

use crate::assert_error;
use crate::common::wire::{MAGIC, VERSION, frame, greeting, preamble};
use crate::support::*;

/// Listens, and runs `serve` with each connection; ends with the test.
fn listener(serve: impl Fn(TcpStream) + Send + 'static) -> String {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", socket.local_addr().unwrap());
    thread::spawn(move || socket.incoming().flatten().for_each(serve));
    address
}

/// Calls an address without an engine; returns the error, and how long it took.
fn call(engine: &Engine, address: &str) -> (Error, Duration) {
    let endpoint = engine.lookup(address).unwrap();
    let begin = Instant::now();
    let error = engine.procedure::<(u32, u32), u32>("add").on(&endpoint).call(&(1, 2)).unwrap_err();
    assert!(error.to_string().contains(address), "{error}");
    assert!(!endpoint.is_connected());
    (error, begin.elapsed())
}

#[track_caller]
fn assert_unreachable(engine: &Engine, address: &str, bound: Duration) {
    let (error, took) = call(engine, address);
    assert!(took < bound, "{took:?}: {error}");
    assert_error!(Err::<(), _>(error), Error::Unreachable { .. });
}

const AT_ONCE: Duration = Duration::from_secs(1);
/// The engines' connect timeout of 2 s, and some slack.
const CONNECTING: Duration = Duration::from_secs(4);

#[test]
fn call_to_http_server_is_unreachable() {
    let _watchdog = Watchdog::start("call_to_http_server_is_unreachable");
    let engine = client();
    let address = listener(|mut stream| {
        let mut request = [0u8; 16];
        let _ = stream.read_exact(&mut request);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
    });
    for _ in 0..3 {
        let (error, took) = call(&engine, &address);
        assert!(took < AT_ONCE && error.to_string().contains("HTTP"), "{took:?}: {error}");
        assert_error!(Err::<(), _>(error), Error::Unreachable { .. });
    }
    assert_lives(&engine);
}

#[test]
fn call_to_server_that_hangs_up_or_sends_garbage_is_unreachable() {
    let _watchdog = Watchdog::start("call_to_server_that_hangs_up_or_sends_garbage_is_unreachable");
    let engine = client();
    assert_unreachable(&engine, &listener(drop), AT_ONCE);
    for seed in 0..20 {
        let address = listener(move |mut stream| {
            let _ = stream.write_all(&pattern(seed, 1000));
        });
        assert_unreachable(&engine, &address, AT_ONCE);
    }
    // The right magic followed by garbage; half a handshake, then the end.
    let address = listener(|mut stream| {
        let _ = stream.write_all(&preamble(VERSION, VERSION, 50));
        let _ = stream.write_all(&[0xff; 50]);
        let _ = stream.read(&mut [0; 1]);
    });
    assert_unreachable(&engine, &address, AT_ONCE);
    let address = listener(|mut stream| {
        let _ = stream.write_all(&preamble(VERSION, VERSION, u32::MAX));
        let _ = stream.read(&mut [0; 1]);
        thread::sleep(Duration::from_secs(10));
    });
    assert_unreachable(&engine, &address, AT_ONCE);
    let address = listener(|mut stream| {
        let _ = stream.write_all(&MAGIC[..5]);
    });
    assert_unreachable(&engine, &address, AT_ONCE);
    assert_lives(&engine);
}

#[test]
fn call_to_silent_server_is_unreachable_after_the_connect_timeout() {
    let _watchdog = Watchdog::start("call_to_silent_server_is_unreachable_after_the_connect_timeout");
    let engine = client();
    let silent = listener(|stream| {
        thread::sleep(Duration::from_secs(30));
        drop(stream);
    });
    assert_unreachable(&engine, &silent, CONNECTING);
    let half = listener(|mut stream| {
        let _ = stream.write_all(&preamble(VERSION, VERSION, 100));
        thread::sleep(Duration::from_secs(30));
    });
    assert_unreachable(&engine, &half, CONNECTING);
    // The call's own deadline applies when it is shorter.
    let endpoint = engine.lookup(&silent).unwrap();
    let begin = Instant::now();
    let add = engine.procedure::<(u32, u32), u32>("add");
    assert_error!(add.on(&endpoint).timeout(Duration::from_millis(50)).call(&(1, 2)), Error::Timeout { .. });
    assert!(begin.elapsed() < AT_ONCE);
    assert_lives(&engine);
}

/// A socket whose accept queue is full, so that the kernel no longer answers; and the connections that fill it.
fn black_hole() -> (SocketAddr, Vec<TcpStream>, TcpListener) {
    // SAFETY: makes a new descriptor, which has no other owner.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0);
    // SAFETY: the descriptor was made above, and the listener is its only owner.
    let listener = unsafe { TcpListener::from_raw_fd(socket) };
    let any = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be() },
        sin_zero: [0; 8],
    };
    let len = size_of_val(&any) as libc::socklen_t;
    // SAFETY: the address is valid for `len` bytes, for as long as the call lasts.
    assert_eq!(unsafe { libc::bind(listener.as_raw_fd(), (&raw const any).cast(), len) }, 0);
    // SAFETY: takes numbers only.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(300)) {
        waiting.push(stream);
        assert!(waiting.len() < 100, "the queue never fills");
    }
    (address, waiting, listener)
}

#[test]
fn call_to_full_accept_queue_is_unreachable_after_the_connect_timeout() {
    let _watchdog = Watchdog::start("call_to_full_accept_queue_is_unreachable_after_the_connect_timeout");
    let engine = client();
    let (address, _waiting, _listener) = black_hole();
    assert_unreachable(&engine, &format!("tcp://{address}"), CONNECTING);
    let begin = Instant::now();
    let endpoint = engine.lookup(format!("tcp://{address}")).unwrap();
    let add = engine.procedure::<(u32, u32), u32>("add");
    assert_error!(add.on(&endpoint).timeout(Duration::from_millis(50)).call(&(1, 2)), Error::Timeout { .. });
    assert!(begin.elapsed() < AT_ONCE);
    // Nor does finalizing wait for it.
    let pending = add.on(&endpoint).start(&(1, 2)).unwrap();
    let begin = Instant::now();
    engine.finalize().unwrap();
    assert!(begin.elapsed() < CONNECTING);
    assert_error!(pending.wait(), Error::Finalized { .. } | Error::Unreachable { .. } | Error::Cancelled { .. });
}

#[test]
fn call_to_closed_port_is_unreachable_at_once() {
    let _watchdog = Watchdog::start("call_to_closed_port_is_unreachable_at_once");
    let engine = client();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", socket.local_addr().unwrap());
    drop(socket);
    assert_unreachable(&engine, &address, AT_ONCE);
    // A name that doesn't resolve fails in the lookup or in the call.
    let add = engine.procedure::<(u32, u32), u32>("add");
    let result = engine.lookup("tcp://no-such-host.invalid:1").and_then(|endpoint| add.on(&endpoint).call(&(1, 2)));
    assert_error!(result, Error::Unreachable { peer, .. } if peer.to_string() == "tcp://no-such-host.invalid:1");
    assert_lives(&engine);
}

#[test]
fn call_to_another_version_reports_both_versions() {
    let _watchdog = Watchdog::start("call_to_another_version_reports_both_versions");
    let engine = client();
    for (low, high) in [(900, 901), (0, 0)] {
        let address = listener(move |mut stream| {
            let _ = stream.write_all(&preamble(low, high, 0));
            let _ = stream.read(&mut [0; 1]);
        });
        let (error, took) = call(&engine, &address);
        assert!(took < AT_ONCE && !error.is_retryable());
        let text = error.to_string();
        assert!(text.contains(&low.to_string()) && text.contains(&high.to_string()), "{text}");
        assert_error!(Err::<(), _>(error), Error::Version { theirs, .. } if theirs == (low, high));
    }
    assert_lives(&engine);
}

/// Connects without being an engine, sends `bytes`, and returns what comes back until the server hangs up.
fn send_raw(address: &Address, bytes: &[u8]) -> Vec<u8> {
    let text = address.to_string();
    let mut stream = TcpStream::connect(text.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
    // The server may hang up during this.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the server does not hang up: {error}"),
    }
    answer
}

#[test]
fn server_hangs_up_on_http_requests() {
    let _watchdog = Watchdog::start("server_hangs_up_on_http_requests");
    let engine = server();
    for request in ["GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "c", "\0", "calomeX\0 and more"] {
        let begin = Instant::now();
        let answer = send_raw(&engine.address(), request.as_bytes());
        assert!(answer.is_empty() || answer.starts_with(MAGIC));
        // Bytes that may still become a handshake are waited for until the connect timeout, not longer.
        let bound = if "calomel\0".starts_with(request) { CONNECTING } else { AT_ONCE };
        assert!(begin.elapsed() < bound, "{request:?}: {:?}", begin.elapsed());
    }
    assert_lives(&engine);
}

#[test]
fn server_hangs_up_on_half_a_handshake() {
    let _watchdog = Watchdog::start("server_hangs_up_on_half_a_handshake");
    let engine = server();
    let address = engine.address();
    thread::scope(|s| {
        for part in [0, 1, 8, 12, 16, 40] {
            let address = &address;
            s.spawn(move || {
                let begin = Instant::now();
                let whole = [preamble(VERSION, VERSION, 100), vec![0; 100]].concat();
                send_raw(address, &whole[..part]);
                let took = begin.elapsed();
                assert!(took > Duration::from_millis(500) && took < CONNECTING, "{took:?}");
            });
        }
        // Other clients are served meanwhile.
        assert_lives(&engine);
    });
    assert_lives(&engine);
}

#[test]
fn server_sends_its_versions_to_another_version() {
    let _watchdog = Watchdog::start("server_sends_its_versions_to_another_version");
    let engine = server();
    let begin = Instant::now();
    let answer = send_raw(&engine.address(), &preamble(900, 901, 0));
    assert!(begin.elapsed() < AT_ONCE);
    assert!(answer.len() >= 16 && answer.starts_with(MAGIC), "{answer:?}");
    let number = |at: usize| u16::from_le_bytes([answer[at], answer[at + 1]]);
    assert!(number(8) <= number(10) && number(10) < 900);
    assert_lives(&engine);
}

#[test]
fn garbage_from_one_peer_leaves_others_connected() {
    let _watchdog = Watchdog::start("garbage_from_one_peer_leaves_others_connected");
    let engine = server();
    define_add(&engine);
    let good = client();
    let endpoint = good.lookup(engine.address()).unwrap();
    assert_serves(&good, &endpoint);
    let hello = greeting(7, 127);
    let mut random = Random(0x6ea2);
    for round in 0..200 {
        let noise = pattern(random.next(), random.below(5000));
        let bytes = match round % 4 {
            0 => noise,
            // After the handshake: frames of any length, with any content.
            1 => [hello.clone(), noise].concat(),
            2 => [hello.clone(), frame(&noise, &[])].concat(),
            // Small numbers, as at the start of messages.
            _ => {
                let mut bytes = hello.clone();
                for _ in 0..20 {
                    let message: Vec<u8> = (0..1 + random.below(60)).map(|_| random.next() as u8 % 20).collect();
                    bytes.extend(frame(&message, &[]));
                }
                bytes
            }
        };
        let text = engine.address().to_string();
        let mut stream = TcpStream::connect(text.strip_prefix("tcp://").unwrap()).unwrap();
        let _ = stream.write_all(&bytes);
        if round % 2 == 0 {
            let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
            let _ = stream.read(&mut [0; 100]);
        }
        drop(stream);
        assert_serves(&good, &endpoint);
    }
    // A frame longer than the limit.
    let begin = Instant::now();
    send_raw(&engine.address(), &[hello, vec![0xff; 12], vec![0; 100]].concat());
    assert!(begin.elapsed() < AT_ONCE);
    assert_lives(&engine);
    assert!(endpoint.is_connected(), "one peer's garbage ended another's connection");
}
