//! A started transfer owns its buffer and returns it with the result. Several run concurrently; each is a future that can be
//! awaited alone or raced against others.
//!
//! `cargo run --example 11_started_transfers`

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};

use calomel::{Bulk, BulkMode, Engine, Request};

const PARTS: usize = 4;
const PART_WORDS: usize = 1 << 18;
const PART_BYTES: usize = PART_WORDS * size_of::<u32>();

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
    let (moved, first_words) = block_on(data.start_pull_into(first_words));
    println!("the first {} bytes are the words {:?}", moved?, first_words.reclaim());

    // All parts at once, each into a buffer of its own, handled in order of arrival.
    let mut transfers = Vec::new();
    for part in 0..PARTS {
        let buffer = client.expose(vec![0u32; PART_WORDS], BulkMode::WriteOnly)?;
        let source = data.slice(part * PART_BYTES, PART_BYTES)?;
        transfers.push((part, source.start_pull_into(buffer)));
    }
    let mut words = 0;
    while !transfers.is_empty() {
        let (part, (moved, buffer)) = block_on(first_finished(&mut transfers));
        assert_eq!(moved?, PART_BYTES);
        let buffer = buffer.reclaim();
        assert!(buffer.iter().copied().eq((part * PART_WORDS) as u32..((part + 1) * PART_WORDS) as u32));
        words += buffer.len();
    }
    println!("{PARTS} parts arrived, {words} words");
    assert_eq!(words, PARTS * PART_WORDS);
    Ok(())
}

/// Removes the first completed future from `futures`, and returns its key and output.
async fn first_finished<K: Copy, F: Future + Unpin>(futures: &mut Vec<(K, F)>) -> (K, F::Output) {
    let (index, output) = poll_fn(|context| {
        for (index, (_, future)) in futures.iter_mut().enumerate() {
            if let Poll::Ready(output) = Pin::new(future).poll(context) {
                return Poll::Ready((index, output));
            }
        }
        Poll::Pending
    })
    .await;
    (futures.swap_remove(index).0, output)
}

/// Drives one future on this thread, which sleeps while the future is pending.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
