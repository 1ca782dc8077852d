//! Whether payloads may go by RMA: a test of the provider, which is run once.
//!
//! Not all providers enforce what a registration says, and some leave memory open after it is closed, for a cache. So it is tried
//! out on a little memory of this process: what is allowed must succeed, what is not must fail and change nothing.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mio::Token;

use super::limits::SELF_TEST;
use super::provider;
use super::station::Station;
use super::sys::{Completion, Label, PeerAddress, Posted, Purpose, RegisteredRegion, RemotePlace, RemoteRights};
use crate::address::OfiProvider;
use crate::deferred_log::defer;
use crate::memory::{Region, Slice};

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

/// What the provider's test has shown; `None`: payloads go in messages. The first call for a provider runs the test, at this
/// address of this host, and logs the outcome.
pub(super) fn rma_limits(provider: OfiProvider, at: SocketAddr) -> Option<RmaLimits> {
    static FOUND: [OnceLock<Option<RmaLimits>>; OfiProvider::ALL.len()] = [const { OnceLock::new() }; OfiProvider::ALL.len()];
    let found = &FOUND[OfiProvider::ALL.iter().position(|other| *other == provider).unwrap_or_default()];
    // Nothing can be dialled at a wildcard address. Such an engine does without RMA.
    if at.ip().is_unspecified() && !provider::exchanges_names(provider) {
        return None;
    }
    *found.get_or_init(|| {
        let outcome = match provider::is_software(provider) {
            Some(reason) => Err(reason.to_owned()),
            None => run(provider, at),
        };
        let (rma, reason) = match &outcome {
            Ok(RmaLimits { write_only: true }) => (true, "its test has passed".to_owned()),
            Ok(_) => (true, "its test has passed, but for memory that may only be written: such memory has no keys".to_owned()),
            Err(reason) => (false, reason.clone()),
        };
        defer(move || tracing::info!(target: "calomel::ofi", %provider, rma, reason, "how bulk data goes"));
        outcome.ok()
    })
}

/// Length of the memory that is tried out.
const LEN: usize = 4096;

/// How an access has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// The bytes that were read, or written.
    Done(Vec<u8>),
    Refused,
    Late,
}

/// What is done with memory, by an initiator of its own.
#[derive(Clone, Copy)]
struct Access {
    pull: bool,
    place: RemotePlace,
    fill: u8,
    len: usize,
}

/// Runs the test. An error says what was found.
pub(super) fn run(provider: OfiProvider, at: SocketAddr) -> Result<RmaLimits, String> {
    let failed = |error: io::Error| format!("its test has failed: {error}");
    let test = SelfTest::new(provider, at).map_err(failed)?;
    test.run().map_err(failed)?
}

struct SelfTest {
    provider: OfiProvider,
    at: SocketAddr,
    poll: mio::Poll,
    target: Station,
    until: Instant,
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
        Ok(SelfTest { provider, at, poll, target, until: Instant::now() + SELF_TEST })
    }

    fn run(&self) -> io::Result<Result<RmaLimits, String>> {
        let refused = |what: &str| Ok(Err(what.to_owned()));
        let (whole, open) = self.register(BOTH)?;
        let (readable, read_only) = self.register(READ_ONLY)?;
        let (writable, write_only) = self.register(WRITE_ONLY)?;
        let [place, of_readable, of_writable] = [&open, &read_only, &write_only].map(|registered| {
            let extent = registered.extents()[0];
            RemotePlace { address: extent.address, key: extent.key }
        });
        // One that has access, and will lose it.
        let (reader, writer) = (self.initiator()?, self.initiator()?);
        let write = Access { pull: false, place, fill: 1, len: LEN };
        let read = Access { pull: true, ..write };
        if self.access(&writer, write)? != Outcome::Done(vec![1; LEN]) || !holds(&whole, 1) {
            return refused("its test has failed: what may be written can't be");
        }
        if self.access(&reader, read)? != Outcome::Done(vec![1; LEN]) {
            return refused("its test has failed: what may be read can't be");
        }
        // By initiators of their own, since a refusal may cost the connection.
        let beyond = Access { place: RemotePlace { address: place.address + 8, ..place }, ..read };
        if self.access(&self.initiator()?, beyond)? != Outcome::Refused {
            return refused("it does not refuse access beyond the bounds of memory");
        }
        let forbidden = Access { place: of_readable, fill: 2, ..write };
        if self.access(&self.initiator()?, forbidden)? != Outcome::Refused || !holds(&readable, 0) {
            return refused("it does not refuse to write memory that may only be read");
        }
        let hidden = Access { place: of_writable, ..read };
        let write_only = match self.access(&self.initiator()?, hidden)? {
            Outcome::Refused => true,
            Outcome::Done(_) => false,
            Outcome::Late => return refused("its test has failed: an access does not end"),
        };
        if let Err(error) = open.close() {
            // Nobody knows whether the provider may still access it.
            std::mem::forget(whole);
            return Err(error);
        }
        if self.access(&writer, Access { fill: 3, ..write })? != Outcome::Refused || !holds(&whole, 1) {
            return refused("closing a registration does not revoke it: memory can be written afterwards");
        }
        if self.access(&reader, read)? != Outcome::Refused {
            return refused("closing a registration does not revoke it: memory can be read afterwards");
        }
        let unchanged = holds(&whole, 1) && holds(&readable, 0) && holds(&writable, 0);
        Ok(if unchanged { Ok(RmaLimits { write_only }) } else { Err("memory changes that may not be written".to_owned()) })
    }

    /// Memory of zeroes.
    fn register(&self, rights: RemoteRights) -> io::Result<(Arc<Region>, Arc<RegisteredRegion>)> {
        let region = Region::from_vec(vec![0; LEN]);
        let registered = RegisteredRegion::of(&region, &self.target.endpoint, 1, rights);
        let registered = registered.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))?;
        Ok((region, registered))
    }

    fn initiator(&self) -> io::Result<(Station, PeerAddress)> {
        let info = provider::at(self.provider, self.at, Purpose::RmaInitiator)?;
        let station = Station::open(self.provider, info, self.at, self.poll.registry(), Token(0))?;
        let target = station.av.insert(self.target.endpoint.name())?;
        Ok((station, target))
    }

    fn access(&self, (station, target): &(Station, PeerAddress), access: Access) -> io::Result<Outcome> {
        let Access { pull, place, fill, len } = access;
        let label = Label::Rma { link: 0, number: 0 };
        let mut buffer = Some(vec![fill; len]);
        while Instant::now() < self.until {
            if let Some(bytes) = buffer.take() {
                match station.endpoint.access(pull, *target, place, bytes, label) {
                    Ok(Posted::Begun) => {}
                    Ok(Posted::Busy(bytes)) => buffer = Some(bytes),
                    // Also where it is no key of this domain, so that it is not even tried.
                    Ok(_) | Err(_) => return Ok(Outcome::Refused),
                }
            }
            // Connections are made by either side.
            self.target.take_completions()?;
            if let Some(Completion { buffer: bytes, result, .. }) = station.take_completions()?.pop_front() {
                return Ok(match result {
                    Ok(_) => Outcome::Done(bytes.unwrap_or_default()),
                    Err(_) => Outcome::Refused,
                });
            }
            std::thread::yield_now();
        }
        Ok(Outcome::Late)
    }
}

/// Whether all of the memory is of this value.
fn holds(memory: &Arc<Region>, value: u8) -> bool {
    let mut bytes = vec![!value; LEN];
    Slice::whole(memory).read(&mut bytes) && bytes.iter().all(|byte| *byte == value)
}

impl Drop for SelfTest {
    fn drop(&mut self) {
        self.target.close();
    }
}
