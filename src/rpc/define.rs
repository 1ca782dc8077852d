//! Providers, and what defines procedures.

use std::fmt;
use std::sync::{Arc, Weak};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::borrowed_args::BorrowedArgs;
use super::handlers::{self, AnswerTime, HandlerBase, HandlerError, Request, RequestHandler, Responder};
use crate::engine::{Engine, EngineShared, HandlerPool};
use crate::progress::HandlerClass;
use crate::proto::wire::MAX_NAME;
use crate::{Error, Result};

/// One of several sets of procedures behind an engine's address, identified by a number: each can define the same names.
/// Made by [`Engine::provider`](crate::Engine::provider).
#[derive(Clone)]
pub struct Provider {
    shared: Arc<EngineShared>,
    id: u16,
    pool: Option<HandlerPool>,
}

impl Provider {
    /// The provider itself: `define_methods` needs a method of this name.
    fn root(&self) -> &Provider {
        self
    }

    /// The provider's number; 0 is the engine itself.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// The same provider, with `pool` to run the handlers that are defined through it.
    pub fn pool(&self, pool: &HandlerPool) -> Provider {
        Provider { pool: Some(pool.clone()), ..self.clone() }
    }

    /// The engine that serves the procedures. The handle keeps it alive.
    pub fn engine(&self) -> Engine {
        Engine::from_shared(self.shared.clone()).clone()
    }

    /// The names of the provider's procedures, in order.
    pub fn procedures(&self) -> Vec<String> {
        let own = |(id, name): (u16, String)| (id == self.id).then_some(name);
        self.root_engine().procedures().into_iter().filter_map(own).collect()
    }

    /// Registers what this provider is, such as the name of the service: peers ask for it with
    /// [`Endpoint::identity`](crate::Endpoint::identity), which each peer may that this engine accepts.
    ///
    /// # Errors
    /// [`Error::AlreadyDefined`] when the provider has an identity; [`Error::MessageTooLarge`] for more than 1024 bytes;
    /// [`Error::Finalized`].
    pub fn register_identity(&self, identity: &str) -> Result<()> {
        self.shared.check("registering an identity")?;
        self.check_name(identity)?;
        let taken = self.shared.core.exec(|proto| {
            let taken = proto.identity(self.id).is_some();
            if !taken {
                proto.set_identity(self.id, Some(identity.to_owned()));
            }
            taken
        });
        if taken { Err(Error::AlreadyDefined { name: "identity".to_owned(), provider: self.id }) } else { Ok(()) }
    }

    /// What this provider is; `None` when that is not registered.
    pub fn identity(&self) -> Option<String> {
        if self.shared.core.is_forked() {
            return None;
        }
        self.shared.core.with_proto(|proto| proto.identity(self.id).cloned())
    }

    /// Removes the provider as a whole: all its procedures, and its identity. Returns the number of procedures. Later calls end
    /// with [`Error::NoSuchProvider`], handlers in progress go on.
    pub fn remove(&self) -> usize {
        if self.shared.core.is_forked() {
            return 0;
        }
        self.shared.core.exec(|proto| proto.set_identity(self.id, None));
        self.shared.registry.remove_provider(self.id)
    }

    fn root_engine(&self) -> Engine {
        Engine::from_shared(self.shared.clone())
    }

    fn check_name(&self, name: &str) -> Result<()> {
        if name.len() <= MAX_NAME {
            return Ok(());
        }
        let (peer, start) = (self.shared.own_address(), name.chars().take(40).collect::<String>());
        Err(Error::MessageTooLarge { peer, name: format!("{start}…"), size: name.len(), limit: MAX_NAME })
    }

    fn add<H: RequestHandler>(&self, name: &str, answers: AnswerTime, handler: H) -> Result<Registration> {
        self.shared.check("define")?;
        self.check_name(name)?;
        let class = HandlerClass::in_pool(self.pool.as_ref().map(HandlerPool::workers));
        let calls = self.shared.statistics.handled(self.id, name);
        let handler = HandlerBase::new(&self.shared, class, answers, calls).with(handler);
        let registry = &self.shared.registry;
        let number = registry.add(self.id, name, handler, self.pool.clone());
        let number = number.ok_or_else(|| Error::AlreadyDefined { name: name.to_owned(), provider: self.id })?;
        // The engine may have been finalized meanwhile, and have dropped its handlers before this one was added.
        self.shared.check("define").inspect_err(|_| {
            registry.remove(self.id, name, number);
        })?;
        Ok(Registration { shared: Arc::downgrade(&self.shared), provider: self.id, name: name.into(), number })
    }
}

/// The methods that define procedures, for [`Engine`] and for [`Provider`].
macro_rules! define_methods {
    ($owner:ty) => {
        impl $owner {
            /// Serves a procedure with a closure: `define("sum", |_: &Request, (x, y): (i32, i32)| x + y)`.
            ///
            /// It may block, call others (its caller too), and transfer. It runs where the request was received as long as it is
            /// quick, and on a handler thread once it has blocked or has taken long. When it panics, the caller gets
            /// [`Error::HandlerPanicked`].
            ///
            /// The engine owns the closure, so a closure that captures a clone of it, as in `move |…| engine.…`, keeps it alive until
            /// [`Engine::finalize`] is called: dropping the other handles does not end it, and the engine goes on serving. Use
            /// [`Request::engine`](crate::Request::engine) in it, or capture a [`WeakEngine`](crate::WeakEngine). Endpoints, procedures, providers, bulks
            /// and exposures can be captured: they do not keep an engine alive. An engine that finds, when it is finalized, that its
            /// handlers have captured handles of it, logs a warning under the target `calomel::engine`.
            ///
            /// # Types
            /// Arguments and results are written without names or types, so the two ends are compared first, by structure, and a
            /// caller whose types differ gets [`Error::TypeMismatch`]. Serde types travel as long as they can be read without asking
            /// what comes next. `rename`, `alias`, `skip` (of a field, and of the last variants of an enum), `transparent`, `with`,
            /// `from` and `into` work. Enums with `#[serde(untagged)]` or `#[serde(tag = "…")]` and types such as
            /// `serde_json::Value` can't be received ([`Error::Decode`]), `#[serde(flatten)]` can't be sent ([`Error::Encode`]),
            /// nor can a field that `skip_serializing_if` leaves out. `default` has no effect: a field that only one side has is a
            /// mismatch.
            ///
            /// Values nest 128 levels deep: a list whose nodes hold an `Option<Box<Node>>` has 63 nodes at most. To learn what a
            /// type reads, its `Deserialize` runs on values that are made up, such as zeros, when the first call arrives; a panic
            /// there is caught, and the panic hook writes it.
            ///
            /// # Errors
            /// [`Error::AlreadyDefined`], [`Error::Finalized`], and [`Error::MessageTooLarge`] for a name of more than 1024 bytes.
            pub fn define<A, R, F>(&self, name: &str, handler: F) -> Result<Registration>
            where
                A: DeserializeOwned + 'static,
                R: Serialize + 'static,
                F: Fn(&Request, A) -> R + Send + Sync + 'static,
            {
                self.root().add(name, AnswerTime::OnReturn, handlers::blocking(handler))
            }

            /// Serves a procedure with a closure that may fail: `?` works in it. The caller gets the value of an `Ok`; of an `Err`
            /// it gets [`Error::Failed`] with the error's text. Any error will do: this library's, one of your own, a text.
            /// Where several kinds meet, return a [`HandlerResult`](crate::HandlerResult).
            ///
            /// To send errors as values, which callers can match on, return a `Result` from [`Engine::define`].
            ///
            /// ```
            /// use calomel::{Engine, Error, Request};
            ///
            /// # fn main() -> calomel::Result<()> {
            /// let server = Engine::server("loop://")?;
            /// server.define_try("parse", |_: &Request, text: String| text.parse::<i32>())?;
            ///
            /// let client = Engine::client("loop")?;
            /// let peer = client.lookup(server.address())?;
            /// let parse = client.procedure::<str, i32>("parse");
            /// assert_eq!(parse.on(&peer).call("42")?, 42);
            /// assert!(matches!(parse.on(&peer).call("x"), Err(Error::Failed { .. })));
            /// # Ok(())
            /// # }
            /// ```
            ///
            /// # Errors
            /// As [`Engine::define`].
            pub fn define_try<A, R, E, F>(&self, name: &str, handler: F) -> Result<Registration>
            where
                A: DeserializeOwned + 'static,
                R: Serialize + 'static,
                E: Into<HandlerError>,
                F: Fn(&Request, A) -> std::result::Result<R, E> + Send + Sync + 'static,
            {
                self.root().add(name, AnswerTime::OnReturn, handlers::fallible(handler))
            }

            /// Serves a procedure with an async closure. No executor is needed: the engine polls the future. When the caller
            /// cancels, times out or disconnects, the future is dropped; that of a one-way call runs to its end, or to that of
            /// the engine. What the closure captures must not keep the engine alive, as with [`Engine::define`]; a future that
            /// holds a clone of the engine keeps it alive until the future is done or dropped.
            ///
            /// # Errors
            /// As [`Engine::define`].
            pub fn define_async<A, R, F, Fut>(&self, name: &str, handler: F) -> Result<Registration>
            where
                A: DeserializeOwned + 'static,
                R: Serialize + 'static,
                F: Fn(Request, A) -> Fut + Send + Sync + 'static,
                Fut: Future<Output = R> + Send + 'static,
            {
                self.root().add(name, AnswerTime::Later, handlers::asynchronous(handler))
            }

            /// Serves a procedure with an async closure that may fail: of an `Err` the caller gets [`Error::Failed`] with the
            /// error's text. See [`Engine::define_try`] and [`Engine::define_async`].
            ///
            /// # Errors
            /// As [`Engine::define`].
            pub fn define_try_async<A, R, E, F, Fut>(&self, name: &str, handler: F) -> Result<Registration>
            where
                A: DeserializeOwned + 'static,
                R: Serialize + 'static,
                E: Into<HandlerError>,
                F: Fn(Request, A) -> Fut + Send + Sync + 'static,
                Fut: Future<Output = std::result::Result<R, E>> + Send + 'static,
            {
                self.root().add(name, AnswerTime::Later, handlers::fallible_async(handler))
            }

            /// Serves a procedure that responds later, from any thread, through the [`Responder`](crate::Responder).
            ///
            /// # Errors
            /// As [`Engine::define`].
            pub fn define_deferred<A, R, F>(&self, name: &str, handler: F) -> Result<Registration>
            where
                A: DeserializeOwned + 'static,
                R: Serialize + 'static,
                F: Fn(Responder<R>, A) + Send + Sync + 'static,
            {
                self.root().add(name, AnswerTime::Later, handlers::deferred(handler))
            }

            /// Serves a procedure whose arguments are borrowed from the bytes that were received: no copy of a large `str` or `[u8]` is
            /// made. The type parameter names what is borrowed: `define_borrowed::<str, _, _>("len", |_: &Request, s: &str| s.len())`.
            ///
            /// # Errors
            /// As [`Engine::define`].
            pub fn define_borrowed<A, R, F>(&self, name: &str, handler: F) -> Result<Registration>
            where
                A: BorrowedArgs + ?Sized + 'static,
                R: Serialize + 'static,
                F: for<'a> Fn(&Request, A::With<'a>) -> R + Send + Sync + 'static,
            {
                self.root().add(name, AnswerTime::OnReturn, handlers::borrowing::<A, R, F>(handler))
            }
        }
    };
}

define_methods!(Engine);
define_methods!(Provider);

impl Engine {
    /// Provider 0 of this engine.
    fn root(&self) -> Provider {
        Provider { shared: self.shared().clone(), id: 0, pool: None }
    }

    /// The provider of this number: its procedures are its own, and callers reach them through
    /// [`Endpoint::provider`](crate::Endpoint::provider). Provider 0 is the engine itself.
    pub fn provider(&self, id: u16) -> Provider {
        Provider { id, ..self.root() }
    }

    /// The procedures that the engine serves: their providers and names, in order.
    pub fn procedures(&self) -> Vec<(u16, String)> {
        let shared = self.shared();
        if shared.core.is_forked() { Vec::new() } else { shared.registry.names() }
    }

    /// Provider 0, with `pool` to run the handlers that are defined through it.
    pub fn pool(&self, pool: &HandlerPool) -> Provider {
        self.root().pool(pool)
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Provider({})", self.id)
    }
}

/// A defined procedure. Dropping this leaves the procedure defined; [`Registration::remove`] removes it.
#[derive(Clone, Debug)]
pub struct Registration {
    shared: Weak<EngineShared>,
    provider: u16,
    name: Arc<str>,
    number: u64,
}

impl Registration {
    /// Removes the procedure: later calls end with [`Error::NoSuchProcedure`], handlers in progress go on. False when it was
    /// removed before.
    pub fn remove(&self) -> bool {
        let shared = self.shared.upgrade().filter(|shared| !shared.core.is_forked());
        shared.is_some_and(|shared| shared.registry.remove(self.provider, &self.name, self.number))
    }

    /// The name that the procedure was defined with.
    pub fn name(&self) -> &str {
        &self.name
    }
}
