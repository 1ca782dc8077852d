//! Users' regions, as registered with devices.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use crate::sync::Mutex;

use super::device::Device;
use super::sys::{AccessFlags, Mr, Mw, Qp, Sge};
use super::wire::RemoteSegment;
use crate::deferred_log::defer;
use crate::memory::{DeviceRegistration, IoVec, Region};

/// A user's region, as registered with one device.
pub(super) struct Registered {
    domain: u64,
    access: AccessFlags,
    /// The region's segments that are not empty.
    segments: Vec<RegisteredSegment>,
    /// Dropping these deregisters the memory.
    memory: Mutex<Vec<Mr>>,
}

struct RegisteredSegment {
    /// Offset in the region.
    start: usize,
    remote: RemoteSegment,
    local_key: u32,
}

impl DeviceRegistration for Registered {
    fn end(&self) {
        self.memory.lock().clear();
    }
}

impl Registered {
    /// A registration of the region with the device, with at least the wanted access: an existing one, or a new one. `None`
    /// when the region's gate is closed.
    pub(super) fn of(region: &Region, device: &Device, access: AccessFlags) -> Option<io::Result<Arc<Registered>>> {
        let suits = |found: &Registered| {
            let has = |wanted: bool, given: bool| given || !wanted;
            found.domain == device.domain
                && has(access.local_write, found.access.local_write)
                && has(access.remote_read, found.access.remote_read)
                && has(access.remote_write, found.access.remote_write)
                && has(access.windows, found.access.windows)
        };
        match region.registration(suits) {
            Some(found) => Some(Ok(found)),
            None => region.register(|pieces| Registered::new(pieces, device, access)),
        }
    }

    fn new(pieces: &[IoVec], device: &Device, access: AccessFlags) -> io::Result<Registered> {
        let (mut segments, mut known) = (Vec::new(), Vec::new());
        let mut start = 0;
        for piece in pieces.iter() {
            if piece.iov_len > 0 {
                // SAFETY: the region closes its gate, and then ends this registration, before its memory goes anywhere. Where
                // writing is allowed there is no reference to it until then.
                let memory = unsafe { Mr::register(&device.pd, piece.iov_base.cast(), piece.iov_len, access) }?;
                let remote =
                    RemoteSegment { address: piece.iov_base.addr() as u64, len: piece.iov_len as u64, key: memory.remote_key };
                segments.push(RegisteredSegment { start, remote, local_key: memory.local_key });
                known.push(memory);
            }
            start += piece.iov_len;
        }
        Ok(Registered { domain: device.domain, access, segments, memory: Mutex::new(known) })
    }

    /// Addresses and keys for peers.
    pub(super) fn remote_segments(&self) -> Vec<RemoteSegment> {
        self.segments.iter().map(|segment| segment.remote).collect()
    }

    /// Appends entries for at most `len` bytes of the region from `offset` on, at most `max` of them. Returns how many bytes
    /// they cover.
    pub(super) fn sges(&self, offset: usize, len: usize, max: usize, out: &mut Vec<Sge>) -> usize {
        let mut index = self.segments.partition_point(|s| s.start + s.remote.len as usize <= offset);
        let (mut at, mut left) = (offset, len);
        let room = out.len() + max;
        while left > 0 && out.len() < room {
            let Some(segment) = self.segments.get(index) else { break };
            let skip = at - segment.start;
            let take = left.min(segment.remote.len as usize - skip);
            out.push(Sge::new(segment.remote.address + skip as u64, take as u32, segment.local_key));
            at += take;
            left -= take;
            index += 1;
        }
        len - left
    }
}

/// The registration, if the device may use such memory: else the owner moves it on request.
pub(super) fn if_supported<T>(registered: io::Result<T>) -> io::Result<Option<T>> {
    match registered {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            defer(move || tracing::debug!(target: "calomel::verbs", %error, "exposed memory is not moved by the device"));
            Ok(None)
        }
        registered => registered.map(Some),
    }
}

/// A user's region as one peer accesses it, and no other: through memory windows that are bound to that link's RMA queue pair.
pub(super) struct Windowed {
    /// In the order in which they are dropped.
    open: Mutex<Vec<(Mw, Mr)>>,
    remote_segments: Vec<RemoteSegment>,
}

impl DeviceRegistration for Windowed {
    fn end(&self) {
        self.open.lock().clear();
    }
}

impl Windowed {
    /// Windows that are not bound yet, one for each segment. `None` when the region's gate is closed.
    pub(super) fn of(region: &Region, device: &Device, access: AccessFlags) -> Option<io::Result<Arc<Windowed>>> {
        region.register(|pieces| {
            let (mut open, mut remote_segments) = (Vec::new(), Vec::new());
            let own = AccessFlags { local_write: access.remote_write, windows: true, ..AccessFlags::default() };
            for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
                let window = Mw::new(&device.pd)?;
                // SAFETY: as for `Registered`.
                let memory = unsafe { Mr::register(&device.pd, piece.iov_base.cast(), piece.iov_len, own) }?;
                remote_segments.push(RemoteSegment {
                    address: piece.iov_base.addr() as u64,
                    len: piece.iov_len as u64,
                    key: window.key,
                });
                open.push((window, memory));
            }
            Ok(Windowed { open: Mutex::new(open), remote_segments })
        })
    }

    pub(super) fn remote_segments(&self) -> &[RemoteSegment] {
        &self.remote_segments
    }

    /// Binds the windows: when that has completed, the peer of the queue pair can use their keys. False when the region is
    /// closed.
    pub(super) fn open(&self, qp: &Qp, id: u64, access: AccessFlags) -> io::Result<bool> {
        let open = self.open.lock();
        let windows: Vec<_> = open
            .iter()
            .zip(&self.remote_segments)
            .map(|((window, memory), remote)| (window, memory, remote.address, remote.len))
            .collect();
        // SAFETY: windows are dropped before their memory, which the region keeps where it is until then.
        unsafe { qp.open(id, &windows, access) }?;
        Ok(!windows.is_empty())
    }
}
