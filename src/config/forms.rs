//! How values look in a configuration: as texts for people, and as numbers in binary formats.

use std::fmt;
use std::time::Duration;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Address, IntoAddress};

const SECOND: u128 = 1_000_000_000;
/// In nanoseconds. A prefix of another unit comes after it, so that the longer one is found first.
const TIMES: &[(&str, u128)] = &[
    ("d", 24 * 3600 * SECOND),
    ("h", 3600 * SECOND),
    ("ms", 1_000_000),
    ("m", 60 * SECOND),
    ("s", SECOND),
    ("us", 1_000),
    ("µs", 1_000),
    ("ns", 1),
];
/// In bytes.
const SIZES: &[(&str, u128)] = &[
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

/// The number at the beginning of a text, in units of `unit`; `None` if there is none, or no whole number of them.
fn number(digits: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let denominator = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let parts = fraction.parse::<u128>().ok()?.checked_mul(unit)?;
    let whole = whole.parse::<u128>().ok()?.checked_mul(unit)?;
    if parts % denominator == 0 { whole.checked_add(parts / denominator) } else { None }
}

/// The sum of the parts of a text such as `1m 30s`; of a number alone, so many of `bare`.
fn sum(text: &str, units: &[(&str, u128)], bare: u128) -> Option<u128> {
    let mut total = 0u128;
    let mut rest = text.trim();
    loop {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (digits, unit) = (&rest[..end], rest[end..].trim_start());
        if unit.is_empty() && rest == text.trim() {
            return number(digits, bare);
        }
        let (name, size) = units.iter().find(|(name, _)| unit.starts_with(name))?;
        total = total.checked_add(number(digits, *size)?)?;
        let next = &unit[name.len()..];
        rest = next.trim_start();
        if rest.is_empty() {
            return Some(total);
        }
        // `5mx` is no minute.
        if !rest.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
    }
}

fn parse_duration(text: &str) -> Option<Duration> {
    let nanos = sum(text, TIMES, SECOND)?;
    Some(Duration::new(u64::try_from(nanos / SECOND).ok()?, u32::try_from(nanos % SECOND).ok()?))
}

fn parse_size(text: &str) -> Option<usize> {
    usize::try_from(sum(text, SIZES, 1)?).ok()
}

fn parse_count(text: &str) -> Option<usize> {
    text.trim().parse().ok()
}

/// The text of a duration, with the fewest units.
fn duration_text(duration: Duration) -> String {
    let mut rest = duration.as_nanos();
    let mut parts = Vec::new();
    for (unit, size) in [("d", 24 * 3600 * SECOND), ("h", 3600 * SECOND), ("m", 60 * SECOND), ("s", SECOND)].into_iter().chain([
        ("ms", 1_000_000),
        ("us", 1_000),
        ("ns", 1),
    ]) {
        if rest >= size {
            parts.push(format!("{}{unit}", rest / size));
            rest %= size;
        }
    }
    if parts.is_empty() { "0s".to_owned() } else { parts.join(" ") }
}

fn size_text(size: usize) -> String {
    let exact = |unit: &&(&str, u128)| size > 0 && (size as u128).is_multiple_of(unit.1);
    // Powers of 1000 are read, and not written.
    match SIZES[..4].iter().find(exact) {
        Some((name, unit)) => format!("{} {name}", size as u128 / unit),
        None => format!("{size} B"),
    }
}

/// Reads a number, or a text.
struct TextVisitor<T> {
    expected: &'static str,
    parse: fn(&str) -> Option<T>,
    number: fn(u64) -> Option<T>,
    float: fn(f64) -> Option<T>,
}

impl<T> Visitor<'_> for TextVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<T, E> {
        (self.number)(value).ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        match u64::try_from(value) {
            Ok(value) => self.visit_u64(value),
            Err(_) => Err(E::invalid_value(de::Unexpected::Signed(value), &self)),
        }
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<T, E> {
        (self.float)(value).ok_or_else(|| E::invalid_value(de::Unexpected::Float(value), &self))
    }
}

struct Time(Duration);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.serialize_str(&duration_text(self.0))
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        if !deserializer.is_human_readable() {
            return Duration::deserialize(deserializer).map(Time);
        }
        let visitor = TextVisitor {
            expected: "a duration such as \"30s\", \"5ms\" or \"1m 30s\", or a number of seconds",
            parse: parse_duration,
            number: |seconds| Some(Duration::from_secs(seconds)),
            float: |seconds| Duration::try_from_secs_f64(seconds).ok(),
        };
        deserializer.deserialize_any(visitor).map(Time)
    }
}

pub(super) mod duration {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        Time(*value).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        Time::deserialize(deserializer).map(|Time(duration)| duration)
    }
}

pub(super) mod optional_duration {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Time).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<Time>::deserialize(deserializer)?.map(|Time(duration)| duration))
    }
}

/// A number of bytes.
struct ByteSize(usize);

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.serialize_str(&size_text(self.0)) } else { self.0.serialize(serializer) }
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        if !deserializer.is_human_readable() {
            return usize::deserialize(deserializer).map(ByteSize);
        }
        let visitor = TextVisitor {
            expected: "a size such as \"64 MiB\", or a number of bytes",
            parse: parse_size,
            number: |bytes| usize::try_from(bytes).ok(),
            float: |_| None,
        };
        deserializer.deserialize_any(visitor).map(ByteSize)
    }
}

pub(super) mod size {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(value: &usize, serializer: S) -> Result<S::Ok, S::Error> {
        ByteSize(*value).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
        ByteSize::deserialize(deserializer).map(|ByteSize(size)| size)
    }
}

pub(super) mod optional_size {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(value: &Option<usize>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(ByteSize).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
        Ok(Option::<ByteSize>::deserialize(deserializer)?.map(|ByteSize(size)| size))
    }
}

pub(super) mod count {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(value: &usize, serializer: S) -> Result<S::Ok, S::Error> {
        // The integers of TOML are signed.
        if serializer.is_human_readable() && i64::try_from(*value).is_err() {
            serializer.collect_str(value)
        } else {
            value.serialize(serializer)
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
        if !deserializer.is_human_readable() {
            return usize::deserialize(deserializer);
        }
        deserializer.deserialize_any(TextVisitor {
            expected: "a whole number, not negative",
            parse: parse_count,
            number: |count| usize::try_from(count).ok(),
            float: |_| None,
        })
    }
}

pub(super) fn listen_addresses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Address>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.into_iter().map(|text| text.into_listen_address().map_err(de::Error::custom)).collect()
}
