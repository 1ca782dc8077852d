//! Engines that share a key, and a server that decides for each call whether its caller may make it.
//!
//! `cargo run --example 16_trust`

use calomel::{Engine, Error, Request};

/// In production, read the key from a file that only its owner can read: `head -c 32 /dev/urandom > key`.
const KEY: &[u8] = b"for this example only, not secret";

fn main() -> calomel::Result<()> {
    let server = Engine::builder()
        .listen("tcp://127.0.0.1:0")
        .pre_shared_key(KEY)
        .payload_checksums(true)
        .authorize(|caller| {
            // Over shared memory the kernel reports the calling process.
            let own = caller.process().is_some_and(|process| process.pid == std::process::id());
            caller.procedure() == "read" || own
        })
        .build()?;
    server.define("read", |_: &Request, ()| 42u32)?;
    server.define("write", |_: &Request, _: u32| ())?;

    let member = Engine::builder().pre_shared_key(KEY).same_host_upgrade(false).build()?;
    let peer = member.lookup(server.address())?;
    println!("with the key, read: {}", member.procedure::<(), u32>("read").on(&peer).call(&())?);
    let Err(Error::AccessDenied { reason, .. }) = member.procedure::<u32, ()>("write").on(&peer).call(&7) else { panic!() };
    println!("with the key, write: {reason}");

    let other = Engine::client("tcp")?;
    let peer = other.lookup(server.address())?;
    let Err(Error::AccessDenied { reason, .. }) = other.procedure::<(), u32>("read").on(&peer).call(&()) else { panic!() };
    println!("without the key: {reason}");
    Ok(())
}
