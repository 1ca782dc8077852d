//! A rank that dies or stops is reported to all others that wait for it, long before their deadline.

use std::time::Instant;

use crate::rank::{SharedDirectory, by_hand, start_all};
use crate::support::{Child, NOTICED};

/// More than the ranks below one in the tree: rank 1 is neither its root nor a leaf.
const SIZE: usize = 10;

fn joined(name: &str) -> Vec<Child> {
    let folder = SharedDirectory::new(&format!("{name}-{:?}", std::thread::current().id()));
    let mut ranks = start_all(SIZE, |rank| by_hand(rank, SIZE, &folder.variable()));
    ranks.iter_mut().for_each(|rank| drop(rank.hear("joined")));
    ranks
}

#[track_caller]
fn assert_all_notice(ranks: &mut [Child], lost: usize, since: Instant) {
    for (_, child) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != lost) {
        let result = child.hear("barrier");
        assert!(result.starts_with("Err(Disconnected") && result.contains(&format!("rank {lost}: ")), "{result}");
    }
    assert!(since.elapsed() < NOTICED, "took {:?}", since.elapsed());
}

fn rank_that_is_killed_is_reported_to_all_that_wait() {
    for lost in [0, 1, SIZE - 1] {
        let mut ranks = joined(&format!("killed-{lost}"));
        for child in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != lost).map(|(_, child)| child) {
            child.tell("barrier");
            child.hear("waits");
        }
        let since = Instant::now();
        ranks[lost].signal(libc::SIGKILL);
        assert_all_notice(&mut ranks, lost, since);
    }
}

/// No connection ends: the peer timeout reports it.
fn rank_that_stops_is_reported_to_all_that_wait() {
    let mut ranks = joined("stopped");
    for child in ranks.iter_mut().skip(2) {
        child.tell("barrier");
        child.hear("waits");
    }
    let since = Instant::now();
    ranks[1].signal(libc::SIGSTOP);
    ranks[0].tell("barrier");
    assert_all_notice(&mut ranks, 1, since);
}

/// The connections have ended when the others come.
fn rank_that_died_before_is_reported() {
    let mut ranks = joined("before");
    ranks[1].signal(libc::SIGKILL);
    let since = Instant::now();
    ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != 1).for_each(|(_, child)| child.tell("barrier"));
    assert_all_notice(&mut ranks, 1, since);
    // The world is over.
    ranks[5].tell("barrier");
    let again = ranks[5].hear("barrier");
    assert!(again.contains("rank 1: "), "{again}");
}

over_each!(
    rank_that_is_killed_is_reported_to_all_that_wait,
    rank_that_stops_is_reported_to_all_that_wait,
    rank_that_died_before_is_reported,
);
