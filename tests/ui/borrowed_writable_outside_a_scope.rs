// E0277. A mutable borrow could end while the exposure is leaked.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let mut buffer = vec![0u8; 16];
    engine.expose(&mut buffer[..], BulkMode::ReadWrite)?;
    Ok(())
}
