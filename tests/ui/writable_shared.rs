// E0277. Other holders may be reading it at the same time.
use std::sync::Arc;

use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.expose(Arc::<[u8]>::from([1, 2, 3]), BulkMode::ReadWrite)?;
    Ok(())
}
