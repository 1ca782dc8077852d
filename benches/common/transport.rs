//! The measured transports, and the engines of each.

use std::{
    process,
    sync::atomic::{AtomicUsize, Ordering},
};

use calomel::{Engine, EngineBuilder};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Shm,
    /// Shared memory whose bulk data goes through the ring, whatever the engine would choose.
    ShmRing,
    /// Shared memory whose bulk data the kernel copies.
    ShmKernelCopy,
    Loop,
}

impl Transport {
    /// Those in their default configuration.
    pub const ALL: [Transport; 3] = [Transport::Tcp, Transport::Shm, Transport::Loop];
    const CONFIGURED: [Transport; 2] = [Transport::ShmRing, Transport::ShmKernelCopy];

    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
            Transport::ShmRing => "shm, ring",
            Transport::ShmKernelCopy => "shm, kernel",
            Transport::Loop => "loop",
        }
    }

    pub fn scheme(self) -> &'static str {
        match self {
            Transport::ShmRing | Transport::ShmKernelCopy => "shm",
            plain => plain.name(),
        }
    }

    pub fn parse(name: &str) -> Option<Transport> {
        Transport::ALL.into_iter().chain(Transport::CONFIGURED).find(|transport| transport.name() == name)
    }

    /// An engine that calls.
    pub fn client(self) -> calomel::Result<Engine> {
        self.builder().transport(self.scheme()).build()
    }

    /// An engine that listens at a free address.
    pub fn server(self) -> calomel::Result<Engine> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let address = match self {
            Transport::Tcp => "tcp://127.0.0.1:0".to_owned(),
            Transport::Shm | Transport::ShmRing | Transport::ShmKernelCopy => "shm://".to_owned(),
            Transport::Loop => format!("loop://bench-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)),
        };
        self.builder().listen(address).build()
    }

    fn builder(self) -> EngineBuilder {
        match self {
            Transport::Tcp => tcp(),
            Transport::Shm | Transport::Loop => Engine::builder(),
            Transport::ShmRing => Engine::builder().shm_kernel_copy(false),
            Transport::ShmKernelCopy => Engine::builder().shm_kernel_copy(true),
        }
    }
}

/// The builder of every tcp engine of the benchmarks: without the upgrade to shared memory on one host.
fn tcp() -> EngineBuilder {
    Engine::builder().same_host_upgrade(false)
}
