//! Bulk data between two processes: a client exposes memory and sends the bulk that names it; the server pulls from it.
//!
//! `cargo run --release --example do_rdma` starts both and prints their output. To start them by hand, on one or two machines:
//!
//! ```text
//! cargo run --release --example do_rdma server [ADDRESS]     # default tcp://127.0.0.1:0; prints its address
//! cargo run --release --example do_rdma client ADDRESS
//! ```
//!
//! ADDRESS can name an RDMA device, `verbs://IP:PORT`, with `--features verbs`.

use std::env;
use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Endpoint, Engine, EngineBuilder, HandlerResult, Request};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [] => both_sides(),
        ["server"] => server("tcp://127.0.0.1:0"),
        ["server", address] => server(address),
        ["client", address] => client(address),
        _ => Err("usage: do_rdma [server [ADDRESS] | client ADDRESS]".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

// ---- The client: exposes memory, and makes calls that carry its bulks ----------------------------------------------------

fn client(address: &str) -> Outcome {
    refuse_loopback(address)?;
    // By default, so few bytes are sent inside the call. A limit of 0 makes the server pull them.
    let engine = builder(address).eager_bulk_limit(0).build()?;
    let server = engine.lookup(address)?;

    expose_a_name(&engine, &server)?;
    sum_ten_numbers(&engine, &server)?;
    copy_a_slice(&engine, &server)?;
    if let Some(transport) = server.transport() {
        println!("all of it went over {transport:?}");
    }

    server.shutdown()?;
    println!("asked the server to stop");
    Ok(())
}

fn expose_a_name(engine: &Engine, server: &Endpoint) -> Outcome {
    let do_rdma = engine.procedure::<Bulk, usize>("do_rdma");
    // Peers may read these 9 bytes, and nothing else.
    let name = engine.expose_read_only(String::from("Matthieu\0"))?;
    let taken = do_rdma.on(server).call(&name.bulk())?;
    println!("the server took {taken} of {} bytes", name.len());
    Ok(())
}

fn sum_ten_numbers(engine: &Engine, server: &Endpoint) -> Outcome {
    let sum = engine.procedure::<Bulk, i32>("sum");
    let numbers = engine.expose_read_only(vec![1, 4, 2, 5, 6, 3, 5, 3, 2, 5])?;
    let answer = sum.on(server).call(&numbers.bulk())?;
    println!("the sum of {:?} is {answer}", numbers.view());
    Ok(())
}

fn copy_a_slice(engine: &Engine, server: &Endpoint) -> Outcome {
    let copy_slice = engine.procedure::<Bulk, usize>("copy_slice");
    let source = engine.expose_read_only(numbered_bytes().to_vec())?;
    let copied = copy_slice.on(server).call(&source.bulk())?;
    println!("the server copied a slice of {copied} bytes");
    Ok(())
}

// ---- The server: receives bulks, and pulls --------------------------------------------------------------------------------

fn server(address: &str) -> Outcome {
    refuse_loopback(address)?;
    let engine = builder(address).listen(address).remote_shutdown(true).build()?;
    // A handler that returns an error fails its call: the caller gets the error's text.
    engine.define_try("do_rdma", pull_the_name)?;
    engine.define_try("sum", pull_and_sum)?;
    engine.define_try("copy_slice", pull_a_slice)?;

    // Printed last: a client may call as soon as it has read this line.
    println!("{LISTENING}{}", engine.address());
    engine.wait_for_finalize();
    println!("stopped");
    Ok(())
}

fn pull_the_name(request: &Request, name: Bulk) -> HandlerResult<usize> {
    // The bulk names the memory, the endpoint its owner. The smaller length is transferred: 6 of the 9 bytes.
    let local = request.engine().expose(vec![0u8; 6], BulkMode::WriteOnly)?;
    // The operator is short for `pull_into`: data flows along the arrow.
    let pulled = (name.on(request.endpoint()) >> &local)?;
    let text = String::from_utf8(local.reclaim())?;
    println!("pulled {pulled} of {} bytes: {text}", name.len());
    Ok(pulled)
}

fn pull_and_sum(request: &Request, numbers: Bulk) -> calomel::Result<i32> {
    // The local side can be plain memory, which the call borrows. The server chooses its size, not the caller.
    let mut local = [0i32; 10];
    let pulled = numbers.on(request.endpoint()).pull_into(&mut local[..])?;
    let pulled = &local[..pulled / size_of::<i32>()];
    println!("pulled {pulled:?}");
    Ok(pulled.iter().sum())
}

fn pull_a_slice(request: &Request, source: Bulk) -> HandlerResult<usize> {
    let local = request.engine().expose(vec![UNTOUCHED; 64], BulkMode::ReadWrite)?;
    let copied = source.slice(3, 45)?.on(request.endpoint()).pull_into(&local.slice(13, 45)?)?;

    let mut expected = [UNTOUCHED; 64];
    expected[13..13 + 45].copy_from_slice(&numbered_bytes()[3..3 + 45]);
    if local.reclaim() != expected {
        return Err("the slice did not arrive where it should have".into());
    }
    println!("copied {copied} bytes from offset 3 there to offset 13 here, and no other");
    Ok(copied)
}

/// The client's bytes: each equals its offset, so that a misplaced byte shows.
fn numbered_bytes() -> [u8; 64] {
    std::array::from_fn(|offset| offset as u8)
}

const UNTOUCHED: u8 = 0xff;

/// By default, two engines on one host use shared memory. With the address of an RDMA device, they stay on that device.
fn builder(address: &str) -> EngineBuilder {
    Engine::builder().same_host_upgrade(!address.starts_with("verbs://"))
}

/// A `loop://` address names an engine in the same process, but client and server are two processes.
fn refuse_loopback(address: &str) -> Outcome {
    if address.starts_with("loop://") {
        return Err(format!("{address} can't be reached from another process: give a tcp:// address").into());
    }
    Ok(())
}

// ---- Both as child processes of this one ----------------------------------------------------------------------------------

const LISTENING: &str = "listening on ";
/// Far more than both need; after it both are killed.
const TIME_LIMIT: Duration = Duration::from_secs(30);

fn both_sides() -> Outcome {
    let deadline = Instant::now() + TIME_LIMIT;
    let server = Side::start("server", &["server"])?;
    let address = server.read_address(deadline)?;
    let client = Side::start("client", &["client", &address])?;
    client.finish(deadline)?;
    server.finish(deadline)
}

/// A child process: this program again. Its output is passed on. It is killed when this is dropped.
struct Side {
    name: &'static str,
    process: Child,
    /// The lines of its output; the channel ends with the process.
    lines: Receiver<String>,
}

impl Side {
    fn start(name: &'static str, arguments: &[&str]) -> Outcome<Self> {
        let mut process = Command::new(env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (printed, lines) = mpsc::channel();
        relay(name, process.stdout.take(), printed.clone());
        relay(name, process.stderr.take(), printed);
        Ok(Side { name, process, lines })
    }

    fn read_address(&self, deadline: Instant) -> Outcome<String> {
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(address) = line.strip_prefix(LISTENING) {
                        return Ok(address.to_owned());
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(format!("the {} ended early", self.name).into()),
                Err(RecvTimeoutError::Timeout) => return Err(self.overdue()),
            }
        }
    }

    fn finish(mut self, deadline: Instant) -> Outcome {
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => return Err(self.overdue()),
            }
        }
        let status = self.process.wait()?;
        if !status.success() {
            return Err(format!("the {} failed: {status}", self.name).into());
        }
        Ok(())
    }

    fn overdue(&self) -> Box<dyn Error> {
        format!("the {} is not done after {} s", self.name, TIME_LIMIT.as_secs()).into()
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // Neither has an effect on a process that has been waited for.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Passes on the lines of one output, until it ends.
fn relay(side: &'static str, output: Option<impl Read + Send + 'static>, printed: Sender<String>) {
    let Some(output) = output else { return };
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            println!("[{side}] {line}");
            // The receiver is gone once the side has been dropped.
            printed.send(line).ok();
        }
    });
}
