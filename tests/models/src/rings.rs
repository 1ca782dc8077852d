//! Models of the two ends of a shared-memory link, as two processes have them: records arrive, sleeping ends are woken by the
//! doorbell, and exported memory is no longer read once it has been revoked.

use std::sync::Arc;

use loom::thread;

use crate::memory::{Region, Slice};
use crate::model;
use crate::transport::PayloadStatus;
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
            far.until(|end| end.received.frames.len() == usize::from(COUNT));
            assert!(far.received.frames.iter().copied().eq(0..COUNT));
        });
        for number in 0..COUNT {
            if !near.send(vec![number; 64], None) {
                near.until(End::is_flushed);
            }
        }
        receiver.join().unwrap();
    });
}

/// As above, with records behind which the sender clears the lines that are free.
pub(crate) fn injected_records_arrive_in_order() {
    const COUNT: u8 = 5;
    model(2, || {
        let (mut near, mut far) = pair(None);
        let receiver = thread::spawn(move || {
            far.until(|end| end.received.frames.len() == usize::from(COUNT));
            assert!(far.received.frames.iter().copied().eq(0..COUNT));
        });
        for number in 0..COUNT {
            if !near.inject(&[number; 64]) && !near.send(vec![number; 64], None) {
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
                far.until(|end| end.received.frames.len() == number);
                assert!(far.send(vec![7], None));
            }
        });
        for number in 1..=2 {
            assert!(near.send(vec![1], None));
            near.until(|end| end.received.frames.len() == number);
        }
        server.join().unwrap();
    });
}

/// As above, with records that are written under a lock; the peer is woken after it.
pub(crate) fn injected_response_wakes_the_sleeping_end() {
    model(3, || {
        let (mut near, mut far) = pair(None);
        let server = thread::spawn(move || {
            for number in 1..=2 {
                far.until(|end| end.received.frames.len() == number);
                assert!(far.inject(&[7]));
            }
        });
        for number in 1..=2 {
            assert!(near.inject(&[1]));
            near.until(|end| end.received.frames.len() == number);
        }
        server.join().unwrap();
    });
}

struct Loaned {
    memory: Arc<Watched>,
    region: Arc<Region>,
    near: End,
    reader: thread::JoinHandle<Option<PayloadStatus>>,
}

/// A frame whose payload is on loan, and a peer that reads it.
fn start_loan() -> Loaned {
    let region = Region::from_vec(vec![0; LARGE]);
    start_loan_of(Slice::whole(&region))
}

fn start_loan_of(payload: Slice) -> Loaned {
    let memory = Arc::new(Watched::default());
    let region = payload.region.clone();
    let (mut near, mut far) = pair(Some(&memory));
    far.received.target = Some(Region::from_vec(vec![0; LARGE]));
    assert!(near.send(vec![1], Some(payload)));
    let kept = memory.clone();
    let reader = thread::spawn(move || {
        let _kept = kept;
        far.until(|end| end.received.lost || !end.received.arrived.is_empty());
        far.received.arrived.first().copied()
    });
    Loaned { memory, region, near, reader }
}

pub(crate) fn no_read_after_reclaim() {
    model(4, || {
        let loaned = start_loan();
        loaned.region.close();
        loaned.memory.write();
        assert!(matches!(loaned.reader.join().unwrap(), Some(PayloadStatus::Whole | PayloadStatus::SourceGone)));
    });
}

/// The owner waits until the reader has finished.
pub(crate) fn loan_ends_when_the_reader_has_finished() {
    model(4, || {
        let mut loaned = start_loan();
        loaned.near.until(|end| end.received.returned == 1);
        loaned.memory.write();
        assert_eq!(loaned.reader.join().unwrap(), Some(PayloadStatus::Whole));
    });
}

/// Both at once: by a thread that drives, and by one that reclaims the memory.
pub(crate) fn end_of_a_loan_and_reclaim_can_coincide() {
    model(3, || {
        let mut loaned = start_loan();
        let (region, memory) = (loaned.region.clone(), loaned.memory.clone());
        let owner = thread::spawn(move || {
            region.close();
            memory.write();
        });
        loaned.near.until(|end| end.received.returned == 1);
        owner.join().unwrap();
        loaned.reader.join().unwrap();
    });
}

/// The link ends while the loan is read, or before; then the memory is reclaimed.
pub(crate) fn end_of_a_link_ends_its_loans() {
    model(3, || {
        let mut loaned = start_loan();
        let (region, memory) = (loaned.region.clone(), loaned.memory.clone());
        let owner = thread::spawn(move || {
            region.close();
            memory.write();
        });
        loaned.near.close();
        owner.join().unwrap();
        loaned.reader.join().unwrap();
    });
}

/// The loan is withdrawn, and the owner writes again, without waiting for the reader: the reader gets the old content, or
/// discards what it has read.
pub(crate) fn read_after_withdrawal_is_discarded() {
    model(4, || {
        let payload = Slice::whole(&Region::from_vec(vec![0; LARGE])).for_one_operation();
        let loaned = start_loan_of(payload.clone());
        payload.end();
        loaned.region.withdraw();
        loaned.memory.change();
        let status = loaned.reader.join().unwrap();
        assert!(status == Some(PayloadStatus::SourceGone) || !loaned.memory.was_read_changed(), "{status:?}");
    });
}
