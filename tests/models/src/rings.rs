//! Two ends of a shared-memory link, as two processes have them: what is said arrives, whoever sleeps is rung for, and what
//! is lent is not read any more when it has been taken back.

use std::sync::Arc;

use loom::thread;

use crate::memory::{Region, Slice};
use crate::model;
use crate::transport::Landed;
use crate::transport::shm::{End, pair};
use crate::watched::Watched;

/// Loans are for more than 8 KiB.
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

/// Both ask and answer, and sleep in between.
pub(crate) fn nobody_sleeps_through_an_answer() {
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

/// A frame with a payload that is lent, and a peer that reads it.
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

pub(crate) fn nothing_is_read_after_memory_is_taken_back() {
    model(4, || {
        let lent = lend();
        lent.region.close();
        lent.memory.write();
        assert!(matches!(lent.reader.join().unwrap(), Some(Landed::Whole | Landed::SourceGone)));
    });
}

/// The owner waits for the reader to be done.
pub(crate) fn what_was_lent_comes_back() {
    model(4, || {
        let mut lent = lend();
        lent.near.until(|end| end.heard.returned == 1);
        lent.memory.write();
        assert_eq!(lent.reader.join().unwrap(), Some(Landed::Whole));
    });
}

/// Both at once: by one thread that drives, and by one that takes the memory back.
pub(crate) fn what_comes_back_is_taken_back() {
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

/// The link ends while what was lent is read, or before; then the memory is taken back.
pub(crate) fn the_end_of_a_link_ends_what_it_lent() {
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

/// The operation that it was lent for is over, and the owner goes on writing, without waiting for anybody: what the reader gets is
/// what was there before, or it knows better.
pub(crate) fn what_is_read_after_a_withdrawal_is_thrown_away() {
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
