//! What transports report, passed on to the protocol.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::{Core, News, collect, key, link_id};
use crate::Address;
use crate::deferred_log::defer;
use crate::proto;
use crate::transport::{Landed, Link, LinkKey, OtherVersion, Place, Sink, Taken, Unauthorized};

pub(super) struct CoreSink<'a> {
    pub core: &'a Core,
    pub news: &'a mut News,
}

impl CoreSink<'_> {
    fn step<R>(&mut self, step: impl FnOnce(&mut proto::Proto<super::Live>, Instant) -> R) -> R {
        let outputs = &mut self.news.outputs;
        outputs.moved = 0;
        let result = {
            let mut proto = self.core.proto.lock();
            let result = step(&mut proto, self.core.rhythm.now());
            collect(self.core, &mut proto, outputs);
            result
        };
        self.core.perform_at_once(self.news);
        result
    }
}

impl Sink for CoreSink<'_> {
    fn accepted(&mut self, remote: Address) -> LinkKey {
        key(self.step(|proto, now| proto.handle_accepted(remote, now)))
    }

    fn attach(&mut self, key: LinkKey, link: Arc<dyn Link>) {
        self.core.attach(link_id(key), link);
    }

    fn chunk(&mut self, key: LinkKey, len: usize) {
        self.step(|proto, _| proto.set_chunk(link_id(key), len));
    }

    fn connected(&mut self, key: LinkKey) {
        let link = link_id(key);
        self.core.detours.lock().remove(link);
        let local = self.core.carrier_of(link).is_some_and(|carrier| carrier.is_local());
        self.step(|proto, now| {
            if local {
                proto.set_local(link);
            }
            proto.handle_connected(link, now);
        });
    }

    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Taken> {
        let link = link_id(key);
        self.step(|proto, now| match proto.consume(link, bytes, now) {
            Ok(consumed) => {
                let place = consumed.place.map(|place| Place { target: place.target, len: place.len });
                proto.has_link(link).then_some(Taken { used: consumed.used, place })
            }
            Err(failure) => {
                proto.hang_up(link, failure);
                None
            }
        })
    }

    fn placed(&mut self, key: LinkKey, landed: Landed) {
        let landed = match landed {
            Landed::Whole => proto::Landed::Whole,
            Landed::SourceGone => proto::Landed::SourceGone,
            Landed::TargetGone => proto::Landed::TargetGone,
            Landed::Damaged => proto::Landed::Damaged,
        };
        self.step(|proto, now| proto.handle_placed(link_id(key), landed, now));
    }

    fn heard(&mut self, key: LinkKey) {
        self.step(|proto, now| proto.handle_heard(link_id(key), now));
    }

    fn sent(&mut self, key: LinkKey, buffer: Vec<u8>, lent: bool) {
        self.step(|proto, _| proto.handle_sent(link_id(key), buffer, lent));
    }

    fn returned(&mut self, key: LinkKey) {
        self.step(|proto, _| proto.handle_returned(link_id(key)));
    }

    fn may_move(&mut self, key: LinkKey) {
        self.step(|proto, _| proto.set_moves(link_id(key)));
    }

    fn moved(&mut self, key: LinkKey, operation: u64, result: io::Result<()>) {
        let result = result.map_err(|error| error.to_string());
        self.step(|proto, _| proto.handle_moved(link_id(key), operation, result));
    }

    fn closed(&mut self, key: LinkKey, cause: io::Error) {
        let detour = self.core.detours.lock().remove(link_id(key));
        if let Some(address) = detour {
            if self.core.look(|proto| proto.has_link(link_id(key))) {
                self.core.connect_straight(link_id(key), &address, &mut self.news.outputs);
                self.core.perform_at_once(self.news);
            }
            return defer(move || {
                tracing::debug!(target: "calomel::progress", %address, error = %cause, "same-host address unreachable, using its own transport");
            });
        }
        let unauthorized = cause.get_ref().and_then(|source| source.downcast_ref::<Unauthorized>());
        if let Some(Unauthorized(reason)) = unauthorized {
            let failure = proto::Failure::Unauthorized { reason: reason.clone() };
            return self.step(|proto, _| proto.close(link_id(key), failure));
        }
        let other = cause.get_ref().and_then(|source| source.downcast_ref::<OtherVersion>());
        match other {
            Some(&OtherVersion { low, high }) => {
                self.step(|proto, _| proto.close(link_id(key), proto::Failure::Version { theirs: (low, high) }));
            }
            None => self.step(|proto, _| proto.handle_closed(link_id(key), cause)),
        }
    }
}
