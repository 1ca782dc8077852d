//! Remote procedure calls: the API of callers and of servers.

mod arrived;
mod authorize;
mod borrowed_args;
mod bounded;
mod calling;
mod define;
mod flat;
#[cfg(any(all(test, not(few_tests)), fuzzing))]
pub(crate) mod fuzzing;
mod handlers;
mod procedure;
mod retry;
mod service;
mod span;
mod stats;

pub(crate) use authorize::authorization;
pub use authorize::{Caller, PeerProcess};
pub use borrowed_args::BorrowedArgs;
#[cfg(test)]
pub(crate) use bounded::decode;
pub use define::{Provider, Registration};
pub use handlers::{HandlerResult, Request, Responder};
pub use procedure::{Call, Pending, Procedure};
pub use retry::{RetriedCall, Retry};
pub(crate) use service::EngineService;
pub(crate) use stats::serve_stats;
