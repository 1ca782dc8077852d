//! The engine that exposed a bulk, and where it listens, as it travels with the bulk.

use std::sync::{OnceLock, Weak};

use smallvec::SmallVec;

use crate::Address;
use crate::address::MAX_LEN;
use crate::progress::Core;
use crate::proto::MAX_ADDRESSES;

/// The engine that exposed a bulk, wherever the bulk is now.
pub(crate) struct Origin {
    /// That engine's core, in its own process; dangling elsewhere.
    pub core: Weak<Core>,
    pub incarnation: u64,
    texts: AddressTexts,
    /// Of a received bulk: where the peer that sent it is, if that peer is the owner.
    seen_at: Option<Address>,
    /// Most bulks are used without their addresses, so they are parsed when one is asked for.
    addresses: OnceLock<Vec<Address>>,
}

impl Origin {
    /// An engine of this process, which listens at these addresses.
    pub(super) fn own(core: Weak<Core>, incarnation: u64, addresses: Vec<Address>) -> Origin {
        let mut texts = AddressTexts::default();
        addresses.iter().for_each(|address| texts.push(&address.to_string()));
        Origin { core, incarnation, texts, seen_at: None, addresses: addresses.into() }
    }

    /// An engine that a bulk of a peer names. `seen_at`: where the peer is, if it is that engine.
    pub(crate) fn received(incarnation: u64, texts: AddressTexts, seen_at: Option<Address>) -> Origin {
        Origin { core: Weak::new(), incarnation, texts, seen_at, addresses: OnceLock::new() }
    }

    /// Runs `f` with the addresses that are sent with a bulk, encoded.
    pub(crate) fn with_encoded_addresses<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        if self.core.strong_count() > 0 {
            return f(&self.texts.0);
        }
        // Where the bulk is forwarded, its next receiver sees another engine than the owner.
        let mut texts = AddressTexts::default();
        self.addresses().iter().for_each(|address| texts.push(&address.to_string()));
        f(&texts.0)
    }

    /// The addresses at which others may reach it. A wildcard address stands for the one that its connections come from.
    pub(crate) fn addresses(&self) -> &[Address] {
        self.addresses.get_or_init(|| known_addresses(self.texts.iter(), self.seen_at.as_ref()))
    }
}

/// The owner's addresses, as others can dial them. An owner that listens on all interfaces names a wildcard address besides
/// those of its interfaces: it stands for the address that the owner's connection comes from, which may be none of them. A
/// connection from this host shows only an address that other hosts can't dial, which is used where there is no other.
fn known_addresses<'a>(sent: impl Iterator<Item = &'a str>, seen_at: Option<&Address>) -> Vec<Address> {
    let sent: Vec<Address> = sent.filter_map(|text| text.parse().ok()).collect();
    let has_others = sent.iter().any(Address::is_dialable);
    let mut known: Vec<Address> = Vec::with_capacity(sent.len());
    for address in sent {
        let seen = seen_at.map_or_else(|| address.clone(), |remote| address.seen_from(remote));
        let local_only = seen != address && seen.is_loopback();
        let shadowed = local_only && has_others;
        if !shadowed && !known.contains(&seen) {
            known.push(seen);
        }
    }
    known
}

/// An engine's addresses as they are encoded: their number, then each of them as text behind its length. What is no text, or no
/// address, is left out when they are parsed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AddressTexts(SmallVec<[u8; 64]>);

impl Default for AddressTexts {
    fn default() -> AddressTexts {
        AddressTexts(SmallVec::from_elem(0, 1))
    }
}

/// Marks a length of two bytes.
const LONG: u8 = 128;

/// The length of a text, and what is behind the length.
fn take_len(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (&first, rest) = bytes.split_first()?;
    if first < LONG {
        return Some((usize::from(first), rest));
    }
    let (&second, rest) = rest.split_first()?;
    Some((usize::from(first - LONG) << 8 | usize::from(second), rest))
}

impl AddressTexts {
    /// Adds one, unless it is too long for an address, or one too many.
    fn push(&mut self, text: &str) {
        let len = text.len();
        if len > MAX_LEN || usize::from(self.0[0]) >= MAX_ADDRESSES {
            return;
        }
        self.0[0] += 1;
        if len < usize::from(LONG) {
            self.0.push(len as u8);
        } else {
            self.0.extend_from_slice(&[LONG | (len >> 8) as u8, len as u8]);
        }
        self.0.extend_from_slice(text.as_bytes());
    }

    /// Takes them off the beginning of some bytes; `None` where there are too few bytes, too many addresses, or longer ones than
    /// an engine has.
    pub(crate) fn take(bytes: &[u8]) -> Option<(AddressTexts, &[u8])> {
        let (&count, mut rest) = bytes.split_first()?;
        if usize::from(count) > MAX_ADDRESSES {
            return None;
        }
        for _ in 0..count {
            let (len, text) = take_len(rest).filter(|(len, _)| *len <= MAX_LEN)?;
            rest = text.get(len..)?;
        }
        let (own, rest) = bytes.split_at(bytes.len() - rest.len());
        Some((AddressTexts(SmallVec::from_slice(own)), rest))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0[0] == 0
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        let mut rest = &self.0[1..];
        let texts = std::iter::from_fn(move || {
            let (len, text) = take_len(rest)?;
            let (text, behind) = text.split_at_checked(len)?;
            rest = behind;
            Some(text)
        });
        texts.filter_map(|text| std::str::from_utf8(text).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(texts: &[&str]) -> Vec<u8> {
        let mut bytes = vec![texts.len() as u8];
        for text in texts {
            match u8::try_from(text.len()) {
                Ok(len) if len < LONG => bytes.push(len),
                _ => bytes.extend([LONG | (text.len() >> 8) as u8, text.len() as u8]),
            }
            bytes.extend(text.as_bytes());
        }
        bytes
    }

    fn decode(texts: &[&str]) -> Option<AddressTexts> {
        let bytes = encode(texts);
        let (decoded, rest) = AddressTexts::take(&bytes)?;
        rest.is_empty().then_some(decoded)
    }

    /// What the next receiver of a bulk gets.
    fn sent_on(origin: &Origin) -> Vec<String> {
        origin.with_encoded_addresses(|bytes| {
            let (texts, rest) = AddressTexts::take(bytes).unwrap();
            assert!(rest.is_empty());
            texts.iter().map(str::to_owned).collect()
        })
    }

    #[test]
    fn addresses_are_those_that_were_sent_but_for_what_is_none() {
        let texts = decode(&["tcp://192.0.2.1:7000", "nonsense", "", "shm://a", "tcp://192.0.2.1:7000"]).unwrap();
        let origin = Origin::received(1, texts, None);
        let expected = ["tcp://192.0.2.1:7000", "shm://a"];
        assert_eq!(origin.addresses().iter().map(Address::to_string).collect::<Vec<_>>(), expected);
        assert_eq!(sent_on(&origin), expected);
    }

    #[test]
    fn bytes_that_are_no_text_are_left_out() {
        let mut bytes = encode(&["shm://a", "shm://\0", "shm://b"]);
        let at = bytes.iter().position(|byte| *byte == 0).unwrap();
        bytes[at] = 0xff;
        let (texts, _) = AddressTexts::take(&bytes).unwrap();
        assert_eq!(sent_on(&Origin::received(1, texts, None)), ["shm://a", "shm://b"]);
    }

    #[test]
    fn a_wildcard_address_is_sent_on_as_it_was_seen() {
        let seen_at = "tcp://192.0.2.7:53000".parse().ok();
        let texts = decode(&["tcp://192.0.2.1:7000", "tcp://0.0.0.0:7000"]).unwrap();
        let expected = ["tcp://192.0.2.1:7000", "tcp://192.0.2.7:7000"];
        // Nothing has asked for its addresses before.
        assert_eq!(sent_on(&Origin::received(1, texts, seen_at)), expected);
    }

    #[test]
    fn more_addresses_than_an_engine_has_are_refused() {
        let longest = format!("loop://{}", "a".repeat(MAX_LEN - 7));
        let most = decode(&vec![longest.as_str(); MAX_ADDRESSES]).unwrap();
        assert!(most.iter().count() == MAX_ADDRESSES && most.iter().all(|text| text == longest));
        assert_eq!(decode(&["loop://a"; MAX_ADDRESSES + 1]), None);
        assert_eq!(decode(&[""; MAX_ADDRESSES + 1]), None);
    }

    #[test]
    fn addresses_of_all_lengths_are_those_that_were_sent() {
        for len in [8, 127, 128, 129, 255, 256, MAX_LEN] {
            let address: Address = format!("loop://{}", "a".repeat(len - 7)).parse().unwrap();
            let origin = Origin::own(Weak::new(), 1, vec![address.clone()]);
            assert_eq!(origin.texts.iter().collect::<Vec<_>>(), [address.to_string()]);
            assert_eq!(sent_on(&origin), [address.to_string()]);
        }
        assert_eq!(decode(&[&"a".repeat(MAX_LEN + 1)]), None);
        assert_eq!(decode(&[&"a".repeat(20_000)]), None);
    }

    #[test]
    fn addresses_that_are_cut_off_are_refused() {
        let bytes = encode(&["shm://a", &"b".repeat(200), ""]);
        for len in 0..bytes.len() {
            assert_eq!(AddressTexts::take(&bytes[..len]), None, "{len} bytes");
        }
        let behind = [&bytes[..], b"behind"].concat();
        let (texts, rest) = AddressTexts::take(&behind).unwrap();
        assert_eq!((texts.iter().count(), rest), (3, &b"behind"[..]));
    }

    /// As the engine itself, which has a core, sends its own.
    #[test]
    fn an_engine_sends_the_addresses_that_it_listens_at() {
        let addresses = vec!["tcp://192.0.2.1:7000".parse().unwrap(), "tcp://0.0.0.0:7000".parse().unwrap()];
        let engine = crate::Engine::client("loop").unwrap();
        let origin = Origin::own(std::sync::Arc::downgrade(&engine.shared().core), 1, addresses.clone());
        assert_eq!(origin.addresses(), addresses);
        assert_eq!(sent_on(&origin), ["tcp://192.0.2.1:7000", "tcp://0.0.0.0:7000"]);
    }
}
