//! Holds the book's table of log targets to the source: each target and level, and their fields, are in both.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Fields by target and level.
type Targets = BTreeMap<(String, String), BTreeSet<String>>;

const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The arguments of a macro, whose text begins behind its parenthesis.
fn arguments(text: &str) -> Vec<String> {
    let (mut arguments, mut depth, mut quoted) = (vec![String::new()], 1, false);
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' if quoted => {
                letters.next();
                continue;
            }
            '"' => quoted = !quoted,
            _ if quoted => {}
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 1 => {
                arguments.push(String::new());
                continue;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
        arguments.last_mut().unwrap().push(letter);
    }
    arguments.iter().map(|argument| argument.trim().to_owned()).filter(|argument| !argument.is_empty()).collect()
}

/// The name of the field that an argument sets: `%peer`, `peer = …`, `shared.peer`.
fn field(argument: &str) -> Option<String> {
    let name = argument.split('=').next()?.trim().trim_start_matches(['%', '?']);
    let named = !name.starts_with('"') && !name.contains(':');
    named.then(|| name.rsplit('.').next().unwrap_or(name).to_owned())
}

fn in_source() -> Targets {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let mut targets = Targets::new();
    for path in files {
        let text = fs::read_to_string(&path).unwrap();
        let code: String =
            text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect();
        for level in LEVELS {
            for behind in code.split(&format!("tracing::{level}!(")).skip(1) {
                let arguments = arguments(behind);
                let target = arguments.iter().find_map(|argument| argument.strip_prefix("target: \"")?.strip_suffix('"'));
                let target = target.unwrap_or_else(|| panic!("{}: a line without a target: {arguments:?}", path.display()));
                let fields = targets.entry((target.to_owned(), level.to_uppercase())).or_default();
                fields.extend(arguments.iter().filter_map(|argument| field(argument)));
            }
        }
    }
    targets
}

/// What stands between backticks.
fn quoted(text: &str) -> BTreeSet<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn in_book() -> Targets {
    let text = include_str!("../docs/src/tracing.md");
    let mut targets = Targets::new();
    for row in text.lines().filter(|line| line.starts_with("| `calomel::")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [target, level, tells, fields] = cells[..] else { panic!("a row has four cells: {row}") };
        assert!(!tells.is_empty());
        let fields = quoted(fields);
        assert!(quoted(tells).is_subset(&fields), "a field that is not listed: {row}");
        let before = targets.insert((target.trim_matches('`').to_owned(), level.to_owned()), fields);
        assert_eq!(before, None, "{target} at {level} has two rows");
    }
    targets
}

#[test]
fn book_has_all_targets_with_their_levels_and_fields() {
    let (source, book) = (in_source(), in_book());
    assert!(source.len() > 30, "{} found", source.len());
    for (target, fields) in &source {
        let told = book.get(target).unwrap_or_else(|| panic!("the book does not have {target:?}, with fields {fields:?}"));
        assert_eq!(told, fields, "fields in the book and in the source, of {target:?}");
    }
    for target in book.keys() {
        assert!(source.contains_key(target), "the book has {target:?}, and the source does not");
    }
}

/// The spans, which are made by a macro of the library.
#[test]
fn spans_have_the_target_of_the_book() {
    let code = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/rpc/span.rs")).unwrap();
    let book = include_str!("../docs/src/tracing.md");
    assert!(
        code.contains("target: \"calomel::rpc\",\n            $(") && book.contains("at level DEBUG, with target `calomel::rpc`")
    );
    for name in ["call", "handle"] {
        assert!(code.contains(&format!("rpc_span!(\"{name}\"")) && book.contains(&format!("`{name}`")));
    }
}
