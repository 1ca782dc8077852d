//! A configuration from TOML and JSON.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use serde::de::{self, IntoDeserializer};

use super::{EngineConfig, invalid, with_field};
use crate::{Error, Result};

impl EngineConfig {
    /// Reads a configuration in TOML. Needs the feature `config`.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let config = calomel::EngineConfig::from_toml("listen = ['tcp://0.0.0.0:7000']\npeer_timeout = '2s'")?;
    /// assert_eq!(config.peer_timeout, Duration::from_secs(2));
    /// # Ok::<(), calomel::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] with the field and the line.
    pub fn from_toml(text: &str) -> Result<EngineConfig> {
        toml::from_str(text).map_err(|error: toml::de::Error| {
            // Only the message: the whole error quotes the line, which may have a key in it by mistake.
            let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let place = line.map(|line| format!(" at line {line}")).unwrap_or_default();
            let field = toml::from_str::<toml::Table>(text).ok().and_then(culprit);
            invalid(field.as_deref().unwrap_or("TOML"), format!("{}{place}", error.message()))
        })
    }

    /// Reads a configuration in JSON. Needs the feature `config`.
    ///
    /// # Errors
    /// [`Error::Config`] with the field and the line.
    pub fn from_json(text: &str) -> Result<EngineConfig> {
        serde_json::from_str(text).map_err(|error: serde_json::Error| {
            let fields = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).ok();
            invalid(fields.and_then(culprit).as_deref().unwrap_or("JSON"), error)
        })
    }

    /// Reads a configuration from a file, whose name ends in `.toml` or `.json`. Needs the feature `config`.
    ///
    /// # Errors
    /// [`Error::Config`] with the field and the line, [`Error::Io`] when the file can't be read, and [`Error::Unsupported`] for
    /// another ending.
    pub fn from_file(path: impl AsRef<Path>) -> Result<EngineConfig> {
        let path = path.as_ref();
        let parse = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => EngineConfig::from_toml,
            Some("json") => EngineConfig::from_json,
            _ => {
                let reason = "its name ends neither in `.toml` nor in `.json`".to_owned();
                return Err(Error::Unsupported { what: format!("the configuration file {}", path.display()), reason });
            }
        };
        let text = fs::read_to_string(path);
        let text = text.map_err(|error| Error::io(format!("can't read the configuration file {}", path.display()), error))?;
        parse(&text).map_err(|error| match error {
            Error::Config { field, reason } => Error::Config { field, reason: in_file(path, &reason) },
            other => other,
        })
    }
}

fn in_file(path: &Path, reason: &dyn Display) -> String {
    format!("{}: {reason}", path.display())
}

/// The first field that can't be read, or is none.
fn culprit<'de, V, E>(fields: impl IntoIterator<Item = (String, V)>) -> Option<String>
where
    V: IntoDeserializer<'de, E>,
    E: de::Error,
{
    fields.into_iter().find_map(|(field, value)| with_field::<V, E>(&field, value).is_err().then_some(field))
}
