// E0505. What is seen belongs to the exposure, which is taken back.
use calomel::Engine;

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let name = engine.expose_read_only(String::from("Matthieu"))?;
    let view = name.view();
    let buffer = name.reclaim();
    println!("{view} {buffer}");
    Ok(())
}
