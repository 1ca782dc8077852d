//! Resolves each relative link of the Markdown files, and each `#anchor` by GitHub's rules. External links are not followed.
//!
//! The book has two rules more: it links to its own chapters only, since the built book has nothing else, and the examples of
//! each chapter are tested by `src/lib.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where Markdown files are looked for: these folders, with those below them.
const FOLDERS: &[&str] = &[".", "benches", "docs", "fuzz", "src"];
const BOOK: &str = "docs/src";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The lines outside of fenced code, with their numbers. What stands between backticks is left out, also across lines of one
/// paragraph.
fn prose(text: &str) -> Vec<(usize, String)> {
    let (mut fenced, mut quoted) = (false, false);
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        if fence || fenced || line.trim().is_empty() {
            quoted = false;
            continue;
        }
        let mut kept = String::new();
        for (at, part) in line.split('`').enumerate() {
            quoted ^= at > 0;
            if !quoted {
                kept += part;
            }
        }
        lines.push((number + 1, kept));
    }
    lines
}

/// The targets of the links, with the numbers of their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        for behind in line.split("](").skip(1) {
            let target = behind.split([')', ' ']).next().unwrap_or("");
            found.push((number, target.to_owned()));
        }
        // `[label]: target`
        if let Some((label, target)) = line.split_once("]: ")
            && label.starts_with('[')
        {
            found.push((number, target.trim().to_owned()));
        }
    }
    found.retain(|(_, target)| !["http://", "https://", "mailto:"].iter().any(|scheme| target.starts_with(scheme)));
    found
}

/// The anchors of the headings, as GitHub makes them: lower case, letters, digits, `-` and `_` only, spaces as `-`. What
/// repeats gets a number.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        let title = line.trim_start_matches('#');
        let level = line.len() - title.len();
        if fenced || !(1..=6).contains(&level) || !title.starts_with(' ') {
            continue;
        }
        // Of a link in a title, the text counts.
        let title = title.split("](").enumerate().map(|(at, part)| match at {
            0 => part,
            _ => part.split_once(')').map_or("", |(_, behind)| behind),
        });
        let title = title.collect::<String>().trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let repeated = seen.entry(anchor.clone()).and_modify(|count| *count += 1).or_insert(0);
        found.insert(if *repeated == 0 { anchor } else { format!("{anchor}-{repeated}") });
    }
    found
}

/// `path` without `.` and `..`; `None` when it leaves the repository.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::CurDir => {}
            Component::ParentDir => normal.pop().then_some(())?,
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

/// Why the link of a file leads nowhere; `read` returns the content of files, an empty one for folders. Paths are relative to
/// the root of the repository.
fn fault(file: &Path, target: &str, read: impl Fn(&Path) -> Option<String>) -> Option<String> {
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let folder = file.parent().unwrap_or(Path::new(""));
    let Some(path) = (if path.is_empty() { Some(file.to_owned()) } else { normal(&folder.join(path)) }) else {
        return Some("outside of the repository".to_owned());
    };
    let Some(content) = read(&path) else { return Some(format!("there is no {}", path.display())) };
    if file.starts_with(BOOK) && !path.starts_with(BOOK) {
        return Some("not a part of the book".to_owned());
    }
    let anchor = anchor?;
    let found = anchors(&content);
    (!found.contains(anchor)).then(|| format!("{} has no heading #{anchor}, only {found:?}", path.display()))
}

fn markdown_below(folder: &Path, deep: bool, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let path = folder.join(entry.unwrap().file_name());
        if root().join(&path).is_dir() {
            if deep && !path.ends_with("target") {
                markdown_below(&path, deep, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

fn read(path: &Path) -> Option<String> {
    let path = root().join(path);
    if path.is_dir() { Some(String::new()) } else { fs::read_to_string(path).ok() }
}

#[test]
fn each_link_leads_somewhere() {
    let mut files = Vec::new();
    for folder in FOLDERS {
        markdown_below(&normal(Path::new(folder)).unwrap(), *folder != ".", &mut files);
    }
    let mut checked = 0;
    let mut faults = String::new();
    for file in &files {
        for (line, target) in links(&read(file).unwrap()) {
            checked += 1;
            if let Some(fault) = fault(file, &target, read) {
                faults += &format!("\n{}:{line}: {target}: {fault}", file.display());
            }
        }
    }
    assert!(faults.is_empty(), "{faults}");
    // Fewer would mean that the files, or the links in them, were not found.
    assert!(files.len() >= 20 && checked >= 40, "{} files, {checked} links", files.len());
}

#[test]
fn each_chapter_of_the_book_is_listed_and_tested() {
    let summary = read(&Path::new(BOOK).join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<String> = links(&summary).into_iter().map(|(_, target)| target).collect();
    let crate_root = read(Path::new("src/lib.rs")).unwrap();
    let mut chapters = Vec::new();
    markdown_below(Path::new(BOOK), true, &mut chapters);
    for chapter in chapters.iter().filter(|chapter| !chapter.ends_with("SUMMARY.md")) {
        let name = chapter.strip_prefix(BOOK).unwrap().to_str().unwrap();
        assert!(listed.contains(name), "SUMMARY.md does not list {name}");
        let has_code = read(chapter).unwrap().contains("```rust");
        let tested = crate_root.contains(&format!("include_str!(\"../{BOOK}/{name}\")"));
        assert!(tested || !has_code, "src/lib.rs does not test the examples of {name}");
    }
}

#[test]
fn anchors_follow_the_rules_of_github() {
    let text =
        "# The `Vec<u8>`, and more\n## Over RDMA devices\n## [A link](x.md) here\n```\n# no heading\n```\n## Twice\n## Twice\n";
    let expected = ["a-link-here", "over-rdma-devices", "the-vecu8-and-more", "twice", "twice-1"];
    let found: Vec<String> = anchors(text).into_iter().collect();
    assert_eq!(found, expected);
}

#[test]
fn broken_links_are_found_with_the_reason() {
    let read = |path: &Path| match path.to_str() {
        Some("docs/src/a.md" | "b.md") => Some("# One\n".to_owned()),
        _ => None,
    };
    let book = Path::new("docs/src/a.md");
    let fault = |file: &Path, target: &str| fault(file, target, read);
    assert_eq!(fault(book, "#one"), None);
    assert_eq!(fault(Path::new("b.md"), "docs/src/a.md#one"), None);
    assert!(fault(book, "#two").unwrap().contains("no heading #two"));
    assert!(fault(book, "c.md").unwrap().contains("there is no docs/src/c.md"));
    assert!(fault(book, "../../b.md").unwrap().contains("not a part of the book"));
    assert!(fault(book, "../../../b.md").unwrap().contains("outside"));
    let text = "[a](x.md) and `[b](y.md)` [c](z.md#t \"title\") [d](https://example.com)\n```\n[e](w.md)\n```\n`[g]\n(u.md)[h](u.md)`\n[f]: v.md\n";
    let targets: Vec<String> = links(text).into_iter().map(|(_, target)| target).collect();
    assert_eq!(targets, ["x.md", "z.md#t", "v.md"]);
}
