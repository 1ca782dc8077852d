//! Random transfers between segments of different lengths, checked against a simple model: one vector of bytes per side.

use calomel::{BulkMode, Exposed, RemoteBulk, Segments};

use crate::support::{Net, Pair, Random, block_on, pattern};

const REGIONS: usize = 12;
const ROUNDS: usize = 40;

/// Exposed segments, and their expected bytes.
struct Side {
    exposed: Option<Exposed<Segments<Vec<u8>>>>,
    model: Vec<u8>,
}

impl Side {
    fn new(engine: &calomel::Engine, random: &mut Random) -> Side {
        // Mostly a few short segments, including empty ones; sometimes long ones of many chunks.
        let segments: Vec<Vec<u8>> = (0..1 + random.below(9))
            .map(|_| {
                let most = [1, 5, 100, 5000, 70_000, 600_000][random.below(6)];
                let len = random.below(most);
                pattern(random.next(), len)
            })
            .collect();
        let model = segments.concat();
        let exposed = engine.expose(Segments(segments), BulkMode::ReadWrite).unwrap();
        Side { exposed: Some(exposed), model }
    }

    fn exposed(&self) -> &Exposed<Segments<Vec<u8>>> {
        self.exposed.as_ref().unwrap()
    }

    /// A random range of it, which may be the whole, or empty at either end.
    fn range(&self, random: &mut Random) -> (usize, usize) {
        if random.below(5) == 0 {
            return (0, self.model.len());
        }
        let offset = random.below(self.model.len() + 1);
        (offset, random.below(self.model.len() - offset + 1))
    }
}

/// One transfer with a random API; returns the bytes transferred.
fn transfer(random: &mut Random, remote: &RemoteBulk, side: &mut Side, (offset, len): (usize, usize), pull: bool) -> usize {
    let whole = (offset, len) == (0, side.model.len());
    let slice = side.exposed().slice(offset, len).unwrap();
    match (random.below(4), pull) {
        (0, true) if whole => remote.pull_into(side.exposed()).unwrap(),
        (0, false) if whole => remote.push_from(side.exposed()).unwrap(),
        (1, true) if whole => {
            let (moved, back) = remote.start_pull_into(side.exposed.take().unwrap()).wait();
            side.exposed = Some(back);
            moved.unwrap()
        }
        (1, false) if whole => {
            let (moved, back) = remote.start_push_from(side.exposed.take().unwrap()).wait();
            side.exposed = Some(back);
            moved.unwrap()
        }
        (0, true) => remote.pull_into(&slice).unwrap(),
        (0, false) => remote.push_from(&slice).unwrap(),
        (1, true) => (remote >> &slice).unwrap(),
        (1, false) => (remote << &slice).unwrap(),
        (2, true) => block_on(remote.start_pull_into(slice)).0.unwrap(),
        (2, false) => remote.start_push_from(slice).wait().0.unwrap(),
        // Through plain memory.
        (_, true) => {
            let mut plain = vec![0u8; len];
            let moved = remote.pull_into(&mut plain).unwrap();
            side.exposed().write_at(offset, &plain[..moved]).unwrap();
            moved
        }
        (_, false) => {
            let mut plain = vec![0u8; len];
            side.exposed().read_at(offset, &mut plain).unwrap();
            remote.push_from(&plain).unwrap()
        }
    }
}

fn random_transfers_agree_with_the_model(net: &Net) {
    let seed = std::env::var("CALOMEL_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64);
    println!("CALOMEL_TEST_SEED={seed}");
    let mut random = Random(seed);
    let pair: Pair = net.pair();
    for region in 0..REGIONS {
        let mut theirs = Side::new(&pair.server, &mut random);
        let mut ours = Side::new(&pair.client, &mut random);
        for round in 0..ROUNDS {
            let (there, here) = (theirs.range(&mut random), ours.range(&mut random));
            // A slice of the bulk, made in one step or in two.
            let bulk = theirs.exposed().bulk();
            let bulk = if random.below(2) == 0 {
                bulk.slice(there.0, there.1).unwrap()
            } else {
                let first = random.below(there.0 + 1);
                bulk.slice(first, bulk.len() - first).unwrap().slice(there.0 - first, there.1).unwrap()
            };
            let remote = bulk.on(&pair.to_server);
            let pull = random.below(2) == 0;
            let moved = transfer(&mut random, &remote, &mut ours, here, pull);
            let less = there.1.min(here.1);
            assert_eq!(moved, less, "seed {seed}, region {region}, round {round}");
            let (far, near) = (&mut theirs.model[there.0..][..less], &mut ours.model[here.0..][..less]);
            if pull {
                near.copy_from_slice(far);
            } else {
                far.copy_from_slice(near);
            }
            // New bytes, now and then.
            if random.below(4) == 0 {
                let (len, seed) = (random.below(theirs.model.len() + 1).min(1000), random.next());
                let offset = random.below(theirs.model.len() - len + 1);
                let fresh = pattern(seed, len);
                theirs.exposed().write_at(offset, &fresh).unwrap();
                theirs.model[offset..offset + len].copy_from_slice(&fresh);
            }
            // Checks a random range of either side.
            let side = if random.below(2) == 0 { &theirs } else { &ours };
            let (offset, len) = side.range(&mut random);
            let mut part = vec![0u8; len];
            side.exposed().read_at(offset, &mut part).unwrap();
            assert!(part == side.model[offset..offset + len], "seed {seed}, region {region}, round {round}");
        }
        for (name, side) in [("theirs", theirs), ("ours", ours)] {
            let bytes = side.exposed.unwrap().reclaim().0.concat();
            assert!(bytes == side.model, "seed {seed}, region {region}: {name} differ");
        }
    }
}

suite![random_transfers_agree_with_the_model];
