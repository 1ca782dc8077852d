// E0277. Reading needs plain data too: padding is uninitialized, and a pointer is meaningless to a peer.
use calomel::Engine;

struct Padded {
    small: u8,
    large: u64,
}

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.expose_read_only(vec![Padded { small: 1, large: 2 }])?;
    Ok(())
}
