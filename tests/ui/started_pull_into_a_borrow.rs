// E0277. A transfer that is leaked goes on: outside of a scope it must own its buffer.
use calomel::{Bulk, Endpoint};

fn pull(bulk: Bulk, peer: &Endpoint) {
    let mut buffer = [0u8; 16];
    let _transfer = bulk.on(peer).start_pull_into(&mut buffer[..]);
}

fn main() {
    let _ = pull;
}
