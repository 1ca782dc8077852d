//! Whether payloads may go by RMA: a test of the provider, whose outcome holds for the process.
//!
//! Not all providers enforce what a registration says, and some leave memory open after it is closed, for a cache. So it is tried
//! out on a little memory of this process: what is allowed must succeed, what is not must fail and change nothing.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use mio::Token;

use super::limits::{PART, PARTS, SELF_TEST};
use super::provider;
use super::station::Station;
use super::sys::{Completion, Label, PeerAddress, Posted, Purpose, RegisteredRegion, RemoteExtent, RemotePlace, RemoteRights};
use crate::address::OfiProvider;
use crate::deferred_log::defer;
use crate::memory::{Region, Slice};
use crate::sync::Mutex;

/// What a provider enforces, of one that peers may reach memory through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RmaLimits {
    /// Memory that is registered for writing alone can't be read.
    pub write_only: bool,
}

impl RmaLimits {
    /// Whether memory can be registered with these rights, and no others.
    pub(super) fn allow(self, rights: RemoteRights) -> bool {
        rights.read || rights.write && self.write_only
    }
}

/// What the provider's test has shown; `None`: bulk data goes in messages. The first calls for a provider run the test, at this
/// address of this host, which takes a part of a second, and log the outcome. `guarded`: the engine has a pre-shared key.
pub(super) fn rma_limits(provider: OfiProvider, at: SocketAddr, guarded: bool) -> Option<RmaLimits> {
    static FOUND: [OnceLock<Option<RmaLimits>>; OfiProvider::ALL.len()] = [const { OnceLock::new() }; OfiProvider::ALL.len()];
    let found = &FOUND[OfiProvider::ALL.iter().position(|other| *other == provider).unwrap_or_default()];
    let software = provider::is_software(provider);
    // A peer without that key can connect to the device, too, and try keys of memory.
    if software.is_none() && guarded {
        return log(provider, Err("peers must have a pre-shared key, for which a device does not ask".to_owned()));
    }
    // Memory belongs to one device, and which one that would be is not known.
    if software.is_none() && at.ip().is_unspecified() && !provider::exchanges_names(provider) {
        return log(provider, Err("the engine listens at all addresses, not at that of a device".to_owned()));
    }
    if let Some(limits) = found.get() {
        return *limits;
    }
    // Not within `get_or_init`: a child that is forked meanwhile would wait for ever.
    let outcome = match software {
        Some(reason) => Err(reason.to_owned()),
        // Of the software that stands in for devices in unit tests, this counts as one that has passed.
        None if cfg!(test) && provider == OfiProvider::Cxi => Ok(RmaLimits { write_only: true }),
        None => run(provider, at),
    };
    match found.set(outcome.as_ref().ok().copied()) {
        Ok(()) => log(provider, outcome),
        // Another thread was sooner: its result counts.
        Err(_) => found.get().copied().flatten(),
    }
}

pub(super) fn log(provider: OfiProvider, outcome: Result<RmaLimits, String>) -> Option<RmaLimits> {
    let (rma, reason) = match &outcome {
        Ok(RmaLimits { write_only: true }) => (true, "a test of the provider has passed".to_owned()),
        Ok(_) => (true, "a test of the provider has passed, but memory that may only be written could be read".to_owned()),
        Err(reason) => (false, reason.clone()),
    };
    defer(move || tracing::info!(target: "calomel::ofi", %provider, rma, reason, "how bulk data goes"));
    outcome.ok()
}

/// Length of the memory that is tried out, in most cases.
const LEN: usize = 4096;

/// How often a registration is closed while it is written, if all is written before.
const ATTEMPTS: usize = 16;

const LABEL: Label = Label::Rma { link: 0, number: 0 };

/// What is done with memory.
#[derive(Clone, Copy)]
struct Access {
    pull: bool,
    place: RemotePlace,
    fill: u8,
    len: usize,
}

/// Runs the test. An error says what was found.
pub(super) fn run(provider: OfiProvider, at: SocketAddr) -> Result<RmaLimits, String> {
    let failed = |error: io::Error| format!("a test of the provider has failed: {error}");
    let test = SelfTest::new(provider, at).map_err(failed)?;
    test.run().map_err(failed)?
}

struct SelfTest {
    provider: OfiProvider,
    at: SocketAddr,
    poll: mio::Poll,
    target: Station,
    until: Instant,
    /// Freed after the target is closed: a provider may write what was revoked.
    memory: Mutex<Vec<Arc<Region>>>,
}

/// The rights that are tried out.
const BOTH: RemoteRights = RemoteRights { read: true, write: true };
const READ_ONLY: RemoteRights = RemoteRights { read: true, write: false };
const WRITE_ONLY: RemoteRights = RemoteRights { read: false, write: true };

impl SelfTest {
    fn new(provider: OfiProvider, at: SocketAddr) -> io::Result<SelfTest> {
        let at = SocketAddr::new(at.ip(), 0);
        let poll = mio::Poll::new()?;
        let info = provider::at(provider, at, Purpose::RmaTarget)?;
        let target = Station::open(provider, info, at, poll.registry(), Token(0))?;
        Ok(SelfTest { provider, at, poll, target, until: Instant::now() + SELF_TEST, memory: Mutex::default() })
    }

    fn run(&self) -> io::Result<Result<RmaLimits, String>> {
        let refused = |what: &str| Ok(Err(what.to_owned()));
        let (whole, readable, writable) =
            (self.register(BOTH, LEN)?, self.register(READ_ONLY, LEN)?, self.register(WRITE_ONLY, LEN)?);
        let [place, of_readable, of_writable] = [&whole, &readable, &writable].map(Tried::place);
        // One that has access, and will lose it.
        let (reader, writer) = (self.initiator()?, self.initiator()?);
        let write = Access { pull: false, place, fill: 1, len: LEN };
        let read = Access { pull: true, ..write };
        if self.access(&writer, write)? != Some(vec![1; LEN]) || !whole.holds(1) {
            return refused("a test of the provider has failed: memory that may be written can't be");
        }
        if self.access(&reader, read)? != Some(vec![1; LEN]) {
            return refused("a test of the provider has failed: memory that may be read can't be");
        }
        // By initiators of their own, since a refusal may cost the connection. That one could be made is seen before.
        let refuses = |access: Access| -> io::Result<bool> {
            let initiator = self.initiator()?;
            if self.access(&initiator, read)?.is_none() {
                return Err(io::Error::other("memory that may be read can't be"));
            }
            Ok(self.access(&initiator, access)?.is_none())
        };
        let beyond = Access { place: RemotePlace { address: place.address + 8, ..place }, ..read };
        if !refuses(beyond)? {
            return refused("it does not refuse access beyond the bounds of memory");
        }
        let forbidden = Access { place: of_readable, fill: 2, ..write };
        if !refuses(forbidden)? || !readable.holds(0) {
            return refused("it does not refuse to write memory that may only be read");
        }
        let hidden = Access { place: of_writable, ..read };
        let write_only = refuses(hidden)?;
        whole.registered.close()?;
        if self.access(&writer, Access { fill: 3, ..write })?.is_some() || !whole.holds(1) {
            return refused("closing a registration does not revoke it: memory can be written afterwards");
        }
        if self.access(&reader, read)?.is_some() {
            return refused("closing a registration does not revoke it: memory can be read afterwards");
        }
        if !self.revokes_while_written()? {
            return refused("closing a registration does not stop a transfer that is under way");
        }
        let unchanged = whole.holds(1) && readable.holds(0) && writable.holds(0);
        Ok(if unchanged { Ok(RmaLimits { write_only }) } else { Err("memory changes that may not be written".to_owned()) })
    }

    /// Closes a registration while it is written, and tells whether that stops the writing. An error where all is written before.
    fn revokes_while_written(&self) -> io::Result<bool> {
        for _ in 0..ATTEMPTS {
            let (at_once, later) = self.close_while_written()?;
            if at_once != later {
                return Ok(false);
            }
            if at_once != [1; PARTS] {
                return Ok(true);
            }
        }
        Err(io::Error::other("transfers are over before a registration can be closed"))
    }

    /// Writes parts, and closes their registration as soon as the first byte is there. Returns the last byte of each part, as it
    /// was right after that, and when what was under way has ended, by a refusal or because it was written before.
    fn close_while_written(&self) -> io::Result<([u8; PARTS], [u8; PARTS])> {
        let (station, target) = self.initiator()?;
        let part = PART.min(station.domain.info.longest);
        let Tried { region, registered } = &self.register(BOTH, PARTS * part)?;
        let RemoteExtent { address, key, .. } = registered.extents()[0];
        let memory = Slice::whole(region);
        let byte = |at: usize| {
            let mut byte = [0];
            memory.part(at, 1).map(|part| part.read(&mut byte));
            byte[0]
        };
        let last_bytes = || std::array::from_fn(|index| byte((index + 1) * part - 1));
        let mut waiting = vec![vec![1; part]; PARTS];
        let (mut at, mut under_way) = (address, 0);
        while byte(0) == 0 {
            if let Some(buffer) = waiting.pop() {
                match station.endpoint.access(false, target, RemotePlace { address: at, key }, buffer, LABEL)? {
                    Posted::Busy(buffer) => waiting.push(buffer),
                    _ => (at, under_way) = (at + part as u64, under_way + 1),
                }
            }
            under_way -= self.progress(&station)?.len();
        }
        registered.close()?;
        let at_once = last_bytes();
        while under_way > 0 {
            under_way -= self.progress(&station)?.len();
        }
        Ok((at_once, last_bytes()))
    }

    /// Memory of zeroes.
    fn register(&self, rights: RemoteRights, len: usize) -> io::Result<Tried> {
        let region = Region::from_vec(vec![0; len]);
        self.memory.lock().push(region.clone());
        let registered = RegisteredRegion::of(&region, &self.target.endpoint, 1, rights);
        let registered = registered.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))?;
        Ok(Tried { region, registered })
    }

    fn initiator(&self) -> io::Result<(Station, PeerAddress)> {
        let info = provider::at(self.provider, self.at, Purpose::RmaInitiator)?;
        let station = Station::open(self.provider, info, self.at, self.poll.registry(), Token(0))?;
        let target = station.av.insert(self.target.endpoint.name())?;
        Ok((station, target))
    }

    /// Returns the bytes that were read or written; `None` where that was refused.
    fn access(&self, (station, target): &(Station, PeerAddress), access: Access) -> io::Result<Option<Vec<u8>>> {
        let Access { pull, place, fill, len } = access;
        let mut buffer = Some(vec![fill; len]);
        loop {
            if let Some(bytes) = buffer.take() {
                match station.endpoint.access(pull, *target, place, bytes, LABEL) {
                    Ok(Posted::Begun) => {}
                    Ok(Posted::Busy(bytes)) => buffer = Some(bytes),
                    // Also where it is no key of this domain, so that it is not even tried.
                    Ok(_) | Err(_) => return Ok(None),
                }
            }
            if let Some(Completion { buffer: bytes, result, .. }) = self.progress(station)?.pop_front() {
                return Ok(result.is_ok().then(|| bytes.unwrap_or_default()));
            }
        }
    }

    /// What has completed at an initiator. An error when the test takes too long.
    fn progress(&self, station: &Station) -> io::Result<VecDeque<Completion>> {
        if Instant::now() >= self.until {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("it is not done after {SELF_TEST:?}")));
        }
        // Connections are made by either side.
        self.target.take_completions()?;
        std::thread::yield_now();
        station.take_completions()
    }
}

/// Memory that is tried out.
struct Tried {
    region: Arc<Region>,
    registered: Arc<RegisteredRegion>,
}

impl Tried {
    fn place(&self) -> RemotePlace {
        let RemoteExtent { address, key, .. } = self.registered.extents()[0];
        RemotePlace { address, key }
    }

    /// Whether all of it is of this value.
    fn holds(&self, value: u8) -> bool {
        let mut bytes = vec![!value; LEN];
        Slice::whole(&self.region).read(&mut bytes) && bytes.iter().all(|byte| *byte == value)
    }
}

impl Drop for Tried {
    fn drop(&mut self) {
        if self.registered.close().is_err() {
            // The provider may still access it.
            self.registered.abandon();
            std::mem::forget(self.region.clone());
        }
    }
}

impl Drop for SelfTest {
    /// Ends all access to the memory.
    fn drop(&mut self) {
        self.target.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_that_a_provider_does_not_enforce_are_not_given() {
        for write_only in [true, false] {
            let limits = RmaLimits { write_only };
            let nothing = RemoteRights { read: false, write: false };
            let allowed = [BOTH, READ_ONLY, WRITE_ONLY, nothing].map(|rights| limits.allow(rights));
            assert_eq!(allowed, [true, true, write_only, false]);
        }
    }

    #[test]
    fn software_and_wildcard_addresses_go_without_rma() {
        for (provider, at) in
            [(OfiProvider::Tcp, "127.0.0.1:0"), (OfiProvider::TcpRxm, "[::]:0"), (OfiProvider::Verbs, "0.0.0.0:0")]
        {
            assert_eq!(rma_limits(provider, at.parse().unwrap(), false), None);
        }
    }
}
