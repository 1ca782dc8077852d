//! Engines with an RMA device: registration of memory, RMA operations, and their fallback.
//!
//! The device is a fake around `loop://`. It transfers nothing: what it "pulls" is made up, and what it "pushes" is recorded.
//! So the bytes show whether the device or the owner did a transfer.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::Mutex;

use crate::memory::{DeviceRegistration, Loan, Region, Slice};
use crate::transport::{
    Capabilities, Consumed, DeviceAccess, Injected, Link, LinkKey, PayloadStatus, RemoteKeys, Sent, Sink, TransportDriver,
};
use crate::{Address, Bulk, BulkMode, Endpoint, Engine, Error, Request, Result, Transport};

/// How the device handles requests.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum DeviceBehavior {
    #[default]
    Completes,
    /// It accepts them, and they fail.
    Fails,
    /// It does not accept them.
    Refuses,
    /// It accepts them, and they never complete.
    Hangs,
}

/// An RMA request to the device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RmaRequest {
    pull: bool,
    len: usize,
    keys: RemoteKeys,
    offset: u64,
}

#[derive(Default)]
struct FakeDeviceState {
    /// The number of devices; 0 before one appears.
    devices: u32,
    behavior: DeviceBehavior,
    /// Registrations fail with the limit on locked memory.
    full: bool,
    /// The length of keys.
    keys: usize,
    exposed: Vec<DeviceAccess>,
    /// How many registrations have ended.
    ended: usize,
    asked: Vec<RmaRequest>,
    pushed: Vec<Vec<u8>>,
    /// How many RMA operations were cancelled, and how often memory was fenced from the device.
    cancelled: usize,
    fenced: usize,
}

#[derive(Clone)]
struct FakeDevice(Arc<Mutex<FakeDeviceState>>);

/// Completions that are to be reported to an engine.
type Completions = Arc<Mutex<Vec<(LinkKey, u64, io::Result<()>)>>>;

/// The value of all bytes that the device pulls.
const MADE_UP: u8 = 0xdd;

impl FakeDevice {
    fn new() -> FakeDevice {
        FakeDevice(Arc::new(Mutex::new(FakeDeviceState { devices: 1, keys: 24, ..FakeDeviceState::default() })))
    }

    fn absent() -> FakeDevice {
        let device = FakeDevice::new();
        device.0.lock().devices = 0;
        device
    }

    fn set(&self, devices: u32, full: bool) {
        let mut state = self.0.lock();
        state.devices = devices;
        state.full = full;
    }

    fn engine(&self, address: &str) -> Result<Engine> {
        let device = self.clone();
        let wrap = move |inner: Box<dyn TransportDriver>| -> Box<dyn TransportDriver> {
            if inner.capabilities().scheme == Transport::Loop {
                Box::new(DeviceTransport { inner, device: device.clone(), done: Completions::default() })
            } else {
                inner
            }
        };
        Engine::builder().listen(address).wrap(wrap).build()
    }
}

/// A registration of memory with the device.
struct RegisteredMemory(FakeDevice);

impl DeviceRegistration for RegisteredMemory {
    fn end(&self) {
        self.0.0.lock().ended += 1;
    }
}

/// Memory of an RMA operation that hangs.
struct InUse(FakeDevice, Slice);

impl Loan for InUse {
    fn withdraw(&self) {}

    fn wait(&self, _: Instant) {
        self.0.0.lock().fenced += 1;
    }

    fn is_over(&self) -> bool {
        self.1.is_over()
    }
}

struct DeviceLink {
    inner: Arc<dyn Link>,
    key: LinkKey,
    device: FakeDevice,
    done: Completions,
}

impl Link for DeviceLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        self.inner.send(bytes, payload)
    }
    fn injects(&self) -> bool {
        self.inner.injects()
    }
    fn inject(&self, bytes: &[u8]) -> Injected {
        self.inner.inject(bytes)
    }
    fn wake_peer(&self) {
        self.inner.wake_peer();
    }
    fn scheme(&self) -> Transport {
        self.inner.scheme()
    }
    fn acknowledged(&self) -> u64 {
        self.inner.acknowledged()
    }
    fn begin_rma(&self, operation: u64, pull: bool, local: &Slice, keys: &RemoteKeys, offset: u64) -> bool {
        let behavior = {
            let mut state = self.device.0.lock();
            state.asked.push(RmaRequest { pull, len: local.len, keys: keys.clone(), offset });
            state.behavior
        };
        let result = match behavior {
            DeviceBehavior::Refuses => return false,
            DeviceBehavior::Hangs => {
                if let Some(access) = local.read_access() {
                    access.lend(Arc::new(InUse(self.device.clone(), local.clone())));
                }
                return true;
            }
            DeviceBehavior::Fails => Err(io::Error::other("the device failed")),
            DeviceBehavior::Completes => {
                let mut bytes = vec![MADE_UP; local.len];
                assert!(if pull { local.write(&bytes) } else { local.read(&mut bytes) });
                self.device.0.lock().pushed.extend((!pull).then_some(bytes));
                Ok(())
            }
        };
        self.done.lock().push((self.key, operation, result));
        true
    }
    fn end_rma(&self, _: u64) {
        self.device.0.lock().cancelled += 1;
    }
    fn close(&self) {
        self.inner.close();
    }
}

struct DeviceTransport {
    inner: Box<dyn TransportDriver>,
    device: FakeDevice,
    done: Completions,
}

impl DeviceTransport {
    fn link(&self, key: LinkKey, inner: Arc<dyn Link>) -> Arc<dyn Link> {
        Arc::new(DeviceLink { inner, key, device: self.device.clone(), done: self.done.clone() })
    }
}

impl TransportDriver for DeviceTransport {
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
    fn listen(&self, address: &Address) -> Result<Address> {
        self.inner.listen(address)
    }
    fn devices(&self) -> u32 {
        self.device.0.lock().devices
    }
    fn expose(&self, region: &Region, access: DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        let (full, keys, number) = {
            let state = self.device.0.lock();
            (state.full, state.keys, state.exposed.len())
        };
        let registered = region.register(|pieces| {
            assert_eq!(pieces.iter().map(|piece| piece.iov_len).sum::<usize>(), region.len());
            if full { Err(io::Error::other("the limit on locked memory")) } else { Ok(RegisteredMemory(self.device.clone())) }
        });
        let Some(registered) = registered else { return Ok(None) };
        registered?;
        self.device.0.lock().exposed.push(access);
        Ok(Some(vec![number as u8; keys].into()))
    }
    fn stop_listening(&self) {
        self.inner.stop_listening();
    }
    fn connect(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        self.inner.connect(key, address, &|link| attach(self.link(key, link)))
    }
    fn poll(&self, sink: &mut dyn Sink) -> bool {
        let done = std::mem::take(&mut *self.done.lock());
        let any = !done.is_empty();
        done.into_iter().for_each(|(key, operation, result)| sink.rma_done(key, operation, result));
        self.inner.poll(&mut DeviceSink { sink, transport: self }) || any
    }
    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink) {
        self.inner.ready(token, event, &mut DeviceSink { sink, transport: self });
    }
    fn park(&self) -> bool {
        self.done.lock().is_empty() && self.inner.park()
    }
    fn unpark(&self) {
        self.inner.unpark();
    }

    fn mute(&self) {
        self.inner.mute();
    }
}

struct DeviceSink<'a> {
    sink: &'a mut dyn Sink,
    transport: &'a DeviceTransport,
}

impl Sink for DeviceSink<'_> {
    fn accepted(&mut self, remote: Address) -> LinkKey {
        self.sink.accepted(remote)
    }
    fn attach(&mut self, key: LinkKey, link: Arc<dyn Link>) {
        self.sink.attach(key, self.transport.link(key, link));
        self.sink.rma_capable(key);
    }
    fn connected(&mut self, key: LinkKey) {
        self.sink.connected(key);
        self.sink.rma_capable(key);
    }
    fn chunk(&mut self, key: LinkKey, len: usize) {
        self.sink.chunk(key, len);
    }
    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        self.sink.bytes(key, bytes)
    }
    fn payload_done(&mut self, key: LinkKey, status: PayloadStatus) {
        self.sink.payload_done(key, status);
    }
    fn heard(&mut self, key: LinkKey) {
        self.sink.heard(key);
    }
    fn sent(&mut self, key: LinkKey, buffer: Vec<u8>, lent: bool) {
        self.sink.sent(key, buffer, lent);
    }
    fn returned(&mut self, key: LinkKey) {
        self.sink.returned(key);
    }
    fn rma_capable(&mut self, _: LinkKey) {}
    fn rma_done(&mut self, _: LinkKey, _: u64, _: io::Result<()>) {}
    fn closed(&mut self, key: LinkKey, cause: io::Error) {
        self.sink.closed(key, cause);
    }
}

const LEN: usize = 100_000;

/// A server that exports a bulk, a client, and the bulk as the client has received it.
fn export_bulk(device: &FakeDevice, bulk: impl FnOnce(&Engine) -> Result<Bulk>) -> Result<(Engine, Engine, Endpoint, Bulk)> {
    let server = device.engine("loop://")?;
    let exported = Mutex::new(Some(bulk(&server)?));
    server.define("export", move |_: &Request, ()| exported.lock().clone())?;
    let client = device.engine("loop://")?;
    let peer = client.lookup(server.address())?;
    let got = client.procedure::<(), Option<Bulk>>("export").on(&peer).call(&())?;
    Ok((server, client, peer, got.expect("the server exports a bulk")))
}

fn finish(engines: [Engine; 2]) -> Result<()> {
    for engine in &engines {
        engine.finalize()?;
        assert_eq!(engine.leftovers(), Vec::<String>::new());
    }
    Ok(())
}

#[test]
fn transfer_with_keys_uses_the_device() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| -> Result<Bulk> {
        // The next exposure then has other keys than the first.
        drop(server.expose(vec![0u8; 10], BulkMode::WriteOnly)?);
        Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk())
    };
    let (server, client, peer, bulk) = export_bulk(&device, expose)?;
    let keys: RemoteKeys = vec![1; 24].into();
    let mut buffer = vec![0u8; LEN];
    assert_eq!(bulk.on(&peer).pull_into(&mut buffer)?, LEN);
    assert!(buffer.iter().all(|byte| *byte == MADE_UP));
    let part = bulk.slice(1000, 2000)?.slice(100, 50)?;
    assert_eq!(part.on(&peer).push_from(&[5u8; 60])?, 50);
    let asked =
        [(true, LEN, 0), (false, 50, 1100)].map(|(pull, len, offset)| RmaRequest { pull, len, keys: keys.clone(), offset });
    {
        let state = device.0.lock();
        assert_eq!(state.asked, asked);
        assert_eq!(state.pushed, [vec![5; 50]]);
        let access = |read, write| DeviceAccess { read, write, constant: false };
        assert_eq!(state.exposed, [access(false, true), access(true, true)]);
    }
    let logged = format!("{bulk:?} {:?}", bulk.on(&peer));
    assert!(!logged.contains("[1, 1") && !logged.contains("0101"), "{logged}");
    // The reclaimed memory is unchanged, since the device transferred nothing.
    assert!(memory.lock().take().expect("exposed").reclaim() == vec![7; LEN]);
    assert_eq!(device.0.lock().ended, 2);
    finish([client, server])
}

/// A peer that receives a forwarded bulk can use RMA with the owner.
#[test]
fn forwarded_bulk_keeps_its_keys() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadOnly)?).bulk());
    let (server, client, _, bulk) = export_bulk(&device, expose)?;
    let third = device.engine("loop://")?;
    third.define("pull", |request: &Request, bulk: Bulk| {
        let mut buffer = vec![0u8; LEN];
        bulk.origin(request.engine())
            .and_then(|remote| remote.pull_into(&mut buffer))
            .map_err(|error| error.to_string())
            .unwrap();
        buffer[LEN - 1]
    })?;
    // It must be connected to the owner.
    third.procedure::<(), Option<Bulk>>("export").on(&third.lookup(server.address())?).call(&())?;
    let pulled = client.procedure::<Bulk, u8>("pull").on(&client.lookup(third.address())?).call(&bulk)?;
    assert_eq!(pulled, MADE_UP);
    third.finalize()?;
    drop((bulk, memory));
    finish([client, server])
}

/// The owner serves transfers that the device does not.
#[test]
fn transfer_that_the_device_fails_is_served_by_the_owner() -> Result<()> {
    for behavior in [DeviceBehavior::Fails, DeviceBehavior::Refuses] {
        let device = FakeDevice::new();
        let memory = Mutex::new(None);
        let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
        let (server, client, peer, bulk) = export_bulk(&device, expose)?;
        device.0.lock().behavior = behavior;
        let mut buffer = vec![0u8; LEN];
        assert_eq!(bulk.on(&peer).pull_into(&mut buffer)?, LEN);
        assert!(buffer == vec![7; LEN]);
        assert_eq!(bulk.on(&peer).push_from(&vec![8u8; LEN])?, LEN);
        assert_eq!(device.0.lock().asked.len(), 2);
        let memory = memory.lock().take().expect("exposed");
        assert!(memory.reclaim() == vec![8; LEN]);
        match bulk.on(&peer).pull_into(&mut buffer) {
            Err(Error::Revoked { .. }) => {}
            other => panic!("{other:?}"),
        }
        // The client asks the device only if the owner's notice that the memory is revoked has not yet arrived.
        assert!((2..=3).contains(&device.0.lock().asked.len()));
        finish([client, server])?;
    }
    Ok(())
}

/// A small bulk is sent with its content instead of keys, and keys that are too long are not sent.
#[test]
fn transfer_without_keys_is_served_by_the_owner() -> Result<()> {
    for (len, keys, mode) in [(1000, 24, BulkMode::ReadOnly), (LEN, (64 << 10) + 1, BulkMode::ReadWrite)] {
        let device = FakeDevice::new();
        device.0.lock().keys = keys;
        let memory = Mutex::new((None, None));
        let expose = |server: &Engine| {
            let mut memory = memory.lock();
            Ok(match mode {
                BulkMode::ReadOnly => memory.0.insert(server.expose_read_only(vec![7u8; len])?).bulk(),
                mode => memory.1.insert(server.expose(vec![7u8; len], mode)?).bulk(),
            })
        };
        let (server, client, peer, bulk) = export_bulk(&device, expose)?;
        assert_eq!(device.0.lock().exposed.len(), 1);
        assert_eq!(device.0.lock().exposed[0].constant, mode == BulkMode::ReadOnly);
        let mut buffer = vec![0u8; len];
        assert_eq!(bulk.on(&peer).pull_into(&mut buffer)?, len);
        assert!(buffer == vec![7; len] && device.0.lock().asked.is_empty());
        drop((bulk, memory));
        finish([client, server])?;
    }
    Ok(())
}

/// Memory exposed earlier is registered with a new device when a bulk of it is sent.
#[test]
fn device_that_appears_later_is_used() -> Result<()> {
    let device = FakeDevice::absent();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
    let (server, client, peer, bulk) = export_bulk(&device, expose)?;
    let mut buffer = vec![0u8; LEN];
    bulk.on(&peer).pull_into(&mut buffer)?;
    assert!(buffer == vec![7; LEN] && device.0.lock().exposed.is_empty());
    let fetch_bulk =
        || client.procedure::<(), Option<Bulk>>("export").on(&peer).call(&()).map(|bulk| bulk.expect("it is exported"));
    // The registration fails; the call does not.
    device.set(1, true);
    fetch_bulk()?.on(&peer).pull_into(&mut buffer)?;
    assert!(buffer == vec![7; LEN] && device.0.lock().exposed.is_empty());
    // Another device appears, with which it succeeds.
    device.set(2, false);
    for _ in 0..3 {
        fetch_bulk()?.on(&peer).pull_into(&mut buffer)?;
        assert!(buffer == vec![MADE_UP; LEN]);
    }
    assert_eq!(device.0.lock().exposed.len(), 1);
    drop((bulk, memory));
    finish([client, server])
}

#[test]
fn exposing_beyond_the_limit_of_the_device_fails() -> Result<()> {
    let device = FakeDevice::new();
    device.0.lock().full = true;
    let engine = device.engine("loop://")?;
    let assert_names_the_limit = |result: Result<()>| match result {
        Err(error @ Error::Io { .. }) => assert!(error.to_string().contains("locked memory"), "{error}"),
        other => panic!("{other:?}"),
    };
    assert_names_the_limit(engine.expose(vec![7u8; LEN], BulkMode::ReadWrite).map(drop));
    assert_names_the_limit(engine.expose_read_only(vec![7u8; LEN]).map(drop));
    let mut buffer = [1u8; 10];
    assert_names_the_limit(engine.scope(|s| s.expose(&mut buffer[..], BulkMode::ReadWrite).map(drop)));
    engine.finalize()?;
    assert_eq!(engine.leftovers(), Vec::<String>::new());
    Ok(())
}

/// A transfer times out or is dropped while the device accesses its memory: the memory is fenced before the caller gets it.
#[test]
fn memory_of_a_cancelled_rma_is_fenced_before_it_returns() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
    let (server, client, peer, bulk) = export_bulk(&device, expose)?;
    device.0.lock().behavior = DeviceBehavior::Hangs;
    let counts = || {
        let state = device.0.lock();
        (state.cancelled, state.fenced)
    };
    let local = client.expose(vec![0u8; LEN], BulkMode::WriteOnly)?;
    let remote = bulk.on(&peer).timeout(Duration::from_millis(20));
    for (round, pull) in [true, false].into_iter().enumerate() {
        let moved = if pull { remote.pull_into(&local) } else { remote.push_from(&local) };
        assert!(matches!(moved, Err(Error::Timeout { .. })), "{moved:?}");
        assert_eq!(counts().0, round + 1);
        assert!(counts().1 > round);
    }
    let (cancelled, fenced) = counts();
    drop(remote.start_pull_into(local.slice(0, 10)?));
    assert_eq!(counts().0, cancelled + 1);
    assert!(counts().1 > fenced);
    // It times out before the caller polls, and is then dropped.
    let (cancelled, fenced) = counts();
    let late = remote.start_pull_into(local.slice(0, 10)?);
    let end = Instant::now() + Duration::from_secs(10);
    while !late.is_ready() {
        assert!(Instant::now() < end, "the transfer is not ready though it has timed out");
        std::thread::yield_now();
    }
    assert_eq!(counts().0, cancelled + 1);
    let between = counts().1;
    assert_eq!(between, fenced);
    drop(late);
    assert!(counts().1 > between);
    drop((bulk, memory, local));
    finish([client, server])
}

/// An engine is finalized during an RMA operation.
#[test]
fn finalize_cancels_rma_in_progress() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
    let (server, client, peer, bulk) = export_bulk(&device, expose)?;
    device.0.lock().behavior = DeviceBehavior::Hangs;
    let local = client.expose(vec![0u8; LEN], BulkMode::WriteOnly)?;
    let begun = bulk.on(&peer).start_pull_into(local.slice(0, LEN)?);
    client.finalize()?;
    let (result, _) = begun.wait();
    assert!(matches!(result, Err(Error::Finalized { .. })), "{result:?}");
    {
        let state = device.0.lock();
        assert_eq!((state.cancelled, state.fenced), (1, 1));
    }
    drop((bulk, memory, local));
    finish([client, server])
}
