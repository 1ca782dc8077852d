//! Memory that the library allocates: single buffers, and pools of them.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Bytes allocated by an engine with [`Engine::alloc`](crate::Engine::alloc), zeroed. Use it as a `[u8]`, and expose it as
/// any other buffer.
pub struct EngineBuffer(Box<[u8]>);

impl EngineBuffer {
    pub(crate) fn new(len: usize) -> EngineBuffer {
        EngineBuffer(vec![0; len].into_boxed_slice())
    }
}

impl Deref for EngineBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for EngineBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl fmt::Debug for EngineBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineBuffer({} bytes)", self.0.len())
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
