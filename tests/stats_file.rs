//! `CALOMEL_STATS`: what the engines of a process write when they end. Run in child processes, which have the variable.

use std::process::Command;

use calomel::{Engine, Request, Stats};

const VARIABLE: &str = "CALOMEL_STATS";

/// A folder that is removed at the end.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Not a test of its own: what the children run. Makes two engines, which call each other.
#[test]
fn child() {
    if std::env::var_os(VARIABLE).is_none() {
        return;
    }
    // Measured all the same.
    let server = Engine::builder().listen("loop://").statistics(false).build().unwrap();
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    let client = Engine::client("loop").unwrap();
    let sum = client.procedure::<(i32, i32), i32>("sum");
    assert_eq!(sum.on(client.lookup(server.address()).unwrap()).call(&(1, 2)).unwrap(), 3);
    client.finalize().unwrap();
    // The other one ends when it is dropped.
}

fn run_child(file: &str) -> u32 {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let mut child = child.args(["--exact", "child", "--quiet"]).env(VARIABLE, file).spawn().unwrap();
    let id = child.id();
    assert!(child.wait().unwrap().success());
    id
}

fn lines(path: &std::path::Path) -> Vec<Stats> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn each_engine_adds_a_line_to_the_file() {
    let folder = Folder(std::env::temp_dir().join(format!("calomel-stats-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).unwrap();
    // Several processes, one file.
    let shared = folder.0.join("all");
    let ids = [run_child(shared.to_str().unwrap()), run_child(shared.to_str().unwrap())];
    let found: Vec<(u32, u64)> = lines(&shared).iter().map(|stats| (stats.process, stats.engine)).collect();
    // The client, which is the second engine, ends first.
    assert_eq!(found, [(ids[0], 2), (ids[0], 1), (ids[1], 2), (ids[1], 1)]);
    // A file for each process, and for each engine.
    let id = run_child(folder.0.join("%p.%e.json").to_str().unwrap());
    let [client] = &lines(&folder.0.join(format!("{id}.2.json")))[..] else { panic!("not one line") };
    assert_eq!((&*client.calls[0].procedure, client.calls[0].calls, client.calls[0].time.count), ("sum", 1, 1));
    let [server] = &lines(&folder.0.join(format!("{id}.1.json")))[..] else { panic!("not one line") };
    assert_eq!((&*server.handlers[0].procedure, server.handlers[0].calls), ("sum", 1));
    assert_eq!((server.handlers[0].running.count, server.peers.len()), (1, 1));
    // A file that can't be written does no harm.
    run_child("/dev/null/no folder");
}
