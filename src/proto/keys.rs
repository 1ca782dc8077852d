//! The key that two engines share, and how each proves to the other that it has it, without showing it.
//!
//! Each side says a nonce, and then the HMAC-SHA-256, under the key, of which side it is and of all that has been said until
//! then: of both challenges as they were said (versions included), of the hello of the side that dials, and, for the proof of the
//! side that is dialled, of its own hello too. A recorded proof is of no use, since the other side's nonce is new each time; nor
//! is one that was made for the other direction. Two engines that prove this share the key; nothing is said about the bytes
//! that follow, which a third party in the network could still change.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256};

pub(crate) const NONCE_LEN: usize = 32;
pub(crate) const DIGEST_LEN: usize = 32;
pub(crate) type Nonce = [u8; NONCE_LEN];
pub(crate) type Digest = [u8; DIGEST_LEN];

/// A key that was given to several engines beforehand.
#[derive(Clone)]
pub(crate) struct PreSharedKey {
    secret: Vec<u8>,
}

impl std::fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Who proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Dialling,
    Dialled,
}

/// What both sides have said so far.
pub(super) struct Transcript<'a> {
    /// The challenge of the side that dials, and that of the other, as they were said.
    pub challenges: [&'a [u8]; 2],
    /// What the side that dials has proved, where the other side proves.
    pub answered: Option<&'a Digest>,
    /// Of the side that proves.
    pub hello: &'a Digest,
}

fn mac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"))
}

impl PreSharedKey {
    pub(crate) fn new(secret: Vec<u8>) -> PreSharedKey {
        PreSharedKey { secret }
    }

    fn proof(&self, side: Role, said: &Transcript<'_>) -> Hmac<Sha256> {
        let label: &[u8] = match side {
            Role::Dialling => b"calomel, dialling",
            Role::Dialled => b"calomel, dialled.",
        };
        // All of them have a fixed length, and the label says which there are.
        mac(&self.secret)
            .chain_update(label)
            .chain_update(said.challenges[0])
            .chain_update(said.challenges[1])
            .chain_update(said.answered.map_or(&[][..], |digest| digest))
            .chain_update(said.hello)
    }

    /// What this side says to prove itself.
    pub(super) fn prove(&self, side: Role, said: &Transcript<'_>) -> Digest {
        self.proof(side, said).finalize().into_bytes().into()
    }

    /// Whether the other side has the key. It takes as long for a proof that is nearly right as for any other.
    pub(super) fn is_proof(&self, side: Role, said: &Transcript<'_>, proof: &Digest) -> bool {
        self.proof(side, said).verify_slice(proof).is_ok()
    }
}

pub(super) fn digest(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HMAC-SHA-256 with the second key of RFC 4231, so that another implementation can be held to the same.
    #[test]
    fn the_mac_is_the_standard_one() {
        let tag: Digest = mac(b"Jefe").chain_update(b"what do ya want for nothing?").finalize().into_bytes().into();
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(tag.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    }

    /// Whatever is changed, side, nonces, hello, key or the proof itself, it is none any more.
    #[test]
    fn a_proof_is_for_one_side_of_one_conversation() {
        let key = PreSharedKey::new(b"sixteen bytes or more".to_vec());
        let other = PreSharedKey::new(b"sixteen bytes or morf".to_vec());
        let [ours, theirs, third]: [Nonce; 3] = [1, 2, 3].map(|byte| [byte; NONCE_LEN]);
        let (hello, other_hello) = (digest(b"hello"), digest(b"other"));
        let said = |challenges, hello| Transcript { challenges, answered: None, hello };
        let real = said([&ours[..], &theirs[..]], &hello);
        let proof = key.prove(Role::Dialling, &real);
        assert!(key.is_proof(Role::Dialling, &real, &proof));
        assert!(!key.is_proof(Role::Dialled, &real, &proof));
        assert!(!other.is_proof(Role::Dialling, &real, &proof));
        assert!(!key.is_proof(Role::Dialling, &said([&theirs, &ours], &hello), &proof));
        assert!(!key.is_proof(Role::Dialling, &said([&ours, &third], &hello), &proof));
        assert!(!key.is_proof(Role::Dialling, &said([&ours, &theirs], &other_hello), &proof));
        let answer = |answered| Transcript { answered: Some(answered), ..said([&ours[..], &theirs[..]], &hello) };
        let answering = key.prove(Role::Dialled, &answer(&hello));
        assert!(key.is_proof(Role::Dialled, &answer(&hello), &answering));
        assert!(!key.is_proof(Role::Dialled, &answer(&other_hello), &answering));
        assert!(!key.is_proof(Role::Dialled, &real, &answering));
        for bit in 0..8 * DIGEST_LEN {
            let mut wrong = proof;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.is_proof(Role::Dialling, &real, &wrong));
        }
        assert!(!format!("{key:?}").contains("sixteen"));
    }
}
