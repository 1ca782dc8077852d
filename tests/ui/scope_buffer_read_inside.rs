// E0502. While peers may write the buffer, it can't be read: also after the bulk's last use, until the scope's end.
use calomel::{BulkMode, Engine};

fn main() -> calomel::Result<()> {
    let engine = Engine::client("loop")?;
    let mut buffer = vec![0u8; 16];
    engine.scope(|s| {
        let bulk = s.expose(&mut buffer[..], BulkMode::WriteOnly)?;
        drop(bulk);
        println!("{}", buffer[0]);
        Ok(())
    })?;
    Ok(())
}
