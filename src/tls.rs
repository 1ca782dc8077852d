//! What an engine needs to speak TLS, as users give it.

use std::io;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::{Error, Result};

/// What both sides of a connection say that they speak inside of it, so that a server of something else is not taken for an
/// engine, whatever its certificate.
pub(crate) const INSIDE: &[u8] = b"calomel";

/// How an engine speaks TLS 1.3 on tcp, and whom it trusts there: for [`EngineBuilder::tls`](crate::EngineBuilder::tls).
/// Needs the feature `tls`.
///
/// Both ends of a connection show a certificate, and each checks the other's: it must be signed by one of those that are
/// trusted, be in its time, and, of a peer that is dialled, be valid for its name. Certificates and keys are given as PEM text;
/// keys are PKCS #8, PKCS #1 or SEC 1, of RSA, ECDSA (P-256, P-384) or Ed25519.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use calomel::{Engine, Tls};
///
/// let tls = Tls::trusting(&std::fs::read("ca.pem")?)?
///     .identity(&std::fs::read("server.pem")?, &std::fs::read("server.key")?)?;
/// let engine = Engine::builder().tls(tls).listen("tcp://0.0.0.0:7000").build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tls {
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    identity: Option<Arc<CertifiedKey>>,
    name: Option<ServerName<'static>>,
    anonymous_clients: bool,
}

/// What cannot be used, and why.
fn unusable(what: &str, reason: impl ToString) -> Error {
    Error::io(what, io::Error::new(io::ErrorKind::InvalidInput, reason.to_string()))
}

/// The certificates of a PEM text; at least one.
fn certificates(what: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_slice_iter(pem).collect::<std::result::Result<Vec<_>, _>>();
    let found = found.map_err(|error| unusable(what, error))?;
    if found.is_empty() { Err(unusable(what, "there is no certificate in the PEM text")) } else { Ok(found) }
}

impl Tls {
    /// Trusts peers whose certificates are signed by one of these: PEM text, of one or more certificates. Others that the
    /// system may trust are not.
    ///
    /// # Errors
    /// [`Error::Io`] when there is no certificate in the text, or one that can't be read.
    pub fn trusting(ca_pem: &[u8]) -> Result<Tls> {
        let what = "the certificates to trust";
        let mut roots = RootCertStore::empty();
        for certificate in certificates(what, ca_pem)? {
            roots.add(certificate).map_err(|error| unusable(what, error))?;
        }
        Ok(Tls {
            provider: Arc::new(ring::default_provider()),
            roots: Arc::new(roots),
            identity: None,
            name: None,
            anonymous_clients: false,
        })
    }

    /// What this engine shows of itself: its certificate, first in the PEM text and followed by those that lead to one which
    /// peers trust, if there are any between; and the key that belongs to it. An engine that listens at tcp needs one. One
    /// that only dials needs one unless its peers allow [anonymous clients](Tls::anonymous_clients).
    ///
    /// # Errors
    /// [`Error::Io`] when one of them can't be read, or they do not belong together.
    pub fn identity(mut self, cert_chain_pem: &[u8], private_key_pem: &[u8]) -> Result<Tls> {
        let chain = certificates("the engine's certificate", cert_chain_pem)?;
        let what = "the engine's private key";
        let key = PrivateKeyDer::from_pem_slice(private_key_pem).map_err(|error| unusable(what, error))?;
        let identity = CertifiedKey::from_der(chain, key, &self.provider).map_err(|error| unusable(what, error))?;
        self.identity = Some(Arc::new(identity));
        Ok(self)
    }

    /// What the certificate of a peer that is dialled must be valid for, whatever its address: a DNS name or an IP address. By
    /// default it is the address that is dialled, as a number.
    ///
    /// # Errors
    /// [`Error::Io`] when it is neither.
    pub fn server_name(mut self, name: &str) -> Result<Tls> {
        let name = ServerName::try_from(name.to_owned()).map_err(|error| unusable("the name of dialled peers", error))?;
        self.name = Some(name);
        Ok(self)
    }

    /// Whether peers that dial this engine may do so without a certificate (default no). One that they show is checked all the
    /// same.
    pub fn anonymous_clients(mut self, allowed: bool) -> Tls {
        self.anonymous_clients = allowed;
        self
    }

    /// What a dialled peer must be, where it does not depend on its address.
    pub(crate) fn name(&self) -> Option<&ServerName<'static>> {
        self.name.as_ref()
    }

    /// For connections that are dialled.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>> {
        let failed = |error: rustls::Error| unusable("TLS", error);
        let builder = ClientConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13]).map_err(failed)?.with_root_certificates(self.roots.clone());
        let mut config = match &self.identity {
            Some(identity) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(identity.clone()))),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![INSIDE.to_vec()];
        // Each connection shows its certificates, so that one that is not trusted any more ends with the process that trusted it.
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// For connections that are accepted; `None` where there is nothing to show.
    pub(crate) fn server(&self) -> Result<Option<Arc<ServerConfig>>> {
        let Some(identity) = &self.identity else { return Ok(None) };
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots.clone(), self.provider.clone());
        let verifier = if self.anonymous_clients { verifier.allow_unauthenticated() } else { verifier };
        let verifier = verifier.build().map_err(|error| unusable("TLS", error))?;
        let builder = ServerConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13]).map_err(|error| unusable("TLS", error))?;
        let builder = builder.with_client_cert_verifier(verifier);
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(identity.clone())));
        config.alpn_protocols = vec![INSIDE.to_vec()];
        config.send_tls13_tickets = 0;
        Ok(Some(Arc::new(config)))
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Nothing of the key, whatever the types of its own would show.
        f.debug_struct("Tls")
            .field("trusted", &self.roots.len())
            .field("identity", &self.identity.is_some())
            .field("server_name", &self.name)
            .field("anonymous_clients", &self.anonymous_clients)
            .finish()
    }
}
