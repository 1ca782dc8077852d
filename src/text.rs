//! Texts: cut to what a message may hold, and hexadecimal digits.

/// The beginning of `text`: up to `limit` bytes, in whole characters. `str::floor_char_boundary` does it from Rust 1.91 on.
pub(crate) fn clipped(text: &str, limit: usize) -> &str {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

/// Reads so many bytes in lower-case hexadecimal digits; `None` for any other text.
pub(crate) fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() != 2 * N || !text.bytes().all(is_digit) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::clipped;

    #[test]
    fn text_is_clipped_between_characters() {
        let beginnings: Vec<&str> = (0..=7).map(|limit| clipped("aü€", limit)).collect();
        assert_eq!(beginnings, ["", "a", "a", "aü", "aü", "aü", "aü€", "aü€"]);
    }
}
