//! An engine without threads of its own, in the program's event loop: one epoll serves the engine, a plain tcp socket, and
//! the program's own timer.
//!
//! `cargo run --example 22_event_loop`

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use calomel::{Engine, Progress, Request};
use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};

const ENGINE: u64 = 0;
const LISTENER: u64 = 1;
const TIMER: u64 = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::builder().listen("tcp://127.0.0.1:0").progress(Progress::External).handler_threads(0).build()?;
    engine.define("sum", |_: &Request, (x, y): (i32, i32)| x + y)?;

    // What the program serves besides: a socket that is no engine's, and a timer.
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
    let (once, after) = (Timespec { tv_sec: 0, tv_nsec: 0 }, Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: once, it_value: after })?;

    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (source, name) in [(engine.as_fd(), ENGINE), (listener.as_fd(), LISTENER), (timer.as_fd(), TIMER)] {
        epoll::add(&epoll, source, epoll::EventData::new_u64(name), epoll::EventFlags::IN)?;
    }

    // Two clients, which would be other programs.
    let (address, plain) = (engine.address(), listener.local_addr()?);
    let calls = std::thread::spawn(move || -> calomel::Result<i32> {
        let client = Engine::client("tcp")?;
        client.procedure::<(i32, i32), i32>("sum").on(client.lookup(address)?).call(&(40, 2))
    });
    let reads = std::thread::spawn(move || -> std::io::Result<String> {
        let mut text = String::new();
        TcpStream::connect(plain)?.read_to_string(&mut text)?;
        Ok(text)
    });

    let mut events = Vec::with_capacity(8);
    let (mut ticked, mut greeted) = (false, false);
    while !(ticked && greeted && calls.is_finished()) {
        events.clear();
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&after))?;
        for event in &events {
            match event.data.u64() {
                ENGINE => _ = engine.progress(Duration::ZERO)?,
                LISTENER => {
                    listener.accept()?.0.write_all(b"hello from the same loop")?;
                    greeted = true;
                }
                _ => {
                    rustix::io::read(&timer, &mut [0u8; 8])?;
                    ticked = true;
                }
            }
        }
    }
    println!("the engine answered {}", calls.join().expect("the thread does not panic")?);
    println!("the socket said: {}", reads.join().expect("the thread does not panic")?);
    println!("the timer ticked: {ticked}");
    engine.finalize()?;
    Ok(())
}
