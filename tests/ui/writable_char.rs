// E0277. Not every four bytes are a character.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.expose(['a', 'b'], BulkMode::ReadWrite)?;
    Ok(())
}
