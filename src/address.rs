//! Addresses of engines: `tcp://host:port`, `shm://name`, `verbs://ip:port`, `ofi+PROVIDER://ip:port`, `loop://name`.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The transport of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Transport {
    /// `tcp://host:port`: a TCP socket.
    Tcp,
    /// `shm://name`: shared memory, on the same host.
    Shm,
    /// `verbs://ip:port`: an RDMA device.
    Verbs,
    /// `ofi+PROVIDER://ip:port`: a fabric, by way of libfabric.
    Ofi(OfiProvider),
    /// `loop://name`: within this process.
    Loop,
    /// `nowhere://`: the address of an engine that does not listen, which can't be dialled.
    Nowhere,
}

/// A provider of libfabric, which reaches one kind of network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum OfiProvider {
    /// `ofi+tcp://`: TCP sockets (`tcp`).
    Tcp,
    /// `ofi+tcp+rxm://`: TCP sockets, by way of the messages utility (`tcp;ofi_rxm`).
    TcpRxm,
    /// `ofi+verbs://`: InfiniBand and RoCE (`verbs;ofi_rxm`).
    Verbs,
    /// `ofi+cxi://`: Slingshot.
    Cxi,
    /// `ofi+opx://`: Omni-Path.
    Opx,
    /// `ofi+efa://`: Elastic Fabric Adapter.
    Efa,
}

impl OfiProvider {
    pub(crate) const ALL: [OfiProvider; 6] =
        [OfiProvider::Tcp, OfiProvider::TcpRxm, OfiProvider::Verbs, OfiProvider::Cxi, OfiProvider::Opx, OfiProvider::Efa];

    /// The scheme of its addresses.
    fn scheme(self) -> &'static str {
        match self {
            OfiProvider::Tcp => "ofi+tcp",
            OfiProvider::TcpRxm => "ofi+tcp+rxm",
            OfiProvider::Verbs => "ofi+verbs",
            OfiProvider::Cxi => "ofi+cxi",
            OfiProvider::Opx => "ofi+opx",
            OfiProvider::Efa => "ofi+efa",
        }
    }
}

impl fmt::Display for OfiProvider {
    /// As in an address, behind `ofi+`: `tcp+rxm`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.scheme().trim_start_matches("ofi+"))
    }
}

pub(crate) const UNKNOWN_SCHEME: &str =
    "the scheme is none of tcp, shm, verbs, loop, ofi+tcp, ofi+tcp+rxm, ofi+verbs, ofi+cxi, ofi+opx, ofi+efa";

impl fmt::Display for Transport {
    /// As in an address: `tcp`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
            Transport::Verbs => "verbs",
            Transport::Ofi(provider) => provider.scheme(),
            Transport::Loop => "loop",
            Transport::Nowhere => "nowhere",
        }
    }

    /// Accepts `tcp` as well as `tcp://`.
    pub(crate) fn parse(text: &str) -> Option<Transport> {
        match text.strip_suffix("://").unwrap_or(text) {
            "tcp" => Some(Transport::Tcp),
            "shm" => Some(Transport::Shm),
            "verbs" => Some(Transport::Verbs),
            "loop" => Some(Transport::Loop),
            "nowhere" => Some(Transport::Nowhere),
            scheme => OfiProvider::ALL.into_iter().find(|provider| provider.scheme() == scheme).map(Transport::Ofi),
        }
    }
}

/// As its name, such as `tcp`, in all formats.
impl Serialize for Transport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Transport {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Transport, D::Error> {
        let name = Cow::<str>::deserialize(deserializer)?;
        let unknown = || de::Error::custom(format_args!("`{name}`: {UNKNOWN_SCHEME}"));
        Transport::parse(&name).filter(|transport| *transport != Transport::Nowhere).ok_or_else(unknown)
    }
}

/// The address of an engine, such as `tcp://127.0.0.1:7000`. Cheap to clone.
///
/// Addresses are compared as text: `tcp://localhost:1` and `tcp://127.0.0.1:1` are not equal.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    scheme: Transport,
    rest: Arc<str>,
}

/// Longest text of an address, in bytes: host names have at most 253, and texts from peers need a limit.
pub(crate) const MAX_LEN: usize = 300;

impl Address {
    /// An error says why the text is not an address.
    pub(crate) fn parse(text: &str) -> Result<Address, &'static str> {
        if text.len() > MAX_LEN {
            return Err("longer than 300 bytes");
        }
        let (scheme, rest) = text.split_once("://").ok_or("no `://` in it")?;
        let scheme = Transport::parse(scheme).ok_or(UNKNOWN_SCHEME)?;
        match scheme {
            Transport::Nowhere if rest.is_empty() => {}
            Transport::Nowhere => return Err("`nowhere://` has no name"),
            Transport::Tcp | Transport::Verbs | Transport::Ofi(_) => {
                let (host, port) = rest.rsplit_once(':').ok_or("no `:port` at its end")?;
                port.parse::<u16>().map_err(|_| "the port is not a number of 0 to 65535")?;
                let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
                match bare {
                    Some(v6) if v6.parse::<Ipv6Addr>().is_ok() || rest.parse::<SocketAddr>().is_ok() => {}
                    Some(_) => return Err("no IPv6 address between the brackets"),
                    None if host.is_empty() => return Err("the host is empty"),
                    None if !host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) => {
                        return Err("the host holds characters that no host name has");
                    }
                    None => {}
                }
            }
            Transport::Shm | Transport::Loop => {
                if !rest.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
                    return Err("the name holds characters other than letters, digits, `-`, `.` and `_`");
                }
            }
        }
        Ok(Address { scheme, rest: rest.into() })
    }

    /// What a listener takes where only a transport is named: any free port on all interfaces, or a name that the engine
    /// chooses. `None` for `nowhere://`.
    pub(crate) fn any_of(scheme: Transport) -> Option<Address> {
        match scheme {
            Transport::Tcp | Transport::Verbs | Transport::Ofi(_) => Some(Address { scheme, rest: "0.0.0.0:0".into() }),
            Transport::Shm | Transport::Loop => Some(Address { scheme, rest: "".into() }),
            Transport::Nowhere => None,
        }
    }

    /// The transport of the address.
    pub fn scheme(&self) -> Transport {
        self.scheme
    }

    /// The text behind `://`.
    pub(crate) fn rest(&self) -> &str {
        &self.rest
    }

    pub(crate) fn tcp(address: SocketAddr) -> Address {
        Address { scheme: Transport::Tcp, rest: address.to_string().into() }
    }

    #[cfg(feature = "verbs")]
    pub(crate) fn verbs(address: SocketAddr) -> Address {
        Address { scheme: Transport::Verbs, rest: address.to_string().into() }
    }

    #[cfg(feature = "ofi")]
    pub(crate) fn ofi(provider: OfiProvider, address: SocketAddr) -> Address {
        Address { scheme: Transport::Ofi(provider), rest: address.to_string().into() }
    }

    pub(crate) fn loopback(name: &str) -> Address {
        Address { scheme: Transport::Loop, rest: name.into() }
    }

    pub(crate) fn shm(name: &str) -> Address {
        Address { scheme: Transport::Shm, rest: name.into() }
    }

    /// The address of an engine that does not listen; it can't be dialled.
    pub(crate) fn nowhere() -> Address {
        Address { scheme: Transport::Nowhere, rest: "".into() }
    }

    /// The socket address; `None` for a host name, and for `shm` and `loop`.
    pub(crate) fn socket(&self) -> Option<SocketAddr> {
        match self.scheme {
            Transport::Tcp | Transport::Verbs | Transport::Ofi(_) => self.rest.parse().ok(),
            Transport::Shm | Transport::Loop | Transport::Nowhere => None,
        }
    }

    /// Whether an engine can be dialled at this address: not at `nowhere://`, a wildcard address, or port 0.
    pub fn is_dialable(&self) -> bool {
        let unspecified = self.socket().is_some_and(|socket| socket.ip().is_unspecified());
        match self.scheme {
            Transport::Tcp | Transport::Verbs | Transport::Ofi(_) => !unspecified && !self.rest.ends_with(":0"),
            Transport::Shm | Transport::Loop => !self.rest.is_empty(),
            Transport::Nowhere => false,
        }
    }

    /// The same host at the port of another address, where this one has port 0.
    pub(crate) fn with_port_of(&self, other: &Address) -> Address {
        let port = other.socket().map(|socket| socket.port());
        match (self.rest.rsplit_once(':'), port) {
            (Some((host, "0")), Some(port)) => Address { scheme: self.scheme, rest: format!("{host}:{port}").into() },
            _ => self.clone(),
        }
    }

    /// True for a host that has to be resolved, which may take long.
    pub(crate) fn is_host_name(&self) -> bool {
        matches!(self.scheme, Transport::Tcp | Transport::Verbs | Transport::Ofi(_)) && self.socket().is_none()
    }

    /// True when only this host reaches the address.
    pub(crate) fn is_loopback(&self) -> bool {
        self.socket().is_some_and(|socket| socket.ip().is_loopback())
    }

    /// Whether this is a wildcard address, and `other` has its scheme, IP version and port: on the same host, both are the same
    /// listener.
    pub(crate) fn is_everywhere(&self, other: &Address) -> bool {
        match (self.socket(), other.socket()) {
            (Some(own), Some(other_socket)) => {
                let same = self.scheme == other.scheme && own.is_ipv4() == other_socket.is_ipv4();
                same && own.ip().is_unspecified() && own.port() == other_socket.port()
            }
            _ => false,
        }
    }

    /// The address as others can dial it: the wildcard address of an engine that listens on all interfaces is replaced by the
    /// address that its connection comes from.
    pub(crate) fn seen_from(&self, remote: &Address) -> Address {
        let Some(own) = self.socket().filter(|own| own.ip().is_unspecified()) else { return self.clone() };
        let ip = match remote.socket() {
            Some(seen) => seen.ip(),
            // The engine is on this host.
            None if remote.scheme == Transport::Shm && own.is_ipv4() => Ipv4Addr::LOCALHOST.into(),
            None if remote.scheme == Transport::Shm => Ipv6Addr::LOCALHOST.into(),
            None => return self.clone(),
        };
        Address { scheme: self.scheme, rest: SocketAddr::new(ip, own.port()).to_string().into() }
    }
}

/// IP addresses of this host.
#[derive(Default)]
pub(crate) struct Interfaces(BTreeSet<IpAddr>);

impl Interfaces {
    /// Those of addresses at which an engine of this host is reached.
    pub(crate) fn of(addresses: impl IntoIterator<Item = Address>) -> Interfaces {
        Interfaces(addresses.into_iter().filter_map(|address| Some(address.socket()?.ip())).collect())
    }

    pub(crate) fn add(&mut self, others: &Interfaces) {
        self.0.extend(&others.0);
    }

    /// Whether an engine at this address is on this host.
    pub(crate) fn have(&self, address: &Address) -> bool {
        address.socket().is_some_and(|socket| socket.ip().is_loopback() || self.0.contains(&socket.ip()))
    }

    /// The addresses at which a listener of this host is reached that has a wildcard address. None for other addresses.
    pub(crate) fn each_of(&self, wildcard: &Address) -> Vec<Address> {
        let Some(socket) = wildcard.socket().filter(|socket| socket.ip().is_unspecified()) else { return Vec::new() };
        let same_version = self.0.iter().filter(|ip| ip.is_ipv4() == socket.is_ipv4());
        let at = |ip: &IpAddr| SocketAddr::new(*ip, socket.port()).to_string().into();
        same_version.map(|ip| Address { scheme: wildcard.scheme, rest: at(ip) }).collect()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.name(), self.rest)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_address_prints_as_it_was_parsed() {
        for text in [
            "tcp://127.0.0.1:0",
            "tcp://[::1]:7000",
            "tcp://host-1.example:65535",
            "shm://",
            "loop://a_b-c.d",
            "verbs://10.0.0.1:1",
            "ofi+tcp://10.0.0.1:7000",
            "ofi+tcp+rxm://[::1]:0",
            "ofi+verbs://ib0.example:1",
            "ofi+cxi://10.0.0.1:1",
            "ofi+opx://10.0.0.1:1",
            "ofi+efa://10.0.0.1:1",
            "nowhere://",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn invalid_address_is_rejected_with_the_reason() {
        for (text, part) in [
            ("127.0.0.1:1", "no `://`"),
            ("udp://127.0.0.1:1", "scheme"),
            ("ofi://127.0.0.1:1", "ofi+tcp"),
            ("ofi+gni://127.0.0.1:1", "ofi+cxi"),
            ("ofi+tcp://127.0.0.1", "`:port`"),
            ("tcp://127.0.0.1", "`:port`"),
            ("nowhere://x", "no name"),
            ("tcp", "no `://`"),
            ("tcp://127.0.0.1:70000", "port"),
            ("tcp://:1", "host is empty"),
            ("tcp://[zz]:1", "brackets"),
            ("tcp://a b:1", "characters"),
            ("loop://a/b", "characters"),
            (&format!("loop://{}", "a".repeat(400)), "300"),
        ] {
            let message = text.parse::<Address>().unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn wildcard_address_is_replaced_by_the_remote_one() {
        let own: Address = "tcp://0.0.0.0:7000".parse().unwrap();
        let seen: Address = "tcp://192.0.2.7:53000".parse().unwrap();
        assert_eq!(own.seen_from(&seen).to_string(), "tcp://192.0.2.7:7000");
        assert_eq!(own.seen_from(&Address::shm("pid-1-2")).to_string(), "tcp://127.0.0.1:7000");
        assert_eq!(own.seen_from(&Address::loopback("")), own);
    }
}
