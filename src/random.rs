//! Random numbers of the operating system.
//!
//! Whatever tells one engine from another, or must not be guessed, is made of these. A generator of the process is copied by a
//! fork, so that workers which make their own engines would have the same secrets. An engine's own generator is seeded from
//! here: it can't be used in a forked child, and neither can the engine.

use std::io;

use rand::TryRng as _;
use rand::rngs::SysRng;

/// So many bytes.
pub(crate) fn from_system<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SysRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}
