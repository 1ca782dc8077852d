//! What an engine says of its configuration and of its transports. `src/config` has the tests of reading and checking.

use std::time::Duration;

use calomel::{Engine, EngineConfig, Error, Transport};

#[test]
fn the_configuration_in_force_makes_the_same_engine() {
    let engine = Engine::builder()
        .listen("loop://")
        .peer_timeout(Duration::MAX)
        .eager_limit(usize::MAX)
        .bulk_connections(100)
        .max_message_size(1 << 20)
        .max_bytes_in_flight_per_peer(0)
        .build()
        .unwrap();
    let config = engine.config();
    assert_eq!(config.listen, engine.addresses());
    // What the builder has taken as the nearest allowed value, and what was computed.
    let year = Duration::from_secs(365 * 24 * 3600);
    assert_eq!((config.eager_limit, config.bulk_connections, config.peer_timeout), (512 << 10, 16, year));
    assert_eq!((config.max_bytes_in_flight_per_peer, config.max_bytes_in_flight), (Some(1 << 20), Some(4 << 20)));
    let later = engine.listen("loop://").unwrap();
    assert_eq!(engine.config().listen, [config.listen[0].clone(), later]);
    engine.finalize().unwrap();
    assert_eq!(Engine::from_config(&config).unwrap().config(), config);
}

#[test]
fn a_configuration_out_of_range_makes_no_engine() {
    let mut config = EngineConfig::default();
    config.peer_timeout = Duration::MAX;
    assert!(matches!(Engine::from_config(&config), Err(Error::Config { field, .. }) if field == "peer_timeout"));
    config = EngineConfig::default();
    config.pre_shared_key_file = Some("/nowhere/key".into());
    assert!(matches!(Engine::from_config(&config), Err(Error::Config { field, .. }) if field == "pre_shared_key_file"));
    // In code it is a mistake that shows at once, as before.
    assert!(matches!(Engine::builder().transport("pigeon").build(), Err(Error::InvalidAddress { .. })));
}

#[test]
fn transports_say_why_they_are_not_there() {
    let engine = Engine::builder().build().unwrap();
    let transports = engine.transports();
    assert_eq!(transports.len(), if cfg!(feature = "ofi") { 10 } else { 5 });
    for status in transports {
        let name = status.transport.to_string();
        let required = Engine::builder().transport(&name).build();
        match (&status.unavailable, required) {
            (None, Ok(_)) => assert!(status.to_string().contains(": available")),
            (Some(reason), Err(Error::Unsupported { reason: same, .. })) => assert_eq!(*reason, same),
            other => panic!("{status:?}: {other:?}"),
        }
        assert!(status.unavailable.is_none() || matches!(status.transport, Transport::Verbs | Transport::Ofi(_)));
        assert!(serde_json::to_string(&status).unwrap().contains(&name));
    }
}
