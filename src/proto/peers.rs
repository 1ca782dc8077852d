//! Peers: which engines are known, and the links to them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::link::{LinkState, PeerLink};
use super::tables;
use super::timers::TimerKind;
use super::traffic::Traffic;
use super::wire::{Hello, Message};
use super::{EngineStage, Env, Failure, LinkId, Output, PeerId, Proto, broken};
use crate::{Address, Transport};

/// What endpoints hold of a peer.
#[derive(Debug)]
pub(crate) struct PeerTag {
    pub id: PeerId,
    pub address: Address,
}

pub(super) struct Peer {
    pub tag: Arc<PeerTag>,
    /// The address at which it can be dialled, if it listens.
    pub dial: Option<Address>,
    /// The link that new operations take.
    pub link: Option<LinkId>,
    /// Another one to the same engine: both have dialled, or this side has left it as idle and it is not closed yet. If this
    /// side has not left it, it takes the place of `link` when that ends.
    pub other: Option<LinkId>,
    /// The incarnation that was last met there.
    pub incarnation: Option<u64>,
    /// How many engines have been met there in turn.
    pub engines: u64,
    /// The token to show to that engine when it is dialled again.
    pub resumption_token: Option<u128>,
    /// The token that the peer was given, to show when it meets this engine again.
    pub given_token: Option<u128>,
    /// The user of this engine has named its address; otherwise a peer has.
    pub chosen: bool,
    /// The transport of its last link that was open.
    pub transport: Option<Transport>,
    /// What went over its links that have ended.
    pub traffic: Traffic,
    /// Its last link was closed as idle: the higher, the later.
    pub idle_since: Option<u64>,
}

impl Peer {
    /// Its links, without lanes.
    pub(super) fn links(&self) -> impl Iterator<Item = LinkId> + use<> {
        self.link.into_iter().chain(self.other)
    }
}

/// Most addresses of one engine: a peer that claims more is refused.
pub(crate) const MAX_ADDRESSES: usize = 16;

impl<E: Env> Proto<E> {
    /// The peer at an address; known or new, connected or not.
    pub(crate) fn lookup(&mut self, address: &Address) -> Arc<PeerTag> {
        if let Some(peer) = self.by_address.get(address).and_then(|id| self.peers.get(*id)) {
            return peer.tag.clone();
        }
        let id = self.add_peer(address.clone(), Some(address.clone()));
        self.by_address.insert(address.clone(), id);
        self.peers[id].tag.clone()
    }

    /// The peer that is the engine of this incarnation, if it has been met.
    pub(crate) fn lookup_incarnation(&self, incarnation: u64) -> Option<Arc<PeerTag>> {
        let peer = self.peers.get(*self.by_incarnation.get(&incarnation)?)?;
        (peer.incarnation == Some(incarnation)).then(|| peer.tag.clone())
    }

    /// The incarnation of the engine at the other end of a link, and its address.
    pub(crate) fn remote_of(&self, link: LinkId) -> Option<(u64, Address)> {
        self.links.get(link).map(|link| (link.incarnation, link.remote.clone()))
    }

    /// Whether the engine at the other end of a link is this peer. It may be known as two peers, if both sides have dialled; as this engine
    /// is, if it has dialled itself.
    pub(crate) fn leads_to(&self, link: LinkId, peer: PeerId) -> bool {
        let Some((link, peer)) = self.links.get(link).zip(self.peers.get(peer)) else { return false };
        peer.incarnation == Some(link.incarnation)
    }

    /// The open link to a peer, if there is one.
    pub(crate) fn connection(&self, peer: PeerId) -> Option<LinkId> {
        self.connection_of(self.peers.get(peer)?)
    }

    fn connection_of(&self, peer: &Peer) -> Option<LinkId> {
        let usable = |id: &LinkId| self.links.get(*id).is_some_and(|link| link.is_open() && !link.idle.left);
        peer.links().find(usable)
    }

    /// Whether the peer has an open link, be it one that this side has left.
    fn has_open_link(&self, peer: PeerId) -> bool {
        let is_open = |id: LinkId| self.links.get(id).is_some_and(PeerLink::is_open);
        self.peers.get(peer).is_some_and(|peer| peer.links().any(is_open))
    }

    /// Whether the connection to a peer was closed as idle, and the peer can be dialled.
    pub(crate) fn is_idle(&self, peer: PeerId) -> bool {
        let Some(peer) = self.peers.get(peer) else { return false };
        let is_idle = peer.idle_since.is_some() || peer.other.is_some();
        is_idle && peer.dial.is_some() && (peer.chosen || !self.config.filters_dials)
    }

    /// The peers that there is a connection to.
    pub(crate) fn connected_peers(&self) -> Vec<Arc<PeerTag>> {
        self.peers.values().filter(|peer| self.connection_of(peer).is_some()).map(|peer| peer.tag.clone()).collect()
    }

    /// Ends the connection to a peer, and forgets which engine was met there.
    pub(crate) fn forget(&mut self, peer: PeerId) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        (entry.resumption_token, entry.idle_since) = (None, None);
        if let Some(incarnation) = entry.incarnation.take()
            && self.by_incarnation.get(&incarnation) == Some(&peer)
        {
            self.by_incarnation.remove(&incarnation);
        }
        if let Some(token) = self.peers[peer].given_token.take() {
            self.by_resumption_token.remove(&token);
        }
        for link in self.peers[peer].links() {
            self.close(link, Failure::Disconnected { reason: "this engine has forgotten it".into() });
        }
    }

    /// The user of this engine has named an address of the peer: it is dialled there, whatever addresses it has claimed.
    pub(crate) fn choose(&mut self, peer: PeerId, address: &Address) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.chosen = true;
            peer.dial = Some(address.clone());
        }
    }

    /// Whether the user of this engine has named the address to which a link was dialled.
    pub(crate) fn is_chosen(&self, link: LinkId) -> bool {
        let Some(link) = self.links.get(link) else { return false };
        let peer = link.peer.and_then(|peer| self.peers.get(peer));
        peer.is_some_and(|peer| peer.chosen && peer.dial.as_ref() == Some(&link.remote))
    }

    /// Whether the user of this engine has named this address.
    pub(crate) fn is_chosen_address(&self, address: &Address) -> bool {
        self.by_address.get(address).and_then(|id| self.peers.get(*id)).is_some_and(|peer| peer.chosen)
    }

    /// The incarnation that was last met at a peer, and how many have been met there so far.
    pub(crate) fn engines_at(&self, peer: PeerId) -> Option<(u64, u64)> {
        let peer = self.peers.get(peer)?;
        Some((peer.incarnation?, peer.engines))
    }

    fn add_peer(&mut self, address: Address, dial: Option<Address>) -> PeerId {
        if self.peers.len() >= self.sweep_at {
            self.sweep();
            self.sweep_at = (2 * self.peers.len()).max(64);
        }
        self.peers.insert_with_key(|id| Peer {
            tag: Arc::new(PeerTag { id, address }),
            dial,
            link: None,
            other: None,
            incarnation: None,
            engines: 0,
            resumption_token: None,
            given_token: None,
            chosen: false,
            transport: None,
            traffic: Traffic::default(),
            idle_since: None,
        })
    }

    /// Removes peers that are not connected and not referenced, except for those whose connections were closed as idle.
    fn sweep(&mut self) {
        self.limit_idle_peers();
        let linked: HashSet<PeerId> = self.links.values().filter_map(|link| link.peer).collect();
        self.peers.retain(|id, peer| linked.contains(&id) || peer.idle_since.is_some() || Arc::strong_count(&peer.tag) > 1);
        let peers = &self.peers;
        self.by_address.retain(|_, id| peers.contains_key(*id));
        self.by_incarnation.retain(|_, id| peers.contains_key(*id));
        self.by_resumption_token.retain(|_, id| peers.contains_key(*id));
    }

    pub(super) fn handle_hello(&mut self, id: LinkId, hello: Hello, lane: bool, now: Instant) -> Result<(), Failure> {
        if hello.addresses.len() > MAX_ADDRESSES {
            return Err(broken(format!("it claims {} addresses", hello.addresses.len())));
        }
        let link = &mut self.links[id];
        let accepted = !link.dialled;
        if lane && !accepted && link.main.is_none() {
            return Err(broken("it opens a lane where a connection was dialled".into()));
        }
        if accepted {
            self.handshakes.remove(&(link.due, id));
            self.accepted += 1;
        }
        self.timers.remove(&(link.due, TimerKind::Handshake(id)));
        link.state = LinkState::Open;
        link.incarnation = hello.incarnation;
        link.peer_max_message = usize::try_from(hello.max_message).unwrap_or(usize::MAX);
        link.checksums = self.config.checksums || hello.checksums;
        if link.checksums {
            self.outputs.push_back(Output::CoverPayloads { link: id });
        }
        let (is_lane, remote) = (lane || link.main.is_some(), link.remote.clone());
        self.count_opened(id);
        if is_lane {
            return self.open_lane(id, &hello, now);
        }
        // A peer that was dialled is taken as the one at that address.
        let peer = match self.links[id].peer.filter(|peer| self.peers.contains_key(*peer)) {
            Some(peer) => peer,
            None => self.recognize(&hello, &remote, now),
        };
        // The token that the peer shows when it meets this engine again. No other engine can know it.
        let token = self.new_resumption_token(hello.incarnation, peer);
        let link = &mut self.links[id];
        link.peer = Some(peer);
        link.queue_frame(&Message::ResumptionToken { token }, &[]);
        let transport = link.transport;
        let entry = &mut self.peers[peer];
        entry.transport = Some(transport);
        entry.idle_since = None;
        let before = entry.incarnation.replace(hello.incarnation);
        // Another engine may have taken over the address and claim the incarnation, which is no secret.
        let is_other_engine = before != Some(hello.incarnation) || hello.resumption_token != Some(token);
        if is_other_engine {
            entry.resumption_token = None;
            entry.engines += 1;
        }
        if let Some(before) = before.filter(|before| *before != hello.incarnation)
            && self.by_incarnation.get(&before) == Some(&peer)
        {
            self.by_incarnation.remove(&before);
        }
        let restarted = before.is_some_and(|before| before != hello.incarnation);
        let tag = entry.tag.clone();
        let others: Vec<LinkId> = entry.links().filter(|other| *other != id).collect();
        let still_connected = others.iter().any(|other| self.links.get(*other).is_some_and(PeerLink::is_open));
        if still_connected && restarted {
            let failure = Failure::Disconnected { reason: "another engine has taken its place".into() };
            self.outputs.push_back(Output::PeerLost { peer: tag.clone(), failure });
        }
        if !still_connected || restarted {
            self.outputs.push_back(Output::PeerConnected(tag));
        }
        self.attach(id, peer, others, is_other_engine, now);
        // No peer can displace an engine that was met by claiming its incarnation, whether that engine is connected or not: a
        // lookup of the owner of memory must not lead to another engine.
        let known = self.by_incarnation.get(&hello.incarnation).and_then(|id| self.peers.get(*id));
        if known.is_none_or(|known| known.incarnation != Some(hello.incarnation)) {
            self.by_incarnation.insert(hello.incarnation, peer);
        }
        if self.stage == EngineStage::Closed {
            self.links[id].closing = true;
            self.touch_closing(id);
            return Ok(());
        }
        self.watch(id, now);
        self.watch_idle(id, now);
        self.refuse_too_large(id);
        self.mark_ready(id);
        Ok(())
    }

    /// A link to a peer is open. `others`: its earlier links.
    fn attach(&mut self, id: LinkId, peer: PeerId, others: Vec<LinkId>, is_other_engine: bool, now: Instant) {
        let accepted = !self.links[id].dialled;
        // What this side sends keeps its order if it goes on with the link that it has dialled.
        let stays = |other: &LinkId| match self.links.get(*other) {
            Some(other) if accepted => self.may_not_be_lost(other, now),
            Some(other) => !other.dialled,
            None => false,
        };
        let (kept, lost): (Vec<LinkId>, Vec<LinkId>) = others.into_iter().partition(|other| !is_other_engine && stays(other));
        let kept = kept.first().copied();
        let entry = &mut self.peers[peer];
        (entry.link, entry.other) = match kept {
            Some(kept) if accepted => (Some(kept), Some(id)),
            kept => (Some(id), kept),
        };
        if let Some(kept) = kept.filter(|_| accepted) {
            // Or it has lost that link, and its system answers so.
            self.ping_unless_offered(kept);
        }
        for other in lost {
            self.close(other, Failure::Disconnected { reason: "it has reconnected".into() });
        }
    }

    /// The token stays the same as long as the same engine is there. An engine that claims the incarnation of another gets a
    /// token of its own, which proves nothing about the other.
    fn new_resumption_token(&mut self, incarnation: u64, peer: PeerId) -> u128 {
        let Peer { incarnation: met, given_token: given, .. } = self.peers[peer];
        if let Some(token) = given.filter(|_| met == Some(incarnation)) {
            return token;
        }
        let token = self.secret();
        self.peers[peer].given_token = Some(token);
        self.by_resumption_token.insert(token, peer);
        if let Some(before) = given {
            self.by_resumption_token.remove(&before);
        }
        token
    }

    /// The peer has sent the token that it wants to see when it is dialled again.
    pub(super) fn handle_resumption_token(&mut self, id: LinkId, token: u128) {
        if let Some(peer) = self.links[id].peer.and_then(|peer| self.peers.get_mut(peer)) {
            peer.resumption_token = Some(token);
        }
    }

    /// The peer that was met before, if a hello proves that this is the same engine.
    pub(super) fn proved(&self, hello: &Hello) -> Option<PeerId> {
        let token = hello.resumption_token?;
        let shown = |id: &PeerId| {
            self.peers.get(*id).is_some_and(|peer| peer.incarnation == Some(hello.incarnation) && peer.given_token == Some(token))
        };
        // Other engines may have claimed its incarnation while it was away.
        self.by_resumption_token.get(&token).copied().filter(shown)
    }

    /// The peer that dialled: one that was met before, if it shows the token that it was given then; otherwise a new one.
    ///
    /// No claim makes it a peer that has a link. The claim of an address that was looked up and never reached is believed if
    /// the connection comes from that host: so an engine that can't be dialled is reached at its address.
    fn recognize(&mut self, hello: &Hello, remote: &Address, now: Instant) -> PeerId {
        if let Some(known) = self.proved(hello) {
            return known;
        }
        let plausible = |address: &Address| match (address.socket(), remote.socket()) {
            (Some(claimed), Some(seen)) => claimed.ip() == seen.ip(),
            (Some(_), None) => remote.scheme() == Transport::Shm && self.interfaces.have(address),
            _ => address.scheme() == remote.scheme(),
        };
        let mut addresses: Vec<Address> = hello.addresses.iter().map(|address| address.seen_from(remote)).collect();
        if remote.scheme() == Transport::Shm {
            // An engine that listens on all interfaces of this host is reached at each of its addresses.
            addresses.extend(hello.addresses.iter().flat_map(|claimed| self.interfaces.each_of(claimed)));
        }
        addresses.retain(plausible);
        // Either the peer at that address has been replaced, or the claim is false.
        let claimed = addresses.iter().filter_map(|address| self.peers.get(*self.by_address.get(address)?));
        let doubted: Vec<LinkId> =
            claimed.filter(|peer| peer.incarnation != Some(hello.incarnation)).flat_map(Peer::links).collect();
        doubted.into_iter().for_each(|link| self.probe_liveness(link, now));
        let unmet = |id: &PeerId| self.peers.get(*id).is_some_and(|peer| peer.link.is_none() && peer.incarnation.is_none());
        let looked_up = addresses.iter().filter_map(|address| self.by_address.get(address)).copied().find(unmet);
        let peer = looked_up.unwrap_or_else(|| {
            let dial = addresses.first().cloned();
            self.add_peer(dial.clone().unwrap_or_else(|| remote.clone()), dial)
        });
        for address in addresses {
            let taken = self.by_address.get(&address).is_some_and(|id| self.peers.contains_key(*id));
            if !taken {
                self.by_address.insert(address, peer);
            }
        }
        peer
    }

    /// A transport lost the link, or could not make it.
    pub(crate) fn handle_closed(&mut self, id: LinkId, cause: std::io::Error) {
        let Some(link) = self.links.get(id) else { return };
        let failure = match link.state {
            LinkState::Dialling => Failure::Unreachable { reason: cause.to_string(), source: Some(Arc::new(cause)) },
            LinkState::Handshaking => {
                let reason = format!("the connection ended during the handshake: {cause}");
                Failure::Unreachable { reason, source: Some(Arc::new(cause)) }
            }
            LinkState::Open => Failure::Disconnected { reason: cause.to_string() },
        };
        self.close(id, failure);
    }

    /// A link is closed: its peer has it no more.
    fn detach(&mut self, id: LinkId, link: &PeerLink<E>, failure: &Failure) {
        let Some(peer) = link.peer else { return };
        let Some(entry) = self.peers.get_mut(peer).filter(|entry| entry.links().any(|own| own == id)) else { return };
        let other = if entry.link == Some(id) { entry.other } else { entry.link };
        (entry.link, entry.other) = match other {
            Some(other) if self.links.get(other).is_some_and(|link| link.idle.left) => {
                (entry.link.filter(|link| *link == other), Some(other))
            }
            other => (other, None),
        };
        let tag = entry.tag.clone();
        if !link.is_open() {
            // Nothing answers there any more.
            entry.idle_since = None;
        } else if !self.has_open_link(peer) {
            self.outputs.push_back(if link.idle.left {
                Output::PeerIdle(tag)
            } else {
                Output::PeerLost { peer: tag, failure: failure.clone() }
            });
            if link.idle.left {
                self.note_idle_peer(peer);
            }
        }
    }

    /// Ends a link, and with it everything that depended on it.
    pub(crate) fn close(&mut self, id: LinkId, failure: Failure) {
        self.end_auth(id);
        let Some(link) = self.links.remove(id) else { return };
        self.traces.remove(&id);
        self.outputs.push_back(Output::Close { link: id });
        match (link.is_open(), link.dialled) {
            (true, false) if link.main.is_some() => self.accepted_lanes -= 1,
            (true, false) => self.accepted -= 1,
            (true, true) => {}
            (false, dialled) => {
                self.timers.remove(&(link.due, TimerKind::Handshake(id)));
                if !dialled {
                    self.handshakes.remove(&(link.due, id));
                }
            }
        }
        if let Some(at) = link.heartbeat {
            self.timers.remove(&(at, TimerKind::Heartbeat(id)));
        }
        self.bytes -= link.account.counted;
        self.count_closed(&link);
        self.end_idle(id, &link.idle);
        self.detach(id, &link, &failure);
        self.end_lanes(id, &link, &failure);
        for call in tables::chained(&mut self.calls, link.last_call) {
            self.end_call(call, Err(failure.clone()));
        }
        for transfer in tables::chained(&mut self.transfers, link.last_transfer) {
            self.end_transfer(transfer, Err(failure.clone()));
        }
        self.parked.orphan(id);
        let extra = link.window.extra();
        self.granted = (self.granted.0 - extra.0, self.granted.1 - extra.1);
        for waiter in link.outgoing.waiting {
            self.outputs.push_back(Output::CallDone { waiter, result: Err(Box::new(failure.clone())) });
        }
        for (_, request) in link.requests {
            self.orphan(request);
        }
        for (number, lease) in link.leases {
            self.unlease(id, number, lease);
        }
    }
}
