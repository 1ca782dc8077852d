//! Texts: cut to what a message may hold, and hexadecimal digits.

use std::fmt::{self, Display, Write};

/// The beginning of `text`: up to `limit` bytes, in whole characters. `str::floor_char_boundary` does it from Rust 1.91 on.
pub(crate) fn clipped(text: &str, limit: usize) -> &str {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

/// The beginning of what `value` displays: up to `limit` bytes, in whole characters. The rest is not written.
pub(crate) fn beginning(value: impl Display, limit: usize) -> String {
    struct Beginning(String, usize);
    impl fmt::Write for Beginning {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let Beginning(written, limit) = self;
            let fits = clipped(text, *limit - written.len());
            written.push_str(fits);
            if fits.len() < text.len() { Err(fmt::Error) } else { Ok(()) }
        }
    }
    let mut written = Beginning(String::new(), limit);
    // Fails where the text is too long, or the value's `Display` does.
    let _ = write!(written, "{value}");
    written.0
}

/// Bytes in lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Reads so many bytes in lower-case hexadecimal digits; `None` for any other text.
pub(crate) fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    any_from_hex(text)?.try_into().ok()
}

/// As `from_hex`, for any number of bytes.
pub(crate) fn any_from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_clipped_between_characters() {
        let beginnings: Vec<&str> = (0..=7).map(|limit| clipped("aü€", limit)).collect();
        assert_eq!(beginnings, ["", "a", "a", "aü", "aü", "aü", "aü€", "aü€"]);
    }

    #[test]
    fn beginning_of_what_a_value_displays() {
        let shown = |limit| beginning(format_args!("{}{}", "ab", "ü€"), limit);
        assert_eq!([0, 1, 2, 3, 4, 6, 7, 8].map(shown), ["", "a", "ab", "ab", "abü", "abü", "abü€", "abü€"]);
        struct Endless;
        impl Display for Endless {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                loop {
                    f.write_str("-")?;
                }
            }
        }
        assert_eq!(beginning(Endless, 4), "----");
    }

    #[test]
    fn hexadecimal_digits_are_the_bytes_again() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(any_from_hex(&hex(&all)), Some(all));
        assert_eq!(from_hex("00fe"), Some([0, 0xfe]));
        assert_eq!(any_from_hex(""), Some(vec![]));
        for text in ["0", "0x", "FE", "ü", "fe ", "+1"] {
            assert_eq!(any_from_hex(text), None, "{text}");
        }
        assert_eq!(from_hex::<3>("00fe"), None);
    }
}
