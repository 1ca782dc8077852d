//! `verbs://`: RDMA cards, by way of rdma-core.
//!
//! A connection has two queue pairs. Messages go over the first, which the connection manager connects: they are received into
//! buffers that many connections share, and none is sent for which the other side has not given credit. What is too large for a
//! few messages is staged, in memory of the transport's own, for the other side to read. The second one, the lane, carries those
//! reads, and all that users' transfers read and write straight between the memories that they exposed: it breaks when an access
//! is refused, and is then replaced, while messages go on.

mod connect;
mod device;
mod inbox;
mod lane;
mod link;
mod memory;
mod outbox;
mod sys;
mod wire;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Token};
use parking_lot::{Mutex, RwLock};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};
use smallvec::SmallVec;

use super::{Access, Capabilities, Keys, Link, LinkKey, Reactor, Sink, Transport};
use crate::memory::Region;
use crate::{Address, Error, Result, Scheme};
use device::{Came, Device, Group};
use lane::Over;
use link::VerbsLink;
use memory::Registered;
use sys::{Completion, Context, EventChannel, Id};

/// Pieces that one side of a connection may have staged, before the other has read them.
const STAGED: usize = 4;
/// How long the end of the transport waits for what has been said to leave.
const LINGER: Duration = Duration::from_millis(200);

/// Added to the transport's first token: the connection manager's, the alarm's, and then two for each device.
const MANAGER: usize = 1;
const ALARM: usize = 2;
const DEVICES: usize = 3;
/// After so long, links that have something to do are looked at, whatever happens.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

pub(crate) struct Verbs {
    shared: Arc<Shared>,
    /// The groups that are polled, as of the change of that number.
    known: Mutex<(u32, Groups)>,
    /// What one turn needs, kept for the next.
    batch: Mutex<Vec<Completion>>,
    message: Mutex<Vec<u8>>,
}

type Groups = Vec<(Arc<Device>, Arc<Group>)>;

/// What links share with their transport.
struct Shared {
    registry: mio::Registry,
    waker: Arc<mio::Waker>,
    first_token: usize,
    incarnation: u64,
    /// Versions of the protocol that are spoken here, lowest and highest.
    versions: (u16, u16),
    /// There when it has been asked for.
    channel: Mutex<Option<Arc<EventChannel>>>,
    /// Devices that are in use.
    devices: RwLock<Vec<Arc<Device>>>,
    /// How often they have changed; 0 as long as there is none.
    generation: AtomicU32,
    /// How often their groups have changed.
    changes: Arc<AtomicU32>,
    /// Links and listeners by what the connection manager calls them.
    links: Mutex<HashMap<usize, Arc<VerbsLink>>>,
    listeners: Mutex<HashMap<usize, Arc<Id>>>,
    /// What lanes are done with.
    over: Mutex<Vec<(Arc<VerbsLink>, Over)>>,
    /// Links that have failed where nobody drives.
    nudged: Mutex<Vec<Arc<VerbsLink>>>,
    /// Links that are closed, and have something left to say.
    closing: Mutex<Vec<Arc<VerbsLink>>>,
    /// Wakes whoever drives, for them, and for links whose device has something to do.
    alarm: OnceLock<OwnedFd>,
    alarm_is_set: AtomicBool,
    /// There is something in the three of them.
    attention: AtomicBool,
    parked: AtomicBool,
}

impl Shared {
    /// Has whoever drives look around.
    fn wake(&self) {
        self.attention.store(true, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst)
            && let Err(error) = self.waker.wake()
        {
            tracing::error!(target: "calomel::verbs", %error, "can't wake a parked engine");
        }
    }

    fn nudge(&self, link: Option<Arc<VerbsLink>>) {
        self.nudged.lock().extend(link);
        self.wake();
    }

    fn closing(&self, link: Option<Arc<VerbsLink>>) {
        self.closing.lock().extend(link);
        self.wake();
    }

    fn deliver(&self, link: &Arc<VerbsLink>, over: Vec<Over>) {
        self.over.lock().extend(over.into_iter().map(|over| (link.clone(), over)));
        self.wake();
    }

    fn forget(&self, id: &Id) {
        self.links.lock().remove(&id.number());
    }

    /// The connection manager's events, from now on.
    fn channel(&self) -> io::Result<Arc<EventChannel>> {
        let mut slot = self.channel.lock();
        if let Some(channel) = &*slot {
            return Ok(channel.clone());
        }
        if Context::all()?.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "there is none"));
        }
        let channel = EventChannel::new()?;
        let token = Token(self.first_token + MANAGER);
        self.registry.register(&mut SourceFd(&channel.fd()), token, Interest::READABLE)?;
        let alarm = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        self.registry.register(&mut SourceFd(&alarm.as_raw_fd()), Token(self.first_token + ALARM), Interest::READABLE)?;
        let _ = self.alarm.set(alarm);
        Ok(slot.insert(channel).clone())
    }

    /// A device that is in use from now on.
    fn device(&self, context: Context) -> io::Result<Arc<Device>> {
        let mut devices = self.devices.write();
        if let Some(device) = devices.iter().find(|device| device.context == context) {
            return Ok(device.clone());
        }
        let device = Device::new(context, &self.changes)?;
        let token = self.first_token + DEVICES + 2 * devices.len();
        self.registry.register(&mut SourceFd(&device.completions.fd()), Token(token), Interest::READABLE)?;
        let events = context.async_fd()?;
        if let Err(error) = self.registry.register(&mut SourceFd(&events), Token(token + 1), Interest::READABLE) {
            // Another engine of this process may hear them, and passes them on.
            tracing::debug!(target: "calomel::verbs", %error, "a device's events are not listened to");
        }
        devices.push(device.clone());
        self.generation.fetch_add(1, Ordering::Release);
        tracing::debug!(target: "calomel::verbs", device = context.name(), limits = ?device.limits, "a device is in use");
        Ok(device)
    }

    /// Has whoever drives look after links in a while, whatever happens: those that are closed, and those whose device has
    /// something to do.
    fn look_later(&self) {
        let Some(alarm) = self.alarm.get().filter(|_| !self.alarm_is_set.swap(true, Ordering::AcqRel)) else { return };
        // To set it anew takes away what it has told before.
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: LOOK_AGAIN.as_secs() as i64, tv_nsec: 0 };
        let set = timerfd_settime(alarm, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: once, it_value: value });
        if let Err(error) = set {
            tracing::error!(target: "calomel::verbs", %error, "links are not looked after");
        }
    }

    /// What was to be done later.
    fn look_after(&self) {
        self.alarm_is_set.store(false, Ordering::Release);
        let links: Vec<Arc<VerbsLink>> = self.links.lock().values().cloned().collect();
        let now = Instant::now();
        if links.iter().filter(|link| link.look_after(now)).count() > 0 {
            self.look_later();
        }
        // Those that are closed are gone on with, too.
        self.attention.store(true, Ordering::SeqCst);
    }

    fn groups(&self) -> Groups {
        let devices = self.devices.read();
        devices.iter().flat_map(|device| device.groups().into_iter().map(|group| (device.clone(), group))).collect()
    }

    fn is_in_use(&self) -> bool {
        self.generation.load(Ordering::Relaxed) > 0
    }
}

impl Verbs {
    pub(crate) fn new(reactor: Reactor, incarnation: u64, versions: (u16, u16)) -> Verbs {
        let Reactor { registry, waker, first_token } = reactor;
        Verbs {
            shared: Arc::new(Shared {
                registry,
                waker,
                first_token,
                incarnation,
                versions,
                channel: Mutex::default(),
                devices: RwLock::default(),
                generation: AtomicU32::new(0),
                changes: Arc::default(),
                links: Mutex::default(),
                listeners: Mutex::default(),
                over: Mutex::default(),
                nudged: Mutex::default(),
                closing: Mutex::default(),
                alarm: OnceLock::new(),
                alarm_is_set: AtomicBool::new(false),
                attention: AtomicBool::new(false),
                parked: AtomicBool::new(false),
            }),
            known: Mutex::default(),
            batch: Mutex::default(),
            message: Mutex::default(),
        }
    }

    /// What has to be done that is no completion. True when there was something.
    fn attend(&self, sink: &mut dyn Sink) -> bool {
        if !self.shared.attention.swap(false, Ordering::SeqCst) {
            return false;
        }
        let over = std::mem::take(&mut *self.shared.over.lock());
        over.into_iter().for_each(|(link, over)| link.over(over, sink));
        let nudged = std::mem::take(&mut *self.shared.nudged.lock());
        nudged.into_iter().for_each(|link| link.settle(sink));
        self.linger();
        true
    }

    /// Goes on with links that were closed.
    fn linger(&self) {
        let closing = std::mem::take(&mut *self.shared.closing.lock());
        if closing.is_empty() {
            return;
        }
        let now = Instant::now();
        let left: Vec<_> = closing.into_iter().filter(|link| !link.linger(now)).collect();
        if !left.is_empty() {
            self.shared.look_later();
        }
        self.shared.closing.lock().extend(left);
    }

    /// Takes what has come on the queues of a group. True when anything has.
    fn turn(&self, device: &Device, group: &Group, sink: &mut dyn Sink) -> io::Result<bool> {
        device.gather(group)?;
        let mut batch = self.batch.lock();
        group.take(&mut batch);
        let any = !batch.is_empty();
        let mut refill = !any;
        for completion in batch.drain(..) {
            let link = device.link(completion.queue_pair);
            match device::came(&completion) {
                Some(Came::Message) if completion.status == 0 => {
                    let mut message = self.message.lock();
                    group.message(&completion, &mut message);
                    let credited = link.as_ref().is_some_and(|link| link.message(&message, sink));
                    refill |= group.empty(&completion, link.as_ref().filter(|_| credited));
                }
                Some(Came::Message) => {
                    group.empty(&completion, None);
                    if let Some(link) = link {
                        link.lose(link::broken_by(completion.status), sink);
                    }
                }
                Some(Came::Sent) => {
                    if let Some(link) = link {
                        link.sent(&completion, sink);
                    }
                }
                None => {}
            }
        }
        if refill {
            group.refill()?;
        }
        Ok(any)
    }

    /// Only whoever drives looks at them, so that nobody waits for this lock.
    fn renew(&self, known: &mut (u32, Groups)) {
        let changes = self.shared.changes.load(Ordering::Acquire);
        if known.0 != changes {
            *known = (changes, self.shared.groups());
        }
    }

    /// Polls every group. True when anything has come.
    fn look(&self, sink: &mut dyn Sink) -> bool {
        let mut any = false;
        let mut known = self.known.lock();
        self.renew(&mut known);
        for (device, group) in &known.1 {
            match self.turn(device, group, sink) {
                Ok(came) => any |= came,
                Err(error) => {
                    tracing::error!(target: "calomel::verbs", device = device.context.name(), %error, "a device fails");
                    let lost = || io::Error::new(io::ErrorKind::ConnectionReset, format!("the device fails: {error}"));
                    device.links().iter().for_each(|link| link.lose(lost(), sink));
                    self.linger();
                }
            }
        }
        any
    }

    fn unsupported(&self, error: &io::Error) -> Error {
        Error::Unsupported {
            what: "transport verbs".to_owned(),
            reason: format!("this machine has no RDMA device that can be used: {error}"),
        }
    }

    fn keys(&self, region: &Region, access: Access) -> io::Result<Option<Keys>> {
        let wanted = sys::Access {
            local_write: !access.constant,
            remote_read: access.read,
            remote_write: access.write,
            ..sys::Access::default()
        };
        let mut keys = Vec::new();
        let devices: SmallVec<[Arc<Device>; 2]> = self.shared.devices.read().iter().cloned().collect();
        for device in devices {
            match Registered::of(region, &device, wanted) {
                Some(registered) => wire::encode_keys(device.domain, &registered?.stretches(), &mut keys),
                None => return Ok(None),
            }
        }
        Ok((!keys.is_empty()).then(|| keys.into()))
    }
}

impl Transport for Verbs {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: Scheme::Verbs }
    }

    fn available(&self) -> Result<()> {
        self.shared.channel().map(drop).map_err(|error| self.unsupported(&error))
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        let socket = super::resolve(address)?;
        self.look_ahead(socket);
        Ok(Address::verbs(socket))
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        self.listen_at(address)
    }

    fn devices(&self) -> u32 {
        self.shared.generation.load(Ordering::Acquire)
    }

    fn expose(&self, region: &Region, access: Access) -> io::Result<Option<Keys>> {
        if region.len() == 0 { Ok(None) } else { self.keys(region, access) }
    }

    fn stop_listening(&self) {
        let listeners = std::mem::take(&mut *self.shared.listeners.lock());
        drop(listeners);
    }

    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        self.dial(key, address, attach)
    }

    fn poll(&self, sink: &mut dyn Sink) -> bool {
        let attended = self.attend(sink);
        if !self.shared.is_in_use() {
            return attended;
        }
        let came = self.look(sink);
        if came {
            self.linger();
        }
        attended | came
    }

    fn ready(&self, token: usize, _event: &mio::event::Event, sink: &mut dyn Sink) {
        let number = token - self.shared.first_token;
        if number == MANAGER {
            return self.take_events(sink);
        }
        if number == ALARM {
            return self.shared.look_after();
        }
        let (index, is_async) = ((number - DEVICES) / 2, (number - DEVICES) % 2 == 1);
        let Some(device) = self.shared.devices.read().get(index).cloned() else { return };
        if is_async {
            while let Some(event) = device.context.take_async() {
                tracing::debug!(target: "calomel::verbs", device = device.context.name(), ?event, "a device tells");
                Device::tell(device.context, &event);
            }
        } else {
            device.completions.drain();
            device.groups().iter().for_each(|group| group.told());
        }
    }

    fn park(&self) -> bool {
        self.shared.parked.store(true, Ordering::SeqCst);
        let quiet = |(device, group): &(Arc<Device>, Arc<Group>)| {
            let armed = group.refill().and_then(|()| group.arm()).and_then(|()| device.gather(group));
            if let Err(error) = armed {
                tracing::error!(target: "calomel::verbs", device = device.context.name(), %error, "a device fails");
            }
            group.is_quiet()
        };
        let mut known = self.known.lock();
        self.renew(&mut known);
        let all_quiet = known.1.iter().filter(|both| !quiet(both)).count() == 0;
        drop(known);
        all_quiet && !self.shared.attention.load(Ordering::SeqCst)
    }

    fn unpark(&self) {
        self.shared.parked.store(false, Ordering::SeqCst);
    }
}

impl Drop for Verbs {
    /// What has been said leaves, within a bound; then all that devices have is freed.
    fn drop(&mut self) {
        if sys::is_forked() && self.shared.is_in_use() {
            return;
        }
        let until = Instant::now() + LINGER;
        while !self.shared.closing.lock().is_empty() && Instant::now() < until {
            for (device, group) in self.shared.groups() {
                let _ = device.gather(&group);
                let mut batch = Vec::new();
                group.take(&mut batch);
                for completion in &batch {
                    if let Some(link) = device.link(completion.queue_pair) {
                        link.ended(completion);
                    }
                }
            }
            self.linger();
            std::thread::yield_now();
        }
        self.known.get_mut().1.clear();
        self.shared.closing.lock().drain(..).for_each(|link| link.bury());
        let links: Vec<_> = self.shared.links.lock().values().cloned().collect();
        links.iter().for_each(|link| link.bury());
        self.shared.over.lock().clear();
        self.shared.nudged.lock().clear();
        let channel = self.shared.channel.lock().take();
        if let Some(channel) = channel {
            let _ = self.shared.registry.deregister(&mut SourceFd(&channel.fd()));
        }
        self.shared.listeners.lock().clear();
    }
}
