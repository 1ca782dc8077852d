//! Bulk transfers, from both ends.
//!
//! The initiator names a range of the owner's memory. For a pull the owner streams it; for a push the initiator streams at
//! once, and what the owner refuses is thrown away where it arrives. Either way the owner has the last word.
//!
//! Where a device can reach the memory, it carries the transfer out, and the owner is asked only if the device fails: it
//! says what is wrong, or serves the transfer after all.

use std::time::Instant;

use slotmap::{KeyData, SlotMap};

use super::chain::{self, Chained, Neighbours};
use super::link::{OutStream, PeerLink, broken};
use super::timers::TimerKind;
use super::wire::{Message, Range, Status, Stream};
use super::{Env, Failure, LinkId, Log, Memory, Output, PayloadStatus, PeerId, Proto, RemoteKeys, TransferId, wire_id};

/// ```text
///   moving, by a device ──────────────────────────────────▶ done
///     │ the device can't
///     ▼
///   pull:  asked ──▶ chunks land in order ──▶ done          push:  streaming ──▶ the owner's `Done`
///              └── refused / timed out / cancelled / link lost / memory taken back ──┘
/// ```
pub(super) struct OutgoingTransfer<E: Env> {
    pub waiter: E::Waiter,
    pub link: LinkId,
    pub pull: bool,
    pub memory: E::Memory,
    /// How much of a pull has landed.
    pub moved: usize,
    /// While a device carries it out: what the owner is asked for if the device can't.
    pub moving: Option<Range>,
    timer: Option<Instant>,
    neighbours: Neighbours<TransferId>,
}

impl<E: Env> Chained<TransferId> for OutgoingTransfer<E> {
    fn neighbours(&mut self) -> &mut Neighbours<TransferId> {
        &mut self.neighbours
    }
}

/// A push of a peer into memory exposed here.
pub(super) struct IncomingPush<E: Env> {
    pub memory: E::Memory,
    pub landed: usize,
    pub token: u128,
}

/// What a peer does with exposed memory.
#[derive(Clone, Copy)]
pub(super) struct PeerAccess {
    link: LinkId,
    /// The peer's number of the transfer.
    number: u64,
    push: bool,
}

/// What peers do with one exposure. Accesses that have ended are among them until there are too many of that sort: so one that
/// ends costs nothing here, and what is revoked is found without a search through everything that peers are doing.
#[derive(Default)]
pub(super) struct PeerAccesses {
    all: Vec<PeerAccess>,
    /// How many there may be before they are sorted out.
    sort_out_at: usize,
}

/// So many accesses are kept, whether they have ended or not.
const FEW_ACCESSES: usize = 4;

/// The far end of a transfer.
#[derive(Clone)]
pub(crate) struct Remote {
    pub peer: PeerId,
    pub owner: u64,
    pub token: u128,
    pub offset: u64,
    /// What a device reaches the exposed memory by, from its beginning.
    pub keys: Option<RemoteKeys>,
}

impl<E: Env> Proto<E> {
    /// Begins to move `memory.len()` bytes. With a deadline the protocol watches it; else the waiter does.
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
        let entry = &mut self.links[link];
        entry.pending += 1;
        // The keys are those of one engine. Who is at the other end, its greeting tells.
        let reachable = entry.rma_capable && entry.is_open() && entry.incarnation == owner && len > 0;
        let keys = keys.filter(|_| reachable);
        let memory = if pull || keys.is_some() { memory.for_one_operation() } else { memory };
        let transfer = OutgoingTransfer {
            waiter,
            link,
            pull,
            memory: memory.clone(),
            moved: 0,
            moving: None,
            timer: deadline,
            neighbours: Neighbours::default(),
        };
        let id = chain::add(&mut self.transfers, &mut self.links[link].last_transfer, transfer);
        if let Some(at) = deadline {
            self.timers.insert((at, TimerKind::Transfer(id)));
        }
        let range = Range { transfer: wire_id(id), owner, token: token.to_le_bytes(), offset, len };
        match keys {
            Some(keys) => {
                self.transfers[id].moving = Some(range);
                self.outputs.push_back(Output::Move { link, transfer: wire_id(id), pull, memory, keys, offset });
            }
            None => self.ask(link, range, pull, memory),
        }
        self.watch(link, now);
        Ok(id)
    }

    /// Has the owner take part in a transfer.
    fn ask(&mut self, link: LinkId, range: Range, pull: bool, memory: E::Memory) {
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

    /// A device has carried out a move, or could not: then the owner is asked, from the beginning.
    pub(crate) fn handle_moved(&mut self, link: LinkId, number: u64, result: Result<(), String>) {
        let id = TransferId::from(KeyData::from_ffi(number));
        let Some(transfer) = self.transfers.get_mut(id).filter(|transfer| transfer.link == link) else { return };
        let Some(range) = transfer.moving.take() else { return };
        let (pull, memory) = (transfer.pull, transfer.memory.clone());
        match result {
            Ok(()) => self.end_transfer(id, Ok(memory.len())),
            Err(reason) => {
                self.outputs.push_back(Output::Log(Log::Device { reason }));
                self.ask(link, range, pull, memory);
            }
        }
    }

    /// Gives a transfer up. The peer is told, and stops; or the device is.
    pub(crate) fn abandon_transfer(&mut self, id: TransferId, failure: Failure) {
        let Some(transfer) = self.transfers.get(id) else { return };
        let (link, push) = (transfer.link, !transfer.pull);
        if transfer.moving.is_none() {
            self.links[link].queue_frame(&Message::Abort { transfer: wire_id(id), push }, &[]);
        }
        self.end_transfer(id, Err(failure));
        self.mark_ready(link);
    }

    /// The one place where a transfer ends.
    pub(super) fn end_transfer(&mut self, id: TransferId, result: Result<usize, Failure>) {
        let Some(mut transfer) = self.transfers.remove(id) else { return };
        // Half a chunk may have landed; the rest must not.
        transfer.memory.end();
        if let Some(at) = transfer.timer {
            self.timers.remove(&(at, TimerKind::Transfer(id)));
        }
        if let Some(link) = self.links.get_mut(transfer.link) {
            link.pending -= 1;
            chain::unlink(&mut self.transfers, &mut link.last_transfer, transfer.neighbours());
            if !transfer.pull {
                link.streams.end(Stream::Push, wire_id(id));
            }
            // A link that is gone has ended its moves by itself.
            if transfer.moving.is_some() {
                self.outputs.push_back(Output::EndMove { link: transfer.link, transfer: wire_id(id) });
            }
        }
        self.outputs.push_back(Output::TransferDone { waiter: transfer.waiter, result });
    }

    pub(super) fn pull_landed(&mut self, link: LinkId, number: u64, len: usize, landed: PayloadStatus) {
        let id = TransferId::from(KeyData::from_ffi(number));
        let Some(transfer) = self.transfers.get_mut(id).filter(|transfer| transfer.link == link) else { return };
        match landed {
            PayloadStatus::Whole => {
                transfer.moved += len;
                if transfer.moved == transfer.memory.len() {
                    let moved = transfer.moved;
                    self.end_transfer(id, Ok(moved));
                }
            }
            // The owner's `Done` follows, but this says it already.
            PayloadStatus::SourceGone => self.end_transfer(id, Err(Failure::Refused(Status::Revoked))),
            PayloadStatus::TargetGone => self.abandon_transfer(id, Failure::Revoked),
            PayloadStatus::Damaged => self.abandon_transfer(id, Failure::Checksum),
        }
    }

    /// The owner's last word on a transfer of ours.
    pub(super) fn handle_done(&mut self, link: LinkId, number: u64, status: Status) {
        let id = TransferId::from(KeyData::from_ffi(number));
        // Of what a device carries out, its owner knows nothing.
        let asked = |t: &&OutgoingTransfer<E>| t.link == link && t.moving.is_none();
        let Some(transfer) = self.transfers.get(id).filter(asked) else { return };
        let result = match status {
            // A pull is done when its bytes are here, not when somebody says so; only an empty one has no bytes.
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
        let token = u128::from_le_bytes(range.token);
        if self.links[link].streams.pulled(range.transfer).is_some() {
            return Err(broken(format!("pull {} was begun twice", range.transfer)));
        }
        // What is refused for there being too many uses nothing of what the memory's terms allow.
        match self.admit_transfer(link).and_then(|()| self.check(link, range, false, now)) {
            Ok(memory) if memory.len() > 0 => {
                let stream = OutStream { kind: Stream::Pull, id: range.transfer, memory, sent: 0, token: Some(token) };
                self.note_access(token, PeerAccess { link, number: range.transfer, push: false });
                self.links[link].streams.add(stream);
                self.watch(link, now);
                self.mark_ready(link);
            }
            Ok(_) => self.done(link, range.transfer, Status::Ok),
            Err(status) => self.done(link, range.transfer, status),
        }
        Ok(())
    }

    pub(super) fn handle_push(&mut self, link: LinkId, range: Range, now: Instant) -> Result<(), Failure> {
        let token = u128::from_le_bytes(range.token);
        if self.links[link].pushes.contains_key(&range.transfer) {
            return Err(broken(format!("push {} was begun twice", range.transfer)));
        }
        match self.admit_transfer(link).and_then(|()| self.check(link, range, true, now)) {
            Ok(memory) if memory.len() > 0 => {
                let push = IncomingPush { memory, landed: 0, token };
                self.note_access(token, PeerAccess { link, number: range.transfer, push: true });
                self.links[link].pushes.insert(range.transfer, push);
                self.watch(link, now);
            }
            Ok(_) => self.done(link, range.transfer, Status::Ok),
            Err(status) => self.done(link, range.transfer, status),
        }
        Ok(())
    }

    pub(super) fn push_landed(&mut self, link: LinkId, number: u64, len: usize, landed: PayloadStatus) {
        let pushes = &mut self.links[link].pushes;
        let Some(push) = pushes.get_mut(&number) else { return };
        let status = match landed {
            PayloadStatus::Whole => {
                push.landed += len;
                if push.landed < push.memory.len() {
                    return;
                }
                Status::Ok
            }
            // The initiator took its own memory away; it knows, and this is for its table of transfers.
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

    /// Ends whatever peers are doing with memory that is being taken back, or that they may not use any more; they are told
    /// why.
    pub(super) fn stop_access(&mut self, token: u128, accesses: PeerAccesses, why: &Status) {
        for access in accesses.all {
            if !is_under_way(&self.links, token, access) {
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

    /// A peer is going to use exposed memory. (One that does so again and again under one number is not noted twice: what it has
    /// done before is over.)
    fn note_access(&mut self, token: u128, access: PeerAccess) {
        let Proto { exposures, links, .. } = self;
        let Some(accesses) = exposures.accesses_mut(token) else { return };
        if accesses.all.len() >= accesses.sort_out_at {
            accesses.all.retain(|access| is_under_way(links, token, *access));
            accesses.sort_out_at = FEW_ACCESSES.max(2 * accesses.all.len());
        }
        accesses.all.push(access);
    }
}

/// Whether an access that was noted has not ended yet.
fn is_under_way<E: Env>(
    links: &SlotMap<LinkId, PeerLink<E>>,
    token: u128,
    PeerAccess { link, number, push }: PeerAccess,
) -> bool {
    let Some(link) = links.get(link) else { return false };
    let used = if push { link.pushes.get(&number).map(|push| push.token) } else { link.streams.pulled(number) };
    used == Some(token)
}
