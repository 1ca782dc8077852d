//! `RemoteBulk`: a peer's exposed memory; and transfers with it that block, as methods and as operators.

use std::fmt;
use std::ops::{Shl, Shr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::descriptor::Bulk;
use super::exposed::{Exposed, ExposedSlice};
use crate::engine::{Endpoint, Engine, EngineShared, MonitoredTransfer, deadline};
use crate::memory::{self, BorrowedRegion, Buffer, CopyOutcome, CopyPath, Element, ReadElement, Slice, Writable, WritableBuffer};
use crate::progress::{
    Awaited, Completion, Copying, EngineEnv, OperationOutcome, OwnCompletion, REFUSED_BY_FILTER, error_of, nanos,
};
use crate::proto::{Failure, PeerTag, Proto, Remote, TransferDirection, TransferId};
use crate::transport::interfaces::in_own_networks;
use crate::{Address, Error, Result};

/// A bulk together with the endpoint of its owner. Made by [`Bulk::on`] and [`Bulk::origin`].
///
/// A transfer moves as many bytes as the shorter of the two sides has, and returns that number. When it returns without an
/// error, all of these bytes have arrived.
///
/// The operators are as in Thallium: data flows along the arrow, whichever side is written first.
///
/// ```
/// # use calomel::{BulkMode, Engine};
/// # fn main() -> calomel::Result<()> {
/// # let server = Engine::server("loop://")?;
/// # let client = Engine::client("loop")?;
/// # let theirs = server.expose(vec![7u8; 100], BulkMode::ReadWrite)?;
/// # let remote = theirs.bulk().on(&client.lookup(server.address())?);
/// let local = client.expose(vec![0u8; 10], BulkMode::ReadWrite)?;
/// assert_eq!((&local << &remote)?, 10); // pulls, as `&remote >> &local` does
/// assert_eq!((&local >> remote.slice(90, 10)?)?, 10); // pushes, as `remote.slice(90, 10)? << &local` does
/// # assert_eq!((&local.slice(0, 4)? << &remote)?, 4);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RemoteBulk {
    bulk: Bulk,
    endpoint: Endpoint,
    timeout: Duration,
}

/// A transfer that was started.
pub(super) enum StartedTransfer {
    /// It has ended already.
    Done(Result<usize>),
    InProgress(TransferId),
}

/// What is measured of a transfer when it begins.
pub(super) struct TransferBeginning {
    at: Instant,
    pull: bool,
    len: usize,
    /// The monitor's number for it; 0 without a monitor.
    monitored: u64,
}

/// Whether the endpoint that a bulk is used with is its owner's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EndpointOwner {
    /// It is the owner's, or an address that the owner listens at.
    Owner,
    /// No engine was met there yet, or several.
    MaybeOwner,
    /// Another engine was met there, and is not connected now.
    MaybeOther,
    /// Another engine is connected there.
    Other,
}

/// The description of a transfer, for errors.
fn what(pull: bool, len: usize) -> String {
    format!("{} of {len} bytes", if pull { "pull" } else { "push" })
}

impl Bulk {
    /// The bulk as memory of the engine at `endpoint`, ready to be pulled from and pushed into. That must be the one that
    /// exposed it, which [`Request::endpoint`](crate::Request::endpoint) is for bulks that came straight from their owner. At
    /// another peer, transfers end with [`Error::OtherEngine`]. The endpoint may be of any engine that is to transfer.
    pub fn on(&self, endpoint: impl AsRef<Endpoint>) -> RemoteBulk {
        RemoteBulk::new(self.clone(), endpoint.as_ref().clone())
    }

    /// The bulk as memory of its owner: for bulks that were forwarded. The owner is reached by an existing connection, or else
    /// at an address that it listens at: the first transfer dials it.
    ///
    /// These addresses are claims of the peer that sent the bulk, which can name any: it can make this engine connect to every
    /// address and port that this engine reaches, also behind a firewall. The other side gets a handshake of this library and
    /// no byte of the peer's choice. [`EngineBuilder::dial_filter`](crate::EngineBuilder::dial_filter) decides on each such
    /// address before it is dialled.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when there is no connection to the owner, and it does not listen, or the filter refuses its
    /// addresses; [`Error::Finalized`].
    pub fn origin(&self, engine: impl AsRef<Engine>) -> Result<RemoteBulk> {
        let engine = engine.as_ref();
        let shared = engine.shared();
        shared.check("looking for the origin of a bulk")?;
        let addresses = self.origin.addresses();
        let known = shared.core.with_proto(|proto| {
            let tag = proto.lookup_incarnation(self.origin.incarnation)?;
            let is_near = proto.connection(tag.id).is_some() || proto.is_idle(tag.id);
            (is_near || addresses.is_empty()).then_some(tag)
        });
        let tag: Arc<PeerTag> = match known {
            Some(tag) => tag,
            // An engine reaches its own bulks without an address.
            None if self.origin.incarnation == shared.incarnation => shared.core.exec(|proto| proto.lookup(&engine.address())),
            None => {
                let specified = |address: &Address| !address.socket().is_some_and(|socket| socket.ip().is_unspecified());
                let dialable = |address: &&Address| specified(address) && shared.core.transport(address.scheme()).is_ok();
                let chosen = |address: &Address| shared.core.with_proto(|proto| proto.is_chosen_address(address));
                let allowed = |address: &&Address| chosen(address) || shared.core.may_dial(address);
                let mut named: Vec<&Address> = addresses.iter().filter(dialable).collect();
                // An owner with several networks is best reached in one that this host has a part in.
                let is_near = in_own_networks();
                named.sort_by_key(|address| !address.socket().is_some_and(|socket| is_near(socket.ip())));
                let refused = named.first().copied().cloned();
                let address = named.into_iter().find(allowed);
                let address = address.ok_or_else(|| Error::Unreachable {
                    reason: match refused {
                        Some(_) => REFUSED_BY_FILTER,
                        None => "the owner of the bulk is not connected, and does not listen where this engine could dial",
                    }
                    .to_owned(),
                    cause: refused.is_some().then(|| Arc::new(std::io::ErrorKind::PermissionDenied.into())),
                    peer: refused.or_else(|| addresses.first().cloned()).unwrap_or_else(Address::nowhere),
                })?;
                shared.core.exec(|proto| proto.lookup(address))
            }
        };
        Ok(RemoteBulk::new(self.clone(), Endpoint::new(shared.clone(), tag, 0)))
    }
}

impl RemoteBulk {
    fn new(bulk: Bulk, endpoint: Endpoint) -> RemoteBulk {
        let timeout = endpoint.shared().config.default_timeout;
        RemoteBulk { bulk, endpoint, timeout }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bulk.len()
    }

    /// True when the length is zero.
    pub fn is_empty(&self) -> bool {
        self.bulk.is_empty()
    }

    /// The bulk itself.
    pub fn bulk(&self) -> &Bulk {
        &self.bulk
    }

    /// The endpoint of the engine whose memory it is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The part of `len` bytes at `offset`, both in bytes; see [`Bulk::slice`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice(&self, offset: usize, len: usize) -> Result<RemoteBulk> {
        Ok(RemoteBulk { bulk: self.bulk.slice(offset, len)?, ..self.clone() })
    }

    /// The part of `count` elements from element `first` on; see [`Bulk::slice_of`].
    ///
    /// # Errors
    /// As [`Bulk::slice_of`].
    pub fn slice_of<T: ReadElement>(&self, first: usize, count: usize) -> Result<RemoteBulk> {
        Ok(RemoteBulk { bulk: self.bulk.slice_of::<T>(first, count)?, ..self.clone() })
    }

    /// How long a transfer may take. The default is [`EngineBuilder::default_timeout`](crate::EngineBuilder::default_timeout).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Copies from the peer's memory into local memory, and blocks until that is done. Returns the number of bytes.
    ///
    /// On an error, any part of the target may have been written. Once this returns, the transfer does not write the target any
    /// more.
    ///
    /// # Errors
    /// [`Timeout`](crate::Error::Timeout), [`Unreachable`](crate::Error::Unreachable),
    /// [`Disconnected`](crate::Error::Disconnected), [`PeerRestarted`](crate::Error::PeerRestarted),
    /// [`AccessDenied`](crate::Error::AccessDenied), [`Revoked`](crate::Error::Revoked),
    /// [`OutOfRange`](crate::Error::OutOfRange), [`Finalized`](crate::Error::Finalized);
    /// [`OtherEngine`](crate::Error::OtherEngine) when the endpoint is not the owner's, or the target is exposed by another
    /// engine.
    pub fn pull_into(&self, target: impl PullTarget) -> Result<usize> {
        target.with(self, |slice| self.run(true, slice))
    }

    /// Copies from local memory into the peer's, and blocks until that is done. Returns the number of bytes.
    ///
    /// On an error, any part of the peer's memory may have been written, and some of it with zeros: the rest of a chunk that
    /// was in progress when the push ended. Once this returns, the transfer does not read the source any more.
    ///
    /// # Errors
    /// As [`RemoteBulk::pull_into`].
    pub fn push_from(&self, source: impl PushSource) -> Result<usize> {
        source.with(self, |slice| self.run(false, slice))
    }

    pub(super) fn shared(&self) -> &Arc<EngineShared> {
        self.endpoint.shared()
    }

    /// Fails when the local memory is exposed by another engine than the one that transfers.
    pub(super) fn check_local(&self, owner: &Arc<EngineShared>) -> Result<()> {
        self.shared().check_same_engine(owner, "the local exposed memory", || "transfer".to_owned())
    }

    /// As `check_local`, for memory that a scope borrows.
    pub(super) fn check_scope(&self, owner: &Arc<EngineShared>) -> Result<()> {
        self.shared().check_same_engine(owner, "the scope", || "transfer".to_owned())
    }

    /// Whether the endpoint is the owner's, as far as that is known. Where the owner may have been at this address before, it
    /// was restarted, which is no misuse of the bulk.
    fn endpoint_owner(&self) -> EndpointOwner {
        let (shared, origin) = (self.shared(), &self.bulk.origin);
        let (peer, address) = (self.endpoint.peer(), self.endpoint.address());
        let (met, connected) = shared.core.with_proto(|proto| (proto.engines_at(peer), proto.connection(peer).is_some()));
        let claims_address = || origin.addresses().contains(&address);
        match met {
            Some((incarnation, _)) if incarnation == origin.incarnation => EndpointOwner::Owner,
            Some((_, 1)) if !claims_address() => {
                if connected {
                    EndpointOwner::Other
                } else {
                    EndpointOwner::MaybeOther
                }
            }
            // An engine reaches its own memory without a connection, if the endpoint is its own.
            None if origin.incarnation == shared.incarnation => {
                let itself = address == Address::nowhere() || shared.core.with_proto(|proto| proto.is_own_address(&address));
                if itself { EndpointOwner::Owner } else { EndpointOwner::Other }
            }
            _ if claims_address() => EndpointOwner::Owner,
            _ => EndpointOwner::MaybeOwner,
        }
    }

    fn other_engine_error(&self, what: String) -> Error {
        let (belongs_to, used_with) = (self.bulk.origin.addresses().first().cloned(), Some(self.endpoint.address()));
        Error::OtherEngine { what, object: "the bulk", belongs_to, used_with }
    }

    pub(super) fn error(&self, pull: bool, len: usize, failure: Failure) -> Error {
        let what = what(pull, len);
        // An engine replies `PeerRestarted` to an unknown token, also where the memory was never at its address.
        let is_other_engine = || matches!(self.endpoint_owner(), EndpointOwner::Other | EndpointOwner::MaybeOther);
        if matches!(failure, Failure::PeerRestarted) && is_other_engine() {
            return self.other_engine_error(what);
        }
        error_of(failure, &self.endpoint.address(), what, "bulk", self.timeout, 0)
    }

    /// A transfer of `len` bytes begins.
    pub(super) fn beginning(&self, pull: bool, len: usize, at: Instant) -> TransferBeginning {
        let beginning = TransferBeginning { at, pull, len, monitored: self.shared().monitored_id() };
        if beginning.monitored > 0 {
            self.shared().tell_monitor(|monitor| monitor.transfer_begins(&self.monitored(&beginning)));
        }
        beginning
    }

    fn monitored(&self, beginning: &TransferBeginning) -> MonitoredTransfer<'_> {
        MonitoredTransfer {
            id: beginning.monitored,
            direction: TransferDirection::of(beginning.pull),
            bytes: beginning.len,
            peer: &self.endpoint,
        }
    }

    /// Counts a transfer that has ended, and tells the monitor. Without a time it has ended just now.
    pub(super) fn note_end(&self, beginning: &TransferBeginning, ended: Option<u64>, result: &Result<usize>) {
        if self.shared().core.is_forked() {
            // A thread that the child does not have may hold the lock.
            return;
        }
        let statistics = &self.shared().statistics;
        if statistics.is_on() {
            let time = match ended {
                Some(ended) => ended.saturating_sub(self.shared().core.clock_at(beginning.at)),
                None => nanos(beginning.at.elapsed()),
            };
            let direction = TransferDirection::of(beginning.pull);
            statistics.record_transfer(direction, beginning.len, time, result.as_ref().copied());
        }
        if beginning.monitored > 0 {
            let error = result.as_ref().err();
            self.shared().tell_monitor(|monitor| monitor.transfer_ended(&self.monitored(beginning), error));
        }
    }

    fn run(&self, pull: bool, local: &Slice) -> Result<usize> {
        let copying = Copying::enter();
        let beginning = self.beginning(pull, local.len.min(self.len()), copying.began());
        let (result, ended) = self.run_to_end(pull, local);
        self.note_end(&beginning, ended, &result);
        result
    }

    /// Also returns when the transfer had ended, where that is known.
    fn run_to_end(&self, pull: bool, local: &Slice) -> (Result<usize>, Option<u64>) {
        let completion = OwnCompletion::new();
        let (started, len) = self.start(pull, local, &completion, false);
        let id = match started {
            StartedTransfer::Done(result) => return (result, None),
            StartedTransfer::InProgress(id) => id,
        };
        let core = &self.shared().core;
        if !completion.wait(core, Some(deadline(Instant::now(), self.timeout)), Awaited::Transfer) {
            // Without effect if the transfer has ended at the last moment.
            core.exec(|proto| proto.abandon_transfer(id, Failure::Timeout));
            local.region.fence();
            if let Err(error) = self.shared().check_may_wait(|| what(pull, len)) {
                return (Err(error), None);
            }
            completion.wait(core, None, Awaited::Other);
        }
        let (result, ended) = match completion.take() {
            Some(OperationOutcome::Transferred(result, ended)) => (result, ended),
            _ => (Err(Box::new(Failure::Cancelled)), None),
        };
        let result = result.map_err(|failure| {
            // An access that is in progress still belongs to the transfer.
            local.region.fence();
            self.error(pull, len, *failure)
        });
        (result, ended)
    }

    /// Starts a transfer between the bulk and a local slice. Returns its length too, the smaller of the two.
    pub(super) fn start(&self, pull: bool, local: &Slice, completion: &Arc<Completion>, timed: bool) -> (StartedTransfer, usize) {
        let shared = self.shared();
        let len = local.len.min(self.bulk.len());
        if let Err(error) = shared.check("transfer") {
            return (StartedTransfer::Done(Err(error)), len);
        }
        let endpoint_owner = self.endpoint_owner();
        if endpoint_owner == EndpointOwner::Other {
            return (StartedTransfer::Done(Err(self.other_engine_error(what(pull, len)))), len);
        }
        let started = match local.part(0, len) {
            Some(local) => self.start_part(pull, local, endpoint_owner, completion, timed),
            None => Err(Failure::Revoked),
        };
        let started = match started {
            Ok(started) => started,
            Err(failure) => StartedTransfer::Done(Err(self.error(pull, len, failure))),
        };
        (started, len)
    }

    fn start_part(
        &self,
        pull: bool,
        local: Slice,
        endpoint_owner: EndpointOwner,
        completion: &Arc<Completion>,
        timed: bool,
    ) -> std::result::Result<StartedTransfer, Failure> {
        let shared = self.shared();
        let Bulk { token, offset, mode, origin, copy, .. } = &self.bulk;
        let len = local.len;
        if local.read_access().is_none() {
            return Err(Failure::Revoked);
        }
        if origin.incarnation == shared.incarnation {
            // Both sides are in this engine: one copy, from memory to memory.
            let now = Instant::now();
            let access = |proto: &mut Proto<EngineEnv>| proto.access(*token, *offset, len as u64, !pull, now);
            let remote = shared.core.exec(access).map_err(Failure::Refused)?;
            let path = CopyPath::for_transfer(local.len);
            let copied = if pull { memory::copy(&remote, &local, path) } else { memory::copy(&local, &remote, path) };
            return match copied {
                CopyOutcome::All => Ok(StartedTransfer::Done(Ok(len))),
                CopyOutcome::SourceClosed | CopyOutcome::TargetClosed => Err(Failure::Revoked),
            };
        }
        if let Some(copy) = copy.as_ref().filter(|_| pull && endpoint_owner == EndpointOwner::Owner)
            && let Some(bytes) = copy.range(*offset, len)
        {
            return if local.write(bytes) { Ok(StartedTransfer::Done(Ok(len))) } else { Err(Failure::Revoked) };
        }
        let now = Instant::now();
        // Where the mode forbids the access, the owner is asked, and refuses: a device would break its queue pair.
        let allowed = if pull { mode.access().read } else { mode.access().write };
        let keys = if allowed { self.bulk.keys() } else { None };
        let (peer, owner) = (self.endpoint.peer(), origin.incarnation);
        let remote = Remote { peer, owner, token: *token, offset: *offset, keys };
        let until = timed.then(|| deadline(now, self.timeout));
        let id = shared.core.exec_start(now, |proto| proto.transfer(pull, remote, local, until, completion.clone(), now))?;
        Ok(StartedTransfer::InProgress(id))
    }
}

impl fmt::Debug for RemoteBulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteBulk({} bytes of {:?})", self.len(), self.endpoint)
    }
}

/// What [`RemoteBulk::pull_into`](crate::RemoteBulk::pull_into) can fill: `&Exposed`, `&ExposedSlice`, `&mut [T]`,
/// `&mut Vec<T>`, `&mut [T; N]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be pulled into",
    note = "give a reference to an `Exposed` that was made by `engine.expose`, an `ExposedSlice` of one, or a `&mut [T]` with `T: bytemuck::Pod`"
)]
pub trait PullTarget: sealed::PullTarget {}

/// What [`RemoteBulk::push_from`](crate::RemoteBulk::push_from) can send: `&Exposed`, `&ExposedSlice`, `&[T]`, `&Vec<T>`,
/// `&[T; N]`, `&str`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be pushed from",
    note = "give a reference to an `Exposed`, an `ExposedSlice`, or a `&[T]` with `T: bytemuck::NoUninit`"
)]
pub trait PushSource: sealed::PushSource {}

mod sealed {
    use super::RemoteBulk;
    use crate::Result;
    use crate::memory::Slice;

    pub trait PullTarget {
        /// Runs `transfer` with the memory, which is reached through its region only meanwhile. Fails when the memory is
        /// exposed by another engine than the one that transfers.
        #[doc(hidden)]
        fn with(self, remote: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize>;
    }

    pub trait PushSource {
        #[doc(hidden)]
        fn with(self, remote: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize>;
    }
}

macro_rules! local {
    ($trait:ident: $([$($generics:tt)*] $kind:ty, |$this:ident| $slice:expr;)*) => {$(
        impl<$($generics)*> $trait for $kind {}
        impl<$($generics)*> sealed::$trait for $kind {
            fn with(self, remote: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize> {
                let $this = self;
                remote.check_local($this.shared())?;
                transfer(&$slice)
            }
        }
    )*};
}

// The `BorrowedRegion` stays on the stack of `with` until the transfer is over: dropping it closes the region, on a panic too.
macro_rules! borrowed {
    ($trait:ident: $([$($generics:tt)*] $kind:ty, |$this:ident| $borrowed:expr;)*) => {$(
        impl<$($generics)*> $trait for $kind {}
        impl<$($generics)*> sealed::$trait for $kind {
            fn with(self, _: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize> {
                let $this = self;
                let borrowed: BorrowedRegion<'_> = $borrowed;
                transfer(&Slice::whole(borrowed.region()))
            }
        }
    )*};
}

local! { PullTarget:
    [B: WritableBuffer] &Exposed<B, Writable>, |this| this.whole();
    [] &ExposedSlice<Writable>, |this| this.slice;
    [] ExposedSlice<Writable>, |this| this.slice;
}

borrowed! { PullTarget:
    [T: Element] &mut [T], |this| BorrowedRegion::writable([bytemuck::cast_slice_mut(this)]);
    [T: Element] &mut Vec<T>, |this| BorrowedRegion::writable([bytemuck::cast_slice_mut(this)]);
    [T: Element, const N: usize] &mut [T; N], |this| BorrowedRegion::writable([bytemuck::cast_slice_mut(this)]);
}

local! { PushSource:
    [B: Buffer, A] &Exposed<B, A>, |this| this.whole();
    [A] &ExposedSlice<A>, |this| this.slice;
    [A] ExposedSlice<A>, |this| this.slice;
}

borrowed! { PushSource:
    [T: ReadElement] &[T], |this| BorrowedRegion::read_only([bytemuck::cast_slice(this)]);
    [T: ReadElement] &Vec<T>, |this| BorrowedRegion::read_only([bytemuck::cast_slice(this)]);
    [T: ReadElement, const N: usize] &[T; N], |this| BorrowedRegion::read_only([bytemuck::cast_slice(this)]);
    [] &str, |this| BorrowedRegion::read_only([this.as_bytes()]);
    [] &String, |this| BorrowedRegion::read_only([this.as_bytes()]);
}

/// Both directions, for each kind of local memory: data flows along the arrow, whichever side is written first.
macro_rules! operators {
    ($remote:ty: $([$($generics:tt)*] $source:ty, [$($limits:tt)*] $target:ty;)*) => {$(
        impl<$($limits)*> Shr<$target> for $remote {
            type Output = Result<usize>;
            /// `remote >> &local` pulls: as [`RemoteBulk::pull_into`].
            fn shr(self, local: $target) -> Result<usize> {
                self.pull_into(local)
            }
        }
        impl<$($limits)*> Shl<$remote> for $target {
            type Output = Result<usize>;
            /// `&local << remote` pulls: as [`RemoteBulk::pull_into`].
            fn shl(self, remote: $remote) -> Result<usize> {
                remote.pull_into(self)
            }
        }
        impl<$($generics)*> Shl<$source> for $remote {
            type Output = Result<usize>;
            /// `remote << &local` pushes: as [`RemoteBulk::push_from`].
            fn shl(self, local: $source) -> Result<usize> {
                self.push_from(local)
            }
        }
        impl<$($generics)*> Shr<$remote> for $source {
            type Output = Result<usize>;
            /// `&local >> remote` pushes: as [`RemoteBulk::push_from`].
            fn shr(self, remote: $remote) -> Result<usize> {
                remote.push_from(self)
            }
        }
    )*};
}

macro_rules! operators_of {
    ($($remote:ty),*) => {$(
        operators! { $remote:
            [B: Buffer, A] &Exposed<B, A>, [B: WritableBuffer] &Exposed<B, Writable>;
            [A] &ExposedSlice<A>, [] &ExposedSlice<Writable>;
            [A] ExposedSlice<A>, [] ExposedSlice<Writable>;
        }
    )*};
}

operators_of!(RemoteBulk, &RemoteBulk);
