//! A reliable datagram endpoint, with its posted receives and sends.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use smallvec::SmallVec;

use super::av::{Av, PeerAddress};
use super::closing::ClosingEndpoint;
use super::cq::Cq;
use super::domain::Domain;
use super::info::{EndpointName, MAX_NAME};
use super::lending::{LoanHost, MemoryLoan};
use super::operation::{Label, MemoryLoans, OperationMemory};
use super::raw::{
    FI_ADDR_UNSPEC, FI_COMPLETION, FI_ENABLE, FI_RECV, FI_REMOTE_CQ_DATA, FI_SEND, FiAddr, Fid, FidDomain, FidEp, RmaOps,
    TaggedMessage, TaggedOps,
};
use super::{check, failed};
use crate::fork::CreatorProcess;
use crate::memory::{DeviceRegistration, IoVec, Slice};
use crate::sync::{Mutex, RwLock};

pub(in super::super) struct Endpoint {
    /// `None` once it is closed. Held shared for one call that does not block.
    raw: RwLock<Option<NonNull<FidEp>>>,
    /// MemoryLoans that may not have ended.
    lent: Mutex<Vec<Weak<MemoryLoan>>>,
    /// Memory that peers reach through it.
    registered: Mutex<Vec<Weak<dyn DeviceRegistration>>>,
    /// The provider has not closed it.
    stuck: AtomicBool,
    /// Most segments of memory of one operation.
    segments: usize,
    name: EndpointName,
    // Closed after the endpoint.
    av: Arc<Av>,
    cq: Arc<Cq>,
    domain: Arc<Domain>,
    process: CreatorProcess,
    /// The error of each attempt to close it: a provider that fails.
    #[cfg(test)]
    pub obstacle: Arc<std::sync::atomic::AtomicI32>,
}

// SAFETY: the functions of libfabric may be called by any thread (FI_THREAD_SAFE).
unsafe impl Send for Endpoint {}
// SAFETY: as above.
unsafe impl Sync for Endpoint {}

/// Memory of a peer, as RMA names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct RemotePlace {
    pub address: u64,
    pub key: u64,
}

/// The outcome of a post.
pub(in super::super) enum Posted<B> {
    /// A completion follows.
    Begun,
    /// There is no room now, or no connection yet; returns what was passed.
    Busy(B),
    /// The memory is not there any more.
    Gone,
    /// The memory has more segments than the provider takes.
    Fragmented,
}

impl Endpoint {
    /// Opens an endpoint at the address of the domain, and enables it.
    pub fn open(domain: &Arc<Domain>, av: &Arc<Av>, cq: &Arc<Cq>) -> io::Result<Endpoint> {
        // SAFETY: the domain is open, and its table has this function in all versions.
        let open = unsafe { FidDomain::ops(domain.as_ptr()) }.endpoint;
        let mut raw = ptr::null_mut();
        // SAFETY: the entry is that of the domain.
        let returned = unsafe { open(domain.as_ptr(), domain.info.as_ptr(), &raw mut raw, ptr::null_mut()) };
        check("fi_endpoint", returned)?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        let mut endpoint = Endpoint {
            raw: RwLock::new(Some(raw)),
            lent: Mutex::default(),
            registered: Mutex::default(),
            stuck: AtomicBool::new(false),
            segments: domain.info.segments.max(1),
            name: EndpointName::of(([0, 0, 0, 0], 0).into()),
            av: av.clone(),
            cq: cq.clone(),
            domain: domain.clone(),
            process: CreatorProcess::this(),
            #[cfg(test)]
            obstacle: Arc::default(),
        };
        let fid = raw.as_ptr().cast::<Fid>();
        // SAFETY: the endpoint is open, and its table has this function in all versions.
        let bind = unsafe { Fid::ops(fid) }.bind;
        // SAFETY: the address vector is of the same domain, and is closed after the endpoint.
        check("fi_ep_bind of an address vector", unsafe { bind(fid, av.as_ptr().cast(), 0) })?;
        // SAFETY: the same holds for the completion queue.
        check("fi_ep_bind of a completion queue", unsafe { bind(fid, cq.as_ptr().cast(), FI_SEND | FI_RECV) })?;
        // SAFETY: the endpoint is open, and its table has this function in all versions.
        let control = unsafe { Fid::ops(fid) }.control;
        // SAFETY: the command takes nothing.
        check("fi_enable", unsafe { control(fid, FI_ENABLE, ptr::null_mut()) })?;
        endpoint.name = Endpoint::name_of(raw, domain.info.opaque_names)?;
        av.set_name_len(endpoint.name.bytes().len());
        Ok(endpoint)
    }

    fn name_of(raw: NonNull<FidEp>, opaque: bool) -> io::Result<EndpointName> {
        let mut bytes = [0u8; MAX_NAME];
        let mut len = MAX_NAME;
        // SAFETY: the endpoint is open, and an enabled one has this table.
        let name = unsafe { FidEp::cm(raw.as_ptr()) }.getname;
        // SAFETY: there is room for `len` bytes.
        check("fi_getname", unsafe { name(raw.as_ptr().cast(), bytes.as_mut_ptr().cast(), &raw mut len) })?;
        let name = bytes.get(..len).and_then(if opaque { EndpointName::opaque } else { EndpointName::from_bytes });
        name.ok_or_else(|| io::Error::other(format!("the provider names its endpoint with {len} unknown bytes")))
    }

    /// Its address.
    pub fn name(&self) -> &EndpointName {
        &self.name
    }

    /// The functions for tagged messages.
    fn tagged(raw: NonNull<FidEp>) -> &'static TaggedOps {
        // SAFETY: the endpoint is open, and has this table, since it was opened with FI_TAGGED. The table is a constant of the
        // provider.
        unsafe { FidEp::tagged(raw.as_ptr()) }
    }

    /// Posts a receive for messages with this tag, of any peer.
    pub fn receive(&self, buffer: Vec<u8>, tag: u64, label: Label) -> io::Result<Posted<Vec<u8>>> {
        self.receive_of(FI_ADDR_UNSPEC, buffer, tag, label)
    }

    /// As `receive`, for messages of one peer.
    pub fn receive_from(&self, from: PeerAddress, buffer: Vec<u8>, tag: u64, label: Label) -> io::Result<Posted<Vec<u8>>> {
        self.receive_of(from.0, buffer, tag, label)
    }

    fn receive_of(&self, from: FiAddr, buffer: Vec<u8>, tag: u64, label: Label) -> io::Result<Posted<Vec<u8>>> {
        self.post_owned(buffer, label, false, |raw, (address, len), context| {
            let function = Endpoint::tagged(raw).recv;
            // SAFETY: the buffer is the operation's own, and stays until it has completed.
            unsafe { function(raw.as_ptr(), address.cast(), len, ptr::null_mut(), from, tag, 0, context) }
        })
    }

    /// Sends a message.
    pub fn send(&self, to: PeerAddress, buffer: Vec<u8>, tag: u64, label: Label) -> io::Result<Posted<Vec<u8>>> {
        self.post_owned(buffer, label, true, |raw, (address, len), context| {
            let function = Endpoint::tagged(raw).send;
            // SAFETY: the buffer is the operation's own, and stays until it has completed.
            unsafe { function(raw.as_ptr(), address.cast(), len, ptr::null_mut(), to.0, tag, context) }
        })
    }

    /// Sends a message that is no longer than `Info::inject`; there is no completion. False when there is no room now.
    pub fn inject(&self, to: PeerAddress, message: &[u8], tag: u64) -> io::Result<bool> {
        let slot = self.raw.read();
        let Some(raw) = *slot else { return Err(closed()) };
        let function = Endpoint::tagged(raw).inject;
        // SAFETY: the provider copies the message before it returns.
        let returned = unsafe { function(raw.as_ptr(), message.as_ptr().cast(), message.len(), to.0, tag) };
        match returned {
            0 => Ok(true),
            busy if busy == -(libc::EAGAIN as isize) => Ok(false),
            error => Err(failed("fi_tinject", -error as i32)),
        }
    }

    /// As `send`, with `data` beside the message: see [`Endpoint::takes_data`].
    pub fn send_with_data(
        &self,
        to: PeerAddress,
        buffer: Vec<u8>,
        tag: u64,
        data: u64,
        label: Label,
    ) -> io::Result<Posted<Vec<u8>>> {
        self.post_owned(buffer, label, true, |raw, (address, len), context| {
            let pieces = [IoVec { iov_base: address.cast(), iov_len: len }];
            // SAFETY: the buffer is the operation's own, and stays until it has completed.
            unsafe { Endpoint::send_message(raw, &pieces, (to, tag), Some(data), context) }
        })
    }

    /// Sends users' memory, one after the other, which is lent until the operation has completed. `data`: what goes beside it.
    pub fn send_lent(
        &self,
        to: PeerAddress,
        memory: &[&Slice],
        tag: u64,
        data: Option<u64>,
        label: Label,
        host: Weak<dyn LoanHost>,
    ) -> io::Result<Posted<()>> {
        self.post_lent(memory, label, true, host, |raw, pieces, context| {
            // SAFETY: the pieces are memory that is lent until the operation has completed, or the endpoint is closed.
            unsafe { Endpoint::send_message(raw, pieces, (to, tag), data, context) }
        })
    }

    /// Sends pieces of memory, one after the other.
    ///
    /// # Safety
    /// The endpoint must be open, and the pieces must stay until the operation has completed, or the endpoint is closed.
    unsafe fn send_message(
        raw: NonNull<FidEp>,
        pieces: &[IoVec],
        (to, tag): (PeerAddress, u64),
        data: Option<u64>,
        context: *mut c_void,
    ) -> isize {
        let message = TaggedMessage {
            msg_iov: pieces.as_ptr(),
            desc: ptr::null_mut(),
            iov_count: pieces.len(),
            addr: to.0,
            tag,
            ignore: 0,
            context,
            data: data.unwrap_or_default(),
        };
        let flags = FI_COMPLETION | if data.is_some() { FI_REMOTE_CQ_DATA } else { 0 };
        let function = Endpoint::tagged(raw).sendmsg;
        // SAFETY: the provider copies the structure before it returns; the pieces stay, as the caller promises.
        unsafe { function(raw.as_ptr(), &raw const message, flags) }
    }

    /// Whether a message can have 4 bytes beside it.
    pub fn takes_data(&self) -> bool {
        self.domain.info.cq_data >= 4
    }

    /// Most segments of memory that one operation takes.
    pub fn most_segments(&self) -> usize {
        self.segments
    }

    /// Posts a receive into users' memory, which is lent until the operation has completed.
    pub fn receive_lent(
        &self,
        from: PeerAddress,
        memory: &Slice,
        tag: u64,
        label: Label,
        host: Weak<dyn LoanHost>,
    ) -> io::Result<Posted<()>> {
        self.post_lent(&[memory], label, false, host, |raw, pieces, context| {
            let function = Endpoint::tagged(raw).recvv;
            // SAFETY: the pieces are memory that is lent until the operation has completed, or the endpoint is closed; where it
            // is received into, it may be written.
            unsafe { function(raw.as_ptr(), pieces.as_ptr(), ptr::null_mut(), pieces.len(), from.0, tag, 0, context) }
        })
    }

    /// The functions for RMA.
    fn rma(raw: NonNull<FidEp>) -> &'static RmaOps {
        // SAFETY: the endpoint is open, and has this table: all have one, and those that were not opened with FI_RMA have functions
        // there that fail. The table is a constant of the provider.
        unsafe { FidEp::rma(raw.as_ptr()) }
    }

    /// Reads a peer's memory into the buffer, or writes it from there.
    pub fn access(
        &self,
        pull: bool,
        peer: PeerAddress,
        remote: RemotePlace,
        buffer: Vec<u8>,
        label: Label,
    ) -> io::Result<Posted<Vec<u8>>> {
        let RemotePlace { address: to, key } = remote;
        self.post_owned(buffer, label, !pull, |raw, (address, len), context| {
            if pull {
                let function = Endpoint::rma(raw).read;
                // SAFETY: the buffer is the operation's own, and stays until it has completed.
                unsafe { function(raw.as_ptr(), address.cast(), len, ptr::null_mut(), peer.0, to, key, context) }
            } else {
                let function = Endpoint::rma(raw).write;
                // SAFETY: the same holds here.
                unsafe { function(raw.as_ptr(), address.cast(), len, ptr::null_mut(), peer.0, to, key, context) }
            }
        })
    }

    /// As `access`, for users' memory, which is lent until the operation has completed.
    pub fn access_lent(
        &self,
        pull: bool,
        peer: PeerAddress,
        remote: RemotePlace,
        memory: &Slice,
        label: Label,
        host: Weak<dyn LoanHost>,
    ) -> io::Result<Posted<()>> {
        let RemotePlace { address: to, key } = remote;
        self.post_lent(&[memory], label, !pull, host, |raw, pieces, context| {
            let (first, count) = (pieces.as_ptr(), pieces.len());
            if pull {
                let function = Endpoint::rma(raw).readv;
                // SAFETY: the pieces are memory that is lent until the operation has completed, or the endpoint is closed, and may
                // be written.
                unsafe { function(raw.as_ptr(), first, ptr::null_mut(), count, peer.0, to, key, context) }
            } else {
                let function = Endpoint::rma(raw).writev;
                // SAFETY: the pieces are memory that is lent until the operation has completed, or the endpoint is closed.
                unsafe { function(raw.as_ptr(), first, ptr::null_mut(), count, peer.0, to, key, context) }
            }
        })
    }

    /// How many bytes of the memory, from its beginning, one operation can take: it has a bound on segments. 0 when it is gone.
    pub fn takes(&self, memory: &Slice) -> usize {
        let mut pieces = SmallVec::<[IoVec; 8]>::new();
        memory.read_access().map_or(0, |access| access.pieces(0, self.segments, &mut pieces))
    }

    /// Calls `register` with the open endpoint, which is not closed meanwhile, and ends what it returns before it closes.
    pub(super) fn register<R: DeviceRegistration>(
        &self,
        register: impl FnOnce(&Arc<Domain>, NonNull<FidEp>) -> Option<io::Result<Arc<R>>>,
    ) -> Option<io::Result<Arc<R>>> {
        let slot = self.raw.read();
        let Some(raw) = *slot else { return Some(Err(closed())) };
        let registered = register(&self.domain, raw)?;
        if let Ok(registered) = &registered {
            let mut all = self.registered.lock();
            // Those of memory that is no longer exposed make room.
            if all.len().is_power_of_two() {
                all.retain(|other| other.strong_count() > 0);
            }
            let registered: Arc<dyn DeviceRegistration> = registered.clone();
            all.push(Arc::downgrade(&registered));
        }
        Some(registered)
    }

    fn post_owned(
        &self,
        mut buffer: Vec<u8>,
        label: Label,
        is_send: bool,
        post: impl FnOnce(NonNull<FidEp>, (*mut u8, usize), *mut c_void) -> isize,
    ) -> io::Result<Posted<Vec<u8>>> {
        let slot = self.raw.read();
        let Some(raw) = *slot else { return Err(closed()) };
        // Moving the vector into the operation does not move its bytes.
        let bytes = (buffer.as_mut_ptr(), buffer.len());
        let operation = self.cq.operations.begin(label, is_send, OperationMemory::Owned(buffer));
        let returned = post(raw, bytes, operation.as_ptr().cast());
        if returned == 0 {
            return Ok(Posted::Begun);
        }
        // SAFETY: the provider has refused it.
        let memory = unsafe { self.cq.operations.take_back(operation) };
        match (memory, returned) {
            (Some(OperationMemory::Owned(buffer)), busy) if busy == -(libc::EAGAIN as isize) => Ok(Posted::Busy(buffer)),
            _ => Err(failed("a message can't be posted", -returned as i32)),
        }
    }

    fn post_lent(
        &self,
        memory: &[&Slice],
        label: Label,
        is_send: bool,
        host: Weak<dyn LoanHost>,
        post: impl FnOnce(NonNull<FidEp>, &[IoVec], *mut c_void) -> isize,
    ) -> io::Result<Posted<()>> {
        let slot = self.raw.read();
        let Some(raw) = *slot else { return Err(closed()) };
        let mut pieces = SmallVec::<[IoVec; 8]>::new();
        let mut loans = MemoryLoans::new();
        for slice in memory {
            // One access at a time, since another thread may close the gate of the next memory, and wait for the first. From then
            // on the loan keeps the memory.
            let refused = match slice.read_access() {
                None => Some(Posted::Gone),
                Some(access) if access.pieces(0, self.segments, &mut pieces) < slice.len => Some(Posted::Fragmented),
                Some(access) => {
                    let loan = MemoryLoan::new(slice, host.clone());
                    access.lend(loan.clone());
                    // Before its memory can be wanted back. The operation keeps it, until it has completed, or the queue is freed
                    // after the endpoint is closed.
                    self.note_lent(&loan);
                    loans.push(loan);
                    None
                }
            };
            if let Some(refused) = refused {
                loans.iter().for_each(MemoryLoan::end);
                return Ok(refused);
            }
        }
        let operation = self.cq.operations.begin(label, is_send, OperationMemory::Lent(loans));
        let returned = post(raw, &pieces, operation.as_ptr().cast());
        if returned == 0 {
            return Ok(Posted::Begun);
        }
        // SAFETY: the provider has refused it.
        if let Some(OperationMemory::Lent(loans)) = unsafe { self.cq.operations.take_back(operation) } {
            loans.iter().for_each(MemoryLoan::end);
        }
        if returned == -(libc::EAGAIN as isize) {
            return Ok(Posted::Busy(()));
        }
        Err(failed("a payload can't be posted", -returned as i32))
    }

    fn note_lent(&self, loan: &Arc<MemoryLoan>) {
        let mut lent = self.lent.lock();
        lent.retain(|other| other.upgrade().is_some_and(|other| !other.has_ended()));
        lent.push(Arc::downgrade(loan));
    }

    /// Since when memory is wanted back that is lent.
    pub fn withheld_since(&self) -> Option<Instant> {
        self.lent.lock().iter().filter_map(|loan| loan.upgrade()?.withheld_since()).min()
    }

    /// Closes the endpoint: ends all its operations, and with them the loans. Where that is impossible, they do not end, and it
    /// returns false, also when it is called again.
    pub fn close(&self) -> bool {
        if self.process.is_forked_child() {
            return true;
        }
        // No thread is in a call of it, nor begins one later.
        let Some(raw) = self.raw.write().take() else { return !self.stuck.load(Ordering::Acquire) };
        let registered = std::mem::take(&mut *self.registered.lock());
        registered.iter().filter_map(Weak::upgrade).for_each(|registered| registered.end());
        let endpoint = ClosingEndpoint {
            raw,
            loans: self.lent.lock().drain(..).collect(),
            cq: self.cq.clone(),
            _av: self.av.clone(),
            _domain: self.domain.clone(),
            process: self.process,
            is_busy: false,
            #[cfg(test)]
            obstacle: self.obstacle.clone(),
        };
        let closed = endpoint.close();
        self.stuck.store(!closed, Ordering::Release);
        closed
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the endpoint is closed")
}
