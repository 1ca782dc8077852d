//! `calomel top`: what an engine does, while it does it.

mod interval;
mod screen;

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use calomel::{Endpoint, Error, Stats};
use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{BeginSynchronizedUpdate, EndSynchronizedUpdate};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::connection::Connection;
use crate::units::parse_duration;
use crate::{Failure, Outcome, print};
use interval::{Interval, Order, continues, interval};
use screen::Screen;

#[derive(Args)]
#[command(after_help = "\
Keys: q quits, s changes the order of the procedures.

The engine must allow it: `EngineBuilder::remote_stats(true)`. Otherwise the exit code is 3.

Examples:
  calomel top tcp://10.0.0.1:7000
  calomel top --sort p99 --interval 5s shm://store
  calomel top --once tcp://10.0.0.1:7000              one interval, as text
  calomel top --json tcp://10.0.0.1:7000 | jq .requests")]
pub(crate) struct Arguments {
    /// The engine's address, such as tcp://10.0.0.1:7000.
    address: String,
    /// Time between two looks at the engine.
    #[arg(short, long, default_value = "1s", value_parser = parse_duration)]
    interval: Duration,
    /// Time limit of connecting and of each look.
    #[arg(short, long, default_value = "5s", value_parser = parse_duration)]
    timeout: Duration,
    /// The order of the procedures.
    #[arg(short, long, value_enum, default_value_t = Order::Rate)]
    sort: Order,
    /// Print one interval as text, and end. So it is where the standard output is no terminal.
    #[arg(long)]
    once: bool,
    /// Print a line of JSON for each interval, times in nanoseconds.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Shorter intervals would show this command more than the engine.
const SHORTEST: Duration = Duration::from_millis(50);
/// How soon a key or a signal is noticed.
const RESPONSE: Duration = Duration::from_millis(50);

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    let timeout = arguments.timeout;
    let engine = arguments.connection.builder()?.connect_timeout(timeout).default_timeout(timeout).build()?;
    let peer = engine.lookup(arguments.address.as_str())?;
    // Also shows whether the engine is there and allows it, before anything is drawn.
    let first = peer.stats()?;
    let sampler = Sampler { peer, before: first, order: arguments.sort, interval: arguments.interval.max(SHORTEST) };
    let done = if arguments.json || arguments.once || !io::stdout().is_terminal() {
        print_intervals(sampler, arguments)
    } else {
        watch(sampler, arguments)
    };
    // Ends a look that is in progress.
    engine.finalize().ok();
    done
}

/// Looks at the engine, again and again.
struct Sampler {
    peer: Endpoint,
    before: Stats,
    order: Order,
    interval: Duration,
}

impl Sampler {
    /// What has happened since the last look; `None` after the first one at an engine that is new at this address.
    fn look(&mut self) -> Result<Option<Interval>, Error> {
        let after = self.peer.stats()?;
        let transport = self.peer.transport().map(|transport| transport.to_string());
        let address = self.peer.address().to_string();
        let found = continues(&self.before, &after).then(|| interval(&self.before, &after, &address, transport, self.order));
        self.before = after;
        Ok(found)
    }
}

fn print_intervals(mut sampler: Sampler, arguments: &Arguments) -> Outcome {
    loop {
        thread::sleep(sampler.interval);
        let Some(interval) = sampler.look()? else { continue };
        if !arguments.json {
            return print(screen::text(&interval).as_bytes());
        }
        let line = serde_json::to_string(&interval).map_err(|error| Failure::Other(error.to_string()))? + "\n";
        if !print_line(&line)? || arguments.once {
            return Ok(());
        }
    }
}

/// False when the reader has read enough.
fn print_line(line: &str) -> Outcome<bool> {
    use io::Write;
    let mut out = io::stdout().lock();
    match out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(true),
    }
}

/// Draws until a key or a signal ends it. The terminal is restored in any case, also by a panic.
fn watch(sampler: Sampler, arguments: &Arguments) -> Outcome {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, ended.clone())?;
    }
    let (found, looks) = mpsc::channel();
    // A look may take as long as the timeout, and keys are answered meanwhile.
    thread::spawn(move || look_on(sampler, &found));
    let mut terminal = ratatui::try_init()?;
    let done = draw_until_end(&mut terminal, &looks, arguments, &ended);
    let restored = ratatui::try_restore();
    done?;
    restored?;
    if ended.load(Ordering::SeqCst) { Err(Failure::Other("ended by a signal".to_owned())) } else { Ok(()) }
}

fn look_on(mut sampler: Sampler, found: &Sender<Result<Option<Interval>, Error>>) {
    loop {
        thread::sleep(sampler.interval);
        let look = sampler.look();
        if found.send(look).is_err() {
            return;
        }
    }
}

/// A terminal that knows of this shows what is drawn meanwhile at its end.
struct WholeFrame;

impl WholeFrame {
    fn begin() -> io::Result<WholeFrame> {
        execute!(io::stdout(), BeginSynchronizedUpdate)?;
        Ok(WholeFrame)
    }
}

impl Drop for WholeFrame {
    fn drop(&mut self) {
        // What can't be written here can't be drawn either, which is reported.
        let _ = execute!(io::stdout(), EndSynchronizedUpdate);
    }
}

fn draw_until_end(
    terminal: &mut DefaultTerminal,
    looks: &Receiver<Result<Option<Interval>, Error>>,
    arguments: &Arguments,
    ended: &AtomicBool,
) -> Outcome {
    let mut screen = Screen::new(&arguments.address, arguments.sort);
    let mut changed = true;
    while !ended.load(Ordering::SeqCst) {
        for look in looks.try_iter() {
            changed = true;
            match look {
                Ok(Some(interval)) => screen.update(interval),
                Ok(None) => screen.connected(),
                // It has changed its mind, or is another engine.
                Err(error @ Error::AccessDenied { .. }) => return Err(error.into()),
                Err(error) => screen.lost(&error.to_string()),
            }
        }
        if changed {
            let _frame = WholeFrame::begin()?;
            terminal.draw(|frame| screen.draw(frame))?;
            changed = false;
        }
        if !event::poll(RESPONSE)? {
            continue;
        }
        match event::read()? {
            Event::Key(key) if key.kind == KeyEventKind::Press => match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
                KeyCode::Char('s') => screen.reorder(),
                _ => {}
            },
            _ => {}
        }
        // A resized terminal is drawn anew.
        changed = true;
    }
    Ok(())
}
