// E0277. `Segments(vec![..])` is needed.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.expose(vec![vec![1u8], vec![2u8]], BulkMode::ReadWrite)?;
    Ok(())
}
