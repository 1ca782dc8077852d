//! What a launcher says in environment variables: this process's rank, the number of ranks, and how they find each other.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use crate::{Address, Error, Result, Transport};

/// How this process was started.
#[derive(Debug)]
pub(super) struct LaunchPlan {
    pub rank: usize,
    pub size: usize,
    /// The launcher's name of the job; empty where it has none.
    pub job: String,
    pub method: StartMethod,
}

/// How the ranks find each other.
#[derive(Debug, PartialEq)]
pub(super) enum StartMethod {
    /// There is one rank only.
    Alone,
    /// By a list of all addresses.
    List(Vec<Address>),
    /// Rank 0 listens at this address, which `variable` names.
    Meet { address: Address, variable: String },
    /// Rank 0 leaves its address in this directory, which `variable` names. `private`: the launcher has made it, for this job.
    Directory { path: PathBuf, variable: String, private: bool },
    /// Through the launcher, on this descriptor.
    Pmi(RawFd),
}

/// The environment: a function, so that tests need not change that of their process.
pub(super) type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

const ENDPOINTS: &str = "CALOMEL_ENDPOINTS";
const RENDEZVOUS: &str = "CALOMEL_RENDEZVOUS";
const RANK: &str = "CALOMEL_RANK";
const SIZE: &str = "CALOMEL_SIZE";
const JOB: &str = "CALOMEL_JOB";

/// Where each launcher says which rank this is, how many there are, and which job they are.
struct RankVariables {
    rank: &'static str,
    size: &'static str,
    job: &'static [&'static str],
}

const BY_HAND: RankVariables = RankVariables { rank: RANK, size: SIZE, job: &[] };
const TORCHRUN: RankVariables = RankVariables { rank: "RANK", size: "WORLD_SIZE", job: &["TORCHELASTIC_RUN_ID"] };
const PMI: RankVariables = RankVariables { rank: "PMI_RANK", size: "PMI_SIZE", job: &[] };
const OPEN_MPI: RankVariables =
    RankVariables { rank: "OMPI_COMM_WORLD_RANK", size: "OMPI_COMM_WORLD_SIZE", job: &["PMIX_NAMESPACE"] };
// Not SLURM_NTASKS: a batch script has that, too, and runs as one process.
const SLURM: RankVariables =
    RankVariables { rank: "SLURM_PROCID", size: "SLURM_STEP_NUM_TASKS", job: &["SLURM_JOB_ID", "SLURM_STEP_ID"] };

/// The first launcher that has started this process, from the inside out: torchrun may run under `srun`, and `mpiexec` starts
/// its own helpers with it.
const LAUNCHERS: [&RankVariables; 5] = [&BY_HAND, &TORCHRUN, &PMI, &OPEN_MPI, &SLURM];

/// Reads the environment.
///
/// # Errors
/// [`Error::Launch`], which names the variable that is missing or wrong.
pub(super) fn plan(environment: Environment<'_>) -> Result<LaunchPlan> {
    let vars = Variables(environment);
    if let Some(list) = vars.text(ENDPOINTS)? {
        return listed(&vars, &list);
    }
    if let Some(text) = vars.text(RENDEZVOUS)? {
        return named(&vars, &text);
    }
    for name in [RANK, SIZE] {
        if let Some(value) = vars.text(name)? {
            let plan = vars.plan(&BY_HAND, StartMethod::Alone)?;
            if plan.size > 1 {
                return Err(missing(RENDEZVOUS, &format!("{name}={value} is set")));
            }
            return Ok(plan);
        }
    }
    if let (Some(_), Some(master)) = (vars.text(TORCHRUN.rank)?, vars.text("MASTER_ADDR")?) {
        let port = vars.required("MASTER_PORT", "MASTER_ADDR")?;
        let variable = format!("MASTER_ADDR={master}, MASTER_PORT={port}");
        let address = meeting_point(&variable, &master, &port)?;
        return vars.plan(&TORCHRUN, StartMethod::Meet { address, variable });
    }
    if let Some(text) = vars.text("PMI_FD")? {
        let descriptor = number(&text).ok_or_else(|| wrong("PMI_FD", &text, "not the number of a descriptor"))?;
        return vars.plan(&PMI, StartMethod::Pmi(descriptor));
    }
    if vars.text(OPEN_MPI.rank)?.is_some() {
        return started_by_open_mpi(&vars);
    }
    if let (Some(_), Some(nodes)) = (vars.text(SLURM.rank)?, vars.text("SLURM_STEP_NODELIST")?) {
        return started_by_slurm(&vars, &nodes);
    }
    // Launchers that speak another protocol: better an error than as many worlds of one rank.
    for name in ["PMI_RANK", "PMIX_RANK"] {
        if let Some(rank) = vars.text(name)? {
            return Err(missing(RENDEZVOUS, &format!("{name}={rank} is set, and PMI_FD is not")));
        }
    }
    Ok(LaunchPlan { rank: 0, size: 1, job: String::new(), method: StartMethod::Alone })
}

/// `CALOMEL_ENDPOINTS=tcp://a:7000,tcp://b:7000`.
fn listed(vars: &Variables<'_>, list: &str) -> Result<LaunchPlan> {
    let parsed = list.split(',').map(|address| address.trim().parse::<Address>());
    let addresses = parsed.collect::<Result<Vec<Address>>>().map_err(|error| wrong(ENDPOINTS, list, error))?;
    let size = addresses.len();
    if let Some(stated) = vars.number::<usize>(SIZE)?.filter(|stated| *stated != size) {
        return Err(wrong(SIZE, stated, format!("{ENDPOINTS} has {size} addresses")));
    }
    let variables = vars.launcher(ENDPOINTS)?;
    let rank = vars.number(variables.rank)?.ok_or_else(|| missing(variables.rank, &format!("{ENDPOINTS} is set")))?;
    if rank >= size {
        return Err(wrong(variables.rank, rank, format!("ranks are less than {size}, the number of {ENDPOINTS}")));
    }
    Ok(LaunchPlan { rank, size, job: vars.job(variables)?, method: StartMethod::List(addresses) })
}

/// `CALOMEL_RENDEZVOUS=tcp://host:port` or `dir:/path`.
fn named(vars: &Variables<'_>, text: &str) -> Result<LaunchPlan> {
    let variable = format!("{RENDEZVOUS}={text}");
    let method = if let Some(path) = text.strip_prefix("dir:") {
        StartMethod::Directory { path: path.into(), variable, private: false }
    } else {
        let address = text.parse::<Address>().map_err(|_| wrong(RENDEZVOUS, text, "neither tcp://host:port nor dir:/path"))?;
        if address.scheme() != Transport::Tcp || !address.is_dialable() {
            return Err(wrong(RENDEZVOUS, text, "not the tcp address of one host, with its port"));
        }
        StartMethod::Meet { address, variable }
    };
    vars.plan(vars.launcher(RENDEZVOUS)?, method)
}

/// `mpirun` of Open MPI: on one host, its ranks share the directory of their session. Its own protocol, PMIx, is no simple one.
fn started_by_open_mpi(vars: &Variables<'_>) -> Result<LaunchPlan> {
    let plan = vars.plan(&OPEN_MPI, StartMethod::Alone)?;
    if plan.size == 1 {
        return Ok(plan);
    }
    let here = vars.number::<usize>("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    if here.is_some_and(|here| here < plan.size) {
        let why = "Open MPI has started ranks on several hosts, and its session directory is on one: name a shared directory, or \
                   a port of rank 0's host (mpirun -x CALOMEL_RENDEZVOUS=…)";
        return Err(Error::Launch { what: format!("{RENDEZVOUS} is not set"), reason: why.to_owned() });
    }
    let name = "PMIX_SERVER_TMPDIR";
    let path =
        vars.text(name)?.ok_or_else(|| missing(RENDEZVOUS, "OMPI_COMM_WORLD_RANK is set, and PMIX_SERVER_TMPDIR is not"))?;
    let method = StartMethod::Directory { variable: format!("{name}={path}"), path: path.into(), private: true };
    Ok(LaunchPlan { method, ..plan })
}

/// `srun` without PMI: rank 0 runs on the first host of the step, and listens at a port that is reserved for the step, or at
/// one that depends on the numbers of job and step.
fn started_by_slurm(vars: &Variables<'_>, nodes: &str) -> Result<LaunchPlan> {
    const FIRST_PORT: u32 = 20_000;
    // Up to where systems take ports of outgoing connections from.
    const PORTS: u32 = 12_000;
    let host = first_host(nodes).ok_or_else(|| wrong("SLURM_STEP_NODELIST", nodes, "not a list of hosts"))?;
    let port = match vars.text("SLURM_STEP_RESV_PORTS")? {
        Some(ports) => ports.split(['-', ',']).next().unwrap_or_default().to_owned(),
        None => {
            let job: u32 = vars.number("SLURM_JOB_ID")?.unwrap_or(0);
            let step: u32 = vars.number("SLURM_STEP_ID")?.unwrap_or(0);
            (FIRST_PORT + job.wrapping_mul(31).wrapping_add(step) % PORTS).to_string()
        }
    };
    let variable = format!("SLURM_STEP_NODELIST={nodes}");
    let address = meeting_point(&variable, &host, &port)?;
    vars.plan(&SLURM, StartMethod::Meet { address, variable: format!("{variable}, at {host}:{port}") })
}

/// The first host of Slurm's list: `n01` of `n[01-04,07],m1`.
fn first_host(nodes: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = nodes;
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        let Some(ranges) = rest[end..].strip_prefix('[') else { break };
        let (numbers, behind) = ranges.split_once(']')?;
        host.push_str(numbers.split(['-', ',']).next()?);
        rest = behind;
    }
    Some(host).filter(|host| !host.is_empty())
}

/// The address of rank 0 where a variable names its host, and a port.
fn meeting_point(variable: &str, host: &str, port: &str) -> Result<Address> {
    let bare_v6 = host.contains(':') && !host.starts_with('[');
    let text = if bare_v6 { format!("tcp://[{host}]:{port}") } else { format!("tcp://{host}:{port}") };
    let failed = |reason: String| Error::Launch { what: variable.to_owned(), reason };
    let address = text.parse::<Address>().map_err(|error| failed(error.to_string()))?;
    if address.is_dialable() { Ok(address) } else { Err(failed(format!("{address} can't be dialled"))) }
}

fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    // Rust's parser takes a sign, which no launcher writes.
    text.parse::<T>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

fn wrong(name: &str, value: impl std::fmt::Display, why: impl std::fmt::Display) -> Error {
    Error::Launch { what: format!("{name}={value}"), reason: why.to_string() }
}

fn missing(name: &str, because: &str) -> Error {
    Error::Launch { what: format!("{name} is not set"), reason: format!("it is needed, since {because}") }
}

/// The environment variables. One that is empty counts as not set.
struct Variables<'a>(Environment<'a>);

impl Variables<'_> {
    fn text(&self, name: &str) -> Result<Option<String>> {
        let value = (self.0)(name).filter(|value| !value.is_empty());
        let text = value.map(|value| value.into_string().map_err(|value| wrong(name, value.display(), "not UTF-8")));
        text.transpose()
    }

    fn required(&self, name: &str, because: &str) -> Result<String> {
        self.text(name)?.ok_or_else(|| missing(name, &format!("{because} is set")))
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        number(&text).map(Some).ok_or_else(|| wrong(name, &text, "not a number"))
    }

    /// The launcher that says which rank this is.
    fn launcher(&self, because: &str) -> Result<&'static RankVariables> {
        for variables in LAUNCHERS {
            if self.text(variables.rank)?.is_some() {
                return Ok(variables);
            }
        }
        Err(missing(RANK, &format!("{because} is set")))
    }

    fn job(&self, variables: &RankVariables) -> Result<String> {
        if let Some(job) = self.text(JOB)? {
            return Ok(job);
        }
        let parts = variables.job.iter().map(|name| self.text(name)).collect::<Result<Vec<_>>>()?;
        Ok(parts.into_iter().flatten().collect::<Vec<String>>().join("."))
    }

    /// The plan for this start, with rank and size checked.
    fn plan(&self, variables: &RankVariables, method: StartMethod) -> Result<LaunchPlan> {
        let RankVariables { rank: rank_name, size: size_name, .. } = *variables;
        let size = self.number(size_name)?.ok_or_else(|| missing(size_name, &format!("{rank_name} is set")))?;
        let rank = self.number(rank_name)?.ok_or_else(|| missing(rank_name, &format!("{size_name} is set")))?;
        if size == 0 {
            return Err(wrong(size_name, size, "a world has one rank at least"));
        }
        if rank >= size {
            return Err(wrong(rank_name, rank, format!("ranks are less than {size_name}={size}")));
        }
        let method = if size == 1 { StartMethod::Alone } else { method };
        Ok(LaunchPlan { rank, size, job: self.job(variables)?, method })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<LaunchPlan> {
        plan(&|name| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| OsString::from(value)))
    }

    fn meet(address: &str, variable: &str) -> StartMethod {
        StartMethod::Meet { address: address.parse().unwrap(), variable: variable.to_owned() }
    }

    fn directory(path: &str, variable: &str, private: bool) -> StartMethod {
        StartMethod::Directory { path: path.into(), variable: variable.to_owned(), private }
    }

    #[track_caller]
    fn assert_plan(variables: &[(&str, &str)], rank: usize, size: usize, job: &str, method: StartMethod) {
        let plan = of(variables).unwrap();
        assert_eq!((plan.rank, plan.size, &*plan.job, plan.method), (rank, size, job, method), "{variables:?}");
    }

    const TORCH: [(&str, &str); 4] = [("RANK", "2"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "n1"), ("MASTER_PORT", "29500")];
    const HYDRA: [(&str, &str); 3] = [("PMI_FD", "6"), ("PMI_RANK", "0"), ("PMI_SIZE", "4")];
    const OMPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_SERVER_TMPDIR", "/tmp/ompi.n1.0/pid.7"),
        ("PMIX_NAMESPACE", "345"),
    ];
    const SRUN: [(&str, &str); 5] = [
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_STEP_NODELIST", "n[01-04]"),
        ("SLURM_JOB_ID", "1000"),
        ("SLURM_STEP_ID", "2"),
    ];

    #[test]
    fn each_launcher_is_recognized() {
        assert_plan(&[], 0, 1, "", StartMethod::Alone);
        assert_plan(&[("CALOMEL_RANK", ""), ("RANK", "x")], 0, 1, "", StartMethod::Alone);
        assert_plan(&[("CALOMEL_RANK", "0"), ("CALOMEL_SIZE", "1")], 0, 1, "", StartMethod::Alone);
        let list = StartMethod::List(vec!["tcp://a:1".parse().unwrap(), "shm://b".parse().unwrap()]);
        assert_plan(&[("CALOMEL_ENDPOINTS", "tcp://a:1, shm://b"), ("CALOMEL_RANK", "1")], 1, 2, "", list);
        let by_hand = [("CALOMEL_RANK", "1"), ("CALOMEL_SIZE", "2"), ("CALOMEL_JOB", "a")];
        let dir = [&by_hand[..], &[("CALOMEL_RENDEZVOUS", "dir:/shared/x")]].concat();
        assert_plan(&dir, 1, 2, "a", directory("/shared/x", "CALOMEL_RENDEZVOUS=dir:/shared/x", false));
        let tcp = [&by_hand[..], &[("CALOMEL_RENDEZVOUS", "tcp://n1:7")]].concat();
        assert_plan(&tcp, 1, 2, "a", meet("tcp://n1:7", "CALOMEL_RENDEZVOUS=tcp://n1:7"));
        assert_plan(&TORCH, 2, 3, "", meet("tcp://n1:29500", "MASTER_ADDR=n1, MASTER_PORT=29500"));
        assert_plan(&HYDRA, 0, 4, "", StartMethod::Pmi(6));
        let session = directory("/tmp/ompi.n1.0/pid.7", "PMIX_SERVER_TMPDIR=/tmp/ompi.n1.0/pid.7", true);
        assert_plan(&OMPI, 1, 2, "345", session);
        let port = 20_000 + (1000 * 31 + 2) % 12_000;
        let address = format!("tcp://n01:{port}");
        assert_plan(&SRUN, 3, 4, "1000.2", meet(&address, &format!("SLURM_STEP_NODELIST=n[01-04], at n01:{port}")));
        let reserved = [&SRUN[..], &[("SLURM_STEP_RESV_PORTS", "12000-12003")]].concat();
        assert_plan(&reserved, 3, 4, "1000.2", meet("tcp://n01:12000", "SLURM_STEP_NODELIST=n[01-04], at n01:12000"));
        // A batch script runs once, whatever was allocated.
        assert_plan(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")], 0, 1, "", StartMethod::Alone);
    }

    #[test]
    fn what_is_closest_to_the_process_decides() {
        let all = [&TORCH[..], &HYDRA, &OMPI, &SRUN].concat();
        let ways = [
            ("CALOMEL_ENDPOINTS", "List"),
            ("CALOMEL_RENDEZVOUS", "Directory"),
            ("MASTER_ADDR", "Meet"),
            ("PMI_FD", "Pmi"),
            ("OMPI_COMM_WORLD_RANK", "Directory"),
            ("SLURM_PROCID", "Meet"),
        ];
        let named = [("CALOMEL_ENDPOINTS", "tcp://a:1,tcp://b:1,tcp://c:1"), ("CALOMEL_RENDEZVOUS", "dir:/x")];
        let mut variables = [&named[..], &all].concat();
        for (name, way) in ways {
            let plan = of(&variables).unwrap();
            assert!(format!("{:?}", plan.method).starts_with(way), "{name}: {plan:?}");
            variables.retain(|(own, _)| *own != name);
        }
        // The rank may be the launcher's where the rendezvous is not.
        let plan = of(&[&SRUN[..], &[("CALOMEL_RENDEZVOUS", "dir:/x")]].concat()).unwrap();
        assert_eq!((plan.rank, plan.size, &*plan.job), (3, 4, "1000.2"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let by_hand = |rank, size| [("CALOMEL_RANK", rank), ("CALOMEL_SIZE", size), ("CALOMEL_RENDEZVOUS", "dir:/x")];
        for (variables, part) in [
            (&by_hand("4", "4")[..], "CALOMEL_RANK=4: ranks are less than CALOMEL_SIZE=4"),
            (&by_hand("0", "0"), "CALOMEL_SIZE=0: a world has one rank"),
            (&by_hand("one", "4"), "CALOMEL_RANK=one: not a number"),
            (&by_hand("-1", "4"), "CALOMEL_RANK=-1: not a number"),
            (&by_hand("+1", "4"), "CALOMEL_RANK=+1: not a number"),
            (&[("CALOMEL_RANK", "1"), ("CALOMEL_RENDEZVOUS", "dir:/x")], "CALOMEL_SIZE is not set"),
            (&[("CALOMEL_RENDEZVOUS", "dir:/x")], "CALOMEL_RANK is not set"),
            (&[("CALOMEL_RANK", "1"), ("CALOMEL_SIZE", "2")], "CALOMEL_RENDEZVOUS is not set"),
            (&[("CALOMEL_SIZE", "2")], "CALOMEL_RANK is not set"),
            (&[("CALOMEL_ENDPOINTS", "tcp://a:1")], "CALOMEL_RANK is not set"),
            (&[("CALOMEL_ENDPOINTS", "tcp://a:1"), ("CALOMEL_RANK", "1")], "CALOMEL_RANK=1: ranks are less than 1"),
            (&[("CALOMEL_ENDPOINTS", "tcp://a:1,b"), ("CALOMEL_RANK", "0")], "CALOMEL_ENDPOINTS=tcp://a:1,b: invalid"),
            (&[("CALOMEL_ENDPOINTS", "tcp://a:1"), ("CALOMEL_SIZE", "2")], "CALOMEL_SIZE=2: CALOMEL_ENDPOINTS has 1"),
            (&[("CALOMEL_RENDEZVOUS", "/x")], "CALOMEL_RENDEZVOUS=/x: neither"),
            (&[("CALOMEL_RENDEZVOUS", "shm://x")], "CALOMEL_RENDEZVOUS=shm://x: not the tcp"),
            (&[("CALOMEL_RENDEZVOUS", "tcp://n1:0")], "CALOMEL_RENDEZVOUS=tcp://n1:0: not the tcp"),
            (&TORCH[..3], "MASTER_PORT is not set"),
            (&[TORCH[0], TORCH[2], TORCH[3]], "WORLD_SIZE is not set"),
            (&[TORCH[0], TORCH[1], TORCH[2], ("MASTER_PORT", "x")], "MASTER_PORT=x"),
            (&HYDRA[..2], "PMI_SIZE is not set"),
            (&HYDRA[1..], "CALOMEL_RENDEZVOUS is not set"),
            (&[("PMI_FD", "x")], "PMI_FD=x: not the number"),
            (&[("PMIX_RANK", "0")], "CALOMEL_RENDEZVOUS is not set"),
            (&OMPI[..3], "PMIX_SERVER_TMPDIR"),
            (&[OMPI[0], OMPI[1], ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")], "mpirun -x CALOMEL_RENDEZVOUS"),
            (&[SRUN[0], SRUN[1], ("SLURM_STEP_NODELIST", "n[1")], "SLURM_STEP_NODELIST=n[1: not a list"),
        ] {
            let error = of(variables).unwrap_err().to_string();
            assert!(error.contains(part), "{variables:?}: {error}");
        }
    }

    #[test]
    fn first_host_of_slurm_lists() {
        for (nodes, host) in
            [("n1", "n1"), ("n1,n2", "n1"), ("n[01-04,07],m1", "n01"), ("n[7,9]", "n7"), ("rack[1-2]n[3-4]-ib", "rack1n3-ib")]
        {
            assert_eq!(first_host(nodes).as_deref(), Some(host), "{nodes}");
        }
        assert_eq!(first_host(",n1"), None);
        assert_eq!(meeting_point("x", "fd00::2", "7").unwrap().to_string(), "tcp://[fd00::2]:7");
    }
}
