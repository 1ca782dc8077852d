//! What transports report, and the shared-memory one: its ring, its doorbell, its loans, and both ends of a link.

use crate::memory::Slice;
pub(crate) use crate::payload::{Consumed, PartialFrame, PayloadStatus, ReceiveTarget};

#[derive(Clone, Copy)]
pub(crate) struct LinkKey;

pub(crate) trait Sink {
    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>>;
    fn payload_done(&mut self, key: LinkKey, status: PayloadStatus);
    fn heard(&mut self, key: LinkKey);
}

pub(crate) mod shm;

fn closed_by_peer() -> std::io::Error {
    std::io::ErrorKind::ConnectionAborted.into()
}
