//! A network that fragments, delays, throttles, cuts and drops: a proxy between two engines.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, Engine, Request};

use crate::support::*;

/// How the proxy treats a connection, in each direction.
#[derive(Clone)]
struct Weather {
    /// Largest piece forwarded at a time.
    piece: usize,
    /// Delay before each piece.
    delay: Duration,
    /// Bytes after which the connection is cut, both directions counted together.
    cut_after: usize,
    /// While set, nothing is forwarded, and neither side is notified.
    swallow: Arc<AtomicBool>,
}

impl Default for Weather {
    fn default() -> Weather {
        Weather { piece: 64 << 10, delay: Duration::ZERO, cut_after: usize::MAX, swallow: Arc::default() }
    }
}

/// Listens, and forwards each connection to `target`, with the `weather` at that moment.
fn proxy(target: SocketAddr, weather: impl Fn() -> Weather + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    keep_little(&listener);
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(target) else { continue };
            keep_little(&near);
            keep_little(&far);
            let (weather, forwarded) = (weather(), Arc::new(AtomicUsize::new(0)));
            for (from, to) in [(&near, &far), (&far, &near)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                from.set_nodelay(true).unwrap();
                let (weather, forwarded) = (weather.clone(), forwarded.clone());
                thread::spawn(move || forward(from, to, &weather, &forwarded));
            }
        }
    });
    address
}

fn forward(mut from: TcpStream, mut to: TcpStream, weather: &Weather, forwarded: &AtomicUsize) {
    let mut buffer = vec![0u8; weather.piece];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        thread::sleep(weather.delay);
        while weather.swallow.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        let before = forwarded.fetch_add(n, Ordering::SeqCst);
        let allowed = weather.cut_after.saturating_sub(before).min(n);
        if to.write_all(&buffer[..allowed]).is_err() || allowed < n {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// A server with procedures of every kind, and its memory.
struct Service {
    engine: Engine,
    source: calomel::Exposed<Vec<u8>>,
    target: calomel::Exposed<Vec<u8>>,
}

const LEN: usize = 100_000;

impl Service {
    fn new() -> Service {
        let engine = server();
        define_add(&engine);
        engine.define("echo", |_: &Request, text: String| text).unwrap();
        engine
            .define("fetch", |request: &Request, bulk: Bulk| -> Result<Vec<u8>, String> {
                let mut bytes = vec![0u8; bulk.len()];
                bulk.on(request.endpoint()).pull_into(&mut bytes).map_err(|e| e.to_string())?;
                Ok(bytes)
            })
            .unwrap();
        let source = engine.expose(pattern(1, LEN), BulkMode::ReadWrite).unwrap();
        let target = engine.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        Service { engine, source, target }
    }

    fn socket(&self) -> SocketAddr {
        self.engine.address().to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
    }

    /// One operation of each kind, with payloads of `len` bytes; returns the first error.
    fn round(&self, client: &Engine, to: &Endpoint, len: usize) -> calomel::Result<()> {
        assert_eq!(client.procedure::<(u32, u32), u32>("add").on(to).call(&(len as u32, 1))?, len as u32 + 1);
        let text = "x".repeat(len);
        assert!(client.procedure::<String, String>("echo").on(to).call(&text)? == text);
        let mut copy = vec![0u8; len];
        assert_eq!(self.source.bulk().on(to).pull_into(&mut copy)?, len.min(LEN));
        assert!(copy[..len.min(LEN)] == pattern(1, LEN)[..len.min(LEN)]);
        assert_eq!(self.target.bulk().on(to).push_from(&copy)?, len.min(LEN));
        let mine = client.expose_read_only(pattern(7, len)).unwrap();
        match client.procedure::<Bulk, Result<Vec<u8>, String>>("fetch").on(to).call(&mine.bulk())? {
            Ok(bytes) => assert!(bytes == pattern(7, len)),
            // The server's half of the connection may end first.
            Err(text) => assert!(text.contains("disconnected"), "{text}"),
        }
        Ok(())
    }
}

#[test]
fn operations_succeed_when_bytes_arrive_one_by_one() {
    let _watchdog = Watchdog::start("proxy::operations_succeed_when_bytes_arrive_one_by_one");
    let service = Service::new();
    for piece in [1, 2, 3, 5, 7, 15, 17, 1000, 1460] {
        let address = proxy(service.socket(), move || Weather { piece, ..Weather::default() });
        let client = client();
        let to = client.lookup(&address).unwrap();
        for len in [0, 1, 100, 4096, 20_000] {
            // Byte by byte, so the payloads are short.
            service.round(&client, &to, len.min(piece * 2000)).unwrap();
        }
        client.finalize().unwrap();
    }
    service.engine.finalize().unwrap();
}

#[test]
fn high_latency_does_not_disconnect() {
    let _watchdog = Watchdog::start("proxy::high_latency_does_not_disconnect");
    let service = Service::new();
    // 50 ms each way: a round trip takes a tenth of the heartbeat.
    let address = proxy(service.socket(), || Weather { delay: Duration::from_millis(50), ..Weather::default() });
    let client = client();
    let to = client.lookup(&address).unwrap();
    for _ in 0..3 {
        service.round(&client, &to, 10_000).unwrap();
    }
    // A call that takes longer than the heartbeat, on an otherwise idle connection.
    service.engine.define("long", |_: &Request, ()| thread::sleep(Duration::from_millis(2500))).unwrap();
    client.procedure::<(), ()>("long").on(&to).call(&()).unwrap();
}

#[test]
fn low_bandwidth_does_not_disconnect() {
    // The bytes of one transfer take several times the heartbeat, and liveness probes queue behind them.
    let _watchdog = Watchdog::start("proxy::low_bandwidth_does_not_disconnect");
    let service = Service::new();
    let weather = || Weather { piece: 64 << 10, delay: Duration::from_millis(50), ..Weather::default() };
    let address = proxy(service.socket(), weather);
    let client = client();
    let to = client.lookup(&address).unwrap();
    // At 64 KiB in 50 ms, 6 MiB take 5 s.
    let mut bytes = pattern(3, 6 << 20);
    let theirs = service.engine.expose(vec![0u8; bytes.len()], BulkMode::ReadWrite).unwrap();
    let begin = Instant::now();
    assert_eq!(theirs.bulk().on(&to).push_from(&bytes).unwrap(), bytes.len());
    assert!(begin.elapsed() > 2 * HEARTBEAT, "the network was not slow: this test tests nothing");
    bytes.fill(0);
    assert_eq!(theirs.bulk().on(&to).pull_into(&mut bytes).unwrap(), bytes.len());
    assert!(bytes == pattern(3, 6 << 20));
}

/// One chunk takes longer than the time after which a peer that reads nothing is disconnected.
#[test]
fn frames_before_finalize_arrive_over_low_bandwidth() {
    let _watchdog = Watchdog::start("proxy::frames_before_finalize_arrive_over_low_bandwidth");
    let service = Service::new();
    let (arrived, noted) = mpsc::channel();
    service.engine.define("note", move |_: &Request, text: String| _ = arrived.send(text.len())).unwrap();
    let weather = || Weather { delay: Duration::from_millis(200), ..Weather::default() };
    let address = proxy(service.socket(), weather);
    let client = Engine::builder().finalize_timeout(Duration::from_secs(30)).build().unwrap();
    let to = client.lookup(&address).unwrap();
    client.procedure::<String, ()>("note").on(&to).notify(&"x".repeat(1 << 20)).unwrap();
    let begin = Instant::now();
    client.finalize().unwrap();
    assert!(begin.elapsed() > Duration::from_secs(2), "the network was not slow: this test tests nothing");
    assert_eq!(noted.recv_timeout(BOUND), Ok(1 << 20));
}

#[test]
fn pull_after_its_deadline_writes_nothing() {
    // The bytes are in transit at the deadline, and arrive long after it.
    let _watchdog = Watchdog::start("proxy::pull_after_its_deadline_writes_nothing");
    let service = Service::new();
    let weather = || Weather { piece: 4 << 10, delay: Duration::from_millis(10), ..Weather::default() };
    let address = proxy(service.socket(), weather);
    let client = client();
    let to = client.lookup(&address).unwrap();
    let theirs = service.engine.expose(vec![1u8; 400_000], BulkMode::ReadOnly).unwrap();
    let remote = theirs.bulk().on(&to);
    assert_eq!(remote.pull_into(&mut [0u8; 10][..]).unwrap(), 10);
    // Into a borrowed slice, a slice of exposed memory, and a started transfer that returns its buffer.
    let mut local = client.expose(vec![0u8; 400_000], BulkMode::ReadWrite).unwrap();
    for form in 0..3 {
        let remote = remote.clone().timeout(Duration::from_millis(105));
        let result = match form {
            0 => remote.pull_into(&local),
            1 => remote.pull_into(local.slice(0, 400_000).unwrap()),
            _ => {
                let (result, back) = remote.start_pull_into(local).wait();
                local = back;
                result
            }
        };
        assert!(result.unwrap_err().is_timeout());
        local.write_at(0, &vec![9u8; 400_000]).unwrap();
        let mut copy = vec![0u8; 400_000];
        stays("nothing is written", Duration::from_millis(1200), || {
            local.read_at(0, &mut copy).unwrap();
            all_are(&copy, 9)
        });
    }
    assert!(all_are(&local.reclaim(), 9));
}

#[test]
fn silent_packet_loss_ends_operations_with_disconnected() {
    let _watchdog = Watchdog::start("proxy::silent_packet_loss_ends_operations_with_disconnected");
    let service = Service::new();
    let (entered, cancelled) = (Gate::default(), Gate::default());
    let (e, c) = (entered.clone(), cancelled.clone());
    service
        .engine
        .define("hang", move |request: &Request, ()| {
            e.open();
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_millis(1));
            }
            if request.is_cancelled() && begin.elapsed() < BOUND / 2 {
                c.open();
            }
        })
        .unwrap();
    let weather = Weather::default();
    let swallow = weather.swallow.clone();
    let address = proxy(service.socket(), move || weather.clone());
    let client = client();
    let to = client.lookup(&address).unwrap();
    service.round(&client, &to, 10_000).unwrap();
    let pending = client.procedure::<(), ()>("hang").on(&to).start(&()).unwrap();
    entered.wait();
    swallow.store(true, Ordering::SeqCst);
    let begin = Instant::now();
    let mut ours = vec![0u8; LEN];
    assert_disconnected(service.source.bulk().on(&to).pull_into(&mut ours), begin);
    assert_disconnected(pending.wait(), begin);
    // The server notices as well, though nothing notified it.
    cancelled.wait();
    assert!(begin.elapsed() < NOTICED + Duration::from_secs(1), "{:?}", begin.elapsed());
    ours.fill(9);
    swallow.store(false, Ordering::SeqCst);
    service.round(&client, &to, 10_000).unwrap();
    assert!(all_are(&ours, 9));
}

#[test]
fn connection_cut_at_any_byte_ends_its_operations_only() {
    let _watchdog = Watchdog::start("proxy::connection_cut_at_any_byte_ends_its_operations_only");
    let service = Service::new();
    let cut = Arc::new(AtomicUsize::new(0));
    let here = cut.clone();
    let address = proxy(service.socket(), move || Weather { cut_after: here.load(Ordering::SeqCst), ..Weather::default() });
    let mut random = Random(0xc07);
    let mut cuts = 0;
    for round in 0..250 {
        // Byte by byte through the handshake and the first call, then anywhere in a round, which is some 600 kB.
        let at = if round < 150 { 2 * round } else { random.below(600_000) };
        cut.store(at, Ordering::SeqCst);
        let client = client();
        let to = client.lookup(&address).unwrap();
        let begin = Instant::now();
        if let Err(error) = service.round(&client, &to, LEN) {
            assert!(error.is_disconnected(), "cut after {at}: {error}");
            cuts += 1;
        }
        assert!(begin.elapsed() < NOTICED, "cut after {at}: {:?}", begin.elapsed());
        // Healed: the next connection is not cut.
        cut.store(usize::MAX, Ordering::SeqCst);
        eventually("calls work again", || service.round(&client, &to, 100).is_ok());
        client.finalize().unwrap();
    }
    assert!(cuts > 200, "only {cuts} of 250 rounds were cut");
    service.engine.finalize().unwrap();
}
