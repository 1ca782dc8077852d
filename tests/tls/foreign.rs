//! Peers that speak TLS and are no engines: they say what an engine never would, or when it never would.

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

/// How long a handshake may take here, and who has connected to greet.
const LIMIT: Duration = Duration::from_millis(1500);
/// What engines say that they speak inside of TLS.
const INSIDE: &[u8] = b"calomel";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The certificate of one, and the key of one.
fn shown(certificate: &Identity, key: &Identity) -> Arc<SingleCertAndKey> {
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

/// What a client of these engines is told that shows this of itself; TLS with all that the library would do.
fn client(authority: &Authority, shown: Option<Arc<SingleCertAndKey>>) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots(authority));
    let mut config = match shown {
        Some(shown) => builder.with_client_cert_resolver(shown),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![INSIDE.to_vec()];
    config
}

/// The same for a server, that lets everybody in.
fn server(shown: Arc<SingleCertAndKey>) -> ServerConfig {
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_no_client_auth().with_cert_resolver(shown);
    config.alpn_protocols = vec![INSIDE.to_vec()];
    config
}

/// An engine that lets everybody in whom TLS lets in, certificate or not.
fn engine(authority: &Authority) -> Engine {
    let tls = authority.tls().anonymous_clients(true);
    // Nothing that is forgotten comes up again with a sign of life.
    let builder = Engine::builder().connect_timeout(LIMIT).heartbeat(10 * BOUND).tls(tls);
    let engine = builder.listen("tcp://127.0.0.1:0").build().unwrap();
    engine.define("length", |_: &Request, bytes: Vec<u8>| bytes.len() as u64).unwrap();
    engine
}

fn socket(engine: &Engine) -> SocketAddr {
    engine.address().to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
}

/// A call of `length` with so many bytes.
fn call(number: u64, len: usize) -> Vec<u8> {
    let arguments = postcard::to_stdvec(&pattern(number, len)).unwrap();
    Message::call(number, "length", arguments.len()).frame(&arguments)
}

/// One that dials engines.
struct Foreign {
    tls: ClientConnection,
    stream: TcpStream,
    /// What it was told and has not looked at.
    heard: Vec<u8>,
    greeted: bool,
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
        Foreign { tls, stream, heard: Vec::new(), greeted: false }
    }

    /// To the end of the handshake as this side sees it; the last thing that it has to say about that is not sent yet.
    fn shake(&mut self) -> io::Result<()> {
        // Behind its hello it is quiet: what it might say before its turn would wake whom it must not.
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

    /// Sends this with all that was not sent yet, in one piece.
    fn say(&mut self, bytes: &[u8]) {
        self.tls.writer().write_all(bytes).unwrap();
        let mut all = Vec::new();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut all).unwrap();
        }
        self.stream.write_all(&all).unwrap();
    }

    /// The same, but each byte is a record.
    fn say_byte_by_byte(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.tls.writer().write_all(&[*byte]).unwrap());
        self.say(&[]);
    }

    /// False at the end, where TLS says that it is one.
    fn listen(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        let n = rustls::Stream::new(&mut self.tls, &mut self.stream).read(&mut bytes)?;
        self.heard.extend_from_slice(&bytes[..n]);
        Ok(n > 0)
    }

    /// What is answered to a call; nothing else is expected.
    #[track_caller]
    fn answer(&mut self, number: u64) -> u64 {
        loop {
            let word = |at: usize| u32::from_le_bytes(self.heard[at..at + 4].try_into().unwrap()) as usize;
            let whole = match self.greeted {
                false if self.heard.len() >= PIECE_LEN => 16 + word(12),
                true if self.heard.len() >= PREFIX_LEN => PREFIX_LEN + word(4),
                _ => usize::MAX,
            };
            if self.heard.len() < whole {
                assert!(self.listen().unwrap(), "the engine has hung up");
                continue;
            }
            let frame: Vec<u8> = self.heard.drain(..whole).collect();
            if std::mem::replace(&mut self.greeted, true)
                && let (Message::Response { call, .. }, body) = postcard::take_from_bytes(&frame[PREFIX_LEN..]).unwrap()
                && call == number
            {
                return postcard::from_bytes(body).unwrap();
            }
        }
    }

    /// That nothing more is said, not even a greeting, and the connection ends.
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
        assert!(!late && begin.elapsed() < BOUND, "{what}: it lives on");
    }

    /// The alert that ends it.
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

/// One that is dialled: each connection has its handshake, and then this. Ends with what it returns.
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
            let mut shaken = Ok(());
            while tls.is_handshaking() && shaken.is_ok() {
                shaken = tls.complete_io(&mut stream).map(drop);
            }
            let _ = sender.send(then(&mut tls, &mut stream, shaken));
        }
    });
    (address, receiver)
}

/// A client engine's call there.
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
fn a_certificate_without_its_key() {
    let _watchdog = Watchdog::start("foreign::a_certificate_without_its_key");
    let authority = Authority::new();
    let engine = engine(&authority);
    let (good, other) = (authority.identity(&["127.0.0.1"]), authority.identity(&["127.0.0.1"]));
    let mut peer = Foreign::dial(&engine, &Arc::new(client(&authority, Some(shown(&good, &other)))));
    peer.shake().unwrap();
    peer.say(&[greeting(1, 1 << 20), call(1, 10)].concat());
    assert_eq!(peer.alert(), Some(AlertDescription::DecryptError));
    assert!(peer.heard.is_empty(), "it is spoken with");
    // With its own it is let in.
    let mut peer = Foreign::dial(&engine, &Arc::new(client(&authority, Some(shown(&good, &good)))));
    peer.shake().unwrap();
    peer.say(&[greeting(2, 1 << 20), call(1, 10)].concat());
    assert_eq!(peer.answer(1), 10);
    // And the other way around.
    let (address, _) = dialled(server(shown(&good, &other)), 1, |_, _, shaken| shaken.is_ok());
    match dial(&authority, &address) {
        Err(Error::AccessDenied { reason, .. }) if reason.contains("its certificate is not accepted") => {}
        other => panic!("{other:?}"),
    }
}

/// A certificate that is good for something else does not make an engine.
#[test]
fn one_that_speaks_something_else_inside() {
    let _watchdog = Watchdog::start("foreign::one_that_speaks_something_else_inside");
    let authority = Authority::new();
    let engine = engine(&authority);
    let identity = authority.identity(&["127.0.0.1"]);
    for (inside, alert) in [(vec![], None), (vec![b"h2".to_vec()], Some(AlertDescription::NoApplicationProtocol))] {
        let mut config = client(&authority, Some(shown(&identity, &identity)));
        config.alpn_protocols = inside.clone();
        let mut peer = Foreign::dial(&engine, &Arc::new(config));
        if peer.shake().is_ok() {
            peer.say(&[greeting(1, 1 << 20), call(1, 10)].concat());
        }
        let ended = peer.alert();
        assert!(alert.is_none() || ended.is_none() || ended == alert, "{ended:?}");
        assert!(peer.heard.is_empty(), "{inside:?}: it is spoken with");
        let mut config = server(shown(&identity, &identity));
        config.alpn_protocols = inside;
        let (address, _) = dialled(config, 1, |tls, stream, shaken| {
            let n = shaken.and_then(|()| rustls::Stream::new(tls, stream).read(&mut [0; 100])).unwrap_or(0);
            assert_eq!(n, 0, "it is greeted");
        });
        let error = dial(&authority, &address).unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    }
}

/// Whoever has been let in once shows its certificate again, and nothing is said before that.
#[test]
fn nobody_resumes() {
    let _watchdog = Watchdog::start("foreign::nobody_resumes");
    let authority = Authority::new();
    let engine = engine(&authority);
    let identity = authority.identity(&["127.0.0.1"]);
    let mut config = client(&authority, Some(shown(&identity, &identity)));
    config.enable_early_data = true;
    let config = Arc::new(config);
    for round in 1..4 {
        let mut peer = Foreign::dial(&engine, &config);
        assert!(peer.tls.early_data().is_none(), "early data is taken");
        peer.shake().unwrap();
        peer.say(&[greeting(round, 1 << 20), call(1, 10)].concat());
        assert_eq!(peer.answer(1), 10);
        assert_eq!(peer.tls.handshake_kind(), Some(HandshakeKind::Full));
        assert_eq!(peer.tls.tls13_tickets_received(), 0);
    }
    // A server that would have it does not get it.
    let mut config = server(shown(&identity, &identity));
    config.max_early_data_size = 1 << 14;
    let (address, seen) = dialled(config, 3, |tls, stream, shaken| {
        shaken.unwrap();
        let early = tls.early_data().is_some();
        // The greeting: what the handshake ends with has been read by then.
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

/// A hello of TLS 1.2, such as clients sent that knew nothing newer.
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
fn older_versions_are_refused() {
    let _watchdog = Watchdog::start("foreign::older_versions_are_refused");
    let authority = Authority::new();
    let engine = engine(&authority);
    let mut stream = TcpStream::connect(socket(&engine)).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.write_all(&older_hello()).unwrap();
    let mut said = Vec::new();
    stream.read_to_end(&mut said).unwrap();
    // An alert: fatal, protocol version.
    assert_eq!((said.first(), &said[said.len() - 2..]), (Some(&0x15), &[2, 70][..]), "{said:?}");
    // Nor is one offered to servers.
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

/// What is said in one breath with the end of the handshake is heard without anything that follows.
#[test]
fn what_comes_with_the_end_of_the_handshake() {
    let _watchdog = Watchdog::start("foreign::what_comes_with_the_end_of_the_handshake");
    let authority = Authority::new();
    let engine = engine(&authority);
    let config = Arc::new(client(&authority, None));
    for (round, len) in [0, 1, 1000, 3000, 5000, 16_384, 60_000, 300_000].into_iter().enumerate() {
        let mut peer = Foreign::dial(&engine, &config);
        peer.shake().unwrap();
        peer.say(&[greeting(round as u64, 1 << 20), call(1, len)].concat());
        assert_eq!(peer.answer(1), len as u64);
        // And with a renewal of keys.
        for number in 2..5 {
            peer.tls.refresh_traffic_keys().unwrap();
            peer.say(&call(number, len));
            assert_eq!(peer.answer(number), len as u64);
        }
    }
}

/// A connection that takes little at a time: with short segments, the engine's system keeps little as well.
fn little(engine: &Engine) -> TcpStream {
    let little = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    little.set_recv_buffer_size(2048).unwrap();
    little.set_tcp_mss(100).unwrap();
    little.connect(&socket(engine).into()).unwrap();
    little.into()
}

/// What does not fit into what the sockets take goes out when there is room, also when nothing is said after it.
#[test]
fn answers_are_as_long_as_they_are() {
    let _watchdog = Watchdog::start("foreign::answers_are_as_long_as_they_are");
    let authority = Authority::new();
    let engine = engine(&authority);
    engine.define("bytes", |_: &Request, len: u64| pattern(1, len as usize)).unwrap();
    let config = Arc::new(client(&authority, None));
    for len in [60_000, 63_000, 100_000, 180_000] {
        let mut peer = Foreign::over(little(&engine), &engine, &config);
        peer.shake().unwrap();
        let arguments = postcard::to_stdvec(&(len as u64)).unwrap();
        let call = Message::call(1, "bytes", arguments.len()).frame(&arguments);
        peer.say(&[greeting(len as u64, 1 << 20), call].concat());
        // Until no more fits. If this is too short once, less is waited for.
        thread::sleep(Duration::from_millis(100));
        let bytes = pattern(1, len);
        // Whatever else it is told behind that.
        let end = &bytes[len - 100..];
        while !peer.heard[peer.heard.len().saturating_sub(1000)..].windows(end.len()).any(|window| window == end) {
            let more = peer.listen();
            assert!(matches!(more, Ok(true)), "{more:?} after {} bytes of {len}", peer.heard.len());
        }
    }
}

/// A handshake that does not fit into what the sockets take goes on when there is room.
#[test]
fn certificates_are_as_long_as_they_are() {
    let _watchdog = Watchdog::start("foreign::certificates_are_as_long_as_they_are");
    let authority = Authority::new();
    let names: Vec<String> = (0..1880).map(|i| format!("this-is-the-engine-{i}.example")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).chain(["127.0.0.1"]).collect();
    let identity = authority.identity(&names);
    assert!(identity.der.len() > 60_000);
    let tls = identity.of(authority.trusted());
    let engine = Engine::builder().heartbeat(10 * BOUND).tls(tls).listen("tcp://127.0.0.1:0").build().unwrap();
    engine.define("length", |_: &Request, bytes: Vec<u8>| bytes.len() as u64).unwrap();
    for round in 0..5 {
        let config = Arc::new(client(&authority, Some(shown(&identity, &identity))));
        let mut peer = Foreign::over(little(&engine), &engine, &config);
        peer.tls.write_tls(&mut peer.stream).unwrap();
        // Until no more fits. If this is too short once, less is waited for.
        thread::sleep(Duration::from_millis(50));
        peer.shake().unwrap();
        peer.say(&[greeting(round, 1 << 20), call(1, 1000)].concat());
        assert_eq!(peer.answer(1), 1000);
    }
}

/// Those who keep an engine busy, until this is dropped: so that it does not look after everybody all the time, but after who
/// has news.
struct Crowd {
    over: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Crowd {
    fn around(engine: &Engine, config: &Arc<ClientConfig>) -> Crowd {
        let over = Arc::new(AtomicBool::new(false));
        let threads = (0..6).map(|i| {
            let (mut peer, over) = (Foreign::dial(engine, config), over.clone());
            thread::spawn(move || {
                peer.shake().unwrap();
                peer.say(&greeting(1000 + i, 1 << 20));
                for number in 1.. {
                    peer.say(&call(number, 10));
                    assert_eq!(peer.answer(number), 10);
                    if over.load(Ordering::SeqCst) {
                        return;
                    }
                }
            })
        });
        Crowd { threads: threads.collect(), over }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let ended = self.threads.drain(..).all(|thread| thread.join().is_ok());
        assert!(ended || thread::panicking(), "one of the crowd is not served");
    }
}

/// However much comes at once, and in however many records, all of it is looked at without anything that follows.
#[test]
fn what_comes_at_once() {
    let _watchdog = Watchdog::start("foreign::what_comes_at_once");
    let authority = Authority::new();
    let engine = engine(&authority);
    let config = Arc::new(client(&authority, None));
    for crowd in [false, true] {
        let _crowd = crowd.then(|| Crowd::around(&engine, &config));
        for round in 0..20 {
            let mut peer = Foreign::dial(&engine, &config);
            peer.shake().unwrap();
            peer.say_byte_by_byte(&[greeting(round, 1 << 20), call(1, 100)].concat());
            assert_eq!(peer.answer(1), 100);
            peer.say_byte_by_byte(&call(2, 3000));
            assert_eq!(peer.answer(2), 3000);
            peer.say(&call(3, 500_000));
            assert_eq!(peer.answer(3), 500_000);
        }
    }
}

/// What is said in one breath with the end is heard before that.
#[test]
fn what_comes_with_the_end() {
    let _watchdog = Watchdog::start("foreign::what_comes_with_the_end");
    let authority = Authority::new();
    let engine = engine(&authority);
    let _crowd = Crowd::around(&engine, &Arc::new(client(&authority, None)));
    let (sender, receiver) = mpsc::channel();
    engine.define("last", move |_: &Request, n: u32| sender.send(n).unwrap()).unwrap();
    let config = Arc::new(client(&authority, None));
    for round in 0..20 {
        let mut peer = Foreign::dial(&engine, &config);
        peer.shake().unwrap();
        peer.say(&[greeting(round, 1 << 20), call(1, 10)].concat());
        assert_eq!(peer.answer(1), 10);
        let mut last = Message::call(2, "last", 1);
        if let Message::Request { one_way, .. } = &mut last {
            *one_way = true;
        }
        peer.tls.writer().write_all(&last.frame(&[round as u8])).unwrap();
        peer.tls.send_close_notify();
        peer.say(&[]);
        assert_eq!(receiver.recv_timeout(BOUND), Ok(round as u32));
        peer.assert_ended("one that has closed");
    }
}

/// An engine that ends a connection says so as TLS demands.
#[test]
fn an_engine_that_ends_says_so() {
    let _watchdog = Watchdog::start("foreign::an_engine_that_ends_says_so");
    let authority = Authority::new();
    let engine = engine(&authority);
    let mut peer = Foreign::dial(&engine, &Arc::new(client(&authority, None)));
    peer.shake().unwrap();
    peer.say(&[greeting(1, 1 << 20), call(1, 10)].concat());
    assert_eq!(peer.answer(1), 10);
    let closing = thread::spawn(move || engine.finalize().unwrap());
    while peer.listen().unwrap() {}
    closing.join().unwrap();
}

/// Who was let in and does not greet has no more time than another, whatever it says of TLS meanwhile.
#[test]
fn who_never_greets() {
    let _watchdog = Watchdog::start("foreign::who_never_greets");
    let authority = Authority::new();
    let engine = engine(&authority);
    let config = Arc::new(client(&authority, None));
    let begin = Instant::now();
    let mut peers: Vec<Foreign> = (0..10).map(|_| Foreign::dial(&engine, &config)).collect();
    for (i, peer) in peers.iter_mut().enumerate() {
        peer.shake().unwrap();
        peer.say(&greeting(1, 1 << 20)[..i]);
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
            assert!(begin.elapsed() < BOUND, "renewals of keys go for a greeting");
            thread::sleep(Duration::from_millis(30));
        }
    });
    peers.iter_mut().for_each(|peer| peer.assert_ended("one that does not greet"));
    let after = begin.elapsed();
    assert!(after > LIMIT / 2 && after < patience() * (LIMIT + Duration::from_secs(5)), "{after:?}");
    talks.join().unwrap();
}

/// Who is dialled and goes on with its handshake no further than this is given up in time.
#[test]
fn a_server_that_does_not_finish() {
    let _watchdog = Watchdog::start("foreign::a_server_that_does_not_finish");
    let authority = Authority::new();
    let client = Engine::builder().connect_timeout(LIMIT).tls(authority.tls()).build().unwrap();
    // Nothing; the beginning of a record; the beginning of a handshake's message; and the first byte of a record for ever.
    for said in [&[][..], &[0x16], &[0x16, 3, 3, 0, 5, 2, 0, 0x40, 0, 3]] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = client.lookup(format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
        let begin = Instant::now();
        let pending = client.procedure::<Vec<u8>, u64>("length").on(&to).start(&vec![1]).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(said).unwrap();
        let error = pending.wait().unwrap_err();
        let after = begin.elapsed();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        assert!(after > LIMIT / 2 && after < patience() * (LIMIT + Duration::from_secs(5)), "{after:?}");
        // It has hung up, and has said nothing but its hello.
        stream.set_read_timeout(Some(BOUND)).unwrap();
        let mut hello = Vec::new();
        stream.read_to_end(&mut hello).unwrap();
        let length = usize::from(u16::from_be_bytes([hello[3], hello[4]]));
        assert_eq!((hello[0], hello.len()), (0x16, 5 + length), "more than a hello");
        let _ = stream.shutdown(Shutdown::Both);
    }
}
