//! A transport that fails by plan, around one that works.
//!
//! It breaks the real thing: frames, sockets and memories are those of the transport inside. What it adds is what a network
//! and a system may do at any time by the contract of [`Transport`]: dials that fail, connections that end or fall silent in
//! the middle of anything, sends that find no room, and bytes that arrive in pieces.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::{Capabilities, Consumed, DeviceAccess, Link, LinkKey, PayloadStatus, RemoteKeys, Sent, Sink, Transport};
use crate::memory::{Region, Slice};
use crate::{Address, Result, Scheme};

/// How often things go wrong, in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FaultPlan {
    /// Of dials, and of moves: they fail at once.
    pub refused: u64,
    /// Of links: they end after a number of operations.
    pub cut: u64,
    /// Of links: they stay, and carry nothing any more after a number of operations.
    pub silent: u64,
    /// Of sends: they find no room, or only for their beginning, and the rest follows some polls later. While the driver
    /// sleeps there is always room: nothing would wake it.
    pub held: u64,
}

/// A link that is to fail does so within so many operations.
const WITHIN: u64 = 60;
/// What finds no room follows within so many polls.
const POLLS: u64 = 64;

/// Random numbers, the same for the same seed (splitmix64).
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

/// The plan at work in one engine.
#[derive(Clone)]
pub(crate) struct Faults(Arc<FaultState>);

struct FaultState {
    plan: FaultPlan,
    ended: AtomicBool,
    /// So many things went wrong.
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

    /// What [`EngineBuilder::wrap`](crate::EngineBuilder::wrap) takes.
    pub(crate) fn wrapping(&self) -> impl Fn(Box<dyn Transport>) -> Box<dyn Transport> + 'static {
        let state = self.0.clone();
        move |inner| Box::new(Faulty { inner, state: state.clone(), desk: Arc::default() })
    }

    /// Nothing goes wrong from now on. What is silent already stays so.
    pub(crate) fn end(&self) {
        self.0.ended.store(true, Ordering::SeqCst);
    }

    /// So many things went wrong.
    pub(crate) fn count(&self) -> usize {
        self.0.count.load(Ordering::SeqCst)
    }

    /// Links that have not been closed by the engine.
    pub(crate) fn links(&self) -> usize {
        self.0.links.lock().len()
    }
}

impl FaultState {
    fn roll(&self, below: u64) -> u64 {
        self.dice.lock().roll(below)
    }

    /// True when something that goes wrong this often is to go wrong now.
    fn happens(&self, thousandths: u64) -> bool {
        let happens = !self.ended.load(Ordering::SeqCst) && self.roll(1000) < thousandths;
        if happens {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
        happens
    }

    fn wrap(self: &Arc<Self>, key: LinkKey, inner: Arc<dyn Link>, desk: &Arc<Mutex<DelayedReports>>) -> Arc<dyn Link> {
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
            desk: desk.clone(),
            fate: Mutex::new(fate),
            sending: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            rest: Mutex::new(None),
        });
        self.links.lock().insert(key, link.clone());
        link
    }

    /// What becomes of the next thing that happens on a link.
    fn next(&self, key: LinkKey) -> FaultDecision {
        let link = self.links.lock().get(&key).cloned();
        link.map_or(FaultDecision::Goes, |link| link.next())
    }
}

fn cut() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "cut by plan")
}

/// What is in store for a link.
enum Fate {
    Sound,
    Cut { after: u64 },
    Silent { after: u64 },
}

/// What becomes of one operation.
enum FaultDecision {
    Goes,
    /// The link ends instead.
    Cut,
    /// It is lost, and so is all that follows.
    Lost,
}

/// What one transport has held back.
#[derive(Default)]
struct DelayedReports {
    polls: u64,
    /// The driver sleeps, or is about to: nothing is held back from now on.
    parked: bool,
    /// At which poll it goes out, and whose it is.
    waiting: Vec<(u64, LinkKey)>,
}

struct FaultyLink {
    key: LinkKey,
    inner: Arc<dyn Link>,
    state: Arc<FaultState>,
    desk: Arc<Mutex<DelayedReports>>,
    fate: Mutex<Fate>,
    /// A send has not been reported as done.
    sending: AtomicBool,
    /// A send has failed, and that is to be reported.
    cut: AtomicBool,
    /// What found no room. It follows from the desk, or when the inner link has sent what is before it.
    rest: Mutex<Option<(Vec<u8>, Option<Slice>)>>,
}

impl FaultyLink {
    fn next(&self) -> FaultDecision {
        let mut fate = self.fate.lock();
        let ended = self.state.ended.load(Ordering::SeqCst);
        match &mut *fate {
            Fate::Silent { after: 0 } => FaultDecision::Lost,
            _ if ended => FaultDecision::Goes,
            Fate::Sound => FaultDecision::Goes,
            Fate::Cut { after: 0 } => FaultDecision::Cut,
            Fate::Cut { after } | Fate::Silent { after } => {
                *after -= 1;
                FaultDecision::Goes
            }
        }
    }

    fn hand_over(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        let sent = self.inner.send(bytes, payload);
        if let Sent::All(_) | Sent::Lent(_) = sent {
            self.sending.store(false, Ordering::SeqCst);
        }
        sent
    }

    /// Finds no room, or only for a beginning.
    fn hold(&self, mut bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        let at = self.state.roll(2 * bytes.len().max(1) as u64) as usize;
        let rest = if at < bytes.len() { bytes.split_off(at) } else { std::mem::take(&mut bytes) };
        // Before anything is sent: that may be reported at once.
        *self.rest.lock() = Some((rest, payload));
        if !bytes.is_empty() {
            match self.inner.send(bytes, None) {
                Sent::All(_) | Sent::Lent(_) => {}
                other => return other,
            }
        }
        let later = self.state.roll(POLLS) + 1;
        {
            let mut desk = self.desk.lock();
            if !desk.parked {
                let due = desk.polls + later;
                desk.waiting.push((due, self.key));
                return Sent::Later;
            }
        }
        let rest = self.rest.lock().take();
        let (bytes, payload) = rest.unwrap_or_default();
        self.hand_over(bytes, payload)
    }

    /// Sees to it that whoever drives reports the end, as of any link that fails. False when the driver sleeps.
    fn will_report_cut(&self) -> bool {
        let mut desk = self.desk.lock();
        if desk.parked {
            return false;
        }
        self.cut.store(true, Ordering::SeqCst);
        let due = desk.polls + 1;
        desk.waiting.push((due, self.key));
        true
    }

    /// Goes on with what found no room; false when there is nothing.
    fn go_on(&self, sink: &mut dyn Sink) -> bool {
        if self.cut.load(Ordering::SeqCst) {
            sink.closed(self.key, cut());
            return true;
        }
        let rest = self.rest.lock().take();
        let Some((bytes, payload)) = rest else { return false };
        match self.next() {
            FaultDecision::Goes => match self.hand_over(bytes, payload) {
                Sent::All(buffer) => sink.sent(self.key, buffer, false),
                Sent::Lent(buffer) => sink.sent(self.key, buffer, true),
                Sent::Later => {}
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
        assert!(!self.sending.swap(true, Ordering::SeqCst), "a send before the last one was reported");
        match self.next() {
            FaultDecision::Goes => {}
            FaultDecision::Cut if self.will_report_cut() => {
                // The other side may have got it, or not.
                if self.state.roll(2) == 0 {
                    drop(self.inner.send(bytes, payload));
                }
                return Sent::Failed(cut());
            }
            FaultDecision::Lost => return Sent::Later,
            // Nothing would tell a driver that sleeps, so the next operation is cut instead.
            FaultDecision::Cut => {}
        }
        if self.state.happens(self.state.plan.held) { self.hold(bytes, payload) } else { self.hand_over(bytes, payload) }
    }

    fn acknowledged(&self) -> u64 {
        self.inner.acknowledged()
    }

    fn scheme(&self) -> Scheme {
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
    inner: Box<dyn Transport>,
    state: Arc<FaultState>,
    desk: Arc<Mutex<DelayedReports>>,
}

impl Faulty {
    fn sink<'a>(&'a self, outer: &'a mut dyn Sink) -> FaultySink<'a> {
        FaultySink { outer, state: &self.state, desk: &self.desk }
    }

    /// Sends what was held back long enough. True when there was anything.
    fn release(&self, sink: &mut dyn Sink) -> bool {
        let due: Vec<LinkKey> = {
            let mut desk = self.desk.lock();
            desk.polls += 1;
            let now = desk.polls;
            desk.waiting.extract_if(.., |(at, _)| *at <= now).map(|(_, key)| key).collect()
        };
        for key in &due {
            let link = self.state.links.lock().get(key).cloned();
            if let Some(link) = link {
                link.go_on(sink);
            }
        }
        !due.is_empty()
    }
}

impl Transport for Faulty {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
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
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "refused by plan"));
        }
        self.inner.connect(key, address, &|link| attach(self.state.wrap(key, link, &self.desk)))
    }

    fn poll(&self, sink: &mut dyn Sink) -> bool {
        let released = self.release(sink);
        self.inner.poll(&mut self.sink(sink)) || released
    }

    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink) {
        self.inner.ready(token, event, &mut self.sink(sink));
    }

    fn park(&self) -> bool {
        {
            let mut desk = self.desk.lock();
            if !desk.waiting.is_empty() {
                return false;
            }
            desk.parked = true;
        }
        self.inner.park()
    }

    fn unpark(&self) {
        self.desk.lock().parked = false;
        self.inner.unpark();
    }
}

struct FaultySink<'a> {
    outer: &'a mut dyn Sink,
    state: &'a Arc<FaultState>,
    desk: &'a Arc<Mutex<DelayedReports>>,
}

impl FaultySink<'_> {
    /// Reports something, or what becomes of it.
    fn report(&mut self, key: LinkKey, report: impl FnOnce(&mut dyn Sink)) {
        match self.state.next(key) {
            FaultDecision::Goes => report(self.outer),
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
        self.outer.attach(key, self.state.wrap(key, link, self.desk));
    }

    fn chunk(&mut self, key: LinkKey, len: usize) {
        self.outer.chunk(key, len);
    }

    fn connected(&mut self, key: LinkKey) {
        self.report(key, |sink| sink.connected(key));
    }

    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        match self.state.next(key) {
            FaultDecision::Goes => self.outer.bytes(key, bytes),
            FaultDecision::Cut => {
                self.outer.closed(key, cut());
                None
            }
            FaultDecision::Lost => Some(Consumed { used: bytes.len(), target: None }),
        }
    }

    fn payload_done(&mut self, key: LinkKey, landed: PayloadStatus) {
        self.report(key, |sink| sink.payload_done(key, landed));
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
            if link.go_on(self.outer) {
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
