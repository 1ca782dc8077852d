//! Why values can't be encoded.

use std::fmt::{self, Display};

use serde::ser;

/// Why a value can't be encoded.
#[derive(Debug)]
pub(crate) struct EncodeError(Box<str>);

impl Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for EncodeError {}

impl ser::Error for EncodeError {
    #[cold]
    fn custom<T: Display>(message: T) -> EncodeError {
        EncodeError(message.to_string().into())
    }
}

#[cold]
pub(super) fn other_length(what: &str) -> EncodeError {
    ser::Error::custom(format_args!("{what} has said that another number of entries follow than it has"))
}

#[cold]
pub(super) fn unknown_length(what: &str) -> EncodeError {
    ser::Error::custom(format_args!(
        "{what} does not say how many entries follow, and the format has no mark for their end: collect them first, \
         or give what is flattened a field of its own"
    ))
}
