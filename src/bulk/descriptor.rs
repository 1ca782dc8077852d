//! `Bulk`: the value that names exposed memory, and how it is encoded in calls.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;

use super::exposure_state::{ExposureState, LeaseGuard};
use super::mode::BulkMode;
use super::wire::{Behind, BulkFields, EncodedBulk, Piece};
use crate::engine::{AddressTexts, DecodeContext, EncodeContext, Origin, RemoteLease, StaleFlag};
use crate::memory::{ReadElement, Slice};
use crate::progress::{LeaseKeepAlive, RemoteKeys};
use crate::text::any_from_hex;
use crate::{Error, Result};

/// A handle to exposed memory, which can be cloned, sliced, sent inside calls, kept, and forwarded to other peers. It names the
/// memory by a token that can't be guessed; the owner checks token, bounds and mode of each access. Over `verbs://` the owner's
/// device checks a key, bounds and mode instead, for as long as the memory is exposed: see "Over RDMA devices" in the
/// crate's documentation.
///
/// Offsets and lengths are in bytes, whatever the elements are. Dropping the last copy that a peer holds releases its lease at
/// the owner (see [`Exposed::released`](crate::Exposed::released)); the memory stays exposed.
#[derive(Clone)]
pub struct Bulk {
    pub(super) token: u128,
    pub(super) offset: u64,
    len: u64,
    pub(super) mode: BulkMode,
    segments: u32,
    pub(super) origin: Arc<Origin>,
    /// Keeps the lease on the memory while this bulk lives.
    lease_source: LeaseSource,
    pub(super) copy: Option<Arc<EagerCopy>>,
    /// The keys by which devices reach a peer's memory: all of the exposure.
    keys: Option<PeerKeys>,
}

#[derive(Clone)]
enum LeaseSource {
    /// Exposed here: the exposure counts peers' leases.
    Own(Arc<ExposureState>),
    /// Received in a call, with a lease at the sender.
    Received(Arc<RemoteLease>),
    /// Received by other means than a call: there is no lease.
    Unknown,
}

/// The content of a small read-only bulk, which was sent with it.
pub(crate) struct EagerCopy {
    /// Offset of the content in the exposed memory.
    start: u64,
    bytes: Vec<u8>,
    stale: StaleFlag,
}

/// The keys by which devices reach the memory, as its owner has sent them.
#[derive(Clone)]
struct PeerKeys {
    keys: RemoteKeys,
    stale: StaleFlag,
}

impl PeerKeys {
    fn valid(&self) -> Option<&RemoteKeys> {
        (!self.stale.load(Ordering::Acquire)).then_some(&self.keys)
    }
}

impl EagerCopy {
    /// The bytes of a range of the exposed memory, if the copy has them and is not stale.
    pub(super) fn range(&self, offset: u64, len: usize) -> Option<&[u8]> {
        if self.stale.load(Ordering::Acquire) {
            return None;
        }
        let start = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }
}

impl Bulk {
    pub(super) fn exposed(
        token: u128,
        (len, segments): (u64, u32),
        mode: BulkMode,
        origin: Arc<Origin>,
        exposure_state: &Arc<ExposureState>,
    ) -> Bulk {
        Bulk {
            token,
            offset: 0,
            len,
            mode,
            segments,
            origin,
            lease_source: LeaseSource::Own(exposure_state.clone()),
            copy: None,
            keys: None,
        }
    }

    /// Length in bytes. For a bulk that a peer has sent, this is the peer's claim, which a transfer checks: before you allocate
    /// a buffer of this length for a peer that you do not trust, check it against a limit.
    pub fn len(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX)
    }

    /// True when the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What peers may do with the memory.
    pub fn mode(&self) -> BulkMode {
        self.mode
    }

    /// Number of segments of the exposed memory, also for a slice of it. Offsets count across all of them. Their lengths are
    /// known to the owner only: [`Exposed::segment_lens`](crate::Exposed::segment_lens).
    pub fn segment_count(&self) -> usize {
        self.segments as usize
    }

    /// The part of `len` bytes at `offset`, both in bytes and within this bulk.
    ///
    /// A slice restricts nothing: a peer that gets it may reach all of the exposed memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the part does not lie inside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Bulk> {
        let out = || Error::OutOfRange { offset, len, size: self.len() };
        let end = offset.checked_add(len).ok_or_else(out)?;
        if end as u64 > self.len {
            return Err(out());
        }
        let start = self.offset.checked_add(offset as u64).ok_or_else(out)?;
        Ok(Bulk { offset: start, len: len as u64, ..self.clone() })
    }

    /// Elements `first..first + count` of this bulk seen as a list of `T`s: [`Bulk::slice`] in elements, not in bytes.
    ///
    /// The list begins at this bulk's first byte, whatever the elements of the exposed buffer are. Where the length is no
    /// multiple of the size of `T`, the bytes behind the last whole element belong to no element.
    ///
    /// ```
    /// # fn main() -> calomel::Result<()> {
    /// # let engine = calomel::Engine::client("loop")?;
    /// let exposed = engine.expose(vec![0f32; 100], calomel::BulkMode::ReadWrite)?;
    /// let part = exposed.bulk().slice_of::<f32>(10, 5)?; // bytes 40..60
    /// assert_eq!(part.len(), 20);
    /// let error = exposed.bulk().slice_of::<f32>(98, 3).unwrap_err();
    /// assert_eq!(error.to_string(), "12 bytes at offset 392 lie outside the 400 bytes there are");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfRange`], in bytes, when the elements do not all lie inside.
    pub fn slice_of<T: ReadElement>(&self, first: usize, count: usize) -> Result<Bulk> {
        let (offset, len) = byte_range::<T>(first, count, self.len())?;
        self.slice(offset, len)
    }

    /// What the sender keeps while a peer holds this bulk.
    fn lease(&self) -> Option<LeaseKeepAlive> {
        let kept: Arc<dyn std::any::Any + Send + Sync> = match &self.lease_source {
            LeaseSource::Own(exposure_state) => Arc::new(LeaseGuard::new(exposure_state)),
            LeaseSource::Received(lease) => lease.clone(),
            LeaseSource::Unknown => return None,
        };
        Some(LeaseKeepAlive { token: self.token, _kept: kept })
    }

    /// The incarnation of the engine that exposed the memory, or that received the bulk.
    fn lease_grantor(&self) -> Option<u64> {
        match &self.lease_source {
            LeaseSource::Own(_) => Some(self.origin.incarnation),
            LeaseSource::Received(lease) => Some(lease.engine),
            LeaseSource::Unknown => None,
        }
    }

    /// The content, where it is small, can't change, and may be read by the peer.
    fn content(&self) -> Option<SmallVec<[u8; 128]>> {
        let len = self.len();
        if self.mode != BulkMode::ReadOnly || len == 0 || len > EncodeContext::eager_bulk() {
            return None;
        }
        match &self.lease_source {
            LeaseSource::Own(exposure_state) => {
                let whole = Slice::whole(&exposure_state.constant()?);
                let mut bytes = SmallVec::from_elem(0, len);
                whole.part(usize::try_from(self.offset).ok()?, len)?.read(&mut bytes).then_some(bytes)
            }
            _ => Some(SmallVec::from_slice(self.copy.as_ref()?.range(self.offset, len)?)),
        }
    }

    /// The keys by which peers' devices reach the memory.
    pub(super) fn keys(&self) -> Option<RemoteKeys> {
        match &self.lease_source {
            LeaseSource::Own(exposure_state) => exposure_state.keys(&*self.origin.core.upgrade()?, self.token),
            _ => self.keys.as_ref()?.valid().cloned(),
        }
    }

    /// The same, as they are encoded: behind their checksum.
    fn encoded_keys(&self) -> Option<Vec<u8>> {
        let keys = self.keys()?;
        let encoded = || [&key_checksum(self.token, &keys)[..], &keys].concat();
        (keys.len() <= MAX_KEYS).then(encoded)
    }

    /// A bulk that was decoded, on this thread.
    pub(super) fn received(fields: BulkFields<'_>, addresses: AddressTexts) -> Bulk {
        let BulkFields { token, offset, len, incarnation, segments, lease, mode, behind } = fields;
        let seen_at = if addresses.is_empty() { None } else { DecodeContext::remote(incarnation) };
        let lease_source = match lease.and_then(DecodeContext::take_lease) {
            Some(lease) => LeaseSource::Received(lease),
            None => LeaseSource::Unknown,
        };
        // It is marked stale by way of the lease.
        let may_copy = matches!(lease_source, LeaseSource::Received(_));
        let content = match behind {
            Behind::Content(content) if may_copy && content.len() as u64 == len => Some(content),
            _ => None,
        };
        let keys = match behind {
            Behind::Keys(encoded) => verify_keys(token, encoded),
            _ => None,
        };
        // One flag for both, where there is either.
        let stale = (content.is_some() || keys.is_some())
            .then(|| DecodeContext::engine().map_or_else(StaleFlag::default, |shared| shared.copies.watch(token)));
        let copy = content
            .zip(stale.clone())
            .map(|(content, stale)| Arc::new(EagerCopy { start: offset, bytes: content.to_vec(), stale }));
        Bulk {
            token,
            offset,
            len,
            mode,
            segments,
            origin: Arc::new(Origin::received(incarnation, addresses, seen_at)),
            lease_source,
            copy,
            keys: keys.zip(stale).map(|(keys, stale)| PeerKeys { keys, stale }),
        }
    }
}

/// Offset and length in bytes of elements of the memory that begins at byte 0 of `size` bytes.
pub(super) fn byte_range<T>(first: usize, count: usize, size: usize) -> Result<(usize, usize)> {
    let bytes = |elements: usize| elements.checked_mul(size_of::<T>());
    match (bytes(first), bytes(count)) {
        (Some(offset), Some(len)) => Ok((offset, len)),
        (offset, len) => Err(Error::OutOfRange { offset: offset.unwrap_or(usize::MAX), len: len.unwrap_or(usize::MAX), size }),
    }
}

/// Longest keys that are sent, in bytes: transfers of bulks with more segments do not use RMA.
const MAX_KEYS: usize = 64 << 10;

/// A checksum of the keys and their token (FNV-1a, 64 bits). Devices do not check tokens, so corruption of a bulk in transit
/// would go unnoticed: keys that do not match are not used, and the owner checks instead. It is no protection against forgery.
fn key_checksum(token: u128, keys: &[u8]) -> [u8; 8] {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    token.to_le_bytes().iter().chain(keys).fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes()
}

fn verify_keys(token: u128, encoded: &[u8]) -> Option<RemoteKeys> {
    let (sum, keys) = encoded.split_first_chunk::<8>()?;
    (keys.len() <= MAX_KEYS && *sum == key_checksum(token, keys)).then(|| keys.into())
}

impl Serialize for Bulk {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let sender = EncodeContext::engine();
        // When memory is revoked, holders of its leases are notified by the engine that granted them. So content and keys,
        // which must be marked stale then, are sent in messages of that engine only; receivers of other messages ask the owner.
        let may_share = sender.zip(self.lease_grantor()).is_none_or(|(sender, grantor)| sender == grantor);
        if !may_share && matches!(&self.lease_source, LeaseSource::Own(exposure_state) if exposure_state.for_one_call) {
            EncodeContext::refuse(self.origin.addresses().first().cloned());
            return Err(serde::ser::Error::custom("a bulk for one call belongs to calls of the engine that exposed it"));
        }
        let lease = if matches!(self.lease_source, LeaseSource::Unknown) {
            None
        } else {
            EncodeContext::lease(|| self.lease().unwrap_or_else(|| unreachable!("checked above")))
        };
        // A copy is marked stale by way of its lease, so content is sent with a lease only.
        let content = lease.filter(|_| may_share).and_then(|_| self.content());
        let keys = if content.is_some() || !may_share { None } else { self.encoded_keys() };
        let behind = match (&content, &keys) {
            (Some(content), _) => Behind::Content(content),
            (None, Some(keys)) => Behind::Keys(keys),
            (None, None) => Behind::Nothing,
        };
        let Bulk { token, offset, len, mode, segments, ref origin, .. } = *self;
        let fields = BulkFields { token, offset, len, incarnation: origin.incarnation, segments, lease, mode, behind };
        let bytes = origin.with_encoded_addresses(|addresses| fields.encode(addresses));
        EncodedBulk { exposed_memory: Piece(&bytes) }.serialize(serializer)
    }
}

/// A bulk that was decoded from one piece.
struct DecodedBulk(Bulk);

impl<'de> Deserialize<'de> for DecodedBulk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<DecodedBulk, D::Error> {
        struct PieceVisitor;
        impl<'de> Visitor<'de> for PieceVisitor {
            type Value = DecodedBulk;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the bytes of a bulk, or their hexadecimal digits")
            }
            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> std::result::Result<DecodedBulk, E> {
                let (fields, addresses) = BulkFields::decode(bytes).ok_or_else(|| E::custom("bytes that are no bulk"))?;
                Ok(DecodedBulk(Bulk::received(fields, addresses)))
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<DecodedBulk, E> {
                self.visit_bytes(&any_from_hex(text).unwrap_or_default())
            }
        }
        if deserializer.is_human_readable() {
            return deserializer.deserialize_str(PieceVisitor);
        }
        deserializer.deserialize_bytes(PieceVisitor)
    }
}

impl<'de> Deserialize<'de> for Bulk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Bulk, D::Error> {
        EncodedBulk::<DecodedBulk>::deserialize(deserializer).map(|encoded| encoded.exposed_memory.0)
    }
}

impl fmt::Debug for Bulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a capability, which logs must not contain.
        write!(f, "Bulk({} bytes, {:?}, of ", self.len, self.mode)?;
        match self.origin.addresses().first() {
            Some(address) => write!(f, "{address})"),
            None => f.write_str("an engine that does not listen)"),
        }
    }
}
