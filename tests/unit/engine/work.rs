//! Work per byte of what a peer sends inside calls: arguments, and the bulks in them. (The protocol's own tests cover its
//! messages about calls and transfers.)

use crate::proto::{LeaseRange, LinkId};
use crate::rpc;
use crate::tests::measure::{linear, processor_time};
use crate::{Bulk, Engine};

/// Encoded bulks, with these tokens and leases, with content or without.
fn bulks(count: u64, token: impl Fn(u64) -> u128, lease: impl Fn(u64) -> Option<u32>, content: bool) -> Vec<u8> {
    let bulk = |n: u64| {
        let mut bytes = [&token(n).to_le_bytes()[..], &[0, 8, 5].map(u64::to_le_bytes).concat()].concat();
        bytes.extend([1, lease(n).unwrap_or(u32::MAX)].map(u32::to_le_bytes).concat());
        // May be read; with content behind no addresses.
        bytes.extend([0, u8::from(content), 0]);
        bytes.extend(if content { vec![7u8; 8] } else { Vec::new() });
        bytes
    };
    postcard::to_stdvec(&(0..count).map(bulk).collect::<Vec<_>>()).unwrap()
}

#[test]
fn decoding_bulks_takes_linear_time() {
    let engine = Engine::client("loop").unwrap();
    let attack = |what: &str, token: fn(u64) -> u128, lease: fn(u64) -> Option<u32>| {
        linear(what, 4_000, |n| {
            let bytes = bulks(n, token, lease, true);
            let leases = LeaseRange { first: 0, count: n as u32 };
            let begin = processor_time();
            let decode = || rpc::decode::<Vec<Bulk>>(&bytes).unwrap();
            let decoded = crate::engine::decoding(engine.shared(), LinkId::default(), leases, decode);
            assert_eq!(decoded.len() as u64, n);
            drop(decoded);
            processor_time() - begin
        });
    };
    attack("bulks of one token", |_| 7, |n| Some(n as u32));
    attack("bulks of two tokens in turn", |n| (n % 2).into(), |n| Some(n as u32));
    attack("bulks of as many tokens", u128::from, |n| Some(n as u32));
    attack("bulks of 64 tokens", |n| (n % 64).into(), |n| Some(n as u32));
    attack("bulks that name every other lease", |_| 7, |n| n.is_multiple_of(2).then_some(n as u32));
    attack("bulks that name one lease", |_| 7, |_| Some(0));
    engine.finalize().unwrap();
}
