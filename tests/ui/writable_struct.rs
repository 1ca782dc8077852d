// E0277. A struct is plain data only if it implements `bytemuck::Pod`.
use calomel::{BulkMode, Engine};

struct Particle {
    position: [f64; 3],
    name: &'static str,
}

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    engine.expose(vec![Particle { position: [0.0; 3], name: "electron" }], BulkMode::ReadWrite)?;
    Ok(())
}
