//! A peer that the test plays itself, byte by byte: it may send what no engine would.

use super::net::Net;
use super::wire::{self, Frame, HandshakeMessage, Hello, MAGIC, Message, ParsedHandshake};
use super::wires::{TEST_PEER, Wire, WireEnd, WireItem, WirePacket};
use super::{LinkId, PeerId};

/// The test's end of a connection.
#[derive(Clone, Copy)]
pub struct Raw {
    pub wire: usize,
    side: usize,
}

pub fn hello(incarnation: u64) -> Hello {
    Hello { incarnation, max_message: 1 << 20, addresses: Vec::new(), resumption_token: None, checksums: false }
}

/// The first message of an engine with these versions, if no key is required.
pub fn encode_hello(versions: (u16, u16), hello: &Hello) -> Vec<u8> {
    wire::encode_handshake(versions, &HandshakeMessage::Hello(hello.clone()))
}

/// Encodes a frame.
pub fn frame(message: &Message<'_>, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::put(&mut bytes, message, body, false);
    bytes
}

impl Net {
    /// Dials a host, and sends nothing yet.
    pub fn raw_dial(&mut self, to: usize) -> Raw {
        let remote = format!("tcp://10.0.9.9:{}", 1000 + self.wires.len());
        self.raw_dial_from(to, &remote)
    }

    /// The same, from this address, as the transport sees it.
    pub fn raw_dial_from(&mut self, to: usize, remote: &str) -> Raw {
        let wire = self.wires.len();
        self.wires.push(Wire { ends: [WireEnd::new(TEST_PEER, None), WireEnd::new(to, None)], frozen: false });
        let link = self.hosts[to].proto.handle_accepted(remote.parse().unwrap(), self.now);
        self.hosts[to].wires.insert(link, (wire, 1));
        self.wires[wire].ends[1].link = Some(link);
        self.pump(to);
        Raw { wire, side: 0 }
    }

    /// Dials a host, and sends its hello as an engine would.
    pub fn raw_peer(&mut self, to: usize, incarnation: u64) -> Raw {
        let raw = self.raw_dial(to);
        self.send_bytes(raw, encode_hello(wire::VERSIONS, &hello(incarnation)));
        raw
    }

    /// A peer that the test plays, for a host to dial.
    pub fn test_peer(&mut self, from: usize) -> PeerId {
        let address: crate::Address = "tcp://10.0.9.9:7000".parse().unwrap();
        self.test_address = Some(address.clone());
        let tag = self.hosts[from].proto.lookup(&address);
        let id = tag.id;
        self.hosts[from].tags.insert(address, tag);
        id
    }

    /// The test's end of the connection that was dialled last.
    pub fn raw_dialled(&mut self) -> Raw {
        Raw { wire: self.wires.len() - 1, side: 1 }
    }

    /// The test's end of a connection, if it has one.
    pub fn raw_at(&self, wire: usize) -> Option<Raw> {
        let side = self.wires[wire].ends.iter().position(|end| end.host == TEST_PEER)?;
        Some(Raw { wire, side })
    }

    /// The host at the other end, and its link, until the link ends.
    pub fn raw_link(&self, raw: Raw) -> Option<(usize, LinkId)> {
        let end = &self.wires[raw.wire].ends[1 - raw.side];
        Some((end.host, end.link?))
    }

    pub fn send_bytes(&mut self, raw: Raw, bytes: Vec<u8>) {
        self.queue_bytes(raw, bytes);
        self.advance(2 * self.settings.delay);
    }

    /// Queues bytes without letting time pass: what is sent next arrives together with them.
    pub fn queue_bytes(&mut self, raw: Raw, bytes: Vec<u8>) {
        let packet = WirePacket::buffered(bytes, None);
        self.put(raw.wire, raw.side, WireItem::Packet(packet));
    }

    /// All bytes that the host has sent on the connection.
    pub fn received(&self, raw: Raw) -> &[u8] {
        &self.wires[raw.wire].ends[raw.side].received
    }

    /// How many bytes of an incomplete frame the host's end of the connection buffers.
    pub fn buffered(&self, raw: Raw) -> usize {
        self.wires[raw.wire].ends[1 - raw.side].receiving.partial.len()
    }

    pub fn send_message(&mut self, raw: Raw, message: &Message<'_>, body: &[u8]) {
        self.send_bytes(raw, frame(message, body));
    }

    /// Starts or stops reading what the host sends.
    pub fn read(&mut self, raw: Raw, reads: bool) {
        self.wires[raw.wire].ends[1 - raw.side].unread = !reads;
    }

    pub fn disconnect(&mut self, raw: Raw) {
        self.put(raw.wire, raw.side, WireItem::Closed);
        self.advance(2 * self.settings.delay);
    }

    /// The host has ended the connection.
    pub fn is_shut(&self, raw: Raw) -> bool {
        self.wires[raw.wire].ends[1 - raw.side].link.is_none()
    }

    /// Visits all messages that the host has sent on the connection, without the handshake and payloads.
    pub fn for_each_received(&self, raw: Raw, mut visit: impl FnMut(&Message<'_>)) {
        let bytes = &self.wires[raw.wire].ends[raw.side].received;
        let mut at = 0;
        while bytes[at..].starts_with(&MAGIC) {
            let ParsedHandshake::Message(_, len) = wire::parse_handshake(&bytes[at..], true) else {
                panic!("the host sent a malformed handshake message")
            };
            at += len;
        }
        while at < bytes.len() {
            let Ok(Frame::Whole(message, _, len)) = wire::take(&bytes[at..]) else { panic!("the host sent a malformed frame") };
            at += len;
            if let Message::Data { len, .. } = message {
                at += len as usize + 1;
            }
            visit(&message);
        }
    }

    /// The first handshake message that the host has sent.
    #[track_caller]
    pub fn first_handshake_message(&self, raw: Raw) -> HandshakeMessage {
        match wire::parse_handshake(&self.wires[raw.wire].ends[raw.side].received, true) {
            ParsedHandshake::Message(message, _) => message,
            other => panic!("{other:?}"),
        }
    }
}
