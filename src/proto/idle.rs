//! Idle connections: the side that dialled one closes it, and neither side notices more than the next handshake.
//!
//! It proposes to close a link on which nothing has happened for the idle timeout, and on which nothing is held; the link stays
//! in use meanwhile. A peer that agrees sends nothing more on the link unless it is asked: its new operations dial a link of
//! their own. If the side that proposed has sent nothing since, both sides know that nothing is on its way in either direction,
//! and it ends the link. Else what it has sent tells the peer that the link is in use after all.
//!
//! ```text
//!   the side that dialled:   in use ──unused for the idle timeout, `Idle`──▶ offered ──`IdleAgreed`, nothing sent since──▶ closed
//!                              ▲                                              │
//!                              └──`InUse`; or `IdleAgreed`, but sent since────┘
//!
//!   the side that was dialled:  in use ──`Idle`, nothing held: `IdleAgreed`──▶ left ──▶ closed
//!                                 ▲                                             │
//!                                 └──any message────────────────────────────────┘
//! ```
//!
//! If the peer that has left the link dials its own while this side sends on the old one, there are two links. Each side uses
//! the one that it has dialled, as after two dials at the same time, until that is idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::{IdleState, PeerLink};
use super::peers::Peer;
use super::timers::TimerKind;
use super::wire::Message;
use super::{Env, Failure, LinkId, PeerId, Proto, broken};
use crate::{Address, Transport};

impl<E: Env> PeerLink<E> {
    /// Whether an operation or a bulk of either side depends on the link.
    fn is_held(&self) -> bool {
        self.is_busy() || !self.requests.is_empty() || !self.leases.is_empty() || self.wants_to_send()
    }

    /// Changes with all that goes over the link, and with each transfer that a device carries out for this side.
    fn used(&self) -> u64 {
        self.sent_or_queued() + self.traffic.received_bytes + self.traffic.transfers
    }
}

impl<E: Env> Proto<E> {
    /// Looks at a link that this side has dialled from time to time, if idle ones are to be closed.
    pub(super) fn watch_idle(&mut self, id: LinkId, now: Instant) {
        let Some(timeout) = self.config.idle_timeout else { return };
        let used = self.used(id);
        let link = &mut self.links[id];
        if link.dialled && link.main.is_none() {
            link.idle.used = used;
            self.look_again(id, now + timeout);
        }
    }

    fn look_again(&mut self, id: LinkId, at: Instant) {
        self.links[id].idle.due = Some(at);
        self.timers.insert((at, TimerKind::Idle(id)));
    }

    /// The link is closed.
    pub(super) fn end_idle(&mut self, id: LinkId, idle: &IdleState) {
        if let Some(at) = idle.due {
            self.timers.remove(&(at, TimerKind::Idle(id)));
        }
    }

    pub(super) fn idle_due(&mut self, id: LinkId, now: Instant) {
        let Some(timeout) = self.config.idle_timeout else { return };
        let used = self.used(id);
        let may_leave = self.may_leave(id);
        let is_held = self.is_held(id);
        let Some(link) = self.links.get_mut(id) else { return };
        link.idle.due = None;
        if link.idle.used != used || is_held || !may_leave {
            link.idle.used = used;
            return self.look_again(id, now + timeout);
        }
        let received = link.traffic.received_bytes;
        link.queue_frame(&Message::Idle { received, exposes: self.exposures.len() > 0 }, &[]);
        link.idle.offered = Some(link.sent_or_queued());
        link.idle.proposed = Some(now);
        self.mark_ready(id);
    }

    /// The link and its lanes.
    fn with_lanes(&self, id: LinkId) -> impl Iterator<Item = &PeerLink<E>> {
        let main = self.links.get(id);
        let lanes = main.into_iter().flat_map(|main| &main.lanes.links).filter_map(|lane| self.links.get(*lane));
        main.into_iter().chain(lanes)
    }

    fn used(&self, id: LinkId) -> u64 {
        self.with_lanes(id).map(PeerLink::used).sum()
    }

    fn is_held(&self, id: LinkId) -> bool {
        self.with_lanes(id).any(PeerLink::is_held)
    }

    /// Whether both engines will know each other when they meet again, and the link is not ending anyway.
    fn will_be_known(&self, id: LinkId) -> bool {
        let Some(link) = self.links.get(id) else { return false };
        let known = link.peer.and_then(|peer| self.peers.get(peer)).is_some_and(|peer| peer.resumption_token.is_some());
        known && link.is_open() && !link.closing
    }

    /// Whether this side, which has dialled the link, can do without it. If it does not listen, peers reach its memory over the
    /// links that it has dialled, and no other way.
    fn may_leave(&self, id: LinkId) -> bool {
        self.will_be_known(id) && (!self.addresses.is_empty() || self.exposures.len() == 0)
    }

    /// The side that dialled the link proposes to close it. It has received so many bytes on it.
    #[cold]
    pub(super) fn handle_idle(&mut self, id: LinkId, received: u64, exposes: bool) -> Result<(), Failure> {
        if self.links[id].dialled {
            return Err(broken("it proposes to close a connection that it has not dialled".into()));
        }
        let agrees = self.agrees(id, received, exposes);
        self.links[id].idle.used = self.links[id].traffic.transfers;
        if agrees {
            self.leave(id);
        }
        self.links[id].queue_control(if agrees { &Message::IdleAgreed } else { &Message::InUse });
        self.mark_ready(id);
        Ok(())
    }

    fn agrees(&self, id: LinkId, received: u64, exposes: bool) -> bool {
        let link = &self.links[id];
        let Some(entry) = link.peer.and_then(|peer| self.peers.get(peer)) else { return false };
        // What this side has sent has not only left it, but was handled by the peer, in this order: what it sends on another link
        // comes behind.
        let has_arrived = received == link.traffic.sent_bytes;
        // Only this side knows of the transfers that its devices carry out.
        let is_unused = link.idle.used == link.traffic.transfers;
        let needs_peer = exposes || Arc::strong_count(&entry.tag) > 1;
        let can_be_closed = has_arrived && is_unused && !self.is_held(id) && self.will_be_known(id);
        can_be_closed && (!needs_peer || self.can_dial(entry, link.transport))
    }

    /// Whether a peer that has dialled this engine over a transport can be dialled too, as far as this engine knows: the program
    /// has named the address; or the peer has, and this engine has a transport for it.
    fn can_dial(&self, peer: &Peer, transport: Transport) -> bool {
        let Some(scheme) = peer.dial.as_ref().map(Address::scheme) else { return false };
        let has_transport = || scheme == transport || self.addresses.iter().any(|own| own.scheme() == scheme);
        peer.chosen || !self.config.filters_dials && has_transport()
    }

    /// New operations take another link, or dial one.
    fn leave(&mut self, id: LinkId) {
        self.links[id].idle.left = true;
        if let Some(entry) = self.links[id].peer.and_then(|peer| self.peers.get_mut(peer))
            && entry.link == Some(id)
        {
            entry.link = entry.other.replace(id);
        }
    }

    /// The peer uses a link that this side has left. True if the message says no more than that.
    #[cold]
    pub(super) fn rejoin(&mut self, id: LinkId, message: &Message<'_>) -> bool {
        self.links[id].idle.left = false;
        if let Some(entry) = self.links[id].peer.and_then(|peer| self.peers.get_mut(peer))
            && entry.link.is_none()
        {
            entry.link = entry.other.take();
        }
        *message == Message::InUse
    }

    /// The peer has left the link.
    #[cold]
    pub(super) fn handle_idle_agreed(&mut self, id: LinkId, now: Instant) -> Result<(), Failure> {
        let link = &mut self.links[id];
        let Some(offered) = link.idle.offered.take() else {
            return Err(broken("it agrees to close a connection, which was not proposed".into()));
        };
        // What was sent since tells the peer that the link is in use.
        if link.sent_or_queued() != offered {
            self.watch_idle(id, now);
            return Ok(());
        }
        // Memory may have been exposed, or a transfer begun by a device or on a lane.
        if self.is_held(id) || !self.may_leave(id) {
            self.links[id].queue_frame(&Message::InUse, &[]);
            self.mark_ready(id);
            self.watch_idle(id, now);
            return Ok(());
        }
        self.links[id].idle.left = true;
        self.close(id, Failure::Disconnected { reason: "it was idle".into() });
        Ok(())
    }

    /// The peer declines a proposal.
    #[cold]
    pub(super) fn handle_in_use(&mut self, id: LinkId, now: Instant) -> Result<(), Failure> {
        if self.links[id].idle.offered.take().is_none() {
            return Err(broken("it declines to close a connection, which was not proposed".into()));
        }
        self.watch_idle(id, now);
        Ok(())
    }

    /// Whether a link may still be good, though its peer has dialled another one: this side has dialled it, and when the peer
    /// dialled, it had not heard of that yet, or had left the link as idle. Otherwise the peer has lost it.
    pub(super) fn may_not_be_lost(&self, link: &PeerLink<E>, now: Instant) -> bool {
        // A peer that dials is done or has given up after a while; its limit is not known.
        let while_dialling = 2 * self.config.connect;
        let since = link.idle.proposed.map_or(link.due, |proposed| proposed.max(link.due));
        link.dialled && now <= since + while_dialling
    }

    /// Sends something on an open link, unless the peer has a proposal to close it to answer: if it has lost the link, this side
    /// soon learns that.
    pub(super) fn ping_unless_offered(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id).filter(|link| link.is_open() && link.idle.offered.is_none()) else { return };
        link.queue_frame(&Message::Ping, &[]);
        self.mark_ready(id);
    }

    /// The last link to a peer was closed as idle. The peer is remembered, so that the two know each other when they meet again.
    pub(super) fn note_idle_peer(&mut self, peer: PeerId) {
        self.idle_closed += 1;
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.idle_since = Some(self.idle_closed);
        }
    }

    /// Forgets the peers that have been idle for the longest, as far as they are more than the engine keeps connections.
    pub(super) fn limit_idle_peers(&mut self) {
        let mut since: Vec<u64> = self.peers.values().filter_map(|peer| peer.idle_since).collect();
        let limit = self.config.limits.connections;
        if since.len() <= limit {
            return;
        }
        since.sort_unstable_by(|a, b| b.cmp(a));
        let oldest = since[limit];
        self.peers
            .values_mut()
            .filter(|peer| peer.idle_since.is_some_and(|at| at <= oldest))
            .for_each(|peer| peer.idle_since = None);
    }
}

/// Shortest idle timeout: less would close a connection between two calls.
pub(crate) const MIN_IDLE: Duration = Duration::from_millis(1);
