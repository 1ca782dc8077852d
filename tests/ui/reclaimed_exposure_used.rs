// E0382. The buffer is the caller's again; the exposure is no more.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let local = engine.expose(vec![0u8; 16], BulkMode::ReadWrite)?;
    let buffer = local.reclaim();
    println!("{} {}", buffer.len(), local.bulk().len());
    Ok(())
}
