//! A foreign event loop, plain epoll, that serves engines with `Progress::External`.

#![allow(dead_code, reason = "each test program uses some of it")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use calomel::{Engine, Error};
use rustix::event::{EventfdFlags, epoll, eventfd};

/// How the loop is told of a readable descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// As long as it is readable.
    Level,
    /// Once for each change.
    Edge,
}

/// Both, for tests that run with each.
pub const TRIGGERS: [Trigger; 2] = [Trigger::Level, Trigger::Edge];

/// Serves the engines until `stop` is readable. Sleeps without a timeout, so a lost wake-up hangs it. An engine that is
/// finalized leaves the loop.
pub fn serve(engines: &[Engine], trigger: Trigger, stop: BorrowedFd<'_>) {
    const STOP: u64 = u64::MAX;
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&poll, stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN).unwrap();
    for (index, engine) in engines.iter().enumerate() {
        let flags = match trigger {
            Trigger::Level => epoll::EventFlags::IN,
            Trigger::Edge => epoll::EventFlags::IN | epoll::EventFlags::ET,
        };
        epoll::add(&poll, engine.as_fd(), epoll::EventData::new_u64(index as u64), flags).unwrap();
    }
    let mut events = Vec::with_capacity(8);
    loop {
        events.clear();
        match epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("{error}"),
        }
        for event in &events {
            if event.data.u64() == STOP {
                return;
            }
            let engine = &engines[event.data.u64() as usize];
            loop {
                match engine.progress(Duration::ZERO) {
                    Ok(true) if trigger == Trigger::Edge => {}
                    Ok(_) => break,
                    Err(Error::Finalized { .. }) => {
                        epoll::delete(&poll, engine.as_fd()).unwrap();
                        break;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

/// A thread that serves engines until this is dropped.
pub struct EventLoop {
    stop: Arc<OwnedFd>,
    thread: Option<thread::JoinHandle<()>>,
}

impl EventLoop {
    /// Finalizes the engines at its end, within the loop's thread.
    pub fn serving(engines: &[&Engine], trigger: Trigger) -> EventLoop {
        EventLoop::start(engines, trigger, |engine| engine.finalize().unwrap())
    }

    /// Leaves the engines alone at its end.
    pub fn serving_meanwhile(engines: &[&Engine], trigger: Trigger) -> EventLoop {
        EventLoop::start(engines, trigger, |_| ())
    }

    fn start(engines: &[&Engine], trigger: Trigger, end: fn(&Engine)) -> EventLoop {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let stopped = stop.clone();
        let engines: Vec<Engine> = engines.iter().copied().cloned().collect();
        let thread = thread::spawn(move || {
            serve(&engines, trigger, stopped.as_fd());
            engines.iter().for_each(end);
        });
        EventLoop { stop, thread: Some(thread) }
    }

    pub fn thread(&self) -> thread::ThreadId {
        self.thread.as_ref().unwrap().thread().id()
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        rustix::io::write(&*self.stop, &1u64.to_ne_bytes()).unwrap();
        let ended = self.thread.take().unwrap().join();
        if !thread::panicking() {
            ended.expect("the event loop panicked");
        }
    }
}
