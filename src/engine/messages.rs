//! Encodes messages, and holds what bulks in them need to know of the message that a thread encodes or decodes.
//!
//! A bulk that is encoded for a peer leaves a lease with the sender, until the peer no longer holds the bulk. Serde has no
//! parameter for a context, so thread-locals hold the engine that encodes or decodes, and the peer.

use std::cell::RefCell;
use std::mem;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use serde::Serialize;
use smallvec::SmallVec;

use super::EngineShared;
use crate::memory::{MAPPED_BY_ALLOCATOR, Region, Slice, spare_to_encode};
use crate::progress::LeaseKeepAlive;
use crate::proto::{LeaseRange, LinkId, OutgoingBody};
use crate::shape::{Declared, Encoded, Knowledge};
use crate::{Address, Error, MessageSide};

/// Why a message can't be encoded.
#[derive(Debug)]
pub(crate) enum Unencodable {
    /// The codec's error.
    Codec(String),
    /// A bulk in it is for calls of another engine.
    OtherEngine { belongs_to: Option<Address>, used_with: Option<Address> },
}

impl Unencodable {
    pub(crate) fn error(self, peer: &Address, side: MessageSide, name: &str) -> Error {
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

/// The leases of the bulks in a message that was encoded, and the shape to declare.
pub(crate) type Encoding<'a> = Result<(Vec<LeaseKeepAlive>, Declared<'a>), Unencodable>;

/// Encodes a value for a peer at the end of `out`.
pub(crate) fn encode_message<'a, T: Serialize + ?Sized>(
    value: &T,
    out: &mut Vec<u8>,
    shared: &EngineShared,
    knowledge: &'a Knowledge,
) -> Encoding<'a> {
    let long = knowledge.long_message.load(Ordering::Relaxed);
    if long > 0 && out.is_empty() {
        reuse_memory(out, long);
    }
    let (start, numbers) = (out.len(), &shared.procedures.numbers);
    let (encoded, mut context) = encoding(shared, || knowledge.encode(value, out, numbers));
    let declared = match encoded {
        Ok(Encoded::As(declared)) => Ok(declared),
        Ok(Encoded::Unlike) => {
            out.truncate(start);
            let declared;
            (declared, context) = encoding(shared, || knowledge.encode_alone(value, out, numbers));
            declared.map(Declared::Latest)
        }
        Err(fault) => Err(fault),
    };
    if long > 0 || out.len() >= MAPPED_BY_ALLOCATOR {
        let len = out.len() - start;
        knowledge.long_message.store(if len < MAPPED_BY_ALLOCATOR { 0 } else { len }, Ordering::Relaxed);
    }
    let EncodeContext { leases, foreign, .. } = context;
    if let Some(belongs_to) = foreign {
        return Err(Unencodable::OtherEngine { belongs_to: *belongs_to, used_with: shared.listens_at() });
    }
    Ok((leases, declared.map_err(|fault| Unencodable::Codec(fault.to_string()))?))
}

/// Takes memory of an earlier message to encode a long one into.
#[cold]
fn reuse_memory(out: &mut Vec<u8>, len: usize) {
    if let Some(spare) = spare_to_encode(len) {
        *out = spare;
    }
}

/// What has been encoded, to be sent. Longer than `eager`, it is taken out of the buffer, and stays until the peer has it.
pub(crate) fn outgoing_body(buffer: &mut Vec<u8>, eager: usize) -> OutgoingBody<'_, Slice> {
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
#[inline]
pub(crate) fn with_encode_buffer<R>(f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    let mut buffer = ENCODE_BUFFER.take();
    buffer.clear();
    let result = f(&mut buffer);
    if buffer.capacity() <= MAX_KEPT_BUFFER {
        ENCODE_BUFFER.set(buffer);
    }
    result
}

thread_local! {
    static ENCODING: RefCell<Option<EncodeContext>> = const { RefCell::new(None) };
    static DECODING: RefCell<Option<DecodeContext>> = const { RefCell::new(None) };
}

/// What the encoder collects while it encodes a message for a peer.
pub(crate) struct EncodeContext {
    /// The incarnation of the engine that sends the message.
    engine: u64,
    pub leases: Vec<LeaseKeepAlive>,
    eager_bulk: usize,
    /// Set when the message has a bulk that this engine must not send: where the bulk's owner listens. Hardly any message has.
    foreign: Option<Box<Option<Address>>>,
}

impl EncodeContext {
    /// Records the lease of a bulk in the message, and returns its index among those of the message. `None` when this thread
    /// encodes no message for a peer.
    pub(crate) fn lease(held: impl FnOnce() -> LeaseKeepAlive) -> Option<u32> {
        ENCODING.with_borrow_mut(|encoding| {
            let encoding = encoding.as_mut()?;
            encoding.leases.push(held());
            Some(encoding.leases.len() as u32 - 1)
        })
    }

    /// The incarnation of the engine that sends the message; `None` when this thread encodes no message for a peer.
    pub(crate) fn engine() -> Option<u64> {
        ENCODING.with_borrow(|encoding| encoding.as_ref().map(|encoding| encoding.engine))
    }

    /// Records that the message has a bulk that its engine must not send. The caller makes encoding fail.
    pub(crate) fn refuse(owner: Option<Address>) {
        ENCODING.with_borrow_mut(|encoding| {
            if let Some(encoding) = encoding {
                encoding.foreign = Some(Box::new(owner));
            }
        });
    }

    /// Bulks up to so many bytes are sent with their content.
    pub(crate) fn eager_bulk() -> usize {
        ENCODING.with_borrow(|encoding| encoding.as_ref().map_or(0, |encoding| encoding.eager_bulk))
    }
}

/// Runs `encode` with a fresh context, and returns what the context has collected.
fn encoding<R>(shared: &EngineShared, encode: impl FnOnce() -> R) -> (R, EncodeContext) {
    let fresh = || EncodeContext {
        engine: shared.incarnation,
        leases: Vec::new(),
        eager_bulk: shared.config.eager_bulk_limit,
        foreign: None,
    };
    // A `Serialize` impl may itself make a call, so the outer context is restored.
    let mut restore = Restore(Some(ENCODING.replace(Some(fresh()))));
    let encoded = encode();
    let context = ENCODING.replace(restore.0.take().flatten());
    (encoded, context.unwrap_or_else(fresh))
}

struct Restore(Option<Option<EncodeContext>>);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(outer) = self.0.take() {
            ENCODING.set(outer);
        }
    }
}

/// Most messages have no more bulks than that.
const FEW_BULKS: usize = 8;

/// The message that this thread decodes, and the peer that sent it.
pub(crate) struct DecodeContext {
    pub shared: Weak<EngineShared>,
    engine: u64,
    pub link: LinkId,
    leases: LeaseRange,
    /// Which of the leases a decoded bulk has taken over.
    taken: SmallVec<[bool; FEW_BULKS]>,
    /// The message will be decoded again, so dropping its bulks must not release their leases.
    will_retry: bool,
    /// The engine at the other end of the link and its address, looked up when the first bulk needs it.
    remote: Option<Option<(u64, Address)>>,
}

/// This engine's part of a lease on a peer's bulk; dropping it releases the lease.
pub(crate) struct RemoteLease {
    shared: Weak<EngineShared>,
    /// The incarnation of the engine that received the bulk.
    pub engine: u64,
    link: LinkId,
    number: u64,
}

impl Drop for RemoteLease {
    fn drop(&mut self) {
        if DecodeContext::will_retry_with(self) {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            // A list of bulks is dropped one by one, so releases are corked and sent together.
            shared.core.exec_soon(|proto| proto.release(self.link, LeaseRange { first: self.number, count: 1 }));
        }
    }
}

impl DecodeContext {
    /// The lease of this number in the message that is being decoded, for the bulk that names it.
    pub(crate) fn take_lease(index: u32) -> Option<Arc<RemoteLease>> {
        DECODING.with_borrow_mut(|decoding| {
            let decoding = decoding.as_mut()?;
            let taken = decoding.taken.get_mut(index as usize)?;
            if mem::replace(taken, true) {
                return None;
            }
            let number = decoding.leases.first.checked_add(u64::from(index))?;
            let (shared, engine, link) = (decoding.shared.clone(), decoding.engine, decoding.link);
            Some(Arc::new(RemoteLease { shared, engine, link, number }))
        })
    }

    /// Marks the message that this thread decodes, if it has leases, as one that will be decoded again.
    pub(crate) fn set_will_retry() {
        DECODING.with_borrow_mut(|decoding| {
            if let Some(decoding) = decoding {
                decoding.will_retry = true;
            }
        });
    }

    /// Whether a lease stays with its message, as the message will be decoded again.
    fn will_retry_with(lease: &RemoteLease) -> bool {
        let will_retry_with = |decoding: &RefCell<Option<DecodeContext>>| {
            decoding.borrow().as_ref().is_some_and(|DecodeContext { link, leases, will_retry, .. }| {
                let number = lease.number.checked_sub(leases.first);
                *will_retry && *link == lease.link && number.is_some_and(|number| number < u64::from(leases.count))
            })
        };
        DECODING.try_with(will_retry_with).unwrap_or(false)
    }

    /// The address of the peer that sent the message, if that peer has this incarnation.
    pub(crate) fn remote(incarnation: u64) -> Option<Address> {
        DECODING.with_borrow_mut(|decoding| {
            let DecodeContext { shared, link, remote, .. } = decoding.as_mut()?;
            if remote.is_none() {
                *remote = Some(shared.upgrade()?.core.with_proto(|proto| proto.remote_of(*link)));
            }
            let (engine, address) = remote.as_ref()?.as_ref()?;
            (*engine == incarnation).then(|| address.clone())
        })
    }

    /// The engine that decodes the message; `None` when this thread decodes no message with leases.
    pub(crate) fn engine() -> Option<Arc<EngineShared>> {
        DECODING.with_borrow(|decoding| decoding.as_ref()?.shared.upgrade())
    }
}

/// Runs `decode` on a peer's message, and afterwards releases the leases that no bulk has taken over.
#[inline]
pub(crate) fn decoding<R>(shared: &Arc<EngineShared>, link: LinkId, leases: LeaseRange, decode: impl FnOnce() -> R) -> R {
    if leases.count == 0 {
        return decode();
    }
    let taken = SmallVec::from_elem(false, leases.count as usize);
    let fresh = DecodeContext {
        shared: Arc::downgrade(shared),
        engine: shared.incarnation,
        link,
        leases,
        taken,
        will_retry: false,
        remote: None,
    };
    let outer = DECODING.replace(Some(fresh));
    let guard = DecodingGuard { shared, outer: Some(outer) };
    let result = decode();
    drop(guard);
    result
}

struct DecodingGuard<'a> {
    shared: &'a Arc<EngineShared>,
    outer: Option<Option<DecodeContext>>,
}

impl Drop for DecodingGuard<'_> {
    fn drop(&mut self) {
        let Some(decoding) = DECODING.replace(self.outer.take().flatten()) else { return };
        if decoding.will_retry || decoding.taken.iter().all(|taken| *taken) {
            return;
        }
        let mut next = decoding.leases.first;
        let mut unclaimed = Vec::new();
        for run in decoding.taken.chunk_by(|a, b| a == b) {
            if !run[0] {
                unclaimed.push(LeaseRange { first: next, count: run.len() as u32 });
            }
            next = next.saturating_add(run.len() as u64);
        }
        for batch in unclaimed.chunks(RELEASE_BATCH) {
            self.shared.core.exec(|proto| batch.iter().for_each(|leases| proto.release(decoding.link, *leases)));
        }
    }
}

/// Ranges of leases that are released in one step: this bounds how long the protocol is locked.
const RELEASE_BATCH: usize = 256;
