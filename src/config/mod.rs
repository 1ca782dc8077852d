//! `EngineConfig`: every option of an engine that is data.

mod environment;
#[cfg(feature = "config")]
mod files;
mod forms;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::value::MapDeserializer;
use serde::de::{self, IntoDeserializer};
use serde::{Deserialize, Serialize};

use crate::progress::Progress;
use crate::proto;
use crate::{Address, Error, Result, Transport};

/// Largest eager limit: the message with its head has to fit into a frame of 1 MiB.
pub(crate) const MAX_EAGER: usize = 512 << 10;
/// Shortest key, in bytes: an attacker that has recorded a proof can try keys offline, and would find shorter ones.
pub(crate) const MIN_KEY: usize = 16;
/// Durations are at most a year, so that adding them to the clock can't overflow.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
pub(crate) const MIN_PEER_TIMEOUT: Duration = Duration::from_millis(10);

/// Default number of handler threads: enough for handlers that block; none is started before it is needed.
const HANDLER_THREADS: usize = 64;
/// The default byte limit for one peer allows so many messages of the largest size; that for all peers is so many times larger.
const MESSAGES: usize = 4;
const MIN_MESSAGE: usize = 16 << 20;

/// The options and limits of an engine, as data: read from a file or from environment variables, or set by the program.
///
/// Each field is what the method of [`EngineBuilder`](crate::EngineBuilder) with its name sets, and has the same default; a
/// field that is missing has it, and a field of another name is an error. What is no data, such as
/// [`authorize`](crate::EngineBuilder::authorize), is set on [`EngineConfig::builder`].
///
/// In formats for people, such as TOML and JSON, durations are texts such as `"30s"`, `"5ms"` or `"1m 30s"` (of `d`, `h`, `m`,
/// `s`, `ms`, `us`, `ns`) or a number of seconds, and sizes are texts such as `"64 MiB"` (of `B`, `KiB`, `MiB`, `GiB`, `TiB`, and
/// of `kB`, `MB`, `GB`, `TB`, which are powers of 1000) or a number of bytes.
///
/// A pre-shared key is in no file and no output of this type: a file names the file that has it. Equality compares it.
///
/// ```
/// use calomel::{Engine, EngineConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config: EngineConfig = serde_json::from_str(
///     r#"{ "listen": ["tcp://127.0.0.1:0"], "handler_threads": 4, "peer_timeout": "2s", "max_message_size": "8 MiB" }"#,
/// )?;
/// let server = Engine::from_config(&config)?;
/// assert_eq!(server.config().listen, [server.address()]); // the real port
/// assert_eq!(server.config().max_bytes_in_flight_per_peer, Some(64 << 20)); // computed
///
/// let mut config = EngineConfig::default();
/// config.transports.push(calomel::Transport::Tcp);
/// let client = config.builder()?.dial_filter(|address| address.to_string().starts_with("tcp://10.")).build()?;
/// # Ok(())
/// # }
/// ```
///
/// # Precedence
///
/// Nothing is read that the program does not ask for. The order of the calls is the precedence; the usual one is code, then
/// environment variables, then a file, then the default (`from_file` needs the feature `config`):
///
/// ```no_run
/// # #[cfg(feature = "config")]
/// # fn f() -> calomel::Result<()> {
/// let config = calomel::EngineConfig::from_file("storage.toml")?.with_env()?;
/// let engine = config.builder()?.remote_shutdown(false).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct EngineConfig {
    /// [`EngineBuilder::listen`](crate::EngineBuilder::listen); in text also the name of a transport alone.
    #[serde(deserialize_with = "forms::listen_addresses")]
    pub listen: Vec<Address>,
    /// [`EngineBuilder::advertise`](crate::EngineBuilder::advertise).
    pub advertise: Vec<Address>,
    /// [`EngineBuilder::transport`](crate::EngineBuilder::transport): those that must be available.
    pub transports: Vec<Transport>,
    /// [`EngineBuilder::handler_threads`](crate::EngineBuilder::handler_threads).
    #[serde(with = "forms::count")]
    pub handler_threads: usize,
    /// [`EngineBuilder::progress`](crate::EngineBuilder::progress): `"adaptive"`, `"park"`, `"spin"` or `"external"`.
    pub progress: Progress,
    /// [`EngineBuilder::default_timeout`](crate::EngineBuilder::default_timeout).
    #[serde(with = "forms::duration")]
    pub default_timeout: Duration,
    /// [`EngineBuilder::max_message_size`](crate::EngineBuilder::max_message_size), in bytes.
    #[serde(with = "forms::size")]
    pub max_message_size: usize,
    /// [`EngineBuilder::eager_limit`](crate::EngineBuilder::eager_limit), in bytes; at most 512 KiB.
    #[serde(with = "forms::size")]
    pub eager_limit: usize,
    /// [`EngineBuilder::eager_bulk_limit`](crate::EngineBuilder::eager_bulk_limit), in bytes.
    #[serde(with = "forms::size")]
    pub eager_bulk_limit: usize,
    /// [`EngineBuilder::peer_timeout`](crate::EngineBuilder::peer_timeout); 10 ms to 365 days.
    #[serde(with = "forms::duration")]
    pub peer_timeout: Duration,
    /// [`EngineBuilder::connect_timeout`](crate::EngineBuilder::connect_timeout); at most 365 days.
    #[serde(with = "forms::duration")]
    pub connect_timeout: Duration,
    /// [`EngineBuilder::idle_timeout`](crate::EngineBuilder::idle_timeout); 1 ms to 365 days. `None`: never.
    #[serde(with = "forms::optional_duration")]
    pub idle_timeout: Option<Duration>,
    /// [`EngineBuilder::finalize_timeout`](crate::EngineBuilder::finalize_timeout); at most 365 days.
    #[serde(with = "forms::duration")]
    pub finalize_timeout: Duration,
    /// [`EngineBuilder::remote_shutdown`](crate::EngineBuilder::remote_shutdown).
    pub remote_shutdown: bool,
    /// [`EngineBuilder::statistics`](crate::EngineBuilder::statistics).
    pub statistics: bool,
    /// [`EngineBuilder::remote_stats`](crate::EngineBuilder::remote_stats).
    pub remote_stats: bool,
    /// [`EngineBuilder::slow_calls`](crate::EngineBuilder::slow_calls); `None`: they are not logged.
    #[serde(with = "forms::optional_duration")]
    pub slow_calls: Option<Duration>,
    /// A file whose content is the key of [`EngineBuilder::pre_shared_key`](crate::EngineBuilder::pre_shared_key): at least 16
    /// bytes. A line break at its end is not part of the key. The file is read when the engine is made.
    pub pre_shared_key_file: Option<PathBuf>,
    /// [`EngineBuilder::payload_checksums`](crate::EngineBuilder::payload_checksums).
    pub payload_checksums: bool,
    /// [`EngineBuilder::bulk_connections`](crate::EngineBuilder::bulk_connections); at most 16.
    #[serde(with = "forms::count")]
    pub bulk_connections: usize,
    /// [`EngineBuilder::same_host_upgrade`](crate::EngineBuilder::same_host_upgrade).
    pub same_host_upgrade: bool,
    /// [`EngineBuilder::shm_group`](crate::EngineBuilder::shm_group): the number of a group.
    pub shm_group: Option<u32>,
    /// [`EngineBuilder::shm_kernel_copy`](crate::EngineBuilder::shm_kernel_copy); `None`: as measured.
    pub shm_kernel_copy: Option<bool>,
    /// [`EngineBuilder::max_connections`](crate::EngineBuilder::max_connections).
    #[serde(with = "forms::count")]
    pub max_connections: usize,
    /// [`EngineBuilder::max_requests_per_peer`](crate::EngineBuilder::max_requests_per_peer).
    #[serde(with = "forms::count")]
    pub max_requests_per_peer: usize,
    /// [`EngineBuilder::max_requests`](crate::EngineBuilder::max_requests).
    #[serde(with = "forms::count")]
    pub max_requests: usize,
    /// [`EngineBuilder::max_transfers_per_peer`](crate::EngineBuilder::max_transfers_per_peer).
    #[serde(with = "forms::count")]
    pub max_transfers_per_peer: usize,
    /// [`EngineBuilder::max_bytes_in_flight_per_peer`](crate::EngineBuilder::max_bytes_in_flight_per_peer); at least
    /// `max_message_size`. `None`: computed, as described there.
    #[serde(with = "forms::optional_size")]
    pub max_bytes_in_flight_per_peer: Option<usize>,
    /// [`EngineBuilder::max_bytes_in_flight`](crate::EngineBuilder::max_bytes_in_flight); at least `max_message_size`. `None`:
    /// computed, as described there.
    #[serde(with = "forms::optional_size")]
    pub max_bytes_in_flight: Option<usize>,
    /// [`EngineBuilder::max_exposures`](crate::EngineBuilder::max_exposures).
    #[serde(with = "forms::count")]
    pub max_exposures: usize,
    /// A PEM file of certificates to trust. With it the engine uses TLS: see `EngineBuilder::tls` and `Tls`. The fields `tls_…`
    /// need the feature `tls`; their files are read when the engine is made.
    pub tls_ca: Option<PathBuf>,
    /// A PEM file of the engine's certificate, followed by the intermediate ones.
    pub tls_certificate: Option<PathBuf>,
    /// A PEM file of the private key of that certificate.
    pub tls_key: Option<PathBuf>,
    /// The name that the certificates of dialled peers must be valid for, in place of the address that is dialled.
    pub tls_server_name: Option<String>,
    /// Whether peers may connect without a certificate.
    pub tls_anonymous_clients: bool,
    #[serde(skip)]
    pub(crate) key: Option<HiddenKey>,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            listen: Vec::new(),
            advertise: Vec::new(),
            transports: Vec::new(),
            handler_threads: HANDLER_THREADS,
            progress: Progress::default(),
            default_timeout: Duration::from_secs(30),
            max_message_size: 64 << 20,
            eager_limit: 16 << 10,
            eager_bulk_limit: 4 << 10,
            peer_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            idle_timeout: None,
            finalize_timeout: Duration::from_secs(5),
            remote_shutdown: false,
            statistics: true,
            remote_stats: false,
            slow_calls: None,
            pre_shared_key_file: None,
            payload_checksums: false,
            bulk_connections: 1,
            same_host_upgrade: true,
            shm_group: None,
            shm_kernel_copy: None,
            max_connections: 16 << 10,
            max_requests_per_peer: 16 << 10,
            max_requests: 256 << 10,
            max_transfers_per_peer: 16 << 10,
            max_bytes_in_flight_per_peer: None,
            max_bytes_in_flight: None,
            max_exposures: 1 << 20,
            tls_ca: None,
            tls_certificate: None,
            tls_key: None,
            tls_server_name: None,
            tls_anonymous_clients: false,
            key: None,
        }
    }
}

/// Makes `FIELDS`, and `adopt`. A field that is missing in the list does not compile.
macro_rules! fields {
    ($($name:ident),* $(,)?) => {
        /// The names of the fields, which are those of their environment variables too.
        const FIELDS: &[&str] = &[$(stringify!($name)),*];

        impl EngineConfig {
            /// Takes one field from another configuration.
            fn adopt(&mut self, field: &str, from: EngineConfig) {
                let EngineConfig { $($name,)* key: _ } = from;
                match field {
                    $(stringify!($name) => self.$name = $name,)*
                    _ => {}
                }
            }
        }
    };
}

fields![
    listen,
    advertise,
    transports,
    handler_threads,
    progress,
    default_timeout,
    max_message_size,
    eager_limit,
    eager_bulk_limit,
    peer_timeout,
    connect_timeout,
    idle_timeout,
    finalize_timeout,
    remote_shutdown,
    statistics,
    remote_stats,
    slow_calls,
    pre_shared_key_file,
    payload_checksums,
    bulk_connections,
    same_host_upgrade,
    shm_group,
    shm_kernel_copy,
    max_connections,
    max_requests_per_peer,
    max_requests,
    max_transfers_per_peer,
    max_bytes_in_flight_per_peer,
    max_bytes_in_flight,
    max_exposures,
    tls_ca,
    tls_certificate,
    tls_key,
    tls_server_name,
    tls_anonymous_clients,
];

/// A configuration with one field set, as it is in a file.
fn with_field<'de, V, E>(field: &str, value: V) -> std::result::Result<EngineConfig, E>
where
    V: IntoDeserializer<'de, E>,
    E: de::Error,
{
    EngineConfig::deserialize(MapDeserializer::new(std::iter::once((field.to_owned(), value))))
}

fn invalid(field: &str, reason: impl fmt::Display) -> Error {
    Error::Config { field: field.to_owned(), reason: reason.to_string() }
}

impl EngineConfig {
    /// Checks what can be checked without making an engine, as [`Engine::from_config`](crate::Engine::from_config) and
    /// [`EngineConfig::builder`] do. Files are not read.
    ///
    /// # Errors
    /// [`Error::Config`], with the field and what it may be.
    pub fn validate(&self) -> Result<()> {
        if self.eager_limit > MAX_EAGER {
            return Err(invalid("eager_limit", format!("{} bytes are more than 512 KiB", self.eager_limit)));
        }
        for (field, value, min) in [
            ("peer_timeout", self.peer_timeout, MIN_PEER_TIMEOUT),
            ("connect_timeout", self.connect_timeout, Duration::ZERO),
            ("idle_timeout", self.idle_timeout.unwrap_or(LONGEST), proto::MIN_IDLE),
            ("finalize_timeout", self.finalize_timeout, Duration::ZERO),
        ] {
            if !(min..=LONGEST).contains(&value) {
                return Err(invalid(field, format!("{value:?} is not in the range of {min:?} to 365 days")));
            }
        }
        if self.bulk_connections > proto::MAX_LANES {
            let reason = format!("{} connections are more than {}", self.bulk_connections, proto::MAX_LANES);
            return Err(invalid("bulk_connections", reason));
        }
        for (field, value) in [
            ("max_bytes_in_flight_per_peer", self.max_bytes_in_flight_per_peer),
            ("max_bytes_in_flight", self.max_bytes_in_flight),
        ] {
            if let Some(value) = value.filter(|value| *value < self.max_message_size) {
                let reason = format!("{value} bytes are less than `max_message_size`, {} bytes", self.max_message_size);
                return Err(invalid(field, reason));
            }
        }
        self.validate_key()?;
        self.validate_tls()
    }

    fn validate_key(&self) -> Result<()> {
        let Some(HiddenKey(key)) = &self.key else { return Ok(()) };
        if self.pre_shared_key_file.is_some() {
            return Err(invalid("pre_shared_key_file", "there is a pre-shared key already"));
        }
        if key.len() < MIN_KEY {
            return Err(invalid("pre_shared_key", too_short(key)));
        }
        Ok(())
    }

    fn validate_tls(&self) -> Result<()> {
        let used = [
            ("tls_ca", self.tls_ca.is_some()),
            ("tls_certificate", self.tls_certificate.is_some()),
            ("tls_key", self.tls_key.is_some()),
            ("tls_server_name", self.tls_server_name.is_some()),
            ("tls_anonymous_clients", self.tls_anonymous_clients),
        ];
        let Some((field, _)) = used.into_iter().find(|(_, used)| *used) else { return Ok(()) };
        if cfg!(not(feature = "tls")) {
            return Err(invalid(field, "calomel is built without its feature `tls`"));
        }
        if self.tls_ca.is_none() {
            return Err(invalid(field, "TLS needs `tls_ca`, the certificates to trust"));
        }
        match (&self.tls_certificate, &self.tls_key) {
            (Some(_), None) => Err(invalid("tls_certificate", "it needs `tls_key`, its private key")),
            (None, Some(_)) => Err(invalid("tls_key", "it needs `tls_certificate`, the certificate of the key")),
            _ => Ok(()),
        }
    }

    /// How many bytes of messages the engine holds for one peer, and for all. With less than the largest message, every message
    /// of that size would be refused.
    pub(crate) fn byte_limits(&self) -> (usize, usize) {
        let message = self.max_message_size;
        let peer = self.max_bytes_in_flight_per_peer.unwrap_or_else(|| message.max(MIN_MESSAGE).saturating_mul(MESSAGES));
        let peer = peer.max(message);
        (peer, self.max_bytes_in_flight.unwrap_or_else(|| peer.saturating_mul(MESSAGES)).max(message))
    }

    /// Bytes of memory that the values in a response may take.
    pub(crate) fn value_limit(&self) -> usize {
        self.byte_limits().0.saturating_mul(proto::VALUES_COUNT)
    }

    /// The pre-shared key, from its file if it is there.
    pub(crate) fn load_key(&self) -> Result<Option<Vec<u8>>> {
        if let Some(HiddenKey(key)) = &self.key {
            return Ok(Some(key.clone()));
        }
        let field = "pre_shared_key_file";
        let Some(path) = &self.pre_shared_key_file else { return Ok(None) };
        let mut key = read(field, path)?;
        if key.ends_with(b"\n") {
            key.pop();
            key.pop_if(|last| *last == b'\r');
        }
        if key.len() < MIN_KEY {
            return Err(invalid(field, format!("{}: {}", path.display(), too_short(&key))));
        }
        Ok(Some(key))
    }

    /// What the fields `tls_…` say, from their files.
    #[cfg(feature = "tls")]
    pub(crate) fn load_tls(&self) -> Result<Option<crate::Tls>> {
        use crate::Tls;

        let Some(ca) = &self.tls_ca else { return Ok(None) };
        let mut tls = Tls::trusting(&read("tls_ca", ca)?).map_err(|error| unusable("tls_ca", ca, &error))?;
        if let (Some(certificate), Some(key)) = (&self.tls_certificate, &self.tls_key) {
            let identity = tls.identity(&read("tls_certificate", certificate)?, &read("tls_key", key)?);
            tls = identity.map_err(|error| {
                // Either of them may be the wrong one.
                let files = format!("{} and {}", certificate.display(), key.display());
                invalid("tls_certificate", format!("{files}: {error}"))
            })?;
        }
        if let Some(name) = &self.tls_server_name {
            tls = tls.server_name(name).map_err(|error| invalid("tls_server_name", error))?;
        }
        Ok(Some(tls.anonymous_clients(self.tls_anonymous_clients)))
    }
}

/// The content of a file that a field names.
fn read(field: &str, path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| unusable(field, path, &error))
}

fn unusable(field: &str, path: &Path, error: &dyn fmt::Display) -> Error {
    invalid(field, format!("{}: {error}", path.display()))
}

fn too_short(key: &[u8]) -> String {
    format!("the key has {} bytes, and keys shorter than {MIN_KEY} bytes can be guessed", key.len())
}

/// A pre-shared key, which is not printed.
#[derive(Clone, PartialEq)]
pub(crate) struct HiddenKey(pub Vec<u8>);

impl fmt::Debug for HiddenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}
