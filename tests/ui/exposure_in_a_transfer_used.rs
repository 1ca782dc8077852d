// E0382. A transfer in progress owns its buffer until it is over.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::server("loop://ui")?;
    let peer = engine.lookup(engine.address())?;
    let source = engine.expose(vec![0u8; 16], BulkMode::ReadOnly)?;
    let local = engine.expose(vec![0u8; 16], BulkMode::ReadWrite)?;
    let transfer = source.bulk().on(&peer).start_pull_into(local);
    local.reclaim();
    transfer.wait().0?;
    Ok(())
}
