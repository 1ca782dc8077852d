//! Remote procedure calls with closures, and bulk data moved straight between the memories of two processes.
//!
//! The entry point is [`Engine`].

#![deny(unsafe_code)]

mod address;
mod bulk;
mod endpoint;
mod engine;
mod error;
mod memory;
mod progress;
mod proto;
mod rpc;
mod transport;

pub use address::{Address, IntoAddress, Scheme};
pub use bulk::{Bulk, BulkMode, Exposed, ExposedSlice, Local, PullTarget, PushSource, Released, RemoteBulk, Scope, Transfer};
pub use endpoint::Endpoint;
pub use engine::{Engine, EngineBuilder, Timer};
pub use error::{Error, Result, Side};
pub use memory::{
    Buffer, BufferPool, EngineBuffer, PooledBuffer, ReadElement, ReadOnly, Segments, View, Writable, WritableBuffer,
};
pub use progress::Progress;
pub use rpc::{BorrowedArgs, Call, HandlerPool, Pending, Procedure, Provider, Registration, Request, Responder};
