//! Log lines as one-way calls. A collector that is slower than its senders grants them no further calls: `notify` waits, and
//! fails with `Busy` at its deadline. The caller chooses between waiting and dropping, and neither side queues without bound.
//!
//! `cargo run --release --example 21_log_stream`

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Endpoint, Engine, Error, HandlerPool, Procedure, Request};

const LINES: u64 = 10_000;
/// How long the collector takes for a line, at least.
const SLOWNESS: Duration = Duration::from_micros(20);

fn main() -> calomel::Result<()> {
    let collector = Arc::new(Collector::default());
    let server = Engine::server("tcp://127.0.0.1:0")?;
    collector.serve(&server)?;

    let client = Engine::client("tcp")?;
    let peer = client.lookup(server.address())?;

    // A sender that must not lose a line waits as long as the collector needs.
    let mut patient = Log::new("patient", &client, &peer, Duration::from_secs(30));
    let begin = Instant::now();
    for number in 0..LINES {
        patient.line(&format!("line {number}"))?;
    }
    println!("sending took {:?}, as handling does", begin.elapsed());
    patient.flush()?;
    println!("patient: {} lines sent, {} dropped", patient.sent, patient.dropped);
    assert_eq!((patient.sent, patient.dropped), (LINES, 0));

    // One that must not wait drops lines, and says how many.
    let mut hurried = Log::new("hurried", &client, &peer, Duration::ZERO);
    for number in 0..LINES {
        hurried.line(&format!("line {number}"))?;
    }
    hurried.flush()?;
    println!("hurried: some lines were dropped: {}", hurried.dropped > 0);
    assert_eq!(hurried.sent + hurried.dropped, LINES);

    // What was sent has arrived, in numbers without a gap.
    let lines = collector.lines.lock().unwrap();
    for sender in [&patient, &hurried] {
        assert!(lines[sender.name].keys().copied().eq(0..sender.sent));
    }
    Ok(())
}

/// A sender.
struct Log {
    name: &'static str,
    peer: Endpoint,
    line: Procedure<(&'static str, u64, &'static str), ()>,
    flush: Procedure<(&'static str, u64), ()>,
    /// How long a line may wait for the collector.
    patience: Duration,
    sent: u64,
    dropped: u64,
}

/// Its sender, its number among those that were sent, and its text.
type Line = (String, u64, String);

impl Log {
    fn new(name: &'static str, client: &Engine, peer: &Endpoint, patience: Duration) -> Log {
        let (line, flush) = (client.procedure("line"), client.procedure("flush"));
        Log { name, peer: peer.clone(), line, flush, patience, sent: 0, dropped: 0 }
    }

    fn line(&mut self, text: &str) -> calomel::Result<()> {
        match self.line.on(&self.peer).timeout(self.patience).notify(&(self.name, self.sent, text)) {
            Ok(()) => self.sent += 1,
            Err(Error::Busy { .. }) => self.dropped += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Waits until the collector has all lines that were sent.
    fn flush(&self) -> calomel::Result<()> {
        self.flush.on(&self.peer).call(&(self.name, self.sent))
    }
}

#[derive(Default)]
struct Collector {
    /// By sender and number, since handlers may overtake each other.
    lines: Mutex<HashMap<String, BTreeMap<u64, String>>>,
    arrived: Condvar,
}

impl Collector {
    fn serve(self: &Arc<Self>, engine: &Engine) -> calomel::Result<()> {
        let collector = Arc::clone(self);
        // One line at a time, as if to a file.
        engine.pool(&HandlerPool::new(1)).define("line", move |_: &Request, (sender, number, text): Line| {
            thread::sleep(SLOWNESS);
            collector.lines.lock().unwrap().entry(sender).or_default().insert(number, text);
            collector.arrived.notify_all();
        })?;
        let collector = Arc::clone(self);
        engine.define_try("flush", move |request: &Request, (sender, sent): (String, u64)| {
            let missing =
                |lines: &mut HashMap<String, BTreeMap<_, _>>| lines.entry(sender.clone()).or_default().len() < sent as usize;
            let lines = collector.lines.lock().unwrap();
            let (_lines, waited) = collector.arrived.wait_timeout_while(lines, request.remaining(), missing).unwrap();
            if waited.timed_out() { Err("lines are missing") } else { Ok(()) }
        })?;
        Ok(())
    }
}
