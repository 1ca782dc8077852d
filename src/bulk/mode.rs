//! Modes: what peers, and their devices, may do with exposed memory.

use serde::{Deserialize, Serialize};

use crate::progress;
use crate::proto::Mode;

/// What *peers* may do with exposed memory. The engine that exposes it may always read it, and write it unless it was
/// exposed with [`Engine::expose_read_only`](crate::Engine::expose_read_only).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BulkMode {
    /// Peers pull.
    ReadOnly,
    /// Peers push.
    WriteOnly,
    /// Peers pull and push.
    ReadWrite,
}

impl BulkMode {
    pub(super) fn access(self) -> Mode {
        Mode { read: self != BulkMode::WriteOnly, write: self != BulkMode::ReadOnly }
    }
}

/// How memory is exposed: whether it can change, and what peers may do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExposeMode {
    /// Neither peers nor this engine write it while it is exposed.
    Constant,
    /// Peers have the access of the mode, and this engine may write.
    Changing(BulkMode),
}

impl ExposeMode {
    pub(super) fn mode(self) -> BulkMode {
        match self {
            ExposeMode::Constant => BulkMode::ReadOnly,
            ExposeMode::Changing(mode) => mode,
        }
    }

    /// What peers' devices may do.
    pub(super) fn of_devices(self) -> progress::DeviceAccess {
        let Mode { read, write } = self.mode().access();
        progress::DeviceAccess { read, write, constant: self == ExposeMode::Constant }
    }
}
