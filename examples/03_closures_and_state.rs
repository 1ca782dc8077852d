//! A handler is a closure that owns its state. Calls may be handled concurrently, so shared state is atomic or behind a lock;
//! the compiler checks that.
//!
//! `cargo run --example 03_closures_and_state`

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use calomel::{Engine, Request};

const CLIENTS: u64 = 4;
const TICKETS_EACH: u64 = 25;

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;

    // State that only this handler needs moves into it.
    let last_ticket = AtomicU64::new(0);
    server.define("next_ticket", move |_: &Request, (): ()| last_ticket.fetch_add(1, Ordering::Relaxed) + 1)?;

    // State that is used elsewhere too is shared as usual in Rust.
    let visitors = Arc::new(Mutex::new(BTreeSet::new()));
    let book = Arc::clone(&visitors);
    server.define("sign", move |_: &Request, name: String| {
        book.lock().expect("no handler panics with the lock held").insert(name);
    })?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let next_ticket = client.procedure::<(), u64>("next_ticket");
    let sign = client.procedure::<str, ()>("sign");

    // Engines, endpoints and procedures can be shared between threads.
    thread::scope(|threads| {
        let visit = |number| {
            sign.on(&peer).call(&format!("client {number}"))?;
            (0..TICKETS_EACH).try_for_each(|_| next_ticket.on(&peer).call(&()).map(drop))
        };
        let visits: Vec<_> = (1..=CLIENTS).map(|number| threads.spawn(move || visit(number))).collect();
        visits.into_iter().try_for_each(|visit| visit.join().expect("a client panicked"))
    })?;

    let ticket = next_ticket.on(&peer).call(&())?;
    println!("the next ticket is number {ticket}");
    assert_eq!(ticket, CLIENTS * TICKETS_EACH + 1);

    let visitors = visitors.lock().expect("no handler panics with the lock held");
    println!("visitors: {visitors:?}");
    assert_eq!(visitors.len() as u64, CLIENTS);
    Ok(())
}
