//! Ring all-reduce: each of N engines has 64 MiB of numbers, and afterwards each has the sums. In every step a rank offers one
//! part of its numbers to the next rank, and pulls one from the rank before it, straight out of its memory. Here the ranks are
//! threads of one process; across machines only their addresses differ.
//!
//! `cargo run --release --example 18_ring_all_reduce [RANKS]`

use std::env;
use std::error::Error;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Address, Bulk, Endpoint, Engine, Procedure, Responder};

const LENGTH: usize = (64 << 20) / size_of::<f32>();
/// Far more than a step takes: a rank that waits for longer has lost its neighbour.
const PATIENCE: Duration = Duration::from_secs(20);

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    let size = env::args().nth(1).map_or(Ok(4), |ranks| ranks.parse())?;
    let ranks = (0..size).map(|_| Rank::start()).collect::<calomel::Result<Vec<_>>>()?;
    let addresses: Vec<Address> = ranks.iter().map(|rank| rank.engine.address()).collect();

    thread::scope(|threads| {
        let addresses = &addresses;
        let work = |(rank, ring): (usize, Rank)| threads.spawn(move || check(rank, &ring, addresses));
        let started: Vec<_> = ranks.into_iter().enumerate().map(work).collect();
        started.into_iter().try_for_each(|rank| rank.join().expect("a rank panicked"))
    })?;
    println!("each of {size} ranks has the sums of {} MiB", (LENGTH * size_of::<f32>()) >> 20);
    Ok(())
}

fn check(rank: usize, ring: &Rank, addresses: &[Address]) -> Outcome {
    let size = addresses.len();
    let next = ring.engine.lookup(&addresses[(rank + 1) % size])?;
    let mut numbers: Vec<f32> = (0..LENGTH).map(|index| (rank * (index % 1000)) as f32).collect();

    let begin = Instant::now();
    ring.all_reduce(rank, size, &next, &mut numbers)?;
    println!("rank {rank} took {:?}", begin.elapsed());

    let factor = size * (size - 1) / 2;
    assert!(numbers.iter().enumerate().all(|(index, sum)| *sum == (factor * (index % 1000)) as f32));
    Ok(())
}

struct Rank {
    engine: Engine,
    /// Tells the next rank that it may pull. The call ends when it has.
    offer: Procedure<Bulk, ()>,
    /// What the rank before this one offers. The thread that has the memory answers, not the handler.
    offers: Receiver<(Responder<()>, Bulk)>,
}

impl Rank {
    fn start() -> calomel::Result<Rank> {
        let engine = Engine::server("tcp://127.0.0.1:0")?;
        let (offered, offers) = mpsc::channel();
        engine.define_deferred("offer", move |reply: Responder<()>, part: Bulk| {
            // A reply that is dropped fails the call.
            offered.send((reply, part)).ok();
        })?;
        Ok(Rank { offer: engine.procedure("offer"), engine, offers })
    }

    /// First each rank adds what it receives, and has the sums of one part in the end; then those go round.
    fn all_reduce(&self, rank: usize, size: usize, next: &Endpoint, numbers: &mut [f32]) -> Outcome {
        let length = numbers.len();
        let part = |step: usize| {
            let part = (rank + 2 * size - step) % size;
            length * part / size..length * (part + 1) / size
        };
        let mut received = vec![0.0; length.div_ceil(size)];
        for step in 0..2 * (size - 1) {
            let [offered, wanted] = numbers.get_disjoint_mut([part(step), part(step + 1)])?;
            if step < size - 1 {
                let received = &mut received[..wanted.len()];
                self.exchange(next, offered, received)?;
                wanted.iter_mut().zip(received).for_each(|(sum, number)| *sum += *number);
            } else {
                self.exchange(next, offered, wanted)?;
            }
        }
        Ok(())
    }

    /// Offers memory to the next rank, and meanwhile pulls from the one before. Returns when both have been pulled: then the
    /// memory can change again.
    fn exchange(&self, next: &Endpoint, offered: &[f32], wanted: &mut [f32]) -> Outcome {
        self.engine.scope(|scope| {
            let taken = self.offer.on(next).start(&scope.expose_read_only(offered)?)?;
            let Ok((reply, part)) = self.offers.recv_timeout(PATIENCE) else { return Ok(Err("nothing is offered".into())) };
            part.on(reply.request().endpoint()).pull_into(wanted)?;
            reply.respond(&())?;
            taken.wait().map(Ok)
        })?
    }
}
