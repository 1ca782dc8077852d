// E0597. Memory exposed outside of a scope must be owned or `'static`; `engine.scope` exposes borrowed memory.
use calomel::Engine;

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let buffer = vec![0u8; 16];
    let exposed = engine.expose_read_only(&buffer[..])?;
    drop(exposed);
    Ok(())
}
