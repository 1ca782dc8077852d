//! How connections are made and end: listening, dialling, and what the connection manager tells.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Verbs;
use super::device::STAGE;
use super::link::{VerbsLink, closed_by_peer};
use super::sys::{Context, Event, EventKind, Id, Reads};
use super::wire::{self, Hello, Objection};
use crate::transport::{Link, LinkKey, OtherVersion, Sink};
use crate::{Address, Error, Result};

/// How long the connection manager may look for the way to an address.
const RESOLVING: Duration = Duration::from_secs(2);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;
/// The queue pair of messages reads nothing.
const NO_READS: Reads = Reads { answered: 1, asked: 1 };
/// Why the connection manager says no where nobody listens.
const NO_SUCH_SERVICE: i32 = 8;

/// The ports of devices must be up; else the reason.
fn check_port(context: Context, number: u8) -> io::Result<()> {
    let port = context.port(number)?;
    if port.active {
        return Ok(());
    }
    let reason = format!("port {number} of {} is not active, but {}", context.name(), port.state());
    Err(io::Error::new(io::ErrorKind::NetworkDown, reason))
}

/// What devices there are, for who has named none of them.
fn names() -> String {
    let found = Context::all().unwrap_or_default();
    let names: Vec<&str> = found.iter().map(|context| context.name()).collect();
    names.join(", ")
}

impl Verbs {
    pub(super) fn listen_at(&self, address: &Address) -> Result<Address> {
        let socket = super::super::resolve(address)?;
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => Error::AddressInUse { address: address.clone() },
            io::ErrorKind::AddrNotAvailable | io::ErrorKind::NotFound => {
                let reason = format!("no RDMA device of this machine has the address ({}): {error}", names());
                Error::io(format!("can't listen at {address}"), io::Error::new(error.kind(), reason))
            }
            _ => Error::io(format!("can't listen at {address}"), error),
        };
        let channel = self.shared.channel().map_err(|error| self.unsupported(&error))?;
        let id = Id::new(&channel).map_err(failed)?;
        id.bind(socket).map_err(failed)?;
        if !socket.ip().is_unspecified() && id.context().is_none() {
            return Err(failed(io::ErrorKind::AddrNotAvailable.into()));
        }
        let contexts = match id.context() {
            Some(context) => {
                check_port(context, id.port_of_device()).map_err(failed)?;
                vec![context]
            }
            None => Context::all().map_err(failed)?,
        };
        let mut last = None;
        let mut usable = 0;
        for context in contexts {
            match self.shared.device(context) {
                Ok(_) => usable += 1,
                Err(error) => {
                    tracing::warn!(target: "calomel::verbs", device = context.name(), %error, "a device can't be used");
                    last = Some(error);
                }
            }
        }
        if let Some(error) = last.filter(|_| usable == 0) {
            return Err(failed(error));
        }
        id.listen(BACKLOG).map_err(failed)?;
        let bound = id.local().ok_or_else(|| failed(io::Error::other("it has no address")))?;
        self.shared.listeners.lock().insert(id.number(), id);
        Ok(Address::verbs(bound))
    }

    /// The address is going to be dialled: the device that leads there is in use from now on, so that what is exposed before
    /// the connection is made is known to it. Where it can't be found that is seen when the address is dialled.
    pub(super) fn look_ahead(&self, socket: SocketAddr) {
        let found = super::super::source_towards(socket).and_then(|source| {
            let id = Id::new(&self.shared.channel()?)?;
            id.bind(SocketAddr::new(source, 0))?;
            id.context().map(|context| self.shared.device(context)).transpose()
        });
        if let Err(error) = found {
            tracing::debug!(target: "calomel::verbs", %socket, %error, "it is not known which device leads to an address");
        }
    }

    pub(super) fn dial(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        let socket = address.socket().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a resolved address"))?;
        let channel = self.shared.channel()?;
        let id = Id::new(&channel)?;
        let link = VerbsLink::new(key, &self.shared, id.clone(), true);
        self.shared.links.lock().insert(id.number(), link.clone());
        attach(link.clone());
        id.resolve_address(socket, RESOLVING).inspect_err(|_| link.close())
    }

    /// Takes what the connection manager tells.
    pub(super) fn take_events(&self, sink: &mut dyn Sink) {
        let Ok(channel) = self.shared.channel() else { return };
        loop {
            match channel.next() {
                Ok(Some(event)) => self.take_event(event, sink),
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(target: "calomel::verbs", %error, "the connection manager fails");
                    return;
                }
            }
        }
    }

    fn take_event(&self, mut event: Event, sink: &mut dyn Sink) {
        tracing::trace!(target: "calomel::verbs", event = event.name, status = event.status, "the connection manager tells");
        if let Some(id) = event.new.take() {
            return self.requested(id, &event, sink);
        }
        let Some(link) = self.shared.links.lock().get(&event.id).cloned() else {
            if event.kind == EventKind::Removed {
                tracing::warn!(target: "calomel::verbs", "a device that is listened on goes away");
            }
            return;
        };
        let went = match event.kind {
            EventKind::AddressResolved => self.resolved(&link),
            EventKind::RouteResolved => self.routed(&link),
            EventKind::Established => self.established(&link, &event, sink),
            EventKind::Rejected => Err(self.rejected(&event)),
            EventKind::Failed => Err(event.error()),
            EventKind::Removed => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the device goes away")),
            EventKind::Disconnected => {
                // What it had said before is there already.
                self.look(sink);
                Err(closed_by_peer())
            }
            EventKind::Request | EventKind::Other => Ok(()),
        };
        if let Err(error) = went {
            link.lose(error, sink);
        }
    }

    fn resolved(&self, link: &Arc<VerbsLink>) -> io::Result<()> {
        let Some(id) = link.id() else { return Ok(()) };
        if let Some(context) = id.context() {
            check_port(context, id.port_of_device())?;
        }
        id.resolve_route(RESOLVING)
    }

    fn routed(&self, link: &Arc<VerbsLink>) -> io::Result<()> {
        let Some(id) = link.id() else { return Ok(()) };
        let context = id.context().ok_or_else(|| io::Error::other("the address leads to no device"))?;
        let device = self.shared.device(context)?;
        link.open(&device)?;
        let Some(hello) = link.hello() else { return Ok(()) };
        id.connect(&hello.encode(), NO_READS)
    }

    fn established(&self, link: &Arc<VerbsLink>, event: &Event, sink: &mut dyn Sink) -> io::Result<()> {
        if link.dialled {
            link.meet(Hello::decode(&event.data, self.shared.versions).map_err(objection)?);
            sink.chunk(link.key, STAGE);
            sink.connected(link.key);
        }
        if link.is_closed() { Ok(()) } else { link.begin() }
    }

    /// Somebody dials.
    fn requested(&self, id: Arc<Id>, event: &Event, sink: &mut dyn Sink) {
        if !self.shared.listeners.lock().contains_key(&event.listener) {
            return;
        }
        let peer = id.peer().map_or_else(Address::nowhere, Address::verbs);
        let met = Hello::decode(&event.data, self.shared.versions).map_err(objection).and_then(|hello| {
            let context = id.context().ok_or_else(|| io::Error::other("the connection has no device"))?;
            Ok((hello, self.shared.device(context)?))
        });
        let (hello, device) = match met {
            Ok(both) => both,
            Err(error) => {
                tracing::warn!(target: "calomel::verbs", %peer, %error, "a peer is refused");
                let _ = id.reject(&wire::encode_refusal(self.shared.versions, &error.to_string()));
                return;
            }
        };
        let key = sink.accepted(peer);
        let link = VerbsLink::new(key, &self.shared, id.clone(), false);
        self.shared.links.lock().insert(id.number(), link.clone());
        sink.attach(key, link.clone());
        let accepted = link.open(&device).and_then(|()| {
            link.meet(hello);
            let own = link.hello().ok_or(io::ErrorKind::NotConnected)?;
            id.accept(&own.encode(), NO_READS)
        });
        match accepted {
            Ok(()) => sink.chunk(key, STAGE),
            Err(error) => {
                let _ = id.reject(&wire::encode_refusal(self.shared.versions, &error.to_string()));
                link.lose(error, sink);
            }
        }
    }

    /// Why the other side does not want to be connected.
    fn rejected(&self, event: &Event) -> io::Error {
        if event.status == NO_SUCH_SERVICE {
            return io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens there");
        }
        let refused = |why: &str| io::Error::new(io::ErrorKind::ConnectionRefused, format!("it refuses: {why}"));
        match wire::decode_refusal(&event.data, self.shared.versions) {
            Err(Objection::Version(low, high)) => objection(Objection::Version(low, high)),
            Ok(reason) if !reason.is_empty() => refused(&reason),
            _ => refused(&event.error().to_string()),
        }
    }
}

fn objection(objection: Objection) -> io::Error {
    match objection {
        Objection::Foreign => io::Error::new(io::ErrorKind::InvalidData, "what is there is not a calomel engine"),
        Objection::Nonsense => io::Error::new(io::ErrorKind::InvalidData, "what it says of itself makes no sense"),
        Objection::Version(low, high) => io::Error::new(io::ErrorKind::InvalidData, OtherVersion { low, high }),
    }
}
