//! Memory that the library allocates: single buffers, and pools of them.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::shared::Block;

/// From this size on memory is worth a descriptor and a mapping of its own.
const SHARED_FROM: usize = 64 << 10;

/// Bytes allocated by an engine with [`Engine::alloc`](crate::Engine::alloc), zeroed. Use it as a `[u8]`, and expose it as
/// any other buffer.
///
/// From 64 KiB on it lies in memory that peers on the same host can map, so that they copy straight from it. Each such buffer
/// takes a file descriptor; beyond 1024 of them, or a quarter of what the process may have, buffers are ordinary memory.
pub struct EngineBuffer(Bytes);

enum Bytes {
    Own(Box<[u8]>),
    Shared(Arc<Block>),
}

impl EngineBuffer {
    pub(crate) fn new(len: usize) -> EngineBuffer {
        if len >= SHARED_FROM {
            match Block::new(len) {
                Ok(block) => return EngineBuffer(Bytes::Shared(block)),
                Err(error) => tracing::debug!(target: "calomel::memory", len, %error, "no shared memory for a buffer"),
            }
        }
        EngineBuffer(Bytes::Own(vec![0; len].into_boxed_slice()))
    }
}

impl Deref for EngineBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Own(bytes) => bytes,
            // SAFETY: the mapping is of this length, valid for reads, and zeroed at first; other processes can't write it. In
            // this process only the buffer's owner does, and what is exposed of it is never referred to.
            Bytes::Shared(block) => unsafe { std::slice::from_raw_parts(block.mapping.address(), block.mapping.len()) },
        }
    }
}

impl DerefMut for EngineBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Bytes::Own(bytes) => bytes,
            // SAFETY: as above, and valid for writes: nobody else has the address but to tell peers of it.
            Bytes::Shared(block) => unsafe { std::slice::from_raw_parts_mut(block.mapping.address(), block.mapping.len()) },
        }
    }
}

impl fmt::Debug for EngineBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineBuffer({} bytes)", self.len())
    }
}

/// A fixed number of equal buffers, allocated once. Clones are the same pool.
///
/// A service that moves bulk data takes a buffer, exposes it, transfers, and drops it: no allocation on the way.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Pool>,
}

struct Pool {
    buffer_len: usize,
    count: usize,
    free: Mutex<Vec<EngineBuffer>>,
}

impl BufferPool {
    pub(crate) fn new(buffer_len: usize, count: usize) -> BufferPool {
        let free = (0..count).map(|_| EngineBuffer::new(buffer_len)).collect();
        BufferPool { shared: Arc::new(Pool { buffer_len, count, free: Mutex::new(free) }) }
    }

    /// A buffer of the pool, with whatever its last user left in it; `None` when all are taken.
    pub fn take(&self) -> Option<PooledBuffer> {
        let buffer = self.shared.free.lock().pop()?;
        Some(PooledBuffer { buffer: Some(buffer), home: Arc::downgrade(&self.shared) })
    }

    /// How many buffers can be taken now.
    pub fn available(&self) -> usize {
        self.shared.free.lock().len()
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
    home: Weak<Pool>,
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
        if let (Some(buffer), Some(pool)) = (self.buffer.take(), self.home.upgrade()) {
            pool.free.lock().push(buffer);
        }
    }
}

impl fmt::Debug for PooledBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PooledBuffer({} bytes)", self.len())
    }
}
