//! What the protocol has asked for, on its way to be done.

use std::cell::Cell;
use std::collections::VecDeque;

use super::EngineEnv;
use crate::deferred_log;
use crate::proto::Output;

type Queue = VecDeque<Output<EngineEnv>>;

/// What the protocol has asked for. The memory is the thread's, which uses it again: see [`Outputs::keep`].
#[derive(Default)]
pub(super) struct Outputs {
    pub queue: Queue,
    /// Bytes of payloads that have been sent on the way.
    pub moved: usize,
}

thread_local! {
    static OUTPUTS: Cell<Option<Queue>> = const { Cell::new(None) };
}

/// What driving brings. Transports report it with locks of theirs held, and the reactor's is held as well; so what runs user code
/// waits until none is. The memory is the engine's, and used again: a thread that drives takes steps of its own meanwhile.
#[derive(Default)]
pub(super) struct PendingOutputs {
    /// Of the step that is taken.
    pub outputs: Outputs,
    pub later: Queue,
}

impl PendingOutputs {
    /// True when it takes no more room than is kept.
    pub(super) fn is_small(&self) -> bool {
        self.outputs.queue.capacity() <= KEEP && self.later.capacity() <= KEEP
    }

    /// True when there is something to pass on.
    pub(super) fn has_any(&self) -> bool {
        !self.later.is_empty() || deferred_log::any()
    }
}

/// True for what ends in user code: wakers, hooks, futures and buffers that are dropped, subscribers of the log.
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
        | Output::ShutdownAsked => true,
        Output::Transmit { .. }
        | Output::CoverPayloads { .. }
        | Output::AskAcknowledged { .. }
        | Output::Move { .. }
        | Output::EndMove { .. }
        | Output::Close { .. }
        | Output::Withdraw { .. } => false,
    }
}

/// A thread keeps room for so many outputs.
const KEEP: usize = 256;

impl Outputs {
    pub(super) fn new() -> Outputs {
        Outputs { queue: OUTPUTS.try_with(Cell::take).ok().flatten().unwrap_or_default(), moved: 0 }
    }

    /// All of it has been carried out. Its memory is for the next outputs of this thread, unless it is large.
    pub(super) fn keep(self) {
        if self.queue.is_empty() && self.queue.capacity() <= KEEP {
            // On a thread that is ending there is no place for it.
            let _ = OUTPUTS.try_with(|outputs| outputs.set(Some(self.queue)));
        }
    }
}
