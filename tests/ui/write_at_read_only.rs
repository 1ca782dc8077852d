// E0599. Others may hold what `view` gave them.
use calomel::Engine;

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let name = engine.expose_read_only(String::from("Matthieu"))?;
    name.write_at(0, b"Mathilde")?;
    Ok(())
}
