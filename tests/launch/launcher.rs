//! A launcher: the server's side of PMI-1, for processes of this program.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use crate::support::{BOUND, Child, eventually};

pub struct Launcher {
    size: usize,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    values: HashMap<String, String>,
    at_barrier: usize,
    left: usize,
}

impl Launcher {
    pub fn new(size: usize) -> Launcher {
        Launcher { size, shared: Arc::default() }
    }

    /// Starts a rank, whose standard input is the socket on which it asks this launcher.
    pub fn start(&self, rank: usize, variables: &[(&str, &str)]) -> Child {
        let (here, there) = UnixStream::pair().unwrap();
        let (size, shared) = (self.size, self.shared.clone());
        thread::spawn(move || serve(&here, size, &shared));
        let (rank, size) = (rank.to_string(), self.size.to_string());
        let pmi = [("PMI_FD", "0"), ("PMI_RANK", &*rank), ("PMI_SIZE", &*size)];
        let variables = [&pmi[..], variables].concat();
        Child::start_as("rank", &variables, |command| {
            command.stdin(OwnedFd::from(there));
        })
    }

    /// How many ranks have left in good order.
    pub fn left(&self) -> usize {
        eventually("the ranks leave", || self.shared.state.lock().unwrap().left > 0);
        self.shared.state.lock().unwrap().left
    }
}

fn serve(mut socket: &UnixStream, size: usize, shared: &Shared) {
    for line in BufReader::new(socket).lines().map_while(Result::ok) {
        let of = |key: &str| {
            let found = line.split(' ').filter_map(|word| word.split_once('=')).find(|(name, _)| *name == key);
            found.map(|(_, value)| value.to_owned()).unwrap_or_default()
        };
        let answer = match &*of("cmd") {
            "init" => "response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
            "get_maxes" => "maxes kvsname_max=256 keylen_max=64 vallen_max=1024".to_owned(),
            "get_my_kvsname" => "my_kvsname kvsname=kvs_1_0".to_owned(),
            "put" => {
                assert_eq!(of("kvsname"), "kvs_1_0");
                shared.state.lock().unwrap().values.insert(of("key"), of("value"));
                "put_result rc=0 msg=success".to_owned()
            }
            "barrier_in" => {
                let mut state = shared.state.lock().unwrap();
                state.at_barrier += 1;
                shared.changed.notify_all();
                // Ranks may come to several barriers.
                let all = state.at_barrier.next_multiple_of(size);
                let (state, _) = shared.changed.wait_timeout_while(state, BOUND, |state| state.at_barrier < all).unwrap();
                if state.at_barrier < all {
                    return;
                }
                "barrier_out".to_owned()
            }
            "get" => match shared.state.lock().unwrap().values.get(&of("key")) {
                Some(value) => format!("get_result rc=0 msg=success value={value}"),
                None => "get_result rc=-1 msg=key_not_found value=unknown".to_owned(),
            },
            "finalize" => {
                shared.state.lock().unwrap().left += 1;
                "finalize_ack".to_owned()
            }
            other => panic!("no command `{other}`"),
        };
        if writeln!(socket, "cmd={answer}").is_err() {
            return;
        }
    }
}
