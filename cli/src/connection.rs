//! The options of each command that connects.

use std::path::PathBuf;

use calomel::{EngineBuilder, EngineConfig};
use clap::Args;

use crate::Outcome;

#[derive(Args)]
pub(crate) struct Connection {
    /// File with the pre-shared key of the engines. A line break at its end is not part of the key.
    #[arg(long, value_name = "FILE", env = "CALOMEL_PRE_SHARED_KEY_FILE", help_heading = "Connection")]
    key_file: Option<PathBuf>,
    /// Stay on the transport of the address also where both processes are on this machine.
    #[arg(long, help_heading = "Connection")]
    no_same_host_upgrade: bool,
    #[cfg(feature = "tls")]
    #[command(flatten)]
    tls: TlsFiles,
}

#[cfg(feature = "tls")]
#[derive(Args)]
#[command(next_help_heading = "TLS")]
struct TlsFiles {
    /// PEM file of the certificates that are trusted. Connections over tcp use TLS then.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// PEM file of the own certificate.
    #[arg(long, value_name = "FILE", requires_all = ["ca", "private_key"])]
    certificate: Option<PathBuf>,
    /// PEM file of its private key.
    #[arg(long, value_name = "FILE", requires = "certificate")]
    private_key: Option<PathBuf>,
    /// The name that the peer's certificate must have, if not the address.
    #[arg(long, value_name = "NAME", requires = "ca")]
    server_name: Option<String>,
}

impl Connection {
    /// A builder of an engine with these options.
    pub(crate) fn builder(&self) -> Outcome<EngineBuilder> {
        let mut config = EngineConfig::default();
        config.same_host_upgrade = !self.no_same_host_upgrade;
        config.pre_shared_key_file = self.key_file.clone();
        #[cfg(feature = "tls")]
        {
            let TlsFiles { ca, certificate, private_key, server_name } = &self.tls;
            (config.tls_ca, config.tls_certificate) = (ca.clone(), certificate.clone());
            (config.tls_key, config.tls_server_name) = (private_key.clone(), server_name.clone());
        }
        Ok(config.builder()?)
    }

    /// The same options as arguments, for a process that this one starts.
    pub(crate) fn arguments(&self) -> Vec<std::ffi::OsString> {
        let mut arguments = Vec::new();
        let mut add = |name: &str, value: &std::ffi::OsStr| arguments.extend([name.into(), value.to_owned()]);
        if let Some(path) = &self.key_file {
            add("--key-file", path.as_os_str());
        }
        #[cfg(feature = "tls")]
        {
            let TlsFiles { ca, certificate, private_key, server_name } = &self.tls;
            for (name, path) in [("--ca", ca), ("--certificate", certificate), ("--private-key", private_key)] {
                if let Some(path) = path {
                    add(name, path.as_os_str());
                }
            }
            if let Some(name) = server_name {
                add("--server-name", name.as_ref());
            }
        }
        if self.no_same_host_upgrade {
            arguments.push("--no-same-host-upgrade".into());
        }
        arguments
    }
}
