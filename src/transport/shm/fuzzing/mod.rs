//! Fuzz targets of the shared-memory transport: packets of the socket, and the ring of a hostile peer.

mod packets;
mod ring;

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

pub use packets::packets;
pub(crate) use packets::seeds as seeds_of_packets;
pub use ring::ring;
pub(crate) use ring::seeds as seeds_of_ring;

fn pair() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("two sockets")
}
