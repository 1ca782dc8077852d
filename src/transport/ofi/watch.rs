//! Sockets by which a link learns that the process at the other end has ended, since providers don't tell.
//!
//! A listening engine accepts TCP connections at a port of its own, which it names when it accepts a link. The dialler connects
//! there, and sends the number of the link; the answer is one byte, and nothing else follows. A connection that ends without that
//! byte says nothing: the listener has turned it away. From then on the kernel ends the connection with the process, and checks idle ones
//! (keep-alive), so an idle link costs no wake-ups. Where the connection can't be made, for instance since a firewall forbids
//! it, the engine's heartbeat has to find out.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Token};

/// Connections that may have sent no number yet. Beyond that, one that has had this much time makes room for a new one.
const MAX_UNKNOWN: usize = 64;
const TO_SEND_NUMBER: Duration = Duration::from_secs(1);
/// Connections that are accepted in one turn.
const MAX_ACCEPTED: usize = 64;
/// When the kernel asks whether an idle peer is there.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Watch {
    listeners: HashMap<usize, TcpListener>,
    sockets: HashMap<usize, WatchSocket>,
    by_link: HashMap<u64, usize>,
}

struct WatchSocket {
    stream: TcpStream,
    state: WatchState,
}

enum WatchState {
    /// Accepted: the number of the link follows.
    Unknown { from: IpAddr, since: Instant },
    /// Dialled: sends this number of the peer's when it is connected.
    Connecting { link: u64, send: u64 },
    /// The number is sent, and not answered yet.
    Claiming { link: u64 },
    /// It ends with the process of this link's peer.
    Watching { link: u64 },
}

/// What an event of a socket means.
pub(super) enum WatchEvent {
    /// Connections wait to be accepted: [`Watch::accept`].
    Accept,
    /// A peer at this address says that it watches this link: [`Watch::attach`] decides.
    Claimed {
        link: u64,
        from: IpAddr,
    },
    /// The peer of this link has ended.
    Ended {
        link: u64,
    },
    Nothing,
}

impl Watch {
    /// Listens at any port of this address; returns the port.
    pub(super) fn listen(&mut self, registry: &mio::Registry, token: usize, ip: IpAddr) -> io::Result<u16> {
        let mut listener = TcpListener::bind(SocketAddr::new(ip, 0))?;
        let port = listener.local_addr()?.port();
        registry.register(&mut listener, Token(token), Interest::READABLE)?;
        self.listeners.insert(token, listener);
        Ok(port)
    }

    /// Watches the peer of a link that was dialled. `send`: the peer's number of it.
    pub(super) fn dial(
        &mut self,
        registry: &mio::Registry,
        token: usize,
        to: SocketAddr,
        link: u64,
        send: u64,
    ) -> io::Result<()> {
        let mut stream = TcpStream::connect(to)?;
        registry.register(&mut stream, Token(token), Interest::READABLE | Interest::WRITABLE)?;
        self.by_link.insert(link, token);
        self.sockets.insert(token, WatchSocket { stream, state: WatchState::Connecting { link, send } });
        Ok(())
    }

    /// Accepts connections; `token` numbers them.
    pub(super) fn accept(&mut self, registry: &mio::Registry, listener: usize, mut token: impl FnMut() -> usize) {
        for _ in 0..MAX_ACCEPTED {
            let Some(Ok((mut stream, remote))) = self.listeners.get(&listener).map(TcpListener::accept) else { return };
            let now = Instant::now();
            if self.sockets.values().filter(|socket| socket.unknown_since().is_some()).count() >= MAX_UNKNOWN {
                let since = self.sockets.iter().filter_map(|(token, socket)| Some((socket.unknown_since()?, *token)));
                match since.min().filter(|(since, _)| now.saturating_duration_since(*since) > TO_SEND_NUMBER) {
                    Some((_, oldest)) => drop(self.sockets.remove(&oldest)),
                    None => continue,
                }
            }
            let token = token();
            if registry.register(&mut stream, Token(token), Interest::READABLE).is_ok() {
                let state = WatchState::Unknown { from: remote.ip(), since: now };
                self.sockets.insert(token, WatchSocket { stream, state });
            }
        }
        // The reactor reports the listener again.
        if let Some(listening) = self.listeners.get_mut(&listener) {
            let _ = registry.reregister(listening, Token(listener), Interest::READABLE);
        }
    }

    /// Handles an event of the reactor.
    pub(super) fn ready(&mut self, token: usize) -> WatchEvent {
        if self.listeners.contains_key(&token) {
            return WatchEvent::Accept;
        }
        let Some(socket) = self.sockets.get_mut(&token) else { return WatchEvent::Nothing };
        let event = socket.ready();
        let ended = match &event {
            Ok(WatchEvent::Ended { .. }) | Err(_) => true,
            Ok(_) => false,
        };
        if ended && let Some(WatchSocket { state, .. }) = self.sockets.remove(&token) {
            match state {
                WatchState::Connecting { link, .. } | WatchState::Claiming { link } | WatchState::Watching { link } => {
                    self.by_link.remove(&link);
                }
                WatchState::Unknown { .. } => {}
            }
        }
        event.unwrap_or(WatchEvent::Nothing)
    }

    /// The connection of this token watches a link. `exists`: it is a link of a peer at the address that it comes from.
    pub(super) fn attach(&mut self, token: usize, link: u64, exists: bool) {
        let free = exists && !self.by_link.contains_key(&link);
        let answered = |socket: &mut WatchSocket| socket.stream.write_all(&[ATTACHED]).is_ok();
        if let Some(socket) = self.sockets.get_mut(&token).filter(|_| free)
            && answered(socket)
        {
            socket.state = WatchState::Watching { link };
            self.by_link.insert(link, token);
        } else {
            self.sockets.remove(&token);
        }
    }

    /// The link has ended.
    pub(super) fn forget(&mut self, link: u64) {
        if let Some(token) = self.by_link.remove(&link) {
            self.sockets.remove(&token);
        }
    }

    pub(super) fn stop_listening(&mut self) {
        self.listeners.clear();
    }

    pub(super) fn clear(&mut self) {
        *self = Watch::default();
    }
}

/// The answer to a number.
const ATTACHED: u8 = 1;

impl WatchSocket {
    fn unknown_since(&self) -> Option<Instant> {
        match self.state {
            WatchState::Unknown { since, .. } => Some(since),
            _ => None,
        }
    }

    /// An error: the connection is of no use.
    fn ready(&mut self) -> io::Result<WatchEvent> {
        let would_block = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        match self.state {
            WatchState::Connecting { link, send } => {
                if let Some(error) = self.stream.take_error()? {
                    return Err(error);
                }
                if self.stream.peer_addr().is_err() {
                    return Ok(WatchEvent::Nothing);
                }
                self.keep_alive()?;
                // So few bytes fit into the buffers of a new connection.
                self.stream.write_all(&send.to_le_bytes())?;
                self.state = WatchState::Claiming { link };
                self.ready()
            }
            WatchState::Claiming { link } => match self.stream.read(&mut [0]) {
                Ok(1) => {
                    self.state = WatchState::Watching { link };
                    // The reactor reports changes only.
                    self.ready()
                }
                Err(error) if would_block(&error) => Ok(WatchEvent::Nothing),
                Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) => Err(error),
            },
            WatchState::Unknown { from, .. } => {
                let mut number = [0; 8];
                match self.stream.read(&mut number) {
                    Ok(8) => {
                        self.keep_alive()?;
                        Ok(WatchEvent::Claimed { link: u64::from_le_bytes(number), from })
                    }
                    Err(error) if would_block(&error) => Ok(WatchEvent::Nothing),
                    Ok(_) => Err(io::ErrorKind::InvalidData.into()),
                    Err(error) => Err(error),
                }
            }
            WatchState::Watching { link } => match self.stream.read(&mut [0; 8]) {
                Err(error) if would_block(&error) => Ok(WatchEvent::Nothing),
                // Nothing is ever sent here: the peer has ended, or breaks the rules.
                _ => Ok(WatchEvent::Ended { link }),
            },
        }
    }

    fn keep_alive(&self) -> io::Result<()> {
        let keep_alive = socket2::TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE / 3).with_retries(3);
        socket2::SockRef::from(&self.stream).set_tcp_keepalive(&keep_alive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTENER: usize = 1;
    const DIALLED: usize = 2;
    const ACCEPTED: usize = 3;
    /// The link of the dialler, and of the listener.
    const HERE: u64 = 7;
    const THERE: u64 = 9;

    /// A listener and a dialler, which share a reactor.
    struct Two {
        poll: mio::Poll,
        listener: Watch,
        dialler: Watch,
    }

    impl Two {
        fn new() -> Two {
            let (poll, mut listener, mut dialler) = (mio::Poll::new().unwrap(), Watch::default(), Watch::default());
            let ip = IpAddr::from([127, 0, 0, 1]);
            let port = listener.listen(poll.registry(), LISTENER, ip).unwrap();
            dialler.dial(poll.registry(), DIALLED, SocketAddr::new(ip, port), HERE, THERE).unwrap();
            Two { poll, listener, dialler }
        }

        /// Handles events until the condition is true; true if the dialler was told meanwhile that its peer has ended.
        fn until(&mut self, exists: bool, done: impl Fn(&Two) -> bool) -> bool {
            let (begin, mut ended, mut events) = (Instant::now(), false, mio::Events::with_capacity(8));
            while !done(self) {
                assert!(begin.elapsed() < Duration::from_secs(10), "nothing happens");
                self.poll.poll(&mut events, Some(Duration::from_millis(10))).unwrap();
                for event in &events {
                    match event.token().0 {
                        DIALLED => ended |= matches!(self.dialler.ready(DIALLED), WatchEvent::Ended { link: HERE }),
                        token => match self.listener.ready(token) {
                            WatchEvent::Accept => self.listener.accept(self.poll.registry(), token, || ACCEPTED),
                            WatchEvent::Claimed { link, .. } => {
                                assert_eq!(link, THERE);
                                self.listener.attach(token, link, exists);
                            }
                            _ => {}
                        },
                    }
                }
            }
            ended
        }
    }

    #[test]
    fn a_watcher_that_is_turned_away_is_not_told_that_the_peer_has_ended() {
        let mut two = Two::new();
        assert!(!two.until(false, |two| two.dialler.sockets.is_empty()));
        assert!(two.dialler.by_link.is_empty() && two.listener.by_link.is_empty());
    }

    #[test]
    fn the_end_of_an_accepted_watcher_is_that_of_the_peer() {
        let mut two = Two::new();
        let watching = |watch: &Watch| watch.sockets.values().any(|socket| matches!(socket.state, WatchState::Watching { .. }));
        assert!(!two.until(true, |two| watching(&two.dialler) && watching(&two.listener)));
        two.listener.clear();
        assert!(two.until(true, |two| two.dialler.sockets.is_empty()));
    }

    /// Those that say nothing do not take the place of others, unless they have had their time.
    #[test]
    fn silent_watchers_are_few() {
        let (poll, mut watch) = (mio::Poll::new().unwrap(), Watch::default());
        let ip = IpAddr::from([127, 0, 0, 1]);
        let port = watch.listen(poll.registry(), LISTENER, ip).unwrap();
        let mut token = ACCEPTED;
        let silent: Vec<_> = (0..2 * MAX_UNKNOWN).map(|_| std::net::TcpStream::connect((ip, port)).unwrap()).collect();
        let begin = Instant::now();
        for _ in 0..4 {
            watch.accept(poll.registry(), LISTENER, || {
                token += 1;
                token
            });
        }
        assert_eq!(watch.sockets.len(), MAX_UNKNOWN);
        let first: Vec<usize> = watch.sockets.keys().copied().filter(|token| *token == ACCEPTED + 1).collect();
        assert!(!first.is_empty() || begin.elapsed() > TO_SEND_NUMBER, "the first one has lost its place");
        drop(silent);
    }
}
