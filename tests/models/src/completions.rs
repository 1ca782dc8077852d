//! Models of a completion: one end, seen once, by a thread or a task that is always woken.

use std::sync::Arc;
use std::task::{Wake, Waker};

use loom::thread;

use crate::model;
use crate::progress::{Completion, with_sleeper};
use crate::proto;
use crate::sync::Flag;

/// A task that sleeps until it is woken.
#[derive(Default)]
pub(crate) struct Task(pub(crate) Flag);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.raise();
    }
}

fn ends(completion: &Arc<Completion>) -> thread::JoinHandle<()> {
    let completion = completion.clone();
    thread::spawn(move || proto::end(&completion))
}

pub(crate) fn waiting_thread_is_woken() {
    model(8, || {
        let completion = Completion::new();
        let end = ends(&completion);
        with_sleeper(|sleeper| {
            let mut asleep = completion.wake_thread(&sleeper.waiter);
            while asleep {
                sleeper.sleep(None);
                asleep = !completion.is_ready();
            }
        });
        assert!(completion.take().is_some());
        assert!(completion.take().is_none());
        end.join().unwrap();
    });
}

pub(crate) fn task_that_has_moved_is_woken() {
    model(8, || {
        let completion = Completion::new();
        let end = ends(&completion);
        // Polled twice, like a future that another task continues.
        let (earlier, task) = (Arc::<Task>::default(), Arc::<Task>::default());
        completion.wake_task(&Waker::from(earlier));
        while completion.wake_task(&Waker::from(task.clone())) {
            task.0.wait();
        }
        assert!(completion.take().is_some());
        end.join().unwrap();
    });
}

/// Another thread wakes it early, while the operation ends.
pub(crate) fn task_that_is_to_lead_learns_of_the_end() {
    model(8, || {
        let completion = Completion::new();
        let task = Arc::<Task>::default();
        completion.wake_task(&Waker::from(task.clone()));
        let end = ends(&completion);
        let other = completion.clone();
        let passes_on = thread::spawn(move || other.wake_early());
        while completion.wake_task(&Waker::from(task.clone())) {
            task.0.wait();
        }
        assert!(completion.take().is_some());
        end.join().unwrap();
        passes_on.join().unwrap();
    });
}

pub(crate) fn one_of_two_takers_gets_the_outcome() {
    model(8, || {
        let completion = Completion::new();
        let end = ends(&completion);
        let other = completion.clone();
        let other = thread::spawn(move || other.take().is_some());
        let mine = completion.take().is_some();
        let theirs = other.join().unwrap();
        end.join().unwrap();
        let left = completion.take().is_some();
        assert_eq!(u8::from(mine) + u8::from(theirs) + u8::from(left), 1);
    });
}
