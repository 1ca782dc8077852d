//! Memory that other processes can map: by descriptor, with no name, so that nothing is left behind by whoever dies.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// What `fstatfs` says of memory that belongs to no file; of huge pages and of files it says something else.
const TMPFS: i64 = 0x0102_1994;

/// A stretch of memory in this process, shared or not, unmapped when dropped.
pub(crate) struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; whoever reads or writes there answers for it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Mapping> {
        // SAFETY: no address is asked for, so no mapping is replaced.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }?;
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { address, len })
    }

    /// Memory of this process alone, zeroed, whose pages are there once they are touched.
    pub(crate) fn anonymous(len: usize) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so no mapping is replaced.
        let address = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE) }?;
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { address, len })
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
        // SAFETY: the range is the one that was mapped, and whoever used it has gone before the mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!(target: "calomel::memory", %error, "can't unmap memory");
        }
    }
}

/// New shared memory, zeroed, that this process may write and those that get the descriptor may read. With `reserve` its
/// pages are taken from the system now: there is an error now instead of a fault later.
pub(crate) fn create(len: usize, reserve: bool) -> io::Result<(OwnedFd, Mapping)> {
    let (fd, mapping) = unsealed(len)?;
    if reserve {
        // A signal may break it off, and then none of the pages are there.
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64))?;
    }
    // Before Linux 5.1 there is no telling others to read only; they could spoil no more than what they are given.
    let sealed = rustix::fs::fcntl_add_seals(&fd, FIXED | SealFlags::FUTURE_WRITE | SealFlags::SEAL);
    sealed.or_else(|_| rustix::fs::fcntl_add_seals(&fd, FIXED | SealFlags::SEAL))?;
    Ok((fd, mapping))
}

/// As [`create`], for memory whose pages are to be given back before others have unmapped it, which a seal against writing
/// forbids. The descriptor itself is for reading only instead.
fn create_returnable(len: usize) -> io::Result<(OwnedFd, Mapping)> {
    let (fd, mapping) = unsealed(len)?;
    rustix::fs::fcntl_add_seals(&fd, FIXED | SealFlags::SEAL)?;
    // Nor can others open it anew for more.
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

/// Maps what another process has made with [`create`], for reading. It can't be made shorter behind our back, and reading it
/// touches memory only: both are checked.
pub(crate) fn attach(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the peer's shared memory {what}"));
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| wrong("is no sealed memory"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(wrong("could be made shorter"));
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
    pub fd: OwnedFd,
    /// Tells the blocks of a process apart; never 0, and never used again.
    pub id: u64,
    /// The process that made it.
    process: u32,
}

/// The blocks of this process, by address.
static BLOCKS: RwLock<BTreeMap<usize, Weak<Block>>> = RwLock::new(BTreeMap::new());
/// How many there are: mostly none, and then nobody has to look for them.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Most blocks at a time, and no more than take a quarter of the descriptors that the process may have: connections need some.
const MAX_BLOCKS: u64 = 1024;

impl Block {
    pub(crate) fn new(len: usize) -> io::Result<Arc<Block>> {
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        if COUNT.load(Ordering::Acquire) as u64 >= (descriptors / 4).min(MAX_BLOCKS) {
            return Err(io::Error::other("the blocks that there are take descriptors enough"));
        }
        // Where there is no `/proc`, the pages stay until every peer has unmapped them.
        let (fd, mapping) = create_returnable(len).or_else(|_| create(len, false))?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let block = Arc::new(Block { mapping, fd, id, process: std::process::id() });
        BLOCKS.write().insert(block.mapping.address().addr(), Arc::downgrade(&block));
        COUNT.fetch_add(1, Ordering::Release);
        Ok(block)
    }

    /// The block that holds the address, with its place there.
    pub(crate) fn find(address: *const u8) -> Option<(Arc<Block>, usize)> {
        if COUNT.load(Ordering::Acquire) == 0 {
            return None;
        }
        let (block, offset) = {
            let blocks = BLOCKS.read();
            let (start, block) = blocks.range(..=address.addr()).next_back()?;
            (block.upgrade()?, address.addr() - start)
        };
        // Not under the lock: this may be the last reference to it.
        (offset < block.mapping.len()).then_some((block, offset))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // A forked child must not take them from its parent, of whose threads one may hold the lock.
        if self.process != std::process::id() {
            return;
        }
        {
            let mut blocks = BLOCKS.write();
            // Before it is unmapped: afterwards the address may be another block's.
            blocks.remove(&self.mapping.address().addr());
        }
        COUNT.fetch_sub(1, Ordering::Release);
        // Peers may keep it mapped for a while; its pages are given back now.
        let (address, len) = (self.mapping.address().cast(), self.mapping.len());
        // SAFETY: the range is the mapping, and whoever used it here has gone before it.
        if let Err(error) = unsafe { rustix::mm::madvise(address, len, Advice::LinuxRemove) } {
            tracing::debug!(target: "calomel::memory", %error, "can't give back the pages of shared memory");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_by_whoever_attaches() {
        let block = Block::new(10_000).unwrap();
        // SAFETY: the mapping is of this length, and nobody else knows of it.
        unsafe { block.mapping.address().wrapping_add(9_999).write(7) };
        let there = attach(block.fd.as_fd(), 10_000).unwrap();
        // SAFETY: it is mapped for reads, and nobody writes it now.
        assert_eq!(unsafe { there.address().wrapping_add(9_999).read() }, 7);
        assert!(attach(block.fd.as_fd(), 20_000).is_err());
        assert!(attach(block.fd.as_fd(), 0).is_err());
    }

    #[test]
    fn it_can_be_neither_shortened_nor_written_by_others() {
        let block = Block::new(4096).unwrap();
        assert!(rustix::fs::ftruncate(&block.fd, 0).is_err());
        let (own, _mapping) = create(4096, false).unwrap();
        assert!(rustix::fs::ftruncate(&own, 0).is_err());
        assert!(Mapping::new(own.as_fd(), 4096, ProtFlags::WRITE).is_err());
        assert!(Mapping::new(block.fd.as_fd(), 4096, ProtFlags::WRITE).is_err());
    }

    #[test]
    fn what_is_no_sealed_memory_is_refused() {
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, 4096).unwrap();
        assert!(attach(plain.as_fd(), 4096).is_err());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(attach(file.as_fd(), 16).is_err());
    }

    #[test]
    fn a_block_is_found_by_its_addresses_and_no_others() {
        let block = Block::new(8192).unwrap();
        let start = block.mapping.address();
        let (found, offset) = Block::find(start.wrapping_add(8191)).unwrap();
        assert!(Arc::ptr_eq(&found, &block) && offset == 8191);
        drop(found);
        assert!(Block::find(start.wrapping_add(8192)).is_none_or(|(other, _)| other.id != block.id));
        let id = block.id;
        drop(block);
        assert!(Block::find(start).is_none_or(|(other, _)| other.id != id));
    }
}
