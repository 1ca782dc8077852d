// E0277. A scope borrows; `engine.expose` takes a buffer over.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.scope(|s| s.expose(vec![0u8; 16], BulkMode::ReadWrite).map(|_| ()))?;
    Ok(())
}
