//! What the two sides say over the socket: who they are, with the descriptors of their segments; bells; and shared blocks.

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

/// Of the segment's layout and of the packets.
pub(super) const VERSION: u16 = 1;
const MAGIC: [u8; 8] = *b"calm-shm";
/// Longest packet.
const MAX_PACKET: usize = 512;

/// What a side says of itself. Its segment comes with it, and its bell, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ShmHello {
    magic: [u8; 8],
    pub version: u16,
    /// A random word, and where it lies in memory: whoever can read it there can read the rest.
    pub nonce: u64,
    pub nonce_at: u64,
}

impl ShmHello {
    pub(super) fn new(nonce: u64, nonce_at: u64) -> ShmHello {
        ShmHello { magic: MAGIC, version: VERSION, nonce, nonce_at }
    }

    /// Why there can't be a connection with whoever says this, if there can't.
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
    /// Something is in the ring. Of one byte, `process::BELL`.
    Bell,
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

/// What a look at the socket found.
pub(super) enum PacketRead {
    Packet(ControlPacket, Fds),
    Nothing,
    /// The other side has closed it.
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
            // It has closed the socket and left something there unread. What it had said before is still to be had: the system
            // reports this once, and first.
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
    // Any others are closed.
    drop(fds);
    if received.bytes == 0 {
        return Ok(PacketRead::End);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("a descriptor of shared memory could not be taken: too few file descriptors are left"));
    }
    let bytes = bytes.get(..received.bytes).unwrap_or_default();
    match postcard::from_bytes(bytes) {
        Ok(packet) => Ok(PacketRead::Packet(packet, taken)),
        Err(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "it sent a packet that is none")),
    }
}

/// Who may be at the other end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Admission {
    pub uid: u32,
    pub group: Option<u32>,
}

impl Admission {
    /// Why whoever is at the other end may not be, if so.
    pub(super) fn objection(&self, who: Credentials, socket: &OwnedFd) -> Option<String> {
        if who.uid == self.uid {
            return None;
        }
        match self.group {
            Some(group) if who.gid == group || sys::groups(socket.as_fd()).contains(&group) => None,
            Some(group) => {
                Some(format!("it runs as user {}, which is neither this engine's, {}, nor in group {group}", who.uid, self.uid))
            }
            None => Some(format!("it runs as user {}, and this engine as user {}", who.uid, self.uid)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_is_one_byte() {
        assert_eq!(postcard::to_stdvec(&ControlPacket::Bell).unwrap(), super::super::process::DOORBELL);
    }

    #[test]
    fn whoever_is_no_engine_of_this_version_is_told_so() {
        let good = ShmHello::new(1, 2);
        assert_eq!(good.objection(), None);
        assert!(ShmHello { version: 9, ..good }.objection().unwrap().contains("version 9"));
        assert!(ShmHello { magic: *b"GET / HT", ..good }.objection().unwrap().contains("not a calomel engine"));
    }
}
