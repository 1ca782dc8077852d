//! Texts that are cut to what a message may hold.

/// The beginning of `text`: up to `limit` bytes, in whole characters. `str::floor_char_boundary` does it from Rust 1.91 on.
pub(crate) fn clipped(text: &str, limit: usize) -> &str {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
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
