//! A man in the middle for tests over tcp: a proxy that flips bits of a connection or cuts it off.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::Random;

/// The faults in one direction of a connection.
#[derive(Clone, Debug)]
pub struct Fate {
    /// The average distance in bytes between two bits that are flipped; 0 for no flips.
    pub flip_every: usize,
    /// One bit of this byte is flipped.
    pub flip_at: Option<usize>,
    /// After so many bytes nothing more is forwarded, and both sides see the end of the stream.
    pub end_after: usize,
    pub seed: u64,
}

impl Default for Fate {
    fn default() -> Fate {
        Fate { flip_every: 0, flip_at: None, end_after: usize::MAX, seed: 0 }
    }
}

/// Counts over all connections.
#[derive(Default)]
pub struct Tally {
    pub flips: AtomicUsize,
    pub bytes: AtomicUsize,
}

/// Listens, and forwards each connection to `target`. The first fate is for the bytes of the dialling side, the second for
/// those that it receives.
pub fn meddle(target: SocketAddr, tally: &Arc<Tally>, fates: impl Fn() -> [Fate; 2] + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let tally = tally.clone();
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(target) else { continue };
            for ((from, to), fate) in [(&near, &far), (&far, &near)].into_iter().zip(fates()) {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                from.set_nodelay(true).unwrap();
                let tally = tally.clone();
                thread::spawn(move || pass_on(from, to, &fate, &tally));
            }
        }
    });
    address
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, fate: &Fate, tally: &Tally) {
    let mut random = Random(fate.seed);
    let mut gap = || if fate.flip_every == 0 { usize::MAX } else { random.below(2 * fate.flip_every) + 1 };
    let (mut buffer, mut at) = (vec![0u8; 64 << 10], 0);
    let mut next_flip = fate.flip_at.unwrap_or_else(&mut gap);
    let mut bits = Random(!fate.seed);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        while let Some(here) = next_flip.checked_sub(at).filter(|here| *here < n) {
            buffer[here] ^= 1 << bits.below(8);
            tally.flips.fetch_add(1, Ordering::SeqCst);
            next_flip = next_flip.saturating_add(gap());
        }
        let allowed = fate.end_after.saturating_sub(at).min(n);
        at += n;
        tally.bytes.fetch_add(n, Ordering::SeqCst);
        if to.write_all(&buffer[..allowed]).is_err() || allowed < n {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
