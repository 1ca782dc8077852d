//! Endpoints whose names are exchanged at `ip:port`. In unit tests software stands in for two of the providers that need that:
//! `tcp` for `ofi+cxi`, and the messages utility for `ofi+opx`; their names are treated as opaque.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::super::limits::{CREDITS, MESSAGE};
use super::super::provider;
use super::super::station::Station;
use super::super::sys::{EndpointName, Label, PeerAddress, Posted};
use super::super::wire::{self, ANSWER, GREETING, Greeting, GreetingAnswer, OfiContent, OfiHeader, OfiHello};
use super::BOUND;
use crate::address::OfiProvider;
use crate::proto::wire::VERSIONS;
use crate::{Address, Bulk, BulkMode, Engine, Error, Request};

/// For how long engines here try to connect.
const CONNECT: Duration = Duration::from_secs(6);

const SCHEMES: [(OfiProvider, &str); 2] = [(OfiProvider::Cxi, "ofi+cxi"), (OfiProvider::Opx, "ofi+opx")];

fn is_there(provider: OfiProvider) -> bool {
    provider::available(provider).inspect_err(|reason| println!("skipped: {reason}")).is_ok()
}

/// An engine that serves at this address.
fn server(at: &str) -> Engine {
    let engine = Engine::builder().listen(at).same_host_upgrade(false).connect_timeout(CONNECT).build().unwrap();
    engine.define("add", |_: &Request, (x, y): (u32, u32)| x + y).unwrap();
    engine
}

fn client() -> Engine {
    Engine::builder().same_host_upgrade(false).connect_timeout(CONNECT).build().unwrap()
}

fn add(client: &Engine, to: Address) -> Result<u32, Error> {
    let to = client.lookup(to)?;
    client.procedure::<(u32, u32), u32>("add").on(&to).call(&(1, 2))
}

fn socket(engine: &Engine) -> SocketAddr {
    engine.address().socket().unwrap()
}

#[test]
fn calls_go_both_ways() {
    for (provider, scheme) in SCHEMES {
        if !is_there(provider) {
            continue;
        }
        let (here, there) = (server(&format!("{scheme}://127.0.0.1:0")), server(&format!("{scheme}://127.0.0.1:0")));
        assert_ne!((socket(&here).port(), socket(&there).port()), (0, 0));
        assert!(here.address().to_string().starts_with(scheme), "{}", here.address());
        assert_eq!(add(&here, there.address()).unwrap(), 3);
        assert_eq!(add(&there, here.address()).unwrap(), 3);
        // The caller of the nested call has only dialled, and is called at the link that it made.
        there
            .define("back", |request: &Request, x: u32| {
                request.engine().procedure::<u32, u32>("double").on(request.endpoint()).call(&x).map_err(|e| e.to_string())
            })
            .unwrap();
        let client = client();
        client.define("double", |_: &Request, x: u32| 2 * x).unwrap();
        let to = client.lookup(there.address()).unwrap();
        assert_eq!(client.procedure::<u32, Result<u32, String>>("back").on(&to).call(&21).unwrap(), Ok(42));
        [here, there, client].into_iter().for_each(|engine| engine.finalize().unwrap());
    }
}

#[test]
fn bulk_data_of_a_mebibyte_goes_both_ways() {
    for (provider, scheme) in SCHEMES {
        if !is_there(provider) {
            continue;
        }
        let (server, client) = (server(&format!("{scheme}://127.0.0.1:0")), client());
        let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 7 % 251) as u8).collect();
        server
            .define("copy", |request: &Request, (from, to): (Bulk, Bulk)| -> Result<usize, String> {
                let text = |error: Error| error.to_string();
                let local = request.engine().expose(vec![0u8; from.len()], BulkMode::ReadWrite).map_err(text)?;
                from.on(request.endpoint()).pull_into(&local).map_err(text)?;
                to.on(request.endpoint()).push_from(&local).map_err(text)
            })
            .unwrap();
        let from = client.expose(data.clone(), BulkMode::ReadOnly).unwrap();
        let into = client.expose(vec![0u8; data.len()], BulkMode::WriteOnly).unwrap();
        let to = client.lookup(server.address()).unwrap();
        let copy = client.procedure::<(Bulk, Bulk), Result<usize, String>>("copy");
        assert_eq!(copy.on(&to).call(&(from.bulk(), into.bulk())).unwrap(), Ok(data.len()));
        assert!(into.reclaim() == data);
        assert!(from.reclaim() == data);
        [server, client].into_iter().for_each(|engine| engine.finalize().unwrap());
    }
}

#[test]
fn a_port_where_nobody_listens_refuses_at_once() {
    if !is_there(OfiProvider::Cxi) {
        return;
    }
    let client = client();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let begin = Instant::now();
    let error = add(&client, Address::ofi(OfiProvider::Cxi, free)).unwrap_err();
    assert!(error.to_string().to_lowercase().contains("refused"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    client.finalize().unwrap();
}

#[test]
fn a_listener_that_says_nothing_costs_the_deadline() {
    if !is_there(OfiProvider::Cxi) {
        return;
    }
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = Engine::builder().connect_timeout(Duration::from_millis(300)).build().unwrap();
    let begin = Instant::now();
    let error = add(&client, Address::ofi(OfiProvider::Cxi, silent.local_addr().unwrap())).unwrap_err();
    let elapsed = begin.elapsed();
    assert!(elapsed >= Duration::from_millis(300) && elapsed < BOUND, "{error} after {elapsed:?}");
    assert!(matches!(error, Error::Unreachable { .. } | Error::Timeout { .. }), "{error:?}");
    client.finalize().unwrap();
}

/// What listens there is something else: the error says so.
#[test]
fn other_listeners_are_named_in_the_error() {
    if !is_there(OfiProvider::Cxi) || !is_there(OfiProvider::Opx) {
        return;
    }
    let client = client();
    let opx = server("ofi+opx://127.0.0.1:0");
    let error = add(&client, Address::ofi(OfiProvider::Cxi, socket(&opx))).unwrap_err();
    assert!(error.to_string().contains("ofi+opx"), "{error}");
    assert!(!error.is_retryable(), "{error}");
    assert_eq!(add(&client, opx.address()).unwrap(), 3);
    opx.finalize().unwrap();

    let other = GreetingAnswer { versions: (900, 901), provider: Some(OfiProvider::Cxi), name: b"a name" };
    let nameless = GreetingAnswer { versions: VERSIONS, provider: Some(OfiProvider::Cxi), name: b"" };
    let foreign = GreetingAnswer { versions: VERSIONS, provider: Some(OfiProvider::Cxi), name: &[1; 100] };
    let cases: [(&[u8], &str); 5] = [
        (&[b'x'; ANSWER], "no engine"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "ended before the name"),
        (&other.encode(), "900"),
        (&nameless.encode(), "does not tell the name"),
        (&foreign.encode(), "in another way"),
    ];
    for (answer, reason) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = Address::ofi(OfiProvider::Cxi, listener.local_addr().unwrap());
        std::thread::scope(|scope| {
            // An engine tries again what may pass, until its deadline.
            scope.spawn(|| {
                listener.set_nonblocking(true).unwrap();
                let begin = Instant::now();
                while begin.elapsed() < Duration::from_secs(1) {
                    if let Ok((mut stream, _)) = listener.accept() {
                        stream.set_nonblocking(false).unwrap();
                        let mut greeting = [0; GREETING];
                        stream.read_exact(&mut greeting).unwrap();
                        assert_eq!(Greeting::decode(&greeting).unwrap().versions, VERSIONS);
                        stream.write_all(answer).unwrap();
                        return;
                    }
                    std::thread::yield_now();
                }
                panic!("nobody dials");
            });
            let error = add(&client, at).unwrap_err();
            assert!(error.to_string().contains(reason), "{reason}: {error}");
        });
    }
    client.finalize().unwrap();
}

/// Strangers at the TCP port: the engine serves others meanwhile and afterwards, and closes what is nonsense.
#[test]
fn garbage_at_the_port_is_closed() {
    if !is_there(OfiProvider::Cxi) {
        return;
    }
    let server = server("ofi+cxi://127.0.0.1:0");
    let connect = || {
        let stream = TcpStream::connect(socket(&server)).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream
    };
    let greeting = Greeting { versions: VERSIONS, provider: Some(OfiProvider::Cxi), link: (1, 2) }.encode();
    let silent: Vec<TcpStream> = (0..50).map(|_| connect()).collect();
    for nonsense in [&[0; 32][..], b"GET / HTTP/1.1\r\nHost: nobody at all\r\n\r\n", &[0xff; 100_000]] {
        let mut stream = connect();
        // It may be closed while this is on its way.
        let _ = stream.write_all(nonsense);
        assert_eq!(stream.read(&mut [0; 8]).unwrap_or(0), 0);
    }
    // More than a greeting.
    let mut more = connect();
    more.write_all(&[&greeting[..], b"more"].concat()).unwrap();
    let mut answer = [0; ANSWER];
    if more.read_exact(&mut answer).is_ok() {
        assert!(!GreetingAnswer::decode(&answer).unwrap().name.is_empty());
        assert_eq!(more.read(&mut [0; 8]).unwrap_or(0), 0);
    }
    let client = client();
    assert_eq!(add(&client, server.address()).unwrap(), 3);
    // Those that say nothing are closed in time.
    for mut stream in silent {
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    }
    [server, client].into_iter().for_each(|engine| engine.finalize().unwrap());
}

/// An endpoint of a test, which sends what it likes.
struct Endpoint {
    station: Station,
    _poll: mio::Poll,
}

impl Endpoint {
    fn open() -> Endpoint {
        let (poll, at) = (mio::Poll::new().unwrap(), "127.0.0.1:0".parse().unwrap());
        let info = provider::at(OfiProvider::Cxi, at, super::Purpose::Messages).unwrap();
        let station = Station::open(OfiProvider::Cxi, info, at, poll.registry(), mio::Token(0)).unwrap();
        (0..8).for_each(|_| drop(station.endpoint.receive(vec![0; MESSAGE], 0, Label::Message).unwrap()));
        Endpoint { station, _poll: poll }
    }

    fn name(&self) -> &[u8] {
        self.station.endpoint.name().bytes()
    }

    fn hello(&self) -> OfiHello<'_> {
        let (message, credits) = (MESSAGE as u32, CREDITS as u16);
        OfiHello { versions: VERSIONS, message, credits, incarnation: 7, link: 9, watch: 0, rma: 0, name: self.name() }
    }

    fn insert(&self, name: &[u8]) -> PeerAddress {
        self.station.av.insert(&EndpointName::opaque(name).unwrap()).unwrap()
    }

    fn say(&self, to: PeerAddress, link: u64, content: OfiContent<'_>) {
        let mut message = Vec::new();
        wire::encode(OfiHeader { sequence: 0, to: link, handled: 0 }, &content, &mut message);
        let begin = Instant::now();
        while !matches!(self.station.endpoint.send(to, message.clone(), 0, Label::Message).unwrap(), Posted::Begun) {
            assert!(begin.elapsed() < BOUND, "the provider takes nothing");
            self.station.collect().unwrap();
        }
    }

    /// The next message that comes within the time.
    fn hear(&self, within: Duration) -> Option<Vec<u8>> {
        let begin = Instant::now();
        while begin.elapsed() < within {
            for done in self.station.take_completions().unwrap() {
                if let (false, Some(buffer), Ok(len)) = (done.is_send, done.buffer, done.result) {
                    return Some(buffer[..len].to_vec());
                }
            }
            std::thread::yield_now();
        }
        None
    }

    /// Waits for the end of the link: earlier than the end of the time for the handshake.
    #[track_caller]
    fn assert_ended(&self) {
        let begin = Instant::now();
        while begin.elapsed() < CONNECT / 2 {
            let heard = self.hear(Duration::from_millis(50));
            if heard.is_some_and(|message| super::parts(&message).contains(&OfiContent::Bye)) {
                return;
            }
        }
        panic!("the link has not ended");
    }
}

/// An endpoint that says hello without a greeting is a stranger, of which nothing is known.
#[test]
fn hello_without_a_greeting_is_dropped() {
    if !is_there(OfiProvider::Cxi) {
        return;
    }
    let (server, raw) = (server("ofi+cxi://127.0.0.1:0"), Endpoint::open());
    let mut stream = TcpStream::connect(socket(&server)).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let greeting = Greeting { versions: VERSIONS, provider: Some(OfiProvider::Cxi), link: (7, 9) };
    stream.write_all(&greeting.encode()).unwrap();
    let mut answer = [0; ANSWER];
    stream.read_exact(&mut answer).unwrap();
    let to = raw.insert(GreetingAnswer::decode(&answer).unwrap().name);
    // Of another link, of another incarnation, and with names that the provider must not be given.
    let name = raw.name();
    let bad = [
        OfiHello { link: 10, ..raw.hello() },
        OfiHello { incarnation: 8, ..raw.hello() },
        OfiHello { name: b"", ..raw.hello() },
        OfiHello { name: &name[..name.len() - 1], ..raw.hello() },
        OfiHello { name: &[1; 200], ..raw.hello() },
    ];
    bad.into_iter().for_each(|hello| raw.say(to, 0, OfiContent::Hello(hello)));
    assert_eq!(raw.hear(Duration::from_millis(100)), None);
    raw.say(to, 0, OfiContent::Hello(raw.hello()));
    let answer = raw.hear(BOUND).expect("an answer");
    let (header, OfiContent::Accept(_), _) = wire::decode(&answer).unwrap() else { panic!("{answer:?}") };
    assert_eq!(header.to, 9);
    // The end of the connection is that of the process.
    drop(stream);
    raw.assert_ended();
    let client = client();
    assert_eq!(add(&client, server.address()).unwrap(), 3);
    [server, client].into_iter().for_each(|engine| engine.finalize().unwrap());
}

/// The listener ends without a word: before it has accepted, or after that.
#[test]
fn the_end_of_a_listener_ends_the_link() {
    if !is_there(OfiProvider::Cxi) {
        return;
    }
    for accepts in [false, true] {
        let (listener, raw, client) = (TcpListener::bind("127.0.0.1:0").unwrap(), Endpoint::open(), client());
        let to = client.lookup(Address::ofi(OfiProvider::Cxi, listener.local_addr().unwrap())).unwrap();
        let begin = Instant::now();
        let call = client.procedure::<(), ()>("nothing").on(&to).start(&());
        let (mut stream, _) = listener.accept().unwrap();
        drop(listener);
        let mut greeting = [0; GREETING];
        stream.read_exact(&mut greeting).unwrap();
        let home = GreetingAnswer { versions: VERSIONS, provider: Some(OfiProvider::Cxi), name: raw.name() };
        stream.write_all(&home.encode()).unwrap();
        let message = raw.hear(BOUND).expect("a hello");
        let (_, OfiContent::Hello(hello), _) = wire::decode(&message).unwrap() else { panic!("{message:?}") };
        let greeting = Greeting::decode(&greeting).unwrap();
        assert_eq!((greeting.link, greeting.provider), ((hello.incarnation, hello.link), Some(OfiProvider::Cxi)));
        if accepts {
            raw.say(raw.insert(hello.name), hello.link, OfiContent::Accept(raw.hello()));
        }
        drop(stream);
        let error = call.and_then(|call| call.wait()).unwrap_err();
        assert!(begin.elapsed() < CONNECT / 2, "{error} after {:?}", begin.elapsed());
        client.finalize().unwrap();
    }
}

#[test]
fn a_listener_that_is_restarted_is_found_under_its_new_name() {
    for (provider, scheme) in SCHEMES {
        if !is_there(provider) {
            continue;
        }
        let client = client();
        let first = server(&format!("{scheme}://127.0.0.1:0"));
        let address = first.address();
        assert_eq!(add(&client, address.clone()).unwrap(), 3);
        assert!(matches!(Engine::builder().listen(address.clone()).build(), Err(Error::AddressInUse { .. })));
        first.finalize().unwrap();
        for _ in 0..2 {
            let next = server(&address.to_string());
            assert_eq!(next.address(), address);
            let begin = Instant::now();
            // The end of the former one may be noticed by the first call.
            while let Err(error) = add(&client, address.clone()) {
                assert!(begin.elapsed() < BOUND, "{error}");
            }
            next.finalize().unwrap();
        }
        client.finalize().unwrap();
    }
}

/// The end of the TCP connection, which is that of a process, ends the link on both sides.
#[test]
fn a_peer_that_ends_is_noticed() {
    if !is_there(OfiProvider::Cxi) {
        return;
    }
    let server = server("ofi+cxi://127.0.0.1:0");
    let clients: Vec<Engine> = (0..3).map(|_| client()).collect();
    for client in &clients {
        assert_eq!(add(client, server.address()).unwrap(), 3);
    }
    let peer = clients[0].lookup(server.address()).unwrap();
    let begin = Instant::now();
    server.finalize().unwrap();
    while clients[0].procedure::<(u32, u32), u32>("add").on(&peer).call(&(1, 2)).is_ok() {
        assert!(begin.elapsed() < BOUND, "the end is not noticed");
    }
    assert!(begin.elapsed() < BOUND);
    clients.into_iter().for_each(|engine| engine.finalize().unwrap());
}
