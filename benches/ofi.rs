//! Benchmark of calls and transfers over libfabric. The references are the same provider without calomel, between two processes
//! that spin: an empty RPC against two messages of `fi_pingpong`; pulls and pushes against messages, and against RMA reads, of
//! `benches/ofi/raw.c`. An empty RPC over `tcp://` is in the same run.
//!
//! `CALOMEL_OFI_TOOLS` is a folder with `fi_pingpong` and the compiled `raw`; `ci/ofi-bench` sets it.

mod common;

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::{
    Outcome, Plan,
    fabric::{self, Killed, Pair, Tools, Transfers},
    report::Report,
};

/// The provider, and the scheme of its addresses.
const PROVIDER: &str = "tcp";
const SCHEME: &str = "ofi+tcp";
/// Bytes of a message; calomel's empty call and answer are a little longer.
const MESSAGE: usize = 64;
/// The minimum number of exchanges in a round, since `fi_pingpong` counts the time that its connection takes, too.
const FEWEST: usize = 20_000;
const TRANSFERS: [Transfers; 4] = [
    Transfers { size: 4 << 10, count: 20_000, window: 64, goal: None },
    Transfers { size: 64 << 10, count: 8000, window: 16, goal: Some(0.95) },
    Transfers { size: 1 << 20, count: 800, window: 8, goal: Some(0.95) },
    Transfers { size: 16 << 20, count: 60, window: 4, goal: Some(0.95) },
];

fn main() -> Outcome {
    let Some(folder) = env::var_os("CALOMEL_OFI_TOOLS") else {
        println!("skipped: CALOMEL_OFI_TOOLS names no folder with tools of libfabric; ci/ofi-bench makes one");
        return Ok(());
    };
    if fabric::is_over(TRANSFERS[3].size)? {
        return Ok(());
    }
    let plan = Plan::from_environment();
    let folder = PathBuf::from(folder);
    let [messages, reads] = [false, true].map(|reads| Raw { folder: folder.clone(), reads });
    let mut report = Report::new("ofi", &plan).beside("libfabric");
    let pair = Pair::new(&plan, SCHEME, &format!("{SCHEME}://127.0.0.1:0"))?;
    if fabric::wanted("rpc") {
        pair.empty_calls(&mut report, &messages)?;
        pair.empty_calls_beside(&mut report, &Pair::new(&plan, "tcp", "tcp://127.0.0.1:0")?)?;
    }
    for (pull, part) in [(true, "pull"), (false, "push")] {
        for transfers in TRANSFERS.into_iter().filter(|_| fabric::wanted(part)) {
            pair.transfers(&mut report, &messages, pull, transfers)?;
        }
    }
    if fabric::wanted("pull") {
        pair.transfers(&mut report, &reads, true, Transfers { goal: None, ..TRANSFERS[2] })?;
    }
    report.finish()?;
    Ok(())
}

/// `raw`, and `fi_pingpong`.
struct Raw {
    folder: PathBuf,
    /// RMA reads, not messages.
    reads: bool,
}

impl Raw {
    fn verb(&self) -> &'static str {
        if self.reads { "reads" } else { "messages" }
    }
}

impl Tools for Raw {
    fn round_trips(&self, count: usize) -> Outcome<Vec<f64>> {
        let (port, size, count) = (fabric::free_port()?, MESSAGE.to_string(), count.to_string());
        let number = port.to_string();
        let tool = |side: &[&str]| {
            let mut tool = Command::new(self.folder.join("fi_pingpong"));
            tool.args(["-p", PROVIDER, "-e", "rdm", "-S", &size, "-I", &count]).args(side);
            tool
        };
        let _server = Killed::quiet(&mut tool(&["-B", &number]))?;
        fabric::wait_for_listener("fi_pingpong", port)?;
        let output = tool(&["-P", &number, "127.0.0.1"]).stdin(Stdio::null()).stderr(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // The next to last column has the microseconds of one way.
        let one_way = |line: &str| line.split_whitespace().nth(6)?.parse::<f64>().ok();
        let one_way = text.lines().find_map(one_way).ok_or_else(|| format!("fi_pingpong prints no time: {text}"))?;
        Ok(vec![2.0 * 1e3 * one_way])
    }

    fn fewest_round_trips(&self) -> usize {
        FEWEST
    }

    fn round_trip_name(&self) -> String {
        format!("2 x fi_pingpong -e rdm -S {MESSAGE}")
    }

    fn call_goal(&self) -> f64 {
        1.3
    }

    fn transfer_name(&self, _: bool, Transfers { size, window, .. }: Transfers) -> String {
        format!("{} of {size} bytes, {window} at a time", self.verb())
    }

    fn transfer(&self, _: bool, Transfers { size, count, window, .. }: Transfers) -> Outcome<f64> {
        let numbers = [size, count, window].map(|number| number.to_string());
        let raw = || Command::new(self.folder.join("raw"));
        // It spins, so it runs for no longer than it is measured.
        let (_server, address) = Killed::server(raw().args(["server", PROVIDER]))?;
        let output = raw().args([self.verb(), PROVIDER, &address]).args(numbers).stderr(Stdio::inherit()).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.trim().parse().map_err(|_| format!("raw prints no time: {text}").into())
    }
}
