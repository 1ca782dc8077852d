//! One-way calls: each that was taken is handled once, whatever its size, and however slow its handler is.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, Engine, Error, Grant, Pending, Request, Responder};

use crate::assert_error;
use crate::support::{BOUND, Gate, Net, Pair, eventually, patience, rounds};

/// How often each call has been handled.
type Handled = Arc<Mutex<HashMap<u64, u32>>>;

/// Arguments: the call's number, and something of a length.
type Note = (u64, String);

fn define_note(engine: &Engine, takes: Duration) -> Handled {
    let handled = Handled::default();
    let by_number = handled.clone();
    engine
        .define("note", move |_: &Request, (number, text): Note| {
            assert!(text == self::text(number, text.len()));
            thread::sleep(takes);
            *by_number.lock().unwrap().entry(number).or_default() += 1;
        })
        .unwrap();
    handled
}

fn text(number: u64, len: usize) -> String {
    char::from(b'a' + (number % 26) as u8).to_string().repeat(len)
}

fn note(engine: &Engine, to: &Endpoint, number: u64, len: usize) -> calomel::Result<()> {
    engine.procedure::<Note, ()>("note").on(to).notify(&(number, text(number, len)))
}

/// These calls, and no others, are handled once each.
#[track_caller]
fn assert_handled(handled: &Handled, sent: &[u64]) {
    let begin = Instant::now();
    while handled.lock().unwrap().len() < sent.len() && begin.elapsed() < BOUND {
        thread::sleep(Duration::from_millis(1));
    }
    let handled = handled.lock().unwrap();
    let lost: Vec<_> = sent.iter().filter(|number| !handled.contains_key(number)).collect();
    assert!(lost.is_empty(), "{} of {} calls are lost: {:?}…", lost.len(), sent.len(), &lost[..lost.len().min(10)]);
    assert_eq!(handled.len(), sent.len(), "calls are handled that were not made");
    assert!(handled.values().all(|times| *times == 1));
}

fn large_ones_to_a_slow_handler(net: &Net) {
    let pair = net.pair();
    let handled = define_note(&pair.server, Duration::from_millis(10));
    let sent: Vec<u64> = (0..rounds(300) as u64).collect();
    for number in &sent {
        note(&pair.client, &pair.to_server, *number, 2 << 20).unwrap();
    }
    assert_handled(&handled, &sent);
    assert_eq!(pair.server.refusals().one_way, 0);
}

fn small_ones_by_the_ten_thousand(net: &Net) {
    let pair = net.pair();
    let handled = define_note(&pair.server, Duration::ZERO);
    let sent: Vec<u64> = (0..rounds(20_000) as u64).collect();
    thread::scope(|scope| {
        for part in sent.chunks(sent.len() / 4) {
            scope.spawn(|| {
                part.iter().for_each(|number| note(&pair.client, &pair.to_server, *number, *number as usize % 100).unwrap());
            });
        }
    });
    assert_handled(&handled, &sent);
}

/// Calls that are answered take all there is of the limits, again and again.
fn beside_calls_that_reach_the_limits(net: &Net) {
    let server = net.server_with(|builder| {
        builder
            .max_message_size(1 << 20)
            .max_bytes_in_flight_per_peer(2 << 20)
            .max_bytes_in_flight(4 << 20)
            .max_requests_per_peer(8)
    });
    let Pair { server, client, to_server } = Pair::of(server, net.client());
    let handled = define_note(&server, Duration::from_millis(1));
    server
        .define("slow", |_: &Request, text: String| {
            thread::sleep(Duration::from_millis(2));
            text.len()
        })
        .unwrap();
    let stop = AtomicBool::new(false);
    let sent = thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let slow = client.procedure::<String, usize>("slow");
                while !stop.load(Ordering::Relaxed) {
                    match slow.on(&to_server).call(&text(0, 700 << 10)) {
                        Ok(_) | Err(Error::Busy { .. }) => {}
                        Err(other) => panic!("{other:?}"),
                    }
                }
            });
        }
        let mut sent = Vec::new();
        for number in 0..rounds(400) as u64 {
            let len = [0, 10, 5000, 30_000, 100_000, 700_000][number as usize % 6];
            match note(&client, &to_server, number, len) {
                Ok(()) => sent.push(number),
                // What is announced shares the limits.
                Err(Error::Busy { .. }) if len > 16_000 => {}
                Err(other) => panic!("{other:?}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        sent
    });
    let all = rounds(400);
    assert!(sent.len() > all * 19 / 40, "{} of {all} calls were taken", sent.len());
    assert_handled(&handled, &sent);
}

fn several_senders_beyond_the_limit_in_all(net: &Net) {
    let server = net.server_with(|builder| {
        builder.max_message_size(2 << 20).max_bytes_in_flight_per_peer(4 << 20).max_bytes_in_flight(6 << 20)
    });
    let handled = define_note(&server, Duration::from_millis(2));
    let clients: Vec<Engine> = (0..4).map(|_| net.client()).collect();
    let sent = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (index, client) in clients.iter().enumerate() {
            let (server, sent) = (&server, &sent);
            scope.spawn(move || {
                let to = client.lookup(server.address()).unwrap();
                for number in index as u64 * 1000..index as u64 * 1000 + 30 {
                    let len = if number.is_multiple_of(2) { 1 << 20 } else { 4000 };
                    match note(client, &to, number, len) {
                        Ok(()) => sent.lock().unwrap().push(number),
                        Err(Error::Busy { .. }) if len > 4000 => {}
                        Err(other) => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    let sent = sent.into_inner().unwrap();
    assert!(sent.len() >= 60, "the small ones at least: {}", sent.len());
    assert_handled(&handled, &sent);
}

/// Around the eager limit, the longest that takes credit, the credit itself, and the largest message.
fn of_every_size(net: &Net) {
    const LARGEST: usize = 3 << 20;
    for eager in [0, 16 << 10, 1 << 20] {
        let pair = net.pair_with(|builder| builder.max_message_size(LARGEST).eager_limit(eager));
        let handled = define_note(&pair.server, Duration::ZERO);
        let mut sent = Vec::new();
        let mut number = 0;
        for around in [0usize, 16 << 10, 32 << 10, 64 << 10, 1 << 20] {
            for len in around.saturating_sub(12)..around + 4 {
                number += 1;
                note(&pair.client, &pair.to_server, number, len).unwrap();
                sent.push(number);
            }
        }
        // The number takes two bytes, the length four.
        for (len, fits) in [(LARGEST - 6, true), (LARGEST - 5, false), (LARGEST + 1, false)] {
            number += 1;
            let number = 1000 + number;
            match note(&pair.client, &pair.to_server, number, len) {
                Ok(()) if fits => sent.push(number),
                Err(Error::MessageTooLarge { limit: LARGEST, .. }) if !fits => {}
                other => panic!("{len} bytes: {other:?}"),
            }
        }
        assert_handled(&handled, &sent);
    }
}

/// How long a caller waits for a handler that blocks.
const TAKES: Duration = Duration::from_millis(700);

/// The handler blocks: callers wait, and get an error at their deadlines; what was taken is handled when it goes on.
fn a_handler_that_blocks(net: &Net) {
    for len in [0, 8000, 1 << 20] {
        let server =
            net.server_with(|builder| builder.max_message_size(1 << 21).max_bytes_in_flight_per_peer(8 << 20).handler_threads(2));
        let Pair { server, client, to_server } = Pair::of(server, net.client());
        let (gate, count) = (Gate::default(), Arc::new(Mutex::new(Vec::new())));
        let (waits, counts) = (gate.clone(), count.clone());
        server
            .define("block", move |_: &Request, (number, _): Note| {
                waits.wait();
                counts.lock().unwrap().push(number);
            })
            .unwrap();
        let block = client.procedure::<Note, ()>("block").on(&to_server);
        let briefly = block.clone().timeout(TAKES * patience());
        let mut sent = Vec::new();
        let refused = loop {
            let number = sent.len() as u64;
            let begin = Instant::now();
            match briefly.notify(&(number, text(number, len))) {
                Ok(()) => sent.push(number),
                Err(error) => break (error, begin.elapsed()),
            }
            assert!(sent.len() < 20_000, "the caller is not slowed down");
        };
        assert_error!(Err::<(), _>(refused.0), Error::Busy { .. });
        assert!(refused.1 >= TAKES.mul_f32(0.9), "it failed after {:?}", refused.1);
        // Calls that are answered are not in the way of that.
        server.define("there", |_: &Request, ()| ()).unwrap();
        client.procedure::<(), ()>("there").on(&to_server).call(&()).unwrap();
        gate.open();
        eventually("all that were taken are handled", || count.lock().unwrap().len() == sent.len());
        for number in sent.len() as u64..sent.len() as u64 + 100 {
            block.notify(&(number, text(number, len))).unwrap();
            sent.push(number);
        }
        eventually("and those behind them", || count.lock().unwrap().len() == sent.len());
        let mut handled = std::mem::take(&mut *count.lock().unwrap());
        handled.sort_unstable();
        assert_eq!(handled, sent);
    }
}

fn what_is_lost_is_counted(net: &Net) {
    let pair = net.pair();
    pair.server.define("panics", |_: &Request, ()| -> () { panic!("on purpose") }).unwrap();
    pair.server.define("number", |_: &Request, _: u64| ()).unwrap();
    let (client, to) = (&pair.client, &pair.to_server);
    for round in 1..=3 {
        client.procedure::<(), ()>("missing").on(to).notify(&()).unwrap();
        client.procedure::<(), ()>("panics").on(to).notify(&()).unwrap();
        client.procedure::<String, ()>("number").on(to).notify(&"seven".to_owned()).unwrap();
        client.procedure::<(), ()>("panics").on(to.provider(77)).notify(&()).unwrap();
        client.procedure::<String, ()>("number").on(to).notify(&text(7, 1 << 20)).unwrap();
        client.procedure::<u64, ()>("number").on(to).notify(&7).unwrap();
        eventually("all are counted", || pair.server.refusals().one_way == 5 * round);
    }
    assert_eq!(client.refusals().one_way, 0);
}

/// Many bytes in memory for each in a message.
type Texts = Vec<String>;

/// A server with little memory for the values in calls, and 64 handler threads.
fn tight(net: &Net) -> Pair {
    let server = net.server_with(|builder| {
        builder.max_message_size(1 << 20).max_bytes_in_flight_per_peer(4 << 20).max_bytes_in_flight(16 << 20).handler_threads(64)
    });
    Pair::of(server, net.client())
}

/// Handlers that take nearly all of that memory until the gate opens.
fn hold(pair: &Pair, gate: &Gate) -> Vec<Pending<()>> {
    let (waits, held) = (gate.clone(), Arc::new(AtomicUsize::new(0)));
    let entered = held.clone();
    pair.server
        .define("hold", move |_: &Request, _: Texts| {
            entered.fetch_add(1, Ordering::SeqCst);
            waits.wait();
        })
        .unwrap();
    // Each counts with its 118,000 bytes, and a quarter of 24 times as many; more while it is decoded.
    let hold = pair.client.procedure::<Texts, ()>("hold").on(&pair.to_server);
    let mut holding = Vec::new();
    for number in 1..=5 {
        holding.push(hold.start(&vec![String::new(); 118_000]).unwrap());
        eventually("the memory is taken", || held.load(Ordering::SeqCst) == number);
    }
    holding
}

fn define_texts(engine: &Engine) -> Handled {
    let handled = Handled::default();
    let by_number = handled.clone();
    engine
        .define("texts", move |_: &Request, (number, texts): (u64, Texts)| {
            assert!(texts.iter().all(String::is_empty));
            *by_number.lock().unwrap().entry(number).or_default() += 1;
        })
        .unwrap();
    handled
}

fn texts(pair: &Pair, number: u64, count: usize) -> calomel::Result<()> {
    pair.client.procedure::<(u64, Texts), ()>("texts").on(&pair.to_server).notify(&(number, vec![String::new(); count]))
}

/// A call that is announced, and small ones, whose values find no room.
fn send_too_many(pair: &Pair) -> Vec<u64> {
    [40_000, 12_000, 12_000].into_iter().zip(0..).for_each(|(count, number)| texts(pair, number, count).unwrap());
    vec![0, 1, 2]
}

/// Small calls and announced ones whose values find no room: they are handled when the calls that took it have ended.
fn values_that_find_no_room(net: &Net) {
    let (pair, gate) = (tight(net), Gate::default());
    let handled = define_texts(&pair.server);
    let holding = hold(&pair, &gate);
    let sent = send_too_many(&pair);
    pair.client.procedure::<(), ()>("there").on(&pair.to_server).call(&()).unwrap_err();
    gate.open();
    holding.into_iter().for_each(|holds| holds.wait().unwrap());
    assert_handled(&handled, &sent);
    assert_eq!(pair.server.refusals().one_way, 0);
}

/// The same while calls that are answered take the room again and again.
fn values_beside_calls_that_take_the_room(net: &Net) {
    let pair = tight(net);
    let handled = define_texts(&pair.server);
    pair.server.define("take", |_: &Request, texts: Texts| texts.len()).unwrap();
    let (stop, all) = (AtomicBool::new(false), rounds(24));
    let sent = thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let take = pair.client.procedure::<Texts, usize>("take").on(&pair.to_server);
                while !stop.load(Ordering::Relaxed) {
                    match take.call(&vec![String::new(); 200_000]) {
                        Ok(200_000) | Err(Error::Busy { .. }) => {}
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
        let mut sent = Vec::new();
        for number in 0..all as u64 {
            let count = [12_000, 15_000, 100_000, 300_000][number as usize % 4];
            match texts(&pair, number, count) {
                Ok(()) => sent.push(number),
                // What is announced shares the limits.
                Err(Error::Busy { .. }) if count > 15_000 => {}
                Err(other) => {
                    stop.store(true, Ordering::Relaxed);
                    panic!("{other:?}");
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        sent
    });
    assert!(sent.len() >= all / 2);
    assert_handled(&handled, &sent);
    assert_eq!(pair.server.refusals().one_way, 0);
}

/// Their caller goes while they wait for room.
fn values_of_a_caller_that_goes(net: &Net) {
    let (pair, gate) = (tight(net), Gate::default());
    let handled = define_texts(&pair.server);
    let holding = hold(&pair, &gate);
    let sent = send_too_many(&pair);
    pair.client.finalize().unwrap();
    gate.open();
    drop(holding);
    assert_handled(&handled, &sent);
    assert_eq!(pair.server.refusals().one_way, 0);
}

/// An engine that is finalized handles those that wait for room, as long as it waits for those that have it.
fn values_at_the_end(net: &Net) {
    let (pair, gate) = (tight(net), Gate::default());
    let handled = define_texts(&pair.server);
    let holding = hold(&pair, &gate);
    let sent = send_too_many(&pair);
    // When there is an answer, if only `Busy`, they have arrived, before the engine begins to end.
    pair.client.procedure::<(), ()>("there").on(&pair.to_server).call(&()).unwrap_err();
    let (begins, begun) = mpsc::channel();
    pair.server.on_prefinalize(move || begins.send(()).unwrap());
    thread::scope(|scope| {
        let ends = scope.spawn(|| pair.server.finalize());
        begun.recv_timeout(BOUND).unwrap();
        gate.open();
        ends.join().unwrap().unwrap();
    });
    drop(holding);
    assert_handled(&handled, &sent);
    assert_eq!(pair.server.refusals().one_way, 0);
}

/// Many wait for room when their procedure is removed.
fn values_of_a_procedure_that_is_removed(net: &Net) {
    let (pair, gate) = (tight(net), Gate::default());
    let handled = Arc::new(AtomicUsize::new(0));
    let count = handled.clone();
    let defined = pair.server.define("many", move |_: &Request, _: Texts| _ = count.fetch_add(1, Ordering::SeqCst)).unwrap();
    let many = pair.client.procedure::<Texts, ()>("many").on(&pair.to_server);
    // A caller has credit for many when many have been handled.
    let before = rounds(20_000);
    for _ in 0..before {
        many.notify(&Texts::new()).unwrap();
    }
    eventually("they are handled", || handled.load(Ordering::SeqCst) == before);
    let holding = hold(&pair, &gate);
    let mut sent = 0;
    while sent < rounds(4_000) && many.clone().timeout(Duration::from_millis(200)).notify(&vec![String::new(); 200]).is_ok() {
        sent += 1;
    }
    pair.client.procedure::<(), ()>("there").on(&pair.to_server).call(&()).unwrap_err();
    assert!(defined.remove());
    gate.open();
    holding.into_iter().for_each(|holds| drop(holds.wait()));
    let over = || handled.load(Ordering::SeqCst) - before + pair.server.refusals().one_way as usize;
    let begin = Instant::now();
    while over() < sent {
        assert!(begin.elapsed() < BOUND, "{} of {sent} calls are over", over());
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(over(), sent);
}

/// Many that wait for room are refused one after the other, by a thread with a small stack that makes the room: an answer ends the
/// calls that have taken it.
fn values_refused_on_a_small_stack(net: &Net) {
    let pair = tight(net);
    let (holds, held) = mpsc::channel();
    pair.server.define_deferred("hold", move |reply: Responder<()>, _: Texts| holds.send(reply).unwrap()).unwrap();
    let handled = Arc::new(AtomicUsize::new(0));
    let count = handled.clone();
    let defined = pair.server.define("many", move |_: &Request, _: Texts| _ = count.fetch_add(1, Ordering::SeqCst)).unwrap();
    let many = pair.client.procedure::<Texts, ()>("many").on(&pair.to_server);
    // A caller has credit for many when many have been handled.
    (0..4_000).for_each(|_| many.notify(&Texts::new()).unwrap());
    eventually("they are handled", || handled.load(Ordering::SeqCst) == 4_000);
    let hold = pair.client.procedure::<Texts, ()>("hold").on(&pair.to_server);
    let start = |_| (hold.start(&vec![String::new(); 118_000]).unwrap(), held.recv_timeout(BOUND).expect("it has found room"));
    let (holding, replies): (Vec<_>, Vec<_>) = (0..5).map(start).unzip();
    // The first needs more room than is left, and those behind it wait their turn.
    many.notify(&vec![String::new(); 12_000]).unwrap();
    let briefly = many.clone().timeout(Duration::from_millis(200));
    let sent = 1 + (0..1_000).take_while(|_| briefly.notify(&vec![String::new(); 200]).is_ok()).count();
    // When there is an answer they have arrived.
    pair.client.procedure::<(), ()>("there").on(&pair.to_server).call(&()).unwrap_err();
    assert!(defined.remove());
    let answer = move || replies.into_iter().for_each(|reply| reply.respond(&()).unwrap());
    thread::Builder::new().stack_size(256 << 10).spawn(answer).unwrap().join().unwrap();
    holding.into_iter().for_each(|holds| holds.wait().unwrap());
    let refused = || pair.server.refusals().one_way as usize;
    eventually("all are over", || handled.load(Ordering::SeqCst) - 4_000 + refused() == sent);
    assert!(refused() > 100, "of {sent} too few have waited");
}

/// What would never find room is refused, and counted.
fn values_beyond_the_whole_limit(net: &Net) {
    let pair = tight(net);
    let handled = define_texts(&pair.server);
    texts(&pair, 1, 900_000).unwrap();
    eventually("it is counted", || pair.server.refusals().one_way == 1);
    texts(&pair, 2, 10_000).unwrap();
    assert_handled(&handled, &[2]);
}

/// A bulk in a call that waits for room is the peer's until its handler has dropped it.
fn bulks_beside_values_that_find_no_room(net: &Net) {
    let (pair, gate) = (tight(net), Gate::default());
    let (moved, told) = mpsc::channel();
    pair.server
        .define("fetch", move |request: &Request, (first, _, last): (Bulk, Texts, Bulk)| {
            let mut bytes = [0u8; 2000];
            let pulled = [first, last].map(|bulk| bulk.on(request.endpoint()).pull_into(&mut bytes[..]));
            moved.send((pulled, bytes)).unwrap();
        })
        .unwrap();
    let holding = hold(&pair, &gate);
    let exposed =
        [5u8, 6].map(|byte| pair.client.expose_with(vec![byte; 2000], BulkMode::ReadOnly, &Grant::new().for_one_call()).unwrap());
    let arguments = (exposed[0].bulk(), vec![String::new(); 40_000], exposed[1].bulk());
    pair.client.procedure::<(Bulk, Texts, Bulk), ()>("fetch").on(&pair.to_server).notify(&arguments).unwrap();
    gate.open();
    holding.into_iter().for_each(|holds| holds.wait().unwrap());
    let ([first, last], bytes) = told.recv_timeout(BOUND).expect("it is handled");
    assert_eq!((first.unwrap(), last.unwrap()), (2000, 2000));
    assert!(bytes == [6; 2000]);
}

suite!(
    large_ones_to_a_slow_handler,
    small_ones_by_the_ten_thousand,
    beside_calls_that_reach_the_limits,
    several_senders_beyond_the_limit_in_all,
    of_every_size,
    a_handler_that_blocks,
    what_is_lost_is_counted,
    values_that_find_no_room,
    values_beside_calls_that_take_the_room,
    values_of_a_caller_that_goes,
    values_at_the_end,
    values_of_a_procedure_that_is_removed,
    values_refused_on_a_small_stack,
    values_beyond_the_whole_limit,
    bulks_beside_values_that_find_no_room,
);
