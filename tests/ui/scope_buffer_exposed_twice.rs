// E0499. Two exposures of one buffer would be two writers.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let mut buffer = vec![0u8; 16];
    engine.scope(|s| {
        s.expose(&mut buffer[..], BulkMode::WriteOnly)?;
        s.expose(&mut buffer[..], BulkMode::WriteOnly)?;
        Ok(())
    })?;
    Ok(())
}
