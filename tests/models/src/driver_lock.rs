//! Models of the driver lock, the driver's sleep, and waiting threads: no thread waits for an event that has happened.

use std::sync::Arc;
use std::task::Waker;

use loom::thread;

use crate::completions::Task;
use crate::model;
use crate::progress::{Awaited, Completion, Core, Event, with_sleeper};
use crate::proto;
use crate::sync::Instant;

fn waits(core: &Arc<Core>, completion: &Arc<Completion>) -> thread::JoinHandle<()> {
    let (core, completion) = (core.clone(), completion.clone());
    thread::spawn(move || {
        assert!(completion.wait(&core, None, Awaited::Other));
        assert!(completion.take().is_some());
    })
}

fn progresses(core: &Arc<Core>) -> thread::JoinHandle<()> {
    let core = core.clone();
    thread::spawn(move || core.progress())
}

/// A holder that gets what it waits for wakes the next waiter, which then drives.
pub(crate) fn two_callers_get_their_outcomes() {
    model(4, || {
        let core = Core::new();
        let completions = [Completion::new(), Completion::new()];
        let callers = [waits(&core, &completions[0]), waits(&core, &completions[1])];
        completions.iter().for_each(|completion| core.arrive(Event::Ends(completion.clone())));
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

/// One caller's wait is ended by a thread that does not drive, and was woken before by an earlier operation: at any point of
/// its wait it may be handed the driver lock, which must not be lost.
pub(crate) fn handed_off_driver_lock_is_not_lost() {
    model(3, || {
        let core = Core::new();
        let completions = [Completion::new(), Completion::new(), Completion::new()];
        let callers = [waits(&core, &completions[1]), waits(&core, &completions[2])];
        core.arrive(Event::Ends(completions[0].clone()));
        proto::end(&completions[1]);
        assert!(completions[0].wait(&core, None, Awaited::Other));
        core.arrive(Event::Ends(completions[2].clone()));
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

/// A thread with a spurious wake-up acquires the lock while it is still in the queue.
pub(crate) fn holder_is_not_in_the_queue() {
    model(3, || {
        let core = Core::new();
        let completions = [Completion::new(), Completion::new(), Completion::new()];
        let woken = {
            let (core, completion) = (core.clone(), completions[1].clone());
            thread::spawn(move || {
                with_sleeper(|sleeper| sleeper.waiter.wake());
                assert!(completion.wait(&core, None, Awaited::Other));
            })
        };
        let caller = waits(&core, &completions[2]);
        core.arrive(Event::Ends(completions[0].clone()));
        assert!(completions[0].wait(&core, None, Awaited::Other));
        core.arrive(Event::Ends(completions[1].clone()));
        core.arrive(Event::Ends(completions[2].clone()));
        woken.join().unwrap();
        caller.join().unwrap();
    });
}

/// A thread that does not drive (one that cancels, for example) ends a call whose caller drives and goes to sleep.
pub(crate) fn outcome_from_another_thread_wakes_the_driver() {
    model(6, || {
        let core = Core::new();
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        proto::end(&completion);
        caller.join().unwrap();
    });
}

/// The progress thread releases the lock for a caller; when the caller is gone, it drives again, and takes events that end no
/// thread's wait.
pub(crate) fn progress_thread_releases_the_lock_and_returns() {
    model(3, || {
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

/// An event that arrives while the caller releases the lock is taken by one of the two.
pub(crate) fn event_during_release_is_taken() {
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

/// The same, when the caller's event comes from the reactor, which reports it once, possibly to a progress thread that has lost
/// the driver lock.
pub(crate) fn reactor_event_is_not_lost() {
    model(2, || {
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
pub(crate) fn progress_thread_is_stopped_wherever_it_sleeps() {
    model(4, || {
        let core = Core::new();
        let progress = progresses(&core);
        core.stop();
        progress.join().unwrap();
    });
}

/// A deadline is set while a thread goes to sleep until a later one, or without one.
pub(crate) fn new_deadline_wakes_the_driver() {
    model(4, || {
        let core = Core::new();
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        let due = Instant::now();
        core.exec(|proto| proto.set_timer(due, completion));
        caller.join().unwrap();
    });
}

/// A poll of a future leads in vain, or does not lead: whichever thread gets the event, the task is woken.
pub(crate) fn task_whose_polls_lead_is_woken() {
    for (leads, by_reactor) in [(true, false), (true, true), (false, false)] {
        model(2, move || {
            let core = Core::leading();
            let progress = progresses(&core);
            let completion = Completion::new();
            completion.set_polls(leads);
            let event = {
                let (core, event) = (core.clone(), Event::Ends(completion.clone()));
                thread::spawn(move || if by_reactor { core.arrive_by_reactor(event) } else { core.arrive(event) })
            };
            await_operation(&core, &completion);
            event.join().unwrap();
            core.stop();
            progress.join().unwrap();
        });
    }
}

fn await_operation(core: &Core, completion: &Completion) {
    let task = Arc::<Task>::default();
    while !core.poll_operation(completion, &Waker::from(task.clone()), true) {
        task.0.wait();
    }
}

/// A future that leads is polled once, and kept: the next one leads in its place, once, or the progress thread gets its event.
pub(crate) fn task_behind_a_leader_that_is_kept_is_woken() {
    model(2, || {
        let core = Core::leading();
        let kept = Completion::new();
        assert!(!core.poll_operation(&kept, &Waker::from(Arc::<Task>::default()), true));
        let progress = progresses(&core);
        let completion = Completion::new();
        completion.set_polls(true);
        let event = {
            let (core, event) = (core.clone(), Event::Ends(completion.clone()));
            thread::spawn(move || core.arrive(event))
        };
        await_operation(&core, &completion);
        event.join().unwrap();
        core.stop();
        progress.join().unwrap();
    });
}
