//! What happens because time passes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::wire::Message;
use super::{CallId, Env, Failure, LinkId, Output, Proto, TransferId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TimerKind {
    /// The deadline of a call.
    Call(CallId),
    /// The deadline of a transfer.
    Transfer(TransferId),
    /// A link has to be open by then.
    Greeting(LinkId),
    /// Has a peer that somebody else claims to be said something?
    Challenge(LinkId),
    /// Has the peer been heard?
    Heartbeat(LinkId),
    /// Memory is exposed until then.
    Exposure(u128),
}

/// Deadlines of calls, in order. A call that ends leaves its own behind, until it is the first or there are too many of that
/// sort.
#[derive(Default)]
pub(super) struct Deadlines {
    queue: VecDeque<(Instant, CallId)>,
}

impl Deadlines {
    /// False when an earlier call has more time than this one.
    fn push(&mut self, at: Instant, call: CallId) -> bool {
        let in_order = self.queue.back().is_none_or(|(last, _)| *last <= at);
        if in_order {
            self.queue.push_back((at, call));
        }
        in_order
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.queue.front().map(|(at, _)| *at)
    }
}

/// A peer that is there answers in far less.
const CHALLENGE: Duration = Duration::from_secs(1);

impl<E: Env> Proto<E> {
    /// Does whatever was to be done by `now`.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        while let Some((at, call)) = self.deadlines.queue.front().copied() {
            if at > now {
                break;
            }
            self.deadlines.queue.pop_front();
            self.abandon_call(call, Failure::Timeout);
        }
        while let Some(&(at, timer)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            match timer {
                TimerKind::Challenge(link) => self.probe_due(link),
                TimerKind::Call(call) => self.abandon_call(call, Failure::Timeout),
                TimerKind::Transfer(transfer) => self.abandon_transfer(transfer, Failure::Timeout),
                TimerKind::Greeting(link) => self.handshake_due(link),
                TimerKind::Heartbeat(link) => self.heartbeat(link, now),
                TimerKind::Exposure(token) => self.exposure_due(token, now),
            }
        }
    }

    /// Watches a call's deadline.
    pub(super) fn set_deadline(&mut self, call: CallId, at: Instant) {
        if !self.deadlines.push(at, call) {
            self.timers.insert((at, TimerKind::Call(call)));
        }
    }

    /// A call is over that had a deadline watched.
    pub(super) fn drop_deadline(&mut self, call: CallId, at: Instant) {
        let Proto { deadlines: Deadlines { queue }, calls, timers, .. } = self;
        // Most are the first, and in no other place.
        if queue.front().is_none_or(|(_, first)| *first != call) && !timers.is_empty() {
            timers.remove(&(at, TimerKind::Call(call)));
        }
        while queue.front().is_some_and(|(_, call)| !calls.contains_key(*call)) {
            queue.pop_front();
        }
        if queue.len() > 64 + 2 * calls.len() {
            queue.retain(|(_, call)| calls.contains_key(*call));
        }
    }

    fn handshake_due(&mut self, id: LinkId) {
        if self.links.get(id).is_some_and(|link| !link.is_open()) {
            let reason = format!("no connection within {:?}", self.config.connect);
            self.close(id, Failure::Unreachable { reason, source: None });
        }
    }

    /// Sees to it that the peer's silence is noticed, from now on until nothing is expected of it.
    pub(super) fn watch(&mut self, id: LinkId, now: Instant) {
        let interval = self.config.peer_timeout / 3;
        let link = &mut self.links[id];
        if link.is_open() && link.heartbeat.is_none() && (link.is_busy() || link.wants_to_send()) {
            link.heartbeat = Some(now + interval);
            // What was not expected of it before, it need not have said.
            link.last_heard = now;
            link.acknowledged = None;
            self.timers.insert((now + interval, TimerKind::Heartbeat(id)));
            self.outputs.push_back(Output::AskAcknowledged { link: id });
        }
    }

    /// Somebody claims to be at the address of a peer that there is a link with. If that has been replaced, it won't answer.
    pub(super) fn probe_liveness(&mut self, id: LinkId, now: Instant) {
        let Some(link) = self.links.get_mut(id).filter(|link| link.probed.is_none()) else { return };
        link.probed = Some(now);
        link.queue_frame(&Message::Ping, &[]);
        self.timers.insert((now + (self.config.peer_timeout / 3).min(CHALLENGE), TimerKind::Challenge(id)));
        self.mark_ready(id);
    }

    fn probe_due(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        if link.probed.take().is_some_and(|since| link.last_heard <= since) {
            self.close(id, Failure::PeerRestarted);
        }
    }

    fn heartbeat(&mut self, id: LinkId, now: Instant) {
        let silence = self.config.peer_timeout;
        let interval = silence / 3;
        let Some(link) = self.links.get_mut(id) else { return };
        link.heartbeat = None;
        if !link.is_busy() {
            return;
        }
        let silent = now.saturating_duration_since(link.last_heard);
        if silent >= silence {
            let reason = format!("it has been silent for {:.1} s", silent.as_secs_f64());
            self.close(id, Failure::Disconnected { reason });
            return;
        }
        self.outputs.push_back(Output::AskAcknowledged { link: id });
        if silent >= interval {
            link.queue_frame(&Message::Ping, &[]);
            self.mark_ready(id);
        }
        let link = &mut self.links[id];
        let next = (link.last_heard + silence).min(now + interval).max(now + interval / 8);
        link.heartbeat = Some(next);
        self.timers.insert((next, TimerKind::Heartbeat(id)));
    }
}
