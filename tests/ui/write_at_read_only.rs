// E0599. A reference from `view` may still be in use.
use calomel::Engine;

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let name = engine.expose_read_only(String::from("Matthieu"))?;
    name.write_at(0, b"Mathilde")?;
    Ok(())
}
