//! `define_async` takes a closure that returns a future, and a started call is a future: a handler awaits other servers without
//! blocking a thread. The engine polls it: no executor is needed.
//!
//! `cargo run --example 05_async_handlers`

use calomel::{Endpoint, Engine, Procedure, Request};

fn main() -> calomel::Result<()> {
    let worker = Engine::server("tcp://127.0.0.1:0")?;
    worker.define("square", |_: &Request, x: i32| x * x)?;

    // The front server answers by calling the worker: an engine that listens can also call.
    let front = Engine::server("tcp://127.0.0.1:0")?;
    let square = front.procedure::<i32, i32>("square");
    let worker = front.lookup(worker.address())?;
    front.define_try_async("sum_of_squares", move |_: Request, (x, y): (i32, i32)| {
        sum_of_squares(square.clone(), worker.clone(), x, y)
    })?;

    let client = Engine::client("tcp")?;
    let front = client.lookup(front.address())?;
    let sum_of_squares = client.procedure::<(i32, i32), i32>("sum_of_squares");

    // The caller has no need of futures: it starts several calls, and waits for them.
    let started = [(3, 4), (5, 12)].map(|sides| sum_of_squares.on(&front).start(&sides));
    let [first, second] = started.map(|pending| pending.and_then(|pending| pending.wait()));
    println!("3² + 4² = {}, 5² + 12² = {}", first?, second?);
    Ok(())
}

/// Both calls are in flight before the first answer is awaited.
async fn sum_of_squares(square: Procedure<i32, i32>, worker: Endpoint, x: i32, y: i32) -> calomel::Result<i32> {
    let x = square.on(&worker).start(&x)?;
    let y = square.on(&worker).start(&y)?;
    Ok(x.await? + y.await?)
}
