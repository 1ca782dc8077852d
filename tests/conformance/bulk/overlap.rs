//! Overlapping copies within one exposure, compared with `copy_within` of a vector.

use calomel::{BulkMode, Exposed, Segments};

use crate::support::{Net, Random, block_on, pattern};

fn overlapping_copy_of_ten_mebibytes_equals_memmove(net: &Net) {
    const LEN: usize = 10 << 20;
    const HALF: usize = LEN / 2;
    const QUARTER: usize = LEN / 4;
    let engine = net.client();
    let data = pattern(3, LEN);
    for (from, to) in [(0, QUARTER), (QUARTER, 0), (0, 1), (1, 0), (HALF, HALF)] {
        for push in [false, true] {
            let exposed = engine.expose(data.clone(), BulkMode::ReadWrite).unwrap();
            let moved = if push {
                let target = exposed.bulk().slice(to, HALF).unwrap().origin(&engine).unwrap();
                target.push_from(exposed.slice(from, HALF).unwrap())
            } else {
                let source = exposed.bulk().slice(from, HALF).unwrap().origin(&engine).unwrap();
                source.pull_into(exposed.slice(to, HALF).unwrap())
            };
            assert_eq!(moved.unwrap(), HALF);
            let mut model = data.clone();
            model.copy_within(from..from + HALF, to);
            assert!(exposed.reclaim() == model, "{HALF} bytes from {from} to {to}, push: {push}");
        }
    }
}

fn overlapping_copies_of_segments_equal_memmove(net: &Net) {
    let engine = net.client();
    let mut random = Random(41);
    for round in 0..12 {
        // Sizes that divide neither each other nor a chunk, including empty segments.
        let segments: Vec<Vec<u8>> = (0..1 + random.below(7))
            .map(|_| {
                let most = [1, 7, 4099, 100_003, 700_001][random.below(5)];
                let len = random.below(most);
                pattern(random.next(), len)
            })
            .collect();
        let mut model = segments.concat();
        let mut exposed: Exposed<Segments<Vec<u8>>> = engine.expose(Segments(segments), BulkMode::ReadWrite).unwrap();
        for step in 0..8 {
            let len = random.below(model.len() + 1);
            let (from, to) = (random.below(model.len() - len + 1), random.below(model.len() - len + 1));
            let remote = |at: usize| exposed.bulk().slice(at, len).unwrap().origin(&engine).unwrap();
            let local = |at: usize| exposed.slice(at, len).unwrap();
            let moved = match random.below(4) {
                0 => remote(from).pull_into(local(to)),
                1 => remote(to).push_from(local(from)),
                2 => block_on(remote(from).start_pull_into(local(to))).0,
                _ => remote(to).start_push_from(local(from)).wait().0,
            };
            assert_eq!(moved.unwrap(), len);
            model.copy_within(from..from + len, to);
            let mut found = vec![0u8; model.len()];
            exposed.read_at(0, &mut found).unwrap();
            assert!(found == model, "round {round}, step {step}: {len} bytes from {from} to {to}");
        }
        // The whole of it, onto itself, with the exposure moved into the transfer.
        let whole = exposed.bulk().origin(&engine).unwrap();
        let (moved, back) = whole.start_pull_into(exposed).wait();
        assert_eq!(moved.unwrap(), model.len());
        exposed = back;
        assert!(exposed.reclaim().0.concat() == model);
    }
}

fn copy_through_a_plain_slice_equals_memmove(net: &Net) {
    // The borrow checker ensures it: an exposed buffer is owned by its exposure, or borrowed by its scope.
    let engine = net.client();
    let mut buffer = pattern(5, 1_000_000);
    let mut model = buffer.clone();
    engine
        .scope(|scope| {
            let bulk = scope.expose(&mut buffer[..], BulkMode::ReadWrite)?;
            let mut copy = vec![0u8; 600_000];
            bulk.slice(0, 600_000)?.origin(&engine)?.pull_into(&mut copy)?;
            bulk.slice(300_000, 600_000)?.origin(&engine)?.push_from(&copy)
        })
        .unwrap();
    model.copy_within(0..600_000, 300_000);
    assert!(buffer == model);
}

suite![
    overlapping_copy_of_ten_mebibytes_equals_memmove,
    overlapping_copies_of_segments_equal_memmove,
    copy_through_a_plain_slice_equals_memmove
];
