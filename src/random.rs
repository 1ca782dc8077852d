//! Random bytes from the operating system.
//!
//! Identities and secrets of engines are made of these. A fork copies a generator of the process, so forked workers that make
//! their own engines would all have the same secrets. An engine's own generator is seeded from here, and can't be used in a
//! forked child, as the engine itself can't.

use std::io;

use rand::TryRng as _;
use rand::rngs::SysRng;

/// `N` random bytes.
pub(crate) fn from_system<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SysRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}
