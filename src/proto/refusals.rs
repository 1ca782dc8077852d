//! What peers were refused: counted, and told to whoever watches the log.

use super::wire::Status;
use super::{Env, LinkId, Log, Output, Proto, RequestId};

/// What peers were refused since the engine was made, by cause. See [`Engine::refusals`](crate::Engine::refusals).
///
/// One of each kind is a mistake or a race, such as a bulk that is used a moment after its memory was taken back. Many that
/// grow fast are somebody who tries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusals {
    /// Accesses with a token that this engine does not know: it was made up, or taken back long ago.
    pub unknown_token: u64,
    /// Accesses to memory that was taken back.
    pub revoked: u64,
    /// Accesses to memory of an engine that was at this address before.
    pub restarted: u64,
    /// Accesses to memory that is exposed to another peer.
    pub other_peer: u64,
    /// Accesses to memory that is exposed for one call, by others than that call's, before it, or after it.
    pub other_call: u64,
    /// Accesses after the time that the memory was exposed for.
    pub expired: u64,
    /// Second transfers, where one was allowed.
    pub used_up: u64,
    /// Reads of what may only be written, and writes of what may only be read.
    pub mode: u64,
    /// Accesses outside of the memory.
    pub range: u64,
    /// Transfers of more than was left of a quota.
    pub quota: u64,
    /// Attempts to shut this engine down, where that is not enabled.
    pub shutdown: u64,
    /// Calls that [`EngineBuilder::authorize`](crate::EngineBuilder::authorize) denied.
    pub calls: u64,
    /// Connections of engines that do not share this one's key.
    pub connections: u64,
    /// One-way calls that arrived and were lost, or whose handler failed, as far as this engine knows: there was no such procedure
    /// or provider, its arguments did not fit, it was denied, its handler panicked or failed, it was damaged on its way, its
    /// connection was lost while it was arriving, or this engine was being finalized. Callers are not told. Logged under
    /// `calomel::rpc`, with the peer and the procedure.
    pub one_way: u64,
    /// What was beyond the engine's limits: connections, requests, transfers, and answers that nobody read. These are logged
    /// under `calomel::limits`.
    pub busy: u64,
}

impl Refusals {
    /// All together, but for `one_way`: a call that was denied is among `calls`, one-way or not.
    pub fn total(&self) -> u64 {
        let Refusals { unknown_token, revoked, restarted, other_peer, other_call, expired, used_up, .. } = *self;
        let Refusals { mode, range, quota, shutdown, calls, connections, busy, .. } = *self;
        let accesses = [unknown_token, revoked, restarted, other_peer, other_call, expired, used_up, mode, range, quota];
        let others = [shutdown, calls, connections, busy];
        accesses.iter().chain(&others).fold(0, |sum: u64, count| sum.saturating_add(*count))
    }
}

/// Why something was refused, and what whoever asked is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    UnknownToken,
    Revoked,
    Restarted,
    OtherPeer,
    /// In words.
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

    /// Peers come upon it who do nothing wrong: memory goes while they are on their way.
    pub(crate) fn is_ordinary(&self) -> bool {
        matches!(self, Cause::Revoked | Cause::Restarted | Cause::Expired)
    }

    fn count<'a>(&self, refusals: &'a mut Refusals) -> &'a mut u64 {
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
            Cause::Revoked => f.write_str("the memory was taken back"),
            Cause::Restarted => f.write_str("the memory was that of another engine"),
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

impl<E: Env> Proto<E> {
    /// Notes that a peer was refused something. At each power of two of the count it is logged too: so whoever is refused can't
    /// flood the log, and costs nothing but the counting in between.
    pub(super) fn refused(&mut self, link: LinkId, what: impl FnOnce() -> String, cause: Cause) {
        let count = cause.count(&mut self.refusals);
        *count = count.saturating_add(1);
        let count = *count;
        if count.is_power_of_two()
            && let Some(link) = self.links.get(link)
        {
            let peer = link.remote.clone();
            self.outputs.push_back(Output::Log(Log::Refused { peer, what: what(), cause, count }));
        }
    }

    /// What peers were refused so far.
    pub(crate) fn refusals(&self) -> Refusals {
        Refusals { busy: self.limited.total(), ..self.refusals }
    }

    /// A call is denied: its caller is told, and it is counted.
    pub(crate) fn deny(&mut self, request: RequestId, link: LinkId, name: &str) {
        self.refused(link, || format!("call of `{name}`"), Cause::Call);
        // That the caller may be gone already changes nothing here.
        let _ = self.respond(request, Err(Cause::Call.status()));
    }
}
