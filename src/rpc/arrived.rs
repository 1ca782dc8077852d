//! Messages of requests, as handlers get them.

use serde::de::DeserializeOwned;

use super::bounded::{AskForMemory, decode_message, decode_within};
use crate::memory::ReceivedMessage;
use crate::shape::Verdicts;

/// The message of a request.
pub(super) enum ArrivedMessage<'a> {
    Small(&'a [u8]),
    Large(&'a mut ReceivedMessage),
}

impl ArrivedMessage<'_> {
    /// Decodes it, by [`decode_within`] or [`decode_message`].
    pub(super) fn decode<T: DeserializeOwned>(
        &mut self,
        verdicts: &Verdicts,
        more: AskForMemory<'_>,
    ) -> Result<(T, usize), String> {
        match self {
            ArrivedMessage::Small(bytes) => decode_within(bytes, more),
            ArrivedMessage::Large(message) => decode_message(message, verdicts, more),
        }
    }

    /// The bytes, for values that borrow from them.
    pub(super) fn bytes(&mut self, verdicts: &Verdicts) -> &[u8] {
        match self {
            ArrivedMessage::Small(bytes) => bytes,
            ArrivedMessage::Large(message) => {
                // Another handler of this name has taken lists over.
                if message.list().is_some() {
                    verdicts.note_copied();
                    message.join();
                }
                message
            }
        }
    }
}
