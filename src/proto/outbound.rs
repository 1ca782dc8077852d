//! What goes out on links, and what their transports report about it.

use std::time::Instant;

use super::wire::Message;
use super::{Env, Failure, LinkId, Proto};

impl<E: Env> Proto<E> {
    /// Queues the link for sending, if it has anything to send.
    pub(super) fn mark_ready(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        if link.becomes_ready() {
            self.ready.push_back(id);
        }
        if link.counts() {
            self.recount(id);
        }
    }

    /// Sets the longest payload that the link's transport prefers.
    pub(crate) fn set_chunk(&mut self, id: LinkId, len: usize) {
        if let Some(link) = self.links.get_mut(id) {
            link.set_chunk(len);
        }
    }

    /// The link does not leave this host.
    pub(crate) fn set_local(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(id) {
            link.local = true;
        }
    }

    /// The link's transport can execute [`Output::StartRma`](super::Output::StartRma).
    #[cfg_attr(not(any(test, feature = "verbs")), allow(dead_code, reason = "for transports that have devices"))]
    pub(crate) fn set_rma_capable(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(id) {
            link.rma_capable = true;
        }
    }

    /// The peer has read a payload that was exported to it.
    pub(crate) fn handle_returned(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.returned();
        if link.closing {
            self.touch_closing(id);
        } else {
            self.mark_ready(id);
        }
    }

    /// A transmit is out; its buffer is reused. If the payload was `exported`, the peer is still reading it.
    pub(crate) fn handle_sent(&mut self, id: LinkId, bytes: Vec<u8>, exported: bool) {
        let Some(link) = self.links.get_mut(id) else { return };
        link.sent(bytes, exported);
        if link.closing {
            self.touch_closing(id);
        } else {
            self.mark_ready(id);
        }
    }

    /// Continues to close a link, which ends once it is flushed. The peer ends an open one, see
    /// [`PeerLink::goodbye`](super::link::PeerLink::goodbye); the engine limits the time for that.
    pub(super) fn touch_closing(&mut self, id: LinkId) {
        let link = &mut self.links[id];
        if link.is_flushed() && !link.goodbye {
            if !link.is_open() {
                return self.close(id, Failure::Finalized);
            }
            link.goodbye = true;
            link.queue_frame(&Message::Goodbye, &[]);
        }
        self.mark_ready(id);
    }

    /// How many bytes the peer's system has acknowledged, as [`AskAcknowledged`](super::Output::AskAcknowledged) asked; 0 when
    /// all of them are. If the number has grown, the peer is alive, though its messages may wait behind what is sent to it.
    pub(crate) fn handle_acknowledged(&mut self, id: LinkId, bytes: u64, now: Instant) {
        let Some(link) = self.links.get_mut(id) else { return };
        // The bytes were acknowledged at some time after the last check.
        if let Some((_, asked)) = link.acknowledged.filter(|(before, _)| bytes > *before) {
            link.last_heard = link.last_heard.max(asked);
        }
        link.acknowledged = (bytes > 0).then_some((bytes, now));
    }
}
