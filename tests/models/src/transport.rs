//! What transports report, and the shared-memory one: its ring, its doorbell, its loans, and both ends of a link.

use crate::memory::Slice;

#[derive(Clone, Copy)]
pub(crate) struct LinkKey;

pub(crate) struct TransportTarget {
    pub target: Option<Slice>,
    pub len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransportStatus {
    Whole,
    SourceGone,
    TargetGone,
}

pub(crate) struct TransportConsumed {
    pub used: usize,
    pub target: Option<TransportTarget>,
}

pub(crate) trait Sink {
    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<TransportConsumed>;
    fn payload_done(&mut self, key: LinkKey, status: TransportStatus);
    fn heard(&mut self, key: LinkKey);
}

#[path = "../../../src/transport/partial_frame.rs"]
mod partial_frame;
pub(crate) mod shm;
