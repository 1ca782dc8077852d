//! What a link does with its lane.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use parking_lot::MutexGuard;

use super::super::STAGED;
use super::super::device::STAGE;
use super::super::lane::Lane;
use super::super::sys::Completion;
use super::super::wire::{Content, Offer, Staged};
use super::{Line, VerbsLink, closed_by_peer};

impl VerbsLink {
    /// Both sides are there: moves are made ready, for which the two have to talk. Done once.
    pub(in super::super) fn begin(&self) -> io::Result<()> {
        let (Some(line), Some(hello)) = (self.line.get(), self.line.get().and_then(|line| line.hello.get())) else {
            return Ok(());
        };
        if self.begun.load(Ordering::Acquire) || self.begun.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let Some(id) = self.id() else { return Ok(()) };
        // The manager knows none when the other side has gone already.
        let path = id.path().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => closed_by_peer(),
            _ => error,
        })?;
        if let Some(qp) = &line.out.lock().qp {
            qp.set_patience();
        }
        let mut slot = line.lane.lock();
        let lane = slot.insert(Lane::new(self.me.clone(), &line.device, &line.group, path, hello.reads));
        let offer = lane.start()?;
        say(line, offer, None)
    }

    /// The other side has made its end of a lane.
    pub(super) fn offered(&self, line: &Line, offer: Offer) -> io::Result<()> {
        let mut slot = line.lane.lock();
        let Some(lane) = slot.as_mut() else { return Ok(()) };
        let (own, connected) = lane.offered(offer)?;
        say(line, own, connected.then_some(offer.lane))?;
        self.deliver(slot);
        Ok(())
    }

    /// The other side has connected its end. True when moves may begin.
    pub(super) fn is_up(&self, line: &Line, lane: u32) -> io::Result<bool> {
        line.lane.lock().as_mut().map_or(Ok(false), |own| own.other_side_is_up(lane))
    }

    pub(super) fn fetch(&self, line: &Line, staged: Staged, payload: bool) -> io::Result<()> {
        {
            let mut inbox = self.inbox.lock();
            if staged.len as usize > STAGE || inbox.expected() >= STAGED {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it stages more than was agreed"));
            }
            let mut slot = line.lane.lock();
            let Some(lane) = slot.as_mut() else { return Ok(()) };
            inbox.expect(lane.fetch(line.device.take_stage()?, staged), payload);
        }
        self.pump(line);
        Ok(())
    }

    /// Has the lane ask for what there is room for.
    pub(super) fn pump(&self, line: &Line) {
        let mut slot = line.lane.lock();
        let Some(lane) = slot.as_mut() else { return };
        if let Err(error) = lane.pump() {
            self.end_lane(line, lane, &error.to_string());
        }
        let busy = lane.is_busy();
        self.deliver(slot);
        if busy {
            self.shared.look_later();
        }
    }

    /// Ends a lane that does not move. True while there is something to look after.
    pub(in super::super) fn look_after(&self, now: Instant) -> bool {
        let Some(line) = self.line.get() else { return false };
        self.break_lane(line, |lane| lane.has_stalled(now), "its device does not go on");
        line.lane.lock().as_ref().is_some_and(Lane::is_busy)
    }

    /// Breaks the lane, if it is still the one that is meant.
    pub(super) fn break_lane(&self, line: &Line, is_it: impl FnOnce(&Lane) -> bool, why: &str) {
        let mut slot = line.lane.lock();
        let Some(lane) = slot.as_mut() else { return };
        if is_it(lane) {
            self.end_lane(line, lane, why);
        }
        self.deliver(slot);
    }

    /// The lane is locked meanwhile, so that offers go out in their order.
    fn end_lane(&self, line: &Line, lane: &mut Lane, why: &str) {
        if let Err(error) = lane.fail(why).and_then(|offer| say(line, offer, None)) {
            self.fail(error);
        }
    }

    /// A request on the lane has ended; `go_on` follows. Called by any thread.
    pub(in super::super) fn move_ended(&self, completion: &Completion) {
        let Some(line) = self.line.get() else { return };
        let mut slot = line.lane.lock();
        let Some(lane) = slot.as_mut() else { return };
        if let Err(why) = lane.ended(completion) {
            self.end_lane(line, lane, &why);
        }
    }

    /// Goes on with what the lane has to do.
    pub(in super::super) fn go_on(&self) {
        if let Some(line) = self.line.get() {
            self.pump(line);
        }
    }

    /// Has whoever drives see to what of the lane is over.
    pub(super) fn deliver(&self, mut slot: MutexGuard<'_, Option<Lane>>) {
        let over = slot.as_mut().map_or_else(Vec::new, Lane::take_over);
        drop(slot);
        if let (false, Some(own)) = (over.is_empty(), self.me.upgrade()) {
            self.shared.deliver(&own, over);
        }
    }
}

/// Says what is to be said of a lane. It does not wait for its turn: what waits may depend on it.
fn say(line: &Line, offer: Option<Offer>, up: Option<u32>) -> io::Result<()> {
    let mut out = line.out.lock();
    offer.into_iter().try_for_each(|offer| out.say(Content::Offer(offer)))?;
    up.into_iter().try_for_each(|lane| out.say(Content::LaneUp(lane)))?;
    out.send_control().map(drop)
}
