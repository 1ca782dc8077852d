//! `Error`: the error type of the crate.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::Address;

/// The result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Which message of a call an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MessageSide {
    /// The arguments, which the server decodes.
    Arguments,
    /// The result, which the caller decodes.
    Result,
}

impl std::fmt::Display for MessageSide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MessageSide::Arguments => "arguments",
            MessageSide::Result => "result",
        })
    }
}

/// Why a call, a transfer or an operation of the engine failed.
///
/// Each variant has the peer and the numbers, where there are any. `what` describes the operation, such as ``call of `sum` ``
/// or `pull of 4096 bytes`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The deadline passed before the operation had ended. It may have been carried out.
    #[error("{what} at {peer} timed out after {after:?}")]
    Timeout {
        /// The peer.
        peer: Address,
        /// The operation.
        what: String,
        /// The timeout that was in force.
        after: Duration,
    },
    /// The operation was cancelled, by [`Pending::cancel`](crate::Pending::cancel) or its like.
    #[error("{what} at {peer} was cancelled")]
    Cancelled {
        /// The peer.
        peer: Address,
        /// The operation.
        what: String,
    },
    /// No connection could be made.
    #[error("{peer} can't be reached: {reason}")]
    Unreachable {
        /// The address that was dialled.
        peer: Address,
        /// The cause.
        reason: String,
        /// The system's error, if there was one. `reason` has its text, so it is no
        /// [source](std::error::Error::source): reports of all sources would have it twice.
        cause: Option<Arc<io::Error>>,
    },
    /// The connection ended while the operation was in progress: the peer died, closed the connection, or exceeded the peer
    /// timeout.
    #[error("{what} failed: {peer} disconnected: {reason}")]
    Disconnected {
        /// The peer whose connection ended.
        peer: Address,
        /// The operation.
        what: String,
        /// The cause.
        reason: String,
    },
    /// The peer at this address is a new engine; the old one's exposed memory and state are gone.
    #[error("{what} failed: the engine at {peer} was restarted")]
    PeerRestarted {
        /// The address, now the new engine's.
        peer: Address,
        /// The operation.
        what: String,
    },
    /// The peer defines no procedure of this name.
    #[error("{peer} defines no procedure `{name}`")]
    NoSuchProcedure {
        /// The peer.
        peer: Address,
        /// The procedure.
        name: String,
    },
    /// The peer has no provider of this number.
    #[error("{peer} has no provider {provider} (procedure `{name}` was asked for)")]
    NoSuchProvider {
        /// The peer.
        peer: Address,
        /// The procedure.
        name: String,
        /// The provider.
        provider: u16,
    },
    /// The handler dropped its responder without a response.
    #[error("`{name}` at {peer} ended without an answer")]
    NoResponse {
        /// The peer.
        peer: Address,
        /// The procedure.
        name: String,
    },
    /// The handler panicked, or the decoding of its arguments or the encoding of its result did; the server keeps running.
    #[error("`{name}` at {peer} panicked: {message}")]
    HandlerPanicked {
        /// The peer.
        peer: Address,
        /// The procedure.
        name: String,
        /// The panic's message.
        message: String,
    },
    /// The handler answered with [`Responder::fail`](crate::Responder::fail).
    #[error("`{name}` at {peer} failed: {message}")]
    Failed {
        /// The peer.
        peer: Address,
        /// The procedure.
        name: String,
        /// The handler's message.
        message: String,
    },
    /// A value could not be encoded: its `Serialize` fails, or needs a format that describes itself.
    #[error("the {side} of `{name}` can't be encoded ({peer}): {reason}")]
    Encode {
        /// The other end.
        peer: Address,
        /// Arguments or result.
        side: MessageSide,
        /// The procedure.
        name: String,
        /// The cause.
        reason: String,
    },
    /// Bytes could not be decoded: they are no value of the type, or the type needs a format that describes itself.
    #[error("the {side} of `{name}` can't be decoded ({peer}): {reason}")]
    Decode {
        /// The other end.
        peer: Address,
        /// Arguments or result.
        side: MessageSide,
        /// The procedure.
        name: String,
        /// What the type says of the value, up to 300 bytes, or what is wrong with the bytes.
        reason: String,
    },
    /// The two ends disagree on the type of the arguments or of the result.
    #[error("type mismatch in the {side} of `{name}` ({peer}): expected {expected}, found {found}")]
    TypeMismatch {
        /// The other end.
        peer: Address,
        /// Arguments or result.
        side: MessageSide,
        /// The procedure.
        name: String,
        /// The receiver's type.
        expected: String,
        /// What the sender sent.
        found: String,
    },
    /// Arguments or result exceed the limit on messages of the sender or of the receiver, in bytes.
    #[error("`{name}` at {peer}: message of {size} bytes exceeds the limit of {limit} bytes")]
    MessageTooLarge {
        /// The other end.
        peer: Address,
        /// The procedure.
        name: String,
        /// Size of the encoded message, in bytes.
        size: usize,
        /// The limit that was in force, in bytes.
        limit: usize,
    },
    /// A range that does not lie inside the memory; all numbers in bytes.
    #[error("{len} bytes at offset {offset} lie outside the {size} bytes there are")]
    OutOfRange {
        /// Offset of the range.
        offset: usize,
        /// Length of the range.
        len: usize,
        /// Length of the memory.
        size: usize,
    },
    /// The exposed memory has no segment of this index; the first has index 0.
    #[error("there is no segment {index}: the memory has {count} segments")]
    NoSuchSegment {
        /// The index.
        index: usize,
        /// How many segments there are.
        count: usize,
    },
    /// The peer refused: the exposure's mode or [`Grant`](crate::Grant) forbids the access, it does not know the token, it does
    /// not allow this call, or authentication failed (pre-shared key, TLS).
    #[error("{what}: {peer} denied access: {reason}")]
    AccessDenied {
        /// The peer that refused.
        peer: Address,
        /// The operation.
        what: String,
        /// The cause.
        reason: String,
    },
    /// Data was corrupted in transit: its checksum does not match. The data was discarded.
    #[error("{what} at {peer} failed: a checksum does not match")]
    Checksum {
        /// The other end.
        peer: Address,
        /// The operation.
        what: String,
    },
    /// The owner has revoked access to the memory: it was reclaimed or dropped.
    #[error("{what} failed: access to the memory exposed by {peer} was revoked")]
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
    /// The procedure is defined already: remove the earlier registration first.
    #[error("procedure `{name}` is already defined at provider {provider}")]
    AlreadyDefined {
        /// The procedure.
        name: String,
        /// The provider.
        provider: u16,
    },
    /// The address is in use already, by this engine or another process.
    #[error("address {address} is in use")]
    AddressInUse {
        /// The address.
        address: Address,
    },
    /// A field of an [`EngineConfig`](crate::EngineConfig) can't be read, or is not in its range.
    #[error("invalid configuration: `{field}`: {reason}")]
    Config {
        /// The field, the environment variable, or the format where a text is not of that format.
        field: String,
        /// What is wrong, where, and what is allowed.
        reason: String,
    },
    /// The text is not an address.
    #[error("invalid address `{text}`: {reason}")]
    InvalidAddress {
        /// The text.
        text: String,
        /// Why it is invalid.
        reason: String,
    },
    /// Two objects that belong to different engines were used together: an endpoint with the procedure of another engine,
    /// an exposure in another engine's transfer, a bulk at a peer that is not its owner. Nothing was transferred; a
    /// request was sent only where an endpoint had no connection yet, so that its peer was not known.
    #[error("{what} failed: {object} belongs to {}, and was used with {}", engine_at(belongs_to), engine_at(used_with))]
    OtherEngine {
        /// The operation.
        what: String,
        /// The object that belongs to another engine.
        object: &'static str,
        /// The address of the engine that the object belongs to; `None` if that does not listen.
        belongs_to: Option<Address>,
        /// The address of the engine that it was used with; `None` if that does not listen.
        used_with: Option<Address>,
    },
    /// What this process was started with does not let it join the other ranks of its job: see [`launch`](crate::launch).
    #[error("can't join the world: {what}: {reason}")]
    Launch {
        /// The environment variable, or the argument, that is wrong or missing.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Not available in this build, on this machine, on this thread, or in a forked child.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The feature or operation.
        what: String,
        /// Why it is not available.
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
    /// A limit on requests, transfers or memory was reached; try again later.
    #[error("`{name}`: {peer} is busy: {reason}")]
    Busy {
        /// The peer.
        peer: Address,
        /// The procedure.
        name: String,
        /// Which limit was reached.
        reason: String,
    },
    /// A system call of the engine failed.
    #[error("{what}: {cause}")]
    Io {
        /// The operation.
        what: String,
        /// The system's error. The text of this error has its text, so it is no [source](std::error::Error::source).
        cause: Arc<io::Error>,
    },
}

/// Whether a peer can't be reached for a reason that time does not mend. Transports and the protocol choose the kinds of their
/// own errors accordingly.
fn is_permanent(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, PermissionDenied, Unsupported};
    matches!(kind, InvalidData | InvalidInput | PermissionDenied | Unsupported)
}

/// The description of an engine, for the middle of a sentence.
fn engine_at(address: &Option<Address>) -> String {
    match address {
        Some(address) => format!("the engine at {address}"),
        None => "an engine that does not listen".to_owned(),
    }
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, cause: io::Error) -> Error {
        Error::Io { what: what.into(), cause: Arc::new(cause) }
    }

    /// The name of the variant, for statistics.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Error::Timeout { .. } => "Timeout",
            Error::Cancelled { .. } => "Cancelled",
            Error::Unreachable { .. } => "Unreachable",
            Error::Disconnected { .. } => "Disconnected",
            Error::PeerRestarted { .. } => "PeerRestarted",
            Error::NoSuchProcedure { .. } => "NoSuchProcedure",
            Error::NoSuchProvider { .. } => "NoSuchProvider",
            Error::NoResponse { .. } => "NoResponse",
            Error::HandlerPanicked { .. } => "HandlerPanicked",
            Error::Failed { .. } => "Failed",
            Error::Encode { .. } => "Encode",
            Error::Decode { .. } => "Decode",
            Error::TypeMismatch { .. } => "TypeMismatch",
            Error::MessageTooLarge { .. } => "MessageTooLarge",
            Error::OutOfRange { .. } => "OutOfRange",
            Error::NoSuchSegment { .. } => "NoSuchSegment",
            Error::AccessDenied { .. } => "AccessDenied",
            Error::Checksum { .. } => "Checksum",
            Error::Revoked { .. } => "Revoked",
            Error::Finalized { .. } => "Finalized",
            Error::AlreadyDefined { .. } => "AlreadyDefined",
            Error::AddressInUse { .. } => "AddressInUse",
            Error::InvalidAddress { .. } => "InvalidAddress",
            Error::OtherEngine { .. } => "OtherEngine",
            Error::Unsupported { .. } => "Unsupported",
            Error::Version { .. } => "Version",
            Error::Busy { .. } => "Busy",
            Error::Config { .. } => "Config",
            Error::Launch { .. } => "Launch",
            Error::Io { .. } => "Io",
        }
    }

    /// True for [`Error::Timeout`].
    pub fn is_timeout(&self) -> bool {
        matches!(self, Error::Timeout { .. })
    }

    /// True when the peer has disconnected, could not be reached, or was restarted.
    pub fn is_disconnected(&self) -> bool {
        matches!(self, Error::Disconnected { .. } | Error::Unreachable { .. } | Error::PeerRestarted { .. })
    }

    /// True when the same call may succeed later, without a change here: the peer was busy, unreachable or too slow, or data was
    /// corrupted. False for what another attempt does not mend: a host name without an address, an address at which something
    /// else than an engine listens or that [`EngineBuilder::dial_filter`](crate::EngineBuilder::dial_filter) refuses.
    ///
    /// The call may have been carried out already, so retry it only if it is idempotent: see [`Call::retry`](crate::Call::retry).
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Unreachable { cause, .. } => !cause.as_ref().is_some_and(|cause| is_permanent(cause.kind())),
            Error::Timeout { .. } | Error::Disconnected { .. } | Error::Busy { .. } | Error::Checksum { .. } => true,
            _ => false,
        }
    }
}
