//! Listening, dialling, and the connection manager's events.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Verbs;
use super::limits::STAGE;
use super::link::VerbsLink;
use super::sys::{CmEvent, CmEventKind, CmId, Context, ReadDepth};
use super::wire::{self, CmHello, HelloError};
use crate::deferred_log::defer;
use crate::transport::{Link, LinkKey, OtherVersion, Sink, closed_by_peer};
use crate::{Address, Error, Result};

/// Time limit for resolving an address, and then a route.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;
/// The message queue pair does no RDMA reads.
const NO_READS: ReadDepth = ReadDepth { answered: 1, asked: 1 };
/// Status of a rejection where no process listens.
const NO_SUCH_SERVICE: i32 = 8;

/// Checks that a device's port is active.
fn check_port(context: Context, number: u8) -> io::Result<()> {
    let port = context.port(number)?;
    if port.active {
        return Ok(());
    }
    let reason = format!("port {number} of {} is not active, but {}", context.name(), port.state());
    Err(io::Error::new(io::ErrorKind::NetworkDown, reason))
}

/// Names of the devices there are, for errors.
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
        let id = CmId::new(&channel).map_err(failed)?;
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
                    let reason = error.to_string();
                    let device = context.name();
                    defer(move || tracing::warn!(target: "calomel::verbs", device, reason, "a device can't be used"));
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

    /// An address is about to be dialled: puts the device that leads there into use, so that memory exposed before the
    /// connection is made is registered with it. A failure here shows again when the address is dialled.
    pub(super) fn prepare_device(&self, socket: SocketAddr) {
        let found = super::super::source_towards(socket).and_then(|source| {
            let id = CmId::new(&self.shared.channel()?)?;
            id.bind(SocketAddr::new(source, 0))?;
            id.context().map(|context| self.shared.device(context)).transpose()
        });
        if let Err(error) = found {
            defer(move || tracing::debug!(target: "calomel::verbs", %socket, %error, "no device is known for an address yet"));
        }
    }

    pub(super) fn dial(&self, key: LinkKey, address: &Address, attach: &dyn Fn(Arc<dyn Link>)) -> io::Result<()> {
        let socket = address.socket().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a resolved address"))?;
        let channel = self.shared.channel()?;
        let id = CmId::new(&channel)?;
        let link = VerbsLink::new(key, &self.shared, id.clone(), true);
        self.shared.links.lock().insert(id.number(), link.clone());
        attach(link.clone());
        id.resolve_address(socket, RESOLVE_TIMEOUT).inspect_err(|_| link.close())
    }

    /// Handles the connection manager's events.
    pub(super) fn take_events(&self, sink: &mut dyn Sink) {
        let Ok(channel) = self.shared.channel() else { return };
        loop {
            match channel.next() {
                Ok(Some(event)) => self.take_event(event, sink),
                Ok(None) => return,
                Err(error) => {
                    return defer(move || tracing::error!(target: "calomel::verbs", %error, "the connection manager fails"));
                }
            }
        }
    }

    fn take_event(&self, mut event: CmEvent, sink: &mut dyn Sink) {
        let (name, status) = (event.name, event.status);
        defer(move || tracing::trace!(target: "calomel::verbs", event = name, status, "connection manager event"));
        if let Some(id) = event.new.take() {
            return self.requested(id, &event, sink);
        }
        let Some(link) = self.shared.links.lock().get(&event.id).cloned() else {
            if event.kind == CmEventKind::Removed {
                defer(|| tracing::warn!(target: "calomel::verbs", "a device with listeners was removed"));
            }
            return;
        };
        let handled = match event.kind {
            CmEventKind::AddressResolved => self.resolved(&link),
            CmEventKind::RouteResolved => self.routed(&link),
            CmEventKind::Established => self.established(&link, &event, sink),
            CmEventKind::Rejected => Err(self.rejected(&event)),
            CmEventKind::Failed => Err(event.error()),
            CmEventKind::Removed => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the device was removed")),
            CmEventKind::Disconnected => {
                // Messages that the peer sent before have arrived already.
                self.poll_queue_sets(sink);
                Err(closed_by_peer())
            }
            CmEventKind::Request | CmEventKind::Other => Ok(()),
        };
        if let Err(error) = handled {
            link.report_failure(error, sink);
        }
    }

    fn resolved(&self, link: &Arc<VerbsLink>) -> io::Result<()> {
        let Some(id) = link.id() else { return Ok(()) };
        if let Some(context) = id.context() {
            check_port(context, id.port_of_device())?;
        }
        id.resolve_route(RESOLVE_TIMEOUT)
    }

    fn routed(&self, link: &Arc<VerbsLink>) -> io::Result<()> {
        let Some(id) = link.id() else { return Ok(()) };
        let context = id.context().ok_or_else(|| io::Error::other("the address leads to no device"))?;
        let device = self.shared.device(context)?;
        link.open(&device)?;
        let Some(hello) = link.hello() else { return Ok(()) };
        id.connect(&hello.encode(), NO_READS)
    }

    fn established(&self, link: &Arc<VerbsLink>, event: &CmEvent, sink: &mut dyn Sink) -> io::Result<()> {
        if link.dialled {
            link.set_peer(CmHello::decode(&event.data, self.shared.versions).map_err(objection)?);
            sink.chunk(link.key, STAGE);
            sink.connected(link.key);
        }
        if link.is_closed() { Ok(()) } else { link.start_rma() }
    }

    /// A peer dials.
    fn requested(&self, id: Arc<CmId>, event: &CmEvent, sink: &mut dyn Sink) {
        if !self.shared.listeners.lock().contains_key(&event.listener) {
            return;
        }
        let peer = id.peer().map_or_else(Address::nowhere, Address::verbs);
        let met = CmHello::decode(&event.data, self.shared.versions).map_err(objection).and_then(|hello| {
            let context = id.context().ok_or_else(|| io::Error::other("the connection has no device"))?;
            Ok((hello, self.shared.device(context)?))
        });
        let (hello, device) = match met {
            Ok(both) => both,
            Err(error) => {
                let _ = id.reject(&wire::encode_refusal(self.shared.versions, &error.to_string()));
                return defer(move || tracing::warn!(target: "calomel::verbs", %peer, %error, "a peer is refused"));
            }
        };
        let key = sink.accepted(peer);
        let link = VerbsLink::new(key, &self.shared, id.clone(), false);
        self.shared.links.lock().insert(id.number(), link.clone());
        sink.attach(key, link.clone());
        let accepted = link.open(&device).and_then(|()| {
            link.set_peer(hello);
            let own = link.hello().ok_or(io::ErrorKind::NotConnected)?;
            id.accept(&own.encode(), NO_READS)
        });
        match accepted {
            Ok(()) => sink.chunk(key, STAGE),
            Err(error) => {
                let _ = id.reject(&wire::encode_refusal(self.shared.versions, &error.to_string()));
                link.report_failure(error, sink);
            }
        }
    }

    /// Why the peer rejected the connection.
    fn rejected(&self, event: &CmEvent) -> io::Error {
        if event.status == NO_SUCH_SERVICE {
            return io::Error::new(io::ErrorKind::ConnectionRefused, "no process listens at this address");
        }
        let refused = |why: &str| io::Error::new(io::ErrorKind::ConnectionRefused, format!("it refuses: {why}"));
        match wire::decode_refusal(&event.data, self.shared.versions) {
            Err(HelloError::Version(low, high)) => objection(HelloError::Version(low, high)),
            Ok(reason) if !reason.is_empty() => refused(&reason),
            _ => refused(&event.error().to_string()),
        }
    }
}

fn objection(objection: HelloError) -> io::Error {
    match objection {
        HelloError::Foreign => io::Error::new(io::ErrorKind::InvalidData, "the peer is not a calomel engine"),
        HelloError::Malformed => io::Error::new(io::ErrorKind::InvalidData, "its connection parameters are invalid"),
        HelloError::Version(low, high) => io::Error::new(io::ErrorKind::InvalidData, OtherVersion { low, high }),
    }
}
