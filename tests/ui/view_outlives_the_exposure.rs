// E0505. The view borrows from the exposure, which is reclaimed.
use calomel::Engine;

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let name = engine.expose_read_only(String::from("Matthieu"))?;
    let view = name.view();
    let buffer = name.reclaim();
    println!("{view} {buffer}");
    Ok(())
}
