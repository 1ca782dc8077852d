//! The TCP connection beside a link. It tells the name of the listener's endpoint, where that is no socket address; whether
//! anything listens at all; and that the process at the other end has ended. Providers tell none of these.
//!
//! The dialler sends a greeting, which says which link it is about; the listener answers, and nothing else follows. From then on the
//! kernel ends the connection with the process, and checks idle ones (keep-alive), so an idle link costs no wake-ups.
//!
//! - Where names are opaque, the listener listens at the address of the engine. The dialler begins here, and only a dialler that has
//!   greeted may say hello.
//! - Where names are socket addresses, the dialler begins with its hello; the listener names a TCP port of its own when it accepts
//!   the link. A connection that ends without an answer says nothing: the listener has turned it away. Where it can't be made,
//!   for instance since a firewall forbids it, the engine's heartbeat has to find out.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Token};

use super::limits::RETRY_SLOWLY;
use super::link::other_version;
use super::wire::{ANSWER, GREETING, Greeting, GreetingAnswer, suit};
use crate::Transport;
use crate::address::OfiProvider;

/// Accepted connections of which no link is known yet. Beyond that, others wait in the listener's queue.
const MAX_WAITING: usize = 256;
/// How long a stranger may take to greet, and after that to say hello.
const TO_GREET: Duration = Duration::from_secs(2);
const TO_SAY_HELLO: Duration = Duration::from_secs(10);
/// Connections that are accepted in one turn.
const MAX_ACCEPTED: usize = 64;
/// When the kernel asks whether an idle peer is there.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Watch {
    listeners: HashMap<usize, WatchListener>,
    sockets: HashMap<usize, WatchSocket>,
    by_link: HashMap<u64, usize>,
    /// Those that have greeted and not said hello yet, by the dialler's incarnation and its number of the link.
    greeted: HashMap<(u64, u64), usize>,
    /// When accepted connections are closed unless a link of theirs is known by then.
    waiting: HashMap<usize, Instant>,
    /// Connections may wait in the queue of a listener.
    has_queue: bool,
}

struct WatchListener {
    socket: TcpListener,
    home: Home,
}

/// What a listener tells of its engine.
pub(super) struct Home {
    pub provider: OfiProvider,
    pub versions: (u16, u16),
    /// The name of the endpoint, where diallers have to ask for it.
    pub name: Option<Vec<u8>>,
}

/// A link that was dialled.
#[derive(Clone, Copy)]
pub(super) struct Dialled {
    pub link: u64,
    pub greeting: Greeting,
    /// The name of the peer's endpoint is not known.
    pub asks: bool,
}

struct WatchSocket {
    stream: TcpStream,
    state: WatchState,
}

/// ```text
/// accepted: Unknown ──▶ Greeted ──▶ Watching        dialled: Connecting ──▶ Asking ──▶ Watching
///              └─────────────────────▲ where names are socket addresses
/// ```
enum WatchState {
    /// Accepted: a greeting follows.
    Unknown { listener: usize, from: SocketAddr, got: Received<GREETING> },
    /// It was told the name of the endpoint: a hello follows there.
    Greeted { link: (u64, u64), from: SocketAddr },
    /// Sends the greeting when it is connected.
    Connecting(Dialled),
    /// The greeting is sent, and not answered yet.
    Asking(Dialled, Box<Received<ANSWER>>),
    /// It ends with the process of this link's peer.
    Watching { link: u64 },
}

/// What an event of a socket means.
pub(super) enum WatchEvent {
    /// Connections wait to be accepted: [`Watch::accept`].
    Accept,
    /// The peer of this link has told the name of its endpoint. There may be a further event.
    Named {
        link: u64,
        name: Vec<u8>,
    },
    /// The peer of this link does not tell it.
    Failed {
        link: u64,
        error: io::Error,
    },
    /// The peer of this link has ended.
    Ended {
        link: u64,
    },
    Nothing,
}

impl Watch {
    /// Answers those that connect to this socket.
    pub(super) fn listen(
        &mut self,
        registry: &mio::Registry,
        token: usize,
        mut socket: TcpListener,
        home: Home,
    ) -> io::Result<()> {
        registry.register(&mut socket, Token(token), Interest::READABLE)?;
        self.listeners.insert(token, WatchListener { socket, home });
        Ok(())
    }

    /// Connects to the peer of a link that was dialled.
    pub(super) fn dial(&mut self, registry: &mio::Registry, token: usize, to: SocketAddr, dialled: Dialled) -> io::Result<()> {
        let mut stream = TcpStream::connect(to)?;
        registry.register(&mut stream, Token(token), Interest::READABLE | Interest::WRITABLE)?;
        self.by_link.insert(dialled.link, token);
        self.sockets.insert(token, WatchSocket { stream, state: WatchState::Connecting(dialled) });
        Ok(())
    }

    /// Accepts connections; `token` numbers them.
    pub(super) fn accept(&mut self, registry: &mio::Registry, listener: usize, mut token: impl FnMut() -> usize) {
        let Some(listening) = self.listeners.get_mut(&listener) else { return };
        for _ in 0..MAX_ACCEPTED {
            if self.waiting.len() >= MAX_WAITING {
                self.has_queue = true;
                return;
            }
            match listening.socket.accept() {
                Ok((mut stream, from)) => {
                    let token = token();
                    if registry.register(&mut stream, Token(token), Interest::READABLE).is_ok() {
                        let state = WatchState::Unknown { listener, from, got: Received::default() };
                        self.sockets.insert(token, WatchSocket { stream, state });
                        self.waiting.insert(token, Instant::now() + TO_GREET);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // That connection has ended.
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                // Mostly there are no descriptors left.
                Err(_) => {
                    self.has_queue = true;
                    return;
                }
            }
        }
        // The reactor reports the listener again.
        let _ = registry.reregister(&mut listening.socket, Token(listener), Interest::READABLE);
    }

    /// Closes connections that have had their time, and accepts others that have waited for that.
    pub(super) fn tidy(&mut self, registry: &mio::Registry, now: Instant, mut token: impl FnMut() -> usize) {
        let late: Vec<usize> = self.waiting.iter().filter(|(_, until)| **until <= now).map(|(token, _)| *token).collect();
        late.into_iter().for_each(|token| drop(self.end(token)));
        if std::mem::take(&mut self.has_queue) {
            let listeners: Vec<usize> = self.listeners.keys().copied().collect();
            listeners.into_iter().for_each(|listener| self.accept(registry, listener, &mut token));
        }
    }

    /// When to call [`Watch::tidy`].
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        let queue = self.has_queue.then(|| now + RETRY_SLOWLY);
        self.waiting.values().copied().chain(queue).min()
    }

    /// Handles an event of the reactor. `accepted` finds the link that a peer at this address has dialled.
    pub(super) fn ready(&mut self, token: usize, accepted: impl Fn((u64, u64), IpAddr) -> Option<u64>) -> WatchEvent {
        if self.listeners.contains_key(&token) {
            return WatchEvent::Accept;
        }
        // Changes are reported once, so what follows is looked for at once.
        loop {
            match self.step(token, &accepted) {
                Ok(Step::Next) => {}
                Ok(Step::Event(event)) => return event,
                Err(error) => return self.failed(token, error),
            }
        }
    }

    fn failed(&mut self, token: usize, error: io::Error) -> WatchEvent {
        match self.end(token) {
            Some(WatchState::Watching { link }) => WatchEvent::Ended { link },
            Some(WatchState::Connecting(dialled) | WatchState::Asking(dialled, _)) if dialled.asks => {
                WatchEvent::Failed { link: dialled.link, error }
            }
            _ => WatchEvent::Nothing,
        }
    }

    /// An error: the connection is of no use.
    fn step(&mut self, token: usize, accepted: &impl Fn((u64, u64), IpAddr) -> Option<u64>) -> io::Result<Step> {
        let Some(WatchSocket { stream, state }) = self.sockets.get_mut(&token) else { return Ok(Step::NOTHING) };
        match state {
            WatchState::Connecting(dialled) => {
                if let Some(error) = stream.take_error()? {
                    return Err(error);
                }
                if stream.peer_addr().is_err() {
                    return Ok(Step::NOTHING);
                }
                keep_alive(stream)?;
                // So few bytes fit into the buffers of a new connection.
                stream.write_all(&dialled.greeting.encode())?;
                *state = WatchState::Asking(*dialled, Box::default());
                Ok(Step::Next)
            }
            WatchState::Asking(dialled, got) => {
                if !got.fill(stream).map_err(no_answer)? {
                    return Ok(Step::NOTHING);
                }
                let name = dialled.take_answer(&got.bytes)?;
                let Dialled { link, asks, .. } = *dialled;
                *state = WatchState::Watching { link };
                Ok(if asks { Step::Event(WatchEvent::Named { link, name }) } else { Step::Next })
            }
            WatchState::Unknown { listener, from, got } => {
                if !got.fill(stream)? {
                    return Ok(Step::NOTHING);
                }
                let greeting = Greeting::decode(&got.bytes).ok_or(io::ErrorKind::InvalidData)?;
                let home = &self.listeners.get(listener).ok_or(io::ErrorKind::NotConnected)?.home;
                let (from, link) = (*from, accepted(greeting.link, from.ip()));
                keep_alive(stream)?;
                match &home.name {
                    Some(name) => {
                        let suits = greeting.provider == Some(home.provider) && suit(greeting.versions, home.versions);
                        let suits = suits && !self.greeted.contains_key(&greeting.link) && link.is_none();
                        stream.write_all(&home.answer(if suits { name } else { &[] }))?;
                        if !suits {
                            return Err(io::ErrorKind::InvalidData.into());
                        }
                        *state = WatchState::Greeted { link: greeting.link, from };
                        self.greeted.insert(greeting.link, token);
                        self.waiting.insert(token, Instant::now() + TO_SAY_HELLO);
                    }
                    None => {
                        let link = link.filter(|link| !self.by_link.contains_key(link)).ok_or(io::ErrorKind::NotFound)?;
                        stream.write_all(&home.answer(&[]))?;
                        *state = WatchState::Watching { link };
                        self.waiting.remove(&token);
                        self.by_link.insert(link, token);
                    }
                }
                Ok(Step::Next)
            }
            WatchState::Greeted { .. } | WatchState::Watching { .. } => match stream.read(&mut [0; 8]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::NOTHING),
                // Nothing is ever sent here: the peer has ended, or breaks the rules.
                Err(error) => Err(error),
                Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
            },
        }
    }

    /// Where the peer is that has greeted for this link and waits for it.
    pub(super) fn greeted_from(&self, link: (u64, u64)) -> Option<SocketAddr> {
        let token = self.greeted.get(&link)?;
        match self.sockets.get(token)?.state {
            WatchState::Greeted { from, .. } => Some(from),
            _ => None,
        }
    }

    /// The peer that has greeted for this link has said hello: it is link `number` here.
    pub(super) fn accepted(&mut self, link: (u64, u64), number: u64) {
        let Some(token) = self.greeted.remove(&link) else { return };
        self.waiting.remove(&token);
        if let Some(socket) = self.sockets.get_mut(&token) {
            socket.state = WatchState::Watching { link: number };
            self.by_link.insert(number, token);
        }
    }

    /// The link has ended.
    pub(super) fn forget(&mut self, link: u64) {
        if let Some(token) = self.by_link.remove(&link) {
            self.sockets.remove(&token);
        }
    }

    fn end(&mut self, token: usize) -> Option<WatchState> {
        self.waiting.remove(&token);
        let WatchSocket { state, .. } = self.sockets.remove(&token)?;
        match &state {
            WatchState::Connecting(Dialled { link, .. })
            | WatchState::Asking(Dialled { link, .. }, _)
            | WatchState::Watching { link } => drop(self.by_link.remove(link)),
            WatchState::Greeted { link, .. } => drop(self.greeted.remove(link)),
            WatchState::Unknown { .. } => {}
        }
        Some(state)
    }

    /// The endpoint of this name is closed: it is not told any more, and nobody listens where it was.
    pub(super) fn forget_name(&mut self, name: &[u8]) {
        self.listeners.retain(|_, listener| listener.home.name.as_deref() != Some(name));
    }

    pub(super) fn stop_listening(&mut self) {
        self.listeners.clear();
    }

    pub(super) fn clear(&mut self) {
        *self = Watch::default();
    }
}

/// What follows an event.
enum Step {
    /// The socket may have more.
    Next,
    Event(WatchEvent),
}

impl Step {
    const NOTHING: Step = Step::Event(WatchEvent::Nothing);
}

impl Home {
    fn answer(&self, name: &[u8]) -> [u8; ANSWER] {
        GreetingAnswer { versions: self.versions, provider: Some(self.provider), name }.encode()
    }
}

impl Dialled {
    /// The name of the peer's endpoint; empty where it is not asked for.
    fn take_answer(&self, bytes: &[u8; ANSWER]) -> io::Result<Vec<u8>> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let answer = GreetingAnswer::decode(bytes).ok_or_else(|| invalid("it is no engine that listens there".to_owned()))?;
        if answer.provider != self.greeting.provider {
            let other = answer.provider.map_or("another provider".to_owned(), |other| Transport::Ofi(other).to_string());
            return Err(invalid(format!("the engine there listens with {other}")));
        }
        if !suit(answer.versions, self.greeting.versions) {
            return Err(other_version(answer.versions));
        }
        if self.asks && answer.name.is_empty() {
            let what = "the engine there does not tell the name of its endpoint";
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, what));
        }
        Ok(answer.name.to_vec())
    }
}

fn no_answer(error: io::Error) -> io::Error {
    let what = format!("the connection ended before the name of an endpoint was told there: {error}");
    io::Error::new(error.kind(), what)
}

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let keep_alive = socket2::TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE / 3).with_retries(3);
    socket2::SockRef::from(stream).set_tcp_keepalive(&keep_alive)
}

/// Bytes that have arrived, of a fixed number.
struct Received<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Default for Received<N> {
    fn default() -> Received<N> {
        Received { bytes: [0; N], len: 0 }
    }
}

impl<const N: usize> Received<N> {
    /// Reads what has arrived, and no more than all. True when all has.
    fn fill(&mut self, stream: &mut TcpStream) -> io::Result<bool> {
        while self.len < N {
            match stream.read(&mut self.bytes[self.len..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => self.len += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
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
    /// The dialler's incarnation and number.
    const LINK: (u64, u64) = (5, HERE);
    const NAME: &[u8] = b"a name";

    fn home(name: Option<&[u8]>) -> Home {
        Home { provider: OfiProvider::Cxi, versions: (2, 3), name: name.map(<[u8]>::to_vec) }
    }

    fn bind() -> (TcpListener, SocketAddr) {
        let socket = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let at = socket.local_addr().unwrap();
        (socket, at)
    }

    fn greeting() -> Greeting {
        Greeting { versions: (1, 2), provider: Some(OfiProvider::Cxi), link: LINK }
    }

    /// A listener and a dialler, which share a reactor.
    struct Two {
        poll: mio::Poll,
        listener: Watch,
        dialler: Watch,
        named: Option<Vec<u8>>,
        failed: Option<io::Error>,
    }

    impl Two {
        /// The listener tells the name if it has one; the dialler asks for it.
        fn new(name: Option<&[u8]>, greeting: Greeting) -> Two {
            let (poll, mut listener, mut dialler) = (mio::Poll::new().unwrap(), Watch::default(), Watch::default());
            let (socket, at) = bind();
            listener.listen(poll.registry(), LISTENER, socket, home(name)).unwrap();
            let dialled = Dialled { link: HERE, greeting, asks: name.is_some() };
            dialler.dial(poll.registry(), DIALLED, at, dialled).unwrap();
            Two { poll, listener, dialler, named: None, failed: None }
        }

        /// Handles events until the condition is true; true if the dialler was told meanwhile that its peer has ended.
        fn until(&mut self, exists: bool, done: impl Fn(&Two) -> bool) -> bool {
            let (begin, mut ended, mut events) = (Instant::now(), false, mio::Events::with_capacity(8));
            let accepted = |link, from: IpAddr| (exists && link == LINK && from.is_loopback()).then_some(THERE);
            while !done(self) {
                assert!(begin.elapsed() < Duration::from_secs(10), "nothing happens");
                self.poll.poll(&mut events, Some(Duration::from_millis(10))).unwrap();
                for event in &events {
                    match event.token().0 {
                        DIALLED => loop {
                            match self.dialler.ready(DIALLED, |_, _| None) {
                                WatchEvent::Named { name, .. } => self.named = Some(name),
                                WatchEvent::Failed { error, .. } => self.failed = Some(error),
                                WatchEvent::Ended { link: HERE } => ended = true,
                                _ => break,
                            }
                        },
                        token => match self.listener.ready(token, accepted) {
                            WatchEvent::Accept => self.listener.accept(self.poll.registry(), token, || ACCEPTED),
                            WatchEvent::Named { .. } | WatchEvent::Failed { .. } => panic!("it has not dialled"),
                            _ => {}
                        },
                    }
                }
            }
            ended
        }
    }

    fn is_watching(watch: &Watch) -> bool {
        watch.sockets.values().any(|socket| matches!(socket.state, WatchState::Watching { .. }))
    }

    /// Nothing is left of connections.
    #[track_caller]
    fn assert_empty(watch: &Watch) {
        let Watch { sockets, by_link, greeted, waiting, .. } = watch;
        assert_eq!((sockets.len(), by_link.len(), greeted.len(), waiting.len()), (0, 0, 0, 0));
    }

    #[test]
    fn a_watcher_that_is_turned_away_is_not_told_that_the_peer_has_ended() {
        let mut two = Two::new(None, greeting());
        assert!(!two.until(false, |two| two.dialler.sockets.is_empty()));
        assert_empty(&two.dialler);
        assert_empty(&two.listener);
    }

    #[test]
    fn the_end_of_an_accepted_watcher_is_that_of_the_peer() {
        let mut two = Two::new(None, greeting());
        assert!(!two.until(true, |two| is_watching(&two.dialler) && is_watching(&two.listener)));
        assert!(two.listener.waiting.is_empty());
        two.listener.clear();
        assert!(two.until(true, |two| two.dialler.sockets.is_empty()));
        assert_empty(&two.dialler);
    }

    #[test]
    fn the_name_is_told_to_one_who_asks_and_the_same_connection_watches() {
        let mut two = Two::new(Some(NAME), greeting());
        assert!(!two.until(false, |two| two.named.is_some()));
        assert_eq!(two.named.as_deref(), Some(NAME));
        assert!(two.listener.greeted_from(LINK).unwrap().ip().is_loopback());
        assert_eq!(two.listener.greeted_from((5, THERE)), None);
        two.listener.accepted(LINK, THERE);
        assert!(is_watching(&two.listener) && two.listener.waiting.is_empty() && two.listener.greeted.is_empty());
        two.listener.forget_name(b"another");
        assert_eq!(two.listener.listeners.len(), 1);
        two.listener.forget_name(NAME);
        assert!(two.listener.listeners.is_empty());
        two.dialler.forget(HERE);
        assert!(!two.until(false, |two| two.listener.sockets.is_empty()));
        assert_empty(&two.listener);
    }

    #[test]
    fn one_who_greets_and_says_no_hello_is_closed_in_time() {
        let mut two = Two::new(Some(NAME), greeting());
        two.until(false, |two| two.named.is_some());
        let due = two.listener.next(Instant::now()).unwrap();
        two.listener.tidy(two.poll.registry(), due, || panic!("nobody waits"));
        assert_empty(&two.listener);
        assert!(two.until(false, |two| two.dialler.sockets.is_empty()));
    }

    #[test]
    fn other_providers_and_versions_are_told_apart() {
        let other = Greeting { provider: Some(OfiProvider::Opx), ..greeting() };
        let mut two = Two::new(Some(NAME), other);
        two.until(false, |two| two.failed.is_some());
        let error = two.failed.take().unwrap().to_string();
        assert!(error.contains("ofi+cxi"), "{error}");
        let mut two = Two::new(Some(NAME), Greeting { versions: (8, 9), ..greeting() });
        two.until(false, |two| two.failed.is_some());
        let error = two.failed.take().unwrap().to_string();
        assert!(error.contains("versions 2 to 3"), "{error}");
        two.until(false, |two| two.listener.sockets.is_empty());
        assert_empty(&two.listener);
        assert_empty(&two.dialler);
    }

    #[test]
    fn a_dialler_that_is_told_nothing_fails_with_the_reason() {
        use std::io::Write;
        for answer in [&b""[..], &[b'x'; 50], &[b'x'; 500]] {
            let (poll, mut dialler) = (mio::Poll::new().unwrap(), Watch::default());
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let dialled = Dialled { link: HERE, greeting: greeting(), asks: true };
            dialler.dial(poll.registry(), DIALLED, listener.local_addr().unwrap(), dialled).unwrap();
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(answer).unwrap();
            drop(stream);
            let mut two = Two { poll, listener: Watch::default(), dialler, named: None, failed: None };
            two.until(false, |two| two.failed.is_some());
            assert!(two.named.is_none());
            assert_empty(&two.dialler);
        }
    }

    /// What strangers send is read up to the length of a greeting, and nonsense is closed.
    #[test]
    fn strangers_cost_little() {
        use std::io::Write;
        let (poll, mut watch) = (mio::Poll::new().unwrap(), Watch::default());
        let (socket, at) = bind();
        watch.listen(poll.registry(), LISTENER, socket, home(Some(NAME))).unwrap();
        for nonsense in [&[b'G'; 32][..], &[0; 4096], &greeting().encode()[..31], b""] {
            let mut stranger = std::net::TcpStream::connect(at).unwrap();
            stranger.write_all(nonsense).unwrap();
            drop(stranger);
        }
        let mut too_much = std::net::TcpStream::connect(at).unwrap();
        too_much.write_all(&[&greeting().encode()[..], b"and more"].concat()).unwrap();
        let (begin, mut next) = (Instant::now(), ACCEPTED);
        while next < ACCEPTED + 5 || !watch.sockets.is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(10), "nothing happens");
            watch.accept(poll.registry(), LISTENER, || {
                next += 1;
                next
            });
            for token in watch.sockets.keys().copied().collect::<Vec<_>>() {
                watch.ready(token, |_, _| None);
            }
        }
        assert_empty(&watch);
    }

    /// Those that say nothing are few, and have their time; others wait for that.
    #[test]
    fn silent_watchers_are_few() {
        let (poll, mut watch) = (mio::Poll::new().unwrap(), Watch::default());
        let (socket, at) = bind();
        watch.listen(poll.registry(), LISTENER, socket, home(None)).unwrap();
        let mut last = ACCEPTED;
        let mut token = || {
            last += 1;
            last
        };
        let more = 20;
        // The system's queue may hold fewer than these.
        let mut silent = Vec::new();
        for _ in 0..MAX_WAITING + more {
            silent.push(std::net::TcpStream::connect(at).unwrap());
            watch.accept(poll.registry(), LISTENER, &mut token);
        }
        assert_eq!((watch.sockets.len(), watch.has_queue), (MAX_WAITING, true));
        let now = Instant::now();
        assert!(watch.next(now).unwrap() <= now + RETRY_SLOWLY);
        watch.tidy(poll.registry(), now + TO_GREET, &mut token);
        assert_eq!((watch.sockets.len(), watch.waiting.len(), watch.has_queue), (more, more, false));
        watch.tidy(poll.registry(), Instant::now() + TO_GREET, &mut token);
        assert_empty(&watch);
        drop(silent);
    }
}
