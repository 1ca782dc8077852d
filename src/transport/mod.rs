//! The transports, which move bytes between engines, and the traits that they implement.
//!
//! A transport does not know calls. It carries bytes in order over links, and payloads straight from memory to memory: the
//! receiver names the target of a payload through the [`Sink`]. No function blocks; a send that finds no room continues later,
//! and its end is reported. Any thread may call links, [`TransportDriver::devices`] and [`TransportDriver::expose`]; only the driver calls
//! the rest.

mod accept_retry;
#[cfg(test)]
#[path = "../../tests/unit/fault.rs"]
pub(crate) mod fault;
pub(crate) mod interfaces;
mod loopback;
#[cfg(feature = "ofi")]
mod ofi;
mod shm;
mod tcp;
#[cfg(all(test, not(few_tests)))]
#[path = "../../tests/unit/transport.rs"]
mod tests;
#[cfg(feature = "verbs")]
mod verbs;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

use crate::memory::{Region, Slice};
pub(crate) use crate::payload::{Consumed, Injected, PartialFrame, PayloadStatus, ReceiveTarget, RemoteKeys};
use crate::{Address, Error, Result, Transport};
pub(crate) use loopback::Loopback;
#[cfg(feature = "ofi")]
pub(crate) use ofi::Ofi;
#[cfg(any(all(test, not(few_tests)), fuzzing))]
pub(crate) use shm::fuzzing;
pub(crate) use shm::{KernelCopyPolicy, Shm, ShmOptions};
#[cfg(any(all(test, not(few_tests)), fuzzing))]
pub(crate) use tcp::fuzzing as tcp_fuzzing;
pub(crate) use tcp::{Tcp, TcpOptions};
#[cfg(feature = "verbs")]
pub(crate) use verbs::Verbs;

/// Identifies a link to the transport and its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinkKey(pub u64);

/// The properties of a transport.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities {
    /// The scheme of the addresses that it serves.
    pub scheme: crate::Transport,
}

/// The outcome of a send.
pub(crate) enum Sent {
    /// All is sent; returns the buffer.
    All(Vec<u8>),
    /// The bytes are sent, and the payload is on loan: [`Sink::returned`] follows when the peer has read it.
    Lent(Vec<u8>),
    /// There is no room now: the driver sends the rest, and [`Sink::sent`] reports it. Until then no other send may begin.
    Later,
    /// As `Later`, but the sender has had its turn, and there may be room: only a poll goes on, so the driver must not sleep before.
    AtNextPoll,
    /// The link is broken: [`Sink::closed`] follows, after what has arrived is read.
    Failed(io::Error),
}

/// The identity of a process, as the kernel reports it. `pid` is 0 when the process is in a namespace that can't be seen from
/// here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Credentials {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// One end of a connection.
pub(crate) trait Link: Send + Sync {
    /// Sends the bytes, and the payload behind them. The payload is read when it is sent: if its memory is gone by then, the
    /// other side gets [`PayloadStatus::SourceGone`].
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent;
    /// The next send is followed by another one at once, with which it may leave; but it must leave if none follows after all.
    fn more_follows(&self) {}
    /// Whether short payloads leave together then.
    fn gathers(&self) -> bool {
        false
    }
    /// Whether each send takes a system call.
    fn takes_system_calls(&self) -> bool {
        false
    }
    /// Whether [`Link::inject`] ever sends anything.
    fn injects(&self) -> bool {
        false
    }
    /// Sends a few bytes if that takes neither a wait nor a system call: the caller holds a lock. Only while no other send is
    /// under way. Where the peer sleeps, [`Link::wake_peer`] must follow.
    fn inject(&self, _bytes: &[u8]) -> Injected {
        Injected::No
    }
    /// Wakes a peer that sleeps.
    fn wake_peer(&self) {}
    /// The scheme of the transport that carries it.
    fn scheme(&self) -> Transport;
    /// True if both ends are certainly on this host. Called once the link is connected.
    fn is_local(&self) -> bool {
        false
    }
    /// The process at the other end, where the kernel reports it.
    fn process(&self) -> Option<Credentials> {
        None
    }
    /// From now on a checksum follows each payload, on transports where bytes can be corrupted in transit.
    fn cover_payloads(&self) {}
    /// While bytes are in flight: how many the peer's kernel has acknowledged. 0 when all are acknowledged, or when that is
    /// unknown.
    fn acknowledged(&self) -> u64;
    /// Begins an RMA operation: a device copies `local` from or to a peer's memory, at `offset` of what `keys` name.
    /// [`Sink::rma_done`] follows, unless the link is closed before. False when no device can do it. The memory is in use until
    /// that report, or until the region is fenced. The operation may end before the device begins: so the transport checks
    /// [`Slice::is_over`] first.
    fn begin_rma(&self, _operation: u64, _pull: bool, _local: &Slice, _keys: &RemoteKeys, _offset: u64) -> bool {
        false
    }
    /// Cancels an RMA operation: what has not begun does not begin. A report may not follow.
    fn end_rma(&self, _operation: u64) {}
    /// Registers memory for RMA by the peer of this link alone, until the region's gate is closed. `None` where no device can
    /// enforce that.
    fn expose(&self, _region: &Region, _access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        Ok(None)
    }
    /// The peer's verified certificate (DER), once the link is connected.
    #[cfg(feature = "tls")]
    fn certificate(&self) -> Option<Arc<[u8]>> {
        None
    }
    /// Ends the connection; the sink gets no further reports of it.
    fn close(&self);
}

/// The RMA access that peers get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceAccess {
    pub read: bool,
    pub write: bool,
    /// The memory is constant: neither peers nor this engine write it.
    pub constant: bool,
}

pub(crate) trait TransportDriver: Send + Sync {
    fn capabilities(&self) -> Capabilities;
    /// Whether it serves addresses of this scheme.
    fn serves(&self, scheme: Transport) -> bool {
        self.capabilities().scheme == scheme
    }
    /// Fails if addresses of this scheme can't be used on this machine.
    fn available(&self, _scheme: Transport) -> Result<()> {
        Ok(())
    }
    /// Resolves host names; the result can be dialled.
    fn resolve(&self, address: &Address) -> Result<Address>;
    /// Listens, and returns the address with what was left to the transport, such as a port.
    fn listen(&self, address: &Address) -> Result<Address>;
    /// Addresses of this transport that stand for `address` of another transport, in the order in which to try them; to dial,
    /// or to listen on.
    fn local_addresses(&self, _address: &Address, _dialled: bool) -> Vec<Address> {
        Vec::new()
    }
    /// How often the set of RMA devices has changed: keys created before a change may lack a device.
    fn devices(&self) -> u32 {
        0
    }
    /// Registers memory for RMA by any peer that has the keys, until the region's gate is closed. `None` where no device can do
    /// that.
    fn expose(&self, _region: &Region, _access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        Ok(None)
    }
    /// Accepts no new links from now on.
    fn stop_listening(&self);
    /// Begins to connect. `attach` gets the link before anything is reported of it; [`Sink::connected`] or [`Sink::closed`]
    /// follows.
    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()>;
    /// Polls for events, without blocking; false when there were none.
    fn poll(&self, sink: &mut dyn Sink) -> bool;
    /// The reactor reports an event for a token of the transport.
    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink);
    /// When the transport has to be polled, even if no event arrives.
    fn next_alarm(&self) -> Option<Instant> {
        None
    }
    /// The driver is about to block in the reactor; from now on the transport wakes it. False when there is something to poll
    /// first.
    fn park(&self) -> bool;
    /// The driver does not block any more.
    fn unpark(&self);
    /// From now until it is parked, the driver polls in place of a thread that blocks in the reactor: the transport need not wake
    /// that for what the driver finds by itself.
    fn mute(&self) {}
    /// True when the calling thread holds a lock that `poll` takes.
    #[cfg(test)]
    fn is_locked(&self) -> bool {
        false
    }
}

/// Receives the events of links.
pub(crate) trait Sink {
    /// A peer has dialled; returns the key of the new link.
    fn accepted(&mut self, remote: Address) -> LinkKey;
    /// The accepted link itself, before anything else is reported of it.
    fn attach(&mut self, key: LinkKey, link: Arc<dyn Link>);
    fn connected(&mut self, key: LinkKey);
    /// Sets the longest payload that should be sent on this link.
    fn chunk(&mut self, key: LinkKey, len: usize);
    /// Bytes have arrived. `None`: the link was closed because of them.
    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>>;
    /// The oldest payload that is not reported yet has arrived, or failed.
    fn payload_done(&mut self, key: LinkKey, status: PayloadStatus);
    /// Part of a payload has arrived.
    fn heard(&mut self, key: LinkKey);
    /// The pending send is complete; its payload is on loan if `lent`.
    fn sent(&mut self, key: LinkKey, buffer: Vec<u8>, lent: bool);
    /// The loan of a payload has ended: its memory is not in use any more.
    fn returned(&mut self, key: LinkKey);
    /// From now on [`Link::begin_rma`] may be called.
    #[cfg_attr(not(any(test, feature = "verbs", feature = "ofi")), allow(dead_code, reason = "for transports that have devices"))]
    fn rma_capable(&mut self, key: LinkKey);
    /// An RMA operation has ended. On an error, any part of it may be done, and no further part will be.
    #[cfg_attr(not(any(test, feature = "verbs", feature = "ofi")), allow(dead_code, reason = "for transports that have devices"))]
    fn rma_done(&mut self, key: LinkKey, operation: u64, result: io::Result<()>);
    /// The link is lost, or could not be established.
    fn closed(&mut self, key: LinkKey, cause: io::Error);
}

/// What a transport needs from the driver's event loop.
pub(crate) struct Reactor {
    pub registry: mio::Registry,
    pub waker: Arc<mio::Waker>,
    /// Tokens from here on belong to the transport.
    pub first_token: usize,
}

/// Resolves an address to a socket address. Of those of a host name, an IPv4 one is preferred: servers that listen on one
/// family only mostly listen on IPv4.
fn resolve(address: &Address) -> Result<SocketAddr> {
    if let Some(socket) = address.socket() {
        return Ok(socket);
    }
    let unresolved = |source: Option<io::Error>| Error::Unreachable {
        peer: address.clone(),
        reason: source.as_ref().map_or_else(|| "the host has no address".to_owned(), ToString::to_string),
        // Not retryable: see `Error::is_retryable`.
        cause: Some(Arc::new(match source {
            Some(source) => io::Error::new(io::ErrorKind::InvalidInput, source),
            None => io::ErrorKind::InvalidInput.into(),
        })),
    };
    let found: Vec<SocketAddr> = address.rest().to_socket_addrs().map_err(|error| unresolved(Some(error)))?.collect();
    found.iter().find(|socket| socket.is_ipv4()).or(found.first()).copied().ok_or_else(|| unresolved(None))
}

/// As [`resolve`], for a listener: the host may also be the name of an interface.
fn resolve_to_listen(address: &Address) -> Result<SocketAddr> {
    match address.socket() {
        Some(socket) => Ok(socket),
        None => match interfaces::by_name(address)? {
            Some(socket) => Ok(socket),
            None => resolve(address),
        },
    }
}

/// The source address of packets from this host to an address. Only the route is looked up; no packet is sent.
fn source_towards(address: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(address)?;
    Ok(socket.local_addr()?.ip())
}

fn closed_by_peer() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "it closed the connection")
}

/// The peer speaks no common version of the protocol; `low` and `high` are those that it speaks.
#[derive(Debug, thiserror::Error)]
#[error("it speaks versions {low} to {high} of the protocol")]
pub(crate) struct OtherVersion {
    pub low: u16,
    pub high: u16,
}

/// One side rejects the other's credentials, for this reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
#[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "for transports that authenticate peers"))]
pub(crate) struct Unauthorized(pub String);
