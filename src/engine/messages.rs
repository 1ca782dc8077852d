//! Encodes messages, and holds what bulks in them need to know of the message that a thread encodes or decodes.
//!
//! A bulk that is encoded for a peer leaves a lease with the sender, until the peer no longer holds the bulk. Serde has no
//! parameter for a context, so thread-locals hold the engine that encodes or decodes, and the peer.
//!
//! What each message passes through is kept small, or stays where it is: a value that is moved right after it was written is loaded in
//! other pieces than it was stored in, and processors wait until such stores have reached the cache.

use std::cell::{Cell, RefCell};
use std::mem::{self, ManuallyDrop};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use serde::Serialize;
use smallvec::SmallVec;

use super::EngineShared;
use crate::memory::{MAPPED_BY_ALLOCATOR, Region, Slice, spare_to_encode};
use crate::progress::LeaseKeepAlive;
use crate::proto::{LeaseRange, LinkId, OutgoingBody, TrailingList};
use crate::shape::{Declared, Encoded, Knowledge, trailing_list};
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

/// The shape to declare with a message that was encoded.
pub(crate) type Encoding<'a> = Result<Declared<'a>, Box<Unencodable>>;

/// As [`encode_message`], of a value of any type.
pub(crate) type EncodeMessage<'f, 'a> = &'f mut dyn FnMut(&mut Vec<u8>, &mut Vec<LeaseKeepAlive>) -> Encoding<'a>;

/// Encodes a value for a peer at the end of `out`. The leases of the bulks in it come into `leases`, which is empty before.
pub(crate) fn encode_message<'a, T: Serialize + ?Sized>(
    value: &T,
    out: &mut Vec<u8>,
    leases: &mut Vec<LeaseKeepAlive>,
    shared: &EngineShared,
    knowledge: &'a Knowledge,
) -> Encoding<'a> {
    let long = knowledge.long_message.load(Ordering::Relaxed);
    if long > 0 && out.is_empty() {
        reuse_memory(out, long);
    }
    let (start, numbers) = (out.len(), &shared.procedures.numbers);
    let mut declared = encoding(shared, leases, || knowledge.encode(value, out, numbers))?;
    if let Ok(Encoded::Unlike) = declared {
        out.truncate(start);
        // Held until there are others: a bulk that is being sent is not released meanwhile.
        let _first = mem::take(leases);
        declared = encoding(shared, leases, || knowledge.encode_alone(value, out, numbers))?
            .map(|alone| Encoded::As(Declared::Latest(alone)));
    }
    if long > 0 || out.len() >= MAPPED_BY_ALLOCATOR {
        let len = out.len() - start;
        knowledge.long_message.store(if len < MAPPED_BY_ALLOCATOR { 0 } else { len }, Ordering::Relaxed);
    }
    match declared {
        Ok(Encoded::As(declared)) => Ok(declared),
        Ok(Encoded::Unlike) => unreachable!("a value that is encoded alone declares its own shape"),
        Err(fault) => Err(Box::new(Unencodable::Codec(fault.to_string()))),
    }
}

/// Takes memory of an earlier message to encode a long one into.
#[cold]
fn reuse_memory(out: &mut Vec<u8>, len: usize) {
    if let Some(spare) = spare_to_encode(len) {
        *out = spare;
    }
}

/// What is to be sent: `in_place`, where the buffer only shows its type, or else what has been encoded last. Longer than `eager`, that is
/// taken out of the buffer, and stays until the peer has it.
pub(crate) fn outgoing_body<'a>(in_place: Option<ListInPlace>, buffer: &'a mut Vec<u8>, eager: usize) -> OutgoingBody<'a, Slice> {
    if let Some(ListInPlace { body, list }) = in_place {
        OutgoingBody::Large(body, list)
    } else if buffer.len() > eager {
        OutgoingBody::Large(Slice::whole(&Region::from_vec(mem::take(buffer))), trailing_list())
    } else {
        OutgoingBody::Small(buffer)
    }
}

/// A body that is sent from where a list lies.
pub(crate) struct ListInPlace {
    pub body: Slice,
    pub list: Option<TrailingList>,
}

thread_local! {
    static ENCODE_BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Buffers that grew beyond this are not kept for the next message.
const MAX_KEPT_BUFFER: usize = 64 << 10;

/// This thread's buffer to encode into; another one where it is in use, since a `Serialize` impl makes a call.
pub(crate) struct EncodeBuffer(Vec<u8>);

impl EncodeBuffer {
    #[inline]
    pub(crate) fn take() -> EncodeBuffer {
        // A thread that is ending has none any more.
        EncodeBuffer(ENCODE_BUFFER.try_with(Cell::take).unwrap_or_default())
    }
}

impl Deref for EncodeBuffer {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for EncodeBuffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

impl Drop for EncodeBuffer {
    #[inline]
    fn drop(&mut self) {
        let mut buffer = mem::take(&mut self.0);
        if buffer.capacity() <= MAX_KEPT_BUFFER {
            buffer.clear();
            let _ = ENCODE_BUFFER.try_with(|kept| kept.set(buffer));
        }
    }
}

/// Whose message a thread encodes.
#[derive(Clone, Copy)]
struct Encoder {
    /// The incarnation of the engine that sends the message.
    engine: u64,
    eager_bulk: usize,
    /// `COLLECTED` holds something of the message.
    has_collected: bool,
}

/// What is collected of a message while it is encoded: hardly any has something.
#[derive(Default)]
struct Collected {
    leases: Vec<LeaseKeepAlive>,
    /// Set when the message has a bulk that this engine must not send: where the bulk's owner listens.
    foreign: Option<Box<Option<Address>>>,
}

thread_local! {
    static ENCODING: Cell<Option<Encoder>> = const { Cell::new(None) };
    /// Empty between messages, so that it needs no destructor: threads that are ending may send bulks, too.
    static COLLECTED: RefCell<ManuallyDrop<Collected>> =
        const { RefCell::new(ManuallyDrop::new(Collected { leases: Vec::new(), foreign: None })) };
    static DECODING: RefCell<Option<Box<DecodeContext>>> = const { RefCell::new(None) };
}

/// What bulks ask and tell while their message is encoded for a peer.
pub(crate) struct EncodeContext;

impl EncodeContext {
    /// Records the lease of a bulk in the message, and returns its index among those of the message. `None` when this thread
    /// encodes no message for a peer.
    pub(crate) fn lease(held: impl FnOnce() -> LeaseKeepAlive) -> Option<u32> {
        EncodeContext::collect(|collected| {
            collected.leases.push(held());
            collected.leases.len() as u32 - 1
        })
    }

    /// The incarnation of the engine that sends the message; `None` when this thread encodes no message for a peer.
    pub(crate) fn engine() -> Option<u64> {
        ENCODING.get().map(|encoder| encoder.engine)
    }

    /// Records that the message has a bulk that its engine must not send. The caller makes encoding fail.
    pub(crate) fn refuse(owner: Option<Address>) {
        EncodeContext::collect(|collected| collected.foreign = Some(Box::new(owner)));
    }

    /// Bulks up to so many bytes are sent with their content.
    pub(crate) fn eager_bulk() -> usize {
        ENCODING.get().map_or(0, |encoder| encoder.eager_bulk)
    }

    fn collect<R>(collect: impl FnOnce(&mut Collected) -> R) -> Option<R> {
        let encoder = ENCODING.get()?;
        ENCODING.set(Some(Encoder { has_collected: true, ..encoder }));
        Some(COLLECTED.with_borrow_mut(|collected| collect(collected)))
    }
}

/// Runs `encode`, and puts the leases of the bulks that it has encoded into `leases`.
fn encoding<R>(
    shared: &EngineShared,
    leases: &mut Vec<LeaseKeepAlive>,
    encode: impl FnOnce() -> R,
) -> Result<R, Box<Unencodable>> {
    let encoder = Encoder { engine: shared.incarnation, eager_bulk: shared.config.eager_bulk_limit, has_collected: false };
    // A `Serialize` impl may itself make a call, and what was collected of the outer message is restored then.
    let outer = ENCODING.replace(Some(encoder));
    let _restore = Restore { outer, collected: outer.is_some_and(|outer| outer.has_collected).then(take_collected) };
    let encoded = encode();
    if has_collected() {
        let Collected { leases: held, foreign } = take_collected();
        *leases = held;
        if let Some(belongs_to) = foreign {
            return Err(Box::new(Unencodable::OtherEngine { belongs_to: *belongs_to, used_with: shared.listens_at() }));
        }
    }
    Ok(encoded)
}

struct Restore {
    outer: Option<Encoder>,
    collected: Option<Collected>,
}

fn replace_collected(by: Collected) -> Collected {
    ManuallyDrop::into_inner(COLLECTED.replace(ManuallyDrop::new(by)))
}

fn take_collected() -> Collected {
    replace_collected(Collected::default())
}

fn has_collected() -> bool {
    ENCODING.get().is_some_and(|encoder| encoder.has_collected)
}

impl Drop for Restore {
    fn drop(&mut self) {
        let left = if self.collected.is_some() || has_collected() {
            replace_collected(self.collected.take().unwrap_or_default())
        } else {
            Collected::default()
        };
        ENCODING.set(self.outer);
        // Leases of a message whose encoding has panicked: their drop may run user code.
        drop(left);
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
        let will_retry_with = |decoding: &RefCell<Option<Box<DecodeContext>>>| {
            decoding.borrow().as_deref().is_some_and(|DecodeContext { link, leases, will_retry, .. }| {
                let number = lease.number.checked_sub(leases.first);
                *will_retry && *link == lease.link && number.is_some_and(|number| number < u64::from(leases.count))
            })
        };
        DECODING.try_with(will_retry_with).unwrap_or(false)
    }

    /// The address of the peer that sent the message, if that peer has this incarnation.
    pub(crate) fn remote(incarnation: u64) -> Option<Address> {
        DECODING.with_borrow_mut(|decoding| {
            let DecodeContext { shared, link, remote, .. } = decoding.as_deref_mut()?;
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
    let place = Box::new_uninit();
    let fresh = DecodeContext {
        shared: Arc::downgrade(shared),
        engine: shared.incarnation,
        link,
        leases,
        taken,
        will_retry: false,
        remote: None,
    };
    let outer = DECODING.replace(Some(Box::write(place, fresh)));
    let guard = DecodingGuard { shared, outer: Some(outer) };
    let result = decode();
    drop(guard);
    result
}

struct DecodingGuard<'a> {
    shared: &'a Arc<EngineShared>,
    outer: Option<Option<Box<DecodeContext>>>,
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
