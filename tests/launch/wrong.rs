//! Ranks that can't join: each gets an error that says why, by its deadline.

use std::time::{Duration, Instant};

use crate::launcher::Launcher;
use crate::rank::{SharedDirectory, TIMEOUT, by_hand, failure, free_port, start};
use crate::support::{BOUND, Child, LISTEN};

/// Starts a rank with further variables.
fn start_with(variables: Vec<(&'static str, String)>, more: &[(&'static str, &str)]) -> Child {
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, &**value)).collect();
    start(&[&variables[..], more].concat())
}

/// Whichever way, and whichever rank it is that is alone.
#[test]
fn deadline_holds_where_the_others_do_not_come() {
    let folder = SharedDirectory::new("deadline");
    let port = format!("tcp://127.0.0.1:{}", free_port());
    for rank in [0, 1] {
        let number = rank.to_string();
        let list = format!("tcp://127.0.0.1:{},tcp://127.0.0.1:{}", free_port(), free_port());
        let launcher = Launcher::new(2);
        let limit = (TIMEOUT, "300");
        let begin = Instant::now();
        let mut alone = [
            start_with(by_hand(rank, 2, &folder.variable()), &[limit]),
            start_with(by_hand(rank, 2, &port), &[limit]),
            start(&[("CALOMEL_ENDPOINTS", &list), ("CALOMEL_RANK", &number), (LISTEN, "none"), limit]),
            launcher.start(rank, &[limit]),
        ];
        for child in &mut alone {
            let error = failure(child);
            assert!(error.starts_with("Timeout"), "{error}");
            assert!(error.contains("joining the world"), "{error}");
        }
        assert!(begin.elapsed() >= Duration::from_millis(300));
        folder.assert_empty();
    }
}

#[test]
fn rank_0_says_who_is_missing() {
    let folder = SharedDirectory::new("missing");
    let mut present = start_with(by_hand(1, 4, &folder.variable()), &[]);
    let mut root = start_with(by_hand(0, 4, &folder.variable()), &[(TIMEOUT, "2000")]);
    let missing = "2 of 4 ranks have not come: 2, 3";
    for child in [&mut root, &mut present] {
        let error = failure(child);
        assert!(error.starts_with("Timeout") && error.contains(missing), "{error}");
    }
}

#[test]
fn two_ranks_of_one_number_are_told() {
    let folder = SharedDirectory::new("twice");
    for rendezvous in [folder.variable(), format!("tcp://127.0.0.1:{}", free_port())] {
        let mut root = start_with(by_hand(0, 3, &rendezvous), &[]);
        let mut twice =
            [start_with(by_hand(1, 3, &rendezvous), &[]), start_with(by_hand(1, 3, &rendezvous), &[(TIMEOUT, "20000")])];
        // One of the two is refused, and the other one still joins.
        let begin = Instant::now();
        let refused = loop {
            let refused = twice.iter_mut().map(|child| child.said_of(&["failed"])).position(|said| match &said[..] {
                [] => false,
                [error, ..] => {
                    assert!(error.contains("Launch") && error.contains("two ranks have the number 1"), "{error}");
                    assert!(error.contains("CALOMEL_RENDEZVOUS="), "{error}");
                    true
                }
            });
            match refused {
                Some(refused) => break refused,
                None => assert!(begin.elapsed() < BOUND),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut last = start_with(by_hand(2, 3, &rendezvous), &[]);
        assert_eq!(root.hear("joined"), "0 of 3");
        assert_eq!(twice[1 - refused].hear("joined"), "1 of 3");
        assert_eq!(last.hear("joined"), "2 of 3");
    }
    folder.assert_empty();
}

#[test]
fn second_rank_0_is_told() {
    let folder = SharedDirectory::new("two roots");
    let first = start_with(by_hand(0, 2, &folder.variable()), &[]);
    crate::support::eventually("rank 0 has left its file", || folder.path().join("calomel-rank-0.").exists());
    let error = failure(&mut start_with(by_hand(0, 2, &folder.variable()), &[]));
    assert!(error.contains("Launch") && error.contains("two ranks have the number 0"), "{error}");
    let mut other = start_with(by_hand(1, 2, &folder.variable()), &[]);
    assert_eq!(other.hear("joined"), "1 of 2");
    drop(first);

    let port = format!("tcp://127.0.0.1:{}", free_port());
    let mut first = start_with(by_hand(0, 2, &port), &[]);
    let mut other = start_with(by_hand(1, 2, &port), &[]);
    assert_eq!(first.hear("joined"), "0 of 2");
    assert_eq!(other.hear("joined"), "1 of 2");
    let error = failure(&mut start_with(by_hand(0, 2, &port), &[]));
    assert!(error.contains("Launch") && error.contains("is in use"), "{error}");
    // And a second rank 1, when all have come.
    let error = failure(&mut start_with(by_hand(1, 2, &port), &[]));
    assert!(error.contains("Launch") && error.contains("two ranks have the number 1"), "{error}");
}

#[test]
fn ranks_of_other_jobs_are_told() {
    let port = format!("tcp://127.0.0.1:{}", free_port());
    let _root = start_with(by_hand(0, 2, &port), &[("CALOMEL_JOB", "a")]);
    let error = failure(&mut start_with(by_hand(1, 2, &port), &[("CALOMEL_JOB", "b")]));
    assert!(error.contains("rank 0 belongs to the job `a`, and this rank to `b`"), "{error}");
    let error = failure(&mut start_with(by_hand(1, 3, &port), &[("CALOMEL_JOB", "a")]));
    assert!(error.contains("rank 0 was started as one of 2, and this rank as one of 3"), "{error}");
    // In a directory they do not meet.
    let folder = SharedDirectory::new("jobs");
    let job = |rank, job| start_with(by_hand(rank, 2, &folder.variable()), &[("CALOMEL_JOB", job)]);
    let mut ranks = [job(0, "a"), job(0, "b"), job(1, "b"), job(1, "a")];
    let joined: Vec<String> = ranks.iter_mut().map(|child| child.hear("joined")).collect();
    assert_eq!(joined, ["0 of 2", "0 of 2", "1 of 2", "1 of 2"]);
    folder.assert_empty();
}

#[test]
fn variable_that_is_wrong_is_named() {
    let absent = "dir:/nonexistent/calomel";
    for (variables, part) in [
        (&[("CALOMEL_RANK", "2"), ("CALOMEL_SIZE", "2"), ("CALOMEL_RENDEZVOUS", "dir:/")][..], "CALOMEL_RANK=2"),
        (&[("CALOMEL_RANK", "0"), ("CALOMEL_SIZE", "2"), ("CALOMEL_RENDEZVOUS", absent)], "RENDEZVOUS=dir:/nonexistent"),
        (&[("CALOMEL_RANK", "1"), ("CALOMEL_SIZE", "2"), ("CALOMEL_RENDEZVOUS", absent)], "RENDEZVOUS=dir:/nonexistent"),
        (&[("PMI_FD", "77"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")], "PMI_FD=77: no open descriptor"),
        (&[("PMI_FD", "1"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")], "PMI_FD=1: init"),
        (&[(LISTEN, "none")], "the engine does not listen"),
    ] {
        let error = failure(&mut start(variables));
        assert!(error.starts_with("Launch") && error.contains(part), "{error}");
    }
}
