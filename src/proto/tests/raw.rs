//! A peer that the test plays itself, byte by byte: it may say what no engine would.

use super::net::Net;
use super::wire::{self, Frame, HandshakeMessage, Hello, MAGIC, Message, ParsedHandshake};
use super::wires::{NOBODY, Wire, WireEnd, WireItem, WirePacket};
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

/// What an engine of these versions says first, where no key is wanted.
pub fn greet(versions: (u16, u16), hello: &Hello) -> Vec<u8> {
    wire::encode_handshake(versions, &HandshakeMessage::Hello(hello.clone()))
}

/// Bytes of a frame.
pub fn frame(message: &Message<'_>, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::put(&mut bytes, message, body, false);
    bytes
}

impl Net {
    /// Dials a host, and says nothing yet.
    pub fn raw_dial(&mut self, to: usize) -> Raw {
        let wire = self.wires.len();
        self.wires.push(Wire { ends: [WireEnd::new(NOBODY, None), WireEnd::new(to, None)], frozen: false });
        let remote = format!("tcp://10.0.9.9:{}", 1000 + wire).parse().unwrap();
        let link = self.hosts[to].proto.handle_accepted(remote, self.now);
        self.hosts[to].wires.insert(link, (wire, 1));
        self.wires[wire].ends[1].link = Some(link);
        self.pump(to);
        Raw { wire, side: 0 }
    }

    /// Dials a host, and greets it as an engine would.
    pub fn raw_peer(&mut self, to: usize, incarnation: u64) -> Raw {
        let raw = self.raw_dial(to);
        self.say_bytes(raw, greet(wire::VERSIONS, &hello(incarnation)));
        raw
    }

    /// A peer for a host to dial, at which the test answers.
    pub fn played_peer(&mut self, from: usize) -> PeerId {
        let address: crate::Address = "tcp://10.0.9.9:7000".parse().unwrap();
        self.played = Some(address.clone());
        let tag = self.hosts[from].proto.lookup(&address);
        let id = tag.id;
        self.hosts[from].tags.insert(address, tag);
        id
    }

    /// The connection that was dialled last.
    pub fn raw_dialled(&mut self) -> Raw {
        Raw { wire: self.wires.len() - 1, side: 1 }
    }

    /// The test's own end of a connection, if it is one with a host.
    pub fn raw_at(&self, wire: usize) -> Option<Raw> {
        let side = self.wires[wire].ends.iter().position(|end| end.host == NOBODY)?;
        Some(Raw { wire, side })
    }

    /// The host at the other end, and its name for the connection, until it ends.
    pub fn raw_link(&self, raw: Raw) -> Option<(usize, LinkId)> {
        let end = &self.wires[raw.wire].ends[1 - raw.side];
        Some((end.host, end.link?))
    }

    pub fn say_bytes(&mut self, raw: Raw, bytes: Vec<u8>) {
        self.mumble(raw, bytes);
        self.advance(2 * self.settings.delay);
    }

    /// Says something, and lets no time pass: what is said next arrives together with it.
    pub fn mumble(&mut self, raw: Raw, bytes: Vec<u8>) {
        let packet = WirePacket::buffered(bytes, None);
        self.put(raw.wire, raw.side, WireItem::Packet(packet));
    }

    /// All that the host has said on the connection.
    pub fn heard(&self, raw: Raw) -> &[u8] {
        &self.wires[raw.wire].ends[raw.side].heard
    }

    /// How much of what was said the host's end of the connection keeps, since more has to come.
    pub fn kept(&self, raw: Raw) -> usize {
        self.wires[raw.wire].ends[1 - raw.side].receiving.partial.len()
    }

    pub fn say(&mut self, raw: Raw, message: &Message<'_>, body: &[u8]) {
        self.say_bytes(raw, frame(message, body));
    }

    /// Reads what the host says, or does not.
    pub fn read(&mut self, raw: Raw, reads: bool) {
        self.wires[raw.wire].ends[1 - raw.side].unread = !reads;
    }

    pub fn hang_up(&mut self, raw: Raw) {
        self.put(raw.wire, raw.side, WireItem::Closed);
        self.advance(2 * self.settings.delay);
    }

    /// The host has ended the connection.
    pub fn is_shut(&self, raw: Raw) -> bool {
        self.wires[raw.wire].ends[1 - raw.side].link.is_none()
    }

    /// Looks at all that the host has said on the connection, but for its greeting and payloads.
    pub fn each_heard(&self, raw: Raw, mut each: impl FnMut(&Message<'_>)) {
        let bytes = &self.wires[raw.wire].ends[raw.side].heard;
        let mut at = 0;
        while bytes[at..].starts_with(&MAGIC) {
            let ParsedHandshake::Message(_, len) = wire::parse_handshake(&bytes[at..], true) else {
                panic!("the host greets nobody so")
            };
            at += len;
        }
        while at < bytes.len() {
            let Ok(Frame::Whole(message, _, len)) = wire::take(&bytes[at..]) else { panic!("the host says no message") };
            at += len;
            if let Message::Data { len, .. } = message {
                at += len as usize + 1;
            }
            each(&message);
        }
    }

    /// The first that the host has said.
    #[track_caller]
    pub fn greeted(&self, raw: Raw) -> HandshakeMessage {
        match wire::parse_handshake(&self.wires[raw.wire].ends[raw.side].heard, true) {
            ParsedHandshake::Message(said, _) => said,
            other => panic!("{other:?}"),
        }
    }
}
