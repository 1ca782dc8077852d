//! Memory that one peer accesses, and no other.

use std::io;
use std::time::{Duration, Instant};

use super::super::memory::{Windowed, if_supported};
use super::super::sys::AccessFlags;
use super::super::wire;
use super::VerbsLink;
use crate::memory::Region;
use crate::transport::{self, RemoteKeys};

/// Windows of one exposure. Memory with more segments is moved by its owner on request.
const MOST: usize = 16;
/// Time limit for binding them: a device does it in microseconds.
const LIMIT: Duration = Duration::from_millis(100);

impl VerbsLink {
    /// Keys that are valid on this link's RMA queue pair only.
    pub(super) fn open_windows(&self, region: &Region, access: transport::DeviceAccess) -> io::Result<Option<RemoteKeys>> {
        let Some(connection) = self.connection.get().filter(|_| !self.is_closed()) else { return Ok(None) };
        if !connection.device.limits.windows || region.len() == 0 || region.segment_count() > MOST {
            return Ok(None);
        }
        let wanted = AccessFlags { remote_read: access.read, remote_write: access.write, ..AccessFlags::default() };
        let Some(registered) = Windowed::of(region, &connection.device, wanted) else { return Ok(None) };
        let Some(windows) = if_supported(registered)? else { return Ok(None) };
        let opening = match connection.rma.lock().as_mut() {
            Some(rma) => rma.open(&windows, wanted)?,
            None => None,
        };
        let Some(opened) = opening else { return Ok(None) };
        let until = Instant::now() + LIMIT;
        while opened.get().is_none() && Instant::now() < until {
            connection.links.collect_completions(&connection.queue_set)?;
            std::thread::yield_now();
        }
        // The driver handles the completions that were polled here.
        self.shared.wake();
        if opened.get() != Some(&true) {
            return Ok(None);
        }
        let mut keys = Vec::new();
        wire::encode_keys(connection.device.domain, windows.remote_segments(), &mut keys);
        Ok(Some(keys.into()))
    }
}
