//! The engine that exposed a bulk, and where it listens, as it travels with the bulk.

use std::fmt;
use std::sync::{OnceLock, Weak};

use serde::de::{DeserializeSeed, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;

use crate::Address;
use crate::address::MAX_LEN;
use crate::progress::Core;

/// Most addresses of one engine: peers refuse more.
pub(super) const MAX_ADDRESSES: usize = 16;

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

/// An engine's addresses as text, one behind the other.
#[derive(Default)]
pub(crate) struct AddressTexts {
    joined: String,
    /// Where each of them ends.
    ends: SmallVec<[u16; 4]>,
}

const _: () = assert!(MAX_ADDRESSES * MAX_LEN <= u16::MAX as usize);

impl AddressTexts {
    /// Adds one, unless it is too long for an address.
    fn push(&mut self, text: &str) {
        if text.len() <= MAX_LEN {
            self.joined.push_str(text);
            self.ends.push(self.joined.len() as u16);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.ends.len()).map(|index| {
            let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
            &self.joined[usize::from(start)..usize::from(self.ends[index])]
        })
    }
}

/// As the list of its addresses.
impl Serialize for Origin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.core.strong_count() > 0 {
            serializer.collect_seq(self.texts.iter())
        } else {
            // Where the bulk is forwarded, its next receiver sees another engine than the owner.
            serializer.collect_seq(self.addresses())
        }
    }
}

/// A list of at most [`MAX_ADDRESSES`] texts.
impl<'de> Deserialize<'de> for AddressTexts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<AddressTexts, D::Error> {
        struct ListVisitor;
        impl<'de> Visitor<'de> for ListVisitor {
            type Value = AddressTexts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_ADDRESSES} addresses")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<AddressTexts, A::Error> {
                let (mut texts, mut count) = (AddressTexts::default(), 0);
                while seq.next_element_seed(NextText(&mut texts))?.is_some() {
                    count += 1;
                    if count > MAX_ADDRESSES {
                        return Err(serde::de::Error::custom("too many addresses"));
                    }
                }
                Ok(texts)
            }
        }
        deserializer.deserialize_seq(ListVisitor)
    }
}

/// Decodes a text to the end of the list.
struct NextText<'a>(&'a mut AddressTexts);

impl<'de> DeserializeSeed<'de> for NextText<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        // As one that is kept: the decoder of messages bounds the memory of their values.
        deserializer.deserialize_string(self)
    }
}

impl Visitor<'_> for NextText<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an address")
    }
    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        self.0.push(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(texts: &[&str]) -> Result<AddressTexts, postcard::Error> {
        postcard::from_bytes(&postcard::to_stdvec(texts).unwrap())
    }

    /// What the next receiver of a bulk gets.
    fn sent_on(origin: &Origin) -> Vec<String> {
        postcard::from_bytes(&postcard::to_stdvec(origin).unwrap()).unwrap()
    }

    #[test]
    fn addresses_are_those_that_were_sent_but_for_what_is_none() {
        let long = format!("loop://{}", "a".repeat(MAX_LEN));
        let texts = decode(&["tcp://192.0.2.1:7000", "nonsense", "", &long, "shm://a", "tcp://192.0.2.1:7000"]).unwrap();
        let origin = Origin::received(1, texts, None);
        let expected = ["tcp://192.0.2.1:7000", "shm://a"];
        assert_eq!(origin.addresses().iter().map(Address::to_string).collect::<Vec<_>>(), expected);
        assert_eq!(sent_on(&origin), expected);
    }

    #[test]
    fn texts_that_are_too_long_for_addresses_are_left_out() {
        let long = "a".repeat(usize::from(u16::MAX) + 5000);
        let texts = decode(&["shm://a", &long, "shm://b"]).unwrap();
        assert_eq!(texts.iter().collect::<Vec<_>>(), ["shm://a", "shm://b"]);
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
        assert!(most.iter().len() == MAX_ADDRESSES && most.iter().all(|text| text == longest));
        assert!(decode(&["loop://a"; MAX_ADDRESSES + 1]).is_err());
        assert!(decode(&[""; MAX_ADDRESSES + 1]).is_err());
    }

    /// A program may keep bulks in other formats than that of messages, some of which have no text to borrow.
    #[test]
    fn addresses_are_read_from_formats_that_own_their_texts() {
        let texts: AddressTexts = serde_json::from_str(r#"["tcp:\/\/192.0.2.1:7000", "shm://\u0061"]"#).unwrap();
        let origin = Origin::received(1, texts, None);
        assert_eq!(serde_json::to_string(&origin).unwrap(), r#"["tcp://192.0.2.1:7000","shm://a"]"#);
    }

    #[test]
    fn an_engine_sends_the_addresses_that_it_listens_at() {
        let addresses = vec!["tcp://192.0.2.1:7000".parse().unwrap(), "tcp://0.0.0.0:7000".parse().unwrap()];
        let engine = crate::Engine::client("loop").unwrap();
        let origin = Origin::own(std::sync::Arc::downgrade(&engine.shared().core), 1, addresses.clone());
        assert_eq!(origin.addresses(), addresses);
        assert_eq!(sent_on(&origin), ["tcp://192.0.2.1:7000", "tcp://0.0.0.0:7000"]);
    }
}
