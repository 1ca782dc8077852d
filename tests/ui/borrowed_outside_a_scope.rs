// E0597. What is exposed outside of a scope must live as long as it likes; `engine.scope` lends.
use calomel::Engine;

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let buffer = vec![0u8; 16];
    let exposed = engine.expose_read_only(&buffer[..])?;
    drop(exposed);
    Ok(())
}
