//! A started transfer owns its buffer and returns it with the result. Several run concurrently. Each can be waited for, and is
//! a future that any executor can await.
//!
//! `cargo run --example 12_started_transfers`

use calomel::{Bulk, BulkMode, Engine, Request, Transfer};

const PARTS: usize = 4;
const PART_WORDS: usize = 1 << 18;

fn main() -> calomel::Result<()> {
    // The server's data set: word i is i. It returns the bulk to any caller.
    let server = Engine::server("tcp://127.0.0.1:0")?;
    let data = server.expose_read_only((0..(PARTS * PART_WORDS) as u32).collect::<Vec<_>>())?;
    let bulk = data.bulk();
    server.define("data", move |_: &Request, (): ()| bulk.clone())?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let data = client.procedure::<(), Bulk>("data").on(&peer).call(&())?.on(&peer);

    // A single transfer.
    let first_words = client.expose(vec![0u32; 3], BulkMode::WriteOnly)?;
    let (moved, first_words) = data.start_pull_into(first_words).wait();
    println!("the first {} bytes are the words {:?}", moved?, first_words.reclaim());

    // All parts at once, each into a buffer of its own, handled in order of arrival.
    let mut transfers = Vec::new();
    for part in 0..PARTS {
        let buffer = client.expose(vec![0u32; PART_WORDS], BulkMode::WriteOnly)?;
        transfers.push(data.slice_of::<u32>(part * PART_WORDS, PART_WORDS)?.start_pull_into(buffer));
    }
    let mut words = Vec::new();
    while !transfers.is_empty() {
        let (_, (moved, buffer)) = Transfer::wait_any(&mut transfers);
        assert_eq!(moved?, size_of::<[u32; PART_WORDS]>());
        words.extend(buffer.reclaim());
    }
    println!("{PARTS} parts arrived, {} words", words.len());
    words.sort_unstable();
    assert!(words.into_iter().eq(0..(PARTS * PART_WORDS) as u32));
    Ok(())
}
