//! `calomel info`: what this machine offers.

use std::fmt::Write;
use std::fs;

use calomel::{Address, Engine, Transport};
use clap::Args;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::{Outcome, print};

#[derive(Args)]
#[command(after_help = "Example:\n  calomel info --json | jq '.transports[] | select(.available | not)'")]
pub(crate) struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Info {
    version: &'static str,
    features: Vec<&'static str>,
    kernel: String,
    processors: usize,
    transports: Vec<TransportInfo>,
    /// At which peers would reach an engine that listens on all interfaces.
    addresses: Vec<Address>,
    limits: Vec<Limit>,
}

#[derive(Serialize)]
struct TransportInfo {
    name: &'static str,
    available: bool,
    /// Why it is not available.
    reason: Option<String>,
}

#[derive(Serialize)]
struct Limit {
    name: &'static str,
    value: String,
    /// What it means for calomel.
    effect: &'static str,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    let info = gather()?;
    let text = if arguments.json {
        serde_json::to_string_pretty(&info).map_err(|error| crate::Failure::Other(error.to_string()))? + "\n"
    } else {
        table(&info)
    };
    print(text.as_bytes())
}

const TRANSPORTS: [(&str, Transport); 4] =
    [("tcp", Transport::Tcp), ("shm", Transport::Shm), ("verbs", Transport::Verbs), ("loop", Transport::Loop)];

fn gather() -> Outcome<Info> {
    let transports = TRANSPORTS.map(|(name, _)| {
        let reason = Engine::client(name).err().map(|error| error.to_string());
        TransportInfo { name, available: reason.is_none(), reason }
    });
    let engine = Engine::builder().build()?;
    engine.listen("tcp://[::]:0").or_else(|_| engine.listen("tcp://0.0.0.0:0"))?;
    let addresses = engine.addresses();
    engine.finalize()?;
    let features = [("tls", cfg!(feature = "tls")), ("verbs", cfg!(feature = "verbs"))];
    Ok(Info {
        version: env!("CARGO_PKG_VERSION"),
        features: features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        transports: transports.into(),
        addresses,
        limits: limits(),
    })
}

fn limits() -> Vec<Limit> {
    let of = |resource| match getrlimit(resource).current {
        Some(limit) => limit.to_string(),
        None => "unlimited".to_owned(),
    };
    let mut limits = vec![
        Limit {
            name: "open files",
            value: of(Resource::Nofile),
            effect: "a connection over tcp takes one, one over shared memory several",
        },
        Limit {
            name: "locked memory, bytes",
            value: of(Resource::Memlock),
            effect: "verbs locks exposed memory: set it to unlimited there (ulimit -l)",
        },
    ];
    let setting = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    if let Some(value) = setting("/proc/sys/kernel/yama/ptrace_scope") {
        let effect = match value.as_str() {
            "0" => "peers of the same user copy each other's memory with one copy",
            _ => "peers on this machine can't copy each other's memory: bulk data takes two copies, but for `Engine::alloc`",
        };
        limits.push(Limit { name: "ptrace scope", value, effect });
    }
    if let Some(value) = setting("/proc/sys/net/core/somaxconn") {
        limits.push(Limit { name: "pending connections", value, effect: "so many peers may connect at the same moment" });
    }
    limits
}

fn table(info: &Info) -> String {
    let mut text = String::new();
    let features = if info.features.is_empty() { "none".to_owned() } else { info.features.join(", ") };
    // Writing to a string can't fail.
    let _ = writeln!(text, "calomel {}, features: {features}", info.version);
    let _ = writeln!(text, "Linux {}, {} processors", info.kernel, info.processors);
    let _ = writeln!(text, "\nTransports");
    for TransportInfo { name, reason, .. } in &info.transports {
        let _ = writeln!(text, "  {name:<6} {}", reason.as_deref().unwrap_or("available"));
    }
    let _ = writeln!(text, "\nAddresses, where an engine listens on all interfaces at a port of the system's choice");
    for address in &info.addresses {
        let _ = writeln!(text, "  {address}");
    }
    let _ = writeln!(text, "\nLimits");
    for Limit { name, value, effect } in &info.limits {
        let _ = writeln!(text, "  {name:<21} {value:>12}  {effect}");
    }
    text
}
