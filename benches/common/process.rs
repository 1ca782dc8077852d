//! The server process: an engine that serves, and the raw side.

use std::{
    env,
    io::{self, BufRead, BufReader, Read, Write},
    net::SocketAddr,
    process::{Child, Command, Stdio},
};

use calomel::Engine;

use super::{
    Outcome, Plan, Transport,
    raw::{self, shared::Shared},
};

/// Bytes of the server's memory that the client reads directly, at most.
pub const DIRECT: usize = 64 << 10;

/// The server process. It is killed when this is dropped, also by a panic.
pub struct Process<'a> {
    plan: &'a Plan,
    child: Child,
    /// The address of its engine, if it has one.
    pub address: String,
    raw: SocketAddr,
    /// The address of [`DIRECT`] bytes of its memory.
    pub memory: u64,
}

impl Process<'_> {
    /// `engine`: the transport of its engine; `None` for the raw side only.
    pub fn start(plan: &Plan, engine: Option<Transport>) -> Outcome<(Process<'_>, raw::Connection)> {
        let shared = Shared::create()?;
        let mut command = Command::new(env::current_exe()?);
        command.arg("server").arg(engine.map_or("none", Transport::name)).args(shared.numbers());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        shared.keep()?;
        let output = child.stdout.take().ok_or("the server has no output")?;
        plan.servers.borrow_mut().push(child.id());
        // From here on an error drops the server, which ends the process.
        let mut process = Process { plan, child, address: String::new(), raw: ([0, 0, 0, 0], 0).into(), memory: 0 };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [address, raw, memory] = words[..] else { return Err("the server did not start".into()) };
        process.address = address.to_owned();
        process.raw = raw.parse()?;
        process.memory = memory.parse()?;
        let connection = raw::Connection::open(process.raw, shared)?;
        Ok((process, connection))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let pid = self.pid();
        self.plan.servers.borrow_mut().retain(|&server| server != pid);
    }
}

/// The main function of the server process.
pub fn serve(define: fn(&Engine) -> calomel::Result<()>, arguments: &[String]) -> Outcome {
    let (transport, numbers) = arguments.split_first().ok_or("the argument `server` needs a transport")?;
    let engine = Transport::parse(transport).map(Transport::server).transpose()?;
    let mut address = "-".to_owned();
    if let Some(engine) = &engine {
        define(engine)?;
        address = engine.address().to_string();
    }
    let raw = raw::start_server(Shared::inherit(numbers)?)?;
    let memory: &'static [u8] = vec![1; DIRECT].leak();
    println!("{address} {raw} {}", memory.as_ptr().addr());
    io::stdout().flush()?;
    // The input ends with the client, even with one that was killed.
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
