// E0521. The scope can't outlive its closure.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let mut buffer = vec![0u8; 16];
    let mut kept = None;
    engine.scope(|s| {
        kept = Some(s);
        Ok(())
    })?;
    kept.unwrap().expose(&mut buffer[..], BulkMode::WriteOnly)?;
    Ok(())
}
