//! What a provider offers at an address: `struct fi_info`.

use std::ffi::{CStr, CString};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::ptr::{self, NonNull};

use super::check;
use super::library::{Library, library};
use super::raw::{
    API_VERSION, FI_CONTEXT, FI_CONTEXT2, FI_DELIVERY_COMPLETE, FI_DIRECTED_RECV, FI_EP_RDM, FI_MR_ALLOCATED, FI_MR_ENDPOINT,
    FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_NUMERICHOST, FI_ORDER_SAS, FI_PROGRESS_MANUAL, FI_READ, FI_RECV, FI_REMOTE_READ,
    FI_REMOTE_WRITE, FI_RM_ENABLED, FI_RMA, FI_SEND, FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SOURCE, FI_TAGGED,
    FI_THREAD_SAFE, FI_WRITE, FiInfo,
};

/// What an endpoint is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Purpose {
    /// Messages, and payloads that go in them.
    Messages,
    /// Messages, and memory that peers reach by RMA.
    RmaTarget,
    /// RMA to memory of peers. A write completes when it has been placed in their memory.
    RmaInitiator,
}

/// A provider at an address, with the capabilities that are needed here: tagged messages between reliable datagram endpoints,
/// in the order in which they were sent.
pub(in super::super) struct Info {
    raw: NonNull<FiInfo>,
    /// Longest message that is copied when it is sent.
    pub inject: usize,
    /// Most segments of memory of one send, and of one receive.
    pub segments: usize,
    /// Longest message, and longest RMA operation.
    pub longest: usize,
    /// How memory is registered (`FI_MR_…`), and the length of its keys, in bytes.
    pub(super) mr_mode: i32,
    pub(super) mr_key_size: usize,
    /// Bytes that may go beside a message, and come with the completion of its receive.
    pub(super) cq_data: usize,
    /// Names of endpoints are bytes that only the provider understands, not socket addresses.
    pub opaque_names: bool,
}

// SAFETY: it is not changed after it was made, and any thread may read or free it.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

/// A list that `fi_getinfo` has allocated, or one entry.
struct InfoList(*mut FiInfo, &'static Library);

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: the library has allocated it, and it is not used any more. A null pointer is allowed.
        unsafe { (self.1.freeinfo)(self.0) };
    }
}

impl Info {
    /// What this provider offers, at this address of this host if there is one. `None`: the provider is not there, or not at
    /// this address.
    pub fn of(provider: &CStr, source: Option<SocketAddr>, purpose: Purpose) -> io::Result<Option<Info>> {
        let library = library().map_err(|reason| io::Error::new(io::ErrorKind::Unsupported, reason))?;
        // SAFETY: a null pointer asks for an empty structure.
        let hints = InfoList(unsafe { (library.dupinfo)(ptr::null()) }, library);
        fill_hints(&hints, provider, purpose)?;
        let list = query(library, hints.0, source)?;
        let mut at = list.0;
        while let Some(entry) = NonNull::new(at) {
            // SAFETY: it is an entry of the list, whose parts the library has set.
            let attributes = unsafe { entry.as_ref() };
            if provider_of(attributes) == Some(provider) {
                return Info::copy(library, attributes).map(Some);
            }
            at = attributes.next;
        }
        Ok(None)
    }

    /// The names of the providers that the library has on this machine.
    pub fn providers() -> Vec<String> {
        let Ok(library) = library() else { return Vec::new() };
        let Ok(list) = query(library, ptr::null(), None) else { return Vec::new() };
        let mut names = Vec::new();
        let mut at = list.0;
        while let Some(entry) = NonNull::new(at) {
            // SAFETY: it is an entry of the list, whose parts the library has set.
            let attributes = unsafe { entry.as_ref() };
            let name = provider_of(attributes).unwrap_or_default().to_string_lossy().into_owned();
            if !names.contains(&name) {
                names.push(name);
            }
            at = attributes.next;
        }
        names
    }

    /// The version of the library.
    pub fn library_version() -> Option<String> {
        library().ok().map(|library| library.version.to_string())
    }

    /// The same, at another address of this host. Where names are opaque, the provider chooses another name.
    pub fn at(&self, source: SocketAddr) -> io::Result<Info> {
        let library = library().map_err(|reason| io::Error::new(io::ErrorKind::Unsupported, reason))?;
        // SAFETY: the entry is there.
        let mut copy = Info::copy(library, unsafe { self.raw.as_ref() })?;
        if self.opaque_names {
            copy.opaque_names = true;
            return Ok(copy);
        }
        let name = EndpointName::of(source);
        // SAFETY: the copy is this function's own.
        let entry = unsafe { &mut *copy.raw.as_ptr() };
        if entry.src_addrlen != name.bytes().len() || entry.src_addr.is_null() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the addresses are of different kinds"));
        }
        // SAFETY: the entry has room for so many bytes.
        unsafe { ptr::copy_nonoverlapping(name.bytes().as_ptr(), entry.src_addr.cast::<u8>(), entry.src_addrlen) };
        Ok(copy)
    }

    fn copy(library: &'static Library, entry: &FiInfo) -> io::Result<Info> {
        // SAFETY: the entry is part of a list that is there.
        let raw = NonNull::new(unsafe { (library.dupinfo)(entry) }).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the library sets the attributes of each entry.
        let sending = unsafe { &*entry.tx_attr };
        // SAFETY: as above.
        let receiving = unsafe { &*entry.rx_attr };
        // SAFETY: as above.
        let endpoint = unsafe { &*entry.ep_attr };
        // SAFETY: as above.
        let domain = unsafe { &*entry.domain_attr };
        Ok(Info {
            raw,
            longest: endpoint.max_msg_size,
            mr_mode: domain.mr_mode,
            mr_key_size: domain.mr_key_size,
            inject: sending.inject_size,
            segments: sending.iov_limit.min(receiving.iov_limit),
            cq_data: domain.cq_data_size,
            opaque_names: ![FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6].contains(&entry.addr_format),
        })
    }

    pub(super) fn as_ptr(&self) -> *mut FiInfo {
        self.raw.as_ptr()
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        if let Ok(library) = library() {
            drop(InfoList(self.raw.as_ptr(), library));
        }
    }
}

fn fill_hints(hints: &InfoList, provider: &CStr, purpose: Purpose) -> io::Result<()> {
    // SAFETY: it was allocated by the library, and no one else has it.
    let info = unsafe { hints.0.as_mut() }.ok_or(io::ErrorKind::OutOfMemory)?;
    info.caps = FI_TAGGED | FI_SEND | FI_RECV | FI_DIRECTED_RECV;
    info.caps |= match purpose {
        Purpose::Messages => 0,
        Purpose::RmaTarget => FI_RMA | FI_REMOTE_READ | FI_REMOTE_WRITE,
        Purpose::RmaInitiator => FI_RMA | FI_READ | FI_WRITE,
    };
    // Each operation brings memory for the provider.
    info.mode = FI_CONTEXT | FI_CONTEXT2;
    // SAFETY: `fi_dupinfo` allocates the attributes too.
    let sending = unsafe { &mut *info.tx_attr };
    sending.msg_order = FI_ORDER_SAS;
    if purpose == Purpose::RmaInitiator {
        sending.op_flags = FI_DELIVERY_COMPLETE;
    }
    // SAFETY: as above.
    let receiving = unsafe { &mut *info.rx_attr };
    receiving.msg_order = FI_ORDER_SAS;
    // SAFETY: as above.
    let endpoint = unsafe { &mut *info.ep_attr };
    endpoint.type_ = FI_EP_RDM;
    // SAFETY: as above.
    let domain = unsafe { &mut *info.domain_attr };
    domain.threading = FI_THREAD_SAFE;
    domain.data_progress = FI_PROGRESS_MANUAL;
    domain.control_progress = FI_PROGRESS_MANUAL;
    domain.resource_mgmt = FI_RM_ENABLED;
    // Without FI_MR_LOCAL: a provider that needs registered buffers registers them by itself.
    domain.mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    // SAFETY: as above.
    let fabric = unsafe { &mut *info.fabric_attr };
    // SAFETY: it copies a text that ends in 0. `fi_freeinfo` frees the copy.
    fabric.prov_name = unsafe { libc::strdup(provider.as_ptr()) };
    Ok(())
}

/// `fi_getinfo`; an empty list where nothing suits.
fn query(library: &'static Library, hints: *const FiInfo, source: Option<SocketAddr>) -> io::Result<InfoList> {
    let (node, service);
    let (mut node_text, mut service_text, mut flags) = (ptr::null(), ptr::null(), 0);
    if let Some(source) = source {
        node = CString::new(source.ip().to_string())?;
        service = CString::new(source.port().to_string())?;
        (node_text, service_text, flags) = (node.as_ptr(), service.as_ptr(), FI_SOURCE | FI_NUMERICHOST);
    }
    let mut list = ptr::null_mut();
    // SAFETY: the texts end in 0, and the hints are null or were made by the library.
    let returned = unsafe { (library.getinfo)(API_VERSION, node_text, service_text, flags, hints, &raw mut list) };
    if returned == -libc::ENODATA {
        return Ok(InfoList(ptr::null_mut(), library));
    }
    check("fi_getinfo", returned)?;
    Ok(InfoList(list, library))
}

fn provider_of(info: &FiInfo) -> Option<&CStr> {
    // SAFETY: the library sets the attributes of each entry.
    let fabric = unsafe { info.fabric_attr.as_ref() }?;
    let name = NonNull::new(fabric.prov_name)?;
    // SAFETY: it is a text that lives as long as the entry.
    Some(unsafe { CStr::from_ptr(name.as_ptr()) })
}

/// Longest name of an endpoint, in bytes, of any provider.
pub(in super::super) const MAX_NAME: usize = 128;

/// The name of an endpoint as its provider has it: a socket address, `struct sockaddr_in` or `struct sockaddr_in6`, or bytes that
/// only the provider understands.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(in super::super) struct EndpointName(Vec<u8>);

const IN: usize = size_of::<libc::sockaddr_in>();
const IN6: usize = size_of::<libc::sockaddr_in6>();

impl EndpointName {
    /// Bytes that only the provider understands. `None`: there are none, or too many.
    pub fn opaque(bytes: &[u8]) -> Option<EndpointName> {
        (1..=MAX_NAME).contains(&bytes.len()).then(|| EndpointName(bytes.to_vec()))
    }

    /// `None` where the bytes are no socket address.
    pub fn from_bytes(bytes: &[u8]) -> Option<EndpointName> {
        let name = EndpointName(bytes.to_vec());
        // Bytes without a meaning would make two names of one address.
        name.socket().filter(|socket| EndpointName::of(*socket) == name).map(|_| name)
    }

    pub fn of(socket: SocketAddr) -> EndpointName {
        let mut bytes = Vec::with_capacity(IN6);
        let family = if socket.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        bytes.extend_from_slice(&(family as libc::sa_family_t).to_ne_bytes());
        bytes.extend_from_slice(&socket.port().to_be_bytes());
        match socket {
            SocketAddr::V4(v4) => {
                bytes.extend_from_slice(&v4.ip().octets());
                bytes.resize(IN, 0);
            }
            SocketAddr::V6(v6) => {
                bytes.extend_from_slice(&[0; 4]);
                bytes.extend_from_slice(&v6.ip().octets());
                bytes.extend_from_slice(&v6.scope_id().to_ne_bytes());
            }
        }
        EndpointName(bytes)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Where it is a socket address. Opaque bytes may look like one by chance.
    pub fn socket(&self) -> Option<SocketAddr> {
        let bytes = &self.0;
        let family = libc::c_int::from(libc::sa_family_t::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
        match (family, bytes.len()) {
            (libc::AF_INET, IN) => {
                let ip: [u8; 4] = bytes[4..8].try_into().ok()?;
                Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(ip)), port))
            }
            (libc::AF_INET6, IN6) => {
                let ip: [u8; 16] = bytes[8..24].try_into().ok()?;
                let scope = u32::from_ne_bytes(bytes[24..28].try_into().ok()?);
                Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_name_has_one_form() {
        for text in ["10.1.2.3:7000", "[::1]:65535", "[fe80::1%3]:9"] {
            let socket: SocketAddr = text.parse().unwrap();
            let name = EndpointName::of(socket);
            assert_eq!(name.socket(), Some(socket));
            assert_eq!(EndpointName::from_bytes(name.bytes()), Some(name.clone()));
            let mut longer = name.bytes().to_vec();
            longer.push(0);
            assert_eq!(EndpointName::from_bytes(&longer), None);
            assert_eq!(EndpointName::from_bytes(&longer[..10]), None);
        }
        let mut padded = EndpointName::of("10.1.2.3:7000".parse().unwrap()).bytes().to_vec();
        padded[15] = 1;
        assert_eq!(EndpointName::from_bytes(&padded), None, "the padding is not zero");
        assert_eq!(EndpointName::from_bytes(&[]), None);
        for (len, possible) in [(0, false), (1, true), (MAX_NAME, true), (MAX_NAME + 1, false)] {
            assert_eq!(EndpointName::opaque(&vec![7; len]).is_some(), possible, "{len} bytes");
        }
    }
}
