//! `notify` sends a call without an answer. It may carry exposed memory all the same: `released` resolves when the server no
//! longer holds the bulk.
//!
//! `cargo run --example 06_one_way`

use std::sync::mpsc;

use calomel::{Bulk, Engine, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;

    let (log, logged) = mpsc::channel();
    server.define("log", move |_: &Request, line: String| {
        log.send(line).ok();
    })?;

    let (sum, sums) = mpsc::channel();
    server.define("sum", move |request: &Request, bulk: Bulk| {
        sum.send(pull_and_sum(request, bulk)).ok();
    })?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;

    // `notify` returns once the message is queued. Its outcome, even an unknown procedure, is not reported.
    let log = client.procedure::<str, ()>("log");
    for line in ["one", "two", "three"] {
        log.on(&peer).notify(line)?;
    }
    // Handlers may overtake each other.
    let mut lines: Vec<String> = logged.iter().take(3).collect();
    lines.sort();
    println!("the server logged {lines:?}");
    assert_eq!(lines, ["one", "three", "two"]);

    let numbers = client.expose_read_only((1..=LENGTH as u64).collect::<Vec<_>>())?;
    client.procedure::<Bulk, ()>("sum").on(&peer).notify(&numbers.bulk())?;
    numbers.released().wait(); // no peer holds a `Bulk` of it any more
    let numbers = numbers.reclaim();
    assert_eq!(numbers.len(), LENGTH);

    let sum = sums.recv().expect("the handler has run: its bulk is gone")?;
    println!("the server summed up {LENGTH} numbers to {sum}");
    assert_eq!(sum, numbers.iter().sum::<u64>());
    Ok(())
}

const LENGTH: usize = 100_000;

fn pull_and_sum(request: &Request, bulk: Bulk) -> calomel::Result<u64> {
    let mut numbers = vec![0u64; LENGTH];
    bulk.on(request.endpoint()).pull_into(&mut numbers)?;
    Ok(numbers.iter().sum())
}
