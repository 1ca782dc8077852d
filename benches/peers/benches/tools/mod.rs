//! The benchmark tools of UCX and libfabric: two of their processes exchange messages of 64 bytes.

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

/// Bytes of a message, and round trips in a round.
const MESSAGE: &str = "64";
const COUNT: usize = 20_000;
/// The port of the tools' server.
const PORT: &str = "13339";
/// How often the client is started before the server counts as not started, and the pause between two attempts.
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
    /// The column, in the last line of its output, of the one-way time in microseconds.
    column: usize,
}

/// The arguments that select a transport on both sides.
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
    /// Twice the one-way time, in nanoseconds.
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
        Err(format!("{} prints no time in the expected column: {last}", self.program).into())
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
