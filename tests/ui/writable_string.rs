// E0277. Peers could write bytes into it that are not UTF-8.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.expose(String::from("Matthieu"), BulkMode::ReadWrite)?;
    Ok(())
}
