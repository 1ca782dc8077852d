// E0382. The buffer has been returned to the caller; the exposure has ended.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let local = engine.expose(vec![0u8; 16], BulkMode::ReadWrite)?;
    let buffer = local.reclaim();
    println!("{} {}", buffer.len(), local.bulk().len());
    Ok(())
}
