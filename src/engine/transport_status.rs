//! Which transports there are, and what this machine does not let them do.

use std::fmt;
use std::fs;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::address::OfiProvider;
use crate::progress::Core;
use crate::{EngineConfig, Error, Transport};

/// What a transport can do in this build, on this machine, for this process: see
/// [`Engine::transports`](crate::Engine::transports).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TransportStatus {
    /// The transport.
    pub transport: Transport,
    /// Why the engine can't use it; `None`: it can.
    pub unavailable: Option<String>,
    /// Limits of the system, and what it does not permit.
    pub notes: Vec<String>,
}

impl fmt::Display for TransportStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.unavailable {
            Some(reason) => format!("unavailable: {reason}"),
            None => "available".to_owned(),
        };
        write!(f, "{}: {state}", self.transport)?;
        self.notes.iter().try_for_each(|note| write!(f, "; {note}"))
    }
}

pub(super) fn transports(core: &Core, config: &EngineConfig) -> Vec<TransportStatus> {
    let status = |transport| TransportStatus {
        transport,
        unavailable: core.transport(transport).err().map(|error| match error {
            Error::Unsupported { reason, .. } => reason,
            other => other.to_string(),
        }),
        notes: notes(transport, config),
    };
    let transports = [Transport::Tcp, Transport::Shm, Transport::Verbs, Transport::Loop].into_iter();
    // Without the feature, one line says so for all providers.
    let providers = if cfg!(feature = "ofi") { &OfiProvider::ALL[..] } else { &OfiProvider::ALL[..1] };
    transports.chain(providers.iter().copied().map(Transport::Ofi)).map(status).collect()
}

fn notes(transport: Transport, config: &EngineConfig) -> Vec<String> {
    let limit = |resource, what| getrlimit(resource).current.map(|limit| format!("{what}: {limit}"));
    let note = match transport {
        Transport::Tcp => limit(Resource::Nofile, "open files (ulimit -n), one for each connection"),
        Transport::Shm if config.shm_kernel_copy == Some(false) => Some("copies by the kernel are turned off".to_owned()),
        Transport::Shm => kernel_copy(),
        Transport::Verbs => limit(Resource::Memlock, "bytes of memory that can be locked (ulimit -l)"),
        Transport::Ofi(_) | Transport::Loop | Transport::Nowhere => None,
    };
    note.into_iter().collect()
}

/// Why the kernel may not copy from process to process.
fn kernel_copy() -> Option<String> {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    let scope = scope.trim();
    let reason = "where it forbids one process to read another's memory, bulk data goes through a ring";
    (scope != "0").then(|| format!("kernel.yama.ptrace_scope is {scope}: {reason}"))
}
