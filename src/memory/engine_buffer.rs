//! Memory that the library allocates: single buffers, and pools of them.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::sync::{Condvar, Mutex};

use super::shared::Block;
use crate::Address;
use crate::fork::CreatorProcess;

/// From this size on, a buffer gets a descriptor and a mapping of its own.
const SHARED_FROM: usize = 64 << 10;

/// Bytes allocated by an engine with [`Engine::alloc`](crate::Engine::alloc), zeroed. Use it as a `[u8]`, and expose it as
/// any other buffer.
///
/// From 64 KiB on it lies in memory that processes of the same user can map, so that they copy straight from it. Over `shm://`
/// a peer maps it when it pulls from it while all of it is exposed for reading without the restrictions of a
/// [`Grant`](crate::Grant), and not before. Such a peer can read the buffer until it is reclaimed. The first time that the
/// buffer is written after that, its content moves to other memory, which no peer maps, so peers do not see what is written
/// later. This costs one copy, and from then on peers get the content as they get that of other memory. So the mapping pays
/// off for a buffer that many peers pull from, and not for one that is written again and again.
///
/// Each buffer that can be mapped takes a file descriptor; beyond 1024 of them, or a quarter of what the process may have,
/// buffers are ordinary memory.
///
/// # Panics
/// A forked child does not have the buffers of 64 KiB and more that its parent has allocated: it may drop them, but reading or
/// writing one panics. A reference to the content that was made before the fork must not be used in the child.
pub struct EngineBuffer(BufferMemory);

enum BufferMemory {
    Own(Box<[u8]>),
    Shared(Arc<Block>),
}

impl EngineBuffer {
    pub(crate) fn new(len: usize) -> EngineBuffer {
        if len >= SHARED_FROM {
            match Block::new(len) {
                Ok(block) => return EngineBuffer(BufferMemory::Shared(block)),
                Err(error) => {
                    tracing::debug!(target: "calomel::memory", len, %error, "no shared memory for a buffer, using the heap")
                }
            }
        }
        EngineBuffer(BufferMemory::Own(vec![0; len].into_boxed_slice()))
    }

    /// The block that peers can map, if the buffer is one.
    pub(super) fn block(&self) -> Option<&Arc<Block>> {
        match &self.0 {
            BufferMemory::Own(_) => None,
            BufferMemory::Shared(block) => Some(block),
        }
    }

    /// The length, also in a forked child.
    fn size(&self) -> usize {
        match &self.0 {
            BufferMemory::Own(bytes) => bytes.len(),
            BufferMemory::Shared(block) => block.mapping.len(),
        }
    }

    /// Moves the content out of memory that a peer may have mapped.
    fn leave_mapped_block(&mut self) {
        if let BufferMemory::Shared(block) = &self.0
            && block.is_given()
        {
            // SAFETY: the reference to `self` is unique, so nothing else refers to the content; and it is not exposed, since
            // what is exposed is never referred to for writing.
            let content = unsafe { block.move_out() };
            self.0 = BufferMemory::Own(content);
        }
    }
}

impl Deref for EngineBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            BufferMemory::Own(bytes) => bytes,
            // SAFETY: the mapping is of this length, valid for reads, and zeroed at first; other processes can't write it. In
            // this process only the buffer's owner does, and what is exposed of it is never referred to.
            BufferMemory::Shared(block) => unsafe { std::slice::from_raw_parts(block.begin(), block.mapping.len()) },
        }
    }
}

impl DerefMut for EngineBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.leave_mapped_block();
        match &mut self.0 {
            BufferMemory::Own(bytes) => bytes,
            // SAFETY: as above, and valid for writes: nothing else has the address, and no peer has it mapped.
            BufferMemory::Shared(block) => unsafe { std::slice::from_raw_parts_mut(block.begin(), block.mapping.len()) },
        }
    }
}

impl fmt::Debug for EngineBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineBuffer({} bytes)", self.size())
    }
}

/// A fixed number of equal buffers, allocated once. Clones are the same pool.
///
/// A service that transfers bulk data takes a buffer, exposes it, transfers, and drops it, without an allocation (except for
/// the one that an [`EngineBuffer`] makes when it is first written after a peer has mapped it). In a forked child, a pool of
/// the parent has no buffers.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Pool>,
}

struct Pool {
    /// The process that made the pool: in its children, `free` may be locked by a thread that does not exist there.
    process: CreatorProcess,
    /// The engine's address, for errors.
    owner: Address,
    buffer_len: usize,
    count: usize,
    free: Mutex<Vec<EngineBuffer>>,
    /// A buffer was returned.
    returned: Condvar,
}

impl BufferPool {
    pub(crate) fn new(owner: Address, buffer_len: usize, count: usize) -> BufferPool {
        let free = (0..count).map(|_| EngineBuffer::new(buffer_len)).collect();
        let (process, free) = (CreatorProcess::this(), Mutex::new(free));
        BufferPool { shared: Arc::new(Pool { process, owner, buffer_len, count, free, returned: Condvar::default() }) }
    }

    /// A buffer of the pool, with whatever its last user left in it; `None` when all are taken.
    /// [`BufferPool::take_timeout`] waits for one.
    pub fn take(&self) -> Option<PooledBuffer> {
        if self.is_forked() {
            return None;
        }
        let buffer = self.shared.free.lock().pop()?;
        Some(self.taken(buffer))
    }

    fn taken(&self, buffer: EngineBuffer) -> PooledBuffer {
        PooledBuffer { buffer: Some(buffer), pool: Arc::downgrade(&self.shared) }
    }

    /// As `take`, but waits for a buffer, until the deadline if there is one. Must not be called in a forked child.
    pub(crate) fn take_until(&self, deadline: Option<Instant>) -> Option<PooledBuffer> {
        let Pool { free, returned, .. } = &*self.shared;
        let mut free = free.lock();
        loop {
            if let Some(buffer) = free.pop() {
                return Some(self.taken(buffer));
            }
            match deadline {
                None => free = returned.wait(free),
                Some(deadline) if Instant::now() >= deadline => return None,
                Some(deadline) => (free, _) = returned.wait_until(free, deadline),
            }
        }
    }

    pub(crate) fn owner(&self) -> &Address {
        &self.shared.owner
    }

    /// True in a child of the process that made the pool.
    pub(crate) fn is_forked(&self) -> bool {
        self.shared.process.is_forked_child()
    }

    /// How many buffers can be taken now.
    pub fn available(&self) -> usize {
        if self.is_forked() { 0 } else { self.shared.free.lock().len() }
    }

    /// How many buffers there are, taken ones included.
    pub fn capacity(&self) -> usize {
        self.shared.count
    }

    /// The length of each buffer in bytes.
    pub fn buffer_len(&self) -> usize {
        self.shared.buffer_len
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferPool({} of {} x {} bytes)", self.available(), self.capacity(), self.buffer_len())
    }
}

/// A buffer of a [`BufferPool`], which it goes back to when it is dropped.
pub struct PooledBuffer {
    /// Taken out by `drop` only.
    buffer: Option<EngineBuffer>,
    pool: Weak<Pool>,
}

impl PooledBuffer {
    pub(super) fn block(&self) -> Option<&Arc<Block>> {
        self.buffer.as_ref()?.block()
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        if let (Some(buffer), Some(pool)) = (self.buffer.take(), self.pool.upgrade())
            && !pool.process.is_forked_child()
        {
            pool.free.lock().push(buffer);
            pool.returned.notify_one();
        }
    }
}

impl fmt::Debug for PooledBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PooledBuffer({} bytes)", self.buffer.as_ref().map_or(0, EngineBuffer::size))
    }
}
