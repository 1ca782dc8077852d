//! Engines on one host communicate through shared memory, even at a tcp address; memory of `engine.alloc` is read by peers
//! without an extra copy.
//!
//! `cargo run --example 13_same_host`

use calomel::{Bulk, BulkMode, Engine, Request, Transport};

const LEN: usize = 1 << 20;

fn main() -> calomel::Result<()> {
    // An address of shared memory is a name on this host; without one, a name is chosen.
    let server = Engine::builder().listen("tcp://127.0.0.1:0").listen("shm://").build()?;
    server.define("sum", |request: &Request, remote: Bulk| {
        let mut local = vec![0u8; remote.len()];
        let pulled = remote.on(request.endpoint()).pull_into(&mut local[..]).map_err(|error| error.to_string())?;
        Ok::<u64, String>(local[..pulled].iter().map(|byte| u64::from(*byte)).sum())
    })?;

    let client = Engine::client("tcp")?;
    let mut buffer = client.alloc(LEN);
    buffer.fill(3);
    let exposed = client.expose(buffer, BulkMode::ReadOnly)?;
    let sum = client.procedure::<Bulk, Result<u64, String>>("sum");

    for address in server.addresses() {
        let peer = client.lookup(&address)?;
        assert_eq!(sum.on(&peer).call(&exposed.bulk())?, Ok(3 * LEN as u64));
        // Both addresses lead to shared memory, if both engines run as the same user and neither has disabled that.
        println!("{:?} address, reached by {:?}", address.scheme(), peer.transport());
        assert_eq!(peer.transport(), Some(Transport::Shm));
    }
    Ok(())
}
