//! Each way to start, where all ranks come.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use calomel::{Engine, Error};

use crate::launcher::Launcher;
use crate::namespaces::{Hosts, ip};
use crate::rank::{SharedDirectory, WITH_KEY, assert_works, by_hand, free_port, start, start_all};
use crate::support::{BOUND, Child, LISTEN, builder, nowhere};

#[test]
fn without_a_launcher_there_is_one_rank() {
    let mut alone = [start(&[])];
    assert_works(&mut alone);
}

#[test]
fn ranks_meet_in_a_directory() {
    let folder = SharedDirectory::new("directory");
    let mut ranks = start_all(3, |rank| by_hand(rank, 3, &folder.variable()));
    assert_works(&mut ranks);
    folder.assert_empty();
}

#[test]
fn engine_joins_two_worlds_by_one_directory() {
    let folder = SharedDirectory::new("again");
    let mut ranks = start_all(3, |rank| by_hand(rank, 3, &folder.variable()));
    ranks.iter_mut().for_each(|rank| rank.tell("again"));
    for rank in &mut ranks {
        assert_eq!(rank.hear("again"), "Ok(())");
    }
    assert_works(&mut ranks);
    folder.assert_empty();
}

/// Of a rank 0 that was killed: its address is that of no engine, or of another one.
#[test]
fn stale_file_is_replaced() {
    let other = Engine::server("tcp://127.0.0.1:0").unwrap();
    for stale in [nowhere(), other.address().to_string()] {
        let folder = SharedDirectory::new("stale");
        let file = folder.path().join("calomel-rank-0.");
        fs::write(&file, format!("calomel-rank-0 00000000000000ab,{stale}\n")).unwrap();
        // The others see the stale file first.
        let mut ranks = vec![start_borrowed(&by_hand(1, 2, &folder.variable()))];
        ranks.insert(0, start_borrowed(&by_hand(0, 2, &folder.variable())));
        assert_works(&mut ranks);
        folder.assert_empty();
    }
}

fn start_borrowed(variables: &[(&'static str, String)]) -> Child {
    start(&variables.iter().map(|(name, value)| (*name, &**value)).collect::<Vec<_>>())
}

#[test]
fn ranks_meet_at_a_port() {
    let rendezvous = format!("tcp://localhost:{}", free_port());
    let mut ranks = start_all(3, |rank| by_hand(rank, 3, &rendezvous));
    assert_works(&mut ranks);
}

#[test]
fn engine_joins_two_worlds_at_one_port() {
    let rendezvous = format!("tcp://127.0.0.1:{}", free_port());
    let mut ranks = start_all(3, |rank| by_hand(rank, 3, &rendezvous));
    ranks.iter_mut().for_each(|rank| rank.tell("again"));
    for rank in &mut ranks {
        assert_eq!(rank.hear("again"), "Ok(())");
    }
    assert_works(&mut ranks);
}

#[test]
fn ranks_meet_as_those_of_torchrun() {
    let port = free_port().to_string();
    let mut ranks = start_all(2, |rank| {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "2".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.clone()),
        ]
    });
    assert_works(&mut ranks);
}

#[test]
fn ranks_meet_as_those_of_open_mpi() {
    let folder = SharedDirectory::new("session");
    let mut ranks = start_all(2, |rank| by_open_mpi(rank, &folder));
    assert_works(&mut ranks);
    folder.assert_empty();
}

fn by_open_mpi(rank: usize, folder: &SharedDirectory) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", "2".to_owned()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2".to_owned()),
        ("PMIX_SERVER_TMPDIR", folder.path().display().to_string()),
        ("PMIX_NAMESPACE", "1234".to_owned()),
    ]
}

/// An engine without the key can't call theirs.
#[test]
fn ranks_of_open_mpi_get_a_key() {
    let folder = SharedDirectory::new("key");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let mut ranks = start_all(2, |rank| [by_open_mpi(rank, &folder), vec![(WITH_KEY, String::new())]].concat());
    let address = ranks.iter_mut().map(|rank| rank.hear("address")).next().unwrap();
    let stranger = builder().build().unwrap();
    let refused = stranger.lookup(&*address).and_then(|rank| rank.ping(BOUND)).unwrap_err();
    assert!(matches!(refused, Error::AccessDenied { .. }), "{refused:?}");
    assert_works(&mut ranks);
}

/// Each rank is on a host of its own, with an address that the others reach, and shares a directory with them or nothing.
#[test]
fn ranks_meet_from_hosts_of_their_own() {
    let folder = SharedDirectory::new("hosts");
    let hosts = match Hosts::new(3) {
        Ok(hosts) => hosts,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let list = [0, 1, 2].map(|host| format!("tcp://{}:7000", ip(host))).join(",");
    // The ports are free: each host was made a moment ago.
    let ways = [
        vec![("CALOMEL_RENDEZVOUS", folder.variable())],
        vec![("CALOMEL_RENDEZVOUS", format!("tcp://{}:7000", ip(0)))],
        vec![("MASTER_ADDR", ip(0)), ("MASTER_PORT", "7001".to_owned())],
        vec![("CALOMEL_ENDPOINTS", list)],
    ];
    for way in ways {
        let start = |rank: usize| {
            let numbers = match way[0].0 {
                "MASTER_ADDR" => [("RANK", rank.to_string()), ("WORLD_SIZE", "3".to_owned())],
                _ => [("CALOMEL_RANK", rank.to_string()), ("CALOMEL_SIZE", "3".to_owned())],
            };
            let listen = if way[0].0 == "CALOMEL_ENDPOINTS" { "none" } else { "tcp" };
            let variables = [&numbers[..], &way, &[(LISTEN, listen.to_owned())]].concat();
            let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, &**value)).collect();
            Child::start_as("rank", &variables, |command| hosts.enter(rank, command))
        };
        let mut ranks: Vec<Child> = (0..3).map(start).collect();
        assert_works(&mut ranks);
        folder.assert_empty();
    }
}

/// Rank 0 listens at a port that depends on the numbers of job and step.
#[test]
fn ranks_meet_as_those_of_srun() {
    let job = std::process::id();
    let mut ranks = start_all(2, |rank| {
        vec![
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_STEP_NUM_TASKS", "2".to_owned()),
            ("SLURM_STEP_NODELIST", "localhost".to_owned()),
            ("SLURM_JOB_ID", job.to_string()),
            ("SLURM_STEP_ID", "0".to_owned()),
        ]
    });
    assert_works(&mut ranks);
}

/// Engines that do not listen do so at their addresses of the list.
#[test]
fn ranks_are_listed() {
    for listen in ["none", "tcp://127.0.0.1:0"] {
        let ports = [free_port(), free_port(), free_port()];
        let list = ports.map(|port| format!("tcp://127.0.0.1:{port}")).join(",");
        let mut ranks = start_all(3, |rank| {
            vec![("CALOMEL_ENDPOINTS", list.clone()), ("CALOMEL_RANK", rank.to_string()), (LISTEN, listen.to_owned())]
        });
        assert_works(&mut ranks);
    }
}

#[test]
fn ranks_meet_through_their_launcher() {
    for variables in [&[][..], &[(WITH_KEY, "")]] {
        let launcher = Launcher::new(3);
        let mut ranks: Vec<Child> = (0..3).map(|rank| launcher.start(rank, variables)).collect();
        for (rank, child) in ranks.iter_mut().enumerate() {
            assert_eq!(child.hear("joined"), format!("{rank} of 3"));
            assert_eq!(child.hear("ring"), "Ok(())");
            assert!(child.wait(BOUND).success());
        }
        // The launcher would kill the others when one ends that has not left.
        assert_eq!(launcher.left(), 3);
    }
}
