//! Certificates, made for a test.

// Each suite uses what it needs.
#![allow(dead_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use calomel::Tls;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd};

/// Somebody who signs certificates, and whom engines trust or don't.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and the key that belongs to it, as PEM text.
#[derive(Clone)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
    pub der: Vec<u8>,
}

fn params(name: &str, valid_for: &[&str]) -> CertificateParams {
    let names: Vec<String> = valid_for.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2100, 1, 1);
    params
}

impl Authority {
    pub fn new() -> Authority {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Authority::called(&format!("authority {}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    pub fn called(name: &str) -> Authority {
        let mut params = params(name, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate that is valid for these names and IP addresses.
    pub fn identity(&self, valid_for: &[&str]) -> Identity {
        self.sign(params("an engine", valid_for))
    }

    /// One whose time is over.
    pub fn expired(&self, valid_for: &[&str]) -> Identity {
        let mut params = params("an engine", valid_for);
        params.not_after = date_time_ymd(2021, 1, 1);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Identity {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Identity { certificate: certificate.pem(), key: key.serialize_pem(), der: certificate.der().to_vec() }
    }

    /// What an engine is told that trusts this authority and shows nothing of itself.
    pub fn trusted(&self) -> Tls {
        Tls::trusting(self.pem().as_bytes()).unwrap()
    }

    /// One that shows a certificate of this authority, valid for this host.
    pub fn tls(&self) -> Tls {
        self.identity(&["127.0.0.1", "::1"]).of(self.trusted())
    }
}

/// What all engines of a process are told that trust each other.
pub fn everybodys() -> Tls {
    static TLS: OnceLock<Tls> = OnceLock::new();
    TLS.get_or_init(|| Authority::new().tls()).clone()
}

impl Identity {
    /// With this to show.
    pub fn of(&self, tls: Tls) -> Tls {
        tls.identity(self.certificate.as_bytes(), self.key.as_bytes()).unwrap()
    }
}
