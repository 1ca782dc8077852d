//! One run: the processes, their connections, the faults, and the results.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::faults::{Event, Fault, HostTrouble, Trouble, plan};
use crate::namespaces::{self, Hosts};
use crate::network::Route;
use crate::node::NODE;
use crate::support::*;

const NODES: usize = 4;
/// Memory that a process may hold beyond its level at the start, in KiB.
const GROWTH: i64 = 96 << 10;
/// Descriptors of a connection, at most. Per peer there may be one connection more than at the beginning: simultaneous connects
/// can leave two.
const DESCRIPTORS: usize = 8;
/// The same through libfabric, where a connection has an endpoint for bulk data.
const DESCRIPTORS_OF_FABRIC: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// tcp, each route of each pair through a proxy.
    Proxies,
    /// tcp, each process with a network of its own.
    Namespaces,
    Shm,
    /// Half of the pairs by shared memory, since they are on one host, and half through proxies.
    Both,
    /// An RDMA device.
    Verbs,
    /// Sockets, by way of libfabric.
    #[cfg_attr(not(feature = "ofi"), allow(dead_code, reason = "runs with the feature"))]
    Ofi,
}

/// One run at a time: the machine should be busy, but not so busy that operations miss their limits.
static ALONE: Mutex<()> = Mutex::new(());

pub fn run(over: Over, seconds: u64) {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let variable = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seconds = variable("CALOMEL_CHAOS_SECONDS").unwrap_or(seconds);
    let seed = variable("CALOMEL_CHAOS_SEED").unwrap_or_else(|| rand::random::<u32>().into());
    let hosts = if over == Over::Namespaces {
        match Hosts::new(NODES) {
            Ok(hosts) => Some(hosts),
            Err(error) => return println!("chaos over {over:?} is SKIPPED: {error}"),
        }
    } else {
        None
    };
    println!("chaos over {over:?} for {seconds} s: CALOMEL_CHAOS_SEED={seed}");
    let carrier = match over {
        Over::Proxies | Over::Namespaces | Over::Both => Carrier::Tcp,
        Over::Shm => Carrier::Shm,
        Over::Verbs => Carrier::Verbs,
        Over::Ofi => Carrier::Ofi,
    };
    over_with(carrier, || Row::new(over, seed, seconds, hosts).run());
}

/// What a process holds, as it reports.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    threads: usize,
    descriptors: usize,
    memory: i64,
}

impl Holdings {
    fn parse(text: &str) -> Holdings {
        let numbers: Vec<i64> = text.split(' ').map(|number| number.parse().unwrap()).collect();
        Holdings { threads: numbers[0] as usize, descriptors: numbers[1] as usize, memory: numbers[2] }
    }
}

/// The folder where the processes put files, if they make any; removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let path = std::env::temp_dir().join(format!("calomel-chaos-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Row {
    over: Over,
    seed: u64,
    seconds: u64,
    /// `None`: not running now.
    nodes: Vec<Option<Child>>,
    generations: Vec<u32>,
    addresses: Vec<String>,
    /// By source and target, where there is a proxy.
    routes: BTreeMap<(usize, usize), Route>,
    hosts: Option<Hosts>,
    folder: Folder,
    /// The counts of each process, by its number and generation.
    counts: BTreeMap<(usize, u32), BTreeMap<String, u64>>,
    faults: BTreeMap<String, u64>,
    losses: Vec<String>,
}

impl Row {
    fn new(over: Over, seed: u64, seconds: u64, hosts: Option<Hosts>) -> Row {
        let mut row = Row {
            over,
            seed,
            seconds,
            nodes: Vec::new(),
            generations: vec![0; NODES],
            addresses: Vec::new(),
            routes: BTreeMap::new(),
            hosts,
            folder: Folder::new(),
            counts: BTreeMap::new(),
            faults: BTreeMap::new(),
            losses: Vec::new(),
        };
        for node in 0..NODES {
            let anywhere = match over {
                Over::Namespaces => format!("tcp://{}:0", namespaces::ip(node)),
                // Not where other programs on this host get free ports: the address must be free for the successor.
                Over::Proxies | Over::Both => format!("tcp://127.77.{}.{}:0", std::process::id() % 250, node + 1),
                Over::Shm | Over::Verbs | Over::Ofi => anywhere(),
            };
            let mut child = row.start(node, &anywhere);
            row.addresses.push(child.hear("address"));
            row.nodes.push(Some(child));
        }
        for (from, to) in (0..NODES).flat_map(|from| (0..NODES).map(move |to| (from, to))) {
            let proxied = over == Over::Proxies || (over == Over::Both && (from + to) % 2 == 1);
            if from != to && proxied {
                let target = row.addresses[to].strip_prefix("tcp://").unwrap().parse().unwrap();
                row.routes.insert((from, to), Route::to(target));
            }
        }
        (0..NODES).for_each(|node| row.introduce(node));
        row
    }

    fn start(&self, node: usize, address: &str) -> Child {
        let upgrade = matches!(self.over, Over::Shm | Over::Both);
        let settings = format!("{node} {} {} {}", self.generations[node], self.seed, u8::from(upgrade));
        let settings = [
            (LISTEN, address),
            (NODE, &settings),
            ("TMPDIR", self.folder.0.to_str().unwrap()),
            // Large blocks are returned to the system when freed, so that growth is visible.
            ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ];
        Child::start_as("node", &settings, |command: &mut Command| {
            if let Some(hosts) = &self.hosts {
                hosts.enter(node, command);
            }
        })
    }

    /// Sends a process the addresses of the others.
    fn introduce(&mut self, node: usize) {
        let route = |to: usize| self.routes.get(&(node, to)).map_or(&self.addresses[to], |route| &route.address).as_str();
        let peers: Vec<&str> = (0..NODES).map(route).collect();
        let order = format!("peers {}", peers.join(" "));
        self.tell(node, &order);
    }

    fn tell(&mut self, node: usize, order: &str) {
        if let Some(child) = &mut self.nodes[node] {
            child.tell(order);
        }
    }

    fn lose(&mut self, loss: String) {
        println!("LOSS: {loss}");
        self.losses.push(loss);
    }

    /// Collects the output of the processes.
    fn listen(&mut self) {
        for node in 0..NODES {
            self.listen_to(node);
        }
    }

    fn listen_to(&mut self, node: usize) {
        let Some(child) = &mut self.nodes[node] else { return };
        let (pid, output) = (child.pid(), child.said_of(&["loss", "counts"]));
        for line in output {
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("loss", text) => self.lose(format!("{node}.{} ({pid}): {text}", self.generations[node])),
                (_, text) => {
                    let counts = text.split(';').filter_map(|count| count.split_once('='));
                    let counts = counts.map(|(key, count)| (key.to_owned(), count.parse().unwrap())).collect();
                    self.counts.insert((node, self.generations[node]), counts);
                }
            }
        }
    }

    /// Waits for this word from a process, or for its end; collects other output meanwhile.
    fn hear(&mut self, node: usize, word: &str) -> String {
        let child = self.nodes[node].as_mut().unwrap();
        let output = child.hear(word);
        self.listen_to(node);
        output
    }

    fn run(mut self) {
        let nodes = 0..NODES;
        nodes.clone().for_each(|node| self.tell(node, "meet 0"));
        let before: Vec<Holdings> = nodes.clone().map(|node| self.met(node).1).collect();
        nodes.clone().for_each(|node| self.tell(node, "load"));
        let begin = Instant::now();
        for event in plan(self.seed, self.over, NODES, Duration::from_secs(self.seconds)) {
            while begin.elapsed() < event.at {
                thread::sleep(event.at.saturating_sub(begin.elapsed()).min(Duration::from_millis(20)));
                self.listen();
            }
            self.happen(event);
        }
        // After the last fault: operations in progress end, and no new ones begin.
        thread::sleep(HEARTBEAT);
        nodes.clone().for_each(|node| self.tell(node, "rest"));
        for node in nodes.clone() {
            self.hear(node, "rests");
        }
        nodes.clone().for_each(|node| self.tell(node, "meet 1"));
        let met: Vec<u64> = nodes.clone().map(|node| self.met(node).0).collect();
        nodes.clone().for_each(|node| self.tell(node, "settle"));
        for (node, before) in before.into_iter().enumerate() {
            let after = Holdings::parse(&self.hear(node, "settled"));
            self.compare(node, before, after);
        }
        nodes.clone().for_each(|node| self.tell(node, "leave"));
        for node in nodes {
            self.hear(node, "left");
            let status = self.nodes[node].as_mut().unwrap().wait(BOUND);
            self.listen_to(node);
            if !status.success() {
                self.lose(format!("process {node} ended with {status}"));
            }
        }
        self.finish(begin.elapsed(), &met);
    }

    fn met(&mut self, node: usize) -> (u64, Holdings) {
        let output = self.hear(node, "met");
        let (took, holdings) = output.split_once(' ').unwrap();
        (took.parse().unwrap(), Holdings::parse(holdings))
    }

    fn compare(&mut self, node: usize, before: Holdings, after: Holdings) {
        let descriptors = if self.over == Over::Ofi { DESCRIPTORS_OF_FABRIC } else { DESCRIPTORS };
        let more_descriptors = after.descriptors.saturating_sub(before.descriptors);
        println!("process {node}: {before:?} at the start, {after:?} at the end");
        if after.threads > before.threads || more_descriptors > descriptors * (NODES - 1) || after.memory - before.memory > GROWTH
        {
            self.lose(format!("process {node} had {before:?} and has {after:?}"));
        }
    }

    fn happen(&mut self, Event { fault, begins, .. }: Event) {
        if begins {
            *self.faults.entry(fault.name()).or_default() += 1;
        }
        match fault {
            Fault::Kill(node) | Fault::Leave(node) if !begins => self.restart(node),
            Fault::Kill(node) => {
                self.listen_to(node);
                self.nodes[node].as_ref().unwrap().signal(libc::SIGKILL);
                self.listen_to(node);
                self.nodes[node] = None;
            }
            Fault::Leave(node) => self.tell(node, "leave"),
            Fault::Stop(node) => {
                let signal = if begins { libc::SIGSTOP } else { libc::SIGCONT };
                self.nodes[node].as_ref().unwrap().signal(signal);
            }
            Fault::Network(from, to, trouble) => {
                let Some(route) = self.routes.get(&(from, to)) else { return };
                match trouble {
                    _ if !begins => route.heal(),
                    Trouble::Delay => route.delay(20),
                    Trouble::Stall => route.stall(),
                    Trouble::Swallow => route.swallow(),
                    Trouble::Refuse => {
                        route.refuse();
                        route.cut(false);
                    }
                    Trouble::Narrow => route.narrow(),
                    Trouble::Cut => route.cut(false),
                    Trouble::Reset => route.cut(true),
                    Trouble::HalfClose => route.half_close(from < to),
                }
            }
            Fault::Host(host, trouble) => {
                let hosts = self.hosts.as_ref().unwrap();
                let done = match trouble {
                    HostTrouble::Unplug => hosts.plug(host, !begins),
                    HostTrouble::Address => hosts.address(host, !begins),
                    HostTrouble::Narrow => hosts.narrow(host, begins),
                };
                done.unwrap();
            }
            Fault::Block(from, to) => self.hosts.as_ref().unwrap().block(from, to, begins).unwrap(),
        }
    }

    fn restart(&mut self, node: usize) {
        if self.nodes[node].is_some() {
            // It was asked to leave, and has had some time for that; finalizing is bounded.
            self.hear(node, "left");
            self.listen_to(node);
        }
        self.generations[node] += 1;
        let address = self.addresses[node].clone();
        self.nodes[node] = Some(self.start(node, &address));
        self.introduce(node);
        self.tell(node, "load");
    }

    fn finish(mut self, took: Duration, met: &[u64]) {
        self.nodes.clear();
        self.routes.clear();
        self.hosts = None;
        let left: Vec<_> = std::fs::read_dir(&self.folder.0).unwrap().flatten().map(|entry| entry.path()).collect();
        if !left.is_empty() {
            self.lose(format!("files are left over: {left:?}"));
        }
        let shared: Vec<_> = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        if shared.iter().any(|path| path.to_string_lossy().contains("calomel")) {
            self.lose(format!("shared memory is left over: {shared:?}"));
        }
        let mut sums = BTreeMap::<&str, u64>::new();
        for (key, count) in self.counts.values().flatten() {
            *sums.entry(key).or_default() += count;
        }
        // Calls and transfers of each kind, by how they ended.
        let mut ends = BTreeMap::<&str, Vec<(&str, u64)>>::new();
        for (key, count) in &sums {
            let classes = ["transfer", "call", "calls"];
            let class = classes.iter().find_map(|class| key.find(&format!("{class} ")).map(|at| at + class.len()));
            match class {
                Some(at) if !key.ends_with("handled") => ends.entry(&key[..at]).or_default().push((&key[at + 1..], *count)),
                _ => {}
            }
        }
        println!("chaos over {:?}, CALOMEL_CHAOS_SEED={}, {:.0} s:", self.over, self.seed, took.as_secs_f64());
        let line =
            |ends: &[(&str, u64)]| ends.iter().map(|(kind, count)| format!("{kind} {count}")).collect::<Vec<_>>().join(", ");
        for (what, all) in [("calls", false), ("transfers", true)] {
            let mut by_kind = BTreeMap::<&str, u64>::new();
            let of_class = ends.iter().filter(|(class, _)| class.contains("transfer") == all);
            of_class.flat_map(|(_, ends)| ends).for_each(|(kind, count)| *by_kind.entry(kind).or_default() += count);
            let total: u64 = by_kind.values().sum();
            let by_kind: Vec<_> = by_kind.into_iter().collect();
            println!("  {what}: {total}: {}", line(&by_kind));
        }
        for (class, ends) in &ends {
            println!("    {class}: {}", line(ends));
        }
        let sum = |key: &str| sums.get(key).copied().unwrap_or(0);
        println!("  bytes: {} transferred, {} verified", sum("bytes"), sum("verified"));
        println!(
            "  one-way calls handled: {}, exposures reclaimed: {}",
            sum("one-way calls handled"),
            sum("exposures reclaimed")
        );
        println!("  processes: {} in all", self.generations.iter().sum::<u32>() + NODES as u32);
        let faults: Vec<_> = self.faults.iter().map(|(fault, count)| (fault.as_str(), *count)).collect();
        println!("  faults: {}: {}", faults.iter().map(|(_, count)| count).sum::<u64>(), line(&faults));
        println!("  all processes reached each other again in {:?} ms", met);
        println!("  losses: {}", self.losses.len());
        assert!(self.losses.is_empty(), "CALOMEL_CHAOS_SEED={}: {:#?}", self.seed, self.losses);
        let calls: u64 = sums.iter().filter(|(key, _)| key.ends_with("call ok")).map(|(_, count)| count).sum();
        assert!(sum("verified") > 0 && sum("transfer ok") > 0 && calls > 0, "nothing was done: this test tests nothing");
    }
}
