//! Many threads share one engine, many engines one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use calomel::{Bulk, BulkMode, Request};

use crate::support::{Net, Pair, Random, pattern, rounds};

const THREADS: u64 = 64;

fn serve(pair: &Pair) {
    pair.server.define("mix", |_: &Request, (a, b): (u64, u64)| a.rotate_left(7) ^ b).unwrap();
    pair.server.define("long", |_: &Request, (c, len): (char, usize)| c.to_string().repeat(len)).unwrap();
    pair.server
        .define("checksum", |request: &Request, bulk: Bulk| -> Result<u64, String> {
            let mut bytes = vec![0u8; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut bytes).map_err(|e| e.to_string())?;
            Ok(checksum(&bytes))
        })
        .unwrap();
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum: u64, &b| sum.wrapping_mul(31).wrapping_add(b.into()))
}

fn sixty_four_threads_share_one_engine(net: &Net) {
    let pair = net.pair();
    serve(&pair);
    let data = pattern(11, 200_000);
    let exposed = pair.server.expose_read_only(data.clone()).unwrap();
    let bulk = exposed.bulk();
    thread::scope(|s| {
        for t in 0..THREADS {
            let (pair, data, bulk) = (&pair, &data, &bulk);
            s.spawn(move || {
                let mut random = Random(t);
                let mix = pair.client.procedure::<(u64, u64), u64>("mix");
                let long = pair.client.procedure::<(char, usize), String>("long");
                let sum = pair.client.procedure::<Bulk, Result<u64, String>>("checksum");
                for _ in 0..rounds(40) {
                    match random.below(5) {
                        0 | 1 => {
                            let (a, b) = (random.next(), random.next());
                            let answer = mix.on(&pair.to_server).call(&(a, b)).unwrap();
                            assert_eq!(answer, a.rotate_left(7) ^ b);
                        }
                        2 => {
                            let (c, len) = ((b'a' + (t % 26) as u8) as char, random.below(30_000));
                            let answer = long.on(&pair.to_server).call(&(c, len)).unwrap();
                            assert!(answer.len() == len && answer.chars().all(|x| x == c));
                        }
                        3 => {
                            let offset = random.below(data.len());
                            let len = random.below(data.len() - offset).min(60_000);
                            let mut part = vec![0u8; len];
                            let moved = bulk.slice(offset, len).unwrap().on(&pair.to_server).pull_into(&mut part);
                            assert_eq!(moved.unwrap(), len);
                            assert!(part == data[offset..offset + len]);
                        }
                        _ => {
                            let mine = pattern(random.next(), random.below(20_000));
                            let expected = checksum(&mine);
                            let mine = pair.client.expose_read_only(mine).unwrap();
                            assert_eq!(sum.on(&pair.to_server).call(&mine.bulk()).unwrap(), Ok(expected));
                        }
                    }
                }
            });
        }
    });
}

fn calls_started_by_many_threads_are_answered(net: &Net) {
    let pair = net.pair();
    serve(&pair);
    thread::scope(|s| {
        for t in 0..16 {
            let pair = &pair;
            s.spawn(move || {
                let mix = pair.client.procedure::<(u64, u64), u64>("mix");
                let pendings: Vec<_> = (0..500).map(|i| mix.on(&pair.to_server).start(&(t, i)).unwrap()).collect();
                for (i, pending) in pendings.into_iter().enumerate() {
                    assert_eq!(pending.wait().unwrap(), t.rotate_left(7) ^ i as u64);
                }
            });
        }
    });
}

fn calls_of_many_engines_are_answered_by_one_server(net: &Net) {
    let server = net.server();
    server.define("square", |_: &Request, n: u64| n * n).unwrap();
    let clients: Vec<_> = (0..16).map(|_| net.client()).collect();
    thread::scope(|s| {
        for (t, client) in clients.iter().enumerate() {
            let server = &server;
            s.spawn(move || {
                let endpoint = client.lookup(server.address()).unwrap();
                let square = client.procedure::<u64, u64>("square");
                for i in 0..100 {
                    let n = 1000 * t as u64 + i;
                    assert_eq!(square.on(&endpoint).call(&n).unwrap(), n * n);
                }
            });
        }
    });
}

fn first_calls_of_many_threads_share_a_connection(net: &Net) {
    // All threads find no connection: they must share a single new one, and no call may be lost.
    for _ in 0..10 {
        let pair = net.pair();
        let count = Arc::new(AtomicU64::new(0));
        let here = count.clone();
        pair.server.define("count", move |_: &Request, ()| here.fetch_add(1, Ordering::SeqCst)).unwrap();
        let start = std::sync::Barrier::new(16);
        thread::scope(|s| {
            for _ in 0..16 {
                s.spawn(|| {
                    start.wait();
                    pair.client.procedure::<(), u64>("count").on(&pair.to_server).call(&()).unwrap();
                });
            }
        });
        assert_eq!(count.load(Ordering::SeqCst), 16);
    }
}

fn small_calls_pass_large_transfers(net: &Net) {
    let pair = net.pair();
    serve(&pair);
    let target = pair.server.expose(vec![0u8; 32 << 20], BulkMode::ReadWrite).unwrap();
    let stop = AtomicBool::new(false);
    let calls = thread::scope(|s| {
        let (stop, bulk, pair) = (&stop, target.bulk(), &pair);
        let mover = s.spawn(move || {
            let mut bytes = pattern(1, 32 << 20);
            for _ in 0..rounds(3) {
                bulk.on(&pair.to_server).push_from(&bytes).unwrap();
                bulk.on(&pair.to_server).pull_into(&mut bytes).unwrap();
            }
            stop.store(true, Ordering::SeqCst);
        });
        let mix = pair.client.procedure::<(u64, u64), u64>("mix");
        let mut calls = 0;
        while !stop.load(Ordering::SeqCst) {
            assert_eq!(mix.on(&pair.to_server).call(&(calls, 3)).unwrap(), calls.rotate_left(7) ^ 3);
            calls += 1;
        }
        mover.join().unwrap();
        calls
    });
    // The gaps between 192 MiB of chunks suffice for many more calls than this, even on a busy machine.
    assert!(calls >= 10, "only {calls} calls");
    assert!(target.reclaim() == pattern(1, 32 << 20));
}

fn waiting_threads_pass_on_the_driver_lock(net: &Net) {
    // Few threads, which alternate between driving and waiting for the driver: each waiter must be woken. The timeout is short
    // compared with the test's own, so a lost wake-up fails the call.
    let pair = net.pair();
    serve(&pair);
    let begin = std::time::Instant::now();
    thread::scope(|s| {
        for t in 0..3u64 {
            let (pair, begin) = (&pair, &begin);
            s.spawn(move || {
                let mix = pair.client.procedure::<(u64, u64), u64>("mix");
                let mut n = 0;
                while begin.elapsed() < std::time::Duration::from_millis(1500) {
                    let call = mix.on(&pair.to_server).timeout(std::time::Duration::from_secs(10));
                    let answer = match n % 3 {
                        0 => call.call(&(t, n)),
                        1 => call.start(&(t, n)).and_then(|pending| pending.wait()),
                        _ => {
                            let mut pendings = vec![call.start(&(t, n)).unwrap(), call.start(&(t, n)).unwrap()];
                            let first = calomel::Pending::wait_any(&mut pendings).1;
                            pendings.pop().unwrap().wait().and(first)
                        }
                    };
                    assert_eq!(answer.unwrap(), t.rotate_left(7) ^ n);
                    n += 1;
                }
            });
        }
    });
}

suite![
    waiting_threads_pass_on_the_driver_lock,
    sixty_four_threads_share_one_engine,
    calls_started_by_many_threads_are_answered,
    calls_of_many_engines_are_answered_by_one_server,
    first_calls_of_many_threads_share_a_connection,
    small_calls_pass_large_transfers,
];
