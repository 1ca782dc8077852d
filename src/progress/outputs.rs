//! Queues of protocol outputs that wait to be executed.

use std::cell::Cell;
use std::collections::VecDeque;

use super::EngineEnv;
use crate::deferred_log;
use crate::proto::Output;

type Queue = VecDeque<Output<EngineEnv>>;

/// The outputs of a step. Their memory is reused by the thread: see [`Outputs::keep`].
#[derive(Default)]
pub(super) struct Outputs {
    pub queue: Queue,
    /// Bytes of payloads sent so far.
    pub sent: usize,
}

thread_local! {
    static OUTPUTS: Cell<Option<Queue>> = const { Cell::new(None) };
}

/// The outputs of driving. Transports report events with their locks and the reactor's held, so outputs that run user code wait
/// until no lock is held. The memory is the engine's, and reused; a thread that drives executes steps of its own meanwhile.
#[derive(Default)]
pub(super) struct PendingOutputs {
    /// Of the current step.
    pub outputs: Outputs,
    pub deferred: Queue,
}

impl PendingOutputs {
    /// True when its capacity is small enough to be kept.
    pub(super) fn is_small(&self) -> bool {
        self.outputs.queue.capacity() <= KEEP && self.deferred.capacity() <= KEEP
    }

    /// True when there are deferred outputs or log lines.
    pub(super) fn has_any(&self) -> bool {
        !self.deferred.is_empty() || deferred_log::any()
    }
}

/// True for outputs that run user code: wakers, hooks, drops of futures and buffers, subscribers of the log.
pub(super) fn runs_user_code(output: &Output<EngineEnv>) -> bool {
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
        | Output::ShutdownAsked => true,
        Output::Transmit { .. }
        | Output::CoverPayloads { .. }
        | Output::AskAcknowledged { .. }
        | Output::StartRma { .. }
        | Output::CancelRma { .. }
        | Output::Close { .. }
        | Output::Withdraw { .. } => false,
    }
}

/// The largest capacity that is kept, in outputs.
const KEEP: usize = 256;

impl Outputs {
    pub(super) fn new() -> Outputs {
        Outputs { queue: OUTPUTS.try_with(Cell::take).ok().flatten().unwrap_or_default(), sent: 0 }
    }

    /// Keeps the memory of executed outputs for the next outputs of this thread, unless it is large.
    pub(super) fn keep(self) {
        if self.queue.is_empty() && self.queue.capacity() <= KEEP {
            // Fails on a thread that is ending: then the memory is freed.
            let _ = OUTPUTS.try_with(|outputs| outputs.set(Some(self.queue)));
        }
    }
}
