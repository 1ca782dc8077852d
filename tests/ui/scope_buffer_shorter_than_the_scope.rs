// E0597. A buffer of the closure's own is gone before the scope has locked peers out.
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
