//! Passes the events of transports on to the protocol.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::{Core, PendingOutputs, collect, key, link_id};
use crate::Address;
use crate::deferred_log::defer;
use crate::memory::Slice;
use crate::proto;
use crate::transport::{Consumed, Link, LinkKey, OtherVersion, PayloadStatus, Sink, Unauthorized};

pub(super) struct CoreSink<'a> {
    pub core: &'a Core,
    pub pending: &'a mut PendingOutputs,
}

impl CoreSink<'_> {
    fn step<R>(&mut self, step: impl FnOnce(&mut proto::Proto<super::EngineEnv>, Instant) -> R) -> R {
        let outputs = &mut self.pending.outputs;
        outputs.sent = 0;
        let result = {
            let mut proto = self.core.proto.lock();
            let result = step(&mut proto, self.core.pacer.now());
            collect(self.core, &mut proto, outputs);
            result
        };
        self.core.execute_immediate(self.pending);
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
        self.core.fallback_addresses.lock().remove(link);
        let local = self.core.transport_link(link).is_some_and(|carrier| carrier.is_local());
        self.step(|proto, now| {
            if local {
                proto.set_local(link);
            }
            proto.handle_connected(link, now);
        });
    }

    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        let link = link_id(key);
        self.step(|proto, now| match proto.consume(link, bytes, now) {
            Ok(consumed) => proto.has_link(link).then_some(consumed),
            Err(failure) => {
                proto.fail_link(link, failure);
                None
            }
        })
    }

    fn payload_done(&mut self, key: LinkKey, status: PayloadStatus) {
        self.step(|proto, now| proto.handle_payload_done(link_id(key), status, now));
    }

    fn heard(&mut self, key: LinkKey) {
        self.step(|proto, now| proto.handle_heard(link_id(key), now));
    }

    fn sent(&mut self, key: LinkKey, buffer: Vec<u8>, exported: bool) {
        self.step(|proto, _| proto.handle_sent(link_id(key), buffer, exported));
    }

    fn returned(&mut self, key: LinkKey) {
        self.step(|proto, _| proto.handle_returned(link_id(key)));
    }

    fn rma_capable(&mut self, key: LinkKey) {
        self.step(|proto, _| proto.set_rma_capable(link_id(key)));
    }

    fn rma_done(&mut self, key: LinkKey, operation: u64, result: io::Result<()>) {
        let result = result.map_err(|error| error.to_string());
        self.step(|proto, _| proto.handle_rma_done(link_id(key), operation, result));
    }

    fn closed(&mut self, key: LinkKey, cause: io::Error) {
        let fallback = self.core.fallback_addresses.lock().remove(link_id(key));
        if let Some(address) = fallback {
            if self.core.with_proto(|proto| proto.has_link(link_id(key))) {
                self.core.connect_directly(link_id(key), &address, &mut self.pending.outputs);
                self.core.execute_immediate(self.pending);
            }
            return defer(move || {
                let message = "same-host address unreachable, using the transport of its own address";
                tracing::debug!(target: "calomel::progress", %address, error = %cause, "{message}");
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
