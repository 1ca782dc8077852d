//! Models of the two ends of a shared-memory link, as two processes have them: records arrive, sleeping ends are woken by the
//! doorbell, and exported memory is no longer read once it has been revoked.

use std::sync::Arc;

use loom::thread;

use crate::memory::{Region, Slice};
use crate::model;
use crate::transport::Landed;
use crate::transport::shm::{End, pair};
use crate::watched::Watched;

/// Only payloads above 8 KiB travel by loans.
const LARGE: usize = 9 << 10;

/// Records of two lines, more than fit: the sender waits for room, the receiver for records.
pub(crate) fn records_arrive_in_order() {
    const COUNT: u8 = 5;
    model(2, || {
        let (mut near, mut far) = pair(None);
        let receiver = thread::spawn(move || {
            far.until(|end| end.heard.frames.len() == usize::from(COUNT));
            assert!(far.heard.frames.iter().copied().eq(0..COUNT));
        });
        for number in 0..COUNT {
            if !near.send(vec![number; 64], None) {
                near.until(End::is_flushed);
            }
        }
        receiver.join().unwrap();
    });
}

/// Both send requests and responses, and sleep in between.
pub(crate) fn response_wakes_the_sleeping_end() {
    model(3, || {
        let (mut near, mut far) = pair(None);
        let server = thread::spawn(move || {
            for number in 1..=2 {
                far.until(|end| end.heard.frames.len() == number);
                assert!(far.send(vec![7], None));
            }
        });
        for number in 1..=2 {
            assert!(near.send(vec![1], None));
            near.until(|end| end.heard.frames.len() == number);
        }
        server.join().unwrap();
    });
}

struct Lent {
    memory: Arc<Watched>,
    region: Arc<Region>,
    near: End,
    reader: thread::JoinHandle<Option<Landed>>,
}

/// A frame whose payload is on loan, and a peer that reads it.
fn lend() -> Lent {
    let region = Region::from_vec(vec![0; LARGE]);
    lend_of(Slice::whole(&region))
}

fn lend_of(payload: Slice) -> Lent {
    let memory = Arc::new(Watched::default());
    let region = payload.region.clone();
    let (mut near, mut far) = pair(Some(&memory));
    far.heard.target = Some(Region::from_vec(vec![0; LARGE]));
    assert!(near.send(vec![1], Some(payload)));
    let kept = memory.clone();
    let reader = thread::spawn(move || {
        let _kept = kept;
        far.until(|end| end.heard.lost || !end.heard.landed.is_empty());
        far.heard.landed.first().copied()
    });
    Lent { memory, region, near, reader }
}

pub(crate) fn no_read_after_reclaim() {
    model(4, || {
        let lent = lend();
        lent.region.close();
        lent.memory.write();
        assert!(matches!(lent.reader.join().unwrap(), Some(Landed::Whole | Landed::SourceGone)));
    });
}

/// The owner waits until the reader has finished.
pub(crate) fn loan_ends_when_the_reader_has_finished() {
    model(4, || {
        let mut lent = lend();
        lent.near.until(|end| end.heard.returned == 1);
        lent.memory.write();
        assert_eq!(lent.reader.join().unwrap(), Some(Landed::Whole));
    });
}

/// Both at once: by a thread that drives, and by one that reclaims the memory.
pub(crate) fn end_of_a_loan_and_reclaim_can_coincide() {
    model(3, || {
        let mut lent = lend();
        let (region, memory) = (lent.region.clone(), lent.memory.clone());
        let owner = thread::spawn(move || {
            region.close();
            memory.write();
        });
        lent.near.until(|end| end.heard.returned == 1);
        owner.join().unwrap();
        lent.reader.join().unwrap();
    });
}

/// The link ends while the loan is read, or before; then the memory is reclaimed.
pub(crate) fn end_of_a_link_ends_its_loans() {
    model(3, || {
        let mut lent = lend();
        let (region, memory) = (lent.region.clone(), lent.memory.clone());
        let owner = thread::spawn(move || {
            region.close();
            memory.write();
        });
        lent.near.close();
        owner.join().unwrap();
        lent.reader.join().unwrap();
    });
}

/// The loan is withdrawn, and the owner writes again, without waiting for the reader: the reader gets the old content, or
/// discards what it has read.
pub(crate) fn read_after_withdrawal_is_discarded() {
    model(4, || {
        let payload = Slice::whole(&Region::from_vec(vec![0; LARGE])).for_one_operation();
        let lent = lend_of(payload.clone());
        payload.end();
        lent.region.withdraw();
        lent.memory.change();
        let landed = lent.reader.join().unwrap();
        assert!(landed == Some(Landed::SourceGone) || !lent.memory.was_read_changed(), "{landed:?}");
    });
}
