//! Exposed memory of a peer, as this engine moves it.

use std::fmt;
use std::ops::{Shl, Shr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::descriptor::Bulk;
use super::exposed::{Exposed, ExposedSlice};
use super::local::{PullTarget, PushSource};
use super::transfer::{Local, Transfer};
use crate::engine::EngineShared;
use crate::memory::{self, Buffer, CopyOutcome, Slice, Writable, WritableBuffer};
use crate::progress::{Completion, EngineEnv, Moving, OperationOutcome, error_of};
use crate::proto::{Failure, Proto, Remote, TransferId};
use crate::rpc::deadline;
use crate::{Address, Endpoint, Error, Result};

/// A bulk and the engine that it is memory of. Made by [`Bulk::on`] and [`Bulk::origin`].
///
/// Transfers move the smaller of the two lengths, and say how many bytes that was. When one returns without an error, all
/// of these bytes are where they belong.
#[derive(Clone)]
pub struct RemoteBulk {
    bulk: Bulk,
    endpoint: Endpoint,
    timeout: Duration,
}

/// How a transfer began.
pub(super) enum StartedTransfer {
    /// It is over already.
    Done(Result<usize>),
    InProgress(TransferId),
}

/// Whose endpoint it is that a bulk is used with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EndpointOwner {
    /// The owner's, or where it said that it listens.
    Owners,
    /// No engine was met there, or several.
    MaybeOwners,
    /// Another engine was met there, which is not connected now.
    MaybeAnothers,
    Anothers,
}

/// A transfer, as errors call it.
fn what(pull: bool, len: usize) -> String {
    format!("{} of {len} bytes", if pull { "pull" } else { "push" })
}

impl RemoteBulk {
    pub(super) fn new(bulk: Bulk, endpoint: Endpoint) -> RemoteBulk {
        let timeout = endpoint.shared().limits.default_timeout;
        RemoteBulk { bulk, endpoint, timeout }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bulk.len()
    }

    /// True when there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.bulk.is_empty()
    }

    /// The bulk itself.
    pub fn bulk(&self) -> &Bulk {
        &self.bulk
    }

    /// Whose memory it is.
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

    /// How long a transfer may take. Without this it is the engine's default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Copies from the peer's memory into local memory, and blocks until that is done; how many bytes were moved.
    ///
    /// On an error, any part of the target may have been written. Once this returns, nothing writes it any more.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Unreachable`], [`Error::Disconnected`], [`Error::PeerRestarted`],
    /// [`Error::AccessDenied`], [`Error::Revoked`], [`Error::OutOfRange`], [`Error::Finalized`]; [`Error::OtherEngine`] when the
    /// endpoint is not the owner's, or the target is exposed by another engine.
    pub fn pull_into(&self, target: impl PullTarget) -> Result<usize> {
        target.with(self, |slice| self.run(true, slice))
    }

    /// Copies from local memory into the peer's, and blocks until that is done; how many bytes were moved.
    ///
    /// On an error, any part of the peer's memory may have been written, and some of it with zeros: what had been begun when the
    /// push was given up. Once this returns, nothing reads the source any more.
    ///
    /// # Errors
    /// As [`RemoteBulk::pull_into`].
    pub fn push_from(&self, source: impl PushSource) -> Result<usize> {
        source.with(self, |slice| self.run(false, slice))
    }

    /// Begins to pull. The transfer owns the local buffer until it is over, and gives it back.
    pub fn start_pull_into<L: Local<Access = Writable>>(&self, local: L) -> Transfer<L::Buffer, L> {
        Transfer::start(self, true, local)
    }

    /// Begins to push. The transfer owns the local buffer until it is over, and gives it back.
    pub fn start_push_from<L: Local>(&self, local: L) -> Transfer<L::Buffer, L> {
        Transfer::start(self, false, local)
    }

    pub(super) fn shared(&self) -> &Arc<EngineShared> {
        self.endpoint.shared()
    }

    /// An error when the near end of a transfer belongs to another engine than the one that transfers.
    pub(super) fn check_local(&self, owner: &Arc<EngineShared>) -> Result<()> {
        self.shared().check_own(owner, "the exposed memory at the near end", || "transfer".to_owned())
    }

    /// Who is at the endpoint, as far as that is known. Where the owner may have been before, it was restarted, and the
    /// endpoint is not mixed up.
    fn whose_endpoint(&self) -> EndpointOwner {
        let (shared, origin) = (self.shared(), &self.bulk.origin);
        let (peer, address) = (self.endpoint.peer(), self.endpoint.address());
        let (met, connected) = shared.core.with_proto(|proto| (proto.engines_at(peer), proto.connection(peer).is_some()));
        let claims_address = || origin.addresses.contains(&address);
        match met {
            Some((incarnation, _)) if incarnation == origin.incarnation => EndpointOwner::Owners,
            Some((_, 1)) if !claims_address() => {
                if connected {
                    EndpointOwner::Anothers
                } else {
                    EndpointOwner::MaybeAnothers
                }
            }
            // Its own memory an engine finds without a connection; if it means itself.
            None if origin.incarnation == shared.incarnation => {
                let own = |own: &Address| *own == address || own.seen_from(&address) == address;
                let itself = address == Address::nowhere() || shared.addresses.iter().any(own);
                if itself { EndpointOwner::Owners } else { EndpointOwner::Anothers }
            }
            _ if claims_address() => EndpointOwner::Owners,
            _ => EndpointOwner::MaybeOwners,
        }
    }

    fn mixed_up(&self, what: String) -> Error {
        let (belongs_to, used_with) = (self.bulk.origin.addresses.first().cloned(), Some(self.endpoint.address()));
        Error::OtherEngine { what, object: "the bulk", belongs_to, used_with }
    }

    pub(super) fn error(&self, pull: bool, len: usize, failure: Failure) -> Error {
        let what = what(pull, len);
        // An engine that was asked for memory which was never its own takes it for that of an engine before it.
        let mixed_up = || matches!(self.whose_endpoint(), EndpointOwner::Anothers | EndpointOwner::MaybeAnothers);
        if matches!(failure, Failure::PeerRestarted) && mixed_up() {
            return self.mixed_up(what);
        }
        error_of(failure, &self.endpoint.address(), what, "bulk", self.timeout, 0)
    }

    fn run(&self, pull: bool, local: &Slice) -> Result<usize> {
        let _moving = Moving::enter();
        let completion = Completion::new();
        let (begun, len) = self.begin(pull, local, &completion, false);
        let id = match begun {
            StartedTransfer::Done(result) => return result,
            StartedTransfer::InProgress(id) => id,
        };
        let core = &self.shared().core;
        if !completion.wait(core, Some(deadline(Instant::now(), self.timeout))) {
            // If it ended at the last moment, this does nothing.
            core.exec(|proto| proto.abandon_transfer(id, Failure::Timeout));
            local.region.fence();
            self.shared().check_may_wait(|| what(pull, len))?;
            completion.wait(core, None);
        }
        let result = match completion.take() {
            Some(OperationOutcome::Transferred(result)) => result,
            _ => Err(Failure::Cancelled),
        };
        result.map_err(|failure| {
            // What was landing at this moment is still the transfer's.
            local.region.fence();
            self.error(pull, len, failure)
        })
    }

    /// Begins a transfer between the bulk and a local slice; with its length, the smaller of the two.
    pub(super) fn begin(&self, pull: bool, local: &Slice, completion: &Arc<Completion>, timed: bool) -> (StartedTransfer, usize) {
        let shared = self.shared();
        let len = local.len.min(self.bulk.len());
        if let Err(error) = shared.check("transfer") {
            return (StartedTransfer::Done(Err(error)), len);
        }
        let whose = self.whose_endpoint();
        if whose == EndpointOwner::Anothers {
            return (StartedTransfer::Done(Err(self.mixed_up(what(pull, len)))), len);
        }
        let begun = match local.part(0, len) {
            Some(local) => self.begin_part(pull, local, whose, completion, timed),
            None => Err(Failure::Revoked),
        };
        let begun = match begun {
            Ok(begun) => begun,
            Err(failure) => StartedTransfer::Done(Err(self.error(pull, len, failure))),
        };
        (begun, len)
    }

    fn begin_part(
        &self,
        pull: bool,
        local: Slice,
        whose: EndpointOwner,
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
            // Both ends are here: one copy, from memory to memory.
            let now = Instant::now();
            let access = |proto: &mut Proto<EngineEnv>| proto.access(*token, *offset, len as u64, !pull, now);
            let remote = shared.core.exec(access).map_err(Failure::Refused)?;
            let copied = if pull { memory::copy(&remote, &local) } else { memory::copy(&local, &remote) };
            return match copied {
                CopyOutcome::All => Ok(StartedTransfer::Done(Ok(len))),
                CopyOutcome::SourceClosed | CopyOutcome::TargetClosed => Err(Failure::Revoked),
            };
        }
        if let Some(copy) = copy.as_ref().filter(|_| pull && whose == EndpointOwner::Owners)
            && let Some(bytes) = copy.range(*offset, len)
        {
            return if local.write(bytes) { Ok(StartedTransfer::Done(Ok(len))) } else { Err(Failure::Revoked) };
        }
        let now = Instant::now();
        // Where the mode does not allow it the owner is asked, who says so: a device would break off what else it does.
        let allowed = if pull { mode.access().read } else { mode.access().write };
        let keys = if allowed { self.bulk.keys() } else { None };
        let (peer, owner) = (self.endpoint.peer(), origin.incarnation);
        let remote = Remote { peer, owner, token: *token, offset: *offset, keys };
        let until = timed.then(|| deadline(now, self.timeout));
        let id = shared.core.exec(|proto| proto.transfer(pull, remote, local, until, completion.clone(), now))?;
        Ok(StartedTransfer::InProgress(id))
    }
}

macro_rules! operators {
    ($($remote:ty),*) => {$(
        impl<B: WritableBuffer> Shr<&Exposed<B, Writable>> for $remote {
            type Output = Result<usize>;
            /// As [`RemoteBulk::pull_into`].
            fn shr(self, local: &Exposed<B, Writable>) -> Result<usize> {
                self.pull_into(local)
            }
        }
        impl Shr<&ExposedSlice<Writable>> for $remote {
            type Output = Result<usize>;
            /// As [`RemoteBulk::pull_into`].
            fn shr(self, local: &ExposedSlice<Writable>) -> Result<usize> {
                self.pull_into(local)
            }
        }
        impl<B: Buffer, A> Shl<&Exposed<B, A>> for $remote {
            type Output = Result<usize>;
            /// As [`RemoteBulk::push_from`].
            fn shl(self, local: &Exposed<B, A>) -> Result<usize> {
                self.push_from(local)
            }
        }
        impl<A> Shl<&ExposedSlice<A>> for $remote {
            type Output = Result<usize>;
            /// As [`RemoteBulk::push_from`].
            fn shl(self, local: &ExposedSlice<A>) -> Result<usize> {
                self.push_from(local)
            }
        }
    )*};
}

operators!(RemoteBulk, &RemoteBulk);

impl fmt::Debug for RemoteBulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteBulk({} bytes of {:?})", self.len(), self.endpoint)
    }
}
