//! PMI-1, the protocol by which processes ask the launcher that has started them: MPICH's, Intel's and Flux's, and `srun
//! --mpi=pmi2`, which speaks it too. Requests and answers are lines of `key=value` on a socket.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::inherited::duplicate;
use super::wait::TimeLimit;
use crate::sync::Mutex;
use crate::{Address, Error, Result};

/// Where rank 0's address is announced.
const ADDRESS_KEY: &str = "calomel-rank-0";
/// Where the job's key is.
const JOB_KEY: &str = "calomel-job-key";
/// The longest line that is accepted; values have 1024 bytes at most.
const MAX_LINE: usize = 4096;

/// This process's session with its launcher. PMI can be left only once, and then serves no more.
static SESSION: Mutex<PmiSession> = Mutex::new(PmiSession::Unused);

enum PmiSession {
    Unused,
    /// The job's key was exchanged.
    Open(PmiClient),
    Left,
}

/// Announces `address` to all ranks, as rank 0, or returns what rank 0 announces; then leaves the launcher. Each rank of the job
/// must call this.
pub(super) fn exchange_address(descriptor: RawFd, address: Option<&str>, own: &Address, limit: TimeLimit) -> Result<String> {
    let mut session = SESSION.lock();
    let mut client = match std::mem::replace(&mut *session, PmiSession::Left) {
        PmiSession::Unused => PmiClient::connect(descriptor)?,
        PmiSession::Open(client) => client,
        PmiSession::Left => return Err(left(descriptor)),
    };
    client.exchange(ADDRESS_KEY, address, true, limit).map_err(|error| match error {
        PmiError::Silent(request) => Error::Timeout {
            peer: own.clone(),
            what: format!("joining the world ({request}: the launcher has not answered)"),
            after: limit.timeout,
        },
        PmiError::Failed(reason) => client.failed(reason),
    })
}

/// Gives `key` to all ranks, as rank 0, or returns the one that rank 0 gives. Each rank of the job must call this, before
/// [`exchange_address`].
pub(super) fn exchange_key(descriptor: RawFd, key: Option<&str>, limit: TimeLimit) -> Result<String> {
    let mut session = SESSION.lock();
    let mut client = match std::mem::replace(&mut *session, PmiSession::Left) {
        PmiSession::Unused => PmiClient::connect(descriptor)?,
        PmiSession::Open(_) | PmiSession::Left => return Err(left(descriptor)),
    };
    match client.exchange(JOB_KEY, key, false, limit) {
        Ok(key) => {
            *session = PmiSession::Open(client);
            Ok(key)
        }
        Err(PmiError::Silent(request)) => {
            Err(client.failed(format!("{request}: the launcher has not answered within {:?}", limit.timeout)))
        }
        Err(PmiError::Failed(reason)) => Err(client.failed(reason)),
    }
}

fn left(descriptor: RawFd) -> Error {
    let reason = "a process can ask its launcher once, for the job's key before the world: for further worlds, gather the \
                  addresses of their engines in the first one, and use `World::from_addresses`";
    Error::Launch { what: format!("PMI_FD={descriptor}"), reason: reason.to_owned() }
}

/// One process's side of PMI.
struct PmiClient {
    socket: UnixStream,
    received: Vec<u8>,
    /// The variable that names the socket, for errors.
    variable: String,
    /// Once the launcher has named it.
    space: Option<KeyValueSpace>,
}

#[derive(Clone)]
struct KeyValueSpace {
    name: String,
    /// The longest value that it takes, where the launcher says so.
    longest: Option<usize>,
}

enum PmiError {
    /// The launcher has not answered this request in time.
    Silent(String),
    Failed(String),
}

impl PmiClient {
    fn connect(descriptor: RawFd) -> Result<PmiClient> {
        let variable = format!("PMI_FD={descriptor}");
        let socket = duplicate(descriptor)
            .map_err(|error| Error::Launch { what: variable.clone(), reason: format!("no open descriptor: {error}") })?;
        Ok(PmiClient { socket: socket.into(), received: Vec::new(), variable, space: None })
    }

    /// Puts the value where there is one, and returns that of rank 0; then leaves, if `leaves`.
    fn exchange(
        &mut self,
        key: &str,
        value: Option<&str>,
        leaves: bool,
        limit: TimeLimit,
    ) -> std::result::Result<String, PmiError> {
        let KeyValueSpace { name: space, longest } = self.space(limit)?;
        if let Some(value) = value {
            if let Some(longest) = longest.filter(|longest| *longest < value.len()) {
                let reason = format!("{key} has {} bytes, and values have {longest} at most", value.len());
                return Err(PmiError::Failed(reason));
            }
            self.ask(&format!("put kvsname={space} key={key} value={value}"), "put_result", limit)?;
        }
        self.ask("barrier_in", "barrier_out", limit)?;
        let value = self.ask(&format!("get kvsname={space} key={key}"), "get_result", limit)?.of("value");
        let value = value.ok_or_else(|| PmiError::Failed(format!("rank 0 has announced no {key}")))?;
        if leaves {
            // Without this, launchers take the end of this process for a failure, and end the job.
            self.ask("finalize", "finalize_ack", limit)?;
        }
        Ok(value)
    }

    fn space(&mut self, limit: TimeLimit) -> std::result::Result<KeyValueSpace, PmiError> {
        if let Some(space) = &self.space {
            return Ok(space.clone());
        }
        self.ask("init pmi_version=1 pmi_subversion=1", "response_to_init", limit)?;
        let longest = self.ask("get_maxes", "maxes", limit)?.number("vallen_max");
        let name = self.ask("get_my_kvsname", "my_kvsname", limit)?.of("kvsname");
        let name = name.ok_or_else(|| PmiError::Failed("the launcher names no key-value space".to_owned()))?;
        Ok(self.space.insert(KeyValueSpace { name, longest }).clone())
    }

    fn ask(&mut self, request: &str, expected: &str, limit: TimeLimit) -> std::result::Result<PmiAnswer, PmiError> {
        let name = request.split(' ').next().unwrap_or_default();
        let line = self.round_trip(request, limit).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => PmiError::Silent(name.to_owned()),
            ErrorKind::UnexpectedEof => PmiError::Failed(format!("{name}: the launcher has closed the socket")),
            _ => PmiError::Failed(format!("{name}: {error}")),
        })?;
        let answer = PmiAnswer(line);
        let code = answer.of("rc").unwrap_or_else(|| "0".to_owned());
        if answer.of("cmd").as_deref() != Some(expected) || code != "0" {
            let start: String = answer.0.chars().take(100).collect();
            return Err(PmiError::Failed(format!("{name}: the launcher answers `{start}`")));
        }
        Ok(answer)
    }

    fn round_trip(&mut self, request: &str, limit: TimeLimit) -> std::io::Result<String> {
        self.socket.set_write_timeout(Some(nonzero(limit.left())?))?;
        self.socket.write_all(format!("cmd={request}\n").as_bytes())?;
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            if self.received.len() > MAX_LINE {
                return Err(std::io::Error::new(ErrorKind::InvalidData, "the launcher's answer has no end"));
            }
            self.socket.set_read_timeout(Some(nonzero(limit.left())?))?;
            let mut bytes = [0; 1024];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn failed(&self, reason: String) -> Error {
        Error::Launch { what: self.variable.clone(), reason }
    }
}

/// Sockets do not take a timeout of zero.
fn nonzero(left: Duration) -> std::io::Result<Duration> {
    Some(left).filter(|left| !left.is_zero()).ok_or_else(|| ErrorKind::TimedOut.into())
}

/// A line of the launcher.
struct PmiAnswer(String);

impl PmiAnswer {
    fn of(&self, key: &str) -> Option<String> {
        let pairs = self.0.split_whitespace().filter_map(|word| word.split_once('='));
        pairs.into_iter().find(|(name, _)| *name == key).map(|(_, value)| value.to_owned())
    }

    fn number(&self, key: &str) -> Option<usize> {
        self.of(key)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// A launcher that gives these answers to one process, whatever it asks; and what that process makes of them.
    fn told(value: Option<&str>, answers: &[&str], timeout: Duration) -> (std::result::Result<String, String>, Vec<String>) {
        let (here, there) = UnixStream::pair().unwrap();
        let answers: Vec<String> = answers.iter().map(|answer| (*answer).to_owned()).collect();
        let launcher = thread::spawn(move || {
            let mut requests = Vec::new();
            let mut lines = BufReader::new(there.try_clone().unwrap()).lines();
            for answer in answers {
                let Some(Ok(request)) = lines.next() else { break };
                requests.push(request);
                (&there).write_all(answer.as_bytes()).unwrap();
            }
            // The next request gets no answer, until its process has given up.
            requests.extend(lines.map_while(std::result::Result::ok));
            requests
        });
        let mut client = PmiClient { socket: here, received: Vec::new(), variable: "PMI_FD=6".to_owned(), space: None };
        let result = client.exchange(ADDRESS_KEY, value, true, TimeLimit::new(timeout)).map_err(|error| match error {
            PmiError::Silent(request) => format!("silent: {request}"),
            PmiError::Failed(reason) => client.failed(reason).to_string(),
        });
        drop(client);
        (result, launcher.join().unwrap())
    }

    const INIT: &str = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
    const MAXES: &str = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n";
    const NAME: &str = "cmd=my_kvsname kvsname=kvs_7_0\n";
    const GOT: &str = "cmd=get_result rc=0 msg=success value=1,tcp://10.0.0.1:7\n";
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn rank_0_announces_what_the_others_get() {
        let answers = [INIT, MAXES, NAME, "cmd=put_result rc=0 msg=success\n", "cmd=barrier_out\n", GOT, "cmd=finalize_ack\n"];
        let (value, requests) = told(Some("1,tcp://10.0.0.1:7"), &answers, LONG);
        assert_eq!(value.unwrap(), "1,tcp://10.0.0.1:7");
        let expected = [
            "cmd=init pmi_version=1 pmi_subversion=1",
            "cmd=get_maxes",
            "cmd=get_my_kvsname",
            "cmd=put kvsname=kvs_7_0 key=calomel-rank-0 value=1,tcp://10.0.0.1:7",
            "cmd=barrier_in",
            "cmd=get kvsname=kvs_7_0 key=calomel-rank-0",
            "cmd=finalize",
        ];
        assert_eq!(requests, expected);
        // Another rank, and a launcher that splits a line.
        let (value, requests) = told(None, &[INIT, MAXES, NAME, "cmd=barrier_out\n", GOT, "cmd=finalize_ack rc=0\n"], LONG);
        assert_eq!(value.unwrap(), "1,tcp://10.0.0.1:7");
        assert_eq!(requests.len(), 6);
    }

    #[test]
    fn what_a_launcher_refuses_is_an_error_that_names_the_variable() {
        for (answers, part) in [
            (&["cmd=response_to_init rc=1 pmi_version=2 pmi_subversion=0\n"][..], "init: the launcher answers `cmd=resp"),
            (&[INIT, "cmd=barrier_out\n"], "get_maxes: the launcher answers"),
            (&[INIT, MAXES, "cmd=my_kvsname\n"], "names no key-value space"),
            (&[INIT, MAXES, NAME, "cmd=barrier_out\n", "cmd=get_result rc=-1 msg=key_not_found\n"], "get: the launcher"),
            (&[INIT, "x".repeat(9000).leak()], "has no end"),
        ] {
            let error = told(None, answers, LONG).0.unwrap_err();
            assert!(error.contains("PMI_FD=6") && error.contains(part), "{error}");
        }
        let short = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=4\n";
        let error = told(Some("1,tcp://10.0.0.1:7"), &[INIT, short, NAME], LONG).0.unwrap_err();
        assert!(error.contains("18 bytes, and values have 4"), "{error}");
    }

    #[test]
    fn silent_launcher_ends_at_the_deadline() {
        let begin = Instant::now();
        let (result, _) = told(None, &[INIT, MAXES, NAME], Duration::from_millis(100));
        assert_eq!(result.unwrap_err(), "silent: barrier_in");
        assert!(begin.elapsed() >= Duration::from_millis(100));
    }
}
