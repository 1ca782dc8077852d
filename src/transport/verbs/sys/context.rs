//! Devices: what they are called, what they can do, and the events they report.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::NonNull;

use rdma_sys as raw;

use super::{do_not_block, failed, note_user, text, verbs};

/// An open device. The connection manager opens it, and keeps it open as long as the process lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Context(NonNull<raw::ibv_context>);

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What a device supports.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct DeviceLimits {
    /// RDMA reads for each queue pair: those of peers that it answers at a time, and own outstanding ones.
    pub reads_answered: u8,
    pub reads_asked: u8,
    /// Scatter/gather entries of one request.
    pub max_sge: usize,
    pub completions: u32,
    pub receives: u32,
    /// It has memory windows of type 2B, which are valid on one queue pair only.
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

/// An asynchronous event of a device.
#[derive(Debug)]
pub(in super::super) struct AsyncEvent {
    #[allow(dead_code, reason = "for the log")]
    number: u32,
    pub what: &'static str,
    /// The queue pair it concerns.
    pub queue_pair: Option<u32>,
    /// The device can't be used any more.
    pub fatal: bool,
}

/// What an event concerns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EventSubject {
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
        // Registered memory must stay where it is when the process forks. Kernels before 5.12 need this call for that, and then
        // a child lacks the memory altogether. SAFETY: the function takes nothing.
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
        // SAFETY: the name is part of the device, which lives as long as the context, that is, until the process ends.
        unsafe { text(name) }
    }

    pub fn limits(self) -> io::Result<DeviceLimits> {
        let mut found = MaybeUninit::<raw::ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and there is room for what is written.
        verbs("ibv_query_device", unsafe { raw::ibv_query_device(self.as_ptr(), found.as_mut_ptr()) })?;
        // SAFETY: it is made of numbers, which zeros are.
        let found = unsafe { found.assume_init() };
        let byte = |number: i32| u8::try_from(number.clamp(1, 128)).unwrap_or(1);
        let type_2b = raw::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0;
        Ok(DeviceLimits {
            reads_answered: byte(found.max_qp_rd_atom),
            reads_asked: byte(found.max_qp_init_rd_atom),
            max_sge: usize::try_from(found.max_sge.min(found.max_sge_rd.max(1))).unwrap_or(1).max(1),
            completions: u32::try_from(found.max_cqe).unwrap_or(0),
            receives: u32::try_from(found.max_srq_wr).unwrap_or(0),
            windows: found.device_cap_flags & type_2b != 0 && found.max_mw > 0,
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

    /// Readable when there are asynchronous events.
    pub fn async_fd(self) -> io::Result<RawFd> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.as_ptr()).async_fd };
        do_not_block(fd)?;
        Ok(fd)
    }

    pub fn take_async(self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<raw::ibv_async_event>::zeroed();
        // SAFETY: the context is open, and there is room for what is written. It does not block: see `async_fd`.
        if unsafe { raw::ibv_get_async_event(self.as_ptr(), event.as_mut_ptr()) } != 0 {
            return None;
        }
        // A newer kernel may report events that these bindings have no name for, so this is read as a plain number.
        // SAFETY: it was written above.
        let kind = unsafe { &raw const (*event.as_ptr()).event_type };
        // SAFETY: it is a number, which can be anything.
        let number = unsafe { kind.cast::<u32>().read() };
        let (what, about) = match number {
            0 => ("a completion queue is broken", EventSubject::Device),
            1 => ("the queue pair is broken", EventSubject::QueuePair),
            2 => ("the peer's request was invalid", EventSubject::QueuePair),
            3 => ("the peer's access was not allowed", EventSubject::QueuePair),
            7 => ("the path can't be changed", EventSubject::QueuePair),
            8 => ("the device is broken", EventSubject::Device),
            15 => ("shared receive buffers are broken", EventSubject::Device),
            _ => ("an event without consequences", EventSubject::Nothing),
        };
        let queue_pair = (about == EventSubject::QueuePair).then(|| {
            // SAFETY: it was written above.
            let element = unsafe { &raw const (*event.as_ptr()).element };
            // SAFETY: events of these kinds are about a queue pair, of which this is the address.
            let pair = unsafe { element.cast::<*mut raw::ibv_qp>().read() };
            // SAFETY: it can't be destroyed before the event has been acknowledged.
            unsafe { (*pair).qp_num }
        });
        // SAFETY: the event came from `ibv_get_async_event`, and is acknowledged once.
        unsafe { raw::ibv_ack_async_event(event.as_mut_ptr()) };
        Some(AsyncEvent { number, what, queue_pair, fatal: about == EventSubject::Device })
    }
}
