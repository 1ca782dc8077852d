//! Addresses, and endpoints made from them.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use calomel::{Address, Endpoint, Engine, Error, Request};

use crate::assert_error;
use crate::support::Net;

fn server_returns_its_address(net: &Net) {
    let server = net.server();
    let address = server.address();
    assert_eq!(server.addresses(), std::slice::from_ref(&address));
    let text = address.to_string();
    assert!(text.starts_with(&format!("{}://", net.scheme())), "{text}");
    assert!(!text.ends_with(":0"), "{text} lacks the real port");
    assert_eq!(text.parse::<Address>().unwrap(), address);
    assert!(format!("{address:?}").contains(&text));
}

fn client_has_no_address(net: &Net) {
    let client = net.client();
    assert!(client.addresses().is_empty());
    assert_eq!(client.address().to_string(), "nowhere://");
    assert!(!client.address().is_dialable());
    let error = client.lookup(client.address()).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { reason, .. } if reason.contains("does not listen")), "{error}");
}

fn servers_get_distinct_addresses(net: &Net) {
    let servers: Vec<Engine> = (0..5).map(|_| net.server()).collect();
    let addresses: HashSet<Address> = servers.iter().map(|server| server.address()).collect();
    assert_eq!(addresses.len(), 5);
}

fn engine_with_several_addresses_serves_each(net: &Net) {
    let own = (net.fresh_address(), net.fresh_address());
    let other = if net.scheme() == "tcp" { "loop://" } else { "tcp://127.0.0.1:0" };
    let server = net.keep(net.builder().listen(&own.0).listen(&own.1).listen(other).build().unwrap());
    server.define("hello", |_: &Request, ()| 1u8).unwrap();
    let addresses = server.addresses();
    assert_eq!(addresses.len(), 3);
    assert_eq!(server.address(), addresses[0]);
    assert!(addresses[2].to_string().starts_with(&other[..4]));
    for address in addresses {
        // A new client for each address.
        let client = net.client();
        let endpoint = client.lookup(&address).unwrap();
        assert_eq!(client.procedure::<(), u8>("hello").on(&endpoint).call(&()).unwrap(), 1);
    }
}

fn lookup_accepts_text_and_addresses(net: &Net) {
    let pair = net.pair();
    let address: Address = pair.server.address();
    let text: String = address.to_string();
    let endpoints: Vec<Endpoint> = vec![
        pair.client.lookup(text.as_str()).unwrap(),
        pair.client.lookup(&text).unwrap(),
        pair.client.lookup(text.clone()).unwrap(),
        pair.client.lookup(&address).unwrap(),
        pair.client.lookup(address.clone()).unwrap(),
    ];
    for endpoint in endpoints {
        assert_eq!(endpoint, pair.to_server);
        assert_eq!(endpoint.address().to_string(), text);
    }
}

fn addresses_survive_printing_and_encoding(net: &Net) {
    let mut texts = vec!["tcp://10.0.0.1:7000", "tcp://[::1]:1", "shm://name", "shm://", "verbs://10.9.0.1:7471", "loop://x"];
    let own = net.server().address().to_string();
    texts.push(&own);
    let mut seen = HashMap::new();
    for (i, text) in texts.iter().enumerate() {
        let address: Address = text.parse().unwrap();
        assert_eq!(address.to_string(), *text);
        let travelled: Address = postcard::from_bytes(&postcard::to_stdvec(&address).unwrap()).unwrap();
        assert_eq!(travelled, address);
        assert!(seen.insert(address, i).is_none());
    }
    assert_eq!(seen[&own.parse::<Address>().unwrap()], texts.len() - 1);
}

fn invalid_address_is_refused(net: &Net) {
    let client = net.client();
    for text in [
        "",
        "x",
        "://",
        "tcp",
        "tcp:",
        "tcp://",
        "tcp://host",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:65536",
        "tcp://:1",
        "tcp://127.0.0.1:-1",
        "tcp://a b:1",
        "http://127.0.0.1:80",
        "127.0.0.1:80",
        "loop://a/b",
        "tcp://[::1:1",
        "\0",
    ] {
        let error = client.lookup(text).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_error!(Err::<(), _>(error), Error::InvalidAddress { text: named, .. } if named == text);
        assert_error!(text.parse::<Address>(), Error::InvalidAddress { .. });
        // A transport alone is an address to listen at.
        if text != "tcp" {
            assert_error!(Engine::server(text), Error::InvalidAddress { .. });
            assert_error!(Engine::builder().listen(text).build(), Error::InvalidAddress { .. });
        }
    }
    assert_error!(Engine::client("http"), Error::InvalidAddress { .. } | Error::Unsupported { .. });
}

fn listening_at_an_address_in_use_fails_with_the_address(net: &Net) {
    let server = net.server();
    let address = server.address();
    let second = net.builder().listen(&address).build();
    assert_error!(second, Error::AddressInUse { address: named, .. } if named == address);
    // Once its engine is finalized, the address can be used again.
    server.finalize().unwrap();
    let again = net.keep(net.builder().listen(&address).build().unwrap());
    assert_eq!(again.address(), address);
}

fn endpoints_are_compared_by_peer_and_provider(net: &Net) {
    fn thread_safe<T: Clone + Eq + Hash + std::fmt::Debug + Send + Sync + 'static>(_: &T) {}
    fn hash(endpoint: &Endpoint) -> u64 {
        let mut hasher = DefaultHasher::new();
        endpoint.hash(&mut hasher);
        hasher.finish()
    }
    let (client, a, b) = (net.client(), net.server(), net.server());
    let (to_a, again, to_b) =
        (client.lookup(a.address()).unwrap(), client.lookup(a.address()).unwrap(), client.lookup(b.address()).unwrap());
    thread_safe(&to_a);
    assert_eq!(to_a, again);
    assert_eq!(hash(&to_a), hash(&again));
    assert_eq!(to_a, to_a.provider(0));
    assert_eq!(to_a.provider(7), again.provider(7));
    assert_eq!(hash(&to_a.provider(7)), hash(&again.provider(7)));
    assert_ne!(to_a, to_a.provider(7));
    assert_ne!(to_a, to_b);
    assert_eq!(to_a.provider(7).provider(0), to_a);
    assert_eq!(to_a.provider(7).address(), to_a.address());
    let shown = format!("{to_a:?}");
    assert!(shown.contains(&a.address().to_string()), "{shown}");
    // The hash of an endpoint does not change.
    #[allow(clippy::mutable_key_type)]
    let set: HashSet<Endpoint> = [to_a.clone(), again, to_b, to_a.provider(7)].into();
    assert_eq!(set.len(), 3);
}

suite![
    server_returns_its_address,
    client_has_no_address,
    servers_get_distinct_addresses,
    engine_with_several_addresses_serves_each,
    lookup_accepts_text_and_addresses,
    addresses_survive_printing_and_encoding,
    invalid_address_is_refused,
    listening_at_an_address_in_use_fails_with_the_address,
    endpoints_are_compared_by_peer_and_provider,
];
