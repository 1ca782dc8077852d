//! Writes the seeds of all targets to `seeds/TARGET/NAME`. Others that lie there stay.

use std::fs;
use std::path::Path;

const TARGETS: [&str; 9] = ["arguments", "bulk", "conversation", "frames", "greeting", "packets", "receiving", "ring", "shapes"];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
    for target in TARGETS {
        let folder = root.join(target);
        fs::create_dir_all(&folder).expect("a folder");
        for (name, bytes) in calomel::fuzzing::seeds(target) {
            fs::write(folder.join(name), bytes).expect("a seed");
        }
    }
}
