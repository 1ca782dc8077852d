// E0277. Read-only memory can be viewed, so no transfer may write it: not even one of this engine.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::server("loop://ui")?;
    let peer = engine.lookup(engine.address())?;
    let source = engine.expose(vec![0u8; 16], BulkMode::ReadOnly)?;
    let text = engine.expose_read_only(vec![0u8; 16])?;
    source.bulk().on(&peer).pull_into(&text)?;
    Ok(())
}
