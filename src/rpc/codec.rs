//! Values to bytes and back, with the bulks in them accounted for.
//!
//! A bulk that is encoded for a peer leaves a lease behind: what is kept until the peer holds the bulk no more. Serde knows
//! nothing of peers, so a thread-local holds the engine that encodes or decodes, and the peer, while it lasts.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use serde::Serialize;

use crate::engine::EngineShared;
use crate::progress::LeaseKeepAlive;
use crate::proto::{LeaseRange, LinkId};
use crate::shape::{DeclaredShape, Encoded, Knowledge};
use crate::{Address, Error, Side};

/// What encoding for a peer has come upon.
pub(crate) struct EncodeContext {
    /// The engine that sends the message, by its incarnation.
    engine: u64,
    leases: Vec<LeaseKeepAlive>,
    eager_bulk: usize,
    /// A bulk that can't be sent by this engine, and where its owner listens.
    foreign: Option<Option<Address>>,
}

/// Why a message can't be made.
#[derive(Debug)]
pub(super) enum Unencodable {
    /// In the codec's words.
    Codec(String),
    /// A bulk in it is for calls of another engine.
    OtherEngine { belongs_to: Option<Address>, used_with: Option<Address> },
}

impl Unencodable {
    pub(super) fn error(self, peer: &Address, side: Side, name: &str) -> Error {
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

thread_local! {
    static ENCODING: RefCell<Option<EncodeContext>> = const { RefCell::new(None) };
    static DECODING: RefCell<Option<DecodeContext>> = const { RefCell::new(None) };
}

impl EncodeContext {
    /// Notes a bulk that goes to the peer; its number among those of the message. `None` when nothing is being encoded for
    /// a peer.
    pub(crate) fn lease(held: impl FnOnce() -> LeaseKeepAlive) -> Option<u32> {
        ENCODING.with_borrow_mut(|encoding| {
            let encoding = encoding.as_mut()?;
            encoding.leases.push(held());
            Some(encoding.leases.len() as u32 - 1)
        })
    }

    /// The engine that sends the message, by its incarnation; `None` when nothing is being encoded for a peer.
    pub(crate) fn engine() -> Option<u64> {
        ENCODING.with_borrow(|encoding| encoding.as_ref().map(|encoding| encoding.engine))
    }

    /// Notes that the message has a bulk in it that its engine must not send. The caller sees to it that encoding fails.
    pub(crate) fn refuse(owner: Option<Address>) {
        ENCODING.with_borrow_mut(|encoding| {
            if let Some(encoding) = encoding {
                encoding.foreign = Some(owner);
            }
        });
    }

    /// Bulks up to this long go along with their content.
    pub(crate) fn eager_bulk() -> usize {
        ENCODING.with_borrow(|encoding| encoding.as_ref().map_or(0, |encoding| encoding.eager_bulk))
    }
}

/// Encodes a value for a peer, at the end of `out`, and finds out what is to be declared of it. The leases are those of the
/// bulks in it.
pub(super) fn encode<T: Serialize + ?Sized>(
    value: &T,
    out: &mut Vec<u8>,
    shared: &EngineShared,
    knowledge: &Knowledge,
) -> Result<(Vec<LeaseKeepAlive>, Arc<DeclaredShape>), Unencodable> {
    let (start, numbers) = (out.len(), &shared.procedures.numbers);
    let (encoded, mut met) = watched(shared, || knowledge.encode(value, out, numbers));
    let declared = match encoded {
        Ok(Encoded::As(declared)) => Ok(declared),
        Ok(Encoded::Unlike) => {
            out.truncate(start);
            let declared;
            (declared, met) = watched(shared, || knowledge.encode_alone(value, out, numbers));
            declared
        }
        Err(fault) => Err(fault),
    };
    let EncodeContext { leases, foreign, .. } = met;
    if let Some(belongs_to) = foreign {
        return Err(Unencodable::OtherEngine { belongs_to, used_with: shared.addresses.first().cloned() });
    }
    Ok((leases, declared.map_err(|fault| Unencodable::Codec(fault.to_string()))?))
}

/// Encodes something for a peer with `encode`, and notes what that comes upon.
fn watched<R>(shared: &EngineShared, encode: impl FnOnce() -> R) -> (R, EncodeContext) {
    let fresh =
        || EncodeContext { engine: shared.incarnation, leases: Vec::new(), eager_bulk: shared.limits.eager_bulk, foreign: None };
    // A `Serialize` may itself make a call: what it interrupts is put back.
    let mut restore = Restore(Some(ENCODING.replace(Some(fresh()))));
    let encoded = encode();
    let met = ENCODING.replace(restore.0.take().flatten());
    (encoded, met.unwrap_or_else(fresh))
}

struct Restore(Option<Option<EncodeContext>>);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(outer) = self.0.take() {
            ENCODING.set(outer);
        }
    }
}

/// Whose bytes are being decoded.
pub(crate) struct DecodeContext {
    pub shared: Weak<EngineShared>,
    engine: u64,
    pub link: LinkId,
    leases: LeaseRange,
    /// Which of the leases some bulk has taken over.
    taken: Vec<bool>,
    /// What is decoded will be decoded again: bulks that are dropped meanwhile are still to come.
    in_vain: bool,
    /// Which engine is at the other end of the link, and where, once a bulk wants to know.
    remote: Option<Option<(u64, crate::Address)>>,
}

/// A bulk from a peer is held here: dropping this says that it is no more.
pub(crate) struct RemoteLease {
    shared: Weak<EngineShared>,
    /// The engine that got it, by its incarnation.
    pub engine: u64,
    link: LinkId,
    number: u64,
}

impl Drop for RemoteLease {
    fn drop(&mut self) {
        if DecodeContext::is_in_vain(self) {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            // A list of bulks is dropped one by one: as many as may be go out together.
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
            if std::mem::replace(taken, true) {
                return None;
            }
            let number = decoding.leases.first.checked_add(u64::from(index))?;
            let (shared, engine, link) = (decoding.shared.clone(), decoding.engine, decoding.link);
            Some(Arc::new(RemoteLease { shared, engine, link, number }))
        })
    }

    /// The message that this thread decodes, which has leases, will be decoded again.
    pub(super) fn set_in_vain() {
        DECODING.with_borrow_mut(|decoding| {
            if let Some(decoding) = decoding {
                decoding.in_vain = true;
            }
        });
    }

    /// Whether a lease is one of those that stay with their message, as that will be decoded again.
    fn is_in_vain(lease: &RemoteLease) -> bool {
        let is_in_vain = |decoding: &RefCell<Option<DecodeContext>>| {
            decoding.borrow().as_ref().is_some_and(|DecodeContext { link, leases, in_vain, .. }| {
                let number = lease.number.checked_sub(leases.first);
                *in_vain && *link == lease.link && number.is_some_and(|number| number < u64::from(leases.count))
            })
        };
        DECODING.try_with(is_in_vain).unwrap_or(false)
    }

    /// Where the peer is whose message is decoded, if it is the engine of this incarnation.
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

    /// The engine that decodes, if it does so for a peer's message.
    pub(crate) fn engine() -> Option<Arc<EngineShared>> {
        DECODING.with_borrow(|decoding| decoding.as_ref()?.shared.upgrade())
    }
}

/// Decodes a message of a peer with `decode`. Leases that no bulk takes over are released when it is done.
pub(crate) fn decoding<R>(shared: &Arc<EngineShared>, link: LinkId, leases: LeaseRange, decode: impl FnOnce() -> R) -> R {
    if leases.count == 0 {
        return decode();
    }
    let taken = vec![false; leases.count as usize];
    let fresh = DecodeContext {
        shared: Arc::downgrade(shared),
        engine: shared.incarnation,
        link,
        leases,
        taken,
        in_vain: false,
        remote: None,
    };
    let outer = DECODING.replace(Some(fresh));
    let done = Done { shared, outer: Some(outer) };
    let result = decode();
    drop(done);
    result
}

struct Done<'a> {
    shared: &'a Arc<EngineShared>,
    outer: Option<Option<DecodeContext>>,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let Some(decoding) = DECODING.replace(self.outer.take().flatten()) else { return };
        if decoding.in_vain {
            return;
        }
        let mut next = decoding.leases.first;
        let mut left = Vec::new();
        for run in decoding.taken.chunk_by(|a, b| a == b) {
            if !run[0] {
                left.push(LeaseRange { first: next, count: run.len() as u32 });
            }
            next = next.saturating_add(run.len() as u64);
        }
        for some in left.chunks(TOGETHER) {
            self.shared.core.exec(|proto| some.iter().for_each(|leases| proto.release(decoding.link, *leases)));
        }
    }
}

/// Runs of leases that are released in one step: the protocol is locked for no longer.
const TOGETHER: usize = 256;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Buffers that grew beyond this are not kept for the next message.
const KEEP: usize = 64 << 10;

/// A buffer to encode into, used again and again by each thread.
pub(super) fn with_buffer<R>(f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    let mut buffer = BUFFER.take();
    buffer.clear();
    let result = f(&mut buffer);
    if buffer.capacity() <= KEEP {
        BUFFER.set(buffer);
    }
    result
}
