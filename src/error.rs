//! What can go wrong, as one type.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::Address;

/// The result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Which side of a call found fault with its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The arguments, as the serving side decoded them.
    Arguments,
    /// The result, as the calling side decoded it.
    Result,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Arguments => "arguments",
            Side::Result => "result",
        })
    }
}

/// Why a call, a transfer or an operation of the engine failed.
///
/// Each variant names the peer and the numbers, where there are any. `what` describes the operation, such as
/// ``call of `sum` `` or `pull of 4096 bytes`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The deadline passed before the answer came.
    #[error("{what} at {peer} timed out after {after:?}")]
    Timeout {
        /// Who was asked.
        peer: Address,
        /// The operation.
        what: String,
        /// The time that it was given.
        after: Duration,
    },
    /// It was cancelled, by [`Pending::cancel`](crate::Pending::cancel) or its like.
    #[error("{what} at {peer} was cancelled")]
    Cancelled {
        /// Who was asked.
        peer: Address,
        /// The operation.
        what: String,
    },
    /// No connection could be made.
    #[error("{peer} can't be reached: {reason}")]
    Unreachable {
        /// Who was to be reached.
        peer: Address,
        /// The cause in words.
        reason: String,
        /// The system's error, if it was one.
        source: Option<Arc<io::Error>>,
    },
    /// The connection ended while the operation was in progress: the peer died, closed, or fell silent.
    #[error("{what} failed: {peer} disconnected: {reason}")]
    Disconnected {
        /// Who went away.
        peer: Address,
        /// The operation.
        what: String,
        /// The cause in words.
        reason: String,
    },
    /// The peer at this address is a new process; what the old one held is gone.
    #[error("{what} failed: the engine at {peer} was restarted")]
    PeerRestarted {
        /// The address that the new process has taken over.
        peer: Address,
        /// The operation.
        what: String,
    },
    /// The peer defines no procedure of this name.
    #[error("{peer} defines no procedure `{name}`")]
    NoSuchProcedure {
        /// Who was asked.
        peer: Address,
        /// The procedure.
        name: String,
    },
    /// The peer has no provider of this number.
    #[error("{peer} has no provider {provider} (procedure `{name}` was asked for)")]
    NoSuchProvider {
        /// Who was asked.
        peer: Address,
        /// The procedure.
        name: String,
        /// The provider.
        provider: u16,
    },
    /// The handler gave its responder away unanswered.
    #[error("`{name}` at {peer} ended without an answer")]
    NoResponse {
        /// Who was asked.
        peer: Address,
        /// The procedure.
        name: String,
    },
    /// The handler panicked; the server lives on.
    #[error("`{name}` at {peer} panicked: {message}")]
    HandlerPanicked {
        /// Who was asked.
        peer: Address,
        /// The procedure.
        name: String,
        /// The panic's message.
        message: String,
    },
    /// The handler answered with [`Responder::fail`](crate::Responder::fail).
    #[error("`{name}` at {peer} failed: {message}")]
    Failed {
        /// Who was asked.
        peer: Address,
        /// The procedure.
        name: String,
        /// What the handler said.
        message: String,
    },
    /// A value could not be encoded: its `Serialize` refuses, or needs a format that describes itself.
    #[error("the {side} of `{name}` can't be encoded ({peer}): {reason}")]
    Encode {
        /// The other end.
        peer: Address,
        /// Arguments or result.
        side: Side,
        /// The procedure.
        name: String,
        /// The cause in words.
        reason: String,
    },
    /// Bytes could not be decoded: they are no value of the type, or the type needs a format that describes itself.
    #[error("the {side} of `{name}` can't be decoded ({peer}): {reason}")]
    Decode {
        /// The other end.
        peer: Address,
        /// Arguments or result.
        side: Side,
        /// The procedure.
        name: String,
        /// The codec's words.
        reason: String,
    },
    /// The two ends disagree on the type of the arguments or of the result.
    #[error("type mismatch in the {side} of `{name}` ({peer}): expected {expected}, found {found}")]
    TypeMismatch {
        /// The other end.
        peer: Address,
        /// Arguments or result.
        side: Side,
        /// The procedure.
        name: String,
        /// The receiver's type.
        expected: String,
        /// What the sender sent.
        found: String,
    },
    /// Arguments or result exceed the limit on messages of the sender or of the receiver, in bytes.
    #[error("message of {size} bytes exceeds the limit of {limit} bytes")]
    MessageTooLarge {
        /// Size of the encoded message, in bytes.
        size: usize,
        /// The limit that was in force, in bytes.
        limit: usize,
    },
    /// A range that does not lie inside the memory it was asked of; all three in bytes.
    #[error("{len} bytes at offset {offset} lie outside the {size} bytes there are")]
    OutOfRange {
        /// Where the range begins.
        offset: usize,
        /// How long the range is.
        len: usize,
        /// How long the memory is.
        size: usize,
    },
    /// The peer refused: an exposure's mode or options forbid the access, the token is not one of its own, a call is not
    /// allowed to this caller, or the two engines do not share a key.
    #[error("{what}: {peer} denied access: {reason}")]
    AccessDenied {
        /// Who refused.
        peer: Address,
        /// The operation.
        what: String,
        /// The cause in words.
        reason: String,
    },
    /// What arrived is not what was sent: a checksum does not match. No data was taken from it.
    #[error("{what} at {peer} failed: a checksum does not match")]
    Checksum {
        /// The other end.
        peer: Address,
        /// The operation.
        what: String,
    },
    /// The memory was taken back by its owner.
    #[error("{what} failed: the memory exposed by {peer} was taken back")]
    Revoked {
        /// The owner.
        peer: Address,
        /// The operation.
        what: String,
    },
    /// The engine was finalized.
    #[error("{what} failed: the engine is finalized")]
    Finalized {
        /// The operation.
        what: String,
    },
    /// This name is taken: remove the earlier registration first.
    #[error("procedure `{name}` is already defined at provider {provider}")]
    AlreadyDefined {
        /// The procedure.
        name: String,
        /// The provider.
        provider: u16,
    },
    /// Somebody listens at this address already.
    #[error("address {address} is in use")]
    AddressInUse {
        /// The address.
        address: Address,
    },
    /// The text is not an address.
    #[error("invalid address `{text}`: {reason}")]
    InvalidAddress {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Two objects that belong to different engines were used together: an endpoint with the procedure of another engine,
    /// an exposure in another engine's transfer, a bulk at a peer that is not its owner. Nothing was sent, and no byte moved;
    /// but where an endpoint had no connection yet, so that its peer had to be asked.
    #[error("{what} failed: {object} belongs to {}, and was used with {}", engine_at(belongs_to), engine_at(used_with))]
    OtherEngine {
        /// The operation.
        what: String,
        /// What belongs to another engine.
        object: &'static str,
        /// Where the engine listens that it belongs to, if it does.
        belongs_to: Option<Address>,
        /// Where the engine listens that it was used with, if it does.
        used_with: Option<Address>,
    },
    /// Not to be had in this build or on this machine.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why not.
        reason: String,
    },
    /// The two engines have no version of the protocol in common.
    #[error("{peer} speaks protocol versions {}..={}, this engine {}..={}", theirs.0, theirs.1, ours.0, ours.1)]
    Version {
        /// The other end.
        peer: Address,
        /// Lowest and highest version spoken here.
        ours: (u16, u16),
        /// Lowest and highest version spoken there.
        theirs: (u16, u16),
    },
    /// The peer has more requests than it takes at a time; try again later.
    #[error("`{name}`: {peer} is busy: {reason}")]
    Busy {
        /// Who was asked.
        peer: Address,
        /// The procedure.
        name: String,
        /// Which limit was reached.
        reason: String,
    },
    /// The system refused something that the engine needs.
    #[error("{what}: {source}")]
    Io {
        /// The operation.
        what: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
}

/// An engine, in the middle of a sentence.
fn engine_at(address: &Option<Address>) -> String {
    match address {
        Some(address) => format!("the engine at {address}"),
        None => "an engine that does not listen".to_owned(),
    }
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Error {
        Error::Io { what: what.into(), source: Arc::new(source) }
    }

    /// True for [`Error::Timeout`].
    pub fn is_timeout(&self) -> bool {
        matches!(self, Error::Timeout { .. })
    }

    /// True when the peer went away, could not be reached, or came back as a new process.
    pub fn is_disconnected(&self) -> bool {
        matches!(self, Error::Disconnected { .. } | Error::Unreachable { .. } | Error::PeerRestarted { .. })
    }

    /// True when the same call may succeed later, with no change to the program: the peer was busy, absent, or too slow, or
    /// bytes were damaged. The call may have been carried out: whether it can be repeated is the caller's to know.
    pub fn is_retryable(&self) -> bool {
        use Error::{Busy, Checksum, Disconnected, Timeout, Unreachable};
        matches!(self, Timeout { .. } | Unreachable { .. } | Disconnected { .. } | Busy { .. } | Checksum { .. })
    }
}
