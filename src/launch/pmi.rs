//! PMI-1, the protocol by which processes ask the launcher that has started them: MPICH's, Intel's and Flux's, and `srun
//! --mpi=pmi2`, which speaks it too. Requests and answers are lines of `key=value` on a socket.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use super::inherited::duplicate;
use super::wait::TimeLimit;
use crate::{Address, Error, Result};

/// The key of what rank 0 announces.
const KEY: &str = "calomel-rank-0";
/// The longest line that is accepted; values have 1024 bytes at most.
const MAX_LINE: usize = 4096;

/// Set once this process has asked its launcher: PMI can be left only once, and then serves no more.
static USED: AtomicBool = AtomicBool::new(false);

/// Announces `value` to all ranks, as rank 0, or returns what rank 0 announces. Each rank of the job must call this.
pub(super) fn exchange(descriptor: RawFd, value: Option<&str>, own: &Address, limit: TimeLimit) -> Result<String> {
    let variable = format!("PMI_FD={descriptor}");
    let failed = |reason: String| Error::Launch { what: variable.clone(), reason };
    if USED.swap(true, Ordering::SeqCst) {
        let reason = "a process can ask its launcher once: for further worlds, gather the addresses of their engines in the \
                      first one, and use `World::from_addresses`";
        return Err(failed(reason.to_owned()));
    }
    let socket = duplicate(descriptor).map_err(|error| failed(format!("no open descriptor: {error}")))?;
    PmiClient { socket: socket.into(), received: Vec::new(), variable, own, limit }.exchange(value)
}

/// One process's side of PMI.
struct PmiClient<'a> {
    socket: UnixStream,
    received: Vec<u8>,
    /// The variable that names the socket, for errors.
    variable: String,
    own: &'a Address,
    limit: TimeLimit,
}

impl PmiClient<'_> {
    fn exchange(&mut self, value: Option<&str>) -> Result<String> {
        self.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")?;
        let longest = self.ask("get_maxes", "maxes")?.number("vallen_max");
        let space = self.ask("get_my_kvsname", "my_kvsname")?.of("kvsname");
        let space = space.ok_or_else(|| self.failed("the launcher names no key-value space".to_owned()))?;
        if let Some(value) = value {
            if let Some(longest) = longest.filter(|longest| *longest < value.len()) {
                return Err(self.failed(format!("an address of {} bytes, and values have {longest} at most", value.len())));
            }
            self.ask(&format!("put kvsname={space} key={KEY} value={value}"), "put_result")?;
        }
        self.ask("barrier_in", "barrier_out")?;
        let value = self.ask(&format!("get kvsname={space} key={KEY}"), "get_result")?.of("value");
        let value = value.ok_or_else(|| self.failed("rank 0 has announced no address".to_owned()))?;
        // Without this, launchers take the end of this process for a failure, and end the job.
        self.ask("finalize", "finalize_ack")?;
        Ok(value)
    }

    fn ask(&mut self, request: &str, expected: &str) -> Result<PmiAnswer> {
        let name = request.split(' ').next().unwrap_or_default();
        let line = self.round_trip(request).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout {
                peer: self.own.clone(),
                what: format!("joining the world ({name}: the launcher has not answered)"),
                after: self.limit.timeout,
            },
            ErrorKind::UnexpectedEof => self.failed(format!("{name}: the launcher has closed the socket")),
            _ => self.failed(format!("{name}: {error}")),
        })?;
        let answer = PmiAnswer(line);
        let code = answer.of("rc").unwrap_or_else(|| "0".to_owned());
        if answer.of("cmd").as_deref() != Some(expected) || code != "0" {
            let start: String = answer.0.chars().take(100).collect();
            return Err(self.failed(format!("{name}: the launcher answers `{start}`")));
        }
        Ok(answer)
    }

    fn round_trip(&mut self, request: &str) -> std::io::Result<String> {
        self.socket.set_write_timeout(Some(self.left()?))?;
        self.socket.write_all(format!("cmd={request}\n").as_bytes())?;
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            if self.received.len() > MAX_LINE {
                return Err(std::io::Error::new(ErrorKind::InvalidData, "the launcher's answer has no end"));
            }
            self.socket.set_read_timeout(Some(self.left()?))?;
            let mut bytes = [0; 1024];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The time that is left: never zero, which sockets do not take.
    fn left(&self) -> std::io::Result<std::time::Duration> {
        Some(self.limit.left()).filter(|left| !left.is_zero()).ok_or_else(|| ErrorKind::TimedOut.into())
    }

    fn failed(&self, reason: String) -> Error {
        Error::Launch { what: self.variable.clone(), reason }
    }
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
    fn told(value: Option<&str>, answers: &[&str], timeout: Duration) -> (Result<String>, Vec<String>) {
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
        let own = "tcp://127.0.0.1:1".parse().unwrap();
        let variable = "PMI_FD=6".to_owned();
        let mut client = PmiClient { socket: here, received: Vec::new(), variable, own: &own, limit: TimeLimit::new(timeout) };
        let result = client.exchange(value);
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
            let error = told(None, answers, LONG).0.unwrap_err().to_string();
            assert!(error.contains("PMI_FD=6") && error.contains(part), "{error}");
        }
        let short = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=4\n";
        let error = told(Some("1,tcp://10.0.0.1:7"), &[INIT, short, NAME], LONG).0.unwrap_err().to_string();
        assert!(error.contains("18 bytes, and values have 4"), "{error}");
    }

    #[test]
    fn silent_launcher_ends_at_the_deadline() {
        let begin = Instant::now();
        let (result, _) = told(None, &[INIT, MAXES, NAME], Duration::from_millis(100));
        assert!(matches!(&result, Err(Error::Timeout { what, .. }) if what.contains("barrier_in")), "{result:?}");
        assert!(begin.elapsed() >= Duration::from_millis(100));
    }
}
