//! The handshake on a new link: finds out which engine the peer is, and whether it is accepted.

use std::time::Instant;

use rand::Rng as _;

use super::keys::{self, AuthState, Digest, NONCE_LEN, Nonce, Role};
use super::refusals::Cause;
use super::wire::{self, HandshakeMessage, Hello, ParsedHandshake, Refusal};
use super::{Env, Failure, LinkId, PeerId, Proto, broken};

/// `dialled`: this side dialled the link.
fn role(dialled: bool) -> Role {
    if dialled { Role::Dialling } else { Role::Dialled }
}

impl<E: Env> Proto<E> {
    /// Sends the first piece of the side that dials.
    pub(super) fn begin_handshake(&mut self, id: LinkId) {
        if self.config.key.is_some() { self.send_challenge(id) } else { self.send_hello(id, self.links[id].peer) }
    }

    /// `peer`: the peer to which this engine shows that they have met.
    fn hello(&self, id: LinkId, peer: Option<PeerId>) -> Vec<u8> {
        let token = peer.and_then(|peer| self.peers.get(peer)?.resumption_token);
        let hello = Hello {
            incarnation: self.incarnation,
            max_message: self.config.max_message as u64,
            addresses: self.addresses.clone(),
            resumption_token: token,
            checksums: self.config.checksums,
        };
        let lane = self.links[id].main.is_some();
        let message = if lane { HandshakeMessage::Lane(hello) } else { HandshakeMessage::Hello(hello) };
        wire::encode_handshake(wire::VERSIONS, &message)
    }

    fn send_hello(&mut self, id: LinkId, peer: Option<PeerId>) {
        let hello = self.hello(id, peer);
        self.send_handshake(id, hello);
    }

    fn send_challenge(&mut self, id: LinkId) {
        let mut nonce = [0; NONCE_LEN];
        self.random.fill_bytes(&mut nonce);
        let challenge = wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Challenge(nonce));
        let link = &mut self.links[id];
        if link.dialled {
            self.dialling.insert(nonce, id);
        }
        link.auth = Some(Box::new(AuthState { ours: challenge.clone(), theirs: None, shown: None, proved: None }));
        self.send_handshake(id, challenge);
    }

    /// Sends the proof that this side has the key, and the hello.
    fn send_proof(&mut self, id: LinkId, peer: Option<PeerId>) {
        let hello = self.hello(id, peer);
        let digest = keys::digest(&hello);
        let link = &mut self.links[id];
        let by = role(link.dialled);
        let (Some(key), Some(auth)) = (&self.config.key, &mut link.auth) else { return };
        let Some(transcript) = auth.transcript(by, &digest, link.dialled) else { return };
        let proof = key.prove(by, &transcript);
        auth.shown = Some(digest);
        let mut bytes = wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Proof(proof, digest));
        bytes.extend_from_slice(&hello);
        self.send_handshake(id, bytes);
    }

    /// Queues a piece of the handshake.
    fn send_handshake(&mut self, id: LinkId, bytes: Vec<u8>) {
        self.links[id].handshake.extend_from_slice(&bytes);
        self.mark_ready(id);
    }

    /// Sends the side that dialled the reason of the refusal, and ends the link.
    fn refuse_link(&mut self, id: LinkId, refusal: Refusal) {
        let link = &mut self.links[id];
        link.handshake.extend_from_slice(&wire::encode_handshake(wire::VERSIONS, &HandshakeMessage::Refusal(refusal)));
        link.closing = true;
        self.touch_closing(id);
    }

    /// Refuses the peer: one that dialled is sent the reason; of one that was dialled, the user gets it.
    fn refuse_handshake(&mut self, id: LinkId, refusal: Refusal, failure: Failure) -> Result<(), Failure> {
        if self.links[id].dialled {
            return Err(failure);
        }
        if refusal == Refusal::Version {
            self.note_other_version(id);
        } else {
            self.refused(id, || "connection".to_owned(), Cause::Key);
        }
        self.refuse_link(id, refusal);
        Ok(())
    }

    /// Handles one piece of the handshake. Returns its length, or `None` if it is incomplete.
    pub(super) fn handle_handshake(&mut self, id: LinkId, bytes: &[u8], now: Instant) -> Result<Option<usize>, Failure> {
        let link = &self.links[id];
        let proved = self.config.key.is_none() || link.auth.as_ref().is_some_and(|auth| auth.proved.is_some());
        let (message, len) = match wire::parse_handshake(bytes, proved) {
            ParsedHandshake::Incomplete => return Ok(None),
            ParsedHandshake::Damaged => return Err(Failure::Checksum),
            ParsedHandshake::Foreign => {
                let start = bytes[..bytes.len().min(16)].escape_ascii();
                let reason = match bytes {
                    // A TLS alert, or the start of a TLS handshake.
                    [0x15 | 0x16, 3, ..] => "it speaks TLS, and this engine does not".to_owned(),
                    _ => format!("what listens there is not a calomel engine: its first bytes are \"{start}\""),
                };
                let source = std::io::Error::new(std::io::ErrorKind::InvalidData, reason.clone());
                return Err(Failure::Unreachable { reason, source: Some(std::sync::Arc::new(source)) });
            }
            // The refusal, like each piece, has the versions that this engine supports.
            ParsedHandshake::Version(low, high) => {
                self.refuse_handshake(id, Refusal::Version, Failure::Version { theirs: (low, high) })?;
                return Ok(Some(bytes.len()));
            }
            ParsedHandshake::Unproved => {
                self.refuse_handshake(id, Refusal::KeyWanted, unauthorized("it has not proved that it has the key"))?;
                return Ok(Some(bytes.len()));
            }
            ParsedHandshake::Message(message, len) => (message, len),
        };
        match message {
            HandshakeMessage::Hello(hello) => self.handle_hello_message(id, hello, false, &bytes[..len], now)?,
            HandshakeMessage::Lane(hello) => self.handle_hello_message(id, hello, true, &bytes[..len], now)?,
            HandshakeMessage::Challenge(nonce) => self.handle_challenge(id, &nonce, &bytes[..len])?,
            HandshakeMessage::Proof(proof, digest) => self.handle_proof(id, &proof, digest)?,
            HandshakeMessage::Refusal(refusal) => return Err(refused(refusal)),
        }
        Ok(Some(len))
    }

    /// Drops the authentication state of a link.
    pub(super) fn end_auth(&mut self, id: LinkId) {
        if let Some(auth) = self.links.get_mut(id).and_then(|link| link.auth.take()) {
            self.dialling.remove(auth.nonce());
        }
    }

    /// Whether a challenge on link `id` is one that this engine sent itself, on a link that it dials. The answer would prove
    /// that this engine has the key, not that the peer does. That is right where the engine dials itself; elsewhere a third
    /// party relays the challenge.
    ///
    /// The link on which the challenge was sent still exists and is not open; otherwise no answer to it would count.
    fn is_reflected(&self, id: LinkId, nonce: &Nonce) -> bool {
        self.dialling.get(nonce).is_some_and(|dialled| self.links[id].dialled || !self.leads_here(*dialled))
    }

    /// Whether a link that this engine dials can lead only to this engine itself.
    fn leads_here(&self, id: LinkId) -> bool {
        let Some(link) = self.links.get(id) else { return false };
        self.addresses.iter().any(|own| *own == link.remote || link.local && own.is_everywhere(&link.remote))
    }

    fn handle_challenge(&mut self, id: LinkId, nonce: &Nonce, challenge: &[u8]) -> Result<(), Failure> {
        if self.config.key.is_none() {
            return self.refuse_handshake(id, Refusal::NoKey, broken("a challenge to an engine without a key".into()));
        }
        if self.is_reflected(id, nonce) {
            return self.refuse_handshake(id, Refusal::Reflected, unauthorized(REFLECTED));
        }
        let dialled = self.links[id].dialled;
        if !dialled && self.links[id].auth.is_none() {
            self.send_challenge(id);
        }
        let Some(auth) = self.links[id].auth.as_mut().filter(|auth| auth.theirs.is_none()) else {
            return Err(broken("a second challenge".into()));
        };
        auth.theirs = Some(challenge.to_vec());
        if dialled {
            self.send_proof(id, self.links[id].peer);
        }
        Ok(())
    }

    fn handle_proof(&mut self, id: LinkId, proof: &Digest, digest: Digest) -> Result<(), Failure> {
        let Some(key) = &self.config.key else { return Err(broken("a proof to an engine without a key".into())) };
        let link = &mut self.links[id];
        let dialled = link.dialled;
        let Some(auth) = link.auth.as_mut().filter(|auth| auth.theirs.is_some() && auth.proved.is_none()) else {
            return Err(broken("a proof before the challenges, or a second one".into()));
        };
        let is_proof = auth
            .transcript(role(!dialled), &digest, dialled)
            .is_some_and(|transcript| key.is_proof(role(!dialled), &transcript, proof));
        if !is_proof {
            return self.refuse_handshake(id, Refusal::OtherKey, unauthorized("its key is another"));
        }
        auth.proved = Some(digest);
        Ok(())
    }

    fn handle_hello_message(&mut self, id: LinkId, hello: Hello, lane: bool, piece: &[u8], now: Instant) -> Result<(), Failure> {
        let link = &self.links[id];
        if let Some(auth) = &link.auth
            && auth.proved != Some(keys::digest(piece))
        {
            return self.refuse_handshake(id, Refusal::OtherKey, unauthorized("its hello is not the one that its proof covers"));
        }
        if !link.dialled && self.is_one_too_many(&hello, lane) {
            self.refuse_link(id, Refusal::Busy);
            return Ok(());
        }
        let link = &self.links[id];
        match (link.dialled, link.auth.is_some()) {
            (true, _) => {}
            (false, true) => self.send_proof(id, self.proved(&hello)),
            (false, false) => self.send_hello(id, self.proved(&hello)),
        }
        self.end_auth(id);
        self.handle_hello(id, hello, lane, now)
    }
}

const REFLECTED: &str = "it relays this engine's own challenge back to it: with a key, an engine can reach itself only at the \
                         addresses at which it listens";

fn unauthorized(reason: &str) -> Failure {
    Failure::Unauthorized { reason: reason.to_owned() }
}

/// What a refusal means to the side that dialled.
fn refused(refusal: Refusal) -> Failure {
    match refusal {
        Refusal::KeyWanted => unauthorized("it wants a key, and this engine has none"),
        Refusal::OtherKey => unauthorized("its key is another"),
        Refusal::Reflected => unauthorized(REFLECTED),
        Refusal::NoKey => unauthorized("it has no key, and this engine wants one"),
        Refusal::Busy => Failure::Unreachable { reason: "it accepts no more connections at the moment".to_owned(), source: None },
        // Versions in common are never refused.
        Refusal::Version => broken("it refuses a version that it supports".into()),
    }
}
