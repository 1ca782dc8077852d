//! Requests whose bodies do not arrive: no handler gets them.

use super::one_way::OneWayRequest;
use super::refusals::Dropped;
use super::wire::{Message, Status};
use super::{Env, Failure, LinkId, Proto, broken};

impl<E: Env> Proto<E> {
    /// The body of a request was corrupted in transit.
    pub(super) fn refuse_damaged(&mut self, id: LinkId, number: u64) {
        match self.one_way_arriving(id, number) {
            Some(OneWayRequest { procedure, .. }) => {
                self.handle_cancel(id, number);
                self.note_dropped(id, procedure, Dropped::Checksum);
            }
            None => self.refuse_arriving(id, number, Status::Checksum),
        }
    }

    /// The caller has revoked the memory of a request whose body is arriving, since it does not wait for the call any more. The
    /// body of a one-way call has no other owner than the call.
    pub(super) fn request_revoked(&mut self, id: LinkId, number: u64) -> Result<(), Failure> {
        if self.one_way_arriving(id, number).is_some() {
            return Err(broken("a one-way call whose body was revoked".into()));
        }
        self.refuse_arriving(id, number, Status::Revoked);
        Ok(())
    }

    fn one_way_arriving(&self, id: LinkId, number: u64) -> Option<OneWayRequest> {
        let key = *self.links[id].requests.get(&number)?;
        self.requests.get(key)?.one_way
    }

    /// Ends a request whose body is arriving. A caller that has cancelled it meanwhile ignores the answer.
    fn refuse_arriving(&mut self, id: LinkId, number: u64, status: Status) {
        if self.links[id].requests.contains_key(&number) {
            self.handle_cancel(id, number);
            self.links[id].queue_control(&Message::Refuse { call: number, status });
            self.mark_ready(id);
        }
    }
}
