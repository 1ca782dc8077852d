//! Shared memory that other processes map by its descriptor. It has no name, so a process that dies leaves nothing behind.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::fork::CreatorProcess;

/// The `f_type` of plain shared memory; huge pages and files have others.
const TMPFS: i64 = 0x0102_1994;

/// A mapping of memory in this process, shared or private, unmapped when dropped.
pub(crate) struct Mapping {
    address: NonNull<u8>,
    len: usize,
    /// The only process that has the mapping, where its forked children do not get it.
    only_in: Option<CreatorProcess>,
}

// SAFETY: an address and a length; the code that reads or writes there justifies it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Mapping> {
        // SAFETY: no address is asked for, so no mapping is replaced.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }?;
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { address, len, only_in: None })
    }

    /// Private memory, zeroed, whose pages are allocated when they are touched.
    pub(crate) fn anonymous(len: usize) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so no mapping is replaced.
        let address = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE) }?;
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { address, len, only_in: None })
    }

    /// Excludes the memory from children that this process forks, which would else share it.
    fn exclude_from_forks(&mut self) -> io::Result<()> {
        let advice = Advice::LinuxDontFork;
        // SAFETY: the range is the mapping. A child has nothing mapped there; each access checks the process first.
        unsafe { rustix::mm::madvise(self.address.as_ptr().cast(), self.len, advice) }?;
        self.only_in = Some(CreatorProcess::this());
        Ok(())
    }

    /// True where the memory is not mapped: in a forked child.
    fn is_unmapped(&self) -> bool {
        self.only_in.is_some_and(CreatorProcess::is_forked_child)
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_unmapped() {
            // Another mapping may be at this address now.
            return;
        }
        // SAFETY: the range is the one that was mapped, and all users of it have been dropped before.
        let unmapped = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!(target: "calomel::memory", %error, "can't unmap memory");
        }
    }
}

/// Creates shared memory, zeroed, that this process may write and the receivers of the descriptor may read. With `reserve` its
/// pages are allocated now: without memory there is an error now instead of a fault later.
pub(crate) fn create(len: usize, reserve: bool) -> io::Result<(OwnedFd, Mapping)> {
    let (fd, mapping) = unsealed(len)?;
    if reserve {
        // A signal may interrupt it, and then no pages are allocated.
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64))?;
    }
    // Before Linux 5.1 there is no seal against future writes; receivers could corrupt only what they read anyway.
    let sealed = rustix::fs::fcntl_add_seals(&fd, FIXED | SealFlags::FUTURE_WRITE | SealFlags::SEAL);
    sealed.or_else(|_| rustix::fs::fcntl_add_seals(&fd, FIXED | SealFlags::SEAL))?;
    Ok((fd, mapping))
}

/// As [`create`], for memory whose pages are released before others have unmapped it, which a seal against writing forbids. The
/// descriptor is read-only instead.
fn create_releasable(len: usize) -> io::Result<(OwnedFd, Mapping)> {
    let (fd, mapping) = unsealed(len)?;
    rustix::fs::fcntl_add_seals(&fd, FIXED | SealFlags::SEAL)?;
    // Receivers can't reopen it for writing by mistake either: a process of the same user would have to change the mode first.
    rustix::fs::fchmod(&fd, Mode::RUSR)?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let readable = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok((readable, mapping))
}

const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

fn unsealed(len: usize) -> io::Result<(OwnedFd, Mapping)> {
    let fd = rustix::fs::memfd_create("calomel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    let mapping = Mapping::new(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
    Ok((fd, mapping))
}

/// Maps memory that another process has made with [`create`], for reading. Checks that it can't be truncated, and that it is
/// plain memory, so that reading it does no I/O.
pub(crate) fn attach(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the peer's shared memory {what}"));
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| wrong("is not sealed"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(wrong("is not sealed against truncation"));
    }
    #[allow(clippy::unnecessary_cast)] // The width differs between architectures.
    if rustix::fs::fstatfs(fd)?.f_type as i64 != TMPFS {
        return Err(wrong("is not plain memory"));
    }
    let size = rustix::fs::fstat(fd)?.st_size;
    if len == 0 || u64::try_from(size).is_ok_and(|size| size < len as u64) {
        return Err(wrong(&format!("has {size} bytes where {len} were announced")));
    }
    Mapping::new(fd, len, ProtFlags::READ)
}

/// Memory of [`Engine::alloc`](crate::Engine::alloc) that peers on the same host can map, and copy from directly.
pub(crate) struct Block {
    pub mapping: Mapping,
    fd: OwnedFd,
    /// Unique among the blocks of the process; never 0, and never reused.
    pub id: u64,
    /// A peer may have it mapped: from then on, only content that these peers may read may be written into it.
    given: AtomicBool,
}

/// The number of blocks in this process.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Most blocks at a time, and no more than take a quarter of the descriptors that the process may have: connections need some.
const MAX_BLOCKS: u64 = 1024;
/// Bytes copied out of a block before their pages are released: a multiple of every page size.
const STEP: usize = 2 << 20;

impl Block {
    pub(crate) fn new(len: usize) -> io::Result<Arc<Block>> {
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        if COUNT.load(Ordering::Acquire) as u64 >= (descriptors / 4).min(MAX_BLOCKS) {
            return Err(io::Error::other(
                "too many shared blocks: their descriptors are limited to 1024, or a quarter of RLIMIT_NOFILE",
            ));
        }
        let (fd, mut mapping) = create_releasable(len)?;
        mapping.exclude_from_forks()?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        COUNT.fetch_add(1, Ordering::Release);
        Ok(Arc::new(Block { mapping, fd, id, given: AtomicBool::new(false) }))
    }

    /// The descriptor, for a peer that may read all of the block.
    pub(crate) fn give(&self) -> BorrowedFd<'_> {
        self.given.store(true, Ordering::Release);
        self.fd.as_fd()
    }

    /// True when a peer may have it mapped.
    pub(crate) fn is_given(&self) -> bool {
        self.given.load(Ordering::Acquire)
    }

    /// Where it begins.
    ///
    /// # Panics
    /// In a forked child, which does not have it.
    pub(crate) fn begin(&self) -> *mut u8 {
        if self.mapping.is_unmapped() {
            used_in_forked_child(self.mapping.len());
        }
        self.mapping.address()
    }

    /// Its content, in memory that no peer has mapped. Its old pages are released on the way.
    ///
    /// # Safety
    /// Nothing else may refer to the content, or access it.
    pub(crate) unsafe fn move_out(&self) -> Box<[u8]> {
        let (begin, len) = (self.begin(), self.mapping.len());
        let mut content = vec![0; len].into_boxed_slice();
        for (number, target) in content.chunks_mut(STEP).enumerate() {
            let source = begin.wrapping_add(number * STEP);
            // SAFETY: the source lies in the mapping, and nothing writes there, as the caller promises; the target is as long,
            // and was allocated above.
            unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
            // SAFETY: as the caller promises, nothing needs what is there any more.
            unsafe { self.release_pages(source, target.len()) };
        }
        content
    }

    /// Releases pages to the kernel, also those that peers have mapped: they read zeros then.
    ///
    /// # Safety
    /// The range must lie in the mapping, begin on a page, and hold nothing that is needed.
    unsafe fn release_pages(&self, address: *mut u8, len: usize) {
        // SAFETY: as the caller promises.
        if let Err(error) = unsafe { rustix::mm::madvise(address.cast(), len, Advice::LinuxRemove) } {
            tracing::debug!(target: "calomel::memory", %error, "can't release the pages of shared memory");
        }
    }
}

#[cold]
fn used_in_forked_child(len: usize) -> ! {
    panic!("an engine buffer of {len} bytes was used in a forked child, which does not have it: copy it before the fork")
}

impl Drop for Block {
    fn drop(&mut self) {
        // Also in a forked child, whose copy of the descriptor is closed.
        COUNT.fetch_sub(1, Ordering::Release);
        // The parent still uses the pages.
        if self.mapping.is_unmapped() {
            return;
        }
        // SAFETY: the range is the mapping, and all users of it in this process have been dropped before. Peers may keep it
        // mapped for a while.
        unsafe { self.release_pages(self.mapping.address(), self.mapping.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attached_mapping_reads_what_the_owner_wrote_and_longer_ones_are_refused() {
        let block = Block::new(10_000).unwrap();
        // SAFETY: the mapping is of this length, and no other thread knows of it.
        unsafe { block.mapping.address().wrapping_add(9_999).write(7) };
        let attached = attach(block.give(), 10_000).unwrap();
        // SAFETY: it is mapped for reads, and no thread writes it now.
        assert_eq!(unsafe { attached.address().wrapping_add(9_999).read() }, 7);
        assert!(attach(block.give(), 20_000).is_err());
        assert!(attach(block.give(), 0).is_err());
    }

    #[test]
    fn receivers_of_the_descriptor_can_neither_truncate_nor_write() {
        let block = Block::new(4096).unwrap();
        assert!(rustix::fs::ftruncate(block.give(), 0).is_err());
        let (own, _mapping) = create(4096, false).unwrap();
        assert!(rustix::fs::ftruncate(&own, 0).is_err());
        assert!(Mapping::new(own.as_fd(), 4096, ProtFlags::WRITE).is_err());
        assert!(Mapping::new(block.give(), 4096, ProtFlags::WRITE).is_err());
    }

    #[test]
    fn attach_to_unsealed_memory_or_a_file_is_refused() {
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, 4096).unwrap();
        assert!(attach(plain.as_fd(), 4096).is_err());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(attach(file.as_fd(), 16).is_err());
    }

    #[test]
    fn content_moved_out_of_a_block_reads_as_zeros_in_attached_mappings() {
        const LEN: usize = 2 * STEP + 10_000;
        let block = Block::new(LEN).unwrap();
        // SAFETY: the mapping is of this length, and nothing else refers to it.
        unsafe { std::slice::from_raw_parts_mut(block.begin(), LEN) }.fill(7);
        let attached = attach(block.give(), LEN).unwrap();
        // SAFETY: it is accessed here only.
        let content = unsafe { block.move_out() };
        assert!(content.len() == LEN && content.iter().all(|byte| *byte == 7));
        // SAFETY: it is mapped for reads, and nothing writes it.
        let seen = unsafe { std::slice::from_raw_parts(attached.address(), LEN) };
        assert!(block.is_given() && seen.iter().all(|byte| *byte == 0));
    }
}
