//! Memory that one peer reaches, and no other.

use std::io;
use std::time::{Duration, Instant};

use super::super::memory::Windowed;
use super::super::sys::Access;
use super::super::wire;
use super::VerbsLink;
use crate::memory::Region;
use crate::transport::{self, Keys};

/// Windows of one exposure. What has more segments is moved when its owner is asked.
const MOST: usize = 16;
/// How long it may take to open them: a device does it in microseconds.
const LIMIT: Duration = Duration::from_millis(100);

impl VerbsLink {
    /// Keys that are good on this link's lane only.
    pub(super) fn open_windows(&self, region: &Region, access: transport::Access) -> io::Result<Option<Keys>> {
        let Some(line) = self.line.get().filter(|_| !self.is_closed()) else { return Ok(None) };
        if !line.device.limits.windows || region.len() == 0 || region.segment_count() > MOST {
            return Ok(None);
        }
        let wanted = Access { remote_read: access.read, remote_write: access.write, ..Access::default() };
        let Some(windows) = Windowed::of(region, &line.device, wanted).transpose()? else { return Ok(None) };
        let opening = match line.lane.lock().as_mut() {
            Some(lane) => lane.open(&windows, wanted)?,
            None => None,
        };
        let Some(opened) = opening else { return Ok(None) };
        let until = Instant::now() + LIMIT;
        while opened.get().is_none() && Instant::now() < until {
            line.device.gather(&line.group)?;
            std::thread::yield_now();
        }
        // What was gathered is for whoever drives.
        self.shared.wake();
        if opened.get() != Some(&true) {
            return Ok(None);
        }
        let mut keys = Vec::new();
        wire::encode_keys(line.device.domain, windows.stretches(), &mut keys);
        Ok(Some(keys.into()))
    }
}
