//! Timers: what happens because time passes.

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
    Handshake(LinkId),
    /// Has a peer whose address another engine claims sent anything?
    Probe(LinkId),
    /// Has the peer sent anything?
    Heartbeat(LinkId),
    /// Memory is exposed until then.
    Exposure(u128),
    /// Has the link been used?
    Idle(LinkId),
}

/// Deadlines of calls, in order. The entry of a call that has ended is removed when it comes first, or when there are too many
/// of these.
#[derive(Default)]
pub(super) struct Deadlines {
    queue: VecDeque<(Instant, CallId)>,
}

impl Deadlines {
    /// False when an earlier call has a later deadline.
    fn push(&mut self, at: Instant, call: CallId) -> bool {
        let in_order = self.queue.back().is_none_or(|(last, _)| *last <= at);
        if in_order {
            self.queue.push_back((at, call));
        }
        in_order
    }
}

/// At so many deadlines `Proto::find_waiter` looks. Among them are those of ended calls, and other timers.
const MAX_LOOKS: usize = 256;
/// Time limit of a liveness probe; a live peer answers in far less.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

impl<E: Env> Proto<E> {
    /// When [`Proto::handle_timeout`] is due next, if at all.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let timer = self.timers.first().map(|(at, _)| *at);
        let deadline = self.deadlines.queue.front().map(|(at, _)| *at);
        [timer, deadline].into_iter().flatten().min()
    }

    /// Executes all timers that are due by `now`.
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
                TimerKind::Probe(link) => self.probe_due(link),
                TimerKind::Call(call) => self.abandon_call(call, Failure::Timeout),
                TimerKind::Transfer(transfer) => self.abandon_transfer(transfer, Failure::Timeout),
                TimerKind::Handshake(link) => self.handshake_due(link),
                TimerKind::Heartbeat(link) => self.heartbeat(link, now),
                TimerKind::Exposure(token) => self.exposure_due(token, now),
                TimerKind::Idle(link) => self.idle_due(link, now),
            }
        }
    }

    /// Watches a call's deadline.
    pub(super) fn set_deadline(&mut self, call: CallId, at: Instant) {
        if !self.deadlines.push(at, call) {
            self.timers.insert((at, TimerKind::Call(call)));
        }
    }

    /// A call has ended whose deadline was watched.
    pub(super) fn drop_deadline(&mut self, call: CallId, at: Instant) {
        let Proto { deadlines: Deadlines { queue }, calls, timers, .. } = self;
        // Most are first in the queue, and have no timer.
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

    /// Looks at what waits for calls and transfers whose deadlines are watched, the last one to be due first, and at few of them,
    /// until `f` returns something.
    pub(crate) fn find_waiter<R>(&self, mut f: impl FnMut(&E::Waiter) -> Option<R>) -> Option<R> {
        let calls = self.deadlines.queue.iter().rev().map(|(_, call)| TimerKind::Call(*call));
        let timers = self.timers.iter().rev().map(|(_, timer)| *timer);
        let waiter = |timer| match timer {
            TimerKind::Call(call) => self.calls.get(call).map(|call| &call.waiter),
            TimerKind::Transfer(transfer) => self.transfers.get(transfer).map(|transfer| &transfer.waiter),
            _ => None,
        };
        calls.chain(timers).take(MAX_LOOKS).find_map(|timer| waiter(timer).and_then(&mut f))
    }

    fn handshake_due(&mut self, id: LinkId) {
        if self.links.get(id).is_some_and(|link| !link.is_open()) {
            let reason = format!("no connection within {:?}", self.config.connect);
            self.close(id, Failure::Unreachable { reason, source: None });
        }
    }

    /// Watches the peer, from now on until nothing is expected of it: one that stays silent for `peer_timeout` is disconnected.
    pub(super) fn watch(&mut self, id: LinkId, now: Instant) {
        let interval = self.config.peer_timeout / 3;
        let link = &mut self.links[id];
        if link.is_open() && link.heartbeat.is_none() && (link.is_busy() || link.wants_to_send()) {
            link.heartbeat = Some(now + interval);
            // Nothing was expected of it before, so it need not have sent anything.
            link.last_heard = now;
            link.acknowledged = None;
            self.timers.insert((now + interval, TimerKind::Heartbeat(id)));
            self.outputs.push_back(Output::AskAcknowledged { link: id });
        }
    }

    /// Another engine claims the address of a peer that has a link. If that peer has been replaced, it won't answer.
    pub(super) fn probe_liveness(&mut self, id: LinkId, now: Instant) {
        let Some(link) = self.links.get_mut(id).filter(|link| link.probed.is_none()) else { return };
        link.probed = Some(now);
        link.queue_frame(&Message::Ping, &[]);
        self.timers.insert((now + (self.config.peer_timeout / 3).min(PROBE_TIMEOUT), TimerKind::Probe(id)));
        self.mark_ready(id);
    }

    fn probe_due(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        if link.probed.take().is_some_and(|since| link.last_heard <= since) {
            self.close(id, Failure::PeerRestarted);
        }
    }

    fn heartbeat(&mut self, id: LinkId, now: Instant) {
        let timeout = self.config.peer_timeout;
        let interval = timeout / 3;
        let Some(link) = self.links.get_mut(id) else { return };
        link.heartbeat = None;
        if !link.is_busy() {
            return;
        }
        let silent = now.saturating_duration_since(link.last_heard);
        if silent >= timeout {
            let reason = format!("it has given no sign of life for {:.1} s", silent.as_secs_f64());
            self.close(id, Failure::Disconnected { reason });
            return;
        }
        self.outputs.push_back(Output::AskAcknowledged { link: id });
        if silent >= interval {
            link.queue_frame(&Message::Ping, &[]);
            self.mark_ready(id);
        }
        let link = &mut self.links[id];
        let next = (link.last_heard + timeout).min(now + interval).max(now + interval / 8);
        link.heartbeat = Some(next);
        self.timers.insert((next, TimerKind::Heartbeat(id)));
    }
}
