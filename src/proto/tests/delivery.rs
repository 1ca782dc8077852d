//! Delivery in the simulated network: executes the outputs of the protocols, and hands arriving bytes to them.

use std::collections::VecDeque;
use std::time::Instant;

use super::devices::DeviceRma;
use super::env::{TestCarrier, TestEnv};
use super::net::Net;
use super::wires::{TEST_PEER, Wire, WireEnd, WireItem, WirePacket, WirePayload};
use super::{LinkId, Output};
use crate::{Address, Transport};

/// Deliveries at one instant beyond which the hosts are in a message loop.
const MAX_DELIVERIES: usize = 3_000_000;

impl Net {
    pub(super) fn next_event(&self) -> Option<Instant> {
        let timers = self.hosts.iter().filter_map(|host| host.proto.next_timeout());
        let arrivals = self.wires.iter().filter(|wire| !wire.frozen).flat_map(|wire| &wire.ends).filter(|end| !end.unread);
        timers.chain(self.next_rma()).chain(arrivals.filter_map(|end| end.outgoing.front()).map(|(at, _)| *at)).min()
    }

    /// Delivers what arrives now.
    pub fn run(&mut self) {
        for _ in 0..MAX_DELIVERIES {
            if !self.step() {
                return;
            }
        }
        panic!("the hosts never stop sending");
    }

    /// Delivers one piece of what arrives now; false when there is nothing.
    pub fn step(&mut self) -> bool {
        if self.step_rma() {
            return true;
        }
        let due = |end: &WireEnd| !end.unread && end.outgoing.front().is_some_and(|(at, _)| *at <= self.now);
        let mut ready = Vec::new();
        for (number, wire) in self.wires.iter().enumerate().filter(|(_, wire)| !wire.frozen) {
            ready.extend((0..2).filter(|side| due(&wire.ends[*side])).map(|side| (number, side)));
        }
        let chosen = match &mut self.random {
            Some(random) => random.pick(&ready),
            None => ready.first(),
        };
        let Some(&(wire, side)) = chosen else { return false };
        self.deliver(wire, side);
        true
    }

    pub fn deliver(&mut self, wire: usize, side: usize) {
        let Some((at, item)) = self.wires[wire].ends[side].outgoing.front_mut() else { return };
        if let WireItem::Packet(packet) = item {
            *at = self.now + self.settings.pace;
            let limit = self.settings.piece;
            let piece = self.random.as_mut().map_or(limit, |random| 1 + random.below(limit));
            let (data, last) = packet.take(piece);
            let report = last && packet.report;
            self.wires[wire].ends[side].delivered += data.len() as u64;
            if last {
                self.wires[wire].ends[side].outgoing.pop_front();
            }
            self.feed(wire, 1 - side, data);
            if let Some(link) = self.wires[wire].ends[side].link.filter(|_| report) {
                let sender = self.wires[wire].ends[side].host;
                self.hosts[sender].proto.handle_sent(link, Vec::new(), false);
                self.pump(sender);
            }
            return;
        }
        let Some((_, item)) = self.wires[wire].ends[side].outgoing.pop_front() else { return };
        let far = self.wires[wire].ends[1 - side].host;
        let link = self.wires[wire].ends[1 - side].link;
        match (item, link) {
            (WireItem::Dial, _) => self.accept(wire),
            (WireItem::Connected, Some(link)) => {
                let local = self.wires[wire].ends[side].host == far;
                self.hosts[far].proto.set_transport(link, Transport::Tcp, local, self.settings.lanes);
                self.hosts[far].proto.handle_connected(link, self.now);
                if self.settings.devices {
                    self.hosts[far].proto.set_rma_capable(link);
                }
            }
            (WireItem::Closed, Some(link)) => {
                self.wires[wire].ends[1 - side].link = None;
                self.hosts[far].wires.remove(&link);
                self.hosts[far].carriers.remove(&link);
                let cause = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the other end is closed");
                self.hosts[far].proto.handle_closed(link, cause);
            }
            _ => {}
        }
        if let Some(host) = Some(far).filter(|far| *far < self.hosts.len()) {
            self.pump(host);
        }
    }

    fn accept(&mut self, wire: usize) {
        let [from, to] = [self.wires[wire].ends[0].host, self.wires[wire].ends[1].host];
        let remote = format!("tcp://10.0.0.{}:{}", from + 1, 40_000 + wire % 20_000).parse().unwrap();
        let link = self.hosts[to].proto.handle_accepted(remote, self.now);
        if self.settings.devices {
            self.hosts[to].proto.set_rma_capable(link);
        }
        self.add_wire(to, link, (wire, 1));
        self.wires[wire].ends[1].link = Some(link);
        self.put(wire, 1, WireItem::Connected);
    }

    pub fn put(&mut self, wire: usize, side: usize, item: WireItem) {
        // Delivery is in order.
        let outgoing = &mut self.wires[wire].ends[side].outgoing;
        let before = outgoing.back().map_or(self.now, |(at, _)| *at);
        outgoing.push_back((before.max(self.now + self.settings.delay), item));
    }
    /// Executes all pending outputs of a host's protocol.
    pub fn pump(&mut self, host: usize) {
        let mut outputs = VecDeque::new();
        loop {
            self.hosts[host].proto.poll(&mut outputs);
            self.carry(host);
            let Some(output) = outputs.pop_front() else { break };
            self.execute_output(host, output);
        }
    }

    /// Puts on the wires what a host has sent at once.
    fn carry(&mut self, host: usize) {
        let taken = self.hosts[host].carriers.iter().filter(|(_, carrier)| !carrier.taken.borrow().is_empty());
        let taken: Vec<_> = taken.map(|(link, carrier)| (*link, carrier.taken.take())).collect();
        for (link, bytes) in taken {
            let &(wire, side) = self.hosts[host].wires.get(&link).expect("only a link that is there has a carrier");
            self.assert_idle(wire, side);
            self.put(wire, side, WireItem::Packet(WirePacket::buffered(bytes, None)));
        }
    }

    fn assert_idle(&self, wire: usize, side: usize) {
        let outgoing = &self.wires[wire].ends[side].outgoing;
        let waiting = outgoing.iter().any(|(_, item)| matches!(item, WireItem::Packet(p) if p.report));
        assert!(!waiting, "a transmit before the last one was reported as sent");
    }

    /// A link of a host is on this wire from now on.
    fn add_wire(&mut self, host: usize, link: LinkId, wire: (usize, usize)) {
        let injects = self.settings.injects;
        let host = &mut self.hosts[host];
        host.wires.insert(link, wire);
        if injects {
            let carrier = TestCarrier::default();
            assert!(host.proto.set_carrier(link, carrier.clone()).is_none());
            host.carriers.insert(link, carrier);
        }
    }

    fn execute_output(&mut self, number: usize, output: Output<TestEnv>) {
        let host = &mut self.hosts[number];
        match output {
            Output::Connect { link, address, .. } => self.connect(number, link, &address),
            Output::Transmit { link, bytes, payload, more, .. } => {
                host.transmits += 1;
                host.followed += usize::from(more);
                let Some(&(wire, side)) = host.wires.get(&link) else { return };
                self.assert_idle(wire, side);
                if self.settings.report_late {
                    self.put(wire, side, WireItem::Packet(WirePacket::new(bytes, payload)));
                } else {
                    self.put(wire, side, WireItem::Packet(WirePacket::buffered(bytes, payload)));
                    let proto = &mut self.hosts[number].proto;
                    proto.handle_sent(link, Vec::new(), false);
                    assert!(!more || proto.links[link].wants_to_send(), "another send follows at once");
                }
            }
            Output::CoverPayloads { link } => host.covered.push(link),
            Output::WakePeer { .. } => host.woken += 1,
            Output::StartRma { link, transfer, pull, memory, keys, offset } => {
                let at = self.now + self.settings.rma_duration;
                self.rma_operations.push(DeviceRma {
                    at,
                    host: number,
                    link,
                    number: transfer,
                    pull,
                    memory,
                    keys,
                    offset,
                    cancelled: false,
                });
            }
            Output::CancelRma { link, transfer } => {
                let is_same = |each: &&mut DeviceRma| each.host == number && each.link == link && each.number == transfer;
                if let Some(found) = self.rma_operations.iter_mut().find(is_same) {
                    found.cancelled = true;
                }
            }
            Output::AskAcknowledged { link } => {
                let Some(&(wire, side)) = host.wires.get(&link) else { return };
                let end = &self.wires[wire].ends[side];
                // Once all has arrived, nothing is in flight that could be acknowledged.
                let acknowledged = if end.outgoing.is_empty() { 0 } else { end.delivered };
                host.proto.handle_acknowledged(link, acknowledged, self.now);
            }
            Output::Close { link } => {
                host.carriers.remove(&link);
                let Some((wire, side)) = host.wires.remove(&link) else { return };
                self.wires[wire].ends[side].link = None;
                self.put(wire, side, WireItem::Closed);
            }
            Output::CallDone { waiter, result } => host.call_done(waiter, result.map_err(|failure| *failure)),
            Output::TransferDone { waiter, result } => host.transfer_done(waiter, result.map_err(|failure| *failure)),
            Output::Request(incoming) => host.request(incoming),
            Output::Cancelled { request } => host.cancelled.push(request),
            Output::LeaseReleased(lease) => host.unleased.push(lease),
            Output::Stale { token } => host.stale.push(token),
            Output::Withdraw { memory } => assert!(!memory.is_open(), "only memory that is closed is withdrawn"),
            Output::Log(line) => host.log.push(line),
            Output::ShutdownAsked => host.shutdowns += 1,
            // The two are reported in turns, whatever the links do.
            Output::PeerConnected(peer) => assert!(host.connected.insert(peer.id), "{} is connected twice", peer.address),
            Output::PeerIdle(peer) => {
                host.idle += 1;
                assert!(host.connected.remove(&peer.id), "{} was not connected", peer.address);
            }
            Output::PeerLost { peer, .. } => assert!(host.connected.remove(&peer.id), "{} was not connected", peer.address),
        }
    }

    /// A connection to an address without a listener is refused.
    fn connect(&mut self, number: usize, link: LinkId, address: &Address) {
        let found = self.hosts.iter().position(|host| host.listens && host.address == *address);
        let wire = self.wires.len();
        let ends = [WireEnd::new(number, Some(link)), WireEnd::new(found.unwrap_or(TEST_PEER), None)];
        self.wires.push(Wire { ends, frozen: self.black_hole });
        self.add_wire(number, link, (wire, 0));
        match found {
            Some(_) => self.put(wire, 0, WireItem::Dial),
            None if self.test_address == Some(address.clone()) => self.put(wire, 1, WireItem::Connected),
            None => self.put(wire, 1, WireItem::Closed),
        }
    }

    /// Hands arriving bytes to the protocol of an end, as a transport does.
    pub fn feed(&mut self, wire: usize, side: usize, mut data: Vec<u8>) {
        let host = self.wires[wire].ends[side].host;
        if host == TEST_PEER {
            return self.wires[wire].ends[side].received.append(&mut data);
        }
        let Some(link) = self.wires[wire].ends[side].link else { return };
        loop {
            // The bytes before may have ended the link.
            if self.wires[wire].ends[side].link != Some(link) {
                return;
            }
            let now = self.now;
            let receiving = &mut self.wires[wire].ends[side].receiving;
            if let Some(payload) = &mut receiving.payload {
                match payload.take(&mut data) {
                    Some(status) => {
                        receiving.payload = None;
                        self.hosts[host].proto.handle_payload_done(link, status, now);
                    }
                    None => self.hosts[host].proto.handle_heard(link, now),
                }
                self.pump(host);
                if data.is_empty() {
                    return;
                }
                continue;
            }
            receiving.partial.append(&mut data);
            let mut offered = std::mem::take(&mut receiving.partial);
            match self.hosts[host].proto.consume(link, &offered, now) {
                Ok(consumed) => {
                    data = offered.split_off(consumed.used);
                    let receiving = &mut self.wires[wire].ends[side].receiving;
                    receiving.payload = consumed.target.map(|payload| WirePayload::new(payload.memory, payload.len));
                    if receiving.payload.is_none() {
                        receiving.partial = data;
                        return self.pump(host);
                    }
                }
                Err(failure) => self.hosts[host].proto.fail_link(link, failure),
            }
            self.pump(host);
        }
    }
}
