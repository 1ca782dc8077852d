//! Certificates, made for a test.

// Each suite uses what it needs.
#![allow(dead_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use calomel::Tls;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyUsagePurpose, date_time_ymd};
use rustls::SignatureScheme;
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::PrivatePkcs8KeyDer;

/// A certificate authority, which engines may trust.
pub struct Authority(CertifiedIssuer<'static, Key>);

/// A certificate and the key that belongs to it, as PEM text.
#[derive(Clone)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
    pub der: Vec<u8>,
}

/// An Ed25519 key that keeps nothing secret: the next number of this process is its seed. It signs with this crate's
/// dependencies, so that without the feature `tls` these tests build nothing that needs a C compiler.
struct Key {
    pkcs8: Vec<u8>,
    public: Vec<u8>,
}

impl Key {
    fn next() -> Key {
        // RFC 8410: a PrivateKeyInfo of version 0 for id-Ed25519, whose key is the seed; and before a public key.
        const PRIVATE: &[u8] = &[0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        const PUBLIC_LEN: usize = 32;
        let mut seed = [0; 32];
        seed[..4].copy_from_slice(&std::process::id().to_le_bytes());
        seed[4..8].copy_from_slice(&next().to_le_bytes());
        let pkcs8 = [PRIVATE, &seed].concat();
        let key = any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_slice())).unwrap();
        let info = key.public_key().unwrap();
        let public = info[info.len() - PUBLIC_LEN..].to_vec();
        Key { pkcs8, public }
    }

    fn pem(&self) -> String {
        pem::encode(&pem::Pem::new("PRIVATE KEY", self.pkcs8.as_slice()))
    }
}

impl rcgen::PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ED25519
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let key = any_eddsa_type(&PrivatePkcs8KeyDer::from(self.pkcs8.as_slice())).unwrap();
        Ok(key.choose_scheme(&[SignatureScheme::ED25519]).unwrap().sign(message).unwrap())
    }
}

fn next() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn params(name: &str, valid_for: &[&str]) -> CertificateParams {
    let names: Vec<String> = valid_for.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2100, 1, 1);
    let number = next();
    params.serial_number = Some(u64::from(number).into());
    params.key_identifier_method = rcgen::KeyIdMethod::PreSpecified(number.to_be_bytes().to_vec());
    params
}

/// The certificate parameters of an authority.
fn signing(name: &str) -> CertificateParams {
    let mut params = params(name, &[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

impl Authority {
    pub fn new() -> Authority {
        Authority::called(&format!("authority {}", next()))
    }

    pub fn called(name: &str) -> Authority {
        Authority(CertifiedIssuer::self_signed(signing(name), Key::next()).unwrap())
    }

    /// An intermediate authority, signed by this one.
    pub fn deputy(&self) -> Authority {
        Authority(CertifiedIssuer::signed_by(signing(&format!("deputy {}", next())), Key::next(), &self.0).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate that is valid for these names and IP addresses.
    pub fn identity(&self, valid_for: &[&str]) -> Identity {
        self.sign(params("an engine", valid_for))
    }

    /// An expired certificate.
    pub fn expired(&self, valid_for: &[&str]) -> Identity {
        let mut params = params("an engine", valid_for);
        params.not_after = date_time_ymd(2021, 1, 1);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Identity {
        let key = Key::next();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Identity { certificate: certificate.pem(), key: key.pem(), der: certificate.der().to_vec() }
    }

    /// The configuration of an engine that trusts this authority and shows no certificate.
    pub fn trusted(&self) -> Tls {
        Tls::trusting(self.pem().as_bytes()).unwrap()
    }

    /// The configuration of an engine with a certificate of this authority, valid for this host.
    pub fn tls(&self) -> Tls {
        self.identity(&["127.0.0.1", "::1"]).of(self.trusted())
    }
}

/// The configuration of all engines of a process that trust each other.
pub fn everybodys() -> Tls {
    static TLS: OnceLock<Tls> = OnceLock::new();
    TLS.get_or_init(|| Authority::new().tls()).clone()
}

impl Identity {
    /// Adds this certificate to a configuration.
    pub fn of(&self, tls: Tls) -> Tls {
        tls.identity(self.certificate.as_bytes(), self.key.as_bytes()).unwrap()
    }
}
