//! Executes the outputs of the protocol: sends bytes, completes operations, finds handlers.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::outputs::{Outputs, PendingOutputs, runs_user_code};
use super::workers::Job;
use super::{Core, EngineEnv, OperationOutcome, TURN, collect, key};
use crate::Address;
use crate::deferred_log::{self, defer};
use crate::proto::{LinkId, Log, Output, Proto};
use crate::transport::{Link, Sent};

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
    pub(super) fn execute_immediate(&self, pending: &mut PendingOutputs) {
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
            Output::Transmit { link, bytes, payload } => {
                next.sent += payload.as_ref().map_or(0, |payload| payload.len);
                let Some(found) = self.transport_link(link) else { return };
                match found.send(bytes, payload) {
                    Sent::All(buffer) if next.sent >= TURN => {
                        {
                            let mut proto = self.proto.lock();
                            proto.handle_sent(link, buffer, false);
                            self.leave_unsent();
                        }
                        if self.driver_lock.is_parked() {
                            self.ring();
                        }
                    }
                    Sent::All(buffer) => self.follow_up(next, |proto| proto.handle_sent(link, buffer, false)),
                    Sent::Lent(buffer) => self.follow_up(next, |proto| proto.handle_sent(link, buffer, true)),
                    Sent::Later => {}
                    // What the peer sent before it went must still be read: the link ends when reading ends.
                    Sent::Failed(error) => defer(move || tracing::debug!(target: "calomel::progress", %error, "a send failed")),
                }
            }
            Output::CallDone { waiter, result } => waiter.set(OperationOutcome::Answered(result)),
            Output::TransferDone { waiter, result } => waiter.set(OperationOutcome::Transferred(result)),
            Output::Request(incoming) => {
                let Some(service) = self.service.get() else { return };
                if let Some(job) = service.request(incoming) {
                    match jobs {
                        Some(jobs) => jobs.push(job),
                        None => self.dispatch(job),
                    }
                }
            }
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
            Output::Connect { link, address } => self.connect(link, &address, next),
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
                    service.peer_changed(peer, None);
                }
            }
            Output::PeerLost { peer, failure } => {
                if let Some(service) = self.service.get() {
                    service.peer_changed(peer, Some(failure));
                }
            }
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
            self.leave_unsent();
        }
        self.execute_outputs(outputs, None);
        if self.driver_lock.is_parked() {
            // The driver sleeps, and has not seen the flag.
            self.exec(|_| ());
        }
        self.check_alarm();
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

    fn follow_up(&self, next: &mut Outputs, step: impl FnOnce(&mut Proto<EngineEnv>)) {
        let mut proto = self.proto.lock();
        step(&mut proto);
        collect(self, &mut proto, next);
    }

    /// True when an address that a peer has named may be dialled. Runs user code.
    pub(crate) fn may_dial(&self, address: &Address) -> bool {
        let Some(filter) = &self.dial_filter else { return true };
        catch_unwind(AssertUnwindSafe(|| filter(address))).unwrap_or_else(|_| {
            tracing::error!(target: "calomel::security", %address, "the dial filter panicked; the address is refused");
            false
        })
    }

    fn connect(&self, link: LinkId, address: &Address, next: &mut Outputs) {
        let attach = |made: Arc<dyn Link>| self.attach(link, made);
        let chosen = self.dial_filter.is_none() || self.with_proto(|proto| proto.is_chosen(link));
        let allowed = |address: &Address| chosen || self.may_dial(address);
        if !allowed(address) {
            let error = io::Error::new(io::ErrorKind::PermissionDenied, REFUSED_BY_FILTER);
            return self.follow_up(next, |proto| proto.handle_closed(link, error));
        }
        for (transport, local_address) in self.local_addresses(address, true).filter(|(_, local)| allowed(local)) {
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
    pub(super) fn connect_directly(&self, link: LinkId, address: &Address, next: &mut Outputs) {
        let attach = |made: Arc<dyn Link>| self.attach(link, made);
        let begun = match self.transport(address.scheme()) {
            Ok(transport) => transport.connect(key(link), address, &attach),
            Err(error) => Err(std::io::Error::new(std::io::ErrorKind::Unsupported, error)),
        };
        if let Err(error) = begun {
            self.follow_up(next, |proto| proto.handle_closed(link, error));
        }
    }

    /// Stores the transport's side of a link, or closes it if the protocol has closed the link already.
    pub(super) fn attach(&self, id: LinkId, link: Arc<dyn Link>) {
        self.links.write().insert(id, link);
        if !self.with_proto(|proto| proto.has_link(id)) {
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
            tracing::warn!(target: "calomel::rpc", peer, name, %reason, count, "one-way call lost");
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
