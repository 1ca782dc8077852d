// E0277. A map has no segments of plain data; a newtype could name them.
use calomel::Engine;
use std::collections::BTreeMap;

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let values: BTreeMap<u32, u32> = BTreeMap::new();
    engine.expose_read_only(values)?;
    Ok(())
}
