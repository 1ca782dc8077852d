//! Packets of a socket that hold anything, with any descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

use super::super::handshake::{self, ControlPacket, PacketRead, ShmHello};
use super::super::process::Doorbell;
use super::super::segment::SharedSegment;
use super::pair;
use crate::fuzzing::script::{Script, script, written};
use crate::memory::shared;

script! {
    /// What comes with a packet.
    enum Thing { Segment, Short, Unsealed, Counter, Socket }
}

script! {
    struct Parcel { things: u8, first: Thing, second: Thing }
}

/// Packets of a socket: any bytes, with any descriptors.
pub fn packets(mut bytes: &[u8]) {
    let parcel = Parcel::read(&mut bytes);
    let (here, there) = pair();
    let thing = |thing: &Thing| match thing {
        Thing::Segment => SharedSegment::create().map(|(fd, _)| fd).ok(),
        Thing::Short => shared::create(100, false).map(|(fd, _)| fd).ok(),
        Thing::Unsealed => rustix::fs::memfd_create("any", rustix::fs::MemfdFlags::CLOEXEC).ok(),
        Thing::Counter => rustix::event::eventfd(0, EventfdFlags::CLOEXEC).ok(),
        Thing::Socket => Some(pair().0),
    };
    let fds: Vec<OwnedFd> =
        [&parcel.first, &parcel.second].into_iter().cycle().take(usize::from(parcel.things % 6)).filter_map(thing).collect();
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
                assert_eq!(found.is_ok(), parcel.first == Thing::Segment);
            }
            if let Some(second) = taken.next() {
                assert_eq!(Doorbell::new(second).is_some(), parcel.second == Thing::Counter);
            }
            // What is understood is said in the same way.
            let again = postcard::to_stdvec(&packet).expect("a packet");
            assert_eq!(postcard::from_bytes::<ControlPacket>(&again).ok(), Some(packet));
        }
        Ok(PacketRead::End) => assert!(bytes.is_empty()),
        Ok(PacketRead::Nothing) | Err(_) => {}
    }
}

/// Bytes that are no packet may be sent too.
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
    let seed =
        |parcel: Parcel, packet: &ControlPacket| [written(&[parcel]), postcard::to_stdvec(packet).expect("a packet")].concat();
    let with = |things| Parcel { things, first: Thing::Segment, second: Thing::Counter };
    vec![
        ("hello", seed(with(2), &ControlPacket::Hello(hello))),
        ("welcome", seed(with(1), &ControlPacket::Welcome { hello, reads: true })),
        ("ready", seed(with(0), &ControlPacket::Ready { reads: true })),
        ("refused", seed(with(0), &ControlPacket::Refused { reason: "no".into() })),
        ("block", seed(Parcel { first: Thing::Short, ..with(1) }, &ControlPacket::Block { id: 1, len: 100 })),
        ("bell", seed(Parcel { second: Thing::Socket, ..with(3) }, &ControlPacket::Bell)),
    ]
}
