//! A checkpoint service: clients expose their state, and the service pulls it straight into a file that is mapped into its
//! memory. A checkpoint that does not arrive as a whole leaves the one before it in place.
//!
//! `cargo run --release --features memmap2 --example 20_checkpoint`

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, process, thread};

use calomel::{Address, Bulk, BulkMode, Endpoint, Engine, HandlerResult, Request};
use memmap2::{Mmap, MmapMut};

const CLIENTS: u32 = 3;
const STEPS: u64 = 4;
const LENGTH: usize = 1 << 20;
/// The largest state that the service takes from a client.
const LARGEST: usize = 64 << 20;

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    let folder = Folder::new()?;
    let service = serve("tcp://127.0.0.1:0", &folder.0)?;
    let address = service.address();
    thread::scope(|threads| {
        let address = &address;
        let clients: Vec<_> = (0..CLIENTS).map(|rank| threads.spawn(move || work(address, rank))).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })?;
    drop(service);

    // A new service finds what the one before it has saved.
    let service = serve("tcp://127.0.0.1:0", &folder.0)?;
    let engine = Engine::client("tcp")?;
    let peer = engine.lookup(service.address())?;
    for rank in 0..CLIENTS {
        let mut state = State::after(rank, 0);
        state.load(&engine, &peer, rank)?;
        assert!(state == State::after(rank, STEPS));
        println!("rank {rank} is back at step {}", state.step);
    }
    let unknown = State::after(0, 0).load(&engine, &peer, CLIENTS).expect_err("no such rank has saved anything");
    println!("{unknown}");
    Ok(())
}

// ---- The service ------------------------------------------------------------------------------------------------------------

/// Clients name numbers, not files: no name leads out of the folder.
fn serve(address: &str, folder: &Path) -> calomel::Result<Engine> {
    let engine = Engine::builder().build()?;
    let to_save = folder.to_owned();
    engine.define_try("save", move |request: &Request, (rank, state): (u32, Bulk)| save(&to_save, request, rank, &state))?;
    let to_load = folder.to_owned();
    engine.define_try("load", move |request: &Request, (rank, state): (u32, Bulk)| load(&to_load, request, rank, &state))?;
    engine.listen(address)?;
    Ok(engine)
}

fn save(folder: &Path, request: &Request, rank: u32, state: &Bulk) -> HandlerResult<()> {
    if state.len() > LARGEST {
        return Err(format!("a state of {} bytes exceeds {LARGEST}", state.len()).into());
    }
    // Each file has a name of its own, also where a client saves twice at a time.
    static SAVES: AtomicU64 = AtomicU64::new(0);
    let unfinished = folder.join(format!("{rank}.{}", SAVES.fetch_add(1, Ordering::Relaxed)));
    let saved = pull(&unfinished, request, state).and_then(|()| Ok(fs::rename(&unfinished, folder.join(rank.to_string()))?));
    if saved.is_err() {
        fs::remove_file(&unfinished).ok();
    }
    saved
}

/// From the client's memory into the pages of a new file.
fn pull(path: &Path, request: &Request, state: &Bulk) -> HandlerResult<()> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    file.set_len(state.len() as u64)?;
    // SAFETY: the folder belongs to this service, which never truncates a file, and writes to this one only here.
    let mut map = unsafe { MmapMut::map_mut(&file)? };
    state.on(request.endpoint()).pull_into(&mut map[..])?;
    Ok(map.flush()?)
}

fn load(folder: &Path, request: &Request, rank: u32, state: &Bulk) -> HandlerResult<()> {
    let file = File::open(folder.join(rank.to_string()))?;
    // SAFETY: as above; a saved file is replaced by another one, and does not change.
    let map = unsafe { Mmap::map(&file)? };
    state.on(request.endpoint()).push_from(&map[..])?;
    Ok(())
}

// ---- The clients ------------------------------------------------------------------------------------------------------------

#[derive(Debug, PartialEq)]
struct State {
    step: u64,
    weights: Vec<f32>,
}

impl State {
    fn after(rank: u32, step: u64) -> State {
        State { step, weights: (0..LENGTH).map(|index| (index as u32 % 1000 * rank + step as u32) as f32).collect() }
    }

    /// The memory stays where it is, and is exposed until the call has ended. All of it is one bulk, and so one file.
    fn save(&self, engine: &Engine, service: &Endpoint, rank: u32) -> calomel::Result<()> {
        engine.scope(|scope| {
            let bulk = scope.expose_read_only((&self.step, &self.weights[..]))?;
            engine.procedure("save").on(service).call(&(rank, bulk))
        })
    }

    fn load(&mut self, engine: &Engine, service: &Endpoint, rank: u32) -> calomel::Result<()> {
        engine.scope(|scope| {
            let bulk = scope.expose((&mut self.step, &mut self.weights[..]), BulkMode::WriteOnly)?;
            engine.procedure("load").on(service).call(&(rank, bulk))
        })
    }
}

/// Saves its state after each step.
fn work(address: &Address, rank: u32) -> calomel::Result<()> {
    let engine = Engine::client("tcp")?;
    let service = engine.lookup(address)?;
    for step in 1..=STEPS {
        State::after(rank, step).save(&engine, &service, rank)?;
    }
    Ok(())
}

/// A folder for this run of the example, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Outcome<Folder> {
        let path = env::temp_dir().join(format!("calomel-checkpoints-{}", process::id()));
        fs::create_dir(&path)?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}
