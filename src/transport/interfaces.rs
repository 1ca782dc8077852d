//! This host's network interfaces: their names and addresses.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

use crate::deferred_log::defer;
use crate::{Address, Error, Result};

/// One address of an interface that is up.
struct InterfaceAddress {
    name: String,
    ip: IpAddr,
    mask: Option<IpAddr>,
}

fn ip_of(address: Option<SockaddrStorage>) -> Option<IpAddr> {
    let address = address?;
    let v4 = || Some(IpAddr::V4(address.as_sockaddr_in()?.ip()));
    v4().or_else(|| Some(IpAddr::V6(address.as_sockaddr_in6()?.ip())))
}

/// The addresses of all interfaces that are up, in the system's order.
fn interfaces() -> io::Result<Vec<InterfaceAddress>> {
    let up = getifaddrs()?.filter(|found| found.flags.contains(InterfaceFlags::IFF_UP));
    Ok(up
        .filter_map(|found| {
            let ip = ip_of(found.address)?;
            Some(InterfaceAddress { name: found.interface_name, ip, mask: ip_of(found.netmask) })
        })
        .collect())
}

/// Link-local IPv6 addresses mean nothing without the number of an interface, which other hosts number differently.
fn is_global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    }
}

/// The address of the interface that `address` names in place of a host, with its port: IPv4, if the interface has such an
/// address. `None` when no interface has that name.
pub(crate) fn by_name(address: &Address) -> Result<Option<SocketAddr>> {
    let Some((name, port)) = address.rest().rsplit_once(':') else { return Ok(None) };
    let port = port.parse().unwrap_or(0);
    let found = interfaces().map_err(|error| Error::io("can't list the network interfaces", error))?;
    let ips = || found.iter().filter(|found| found.name == name).map(|found| found.ip);
    let usable = |ip: &IpAddr| is_global(*ip) || ip.is_loopback();
    let ip = ips().find(IpAddr::is_ipv4).or_else(|| ips().find(usable));
    Ok(ip.map(|ip| SocketAddr::new(ip, port)))
}

/// The socket addresses at which other hosts reach a listener: for a wildcard address those of the interfaces, and only where
/// there are none those of the loopback interface. For any other address, itself.
pub(crate) fn reachable_at(bound: SocketAddr) -> Vec<SocketAddr> {
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    let found = interfaces().unwrap_or_else(|error| {
        defer(move || tracing::warn!(target: "calomel::engine", %error, "can't list the network interfaces"));
        Vec::new()
    });
    // A listener at `[::]` takes IPv4 connections as well.
    let served = |ip: &IpAddr| bound.is_ipv6() || ip.is_ipv4();
    let mut ips: Vec<IpAddr> = found.iter().map(|found| found.ip).filter(|ip| is_global(*ip) && served(ip)).collect();
    // Stable, so the system's order of interfaces stays.
    ips.sort_by_key(|ip| ip.is_ipv6() != bound.is_ipv6());
    if ips.is_empty() {
        let loopback: IpAddr = if bound.is_ipv6() { Ipv6Addr::LOCALHOST.into() } else { std::net::Ipv4Addr::LOCALHOST.into() };
        ips.push(loopback);
    }
    ips.into_iter().map(|ip| SocketAddr::new(ip, bound.port())).collect()
}

/// Which of several addresses of one peer this host reaches without a router: returns whether an address is in a network of
/// one of its interfaces.
pub(crate) fn in_own_networks() -> impl Fn(IpAddr) -> bool {
    let found = interfaces().unwrap_or_default();
    move |ip| found.iter().any(|own| own.mask.is_some_and(|mask| is_global(own.ip) && same_network(own.ip, mask, ip)))
}

fn same_network(own: IpAddr, mask: IpAddr, other: IpAddr) -> bool {
    match (own, mask, other) {
        (IpAddr::V4(own), IpAddr::V4(mask), IpAddr::V4(other)) => own & mask == other & mask,
        (IpAddr::V6(own), IpAddr::V6(mask), IpAddr::V6(other)) => own & mask == other & mask,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_interface_is_found_by_its_name() {
        let at = |text: &str| by_name(&text.parse().unwrap()).unwrap();
        assert_eq!(at("tcp://lo:7000"), Some("127.0.0.1:7000".parse().unwrap()));
        assert_eq!(at("tcp://no-such-interface:7000"), None);
    }

    #[test]
    fn wildcard_is_reachable_at_addresses_and_others_at_themselves() {
        let bound: SocketAddr = "0.0.0.0:7000".parse().unwrap();
        let found = reachable_at(bound);
        assert!(!found.is_empty());
        assert!(found.iter().all(|found| found.is_ipv4() && !found.ip().is_unspecified() && found.port() == 7000), "{found:?}");
        let bound: SocketAddr = "192.0.2.1:7000".parse().unwrap();
        assert_eq!(reachable_at(bound), [bound]);
    }

    #[test]
    fn addresses_of_one_network_share_the_masked_bits() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(same_network(ip("10.1.2.3"), ip("255.255.0.0"), ip("10.1.9.9")));
        assert!(!same_network(ip("10.1.2.3"), ip("255.255.0.0"), ip("10.2.2.3")));
        assert!(same_network(ip("fd00::1"), ip("ffff:ffff::"), ip("fd00::2")));
        assert!(!same_network(ip("fd00::1"), ip("ffff:ffff::"), ip("10.1.2.3")));
    }
}
