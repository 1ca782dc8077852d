// E0599. Peers may be writing what one would look at.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let local = engine.expose(vec![0u8; 16], BulkMode::WriteOnly)?;
    println!("{:?}", local.view());
    Ok(())
}
