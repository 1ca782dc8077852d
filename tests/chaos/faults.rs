//! The faults of the processes and of their network, drawn from the seed beforehand.

use std::time::Duration;

use crate::row::Over;
use crate::support::Random;

/// A fault, which either ends at once or after a while. Numbers are those of processes.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Killed and restarted.
    Kill(usize),
    Stop(usize),
    /// Asked to finalize and exit, then restarted.
    Leave(usize),
    Network(usize, usize, Trouble),
    /// A fault of one host's whole network.
    Host(usize, HostTrouble),
    /// Packets from the first to the second are lost.
    Block(usize, usize),
}

/// A fault of the route by which one process dials another.
#[derive(Clone, Copy, Debug)]
pub enum Trouble {
    Delay,
    Stall,
    Swallow,
    Refuse,
    Narrow,
    Cut,
    Reset,
    HalfClose,
}

#[derive(Clone, Copy, Debug)]
pub enum HostTrouble {
    Unplug,
    Address,
    Narrow,
}

impl Fault {
    /// The name under which it is counted.
    pub fn name(&self) -> String {
        match self {
            Fault::Kill(_) => "kill".to_owned(),
            Fault::Stop(_) => "stop".to_owned(),
            Fault::Leave(_) => "leave".to_owned(),
            Fault::Network(_, _, trouble) => format!("{trouble:?}").to_lowercase(),
            Fault::Host(_, trouble) => format!("host {trouble:?}").to_lowercase(),
            Fault::Block(..) => "block".to_owned(),
        }
    }

    /// The process or route that is affected: one fault at a time.
    fn place(&self) -> (usize, usize) {
        match *self {
            Fault::Kill(node) | Fault::Stop(node) | Fault::Leave(node) => (node, node),
            Fault::Network(from, to, _) | Fault::Block(from, to) => (from, to),
            Fault::Host(host, _) => (100 + host, 100 + host),
        }
    }
}

/// When a fault begins or ends.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub at: Duration,
    pub fault: Fault,
    pub begins: bool,
}

/// Either longer than the peer timeout or shorter.
fn duration(random: &mut Random) -> Duration {
    Duration::from_millis(match random.below(4) {
        0 => random.below(50),
        1 | 2 => 100 + random.below(600),
        _ => 1000 + random.below(3000),
    } as u64)
}

/// All faults of a run, in order.
pub fn plan(seed: u64, over: Over, nodes: usize, time: Duration) -> Vec<Event> {
    let mut random = Random(seed ^ 0xfa17);
    let mut events = Vec::new();
    let mut busy: Vec<((usize, usize), Duration)> = Vec::new();
    let mut at = Duration::ZERO;
    // On emulated devices, a restart takes seconds.
    let pause = if over == Over::Verbs { 10 } else { 1 };
    loop {
        at += pause * Duration::from_millis(50 + random.below(400) as u64);
        if at >= time {
            break;
        }
        let (node, lasts) = (random.below(nodes), duration(&mut random));
        let other = (node + 1 + random.below(nodes - 1)) % nodes;
        let draw = random.below(100);
        let fault = match (over, draw) {
            (_, 0..20) => Fault::Kill(node),
            (_, 20..40) => Fault::Stop(node),
            (_, 40..46) => Fault::Leave(node),
            (Over::Proxies | Over::Both, _) => {
                use Trouble::*;
                let troubles = [Delay, Stall, Stall, Swallow, Refuse, Narrow, Cut, Cut, Reset, HalfClose];
                Fault::Network(node, other, troubles[random.below(troubles.len())])
            }
            (Over::Namespaces, _) => {
                use HostTrouble::*;
                match random.below(5) {
                    0 => Fault::Block(node, other),
                    draw => Fault::Host(node, [Unplug, Unplug, Address, Narrow][draw - 1]),
                }
            }
            // No proxy or host network in between could fail.
            (Over::Shm | Over::Verbs | Over::Ofi, _) => [Fault::Kill(node), Fault::Stop(node)][draw % 2],
        };
        busy.retain(|(_, until)| *until > at);
        let processes = busy.iter().filter(|((from, to), _)| from == to && *from < 100).count();
        let is_process = matches!(fault, Fault::Kill(_) | Fault::Stop(_) | Fault::Leave(_));
        // At any time, at least half of the processes run without a fault of their own.
        if busy.iter().any(|(place, _)| *place == fault.place()) || (is_process && processes >= nodes / 2) {
            continue;
        }
        let until = (at + lasts).min(time);
        busy.push((fault.place(), until));
        events.push(Event { at, fault, begins: true });
        events.push(Event { at: until, fault, begins: false });
    }
    events.sort_by_key(|event| event.at);
    events
}

#[test]
fn equal_seeds_give_equal_plans() {
    let time = Duration::from_secs(60);
    let planned = |seed| format!("{:?}", plan(seed, Over::Proxies, 4, time));
    assert_eq!(planned(1), planned(1));
    assert_ne!(planned(1), planned(2));
    let events = plan(1, Over::Proxies, 4, time);
    assert!(events.len() > 200, "{} events", events.len());
    for event in events.iter().filter(|event| event.begins) {
        let ends = events.iter().filter(|end| !end.begins && end.fault.name() == event.fault.name() && end.at >= event.at);
        assert!(ends.count() > 0, "{event:?} never ends");
    }
}
