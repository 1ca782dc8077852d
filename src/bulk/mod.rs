//! Bulk data: exposed memory, the handles to it, and transfers.

mod borrowed;
mod descriptor;
mod exposed;
mod exposure_state;
mod grant;
mod mode;
mod pool;
mod remote;
mod scope;
mod transfer;
mod wire;

pub use borrowed::{BorrowedSegments, BorrowedSegmentsMut};
pub use descriptor::Bulk;
pub use exposed::{Exposed, ExposedSlice};
pub use exposure_state::Released;
pub use grant::Grant;
pub use mode::BulkMode;
pub use remote::{PullTarget, PushSource, RemoteBulk};
pub use scope::Scope;
pub use transfer::{LocalMemory, Transfer, TransferBuffer};
