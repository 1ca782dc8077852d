//! Durations and sizes, as people write them and as they are printed.

use std::time::Duration;

/// A duration: `250us`, `5ms`, `2s`, `1.5s`, `1m`; a plain number means seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, seconds) = match split_unit(text) {
        (number, "us" | "µs") => (number, 1e-6),
        (number, "ms") => (number, 1e-3),
        (number, "s" | "") => (number, 1.0),
        (number, "m" | "min") => (number, 60.0),
        _ => return Err("a duration is a number and a unit: 250us, 5ms, 2s, 1m".to_owned()),
    };
    let number: f64 = number.parse().map_err(|_| format!("`{number}` is not a number"))?;
    Duration::try_from_secs_f64(number * seconds).map_err(|error| error.to_string())
}

/// A size in bytes: `4096`, `64KiB`, `1MiB`, `1GiB`.
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    let (number, shift) = match split_unit(text) {
        (number, "" | "B") => (number, 0),
        (number, "KiB" | "K" | "k") => (number, 10),
        (number, "MiB" | "M") => (number, 20),
        (number, "GiB" | "G") => (number, 30),
        _ => return Err("a size is a number of bytes, KiB, MiB or GiB".to_owned()),
    };
    let number: usize = number.parse().map_err(|_| format!("`{number}` is not a whole number"))?;
    number.checked_mul(1 << shift).ok_or_else(|| "that is too much".to_owned())
}

fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

/// Nanoseconds, with three digits and their unit.
pub(crate) fn time(nanoseconds: f64) -> String {
    match nanoseconds {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{} us", digits(ns / 1e3)),
        ns if ns < 1e9 => format!("{} ms", digits(ns / 1e6)),
        ns => format!("{} s", digits(ns / 1e9)),
    }
}

/// Operations per second.
pub(crate) fn rate(per_second: f64) -> String {
    match per_second {
        rate if rate >= 1e6 => format!("{} M/s", digits(rate / 1e6)),
        rate if rate >= 1e3 => format!("{} k/s", digits(rate / 1e3)),
        rate => format!("{} /s", digits(rate)),
    }
}

/// Bytes per second.
pub(crate) fn bandwidth(per_second: f64) -> String {
    match per_second {
        rate if rate >= 1e9 => format!("{} GB/s", digits(rate / 1e9)),
        rate if rate >= 1e6 => format!("{} MB/s", digits(rate / 1e6)),
        rate if rate >= 1e3 => format!("{} kB/s", digits(rate / 1e3)),
        rate => format!("{rate:.0} B/s"),
    }
}

/// Bytes, with three digits and their unit.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    units
        .into_iter()
        .find(|(shift, _)| bytes >= 1 << shift)
        .map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", digits(bytes as f64 / (1u64 << shift) as f64)))
}

/// A size that someone has chosen, exactly.
pub(crate) fn size(bytes: usize) -> String {
    [(30, "GiB"), (20, "MiB"), (10, "KiB")]
        .into_iter()
        .find(|(shift, _)| bytes >= 1 << shift && bytes.trailing_zeros() >= *shift)
        .map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}

/// Three digits, of which the last ones may be behind the point.
fn digits(number: f64) -> String {
    match number {
        n if n < 9.995 => format!("{n:.2}"),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_number_and_a_unit() {
        let parsed = ["250us", "5ms", "2s", "1.5 s", "1m", "3"].map(parse_duration);
        let expected = [250, 5_000, 2_000_000, 1_500_000, 60_000_000, 3_000_000].map(|us| Ok(Duration::from_micros(us)));
        assert_eq!(parsed, expected);
        for wrong in ["", "s", "-1s", "1h", "1e300m", "inf"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_whole_numbers_of_bytes() {
        assert_eq!(["0", "17B", "64KiB", "1 MiB", "2G"].map(parse_size), [0, 17, 64 << 10, 1 << 20, 2 << 30].map(Ok));
        for wrong in ["", "KiB", "1.5MiB", "1KB", "99999999999999999999", "99999999999GiB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        assert_eq!([0, 1000, 4096, 3 << 20].map(size), ["0 B", "1000 B", "4 KiB", "3 MiB"]);
    }

    #[test]
    fn figures_have_three_digits() {
        assert_eq!([999.0, 1_234.0, 99_960.0, 5e8, 2.5e9].map(time), ["999 ns", "1.23 us", "100 us", "500 ms", "2.50 s"]);
        assert_eq!([9.0, 1_500.0, 1.1e6].map(rate), ["9.00 /s", "1.50 k/s", "1.10 M/s"]);
        assert_eq!([2e7, 3.456e9].map(bandwidth), ["20.0 MB/s", "3.46 GB/s"]);
        assert_eq!([0.0, 999.0, 1_500.0].map(bandwidth), ["0 B/s", "999 B/s", "1.50 kB/s"]);
        assert_eq!([0, 1023, 1024, 5 << 30].map(bytes), ["0 B", "1023 B", "1.00 KiB", "5.00 GiB"]);
    }
}
