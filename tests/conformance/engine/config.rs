//! Engines from a configuration behave as those of the builder do.

use std::time::Duration;

use calomel::{Engine, EngineConfig, Error, Progress, Request};

use crate::assert_error;
use crate::support::{Net, Pair, TempFile, pattern};

const LIMIT: usize = 100_000;
const TIMEOUT: Duration = Duration::from_secs(20);

/// As a file has it.
fn text(listen: &str) -> String {
    format!(
        r#"{{ "listen": [{listen:?}], "max_message_size": "100 kB", "default_timeout": "20s", "eager_limit": 100,
            "eager_bulk_limit": 0, "handler_threads": 2, "progress": "park", "remote_shutdown": true, "max_exposures": 1,
            "peer_timeout": "1h" }}"#
    )
}

/// The same by the builder.
fn built(net: &Net) -> Engine {
    let builder = net.builder().listen(net.fresh_address()).max_message_size(LIMIT).default_timeout(TIMEOUT).eager_limit(100);
    let builder = builder.eager_bulk_limit(0).handler_threads(2).progress(Progress::Park).remote_shutdown(true).max_exposures(1);
    net.keep(builder.build().unwrap())
}

fn configured(net: &Net, config: &EngineConfig) -> Engine {
    // Keys and certificates of the transport under test.
    net.keep(net.knobs()(config.builder().unwrap()).build().unwrap())
}

fn engines_from_a_configuration_behave_as_those_of_the_builder(net: &Net) {
    let config: EngineConfig = serde_json::from_str(&text(&net.fresh_address())).unwrap();
    let [first, second] = [configured(net, &config), built(net)];
    let [mut left, mut right] = [first.config(), second.config()];
    assert_eq!((&left.listen, &right.listen), (&first.addresses(), &second.addresses()));
    (left.listen, right.listen) = (Vec::new(), Vec::new());
    assert_eq!(left, right);
    for server in [first, second] {
        let client = net.client_with(|builder| builder.max_message_size(10 * LIMIT));
        let pair = Pair::of(server, client);
        pair.server.define("length", |_: &Request, text: String| text.len()).unwrap();
        let length = pair.client.procedure::<String, usize>("length");
        assert_eq!(length.on(&pair.to_server).call(&"x".repeat(50_000)).unwrap(), 50_000);
        let large = length.on(&pair.to_server).call(&"x".repeat(LIMIT + 1));
        assert_error!(large, Error::MessageTooLarge { limit, .. } if limit == LIMIT);
        let exposed = pair.server.expose_read_only(pattern(1, 300_000)).unwrap();
        assert_error!(pair.server.expose_read_only(vec![0u8]), Error::Busy { .. });
        let mut copy = vec![0u8; 300_000];
        exposed.bulk().on(&pair.to_server).pull_into(&mut copy).unwrap();
        assert!(copy == exposed.view());
        drop(exposed);
        pair.to_server.shutdown().unwrap();
        pair.server.wait_for_finalize();
    }
}

/// An engine that takes another's place, in all formats that a configuration may travel in.
fn the_configuration_in_force_makes_another_such_engine(net: &Net) {
    let first = built(net);
    let mut config = first.config();
    first.finalize().unwrap();
    // Another test may have taken its port.
    config.listen = vec![net.fresh_address().parse().unwrap()];
    let binary: EngineConfig = postcard::from_bytes(&postcard::to_stdvec(&config).unwrap()).unwrap();
    let written: EngineConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!([&binary, &written], [&config, &config]);
    let second = configured(net, &binary);
    let mut in_force = second.config();
    in_force.listen.clone_from(&config.listen);
    assert_eq!(in_force, config);
    second.define("hello", |_: &Request, ()| 7u8).unwrap();
    let pair = Pair::of(second, net.client());
    assert_eq!(pair.client.procedure::<(), u8>("hello").on(&pair.to_server).call(&()).unwrap(), 7);
}

/// A key from a file is the key of the builder.
fn a_key_from_a_file_is_proved(net: &Net) {
    const KEY: &str = "sixteen bytes at the least";
    let file = TempFile::with("key", &format!("{KEY}\n"));
    // Where the settings of the transport under test have a key, it takes the place of the file.
    let config = net.builder().listen(net.fresh_address()).build().unwrap().config();
    let config = config.with_variables([("CALOMEL_PRE_SHARED_KEY_FILE", file.path().to_str().unwrap())]).unwrap();
    let server = configured(net, &config);
    server.define("hello", |_: &Request, ()| 7u8).unwrap();
    let guarded = server.config().pre_shared_key_file.is_none();
    for (key, admitted) in [(KEY, !guarded), ("sixteen bytes of something else", false)] {
        let client = net.client_with(|builder| builder.pre_shared_key(key));
        let peer = client.lookup(server.address()).unwrap();
        let answer = client.procedure::<(), u8>("hello").on(&peer).call(&());
        match admitted {
            true => assert_eq!(answer.unwrap(), 7),
            false => assert_error!(answer, Error::AccessDenied { .. }),
        }
    }
}

suite![
    engines_from_a_configuration_behave_as_those_of_the_builder,
    the_configuration_in_force_makes_another_such_engine,
    a_key_from_a_file_is_proved,
];
