//! What the protocol has asked for, on its way to be done.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::Live;
use crate::deferred_log;
use crate::proto::Output;

type Queue = VecDeque<Output<Live>>;

/// What the protocol has asked for. The memory is the thread's, and used again.
pub(super) struct Outputs {
    pub queue: Queue,
    /// Bytes of payloads that have been sent on the way.
    pub moved: usize,
}

thread_local! {
    /// Empty queues. A thread that drives has two in use, and needs another for each step of its own meanwhile.
    static SPARE: RefCell<Vec<Queue>> = const { RefCell::new(Vec::new()) };
}

const SPARES: usize = 4;

fn spare() -> Queue {
    SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten().unwrap_or_default()
}

fn keep(queue: &mut Queue) {
    if queue.is_empty() && queue.capacity() <= KEEP && queue.capacity() > 0 {
        // On a thread that is ending there is no place for it.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < SPARES {
                spare.push(std::mem::take(queue));
            }
        });
    }
}

/// What driving brings. Transports report it with locks of theirs held, and the reactor's is held as well; so what runs user code
/// waits until none is.
pub(super) struct News {
    /// Of the step that is taken.
    pub outputs: Outputs,
    pub later: Queue,
}

impl News {
    pub(super) fn new() -> News {
        News { outputs: Outputs::new(), later: spare() }
    }

    /// True when there is something to pass on.
    pub(super) fn has_any(&self) -> bool {
        !self.later.is_empty() || deferred_log::any()
    }
}

impl Drop for News {
    fn drop(&mut self) {
        keep(&mut self.later);
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
        Outputs { queue: spare(), moved: 0 }
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        keep(&mut self.queue);
    }
}
