//! Tests of regions: copies, gates, operations, loans.

use std::time::Instant;

use super::*;

fn region(parts: &mut [Vec<u8>]) -> Arc<Region> {
    // SAFETY: the tests keep the parts untouched while the region is used.
    unsafe { Region::new(parts.iter_mut().map(|p| (p.as_mut_ptr(), p.len()))) }
}

#[test]
fn copy_between_differently_segmented_regions_preserves_byte_order() {
    let mut a = [vec![1, 2, 3], vec![], vec![4, 5, 6, 7, 8]];
    let mut b = [vec![0; 1], vec![0; 6], vec![0; 4]];
    let (ra, rb) = (region(&mut a), region(&mut b));
    let source = Slice::whole(&ra).part(1, 6).unwrap();
    let target = Slice::whole(&rb).part(2, 6).unwrap();
    assert_eq!(copy(&source, &target), CopyOutcome::All);
    rb.close();
    assert_eq!(b.concat(), [0, 0, 2, 3, 4, 5, 6, 7, 0, 0, 0]);
}

#[test]
fn overlapping_copy_within_a_region_preserves_the_source() {
    let region = Region::from_vec((0..10).collect());
    let whole = Slice::whole(&region);
    assert_eq!(copy(&whole.part(0, 8).unwrap(), &whole.part(2, 8).unwrap()), CopyOutcome::All);
    assert_eq!(*region.take_message(), [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]);
}

/// splitmix64.
fn random(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)) as usize
}

#[test]
fn random_overlapping_copies_within_a_region_equal_copy_within() {
    let mut state = 17;
    // Miri is too slow for the long ones.
    let (rounds, sizes) = if cfg!(miri) { (6, 2) } else { (60, 4) };
    for round in 0..rounds {
        // Segments shorter than a chunk and longer, of sizes that don't divide each other, some of them empty.
        let most = [5, 1009, COPY_CHUNK + 7, 2 * COPY_CHUNK + 1001][round % sizes];
        let mut parts: Vec<Vec<u8>> = (0..1 + random(&mut state) % 5)
            .map(|_| (0..random(&mut state) % most).map(|i| (i * 7 + i / 251 + round) as u8).collect())
            .collect();
        let mut model = parts.concat();
        let region = region(&mut parts);
        for _ in 0..4 {
            let len = random(&mut state) % (model.len() + 1);
            let mut position = || random(&mut state) % (model.len() - len + 1);
            let (from, to) = (position(), position());
            let part = |at| Slice::whole(&region).part(at, len).unwrap();
            assert_eq!(copy(&part(from), &part(to)), CopyOutcome::All);
            model.copy_within(from..from + len, to);
        }
        region.close();
        assert!(parts.concat() == model, "round {round}");
    }
}

#[test]
fn access_through_a_closed_gate_is_refused() {
    let (a, b) = (Region::from_vec(vec![1; 4]), Region::from_vec(vec![2; 4]));
    a.close();
    assert_eq!(copy(&Slice::whole(&a), &Slice::whole(&b)), CopyOutcome::SourceClosed);
    assert_eq!(copy(&Slice::whole(&b), &Slice::whole(&a)), CopyOutcome::TargetClosed);
    assert!(!Slice::whole(&a).read(&mut [0; 4]));
    assert!(!Slice::whole(&a).write(&[0; 4]));
    assert_eq!(*b.take_message(), [2; 4]);
}

#[test]
fn access_for_an_ended_operation_is_refused() {
    let (a, b) = (Region::from_vec(vec![1; 4]), Region::from_vec(vec![2; 8]));
    let (over, part) = (Slice::whole(&a).for_one_operation(), Slice::whole(&b).part(4, 4).unwrap().for_one_operation());
    let rest = Slice::whole(&b).part(0, 4).unwrap();
    over.end();
    part.end();
    assert_eq!(copy(&over, &Slice::whole(&a)), CopyOutcome::SourceClosed);
    assert_eq!(copy(&over, &rest), CopyOutcome::SourceClosed);
    assert_eq!(copy(&rest, &over), CopyOutcome::TargetClosed);
    assert_eq!(copy(&part, &rest), CopyOutcome::SourceClosed);
    assert!(!over.read(&mut [0; 4]) && !over.write(&[0; 4]));
    // Other operations on the same memory go on.
    assert!(Slice::whole(&a).read(&mut [0; 4]));
    assert_eq!(*b.take_message(), [2; 8]);
}

/// A loan that counts its withdrawals; the tests never wait for it.
struct CountingLoan(Operation, Arc<std::sync::atomic::AtomicUsize>);

impl Loan for CountingLoan {
    fn wait(&self, _: Instant) {
        unreachable!("the memory is not reclaimed")
    }
    fn withdraw(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
    fn is_over(&self) -> bool {
        self.0.has_ended()
    }
}

#[test]
fn withdraw_ends_only_the_loans_of_ended_operations() {
    let region = Region::from_vec(vec![1; 4]);
    let [ended, other] = [(); 2].map(|()| Slice::whole(&region).for_one_operation());
    let withdrawn = [(); 3].map(|()| Arc::<std::sync::atomic::AtomicUsize>::default());
    for (slice, count) in [&ended.part(1, 2).unwrap(), &other, &Slice::whole(&region)].into_iter().zip(&withdrawn) {
        let loan = CountingLoan(slice.operation(), count.clone());
        slice.read_access().unwrap().lend(Arc::new(loan));
    }
    let counts = || withdrawn.each_ref().map(|count| count.load(Ordering::SeqCst));
    region.withdraw();
    assert_eq!(counts(), [0, 0, 0]);
    ended.end();
    region.withdraw();
    assert_eq!(counts(), [1, 0, 0]);
    // Closing the gate would wait for the loans.
    region.outside.lock().loans.clear();
}

#[test]
fn close_waits_for_the_access_in_progress() {
    let region = Region::from_vec(vec![0; 4]);
    let slice = Slice::whole(&region);
    let access = slice.write_access().unwrap();
    let closed = Arc::new(std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|s| {
        let (region, flag) = (&region, closed.clone());
        let closer = s.spawn(move || {
            region.close();
            flag.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        assert!(!closed.load(std::sync::atomic::Ordering::SeqCst));
        drop(access);
        closer.join().unwrap();
    });
    assert!(closed.load(std::sync::atomic::Ordering::SeqCst));
}

#[test]
fn part_out_of_range_or_overflowing_is_none() {
    let whole = Slice::whole(&Region::from_vec(vec![0; 8]));
    assert!(whole.part(8, 0).is_some());
    assert!(whole.part(9, 0).is_none());
    assert!(whole.part(usize::MAX, 2).is_none());
    assert!(whole.part(4, usize::MAX).is_none());
}
