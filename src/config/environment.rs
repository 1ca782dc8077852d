//! A configuration from environment variables.

use std::env;

use serde::de::value::{Error as ValueError, SeqDeserializer, StrDeserializer};
use serde::de::{self, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::{EngineConfig, FIELDS, HiddenKey, invalid, with_field};
use crate::Result;

pub(super) const PREFIX: &str = "CALOMEL_";
/// The one variable without a field: files do not hold the key itself.
const KEY: &str = "CALOMEL_PRE_SHARED_KEY";
/// Variables with the same prefix that set no field: those of launchers, of the transport that loads a library, and of this
/// crate's tests and benchmarks.
const OTHERS: &[&str] = &[
    "RANK",
    "SIZE",
    "RENDEZVOUS",
    "ENDPOINTS",
    "STATS",
    "STATS_SIGNAL",
    "JOB",
    "LIBFABRIC",
    "VERBS",
    "VERBS_",
    "TEST_",
    "BENCH_",
    "CHAOS_",
    "SOAK_",
    "ROUNDS",
    "WORKLOAD_",
    "OFI_",
    "MAY_",
];
/// A name that differs from a variable's by so many letters is taken for a mistake.
const NEAR: usize = 2;

impl EngineConfig {
    /// The configuration that the environment variables of this process set, with the defaults for the rest.
    ///
    /// # Errors
    /// As [`EngineConfig::with_env`].
    pub fn from_env() -> Result<EngineConfig> {
        EngineConfig::default().with_env()
    }

    /// The same configuration, with the fields replaced that environment variables of this process set: `CALOMEL_` and the name
    /// of the field in capital letters, such as `CALOMEL_HANDLER_THREADS`. Values are as in a file, without quotes; those of
    /// lists are separated by commas, and `true` and `1` are yes, `false` and `0` no. An empty variable sets nothing.
    ///
    /// `CALOMEL_PRE_SHARED_KEY` is the pre-shared key itself, as text, in place of `CALOMEL_PRE_SHARED_KEY_FILE`. Other
    /// processes of the same user can read the environment of a process: a file is safer.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the variable, for a value that can't be read, and for a variable that is
    /// hardly different from a known one. Other variables that begin with `CALOMEL_` are logged as warnings (target
    /// `calomel::config`), as they may be another program's.
    pub fn with_env(self) -> Result<EngineConfig> {
        let ours = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        let ours = ours.filter(|(name, _)| name.starts_with(PREFIX));
        let texts = ours.map(|(name, value)| match value.into_string() {
            Ok(value) => Ok((name, value)),
            Err(_) => Err(invalid(&name, "it is no UTF-8 text")),
        });
        self.with_variables(texts.collect::<Result<Vec<(String, String)>>>()?)
    }

    /// As [`EngineConfig::with_env`], with these variables instead of those of the process.
    ///
    /// ```
    /// use calomel::EngineConfig;
    ///
    /// # fn main() -> calomel::Result<()> {
    /// let config = EngineConfig::default().with_variables([("CALOMEL_LISTEN", "tcp, shm"), ("CALOMEL_PEER_TIMEOUT", "500ms")])?;
    /// assert_eq!(config.listen.len(), 2);
    /// let misspelt = EngineConfig::default().with_variables([("CALOMEL_LISTN", "tcp")]);
    /// assert!(misspelt.unwrap_err().to_string().contains("CALOMEL_LISTEN"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`EngineConfig::with_env`].
    pub fn with_variables<N: AsRef<str>, V: AsRef<str>>(
        mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Result<EngineConfig> {
        let mut key = None;
        let mut key_file = false;
        for (name, value) in variables {
            let (name, value) = (name.as_ref(), value.as_ref());
            let Some(part) = name.strip_prefix(PREFIX) else { continue };
            if name == KEY {
                key = Some(value.as_bytes().to_vec()).filter(|key| !key.is_empty());
            } else if let Some(field) = FIELDS.iter().find(|field| field.to_ascii_uppercase() == part) {
                if !value.trim().is_empty() {
                    let read = with_field(field, Variable(value)).map_err(|error: ValueError| invalid(name, error))?;
                    self.adopt(field, read);
                    key_file |= *field == "pre_shared_key_file";
                }
            } else if !is_of_others(part) {
                unknown(name)?;
            }
        }
        if key.is_some() && key_file {
            return Err(invalid(KEY, "CALOMEL_PRE_SHARED_KEY_FILE is set too"));
        }
        // One replaces the other where that came from a file or from the program.
        if key.is_some() {
            self.key = key.map(HiddenKey);
            self.pre_shared_key_file = None;
        } else if key_file {
            self.key = None;
        }
        Ok(self)
    }

    /// The names of all environment variables that [`EngineConfig::with_env`] reads, such as for a program's help text.
    pub fn variables() -> impl Iterator<Item = String> {
        FIELDS.iter().map(|field| format!("{PREFIX}{}", field.to_ascii_uppercase())).chain([KEY.to_owned()])
    }
}

/// Whether the variable of this name, without the prefix, is one that has another use.
pub(super) fn is_of_others(part: &str) -> bool {
    OTHERS.iter().any(|other| if other.ends_with('_') { part.starts_with(other) } else { part == *other })
}

/// Fails for a name that is near to those of variables.
fn unknown(name: &str) -> Result<()> {
    let near: Vec<String> = EngineConfig::variables().filter(|known| distance(name, known) <= NEAR).collect();
    if near.is_empty() {
        tracing::warn!(target: "calomel::config", variable = name, "an environment variable of this name sets nothing");
        return Ok(());
    }
    Err(invalid(name, format!("there is no such variable: did you mean {}?", near.join(" or "))))
}

/// How many letters have to be inserted, left out or replaced to make one text of the other (Levenshtein's distance).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, right) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

type Parsed<T> = std::result::Result<T, ValueError>;

/// The text of a variable, as a value of the type that is wanted.
#[derive(Clone, Copy)]
struct Variable<'de>(&'de str);

impl<'de> IntoDeserializer<'de, ValueError> for Variable<'de> {
    type Deserializer = Variable<'de>;

    fn into_deserializer(self) -> Variable<'de> {
        self
    }
}

impl<'de> Deserializer<'de> for Variable<'de> {
    type Error = ValueError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Parsed<V::Value> {
        visitor.visit_borrowed_str(self.0.trim())
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Parsed<V::Value> {
        match self.0.trim() {
            "true" | "1" => visitor.visit_bool(true),
            "false" | "0" => visitor.visit_bool(false),
            other => Err(de::Error::invalid_value(de::Unexpected::Str(other), &"true, 1, false or 0")),
        }
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Parsed<V::Value> {
        match self.0.trim().parse() {
            Ok(number) => visitor.visit_u32(number),
            Err(_) => Err(de::Error::invalid_value(de::Unexpected::Str(self.0), &visitor)),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Parsed<V::Value> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Parsed<V::Value> {
        visitor.visit_seq(SeqDeserializer::new(self.0.split(',').map(Variable)))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Parsed<V::Value> {
        StrDeserializer::new(self.0.trim()).deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct tuple
        tuple_struct map struct identifier ignored_any
    }
}
