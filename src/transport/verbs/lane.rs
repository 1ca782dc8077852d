//! A link's second queue pair: one-sided reads and writes, and nothing else. When an access is refused, the devices break the
//! queue pair that it was made on; messages go on meanwhile, and a new lane takes the place of the broken one.
//!
//! ```text
//!   none ──offered──▶ offered ──the other side's offer──▶ connected ──its `LaneUp`──▶ up ──an error──▶ offered, the next lane
//! ```

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::device::{Device, Group, MOVED, NUMBER};
use super::link::VerbsLink;
use super::memory::{Registered, Slab, Windowed};
use super::sys::{Access, Capacity, Completion, Kind, Path, Piece, Qp, Work, status_text};
use super::wire::{Offer, Staged, Stretch};
use crate::memory::{Loan, Slice};
use crate::random;

/// Requests that may be under way on a lane.
pub(super) const MOVES: usize = 64;
/// Of one move, at a time: 2 MiB, which is a hundred times what is on its way at 100 Gbit/s and 2 µs.
const AT_ONCE: u32 = 8;
/// Longest request: a move is given up between two of them, others have their turn, and a large one keeps several under way.
const UNIT: usize = 256 << 10;
/// A lane that has not moved for so long, while it has something to do, is ended: longer than it takes a device to give up by itself,
/// which soft-RoCE does not do when a read is refused in the middle.
const STALLED: Duration = Duration::from_secs(3);
/// What is staged is tried to be read so often: each time another lane takes the place of one that broke.
const TRIES: u32 = 8;

/// What a move is for.
enum What {
    /// What the other side has staged.
    Fetch { stage: Slab, staged: Staged, posted: bool, tries: u32 },
    /// A transfer between memory that users have exposed.
    Transfer(Transfer),
    /// Windows are being opened: whether that has succeeded.
    Windows { opened: Arc<OnceLock<bool>> },
}

/// A transfer between memory that users have exposed.
pub(super) struct Transfer {
    operation: u64,
    pull: bool,
    local: Slice,
    registered: Arc<Registered>,
    remote: Vec<Stretch>,
    /// How far it has been asked for: how much in all; of which stretch, and how much of that.
    asked: usize,
    stretch: usize,
    within: u64,
    loan: Arc<dyn Loan>,
}

struct Move {
    what: What,
    /// Requests that are under way.
    outstanding: u32,
    /// Nothing more is asked for.
    stopped: bool,
}

/// A move that is over.
pub(super) enum Over {
    /// With the number that [`Lane::fetch`] gave.
    Fetched {
        number: u64,
        stage: Slab,
        len: usize,
    },
    Transferred {
        operation: u64,
        result: io::Result<()>,
    },
}

pub(super) struct Lane {
    /// How many there have been.
    number: u32,
    mine: Option<Mine>,
    theirs: Option<Offer>,
    /// The last lane that the other side has offered, and the last that it has connected.
    offered: u32,
    confirmed: u32,
    /// The other side has connected its end.
    up: bool,
    /// By number; fetches keep theirs when they are tried again.
    moves: HashMap<u64, Move>,
    /// Who asks next.
    turn: VecDeque<u64>,
    outstanding: usize,
    /// When something was last asked for, or ended.
    moved: Instant,
    closed: bool,
    link: Weak<VerbsLink>,
    device: Arc<Device>,
    group: Arc<Group>,
    path: Path,
    /// Reads that the other side answers at a time.
    reads: u8,
    over: Vec<Over>,
}

struct Mine {
    qp: Qp,
    first: u32,
}

impl Lane {
    pub(super) fn new(link: Weak<VerbsLink>, device: &Arc<Device>, group: &Arc<Group>, path: Path, reads: u8) -> Lane {
        Lane {
            number: 0,
            mine: None,
            theirs: None,
            offered: 0,
            confirmed: 0,
            up: false,
            moves: HashMap::new(),
            turn: VecDeque::new(),
            outstanding: 0,
            moved: Instant::now(),
            closed: false,
            link,
            device: device.clone(),
            group: group.clone(),
            path,
            reads: reads.max(1),
            over: Vec::new(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.up && !self.closed
    }

    /// True while the device has something to do.
    pub(super) fn is_busy(&self) -> bool {
        self.outstanding > 0
    }

    pub(super) fn has_stalled(&self, now: Instant) -> bool {
        self.is_busy() && now >= self.moved + STALLED
    }

    fn queue_pair(&self) -> Option<u32> {
        self.mine.as_ref().map(|mine| mine.qp.number)
    }

    /// By what completions of a move name it: they tell for which lane it was.
    fn id(&self, number: u64) -> u64 {
        MOVED | u64::from(self.number & 0xf_ffff) << 40 | number
    }

    /// Makes this side's end of the first lane, if the other side has not brought that about.
    pub(super) fn start(&mut self) -> io::Result<Option<Offer>> {
        if self.number > 0 { Ok(None) } else { self.offer().map(Some) }
    }

    /// Makes this side's end of the next lane; what to tell the other side.
    fn offer(&mut self) -> io::Result<Offer> {
        let pieces = self.device.limits.pieces.min(16) as u32;
        let capacity = Capacity { requests: MOVES as u32, pieces, inline: 0 };
        let qp = Qp::bare(&self.device.pd, &self.group.cq, capacity)?;
        qp.prepare(&self.path, true)?;
        self.number += 1;
        let first = u32::from_ne_bytes(random::from_system()?) & 0x00ff_ffff;
        let offer = Offer { lane: self.number, queue_pair: qp.number, first };
        if let Some(link) = self.link.upgrade() {
            self.device.enter(qp.number, &link);
        }
        self.mine = Some(Mine { qp, first });
        Ok(offer)
    }

    /// The other side has made its end. What is to be said: an offer of this side's, if it has not been made; and whether the
    /// lane is connected.
    pub(super) fn offered(&mut self, offer: Offer) -> io::Result<(Option<Offer>, bool)> {
        let mut own = None;
        if self.closed {
            return Ok((None, false));
        }
        // Each side offers each lane once, and the next when it has had this one up: it has said so before.
        if offer.lane != self.offered + 1 || self.offered > self.confirmed {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it offers a lane out of turn"));
        }
        self.offered = offer.lane;
        if offer.lane < self.number {
            return Ok((None, false));
        }
        if offer.lane > self.number {
            own = match self.number {
                0 => Some(self.offer()?),
                _ => self.fail("the other side has given the lane up")?,
            };
        }
        let Some(mine) = &self.mine else { return Ok((own, false)) };
        let reads = (self.device.limits.reads_asked.min(self.reads), self.device.limits.reads_answered);
        mine.qp.connect(&self.path, offer.queue_pair, (mine.first, offer.first), reads)?;
        self.theirs = Some(offer);
        Ok((own, true))
    }

    /// The other side has connected its end. True when moves may begin.
    pub(super) fn other_side_is_up(&mut self, lane: u32) -> io::Result<bool> {
        if lane != self.offered || lane == self.confirmed {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it speaks of a lane that it has not offered"));
        }
        self.confirmed = lane;
        self.up = lane == self.number && self.theirs.is_some() && self.mine.is_some();
        Ok(self.up)
    }

    /// Ends the lane: nothing that was asked of it goes on. Transfers end with an error, fetches wait for the next. What to tell
    /// the other side, if there is to be another lane.
    pub(super) fn fail(&mut self, why: &str) -> io::Result<Option<Offer>> {
        // When it is gone the device does not touch any memory on its behalf.
        if let Some(mine) = self.mine.take() {
            self.device.leave(mine.qp.number);
        }
        self.theirs = None;
        self.up = false;
        self.outstanding = 0;
        self.turn.clear();
        let numbers: Vec<u64> = self.moves.keys().copied().collect();
        let mut unreadable = false;
        for number in numbers {
            let Some(entry) = self.moves.get_mut(&number) else { continue };
            entry.outstanding = 0;
            match &mut entry.what {
                What::Fetch { posted, tries, .. } if !self.closed => {
                    *tries += u32::from(*posted);
                    unreadable |= *tries > TRIES;
                    *posted = false;
                    self.turn.push_back(number);
                }
                _ => self.end(number, Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned()))),
            }
        }
        if unreadable {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("what it sent can't be read: {why}")));
        }
        if self.closed {
            return Ok(None);
        }
        tracing::debug!(target: "calomel::verbs", why, "a lane has broken; another takes its place");
        self.offer().map(Some)
    }

    /// Ends it for good.
    pub(super) fn close(&mut self) {
        self.closed = true;
        // It can't fail: there is not to be another.
        let _ = self.fail("the connection is over");
    }

    /// Begins nothing more for users.
    pub(super) fn stop_transfers(&mut self) {
        let numbers: Vec<u64> = self.moves.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.stop(number));
    }

    /// Reads what the other side has staged; the number by which its end is told.
    pub(super) fn fetch(&mut self, stage: Slab, staged: Staged) -> u64 {
        let number = self.device.number();
        self.moves.insert(
            number,
            Move { what: What::Fetch { stage, staged, posted: false, tries: 0 }, outstanding: 0, stopped: false },
        );
        self.turn.push_back(number);
        number
    }

    /// Opens windows for the other side; where it is told whether that has succeeded. `None` when it can't be done now.
    pub(super) fn open(&mut self, windows: &Windowed, access: Access) -> io::Result<Option<Arc<OnceLock<bool>>>> {
        let count = windows.stretches().len();
        let (Some(mine), true) = (&self.mine, self.up && self.outstanding + count <= MOVES) else { return Ok(None) };
        let number = self.device.number();
        if !windows.open(&mine.qp, self.id(number), access)? {
            return Ok(None);
        }
        let opened = Arc::<OnceLock<bool>>::default();
        let what = What::Windows { opened: opened.clone() };
        self.moves.insert(number, Move { what, outstanding: count as u32, stopped: false });
        self.outstanding += count;
        Ok(Some(opened))
    }

    /// Begins a transfer under a number.
    pub(super) fn transfer(&mut self, number: u64, transfer: Transfer) {
        self.moves.insert(number, Move { what: What::Transfer(transfer), outstanding: 0, stopped: false });
        self.turn.push_back(number);
    }

    /// Asks for nothing more of a transfer, if it is one. It is over when what has been asked for has ended.
    pub(super) fn stop(&mut self, number: u64) {
        let Some(entry) = self.moves.get_mut(&number) else { return };
        if matches!(entry.what, What::Transfer(_)) {
            entry.stopped = true;
            if entry.outstanding == 0 {
                self.end(number, Err(io::ErrorKind::Interrupted.into()));
            }
        }
    }

    pub(super) fn number_of(&self, operation: u64) -> Option<u64> {
        let is_it = |entry: &Move| matches!(&entry.what, What::Transfer(transfer) if transfer.operation == operation);
        self.moves.iter().find(|(_, entry)| is_it(entry)).map(|(number, _)| *number)
    }

    /// True while the device may touch memory for a move.
    pub(super) fn is_under_way(&self, number: u64) -> bool {
        self.moves.contains_key(&number)
    }

    pub(super) fn take_over(&mut self) -> Vec<Over> {
        std::mem::take(&mut self.over)
    }

    fn end(&mut self, number: u64, result: io::Result<()>) {
        let Some(entry) = self.moves.remove(&number) else { return };
        match entry.what {
            What::Fetch { stage, staged, .. } => match result {
                Ok(()) => self.over.push(Over::Fetched { number, stage, len: staged.len as usize }),
                Err(_) => self.device.give_stage(stage),
            },
            What::Windows { opened } => {
                let _ = opened.set(result.is_ok());
            }
            What::Transfer(transfer) => {
                transfer.local.region.unlend(&transfer.loan);
                self.over.push(Over::Transferred { operation: transfer.operation, result });
            }
        }
    }

    /// Something that was asked for has ended. An error breaks the lane.
    pub(super) fn ended(&mut self, completion: &Completion) -> Result<(), String> {
        // It may be of a lane before this one, even if that had a queue pair of the same number.
        if self.queue_pair() != Some(completion.queue_pair) || completion.id & !NUMBER != self.id(0) {
            return Ok(());
        }
        if completion.status != 0 {
            return Err(status_text(completion.status));
        }
        let number = completion.id & NUMBER;
        let Some(entry) = self.moves.get_mut(&number) else { return Ok(()) };
        self.moved = Instant::now();
        self.outstanding -= 1;
        entry.outstanding -= 1;
        if entry.outstanding == 0 {
            let whole = match &entry.what {
                What::Fetch { posted, .. } => *posted,
                What::Transfer(transfer) => transfer.asked == transfer.local.len,
                What::Windows { .. } => true,
            };
            if whole {
                self.end(number, Ok(()));
            } else if entry.stopped {
                self.end(number, Err(io::ErrorKind::Interrupted.into()));
            }
        }
        Ok(())
    }

    /// Asks for what there is room for.
    pub(super) fn pump(&mut self) -> io::Result<()> {
        if !self.is_up() {
            return Ok(());
        }
        if self.outstanding == 0 {
            self.moved = Instant::now();
        }
        let mut idle = 0;
        while self.outstanding < MOVES && idle < self.turn.len() {
            let Some(number) = self.turn.pop_front() else { break };
            match self.ask(number)? {
                Asked::All => idle = 0,
                Asked::Some => {
                    self.turn.push_back(number);
                    idle = 0;
                }
                Asked::Nothing => {
                    self.turn.push_back(number);
                    idle += 1;
                }
            }
        }
        Ok(())
    }

    fn ask(&mut self, number: u64) -> io::Result<Asked> {
        let id = self.id(number);
        let Some(mine) = &self.mine else { return Ok(Asked::All) };
        let Some(entry) = self.moves.get_mut(&number) else { return Ok(Asked::All) };
        match &mut entry.what {
            What::Fetch { stage, staged, posted, .. } => {
                let piece = stage.piece(0, staged.len as usize);
                let kind = Kind::Read { address: staged.address, key: staged.key };
                // Counted first: on an error it may be under way all the same, until the lane has ended.
                *posted = true;
                entry.outstanding += 1;
                self.outstanding += 1;
                // SAFETY: the stage is registered for local writes, and is looked at when this has ended.
                unsafe { mine.qp.post(&[Work { id, kind, pieces: &[piece], signalled: true }]) }?;
                Ok(Asked::All)
            }
            What::Windows { .. } => Ok(Asked::All),
            What::Transfer(transfer) => {
                let room = (MOVES - self.outstanding).min((AT_ONCE - entry.outstanding.min(AT_ONCE)) as usize).min(4);
                if room == 0 {
                    return Ok(Asked::Nothing);
                }
                // While this is held nobody takes the memory back; whoever wants to after that finds the loan.
                let local = transfer.local.clone();
                let Some(_access) = local.read_access().filter(|_| !entry.stopped && !local.has_ended()) else {
                    self.stop(number);
                    return Ok(Asked::All);
                };
                let mut pieces: SmallVec<[Vec<Piece>; 4]> = SmallVec::new();
                let mut kinds: SmallVec<[Kind; 4]> = SmallVec::new();
                while kinds.len() < room
                    && let Some((kind, from)) = transfer.next(self.device.limits.pieces.min(16))
                {
                    kinds.push(kind);
                    pieces.push(from);
                }
                let work: SmallVec<[Work<'_>; 4]> =
                    kinds.iter().zip(&pieces).map(|(kind, pieces)| Work { id, kind: *kind, pieces, signalled: true }).collect();
                if work.is_empty() {
                    // The two sides don't cover what is to be moved, which the keys' and the region's lengths rule out.
                    self.stop(number);
                    return Ok(Asked::All);
                }
                entry.outstanding += work.len() as u32;
                self.outstanding += work.len();
                // SAFETY: the region is registered, for local writes if it is pulled into, and stays so until the loan has been
                // revoked, which waits for the end of this; it is memory that the user has set aside for transfers.
                unsafe { mine.qp.post(&work) }?;
                Ok(if transfer.asked == transfer.local.len { Asked::All } else { Asked::Some })
            }
        }
    }
}

enum Asked {
    /// There is nothing left to ask for.
    All,
    Some,
    /// There is no room.
    Nothing,
}

impl Transfer {
    pub(super) fn new(
        operation: u64,
        pull: bool,
        local: &Slice,
        registered: Arc<Registered>,
        remote: Vec<Stretch>,
        loan: &Arc<dyn Loan>,
    ) -> Transfer {
        let (local, loan) = (local.clone(), loan.clone());
        Transfer { operation, pull, local, registered, remote, asked: 0, stretch: 0, within: 0, loan }
    }

    /// The next request: as much of one stretch over there, and of so many pieces here, as fits.
    fn next(&mut self, most: usize) -> Option<(Kind, Vec<Piece>)> {
        let left = self.local.len - self.asked;
        let stretch = self.remote.get(self.stretch).filter(|_| left > 0)?;
        let len = left.min(usize::try_from(stretch.len - self.within).unwrap_or(usize::MAX)).min(UNIT);
        let mut pieces = Vec::new();
        let len = self.registered.pieces(self.local.offset + self.asked, len, most, &mut pieces);
        if len == 0 {
            return None;
        }
        let (address, key) = (stretch.address + self.within, stretch.key);
        self.asked += len;
        self.within += len as u64;
        if self.within == stretch.len {
            self.stretch += 1;
            self.within = 0;
        }
        Some((if self.pull { Kind::Read { address, key } } else { Kind::Write { address, key } }, pieces))
    }
}
