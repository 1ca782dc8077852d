//! The seat, the driver's sleep, and whoever waits: nobody is left waiting for what has happened.

use std::sync::Arc;

use loom::thread;

use crate::model;
use crate::progress::{Completion, Core, Event};

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
#[test]
fn two_callers_get_what_they_wait_for() {
    model(4, || {
        let core = Core::new();
        let completions = [Completion::new(), Completion::new()];
        let callers = [waits(&core, &completions[0]), waits(&core, &completions[1])];
        completions.iter().for_each(|completion| core.arrive(Event::Ends(completion.clone())));
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

/// The progress thread gets up for a caller; when the caller is gone, it drives again, and takes what concerns nobody else.
#[test]
fn the_progress_thread_gives_way_and_comes_back() {
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

/// The same, ended as an engine ends its threads.
#[test]
fn the_progress_thread_can_be_stopped_wherever_it_sleeps() {
    model(4, || {
        let core = Core::new();
        let progress = progresses(&core);
        core.stop();
        progress.join().unwrap();
    });
}

/// A deadline that comes up while somebody goes to sleep until a later one, or for ever.
#[test]
fn a_new_deadline_is_not_slept_through() {
    model(4, || {
        let core = Core::new();
        let completion = Completion::new();
        let caller = waits(&core, &completion);
        let due = std::time::Instant::now();
        core.exec(|proto| proto.set_timer(due, completion));
        caller.join().unwrap();
    });
}
