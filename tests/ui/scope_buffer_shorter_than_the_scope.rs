// E0597. A buffer in the closure would be freed before the scope has revoked the access of peers.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.scope(|s| {
        let mut buffer = vec![0u8; 16];
        s.expose(&mut buffer[..], BulkMode::WriteOnly)?;
        Ok(())
    })?;
    Ok(())
}
