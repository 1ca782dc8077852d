// E0277. Peers can't write what is borrowed for reading.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let (mut numbers, names) = (vec![0u32; 16], vec![0u8; 16]);
    engine.scope(|s| s.expose((&mut numbers, &names), BulkMode::ReadWrite).map(|_| ()))?;
    Ok(())
}
