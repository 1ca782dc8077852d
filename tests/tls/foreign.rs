//! Peers that speak TLS and are not engines: they send what an engine never would, or at another time.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, Request};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{AlertDescription, ClientConfig, ClientConnection, HandshakeKind, RootCertStore, ServerConfig, ServerConnection};
use socket2::{Domain, Socket, Type};

use crate::authority::{Authority, Identity};
use crate::common::wire::{Message, PIECE_LEN, PREFIX_LEN, greeting};
use crate::common::*;

/// How long the TLS handshake may take here, and then the engine's handshake.
const LIMIT: Duration = Duration::from_millis(1500);
/// The protocol (ALPN) that engines negotiate inside TLS.
const INSIDE: &[u8] = b"calomel";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The certificate of one identity, with the key of another.
fn certified_key(certificate: &Identity, key: &Identity) -> Arc<SingleCertAndKey> {
    let key = PrivateKeyDer::from_pem_slice(key.key.as_bytes()).unwrap();
    let key = provider().key_provider.load_private_key(key).unwrap();
    let chain = vec![CertificateDer::from(certificate.der.clone())];
    Arc::new(SingleCertAndKey::from(CertifiedKey::new(chain, key)))
}

fn roots(authority: &Authority) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    roots
}

/// The configuration of a client with this certificate, with all features of the TLS library.
fn client(authority: &Authority, certified_key: Option<Arc<SingleCertAndKey>>) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots(authority));
    let mut config = match certified_key {
        Some(certified_key) => builder.with_client_cert_resolver(certified_key),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![INSIDE.to_vec()];
    config
}

/// The same for a server, which accepts every client.
fn server(certified_key: Arc<SingleCertAndKey>) -> ServerConfig {
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_no_client_auth().with_cert_resolver(certified_key);
    config.alpn_protocols = vec![INSIDE.to_vec()];
    config
}

/// An engine that accepts every peer that TLS accepts, with a certificate or without.
fn engine(authority: &Authority) -> Engine {
    let tls = authority.tls().anonymous_clients(true);
    // No liveness probe hides a forgotten event.
    let builder = Engine::builder().connect_timeout(LIMIT).peer_timeout(10 * BOUND).tls(tls);
    let engine = builder.listen("tcp://127.0.0.1:0").build().unwrap();
    engine.define("length", |_: &Request, bytes: Vec<u8>| bytes.len() as u64).unwrap();
    engine
}

fn socket(engine: &Engine) -> SocketAddr {
    engine.address().to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
}

/// A call of `length` with this many bytes.
fn call(number: u64, len: usize) -> Vec<u8> {
    let arguments = postcard::to_stdvec(&pattern(number, len)).unwrap();
    Message::call(number, "length", arguments.len()).frame(&arguments)
}

/// A peer that dials engines.
struct Foreign {
    tls: ClientConnection,
    stream: TcpStream,
    /// Bytes received and not parsed yet.
    received: Vec<u8>,
    handshake_done: bool,
}

impl Foreign {
    fn dial(engine: &Engine, config: &Arc<ClientConfig>) -> Foreign {
        Foreign::over(TcpStream::connect(socket(engine)).unwrap(), engine, config)
    }

    fn over(stream: TcpStream, engine: &Engine, config: &Arc<ClientConfig>) -> Foreign {
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream.set_write_timeout(Some(BOUND)).unwrap();
        let name = socket(engine).ip().into();
        let mut tls = ClientConnection::new(config.clone(), name).unwrap();
        tls.set_buffer_limit(None);
        Foreign { tls, stream, received: Vec::new(), handshake_done: false }
    }

    /// Completes the handshake on this side; its last message is not sent yet.
    fn complete_handshake(&mut self) -> io::Result<()> {
        // After its hello it waits: bytes sent too early would wake the engine, and hide a missed event.
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.stream)?;
        }
        while self.tls.is_handshaking() {
            if self.tls.read_tls(&mut self.stream)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.tls.process_new_packets().map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Sends these bytes and all that was not sent yet, in one write.
    fn send(&mut self, bytes: &[u8]) {
        self.tls.writer().write_all(bytes).unwrap();
        let mut all = Vec::new();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut all).unwrap();
        }
        self.stream.write_all(&all).unwrap();
    }

    /// The same, with each byte in a record of its own.
    fn send_byte_by_byte(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.tls.writer().write_all(&[*byte]).unwrap());
        self.send(&[]);
    }

    /// False at the end of the stream, if TLS announced it.
    fn listen(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        let n = rustls::Stream::new(&mut self.tls, &mut self.stream).read(&mut bytes)?;
        self.received.extend_from_slice(&bytes[..n]);
        Ok(n > 0)
    }

    /// Waits for the response to a call; no other message is expected.
    #[track_caller]
    fn answer(&mut self, number: u64) -> u64 {
        loop {
            let word = |at: usize| u32::from_le_bytes(self.received[at..at + 4].try_into().unwrap()) as usize;
            let whole = match self.handshake_done {
                false if self.received.len() >= PIECE_LEN => 16 + word(12),
                true if self.received.len() >= PREFIX_LEN => PREFIX_LEN + word(4),
                _ => usize::MAX,
            };
            if self.received.len() < whole {
                assert!(self.listen().unwrap(), "the engine has hung up");
                continue;
            }
            let frame: Vec<u8> = self.received.drain(..whole).collect();
            if std::mem::replace(&mut self.handshake_done, true)
                && let (Message::Response { call, .. }, body) = Message::take(&frame[PREFIX_LEN..]).unwrap()
                && call == number
            {
                return postcard::from_bytes(body).unwrap();
            }
        }
    }

    /// Asserts that nothing more is received, not even a handshake, and the connection ends.
    #[track_caller]
    fn assert_ended(&mut self, what: &str) {
        let begin = Instant::now();
        let ended = loop {
            match self.listen() {
                Ok(true) => {}
                ended => break ended,
            }
        };
        let late = matches!(&ended, Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
        assert!(!late && begin.elapsed() < BOUND, "{what}: the connection stays open");
    }

    /// The alert that ends the connection.
    fn alert(&mut self) -> Option<AlertDescription> {
        let error = loop {
            match self.listen() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => break error,
            }
        };
        match error.get_ref()?.downcast_ref()? {
            rustls::Error::AlertReceived(alert) => Some(*alert),
            _ => None,
        }
    }
}

/// A peer that is dialled: runs the handshake and `then` on each connection; returns its result.
fn dialled<R: Send + 'static>(
    config: ServerConfig,
    connections: usize,
    mut then: impl FnMut(&mut ServerConnection, &mut TcpStream, io::Result<()>) -> R + Send + 'static,
) -> (String, mpsc::Receiver<R>) {
    let (config, listener) = (Arc::new(config), TcpListener::bind("127.0.0.1:0").unwrap());
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming().take(connections) {
            let mut stream = stream.unwrap();
            stream.set_read_timeout(Some(BOUND)).unwrap();
            let mut tls = ServerConnection::new(config.clone()).unwrap();
            let mut handshake = Ok(());
            while tls.is_handshaking() && handshake.is_ok() {
                handshake = tls.complete_io(&mut stream).map(drop);
            }
            let _ = sender.send(then(&mut tls, &mut stream, handshake));
        }
    });
    (address, receiver)
}

/// Calls the peer from a client engine.
fn dial(authority: &Authority, address: &str) -> calomel::Result<u64> {
    let client = Engine::builder().connect_timeout(LIMIT).tls(authority.tls()).build().unwrap();
    let to = client.lookup(address).unwrap();
    let begin = Instant::now();
    let result = client.procedure::<Vec<u8>, u64>("length").on(&to).call(&vec![1]);
    assert!(begin.elapsed() < patience() * (LIMIT + Duration::from_secs(5)), "{:?}", begin.elapsed());
    client.finalize().unwrap();
    result
}

#[test]
fn certificate_without_its_key_is_refused() {
    let _watchdog = Watchdog::start("foreign::certificate_without_its_key_is_refused");
    let authority = Authority::new();
    let engine = engine(&authority);
    let (good, other) = (authority.identity(&["127.0.0.1"]), authority.identity(&["127.0.0.1"]));
    let mut peer = Foreign::dial(&engine, &Arc::new(client(&authority, Some(certified_key(&good, &other)))));
    peer.complete_handshake().unwrap();
    peer.send(&[greeting(1, 1 << 20), call(1, 10)].concat());
    assert_eq!(peer.alert(), Some(AlertDescription::DecryptError));
    assert!(peer.received.is_empty(), "the engine has sent data");
    // With its own key it is accepted.
    let mut peer = Foreign::dial(&engine, &Arc::new(client(&authority, Some(certified_key(&good, &good)))));
    peer.complete_handshake().unwrap();
    peer.send(&[greeting(2, 1 << 20), call(1, 10)].concat());
    assert_eq!(peer.answer(1), 10);
    // And in the other direction.
    let (address, _) = dialled(server(certified_key(&good, &other)), 1, |_, _, handshake| handshake.is_ok());
    match dial(&authority, &address) {
        Err(Error::AccessDenied { reason, .. }) if reason.contains("its certificate is not accepted") => {}
        other => panic!("{other:?}"),
    }
}

/// A valid certificate for another protocol does not make a peer an engine.
#[test]
fn peer_without_the_engines_alpn_is_refused() {
    let _watchdog = Watchdog::start("foreign::peer_without_the_engines_alpn_is_refused");
    let authority = Authority::new();
    let engine = engine(&authority);
    let identity = authority.identity(&["127.0.0.1"]);
    for (inside, alert) in [(vec![], None), (vec![b"h2".to_vec()], Some(AlertDescription::NoApplicationProtocol))] {
        let mut config = client(&authority, Some(certified_key(&identity, &identity)));
        config.alpn_protocols = inside.clone();
        let mut peer = Foreign::dial(&engine, &Arc::new(config));
        if peer.complete_handshake().is_ok() {
            peer.send(&[greeting(1, 1 << 20), call(1, 10)].concat());
        }
        let ended = peer.alert();
        assert!(alert.is_none() || ended.is_none() || ended == alert, "{ended:?}");
        assert!(peer.received.is_empty(), "{inside:?}: the engine has sent data");
        let mut config = server(certified_key(&identity, &identity));
        config.alpn_protocols = inside;
        let (address, _) = dialled(config, 1, |tls, stream, handshake| {
            let n = handshake.and_then(|()| rustls::Stream::new(tls, stream).read(&mut [0; 100])).unwrap_or(0);
            assert_eq!(n, 0, "the engine has sent data");
        });
        let error = dial(&authority, &address).unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    }
}

/// There is no session resumption: a peer shows its certificate on each connection, and no early data is accepted.
#[test]
fn tls_sessions_are_not_resumed() {
    let _watchdog = Watchdog::start("foreign::tls_sessions_are_not_resumed");
    let authority = Authority::new();
    let engine = engine(&authority);
    let identity = authority.identity(&["127.0.0.1"]);
    let mut config = client(&authority, Some(certified_key(&identity, &identity)));
    config.enable_early_data = true;
    let config = Arc::new(config);
    for round in 1..4 {
        let mut peer = Foreign::dial(&engine, &config);
        assert!(peer.tls.early_data().is_none(), "early data is accepted");
        peer.complete_handshake().unwrap();
        peer.send(&[greeting(round, 1 << 20), call(1, 10)].concat());
        assert_eq!(peer.answer(1), 10);
        assert_eq!(peer.tls.handshake_kind(), Some(HandshakeKind::Full));
        assert_eq!(peer.tls.tls13_tickets_received(), 0);
    }
    // Nor does an engine resume a session that a server offers.
    let mut config = server(certified_key(&identity, &identity));
    config.max_early_data_size = 1 << 14;
    let (address, seen) = dialled(config, 3, |tls, stream, handshake| {
        handshake.unwrap();
        let early = tls.early_data().is_some();
        // The engine's handshake: by then, all messages of the TLS handshake have been read.
        assert!(rustls::Stream::new(tls, stream).read(&mut [0; 100]).unwrap() > 0);
        tls.send_close_notify();
        let _ = tls.complete_io(stream);
        (tls.handshake_kind(), early)
    });
    let client = Engine::builder().connect_timeout(LIMIT).tls(authority.tls()).build().unwrap();
    let to = client.lookup(&address).unwrap();
    for _ in 0..3 {
        let error = client.procedure::<Vec<u8>, u64>("length").on(&to).call(&vec![1]).unwrap_err();
        assert!(error.is_disconnected(), "{error:?}");
        assert_eq!(seen.recv_timeout(BOUND), Ok((Some(HandshakeKind::Full), false)));
    }
}

/// A TLS 1.2 hello of a client that supports nothing newer.
fn older_hello() -> Vec<u8> {
    let extensions = [
        // Groups: x25519. Points: uncompressed. Signatures: Ed25519, ECDSA and RSA. Extended master secret.
        &[0, 10, 0, 4, 0, 2, 0, 29][..],
        &[0, 11, 0, 2, 1, 0],
        &[0, 13, 0, 8, 0, 6, 8, 7, 4, 3, 8, 4],
        &[0, 23, 0, 0],
        &[0, 16, 0, 10, 0, 8, 7],
        INSIDE,
    ]
    .concat();
    let suites = [0, 6, 0xc0, 0x2b, 0xc0, 0x2f, 0xcc, 0xa9];
    let length = (extensions.len() as u16).to_be_bytes();
    let body = [&[3, 3][..], &[7; 32], &[0], &suites, &[1, 0], &length, &extensions].concat();
    let length = (body.len() as u16).to_be_bytes();
    let message = [&[1, 0][..], &length, &body].concat();
    [&[0x16, 3, 1][..], &(message.len() as u16).to_be_bytes(), &message].concat()
}

#[test]
fn tls_1_2_is_refused() {
    let _watchdog = Watchdog::start("foreign::tls_1_2_is_refused");
    let authority = Authority::new();
    let engine = engine(&authority);
    let mut stream = TcpStream::connect(socket(&engine)).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.write_all(&older_hello()).unwrap();
    let mut alert = Vec::new();
    stream.read_to_end(&mut alert).unwrap();
    // An alert: fatal, protocol version.
    assert_eq!((alert.first(), &alert[alert.len() - 2..]), (Some(&0x15), &[2, 70][..]), "{alert:?}");
    // Nor do engines offer it to servers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = Engine::builder().connect_timeout(LIMIT).tls(authority.tls()).build().unwrap();
    let to = client.lookup(format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
    let pending = client.procedure::<Vec<u8>, u64>("length").on(&to).start(&vec![1]).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let mut hello = vec![0; 4096];
    let n = stream.read(&mut hello).unwrap();
    // The extension that names versions: 1.3 alone.
    let versions = [0, 43, 0, 3, 2, 3, 4];
    assert!(hello[..n].windows(versions.len()).any(|window| window == versions), "{:?}", &hello[..n]);
    drop((stream, listener));
    pending.wait().unwrap_err();
}

/// Data in the same write as the end of the handshake is read, without anything that follows.
#[test]
fn data_sent_with_the_end_of_the_handshake_is_read() {
    let _watchdog = Watchdog::start("foreign::data_sent_with_the_end_of_the_handshake_is_read");
    let authority = Authority::new();
    let engine = engine(&authority);
    let config = Arc::new(client(&authority, None));
    for (round, len) in [0, 1, 1000, 3000, 5000, 16_384, 60_000, 300_000].into_iter().enumerate() {
        let mut peer = Foreign::dial(&engine, &config);
        peer.complete_handshake().unwrap();
        peer.send(&[greeting(round as u64, 1 << 20), call(1, len)].concat());
        assert_eq!(peer.answer(1), len as u64);
        // And with a key update.
        for number in 2..5 {
            peer.tls.refresh_traffic_keys().unwrap();
            peer.send(&call(number, len));
            assert_eq!(peer.answer(number), len as u64);
        }
    }
}

/// A connection with small buffers: short segments keep those of the engine's kernel small as well.
fn little(engine: &Engine) -> TcpStream {
    let little = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    little.set_recv_buffer_size(2048).unwrap();
    little.set_tcp_mss(100).unwrap();
    little.connect(&socket(engine).into()).unwrap();
    little.into()
}

/// Data that exceeds the socket buffers is sent when there is room, even if nothing is received afterwards.
#[test]
fn responses_longer_than_socket_buffers_arrive() {
    let _watchdog = Watchdog::start("foreign::responses_longer_than_socket_buffers_arrive");
    let authority = Authority::new();
    let engine = engine(&authority);
    engine.define("bytes", |_: &Request, len: u64| pattern(1, len as usize)).unwrap();
    let config = Arc::new(client(&authority, None));
    for len in [60_000, 63_000, 100_000, 180_000] {
        let mut peer = Foreign::over(little(&engine), &engine, &config);
        peer.complete_handshake().unwrap();
        let arguments = postcard::to_stdvec(&(len as u64)).unwrap();
        let call = Message::call(1, "bytes", arguments.len()).frame(&arguments);
        peer.send(&[greeting(len as u64, 1 << 20), call].concat());
        // Until the buffers are full. If this is too short once, the test waits for less.
        thread::sleep(Duration::from_millis(100));
        let bytes = pattern(1, len);
        // Until the response to a later call.
        let end = &bytes[len - 100..];
        while !peer.received[peer.received.len().saturating_sub(1000)..].windows(end.len()).any(|window| window == end) {
            let more = peer.listen();
            assert!(matches!(more, Ok(true)), "{more:?} after {} bytes of {len}", peer.received.len());
        }
    }
}

/// A handshake that exceeds the socket buffers continues when there is room.
#[test]
fn handshakes_longer_than_socket_buffers_complete() {
    let _watchdog = Watchdog::start("foreign::handshakes_longer_than_socket_buffers_complete");
    let authority = Authority::new();
    let names: Vec<String> = (0..1880).map(|i| format!("this-is-the-engine-{i}.example")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).chain(["127.0.0.1"]).collect();
    let identity = authority.identity(&names);
    assert!(identity.der.len() > 60_000);
    let tls = identity.of(authority.trusted());
    let engine = Engine::builder().peer_timeout(10 * BOUND).tls(tls).listen("tcp://127.0.0.1:0").build().unwrap();
    engine.define("length", |_: &Request, bytes: Vec<u8>| bytes.len() as u64).unwrap();
    for round in 0..5 {
        let config = Arc::new(client(&authority, Some(certified_key(&identity, &identity))));
        let mut peer = Foreign::over(little(&engine), &engine, &config);
        peer.tls.write_tls(&mut peer.stream).unwrap();
        // Until the buffers are full. If this is too short once, the test waits for less.
        thread::sleep(Duration::from_millis(50));
        peer.complete_handshake().unwrap();
        peer.send(&[greeting(round, 1 << 20), call(1, 1000)].concat());
        assert_eq!(peer.answer(1), 1000);
    }
}

/// Peers that keep an engine busy until this is dropped: then the engine does not check all connections all the time, but only
/// those with events.
struct BusyPeers {
    over: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl BusyPeers {
    fn around(engine: &Engine, config: &Arc<ClientConfig>) -> BusyPeers {
        let over = Arc::new(AtomicBool::new(false));
        let threads = (0..6).map(|i| {
            let (mut peer, over) = (Foreign::dial(engine, config), over.clone());
            thread::spawn(move || {
                peer.complete_handshake().unwrap();
                peer.send(&greeting(1000 + i, 1 << 20));
                for number in 1.. {
                    peer.send(&call(number, 10));
                    assert_eq!(peer.answer(number), 10);
                    if over.load(Ordering::SeqCst) {
                        return;
                    }
                }
            })
        });
        BusyPeers { threads: threads.collect(), over }
    }
}

impl Drop for BusyPeers {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let ended = self.threads.drain(..).all(|thread| thread.join().is_ok());
        assert!(ended || thread::panicking(), "one of the busy peers is not served");
    }
}

/// Whatever arrives at once, in however many records, is processed without anything that follows.
#[test]
fn many_records_at_once_are_all_read() {
    let _watchdog = Watchdog::start("foreign::many_records_at_once_are_all_read");
    let authority = Authority::new();
    let engine = engine(&authority);
    let config = Arc::new(client(&authority, None));
    for crowd in [false, true] {
        let _crowd = crowd.then(|| BusyPeers::around(&engine, &config));
        for round in 0..20 {
            let mut peer = Foreign::dial(&engine, &config);
            peer.complete_handshake().unwrap();
            peer.send_byte_by_byte(&[greeting(round, 1 << 20), call(1, 100)].concat());
            assert_eq!(peer.answer(1), 100);
            peer.send_byte_by_byte(&call(2, 3000));
            assert_eq!(peer.answer(2), 3000);
            peer.send(&call(3, 500_000));
            assert_eq!(peer.answer(3), 500_000);
        }
    }
}

/// Data in the same write as the end of the stream is processed before the end.
#[test]
fn data_sent_with_the_end_is_read() {
    let _watchdog = Watchdog::start("foreign::data_sent_with_the_end_is_read");
    let authority = Authority::new();
    let engine = engine(&authority);
    let _crowd = BusyPeers::around(&engine, &Arc::new(client(&authority, None)));
    let (sender, receiver) = mpsc::channel();
    engine.define("last", move |_: &Request, n: u32| sender.send(n).unwrap()).unwrap();
    let config = Arc::new(client(&authority, None));
    for round in 0..20 {
        let mut peer = Foreign::dial(&engine, &config);
        peer.complete_handshake().unwrap();
        peer.send(&[greeting(round, 1 << 20), call(1, 10)].concat());
        assert_eq!(peer.answer(1), 10);
        let mut last = Message::call(2, "last", 1);
        if let Message::Request { one_way, .. } = &mut last {
            *one_way = true;
        }
        peer.tls.writer().write_all(&last.frame(&[round as u8])).unwrap();
        peer.tls.send_close_notify();
        peer.send(&[]);
        assert_eq!(receiver.recv_timeout(BOUND), Ok(round as u32));
        peer.assert_ended("a closed connection");
    }
}

/// An engine that ends a connection sends the close_notify that TLS requires.
#[test]
fn engine_that_ends_sends_close_notify() {
    let _watchdog = Watchdog::start("foreign::engine_that_ends_sends_close_notify");
    let authority = Authority::new();
    let engine = engine(&authority);
    let mut peer = Foreign::dial(&engine, &Arc::new(client(&authority, None)));
    peer.complete_handshake().unwrap();
    peer.send(&[greeting(1, 1 << 20), call(1, 10)].concat());
    assert_eq!(peer.answer(1), 10);
    let closing = thread::spawn(move || engine.finalize().unwrap());
    while peer.listen().unwrap() {}
    closing.join().unwrap();
}

/// A peer that completes the TLS handshake, but not the engine's, is disconnected after the connect timeout, despite other TLS
/// messages.
#[test]
fn tls_peer_without_engine_handshake_is_disconnected() {
    let _watchdog = Watchdog::start("foreign::tls_peer_without_engine_handshake_is_disconnected");
    let authority = Authority::new();
    let engine = engine(&authority);
    let config = Arc::new(client(&authority, None));
    let begin = Instant::now();
    let mut peers: Vec<Foreign> = (0..10).map(|_| Foreign::dial(&engine, &config)).collect();
    for (i, peer) in peers.iter_mut().enumerate() {
        peer.complete_handshake().unwrap();
        peer.send(&greeting(1, 1 << 20)[..i]);
    }
    let mut talks = peers.pop().unwrap();
    let talks = thread::spawn(move || {
        while talks.tls.refresh_traffic_keys().is_ok() {
            let mut all = Vec::new();
            while talks.tls.wants_write() {
                talks.tls.write_tls(&mut all).unwrap();
            }
            if talks.stream.write_all(&all).is_err() {
                return;
            }
            assert!(begin.elapsed() < BOUND, "key updates extend the time for the handshake");
            thread::sleep(Duration::from_millis(30));
        }
    });
    peers.iter_mut().for_each(|peer| peer.assert_ended("a peer without a handshake"));
    let after = begin.elapsed();
    assert!(after > LIMIT / 2 && after < patience() * (LIMIT + Duration::from_secs(5)), "{after:?}");
    talks.join().unwrap();
}

/// A server that stops in the middle of the TLS handshake is disconnected after the connect timeout.
#[test]
fn server_that_stops_in_the_handshake_is_disconnected() {
    let _watchdog = Watchdog::start("foreign::server_that_stops_in_the_handshake_is_disconnected");
    let authority = Authority::new();
    let client = Engine::builder().connect_timeout(LIMIT).tls(authority.tls()).build().unwrap();
    // Nothing; the beginning of a record; the beginning of a handshake message; and a repeated first byte of a record.
    for beginning in [&[][..], &[0x16], &[0x16, 3, 3, 0, 5, 2, 0, 0x40, 0, 3]] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = client.lookup(format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
        let begin = Instant::now();
        let pending = client.procedure::<Vec<u8>, u64>("length").on(&to).start(&vec![1]).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(beginning).unwrap();
        let error = pending.wait().unwrap_err();
        let after = begin.elapsed();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        assert!(after > LIMIT / 2 && after < patience() * (LIMIT + Duration::from_secs(5)), "{after:?}");
        // The engine has hung up, and has sent only its hello.
        stream.set_read_timeout(Some(BOUND)).unwrap();
        let mut hello = Vec::new();
        stream.read_to_end(&mut hello).unwrap();
        let length = usize::from(u16::from_be_bytes([hello[3], hello[4]]));
        assert_eq!((hello[0], hello.len()), (0x16, 5 + length), "more than a hello");
        let _ = stream.shutdown(Shutdown::Both);
    }
}
