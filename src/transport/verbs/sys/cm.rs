//! The connection manager.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use rdma_sys as raw;
use rdma_sys::rdma_cm_event_type as kind;

use super::context::Context;
use super::path::{ConnectionPath, no_attributes};
use super::{do_not_block, errno, failed, is_forked, text};
use crate::deferred_log::defer;

/// Delivers the connection manager's events.
pub(in super::super) struct EventChannel(NonNull<raw::rdma_event_channel>);

// SAFETY: the functions of the connection manager may be called by any thread.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum CmEventKind {
    AddressResolved,
    RouteResolved,
    Request,
    Established,
    Rejected,
    Disconnected,
    /// The device is being removed.
    Removed,
    /// An operation has failed.
    Failed,
    Other,
}

/// Outstanding RDMA reads: those of the peer's that are answered, and this side's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct ReadDepth {
    pub answered: u8,
    pub asked: u8,
}

/// An event of the connection manager.
pub(in super::super) struct CmEvent {
    pub kind: CmEventKind,
    pub name: &'static str,
    /// The connection it belongs to; see [`CmId::number`].
    pub id: usize,
    /// A peer dials: the new connection.
    pub new: Option<Arc<CmId>>,
    /// The listener that the peer dialled.
    pub listener: usize,
    /// 0, a negative error number, or the reason of a rejection.
    pub status: i32,
    /// Private data from the peer.
    pub data: Vec<u8>,
}

impl CmEvent {
    pub fn error(&self) -> io::Error {
        if self.status < 0 {
            return failed(self.name, &io::Error::from_raw_os_error(-self.status));
        }
        io::Error::other(format!("{} (status {})", self.name, self.status))
    }
}

impl EventChannel {
    pub fn new() -> io::Result<Arc<EventChannel>> {
        // SAFETY: the function takes nothing.
        let made = unsafe { raw::rdma_create_event_channel() };
        let made = NonNull::new(made).ok_or_else(|| failed("rdma_create_event_channel", &io::Error::last_os_error()))?;
        let channel = EventChannel(made);
        do_not_block(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub fn fd(&self) -> RawFd {
        // SAFETY: it was made by `new`.
        unsafe { (*self.0.as_ptr()).fd }
    }

    /// The next event; `None` when there is none now.
    pub fn next(self: &Arc<EventChannel>) -> io::Result<Option<CmEvent>> {
        let mut event = null_mut();
        // SAFETY: the channel is there, and the pointer is to a pointer. It does not block: see `new`.
        if unsafe { raw::rdma_get_cm_event(self.0.as_ptr(), &raw mut event) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(failed("rdma_get_cm_event", &error)) };
        }
        // SAFETY: it was given above, and lives until it is acknowledged.
        let found = unsafe { &*event };
        let taken = self.take(found);
        // SAFETY: the event is acknowledged once, and nothing refers to it any more.
        errno("rdma_ack_cm_event", unsafe { raw::rdma_ack_cm_event(event) })?;
        Ok(Some(taken))
    }

    fn take(self: &Arc<EventChannel>, event: &raw::rdma_cm_event) -> CmEvent {
        let what = match event.event {
            kind::RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddressResolved,
            kind::RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
            kind::RDMA_CM_EVENT_CONNECT_REQUEST => CmEventKind::Request,
            kind::RDMA_CM_EVENT_ESTABLISHED => CmEventKind::Established,
            kind::RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected,
            kind::RDMA_CM_EVENT_DISCONNECTED => CmEventKind::Disconnected,
            kind::RDMA_CM_EVENT_DEVICE_REMOVAL => CmEventKind::Removed,
            kind::RDMA_CM_EVENT_ADDR_ERROR
            | kind::RDMA_CM_EVENT_ROUTE_ERROR
            | kind::RDMA_CM_EVENT_CONNECT_ERROR
            | kind::RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Failed,
            _ => CmEventKind::Other,
        };
        let talks = matches!(what, CmEventKind::Request | CmEventKind::Established | CmEventKind::Rejected);
        let mut data = Vec::new();
        if talks {
            // SAFETY: all connections are reliable ones, whose events have this parameter.
            let received = unsafe { event.param.conn };
            if !received.private_data.is_null() {
                // SAFETY: the data lives as long as the event, and has this length.
                let bytes =
                    unsafe { std::slice::from_raw_parts(received.private_data.cast::<u8>(), received.private_data_len.into()) };
                data.extend_from_slice(bytes);
            }
        }
        // SAFETY: the function takes any number.
        let name = unsafe { raw::rdma_event_str(event.event) };
        let own = NonNull::new(event.id).filter(|_| what == CmEventKind::Request);
        CmEvent {
            kind: what,
            // SAFETY: it is one of the library's constants.
            name: unsafe { text(name) },
            id: event.id.addr(),
            new: own.map(|raw| Arc::new(CmId { raw, _channel: self.clone() })),
            listener: event.listen_id.addr(),
            status: event.status,
            data,
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: each identifier that uses it holds an `Arc` of it, so there is none.
        unsafe { raw::rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

/// One end of a connection, or a listener.
pub(in super::super) struct CmId {
    raw: NonNull<raw::rdma_cm_id>,
    _channel: Arc<EventChannel>,
}

// SAFETY: the functions of the connection manager may be called by any thread.
unsafe impl Send for CmId {}
// SAFETY: as above.
unsafe impl Sync for CmId {}

/// An address in the system's format.
union RawSocketAddress {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

fn to_system(address: SocketAddr) -> RawSocketAddress {
    match address {
        SocketAddr::V4(address) => RawSocketAddress {
            v4: libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
                sin_zero: [0; 8],
            },
        },
        SocketAddr::V6(address) => RawSocketAddress {
            v6: libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            },
        },
    }
}

/// # Safety
/// The storage must hold an address of the kind that its family names, if that is one of the two.
unsafe fn from_system(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let place: *const libc::sockaddr_storage = storage;
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the caller promises it; the storage is large enough, and aligned for both.
            let found = unsafe { &*place.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(found.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let found = unsafe { &*place.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(found.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(found.sin6_port), found.sin6_flowinfo, found.sin6_scope_id).into())
        }
        _ => None,
    }
}

impl CmId {
    pub fn new(channel: &Arc<EventChannel>) -> io::Result<Arc<CmId>> {
        let mut made = null_mut();
        let space = raw::rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is there as long as the identifier, and the pointer is to a pointer.
        let returned = unsafe { raw::rdma_create_id(channel.0.as_ptr(), &raw mut made, null_mut(), space) };
        errno("rdma_create_id", returned)?;
        let raw = NonNull::new(made).ok_or_else(|| io::Error::other("rdma_create_id made nothing"))?;
        Ok(Arc::new(CmId { raw, _channel: channel.clone() }))
    }

    pub(super) fn as_ptr(&self) -> *mut raw::rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Identifies it in events.
    pub fn number(&self) -> usize {
        self.raw.as_ptr().addr()
    }

    pub fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let mut address = to_system(address);
        // SAFETY: the identifier is there, and the address is one.
        errno("rdma_bind_addr", unsafe { raw::rdma_bind_addr(self.as_ptr(), (&raw mut address).cast()) })
    }

    pub fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the identifier is there.
        errno("rdma_listen", unsafe { raw::rdma_listen(self.as_ptr(), backlog) })
    }

    /// Starts resolving the device that leads to an address.
    pub fn resolve_address(&self, address: SocketAddr, timeout: Duration) -> io::Result<()> {
        let mut address = to_system(address);
        let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the identifier is there, and the address is one.
        let begun = unsafe { raw::rdma_resolve_addr(self.as_ptr(), null_mut(), (&raw mut address).cast(), timeout) };
        errno("rdma_resolve_addr", begun)
    }

    pub fn resolve_route(&self, timeout: Duration) -> io::Result<()> {
        let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the identifier is there.
        errno("rdma_resolve_route", unsafe { raw::rdma_resolve_route(self.as_ptr(), timeout) })
    }

    pub fn connect(&self, data: &[u8], reads: ReadDepth) -> io::Result<()> {
        let mut parameters = parameters(data, reads);
        // SAFETY: the identifier is there, and the parameters and their data outlive the call.
        errno("rdma_connect", unsafe { raw::rdma_connect(self.as_ptr(), &raw mut parameters) })
    }

    pub fn accept(&self, data: &[u8], reads: ReadDepth) -> io::Result<()> {
        let mut parameters = parameters(data, reads);
        // SAFETY: the identifier is there, and the parameters and their data outlive the call.
        errno("rdma_accept", unsafe { raw::rdma_accept(self.as_ptr(), &raw mut parameters) })
    }

    pub fn reject(&self, data: &[u8]) -> io::Result<()> {
        let len = u8::try_from(data.len()).unwrap_or(0);
        // SAFETY: the identifier is there, and the data outlives the call.
        errno("rdma_reject", unsafe { raw::rdma_reject(self.as_ptr(), data.as_ptr().cast(), len) })
    }

    pub fn disconnect(&self) {
        // For the system, a forked child's identifier is its parent's.
        if is_forked() {
            return;
        }
        // SAFETY: the identifier is there. It may be disconnected already.
        let _ = unsafe { raw::rdma_disconnect(self.as_ptr()) };
    }

    /// The device, once it is known.
    pub fn context(&self) -> Option<Context> {
        // SAFETY: the identifier is there.
        let context = unsafe { (*self.as_ptr()).verbs };
        // SAFETY: the connection manager has opened it.
        unsafe { Context::new(context) }
    }

    /// How to reach the peer, for further queue pairs.
    pub fn path(&self) -> io::Result<ConnectionPath> {
        let asked = |state: raw::ibv_qp_state::Type| {
            let mut found = no_attributes();
            found.qp_state = state;
            let mut which = 0;
            // SAFETY: the identifier is there, and the pointers are to room for what is written.
            let returned = unsafe { raw::rdma_init_qp_attr(self.as_ptr(), &raw mut found, &raw mut which) };
            errno("rdma_init_qp_attr", returned).map(|()| found)
        };
        use raw::ibv_qp_state::{IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
        let (prepared, mut receiving) = (asked(IBV_QPS_INIT)?, asked(IBV_QPS_RTR)?);
        receiving.pkey_index = prepared.pkey_index;
        receiving.ah_attr.port_num = prepared.port_num;
        Ok(ConnectionPath::new(&receiving, &asked(IBV_QPS_RTS)?))
    }

    pub fn port_of_device(&self) -> u8 {
        // SAFETY: the identifier is there.
        unsafe { (*self.as_ptr()).port_num }
    }

    fn addresses(&self) -> &raw::rdma_addr {
        // SAFETY: the identifier is there, and its addresses are not written any more once they have been found.
        unsafe { &(*self.as_ptr()).route.addr }
    }

    pub fn local(&self) -> Option<SocketAddr> {
        // SAFETY: any of the union's kinds is a storage, as far as it goes, and zeros behind that.
        let storage = unsafe { &self.addresses().src_addr_union.src_storage };
        // SAFETY: the connection manager keeps addresses there.
        unsafe { from_system(storage) }
    }

    pub fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: any of the union's kinds is a storage, as far as it goes, and zeros behind that.
        let storage = unsafe { &self.addresses().dst_addr_union.dst_storage };
        // SAFETY: the connection manager keeps addresses there.
        unsafe { from_system(storage) }
    }
}

fn parameters(data: &[u8], reads: ReadDepth) -> raw::rdma_conn_param {
    raw::rdma_conn_param {
        private_data: data.as_ptr().cast(),
        private_data_len: u8::try_from(data.len()).unwrap_or(0),
        responder_resources: reads.answered,
        initiator_depth: reads.asked,
        flow_control: 1,
        retry_count: 7,
        // Credits keep the peer from sending more than there is room for; 7 means to retry without end, all the same.
        rnr_retry_count: 7,
        srq: 1,
        qp_num: 0,
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: the identifier came from the connection manager; its queue pair holds an `Arc` of it, so it has none. All of
        // its events have been acknowledged: see `EventChannel::next`.
        if let Err(error) = errno("rdma_destroy_id", unsafe { raw::rdma_destroy_id(self.as_ptr()) }) {
            defer(move || tracing::error!(target: "calomel::verbs", %error, "a connection can't be freed"));
        }
    }
}
