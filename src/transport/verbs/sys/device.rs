//! Devices, and what they know: protection domains, registered memory, queues of completions.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys as raw;
use rdma_sys::{ibv_access_flags as flags, ibv_wc};

use super::{do_not_block, errno, failed, is_forked, must, note_user, text, verbs};

/// An open device. The connection manager opens it, and keeps it open as long as the process lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Context(NonNull<raw::ibv_context>);

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What a device can do.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Limits {
    /// Reads of others that it answers at a time, and own ones that it has under way, for each queue pair.
    pub reads_answered: u8,
    pub reads_asked: u8,
    /// Pieces of memory that one request may gather, or scatter to.
    pub pieces: usize,
    pub completions: u32,
    pub receives: u32,
    /// It has memory windows that are good on one queue pair only (type 2B).
    pub windows: bool,
}

#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Port {
    pub active: bool,
    state: u32,
}

impl Port {
    pub fn state(&self) -> &'static str {
        // SAFETY: the function takes any number.
        let name = unsafe { raw::ibv_port_state_str(self.state) };
        // SAFETY: it is one of the library's constants.
        unsafe { text(name) }
    }
}

/// What a device has to say of itself, unasked.
#[derive(Debug)]
pub(in super::super) struct Async {
    #[allow(dead_code, reason = "for who reads traces")]
    number: u32,
    pub what: &'static str,
    /// The queue pair that it is about.
    pub queue_pair: Option<u32>,
    /// It can't be used any more.
    pub fatal: bool,
}

/// What an event is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum About {
    Device,
    QueuePair,
    Nothing,
}

impl Context {
    /// # Safety
    /// It must be a context that the connection manager has opened.
    pub(super) unsafe fn new(context: *mut raw::ibv_context) -> Option<Context> {
        NonNull::new(context).map(Context)
    }

    pub(super) fn as_ptr(self) -> *mut raw::ibv_context {
        self.0.as_ptr()
    }

    /// The devices of this machine.
    pub fn all() -> io::Result<Vec<Context>> {
        note_user()?;
        // Memory that a device knows must stay where it is when the process forks. Kernels before 5.12 don't see to that, and
        // then a child lacks it altogether.
        // SAFETY: the function takes nothing.
        if unsafe { raw::ibv_is_fork_initialized() } == raw::IBV_FORK_DISABLED {
            // SAFETY: as above. It may be too late for that, where others in this process use devices already.
            let _ = unsafe { raw::ibv_fork_init() };
        }
        let mut count = 0;
        // SAFETY: the pointer is to a number.
        let list = unsafe { raw::rdma_get_devices(&raw mut count) };
        if list.is_null() {
            let error = io::Error::last_os_error();
            return Err(failed("the connection manager has no devices", &error));
        }
        // SAFETY: the list has so many entries.
        let found = unsafe { std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0)) };
        let contexts = found.iter().filter_map(|context| NonNull::new(*context)).map(Context).collect();
        // SAFETY: the list came from `rdma_get_devices`, and is not used any more; the contexts stay open.
        unsafe { raw::rdma_free_devices(list) };
        Ok(contexts)
    }

    pub fn name(self) -> &'static str {
        // SAFETY: the context is open.
        let device = unsafe { (*self.as_ptr()).device };
        // SAFETY: the device lives as long as the context.
        let name = unsafe { raw::ibv_get_device_name(device) };
        // SAFETY: the name is part of the device, which lives as long as the context, for ever.
        unsafe { text(name) }
    }

    pub fn limits(self) -> io::Result<Limits> {
        let mut found = MaybeUninit::<raw::ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and there is room for what is written.
        verbs("ibv_query_device", unsafe { raw::ibv_query_device(self.as_ptr(), found.as_mut_ptr()) })?;
        // SAFETY: it is made of numbers, which zeros are.
        let found = unsafe { found.assume_init() };
        let byte = |number: i32| u8::try_from(number.clamp(1, 128)).unwrap_or(1);
        Ok(Limits {
            reads_answered: byte(found.max_qp_rd_atom),
            reads_asked: byte(found.max_qp_init_rd_atom),
            pieces: usize::try_from(found.max_sge.min(found.max_sge_rd.max(1))).unwrap_or(1).max(1),
            completions: u32::try_from(found.max_cqe).unwrap_or(0),
            receives: u32::try_from(found.max_srq_wr).unwrap_or(0),
            windows: found.device_cap_flags & raw::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0 != 0 && found.max_mw > 0,
        })
    }

    pub fn port(self, number: u8) -> io::Result<Port> {
        let mut found = MaybeUninit::<raw::ibv_port_attr>::zeroed();
        // The older of the library's two layouts is the first part of the newer.
        let room = found.as_mut_ptr().cast();
        // SAFETY: the context is open, and there is room for what is written.
        verbs("ibv_query_port", unsafe { raw::ibv_query_port(self.as_ptr(), number, room) })?;
        // SAFETY: it is made of numbers, which zeros are.
        let found = unsafe { found.assume_init() };
        let active = found.state == raw::ibv_port_state::IBV_PORT_ACTIVE;
        Ok(Port { active, state: found.state })
    }

    /// Where the device tells that it has something to say.
    pub fn async_fd(self) -> io::Result<RawFd> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.as_ptr()).async_fd };
        do_not_block(fd)?;
        Ok(fd)
    }

    pub fn take_async(self) -> Option<Async> {
        let mut event = MaybeUninit::<raw::ibv_async_event>::zeroed();
        // SAFETY: the context is open, and there is room for what is written. It does not block: see `async_fd`.
        if unsafe { raw::ibv_get_async_event(self.as_ptr(), event.as_mut_ptr()) } != 0 {
            return None;
        }
        // A newer kernel may tell of what these bindings have no name for: the number is taken for no more than that.
        // SAFETY: it was written above.
        let kind = unsafe { &raw const (*event.as_ptr()).event_type };
        // SAFETY: it is a number, which can be anything.
        let number = unsafe { kind.cast::<u32>().read() };
        let (what, about) = match number {
            0 => ("a completion queue is broken", About::Device),
            1 => ("the queue pair is broken", About::QueuePair),
            2 => ("the other side's request was not valid", About::QueuePair),
            3 => ("the other side's access was not allowed", About::QueuePair),
            7 => ("the path can't be changed", About::QueuePair),
            8 => ("the device is broken", About::Device),
            15 => ("shared receive buffers are broken", About::Device),
            _ => ("something that is of no consequence", About::Nothing),
        };
        let queue_pair = (about == About::QueuePair).then(|| {
            // SAFETY: it was written above.
            let element = unsafe { &raw const (*event.as_ptr()).element };
            // SAFETY: events of these kinds are about a queue pair, of which this is the address.
            let pair = unsafe { element.cast::<*mut raw::ibv_qp>().read() };
            // SAFETY: it can't be destroyed before the event has been acknowledged.
            unsafe { (*pair).qp_num }
        });
        // SAFETY: the event came from `ibv_get_async_event`, and is acknowledged once.
        unsafe { raw::ibv_ack_async_event(event.as_mut_ptr()) };
        Some(Async { number, what, queue_pair, fatal: about == About::Device })
    }
}

/// Memory and queue pairs that may be used together.
pub(in super::super) struct Pd {
    raw: NonNull<raw::ibv_pd>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub fn new(context: Context) -> io::Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let made = unsafe { raw::ibv_alloc_pd(context.as_ptr()) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_alloc_pd", &io::Error::last_os_error()))?;
        Ok(Arc::new(Pd { raw }))
    }

    pub(super) fn as_ptr(&self) -> *mut raw::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: whatever uses it holds an `Arc` of it, so nothing does.
        let freed = verbs("ibv_dealloc_pd", unsafe { raw::ibv_dealloc_pd(self.as_ptr()) });
        if let Err(error) = freed {
            tracing::error!(target: "calomel::verbs", %error, "a protection domain can't be freed");
        }
    }
}

/// What may be done with registered memory. The device's own reads, for what is sent, are always allowed. Relaxed ordering
/// is never asked for: who is told that data has arrived has to see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Access {
    pub local_write: bool,
    pub remote_read: bool,
    pub remote_write: bool,
    /// Windows may be opened to it.
    pub windows: bool,
}

/// Memory that a device knows. When it is dropped the device has forgotten it.
pub(in super::super) struct Memory {
    raw: NonNull<raw::ibv_mr>,
    pub local_key: u32,
    pub remote_key: u32,
    _pd: Arc<Pd>,
}

impl Memory {
    pub(super) fn as_ptr(&self) -> *mut raw::ibv_mr {
        self.raw.as_ptr()
    }
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Safety
    /// Until the value is dropped the memory must stay where it is. The device, and where that is allowed any peer, may read and
    /// write it at any moment, as `access` says: nobody may count on it not changing where writing is allowed.
    pub unsafe fn register(pd: &Arc<Pd>, address: *mut u8, len: usize, access: Access) -> io::Result<Memory> {
        let mut wanted = flags(0);
        // The device must be able to write what peers may write.
        for (is_wanted, flag) in [
            (access.local_write || access.remote_write, flags::IBV_ACCESS_LOCAL_WRITE),
            (access.remote_read, flags::IBV_ACCESS_REMOTE_READ),
            (access.remote_write, flags::IBV_ACCESS_REMOTE_WRITE),
            (access.windows, flags::IBV_ACCESS_MW_BIND),
        ] {
            wanted |= if is_wanted { flag } else { flags(0) };
        }
        // SAFETY: the domain is there, and the memory is as whoever calls promises.
        let made = unsafe { raw::ibv_reg_mr(pd.as_ptr(), address.cast(), len, wanted.0.cast_signed()) };
        let raw = NonNull::new(made).ok_or_else(|| refused(len, &io::Error::last_os_error()))?;
        // SAFETY: it was made above.
        let local_key = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: as above.
        let remote_key = unsafe { (*raw.as_ptr()).rkey };
        Ok(Memory { raw, local_key, remote_key, _pd: pd.clone() })
    }
}

/// Why memory can't be registered. Most often too little of it may be locked.
fn refused(len: usize, error: &io::Error) -> io::Error {
    match (error.raw_os_error(), super::locked_memory_limit()) {
        (Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN), Some(limit)) => io::Error::new(
            error.kind(),
            format!(
                "{len} bytes can't be registered with the device ({error}): this process may lock {limit} bytes in memory, what is \
                 registered already included (ulimit -l {}); it needs at least {} KiB, or no limit: see `memlock` in \
                 /etc/security/limits.conf, and LimitMEMLOCK= of systemd",
                limit / 1024,
                (limit.max(len as u64) + len as u64).div_ceil(1024),
            ),
        ),
        _ => failed(&format!("{len} bytes can't be registered with the device (ibv_reg_mr)"), error),
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: it came from `ibv_reg_mr`, and is not used any more.
        must("ibv_dereg_mr", unsafe { raw::ibv_dereg_mr(self.raw.as_ptr()) });
    }
}

/// A view of registered memory that is good on one queue pair only. When it is dropped nobody reaches the memory through it.
pub(in super::super) struct Window {
    raw: NonNull<raw::ibv_mw>,
    /// The key that it has when it has been opened.
    pub key: u32,
    _pd: Arc<Pd>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    pub fn new(pd: &Arc<Pd>) -> io::Result<Window> {
        // SAFETY: the domain is there.
        let made = unsafe { raw::ibv_alloc_mw(pd.as_ptr(), raw::ibv_mw_type::IBV_MW_TYPE_2) };
        let raw = made.and_then(NonNull::new).ok_or_else(|| failed("ibv_alloc_mw", &io::Error::last_os_error()))?;
        // SAFETY: it was made above.
        let first = unsafe { (*raw.as_ptr()).rkey };
        // SAFETY: the function takes any number.
        let key = unsafe { raw::ibv_inc_rkey(first) };
        Ok(Window { raw, key, _pd: pd.clone() })
    }

    pub(super) fn as_ptr(&self) -> *mut raw::ibv_mw {
        self.raw.as_ptr()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: it came from `ibv_alloc_mw`, and is not used any more.
        must("ibv_dealloc_mw", unsafe { raw::ibv_dealloc_mw(self.raw.as_ptr()) });
    }
}

/// Where a device tells that completions have come.
pub(in super::super) struct Completions {
    raw: NonNull<raw::ibv_comp_channel>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Completions {}
// SAFETY: as above.
unsafe impl Sync for Completions {}

impl Completions {
    pub fn new(context: Context) -> io::Result<Arc<Completions>> {
        // SAFETY: the context is open.
        let made = unsafe { raw::ibv_create_comp_channel(context.as_ptr()) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_create_comp_channel", &io::Error::last_os_error()))?;
        let channel = Completions { raw };
        do_not_block(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub fn fd(&self) -> RawFd {
        // SAFETY: it was made by `new`.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// Takes all that has been told.
    pub fn drain(&self) {
        loop {
            let mut cq = std::ptr::null_mut();
            let mut context = std::ptr::null_mut();
            // SAFETY: the channel is there, and the pointers are to pointers. It does not block: see `new`.
            if unsafe { raw::ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut context) } != 0 {
                return;
            }
            // SAFETY: the queue can't be destroyed before its event has been acknowledged, which is done once.
            unsafe { raw::ibv_ack_cq_events(cq, 1) };
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: whatever queue uses it holds an `Arc` of it, so none does.
        let freed = errno("ibv_destroy_comp_channel", unsafe { raw::ibv_destroy_comp_channel(self.raw.as_ptr()) });
        if let Err(error) = freed {
            tracing::error!(target: "calomel::verbs", %error, "a completion channel can't be freed");
        }
    }
}

/// A queue of completions.
pub(in super::super) struct Cq {
    raw: NonNull<raw::ibv_cq>,
    _channel: Arc<Completions>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

/// The end of something that a device was asked for.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Completion {
    pub id: u64,
    /// 0 for success.
    pub status: u32,
    pub queue_pair: u32,
    /// How much was received.
    pub len: u32,
}

impl Completion {
    /// It was given up because something before it had failed.
    pub fn is_flushed(&self) -> bool {
        self.status == raw::ibv_wc_status::IBV_WC_WR_FLUSH_ERR
    }
}

/// Completions taken at a time.
const BATCH: usize = 32;

impl Cq {
    pub fn new(context: Context, channel: &Arc<Completions>, size: u32) -> io::Result<Arc<Cq>> {
        let size = i32::try_from(size).unwrap_or(i32::MAX);
        let nothing = std::ptr::null_mut();
        // SAFETY: the context is open, and the channel is there as long as the queue.
        let made = unsafe { raw::ibv_create_cq(context.as_ptr(), size, nothing, channel.raw.as_ptr(), 0) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_create_cq", &io::Error::last_os_error()))?;
        Ok(Arc::new(Cq { raw, _channel: channel.clone() }))
    }

    pub(super) fn as_ptr(&self) -> *mut raw::ibv_cq {
        self.raw.as_ptr()
    }

    /// Has the channel told of the next completion.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue is there.
        verbs("ibv_req_notify_cq", unsafe { raw::ibv_req_notify_cq(self.as_ptr(), 0) })
    }

    /// Takes completions; false when there is none.
    pub fn poll(&self, found: &mut Vec<Completion>) -> io::Result<bool> {
        let mut room = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        // SAFETY: the queue is there, and there is room for so many.
        let count = unsafe { raw::ibv_poll_cq(self.as_ptr(), BATCH as i32, room.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::other("a completion queue is broken (ibv_poll_cq)"))?;
        found.extend(room[..count].iter().map(|entry| {
            // SAFETY: as many entries as the count says have been written.
            let entry = unsafe { entry.assume_init_ref() };
            Completion { id: entry.wr_id, status: entry.status, queue_pair: entry.qp_num, len: entry.byte_len }
        }));
        Ok(count > 0)
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: whatever queue pair uses it holds an `Arc` of it, so none does.
        let freed = verbs("ibv_destroy_cq", unsafe { raw::ibv_destroy_cq(self.as_ptr()) });
        if let Err(error) = freed {
            tracing::error!(target: "calomel::verbs", %error, "a completion queue can't be freed");
        }
    }
}
