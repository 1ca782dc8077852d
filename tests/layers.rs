//! Holds the code to the layers of DESIGN.md: reads what each file of `src` names, and fails on what it must not.

#[path = "layers/imports.rs"]
mod imports;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use imports::{Import, circles, imports};

/// The modules of the crate, from the lowest layer to the highest. A module may name those of the layers below its own, and no
/// other one, except its own parts.
const LAYERS: &[&[&str]] = &[
    &["address", "checksum", "copy", "deferred_log", "fork", "latency", "payload", "random", "sync", "text"],
    &["error", "trace_context"],
    &["into_address", "memory", "shape", "tls"],
    &["proto", "transport"],
    &["progress"],
    &["config"],
    &["engine"],
    &["bulk", "rpc"],
    &["builder"],
    &["launch"],
];

/// Modules for tests, which may name all and be named by any test.
const TEST_MODULES: &[&str] = &["fuzzing", "tests"];

/// What the files of `proto` must not name, beyond that: it has no input or output, no clock, no threads and no locks, and it
/// never reads the memory that it moves.
const NOT_IN_PROTO: &[&str] = &[
    "crate::memory",
    "crate::shape",
    "crate::deferred_log",
    "std::net",
    "std::thread",
    "std::sync::Mutex",
    "std::sync::RwLock",
    "std::sync::mpsc",
    "crate::sync",
    "mio::",
    "libc::",
    "Instant::now",
    "SystemTime",
    // The protocol runs under a lock, and a log subscriber is user code: it queues `Log`s instead.
    "tracing::",
    "unsafe",
];
/// What its tests may name of that.
const IN_TESTS_OF_PROTO: &[&str] = &["std::thread", "Instant::now", "std::sync::Mutex"];

/// Where `unsafe` may stand.
const UNSAFE: &[&str] = &[
    "memory/",
    "transport/tcp/sys.rs",
    "transport/shm/sys.rs",
    "transport/shm/segment.rs",
    "transport/shm/blocks.rs",
    "transport/ofi/sys/",
    "transport/verbs/sys/",
    "transport/verbs/memory.rs",
    "transport/verbs/slab.rs",
    "transport/verbs/queue_set.rs",
    "transport/verbs/inbox.rs",
    "transport/verbs/link/rma_queue_pair.rs",
    "transport/verbs/outbox.rs",
    "checksum.rs",
    "copy.rs",
    "fork.rs",
    "shape/plain.rs",
    "bulk/exposed.rs",
    "bulk/scope.rs",
    "launch/inherited.rs",
    "progress/mod.rs",
];

/// A file says one thing: over this many lines there is a second thing in it.
const MAX_LINES: usize = 800;

/// A file that takes another's place where a feature is off, and so defines the same types.
const STANDS_IN: &str = "transport/tcp/no_session.rs";

/// A file of `src`, with its path from there; and its lines, comments taken out.
struct Source {
    path: String,
    text: String,
    lines: Vec<String>,
}

impl Source {
    fn new(path: &str, text: &str) -> Source {
        let lines = text.lines().map(|line| code(line).to_owned()).collect();
        Source { path: path.to_owned(), text: text.to_owned(), lines }
    }

    fn is_test(&self) -> bool {
        self.path.trim_end_matches(".rs").split('/').any(|part| TEST_MODULES.contains(&part))
    }
}

/// The part of a line before a comment. (A `//` in a text is taken for one, which hides no import.)
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

fn sources() -> Vec<Source> {
    fn visit(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    visit(&root, &mut found);
    assert!(found.len() > 30, "{} files found", found.len());
    let relative = |path: &Path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
    found.iter().map(|path| Source::new(&relative(path), &fs::read_to_string(path).unwrap())).collect()
}

/// Lines that log with no `defer(` on the same line or on the one before.
fn logged_at_once(source: &Source) -> impl Iterator<Item = &str> {
    let before = std::iter::once("").chain(source.lines.iter().map(String::as_str));
    // An import of `tracing` would hide its macros.
    let logs = |line: &str| line.contains("tracing::");
    let pairs = source.lines.iter().map(String::as_str).zip(before);
    pairs
        .filter(move |(line, before)| logs(line) && !line.contains("defer(") && !before.contains("defer("))
        .map(|(line, _)| line.trim())
}

/// What is wrong with a file, in words.
fn complaints(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let text = source.lines.join("\n");
    if source.path.starts_with("proto/") {
        let forbidden = NOT_IN_PROTO.iter().filter(|name| !(source.is_test() && IN_TESTS_OF_PROTO.contains(name)));
        let named = forbidden.filter(|name| text.contains(**name));
        found.extend(named.map(|name| format!("{} must not name `{name}`", source.path)));
    }
    // Deadlines go by the clock that never jumps.
    if text.contains("SystemTime") && !source.is_test() {
        found.push(format!("{} must not ask the clock that can be set", source.path));
    }
    // A fork copies every generator of the process: secrets of engines come from the system, by `crate::random`.
    let copied = ["rand::rng(", "rand::random(", "rand::make_rng", "ThreadRng", "RandomState", "DefaultHasher"];
    if source.path != "proto/tables.rs" && !source.is_test() {
        let named = copied.iter().filter(|name| text.contains(*name));
        found.extend(named.map(|name| format!("{} must not use `{name}`, which a fork copies", source.path)));
    }
    // A fork copies a table of waiting threads with its locks held: see `sync.rs`.
    if text.contains("parking_lot") {
        found.push(format!("{} must take its locks from `crate::sync`", source.path));
    }
    // Transports run under locks of theirs and of the engine, and a subscriber is user code: `deferred_log::defer` has a line
    // wait.
    if source.path.starts_with("transport/") && !source.is_test() {
        found.extend(logged_at_once(source).map(|line| format!("{} must defer what it logs: {line}", source.path)));
    }
    let has_unsafe = |line: &String| line.contains("unsafe {") || line.contains("unsafe impl") || line.contains("unsafe fn");
    if source.lines.iter().any(has_unsafe) && !UNSAFE.iter().any(|place| source.path.starts_with(place)) {
        found.push(format!("{} must not have `unsafe`", source.path));
    }
    if source.lines.len() > MAX_LINES && !source.is_test() {
        found.push(format!("{} has {} lines", source.path, source.lines.len()));
    }
    found
}

/// Imports that go up, or to another module of the same layer.
fn upward(imports: &[Import]) -> Vec<String> {
    let layer = |module: &str| LAYERS.iter().position(|layer| layer.contains(&module));
    let mut found = Vec::new();
    for Import { from, to, name, children, .. } in imports.iter().filter(|import| import.folder.is_empty()) {
        let is_test = |module: &String| TEST_MODULES.contains(&&**module);
        // A fuzzer of one layer may build its inputs with another.
        if is_test(&children.0) || is_test(&children.1) || from.contains("fuzzing") {
            continue;
        }
        match (layer(&children.0), layer(&children.1)) {
            (Some(own), Some(other)) if other < own => {}
            (None, _) | (_, None) => found.push(format!("{from} or {to} is in no layer")),
            _ => found.push(format!("{from} must not name `{name}` of {to}")),
        }
    }
    found
}

/// The names of the thread-locals of a file.
fn thread_locals(source: &Source) -> Vec<String> {
    let mut inside = None;
    let mut found = Vec::new();
    // The tests of a file are at its end.
    for line in source.lines.iter().take_while(|line| !line.contains("mod tests {")) {
        let indentation = line.len() - line.trim_start().len();
        if line.contains("thread_local!") {
            inside = Some(indentation);
        } else if inside.is_some_and(|outer| indentation <= outer && !line.trim().is_empty()) {
            inside = None;
        }
        if inside.is_some()
            && let Some((_, named)) = line.split_once("static ")
        {
            found.push(named.split(':').next().unwrap_or_default().trim().to_owned());
        }
    }
    found
}

/// Hidden arguments are few, and each is listed with its reason.
#[test]
fn every_thread_local_is_listed() {
    let list = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/progress/README.md")).unwrap();
    let mut count = 0;
    for source in sources().iter().filter(|source| !source.is_test()) {
        for name in thread_locals(source) {
            assert!(list.contains(&format!("`{name}`")), "{} has the thread-local {name}, which is not listed", source.path);
            count += 1;
        }
    }
    assert!(count > 10, "{count} found");
}

#[test]
fn thread_locals_are_found() {
    let text = "thread_local! {\n    static A: Cell<u8> = B;\n    pub static C: u8 = D;\n}\nstatic E: u8 = 1;\nthread_local!(static F: u8 = G);";
    assert_eq!(thread_locals(&Source::new("a.rs", text)), ["A", "C", "F"]);
}

#[test]
fn every_file_keeps_to_its_layer() {
    let sources = sources();
    let mut found: Vec<String> = sources.iter().flat_map(complaints).collect();
    found.extend(upward(&imports(&sources)));
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn imports_form_no_circle() {
    let imports = imports(&sources());
    assert!(imports.len() > 200, "{} imports found", imports.len());
    let found = circles(imports.iter().filter(|import| !import.in_tests));
    assert!(found.is_empty(), "{found:#?}");
}

/// The names of the types that a file defines at the top of a module. Those inside functions are their functions' own, and a
/// `mod sealed` repeats the names of the public traits that it seals.
fn types(source: &Source) -> Vec<String> {
    let mut sealed = false;
    let mut found = Vec::new();
    for line in &source.lines {
        if !line.starts_with(' ') && !line.is_empty() {
            sealed = line.contains("mod sealed {");
        }
        let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub") || *word == "unsafe");
        let kind = words.next().unwrap_or_default();
        if !line.starts_with(' ') && !sealed && ["struct", "enum", "trait", "union", "type"].contains(&kind) {
            let name = words.next().unwrap_or_default();
            found.push(name.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned());
        }
    }
    found
}

/// Names of types that more than one file defines, with these files.
fn repeated(sources: &[Source]) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !source.is_test() && source.path != STANDS_IN) {
        types(source).into_iter().for_each(|name| places.entry(name).or_default().push(&source.path));
    }
    places.into_iter().filter(|(_, files)| files.len() > 1).map(|(name, files)| format!("{name}: {files:?}")).collect()
}

#[test]
fn one_name_is_one_type() {
    let found = repeated(&sources());
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_name_of_two_types_is_found() {
    let source = |path, text| Source::new(path, text);
    let pair = [source("a.rs", "pub(crate) struct State {\n}"), source("b/c.rs", "enum State {\n    A,\n}")];
    assert_eq!(repeated(&pair), ["State: [\"a.rs\", \"b/c.rs\"]"]);
    let apart = [
        source("a.rs", "pub trait Local: sealed::Local {}\nmod sealed {\n    pub trait Local {}\n}\ntype Line = u8;"),
        source("b.rs", "impl A for B {\n    type Line = u16;\n}\nfn f() {\n    struct Local;\n}"),
        source(STANDS_IN, "struct Line;"),
    ];
    assert!(repeated(&apart).is_empty());
}

#[test]
fn a_file_that_does_not_is_found() {
    for (path, text, part) in [
        ("proto/bad.rs", "fn f(slice: &crate::memory::Slice) {}", "crate::memory"),
        ("proto/bad.rs", "use std::net::SocketAddr;", "std::net"),
        ("proto/bad.rs", "fn f() { let now = Instant::now(); }", "Instant::now"),
        ("proto/bad.rs", "use crate::sync::Mutex;", "crate::sync"),
        ("proto/bad.rs", "fn f() { tracing::warn!(\"{}\", 1); }", "tracing::"),
        ("transport/bad.rs", "fn f() {\n    let error = g();\n    tracing::warn!(%error, \"it fails\");\n}", "must defer"),
        ("transport/verbs/bad.rs", "use tracing::warn;", "must defer"),
        ("rpc/bad.rs", "fn f() { unsafe { g() } }", "`unsafe`"),
        ("engine/bad.rs", "fn f() { let now = std::time::SystemTime::now(); }", "the clock"),
        ("bulk/bad.rs", "fn f() -> u64 { rand::random() }", "a fork copies"),
        ("proto/bad.rs", "use std::hash::{BuildHasher, RandomState};", "a fork copies"),
        ("rpc/bad.rs", "use parking_lot::Mutex;", "`crate::sync`"),
        ("rpc/bad.rs", &"\n".repeat(MAX_LINES + 1), "lines"),
    ] {
        let found = complaints(&Source::new(path, text));
        assert!(found.iter().any(|complaint| complaint.contains(part)), "{path}: {text}: {found:?}");
    }
}

#[test]
fn what_is_allowed_is_not_found() {
    for (path, text) in [
        ("proto/good.rs", "use std::time::Instant; // never Instant::now\nuse super::wire::Message;"),
        (
            "transport/shm/good.rs",
            "defer(move || tracing::warn!(pid, \"a\"));\ndefer(\n    move || tracing::warn!(pid, \"b\"),\n);",
        ),
        ("memory/good.rs", "fn f() { unsafe { g() } }"),
        ("proto/tests/good.rs", "fn f() { let now = Instant::now(); }"),
    ] {
        let found = complaints(&Source::new(path, text));
        assert!(found.is_empty(), "{path}: {text}: {found:?}");
    }
}

/// A crate of a few files, with the rest of its layers.
fn invented(files: &[(&str, &str)]) -> Vec<Import> {
    let lib = "mod address;\npub use address::Address;\npub use engine::Engine;";
    let rest = [
        ("lib.rs", lib),
        ("address.rs", "pub struct Address;"),
        ("engine/mod.rs", "pub use handle::Engine;"),
        ("engine/handle.rs", "pub struct Engine;"),
        ("proto/mod.rs", "mod frame;\npub(crate) use frame::Frame;\npub(crate) struct Proto;"),
        ("proto/frame.rs", "pub(crate) enum Frame {}"),
    ];
    let all = rest.iter().filter(|(path, _)| files.iter().all(|(given, _)| given != path)).chain(files);
    imports(&all.map(|(path, text)| Source::new(path, text)).collect::<Vec<_>>())
}

#[test]
fn an_import_that_goes_up_is_found() {
    for (path, text, complaint) in [
        ("transport/bad.rs", "use super::super::proto::Proto;", "must not name `Proto` of proto/mod.rs"),
        ("transport/mod.rs", "use super::proto::Proto;", "must not name `Proto` of proto/mod.rs"),
        ("transport/tcp/bad.rs", "fn f(_: super::super::super::proto::Frame) {}", "must not name `Frame` of proto/frame.rs"),
        ("address.rs", "use crate::{\n    payload::Status,\n    proto::{self, Frame as F},\n};", "`proto` of proto/mod.rs"),
        ("progress/bad.rs", "use crate::Engine;", "must not name `Engine` of engine/handle.rs"),
        ("memory/bad.rs", "mod inner {\n    use super::super::super::proto::*;\n}", "of proto/mod.rs"),
        ("bad.rs", "use crate::Address;", "is in no layer"),
    ] {
        let found = upward(&invented(&[(path, text)]));
        assert!(found.iter().any(|found| found.starts_with(path) && found.contains(complaint)), "{path}: {text}: {found:?}");
    }
    for (path, text) in [
        ("proto/good.rs", "use super::{Frame, frame};\nuse crate::{Address, Transport};"),
        ("progress/good.rs", "use crate::proto::Frame; // and not crate::Engine\nconst C: &str = \"{ crate::Engine\";"),
        ("engine/good.rs", "use std::mem;\nuse super::handle::Engine;\npub(in crate::rpc) fn f<'a>(_: &'a crate::Address) {}"),
    ] {
        let found = upward(&invented(&[(path, text)]));
        assert!(found.is_empty(), "{path}: {text}: {found:?}");
    }
}

#[test]
fn a_circle_of_imports_is_found() {
    let found = |files: &[(&str, &str)]| circles(invented(files).iter().filter(|import| !import.in_tests));
    // Through a re-export.
    let [circle] =
        &found(&[("proto/frame.rs", "use super::link::Link;\nstruct Frame;"), ("proto/link.rs", "use super::Frame;")])[..]
    else {
        panic!("not one circle");
    };
    assert!(circle.contains("proto/frame.rs -> proto/link.rs: {\"Link\"}"), "{circle}");
    assert!(circle.contains("proto/link.rs -> proto/frame.rs: {\"Frame\"}"), "{circle}");
    // Between folders, over a third.
    let folders = [
        ("a/mod.rs", "mod x;"),
        ("a/x.rs", "use crate::b::Y;"),
        ("b/mod.rs", "pub use y::*;"),
        ("b/y.rs", "pub struct Y;\nfn f() { crate::c::g() }"),
        ("c.rs", "use crate::a;"),
        ("d.rs", "use crate::a;"),
    ];
    let circle = found(&folders).concat();
    assert!(circle.contains("of {\"a\", \"b\", \"c\"}") && circle.contains("b/y.rs -> c.rs: {\"g\"}"), "{circle}");
    // A module and its parts may name each other; and a test may name all.
    let parts = [
        ("proto/mod.rs", "mod frame;\nuse frame::Frame;\npub struct Proto;"),
        (
            "proto/frame.rs",
            "use super::Proto;\npub struct Frame;\n#[cfg(test)]\nmod tests {\n    use super::super::link::Link;\n}",
        ),
        ("proto/link.rs", "use super::Frame;\npub struct Link;"),
        ("proto/link/part.rs", "use super::Link;"),
    ];
    assert_eq!(found(&parts), Vec::<String>::new());
}
