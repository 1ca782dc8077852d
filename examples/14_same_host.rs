//! Engines on one host communicate through shared memory, even at a tcp address; memory of `engine.alloc` is read by peers
//! without an extra copy.
//!
//! `cargo run --example 14_same_host`

use calomel::{Bulk, BulkMode, Engine, Request, Transport};

const LEN: usize = 1 << 20;

fn main() -> calomel::Result<()> {
    // An address of shared memory is a name on this host; without one, a name is chosen.
    let server = Engine::builder().listen("tcp://127.0.0.1:0").listen("shm://").build()?;
    server.define_try("sum", |request: &Request, remote: Bulk| {
        let mut local = vec![0u8; LEN];
        let pulled = remote.on(request.endpoint()).pull_into(&mut local[..])?;
        calomel::Result::Ok(local[..pulled].iter().map(|byte| u64::from(*byte)).sum::<u64>())
    })?;

    let client = Engine::client("tcp")?;
    let mut buffer = client.alloc(LEN);
    buffer.fill(3);
    let exposed = client.expose(buffer, BulkMode::ReadOnly)?;
    let sum = client.procedure::<Bulk, u64>("sum");

    for address in server.addresses() {
        let peer = client.lookup(&address)?;
        assert_eq!(sum.on(&peer).call(&exposed.bulk())?, 3 * LEN as u64);
        // Both addresses lead to shared memory, if both engines run as the same user and neither has disabled that.
        println!("{:?} address, reached by {:?}", address.scheme(), peer.transport());
        assert_eq!(peer.transport(), Some(Transport::Shm));
    }
    Ok(())
}
