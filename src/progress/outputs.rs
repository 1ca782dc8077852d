//! What the protocol has asked for, on its way to be done.

use std::cell::Cell;
use std::collections::VecDeque;

use super::Live;
use crate::deferred_log;
use crate::proto::Output;

/// What the protocol has asked for. The memory is the thread's, and used again.
pub(super) struct Outputs {
    pub queue: VecDeque<Output<Live>>,
    /// Bytes of payloads that have been sent on the way.
    pub moved: usize,
}

thread_local! {
    static OUTPUTS: Cell<VecDeque<Output<Live>>> = const { Cell::new(VecDeque::new()) };
    static LATER: Cell<VecDeque<Output<Live>>> = const { Cell::new(VecDeque::new()) };
}

/// What driving brings. Transports report it with locks of theirs held, and the reactor's is held as well; so what runs user code
/// waits until none is.
pub(super) struct News {
    /// Of the step that is taken.
    pub outputs: Outputs,
    pub later: VecDeque<Output<Live>>,
}

impl News {
    pub(super) fn new() -> News {
        News { outputs: Outputs::new(), later: LATER.try_with(Cell::take).unwrap_or_default() }
    }

    /// True when there is something to pass on.
    pub(super) fn has_any(&self) -> bool {
        !self.later.is_empty() || deferred_log::any()
    }
}

impl Drop for News {
    fn drop(&mut self) {
        if self.later.is_empty() && self.later.capacity() <= KEEP {
            // On a thread that is ending there is no place for it.
            let _ = LATER.try_with(|later| later.set(std::mem::take(&mut self.later)));
        }
    }
}

/// True for what ends in user code: wakers, hooks, futures and buffers that are dropped, subscribers of the log.
pub(super) fn runs_user_code(output: &Output<Live>) -> bool {
    match output {
        Output::CallDone { .. }
        | Output::TransferDone { .. }
        | Output::Request(_)
        | Output::Connect { .. }
        | Output::Cancelled { .. }
        | Output::Unleased(_)
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
        Outputs { queue: OUTPUTS.try_with(Cell::take).unwrap_or_default(), moved: 0 }
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        if self.queue.is_empty() && self.queue.capacity() <= KEEP {
            // On a thread that is ending there is no place for it.
            let _ = OUTPUTS.try_with(|outputs| outputs.set(std::mem::take(&mut self.queue)));
        }
    }
}
