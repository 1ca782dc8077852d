//! `define_async` takes a closure that returns a future, and a started call is a future: a handler awaits other servers without
//! blocking a thread. Any executor will do; here it is ten lines of the standard library.
//!
//! `cargo run --example 04_async_handlers`

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};

use calomel::{Endpoint, Engine, Procedure, Request};

fn main() -> calomel::Result<()> {
    let worker = Engine::server("tcp://127.0.0.1:0")?;
    worker.define("square", |_: &Request, x: i32| x * x)?;

    // The front server answers by calling the worker: an engine that listens can also call.
    let front = Engine::server("tcp://127.0.0.1:0")?;
    let square = front.procedure::<i32, i32>("square");
    let worker = front.lookup(worker.address())?;
    front.define_async("sum_of_squares", move |_: Request, (x, y): (i32, i32)| {
        let (square, worker) = (square.clone(), worker.clone());
        // An error that the caller should see is part of the answer's type.
        async move { sum_of_squares(&square, &worker, x, y).await.map_err(|error| error.to_string()) }
    })?;

    let client = Engine::client("tcp")?;
    let front = client.lookup(front.address())?;
    let sum_of_squares = client.procedure::<(i32, i32), Result<i32, String>>("sum_of_squares");

    let answer = block_on(async { sum_of_squares.on(&front).start(&(3, 4))?.await })?;
    println!("3² + 4² = {answer:?}");
    assert_eq!(answer, Ok(25));
    Ok(())
}

/// Both calls are in flight before the first answer is awaited.
async fn sum_of_squares(square: &Procedure<i32, i32>, worker: &Endpoint, x: i32, y: i32) -> calomel::Result<i32> {
    let x = square.on(worker).start(&x)?;
    let y = square.on(worker).start(&y)?;
    Ok(x.await? + y.await?)
}

/// Drives one future on this thread, which sleeps while the future is pending.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
