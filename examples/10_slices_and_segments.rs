//! Several buffers can form one bulk, whose offsets, in bytes, run through all of them. A slice of a bulk is a bulk too, and
//! can be sent like one.
//!
//! `cargo run --example 10_slices_and_segments`

use calomel::{Bulk, BulkMode, Engine, Error, Request, Segments};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;
    server.define_try("double", double)?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let double = client.procedure::<Bulk, [u32; 3]>("double");

    let header = vec![1u32, 2, 3];
    let body = vec![10u32, 20, 30, 40];
    let message = client.expose(Segments(vec![header, body]), BulkMode::ReadWrite)?;
    let bulk = message.bulk();
    assert_eq!((bulk.segment_count(), bulk.len()), (2, 28));

    // 12 bytes from offset 8 on: the last word of the header, the first two of the body.
    let answer = double.on(&peer).call(&bulk.slice(8, 12)?)?;
    println!("the server was given {answer:?}");
    assert_eq!(answer, [3, 10, 20]);

    let error = bulk.slice(20, 12).expect_err("the bulk ends at 28");
    println!("{error}");
    assert!(matches!(error, Error::OutOfRange { .. }));

    let Segments(message) = message.reclaim();
    println!("afterwards the message is {message:?}");
    assert_eq!(message, [vec![1, 2, 6], vec![20, 40, 30, 40]]);
    Ok(())
}

/// Doubles three words in the caller's memory, and returns the old ones. It need not know which buffers they are in.
fn double(request: &Request, words: Bulk) -> calomel::Result<[u32; 3]> {
    let remote = words.on(request.endpoint());
    let mut found = [0u32; 3];
    remote.pull_into(&mut found[..])?;
    remote.push_from(&found.map(|word| word * 2)[..])?;
    Ok(found)
}
