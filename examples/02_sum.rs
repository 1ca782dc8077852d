//! Arguments and results are of any serde type: several arguments are passed as a tuple, a type of your own as it is.
//!
//! `cargo run --example 02_sum`

use calomel::{Engine, Request};
use serde::{Deserialize, Serialize};

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Statistics {
    count: usize,
    sum: f64,
    mean: f64,
}

/// A function can be a handler too.
fn statistics(_: &Request, values: Vec<f64>) -> Statistics {
    let (count, sum) = (values.len(), values.iter().sum::<f64>());
    Statistics { count, sum, mean: sum / count as f64 }
}

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y)?;
    server.define("statistics", statistics)?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;

    let sum = client.procedure::<(i32, i32), i32>("sum");
    let answer = sum.on(&peer).call(&(42, 63))?;
    println!("42 + 63 = {answer}");
    assert_eq!(answer, 105);

    let statistics = client.procedure::<[f64], Statistics>("statistics");
    let answer = statistics.on(&peer).call(&[1.0, 2.0, 6.0])?;
    println!("{answer:?}");
    assert_eq!(answer, Statistics { count: 3, sum: 9.0, mean: 3.0 });
    Ok(())
}
