//! A pre-shared key for the ranks of one job, handed out by the launcher.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use super::env::{self, LaunchPlan, StartMethod};
use super::pmi;
use super::wait::TimeLimit;
use crate::sync::Mutex;
use crate::{Error, Result, random, text};

const KEY_LEN: usize = 32;
/// The name of its file, before that of the job.
const FILE: &str = "calomel-job-key";
/// How often a rank looks for the file of rank 0.
const LOOK: Duration = Duration::from_millis(10);

/// A key that all ranks of a job have, and no other process: made by [`job_key`].
#[derive(Clone)]
pub struct JobKey([u8; KEY_LEN]);

impl AsRef<[u8]> for JobKey {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

/// The job's pre-shared key, 32 random bytes: rank 0 makes it, and the launcher's own channel hands it out. All ranks must call
/// this, before they make their engines, and then [`World::from_env`](super::World::from_env). Further calls in a process return
/// the same key.
///
/// ```
/// use std::time::Duration;
///
/// use calomel::Engine;
/// use calomel::launch::{World, job_key};
///
/// # fn main() -> calomel::Result<()> {
/// let timeout = Duration::from_secs(60);
/// let engine = Engine::builder().listen("tcp").pre_shared_key(job_key(timeout)?).build()?;
/// let world = World::from_env(&engine, timeout)?;
/// # world.barrier(timeout)
/// # }
/// ```
///
/// The channel is the key-value space of PMI (`mpiexec` of MPICH and of Intel MPI, `srun --mpi=pmi2`, Flux), and on one host the
/// session directory of Open MPI, which other users can't read. So the key is as secret as the launcher keeps what it carries
/// between its own processes: most send it unencrypted over the network of the cluster.
///
/// # Errors
/// [`Error::Launch`] where the job was started in another way, which has no private channel: make a key for it, and give it to
/// the ranks by `CALOMEL_PRE_SHARED_KEY_FILE`. Also where other users could read the session directory, when the launcher
/// refuses, and when the key has not come by the timeout.
pub fn job_key(timeout: Duration) -> Result<JobKey> {
    static KEY: Mutex<Option<JobKey>> = Mutex::new(None);
    let mut known = KEY.lock();
    if let Some(key) = &*known {
        return Ok(key.clone());
    }
    let key = hand_out(&env::plan(&|name| std::env::var_os(name))?, TimeLimit::new(timeout))?;
    Ok(known.insert(key).clone())
}

fn hand_out(plan: &LaunchPlan, limit: TimeLimit) -> Result<JobKey> {
    let made = match plan.rank {
        0 => Some(JobKey(random::from_system().map_err(|error| Error::io("can't get random numbers from the system", error))?)),
        _ => None,
    };
    let no_channel = |what: &str| {
        let reason = "it has no private channel for a key: make one, and name its file by CALOMEL_PRE_SHARED_KEY_FILE";
        Err(Error::Launch { what: what.to_owned(), reason: reason.to_owned() })
    };
    match (&plan.method, made) {
        (StartMethod::Alone, Some(key)) => Ok(key),
        (StartMethod::Alone, None) => unreachable!("a world of one has rank 0 only"),
        (StartMethod::Pmi(descriptor), made) => {
            let text = pmi::exchange_key(*descriptor, made.as_ref().map(hex).as_deref(), limit)?;
            from_hex(&text).ok_or_else(|| {
                let reason = "rank 0 gives something that is no key".to_owned();
                Error::Launch { what: format!("PMI_FD={descriptor}"), reason }
            })
        }
        (StartMethod::Directory { path, variable, private: true }, made) => {
            let failed = |reason: String| Error::Launch { what: variable.clone(), reason };
            let file = path.join(format!("{FILE}.{}", plan.job));
            check_private(path).map_err(&failed)?;
            match made {
                Some(key) => write(&file, &key).map(|()| key),
                None => await_file(&file, limit),
            }
            .map_err(failed)
        }
        (StartMethod::List(_), _) => no_channel("CALOMEL_ENDPOINTS"),
        (StartMethod::Meet { variable, .. } | StartMethod::Directory { variable, .. }, _) => no_channel(variable),
    }
}

/// `Err` says why other users could read or replace what is in this directory.
fn check_private(directory: &Path) -> std::result::Result<(), String> {
    let about = fs::metadata(directory).map_err(|error| format!("can't read the directory: {error}"))?;
    let user = rustix::process::geteuid().as_raw();
    if about.uid() != user {
        return Err(format!("the directory belongs to user {}, and this process to {user}", about.uid()));
    }
    if about.mode() & 0o077 != 0 {
        return Err(format!("other users may enter the directory: its mode is {:03o}", about.mode() & 0o777));
    }
    Ok(())
}

/// Rank 0's file. The launcher removes it with its directory, which is the job's own.
fn write(file: &Path, key: &JobKey) -> std::result::Result<(), String> {
    let failed = |error: std::io::Error| format!("can't write {}: {error}", file.display());
    let mut opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file).map_err(failed)?;
    // In one piece, with the end of the line last: what has none is not whole yet.
    opened.write_all(format!("{}\n", hex(key)).as_bytes()).map_err(failed)
}

fn await_file(file: &Path, limit: TimeLimit) -> std::result::Result<JobKey, String> {
    loop {
        match fs::read_to_string(file) {
            Ok(text) => {
                if let Some(line) = text.strip_suffix('\n') {
                    return from_hex(line).ok_or_else(|| format!("{} is no key", file.display()));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(format!("can't read {}: {error}", file.display())),
        }
        if limit.is_over() {
            return Err(format!("rank 0 has left no {} within {:?}", file.display(), limit.timeout));
        }
        std::thread::sleep(LOOK.min(limit.left()));
    }
}

fn hex(key: &JobKey) -> String {
    text::hex(&key.0)
}

fn from_hex(text: &str) -> Option<JobKey> {
    text::from_hex(text).map(JobKey)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::*;

    fn plan(rank: usize, method: StartMethod) -> LaunchPlan {
        LaunchPlan { rank, size: 2, job: "7".to_owned(), method }
    }

    fn session(path: &Path) -> StartMethod {
        StartMethod::Directory { path: path.to_owned(), variable: "PMIX_SERVER_TMPDIR=x".to_owned(), private: true }
    }

    /// A directory that is removed with its files.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str, mode: u32) -> Temporary {
            let path = std::env::temp_dir().join(format!("calomel-job-key-{}-{name}", std::process::id()));
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Temporary(path)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn hexadecimal_text_is_the_key_again() {
        let key = JobKey(std::array::from_fn(|index| 7 * index as u8));
        assert_eq!(from_hex(&hex(&key)).unwrap().0, key.0);
        for text in ["", "0", &"0".repeat(63), &"0".repeat(65), &"x".repeat(64), &"ü".repeat(32)] {
            assert!(from_hex(text).is_none(), "{text}");
        }
        assert_eq!(format!("{key:?}"), "JobKey(..)");
    }

    #[test]
    fn private_directory_hands_out_the_key() {
        let folder = Temporary::new("private", 0o700);
        let other = {
            let path = folder.0.clone();
            std::thread::spawn(move || hand_out(&plan(1, session(&path)), TimeLimit::new(LIMIT)).unwrap())
        };
        let made = hand_out(&plan(0, session(&folder.0)), TimeLimit::new(LIMIT)).unwrap();
        assert_eq!(made.0, other.join().unwrap().0);
        assert_ne!(made.0, [0; KEY_LEN]);
        let mode = fs::metadata(folder.0.join("calomel-job-key.7")).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn directory_that_others_may_enter_is_refused() {
        for mode in [0o750, 0o701, 0o777] {
            let folder = Temporary::new(&format!("{mode:o}"), mode);
            for rank in [0, 1] {
                let error = hand_out(&plan(rank, session(&folder.0)), TimeLimit::new(LIMIT)).unwrap_err().to_string();
                assert!(error.contains("PMIX_SERVER_TMPDIR=x") && error.contains(&format!("mode is {mode:o}")), "{error}");
            }
        }
    }

    #[test]
    fn rank_0_that_leaves_no_key_is_an_error_at_the_deadline() {
        let folder = Temporary::new("late", 0o700);
        let limit = TimeLimit::new(Duration::from_millis(50));
        let error = hand_out(&plan(1, session(&folder.0)), limit).unwrap_err().to_string();
        assert!(error.contains("rank 0 has left no"), "{error}");
    }

    #[test]
    fn ways_without_a_private_channel_are_refused() {
        let meet = StartMethod::Meet { address: "tcp://n1:7".parse().unwrap(), variable: "MASTER_ADDR=n1".to_owned() };
        let shared =
            StartMethod::Directory { path: "/x".into(), variable: "CALOMEL_RENDEZVOUS=dir:/x".to_owned(), private: false };
        for (method, name) in [
            (meet, "MASTER_ADDR=n1"),
            (shared, "CALOMEL_RENDEZVOUS=dir:/x"),
            (StartMethod::List(Vec::new()), "CALOMEL_ENDPOINTS"),
        ] {
            let error = hand_out(&plan(0, method), TimeLimit::new(LIMIT)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("CALOMEL_PRE_SHARED_KEY_FILE"), "{error}");
        }
        assert!(hand_out(&plan(0, StartMethod::Alone), TimeLimit::new(LIMIT)).is_ok());
    }
}
