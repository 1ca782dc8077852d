//! Work, measured so that a busy machine does not matter.
//!
//! Time is that of the thread's processor, so other load on the machine hardly counts. Each attack runs at one size and at a
//! multiple of that size. Work that is linear takes four times as long at four times the size, and work that is quadratic
//! sixteen times.

use std::time::Duration;

/// Time that this thread has had of a processor.
pub(crate) fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs an attack at a size and at `times` that size, until the larger one takes less than `most` times as long; several
/// times, as the machine may be busy.
#[track_caller]
fn compare(what: &str, size: u64, times: u64, most: f64, attack: &dyn Fn(u64) -> Duration) {
    let mut seen = Vec::new();
    for _ in 0..6 {
        // A fault or an interrupt may fall into either: what is short is what it takes.
        let (few, many) = (attack(size).min(attack(size)), attack(size * times).min(attack(size * times)));
        let ratio = many.as_secs_f64() / few.as_secs_f64().max(1e-6);
        seen.push((few, many));
        if ratio < most {
            println!("{what}: {few:?} for {size}, {many:?} for {} ({ratio:.1} times)", size * times);
            return;
        }
    }
    panic!("{what}: {size} and {} took {seen:?}", size * times);
}

/// What a peer says by the thousand: four times as much takes four times as long.
#[track_caller]
pub(crate) fn linear(what: &str, size: u64, attack: impl Fn(u64) -> Duration) {
    compare(what, size, 4, 8.0, &attack);
}

/// What takes the same time however much the engine holds: sixteen times as much makes no difference but to caches.
#[track_caller]
pub(crate) fn independent(what: &str, size: u64, attack: impl Fn(u64) -> Duration) {
    compare(what, size, 16, 4.0, &attack);
}
