//! The metrics of engines as Prometheus gets them: served as text over HTTP by the recorder that a program installs.

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use calomel::{Bulk, Engine, Error, Request};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use common::{BOUND, Watchdog, eventually};

/// A procedure whose name needs escaping.
const ODD: &str = "odd \"one\" \\ and\nmore";

/// Serves what `page` returns, to one client after the other.
fn serve(page: impl Fn() -> String + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            client.set_read_timeout(Some(BOUND)).unwrap();
            let head: Vec<String> =
                BufReader::new(&client).lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            assert!(head[0].starts_with("GET /metrics "), "{head:?}");
            let text = page();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close";
            write!(client, "{head}\r\nContent-Length: {}\r\n\r\n{text}", text.len()).unwrap();
        }
    });
    address
}

fn scrape(address: SocketAddr) -> Scrape {
    let mut server = TcpStream::connect(address).unwrap();
    server.set_read_timeout(Some(BOUND)).unwrap();
    write!(server, "GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let mut response = String::new();
    server.read_to_string(&mut response).unwrap();
    let (head, text) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    Scrape::parse(text)
}

/// A series: its name, and its labels.
type Series = (String, BTreeMap<String, String>);

#[derive(Debug, Default)]
struct Scrape {
    samples: BTreeMap<Series, f64>,
    types: BTreeMap<String, String>,
    help: BTreeMap<String, String>,
}

impl Scrape {
    /// Reads Prometheus' text format 0.0.4, and fails on all that is not allowed in it.
    fn parse(text: &str) -> Scrape {
        let mut scrape = Scrape::default();
        assert!(text.ends_with('\n'));
        for line in text.lines().filter(|line| !line.is_empty()) {
            let words = |rest: &str| rest.split_once(' ').map(|(name, rest)| (name.to_owned(), rest.to_owned())).unwrap();
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = words(rest);
                assert_eq!(scrape.help.insert(name, help), None, "{line}");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = words(rest);
                assert!(["counter", "gauge"].contains(&&*kind), "{line}");
                assert_eq!(scrape.types.insert(name, kind), None, "{line}");
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let series = Scrape::series(series);
                assert!(scrape.types.contains_key(&series.0), "{line} has no type before it");
                assert_eq!(scrape.samples.insert(series, value.parse().unwrap()), None, "{line} came twice");
            }
        }
        scrape
    }

    fn series(text: &str) -> Series {
        let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let Some((name, labels)) = text.split_once('{') else {
            assert!(is_name(text), "{text}");
            return (text.to_owned(), BTreeMap::new());
        };
        let (mut rest, mut found) = (labels.strip_suffix('}').unwrap(), BTreeMap::new());
        while !rest.is_empty() {
            let (label, quoted) = rest.split_once("=\"").unwrap();
            let (mut value, mut chars) = (String::new(), quoted.char_indices());
            let end = loop {
                match chars.next().unwrap() {
                    (end, '"') => break end,
                    (_, '\\') => value.push(match chars.next().unwrap().1 {
                        'n' => '\n',
                        c @ ('"' | '\\') => c,
                        c => panic!("\\{c} in {text}"),
                    }),
                    (_, c) => value.push(c),
                }
            };
            assert!(is_name(label) && is_name(name), "{text}");
            assert_eq!(found.insert(label.to_owned(), value), None, "{text}");
            rest = quoted[end + 1..].strip_prefix(',').unwrap_or(&quoted[end + 1..]);
        }
        (name.to_owned(), found)
    }

    fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect();
        self.samples.get(&(name.to_owned(), labels)).copied()
    }

    /// The value of exactly this series.
    #[track_caller]
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.get(name, labels).unwrap_or_else(|| panic!("no {name}{labels:?} in {:#?}", self.samples))
    }

    /// The buckets of each histogram, by the upper end, with the name and the other labels.
    fn histograms(&self) -> BTreeMap<Series, Vec<(f64, f64)>> {
        let mut found: BTreeMap<Series, Vec<(f64, f64)>> = BTreeMap::new();
        for ((name, labels), count) in &self.samples {
            if let Some(name) = name.strip_suffix("_bucket") {
                let mut labels = labels.clone();
                let end: f64 = labels.remove("le").unwrap().parse().unwrap();
                found.entry((name.to_owned(), labels)).or_default().push((end, *count));
            }
        }
        found.values_mut().for_each(|buckets| buckets.sort_by(|a, b| a.0.total_cmp(&b.0)));
        found
    }
}

/// The upper end of the bucket that has the quantile, as `histogram_quantile` finds it.
fn quantile(buckets: &[(f64, f64)], part: f64) -> f64 {
    let (_, count) = *buckets.last().unwrap();
    buckets.iter().find(|(_, below)| *below >= part * count).unwrap().0
}

struct Scene {
    server: Engine,
    client: Engine,
    middle: Engine,
}

/// Three engines, the second of which calls the first by the third one too.
fn scene() -> Scene {
    let server = Engine::server("tcp://127.0.0.1:0").unwrap();
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    server.define_try("fail", |_: &Request, why: String| -> Result<(), String> { Err(why) }).unwrap();
    server.provider(3).define(ODD, |_: &Request, bulk: Bulk| bulk.len() as u64).unwrap();
    let memory = server.expose(vec![0u8; 100_000], calomel::BulkMode::ReadWrite).unwrap();
    server.define("memory", move |_: &Request, (): ()| memory.bulk()).unwrap();

    let middle = Engine::server("loop://").unwrap();
    let onward = middle.downgrade();
    let to = server.address();
    let relay = move |_: &Request, (): ()| {
        let engine = onward.upgrade().unwrap();
        let peer = engine.lookup(&to).unwrap();
        engine.procedure::<(i32, i32), i32>("sum").on(&peer).call(&(1, 1)).unwrap()
    };
    middle.define("relay", relay).unwrap();
    Scene { server, client: Engine::client("tcp").unwrap(), middle }
}

fn use_it(scene: &Scene) {
    let (client, peer) = (&scene.client, scene.client.lookup(scene.server.address()).unwrap());
    let sum = client.procedure::<(i32, i32), i32>("sum");
    (0..100).for_each(|x| assert_eq!(sum.on(&peer).call(&(x, 1)).unwrap(), x + 1));
    let fail = client.procedure::<String, ()>("fail");
    (0..3).for_each(|_| assert!(matches!(fail.on(&peer).call(&"so".to_owned()), Err(Error::Failed { .. }))));
    let missing = client.procedure::<(), ()>("missing");
    (0..2).for_each(|_| assert!(matches!(missing.on(&peer).call(&()), Err(Error::NoSuchProcedure { .. }))));
    let own = client.expose(vec![0u8; 10], calomel::BulkMode::ReadWrite).unwrap();
    assert_eq!(client.procedure::<Bulk, u64>(ODD).on(peer.provider(3)).call(&own.bulk()).unwrap(), 10);

    let memory = client.procedure::<(), Bulk>("memory").on(&peer).call(&()).unwrap().on(&peer);
    let mut bytes = vec![1u8; 100_000];
    assert_eq!(memory.pull_into(&mut bytes[..]).unwrap(), 100_000);
    assert_eq!(memory.slice(0, 10).unwrap().push_from(&[7u8; 10][..]).unwrap(), 10);

    let near = client.lookup(scene.middle.address()).unwrap();
    let relay = client.procedure::<(), i32>("relay");
    (0..4).for_each(|_| assert_eq!(relay.on(&near).call(&()).unwrap(), 2));
}

fn check_histograms(scrape: &Scrape) {
    let histograms = scrape.histograms();
    assert!(histograms.len() > 10, "{}", histograms.len());
    for ((name, labels), buckets) in &histograms {
        let what = format!("{name}{labels:?}: {buckets:?}");
        assert_eq!(buckets.len(), 28, "{what}");
        assert!(buckets[0].0 > 1e-6 && buckets[0].0 < 2e-6 && (60.0..70.0).contains(&buckets[26].0), "{what}");
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{what}");
        let count = scrape.samples[&(format!("{name}_count"), labels.clone())];
        let sum = scrape.samples[&(format!("{name}_sum"), labels.clone())];
        assert_eq!(buckets[27], (f64::INFINITY, count), "{what}");
        // Each duration is above the end of the bucket before its own, and below that of its own.
        let mut below = 0.0;
        let (mut least, mut most, mut last) = (0.0, 0.0, 0.0);
        for (end, count) in buckets {
            least += (count - below) * last;
            most += (count - below) * end.min(1e9);
            (below, last) = (*count, *end);
        }
        assert!(least <= sum && (sum <= most || count == 0.0), "{least} <= {sum} <= {most}: {what}");
    }
}

#[test]
fn prometheus_gets_what_engines_have_counted() {
    let _watchdog = Watchdog::start("prometheus_gets_what_engines_have_counted");
    let recorder: PrometheusHandle = PrometheusBuilder::new().install_recorder().unwrap();
    let scene = scene();
    use_it(&scene);
    // The figures of the handlers come a moment after their answers.
    eventually("all calls are counted", || {
        let handlers = scene.server.stats().handlers;
        let counted = handlers.iter().map(|handler| (handler.calls, handler.running.count, handler.waiting.count));
        counted.fold((0, 0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1, sum.2 + one.2)) == (109, 109, 109)
    });
    let published = scene.middle.downgrade();
    let engines = [scene.server.clone(), scene.client.clone()];
    let address = serve(move || {
        engines.iter().for_each(Engine::publish_metrics);
        published.upgrade().inspect(Engine::publish_metrics);
        recorder.render()
    });
    let found = scrape(address);
    let number = |engine: &Engine| engine.stats().engine.to_string();
    let (server, client, middle) = (number(&scene.server), number(&scene.client), number(&scene.middle));

    // Calls, and those that failed, by kind.
    let of = |procedure: &'static str| [("engine", &*client), ("procedure", procedure), ("provider", "0")];
    let failed = |procedure: &'static str, error: &'static str| [&of(procedure)[..], &[("error", error)]].concat();
    assert_eq!(found.value("calomel_calls_total", &of("sum")), 100.0);
    assert_eq!(found.value("calomel_call_duration_seconds_count", &of("sum")), 100.0);
    assert_eq!(found.value("calomel_calls_total", &of("fail")), 3.0);
    assert_eq!(found.value("calomel_call_errors_total", &failed("fail", "Failed")), 3.0);
    assert_eq!(found.value("calomel_call_errors_total", &failed("missing", "NoSuchProcedure")), 2.0);
    assert_eq!(found.get("calomel_call_errors_total", &failed("sum", "Failed")), None);
    let odd = [("engine", &*client), ("procedure", ODD), ("provider", "3")];
    assert_eq!(found.value("calomel_calls_total", &odd), 1.0);
    // The same at the other side, which has numbers of its own for what it handled.
    let at_server = |procedure: &'static str| [("engine", &*server), ("procedure", procedure), ("provider", "0")];
    assert_eq!(found.value("calomel_handled_calls_total", &at_server("sum")), 104.0);
    assert_eq!(found.value("calomel_handler_duration_seconds_count", &at_server("sum")), 104.0);
    assert_eq!(found.value("calomel_handler_errors_total", &[&at_server("fail")[..], &[("error", "Failed")]].concat()), 3.0);
    assert_eq!(found.value("calomel_unknown_procedures_total", &[("engine", &server)]), 2.0);
    // A nested call has a parent.
    let nested = [("engine", &*middle), ("parent", "relay"), ("procedure", "sum"), ("provider", "0")];
    assert_eq!(found.value("calomel_calls_total", &nested), 4.0);

    // Bytes and transfers.
    let [pulls, pushes] = [("pull", "1048576"), ("push", "4096")]
        .map(|(direction, class)| [("direction", direction), ("engine", &*client), ("up_to_bytes", class)]);
    assert_eq!(found.value("calomel_transfers_total", &pulls), 1.0);
    assert_eq!(found.value("calomel_transferred_bytes_total", &pulls), 100_000.0);
    assert_eq!(found.value("calomel_transferred_bytes_total", &pushes), 10.0);
    assert_eq!(found.value("calomel_exposed_bytes", &[("engine", &server)]), 100_000.0);
    let stats = scene.client.stats();
    let call = stats.calls.iter().find(|call| call.procedure == "sum").unwrap();
    assert_eq!(found.value("calomel_call_sent_bytes_total", &of("sum")), call.sent_bytes as f64);
    assert!(call.sent_bytes >= 200);
    for transport in &stats.transports {
        let name = transport.transport.to_string();
        let labels = [("engine", &*client), ("transport", &name)];
        assert_eq!(found.value("calomel_connections", &labels), transport.open as f64);
        assert_eq!(found.value("calomel_sent_bytes_total", &labels), transport.traffic.sent_bytes as f64);
        assert_eq!(found.value("calomel_transport_calls_total", &labels), transport.traffic.calls as f64);
    }
    assert_eq!(found.value("calomel_peers", &[("engine", &client)]), 2.0);
    assert_eq!(found.value("calomel_refusals_total", &[("cause", "range"), ("engine", &client)]), 0.0);

    // Histograms, and the quantiles that Prometheus makes of them.
    check_histograms(&found);
    let labels = of("sum").map(|(label, value)| (label.to_owned(), value.to_owned())).into_iter().collect();
    let buckets = &found.histograms()[&("calomel_call_duration_seconds".to_owned(), labels)];
    for (part, exact) in [(0.5, call.time.p50), (0.99, call.time.p99)] {
        let (approximate, exact) = (quantile(buckets, part), exact.as_secs_f64().max(1.0e-6));
        assert!(approximate >= 0.79 * exact && approximate <= 2.01 * exact, "{part}: {approximate} s is not near {exact} s");
    }

    // Each has a description, and none names a peer.
    assert!(found.types.keys().eq(found.help.keys()), "{:?} and {:?}", found.types.keys(), found.help.keys());
    assert!(found.samples.keys().all(|(_, labels)| labels.values().all(|value| !value.contains("://"))));

    // The next scrape has what came meanwhile, and no counter has fallen.
    let peer = scene.client.lookup(scene.server.address()).unwrap();
    assert_eq!(scene.client.procedure::<(i32, i32), i32>("sum").on(&peer).call(&(1, 2)).unwrap(), 3);
    let later = scrape(address);
    assert_eq!(later.value("calomel_calls_total", &of("sum")), 101.0);
    check_histograms(&later);
    for (series, value) in &found.samples {
        assert!(found.types[&series.0] == "gauge" || later.samples[series] >= *value, "{series:?} has fallen");
    }
}
