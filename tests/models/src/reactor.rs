//! `mio`, as far as calomel's driver uses it: a reactor that reports each event once.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::sync::{Flag, Mutex};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token(pub usize);

/// The token of the driver's own waker.
const WAKER: Token = Token(usize::MAX);

pub(crate) mod event {
    #[derive(Clone)]
    pub(crate) struct Event(pub(super) super::Token);

    impl Event {
        pub(crate) fn token(&self) -> super::Token {
            self.0
        }
    }
}

pub(crate) struct Events(Vec<event::Event>);

impl Events {
    pub(crate) fn with_capacity(_: usize) -> Events {
        Events(Vec::new())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &event::Event> {
        self.0.iter()
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[derive(Clone, Default)]
pub(crate) struct Registry(Arc<Reactor>);

#[derive(Default)]
struct Reactor {
    flag: Flag,
    pending: Mutex<Vec<Token>>,
}

impl Registry {
    pub(crate) fn try_clone(&self) -> io::Result<Registry> {
        Ok(self.clone())
    }
}

pub(crate) struct Waker(Registry);

impl Waker {
    pub(crate) fn new(registry: &Registry, _: Token) -> io::Result<Waker> {
        Ok(Waker(registry.clone()))
    }

    pub(crate) fn wake(&self) -> io::Result<()> {
        self.notify(WAKER);
        Ok(())
    }

    pub(crate) fn notify(&self, token: Token) {
        self.0.0.pending.lock().push(token);
        self.0.0.flag.raise();
    }
}

pub(crate) struct Poll(Registry);

impl Poll {
    pub(crate) fn new() -> io::Result<Poll> {
        Ok(Poll(Registry::default()))
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.0
    }

    pub(crate) fn poll(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_none() {
            self.0.0.flag.wait();
        } else {
            self.0.0.flag.take();
        }
        let pending = std::mem::take(&mut *self.0.0.pending.lock());
        events.0 = pending.into_iter().map(event::Event).collect();
        Ok(())
    }
}
