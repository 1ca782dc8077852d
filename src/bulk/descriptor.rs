//! The value that stands for exposed memory, and travels.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::exposure_state::ExposureState;
use super::lease::LeaseGuard;
use super::remote::RemoteBulk;
use crate::memory::{Region, Slice};
use crate::progress::{self, Core, LeaseKeepAlive, REFUSED_BY_FILTER, RemoteKeys};
use crate::proto::{Mode, PeerTag};
use crate::rpc::{DecodeContext, EncodeContext};
use crate::{Address, Endpoint, Engine, Error, Result};

/// What *peers* may do with exposed memory. The engine that exposes it may always read it, and write it unless it was
/// exposed with [`Engine::expose_read_only`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BulkMode {
    /// Peers pull.
    ReadOnly,
    /// Peers push.
    WriteOnly,
    /// Peers pull and push.
    ReadWrite,
}

impl BulkMode {
    pub(super) fn access(self) -> Mode {
        Mode { read: self != BulkMode::WriteOnly, write: self != BulkMode::ReadOnly }
    }
}

/// How memory is exposed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExposeMode {
    /// Nobody writes it as long as it is exposed.
    Constant,
    /// Peers may do what the mode says, and this engine may write.
    Changing(BulkMode),
}

impl ExposeMode {
    pub(super) fn mode(self) -> BulkMode {
        match self {
            ExposeMode::Constant => BulkMode::ReadOnly,
            ExposeMode::Changing(mode) => mode,
        }
    }

    /// What devices of peers may do.
    pub(super) fn of_devices(self) -> progress::DeviceAccess {
        let Mode { read, write } = self.mode().access();
        progress::DeviceAccess { read, write, constant: self == ExposeMode::Constant }
    }
}

/// The engine that exposed a bulk, wherever the bulk is now.
pub(crate) struct Origin {
    /// In that engine's own process, its heart.
    pub core: Weak<Core>,
    pub incarnation: u64,
    pub addresses: Vec<Address>,
}

/// Exposed memory, as a value: it can be cloned, sliced, sent inside calls, kept, and forwarded to others. It names the
/// memory by a token that can't be guessed; the owner checks token, bounds and mode of each access. Over `verbs://` the owner's
/// device checks in its stead, a key, bounds and mode, for as long as the memory is exposed: see "Over RDMA devices" in the
/// crate's documentation.
///
/// Offsets and lengths are in bytes, whatever the elements are.
#[derive(Clone)]
pub struct Bulk {
    pub(super) token: u128,
    pub(super) offset: u64,
    len: u64,
    pub(super) mode: BulkMode,
    segments: u32,
    pub(super) origin: Arc<Origin>,
    /// What is kept until nobody holds this bulk any more.
    hold: LeaseSource,
    pub(super) copy: Option<Arc<EagerCopy>>,
    /// By which devices reach the memory of a peer, all of what is exposed.
    keys: Option<PeerKeys>,
}

#[derive(Clone)]
enum LeaseSource {
    /// Exposed here: peers' leases are counted.
    Own(Arc<ExposureState>),
    /// Received, with a lease that says so to the sender.
    Received(Arc<crate::rpc::RemoteLease>),
    /// Received by other means than a call: nobody knows.
    Unknown,
}

/// The content of a small read-only bulk, which came with it.
pub(crate) struct EagerCopy {
    /// Where in the exposed memory it begins.
    start: u64,
    bytes: Vec<u8>,
    stale: Stale,
}

/// Set when the owner has taken the memory back.
type Stale = Arc<AtomicBool>;

/// What devices reach the memory by, as its owner has told.
#[derive(Clone)]
struct PeerKeys {
    keys: RemoteKeys,
    stale: Stale,
}

impl PeerKeys {
    fn good(&self) -> Option<&RemoteKeys> {
        (!self.stale.load(Ordering::Acquire)).then_some(&self.keys)
    }
}

impl EagerCopy {
    /// The bytes of a range of the exposed memory, if they are here and still good.
    pub(super) fn range(&self, offset: u64, len: usize) -> Option<&[u8]> {
        if self.stale.load(Ordering::Acquire) {
            return None;
        }
        let start = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }
}

/// What an engine has been told of others' memory, content and keys, so that it can be called stale when the owner takes the
/// memory back.
#[derive(Default)]
pub(crate) struct ForeignCopies {
    known: Mutex<KnownTokens>,
}

#[derive(Default)]
struct KnownTokens {
    /// All bulks of one token have one flag: they turn stale together.
    by_token: HashMap<u128, Weak<AtomicBool>>,
    /// How many there may be before those that nobody holds are swept out.
    sweep_at: usize,
}

/// So many are not worth sweeping.
const FEW_COPIES: usize = 64;

impl ForeignCopies {
    /// What tells whether the memory of this token has been taken back.
    fn watch(&self, token: u128) -> Stale {
        let mut known = self.known.lock();
        let KnownTokens { by_token, sweep_at } = &mut *known;
        if let Some(stale) = by_token.get(&token).and_then(Weak::upgrade) {
            return stale;
        }
        if by_token.len() >= *sweep_at {
            by_token.retain(|_, stale| stale.strong_count() > 0);
            *sweep_at = FEW_COPIES.max(2 * by_token.len());
        }
        let stale = Stale::default();
        by_token.insert(token, Arc::downgrade(&stale));
        stale
    }

    pub(crate) fn expire(&self, token: u128) {
        let known = self.known.lock().by_token.remove(&token);
        if let Some(stale) = known.and_then(|stale| stale.upgrade()) {
            stale.store(true, Ordering::Release);
        }
    }
}

impl Bulk {
    pub(super) fn own(
        token: u128,
        region: &Arc<Region>,
        access: ExposeMode,
        origin: Arc<Origin>,
        own: &Arc<ExposureState>,
    ) -> Bulk {
        Bulk {
            token,
            offset: 0,
            len: region.len() as u64,
            mode: access.mode(),
            segments: region.segment_count() as u32,
            origin,
            hold: LeaseSource::Own(own.clone()),
            copy: None,
            keys: None,
        }
    }

    /// Length in bytes. Of a bulk that came from a peer, this is what the peer says: whether there is as much, a transfer shows. Who
    /// does not trust its peers sets a limit before it makes room for so much.
    pub fn len(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX)
    }

    /// True when there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What peers may do with the memory.
    pub fn mode(&self) -> BulkMode {
        self.mode
    }

    /// How many segments the exposed memory has; it is one address space all the same.
    pub fn segment_count(&self) -> usize {
        self.segments as usize
    }

    /// The part of `len` bytes at `offset`, both in bytes and within this bulk.
    ///
    /// It is a convenience, no restriction: whoever gets it may reach all of the exposed memory.
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

    /// The bulk as memory of the engine at `endpoint`, ready to be pulled from and pushed into. That must be the one that
    /// exposed it, which [`Request::endpoint`](crate::Request::endpoint) is for bulks that came straight from their owner. At
    /// another peer, transfers end with [`Error::OtherEngine`]. The endpoint may be of any engine that is to transfer.
    pub fn on(&self, endpoint: impl AsRef<Endpoint>) -> RemoteBulk {
        RemoteBulk::new(self.clone(), endpoint.as_ref().clone())
    }

    /// The bulk as memory of whoever exposed it: for bulks that were forwarded. The owner is found by the connection that
    /// there is, or else by the addresses that it listens at: the first transfer dials one of them.
    ///
    /// These addresses are what the peer says from which the bulk has come, and that peer can say anything: it can have this
    /// engine connect to every address and port that this engine reaches, also behind a firewall. The other side gets a greeting
    /// of this library and no byte of the peer's choice. [`EngineBuilder::dial_filter`](crate::EngineBuilder::dial_filter)
    /// decides on each such address before it is dialled.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when there is no connection to the owner, and it does not listen, or the filter refuses its
    /// addresses; [`Error::Finalized`].
    pub fn origin(&self, engine: impl AsRef<Engine>) -> Result<RemoteBulk> {
        let engine = engine.as_ref();
        let shared = engine.shared();
        shared.check("looking for the origin of a bulk")?;
        let known = shared.core.with_proto(|proto| {
            let tag = proto.lookup_incarnation(self.origin.incarnation)?;
            (proto.connection(tag.id).is_some() || self.origin.addresses.is_empty()).then_some(tag)
        });
        let tag: Arc<PeerTag> = match known {
            Some(tag) => tag,
            // Its own bulks an engine reaches without an address.
            None if self.origin.incarnation == shared.incarnation => shared.core.exec(|proto| proto.lookup(&engine.address())),
            None => {
                let somewhere = |address: &Address| !address.socket().is_some_and(|socket| socket.ip().is_unspecified());
                let dialable = |address: &&Address| somewhere(address) && shared.core.transport(address.scheme()).is_ok();
                let chosen = |address: &Address| shared.core.with_proto(|proto| proto.is_chosen_address(address));
                let allowed = |address: &&Address| chosen(address) || shared.core.may_dial(address);
                let named = || self.origin.addresses.iter().filter(dialable);
                let refused = named().next().cloned();
                let address = named().find(allowed);
                let address = address.ok_or_else(|| Error::Unreachable {
                    reason: match refused {
                        Some(_) => REFUSED_BY_FILTER,
                        None => "the owner of the bulk is not connected, and does not listen where this engine could dial",
                    }
                    .to_owned(),
                    peer: refused.or_else(|| self.origin.addresses.first().cloned()).unwrap_or_else(Address::nowhere),
                    source: None,
                })?;
                shared.core.exec(|proto| proto.lookup(address))
            }
        };
        Ok(RemoteBulk::new(self.clone(), Endpoint::new(shared.clone(), tag, 0)))
    }

    /// What a peer that gets this bulk makes the sender keep.
    fn lease(&self) -> Option<LeaseKeepAlive> {
        let kept: Arc<dyn std::any::Any + Send + Sync> = match &self.hold {
            LeaseSource::Own(own) => Arc::new(LeaseGuard::new(own)),
            LeaseSource::Received(lease) => lease.clone(),
            LeaseSource::Unknown => return None,
        };
        Some(LeaseKeepAlive { token: self.token, _kept: kept })
    }

    /// The engine that exposed the memory, or that was told of it, by its incarnation.
    fn holder(&self) -> Option<u64> {
        match &self.hold {
            LeaseSource::Own(_) => Some(self.origin.incarnation),
            LeaseSource::Received(lease) => Some(lease.engine),
            LeaseSource::Unknown => None,
        }
    }

    /// The content, where it is small and can't change, and the peer may read it.
    fn content(&self) -> Option<OwnedBytes> {
        let len = self.len();
        if self.mode != BulkMode::ReadOnly || len == 0 || len > EncodeContext::eager_bulk() {
            return None;
        }
        match &self.hold {
            LeaseSource::Own(own) => {
                let whole = Slice::whole(&own.constant()?);
                let mut bytes = vec![0; len];
                whole.part(usize::try_from(self.offset).ok()?, len)?.read(&mut bytes).then_some(OwnedBytes(bytes))
            }
            _ => Some(OwnedBytes(self.copy.as_ref()?.range(self.offset, len)?.to_vec())),
        }
    }

    /// What devices of others reach the memory by.
    pub(super) fn keys(&self) -> Option<RemoteKeys> {
        match &self.hold {
            LeaseSource::Own(own) => own.keys(&*self.origin.core.upgrade()?, self.token),
            _ => self.keys.as_ref()?.good().cloned(),
        }
    }

    /// The same, as they travel.
    fn sealed_keys(&self) -> Option<OwnedBytes> {
        let keys = self.keys()?;
        let sealed = || OwnedBytes([&seal(self.token, &keys)[..], &keys].concat());
        (keys.len() <= MAX_KEYS).then(sealed)
    }
}

/// A bulk as it travels.
#[derive(Serialize, Deserialize)]
struct EncodedBulk {
    token: [u8; 16],
    offset: u64,
    len: u64,
    mode: BulkMode,
    segments: u32,
    incarnation: u64,
    #[serde(deserialize_with = "few")]
    addresses: Vec<String>,
    /// Which of its message's leases is this bulk's.
    lease: Option<u32>,
    content: Option<OwnedBytes>,
    /// Without the content, where a device knows the memory: by what it is reached there.
    keys: Option<OwnedBytes>,
}

/// Longest keys that travel, in bytes: a bulk of more segments than that allows is moved without devices.
const MAX_KEYS: usize = 64 << 10;

/// Ties keys to their token (FNV-1a, of 64 bits). No device looks at the token; so that a bulk which was damaged on its way is
/// still found out, its keys are not used unless they belong to it, and its owner is asked. Who lies can make this up.
fn seal(token: u128, keys: &[u8]) -> [u8; 8] {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    token.to_le_bytes().iter().chain(keys).fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes()
}

fn unseal(token: u128, sealed: &[u8]) -> Option<RemoteKeys> {
    let (sum, keys) = sealed.split_first_chunk::<8>()?;
    (keys.len() <= MAX_KEYS && *sum == seal(token, keys)).then(|| keys.into())
}

/// A list that a peer can't make long.
fn few<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<String>, D::Error> {
    struct Few;
    impl<'de> Visitor<'de> for Few {
        type Value = Vec<String>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_ADDRESSES} addresses")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Vec<String>, A::Error> {
            let mut list = Vec::new();
            while let Some(text) = seq.next_element()? {
                if list.len() == MAX_ADDRESSES {
                    return Err(serde::de::Error::custom("too many addresses"));
                }
                list.push(text);
            }
            Ok(list)
        }
    }
    deserializer.deserialize_seq(Few)
}

/// Bytes that serde passes on as one piece.
struct OwnedBytes(Vec<u8>);

impl Serialize for OwnedBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for OwnedBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<OwnedBytes, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = OwnedBytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> std::result::Result<OwnedBytes, E> {
                Ok(OwnedBytes(bytes.to_vec()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<OwnedBytes, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = seq.next_element()? {
                    bytes.push(byte);
                }
                Ok(OwnedBytes(bytes))
            }
        }
        deserializer.deserialize_bytes(Any)
    }
}

impl Serialize for Bulk {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let sender = EncodeContext::engine();
        // What is told to holders when the memory goes, the engine tells that has told them of it. So what has to be called
        // stale then, content and keys, goes along in messages of that engine only; through others the owner is asked.
        let told = sender.zip(self.holder()).is_none_or(|(sender, holder)| sender == holder);
        if !told && matches!(&self.hold, LeaseSource::Own(own) if own.for_one_call) {
            EncodeContext::refuse(self.origin.addresses.first().cloned());
            return Err(serde::ser::Error::custom("a bulk for one call belongs to calls of the engine that exposed it"));
        }
        let lease = if matches!(self.hold, LeaseSource::Unknown) {
            None
        } else {
            EncodeContext::lease(|| self.lease().unwrap_or_else(|| unreachable!("checked above")))
        };
        // A copy is called stale by way of the lease: without one, none goes along.
        let content = lease.filter(|_| told).and_then(|_| self.content());
        EncodedBulk {
            token: self.token.to_le_bytes(),
            offset: self.offset,
            len: self.len,
            mode: self.mode,
            segments: self.segments,
            incarnation: self.origin.incarnation,
            addresses: self.origin.addresses.iter().map(Address::to_string).collect(),
            lease,
            keys: if content.is_some() || !told { None } else { self.sealed_keys() },
            content,
        }
        .serialize(serializer)
    }
}

/// Most addresses of an owner that are kept.
const MAX_ADDRESSES: usize = 16;

impl<'de> Deserialize<'de> for Bulk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Bulk, D::Error> {
        let wire = EncodedBulk::deserialize(deserializer)?;
        // Its owner may listen on every interface, and knows itself as 0.0.0.0: here it is known by the one it is seen at.
        let remote = DecodeContext::remote(wire.incarnation);
        let seen = |address: Address| remote.as_ref().map_or_else(|| address.clone(), |remote| address.seen_from(remote));
        let addresses = wire.addresses.iter().filter_map(|text| text.parse().ok()).map(seen).collect();
        let token = u128::from_le_bytes(wire.token);
        let hold = match wire.lease.and_then(DecodeContext::take_lease) {
            Some(lease) => LeaseSource::Received(lease),
            None => LeaseSource::Unknown,
        };
        let content =
            wire.content.filter(|content| content.0.len() as u64 == wire.len && matches!(hold, LeaseSource::Received(_)));
        let keys = wire.keys.and_then(|sealed| unseal(token, &sealed.0));
        let told = content.is_some() || keys.is_some();
        let stale =
            if told { DecodeContext::engine().map(|shared| shared.copies.watch(token)) } else { None }.unwrap_or_default();
        let copy = content.map(|content| Arc::new(EagerCopy { start: wire.offset, bytes: content.0, stale: stale.clone() }));
        Ok(Bulk {
            token,
            offset: wire.offset,
            len: wire.len,
            mode: wire.mode,
            segments: wire.segments,
            origin: Arc::new(Origin { core: Weak::new(), incarnation: wire.incarnation, addresses }),
            hold,
            copy,
            keys: keys.map(|keys| PeerKeys { keys, stale }),
        })
    }
}

impl fmt::Debug for Bulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a capability: it is not for logs.
        write!(f, "Bulk({} bytes, {:?}, of ", self.len, self.mode)?;
        match self.origin.addresses.first() {
            Some(address) => write!(f, "{address})"),
            None => f.write_str("an engine that does not listen)"),
        }
    }
}
