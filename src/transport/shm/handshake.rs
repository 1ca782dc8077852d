//! The packets of the socket: the handshake with the descriptors of the segments, doorbells, and shared blocks.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::super::Credentials;
use super::sys;

/// The version of the segment's layout and of the packets.
pub(super) const VERSION: u16 = 3;
const MAGIC: [u8; 8] = *b"calm-shm";
/// Longest packet.
const MAX_PACKET: usize = 512;

/// The first packet of each side. Its segment comes with it, and its doorbell, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ShmHello {
    magic: [u8; 8],
    pub version: u16,
    /// A random word, and its address: a peer that can read it there can read the rest of the memory too.
    pub nonce: u64,
    pub nonce_at: u64,
}

impl ShmHello {
    pub(super) fn new(nonce: u64, nonce_at: u64) -> ShmHello {
        ShmHello { magic: MAGIC, version: VERSION, nonce, nonce_at }
    }

    /// Why there can't be a connection with the side that sent this, if so.
    pub(super) fn objection(&self) -> Option<String> {
        if self.magic != MAGIC {
            return Some("it is not a calomel engine".to_owned());
        }
        (self.version != VERSION)
            .then(|| format!("it speaks version {} of the shared-memory transport, and this engine {VERSION}", self.version))
    }
}

/// ```text
///   dials    Hello + segment ─▶   ◀─ Welcome + segment   Ready ─▶        (or ◀─ Refused)
/// ```
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ControlPacket {
    /// The ring has something. Encoded as one byte, `process::DOORBELL`.
    Doorbell,
    Hello(ShmHello),
    /// `reads`: this side can read the other's memory.
    Welcome {
        hello: ShmHello,
        reads: bool,
    },
    Ready {
        reads: bool,
    },
    Refused {
        reason: String,
    },
    /// A shared block, with its descriptor.
    Block {
        id: u64,
        len: u64,
    },
}

pub(super) fn send(socket: &OwnedFd, packet: &ControlPacket, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = postcard::to_stdvec(packet).map_err(io::Error::other)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)?;
    Ok(())
}

/// The descriptors that came with a packet.
pub(super) type Fds = SmallVec<[OwnedFd; 2]>;

/// The outcome of a read from the socket.
pub(super) enum PacketRead {
    Packet(ControlPacket, Fds),
    Nothing,
    /// The peer has closed the socket.
    End,
}

pub(super) fn receive(socket: &OwnedFd) -> io::Result<PacketRead> {
    let mut bytes = [0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) => break received,
            // The peer closed the socket with unread data in it. The kernel reports that once, before what the peer sent, which
            // can still be read.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(PacketRead::Nothing),
            Err(error) => return Err(error.into()),
        }
    };
    let mut fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<OwnedFd>>(),
        _ => Vec::new(),
    });
    let taken: Fds = fds.by_ref().take(2).collect();
    // Dropping the others closes them.
    drop(fds);
    if received.bytes == 0 {
        return Ok(PacketRead::End);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other(
            "can't receive a descriptor of shared memory: the process has too few file descriptors left",
        ));
    }
    let bytes = bytes.get(..received.bytes).unwrap_or_default();
    match postcard::from_bytes(bytes) {
        Ok(packet) => Ok(PacketRead::Packet(packet, taken)),
        Err(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "it sent a packet that can't be decoded")),
    }
}

/// Access control: the users and the group whose processes may connect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Admission {
    pub uid: u32,
    pub group: Option<u32>,
}

impl Admission {
    /// Why a peer with these credentials is refused, if so.
    pub(super) fn objection(&self, peer: Credentials, socket: &OwnedFd) -> Option<String> {
        let (uid, own) = (peer.uid, self.uid);
        if uid == own {
            return None;
        }
        match self.group {
            Some(group) if peer.gid == group || sys::groups(socket.as_fd()).contains(&group) => None,
            Some(group) => Some(format!("it runs as user {uid}, which is neither this engine's, {own}, nor in group {group}")),
            None => Some(format!("it runs as user {uid}, and this engine as user {own}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbell_packet_is_encoded_as_one_byte() {
        assert_eq!(postcard::to_stdvec(&ControlPacket::Doorbell).unwrap(), super::super::process::DOORBELL);
    }

    #[test]
    fn hello_of_another_version_or_magic_is_refused_with_the_reason() {
        let good = ShmHello::new(1, 2);
        assert_eq!(good.objection(), None);
        assert!(ShmHello { version: 9, ..good }.objection().unwrap().contains("version 9"));
        assert!(ShmHello { magic: *b"GET / HT", ..good }.objection().unwrap().contains("not a calomel engine"));
    }
}
