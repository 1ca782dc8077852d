//! The providers of libfabric: their names, and what calomel knows about them.

use std::ffi::CStr;
use std::io;
use std::net::SocketAddr;
use std::sync::OnceLock;

use super::limits::MESSAGE;
use super::sys::{Info, Purpose};
use super::wire::HEADER;
use crate::address::OfiProvider;
use crate::fork::find_once;

/// The provider's name in libfabric. Unit tests have software stand in for the first two of those whose names are opaque.
fn library_name(provider: OfiProvider) -> &'static CStr {
    match provider {
        OfiProvider::Tcp => c"tcp",
        OfiProvider::TcpRxm => c"tcp;ofi_rxm",
        OfiProvider::Verbs => c"verbs;ofi_rxm",
        OfiProvider::Cxi if cfg!(test) => c"tcp",
        OfiProvider::Opx if cfg!(test) => c"tcp;ofi_rxm",
        OfiProvider::Cxi => c"cxi",
        OfiProvider::Opx => c"opx",
        OfiProvider::Efa => c"efa",
    }
}

/// Whether the names of its endpoints are no socket addresses. They are asked for at a TCP port.
pub(super) fn exchanges_names(provider: OfiProvider) -> bool {
    matches!(provider, OfiProvider::Cxi | OfiProvider::Opx | OfiProvider::Efa)
}

/// Whether payloads are copied through calomel's own buffers: where the provider may register memory with a device, to which
/// peers may then have access that outlasts the payload.
pub(super) fn copies_payloads(provider: OfiProvider) -> bool {
    !matches!(provider, OfiProvider::Tcp | OfiProvider::TcpRxm)
}

/// Why RMA is out of the question, whatever a test of the provider shows. `None`: its test decides.
pub(super) fn is_software(provider: OfiProvider) -> Option<&'static str> {
    // In unit tests these also stand in for devices.
    matches!(provider, OfiProvider::Tcp | OfiProvider::TcpRxm).then_some(
        "the provider is software: closing a registration does not stop a transfer that is under way, and messages are as fast",
    )
}

/// Longest payload that is sent in messages. The messages utility cuts what is longer than 16 KiB, and no longer than 128 KiB,
/// into segments; up to version 2.1 it crashes where an endpoint is closed that has received some of them.
pub(super) fn longest_in_messages(provider: OfiProvider) -> usize {
    match provider {
        OfiProvider::TcpRxm | OfiProvider::Verbs => 160 << 10,
        _ => MESSAGE - HEADER - 4,
    }
}

/// Whether its descriptor is waited for. That of the messages utility over sockets is an epoll instance within another one, within
/// another: with those of the engine and of a program's event loop these are more levels than the kernel allows. `opx` has none.
pub(super) fn has_descriptor(provider: OfiProvider) -> bool {
    !matches!(provider, OfiProvider::TcpRxm | OfiProvider::Opx)
}

/// Whether its descriptor may miss an event. That of the messages utility reports no connections.
pub(super) fn may_miss_events(provider: OfiProvider) -> bool {
    matches!(provider, OfiProvider::Verbs | OfiProvider::Cxi)
}

/// An error says why the provider can't be used on this machine. What was found out first is kept.
pub(super) fn available(provider: OfiProvider) -> Result<(), String> {
    static FOUND: [OnceLock<Result<(), String>>; OfiProvider::ALL.len()] = [const { OnceLock::new() }; OfiProvider::ALL.len()];
    let index = OfiProvider::ALL.iter().position(|other| *other == provider).unwrap_or_default();
    find_once(&FOUND[index], || check(provider)).clone()
}

fn check(provider: OfiProvider) -> Result<(), String> {
    let name = library_name(provider);
    let info = Info::of(name, None, Purpose::Messages).map_err(|error| error.to_string())?;
    let version = Info::library_version().unwrap_or_default();
    match info {
        Some(info) if exchanges_names(provider) || !info.opaque_names => Ok(()),
        Some(_) => Err(format!("the endpoints of the provider {name:?} of libfabric {version} have no socket addresses")),
        None => Err(format!(
            "libfabric {version} has no provider {name:?} with reliable datagrams, tags and ordered messages on this machine; \
             it has: {}",
            Info::providers().join(", ")
        )),
    }
}

/// What the provider offers at an address of this host; at its first device where names are opaque, since it does not know IP
/// addresses.
pub(super) fn at(provider: OfiProvider, socket: SocketAddr, purpose: Purpose) -> io::Result<Info> {
    let missing = || {
        let what = format!("the provider {:?} has no device at {}", library_name(provider), socket.ip());
        io::Error::new(io::ErrorKind::AddrNotAvailable, what)
    };
    let exchanges = exchanges_names(provider);
    let mut info = Info::of(library_name(provider), (!exchanges).then_some(socket), purpose)?.ok_or_else(missing)?;
    info.opaque_names |= exchanges;
    Ok(info)
}
