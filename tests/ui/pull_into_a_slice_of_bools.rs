// E0277. A plain slice must meet the same conditions as an exposed one.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::server("loop://ui")?;
    let peer = engine.lookup(engine.address())?;
    let source = engine.expose(vec![2u8; 16], BulkMode::ReadOnly)?;
    let mut flags = [false; 16];
    source.bulk().on(&peer).pull_into(&mut flags[..])?;
    Ok(())
}
