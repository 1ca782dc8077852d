//! Bulk transfers, from both ends.
//!
//! The initiator names a range of the owner's memory. For a pull the owner streams it; for a push the initiator streams at
//! once, and what the owner refuses is thrown away where it arrives. Either way the owner has the last word.
//!
//! Where a device can reach the memory, it carries the transfer out, and the owner is asked only if the device fails: it
//! says what is wrong, or serves the transfer after all.

use std::time::Instant;

use slotmap::KeyData;

use super::landing::Landed;
use super::link::{OutStream, broken};
use super::timers::Timer;
use super::wire::{Message, Range, Status, Stream};
use super::{Env, Failure, Keys, LinkId, Log, Memory, Output, PeerId, Proto, TransferId, wire_id};

/// ```text
///   moving, by a device ──────────────────────────────────▶ done
///     │ the device can't
///     ▼
///   pull:  asked ──▶ chunks land in order ──▶ done          push:  streaming ──▶ the owner's `Done`
///              └── refused / timed out / cancelled / link lost / memory taken back ──┘
/// ```
pub(super) struct Transfer<E: Env> {
    pub waiter: E::Waiter,
    pub link: LinkId,
    pub pull: bool,
    pub memory: E::Memory,
    /// How much of a pull has landed.
    pub moved: usize,
    /// While a device carries it out: what the owner is asked for if the device can't.
    pub moving: Option<Range>,
    timer: Option<Instant>,
}

/// A push of a peer into memory exposed here.
pub(super) struct IncomingPush<E: Env> {
    pub memory: E::Memory,
    pub landed: usize,
    pub token: u128,
}

/// The far end of a transfer.
#[derive(Clone)]
pub(crate) struct Remote {
    pub peer: PeerId,
    pub owner: u64,
    pub token: u128,
    pub offset: u64,
    /// What a device reaches the exposed memory by, from its beginning.
    pub keys: Option<Keys>,
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
        let reachable = entry.moves && entry.is_open() && entry.incarnation == owner && len > 0;
        let keys = keys.filter(|_| reachable);
        let memory = if pull || keys.is_some() { memory.for_one_operation() } else { memory };
        let transfer = Transfer { waiter, link, pull, memory: memory.clone(), moved: 0, moving: None, timer: deadline };
        let id = self.transfers.insert(transfer);
        if let Some(at) = deadline {
            self.timers.insert((at, Timer::Transfer(id)));
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
            entry.say(&Message::Pull(range), &[]);
        } else {
            entry.say(&Message::Push(range), &[]);
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
            self.links[link].say(&Message::Abort { transfer: wire_id(id), push }, &[]);
        }
        self.end_transfer(id, Err(failure));
        self.mark_ready(link);
    }

    /// The one place where a transfer ends.
    pub(super) fn end_transfer(&mut self, id: TransferId, result: Result<usize, Failure>) {
        let Some(transfer) = self.transfers.remove(id) else { return };
        // Half a chunk may have landed; the rest must not.
        transfer.memory.end();
        if let Some(at) = transfer.timer {
            self.timers.remove(&(at, Timer::Transfer(id)));
        }
        if let Some(link) = self.links.get_mut(transfer.link) {
            link.pending -= 1;
            link.streams.drop_where(|s| s.kind == Stream::Push && s.id == wire_id(id));
            // A link that is gone has ended its moves by itself.
            if transfer.moving.is_some() {
                self.outputs.push_back(Output::EndMove { link: transfer.link, transfer: wire_id(id) });
            }
        }
        self.outputs.push_back(Output::TransferDone { waiter: transfer.waiter, result });
    }

    pub(super) fn pull_landed(&mut self, link: LinkId, number: u64, len: usize, landed: Landed) {
        let id = TransferId::from(KeyData::from_ffi(number));
        let Some(transfer) = self.transfers.get_mut(id).filter(|transfer| transfer.link == link) else { return };
        match landed {
            Landed::Whole => {
                transfer.moved += len;
                if transfer.moved == transfer.memory.len() {
                    let moved = transfer.moved;
                    self.end_transfer(id, Ok(moved));
                }
            }
            // The owner's `Done` follows, but this says it already.
            Landed::SourceGone => self.end_transfer(id, Err(Failure::Refused(Status::Revoked))),
            Landed::TargetGone => self.abandon_transfer(id, Failure::Revoked),
            Landed::Damaged => self.abandon_transfer(id, Failure::Checksum),
        }
    }

    /// The owner's last word on a transfer of ours.
    pub(super) fn handle_done(&mut self, link: LinkId, number: u64, status: Status) {
        let id = TransferId::from(KeyData::from_ffi(number));
        // Of what a device carries out, its owner knows nothing.
        let asked = |t: &&Transfer<E>| t.link == link && t.moving.is_none();
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
            entry.say_back(&Message::Done { transfer, status });
            self.mark_ready(link);
        }
    }

    pub(super) fn handle_pull(&mut self, link: LinkId, range: Range, now: Instant) -> Result<(), Failure> {
        let token = u128::from_le_bytes(range.token);
        if self.links[link].streams.has_pull(range.transfer) {
            return Err(broken(format!("pull {} was begun twice", range.transfer)));
        }
        // What is refused for there being too many uses nothing of what the memory's terms allow.
        match self.admit_transfer(link).and_then(|()| self.check(link, range, false, now)) {
            Ok(memory) if memory.len() > 0 => {
                let stream = OutStream { kind: Stream::Pull, id: range.transfer, memory, sent: 0, token: Some(token) };
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
                self.links[link].pushes.insert(range.transfer, push);
                self.watch(link, now);
            }
            Ok(_) => self.done(link, range.transfer, Status::Ok),
            Err(status) => self.done(link, range.transfer, status),
        }
        Ok(())
    }

    pub(super) fn push_landed(&mut self, link: LinkId, number: u64, len: usize, landed: Landed) {
        let pushes = &mut self.links[link].pushes;
        let Some(push) = pushes.get_mut(&number) else { return };
        let status = match landed {
            Landed::Whole => {
                push.landed += len;
                if push.landed < push.memory.len() {
                    return;
                }
                Status::Ok
            }
            // The initiator took its own memory away; it knows, and this is for its table of transfers.
            Landed::SourceGone | Landed::TargetGone => Status::Revoked,
            Landed::Damaged => Status::Checksum,
        };
        pushes.remove(&number);
        self.links[link].disown_landings(Stream::Push, number);
        self.done(link, number, status);
    }

    pub(super) fn handle_abort(&mut self, link: LinkId, number: u64, push: bool) {
        let entry = &mut self.links[link];
        if push {
            entry.pushes.remove(&number);
            entry.disown_landings(Stream::Push, number);
        } else {
            // Whoever gives up what there is not has no search made for it.
            if entry.streams.has_pull(number) {
                entry.streams.drop_where(|s| s.kind == Stream::Pull && s.id == number);
            }
        }
    }

    /// Ends whatever peers are doing with memory that is being taken back, or that they may not use any more; they are told
    /// why.
    pub(super) fn stop_access(&mut self, token: u128, why: &Status) {
        let links: Vec<LinkId> = self.links.keys().collect();
        for link in links {
            let entry = &mut self.links[link];
            let mut stopped = Vec::new();
            entry.streams.drop_where(|s| {
                let doomed = s.token == Some(token);
                stopped.extend(doomed.then_some(s.id));
                doomed
            });
            let pushes: Vec<u64> = entry.pushes.iter().filter(|(_, push)| push.token == token).map(|(id, _)| *id).collect();
            for push in &pushes {
                entry.pushes.remove(push);
                entry.disown_landings(Stream::Push, *push);
            }
            for transfer in stopped.into_iter().chain(pushes) {
                self.done(link, transfer, why.clone());
            }
        }
    }
}
