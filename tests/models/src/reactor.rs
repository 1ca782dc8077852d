//! `mio`, as far as calomel's driver uses it: a reactor that knows one event, that it was woken.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::sync::Flag;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token(pub usize);

pub(crate) mod event {
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

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[derive(Clone, Default)]
pub(crate) struct Registry(Arc<Flag>);

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
        self.0.0.raise();
        Ok(())
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
        let rung = match timeout {
            None => {
                self.0.0.wait();
                true
            }
            Some(_) => self.0.0.take(),
        };
        events.0.clear();
        events.0.extend(rung.then_some(event::Event(Token(usize::MAX))));
        Ok(())
    }
}
