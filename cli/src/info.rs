//! `calomel info`: what this machine offers.

use std::fmt::Write;

use calomel::{Address, Engine, TransportStatus};
use clap::Args;
use serde::Serialize;

use crate::{Outcome, print};

#[derive(Args)]
#[command(after_help = "Example:\n  calomel info --json | jq '.transports[] | select(.unavailable)'")]
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
    transports: Vec<TransportStatus>,
    /// At which peers would reach an engine that listens on all interfaces.
    addresses: Vec<Address>,
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

fn gather() -> Outcome<Info> {
    let engine = Engine::builder().build()?;
    engine.listen("tcp://[::]:0").or_else(|_| engine.listen("tcp://0.0.0.0:0"))?;
    let (addresses, transports) = (engine.addresses(), engine.transports());
    engine.finalize()?;
    let features = [("tls", cfg!(feature = "tls")), ("ofi", cfg!(feature = "ofi")), ("verbs", cfg!(feature = "verbs"))];
    Ok(Info {
        version: env!("CARGO_PKG_VERSION"),
        features: features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        transports,
        addresses,
    })
}

fn table(info: &Info) -> String {
    let mut text = String::new();
    let features = if info.features.is_empty() { "none".to_owned() } else { info.features.join(", ") };
    // Writing to a string can't fail.
    let _ = writeln!(text, "calomel {}, features: {features}", info.version);
    let _ = writeln!(text, "Linux {}, {} processors", info.kernel, info.processors);
    let _ = writeln!(text, "\nTransports");
    for status in &info.transports {
        let _ = writeln!(text, "  {:<11} {}", status.transport, status.unavailable.as_deref().unwrap_or("available"));
        for note in &status.notes {
            let _ = writeln!(text, "              {note}");
        }
    }
    let _ = writeln!(text, "\nAddresses, where an engine listens on all interfaces at a port of the system's choice");
    for address in &info.addresses {
        let _ = writeln!(text, "  {address}");
    }
    text
}
