//! The options of each command that connects.

use std::fs;
use std::path::PathBuf;

use calomel::{Engine, EngineBuilder};
use clap::Args;

use crate::{Failure, Outcome, about};

#[derive(Args)]
pub(crate) struct Connection {
    /// File with the pre-shared key of the engines. White space at its end does not belong to the key.
    #[arg(long, value_name = "FILE", env = "CALOMEL_KEY_FILE", help_heading = "Connection")]
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
        let mut builder = Engine::builder();
        if self.no_same_host_upgrade {
            builder = builder.same_host_upgrade(false);
        }
        if let Some(path) = &self.key_file {
            let key = fs::read(path).map_err(about(path))?;
            let key = key.trim_ascii_end();
            if key.is_empty() {
                return Err(Failure::Other(format!("{}: there is no key in it", path.display())));
            }
            builder = builder.pre_shared_key(key);
        }
        #[cfg(feature = "tls")]
        if let Some(ca) = &self.tls.ca {
            let mut tls = calomel::Tls::trusting(&fs::read(ca).map_err(about(ca))?)?;
            if let (Some(certificate), Some(key)) = (&self.tls.certificate, &self.tls.private_key) {
                tls = tls.identity(&fs::read(certificate).map_err(about(certificate))?, &fs::read(key).map_err(about(key))?)?;
            }
            if let Some(name) = &self.tls.server_name {
                tls = tls.server_name(name)?;
            }
            builder = builder.tls(tls);
        }
        Ok(builder)
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
