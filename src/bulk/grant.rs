//! `Grant`: the restrictions under which memory is exposed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::exposure_state::Visibility;
use crate::Result;
use crate::engine::{Endpoint, EngineShared};
use crate::proto::AccessPolicy;

/// The restrictions under which memory is exposed: for one peer, one call, one transfer, a number of bytes, a time. They
/// combine: each transfer has to meet all of them when it begins. [`Engine::expose`](crate::Engine::expose) uses a grant
/// without restrictions.
///
/// The owner enforces them for each transfer, on every transport: the content of such memory is not sent inside calls, and over
/// `verbs://` no device reaches it without the owner (except with [`Grant::only`] alone, which devices can enforce). A transfer
/// that is refused gets [`Error::AccessDenied`](crate::Error::AccessDenied) with the reason, uses nothing up, and is counted in
/// [`Engine::refusals`](crate::Engine::refusals). Access by the owner through its [`Exposed`](crate::Exposed) is not
/// restricted.
///
/// ```
/// use std::time::Duration;
///
/// use calomel::{Bulk, BulkMode, Engine, Error, Grant, Request};
///
/// # fn main() -> calomel::Result<()> {
/// # let server = Engine::server("loop://")?;
/// # server.define("fetch", |request: &Request, bulk: Bulk| {
/// #     let fetch = || bulk.on(request.endpoint()).pull_into(&mut [0u8; 1000][..]);
/// #     fetch().is_ok_and(|pulled| pulled == 1000) && matches!(fetch(), Err(Error::AccessDenied { .. }))
/// # })?;
/// # let client = Engine::client("loop")?;
/// # let peer = client.lookup(server.address())?;
/// // For the callee of one call, for one transfer, within five seconds.
/// let grant = Grant::new().for_one_call().once().expires_after(Duration::from_secs(5));
/// let exposed = client.expose_with(vec![7u8; 1000], BulkMode::ReadOnly, &grant)?;
/// assert!(client.procedure::<Bulk, bool>("fetch").on(&peer).call(&exposed.bulk())?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Grant {
    only: Option<Endpoint>,
    for_one_call: bool,
    once: bool,
    quota: Option<u64>,
    expires: Option<Duration>,
}

impl Grant {
    /// A grant without restrictions.
    pub fn new() -> Grant {
        Grant::default()
    }

    /// For one peer: for the engine that is connected at the endpoint now, or, without a connection, for the first engine that
    /// connects there. See [`Engine::expose_to`](crate::Engine::expose_to). The endpoint must be of the engine that exposes the
    /// memory: with another's, exposing ends with [`Error::OtherEngine`](crate::Error::OtherEngine).
    pub fn only(mut self, endpoint: impl AsRef<Endpoint>) -> Grant {
        self.only = Some(endpoint.as_ref().clone());
        self
    }

    /// For one call: the first one that a bulk of the memory is an argument of. Only the callee may use the memory, and only
    /// until the call has ended, with a response or an error. A bulk that the callee forwards is of no use. Transfers that are
    /// in progress when the call ends, end with it: with [`Error::AccessDenied`](crate::Error::AccessDenied), or with
    /// [`Error::Revoked`](crate::Error::Revoked) where half of a chunk was on its way.
    ///
    /// A one-way call ([`Call::notify`](crate::Call::notify)) has no end that its caller learns of. It counts as ended when its
    /// receiver has dropped the bulk ([`Exposed::released`](crate::Exposed::released)), when the connection is lost, and when
    /// its timeout is over, whichever is first.
    ///
    /// In a response to a call, such a bulk is of no use to the receiver. A call by another engine than the one that exposes
    /// the memory ends with [`Error::OtherEngine`](crate::Error::OtherEngine).
    pub fn for_one_call(mut self) -> Grant {
        self.for_one_call = true;
        self
    }

    /// For one transfer, of any part, whether it succeeds or not. The next one is refused.
    pub fn once(mut self) -> Grant {
        self.once = true;
        self
    }

    /// For so many bytes in total, of pulls and of pushes, counted when a transfer begins and not returned when it fails. A
    /// transfer that is longer than what is left is refused as a whole.
    pub fn quota(mut self, bytes: u64) -> Grant {
        self.quota = Some(bytes);
        self
    }

    /// For so long, from the moment when the memory is exposed. Transfers that are still in progress then, end with
    /// [`Error::AccessDenied`](crate::Error::AccessDenied), or with [`Error::Revoked`](crate::Error::Revoked) where half of a
    /// chunk was on its way. The memory stays with its [`Exposed`](crate::Exposed), which returns it as usual. A time beyond
    /// what the clock can represent never expires.
    pub fn expires_after(mut self, time: Duration) -> Grant {
        self.expires = Some(time);
        self
    }

    /// The policy that the protocol enforces, and which devices may reach the memory without a check by the owner.
    pub(super) fn policy(&self, shared: &Arc<EngineShared>) -> Result<(AccessPolicy, Visibility)> {
        let Grant { only, for_one_call, once, quota, expires } = self;
        let (for_one_call, once, quota) = (*for_one_call, *once, *quota);
        if let Some(only) = only {
            shared.check_same_engine(only.shared(), "the endpoint", || "expose".to_owned())?;
        }
        let only = only.as_ref().map(Endpoint::peer);
        let expires = expires.and_then(|time| Instant::now().checked_add(time));
        let visibility = match only {
            _ if for_one_call || once || quota.is_some() || expires.is_some() => Visibility::OwnerOnly,
            Some(peer) => Visibility::Only(peer),
            None => Visibility::Holders,
        };
        Ok((AccessPolicy { only, for_one_call, once, quota, expires }, visibility))
    }
}
