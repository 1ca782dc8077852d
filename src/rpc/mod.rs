//! Remote procedure calls: the API of callers and of servers.

mod authorize;
mod bounded;
mod codec;
mod define;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod handlers;
mod pending;
mod procedure;
mod request;
mod service;

pub(crate) use authorize::Authorize;
pub use authorize::{Caller, PeerProcess};
#[cfg(test)]
pub(crate) use bounded::decode;
#[cfg(test)]
pub(crate) use codec::decoding;
pub(crate) use codec::{DecodeContext, EncodeContext, RemoteLease};
pub(crate) use define::Registry;
pub use define::{HandlerPool, Provider, Registration};
pub use handlers::BorrowedArgs;
pub use pending::Pending;
pub use procedure::{Call, Procedure};
pub(crate) use procedure::{Procedures, deadline};
pub use request::{Request, Responder};
pub(crate) use service::EngineService;
