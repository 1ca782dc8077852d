//! Arguments, results and one-way calls of every size around every limit.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::time::Duration;

use calomel::{Bulk, Error, HandlerResult, Request, Responder};

use crate::assert_error;
use crate::support::{self, BOUND, Net, Pair, pattern};

const EAGER: usize = 4096;
const LIMIT: usize = 1 << 20;

/// Sizes around the limits of encoded lengths and powers of two, and all that are near the eager limit with their headers.
fn sizes() -> impl Iterator<Item = usize> {
    let near = (EAGER - 128..=EAGER + 16).chain(2 * EAGER - 3..=2 * EAGER + 3);
    [0, 1, 2, 127, 128, 16383, 16384, 16385, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1].into_iter().chain(near)
}

fn eager_pair(net: &Net) -> Pair {
    net.pair_with(|b| b.eager_limit(EAGER))
}

fn define_echo(pair: &Pair) {
    pair.server.define("echo", |_: &Request, text: String| text).unwrap();
    pair.server.define("length", |_: &Request, text: String| text.len()).unwrap();
    pair.server.define("make", |_: &Request, len: usize| text(len)).unwrap();
}

/// ASCII that depends on the position.
fn text(len: usize) -> String {
    support::text(len as u64, len)
}

fn arguments_and_results_of_every_size_arrive(net: &Net) {
    let pair = eager_pair(net);
    define_echo(&pair);
    let echo = pair.client.procedure::<String, String>("echo");
    for len in sizes() {
        let sent = text(len);
        let answer = echo.on(&pair.to_server).call(&sent).unwrap();
        assert!(answer == sent, "{len} bytes came back as {} others", answer.len());
    }
}

fn large_arguments_or_large_results_arrive(net: &Net) {
    let pair = eager_pair(net);
    define_echo(&pair);
    let length = pair.client.procedure::<String, usize>("length");
    let make = pair.client.procedure::<usize, String>("make");
    for len in sizes() {
        assert_eq!(length.on(&pair.to_server).call(&text(len)).unwrap(), len);
        assert!(make.on(&pair.to_server).call(&len).unwrap() == text(len), "{len}");
    }
}

fn one_way_calls_of_every_size_arrive(net: &Net) {
    let pair = eager_pair(net);
    let (heard, hears) = mpsc::channel();
    pair.server.define("note", move |_: &Request, text: String| heard.send(text).unwrap()).unwrap();
    let note = pair.client.procedure::<String, ()>("note");
    // The sender's buffer is freed before the call arrives, which must not matter.
    for len in sizes() {
        note.on(&pair.to_server).notify(&text(len)).unwrap();
    }
    let mut heard: Vec<String> = sizes().map(|_| hears.recv_timeout(BOUND).unwrap()).collect();
    let mut sent: Vec<String> = sizes().map(text).collect();
    heard.sort();
    sent.sort();
    assert!(heard == sent);
}

fn byte_vectors_of_every_size_arrive(net: &Net) {
    let pair = eager_pair(net);
    pair.server
        .define("reverse", |_: &Request, mut bytes: Vec<u8>| {
            bytes.reverse();
            bytes
        })
        .unwrap();
    let reverse = pair.client.procedure::<Vec<u8>, Vec<u8>>("reverse");
    for len in [0, 1, EAGER - 1, EAGER, EAGER + 1, 65536] {
        let mut bytes = pattern(1, len);
        let answer = reverse.on(&pair.to_server).call(&bytes).unwrap();
        bytes.reverse();
        assert!(answer == bytes, "{len}");
    }
}

/// Of the types that are sent from where they lie when they are long, and of others that are like them.
fn results_of_each_type_arrive(net: &Net) {
    type Lists = (Vec<u8>, Option<Vec<u8>>, Result<Vec<u8>, String>, Vec<[f64; 3]>, Option<Vec<bool>>);
    let lists = |len: usize| -> Lists {
        let (bytes, points) = (pattern(1, len), (0..len / 24).map(|i| [i as f64, 0.5, -1.0]).collect());
        let flags = bytes.iter().map(|byte| byte % 2 == 0).collect();
        (bytes.clone(), (len > 0).then(|| bytes.clone()), Ok(bytes), points, Some(flags))
    };
    let pair = eager_pair(net);
    let server = &pair.server;
    server.define("bytes", move |_: &Request, len: usize| lists(len).0).unwrap();
    server.define("option", move |_: &Request, len: usize| lists(len).1).unwrap();
    server.define("result", move |_: &Request, len: usize| lists(len).2).unwrap();
    server.define_try("points", move |_: &Request, len: usize| -> HandlerResult<_> { Ok(lists(len).3) }).unwrap();
    server.define_async("flags", move |_: Request, len: usize| async move { lists(len).4 }).unwrap();
    server.define("text", |_: &Request, len: usize| (len > 0).then(|| text(len))).unwrap();
    let (client, to) = (&pair.client, &pair.to_server);
    for len in [24 * EAGER, 0, 1, EAGER - 4, EAGER, EAGER + 1, LIMIT - 8] {
        let expected = lists(len);
        assert!(client.procedure::<usize, Vec<u8>>("bytes").on(to).call(&len).unwrap() == expected.0, "{len}");
        assert!(client.procedure::<usize, Option<Vec<u8>>>("option").on(to).call(&len).unwrap() == expected.1, "{len}");
        assert!(client.procedure::<usize, Result<Vec<u8>, String>>("result").on(to).call(&len).unwrap() == expected.2, "{len}");
        assert!(client.procedure::<usize, Vec<[f64; 3]>>("points").on(to).call(&len).unwrap() == expected.3, "{len}");
        assert!(client.procedure::<usize, Option<Vec<bool>>>("flags").on(to).call(&len).unwrap() == expected.4, "{len}");
        let wanted = (len > 0).then(|| text(len));
        assert!(client.procedure::<usize, Option<String>>("text").on(to).call(&len).unwrap() == wanted, "{len}");
    }
    // A caller of another type is told so, as of short results.
    let other = client.procedure::<usize, Vec<u8>>("option").on(to).call(&LIMIT);
    assert_error!(other, Error::TypeMismatch { .. });
}

/// It borrows from the message while it is decoded.
#[derive(serde::Serialize)]
struct Name(String);

impl<'de> serde::Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
        <&str>::deserialize(deserializer).map(|name| Name(name.to_owned()))
    }
}

/// Each several times: the first long message of a type tells what memory the next one arrives in.
fn arguments_of_each_type_arrive(net: &Net) {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Blob(Vec<u8>);
    let pair = eager_pair(net);
    let server = &pair.server;
    let sum = |bytes: &mut dyn Iterator<Item = u8>| bytes.map(u64::from).sum::<u64>();
    server.define("bytes", move |_: &Request, list: Vec<u8>| sum(&mut list.into_iter())).unwrap();
    server.define("blob", move |_: &Request, Blob(list): Blob| sum(&mut list.into_iter())).unwrap();
    server.define("deque", move |_: &Request, list: VecDeque<u8>| sum(&mut list.into_iter())).unwrap();
    server.define_borrowed::<[u8], _, _>("slice", move |_: &Request, list: &[u8]| sum(&mut list.iter().copied())).unwrap();
    server.define("name", |_: &Request, Name(name): Name| name).unwrap();
    server.define_async("text", |_: Request, text: Option<String>| async move { text }).unwrap();
    server.define("points", |_: &Request, points: Vec<[f64; 3]>| points).unwrap();
    server.define("flags", |_: &Request, flags: Vec<bool>| flags).unwrap();
    let (client, to) = (&pair.client, &pair.to_server);
    for len in [24 * EAGER, LIMIT - 8, EAGER + 5, 24 * EAGER, 1] {
        let bytes = pattern(1, len);
        let expected = sum(&mut bytes.iter().copied());
        for name in ["bytes", "blob", "deque", "slice"] {
            assert_eq!(client.procedure::<Vec<u8>, u64>(name).on(to).call(&bytes).unwrap(), expected, "{name} {len}");
        }
        let name = text(len);
        assert!(client.procedure::<str, String>("name").on(to).call(&name).unwrap() == name, "{len}");
        let name = Some(name);
        assert!(client.procedure::<Option<String>, Option<String>>("text").on(to).call(&name).unwrap() == name, "{len}");
        let points: Vec<_> = (0..len / 24).map(|i| [i as f64, 0.5, -1.0]).collect();
        type Points = Vec<[f64; 3]>;
        assert!(client.procedure::<Points, Points>("points").on(to).call(&points).unwrap() == points, "{len}");
        let flags: Vec<_> = bytes.iter().map(|byte| byte % 2 == 0).collect();
        assert!(client.procedure::<Vec<bool>, Vec<bool>>("flags").on(to).call(&flags).unwrap() == flags, "{len}");
    }
}

/// A list at the end of a value, by each way in which arguments are sent and handled, and each twice.
fn lists_within_other_values_arrive(net: &Net) {
    #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Put<T> {
        key: String,
        version: Option<u64>,
        value: T,
    }
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Unread {
        key: String,
        version: Option<u64>,
        value: VecDeque<u8>,
    }
    type Bytes = Put<Vec<u8>>;
    type Points = Put<Vec<[f32; 3]>>;
    let pair = eager_pair(net);
    let server = &pair.server;
    server.define("put", |_: &Request, put: Bytes| put).unwrap();
    server.define_async("points", |_: Request, put: Points| async move { put }).unwrap();
    server.define("pair", |_: &Request, (value, key): (Vec<u8>, String)| (key, value)).unwrap();
    server.define_deferred("kept", |kept: Responder<Bytes>, put: Bytes| kept.respond(&put).unwrap()).unwrap();
    server.define("try", |_: &Request, put: Bytes| if put.key.is_empty() { Err(put.value) } else { Ok(put) }).unwrap();
    server.define("deque", |_: &Request, Unread { key, version: _, value }: Unread| (key, value)).unwrap();
    let content = server.expose_read_only(pattern(3, 100_000)).unwrap();
    let bulk = content.bulk();
    server.define("bulk", move |_: &Request, put: Bytes| (bulk.clone(), put.value)).unwrap();
    let (client, to) = (&pair.client, &pair.to_server);
    for (round, len) in [24 * EAGER, LIMIT - 40, EAGER + 5, 24 * EAGER, 24 * EAGER + 1, 1, 24 * EAGER].into_iter().enumerate() {
        let key = "k".repeat(round);
        let put = Put { key: key.clone(), version: (round % 2 == 0).then_some(u64::MAX >> round), value: pattern(7, len) };
        for name in ["put", "kept"] {
            let procedure = client.procedure::<Bytes, Bytes>(name).on(to);
            assert!(procedure.call(&put).unwrap() == put, "{name} {len}");
            assert!(procedure.start(&put).unwrap().wait().unwrap() == put, "{name} {len}, started");
        }
        let points = Put { key: key.clone(), version: None, value: vec![[round as f32, 0.5, -1.0]; len / 12] };
        assert!(client.procedure::<Points, Points>("points").on(to).call(&points).unwrap() == points, "{len}");
        let pair = (put.value.clone(), key.clone());
        let swapped = client.procedure::<(Vec<u8>, String), (String, Vec<u8>)>("pair").on(to).call(&pair).unwrap();
        assert!(swapped == (pair.1, pair.0), "{len}");
        let tried = client.procedure::<Bytes, Result<Bytes, Vec<u8>>>("try").on(to).call(&put).unwrap();
        assert!(tried == if round == 0 { Err(put.value.clone()) } else { Ok(put.clone()) }, "{len}");
        let (its_key, value) = client.procedure::<Bytes, (String, VecDeque<u8>)>("deque").on(to).call(&put).unwrap();
        assert!(its_key == key && value == put.value, "{len}");
        let (bulk, value) = client.procedure::<Bytes, (Bulk, Vec<u8>)>("bulk").on(to).call(&put).unwrap();
        let mut pulled = vec![0; 100_000];
        assert_eq!(bulk.on(to).pull_into(&mut pulled[..]).unwrap(), 100_000);
        assert!(value == put.value && pulled == pattern(3, 100_000), "{len}");
    }
}

fn large_messages_in_both_directions_at_once_arrive(net: &Net) {
    let pair = eager_pair(net);
    define_echo(&pair);
    let echo = pair.client.procedure::<String, String>("echo");
    let sent: Vec<String> = (0..24).map(|i| text((i % 4) * 500_000 + i)).collect();
    let pendings: Vec<_> = sent.iter().map(|text| echo.on(&pair.to_server).start(text).unwrap()).collect();
    for (sent, pending) in sent.iter().zip(pendings) {
        assert!(pending.wait().unwrap() == *sent);
    }
}

fn sixty_four_mebibytes_are_sent_and_returned(net: &Net) {
    let pair = net.pair_with(|b| b.max_message_size(80 << 20));
    define_echo(&pair);
    let sent = text(64 << 20);
    let echo = pair.client.procedure::<String, String>("echo");
    assert!(echo.on(&pair.to_server).timeout(Duration::from_secs(50)).call(&sent).unwrap() == sent);
}

fn the_default_limit_admits_large_messages(net: &Net) {
    let pair = net.pair();
    define_echo(&pair);
    let sent = text(8 << 20);
    assert!(pair.client.procedure::<String, String>("echo").on(&pair.to_server).call(&sent).unwrap() == sent);
}

/// Asserts that the error has a size of about `len` bytes and this limit, in its fields and in its text.
#[track_caller]
fn assert_too_large<T>(result: calomel::Result<T>, len: usize, limit: usize) {
    let error = result.map(|_| ()).unwrap_err();
    let Error::MessageTooLarge { size, limit: named, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*named, limit);
    assert!((len..len + 256).contains(size), "{size} for {len} bytes");
    let text = error.to_string();
    assert!(text.contains(&size.to_string()) && text.contains(&limit.to_string()), "{text}");
    assert!(!error.is_retryable() && !error.is_disconnected());
}

fn arguments_above_the_limit_are_refused(net: &Net) {
    let pair = net.pair_with(|b| b.max_message_size(LIMIT));
    define_echo(&pair);
    let length = pair.client.procedure::<String, usize>("length");
    for len in [LIMIT + 1, 2 * LIMIT, 20 * LIMIT] {
        assert_too_large(length.on(&pair.to_server).call(&text(len)), len, LIMIT);
        assert_too_large(length.on(&pair.to_server).start(&text(len)).and_then(|p| p.wait()), len, LIMIT);
        assert_too_large(length.on(&pair.to_server).notify(&text(len)), len, LIMIT);
    }
    assert_eq!(length.on(&pair.to_server).call(&text(LIMIT - 256)).unwrap(), LIMIT - 256);
}

fn messages_of_exactly_the_limit_are_accepted(net: &Net) {
    let pair = net.pair_with(|b| b.max_message_size(LIMIT));
    define_echo(&pair);
    let length = pair.client.procedure::<String, usize>("length");
    let make = pair.client.procedure::<usize, String>("make");
    // The size in the error shows the overhead of a message beyond its text.
    let Err(Error::MessageTooLarge { size, .. }) = length.on(&pair.to_server).call(&text(LIMIT + 1)) else { panic!() };
    let most = LIMIT - (size - (LIMIT + 1));
    assert_eq!(length.on(&pair.to_server).call(&text(most)).unwrap(), most);
    assert_too_large(length.on(&pair.to_server).call(&text(most + 1)), most + 1, LIMIT);
    let Err(Error::MessageTooLarge { size, .. }) = make.on(&pair.to_server).call(&(LIMIT + 1)) else { panic!() };
    let most = LIMIT - (size - (LIMIT + 1));
    assert_eq!(make.on(&pair.to_server).call(&most).unwrap().len(), most);
    assert_too_large(make.on(&pair.to_server).call(&(most + 1)), most + 1, LIMIT);
}

fn results_above_the_limit_are_refused(net: &Net) {
    let pair = net.pair_with(|b| b.max_message_size(LIMIT));
    define_echo(&pair);
    let make = pair.client.procedure::<usize, String>("make");
    for len in [LIMIT + 1, 2 * LIMIT, 20 * LIMIT] {
        assert_too_large(make.on(&pair.to_server).call(&len), len, LIMIT);
    }
    assert_eq!(make.on(&pair.to_server).call(&(LIMIT - 256)).unwrap().len(), LIMIT - 256);
}

fn messages_above_the_receivers_limit_are_refused(net: &Net) {
    let server = net.server_with(|b| b.max_message_size(LIMIT / 4));
    let client = net.client_with(|b| b.max_message_size(64 * LIMIT));
    let pair = Pair::of(server, client);
    define_echo(&pair);
    // An answer is bounded by the smaller of the caller's and the server's limit.
    let length = pair.client.procedure::<String, usize>("length");
    assert_too_large(length.on(&pair.to_server).call(&text(LIMIT)), LIMIT, LIMIT / 4);
    assert_eq!(length.on(&pair.to_server).call(&text(LIMIT / 8)).unwrap(), LIMIT / 8);
    let make = pair.client.procedure::<usize, String>("make");
    assert_too_large(make.on(&pair.to_server).call(&LIMIT), LIMIT, LIMIT / 4);

    let client = net.client_with(|b| b.max_message_size(LIMIT / 8));
    let server = net.server_with(|b| b.max_message_size(64 * LIMIT));
    let pair = Pair::of(server, client);
    define_echo(&pair);
    let make = pair.client.procedure::<usize, String>("make");
    assert_too_large(make.on(&pair.to_server).call(&LIMIT), LIMIT, LIMIT / 8);
    assert_eq!(make.on(&pair.to_server).call(&1000).unwrap().len(), 1000);
}

fn bulks_above_the_message_limit_are_transferred(net: &Net) {
    let pair = net.pair_with(|b| b.max_message_size(65536).eager_limit(1024));
    let data = pattern(5, 3_000_001);
    let exposed = pair.server.expose_read_only(data.clone()).unwrap();
    let mut copy = vec![0u8; data.len()];
    assert_eq!(exposed.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap(), data.len());
    assert!(copy == data);
}

fn zero_and_large_eager_limits_are_accepted(net: &Net) {
    for eager in [0, 1, 1 << 20] {
        let pair = net.pair_with(|b| b.eager_limit(eager));
        define_echo(&pair);
        let echo = pair.client.procedure::<String, String>("echo");
        for len in [0, 1, 100, 10_000, 300_000] {
            let sent = text(len);
            assert!(echo.on(&pair.to_server).call(&sent).unwrap() == sent, "eager {eager}, {len} bytes");
        }
    }
}

fn call_given_up_with_large_arguments_leaves_the_link_usable(net: &Net) {
    let pair = net.pair_with(|b| b.max_message_size(80 << 20));
    define_echo(&pair);
    let echo = pair.client.procedure::<String, String>("echo");
    let large = text(16 << 20);
    for micros in [0, 100, 1000, 3000] {
        let result = echo.on(&pair.to_server).timeout(Duration::from_micros(micros)).call(&large);
        match result {
            Ok(answer) => assert!(answer == large),
            Err(error) => assert_error!(Err::<(), _>(error), Error::Timeout { .. }),
        }
        drop(echo.on(&pair.to_server).start(&large).unwrap());
        assert_eq!(echo.on(&pair.to_server).call(&"small".to_owned()).unwrap(), "small");
    }
}

suite![
    arguments_and_results_of_every_size_arrive,
    large_arguments_or_large_results_arrive,
    one_way_calls_of_every_size_arrive,
    byte_vectors_of_every_size_arrive,
    arguments_of_each_type_arrive,
    lists_within_other_values_arrive,
    results_of_each_type_arrive,
    large_messages_in_both_directions_at_once_arrive,
    sixty_four_mebibytes_are_sent_and_returned,
    the_default_limit_admits_large_messages,
    arguments_above_the_limit_are_refused,
    messages_of_exactly_the_limit_are_accepted,
    results_above_the_limit_are_refused,
    messages_above_the_receivers_limit_are_refused,
    bulks_above_the_message_limit_are_transferred,
    zero_and_large_eager_limits_are_accepted,
    call_given_up_with_large_arguments_leaves_the_link_usable,
];
