//! A transport for tests that injects faults into another one.
//!
//! Frames, sockets and memory are those of the inner transport. The faults are those that the contract of [`TransportDriver`] permits
//! at any time: dials that fail, connections that end or carry nothing more, sends that find no room, and bytes that arrive in
//! pieces.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crate::sync::Mutex;

use super::{
    Capabilities, Consumed, DeviceAccess, Injected, Link, LinkKey, PayloadStatus, RemoteKeys, Sent, Sink, TransportDriver,
};
use crate::memory::{Region, Slice};
use crate::{Address, Result, Transport};

/// How often faults happen, in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FaultPlan {
    /// Of dials and RMA operations: they fail at once.
    pub refused: u64,
    /// Of links: they end after a number of operations.
    pub cut: u64,
    /// Of links: after a number of operations they stay open, and carry nothing more.
    pub silent: u64,
    /// Of sends: they find no room, or only for their beginning; the rest follows some polls later. Not while the driver is
    /// parked, since nothing would wake it.
    pub held: u64,
}

/// A link with a fault fails within so many operations.
const WITHIN: u64 = 60;
/// A delayed send follows within so many polls.
const POLLS: u64 = 64;

/// Deterministic random numbers (splitmix64).
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub(crate) fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

/// The faults of one engine.
#[derive(Clone)]
pub(crate) struct Faults(Arc<FaultState>);

struct FaultState {
    plan: FaultPlan,
    ended: AtomicBool,
    /// Faults so far.
    count: AtomicUsize,
    dice: Mutex<Dice>,
    links: Mutex<HashMap<LinkKey, Arc<FaultyLink>>>,
}

impl Faults {
    pub(crate) fn new(seed: u64, plan: FaultPlan) -> Faults {
        Faults(Arc::new(FaultState {
            plan,
            ended: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            dice: Mutex::new(Dice::new(seed)),
            links: Mutex::default(),
        }))
    }

    /// The argument for [`EngineBuilder::wrap`](crate::EngineBuilder::wrap).
    pub(crate) fn wrapping(&self) -> impl Fn(Box<dyn TransportDriver>) -> Box<dyn TransportDriver> + 'static {
        let state = self.0.clone();
        move |inner| Box::new(Faulty { inner, state: state.clone(), delayed: Arc::default() })
    }

    /// Injects no further faults. A silent link stays silent.
    pub(crate) fn end(&self) {
        self.0.ended.store(true, Ordering::SeqCst);
    }

    /// The number of faults so far.
    pub(crate) fn count(&self) -> usize {
        self.0.count.load(Ordering::SeqCst)
    }

    /// The number of links that the engine has not closed.
    pub(crate) fn links(&self) -> usize {
        self.0.links.lock().len()
    }
}

impl FaultState {
    fn roll(&self, below: u64) -> u64 {
        self.dice.lock().roll(below)
    }

    /// Decides whether a fault of this frequency happens now.
    fn happens(&self, thousandths: u64) -> bool {
        let happens = !self.ended.load(Ordering::SeqCst) && self.roll(1000) < thousandths;
        if happens {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
        happens
    }

    fn wrap(self: &Arc<Self>, key: LinkKey, inner: Arc<dyn Link>, delayed: &Arc<Mutex<DelayedSends>>) -> Arc<dyn Link> {
        let fate = if self.happens(self.plan.cut) {
            Fate::Cut { after: self.roll(WITHIN) }
        } else if self.happens(self.plan.silent) {
            Fate::Silent { after: self.roll(WITHIN) }
        } else {
            Fate::Sound
        };
        let link = Arc::new(FaultyLink {
            key,
            inner,
            state: self.clone(),
            delayed: delayed.clone(),
            fate: Mutex::new(fate),
            sending: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            rest: Mutex::new(None),
        });
        self.links.lock().insert(key, link.clone());
        link
    }

    /// Decides about the next operation of a link.
    fn next(&self, key: LinkKey) -> FaultDecision {
        let link = self.links.lock().get(&key).cloned();
        link.map_or(FaultDecision::Proceed, |link| link.next())
    }
}

fn cut() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "cut by the fault plan")
}

/// The fault of a link.
enum Fate {
    Sound,
    Cut { after: u64 },
    Silent { after: u64 },
}

/// What happens to one operation.
enum FaultDecision {
    Proceed,
    /// The link ends instead.
    Cut,
    /// It is lost, and so are all that follow.
    Lost,
}

/// The delayed sends of one transport.
#[derive(Default)]
struct DelayedSends {
    polls: u64,
    /// The driver is parked, or about to park: no send is delayed.
    parked: bool,
    /// The poll at which each is due, and its link.
    waiting: Vec<(u64, LinkKey)>,
}

struct FaultyLink {
    key: LinkKey,
    inner: Arc<dyn Link>,
    state: Arc<FaultState>,
    delayed: Arc<Mutex<DelayedSends>>,
    fate: Mutex<Fate>,
    /// A send is pending.
    sending: AtomicBool,
    /// A send was cut, and the driver has to report the end.
    cut: AtomicBool,
    /// The delayed rest of a send. It follows when it is due, or when the inner link has sent what is before it.
    rest: Mutex<Option<(Vec<u8>, Option<Slice>)>>,
}

impl FaultyLink {
    fn next(&self) -> FaultDecision {
        let mut fate = self.fate.lock();
        let ended = self.state.ended.load(Ordering::SeqCst);
        match &mut *fate {
            Fate::Silent { after: 0 } => FaultDecision::Lost,
            _ if ended => FaultDecision::Proceed,
            Fate::Sound => FaultDecision::Proceed,
            Fate::Cut { after: 0 } => FaultDecision::Cut,
            Fate::Cut { after } | Fate::Silent { after } => {
                *after -= 1;
                FaultDecision::Proceed
            }
        }
    }

    fn send_inner(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        let sent = self.inner.send(bytes, payload);
        if let Sent::All(_) | Sent::Lent(_) = sent {
            self.sending.store(false, Ordering::SeqCst);
        }
        sent
    }

    /// Sends only a beginning, possibly empty, and delays the rest.
    fn delay(&self, mut bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        let at = self.state.roll(2 * bytes.len().max(1) as u64) as usize;
        let rest = if at < bytes.len() { bytes.split_off(at) } else { std::mem::take(&mut bytes) };
        // Stored before the beginning is sent, since the end of that may be reported at once.
        *self.rest.lock() = Some((rest, payload));
        if !bytes.is_empty() {
            match self.inner.send(bytes, None) {
                Sent::All(_) | Sent::Lent(_) => {}
                other => return other,
            }
        }
        let later = self.state.roll(POLLS) + 1;
        {
            let mut delayed = self.delayed.lock();
            if !delayed.parked {
                let due = delayed.polls + later;
                delayed.waiting.push((due, self.key));
                return Sent::Later;
            }
        }
        let rest = self.rest.lock().take();
        let (bytes, payload) = rest.unwrap_or_default();
        self.send_inner(bytes, payload)
    }

    /// Has the driver report the end of the link, as of any that fails. False when the driver is parked.
    fn will_report_cut(&self) -> bool {
        let mut delayed = self.delayed.lock();
        if delayed.parked {
            return false;
        }
        self.cut.store(true, Ordering::SeqCst);
        let due = delayed.polls + 1;
        delayed.waiting.push((due, self.key));
        true
    }

    /// Continues a delayed send; false when there is none.
    fn resume(&self, sink: &mut dyn Sink) -> bool {
        if self.cut.load(Ordering::SeqCst) {
            sink.closed(self.key, cut());
            return true;
        }
        let rest = self.rest.lock().take();
        let Some((bytes, payload)) = rest else { return false };
        match self.next() {
            FaultDecision::Proceed => match self.send_inner(bytes, payload) {
                Sent::All(buffer) => sink.sent(self.key, buffer, false),
                Sent::Lent(buffer) => sink.sent(self.key, buffer, true),
                Sent::Later | Sent::AtNextPoll => {}
                Sent::Failed(error) => sink.closed(self.key, error),
            },
            FaultDecision::Cut => sink.closed(self.key, cut()),
            FaultDecision::Lost => {}
        }
        true
    }
}

impl Link for FaultyLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        assert!(!self.sending.swap(true, Ordering::SeqCst), "a send began while another was pending");
        match self.next() {
            FaultDecision::Proceed => {}
            FaultDecision::Cut if self.will_report_cut() => {
                // The other side may have received it, or not.
                if self.state.roll(2) == 0 {
                    drop(self.inner.send(bytes, payload));
                }
                return Sent::Failed(cut());
            }
            FaultDecision::Lost => return Sent::Later,
            // A parked driver would not report the end, so the next operation is cut instead.
            FaultDecision::Cut => {}
        }
        if self.state.happens(self.state.plan.held) { self.delay(bytes, payload) } else { self.send_inner(bytes, payload) }
    }

    fn injects(&self) -> bool {
        self.inner.injects()
    }

    /// Half of the time; else `send` has the faults.
    fn inject(&self, bytes: &[u8]) -> Injected {
        assert!(!self.sending.load(Ordering::SeqCst), "bytes were injected while a send was pending");
        if self.cut.load(Ordering::SeqCst) || self.state.roll(2) == 0 { Injected::No } else { self.inner.inject(bytes) }
    }

    fn wake_peer(&self) {
        self.inner.wake_peer();
    }

    fn acknowledged(&self) -> u64 {
        self.inner.acknowledged()
    }

    fn scheme(&self) -> Transport {
        self.inner.scheme()
    }

    fn is_local(&self) -> bool {
        self.inner.is_local()
    }

    fn begin_rma(&self, operation: u64, pull: bool, local: &Slice, keys: &RemoteKeys, offset: u64) -> bool {
        let refused = self.state.happens(self.state.plan.refused);
        !refused && self.inner.begin_rma(operation, pull, local, keys, offset)
    }

    fn end_rma(&self, operation: u64) {
        self.inner.end_rma(operation);
    }

    fn cover_payloads(&self) {
        self.inner.cover_payloads();
    }

    #[cfg(feature = "tls")]
    fn certificate(&self) -> Option<Arc<[u8]>> {
        self.inner.certificate()
    }

    fn close(&self) {
        self.state.links.lock().remove(&self.key);
        self.inner.close();
    }
}

struct Faulty {
    inner: Box<dyn TransportDriver>,
    state: Arc<FaultState>,
    delayed: Arc<Mutex<DelayedSends>>,
}

impl Faulty {
    fn sink<'a>(&'a self, outer: &'a mut dyn Sink) -> FaultySink<'a> {
        FaultySink { outer, state: &self.state, delayed: &self.delayed }
    }

    /// Continues the delayed sends that are due. True when there were any.
    fn release(&self, sink: &mut dyn Sink) -> bool {
        let due: Vec<LinkKey> = {
            let mut delayed = self.delayed.lock();
            delayed.polls += 1;
            let now = delayed.polls;
            delayed.waiting.extract_if(.., |(at, _)| *at <= now).map(|(_, key)| key).collect()
        };
        for key in &due {
            let link = self.state.links.lock().get(key).cloned();
            if let Some(link) = link {
                link.resume(sink);
            }
        }
        !due.is_empty()
    }
}

impl TransportDriver for Faulty {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn serves(&self, scheme: Transport) -> bool {
        self.inner.serves(scheme)
    }

    fn available(&self, scheme: Transport) -> Result<()> {
        self.inner.available(scheme)
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        self.inner.resolve(address)
    }

    fn local_addresses(&self, address: &Address, dialled: bool) -> Vec<Address> {
        self.inner.local_addresses(address, dialled)
    }

    fn devices(&self) -> u32 {
        self.inner.devices()
    }

    fn expose(&self, region: &Region, access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        self.inner.expose(region, access)
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        self.inner.listen(address)
    }

    fn stop_listening(&self) {
        self.inner.stop_listening();
    }

    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        if self.state.happens(self.state.plan.refused) {
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "refused by the fault plan"));
        }
        self.inner.connect(key, address, &|link| attach(self.state.wrap(key, link, &self.delayed)))
    }

    fn poll(&self, sink: &mut dyn Sink) -> bool {
        let released = self.release(sink);
        self.inner.poll(&mut self.sink(sink)) || released
    }

    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink) {
        self.inner.ready(token, event, &mut self.sink(sink));
    }

    fn next_alarm(&self) -> Option<Instant> {
        self.inner.next_alarm()
    }

    fn park(&self) -> bool {
        {
            let mut delayed = self.delayed.lock();
            if !delayed.waiting.is_empty() {
                return false;
            }
            delayed.parked = true;
        }
        self.inner.park()
    }

    fn unpark(&self) {
        self.delayed.lock().parked = false;
        self.inner.unpark();
    }

    fn mute(&self) {
        self.inner.mute();
    }
}

struct FaultySink<'a> {
    outer: &'a mut dyn Sink,
    state: &'a Arc<FaultState>,
    delayed: &'a Arc<Mutex<DelayedSends>>,
}

impl FaultySink<'_> {
    /// Reports an event, unless a fault replaces it.
    fn report(&mut self, key: LinkKey, report: impl FnOnce(&mut dyn Sink)) {
        match self.state.next(key) {
            FaultDecision::Proceed => report(self.outer),
            FaultDecision::Cut => self.outer.closed(key, cut()),
            FaultDecision::Lost => {}
        }
    }
}

impl Sink for FaultySink<'_> {
    fn accepted(&mut self, remote: Address) -> LinkKey {
        self.outer.accepted(remote)
    }

    fn attach(&mut self, key: LinkKey, link: Arc<dyn Link>) {
        self.outer.attach(key, self.state.wrap(key, link, self.delayed));
    }

    fn chunk(&mut self, key: LinkKey, len: usize) {
        self.outer.chunk(key, len);
    }

    fn connected(&mut self, key: LinkKey) {
        self.report(key, |sink| sink.connected(key));
    }

    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        match self.state.next(key) {
            FaultDecision::Proceed => self.outer.bytes(key, bytes),
            FaultDecision::Cut => {
                self.outer.closed(key, cut());
                None
            }
            FaultDecision::Lost => Some(Consumed { used: bytes.len(), target: None }),
        }
    }

    fn payload_done(&mut self, key: LinkKey, status: PayloadStatus) {
        self.report(key, |sink| sink.payload_done(key, status));
    }

    fn heard(&mut self, key: LinkKey) {
        self.report(key, |sink| sink.heard(key));
    }

    fn returned(&mut self, key: LinkKey) {
        self.report(key, |sink| sink.returned(key));
    }

    fn rma_capable(&mut self, key: LinkKey) {
        self.report(key, |sink| sink.rma_capable(key));
    }

    fn rma_done(&mut self, key: LinkKey, operation: u64, result: io::Result<()>) {
        self.report(key, |sink| sink.rma_done(key, operation, result));
    }

    fn sent(&mut self, key: LinkKey, buffer: Vec<u8>, lent: bool) {
        let link = self.state.links.lock().get(&key).cloned();
        if let Some(link) = link {
            if link.resume(self.outer) {
                return;
            }
            link.sending.store(false, Ordering::SeqCst);
        }
        self.report(key, |sink| sink.sent(key, buffer, lent));
    }

    fn closed(&mut self, key: LinkKey, cause: io::Error) {
        self.outer.closed(key, cause);
    }
}
