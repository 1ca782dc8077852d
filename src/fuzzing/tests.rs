//! The fuzzer's beginnings, without the fuzzer: every seed is played, those that are generated and those that are kept.

use std::fs;
use std::path::Path;

type Target = (&'static str, fn(&[u8]));

const TARGETS: [Target; 9] = [
    ("arguments", super::arguments),
    ("bulk", super::bulk),
    ("conversation", super::conversation),
    ("frames", super::frames),
    ("greeting", super::greeting),
    ("packets", super::packets),
    ("receiving", super::receiving),
    ("ring", super::ring),
    ("shapes", super::shapes),
];

#[test]
fn what_is_generated_holds() {
    for (target, run) in TARGETS {
        let seeds = super::seeds(target);
        assert!(seeds.len() >= 4, "{target} has {} seeds", seeds.len());
        for (_, bytes) in seeds {
            run(&bytes);
            run(&bytes[..bytes.len() / 2]);
        }
    }
}

/// Among them inputs that once found something.
#[test]
fn what_is_kept_holds() {
    // The published package has no fuzzer.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
    if !root.exists() {
        return;
    }
    for (target, run) in TARGETS {
        let kept: Vec<_> = fs::read_dir(root.join(target)).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(kept.len() >= 4, "{target} has {} seeds", kept.len());
        kept.iter().for_each(|path| run(&fs::read(path).unwrap()));
    }
}
