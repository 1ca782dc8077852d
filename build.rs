//! Says what is missing where feature `verbs` can't be built, before the bindings' own build says it less clearly. The
//! default features need nothing.

use std::process::{Command, Stdio, exit};

/// Library, and the Debian package that brings it.
const LIBRARIES: [(&str, &str); 2] = [("libibverbs", "libibverbs-dev"), ("librdmacm", "librdmacm-dev")];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_VERBS").is_none() {
        return;
    }
    println!("cargo::rerun-if-env-changed=PKG_CONFIG_PATH");
    let mut missing = Vec::new();
    if !succeeds("--version") {
        missing.push("pkg-config");
    } else {
        missing.extend(LIBRARIES.iter().filter(|(library, _)| !succeeds(library)).map(|(_, package)| *package));
    }
    if !missing.is_empty() {
        eprintln!(
            "error: feature `verbs` of calomel needs {}, which is not installed.\n\
             On Debian and Ubuntu: apt-get install libibverbs-dev librdmacm-dev pkg-config libclang1-14 libclang-common-14-dev\n\
             and LIBCLANG_PATH=/usr/lib/llvm-14/lib, since the bindings can't be made with libclang 16 and newer.\n\
             On Fedora and RHEL: dnf install rdma-core-devel pkgconf-pkg-config, and a libclang older than 16.\n\
             Without the feature nothing of this is needed: tcp, shm and loop work.",
            missing.join(" and ")
        );
        exit(1);
    }
}

fn succeeds(argument: &str) -> bool {
    let exists = if argument.starts_with("--") { vec![argument] } else { vec!["--exists", argument] };
    let ended = Command::new("pkg-config").args(exists).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ended.is_ok_and(|status| status.success())
}
