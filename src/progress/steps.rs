//! Steps of the protocol: what causes them, and what they cause.
//!
//! A thread of the program makes a step by [`Core::exec`] or one of its kin; the thread that drives makes one for each event
//! that a transport reports to [`CoreSink`]. A step queues [`Outputs`], and once the protocol is unlocked they are executed:
//! bytes are sent, operations completed, handlers found.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Instant;

use slotmap::Key;

use super::workers::Job;
use super::{Core, EngineEnv, OperationOutcome, PeerChange, completion, frame_log};
use crate::deferred_log::{self, defer};
use crate::memory::Slice;
use crate::proto::{self, LinkId, Log, MayWait, Output, Proto};
use crate::transport::{Consumed, Link, LinkKey, OtherVersion, PayloadStatus, Sent, Sink, Unauthorized};
use crate::{Address, Transport};

type Queue = VecDeque<Output<EngineEnv>>;

/// The outputs of a step. Their memory is reused by the thread: see [`Outputs::keep`].
#[derive(Default)]
pub(super) struct Outputs {
    pub queue: Queue,
    /// Bytes of payloads sent so far.
    pub sent: usize,
    /// When the operations among them ended, once it is known.
    ended: Option<u64>,
}

thread_local! {
    static OUTPUTS: Cell<Option<Queue>> = const { Cell::new(None) };
    /// Several where a thread drives one engine while it drives another.
    static PENDING: RefCell<Vec<PendingOutputs>> = const { RefCell::new(Vec::new()) };
    /// The engine whose frames are corked on this thread, to go out together.
    static CORKED: Cell<Option<usize>> = const { Cell::new(None) };
    /// The task of an async handler that is polled on this thread, by the data of its waker; null for none.
    static POLLED_TASK: Cell<*const ()> = const { Cell::new(std::ptr::null()) };
}

/// Polls the task of an async handler, whose waker has this data.
pub(crate) fn poll_task<R>(task: *const (), poll: impl FnOnce() -> R) -> R {
    let outer = POLLED_TASK.replace(task);
    let polled = poll();
    POLLED_TASK.set(outer);
    polled
}

/// The largest capacity that is kept, in outputs.
const KEEP: usize = 256;
/// Bytes of payloads that a thread sends before it handles other events.
const TURN: usize = 128 << 10;

impl Outputs {
    pub(super) fn new() -> Outputs {
        Outputs { queue: OUTPUTS.try_with(Cell::take).ok().flatten().unwrap_or_default(), sent: 0, ended: None }
    }

    /// Keeps the memory of executed outputs for the next outputs of this thread, unless it is large.
    pub(super) fn keep(self) {
        if self.queue.is_empty() && self.queue.capacity() <= KEEP {
            // Fails on a thread that is ending: then the memory is freed.
            let _ = OUTPUTS.try_with(|outputs| outputs.set(Some(self.queue)));
        }
    }
}

/// The outputs of driving. Transports report events with their locks and the reactor's held, so outputs that run user code wait
/// until no lock is held. Their memory is reused by the thread, which executes steps of its own while it drives.
#[derive(Default)]
pub(super) struct PendingOutputs {
    /// Of the current step.
    pub outputs: Outputs,
    pub deferred: Queue,
}

impl PendingOutputs {
    pub(super) fn new() -> PendingOutputs {
        PENDING.try_with(|pending| pending.borrow_mut().pop()).ok().flatten().unwrap_or_default()
    }

    /// Keeps the memory for the next drive of this thread, unless it is large.
    pub(super) fn keep(self) {
        let is_empty = self.outputs.queue.is_empty() && self.deferred.is_empty();
        debug_assert!(is_empty, "all outputs are executed");
        if is_empty && self.outputs.queue.capacity() <= KEEP && self.deferred.capacity() <= KEEP {
            // Fails on a thread that is ending: then the memory is freed.
            let _ = PENDING.try_with(|pending| pending.borrow_mut().push(self));
        }
    }

    /// True when there are deferred outputs or log lines.
    pub(super) fn has_any(&self) -> bool {
        !self.deferred.is_empty() || deferred_log::any()
    }
}

/// True for outputs that run user code: wakers, hooks, drops of futures and buffers, subscribers of the log.
fn runs_user_code(output: &Output<EngineEnv>) -> bool {
    match output {
        Output::CallDone { .. }
        | Output::TransferDone { .. }
        | Output::Request(_)
        | Output::Connect { .. }
        | Output::Cancelled { .. }
        | Output::LeaseReleased(_)
        | Output::Stale { .. }
        | Output::Log(_)
        | Output::PeerConnected(_)
        | Output::PeerLost { .. }
        | Output::PeerIdle(_)
        | Output::ShutdownAsked => true,
        Output::Transmit { .. }
        | Output::CoverPayloads { .. }
        | Output::AskAcknowledged { .. }
        | Output::WakePeer { .. }
        | Output::StartRma { .. }
        | Output::CancelRma { .. }
        | Output::Close { .. }
        | Output::Withdraw { .. } => false,
    }
}

impl Core {
    /// Identifies the engine within its process.
    pub(super) fn identity(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// True in a child of the process that made the engine.
    pub(crate) fn is_forked(&self) -> bool {
        self.process.is_forked_child()
    }

    /// Reads the state of the protocol.
    pub(crate) fn with_proto<R>(&self, read: impl FnOnce(&Proto<EngineEnv>) -> R) -> R {
        read(&self.proto.lock())
    }

    /// Runs one step of the protocol, and executes its outputs.
    pub(crate) fn exec<R>(&self, step: impl FnOnce(&mut Proto<EngineEnv>) -> R) -> R {
        let mut outputs = Outputs::new();
        let (result, next) = {
            let mut proto = self.proto.lock();
            let result = step(&mut proto);
            if self.is_corked() {
                self.leave_unsent(false);
            } else {
                collect(self, &mut proto, &mut outputs);
            }
            (result, proto.next_timeout())
        };
        if outputs.queue.is_empty() {
            outputs.keep();
            self.check_alarm_at(next);
        } else {
            self.execute_outputs(outputs, None);
            self.check_alarm();
        }
        result
    }

    /// As `exec`, for a step at `now` that starts a call or a transfer. Where several are in flight, its frames may wait for more:
    /// for a moment, and only while the driver is awake.
    pub(crate) fn exec_start<R>(&self, now: Instant, step: impl FnOnce(&mut Proto<EngineEnv>) -> R) -> R {
        let ended = Some(self.pacer.note(now));
        let mut outputs = Outputs { ended, ..Outputs::new() };
        let left;
        let result = {
            let mut proto = self.proto.lock();
            // An answer may have left it.
            proto.may_send_later();
            let result = step(&mut proto);
            let corked = self.is_corked();
            let may_wait = proto.may_send_later();
            left = !corked
                && match may_wait {
                    MayWait::No => false,
                    MayWait::ForNextPoll => self.polls.leads_here() && !self.threads.is_handling(),
                    MayWait::ForMore => true,
                };
            if left || corked {
                proto.poll_unsent(&mut outputs.queue);
                self.leave_unsent(left && may_wait == MayWait::ForMore);
            } else {
                collect(self, &mut proto, &mut outputs);
            }
            result
        };
        self.execute_outputs(outputs, None);
        if left && self.driver_lock.is_parked() {
            // The driver sleeps, and has not seen the flag.
            self.exec(|_| ());
        }
        self.check_alarm();
        result
    }

    /// As `exec`, for drops: a forked child sends nothing, and takes no lock that a thread of the parent may have held.
    pub(crate) fn exec_unless_forked(&self, step: impl FnOnce(&mut Proto<EngineEnv>)) {
        if !self.is_forked() {
            self.exec(step);
        }
    }

    /// As `exec_unless_forked`, for frames that are not urgent: while the driver is awake, they wait to go out with others.
    pub(crate) fn exec_soon(&self, step: impl FnOnce(&mut Proto<EngineEnv>)) {
        if self.is_forked() {
            return;
        }
        let mut outputs = Outputs::new();
        {
            let mut proto = self.proto.lock();
            step(&mut proto);
            proto.poll_unsent(&mut outputs.queue);
            self.leave_unsent(false);
        }
        self.execute_outputs(outputs, None);
        if self.driver_lock.is_parked() {
            // The driver sleeps, and has not seen the flag.
            self.exec(|_| ());
        }
        self.check_alarm();
    }

    /// Leaves the protocol's frames for the driver to send; `may_wait`: they are of calls and transfers that may wait for more.
    /// Called under the protocol's lock.
    pub(super) fn leave_unsent(&self, may_wait: bool) {
        let more = self.unsent.load(Ordering::Relaxed);
        self.unsent_may_wait.store(may_wait && (!more || self.unsent_may_wait.load(Ordering::Relaxed)), Ordering::Relaxed);
        if !more {
            self.unsent.store(true, Ordering::SeqCst);
        }
    }

    /// Corks what this thread sends while `work` runs.
    pub(super) fn corked<R>(&self, work: impl FnOnce() -> R) -> R {
        let outer = CORKED.replace(Some(self.identity()));
        let result = work();
        CORKED.set(outer);
        result
    }

    /// Whether what this thread sends is corked.
    pub(super) fn is_corked(&self) -> bool {
        CORKED.get() == Some(self.identity())
    }

    /// Whether what this thread sends stays corked after a poll with this waker has found its operation in progress: the poll belongs to a
    /// handler's task, and returns to the batch of jobs, which sends all. One of a future for which the thread blocks has another waker.
    /// If the task does not return soon, another progress thread sends it; beside an event loop there is none.
    pub(super) fn is_corked_for(&self, waker: &Waker) -> bool {
        let task = POLLED_TASK.get();
        self.is_corked() && !task.is_null() && task == waker.data() && !self.is_external()
    }

    /// Sends what was corked or left unsent.
    pub(crate) fn uncork(&self) {
        if self.is_corked() {
            CORKED.set(None);
        }
        if self.unsent.load(Ordering::Relaxed) {
            self.exec(|_| ());
        }
    }

    /// Sends what was corked or left unsent where a transport takes it at once.
    pub(super) fn inject_unsent(&self) {
        if !self.unsent.load(Ordering::Relaxed) {
            return;
        }
        let mut outputs = Outputs::new();
        {
            let mut proto = self.proto.lock();
            if proto.inject_ready(&mut outputs.queue) {
                self.unsent.store(false, Ordering::SeqCst);
                self.answers_left.store(false, Ordering::Relaxed);
            }
        }
        self.execute_outputs(outputs, None);
    }

    pub(crate) fn uncork_unless_forked(&self) {
        if self.unsent.load(Ordering::Relaxed) {
            self.exec_unless_forked(|_| ());
        }
    }

    fn follow_up(&self, next: &mut Outputs, step: impl FnOnce(&mut Proto<EngineEnv>)) {
        let mut proto = self.proto.lock();
        step(&mut proto);
        collect(self, &mut proto, next);
    }

    /// Wakes the driver, if it sleeps.
    pub(super) fn wake(&self) {
        if self.driver_lock.is_parked() {
            self.ring();
        }
    }

    pub(super) fn ring(&self) {
        completion::ring(&self.waker);
    }

    /// Wakes a driver that would sleep past the protocol's next deadline.
    pub(super) fn check_alarm(&self) {
        if self.asleep_until.load(Ordering::SeqCst) != 0 {
            let next = self.proto.lock().next_timeout();
            self.check_alarm_at(next);
        }
    }

    fn check_alarm_at(&self, next: Option<Instant>) {
        let until = self.asleep_until.load(Ordering::SeqCst);
        if until != 0 && next.is_some_and(|next| self.micros(next) < until) {
            self.ring();
        }
    }

    pub(super) fn micros(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_micros() as u64 + 1
    }
}

/// The system's clock behind [`Instant`], in nanoseconds: an `Instant` takes four times as many instructions to be read and
/// subtracted.
pub(super) fn monotonic() -> u64 {
    // This clock is always there. The C library's function is the one that valgrind can run.
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |now| (now.tv_sec() as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec() as u64))
}

/// Takes the outputs of a step.
#[inline]
pub(super) fn collect(core: &Core, proto: &mut Proto<EngineEnv>, outputs: &mut Outputs) {
    proto.poll(&mut outputs.queue);
    if core.unsent.load(Ordering::Relaxed) {
        core.unsent.store(false, Ordering::SeqCst);
        core.answers_left.store(false, Ordering::Relaxed);
    }
}

/// What the thread that drives gives the transports: passes their events on to the protocol.
pub(super) struct CoreSink<'a> {
    pub core: &'a Core,
    pub pending: &'a mut PendingOutputs,
}

impl CoreSink<'_> {
    fn step<R>(&mut self, step: impl FnOnce(&mut Proto<EngineEnv>, Instant) -> R) -> R {
        let outputs = &mut self.pending.outputs;
        outputs.sent = 0;
        let result = {
            let mut proto = self.core.proto.lock();
            let result = step(&mut proto, self.core.pacer.now());
            collect(self.core, &mut proto, outputs);
            result
        };
        self.core.execute_immediate(self.pending);
        result
    }
}

impl Sink for CoreSink<'_> {
    fn accepted(&mut self, remote: Address) -> LinkKey {
        // The time limit of the handshake begins now: the clock may be that of a moment before the process was stopped.
        self.core.pacer.read_clock();
        key(self.step(|proto, now| proto.handle_accepted(remote, now)))
    }

    fn attach(&mut self, key: LinkKey, link: Arc<dyn Link>) {
        self.core.attach(link_id(key), link);
    }

    fn chunk(&mut self, key: LinkKey, len: usize) {
        self.step(|proto, _| proto.set_chunk(link_id(key), len));
    }

    fn connected(&mut self, key: LinkKey) {
        let link = link_id(key);
        self.core.fallback_addresses.lock().remove(link);
        let carrier = self.core.transport_link(link);
        self.step(|proto, now| {
            if let Some(carrier) = &carrier {
                let transport = carrier.scheme();
                proto.set_transport(link, transport, carrier.is_local(), transport == Transport::Tcp);
            }
            proto.handle_connected(link, now);
        });
    }

    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        let link = link_id(key);
        self.step(|proto, now| match proto.consume(link, bytes, now) {
            Ok(consumed) => {
                if frame_log::is_on() {
                    frame_log::log("received", key, bytes, consumed.used);
                }
                proto.has_link(link).then_some(consumed)
            }
            Err(failure) => {
                proto.fail_link(link, failure);
                None
            }
        })
    }

    fn payload_done(&mut self, key: LinkKey, status: PayloadStatus) {
        self.step(|proto, now| proto.handle_payload_done(link_id(key), status, now));
    }

    fn heard(&mut self, key: LinkKey) {
        self.step(|proto, now| proto.handle_heard(link_id(key), now));
    }

    fn sent(&mut self, key: LinkKey, buffer: Vec<u8>, exported: bool) {
        self.step(|proto, _| proto.handle_sent(link_id(key), buffer, exported));
    }

    fn returned(&mut self, key: LinkKey) {
        self.step(|proto, _| proto.handle_returned(link_id(key)));
    }

    fn rma_capable(&mut self, key: LinkKey) {
        self.step(|proto, _| proto.set_rma_capable(link_id(key)));
    }

    fn rma_done(&mut self, key: LinkKey, operation: u64, result: io::Result<()>) {
        let result = result.map_err(|error| error.to_string());
        self.step(|proto, _| proto.handle_rma_done(link_id(key), operation, result));
    }

    fn closed(&mut self, key: LinkKey, cause: io::Error) {
        let fallback = self.core.fallback_addresses.lock().remove(link_id(key));
        if let Some(address) = fallback {
            if self.core.with_proto(|proto| proto.has_link(link_id(key))) {
                self.core.connect_directly(link_id(key), &address, &mut self.pending.outputs);
                self.core.execute_immediate(self.pending);
            }
            return defer(move || {
                let message = "same-host address unreachable, using the transport of its own address";
                tracing::debug!(target: "calomel::progress", %address, error = %cause, "{message}");
            });
        }
        let unauthorized = cause.get_ref().and_then(|source| source.downcast_ref::<Unauthorized>());
        if let Some(Unauthorized(reason)) = unauthorized {
            let failure = proto::Failure::Unauthorized { reason: reason.clone() };
            return self.step(|proto, _| proto.close(link_id(key), failure));
        }
        let other = cause.get_ref().and_then(|source| source.downcast_ref::<OtherVersion>());
        match other {
            Some(&OtherVersion { low, high }) => {
                self.step(|proto, _| proto.close(link_id(key), proto::Failure::Version { theirs: (low, high) }));
            }
            None => self.step(|proto, _| proto.handle_closed(link_id(key), cause)),
        }
    }
}

fn key(link: LinkId) -> LinkKey {
    LinkKey(link.data().as_ffi())
}

fn link_id(key: LinkKey) -> LinkId {
    slotmap::KeyData::from_ffi(key.0).into()
}

/// The error of a dial that the engine's filter refused.
pub(crate) const REFUSED_BY_FILTER: &str = "a peer has named this address, and the dial filter of this engine refuses it";

impl Core {
    /// Executes the outputs, and the outputs of the steps that this leads to. Requests become jobs in `jobs` if the thread
    /// drives; else they go to the handler threads.
    pub(super) fn execute_outputs(&self, mut outputs: Outputs, jobs: Option<&mut Vec<Job>>) {
        self.execute_queued(&mut outputs, jobs);
        outputs.keep();
    }

    fn execute_queued(&self, outputs: &mut Outputs, mut jobs: Option<&mut Vec<Job>>) {
        while let Some(output) = outputs.queue.pop_front() {
            self.execute_output(output, jobs.as_deref_mut(), outputs);
        }
        deferred_log::flush();
    }

    /// Executes the outputs that run no user code, while transports hold locks; keeps the rest for [`Core::execute_deferred`].
    fn execute_immediate(&self, pending: &mut PendingOutputs) {
        if pending.outputs.queue.is_empty() {
            return;
        }
        // The common case: a request, or a response.
        if pending.deferred.is_empty() && pending.outputs.queue.iter().all(runs_user_code) {
            return std::mem::swap(&mut pending.deferred, &mut pending.outputs.queue);
        }
        while let Some(output) = pending.outputs.queue.pop_front() {
            if runs_user_code(&output) {
                pending.deferred.push_back(output);
            } else {
                self.execute_output(output, None, &mut pending.outputs);
            }
        }
    }

    /// Executes the outputs deferred until the transports have returned, and writes their deferred log lines.
    pub(super) fn execute_deferred(&self, pending: &mut PendingOutputs, jobs: &mut Vec<Job>) {
        // The clock is read once for all that ended in one pass.
        pending.outputs.ended = None;
        while let Some(output) = pending.deferred.pop_front() {
            pending.outputs.sent = 0;
            self.execute_output(output, Some(jobs), &mut pending.outputs);
            if !pending.outputs.queue.is_empty() {
                self.execute_queued(&mut pending.outputs, Some(jobs));
            }
        }
        deferred_log::flush();
    }

    fn execute_output(&self, output: Output<EngineEnv>, jobs: Option<&mut Vec<Job>>, next: &mut Outputs) {
        match output {
            Output::Transmit { link, carrier, bytes, payload, more } => {
                next.sent += payload.as_ref().map_or(0, |payload| payload.len);
                // It is attached before the first report of the link.
                debug_assert!(carrier.is_some(), "a link that sends has a carrier");
                let Some(carrier) = carrier else { return };
                if frame_log::is_on() {
                    frame_log::log("sent", key(link), &bytes, bytes.len());
                }
                if more {
                    carrier.more_follows();
                }
                match carrier.send(bytes, payload) {
                    Sent::All(buffer) if next.sent >= TURN => {
                        {
                            let mut proto = self.proto.lock();
                            proto.handle_sent(link, buffer, false);
                            self.leave_unsent(false);
                        }
                        self.wake();
                    }
                    // The driver looks at its transports before it sleeps, and another thread may be too late for that.
                    Sent::AtNextPoll if !self.is_driving() => self.ring(),
                    Sent::AtNextPoll => {}
                    Sent::All(buffer) => self.follow_up(next, |proto| proto.handle_sent(link, buffer, false)),
                    Sent::Lent(buffer) => self.follow_up(next, |proto| proto.handle_sent(link, buffer, true)),
                    Sent::Later => {}
                    // What the peer sent before it went must still be read: the link ends when reading ends.
                    Sent::Failed(error) => defer(move || tracing::debug!(target: "calomel::progress", %error, "a send failed")),
                }
            }
            Output::CallDone { waiter, result } => waiter.set(OperationOutcome::Answered(result, self.end_time(next))),
            Output::TransferDone { waiter, result } => waiter.set(OperationOutcome::Transferred(result, self.end_time(next))),
            Output::Request(incoming) => {
                let Some(service) = self.service.get() else { return };
                let drives = jobs.is_some();
                // A request may be refused at once, and that may make room for the next one, which has waited for it: corked, as a
                // peer could else have this thread refuse one within the other until its stack ends.
                self.corked(|| match (service.request(incoming), jobs) {
                    (Some(job), Some(jobs)) => jobs.push(job),
                    (Some(job), None) => self.dispatch(job),
                    (None, _) => {}
                });
                // The driver sends what is unsent at its next poll, with the answers to other requests.
                if !drives && self.unsent.load(Ordering::Relaxed) {
                    self.follow_up(next, |_| ());
                }
            }
            Output::WakePeer { carrier } => carrier.wake_peer(),
            Output::CoverPayloads { link } => {
                if let Some(found) = self.transport_link(link) {
                    found.cover_payloads();
                }
            }
            Output::AskAcknowledged { link } => {
                if let Some(found) = self.transport_link(link) {
                    let bytes = found.acknowledged();
                    self.follow_up(next, |proto| proto.handle_acknowledged(link, bytes, Instant::now()));
                }
            }
            Output::StartRma { link, transfer, pull, memory, keys, offset } => {
                let Some(found) = self.transport_link(link) else { return };
                if !found.begin_rma(transfer, pull, &memory, &keys, offset) {
                    let reason = "the transport can't carry out this RMA".to_owned();
                    self.follow_up(next, |proto| proto.handle_rma_done(link, transfer, Err(reason)));
                }
            }
            Output::CancelRma { link, transfer } => {
                if let Some(found) = self.transport_link(link) {
                    found.end_rma(transfer);
                }
            }
            Output::Connect { link, address, lane } => self.connect(link, &address, lane, next),
            Output::Close { link } => {
                self.fallback_addresses.lock().remove(link);
                let found = self.links.write().remove(link);
                if let Some(found) = found {
                    found.close();
                }
            }
            Output::Cancelled { request } => {
                if let Some(service) = self.service.get() {
                    service.cancelled(request);
                }
            }
            Output::LeaseReleased(lease) => drop(lease),
            Output::Stale { token } => {
                if let Some(service) = self.service.get() {
                    service.stale(token);
                }
            }
            Output::Withdraw { memory } => memory.region.withdraw(),
            Output::Log(line) => log(&line),
            Output::ShutdownAsked => {
                if let Some(service) = self.service.get() {
                    service.shutdown_asked();
                }
            }
            Output::PeerConnected(peer) => {
                if let Some(service) = self.service.get() {
                    service.peer_changed(peer, PeerChange::Connected);
                }
            }
            Output::PeerLost { peer, failure } => {
                if let Some(service) = self.service.get() {
                    service.peer_changed(peer, PeerChange::Lost(failure));
                }
            }
            Output::PeerIdle(peer) => {
                if let Some(service) = self.service.get() {
                    service.peer_changed(peer, PeerChange::Idle);
                }
            }
        }
    }

    /// When the operations of this pass ended, if the engine measures them.
    fn end_time(&self, outputs: &mut Outputs) -> Option<u64> {
        self.measures.then(|| *outputs.ended.get_or_insert_with(|| monotonic().saturating_sub(self.clock_start)))
    }

    /// The last reading of the engine's clock, in nanoseconds since the engine was made.
    #[inline]
    pub(crate) fn clock(&self) -> u64 {
        self.pacer.nanos()
    }

    /// A time on the engine's clock.
    pub(crate) fn clock_at(&self, at: Instant) -> u64 {
        self.pacer.nanos_at(at)
    }

    /// The transport's side of a link, cloned so that the table is not locked while it is used.
    pub(super) fn transport_link(&self, link: LinkId) -> Option<Arc<dyn Link>> {
        self.links.read().get(link).cloned()
    }

    /// A number that changes while peers' kernels acknowledge what was sent, as far as transports can tell.
    pub(crate) fn acknowledged(&self) -> u64 {
        let links: Vec<Arc<dyn Link>> = self.links.read().values().cloned().collect();
        links.iter().fold(0, |sum, link| sum.wrapping_add(link.acknowledged()))
    }

    /// True when an address that a peer has named may be dialled. Runs user code.
    pub(crate) fn may_dial(&self, address: &Address) -> bool {
        let Some(filter) = &self.dial_filter else { return true };
        catch_unwind(AssertUnwindSafe(|| filter(address))).unwrap_or_else(|_| {
            tracing::error!(target: "calomel::security", %address, "the dial filter panicked; the address is refused");
            false
        })
    }

    fn connect(&self, link: LinkId, address: &Address, lane: bool, next: &mut Outputs) {
        let attach = |made: Arc<dyn Link>| self.attach(link, made);
        let chosen = self.dial_filter.is_none() || self.with_proto(|proto| proto.is_chosen(link));
        let allowed = |address: &Address| chosen || self.may_dial(address);
        if !allowed(address) {
            let error = io::Error::new(io::ErrorKind::PermissionDenied, REFUSED_BY_FILTER);
            return self.follow_up(next, |proto| proto.handle_closed(link, error));
        }
        for (transport, local_address) in self.local_addresses(address, true).filter(|(_, local)| !lane && allowed(local)) {
            // Inserted before the transport can report on the link.
            self.fallback_addresses.lock().insert(link, address.clone());
            match transport.connect(key(link), &local_address, &attach) {
                Ok(()) => return,
                Err(error) => {
                    tracing::trace!(target: "calomel::progress", %address, %error, "no connection by the same-host address")
                }
            }
        }
        self.fallback_addresses.lock().remove(link);
        self.connect_directly(link, address, next);
    }

    /// Connects by the transport of the address itself.
    fn connect_directly(&self, link: LinkId, address: &Address, next: &mut Outputs) {
        let attach = |made: Arc<dyn Link>| self.attach(link, made);
        let begun = match self.transport(address.scheme()) {
            Ok(transport) => transport.connect(key(link), address, &attach),
            Err(error) => Err(io::Error::new(io::ErrorKind::Unsupported, error)),
        };
        if let Err(error) = begun {
            self.follow_up(next, |proto| proto.handle_closed(link, error));
        }
    }

    /// Stores the transport's side of a link, or closes it if the protocol has closed the link already.
    fn attach(&self, id: LinkId, link: Arc<dyn Link>) {
        let earlier = self.links.write().insert(id, link.clone());
        if let Some(earlier) = &earlier {
            earlier.close();
        }
        let (carrier, has_link) = {
            let mut proto = self.proto.lock();
            (proto.set_carrier(id, link), proto.has_link(id))
        };
        // May be the last references.
        drop((earlier, carrier));
        if !has_link {
            let late = self.links.write().remove(id);
            if let Some(late) = late {
                late.close();
            }
        }
    }
}

fn log(line: &Log) {
    match line {
        Log::Refused { peer, what, cause, count } if cause.is_ordinary() => {
            tracing::debug!(target: "calomel::security", %peer, what, reason = %cause, count, "refused");
        }
        Log::Refused { peer, what, cause, count } => {
            tracing::warn!(target: "calomel::security", %peer, what, reason = %cause, count, "refused");
        }
        Log::Limit { what, reason, count } => tracing::warn!(target: "calomel::limits", count, reason, "{what}"),
        Log::Dropped { peer, name, reason, count } => {
            let peer = peer.as_ref().map(ToString::to_string);
            tracing::warn!(target: "calomel::rpc", peer, procedure = name, %reason, count, "one-way call lost");
        }
        Log::DroppedExposure { peer, size, count } => {
            let reason = "a peer holds a bulk of it: wait for `Exposed::released`, or `reclaim` it";
            tracing::warn!(target: "calomel::bulk", %peer, size, count, "memory dropped while {reason}");
        }
        Log::LinkFailed { peer, failure, count } => {
            tracing::warn!(target: "calomel::proto", %peer, failure, count, "connection closed");
        }
        Log::OtherVersion { peer, count } => {
            tracing::warn!(target: "calomel::proto", %peer, count, "peer speaks another protocol version");
        }
        Log::Device { reason } => tracing::debug!(target: "calomel::proto", %reason, "device could not carry out a transfer"),
    }
}
