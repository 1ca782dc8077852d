//! On what terms memory is exposed, as users say it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::exposure_state::Visibility;
use crate::engine::EngineShared;
use crate::proto::AccessPolicy;
use crate::{Endpoint, Result};

/// The terms on which memory is exposed: to whom, for which call, for how many transfers and bytes, for how long. They all
/// combine: each transfer has to meet all of them when it begins. A grant without terms is what
/// [`Engine::expose`](crate::Engine::expose) gives.
///
/// The owner keeps to them for each transfer, on every transport: such memory never goes along inside a call, and over
/// `verbs://` no device reaches it by itself (but for [`Grant::only`] alone, which devices can keep to). A transfer that is
/// refused gets [`Error::AccessDenied`](crate::Error::AccessDenied) with the reason, uses nothing up, and is counted in
/// [`Engine::refusals`](crate::Engine::refusals). What the owner does through its [`Exposed`](crate::Exposed) is not subject
/// to terms.
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
    /// Without terms.
    pub fn new() -> Grant {
        Grant::default()
    }

    /// For one peer: for the engine that is at the endpoint now, if there is a connection, or else for the first that is found
    /// there. See [`Engine::expose_to`](crate::Engine::expose_to). The endpoint must be of the engine that exposes the memory:
    /// with another's, exposing ends with [`Error::OtherEngine`](crate::Error::OtherEngine).
    pub fn only(mut self, endpoint: impl AsRef<Endpoint>) -> Grant {
        self.only = Some(endpoint.as_ref().clone());
        self
    }

    /// For one call: the first one that a bulk of the memory is an argument of. Whoever is called may use the memory until the call
    /// has ended, with an answer or an error; nobody else, nobody before, and nobody afterwards. A callee that passes the
    /// bulk on passes nothing on. Transfers that are under way when the call ends, end with it: with
    /// [`Error::AccessDenied`](crate::Error::AccessDenied), or with [`Error::Revoked`](crate::Error::Revoked) where half of a chunk was on its way.
    ///
    /// A one-way call ([`Call::notify`](crate::Call::notify)) has no end that its caller hears of. It counts as ended when
    /// its receiver has dropped the bulk ([`Exposed::released`](crate::Exposed::released)), when the connection is lost, and when
    /// its timeout is over, whatever comes first.
    ///
    /// In an answer to a call, such a bulk is of no use to whoever gets it. In a call of another engine than the one that exposes
    /// the memory there is none that it could be for: that call ends with [`Error::OtherEngine`](crate::Error::OtherEngine).
    pub fn for_one_call(mut self) -> Grant {
        self.for_one_call = true;
        self
    }

    /// For one transfer, of any part, whether it succeeds or not. The next one is refused.
    pub fn once(mut self) -> Grant {
        self.once = true;
        self
    }

    /// For so many bytes in all, of pulls and of pushes, counted when a transfer begins and not given back when it fails. One
    /// that is longer than what is left is refused as a whole.
    pub fn quota(mut self, bytes: u64) -> Grant {
        self.quota = Some(bytes);
        self
    }

    /// For so long from the moment on when the memory is exposed. Transfers that are under way then, end: with
    /// [`Error::AccessDenied`](crate::Error::AccessDenied), or with [`Error::Revoked`](crate::Error::Revoked) where half of a chunk was on its way. The memory stays with its
    /// [`Exposed`](crate::Exposed), which gives it back as ever. A time beyond what the clock can say never comes.
    pub fn expires_after(mut self, time: Duration) -> Grant {
        self.expires = Some(time);
        self
    }

    /// As the protocol takes them; and who may reach the memory without asking.
    pub(super) fn terms(&self, shared: &Arc<EngineShared>) -> Result<(AccessPolicy, Visibility)> {
        let Grant { only, for_one_call, once, quota, expires } = self;
        let (for_one_call, once, quota) = (*for_one_call, *once, *quota);
        if let Some(only) = only {
            shared.check_own(only.shared(), "the endpoint", || "expose".to_owned())?;
        }
        let only = only.as_ref().map(Endpoint::peer);
        let expires = expires.and_then(|time| Instant::now().checked_add(time));
        let reach = match only {
            _ if for_one_call || once || quota.is_some() || expires.is_some() => Visibility::Nobody,
            Some(peer) => Visibility::Only(peer),
            None => Visibility::Everybody,
        };
        Ok((AccessPolicy { only, for_one_call, once, quota, expires }, reach))
    }
}
