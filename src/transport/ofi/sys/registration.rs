//! Users' regions, as registered for RMA by peers.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::check;
use super::domain::Domain;
use super::endpoint::Endpoint;
use super::fabric::{close, note};
use super::raw::{
    FI_ENABLE, FI_MR_ENDPOINT, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_REMOTE_READ, FI_REMOTE_WRITE, Fid, FidDomain, FidEp, FidMr,
};
use crate::fork::CreatorProcess;
use crate::memory::{DeviceRegistration, IoVec, Region};
use crate::random;
use crate::sync::Mutex;

/// How long a thread that wants memory back waits for a provider that calls its registration busy.
const PATIENCE: Duration = Duration::from_secs(10);

/// What peers may do with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct RemoteRights {
    pub read: bool,
    pub write: bool,
}

/// A segment of a peer's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct RemoteExtent {
    pub address: u64,
    pub len: u64,
    pub key: u64,
}

/// One segment's registration. Closing it revokes its key.
struct MemoryRegistration {
    raw: NonNull<FidMr>,
    closed: bool,
    _domain: Arc<Domain>,
    process: CreatorProcess,
}

// SAFETY: the functions of libfabric may be called by any thread (FI_THREAD_SAFE).
unsafe impl Send for MemoryRegistration {}

impl MemoryRegistration {
    /// Registers memory; returns its segment as peers name it, too.
    ///
    /// # Safety
    /// The endpoint must be an open one of the domain. Until the registration is closed, the memory must stay where it is, be
    /// valid for reads, and, where peers may write it, for writes, without any reference to it.
    unsafe fn new(
        domain: &Arc<Domain>,
        endpoint: NonNull<FidEp>,
        memory: IoVec,
        rights: RemoteRights,
    ) -> io::Result<(MemoryRegistration, RemoteExtent)> {
        let info = &domain.info;
        let has = |mode| info.mr_mode & mode != 0;
        let access = if rights.read { FI_REMOTE_READ } else { 0 } | if rights.write { FI_REMOTE_WRITE } else { 0 };
        // Where the provider chooses no key, this is one that peers can't guess.
        let bits = 8 * info.mr_key_size.min(8) as u32;
        let mask = u64::MAX.checked_shr(64 - bits).unwrap_or(0);
        let wanted = if has(FI_MR_PROV_KEY) { 0 } else { u64::from_ne_bytes(random::from_system()?) & mask };
        let (address, len) = (memory.iov_base, memory.iov_len);
        let fid = domain.as_ptr().cast::<Fid>();
        // SAFETY: the domain is open, and has this table in all versions.
        let register = unsafe { FidDomain::mr(domain.as_ptr()) }.reg;
        let mut raw: *mut FidMr = ptr::null_mut();
        // SAFETY: the memory is as the caller promises, and there is room for a pointer.
        let returned =
            unsafe { register(fid, address.cast_const(), len, access, 0, wanted, 0, &raw mut raw, ptr::null_mut::<c_void>()) };
        check("fi_mr_reg", returned)?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        let registration = MemoryRegistration { raw, closed: false, _domain: domain.clone(), process: CreatorProcess::this() };
        if has(FI_MR_ENDPOINT) {
            // SAFETY: the endpoint is open, as the caller promises, and so is the registration.
            unsafe { registration.bind(endpoint) }?;
        }
        // SAFETY: it is open, and the library has set the key.
        let key = unsafe { raw.as_ref() }.key;
        if key == u64::MAX {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the provider has keys of more than 64 bits"));
        }
        let address = if has(FI_MR_VIRT_ADDR) { address.addr() as u64 } else { 0 };
        Ok((registration, RemoteExtent { address, len: len as u64, key }))
    }

    /// Lets peers reach the memory through the endpoint, where that takes a step of its own.
    ///
    /// # Safety
    /// The endpoint must be an open one of the same domain.
    unsafe fn bind(&self, endpoint: NonNull<FidEp>) -> io::Result<()> {
        let fid = self.raw.as_ptr().cast::<Fid>();
        // SAFETY: it is open, and has this table in all versions.
        let operations = unsafe { Fid::ops(fid) };
        // SAFETY: as the caller promises.
        check("fi_mr_bind", unsafe { (operations.bind)(fid, endpoint.as_ptr().cast(), 0) })?;
        // SAFETY: the command takes nothing.
        check("fi_mr_enable", unsafe { (operations.control)(fid, FI_ENABLE, ptr::null_mut()) })
    }

    /// Revokes the key: when this has succeeded, the provider does not access the memory at the request of any peer.
    fn close(&mut self) -> io::Result<()> {
        if self.closed || self.process.is_forked_child() {
            return Ok(());
        }
        // SAFETY: it is open: it is not closed again after success.
        unsafe { close("fi_close of a registration", self.raw.as_ptr().cast()) }?;
        self.closed = true;
        Ok(())
    }
}

impl Drop for MemoryRegistration {
    /// Only one that could not be bound, or whose closing has failed, is still open: no peer was told its key, or the memory stays.
    fn drop(&mut self) {
        note(self.close());
    }
}

/// A user's region, as registered with one domain. What registers it closes it, too: before the memory goes anywhere, and before
/// the endpoint is closed through which peers reach it.
pub(in super::super) struct RegisteredRegion {
    /// Identifies the endpoint.
    target: u64,
    rights: RemoteRights,
    extents: Vec<RemoteExtent>,
    open: Mutex<Vec<MemoryRegistration>>,
    process: CreatorProcess,
}

impl RegisteredRegion {
    /// A registration of the region: an existing one of the same endpoint and rights, or a new one. `None` when the region's gate
    /// is closed.
    pub fn of(
        region: &Region,
        endpoint: &Endpoint,
        target: u64,
        rights: RemoteRights,
    ) -> Option<io::Result<Arc<RegisteredRegion>>> {
        if let Some(found) = region.registration(|found: &RegisteredRegion| found.target == target && found.rights == rights) {
            return Some(Ok(found));
        }
        endpoint.register(|domain, raw| region.register(|pieces| RegisteredRegion::new(domain, raw, target, pieces, rights)))
    }

    fn new(
        domain: &Arc<Domain>,
        endpoint: NonNull<FidEp>,
        target: u64,
        pieces: &[IoVec],
        rights: RemoteRights,
    ) -> io::Result<RegisteredRegion> {
        let (open, process) = (Mutex::default(), CreatorProcess::this());
        let registered = RegisteredRegion { target, rights, extents: Vec::new(), open, process };
        let mut extents = Vec::new();
        for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
            // SAFETY: the caller keeps the endpoint open. The region closes its gate, and then ends this registration, before its
            // memory goes anywhere. Where writing is allowed there is no reference to it until then.
            match unsafe { MemoryRegistration::new(domain, endpoint, *piece, rights) } {
                Ok((registration, extent)) => {
                    registered.open.lock().push(registration);
                    extents.push(extent);
                }
                Err(error) => {
                    registered.end();
                    return Err(error);
                }
            }
        }
        Ok(RegisteredRegion { extents, ..registered })
    }

    /// The segments that are not empty, as peers name them.
    pub fn extents(&self) -> &[RemoteExtent] {
        &self.extents
    }

    /// Closes the registrations, which revokes their keys. After an error some may be open.
    pub fn close(&self) -> io::Result<()> {
        if self.process.is_forked_child() {
            // The lock may be held, for ever, by a thread of the parent.
            return Ok(());
        }
        let mut open = self.open.lock();
        while let Some(registration) = open.last_mut() {
            registration.close()?;
            open.pop();
        }
        Ok(())
    }

    /// Leaves open what can't be closed. The memory must then stay for ever.
    pub fn abandon(&self) {
        self.open.lock().drain(..).for_each(std::mem::forget);
    }
}

impl DeviceRegistration for RegisteredRegion {
    /// Ends the process where a registration can't be closed: peers could still write to memory that is about to be used for
    /// something else.
    fn end(&self) {
        let since = Instant::now();
        while let Err(error) = self.close() {
            let is_busy = matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock);
            if !is_busy || since.elapsed() > PATIENCE {
                // Not logged: a subscriber is user code, and this may run under a lock.
                eprintln!("calomel: a provider of libfabric does not deregister memory ({error}), so the process ends");
                std::process::abort();
            }
            std::thread::yield_now();
        }
    }
}
