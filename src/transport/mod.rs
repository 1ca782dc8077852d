//! Ways to move bytes between engines.
//!
//! A transport knows nothing of calls. It carries bytes in order over links, and payloads straight from one memory to
//! another: who receives says, through the [`Sink`], where a payload belongs. Everything is non-blocking; a send that finds
//! no room is finished later, and reported. Links are called by any thread, as are [`Transport::devices`] and
//! [`Transport::expose`]; the rest by whoever drives progress, one at a time.

mod accept_retry;
#[cfg(test)]
pub(crate) mod fault;
mod loopback;
mod partial_frame;
mod shm;
mod tcp;
#[cfg(test)]
mod tests;
#[cfg(feature = "verbs")]
mod verbs;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;

use crate::memory::{Region, Slice};
pub(crate) use crate::payload::{Consumed, PayloadStatus, ReceiveTarget, RemoteKeys};
use crate::{Address, Error, Result, Scheme};
pub(crate) use loopback::Loopback;
#[cfg(any(test, fuzzing))]
pub(crate) use shm::fuzzing;
pub(crate) use shm::{KernelCopyPolicy, Shm, ShmOptions};
#[cfg(any(test, fuzzing))]
pub(crate) use tcp::fuzzing as tcp_fuzzing;
pub(crate) use tcp::{Tcp, TcpOptions};
#[cfg(feature = "verbs")]
pub(crate) use verbs::Verbs;

/// A lock that another thread holds is free within this.
#[cfg(test)]
const IN_OTHER_HANDS: std::time::Duration = std::time::Duration::from_secs(5);

/// Names a link between a transport and its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinkKey(pub u64);

/// What a transport is and can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities {
    /// The addresses that it serves.
    pub scheme: crate::Scheme,
}

/// How a send ended.
pub(crate) enum Sent {
    /// All of it is out; the buffer comes back.
    All(Vec<u8>),
    /// The bytes are out, and the peer may read the payload where it is: [`Sink::returned`] follows when it has.
    Lent(Vec<u8>),
    /// No room now: the rest follows by itself, and [`Sink::sent`] reports it. Nothing else may be sent until then.
    Later,
    /// The link is broken: [`Sink::closed`] follows, when what has arrived before that is taken.
    Failed(io::Error),
}

/// Who a process is, as the system knows it. The number of the process is 0 when it can't be seen from here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Credentials {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// One end of a connection.
pub(crate) trait Link: Send + Sync {
    /// Sends the bytes, and the payload behind them. The payload is read when it is sent: if its memory is gone by then, the
    /// other side learns [`Landed::SourceGone`].
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent;
    /// By which means it is carried.
    fn scheme(&self) -> Scheme;
    /// Both ends are on this host, for certain. Once it is connected.
    fn is_local(&self) -> bool {
        false
    }
    /// The process at the other end, where the system vouches for it.
    fn process(&self) -> Option<Credentials> {
        None
    }
    /// From now on a checksum goes with each payload, where that is of use.
    fn cover_payloads(&self) {}
    /// While some of the bytes that were sent are on their way: how many the other side's system has. 0 when all are there,
    /// and where it can't be known.
    fn acknowledged(&self) -> u64;
    /// Begins to move the bytes of `local` from or to a peer's memory, at `offset` of what `keys` reach, without the peer's
    /// doing: [`Sink::moved`] follows, unless the link is closed before. False when it can't be done so. The memory is in use
    /// until that report, or until the region is fenced. The operation may be over by then: whoever has lent the memory looks at
    /// [`Slice::is_over`] before anything moves.
    fn begin_rma(&self, _operation: u64, _pull: bool, _local: &Slice, _keys: &RemoteKeys, _offset: u64) -> bool {
        false
    }
    /// The operation is given up: what of it has not begun does not begin. There may be no report any more.
    fn end_rma(&self, _operation: u64) {}
    /// Lets the peer at the other end, and nobody else, reach the memory by these keys, until its gate is closed. `None` where
    /// no device could see to that.
    fn expose(&self, _region: &Region, _access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        Ok(None)
    }
    /// The certificate that the peer has shown, and proved to be its own: the encoded bytes (DER). From when it is connected.
    #[cfg(feature = "tls")]
    fn certificate(&self) -> Option<Arc<[u8]>> {
        None
    }
    /// Ends the connection; nothing is reported of it any more.
    fn close(&self);
}

/// What peers may do with memory by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceAccess {
    pub read: bool,
    pub write: bool,
    /// Nobody writes it, this engine neither.
    pub constant: bool,
}

pub(crate) trait Transport: Send + Sync {
    fn capabilities(&self) -> Capabilities;
    /// Whether it can be used on this machine.
    fn available(&self) -> Result<()> {
        Ok(())
    }
    /// The address as it is to be dialled: host names are resolved.
    fn resolve(&self, address: &Address) -> Result<Address>;
    /// Listens; the address comes back with what was left to choose.
    fn listen(&self, address: &Address) -> Result<Address>;
    /// Addresses of this transport's own by which engines at `address`, another's, can be reached too, in the order in which
    /// to try them; to dial, or to listen at.
    fn local_addresses(&self, _address: &Address, _dialled: bool) -> Vec<Address> {
        Vec::new()
    }
    /// How often the devices by which peers reach memory have changed: keys made before that may lack one.
    fn devices(&self) -> u32 {
        0
    }
    /// Lets peers that get the keys reach the memory, until its gate is closed. `None` where no device could do that.
    fn expose(&self, _region: &Region, _access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        Ok(None)
    }
    /// Takes no new links from now on.
    fn stop_listening(&self);
    /// Begins to connect. `attach` gets the link before anything is reported of it; [`Sink::connected`] or [`Sink::closed`]
    /// follows.
    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()>;
    /// Looks for what has happened, without blocking; false when nothing has.
    fn poll(&self, sink: &mut dyn Sink) -> bool;
    /// The reactor has something for the transport's token.
    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink);
    /// The thread that drives is about to block in the reactor, which will be woken from now on. False when there is
    /// something to poll first.
    fn park(&self) -> bool;
    /// It does not block any more.
    fn unpark(&self);
    /// True when the calling thread holds one of the locks that it drives with.
    #[cfg(test)]
    fn is_locked(&self) -> bool {
        false
    }
}

/// Who is told what happens on links.
pub(crate) trait Sink {
    /// Somebody has dialled: names the link.
    fn accepted(&mut self, remote: Address) -> LinkKey;
    /// The accepted link itself, before anything else is reported of it.
    fn attach(&mut self, key: LinkKey, link: Arc<dyn Link>);
    fn connected(&mut self, key: LinkKey);
    /// How long payloads on this link should be at most.
    fn chunk(&mut self, key: LinkKey, len: usize);
    /// Bytes have arrived. `None`: the link was closed because of them.
    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>>;
    /// The first of the payloads that were asked for, and not reported yet, is in its place.
    fn payload_done(&mut self, key: LinkKey, landed: PayloadStatus);
    /// Part of a payload has arrived.
    fn heard(&mut self, key: LinkKey);
    /// The send that was left for later is done, up to the payload where that is `lent`.
    fn sent(&mut self, key: LinkKey, buffer: Vec<u8>, lent: bool);
    /// A payload that was lent has been read, or given up: its memory is not used any more.
    fn returned(&mut self, key: LinkKey);
    /// From now on [`Link::begin_move`] may be asked for.
    #[cfg_attr(not(any(test, feature = "verbs")), allow(dead_code, reason = "for transports that have devices"))]
    fn rma_capable(&mut self, key: LinkKey);
    /// A move has ended. On an error, any part of it may have been done, and nothing more will be.
    #[cfg_attr(not(any(test, feature = "verbs")), allow(dead_code, reason = "for transports that have devices"))]
    fn rma_done(&mut self, key: LinkKey, operation: u64, result: io::Result<()>);
    /// The link is lost, or could not be made.
    fn closed(&mut self, key: LinkKey, cause: io::Error);
}

/// What a transport needs of whoever drives it.
pub(crate) struct Reactor {
    pub registry: mio::Registry,
    pub waker: Arc<mio::Waker>,
    /// Tokens from here on are the transport's.
    pub first_token: usize,
}

/// The socket address meant. Of the several that a host name may have, an IPv4 one is preferred: servers that listen on
/// one family only mostly listen on that.
fn resolve(address: &Address) -> Result<SocketAddr> {
    if let Some(socket) = address.socket() {
        return Ok(socket);
    }
    let unknown = |source: Option<io::Error>| Error::Unreachable {
        peer: address.clone(),
        reason: source.as_ref().map_or_else(|| "the host has no address".to_owned(), ToString::to_string),
        source: source.map(Arc::new),
    };
    let found: Vec<SocketAddr> = address.rest().to_socket_addrs().map_err(|error| unknown(Some(error)))?.collect();
    found.iter().find(|socket| socket.is_ipv4()).or(found.first()).copied().ok_or_else(|| unknown(None))
}

/// Where packets to an address come from, if they come from here. Nothing is sent: only the way is looked up.
fn source_towards(address: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(address)?;
    Ok(socket.local_addr()?.ip())
}

/// The other side speaks other versions of the protocol: the lowest and the highest.
#[derive(Debug, thiserror::Error)]
#[error("it speaks versions {low} to {high} of the protocol")]
pub(crate) struct OtherVersion {
    pub low: u16,
    pub high: u16,
}

/// One side does not accept who the other is, and why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
#[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "for transports that know who is there"))]
pub(crate) struct Unauthorized(pub String);
