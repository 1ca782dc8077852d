//! What a link receives: messages in their order, and among them what has to be read from the other side's memory first.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;

use super::device::CREDITS;
use super::memory::Slab;
use super::wire::Content;
use crate::transport::{Landed, LinkKey, Place, Sink, Taken};

/// Something that has its turn when what was before it is done.
enum Item {
    Bytes(Vec<u8>),
    Payload(Vec<u8>),
    SourceGone,
    /// To be read, or read already: by its number.
    Fetch {
        number: u64,
        payload: bool,
        read: Option<(Slab, usize)>,
    },
    Bye,
}

#[derive(Default)]
pub(super) struct Inbox {
    /// The start of a frame that is not complete.
    rest: Vec<u8>,
    /// Where the payload belongs that comes next.
    place: Option<Place>,
    queue: VecDeque<Item>,
}

/// How it goes on.
pub(super) enum Went {
    On,
    /// It has to wait for its turn.
    Waits,
    /// The link was closed because of what it brought.
    Closed,
    /// The other side has said farewell.
    Bye,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("it sent {what}"))
}

impl Inbox {
    /// Takes a message that is no staged piece.
    pub(super) fn take(&mut self, key: LinkKey, content: &Content<'_>, sink: &mut dyn Sink) -> io::Result<Went> {
        if self.queue.is_empty() {
            return match content {
                Content::Bytes(bytes) => self.feed(key, bytes, sink),
                Content::Payload(bytes) => self.place(key, Some(bytes), sink),
                Content::SourceGone => self.place(key, None, sink),
                Content::Bye => Ok(Went::Bye),
                _ => Ok(Went::On),
            };
        }
        self.queue.push_back(match content {
            Content::Bytes(bytes) => Item::Bytes(bytes.to_vec()),
            Content::Payload(bytes) => Item::Payload(bytes.to_vec()),
            Content::SourceGone => Item::SourceGone,
            Content::Bye => Item::Bye,
            _ => return Ok(Went::On),
        });
        if self.queue.len() > usize::from(CREDITS) + 1 {
            return Err(broken("more than it was given credit for"));
        }
        Ok(Went::Waits)
    }

    /// How much waits for its turn.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Keeps the place of a staged piece, which is being read.
    pub(super) fn expect(&mut self, number: u64, payload: bool) {
        self.queue.push_back(Item::Fetch { number, payload, read: None });
    }

    /// Staged pieces whose places are kept.
    pub(super) fn expected(&self) -> usize {
        self.queue.iter().filter(|item| matches!(item, Item::Fetch { .. })).count()
    }

    /// A staged piece has been read.
    pub(super) fn fetched(&mut self, fetched: u64, stage: Slab, len: usize) {
        for item in &mut self.queue {
            if let Item::Fetch { number, read, .. } = item
                && *number == fetched
            {
                *read = Some((stage, len));
                return;
            }
        }
    }

    /// Goes on with what has its turn. `done` gets each staged piece back.
    pub(super) fn go_on(&mut self, key: LinkKey, sink: &mut dyn Sink, done: &mut dyn FnMut(Slab)) -> io::Result<Went> {
        while let Some(item) = self.queue.pop_front() {
            let went = match item {
                Item::Fetch { read: None, .. } => {
                    self.queue.push_front(item);
                    return Ok(Went::On);
                }
                Item::Bytes(bytes) => self.feed(key, &bytes, sink)?,
                Item::Payload(bytes) => self.place(key, Some(&bytes), sink)?,
                Item::SourceGone => self.place(key, None, sink)?,
                Item::Bye => Went::Bye,
                Item::Fetch { payload, read: Some((stage, len)), .. } => {
                    let went = {
                        // SAFETY: the read into it has ended, and nothing else is asked of the device with it.
                        let bytes = unsafe { stage.read(0, len) };
                        if payload { self.place(key, Some(bytes), sink) } else { self.feed(key, bytes, sink) }
                    };
                    done(stage);
                    went?
                }
            };
            if !matches!(went, Went::On) {
                return Ok(went);
            }
        }
        Ok(Went::On)
    }

    fn feed(&mut self, key: LinkKey, bytes: &[u8], sink: &mut dyn Sink) -> io::Result<Went> {
        if self.place.is_some() {
            return Err(broken("no payload where it had announced one"));
        }
        let joined;
        let data = if self.rest.is_empty() {
            bytes
        } else {
            let mut rest = std::mem::take(&mut self.rest);
            rest.extend_from_slice(bytes);
            joined = rest;
            &joined
        };
        let Some(Taken { used, place }) = sink.bytes(key, data) else { return Ok(Went::Closed) };
        if place.is_some() && used < data.len() {
            return Err(broken("bytes where it had announced a payload"));
        }
        self.rest.extend_from_slice(&data[used..]);
        self.place = place;
        Ok(Went::On)
    }

    /// A payload has come; or none, because its memory was gone.
    fn place(&mut self, key: LinkKey, bytes: Option<&[u8]>, sink: &mut dyn Sink) -> io::Result<Went> {
        let place = self.place.take().ok_or_else(|| broken("a payload that it had not announced"))?;
        if bytes.is_some_and(|bytes| bytes.len() != place.len) {
            return Err(broken("a payload of another length than it had announced"));
        }
        let landed = match (&place.target, bytes) {
            (None, Some(_)) => Landed::Whole,
            (_, None) => Landed::SourceGone,
            (Some(target), Some(bytes)) if target.write(bytes) => Landed::Whole,
            (Some(_), Some(_)) => Landed::TargetGone,
        };
        sink.placed(key, landed);
        Ok(Went::On)
    }
}
