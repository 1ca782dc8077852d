//! Runs every seed of the fuzz targets, generated and checked in, without the fuzzer.

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
fn generated_seeds_run_without_failure() {
    for (target, run) in TARGETS {
        let seeds = super::seeds(target);
        assert!(seeds.len() >= 4, "{target} has {} seeds", seeds.len());
        for (_, bytes) in seeds {
            run(&bytes);
            run(&bytes[..bytes.len() / 2]);
        }
    }
}

/// They include inputs that once failed.
#[test]
fn checked_in_seeds_run_without_failure() {
    // The published package does not include the seeds.
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
