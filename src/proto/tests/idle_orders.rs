//! Idle connections in every order of events, up to a number of deviations from a simple order: whatever both sides begin while
//! a connection is about to be closed succeeds, is executed once, and one-way calls keep their order.

use std::time::Duration;

use super::env::{Mem, Op, Random};
use super::host::{TestOutcome, served};
use super::net::{Net, TestCall, call, config};
use super::{Config, LinkId};

const TIMEOUT: Duration = Duration::from_millis(10);
const TOKEN: u128 = 7;
/// Deviations from the simple order that are combined.
const DEVIATIONS: usize = 2;
/// Events within which each schedule ends.
const MOST: usize = 400;

/// What a host begins, one after the other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Call,
    Notify,
    Pull,
    /// A call whose body is streamed.
    LongCall,
}

#[derive(Clone, Copy)]
enum Event {
    /// The next of what an end has sent arrives.
    Arrival(usize, usize),
    Action(usize),
    Timer(usize),
}

/// What the simple order prefers.
#[derive(Clone, Copy)]
enum First {
    Arrivals,
    /// Those of the newest connections.
    NewArrivals,
    Actions,
    Timers,
}

struct Scene {
    net: Net,
    left: [Vec<Action>; 2],
    begun: Vec<(usize, Op, Action, Vec<u8>)>,
    notices: [Vec<Vec<u8>>; 2],
    /// How often each host's timers may still run before the end.
    timers: [usize; 2],
}

impl Scene {
    /// Two hosts that are connected, and one of them is about to find that the connection is idle. With `twice` they have a
    /// connection each.
    fn new(timeouts: [Option<Duration>; 2], actions: [&[Action]; 2], twice: bool) -> Scene {
        let configs = timeouts.map(|idle_timeout| (Config { idle_timeout, ..config() }, true));
        let mut net = Net::with(configs.to_vec());
        net.echo_everywhere();
        for host in [0, 1] {
            net.expose(host, TOKEN, vec![host as u8; 1000], true, true);
        }
        net.call(0, 1, call("hello"));
        if twice {
            net.call(1, 0, call("hello"));
        }
        net.advance(TIMEOUT / 2);
        Scene {
            net,
            left: actions.map(|actions| actions.iter().rev().copied().collect()),
            begun: Vec::new(),
            notices: [Vec::new(), Vec::new()],
            timers: [3, 3],
        }
    }

    fn events(&self, first: First) -> Vec<Event> {
        let mut arrivals = Vec::new();
        for (number, wire) in self.net.wires.iter().enumerate() {
            let sides = (0..2).filter(|side| !wire.ends[*side].outgoing.is_empty());
            arrivals.extend(sides.map(|side| Event::Arrival(number, side)));
        }
        let actions: Vec<Event> = (0..2).filter(|host| !self.left[*host].is_empty()).map(Event::Action).collect();
        let soon = |host: &usize| {
            let due = self.net.hosts[*host].proto.next_timeout();
            self.timers[*host] > 0 && due.is_some_and(|due| due <= self.net.now + 2 * TIMEOUT)
        };
        let timers: Vec<Event> = (0..2).filter(soon).map(Event::Timer).collect();
        match first {
            First::Arrivals => [arrivals, actions, timers].concat(),
            First::NewArrivals => [arrivals.into_iter().rev().collect(), actions, timers].concat(),
            First::Actions => [actions, arrivals, timers].concat(),
            First::Timers => [timers, arrivals, actions].concat(),
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrival(wire, side) => {
                let now = self.net.now;
                if let Some((at, _)) = self.net.wires[wire].ends[side].outgoing.front_mut() {
                    *at = now.min(*at);
                }
                self.net.deliver(wire, side);
            }
            Event::Timer(host) => {
                self.timers[host] -= 1;
                if let Some(due) = self.net.hosts[host].proto.next_timeout() {
                    self.net.now = self.net.now.max(due);
                    let now = self.net.now;
                    self.net.with_host(host, |host| host.proto.handle_timeout(now));
                }
            }
            Event::Action(host) => self.act(host),
        }
    }

    fn act(&mut self, host: usize) {
        let Some(action) = self.left[host].pop() else { return };
        let mut body = vec![host as u8, self.begun.len() as u8];
        let op = match action {
            Action::Call => self.net.call(host, 1 - host, call(body.clone())),
            Action::LongCall => {
                body.resize(40_000, 3);
                self.net.call(host, 1 - host, call(body.clone()))
            }
            Action::Notify => {
                self.notices[host].push(body.clone());
                self.net.call(host, 1 - host, TestCall { one_way: true, ..call(body.clone()) })
            }
            Action::Pull => self.net.pull(host, 1 - host, TOKEN, 0, &Mem::new(vec![9; 1000])),
        };
        self.begun.push((host, op, action, body));
    }

    fn finish(mut self) {
        self.net.settle();
        for (host, op, action, body) in &self.begun {
            match (action, self.net.hosts[*host].outcome(*op)) {
                (Action::Pull, Some(TestOutcome::Transferred(1000))) => {}
                (Action::Notify, Some(TestOutcome::Answered { .. })) => {}
                (Action::Call | Action::LongCall, Some(TestOutcome::Answered { body: answer, .. })) => {
                    assert!(*answer == served(body));
                }
                (_, other) => panic!("host {host}, operation {op}: {other:?}"),
            }
        }
        for host in [0, 1] {
            assert_eq!(self.net.hosts[1 - host].notices, self.notices[host], "one-way calls of host {host}");
            self.net.revoke(host, TOKEN);
        }
        // With a timeout at both ends, all connections end.
        if self.net.hosts.iter().all(|host| host.config.idle_timeout.is_some()) {
            for host in &self.net.hosts {
                let left: Vec<LinkId> = host.proto.links.keys().collect();
                assert!(
                    left.is_empty() && host.connected.is_empty(),
                    "{left:?} are left, of {} connections",
                    self.net.wires.len()
                );
            }
        }
        self.net.end();
    }
}

/// Runs one schedule: at these steps, another event than the first one happens. Returns how many events there were to choose
/// from at each step.
fn run(mut scene: Scene, first: First, deviations: &[(usize, usize)]) -> Vec<usize> {
    let mut counts = Vec::new();
    loop {
        let events = scene.events(first);
        if events.is_empty() {
            break;
        }
        let choice = deviations.iter().find(|(step, _)| *step == counts.len()).map_or(0, |(_, choice)| *choice);
        assert!(counts.len() < MOST, "the schedule does not end");
        counts.push(events.len());
        scene.happen(events[choice]);
    }
    scene.finish();
    counts
}

/// Prints the schedule if the test fails.
struct Schedule<'a>(&'a str, &'a [(usize, usize)]);

impl Drop for Schedule<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}, with the deviations {:?}", self.0, self.1);
        }
    }
}

fn explore(name: &str, scene: &impl Fn() -> Scene, first: First, deviations: &[(usize, usize)], runs: &mut usize) {
    *runs += 1;
    let counts = {
        let _shown = Schedule(name, deviations);
        run(scene(), first, deviations)
    };
    if deviations.len() == DEVIATIONS {
        return;
    }
    let from = deviations.last().map_or(0, |(step, _)| step + 1);
    for (step, count) in counts.iter().enumerate().skip(from) {
        for choice in 1..*count {
            explore(name, scene, first, &[deviations, &[(step, choice)]].concat(), runs);
        }
    }
}

const IDLE: Option<Duration> = Some(TIMEOUT);

const ACTIONS: &[(&str, [&[Action]; 2])] = &[
    ("a call of each side", [&[Action::Call], &[Action::Call]]),
    ("one-way calls", [&[Action::Notify, Action::Notify], &[Action::Notify, Action::Notify]]),
    ("the other side's", [&[], &[Action::Notify, Action::Call, Action::Notify]]),
    ("the dialling side's", [&[Action::Notify, Action::Call, Action::Notify], &[]]),
    ("transfers", [&[Action::Pull], &[Action::Pull, Action::Call]]),
    ("streams", [&[Action::LongCall], &[Action::LongCall]]),
];

#[test]
fn operations_succeed_once_in_every_order_of_events() {
    let mut runs = 0;
    for (name, actions) in ACTIONS {
        for first in [First::Arrivals, First::NewArrivals, First::Actions, First::Timers] {
            for timeouts in [[IDLE, None], [IDLE, IDLE]] {
                explore(name, &|| Scene::new(timeouts, *actions, false), first, &[], &mut runs);
            }
        }
    }
    assert!(runs > 1000, "only {runs} orders");
}

#[test]
fn operations_over_two_connections_succeed_once_in_every_order_of_events() {
    let mut runs = 0;
    for (name, actions) in &ACTIONS[..2] {
        explore(name, &|| Scene::new([IDLE, IDLE], *actions, true), First::Arrivals, &[], &mut runs);
        explore(name, &|| Scene::new([IDLE, IDLE], *actions, true), First::Timers, &[], &mut runs);
    }
    assert!(runs > 100, "only {runs} orders");
}

/// More operations, and any order at all.
#[test]
fn many_operations_succeed_once_in_random_orders() {
    let all = [Action::Call, Action::Notify, Action::Notify, Action::Pull, Action::LongCall];
    for seed in 0..2000 {
        let mut random = Random(seed);
        let actions = [0, 1].map(|_| (0..random.below(12)).map(|_| all[random.below(all.len())]).collect::<Vec<_>>());
        let timeouts = [IDLE, [None, IDLE][random.below(2)]];
        let mut scene = Scene::new(timeouts, [&actions[0], &actions[1]], random.once_in(3));
        scene.timers = [30, 30];
        let mut steps = 0;
        let name = format!("seed {seed}");
        let _shown = Schedule(&name, &[]);
        loop {
            let events = scene.events(First::Arrivals);
            let Some(event) = random.pick(&events) else { break };
            scene.happen(*event);
            steps += 1;
            assert!(steps < 20 * MOST);
        }
        scene.finish();
    }
}
