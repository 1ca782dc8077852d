// E0271. The same for a started transfer.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::server("loop://ui")?;
    let peer = engine.lookup(engine.address())?;
    let source = engine.expose(vec![0u8; 16], BulkMode::ReadOnly)?;
    let text = engine.expose_read_only(String::from("a text of 16 b."))?;
    source.bulk().on(&peer).start_pull_into(text).wait().0?;
    Ok(())
}
