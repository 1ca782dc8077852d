//! Passes what has completed on to the links.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::OfiShared;
use super::bulk::{BulkEndpoint, fails};
use super::link::{OfiLink, SlotContent};
use super::port::{PeerName, Port};
use super::sys::{Completion, Label};
use super::wire::{self, OfiContent, OfiHeader, OfiHello};
use crate::deferred_log::defer;
use crate::transport::Sink;

/// Messages under way, of all links of a port, beyond which hellos are not refused.
const MAX_REFUSING: usize = 256;

/// Handles what has arrived, and what was sent. True when there was something.
pub(super) fn poll(shared: &Arc<OfiShared>, port: &Arc<Port>, sink: &mut dyn Sink) -> bool {
    match port.station.collect() {
        Ok(count) => {
            port.replenish();
            for completion in (0..count).map_while(|_| port.station.next_completion()) {
                handle(shared, port, completion, count > 1, sink);
            }
            count > 0
        }
        Err(error) => {
            // It would fail again at once: the port ends, and a later dial opens another.
            shared.give_up(port);
            port.station.log_failure(&error);
            let links = shared.all_links();
            links.iter().filter(|link| link.is_of(port)).for_each(|link| link.report_failure(fails(&error), sink));
            true
        }
    }
}

/// As `poll`, for the payloads of a link.
pub(super) fn poll_bulk(shared: &Arc<OfiShared>, bulk: &BulkEndpoint, sink: &mut dyn Sink) -> bool {
    let count = match bulk.station.collect() {
        Ok(count) => count,
        Err(error) => {
            bulk.give_up(&error);
            return true;
        }
    };
    for Completion { label, is_send, buffer, result, data } in (0..count).map_while(|_| bulk.station.next_completion()) {
        let (Label::Payload { link, .. } | Label::Rma { link, .. } | Label::Slot { link, .. }) = label else { continue };
        let Some(link) = shared.link(link) else { continue };
        match label {
            Label::Rma { number, .. } => link.rma_part_done(number, result.map(drop), sink),
            Label::Slot { slot, .. } => {
                let buffer = buffer.unwrap_or_default();
                link.slot_filled(slot, SlotContent { result, buffer, load: data }, sink);
            }
            Label::Payload { number, .. } if is_send => link.payload_sent(number, result.map(drop), sink),
            Label::Payload { number, .. } => link.payload_received(number, result, buffer, sink),
            Label::Message | Label::Sent { .. } => {}
        }
    }
    count > 0
}

/// `several`: there are others in this pass.
fn handle(shared: &Arc<OfiShared>, port: &Arc<Port>, completion: Completion, several: bool, sink: &mut dyn Sink) {
    let Completion { label, is_send, buffer, result, .. } = completion;
    match (label, is_send) {
        (Label::Message | Label::Sent { .. }, true) => {
            if let Err(error) = result {
                // The receiver finds the gap.
                defer(move || tracing::debug!(target: "calomel::ofi", %error, "a message was not sent"));
            }
            if let Some(backlog) = port.message_sent(label) {
                let links = shared.all_links();
                links.iter().filter(|link| link.sends_with(&backlog)).for_each(|link| link.continue_sending(sink));
            }
        }
        (Label::Message, false) => {
            let Some(buffer) = buffer else { return };
            match result {
                Ok(len) => message(shared, port, &buffer[..len.min(buffer.len())], several, sink),
                // Also one that is cancelled, when a connection ends in the middle of its message: it is posted again like others.
                Err(error) => {
                    defer(move || tracing::debug!(target: "calomel::ofi", %error, "a message was not received"));
                }
            }
            port.message_received(buffer);
        }
        (Label::Payload { .. } | Label::Slot { .. } | Label::Rma { .. } | Label::Sent { .. }, _) => {}
    }
}

/// A stranger can send anything: what belongs to no link is dropped.
fn message(shared: &Arc<OfiShared>, port: &Arc<Port>, message: &[u8], several: bool, sink: &mut dyn Sink) {
    match wire::decode(message) {
        Ok((_, OfiContent::Hello(content), _)) => hello(shared, port, content, sink),
        Ok((header, content, further)) => {
            if let Some(link) = shared.link(header.to).filter(|link| link.is_of(port)) {
                if several || !further.is_empty() || link.has_bulk() {
                    link.hold();
                }
                link.message(header, content, further, sink);
            }
        }
        Err(error) => {
            // Only a link's own peer knows its number.
            let number = wire::receiver(message).and_then(|number| shared.link(number));
            if let Some(link) = number.filter(|link| link.is_of(port)) {
                link.report_failure(error, sink);
            }
        }
    }
}

fn hello(shared: &Arc<OfiShared>, port: &Arc<Port>, hello: OfiHello<'_>, sink: &mut dyn Sink) {
    if let Some(link) = shared.accepted_link((hello.incarnation, hello.link)) {
        return link.accept_again();
    }
    let peer = match shared.peer_of(port, &hello) {
        Ok(peer) => peer,
        Err(error) => return defer(move || tracing::debug!(target: "calomel::ofi", %error, "a hello is not answered")),
    };
    if !port.listens.load(Ordering::Acquire) {
        return refuse(shared, port, &peer, hello.link, "no engine listens there");
    }
    if !hello.suits(shared.versions) {
        return refuse(shared, port, &peer, hello.link, "it supports no common version of the protocol");
    }
    OfiLink::accept(shared, port, hello, peer, sink);
}

/// Answers a hello that is not accepted. Its sender repeats it if the answer does not arrive.
fn refuse(shared: &OfiShared, port: &Port, to: &PeerName, link: u64, reason: &str) {
    // A stranger that reads nothing would have the provider keep what it is sent.
    if port.sending() >= MAX_REFUSING {
        return;
    }
    let header = OfiHeader { sequence: 0, to: link, handled: 0 };
    let mut message = Vec::new();
    wire::encode(header, &OfiContent::Refuse { versions: shared.versions, reason: wire::reason(reason) }, &mut message);
    if let Err(error) = port.send(to.address(), message, Label::Message) {
        defer(move || tracing::debug!(target: "calomel::ofi", %error, "a hello can't be answered"));
    }
}
