//! Fuzz target: packets of the socket with arbitrary bytes and descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

use super::super::handshake::{self, ControlPacket, PacketRead, ShmHello};
use super::super::process::Doorbell;
use super::super::segment::SharedSegment;
use super::pair;
use crate::fuzzing::script::{Script, script, written};
use crate::memory::shared;

script! {
    /// A descriptor that comes with a packet.
    enum Descriptor { Segment, Short, Unsealed, EventFd, Socket }
}

script! {
    struct Attachment { count: u8, first: Descriptor, second: Descriptor }
}

/// Receives one packet with arbitrary bytes and descriptors.
pub fn packets(mut bytes: &[u8]) {
    let attachment = Attachment::read(&mut bytes);
    let (here, there) = pair();
    let create = |descriptor: &Descriptor| match descriptor {
        Descriptor::Segment => SharedSegment::create().map(|(fd, _)| fd).ok(),
        Descriptor::Short => shared::create(100, false).map(|(fd, _)| fd).ok(),
        Descriptor::Unsealed => rustix::fs::memfd_create("any", rustix::fs::MemfdFlags::CLOEXEC).ok(),
        Descriptor::EventFd => rustix::event::eventfd(0, EventfdFlags::CLOEXEC).ok(),
        Descriptor::Socket => Some(pair().0),
    };
    let fds: Vec<OwnedFd> = [&attachment.first, &attachment.second]
        .into_iter()
        .cycle()
        .take(usize::from(attachment.count % 6))
        .filter_map(create)
        .collect();
    if !send(&there, bytes, &fds) {
        return;
    }
    match handshake::receive(&here) {
        Ok(PacketRead::Packet(packet, taken)) => {
            assert!(taken.len() <= fds.len().min(2));
            if let ControlPacket::Hello(hello) | ControlPacket::Welcome { hello, .. } = &packet {
                assert!(hello.objection().is_none_or(|objection| !objection.is_empty()));
            }
            let mut taken = taken.into_iter();
            if let Some(first) = taken.next() {
                let found = SharedSegment::attach(first.as_fd());
                assert_eq!(found.is_ok(), attachment.first == Descriptor::Segment);
            }
            if let Some(second) = taken.next() {
                assert_eq!(Doorbell::new(second).is_some(), attachment.second == Descriptor::EventFd);
            }
            // A decoded packet encodes to bytes that decode to the same packet.
            let again = postcard::to_stdvec(&packet).expect("a packet");
            assert_eq!(postcard::from_bytes::<ControlPacket>(&again).ok(), Some(packet));
        }
        Ok(PacketRead::End) => assert!(bytes.is_empty()),
        Ok(PacketRead::Nothing) | Err(_) => {}
    }
}

/// Sends the bytes, which need not be a valid packet.
fn send(socket: &OwnedFd, bytes: &[u8], fds: &[OwnedFd]) -> bool {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(5))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().take(5).map(OwnedFd::as_fd).collect();
    if !borrowed.is_empty() {
        control.push(rustix::net::SendAncillaryMessage::ScmRights(&borrowed));
    }
    let bytes = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &bytes, &mut control, rustix::net::SendFlags::DONTWAIT).is_ok()
}

pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let hello = ShmHello::new(1, 2);
    let seed = |attachment: Attachment, packet: &ControlPacket| {
        [written(&[attachment]), postcard::to_stdvec(packet).expect("a packet")].concat()
    };
    let with = |count| Attachment { count, first: Descriptor::Segment, second: Descriptor::EventFd };
    vec![
        ("hello", seed(with(2), &ControlPacket::Hello(hello))),
        ("welcome", seed(with(1), &ControlPacket::Welcome { hello, reads: true })),
        ("ready", seed(with(0), &ControlPacket::Ready { reads: true })),
        ("refused", seed(with(0), &ControlPacket::Refused { reason: "no".into() })),
        ("block", seed(Attachment { first: Descriptor::Short, ..with(1) }, &ControlPacket::Block { id: 1, len: 100 })),
        ("bell", seed(Attachment { second: Descriptor::Socket, ..with(3) }, &ControlPacket::Doorbell)),
    ]
}
