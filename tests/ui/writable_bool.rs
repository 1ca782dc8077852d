// E0277. Peers could write bytes into it that are neither true nor false.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.expose(vec![true, false], BulkMode::WriteOnly)?;
    Ok(())
}
