//! A service as a service manager runs it: its options come from the environment, it tells systemd when it is ready, and
//! SIGTERM ends it in an orderly way. `docs/deploy` has a unit and a Dockerfile for it.
//!
//! `cargo run --example 25_daemon` runs it as a child, calls it and ends it. `25_daemon serve` is the service.

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::io::{BufRead, BufReader};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use calomel::{Engine, EngineConfig, Request};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

fn main() -> Result<(), Box<dyn Error>> {
    match env::args().nth(1).as_deref() {
        Some("serve") => serve(),
        _ => supervise(),
    }
}

fn serve() -> Result<(), Box<dyn Error>> {
    // Before the engine: a signal that comes early is not lost.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    // `CALOMEL_LISTEN`, `CALOMEL_PRE_SHARED_KEY_FILE`, `CALOMEL_REMOTE_STATS` and so on.
    let mut config = EngineConfig::from_env()?;
    let addresses = std::mem::take(&mut config.listen);
    let engine = Engine::from_config(&config)?;
    let values: Arc<Mutex<HashMap<String, Vec<u8>>>> = Arc::default();
    let stored = values.clone();
    engine.define("put", move |_: &Request, (key, value): (String, Vec<u8>)| stored.lock().unwrap().insert(key, value))?;
    engine.define("get", move |_: &Request, key: String| values.lock().unwrap().get(&key).cloned())?;
    // Listens when all is defined: a peer that reaches it finds its procedures.
    for address in addresses {
        println!("listening at {}", engine.listen(address)?);
    }
    tell_systemd("READY=1")?;
    signals.forever().next();
    tell_systemd("STOPPING=1")?;
    // Handlers that run have `CALOMEL_FINALIZE_TIMEOUT` to end, and what they have answered is sent.
    engine.finalize()?;
    println!("ended");
    Ok(())
}

/// What `sd_notify` does, for a unit of `Type=notify`.
fn tell_systemd(state: &str) -> std::io::Result<()> {
    let Ok(name) = env::var("NOTIFY_SOCKET") else { return Ok(()) };
    let socket = match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &socket).map(drop)
}

/// What a service manager does, and a client.
fn supervise() -> Result<(), Box<dyn Error>> {
    let mut service = Command::new(env::current_exe()?);
    let mut service = service.arg("serve").env("CALOMEL_LISTEN", "tcp://127.0.0.1:0").stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(service.stdout.take().expect("it is piped")).lines();
    let line = lines.next().ok_or("the service has ended")??;
    let address = line.strip_prefix("listening at ").ok_or("it does not listen")?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(address)?;
    client.procedure::<(&str, Vec<u8>), Option<Vec<u8>>>("put").on(&peer).call(&("name", b"calomel".to_vec()))?;
    let value = client.procedure::<&str, Option<Vec<u8>>>("get").on(&peer).call(&"name")?;
    println!("stored and read back: {}", String::from_utf8_lossy(&value.ok_or("it is not there")?));

    kill_process(Pid::from_child(&service), Signal::TERM)?;
    for line in lines {
        println!("the service: {}", line?);
    }
    println!("it has ended by itself: {}", service.wait()?.success());
    Ok(())
}
