//! `Tls`: the TLS configuration of an engine.

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

/// The ALPN protocol name that both sides require, so that a server of another protocol is not taken for an engine, whatever
/// its certificate.
pub(crate) const INSIDE: &[u8] = b"calomel";

/// TLS 1.3 for tcp connections: the trusted certificates, and the engine's own; for
/// [`EngineBuilder::tls`](crate::EngineBuilder::tls). Needs the feature `tls`.
///
/// Both sides of a connection present a certificate, and each verifies the other's: it must chain to a trusted one, not be
/// expired, and, for a peer that is dialled, be valid for its name. Certificates and keys are given as PEM text; keys are PKCS
/// #8, PKCS #1 or SEC 1, of RSA, ECDSA (P-256, P-384) or Ed25519.
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

/// The error for input that can't be used.
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
    /// Trusts peers whose certificates chain to one of these: PEM text of one or more certificates. The system's root
    /// certificates are not used.
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

    /// The certificate that this engine presents, and its private key. The PEM text has the engine's certificate first,
    /// followed by the intermediate ones, if any. An engine that listens at tcp needs an identity. One that only dials needs
    /// one unless its peers allow [anonymous clients](Tls::anonymous_clients).
    ///
    /// # Errors
    /// [`Error::Io`] when one of them can't be read, or the key is not that of the certificate.
    pub fn identity(mut self, cert_chain_pem: &[u8], private_key_pem: &[u8]) -> Result<Tls> {
        let chain = certificates("the engine's certificate", cert_chain_pem)?;
        let what = "the engine's private key";
        let key = PrivateKeyDer::from_pem_slice(private_key_pem).map_err(|error| unusable(what, error))?;
        let identity = CertifiedKey::from_der(chain, key, &self.provider).map_err(|error| unusable(what, error))?;
        self.identity = Some(Arc::new(identity));
        Ok(self)
    }

    /// The name that the certificate of a dialled peer must be valid for, whatever its address: a DNS name or an IP address. By
    /// default it is the IP address that is dialled.
    ///
    /// # Errors
    /// [`Error::Io`] when `name` is neither.
    pub fn server_name(mut self, name: &str) -> Result<Tls> {
        let name = ServerName::try_from(name.to_owned()).map_err(|error| unusable("the name of dialled peers", error))?;
        self.name = Some(name);
        Ok(self)
    }

    /// Whether peers may connect to this engine without a certificate (default no). A certificate that they present is verified
    /// in any case.
    pub fn anonymous_clients(mut self, allowed: bool) -> Tls {
        self.anonymous_clients = allowed;
        self
    }

    /// The name that was set for dialled peers.
    pub(crate) fn name(&self) -> Option<&ServerName<'static>> {
        self.name.as_ref()
    }

    /// The configuration of dialled connections.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>> {
        let failed = |error: rustls::Error| unusable("TLS", error);
        let builder = ClientConfig::builder_with_provider(self.provider.clone());
        let builder = builder.with_protocol_versions(&[&TLS13]).map_err(failed)?.with_root_certificates(self.roots.clone());
        let mut config = match &self.identity {
            Some(identity) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(identity.clone()))),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![INSIDE.to_vec()];
        // No resumption: certificates are verified on each connection, with the roots that the engine trusts now.
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// The configuration of accepted connections; `None` without an identity.
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
        // Excludes the private key.
        f.debug_struct("Tls")
            .field("trusted", &self.roots.len())
            .field("identity", &self.identity.is_some())
            .field("server_name", &self.name)
            .field("anonymous_clients", &self.anonymous_clients)
            .finish()
    }
}
