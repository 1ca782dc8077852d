//! The tools that UCX and libfabric bring to measure themselves: two processes of theirs send 64 bytes to and fro.

use std::{
    io,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::common::{
    Outcome, Plan, Site, Transport,
    caller::Caller,
    interleave,
    report::{Figure, Report, Unit},
};

/// Bytes of a message, and how many go to and fro in a round.
const MESSAGE: &str = "64";
const COUNT: usize = 20_000;
/// Where the tools meet.
const PORT: &str = "13339";
/// How often the client is started before the server is said not to have come up, and how long to wait between.
const ATTEMPTS: usize = 30;
const PAUSE: Duration = Duration::from_millis(100);

struct Tool {
    name: &'static str,
    program: &'static str,
    package: &'static str,
    tcp: Way,
    shm: Way,
    server: &'static [&'static str],
    client: &'static [&'static str],
    /// The column of the last line of its output that has the time of one way, in microseconds.
    column: usize,
}

/// How both sides are told to go a way.
struct Way {
    environment: &'static [(&'static str, &'static str)],
    arguments: &'static [&'static str],
}

const TOOLS: [Tool; 2] = [
    Tool {
        name: "UCX, 2 x tag_lat",
        program: "ucx_perftest",
        package: "ucx-utils",
        tcp: Way { environment: &[("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "lo")], arguments: &[] },
        shm: Way { environment: &[("UCX_TLS", "shm,self")], arguments: &[] },
        server: &["-p", PORT],
        client: &["127.0.0.1", "-p", PORT, "-t", "tag_lat", "-f", "-w", "1000", "-s", MESSAGE, "-n"],
        column: 1,
    },
    Tool {
        name: "libfabric, 2 x fi_pingpong",
        program: "fi_pingpong",
        package: "libfabric-bin",
        tcp: Way { environment: &[], arguments: &["-p", "tcp;ofi_rxm"] },
        shm: Way { environment: &[], arguments: &["-p", "shm"] },
        server: &["-e", "rdm", "-m", "tagged", "-S", MESSAGE, "-B", PORT, "-I"],
        client: &["-e", "rdm", "-m", "tagged", "-S", MESSAGE, "-P", PORT, "127.0.0.1", "-I"],
        column: 6,
    },
];

pub fn beside(plan: &Plan, report: &mut Report<'_>, site: &Site<'_>) -> Outcome {
    let caller = Caller::new(site);
    let count = plan.count(1000);
    for tool in &TOOLS {
        if let Err(error) = Command::new(tool.program).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status() {
            let Tool { name, program, package, .. } = tool;
            report.skip(format!("{name}: skipped: {program} does not start: {error} (Debian: apt-get install {package})"));
            continue;
        }
        let measured = interleave(
            plan,
            |samples| caller.round_trips(count / 5, count, samples),
            |samples| {
                samples.push(tool.round_trip(site.transport, plan.count(COUNT))?);
                Ok(())
            },
        );
        match measured {
            Ok((ours, theirs)) => {
                let name = format!("{}: empty call ({})", site.name(), tool.program);
                report.add(Figure::new(name, Unit::Time, &ours).raw(tool.name, &theirs));
            }
            Err(error) => report.skip(format!("{}: {}: skipped: {error}", site.name(), tool.name)),
        }
    }
    Ok(())
}

impl Tool {
    /// Twice the time of one way, in nanoseconds.
    fn round_trip(&self, transport: Transport, count: usize) -> Outcome<f64> {
        let count = count.to_string();
        let _server = Ended(self.start(transport, self.server, &count)?);
        let mut last = String::new();
        for _ in 0..ATTEMPTS {
            thread::sleep(PAUSE);
            let output = self.start(transport, self.client, &count)?.wait_with_output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            last = text.lines().last().unwrap_or_default().replace("Final:", "");
            let time = last.split_whitespace().nth(self.column).and_then(|word| word.parse::<f64>().ok());
            if let (true, Some(time)) = (output.status.success(), time) {
                return Ok(2e3 * time);
            }
        }
        Err(format!("{} says nothing that can be read: {last}", self.program).into())
    }

    fn start(&self, transport: Transport, arguments: &[&str], count: &str) -> io::Result<Child> {
        let way = if transport == Transport::Tcp { &self.tcp } else { &self.shm };
        let mut command = Command::new(self.program);
        command.envs(way.environment.iter().copied()).args(way.arguments).args(arguments);
        if arguments.last() != Some(&PORT) {
            command.arg(count);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    }
}

/// A process that is killed when it is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
