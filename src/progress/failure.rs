//! The error that a user gets for each failure of the protocol.

use std::time::Duration;

use crate::proto::{self, Failure};
use crate::{Address, Error};

/// The error for a failure of `what`, which the caller waits for at `peer`.
pub(crate) fn error_of(failure: Failure, peer: &Address, what: String, name: &str, after: Duration, provider: u16) -> Error {
    let peer = peer.clone();
    let name = name.to_owned();
    use proto::Status;
    match failure {
        Failure::Timeout => Error::Timeout { peer, what, after },
        Failure::Cancelled => Error::Cancelled { peer, what },
        Failure::Unreachable { reason, source } => Error::Unreachable { peer, reason, cause: source },
        Failure::Disconnected { reason } => Error::Disconnected { peer, what, reason },
        Failure::PeerRestarted | Failure::Refused(Status::Restarted) => Error::PeerRestarted { peer, what },
        Failure::TooLarge { size, limit } | Failure::Refused(Status::TooLarge { size, limit }) => {
            Error::MessageTooLarge { peer, name, size: size as usize, limit: limit as usize }
        }
        Failure::Version { theirs } => Error::Version { peer, ours: proto::wire::VERSIONS, theirs },
        Failure::Unauthorized { reason } => Error::AccessDenied { peer, what, reason },
        Failure::Checksum | Failure::Refused(Status::Checksum) => Error::Checksum { peer, what },
        Failure::Finalized => Error::Finalized { what },
        Failure::Revoked | Failure::Refused(Status::Revoked) => Error::Revoked { peer, what },
        Failure::Refused(status) => match status {
            Status::NoSuchProcedure => Error::NoSuchProcedure { peer, name },
            Status::NoSuchProvider => Error::NoSuchProvider { peer, name, provider },
            Status::Panicked(message) => Error::HandlerPanicked { peer, name, message },
            Status::Failed(message) => Error::Failed { peer, name, message },
            Status::Decode(reason) => Error::Decode { peer, side: crate::MessageSide::Arguments, name, reason },
            Status::Encode(reason) => Error::Encode { peer, side: crate::MessageSide::Result, name, reason },
            Status::TypeMismatch { expected, found } => {
                Error::TypeMismatch { peer, side: crate::MessageSide::Arguments, name, expected, found }
            }
            Status::Busy(reason) => Error::Busy { peer, name, reason },
            Status::AccessDenied(reason) => Error::AccessDenied { peer, what, reason },
            Status::OutOfRange { offset, len, size } => {
                Error::OutOfRange { offset: offset as usize, len: len as usize, size: size as usize }
            }
            Status::Finalizing => Error::Disconnected { peer, what, reason: "it is being finalized".to_owned() },
            // Handled above, or no failures: a peer that sends these as a failure violates the protocol.
            Status::NoResponse
            | Status::Ok
            | Status::Revoked
            | Status::Restarted
            | Status::Checksum
            | Status::TooLarge { .. } => Error::NoResponse { peer, name },
        },
    }
}
