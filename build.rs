//! Says what is missing where feature `verbs` can't be built, before the bindings' own build says it less clearly. The
//! default features need nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio, exit};

/// Library, and the Debian package that brings it.
const LIBRARIES: [(&str, &str); 2] = [("libibverbs", "libibverbs-dev"), ("librdmacm", "librdmacm-dev")];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_VERBS").is_none() {
        return;
    }
    for name in ["PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let mut missing = Vec::new();
    if !succeeds("--version") {
        missing.push("pkg-config");
    } else {
        missing.extend(LIBRARIES.iter().filter(|(library, _)| !succeeds(library)).map(|(_, package)| *package));
    }
    if !has_libclang() {
        missing.push("libclang1-14");
    }
    if !missing.is_empty() {
        eprintln!(
            "error: feature `verbs` of calomel needs {}, not installed here.\n\
             On Debian and Ubuntu: apt-get install libibverbs-dev librdmacm-dev pkg-config libclang1-14 libclang-common-14-dev\n\
             and LIBCLANG_PATH=/usr/lib/llvm-14/lib, since the bindings can't be made with libclang 16 and newer.\n\
             On Fedora and RHEL: dnf install rdma-core-devel pkgconf-pkg-config, and a libclang older than 16.\n\
             Without the feature nothing of this is needed: tcp, shm and loop work.",
            missing.join(" and ")
        );
        exit(1);
    }
}

/// Whether libclang is where the bindings' build would look for it.
fn has_libclang() -> bool {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    if let Some(path) = std::env::var_os("LIBCLANG_PATH") {
        let path = Path::new(&path);
        return path.is_file() || holds_libclang(path);
    }
    let mut folders: Vec<PathBuf> = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from).into();
    for folder in read("/usr/lib".as_ref()) {
        folders.push(folder.join("lib"));
        folders.push(folder);
    }
    // Elsewhere it may be, too: then the bindings' own build has the last word.
    !Path::new("/usr/lib").is_dir() || folders.iter().any(|folder| holds_libclang(folder))
}

fn holds_libclang(folder: &Path) -> bool {
    read(folder).iter().any(|file| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libclang")))
}

fn read(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn succeeds(argument: &str) -> bool {
    let exists = if argument.starts_with("--") { vec![argument] } else { vec!["--exists", argument] };
    let ended = Command::new("pkg-config").args(exists).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ended.is_ok_and(|status| status.success())
}
