// E0499. Two segments that peers may write must not overlap.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let mut buffer = vec![0u8; 16];
    engine.scope(|s| s.expose((&mut buffer[..8], &mut buffer[..]), BulkMode::ReadWrite).map(|_| ()))?;
    Ok(())
}
