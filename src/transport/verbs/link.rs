//! One connection.

mod ending;
mod lanes;
mod windows;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::Shared;
use super::device::{CREDITS, Device, Group, MESSAGE};
use super::inbox::{Inbox, Went};
use super::lane::{Lane, Over, Transfer};
use super::memory::Registered;
use super::outbox::{Outbox, SENDS, Sending};
use super::sys::{Access, Async, Capacity, Completion, Id, Qp, status_text};
use super::wire::{self, Content, Hello};
use crate::Scheme;
use crate::memory::{Loan, Region, Slice};
use crate::transport::{self, Keys, Link, LinkKey, Sent, Sink};
use ending::MoveLoan;

/// Bytes that go along with a message, where the device can do that: most calls and answers.
const INLINE: u32 = 256;

pub(super) struct VerbsLink {
    pub key: LinkKey,
    me: Weak<VerbsLink>,
    shared: Arc<Shared>,
    /// The connection manager's; `None` when the link is over.
    id: Mutex<Option<Arc<Id>>>,
    line: OnceLock<Line>,
    inbox: Mutex<Inbox>,
    pub dialled: bool,
    /// Moves may be asked for, and its user has been told.
    moves: AtomicBool,
    begun: AtomicBool,
    closed: AtomicBool,
    /// Since when.
    closing: OnceLock<Instant>,
    /// Its devices are of no use any more.
    failed: AtomicBool,
    cause: Mutex<Option<io::Error>>,
}

/// What there is once the device is known.
pub(super) struct Line {
    pub device: Arc<Device>,
    group: Arc<Group>,
    queue_pair: u32,
    out: Mutex<Outbox>,
    lane: Mutex<Option<Lane>>,
    /// What the other side has said of itself.
    hello: OnceLock<Hello>,
}

impl VerbsLink {
    pub(super) fn new(key: LinkKey, shared: &Arc<Shared>, id: Arc<Id>, dialled: bool) -> Arc<VerbsLink> {
        Arc::new_cyclic(|me| VerbsLink {
            key,
            me: me.clone(),
            shared: shared.clone(),
            id: Mutex::new(Some(id)),
            line: OnceLock::new(),
            inbox: Mutex::default(),
            dialled,
            moves: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            closing: OnceLock::new(),
            failed: AtomicBool::new(false),
            cause: Mutex::default(),
        })
    }

    pub(super) fn id(&self) -> Option<Arc<Id>> {
        self.id.lock().clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Makes the queue pair, on the device that is known now.
    pub(super) fn open(self: &Arc<Self>, device: &Arc<Device>) -> io::Result<()> {
        let id = self.id().ok_or(io::ErrorKind::NotConnected)?;
        let group = device.admit()?;
        let made =
            Qp::managed(&id, &device.pd, &group.cq, &group.srq, Capacity { requests: SENDS as u32, pieces: 1, inline: INLINE })
                .and_then(|qp| Ok((qp.number, Outbox::new(qp, device)?)));
        let (queue_pair, outbox) = made.inspect_err(|_| device.dismiss(&group))?;
        let line = Line {
            device: device.clone(),
            group,
            queue_pair,
            out: Mutex::new(outbox),
            lane: Mutex::new(None),
            hello: OnceLock::new(),
        };
        device.enter(queue_pair, self);
        let _ = self.line.set(line);
        Ok(())
    }

    /// What this side says of itself.
    pub(super) fn hello(&self) -> Option<Hello> {
        let line = self.line.get()?;
        Some(Hello {
            versions: self.shared.versions,
            message: MESSAGE as u32,
            credits: CREDITS,
            reads: line.device.limits.reads_answered,
            incarnation: self.shared.incarnation,
            domain: line.device.domain,
        })
    }

    /// What the other side says of itself.
    pub(super) fn meet(&self, hello: Hello) {
        if let Some(line) = self.line.get() {
            tracing::debug!(
                target: "calomel::verbs",
                device = line.device.context.name(), incarnation = hello.incarnation, reads = hello.reads, "a connection"
            );
            line.out.lock().open(hello.credits, hello.message);
            let _ = line.hello.set(hello);
        }
    }

    /// The link is of no use any more; whoever drives reports it.
    pub(super) fn fail(&self, cause: io::Error) {
        self.cause.lock().get_or_insert(cause);
        self.failed.store(true, Ordering::Release);
        self.shared.nudge(self.me.upgrade());
    }

    /// Reports the end of the link, once.
    pub(super) fn lose(&self, cause: io::Error, sink: &mut dyn Sink) {
        self.failed.store(true, Ordering::Release);
        if self.is_closed() {
            // It lingers no more.
            return self.shared.wake();
        }
        if cause.kind() == io::ErrorKind::InvalidData {
            tracing::warn!(target: "calomel::verbs", %cause, "a peer is hung up on");
        }
        self.close();
        sink.closed(self.key, cause);
    }

    /// A message has come. True when its sender gets a credit for it at once: what has to wait for its turn takes room until
    /// then.
    pub(super) fn message(self: &Arc<Self>, message: &[u8], sink: &mut dyn Sink) -> bool {
        self.take_message(message, sink).unwrap_or_else(|error| {
            self.lose(error, sink);
            false
        })
    }

    fn take_message(self: &Arc<Self>, message: &[u8], sink: &mut dyn Sink) -> io::Result<bool> {
        let Some(line) = self.line.get() else { return Ok(false) };
        let (header, content) = wire::decode(message)?;
        line.out.lock().heed(header, &content)?;
        if self.is_closed() {
            return Ok(false);
        }
        let mut done = content.is_credited();
        // The other side has connected its queue pair, or it could not have sent this.
        self.begin()?;
        match content {
            Content::Credit => {}
            Content::Offer(offer) => self.offered(line, offer)?,
            Content::LaneUp(number) => {
                if self.is_up(line, number)? {
                    if !self.moves.swap(true, Ordering::AcqRel) {
                        sink.may_move(self.key);
                    }
                    self.pump(line);
                }
            }
            Content::StagedBytes(staged) => {
                self.fetch(line, staged, false)?;
                done = false;
            }
            Content::StagedPayload(staged) => {
                self.fetch(line, staged, true)?;
                done = false;
            }
            content => {
                let went = self.inbox.lock().take(self.key, &content, sink)?;
                done &= !matches!(went, Went::Waits);
                self.went(went, sink);
            }
        }
        self.resume(sink);
        Ok(done)
    }

    fn went(&self, went: Went, sink: &mut dyn Sink) {
        if matches!(went, Went::Bye) {
            self.lose(closed_by_peer(), sink);
        }
    }

    /// Something that the lane did is over.
    pub(super) fn over(self: &Arc<Self>, over: Over, sink: &mut dyn Sink) {
        let Some(line) = self.line.get() else { return };
        match over {
            Over::Transferred { operation, result } if !self.is_closed() => sink.moved(self.key, operation, result),
            Over::Transferred { .. } => {}
            Over::Fetched { stage, .. } if self.is_closed() => line.device.give_stage(stage),
            Over::Fetched { number, stage, len } => {
                let (went, done) = {
                    let mut inbox = self.inbox.lock();
                    inbox.fetched(number, stage, len);
                    let waited = inbox.waiting();
                    let went = inbox.go_on(self.key, sink, &mut |stage| {
                        line.device.give_stage(stage);
                        line.out.lock().has_read();
                    });
                    (went, waited - inbox.waiting())
                };
                let went = went.and_then(|went| {
                    let mut out = line.out.lock();
                    (0..done).try_for_each(|_| out.owe())?;
                    out.report().map(|()| went)
                });
                match went {
                    Ok(went) => self.went(went, sink),
                    Err(error) => self.lose(error, sink),
                }
            }
        }
    }

    /// There is room for one more message of the other side.
    pub(super) fn owe(&self) {
        let Some(line) = self.line.get() else { return };
        let reported = {
            let mut out = line.out.lock();
            out.owe().and_then(|()| out.report())
        };
        if let Err(error) = reported {
            self.fail(error);
        }
    }

    /// A message that was sent has ended, or the queue pair is broken.
    pub(super) fn sent(&self, completion: &Completion, sink: &mut dyn Sink) {
        let Some(line) = self.line.get() else { return };
        if completion.status == 0 {
            let reported = {
                let mut out = line.out.lock();
                out.ended(completion.id);
                // There may have been no room for that.
                out.report()
            };
            if let Err(error) = reported {
                return self.lose(error, sink);
            }
            self.resume(sink);
        } else if !completion.is_flushed() || !self.failed.load(Ordering::Acquire) {
            self.lose(broken_by(completion.status), sink);
        }
    }

    /// As `sent`, where nobody is told of anything any more.
    pub(super) fn ended(&self, completion: &Completion) {
        if completion.status != 0 {
            self.failed.store(true, Ordering::Release);
        } else if let Some(line) = self.line.get() {
            line.out.lock().ended(completion.id);
        }
    }

    /// The device has something to say of itself, or of one of the link's queue pairs. What becomes of a lane is seen in its
    /// completions, or told by the other side. Called by any thread.
    pub(super) fn told(&self, event: &Async) {
        if event.fatal || self.line.get().is_some_and(|line| Some(line.queue_pair) == event.queue_pair) {
            self.fail(io::Error::new(io::ErrorKind::ConnectionReset, format!("the device ended the connection: {}", event.what)));
        }
    }

    /// Goes on with what waited for room.
    pub(super) fn resume(&self, sink: &mut dyn Sink) {
        let Some(line) = self.line.get() else { return };
        let resumed = line.out.lock().resume();
        match resumed {
            Ok(None) => {}
            Ok(Some(sent)) if !self.is_closed() => sink.sent(self.key, sent.bytes, false),
            Ok(Some(_)) => {}
            Err(error) => self.lose(error, sink),
        }
    }

    /// Reports what has failed where nobody could report it.
    pub(super) fn settle(&self, sink: &mut dyn Sink) {
        let cause = self.cause.lock().take();
        if let Some(cause) = cause {
            self.lose(cause, sink);
        }
    }
}

pub(super) fn closed_by_peer() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "it closed the connection")
}

pub(super) fn broken_by(status: u32) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, format!("the device ended the connection: {}", status_text(status)))
}

impl Link for VerbsLink {
    fn send(&self, bytes: Vec<u8>, payload: Option<Slice>) -> Sent {
        let gone = || Sent::Failed(io::Error::new(io::ErrorKind::NotConnected, "the link is closed"));
        if self.is_closed() {
            return gone();
        }
        let Some(line) = self.line.get() else { return gone() };
        let written = {
            let mut out = line.out.lock();
            let mut sending = Sending::new(bytes, payload);
            match out.write(&mut sending) {
                Ok(true) => return Sent::All(sending.bytes),
                Ok(false) => {
                    out.pending = Some(sending);
                    return Sent::Later;
                }
                Err(error) => error,
            }
        };
        let told = io::Error::new(written.kind(), written.to_string());
        self.fail(written);
        Sent::Failed(told)
    }

    fn scheme(&self) -> Scheme {
        Scheme::Verbs
    }

    /// Can't be known: a device says when all of a message is there, and not before.
    fn acknowledged(&self) -> u64 {
        0
    }

    fn begin_move(&self, operation: u64, pull: bool, local: &Slice, keys: &Keys, offset: u64) -> bool {
        let Some(line) = self.line.get().filter(|_| !self.is_closed()) else { return false };
        let (Some(hello), Some(own)) = (line.hello.get(), self.me.upgrade()) else { return false };
        let Some(remote) = wire::decode_keys(keys, hello.domain, offset, local.len as u64) else { return false };
        let access = Access { local_write: pull, ..Access::default() };
        let registered = match Registered::of(&local.region, &line.device, access) {
            Some(Ok(registered)) => registered,
            Some(Err(error)) => {
                tracing::debug!(target: "calomel::verbs", %error, "a transfer takes the long way");
                return false;
            }
            None => return false,
        };
        let number = line.device.number();
        let loan: Arc<dyn Loan> = Arc::new(MoveLoan { link: own, number, local: local.clone() });
        match local.read_access() {
            Some(access) => access.lend(loan.clone()),
            None => return false,
        }
        // Whoever has ended the operation meanwhile did not find the loan.
        let over = local.is_over();
        let begun = match line.lane.lock().as_mut() {
            Some(lane) if lane.is_up() && !over => {
                lane.transfer(number, Transfer::new(operation, pull, local, registered, remote, &loan));
                true
            }
            _ => false,
        };
        if begun {
            self.pump(line);
        } else {
            local.region.unlend(&loan);
        }
        begun
    }

    fn end_move(&self, operation: u64) {
        let Some(line) = self.line.get() else { return };
        if let Some(lane) = line.lane.lock().as_mut()
            && let Some(number) = lane.number_of(operation)
        {
            lane.stop(number);
        }
        self.deliver(line.lane.lock());
    }

    fn expose(&self, region: &Region, access: transport::Access) -> io::Result<Option<Keys>> {
        self.open_windows(region, access)
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(line) = self.line.get()
            && let Some(lane) = line.lane.lock().as_mut()
        {
            lane.stop_transfers();
        }
        self.shared.closing(self.me.upgrade());
    }
}
