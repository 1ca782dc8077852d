// E0277. What is exposed read-only can be looked at, so nobody writes it: this engine's own transfers neither.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::server("loop://ui")?;
    let peer = engine.lookup(engine.address())?;
    let source = engine.expose(vec![0u8; 16], BulkMode::ReadOnly)?;
    let text = engine.expose_read_only(vec![0u8; 16])?;
    source.bulk().on(&peer).pull_into(&text)?;
    Ok(())
}
