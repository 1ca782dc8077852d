//! Bulk transfers, from both ends.
//!
//! The initiator names a range of the owner's memory. For a pull the owner streams it; for a push the initiator streams at
//! once, and the owner discards what it refuses. Either way the owner decides.
//!
//! If a device can access the memory, it executes the transfer (RMA). The owner takes part only if the device fails: then it
//! gives the reason, or serves the transfer after all.

use std::time::Instant;

use slotmap::{KeyData, SlotMap};

use super::exposures::{IncomingPush, PeerAccess, PeerAccesses};
use super::link::{MayWait, PeerLink};
use super::streams::OutStream;
use super::tables::{self, Chained, Neighbours};
use super::timers::TimerKind;
use super::wire::{Message, Range, Status, Stream};
use super::{Env, Failure, LinkId, Log, Memory, Output, PayloadStatus, PeerId, Proto, RemoteKeys, TransferId, broken, wire_id};

/// ```text
///   rma, by a device ─────────────────────────────────────▶ done
///     │ the device fails
///     ▼
///   pull:  requested ──▶ chunks arrive in order ──▶ done    push:  streaming ──▶ the owner's `Done`
///              └── refused / timed out / cancelled / link lost / memory revoked ──┘
/// ```
pub(super) struct OutgoingTransfer<E: Env> {
    pub waiter: E::Waiter,
    pub link: LinkId,
    pub pull: bool,
    pub memory: E::Memory,
    /// How much of a pull has arrived.
    pub arrived: usize,
    /// While a device executes it: what the owner is asked for if the device fails.
    pub rma: Option<Range>,
    pub began: Instant,
    timer: Option<Instant>,
    neighbours: Neighbours<TransferId>,
}

impl<E: Env> Chained<TransferId> for OutgoingTransfer<E> {
    fn neighbours(&mut self) -> &mut Neighbours<TransferId> {
        &mut self.neighbours
    }
}

/// The far end of a transfer.
#[derive(Clone)]
pub(crate) struct Remote {
    pub peer: PeerId,
    pub owner: u64,
    pub token: u128,
    pub offset: u64,
    /// What a device accesses the exposed memory with, from its beginning.
    pub keys: Option<RemoteKeys>,
}

impl<E: Env> Proto<E> {
    /// Starts a transfer of `memory.len()` bytes. With a deadline the protocol watches it; else the waiter does.
    pub(crate) fn transfer(
        &mut self,
        pull: bool,
        remote: Remote,
        memory: E::Memory,
        deadline: Option<Instant>,
        waiter: E::Waiter,
        now: Instant,
    ) -> Result<TransferId, Failure> {
        let Remote { peer, owner, token, offset, keys } = remote;
        let link = self.link_to(peer, now)?;
        let len = memory.len() as u64;
        let link = self.lane_for(link, len, now);
        let entry = &mut self.links[link];
        entry.pending += 1;
        // The keys belong to one engine. Only the hello tells which engine the peer is.
        let reachable = entry.rma_capable && entry.is_open() && entry.incarnation == owner && len > 0;
        let keys = keys.filter(|_| reachable);
        let memory = if pull || keys.is_some() { memory.for_one_operation() } else { memory };
        let make = |neighbours| OutgoingTransfer {
            waiter,
            link,
            pull,
            memory: memory.clone(),
            arrived: 0,
            rma: None,
            began: now,
            timer: deadline,
            neighbours,
        };
        let id = tables::chain(&mut self.transfers, &mut self.links[link].last_transfer, make);
        if let Some(at) = deadline {
            self.timers.insert((at, TimerKind::Transfer(id)));
        }
        let range = Range { transfer: wire_id(id), owner, token: token.to_le_bytes(), offset, len };
        match keys {
            Some(keys) => {
                self.transfers[id].rma = Some(range);
                self.outputs.push_back(Output::StartRma { link, transfer: wire_id(id), pull, memory, keys, offset });
            }
            None => {
                self.ask_owner(link, range, pull, memory);
                // One that blocks its thread has nothing more to ask for.
                let streamed = if pull { 0 } else { len as usize };
                let may_wait = self.links[link].may_wait(streamed);
                self.may_send_later = if deadline.is_some() { may_wait } else { MayWait::No };
            }
        }
        self.watch(link, now);
        Ok(id)
    }

    /// Asks the owner to take part in a transfer.
    fn ask_owner(&mut self, link: LinkId, range: Range, pull: bool, memory: E::Memory) {
        let entry = &mut self.links[link];
        if pull {
            entry.queue_frame(&Message::Pull(range), &[]);
        } else {
            entry.queue_frame(&Message::Push(range), &[]);
            if range.len > 0 {
                entry.streams.add(OutStream { kind: Stream::Push, id: range.transfer, memory, sent: 0, token: None });
            }
        }
        self.mark_ready(link);
    }

    /// A device has executed a transfer, or failed: then the owner is asked, from the beginning.
    pub(crate) fn handle_rma_done(&mut self, link: LinkId, number: u64, result: Result<(), String>) {
        let id = TransferId::from(KeyData::from_ffi(number));
        let Some(transfer) = self.transfers.get_mut(id).filter(|transfer| transfer.link == link) else { return };
        let Some(range) = transfer.rma.take() else { return };
        let (pull, memory) = (transfer.pull, transfer.memory.clone());
        match result {
            Ok(()) => self.end_transfer(id, Ok(memory.len())),
            Err(reason) => {
                self.outputs.push_back(Output::Log(Log::Device { reason }));
                self.ask_owner(link, range, pull, memory);
            }
        }
    }

    /// Gives a transfer up, and stops the peer or the device.
    pub(crate) fn abandon_transfer(&mut self, id: TransferId, failure: Failure) {
        let Some(transfer) = self.transfers.get(id) else { return };
        let (link, push) = (transfer.link, !transfer.pull);
        if transfer.rma.is_none() {
            self.links[link].queue_frame(&Message::Abort { transfer: wire_id(id), push }, &[]);
        }
        self.end_transfer(id, Err(failure));
        self.mark_ready(link);
    }

    /// The one place where a transfer ends.
    pub(super) fn end_transfer(&mut self, id: TransferId, result: Result<usize, Failure>) {
        let Some(mut transfer) = self.transfers.remove(id) else { return };
        // Half a chunk may have arrived; the rest must not be written.
        transfer.memory.end();
        if let Some(at) = transfer.timer {
            self.timers.remove(&(at, TimerKind::Transfer(id)));
        }
        if let Some(link) = self.links.get_mut(transfer.link) {
            link.pending -= 1;
            if let Ok(bytes) = &result {
                link.traffic.transfers += 1;
                link.traffic.transferred_bytes += *bytes as u64;
            }
            tables::unchain(&mut self.transfers, &mut link.last_transfer, transfer.neighbours());
            if !transfer.pull {
                link.streams.end(Stream::Push, wire_id(id));
            }
            // A closed link has ended its device transfers by itself.
            if transfer.rma.is_some() {
                self.outputs.push_back(Output::CancelRma { link: transfer.link, transfer: wire_id(id) });
            }
        }
        let result = result.map_err(Box::new);
        self.outputs.push_back(Output::TransferDone { waiter: transfer.waiter, result });
    }

    pub(super) fn pull_arrived(&mut self, link: LinkId, number: u64, len: usize, status: PayloadStatus) {
        let id = TransferId::from(KeyData::from_ffi(number));
        let Some(transfer) = self.transfers.get_mut(id).filter(|transfer| transfer.link == link) else { return };
        match status {
            PayloadStatus::Whole => {
                transfer.arrived += len;
                if transfer.arrived == transfer.memory.len() {
                    let arrived = transfer.arrived;
                    self.end_transfer(id, Ok(arrived));
                }
            }
            // The owner's `Done` follows, but brings nothing new.
            PayloadStatus::SourceGone => self.end_transfer(id, Err(Failure::Refused(Status::Revoked))),
            PayloadStatus::TargetGone => self.abandon_transfer(id, Failure::Revoked),
            PayloadStatus::Damaged => self.abandon_transfer(id, Failure::Checksum),
        }
    }

    /// The owner has completed or refused a transfer of this side.
    pub(super) fn handle_done(&mut self, link: LinkId, number: u64, status: Status) {
        let id = TransferId::from(KeyData::from_ffi(number));
        // The owner does not know of a transfer that a device executes.
        let asked = |t: &&OutgoingTransfer<E>| t.link == link && t.rma.is_none();
        let Some(transfer) = self.transfers.get(id).filter(asked) else { return };
        let result = match status {
            // A pull is done when its bytes are here, whatever the peer reports; only an empty one has no bytes.
            Status::Ok if !transfer.pull || transfer.memory.len() == 0 => Ok(transfer.memory.len()),
            Status::Ok => return,
            Status::Restarted => Err(Failure::PeerRestarted),
            status => Err(Failure::Refused(status)),
        };
        self.end_transfer(id, result);
    }

    fn done(&mut self, link: LinkId, transfer: u64, status: Status) {
        if let Some(entry) = self.links.get_mut(link) {
            entry.queue_control(&Message::Done { transfer, status });
            self.mark_ready(link);
        }
    }

    pub(super) fn handle_pull(&mut self, link: LinkId, range: Range, now: Instant) -> Result<(), Failure> {
        self.want_lane(link, range.len, now);
        let token = u128::from_le_bytes(range.token);
        if self.links[link].streams.pulled(range.transfer).is_some() {
            return Err(broken(format!("pull {} was begun twice", range.transfer)));
        }
        // Admission comes first: a transfer that is refused there uses up nothing of a grant.
        match self.admit_transfer(link).and_then(|()| self.check(link, range, false, now)) {
            Ok(memory) if memory.len() > 0 => {
                let stream = OutStream { kind: Stream::Pull, id: range.transfer, memory, sent: 0, token: Some(token) };
                self.note_access(token, PeerAccess { link, number: range.transfer, push: false });
                self.links[link].streams.add(stream);
                self.links[link].traffic.served_transfers += 1;
                self.watch(link, now);
                self.mark_ready(link);
            }
            Ok(_) => self.done(link, range.transfer, Status::Ok),
            Err(status) => self.done(link, range.transfer, status),
        }
        Ok(())
    }

    pub(super) fn handle_push(&mut self, link: LinkId, range: Range, now: Instant) -> Result<(), Failure> {
        self.want_lane(link, range.len, now);
        let token = u128::from_le_bytes(range.token);
        if self.links[link].pushes.contains_key(&range.transfer) {
            return Err(broken(format!("push {} was begun twice", range.transfer)));
        }
        match self.admit_transfer(link).and_then(|()| self.check(link, range, true, now)) {
            Ok(memory) if memory.len() > 0 => {
                let push = IncomingPush { memory, arrived: 0, token };
                self.note_access(token, PeerAccess { link, number: range.transfer, push: true });
                self.links[link].pushes.insert(range.transfer, push);
                self.links[link].traffic.served_transfers += 1;
                self.watch(link, now);
            }
            Ok(_) => self.done(link, range.transfer, Status::Ok),
            Err(status) => self.done(link, range.transfer, status),
        }
        Ok(())
    }

    pub(super) fn push_arrived(&mut self, link: LinkId, number: u64, len: usize, status: PayloadStatus) {
        let pushes = &mut self.links[link].pushes;
        let Some(push) = pushes.get_mut(&number) else { return };
        let status = match status {
            PayloadStatus::Whole => {
                push.arrived += len;
                if push.arrived < push.memory.len() {
                    return;
                }
                Status::Ok
            }
            // The memory of the initiator was revoked. It knows, but needs a `Done` to end the transfer.
            PayloadStatus::SourceGone | PayloadStatus::TargetGone => Status::Revoked,
            PayloadStatus::Damaged => Status::Checksum,
        };
        pushes.remove(&number);
        self.links[link].discard_inbound(Stream::Push, number);
        self.done(link, number, status);
    }

    pub(super) fn handle_abort(&mut self, link: LinkId, number: u64, push: bool) {
        let entry = &mut self.links[link];
        if push {
            entry.pushes.remove(&number);
            entry.discard_inbound(Stream::Push, number);
        } else {
            entry.streams.end(Stream::Pull, number);
        }
    }

    /// Ends the accesses of peers to memory that is being revoked, or that they may not use any more; they get the reason.
    pub(super) fn stop_access(&mut self, token: u128, accesses: PeerAccesses, why: &Status) {
        for access in accesses.into_all() {
            if !is_in_progress(&self.links, token, access) {
                continue;
            }
            let PeerAccess { link, number, push } = access;
            let entry = &mut self.links[link];
            if push {
                entry.pushes.remove(&number);
                entry.discard_inbound(Stream::Push, number);
            } else {
                entry.streams.end(Stream::Pull, number);
            }
            self.done(link, number, why.clone());
        }
    }

    /// Notes an access, before the link has it: so a sweep removes earlier accesses with the same number, which are over.
    fn note_access(&mut self, token: u128, access: PeerAccess) {
        let Proto { exposures, links, .. } = self;
        let Some(accesses) = exposures.accesses_mut(token) else { return };
        accesses.add(access, |access| is_in_progress(links, token, access));
    }
}

/// Whether an access that was noted has not ended.
fn is_in_progress<E: Env>(
    links: &SlotMap<LinkId, PeerLink<E>>,
    token: u128,
    PeerAccess { link, number, push }: PeerAccess,
) -> bool {
    let Some(link) = links.get(link) else { return false };
    let used = if push { link.pushes.get(&number).map(|push| push.token) } else { link.streams.pulled(number) };
    used == Some(token)
}
