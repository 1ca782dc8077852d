//! How much a link may have outstanding, and how long its messages are.

/// Longest message, in bytes.
pub(super) const MESSAGE: usize = 4096;
/// Messages that a link's peer may send before it gets credits back.
pub(super) const CREDITS: u16 = 16;
/// Buffers for messages that need no credit: two that return credits, as many as there may be staged segments whose reading
/// is reported, a farewell, and four about this RMA queue pair and the next.
pub(super) const UNCREDITED: u16 = 3 + STAGED as u16 + 4;
/// Messages that a link may have outstanding.
pub(super) const SENDS: usize = 32;
/// Requests that may be outstanding on an RMA queue pair.
pub(super) const RMA_REQUESTS: usize = 64;
/// Segments that one side of a connection may have staged and the other has not read.
pub(super) const STAGED: usize = 4;
/// Length of a staged segment, in bytes.
pub(super) const STAGE: usize = 256 << 10;
