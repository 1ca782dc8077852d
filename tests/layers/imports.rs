//! The imports between the files of a crate: which file names what, and which file defines it.
//!
//! Each file is a module. A path of a `use`, or one that begins with `crate`, `super` or `self`, is followed through the
//! modules and their own imports, so a re-export leads to the file that defines the name. Calls of methods are not seen.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;

/// One file names what another defines.
pub(super) struct Import {
    pub from: String,
    pub to: String,
    /// The last segment of the path.
    pub name: String,
    /// The test code of the file names it.
    pub in_tests: bool,
    /// Where the two modules part: the module that holds both, and its child on each side.
    pub folder: String,
    pub children: (String, String),
}

struct Module {
    file: String,
    path: Vec<String>,
    items: BTreeSet<String>,
    /// What `use` brings in, by name (`*` for all of a module), as paths from the crate's root.
    uses: Vec<(String, Vec<String>)>,
    /// Each path that it names, from the crate's root, and whether its test code does.
    named: Vec<(Vec<String>, bool)>,
}

/// Splits code into words, `::` and single characters. Comments and literals are left out.
fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\n');
    let mut found = Vec::new();
    let mut i = 0;
    while i < chars.len() {
        let word = chars[i..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
        let hashes = chars[i + word..].iter().take_while(|c| **c == '#').count();
        if (at(i), at(i + 1)) == ('/', '/') {
            i += chars[i..].iter().take_while(|c| **c != '\n').count();
        } else if ["r", "br"].contains(&&*chars[i..i + word].iter().collect::<String>()) && at(i + word + hashes) == '"' {
            i += word + hashes + 1;
            while !(at(i) == '"' && (1..=hashes).all(|n| at(i + n) == '#')) && i < chars.len() {
                i += 1;
            }
            i += 1 + hashes;
        } else if word > 0 {
            found.push(chars[i..i + word].iter().collect());
            i += word;
        } else if at(i) == '"' {
            i += 1;
            while at(i) != '"' && i < chars.len() {
                i += if at(i) == '\\' { 2 } else { 1 };
            }
            i += 1;
        } else if at(i) == '\'' {
            // A character, or else a lifetime.
            let escaped = at(i + 1) == '\\';
            i += match chars[(i + 2 + usize::from(escaped)).min(chars.len())..].iter().position(|c| *c == '\'') {
                Some(end) if escaped || end == 0 => end + 3 + usize::from(escaped),
                _ => 1,
            };
        } else if (at(i), at(i + 1)) == (':', ':') {
            found.push("::".to_owned());
            i += 2;
        } else {
            if !at(i).is_whitespace() {
                found.push(at(i).to_string());
            }
            i += 1;
        }
    }
    found
}

/// The paths of a `use` whose tokens follow, each with the name that it brings in.
fn tree(tokens: &[String], at: &mut usize, prefix: &[String], found: &mut Vec<(String, Vec<String>)>) {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(*at).map(String::as_str) {
        *at += 1;
        match token {
            "{" => {
                while tokens.get(*at).is_some_and(|token| token != "}") {
                    tree(tokens, at, &path, found);
                    *at += usize::from(tokens.get(*at).is_some_and(|token| token == ","));
                }
                *at += 1;
                return;
            }
            "::" => {}
            "as" => {
                found.push((tokens[*at].clone(), path));
                *at += 1;
                return;
            }
            "," | "}" | ";" => {
                *at -= 1;
                break;
            }
            "self" if !prefix.is_empty() => {}
            word => path.push(word.to_owned()),
        }
    }
    if let Some(last) = path.last().cloned() {
        found.push((last, path));
    }
}

impl Module {
    fn new(source: &Source) -> Module {
        let name = source.path.trim_end_matches(".rs");
        let name = name.strip_suffix("/mod").unwrap_or(name);
        let path = if name == "lib" { Vec::new() } else { name.split('/').map(str::to_owned).collect() };
        let (items, uses, named) = (BTreeSet::new(), Vec::new(), Vec::new());
        let mut module = Module { file: source.path.clone(), path, items, uses, named };
        module.read(&tokens(&source.text), source.is_test());
        module
    }

    fn read(&mut self, tokens: &[String], is_test: bool) {
        // The modules inside the file that the token is in: their names, and the depths at which they end.
        let mut inner: Vec<(String, usize)> = Vec::new();
        let (mut depth, mut at) = (0, 0);
        let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token == text);
        while at < tokens.len() {
            let begin = at;
            let in_tests = is_test || inner.iter().any(|(name, _)| name == "tests");
            at += 1;
            match &*tokens[begin] {
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    inner.retain(|(_, end)| *end < depth + 1);
                }
                "mod" if is(at + 1, "{") => inner.push((tokens[at].clone(), depth + 1)),
                "use" if !is(at, "<") => {
                    let mut found = Vec::new();
                    tree(tokens, &mut at, &[], &mut found);
                    for (name, path) in found {
                        let Some(path) = self.absolute(path, &inner) else { continue };
                        self.named.push((path.clone(), in_tests));
                        if inner.is_empty() {
                            self.uses.push((name, path));
                        }
                    }
                }
                "struct" | "enum" | "trait" | "union" | "type" | "fn" | "const" | "static" | "mod" if depth == 0 => {
                    self.items.extend(tokens.get(at).filter(|_| !is(at + 1, ";") || tokens[begin] != "mod").cloned());
                }
                "crate" | "super" | "self" if is(at, "::") && !(begin > 0 && (is(begin - 1, "in") || is(begin - 1, "::"))) => {
                    let mut path = vec![tokens[begin].clone()];
                    while is(at, "::")
                        && tokens.get(at + 1).is_some_and(|word| word.chars().all(|c| c.is_alphanumeric() || c == '_'))
                    {
                        path.push(tokens[at + 1].clone());
                        at += 2;
                    }
                    if let Some(path) = self.absolute(path, &inner) {
                        self.named.push((path, in_tests));
                    }
                }
                _ => {}
            }
        }
    }

    /// A path as seen from the root. One that begins with a name is taken as relative, since it may be that of a child.
    fn absolute(&self, path: Vec<String>, inner: &[(String, usize)]) -> Option<Vec<String>> {
        let mut base: Vec<String> = self.path.iter().chain(inner.iter().map(|(name, _)| name)).cloned().collect();
        let mut rest = path.into_iter().peekable();
        if rest.next_if(|word| word == "crate").is_some() {
            base.clear();
        }
        rest.next_if(|word| word == "self");
        while rest.next_if(|word| word == "super").is_some() {
            base.pop()?;
        }
        base.extend(rest);
        Some(base)
    }
}

/// The file that defines what a path names, as an index; `None` for what is not of this crate.
fn resolve(modules: &[Module], path: &[String], hops: usize) -> Option<usize> {
    let mut at = modules.iter().position(|module| module.path.is_empty());
    for (i, name) in path.iter().enumerate() {
        let child = modules.iter().position(|module| module.path == path[..=i]);
        if child.is_some() {
            at = child;
            continue;
        }
        let module = &modules[at?];
        if module.items.contains(name) || hops == 0 {
            return at;
        }
        let follow = |target: &[String], rest: &[String]| {
            let path: Vec<String> = target.iter().chain(rest).cloned().collect();
            // A name that is not of the crate resolves to the module that imports it.
            (path != module.path).then(|| resolve(modules, &path, hops - 1))?
        };
        if let Some((_, target)) = module.uses.iter().find(|(known, target)| known == name && target[..] != path[..=i]) {
            return follow(target, &path[i + 1..]);
        }
        let globs = module.uses.iter().filter(|(known, _)| known == "*");
        let defines = |found: &usize| modules[*found].items.contains(name);
        return globs.filter_map(|(_, glob)| follow(&glob[..glob.len() - 1], &path[i..]).filter(defines)).next().or(at);
    }
    at
}

/// All imports between files of which neither's module holds the other.
pub(super) fn imports(sources: &[Source]) -> Vec<Import> {
    let modules: Vec<Module> = sources.iter().map(Module::new).collect();
    let mut found = Vec::new();
    for module in &modules {
        for (path, in_tests) in &module.named {
            let Some(target) = resolve(&modules, path, 8).map(|target| &modules[target]) else { continue };
            let common = module.path.iter().zip(&target.path).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.path.get(common), target.path.get(common)) {
                found.push(Import {
                    from: module.file.clone(),
                    to: target.file.clone(),
                    name: path.last().cloned().unwrap_or_default(),
                    in_tests: *in_tests,
                    folder: module.path[..common].join("/"),
                    children: (from.clone(), to.clone()),
                });
            }
        }
    }
    found
}

/// The circles among the children of each folder, with the imports that tie them.
pub(super) fn circles<'a>(imports: impl Iterator<Item = &'a Import>) -> Vec<String> {
    let mut folders: BTreeMap<&str, Vec<&Import>> = BTreeMap::new();
    imports.for_each(|import| folders.entry(&import.folder).or_default().push(import));
    let mut found = Vec::new();
    for (folder, imports) in folders {
        let mut reach: BTreeSet<(&str, &str)> = imports.iter().map(|i| (&*i.children.0, &*i.children.1)).collect();
        let names: BTreeSet<&str> = reach.iter().flat_map(|(from, to)| [*from, *to]).collect();
        for via in &names {
            for from in &names {
                for to in &names {
                    if reach.contains(&(from, via)) && reach.contains(&(via, to)) {
                        reach.insert((from, to));
                    }
                }
            }
        }
        let mut left: BTreeSet<&str> = names.iter().copied().filter(|name| reach.contains(&(name, name))).collect();
        while let Some(first) = left.first().copied() {
            let circle: BTreeSet<&str> =
                left.iter().copied().filter(|name| reach.contains(&(first, name)) && reach.contains(&(name, first))).collect();
            left.retain(|name| !circle.contains(name));
            let mut ties: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
            for import in imports.iter().filter(|i| circle.contains(&*i.children.0) && circle.contains(&*i.children.1)) {
                ties.entry((&import.from, &import.to)).or_default().insert(&import.name);
            }
            let ties: Vec<String> = ties.iter().map(|((from, to), names)| format!("{from} -> {to}: {names:?}")).collect();
            found.push(format!("a circle in `{folder}` of {circle:?}: {}", ties.join("; ")));
        }
    }
    found
}
