// E0599. Peers may be writing the memory that would be viewed.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let local = engine.expose(vec![0u8; 16], BulkMode::WriteOnly)?;
    println!("{:?}", local.view());
    Ok(())
}
