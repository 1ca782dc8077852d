//! Sockets by which a link learns that the process at the other end has ended, since providers don't tell.
//!
//! A listening engine accepts TCP connections at a port of its own, which it names when it accepts a link. The dialler connects
//! there, sends the number of the link, and nothing else. The kernel ends the connection with the process, and checks idle ones
//! (keep-alive), so an idle link costs no wake-ups. Where the connection can't be made, for instance since a firewall forbids
//! it, the engine's heartbeat has to find out.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Token};

/// Connections that may have sent no number yet: strangers' take their place from each other.
const MAX_UNKNOWN: usize = 64;
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
    Unknown { from: IpAddr },
    /// Dialled: sends this number of the peer's when it is connected.
    Connecting { link: u64, send: u64 },
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
            let unknown = |socket: &WatchSocket| matches!(socket.state, WatchState::Unknown { .. });
            if self.sockets.values().filter(|socket| unknown(socket)).count() >= MAX_UNKNOWN {
                let oldest = self.sockets.iter().filter(|(_, socket)| unknown(socket)).map(|(token, _)| *token).min();
                oldest.map(|token| self.sockets.remove(&token));
            }
            let token = token();
            if registry.register(&mut stream, Token(token), Interest::READABLE).is_ok() {
                self.sockets.insert(token, WatchSocket { stream, state: WatchState::Unknown { from: remote.ip() } });
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
        if ended
            && let Some(WatchSocket { state: WatchState::Connecting { link, .. } | WatchState::Watching { link }, .. }) =
                self.sockets.remove(&token)
        {
            self.by_link.remove(&link);
        }
        event.unwrap_or(WatchEvent::Nothing)
    }

    /// The connection of this token watches a link. `exists`: it is a link of a peer at the address that it comes from.
    pub(super) fn attach(&mut self, token: usize, link: u64, exists: bool) {
        if !exists || self.by_link.contains_key(&link) {
            self.sockets.remove(&token);
        } else if let Some(socket) = self.sockets.get_mut(&token) {
            socket.state = WatchState::Watching { link };
            self.by_link.insert(link, token);
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

impl WatchSocket {
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
                self.state = WatchState::Watching { link };
                Ok(WatchEvent::Nothing)
            }
            WatchState::Unknown { from } => {
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
