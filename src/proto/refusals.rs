//! What peers were refused, and which of their calls were lost, counted by cause.

use serde::{Deserialize, Serialize};

use super::wire::Status;
use super::{Env, LinkId, Proto, RequestId};

/// What peers were refused since the engine was made, by cause. See [`Engine::refusals`](crate::Engine::refusals).
///
/// A few are mistakes or races, such as a bulk that is used a moment after its memory was revoked. Counts that grow fast are a
/// sign of an attack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Refusals {
    /// Accesses with a token that this engine does not know: it was made up, or revoked long ago.
    pub unknown_token: u64,
    /// Accesses to memory that was revoked.
    pub revoked: u64,
    /// Accesses to memory of an engine that was at this address before.
    pub restarted: u64,
    /// Accesses to memory that is exposed to another peer.
    pub other_peer: u64,
    /// Accesses to memory that is exposed for one call, from outside that call, before it, or after it.
    pub other_call: u64,
    /// Accesses after the time that the memory was exposed for.
    pub expired: u64,
    /// Further transfers, where one was allowed.
    pub used_up: u64,
    /// Reads of write-only memory, and writes to read-only memory.
    pub mode: u64,
    /// Accesses outside the memory.
    pub range: u64,
    /// Transfers of more than was left of a quota.
    pub quota: u64,
    /// Attempts to shut this engine down, where that is not enabled.
    pub shutdown: u64,
    /// Calls that [`EngineBuilder::authorize`](crate::EngineBuilder::authorize) denied.
    pub calls: u64,
    /// Connections of engines that do not share this one's key.
    pub connections: u64,
    /// One-way calls that arrived and were lost, or whose handler failed, as far as this engine knows: there was no such
    /// procedure or provider, the arguments did not fit, the call was denied, its handler panicked or failed, it was corrupted
    /// in transit, its connection was lost while it was arriving, or this engine was being finalized. Callers are not told.
    /// Logged under `calomel::rpc`, with the peer and the procedure.
    pub one_way: u64,
    /// What was beyond the engine's limits: connections, requests, transfers, and answers that the peer did not read. Logged
    /// under `calomel::limits`.
    pub busy: u64,
}

impl Refusals {
    /// The sum of all but `one_way`: a denied call is among `calls`, one-way or not.
    pub fn total(&self) -> u64 {
        let Refusals { unknown_token, revoked, restarted, other_peer, other_call, expired, used_up, .. } = *self;
        let Refusals { mode, range, quota, shutdown, calls, connections, busy, .. } = *self;
        let accesses = [unknown_token, revoked, restarted, other_peer, other_call, expired, used_up, mode, range, quota];
        let others = [shutdown, calls, connections, busy];
        accesses.iter().chain(&others).fold(0, |sum: u64, count| sum.saturating_add(*count))
    }
}

/// Why something was refused; the peer gets it as a [`Status`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    UnknownToken,
    Revoked,
    Restarted,
    OtherPeer,
    /// As text.
    OtherCall(&'static str),
    Expired,
    UsedUp,
    Mode {
        write: bool,
    },
    Range {
        offset: u64,
        len: u64,
        size: u64,
    },
    Quota {
        len: u64,
        left: u64,
    },
    Shutdown,
    Call,
    Key,
}

impl Cause {
    pub(super) fn status(&self) -> Status {
        match self {
            Cause::Revoked => Status::Revoked,
            Cause::Restarted => Status::Restarted,
            Cause::Range { offset, len, size } => Status::OutOfRange { offset: *offset, len: *len, size: *size },
            other => Status::AccessDenied(other.to_string()),
        }
    }

    /// Peers that do nothing wrong can cause it: memory may be revoked while their requests are in flight.
    pub(crate) fn is_ordinary(&self) -> bool {
        matches!(self, Cause::Revoked | Cause::Restarted | Cause::Expired)
    }

    pub(super) fn count<'a>(&self, refusals: &'a mut Refusals) -> &'a mut u64 {
        match self {
            Cause::UnknownToken => &mut refusals.unknown_token,
            Cause::Revoked => &mut refusals.revoked,
            Cause::Restarted => &mut refusals.restarted,
            Cause::OtherPeer => &mut refusals.other_peer,
            Cause::OtherCall(_) => &mut refusals.other_call,
            Cause::Expired => &mut refusals.expired,
            Cause::UsedUp => &mut refusals.used_up,
            Cause::Mode { .. } => &mut refusals.mode,
            Cause::Range { .. } => &mut refusals.range,
            Cause::Quota { .. } => &mut refusals.quota,
            Cause::Shutdown => &mut refusals.shutdown,
            Cause::Call => &mut refusals.calls,
            Cause::Key => &mut refusals.connections,
        }
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cause::UnknownToken => f.write_str("no memory is exposed under this token"),
            Cause::Revoked => f.write_str("the memory was revoked"),
            Cause::Restarted => f.write_str("the memory belonged to an earlier engine at this address"),
            Cause::OtherPeer => f.write_str("the memory is exposed to another peer"),
            Cause::OtherCall(why) => f.write_str(why),
            Cause::Expired => f.write_str("the time that the memory was exposed for has expired"),
            Cause::UsedUp => f.write_str("the memory was exposed for one transfer, which is used up"),
            Cause::Mode { write } => {
                write!(f, "the memory is not exposed for peers to {}", if *write { "write" } else { "read" })
            }
            Cause::Range { offset, len, size } => write!(f, "{len} bytes at {offset} are not within the memory's {size} bytes"),
            Cause::Quota { len, left } => write!(f, "a transfer of {len} bytes is more than the {left} bytes left of the quota"),
            Cause::Shutdown => f.write_str("remote shutdown is not enabled"),
            Cause::Call => f.write_str("this caller may not call it"),
            Cause::Key => f.write_str("the two engines do not share a key"),
        }
    }
}

/// Why a one-way call was not handled, or its handler failed. Its caller does not learn it.
#[derive(Clone, Debug)]
pub(crate) enum Dropped {
    /// The body was corrupted in transit.
    Checksum,
    /// The connection was lost while the body was arriving.
    Connection,
    /// The status that a waiting caller would have got.
    Refused(Status),
}

impl std::fmt::Display for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dropped::Checksum | Dropped::Refused(Status::Checksum) => f.write_str("the arguments were corrupted in transit"),
            Dropped::Connection => f.write_str("the connection was lost before all of it had arrived"),
            Dropped::Refused(Status::NoSuchProcedure) => f.write_str("the procedure is not defined"),
            Dropped::Refused(Status::NoSuchProvider) => f.write_str("the provider is not defined"),
            Dropped::Refused(Status::Panicked(message)) => write!(f, "the handler panicked: {message}"),
            Dropped::Refused(Status::Failed(message)) => write!(f, "the handler failed: {message}"),
            Dropped::Refused(Status::Decode(reason)) => write!(f, "the arguments can't be decoded: {reason}"),
            Dropped::Refused(Status::TypeMismatch { expected, found }) => {
                write!(f, "the arguments are of another type: expected {expected}, found {found}")
            }
            Dropped::Refused(Status::AccessDenied(reason)) => f.write_str(reason),
            Dropped::Refused(Status::Finalizing) => f.write_str("this engine is being finalized"),
            Dropped::Refused(status) => write!(f, "{status:?}"),
        }
    }
}

impl<E: Env> Proto<E> {
    /// What peers were refused so far.
    pub(crate) fn refusals(&self) -> Refusals {
        Refusals { busy: self.limited.total(), ..self.refusals }
    }

    /// Denies a call: answers its caller, and counts it.
    pub(crate) fn deny(&mut self, request: RequestId, link: LinkId, name: &str) {
        self.refused(link, || format!("call of `{name}`"), Cause::Call);
        // The caller may be gone already.
        let _ = self.respond(request, Err(Cause::Call.status()));
    }
}
