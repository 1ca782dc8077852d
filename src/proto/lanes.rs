//! Lanes: further links to a peer, for bulk data only.
//!
//! Over tcp a small call waits behind all that the kernels of both sides hold of a transfer, which may be megabytes. So the side
//! that dialled a link dials a second one, a lane, as soon as there is a large transfer in either direction. Transfers that
//! begin once the lane is open take it; the link itself, the main one, has everything else, and shorter transfers.
//!
//! A lane is a link as any other, with a handshake, limits and a heartbeat of its own: a transfer is begun, fenced and cancelled
//! on it as on the main link. It is the peer's by proof: the side that dials shows the resumption token that it was given, and
//! so does the other. It ends with its main link.
//!
//! ```text
//!   none ──a transfer of 1 MiB──▶ dialled ──the peer's hello──▶ open ──lost──▶ none
//!                                    └──refused, unreachable──▶ never again for this main link
//! ```

use std::time::Instant;

use super::link::{Lanes, PeerLink};
use super::wire::Hello;
use super::{EngineStage, Env, Failure, LinkId, Output, PeerId, Proto, broken};

/// A transfer of so many bytes is worth a lane. One of less than a sixteenth stays on the main link: it keeps a small call
/// waiting for some ten microseconds.
pub(crate) const WORTH_A_LANE: u64 = 1 << 20;
/// Lanes of one link that are accepted.
pub(crate) const MAX_LANES: usize = 16;

impl<E: Env> Proto<E> {
    /// The main link of a lane; any other link itself.
    pub(super) fn main_of(&self, id: LinkId) -> LinkId {
        self.links.get(id).and_then(|link| link.main).unwrap_or(id)
    }

    /// Transfers of the peer that are in progress on a link, its main link, and the lanes of that.
    pub(super) fn transfers_of_peer(&self, id: LinkId) -> usize {
        let main = self.links.get(self.main_of(id));
        let lanes = main.into_iter().flat_map(|main| &main.lanes.links).filter_map(|lane| self.links.get(*lane));
        main.into_iter().chain(lanes).map(PeerLink::transfers).sum()
    }

    /// The link that a transfer of `len` bytes takes: the lane with the fewest transfers, or the main link.
    pub(super) fn lane_for(&mut self, main: LinkId, len: u64, now: Instant) -> LinkId {
        self.want_lane(main, len, now);
        if len < self.config.worth_a_lane / 16 {
            return main;
        }
        let lanes = self.links[main].lanes.links.iter().copied();
        let open = lanes.filter(|lane| self.links.get(*lane).is_some_and(|lane| lane.is_open() && !lane.closing));
        open.min_by_key(|lane| self.links[*lane].pending).unwrap_or(main)
    }

    /// Dials a lane if a transfer of `len` bytes is worth it, this side has dialled the main link, and there are not enough.
    pub(super) fn want_lane(&mut self, main: LinkId, len: u64, now: Instant) {
        let link = &self.links[main];
        let Lanes { useful, ref links, refused } = link.lanes;
        if len < self.config.worth_a_lane || !useful || refused || links.len() >= self.config.lanes {
            return;
        }
        let known = link.peer.and_then(|peer| self.peers.get(peer)).is_some_and(|peer| peer.resumption_token.is_some());
        let is_main = link.dialled && link.is_open() && link.main.is_none();
        if !(is_main && known && self.stage == EngineStage::Running) {
            return;
        }
        let (peer, address) = (link.peer, link.remote.clone());
        let lane = self.add_link(address.clone(), true, now);
        self.links[lane].peer = peer;
        self.links[lane].main = Some(main);
        self.links[main].lanes.links.push(lane);
        self.begin_handshake(lane);
        self.outputs.push_back(Output::Connect { link: lane, address, lane: true });
    }

    /// The link that a peer has dialled: the main link of the lanes that it dials.
    fn accepted_link(&self, peer: PeerId) -> Option<LinkId> {
        self.peers.get(peer)?.links().find(|link| self.links.get(*link).is_some_and(|link| !link.dialled))
    }

    /// A peer's hello on a lane.
    pub(super) fn open_lane(&mut self, id: LinkId, hello: &Hello, now: Instant) -> Result<(), Failure> {
        let dialled = self.links[id].dialled;
        let shown = self.proved(hello);
        let main = if dialled { self.links[id].main } else { shown.and_then(|peer| self.accepted_link(peer)) };
        let Some((main, link)) = main.and_then(|main| Some((main, self.links.get_mut(main)?))) else {
            return Err(broken("a lane of no connection".into()));
        };
        if dialled && link.incarnation != hello.incarnation {
            // Another engine, at an address that leads to several.
            link.lanes.refused = true;
        }
        let belongs = shown.is_some() && link.peer == shown;
        // The side that is dialled may use the lane at once, so it accepts none that it can't prove itself on.
        let proves = shown.and_then(|shown| self.peers.get(shown)).is_some_and(|peer| peer.resumption_token.is_some());
        if !belongs || !proves || !link.is_open() || link.closing {
            return Err(Failure::Disconnected { reason: "a lane to another engine".into() });
        }
        if !dialled {
            if link.lanes.links.len() >= MAX_LANES {
                return Err(broken(format!("more than {MAX_LANES} lanes of a connection")));
            }
            link.lanes.links.push(id);
            self.accepted -= 1;
            self.accepted_lanes += 1;
        }
        self.links[id].peer = shown;
        self.links[id].main = Some(main);
        if self.stage == EngineStage::Closed {
            self.links[id].closing = true;
            self.touch_closing(id);
            return Ok(());
        }
        self.watch(id, now);
        self.mark_ready(id);
        Ok(())
    }

    /// A link was closed: its lanes end with it. If it is a lane, its main link has it no more.
    pub(super) fn end_lanes(&mut self, id: LinkId, link: &PeerLink<E>, failure: &Failure) {
        for lane in &link.lanes.links {
            self.close(*lane, failure.clone());
        }
        if let Some(main) = link.main.and_then(|main| self.links.get_mut(main)) {
            main.lanes.links.retain(|lane| *lane != id);
            main.lanes.refused |= !link.is_open();
        }
    }
}
