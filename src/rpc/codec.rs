//! Encodes messages.

use std::cell::RefCell;
use std::mem;
use std::sync::Arc;

use serde::Serialize;

use crate::engine::{EncodeContext, EngineShared, encoding};
use crate::memory::{Region, Slice};
use crate::progress::LeaseKeepAlive;
use crate::proto::OutgoingBody;
use crate::shape::{DeclaredShape, Encoded, Knowledge};
use crate::{Address, Error, MessageSide};

/// Why a message can't be encoded.
#[derive(Debug)]
pub(super) enum Unencodable {
    /// The codec's error.
    Codec(String),
    /// A bulk in it is for calls of another engine.
    OtherEngine { belongs_to: Option<Address>, used_with: Option<Address> },
}

impl Unencodable {
    pub(super) fn error(self, peer: &Address, side: MessageSide, name: &str) -> Error {
        match self {
            Unencodable::Codec(reason) => Error::Encode { peer: peer.clone(), side, name: name.to_owned(), reason },
            Unencodable::OtherEngine { belongs_to, used_with } => Error::OtherEngine {
                what: format!("sending the {side} of `{name}`"),
                object: "a bulk for one call",
                belongs_to,
                used_with,
            },
        }
    }
}

/// Encodes a value for a peer at the end of `out`. Returns the leases of the bulks in it, and the shape to declare.
pub(super) fn encode<T: Serialize + ?Sized>(
    value: &T,
    out: &mut Vec<u8>,
    shared: &EngineShared,
    knowledge: &Knowledge,
) -> Result<(Vec<LeaseKeepAlive>, Arc<DeclaredShape>), Unencodable> {
    let (start, numbers) = (out.len(), &shared.procedures.numbers);
    let (encoded, mut context) = encoding(shared, || knowledge.encode(value, out, numbers));
    let declared = match encoded {
        Ok(Encoded::As(declared)) => Ok(declared),
        Ok(Encoded::Unlike) => {
            out.truncate(start);
            let declared;
            (declared, context) = encoding(shared, || knowledge.encode_alone(value, out, numbers));
            declared
        }
        Err(fault) => Err(fault),
    };
    let EncodeContext { leases, foreign, .. } = context;
    if let Some(belongs_to) = foreign {
        return Err(Unencodable::OtherEngine { belongs_to, used_with: shared.listens_at() });
    }
    Ok((leases, declared.map_err(|fault| Unencodable::Codec(fault.to_string()))?))
}

/// What has been encoded, to be sent. Longer than `eager`, it is taken out of the buffer, and stays until the peer has it.
pub(super) fn outgoing(buffer: &mut Vec<u8>, eager: usize) -> OutgoingBody<'_, Slice> {
    if buffer.len() > eager {
        OutgoingBody::Large(Slice::whole(&Region::from_vec(mem::take(buffer))))
    } else {
        OutgoingBody::Small(buffer)
    }
}

thread_local! {
    static ENCODE_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Buffers that grew beyond this are not kept for the next message.
const MAX_KEPT_BUFFER: usize = 64 << 10;

/// Runs `f` with this thread's buffer to encode into.
pub(super) fn with_buffer<R>(f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    let mut buffer = ENCODE_BUFFER.take();
    buffer.clear();
    let result = f(&mut buffer);
    if buffer.capacity() <= MAX_KEPT_BUFFER {
        ENCODE_BUFFER.set(buffer);
    }
    result
}
