//! Lengths around every internal limit, in each role.

use calomel::{Bulk, BulkMode, Engine, Request, Segments};

use crate::support::*;

/// Lengths where the implementation changes: eager, one piece, one record, one step, one chunk; the ring; one message.
const LIMITS: [usize; 12] = [
    4 << 10,
    8 << 10,
    16 << 10,
    (32 << 10) - 64,
    32 << 10,
    64 << 10,
    96 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
];

/// The limits, one more and one less, and a few near them, since headers take some bytes.
fn lens() -> Vec<usize> {
    let mut lens: Vec<usize> = LIMITS.iter().flat_map(|limit| [limit - 8, limit - 1, *limit, limit + 1, limit + 56]).collect();
    lens.extend([0, 1, 63, 64, 65]);
    // The body length that, with the header, gives a message of this length.
    lens.extend((1..40).map(|less| (32 << 10) - 64 - less));
    lens
}

struct Pair {
    server: Engine,
    client: Engine,
}

fn pair(carrier: Carrier) -> Pair {
    over(carrier, || ());
    let (server, client) = (server(), client());
    server.define("swallow", |_: &Request, bytes: Vec<u8>| (bytes.len(), sum(&bytes))).unwrap();
    server.define("big", |_: &Request, (seed, len): (u64, usize)| pattern(seed, len)).unwrap();
    Pair { server, client }
}

/// Depends on the position of each byte.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)))
}

fn calls_with_messages_around_every_limit(carrier: Carrier) {
    let Pair { server, client } = pair(carrier);
    let to = client.lookup(server.address()).unwrap();
    let swallow = client.procedure::<Vec<u8>, (usize, u64)>("swallow");
    let big = client.procedure::<(u64, usize), Vec<u8>>("big");
    for (seed, len) in lens().into_iter().enumerate() {
        let bytes = pattern(seed as u64, len);
        assert_eq!(swallow.on(&to).call(&bytes).unwrap(), (len, sum(&bytes)), "{len}");
        assert!(big.on(&to).call(&(seed as u64, len)).unwrap() == bytes, "{len}");
    }
    assert_eq!(to.transport(), Some(calomel::Transport::Shm));
}

fn transfers_around_every_limit(carrier: Carrier) {
    let Pair { server, client } = pair(carrier);
    let to = client.lookup(server.address()).unwrap();
    let room = 3 << 20;
    let source = server.expose(pattern(1, room), BulkMode::ReadWrite).unwrap();
    let mut shared = server.alloc(room);
    shared.copy_from_slice(&pattern(1, room));
    let shared = server.expose(shared, BulkMode::ReadWrite).unwrap();
    let whole = pattern(1, room);
    for len in lens() {
        // At an unaligned offset.
        let part = 13..13 + len;
        let fresh = pattern(len as u64, len);
        let check = |bulk: Bulk, take: &dyn Fn(&mut [u8])| {
            let bulk = bulk.slice(part.start, len).unwrap();
            let mut copy = vec![0u8; len];
            assert_eq!(bulk.on(&to).pull_into(&mut copy).unwrap(), len);
            assert!(copy == whole[part.clone()], "pulled {len}");
            assert_eq!(bulk.on(&to).push_from(&fresh).unwrap(), len);
            let mut now = vec![0u8; room];
            take(&mut now);
            assert!(now[..part.start] == whole[..part.start] && now[part.end..] == whole[part.end..], "pushed {len}: too much");
            assert!(now[part.clone()] == fresh, "pushed {len}");
        };
        check(source.bulk(), &|now| {
            source.read_at(0, now).unwrap();
            source.write_at(0, &whole).unwrap();
        });
        check(shared.bulk(), &|now| {
            shared.read_at(0, now).unwrap();
            shared.write_at(0, &whole).unwrap();
        });
    }
}

fn transfers_between_different_layouts(carrier: Carrier) {
    let Pair { server, client } = pair(carrier);
    let to = client.lookup(server.address()).unwrap();
    let mut random = Random(0x5ae);
    for round in 0..60 {
        // Many short pieces, few long ones, and an empty one now and then; the other side has another layout.
        let most = [3, 100, 600, 5000, 70_000, 400_000][round % 6];
        let mut shape = |total: usize| {
            let (mut lens, mut left) = (Vec::new(), total);
            while left > 0 {
                let len = random.below(most + 1).min(left);
                lens.push(len);
                left -= len;
            }
            lens
        };
        let total = most * 7 + 1;
        let (theirs, ours) = (shape(total), shape(total));
        let segments = |lens: &[usize], seed: u64| Segments(lens.iter().map(|len| pattern(seed, *len)).collect::<Vec<_>>());
        let theirs = segments(&theirs, 3);
        let flat = theirs.0.concat();
        let exposed = server.expose(theirs, BulkMode::ReadWrite).unwrap();
        let local = client.expose(segments(&ours, 4), BulkMode::ReadWrite).unwrap();
        let (result, local) = exposed.bulk().on(&to).start_pull_into(local).wait();
        assert_eq!(result.unwrap(), total);
        let local = local.reclaim();
        assert!(local.0.concat() == flat, "round {round}");
        let ours = segments(&ours, 5);
        let flat = ours.0.concat();
        let local = client.expose(ours, BulkMode::ReadOnly).unwrap();
        let (result, _local) = exposed.bulk().on(&to).start_push_from(local).wait();
        assert_eq!(result.unwrap(), total);
        assert!(exposed.reclaim().0.concat() == flat, "round {round}");
    }
}

macro_rules! both_paths {
    ($($test:ident),*) => {
        both_paths!(@ by_the_system, Shm, $($test),*);
        both_paths!(@ by_the_ring, ShmNoKernelCopy, $($test),*);
    };
    (@ $module:ident, $carrier:ident, $($test:ident),*) => {
        mod $module {
            use crate::support::*;
            $(
                #[test]
                fn $test() {
                    let _watchdog = Watchdog::start(concat!("sizes::", stringify!($test)));
                    super::$test(Carrier::$carrier);
                }
            )*
        }
    };
}

both_paths!(calls_with_messages_around_every_limit, transfers_around_every_limit, transfers_between_different_layouts);
