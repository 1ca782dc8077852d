//! An address vector: the addresses of peers, under the numbers that sends take.

use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use super::domain::Domain;
use super::fabric::{close, note};
use super::info::EndpointName;
use super::raw::{AvAttr, FI_ADDR_UNSPEC, FiAddr, FidAv, FidDomain};
use super::{check, failed};
use crate::fork::CreatorProcess;

pub(in super::super) struct Av {
    raw: NonNull<FidAv>,
    /// The length of each name: that of this side's endpoint.
    name_len: OnceLock<usize>,
    _domain: Arc<Domain>,
    process: CreatorProcess,
}

// SAFETY: the functions of libfabric may be called by any thread (FI_THREAD_SAFE).
unsafe impl Send for Av {}
// SAFETY: as above.
unsafe impl Sync for Av {}

/// The number of a peer's address in an address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct PeerAddress(pub(super) FiAddr);

impl PeerAddress {
    /// Of a peer whose name is not known yet. Nothing can be sent there.
    pub const UNKNOWN: PeerAddress = PeerAddress(FI_ADDR_UNSPEC);
}

impl Av {
    pub fn open(domain: &Arc<Domain>) -> io::Result<Arc<Av>> {
        let mut attributes =
            AvAttr { type_: 0, rx_ctx_bits: 0, count: 0, ep_per_node: 0, name: ptr::null(), map_addr: ptr::null_mut(), flags: 0 };
        // SAFETY: the domain is open, and its table has this function in all versions.
        let open = unsafe { FidDomain::ops(domain.as_ptr()) }.av_open;
        let mut raw = ptr::null_mut();
        // SAFETY: the domain is open, and the attributes are complete.
        let returned = unsafe { open(domain.as_ptr(), &raw mut attributes, &raw mut raw, ptr::null_mut()) };
        check("fi_av_open", returned)?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        Ok(Arc::new(Av { raw, name_len: OnceLock::new(), _domain: domain.clone(), process: CreatorProcess::this() }))
    }

    pub(super) fn as_ptr(&self) -> *mut FidAv {
        self.raw.as_ptr()
    }

    /// All names in it are of this length.
    pub(super) fn set_name_len(&self, len: usize) {
        self.name_len.get_or_init(|| len);
    }

    /// Adds an address. An error where it is not as long as that of this side's endpoint: the provider reads as many bytes.
    pub fn insert(&self, name: &EndpointName) -> io::Result<PeerAddress> {
        if self.name_len.get() != Some(&name.bytes().len()) {
            let what = "it names an endpoint in another way than the provider does";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        // SAFETY: the vector is open, and its table has this function in all versions.
        let insert = unsafe { FidAv::ops(self.as_ptr()) }.insert;
        let mut number = FI_ADDR_UNSPEC;
        let bytes = name.bytes().as_ptr().cast();
        // SAFETY: it is one address, as long as those of the domain are, and there is room for one number.
        let inserted = unsafe { insert(self.as_ptr(), bytes, 1, &raw mut number, 0, ptr::null_mut()) };
        match inserted {
            1 if number != FI_ADDR_UNSPEC => Ok(PeerAddress(number)),
            error if error < 0 => Err(failed("fi_av_insert", -error)),
            _ => Err(failed("fi_av_insert", libc::EINVAL)),
        }
    }

    /// Removes an address that is not used any more.
    pub fn remove(&self, PeerAddress(mut number): PeerAddress) {
        // SAFETY: the vector is open, and its table has this function in all versions.
        let remove = unsafe { FidAv::ops(self.as_ptr()) }.remove;
        // SAFETY: it is a number that `insert` has returned. An error leaves it in the vector.
        let _: c_int = unsafe { remove(self.as_ptr(), &raw mut number, 1, 0) };
    }
}

impl Drop for Av {
    fn drop(&mut self) {
        if !self.process.is_forked_child() {
            // SAFETY: it is open, and the endpoints that it is bound to are closed, since they hold an `Arc` of it.
            note(unsafe { close("fi_close of an address vector", self.raw.as_ptr().cast()) });
        }
    }
}
