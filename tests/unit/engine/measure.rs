//! Measures how work grows with its input, in a way that load on the machine hardly affects.
//!
//! It counts the processor time of the thread, which other load on the machine hardly affects. Each attack runs at one size
//! and at a multiple of that size. Linear work takes four times as long at four times the size, quadratic work sixteen times.

use std::time::Duration;

/// The processor time of this thread.
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
        // Faults and interrupts only add time: the shorter measurement counts.
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

/// Asserts linear time: four times the input takes about four times as long.
#[track_caller]
pub(crate) fn linear(what: &str, size: u64, attack: impl Fn(u64) -> Duration) {
    compare(what, size, 4, 8.0, &attack);
}

/// Asserts that time does not depend on state: sixteen times as much state changes it only by cache effects.
#[track_caller]
pub(crate) fn independent(what: &str, size: u64, attack: impl Fn(u64) -> Duration) {
    compare(what, size, 16, 4.0, &attack);
}
