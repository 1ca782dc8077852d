//! One connection.

mod device_links;
mod ending;
mod rma;
mod rma_queue_pair;
mod rma_transfer;
mod windows;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use crate::sync::Mutex;

use super::VerbsShared;
use super::device::Device;
use super::inbox::{ReceiveOutcome, VerbsInbox};
use super::limits::{CREDITS, MESSAGE, SENDS};
use super::memory::Registered;
use super::outbox::{VerbsOutbox, VerbsSend};
use super::queue_set::QueueSet;
use super::sys::{AccessFlags, AsyncEvent, CmId, Qp, QpCapacity, WorkCompletion, status_text};
use super::wire::{self, CmHello, MessageContent};
use crate::Transport;
use crate::deferred_log::defer;
use crate::memory::{Loan, Region, Slice};
use crate::transport::{self, Link, LinkKey, RemoteKeys, Sent, Sink, closed_by_peer};
pub(super) use device_links::DeviceLinks;
use ending::RmaLoan;
pub(super) use rma_queue_pair::OperationDone;
use rma_queue_pair::RmaQueuePair;
use rma_transfer::RmaTransfer;

/// Bytes that the device copies when a message is posted, where it supports that: enough for most calls and answers.
const INLINE: u32 = 256;

pub(super) struct VerbsLink {
    pub key: LinkKey,
    me: Weak<VerbsLink>,
    shared: Arc<VerbsShared>,
    /// `None` when the link has ended.
    id: Mutex<Option<Arc<CmId>>>,
    connection: OnceLock<VerbsConnection>,
    inbox: Mutex<VerbsInbox>,
    pub dialled: bool,
    /// RMA is possible, and was reported to the sink.
    rma_ready: AtomicBool,
    rma_started: AtomicBool,
    closed: AtomicBool,
    /// When closing began.
    closing: OnceLock<Instant>,
    /// Its queue pair is broken, or the device was removed.
    failed: AtomicBool,
    cause: Mutex<Option<io::Error>>,
}

/// What a link has once its device is known.
pub(super) struct VerbsConnection {
    device: Arc<Device>,
    /// The links of the same device.
    links: Arc<DeviceLinks>,
    queue_set: Arc<QueueSet<VerbsLink>>,
    queue_pair: u32,
    out: Mutex<VerbsOutbox>,
    rma: Mutex<Option<RmaQueuePair>>,
    /// The peer's parameters.
    hello: OnceLock<CmHello>,
}

impl VerbsLink {
    pub(super) fn new(key: LinkKey, shared: &Arc<VerbsShared>, id: Arc<CmId>, dialled: bool) -> Arc<VerbsLink> {
        Arc::new_cyclic(|me| VerbsLink {
            key,
            me: me.clone(),
            shared: shared.clone(),
            id: Mutex::new(Some(id)),
            connection: OnceLock::new(),
            inbox: Mutex::default(),
            dialled,
            rma_ready: AtomicBool::new(false),
            rma_started: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            closing: OnceLock::new(),
            failed: AtomicBool::new(false),
            cause: Mutex::default(),
        })
    }

    pub(super) fn id(&self) -> Option<Arc<CmId>> {
        self.id.lock().clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Makes the queue pair, on the device that is now known.
    pub(super) fn open(self: &Arc<Self>, links: &Arc<DeviceLinks>) -> io::Result<()> {
        let id = self.id().ok_or(io::ErrorKind::NotConnected)?;
        let device = &links.device;
        let queue_set = links.admit()?;
        let made = Qp::managed(
            &id,
            &device.pd,
            &queue_set.cq,
            &queue_set.srq,
            QpCapacity { requests: SENDS as u32, max_sge: 1, inline: INLINE },
        )
        .and_then(|qp| Ok((qp.number, VerbsOutbox::new(qp, device)?)));
        let (queue_pair, outbox) = made.inspect_err(|_| links.release(&queue_set))?;
        let connection = VerbsConnection {
            device: device.clone(),
            links: links.clone(),
            queue_set,
            queue_pair,
            out: Mutex::new(outbox),
            rma: Mutex::new(None),
            hello: OnceLock::new(),
        };
        links.insert(queue_pair, self);
        let _ = self.connection.set(connection);
        Ok(())
    }

    /// This side's parameters.
    pub(super) fn hello(&self) -> Option<CmHello> {
        let connection = self.connection.get()?;
        Some(CmHello {
            versions: self.shared.versions,
            message: MESSAGE as u32,
            credits: CREDITS,
            reads: connection.device.limits.reads_answered,
            incarnation: self.shared.incarnation,
            domain: connection.device.domain,
        })
    }

    /// The peer's parameters have arrived.
    pub(super) fn set_peer(&self, hello: CmHello) {
        if let Some(connection) = self.connection.get() {
            let (device, CmHello { incarnation, reads, .. }) = (connection.device.context.name(), hello);
            defer(move || tracing::debug!(target: "calomel::verbs", device, incarnation, reads, "a connection"));
            connection.out.lock().open(hello.credits, hello.message);
            let _ = connection.hello.set(hello);
        }
    }

    /// The link has failed; the driver reports it.
    pub(super) fn fail(&self, cause: io::Error) {
        self.cause.lock().get_or_insert(cause);
        self.failed.store(true, Ordering::Release);
        self.shared.schedule(self.me.upgrade());
    }

    /// Reports the end of the link, once.
    pub(super) fn report_failure(&self, cause: io::Error, sink: &mut dyn Sink) {
        self.failed.store(true, Ordering::Release);
        if self.is_closed() {
            // It lingers no more.
            return self.shared.wake();
        }
        if cause.kind() == io::ErrorKind::InvalidData {
            let cause = cause.to_string();
            let what = "a connection is closed: its peer broke the protocol";
            defer(move || tracing::warn!(target: "calomel::verbs", cause, "{what}"));
        }
        self.close();
        sink.closed(self.key, cause);
    }

    /// A message has arrived. True when its sender gets the credit back at once: a message that waits occupies its room until
    /// then.
    pub(super) fn message(self: &Arc<Self>, message: &[u8], sink: &mut dyn Sink) -> bool {
        self.take_message(message, sink).unwrap_or_else(|error| {
            self.report_failure(error, sink);
            false
        })
    }

    fn take_message(self: &Arc<Self>, message: &[u8], sink: &mut dyn Sink) -> io::Result<bool> {
        let Some(connection) = self.connection.get() else { return Ok(false) };
        let (header, content) = wire::decode(message)?;
        connection.out.lock().take_header(header, &content)?;
        if self.is_closed() {
            return Ok(false);
        }
        let mut done = content.is_credited();
        // The peer has connected its queue pair, or it could not have sent this.
        self.start_rma()?;
        match content {
            MessageContent::Credit => {}
            MessageContent::Offer(offer) => self.peer_offered(connection, offer)?,
            MessageContent::RmaConnected(number) => {
                if self.peer_connected(connection, number)? {
                    if !self.rma_ready.swap(true, Ordering::AcqRel) {
                        sink.rma_capable(self.key);
                    }
                    self.post_pending(connection);
                }
            }
            MessageContent::StagedBytes(staged) => {
                self.fetch(connection, staged, false)?;
                done = false;
            }
            MessageContent::StagedPayload(staged) => {
                self.fetch(connection, staged, true)?;
                done = false;
            }
            content => {
                let outcome = self.inbox.lock().take(self.key, &content, sink)?;
                done &= !matches!(outcome, ReceiveOutcome::Waits);
                self.handle_outcome(outcome, sink);
            }
        }
        self.resume(sink);
        Ok(done)
    }

    fn handle_outcome(&self, outcome: ReceiveOutcome, sink: &mut dyn Sink) {
        if matches!(outcome, ReceiveOutcome::Bye) {
            self.report_failure(closed_by_peer(), sink);
        }
    }

    /// An RMA operation has ended.
    pub(super) fn operation_done(self: &Arc<Self>, done: OperationDone, sink: &mut dyn Sink) {
        let Some(connection) = self.connection.get() else { return };
        match done {
            OperationDone::Transferred { operation, result } if !self.is_closed() => sink.rma_done(self.key, operation, result),
            OperationDone::Transferred { .. } => {}
            OperationDone::Fetched { stage, .. } if self.is_closed() => connection.device.give_stage(stage),
            OperationDone::Fetched { number, stage, len } => {
                let (outcome, done) = {
                    let mut inbox = self.inbox.lock();
                    inbox.fetched(number, stage, len);
                    let waited = inbox.waiting();
                    let outcome = inbox.deliver_ready(self.key, sink, &mut |stage| {
                        connection.device.give_stage(stage);
                        connection.out.lock().count_read();
                    });
                    (outcome, waited - inbox.waiting())
                };
                let outcome = outcome.and_then(|outcome| {
                    let mut out = connection.out.lock();
                    (0..done).try_for_each(|_| out.return_credit())?;
                    out.report().map(|()| outcome)
                });
                match outcome {
                    Ok(outcome) => self.handle_outcome(outcome, sink),
                    Err(error) => self.report_failure(error, sink),
                }
            }
        }
    }

    /// There is room for one more message of the peer.
    pub(super) fn return_credit(&self) {
        let Some(connection) = self.connection.get() else { return };
        let reported = {
            let mut out = connection.out.lock();
            out.return_credit().and_then(|()| out.report())
        };
        if let Err(error) = reported {
            self.fail(error);
        }
    }

    /// A message that was sent has completed, or the queue pair is broken.
    pub(super) fn sent(&self, completion: &WorkCompletion, sink: &mut dyn Sink) {
        let Some(connection) = self.connection.get() else { return };
        if completion.status == 0 {
            let reported = {
                let mut out = connection.out.lock();
                out.ended(completion.id);
                // There may have been no room for this report.
                out.report()
            };
            if let Err(error) = reported {
                return self.report_failure(error, sink);
            }
            self.resume(sink);
        } else if !completion.is_flushed() || !self.failed.load(Ordering::Acquire) {
            self.report_failure(broken_by(completion.status), sink);
        }
    }

    /// As `sent`, when the transport ends and nothing is reported any more.
    pub(super) fn ended(&self, completion: &WorkCompletion) {
        if completion.status != 0 {
            self.failed.store(true, Ordering::Release);
        } else if let Some(connection) = self.connection.get() {
            connection.out.lock().ended(completion.id);
        }
    }

    /// An asynchronous event of the device, or of one of the link's queue pairs. A broken RMA queue pair is noticed by its
    /// completions, or by the peer's next offer. Callable from any thread.
    pub(super) fn async_event(&self, event: &AsyncEvent) {
        if event.fatal || self.connection.get().is_some_and(|connection| Some(connection.queue_pair) == event.queue_pair) {
            let cause = format!("the device ended the connection: {}", event.what);
            self.fail(io::Error::new(io::ErrorKind::ConnectionReset, cause));
        }
    }

    /// Continues with what waited for room.
    pub(super) fn resume(&self, sink: &mut dyn Sink) {
        let Some(connection) = self.connection.get() else { return };
        let resumed = connection.out.lock().resume();
        match resumed {
            Ok(None) => {}
            Ok(Some(sent)) if !self.is_closed() => sink.sent(self.key, sent.bytes, false),
            Ok(Some(_)) => {}
            Err(error) => self.report_failure(error, sink),
        }
    }

    /// Reports a failure that was noticed where it could not be reported.
    pub(super) fn report_pending_failure(&self, sink: &mut dyn Sink) {
        let cause = self.cause.lock().take();
        if let Some(cause) = cause {
            self.report_failure(cause, sink);
        }
    }
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
        let Some(connection) = self.connection.get() else { return gone() };
        let written = {
            let mut out = connection.out.lock();
            let mut sending = VerbsSend::new(bytes, payload);
            match out.write(&mut sending) {
                Ok(true) => return Sent::All(sending.bytes),
                Ok(false) => {
                    out.pending = Some(sending);
                    return Sent::Later;
                }
                Err(error) => error,
            }
        };
        let reported = io::Error::new(written.kind(), written.to_string());
        self.fail(written);
        Sent::Failed(reported)
    }

    fn scheme(&self) -> Transport {
        Transport::Verbs
    }

    /// Unknown: a device reports when a whole message has arrived, and nothing before.
    fn acknowledged(&self) -> u64 {
        0
    }

    fn begin_rma(&self, operation: u64, pull: bool, local: &Slice, keys: &RemoteKeys, offset: u64) -> bool {
        let Some(connection) = self.connection.get().filter(|_| !self.is_closed()) else { return false };
        let (Some(hello), Some(own)) = (connection.hello.get(), self.me.upgrade()) else { return false };
        let Some(remote) = wire::decode_keys(keys, hello.domain, offset, local.len as u64) else { return false };
        let access = AccessFlags { local_write: pull, ..AccessFlags::default() };
        let registered = match Registered::of(&local.region, &connection.device, access) {
            Some(Ok(registered)) => registered,
            Some(Err(error)) => {
                defer(move || tracing::debug!(target: "calomel::verbs", %error, "a transfer is not done by the device"));
                return false;
            }
            None => return false,
        };
        let number = connection.device.number();
        let loan: Arc<dyn Loan> = Arc::new(RmaLoan { link: own, number, local: local.clone() });
        match local.read_access() {
            Some(access) => access.lend(loan.clone()),
            None => return false,
        }
        // An operation that was ended meanwhile was ended without this loan.
        let done = local.is_over();
        let begun = match connection.rma.lock().as_mut() {
            Some(rma) if rma.is_connected() && !done => {
                rma.transfer(number, RmaTransfer::new(operation, pull, local, registered, remote, &loan));
                true
            }
            _ => false,
        };
        if begun {
            self.post_pending(connection);
        } else {
            local.region.unlend(&loan);
        }
        begun
    }

    fn end_rma(&self, operation: u64) {
        let Some(connection) = self.connection.get() else { return };
        if let Some(rma) = connection.rma.lock().as_mut()
            && let Some(number) = rma.number_of(operation)
        {
            rma.stop(number);
        }
        self.deliver(connection.rma.lock());
    }

    fn expose(&self, region: &Region, access: transport::DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        self.open_windows(region, access)
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(connection) = self.connection.get()
            && let Some(rma) = connection.rma.lock().as_mut()
        {
            rma.stop_transfers();
        }
        self.shared.closing(self.me.upgrade());
    }
}
