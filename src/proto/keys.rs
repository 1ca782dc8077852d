//! The pre-shared key, and how two engines prove to each other that they have it without revealing it.
//!
//! Each side sends a nonce. Its proof is the HMAC-SHA-256, under the key, of the side's label and of all that has been sent so
//! far: both challenges with their versions, the digest of the dialling side's hello and, in the dialled side's proof, the
//! digest of its own hello. A recorded proof is useless, since the other side's nonce is new each time; so is a proof that was
//! made for the other direction. Two engines that prove this share the key. The proof does not cover the bytes that follow,
//! which a third party in the network could still change.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256};

pub(crate) const NONCE_LEN: usize = 32;
pub(crate) const DIGEST_LEN: usize = 32;
pub(crate) type Nonce = [u8; NONCE_LEN];
pub(crate) type Digest = [u8; DIGEST_LEN];

/// A key that several engines were given in advance.
#[derive(Clone)]
pub(crate) struct PreSharedKey {
    secret: Vec<u8>,
}

impl std::fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The side that proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Dialling,
    Dialled,
}

/// What a proof covers.
pub(super) struct Transcript<'a> {
    /// The challenges of the dialling side and of the dialled side, as sent.
    pub challenges: [&'a [u8]; 2],
    /// The digest of the dialling side's hello, in the proof of the dialled side.
    pub answered: Option<&'a Digest>,
    /// The digest of the proving side's hello.
    pub hello: &'a Digest,
}

fn mac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"))
}

impl PreSharedKey {
    pub(crate) fn new(secret: Vec<u8>) -> PreSharedKey {
        PreSharedKey { secret }
    }

    fn proof(&self, side: Role, transcript: &Transcript<'_>) -> Hmac<Sha256> {
        let label: &[u8] = match side {
            Role::Dialling => b"calomel, dialling",
            Role::Dialled => b"calomel, dialled.",
        };
        // Each part has a fixed length, and the label says which parts there are.
        mac(&self.secret)
            .chain_update(label)
            .chain_update(transcript.challenges[0])
            .chain_update(transcript.challenges[1])
            .chain_update(transcript.answered.map_or(&[][..], |digest| digest))
            .chain_update(transcript.hello)
    }

    /// The proof that this side sends.
    pub(super) fn prove(&self, side: Role, transcript: &Transcript<'_>) -> Digest {
        self.proof(side, transcript).finalize().into_bytes().into()
    }

    /// Whether a proof of the other side is right. The comparison takes constant time.
    pub(super) fn is_proof(&self, side: Role, transcript: &Transcript<'_>, proof: &Digest) -> bool {
        self.proof(side, transcript).verify_slice(proof).is_ok()
    }
}

pub(super) fn digest(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

/// How far the two sides have proved to each other that they have the key.
pub(super) struct AuthState {
    /// The challenges, as sent.
    pub ours: Vec<u8>,
    pub theirs: Option<Vec<u8>>,
    /// This side has sent its proof, with the hello of this digest.
    pub shown: Option<Digest>,
    /// The peer has proved it. It has to send the hello of this digest next.
    pub proved: Option<Digest>,
}

impl AuthState {
    /// What a proof of side `by`, with this hello, covers. `None` if it can't be made yet.
    pub(super) fn transcript<'a>(&'a self, by: Role, hello: &'a Digest, dialled: bool) -> Option<Transcript<'a>> {
        let theirs = self.theirs.as_deref()?;
        let challenges = if dialled { [&self.ours[..], theirs] } else { [theirs, &self.ours[..]] };
        let answered = match by {
            Role::Dialling => None,
            Role::Dialled => Some(if dialled { self.shown.as_ref()? } else { self.proved.as_ref()? }),
        };
        Some(Transcript { challenges, answered, hello })
    }

    pub(super) fn nonce(&self) -> &[u8] {
        &self.ours[self.ours.len() - NONCE_LEN..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HMAC-SHA-256 with the second key of RFC 4231, to check other implementations against.
    #[test]
    fn mac_of_rfc_4231_input_has_the_tag_of_rfc_4231() {
        let tag: Digest = mac(b"Jefe").chain_update(b"what do ya want for nothing?").finalize().into_bytes().into();
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(tag.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    }

    /// A change of the side, nonces, hello, key or proof makes the proof invalid.
    #[test]
    fn proof_with_any_input_changed_is_rejected() {
        let key = PreSharedKey::new(b"sixteen bytes or more".to_vec());
        let other = PreSharedKey::new(b"sixteen bytes or morf".to_vec());
        let [ours, theirs, third]: [Nonce; 3] = [1, 2, 3].map(|byte| [byte; NONCE_LEN]);
        let (hello, other_hello) = (digest(b"hello"), digest(b"other"));
        let transcript = |challenges, hello| Transcript { challenges, answered: None, hello };
        let real = transcript([&ours[..], &theirs[..]], &hello);
        let proof = key.prove(Role::Dialling, &real);
        assert!(key.is_proof(Role::Dialling, &real, &proof));
        assert!(!key.is_proof(Role::Dialled, &real, &proof));
        assert!(!other.is_proof(Role::Dialling, &real, &proof));
        assert!(!key.is_proof(Role::Dialling, &transcript([&theirs, &ours], &hello), &proof));
        assert!(!key.is_proof(Role::Dialling, &transcript([&ours, &third], &hello), &proof));
        assert!(!key.is_proof(Role::Dialling, &transcript([&ours, &theirs], &other_hello), &proof));
        let answer = |answered| Transcript { answered: Some(answered), ..transcript([&ours[..], &theirs[..]], &hello) };
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
