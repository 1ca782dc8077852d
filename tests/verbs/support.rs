use std::time::Duration;

use calomel::{Endpoint, Engine};

/// The address of a device, if there is one.
pub fn device() -> Option<String> {
    let found = std::env::var("CALOMEL_VERBS").ok();
    if found.is_none() {
        eprintln!("skipped: CALOMEL_VERBS names no device");
    }
    found
}

/// A server and a client, of one process.
pub struct Pair {
    pub server: Engine,
    pub client: Engine,
    pub endpoint: Endpoint,
}

impl Pair {
    pub fn new(device: &str) -> Pair {
        let builder = || Engine::builder().same_host_upgrade(false).default_timeout(Duration::from_secs(20));
        let server = builder().listen(format!("verbs://{device}:0")).build().unwrap();
        let client = builder().build().unwrap();
        let endpoint = client.lookup(server.address()).unwrap();
        Pair { server, client, endpoint }
    }
}

impl Pair {
    /// A further client, which knows nobody.
    pub fn another_client(&self) -> Engine {
        Engine::builder().same_host_upgrade(false).default_timeout(Duration::from_secs(20)).build().unwrap()
    }
}
