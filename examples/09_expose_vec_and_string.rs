//! Memory is exposed by value: peers can access it, within its mode, until `reclaim` returns it. The [`Bulk`] that names it is
//! an ordinary argument, and its receiver starts the transfer.
//!
//! `cargo run --example 09_expose_vec_and_string`

use calomel::{Bulk, BulkMode, Engine, Error, Request};

fn main() -> calomel::Result<()> {
    let server = Engine::server("tcp://127.0.0.1:0")?;
    server.define_try("shout", |request: &Request, (from, to): (Bulk, Bulk)| shout(request, from, to))?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;
    let shout = client.procedure::<(Bulk, Bulk), usize>("shout");

    // The mode restricts what peers may do. The owner can still read read-only memory, since no peer changes it.
    let name = client.expose_read_only(String::from("Matthieu"))?;
    assert_eq!(name.view(), "Matthieu");
    // While peers may write to memory, it can't be borrowed.
    let room = client.expose(vec![b'.'; 12], BulkMode::WriteOnly)?;

    let moved = shout.on(&peer).call(&(name.bulk(), room.bulk()))?;
    assert_eq!(moved, 8);

    // From here on no peer can access the buffer. A later transfer with its bulk fails at the peer.
    let shouted: Vec<u8> = room.reclaim();
    println!("{}", String::from_utf8_lossy(&shouted));
    assert_eq!(shouted, b"MATTHIEU....");
    Ok(())
}

fn shout(request: &Request, from: Bulk, to: Bulk) -> calomel::Result<usize> {
    let peer = request.endpoint();

    // The local side can be plain memory, which the call borrows. The smaller of the two lengths is transferred.
    let mut text = [0u8; 64];
    let length = from.on(peer).pull_into(&mut text[..])?;
    text.make_ascii_uppercase();
    let moved = to.on(peer).push_from(&text[..length])?;

    let error = from.on(peer).push_from(&text[..length]).expect_err("the name is read-only");
    assert!(matches!(error, Error::AccessDenied { .. }));
    Ok(moved)
}
