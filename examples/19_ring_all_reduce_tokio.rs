//! The all-reduce of the previous example on tokio: each rank is a task, and no thread waits. A future can be dropped at any
//! time, so it can't borrow memory that a peer reads: buffers are exposed by value, and come back.
//!
//! `cargo run --release --features tokio --example 19_ring_all_reduce_tokio [RANKS]`

use std::env;
use std::error::Error;
use std::mem::take;
use std::time::{Duration, Instant};

use calomel::{Address, Bulk, BulkMode, Endpoint, Engine, Procedure, Responder};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::task::JoinSet;
use tokio::time::timeout;

const LENGTH: usize = (64 << 20) / size_of::<f32>();
/// Far more than a step takes: a rank that waits for longer has lost its neighbour.
const PATIENCE: Duration = Duration::from_secs(20);

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome {
    let size = env::args().nth(1).map_or(Ok(4), |ranks| ranks.parse())?;
    let ranks = (0..size).map(|_| Rank::start()).collect::<calomel::Result<Vec<_>>>()?;
    let addresses: Vec<Address> = ranks.iter().map(|rank| rank.engine.address()).collect();

    let mut tasks = JoinSet::new();
    for (rank, ring) in ranks.into_iter().enumerate() {
        tasks.spawn(check(rank, ring, addresses.clone()));
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome??;
    }
    println!("each of {size} ranks has the sums of {} MiB", (LENGTH * size_of::<f32>()) >> 20);
    Ok(())
}

async fn check(rank: usize, mut ring: Rank, addresses: Vec<Address>) -> Outcome {
    let size = addresses.len();
    let next = ring.engine.lookup_async(&addresses[(rank + 1) % size]).await?;
    let part = |part| LENGTH * part / size..LENGTH * (part + 1) / size;
    let number = |index: usize| (rank * (index % 1000)) as f32;
    let mut parts: Vec<Vec<f32>> = (0..size).map(|index| part(index).map(number).collect()).collect();

    let begin = Instant::now();
    ring.all_reduce(rank, &next, &mut parts).await?;
    println!("rank {rank} took {:?}", begin.elapsed());

    let factor = size * (size - 1) / 2;
    assert!(parts.iter().flatten().enumerate().all(|(index, sum)| *sum == (factor * (index % 1000)) as f32));
    Ok(())
}

struct Rank {
    engine: Engine,
    /// Tells the next rank that it may pull. The call ends when it has.
    offer: Procedure<Bulk, ()>,
    /// What the rank before this one offers.
    offers: UnboundedReceiver<(Responder<()>, Bulk)>,
}

impl Rank {
    fn start() -> calomel::Result<Rank> {
        let engine = Engine::server("tcp://127.0.0.1:0")?;
        let (offered, offers) = mpsc::unbounded_channel();
        engine.define_deferred("offer", move |reply: Responder<()>, part: Bulk| {
            // A reply that is dropped fails the call.
            offered.send((reply, part)).ok();
        })?;
        Ok(Rank { offer: engine.procedure("offer"), engine, offers })
    }

    /// First each rank adds what it receives, and has the sums of one part in the end; then those go round.
    async fn all_reduce(&mut self, rank: usize, next: &Endpoint, parts: &mut [Vec<f32>]) -> Outcome {
        let size = parts.len();
        let mut spare = vec![0.0; parts.iter().map(Vec::len).max().unwrap_or_default()];
        for step in 0..2 * (size - 1) {
            let (offered, wanted) = ((rank + 2 * size - step) % size, (rank + 2 * size - step - 1) % size);
            spare.resize(parts[wanted].len(), 0.0);
            let received;
            (parts[offered], received) = self.exchange(next, take(&mut parts[offered]), take(&mut spare)).await?;
            if step < size - 1 {
                parts[wanted].iter_mut().zip(&received).for_each(|(sum, number)| *sum += number);
                spare = received;
            } else {
                spare = std::mem::replace(&mut parts[wanted], received);
            }
        }
        Ok(())
    }

    /// Offers memory to the next rank, and meanwhile pulls from the one before. Returns both buffers when both are pulled.
    async fn exchange(&mut self, next: &Endpoint, offered: Vec<f32>, wanted: Vec<f32>) -> Outcome<(Vec<f32>, Vec<f32>)> {
        let offered = self.engine.expose_read_only(offered)?;
        let wanted = self.engine.expose(wanted, BulkMode::WriteOnly)?;
        let taken = self.offer.on(next).start(&offered.bulk())?;
        let (reply, part) = timeout(PATIENCE, self.offers.recv()).await?.ok_or("the engine has ended")?;
        let (pulled, wanted) = part.on(reply.request().endpoint()).start_pull_into(wanted).await;
        pulled?;
        reply.respond(&())?;
        taken.await?;
        Ok((offered.reclaim(), wanted.reclaim()))
    }
}
