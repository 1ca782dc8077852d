//! Reports what feature `verbs` lacks on this machine, before the bindings' own build fails less clearly. The default features
//! need nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio, exit};

/// Each library, and the Debian package that has it.
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
    let found = libclangs();
    if found.is_empty() && Path::new("/usr/lib").is_dir() {
        missing.push("libclang");
    }
    if !missing.is_empty() {
        eprintln!(
            "error: feature `verbs` of calomel needs {}, which {} not installed here.\n\
             On Debian and Ubuntu: apt-get install libibverbs-dev librdmacm-dev pkg-config\n\
             On Fedora and RHEL: dnf install rdma-core-devel pkgconf-pkg-config\n\
             {LIBCLANG}",
            missing.join(" and "),
            if missing.len() == 1 { "is" } else { "are" },
        );
        exit(1);
    }
    // The bindings' build uses the newest one. A file without a version in its name is not checked.
    let newest = found.into_iter().filter_map(|file| Some((version(&file)?, file))).max();
    if let Some((version, file)) = newest
        && version >= TOO_NEW
    {
        eprintln!(
            "error: feature `verbs` of calomel can't be built with {}: the generator of its bindings fails with clang {TOO_NEW} and \
             newer, and this is clang {version}.\n{LIBCLANG}",
            file.display()
        );
        exit(1);
    }
}

/// The first version of clang that names unnamed types in a way that bindgen 0.59, which `rdma-sys` uses, can't read: it
/// panics.
const TOO_NEW: u32 = 16;

const LIBCLANG: &str = "\
    libclang 14 can be had without root on any distribution:\n\
    \x20   pip install --target ~/.cache/calomel-libclang libclang==14.0.6\n\
    \x20   export LIBCLANG_PATH=~/.cache/calomel-libclang/clang/native\n\
    \x20   export BINDGEN_EXTRA_CLANG_ARGS=-I$(gcc -print-file-name=include)\n\
    Without the feature none of this is needed: tcp, shm and loop work.";

/// The files of libclang that the bindings' build would find.
fn libclangs() -> Vec<PathBuf> {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    let mut folders: Vec<PathBuf> = Vec::new();
    match std::env::var_os("LIBCLANG_PATH").map(PathBuf::from) {
        Some(path) if path.is_file() => return vec![path],
        Some(path) => folders.push(path),
        None => {
            folders.extend(["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from));
            for folder in ["/usr/lib", "/usr/lib64"].iter().flat_map(|folder| read(folder.as_ref())) {
                folders.push(folder.join("lib"));
                folders.push(folder);
            }
        }
    }
    folders.iter().flat_map(|folder| read(folder)).filter(|file| is_libclang(file)).collect()
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn is_libclang(file: &Path) -> bool {
    let name = name(file);
    (name.starts_with("libclang.so") || name.starts_with("libclang-") && name.contains(".so")) && !name.contains("-cpp")
}

/// The version in the file name, with symbolic links resolved: `libclang-19.so.19`, `libclang.so.18.1.8`.
fn version(file: &Path) -> Option<u32> {
    let name = name(&fs::canonicalize(file).ok()?);
    let numbers = name.strip_prefix("libclang-").or_else(|| name.strip_prefix("libclang.so."))?;
    numbers.split('.').next()?.parse().ok()
}

fn read(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn succeeds(argument: &str) -> bool {
    let exists = if argument.starts_with("--") { vec![argument] } else { vec!["--exists", argument] };
    let ended = Command::new("pkg-config").args(exists).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ended.is_ok_and(|status| status.success())
}
