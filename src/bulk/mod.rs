//! Bulk data: exposed memory, the handles to it, and transfers.

mod descriptor;
mod exposed;
mod exposure_state;
mod grant;
mod lease;
mod local;
mod remote;
mod scope;
mod transfer;

pub use descriptor::{Bulk, BulkMode};
pub(crate) use descriptor::{ForeignCopies, Origin};
pub use exposed::{Exposed, ExposedSlice};
pub(crate) use exposed::{expose, expose_read_only};
pub use grant::Grant;
pub use lease::Released;
pub use local::{PullTarget, PushSource};
pub use remote::RemoteBulk;
pub use scope::Scope;
pub(crate) use scope::scope;
pub use transfer::{Local, Transfer};
