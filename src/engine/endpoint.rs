//! `Endpoint`: a peer, or one of its providers, as an engine calls it.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Engine, EngineShared, completed, deadline};
use crate::progress::{Awaited, EngineEnv, OperationOutcome, OwnCompletion, error_of};
use crate::proto::{Answer, Body, CallId, Failure, LinkId, PeerId, PeerTag, Placed, Question};
use crate::{Address, Error, MessageSide, Result, Transport};

/// A peer that can be called, or one provider of it. Cheap to clone; dropping it does not disconnect.
///
/// Endpoints are equal when they belong to the same engine, and name the same provider of the same peer.
pub struct Endpoint {
    /// Does not keep the engine alive.
    engine: Engine,
    tag: Arc<PeerTag>,
    provider: u16,
}

impl Endpoint {
    pub(crate) fn new(shared: Arc<EngineShared>, tag: Arc<PeerTag>, provider: u16) -> Endpoint {
        Endpoint { engine: Engine::from_shared(shared), tag, provider }
    }

    pub(crate) fn shared(&self) -> &Arc<EngineShared> {
        self.engine.shared()
    }

    /// Its engine; the reference does not keep that alive.
    pub(crate) fn of_engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn peer(&self) -> PeerId {
        self.tag.id
    }

    pub(crate) fn tag(&self) -> &Arc<PeerTag> {
        &self.tag
    }

    /// The address that the peer listens at; for one that does not listen, the address that its connection comes from.
    pub fn address(&self) -> Address {
        self.tag.address.clone()
    }

    /// An endpoint for the provider with this number, of the same peer.
    pub fn provider(&self, id: u16) -> Endpoint {
        Endpoint { provider: id, ..self.clone() }
    }

    /// The number of this endpoint's provider; 0 is the engine itself.
    pub fn provider_id(&self) -> u16 {
        self.provider
    }

    /// True while there is a connection. There is none before the first call, and none after the peer has disconnected or the
    /// connection was [idle](crate::EngineBuilder::idle_timeout); the next call connects again.
    pub fn is_connected(&self) -> bool {
        self.connection().is_some()
    }

    /// The transport of the current connection; `None` while there is none. It can differ from the address's scheme: a tcp or
    /// verbs address of the same host may be reached through shared memory.
    pub fn transport(&self) -> Option<Transport> {
        self.shared().core.scheme_of(self.connection()?)
    }

    /// The link to the peer; a forked child has none.
    fn connection(&self) -> Option<LinkId> {
        let core = &self.shared().core;
        if core.is_forked() { None } else { core.with_proto(|proto| proto.connection(self.tag.id)) }
    }

    /// The engine that this endpoint belongs to. The handle keeps it alive.
    pub fn engine(&self) -> Engine {
        self.engine.clone()
    }

    /// Measures the time that the peer takes to answer: one round trip on the connection, through the peer's progress engine and
    /// none of its handlers. Connects first, where there is no connection, which counts.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout), [`Error::Unreachable`](crate::Error::Unreachable),
    /// [`Error::Disconnected`](crate::Error::Disconnected), [`Error::Finalized`](crate::Error::Finalized), and
    /// [`Error::AccessDenied`](crate::Error::AccessDenied) or [`Error::Version`](crate::Error::Version) from a peer that does not
    /// accept this engine.
    pub fn ping(&self, timeout: Duration) -> Result<Duration> {
        let begin = Instant::now();
        self.ask(Question::Echo, "ping", timeout)?;
        Ok(begin.elapsed())
    }

    /// As [`Endpoint::ping`], for async code. Dropping the future cancels the ping.
    ///
    /// # Errors
    /// As [`Endpoint::ping`].
    pub async fn ping_async(&self, timeout: Duration) -> Result<Duration> {
        let begin = Instant::now();
        let asked = self.start_asking(Question::Echo, "ping", timeout)?;
        if !completed(&self.shared().core, &asked.completion, None).await {
            self.shared().check_process(|| "ping".to_owned())?;
        }
        asked.result()?;
        Ok(begin.elapsed())
    }

    /// Waits until the peer answers: an engine that is being started, or started again. It pings, at growing intervals of up to
    /// 250 ms.
    ///
    /// An engine answers as soon as it listens. One that defines its procedures first, and listens then
    /// ([`Engine::listen`](crate::Engine::listen)), has all of them when this returns.
    ///
    /// # Errors
    /// The last error, when the peer has not answered by the timeout, and at once an error that waiting does not mend: see
    /// [`Error::is_retryable`](crate::Error::is_retryable).
    pub fn wait_ready(&self, timeout: Duration) -> Result<()> {
        let until = deadline(Instant::now(), timeout);
        let mut interval = Duration::from_millis(1);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.ping(left.min(LONGEST_PING)) {
                Ok(_) => return Ok(()),
                Err(error) if !error.is_retryable() || Instant::now() + interval >= until => return Err(error),
                Err(_) => {}
            }
            self.shared().pause(interval);
            interval = (2 * interval).min(Duration::from_millis(250));
        }
    }

    /// What the provider at this endpoint is, as its owner has registered it with
    /// [`Provider::register_identity`](crate::Provider::register_identity). Asks the peer, and blocks until it answers.
    ///
    /// # Errors
    /// [`Error::NoSuchProvider`](crate::Error::NoSuchProvider) when none is registered for this provider, and what
    /// [`Endpoint::ping`] may end with.
    pub fn identity(&self, timeout: Duration) -> Result<String> {
        let answer = self.ask(Question::Identity(self.provider), "identity", timeout)?;
        let text = match &answer.body {
            Body::Small(bytes) => std::str::from_utf8(bytes).ok().map(str::to_owned),
            Body::Large(_) => None,
        };
        text.ok_or_else(|| Error::Decode {
            peer: self.address(),
            side: MessageSide::Result,
            name: "identity".to_owned(),
            reason: "it is no UTF-8 text, or too long".to_owned(),
        })
    }

    /// Ends the connection, and forgets which engine was met at the address. What is in progress with the peer ends with
    /// [`Error::Disconnected`](crate::Error::Disconnected), at both ends, and its leases on this engine's memory are released.
    /// The endpoint stays valid: the next call connects again, to whichever engine is there. Memory that was exposed to this
    /// peer alone ([`Grant::only`](crate::Grant::only)) is out of its reach from then on, also when it comes back.
    pub fn forget(&self) {
        self.shared().core.exec_unless_forked(|proto| proto.forget(self.tag.id));
    }

    /// Asks the peer to finalize itself. Returns when it has accepted, before it is finalized.
    ///
    /// # Errors
    /// [`Error::AccessDenied`] where that is not allowed by
    /// [`EngineBuilder::remote_shutdown`](crate::EngineBuilder::remote_shutdown), and what any call may end with.
    pub fn shutdown(&self) -> Result<()> {
        self.ask(Question::Shutdown, "remote shutdown", self.shared().config.default_timeout).map(drop)
    }

    /// Asks the peer, and waits for the answer.
    fn ask(&self, question: Question, what: &'static str, timeout: Duration) -> Result<Placed<Answer<EngineEnv>>> {
        let asked = self.start_asking(question, what, timeout)?;
        if !asked.completion.wait(&self.shared().core, None, Awaited::Other) {
            // This thread receives the answer, so it can't wait for it.
            self.shared().check_may_wait(|| what.to_owned())?;
        }
        asked.result()
    }

    fn start_asking(&self, question: Question, what: &'static str, timeout: Duration) -> Result<AskedPeer<'_>> {
        self.shared().check(what)?;
        let completion = OwnCompletion::new();
        let now = Instant::now();
        let deadline = deadline(now, timeout);
        let started = self.shared().core.exec(|proto| proto.ask(self.tag.id, question, deadline, completion.clone(), now));
        match started {
            Ok(call) => Ok(AskedPeer { endpoint: self, what, timeout, completion, call }),
            Err(failure) => Err(self.error(failure, what, timeout)),
        }
    }

    fn error(&self, failure: Failure, what: &'static str, timeout: Duration) -> Error {
        error_of(failure, &self.tag.address, what.to_owned(), what, timeout, self.provider)
    }
}

/// A question to a peer, until it is answered; dropping it cancels it.
struct AskedPeer<'a> {
    endpoint: &'a Endpoint,
    what: &'static str,
    timeout: Duration,
    completion: OwnCompletion,
    call: CallId,
}

impl AskedPeer<'_> {
    fn result(&self) -> Result<Placed<Answer<EngineEnv>>> {
        let failure = match self.completion.take() {
            Some(OperationOutcome::Answered(Ok(answer), _)) => return Ok(answer),
            Some(OperationOutcome::Answered(Err(failure), _)) => *failure,
            _ => Failure::Finalized,
        };
        Err(self.endpoint.error(failure, self.what, self.timeout))
    }
}

impl Drop for AskedPeer<'_> {
    fn drop(&mut self) {
        if !self.completion.is_ready() {
            self.endpoint.shared().core.exec_unless_forked(|proto| proto.abandon_call(self.call, Failure::Cancelled));
        }
    }
}

/// How long one ping of [`Endpoint::wait_ready`] may take: an engine may be restarted while the old one does not answer.
const LONGEST_PING: Duration = Duration::from_secs(1);

impl Clone for Endpoint {
    fn clone(&self) -> Endpoint {
        // Not a clone of the handle, which would keep the engine alive.
        Endpoint::new(self.shared().clone(), self.tag.clone(), self.provider)
    }
}

impl AsRef<Endpoint> for Endpoint {
    fn as_ref(&self) -> &Endpoint {
        self
    }
}

impl PartialEq for Endpoint {
    fn eq(&self, other: &Endpoint) -> bool {
        self.engine == other.engine && self.tag.id == other.tag.id && self.provider == other.provider
    }
}

impl Eq for Endpoint {}

impl Hash for Endpoint {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.tag.id.hash(state);
        self.provider.hash(state);
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({}", self.tag.address)?;
        if self.provider != 0 {
            write!(f, ", provider {}", self.provider)?;
        }
        f.write_str(")")
    }
}
