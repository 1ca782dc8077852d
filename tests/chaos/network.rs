//! A network between two processes: a proxy that delays, stalls, throttles, cuts and loses data.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::SockRef;

use crate::support::keep_little;

/// How the connections of a route are treated now.
#[derive(Default)]
struct Weather {
    /// Delay before each piece, in milliseconds.
    delay: AtomicU64,
    /// Nothing is forwarded; bytes are kept.
    stalled: AtomicBool,
    /// Bytes are discarded silently. Connections that lose bytes never recover.
    swallows: AtomicBool,
    /// New connections are closed at once.
    refuses: AtomicBool,
    /// Pieces are small.
    narrow: AtomicBool,
    ends: AtomicBool,
}

/// The route by which one process dials another. It listens where the one dials, and forwards to where the other listens.
pub struct Route {
    pub address: String,
    weather: Arc<Weather>,
    connections: Arc<Mutex<Vec<Arc<Connection>>>>,
    listener: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

/// A connection.
struct Connection {
    near: TcpStream,
    far: TcpStream,
    /// One direction is shut down.
    half_closed: AtomicBool,
    ended: AtomicBool,
}

impl Route {
    pub fn to(target: SocketAddr) -> Route {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        keep_little(&listener);
        let at = listener.local_addr().unwrap();
        let (weather, connections) = (Arc::<Weather>::default(), Arc::<Mutex<Vec<Arc<Connection>>>>::default());
        let (w, l) = (weather.clone(), connections.clone());
        let thread = thread::spawn(move || accept(&listener, target, &w, &l));
        Route { address: format!("tcp://{at}"), weather, connections, listener: at, thread: Some(thread) }
    }

    pub fn delay(&self, millis: u64) {
        self.weather.delay.store(millis, Ordering::SeqCst);
    }

    pub fn stall(&self) {
        self.weather.stalled.store(true, Ordering::SeqCst);
    }

    pub fn swallow(&self) {
        self.weather.swallows.store(true, Ordering::SeqCst);
    }

    pub fn refuse(&self) {
        self.weather.refuses.store(true, Ordering::SeqCst);
    }

    pub fn narrow(&self) {
        self.weather.narrow.store(true, Ordering::SeqCst);
        self.delay(3);
    }

    pub fn heal(&self) {
        self.delay(0);
        for flag in [&self.weather.stalled, &self.weather.swallows, &self.weather.refuses, &self.weather.narrow] {
            flag.store(false, Ordering::SeqCst);
        }
    }

    fn each(&self, what: impl Fn(&Connection)) {
        self.connections.lock().unwrap().iter().for_each(|connection| what(connection));
    }

    /// Ends the current connections; `reset`: with a TCP reset instead of an orderly close.
    pub fn cut(&self, reset: bool) {
        self.each(|connection| {
            if reset {
                for stream in [&connection.near, &connection.far] {
                    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
                    let _ = stream.shutdown(Shutdown::Read);
                }
            } else {
                connection.end();
            }
        });
    }

    /// Shuts down one direction of the current connections.
    pub fn half_close(&self, towards_near: bool) {
        self.each(|connection| {
            connection.half_closed.store(true, Ordering::SeqCst);
            let _ = if towards_near { &connection.near } else { &connection.far }.shutdown(Shutdown::Write);
        });
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        self.weather.ends.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.listener);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Connection {
    fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        for stream in [&self.near, &self.far] {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &TcpListener, target: SocketAddr, weather: &Arc<Weather>, connections: &Arc<Mutex<Vec<Arc<Connection>>>>) {
    let mut pumps: Vec<JoinHandle<()>> = Vec::new();
    for near in listener.incoming().flatten() {
        if weather.ends.load(Ordering::SeqCst) {
            break;
        }
        if weather.refuses.load(Ordering::SeqCst) {
            continue;
        }
        let Ok(far) = TcpStream::connect(target) else { continue };
        for stream in [&near, &far] {
            keep_little(stream);
            let _ = stream.set_nodelay(true);
        }
        let connection = Arc::new(Connection { near, far, half_closed: AtomicBool::new(false), ended: AtomicBool::new(false) });
        connections.lock().unwrap().push(connection.clone());
        // Only these and the list keep a connection's descriptors.
        for towards_near in [true, false] {
            let (connection, weather, connections) = (connection.clone(), weather.clone(), connections.clone());
            pumps.push(thread::spawn(move || {
                pump(&connection, towards_near, &weather);
                connections.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &connection));
            }));
        }
        pumps.retain(|pump| !pump.is_finished());
    }
    connections.lock().unwrap().iter().for_each(|connection| connection.end());
    pumps.into_iter().for_each(|pump| drop(pump.join()));
}

fn pump(connection: &Connection, towards_near: bool, weather: &Weather) {
    let (mut from, mut to) = if towards_near { (&connection.far, &connection.near) } else { (&connection.near, &connection.far) };
    let mut buffer = vec![0u8; 32 << 10];
    // A connection that has lost bytes must not go on.
    let mut lost = false;
    loop {
        let most = if weather.narrow.load(Ordering::SeqCst) { 1000 } else { buffer.len() };
        let Ok(n @ 1..) = from.read(&mut buffer[..most]) else { break };
        let delay = weather.delay.load(Ordering::SeqCst);
        if delay > 0 {
            thread::sleep(Duration::from_millis(delay));
        }
        let over = || connection.ended.load(Ordering::SeqCst) || weather.ends.load(Ordering::SeqCst);
        while weather.stalled.load(Ordering::SeqCst) && !over() {
            thread::sleep(Duration::from_millis(1));
        }
        lost |= weather.swallows.load(Ordering::SeqCst);
        if !lost && to.write_all(&buffer[..n]).is_err() {
            if !connection.half_closed.load(Ordering::SeqCst) {
                break;
            }
            // The other direction goes on.
            lost = true;
        }
    }
    if SockRef::from(&connection.near).linger().is_ok_and(|linger| linger.is_some()) {
        // The last one to drop the connection resets it.
        let _ = from.shutdown(Shutdown::Read);
        let _ = to.shutdown(Shutdown::Read);
        return;
    }
    connection.end();
}
