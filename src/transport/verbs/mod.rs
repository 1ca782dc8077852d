//! `verbs://`: RDMA cards, by way of rdma-core.
//!
//! A connection has two queue pairs, one for messages and one for RMA: see README.md in this folder, which explains them, the
//! credits, staging, ownership, and the order in which objects are destroyed.

mod connect;
mod device;
mod inbox;
mod limits;
mod link;
mod memory;
mod outbox;
mod queue_set;
mod slab;
mod sys;
mod wire;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::sync::{Mutex, RwLock};
use mio::unix::SourceFd;
use mio::{Interest, Token};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};
use smallvec::SmallVec;

use super::{Capabilities, DeviceAccess, Link, LinkKey, Reactor, RemoteKeys, Sink, TransportDriver};
use crate::deferred_log::defer;
use crate::memory::Region;
use crate::{Address, Error, Result, Transport};
use device::Device;
use link::{DeviceLinks, OperationDone, VerbsLink};
use memory::{Registered, if_supported};
use queue_set::{CompletionKind, QueueSet};
use sys::{CmId, Context, EventChannel, WorkCompletion};

/// How long the end of the transport waits for messages to be sent.
const LINGER: Duration = Duration::from_millis(200);

/// Added to the transport's first token: the connection manager's, the timer's, and then two for each device.
const MANAGER: usize = 1;
const ALARM: usize = 2;
const DEVICES: usize = 3;
/// Interval at which links with outstanding work are checked for progress.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Verbs {
    shared: Arc<VerbsShared>,
    /// The queue sets that are polled, and the count of changes that they are from.
    polled: Mutex<(u32, QueueSets)>,
    /// Buffers of one poll, kept for the next.
    batch: Mutex<Vec<WorkCompletion>>,
    message: Mutex<Vec<u8>>,
}

type QueueSets = Vec<(Arc<DeviceLinks>, Arc<QueueSet<VerbsLink>>)>;

/// What links share with their transport.
struct VerbsShared {
    registry: mio::Registry,
    waker: Arc<mio::Waker>,
    first_token: usize,
    incarnation: u64,
    /// Lowest and highest protocol version that this engine supports.
    versions: (u16, u16),
    /// Made when it is first needed.
    channel: Mutex<Option<Arc<EventChannel>>>,
    /// Devices in use.
    devices: RwLock<Vec<Arc<DeviceLinks>>>,
    /// Counts changes of `devices`; 0 as long as there is none.
    generation: AtomicU32,
    /// Counts changes of the devices' queue sets.
    changes: Arc<AtomicU32>,
    /// Links and listeners by their numbers: see [`CmId::number`].
    links: Mutex<HashMap<usize, Arc<VerbsLink>>>,
    listeners: Mutex<HashMap<usize, Arc<CmId>>>,
    /// RMA operations that have ended.
    done: Mutex<Vec<(Arc<VerbsLink>, OperationDone)>>,
    /// Links that have failed where it could not be reported.
    scheduled: Mutex<Vec<Arc<VerbsLink>>>,
    /// Links that are closed, and have messages left to send.
    closing: Mutex<Vec<Arc<VerbsLink>>>,
    /// Wakes the driver for closing links, and for links whose RMA queue pair may have stalled.
    alarm: OnceLock<OwnedFd>,
    alarm_is_set: AtomicBool,
    /// `done`, `scheduled` or `closing` is not empty.
    pending_flags: AtomicBool,
    parked: AtomicBool,
}

impl VerbsShared {
    /// Has the driver check `done`, `scheduled` and `closing`.
    fn wake(&self) {
        self.pending_flags.store(true, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst)
            && let Err(error) = self.waker.wake()
        {
            defer(move || tracing::error!(target: "calomel::verbs", %error, "can't wake a parked engine"));
        }
    }

    fn schedule(&self, link: Option<Arc<VerbsLink>>) {
        self.scheduled.lock().extend(link);
        self.wake();
    }

    fn closing(&self, link: Option<Arc<VerbsLink>>) {
        self.closing.lock().extend(link);
        self.wake();
    }

    fn deliver(&self, link: &Arc<VerbsLink>, done: Vec<OperationDone>) {
        self.done.lock().extend(done.into_iter().map(|done| (link.clone(), done)));
        self.wake();
    }

    fn forget(&self, id: &CmId) {
        self.links.lock().remove(&id.number());
    }

    /// The channel of the connection manager's events, made when it is first needed.
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

    /// Puts a device into use.
    fn device(&self, context: Context) -> io::Result<Arc<DeviceLinks>> {
        let mut devices = self.devices.write();
        if let Some(links) = devices.iter().find(|links| links.device.context == context) {
            return Ok(links.clone());
        }
        let links = DeviceLinks::new(context, &self.changes)?;
        let token = self.first_token + DEVICES + 2 * devices.len();
        self.registry.register(&mut SourceFd(&links.device.completions.fd()), Token(token), Interest::READABLE)?;
        let events = context.async_fd()?;
        if let Err(error) = self.registry.register(&mut SourceFd(&events), Token(token + 1), Interest::READABLE) {
            // Another engine of this process listens, and passes events on.
            defer(move || tracing::debug!(target: "calomel::verbs", %error, "another engine hears this device's events"));
        }
        devices.push(links.clone());
        self.generation.fetch_add(1, Ordering::Release);
        let limits = links.device.limits;
        defer(move || tracing::debug!(target: "calomel::verbs", device = context.name(), ?limits, "a device is in use"));
        Ok(links)
    }

    /// Has the driver check links after [`CHECK_INTERVAL`].
    fn set_alarm(&self) {
        let Some(alarm) = self.alarm.get().filter(|_| !self.alarm_is_set.swap(true, Ordering::AcqRel)) else { return };
        // Setting the timer anew also makes it unreadable.
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: CHECK_INTERVAL.as_secs() as i64, tv_nsec: 0 };
        let set = timerfd_settime(alarm, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: once, it_value: value });
        if let Err(error) = set {
            defer(move || tracing::error!(target: "calomel::verbs", %error, "can't set the timer that checks links"));
        }
    }

    /// The timer has expired: replaces stalled RMA queue pairs.
    fn check_links(&self) {
        self.alarm_is_set.store(false, Ordering::Release);
        let links: Vec<Arc<VerbsLink>> = self.links.lock().values().cloned().collect();
        let now = Instant::now();
        if links.iter().filter(|link| link.check_progress(now)).count() > 0 {
            self.set_alarm();
        }
        // Closing links are continued, too.
        self.pending_flags.store(true, Ordering::SeqCst);
    }

    fn queue_sets(&self) -> QueueSets {
        let devices = self.devices.read();
        devices.iter().flat_map(|links| links.queue_sets().into_iter().map(|queue_set| (links.clone(), queue_set))).collect()
    }

    fn is_in_use(&self) -> bool {
        self.generation.load(Ordering::Relaxed) > 0
    }
}

impl Verbs {
    pub(crate) fn new(reactor: Reactor, incarnation: u64, versions: (u16, u16)) -> Verbs {
        let Reactor { registry, waker, first_token } = reactor;
        Verbs {
            shared: Arc::new(VerbsShared {
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
                done: Mutex::default(),
                scheduled: Mutex::default(),
                closing: Mutex::default(),
                alarm: OnceLock::new(),
                alarm_is_set: AtomicBool::new(false),
                pending_flags: AtomicBool::new(false),
                parked: AtomicBool::new(false),
            }),
            polled: Mutex::default(),
            batch: Mutex::default(),
            message: Mutex::default(),
        }
    }

    /// Handles `done`, `scheduled` and `closing`. True when there was something.
    fn run_scheduled(&self, sink: &mut dyn Sink) -> bool {
        if !self.shared.pending_flags.swap(false, Ordering::SeqCst) {
            return false;
        }
        let done = std::mem::take(&mut *self.shared.done.lock());
        done.into_iter().for_each(|(link, done)| link.operation_done(done, sink));
        let scheduled = std::mem::take(&mut *self.shared.scheduled.lock());
        scheduled.into_iter().for_each(|link| link.report_pending_failure(sink));
        self.linger();
        true
    }

    /// Continues with links that were closed.
    fn linger(&self) {
        let closing = std::mem::take(&mut *self.shared.closing.lock());
        if closing.is_empty() {
            return;
        }
        let now = Instant::now();
        let left: Vec<_> = closing.into_iter().filter(|link| !link.linger(now)).collect();
        if !left.is_empty() {
            self.shared.set_alarm();
        }
        self.shared.closing.lock().extend(left);
    }

    /// Handles the completions of a queue set. True when there were any.
    fn poll_queue_set(&self, links: &DeviceLinks, queue_set: &QueueSet<VerbsLink>, sink: &mut dyn Sink) -> io::Result<bool> {
        links.collect_completions(queue_set)?;
        let mut batch = self.batch.lock();
        queue_set.take(&mut batch);
        let any = !batch.is_empty();
        let mut repost = !any;
        for completion in batch.drain(..) {
            let link = links.link(completion.queue_pair);
            match queue_set::completion_kind(&completion) {
                Some(CompletionKind::Message) if completion.status == 0 => {
                    let mut message = self.message.lock();
                    queue_set.read_message(&completion, &mut message);
                    let credited = link.as_ref().is_some_and(|link| link.message(&message, sink));
                    repost |= queue_set.recycle(&completion, link.as_ref().filter(|_| credited));
                }
                Some(CompletionKind::Message) => {
                    queue_set.recycle(&completion, None);
                    if let Some(link) = link {
                        link.report_failure(link::broken_by(completion.status), sink);
                    }
                }
                Some(CompletionKind::Sent) => {
                    if let Some(link) = link {
                        link.sent(&completion, sink);
                    }
                }
                None => {}
            }
        }
        if repost {
            queue_set.repost(VerbsLink::return_credit)?;
        }
        Ok(any)
    }

    /// Only the driver uses them, so that no thread waits for this lock.
    fn refresh(&self, polled: &mut (u32, QueueSets)) {
        let changes = self.shared.changes.load(Ordering::Acquire);
        if polled.0 != changes {
            *polled = (changes, self.shared.queue_sets());
        }
    }

    /// Polls every queue set. True when there were completions.
    fn poll_queue_sets(&self, sink: &mut dyn Sink) -> bool {
        let mut any = false;
        let mut polled = self.polled.lock();
        self.refresh(&mut polled);
        for (links, queue_set) in &polled.1 {
            match self.poll_queue_set(links, queue_set, sink) {
                Ok(progressed) => any |= progressed,
                Err(error) => {
                    log_device_failure(&links.device, &error);
                    let lost = || io::Error::new(io::ErrorKind::ConnectionReset, format!("the device fails: {error}"));
                    links.all().iter().for_each(|link| link.report_failure(lost(), sink));
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

    fn keys(&self, region: &Region, access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        let wanted = sys::AccessFlags {
            local_write: !access.constant,
            remote_read: access.read,
            remote_write: access.write,
            ..sys::AccessFlags::default()
        };
        let mut keys = Vec::new();
        let devices: SmallVec<[Arc<Device>; 2]> = self.shared.devices.read().iter().map(|links| links.device.clone()).collect();
        for device in devices {
            match Registered::of(region, &device, wanted) {
                Some(registered) => {
                    if let Some(registered) = if_supported(registered)? {
                        wire::encode_keys(device.domain, &registered.remote_segments(), &mut keys);
                    }
                }
                None => return Ok(None),
            }
        }
        Ok((!keys.is_empty()).then(|| keys.into()))
    }
}

impl TransportDriver for Verbs {
    fn capabilities(&self) -> Capabilities {
        Capabilities { scheme: Transport::Verbs }
    }

    fn available(&self, _scheme: Transport) -> Result<()> {
        self.shared.channel().map(drop).map_err(|error| self.unsupported(&error))
    }

    fn resolve(&self, address: &Address) -> Result<Address> {
        let socket = super::resolve(address)?;
        self.prepare_device(socket);
        Ok(Address::verbs(socket))
    }

    fn listen(&self, address: &Address) -> Result<Address> {
        self.listen_at(address)
    }

    fn devices(&self) -> u32 {
        self.shared.generation.load(Ordering::Acquire)
    }

    fn expose(&self, region: &Region, access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
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
        let attended = self.run_scheduled(sink);
        if !self.shared.is_in_use() {
            return attended;
        }
        let progressed = self.poll_queue_sets(sink);
        if progressed {
            self.linger();
        }
        attended | progressed
    }

    fn ready(&self, token: usize, _event: &mio::event::Event, sink: &mut dyn Sink) {
        let number = token - self.shared.first_token;
        if number == MANAGER {
            return self.take_events(sink);
        }
        if number == ALARM {
            return self.shared.check_links();
        }
        let (index, is_async) = ((number - DEVICES) / 2, (number - DEVICES) % 2 == 1);
        let Some(links) = self.shared.devices.read().get(index).cloned() else { return };
        let device = &links.device;
        if is_async {
            while let Some(event) = device.context.take_async() {
                DeviceLinks::dispatch_async_event(device.context, &event);
                let name = device.context.name();
                defer(move || tracing::debug!(target: "calomel::verbs", device = name, ?event, "device event"));
            }
        } else {
            device.completions.drain();
            links.queue_sets().iter().for_each(|queue_set| queue_set.notified());
        }
    }

    fn park(&self) -> bool {
        self.shared.parked.store(true, Ordering::SeqCst);
        let quiet = |(links, queue_set): &(Arc<DeviceLinks>, Arc<QueueSet<VerbsLink>>)| {
            let reposted = queue_set.repost(VerbsLink::return_credit);
            let armed = reposted.and_then(|()| queue_set.arm()).and_then(|()| links.collect_completions(queue_set));
            if let Err(error) = armed {
                log_device_failure(&links.device, &error);
            }
            queue_set.is_quiet()
        };
        let mut polled = self.polled.lock();
        self.refresh(&mut polled);
        let all_quiet = polled.1.iter().filter(|both| !quiet(both)).count() == 0;
        drop(polled);
        all_quiet && !self.shared.pending_flags.load(Ordering::SeqCst)
    }

    fn unpark(&self) {
        self.shared.parked.store(false, Ordering::SeqCst);
    }
}

fn log_device_failure(device: &Device, error: &io::Error) {
    let (device, error) = (device.context.name(), error.to_string());
    defer(move || tracing::error!(target: "calomel::verbs", device, error, "a device fails"));
}

impl Drop for Verbs {
    /// Messages are sent, within a bound; then everything that devices hold is freed.
    fn drop(&mut self) {
        if sys::is_forked() && self.shared.is_in_use() {
            return;
        }
        let until = Instant::now() + LINGER;
        while !self.shared.closing.lock().is_empty() && Instant::now() < until {
            for (links, queue_set) in self.shared.queue_sets() {
                let _ = links.collect_completions(&queue_set);
                let mut batch = Vec::new();
                queue_set.take(&mut batch);
                for completion in &batch {
                    if let Some(link) = links.link(completion.queue_pair) {
                        link.ended(completion);
                    }
                }
            }
            self.linger();
            std::thread::yield_now();
        }
        self.polled.get_mut().1.clear();
        self.shared.closing.lock().drain(..).for_each(|link| link.destroy());
        let links: Vec<_> = self.shared.links.lock().values().cloned().collect();
        links.iter().for_each(|link| link.destroy());
        self.shared.done.lock().clear();
        self.shared.scheduled.lock().clear();
        let channel = self.shared.channel.lock().take();
        if let Some(channel) = channel {
            let _ = self.shared.registry.deregister(&mut SourceFd(&channel.fd()));
        }
        self.shared.listeners.lock().clear();
    }
}
