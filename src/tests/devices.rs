//! Engines with a device: what it is told of memory, what it is asked to move, and what becomes of that.
//!
//! The device is a pretence around `loop://`. It moves nothing: what it "pulls" is made up, and what it "pushes" is noted,
//! so that it shows who carried a transfer out.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::memory::{DeviceRegistration, Loan, Region, Slice};
use crate::transport::{Capabilities, Consumed, DeviceAccess, Link, LinkKey, PayloadStatus, RemoteKeys, Sent, Sink, Transport};
use crate::{Address, Bulk, BulkMode, Endpoint, Engine, Error, Request, Result, Scheme};

/// What the device makes of what it is asked.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Mood {
    #[default]
    Moves,
    /// It tries in vain.
    Fails,
    /// It does not even try.
    Refuses,
    /// It never comes to an end.
    Hangs,
}

/// What the device has been asked.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RmaRequest {
    pull: bool,
    len: usize,
    keys: RemoteKeys,
    offset: u64,
}

#[derive(Default)]
struct FakeDeviceState {
    /// 0 before it comes into use.
    devices: u32,
    mood: Mood,
    /// Why it can't be told of memory.
    full: bool,
    /// How long keys are.
    keys: usize,
    exposed: Vec<DeviceAccess>,
    /// How many registrations have ended.
    ended: usize,
    asked: Vec<RmaRequest>,
    pushed: Vec<Vec<u8>>,
    /// How many moves were given up, and how often it was made to leave memory alone.
    given_up: usize,
    revoked: usize,
}

#[derive(Clone)]
struct FakeDevice(Arc<Mutex<FakeDeviceState>>);

/// What one engine is to be told of moves.
type RmaCallback = Arc<Mutex<Vec<(LinkKey, u64, io::Result<()>)>>>;

/// Every byte that the device pulls.
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
        let wrap = move |inner: Box<dyn Transport>| -> Box<dyn Transport> {
            if inner.capabilities().scheme == Scheme::Loop {
                Box::new(Near { inner, device: device.clone(), done: RmaCallback::default() })
            } else {
                inner
            }
        };
        Engine::builder().listen(address).wrap(wrap).build()
    }
}

/// What the device knows of memory.
struct RegisteredMemory(FakeDevice);

impl DeviceRegistration for RegisteredMemory {
    fn end(&self) {
        self.0.0.lock().ended += 1;
    }
}

/// Memory that a move which hangs is about to touch.
struct InUse(FakeDevice, Slice);

impl Loan for InUse {
    fn withdraw(&self) {}

    fn wait(&self, _: Instant) {
        self.0.0.lock().revoked += 1;
    }

    fn is_over(&self) -> bool {
        self.1.is_over()
    }
}

struct NearLink {
    inner: Arc<dyn Link>,
    key: LinkKey,
    device: FakeDevice,
    done: RmaCallback,
}

impl Link for NearLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        self.inner.send(bytes, payload)
    }
    fn scheme(&self) -> Scheme {
        self.inner.scheme()
    }
    fn acknowledged(&self) -> u64 {
        self.inner.acknowledged()
    }
    fn begin_rma(&self, operation: u64, pull: bool, local: &Slice, keys: &RemoteKeys, offset: u64) -> bool {
        let mood = {
            let mut state = self.device.0.lock();
            state.asked.push(RmaRequest { pull, len: local.len, keys: keys.clone(), offset });
            state.mood
        };
        let result = match mood {
            Mood::Refuses => return false,
            Mood::Hangs => {
                if let Some(access) = local.read_access() {
                    access.lend(Arc::new(InUse(self.device.clone(), local.clone())));
                }
                return true;
            }
            Mood::Fails => Err(io::Error::other("the device failed")),
            Mood::Moves => {
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
        self.device.0.lock().given_up += 1;
    }
    fn close(&self) {
        self.inner.close();
    }
}

struct Near {
    inner: Box<dyn Transport>,
    device: FakeDevice,
    done: RmaCallback,
}

impl Near {
    fn link(&self, key: LinkKey, inner: Arc<dyn Link>) -> Arc<dyn Link> {
        Arc::new(NearLink { inner, key, device: self.device.clone(), done: self.done.clone() })
    }
}

impl Transport for Near {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
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
        let made = region.register(|pieces| {
            assert_eq!(pieces.iter().map(|piece| piece.iov_len).sum::<usize>(), region.len());
            if full { Err(io::Error::other("the limit on locked memory")) } else { Ok(RegisteredMemory(self.device.clone())) }
        });
        let Some(made) = made else { return Ok(None) };
        made?;
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
        self.inner.poll(&mut NearSink { sink, near: self }) || any
    }
    fn ready(&self, token: usize, event: &mio::event::Event, sink: &mut dyn Sink) {
        self.inner.ready(token, event, &mut NearSink { sink, near: self });
    }
    fn park(&self) -> bool {
        self.done.lock().is_empty() && self.inner.park()
    }
    fn unpark(&self) {
        self.inner.unpark();
    }
}

struct NearSink<'a> {
    sink: &'a mut dyn Sink,
    near: &'a Near,
}

impl Sink for NearSink<'_> {
    fn accepted(&mut self, remote: Address) -> LinkKey {
        self.sink.accepted(remote)
    }
    fn attach(&mut self, key: LinkKey, link: Arc<dyn Link>) {
        self.sink.attach(key, self.near.link(key, link));
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
    fn payload_done(&mut self, key: LinkKey, landed: PayloadStatus) {
        self.sink.payload_done(key, landed);
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

/// A server, which lends what it is given; a client; and the bulk as the client has got it.
fn lent(device: &FakeDevice, bulk: impl FnOnce(&Engine) -> Result<Bulk>) -> Result<(Engine, Engine, Endpoint, Bulk)> {
    let server = device.engine("loop://")?;
    let lent = Mutex::new(Some(bulk(&server)?));
    server.define("lend", move |_: &Request, ()| lent.lock().clone())?;
    let client = device.engine("loop://")?;
    let peer = client.lookup(server.address())?;
    let got = client.procedure::<(), Option<Bulk>>("lend").on(&peer).call(&())?;
    Ok((server, client, peer, got.expect("the server lends")))
}

fn finish(engines: [Engine; 2]) -> Result<()> {
    for engine in &engines {
        engine.finalize()?;
        assert_eq!(engine.leftovers(), Vec::<String>::new());
    }
    Ok(())
}

#[test]
fn the_device_carries_transfers_out() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| -> Result<Bulk> {
        // So that the keys are not the first.
        drop(server.expose(vec![0u8; 10], BulkMode::WriteOnly)?);
        Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk())
    };
    let (server, client, peer, bulk) = lent(&device, expose)?;
    let keys: RemoteKeys = vec![1; 24].into();
    let mut near = vec![0u8; LEN];
    assert_eq!(bulk.on(&peer).pull_into(&mut near)?, LEN);
    assert!(near.iter().all(|byte| *byte == MADE_UP));
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
    // Taken back, the memory is as its owner left it: the device only pretends.
    assert!(memory.lock().take().expect("exposed").reclaim() == vec![7; LEN]);
    assert_eq!(device.0.lock().ended, 2);
    finish([client, server])
}

/// Whoever gets a bulk from somebody else can have its device reach the owner's.
#[test]
fn keys_are_passed_on() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadOnly)?).bulk());
    let (server, client, _, bulk) = lent(&device, expose)?;
    let third = device.engine("loop://")?;
    third.define("pull", |request: &Request, bulk: Bulk| {
        let mut near = vec![0u8; LEN];
        bulk.origin(request.engine()).and_then(|remote| remote.pull_into(&mut near)).map_err(|error| error.to_string()).unwrap();
        near[LEN - 1]
    })?;
    // The owner has to be met first.
    third.procedure::<(), Option<Bulk>>("lend").on(&third.lookup(server.address())?).call(&())?;
    let pulled = client.procedure::<Bulk, u8>("pull").on(&client.lookup(third.address())?).call(&bulk)?;
    assert_eq!(pulled, MADE_UP);
    third.finalize()?;
    drop((bulk, memory));
    finish([client, server])
}

/// The owner does what the device does not.
#[test]
fn the_owner_helps_out() -> Result<()> {
    for mood in [Mood::Fails, Mood::Refuses] {
        let device = FakeDevice::new();
        let memory = Mutex::new(None);
        let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
        let (server, client, peer, bulk) = lent(&device, expose)?;
        device.0.lock().mood = mood;
        let mut near = vec![0u8; LEN];
        assert_eq!(bulk.on(&peer).pull_into(&mut near)?, LEN);
        assert!(near == vec![7; LEN]);
        assert_eq!(bulk.on(&peer).push_from(&vec![8u8; LEN])?, LEN);
        assert_eq!(device.0.lock().asked.len(), 2);
        let memory = memory.lock().take().expect("exposed");
        assert!(memory.reclaim() == vec![8; LEN]);
        match bulk.on(&peer).pull_into(&mut near) {
            Err(Error::Revoked { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(device.0.lock().asked.len(), 3);
        finish([client, server])?;
    }
    Ok(())
}

/// The content of a small bulk goes along instead of keys, and keys that are too long do not.
#[test]
fn who_has_no_keys_asks() -> Result<()> {
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
        let (server, client, peer, bulk) = lent(&device, expose)?;
        assert_eq!(device.0.lock().exposed.len(), 1);
        assert_eq!(device.0.lock().exposed[0].constant, mode == BulkMode::ReadOnly);
        let mut near = vec![0u8; len];
        assert_eq!(bulk.on(&peer).pull_into(&mut near)?, len);
        assert!(near == vec![7; len] && device.0.lock().asked.is_empty());
        drop((bulk, memory));
        finish([client, server])?;
    }
    Ok(())
}

/// What was exposed before is made known to a device that comes, once somebody is sent a bulk of it.
#[test]
fn a_device_comes_later() -> Result<()> {
    let device = FakeDevice::absent();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
    let (server, client, peer, bulk) = lent(&device, expose)?;
    let mut near = vec![0u8; LEN];
    bulk.on(&peer).pull_into(&mut near)?;
    assert!(near == vec![7; LEN] && device.0.lock().exposed.is_empty());
    let again = || client.procedure::<(), Option<Bulk>>("lend").on(&peer).call(&()).map(|bulk| bulk.expect("it is lent"));
    // It can't take it, which is no reason for the call to fail.
    device.set(1, true);
    again()?.on(&peer).pull_into(&mut near)?;
    assert!(near == vec![7; LEN] && device.0.lock().exposed.is_empty());
    // Another one comes, which can.
    device.set(2, false);
    for _ in 0..3 {
        again()?.on(&peer).pull_into(&mut near)?;
        assert!(near == vec![MADE_UP; LEN]);
    }
    assert_eq!(device.0.lock().exposed.len(), 1);
    drop((bulk, memory));
    finish([client, server])
}

#[test]
fn a_device_that_is_full_fails_exposing() -> Result<()> {
    let device = FakeDevice::new();
    device.0.lock().full = true;
    let engine = device.engine("loop://")?;
    let says = |result: Result<()>| match result {
        Err(error @ Error::Io { .. }) => assert!(error.to_string().contains("locked memory"), "{error}"),
        other => panic!("{other:?}"),
    };
    says(engine.expose(vec![7u8; LEN], BulkMode::ReadWrite).map(drop));
    says(engine.expose_read_only(vec![7u8; LEN]).map(drop));
    let mut near = [1u8; 10];
    says(engine.scope(|s| s.expose(&mut near[..], BulkMode::ReadWrite).map(drop)));
    engine.finalize()?;
    assert_eq!(engine.leftovers(), Vec::<String>::new());
    Ok(())
}

/// The device is at it when the time is over, or the transfer is dropped: it leaves the memory alone before anybody else has it.
#[test]
fn the_memory_comes_back_after_the_device_has_left_it() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
    let (server, client, peer, bulk) = lent(&device, expose)?;
    device.0.lock().mood = Mood::Hangs;
    let seen = || {
        let state = device.0.lock();
        (state.given_up, state.revoked)
    };
    let local = client.expose(vec![0u8; LEN], BulkMode::WriteOnly)?;
    let remote = bulk.on(&peer).timeout(Duration::from_millis(20));
    for (round, pull) in [true, false].into_iter().enumerate() {
        let moved = if pull { remote.pull_into(&local) } else { remote.push_from(&local) };
        assert!(matches!(moved, Err(Error::Timeout { .. })), "{moved:?}");
        assert_eq!(seen().0, round + 1);
        assert!(seen().1 > round);
    }
    let (given_up, revoked) = seen();
    drop(remote.start_pull_into(local.slice(0, 10)?));
    assert_eq!(seen().0, given_up + 1);
    assert!(seen().1 > revoked);
    // It is over before anybody looks, and then nobody does.
    let (given_up, revoked) = seen();
    let late = remote.start_pull_into(local.slice(0, 10)?);
    let end = Instant::now() + Duration::from_secs(10);
    while !late.is_ready() {
        assert!(Instant::now() < end, "its time is over, and it is not");
        std::thread::yield_now();
    }
    assert_eq!(seen().0, given_up + 1);
    let between = seen().1;
    assert_eq!(between, revoked);
    drop(late);
    assert!(seen().1 > between);
    drop((bulk, memory, local));
    finish([client, server])
}

/// An engine ends while its device is at something.
#[test]
fn finalizing_ends_what_the_device_is_at() -> Result<()> {
    let device = FakeDevice::new();
    let memory = Mutex::new(None);
    let expose = |server: &Engine| Ok(memory.lock().insert(server.expose(vec![7u8; LEN], BulkMode::ReadWrite)?).bulk());
    let (server, client, peer, bulk) = lent(&device, expose)?;
    device.0.lock().mood = Mood::Hangs;
    let local = client.expose(vec![0u8; LEN], BulkMode::WriteOnly)?;
    let begun = bulk.on(&peer).start_pull_into(local.slice(0, LEN)?);
    client.finalize()?;
    let (result, _) = begun.wait();
    assert!(matches!(result, Err(Error::Finalized { .. })), "{result:?}");
    {
        let state = device.0.lock();
        assert_eq!((state.given_up, state.revoked), (1, 1));
    }
    drop((bulk, memory, local));
    finish([client, server])
}
