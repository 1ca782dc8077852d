//! Certificates from files that a configuration names.

use calomel::{Engine, EngineConfig, Error, Request};

use crate::authority::Authority;
use crate::support::*;

#[test]
fn certificates_are_read_from_files() {
    let _watchdog = Watchdog::start("config::certificates_are_read_from_files");
    let authority = Authority::new();
    let identity = authority.identity(&["storage.example"]);
    let (ca, certificate) = (TempFile::with("ca.pem", &authority.pem()), TempFile::with("pem", &identity.certificate));
    let key = TempFile::with("key", &identity.key);
    let path = |file: &TempFile| file.path().to_str().unwrap().to_owned();
    let variables = [
        ("CALOMEL_LISTEN", "tcp://127.0.0.1:0".to_owned()),
        ("CALOMEL_TLS_CA", path(&ca)),
        ("CALOMEL_TLS_CERTIFICATE", path(&certificate)),
        ("CALOMEL_TLS_KEY", path(&key)),
    ];
    let config = EngineConfig::default().with_variables(variables).unwrap();
    let server = Engine::from_config(&config).unwrap();
    assert!(!server.config().same_host_upgrade);
    server.define("hello", |_: &Request, ()| 7u8).unwrap();
    let hello = |client: &Engine| {
        let peer = client.lookup(server.address()).unwrap();
        client.procedure::<(), u8>("hello").on(&peer).call(&())
    };
    let mut dialling = config.clone();
    dialling.listen.clear();
    let named = dialling.clone().with_variables([("CALOMEL_TLS_SERVER_NAME", "storage.example")]).unwrap();
    assert_eq!(hello(&Engine::from_config(&named).unwrap()).unwrap(), 7);
    // The certificate is not valid for the address that is dialled.
    assert!(matches!(hello(&Engine::from_config(&dialling).unwrap()), Err(Error::AccessDenied { .. })));
    assert!(hello(&Engine::client("tcp").unwrap()).is_err());
    // What the program sets takes the place of the files.
    let other = dialling.builder().unwrap().tls(Authority::new().tls()).build().unwrap();
    assert_eq!(other.config().tls_ca, None);
    assert!(hello(&other).is_err());
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let _watchdog = Watchdog::start("config::files_that_are_no_certificates_are_named");
    let (authority, no_pem) = (Authority::new(), TempFile::with("pem", "no PEM"));
    let ca = TempFile::with("ca.pem", &authority.pem());
    let refused = |field: &str, change: &dyn Fn(&mut EngineConfig)| {
        let mut config = EngineConfig::default();
        config.tls_ca = Some(ca.path().into());
        change(&mut config);
        match Engine::from_config(&config) {
            Err(Error::Config { field: named, reason }) => {
                assert_eq!(named, field);
                reason
            }
            other => panic!("{other:?}"),
        }
    };
    let path = no_pem.path().to_str().unwrap();
    assert!(refused("tls_ca", &|config| config.tls_ca = Some(path.into())).contains(path));
    assert!(refused("tls_ca", &|config| config.tls_ca = Some("/nowhere".into())).contains("/nowhere"));
    let both = |config: &mut EngineConfig| {
        (config.tls_certificate, config.tls_key) = (Some(ca.path().into()), Some(path.into()));
    };
    assert!(refused("tls_certificate", &both).contains("ca.pem"));
    refused("tls_server_name", &|config| config.tls_server_name = Some("no name".into()));
}
