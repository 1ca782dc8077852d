//! Where an engine listens, and the addresses by which it is known.

use std::sync::Arc;

use crate::sync::{Mutex, RwLock};

use super::origin::Origin;
use crate::address::Interfaces;
use crate::progress::Core;
use crate::proto::MAX_ADDRESSES;
use crate::transport::interfaces::reachable_at;
use crate::{Address, Error, Result, Transport};

/// An engine's listeners. More can be added at any time.
pub(crate) struct Listeners {
    bound: Mutex<BoundAddresses>,
    /// The addresses that the program wants to be used, in place of those of the listeners.
    advertised: Vec<Address>,
    /// Replaced as a whole, since bulks keep the one of their exposure.
    origin: RwLock<Stored>,
}

#[derive(Default)]
struct BoundAddresses {
    /// As the transports have bound them.
    addresses: Vec<Address>,
    /// How many more are being bound, without the lock.
    pending: usize,
}

/// The newest origin.
struct Stored {
    origin: Arc<Origin>,
    /// Of how many listeners it knows.
    listeners: usize,
}

impl Listeners {
    pub(super) fn new(core: &Arc<Core>, incarnation: u64, advertised: Vec<Address>) -> Listeners {
        let origin = Arc::new(Origin::own(Arc::downgrade(core), incarnation, Vec::new()));
        Listeners { bound: Mutex::default(), advertised, origin: RwLock::new(Stored { origin, listeners: 0 }) }
    }

    pub(super) fn origin(&self) -> Arc<Origin> {
        self.origin.read().origin.clone()
    }

    /// Where the engine listens, as the transports have bound the addresses.
    pub(super) fn bound(&self) -> Vec<Address> {
        self.bound.lock().addresses.clone()
    }

    /// Listens, and returns the address at which others reach the listener.
    pub(super) fn listen(&self, core: &Core, address: &Address) -> Result<Address> {
        {
            let mut bound = self.bound.lock();
            if bound.addresses.len() + bound.pending == MAX_ADDRESSES {
                let reason = format!("an engine listens at {MAX_ADDRESSES} addresses at most");
                return Err(Error::Unsupported { what: format!("listening at {address}"), reason });
            }
            bound.pending += 1;
        }
        // Names are resolved and sockets are made without a lock.
        let listened = core.listen(address);
        let all = {
            let mut bound = self.bound.lock();
            bound.pending -= 1;
            bound.addresses.extend(listened.iter().cloned());
            bound.addresses.clone()
        };
        let listener = listened?;
        let interfaces = Interfaces::of(all.iter().flat_map(reachable));
        core.exec(|proto| proto.set_addresses(self.bound.lock().addresses.clone(), &interfaces));
        let known = self.known_by(&all);
        let mut stored = self.origin.write();
        // Another thread may have stored more of them meanwhile.
        if stored.listeners < all.len() {
            let Origin { core, incarnation, .. } = &*stored.origin;
            let origin = Arc::new(Origin::own(core.clone(), *incarnation, known));
            *stored = Stored { origin, listeners: all.len() };
        }
        drop(stored);
        let own = advertised(&self.advertised, &listener).or_else(|| reachable(&listener).into_iter().next());
        Ok(own.unwrap_or(listener))
    }

    /// The addresses that others get, of all listeners.
    fn known_by(&self, bound: &[Address]) -> Vec<Address> {
        let mut addresses = Vec::new();
        if self.advertised.is_empty() {
            addresses.extend(bound.iter().flat_map(reachable));
            // Behind the addresses of the interfaces, in case that the peer sees another one.
            let wildcard = bound.iter().find(|bound| !bound.is_dialable());
            addresses.truncate(MAX_ADDRESSES - usize::from(wildcard.is_some()));
            addresses.extend(wildcard.cloned());
        } else {
            addresses.extend(bound.iter().filter_map(|bound| advertised(&self.advertised, bound)));
            let fixed = self.advertised.iter().filter(|address| address.is_dialable()).cloned();
            addresses.extend(fixed.collect::<Vec<Address>>());
        }
        let mut seen = Vec::new();
        addresses.retain(|address| {
            !seen.contains(address) && {
                seen.push(address.clone());
                true
            }
        });
        addresses.truncate(MAX_ADDRESSES);
        addresses
    }
}

/// The addresses at which other hosts reach a listener.
fn reachable(bound: &Address) -> Vec<Address> {
    match (bound.scheme(), bound.socket()) {
        (Transport::Tcp, Some(socket)) => reachable_at(socket).into_iter().map(Address::tcp).collect(),
        // Not each interface has a device.
        _ => vec![bound.clone()],
    }
}

/// What the program advertises for a listener: its address of that transport. Port 0 stands for the listener's.
fn advertised(advertised: &[Address], bound: &Address) -> Option<Address> {
    let address = advertised.iter().find(|address| address.scheme() == bound.scheme())?;
    Some(address.with_port_of(bound))
}
