// E0499. While peers may write the buffer, its owner may not.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let mut buffer = vec![0u8; 16];
    engine.scope(|s| {
        let bulk = s.expose(&mut buffer[..], BulkMode::WriteOnly)?;
        buffer[0] = 1;
        Ok(bulk.len())
    })?;
    Ok(())
}
