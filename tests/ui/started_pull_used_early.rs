// E0502. The transfer returns the slice; until then it can't be read.
use calomel::{Engine, RemoteBulk};

fn pull(engine: &Engine, remote: &RemoteBulk) -> calomel::Result<()> {
    let mut buffer = [0u8; 16];
    engine.scope(|s| {
        let transfer = s.start_pull_into(remote, &mut buffer);
        println!("{}", buffer[0]);
        transfer.wait().0.map(|_| ())
    })
}

fn main() {
    let _ = pull;
}
