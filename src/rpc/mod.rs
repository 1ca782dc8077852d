//! Remote procedure calls: the API of callers and of servers.

mod authorize;
mod bounded;
mod codec;
mod define;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod handlers;
mod procedure;
mod request;
mod retry;
mod service;

pub(crate) use authorize::authorization;
pub use authorize::{Caller, PeerProcess};
#[cfg(test)]
pub(crate) use bounded::decode;
pub use define::{Provider, Registration};
pub use handlers::{BorrowedArgs, HandlerResult};
pub use procedure::{Call, Pending, Procedure};
pub use request::{Request, Responder};
pub use retry::{RetriedCall, Retry};
pub(crate) use service::EngineService;
