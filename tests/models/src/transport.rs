//! What transports report, and the shared-memory one: its ring, its doorbell, its loans, and both ends of a link.

use crate::memory::Slice;

#[derive(Clone, Copy)]
pub(crate) struct LinkKey;

pub(crate) struct Place {
    pub target: Option<Slice>,
    pub len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landed {
    Whole,
    SourceGone,
    TargetGone,
}

pub(crate) struct Taken {
    pub used: usize,
    pub place: Option<Place>,
}

pub(crate) trait Sink {
    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Taken>;
    fn placed(&mut self, key: LinkKey, landed: Landed);
    fn heard(&mut self, key: LinkKey);
}

#[path = "../../../src/transport/rest.rs"]
mod rest;
pub(crate) mod shm;
