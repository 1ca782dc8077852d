//! The seat, the driver's sleep, and whoever waits: nobody is left waiting for what has happened.

use std::sync::Arc;

use loom::thread;

use crate::model;
use crate::progress::{Completion, Core, Event, with_sleeper};
use crate::proto;
use crate::sync::Instant;

fn waits(core: &Arc<Core>, completion: &Arc<Completion>) -> thread::JoinHandle<()> {
    let (core, completion) = (core.clone(), completion.clone());
    thread::spawn(move || {
        assert!(completion.wait(&core, None));
        assert!(completion.take().is_some());
    })
}

fn progresses(core: &Arc<Core>) -> thread::JoinHandle<()> {
    let core = core.clone();
    thread::spawn(move || core.progress())
}

/// Who sits when it gets what it waits for wakes the next one, who then drives.
pub(crate) fn two_callers_get_what_they_wait_for() {
    model(4, || {
        let core = Core::new();
        let completions = [Completion::new(), Completion::new()];
        let callers = [waits(&core, &completions[0]), waits(&core, &completions[1])];
        completions.iter().for_each(|completion| core.arrive(Event::Ends(completion.clone())));
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

/// One is ended by a thread that drives nothing, and has been woken before by what it did earlier: it may be at any point of
/// waiting when its turn comes, and the turn must not be lost with it.
pub(crate) fn a_turn_is_passed_on() {
    model(3, || {
        let core = Core::new();
        let completions = [Completion::new(), Completion::new(), Completion::new()];
        let callers = [waits(&core, &completions[1]), waits(&core, &completions[2])];
        core.arrive(Event::Ends(completions[0].clone()));
        proto::end(&completions[1]);
        assert!(completions[0].wait(&core, None));
        core.arrive(Event::Ends(completions[2].clone()));
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

/// A thread that has been woken once too often sits down while it is still in the queue.
pub(crate) fn nobody_sits_and_queues() {
    model(3, || {
        let core = Core::new();
        let completions = [Completion::new(), Completion::new(), Completion::new()];
        let woken = {
            let (core, completion) = (core.clone(), completions[1].clone());
            thread::spawn(move || {
                with_sleeper(|sleeper| sleeper.waiter.wake());
                assert!(completion.wait(&core, None));
            })
        };
        let caller = waits(&core, &completions[2]);
        core.arrive(Event::Ends(completions[0].clone()));
        assert!(completions[0].wait(&core, None));
        core.arrive(Event::Ends(completions[1].clone()));
        core.arrive(Event::Ends(completions[2].clone()));
        woken.join().unwrap();
        caller.join().unwrap();
    });
}

/// A call that ends while its caller drives and goes to sleep, by a thread that drives nothing: one that cancels it, say.
pub(crate) fn an_end_from_elsewhere_is_not_slept_through() {
    model(6, || {
        let core = Core::new();
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        proto::end(&completion);
        caller.join().unwrap();
    });
}

/// The progress thread gets up for a caller; when the caller is gone, it drives again, and takes what concerns nobody else.
pub(crate) fn the_progress_thread_gives_way_and_comes_back() {
    model(4, || {
        let core = Core::new();
        let progress = progresses(&core);
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        core.arrive(Event::Ends(completion));
        caller.join().unwrap();
        core.arrive(Event::Stop);
        progress.join().unwrap();
    });
}

/// What comes while the caller gets up is taken by one or the other.
pub(crate) fn nothing_is_left_by_a_caller_that_gets_up() {
    model(3, || {
        let core = Core::new();
        let progress = progresses(&core);
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        core.arrive(Event::Ends(completion));
        core.arrive(Event::Stop);
        caller.join().unwrap();
        progress.join().unwrap();
    });
}

/// The same, when what the caller waits for comes by the reactor, which tells once: it may tell a progress thread that has
/// lost the seat.
pub(crate) fn what_the_reactor_tells_is_not_lost() {
    model(3, || {
        let core = Core::new();
        let progress = progresses(&core);
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        core.arrive_by_reactor(Event::Ends(completion));
        caller.join().unwrap();
        core.arrive_by_reactor(Event::Stop);
        progress.join().unwrap();
    });
}

/// The same, ended as an engine ends its threads.
pub(crate) fn the_progress_thread_can_be_stopped_wherever_it_sleeps() {
    model(4, || {
        let core = Core::new();
        let progress = progresses(&core);
        core.stop();
        progress.join().unwrap();
    });
}

/// A deadline that comes up while somebody goes to sleep until a later one, or for ever.
pub(crate) fn a_new_deadline_is_not_slept_through() {
    model(4, || {
        let core = Core::new();
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        let due = Instant::now();
        core.exec(|proto| proto.set_timer(due, completion));
        caller.join().unwrap();
    });
}
