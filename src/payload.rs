//! What the protocol and the transports both handle: keys of remote memory, and payloads that arrive.

use std::sync::Arc;

/// What a device reaches a peer's memory by. The transport that made them reads them; every other layer passes them on.
pub(crate) type RemoteKeys = Arc<[u8]>;

/// Where a payload belongs.
pub(crate) struct ReceiveTarget<M> {
    /// `None`: it is discarded.
    pub memory: Option<M>,
    pub len: usize,
}

/// How a payload arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadStatus {
    Whole,
    /// The sender lost the memory meanwhile: the bytes mean nothing.
    SourceGone,
    /// The memory that they were for is gone.
    TargetGone,
    /// The bytes are not those that were sent: their checksum does not match.
    Damaged,
}

/// What became of bytes that a transport brought.
pub(crate) struct Consumed<M> {
    /// So many are done with; the rest begins an incomplete frame, and comes again with more behind it.
    pub used: usize,
    /// The bytes behind those are payload.
    pub target: Option<ReceiveTarget<M>>,
}
