//! Calomel's shared-memory transport, with a ring of eight lines, in memory that loom watches.

#[path = "../../../../src/transport/shm/connection.rs"]
mod connection;
#[path = "../../../../src/transport/shm/copy_choice.rs"]
mod copy_choice;
#[path = "../../../../src/transport/shm/loans.rs"]
mod loans;
#[path = "../../../../src/transport/shm/mailbox.rs"]
mod mailbox;
#[path = "../../../../src/transport/shm/ring_path.rs"]
mod ring_path;
mod segment;

use std::sync::Arc;

use super::{Consumed, LinkKey, PayloadStatus, ReceiveTarget, Sink};
use crate::memory::{Region, Slice};
use crate::sync::Flag;
use crate::sync::atomic::Ordering;
use crate::watched::Watched;
use connection::Connection;
use mailbox::{KernelCopyPolicy, ShmInbox, ShmOutbox, Turn, Written};
use process::ShmPeer;
use segment::SharedSegment;

/// One end of a link, with the thread that drives it.
pub(crate) struct End {
    connection: Arc<Connection>,
    doorbell: Arc<Flag>,
    outbox: ShmOutbox,
    inbox: ShmInbox,
    pub received: Received,
}

/// What has arrived.
#[derive(Default)]
pub(crate) struct Received {
    pub frames: Vec<u8>,
    pub arrived: Vec<PayloadStatus>,
    pub returned: usize,
    pub lost: bool,
    /// Where payloads go.
    pub target: Option<Arc<Region>>,
}

impl Sink for Received {
    /// The first byte is the frame; if there is a target, a payload follows.
    fn bytes(&mut self, _: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        self.frames.push(bytes[0]);
        let target = self.target.as_ref().map(Slice::whole);
        Some(Consumed {
            used: bytes.len(),
            target: target.map(|target| ReceiveTarget { len: target.len, total: target.len, memory: Some(target) }),
        })
    }

    fn payload_done(&mut self, _: LinkKey, status: PayloadStatus) {
        self.arrived.push(status);
    }

    fn heard(&mut self, _: LinkKey) {}
}

/// Two ends. The first one exports the watched memory.
pub(crate) fn pair(exported: Option<&Watched>) -> (End, End) {
    let segments = [Arc::new(SharedSegment::new()), Arc::new(SharedSegment::new())];
    let doorbells = [Arc::<Flag>::default(), Arc::default()];
    let end = |own: usize, far: usize| {
        let peer = ShmPeer {
            own_user: true,
            socket: (),
            pid: exported.map_or(0, |exported| std::ptr::from_ref(exported).expose_provenance()),
            nonce: (),
            bell: doorbells[far].clone(),
        };
        let connection = Arc::new(Connection::new(segments[own].clone(), segments[far].clone(), peer, true));
        connection.lends.store(true, Ordering::Relaxed);
        End {
            outbox: ShmOutbox::new(&connection, KernelCopyPolicy::Always),
            inbox: ShmInbox::new(&connection),
            doorbell: doorbells[own].clone(),
            connection,
            received: Received::default(),
        }
    };
    (end(0, 1), end(1, 0))
}

impl End {
    /// Like a link's send; false when the rest has to wait.
    pub(crate) fn send(&mut self, bytes: Vec<u8>, payload: Option<Slice>) -> bool {
        let mut sending = self.outbox.begin(bytes, payload);
        let written = self.outbox.write(&self.connection, &mut sending, || false).unwrap();
        if let Written::Part = written {
            self.outbox.pending = Some(sending);
        }
        let all = self.outbox.pending.is_none();
        if self.outbox.is_waiting() {
            self.connection.set_waiting(true);
        }
        self.connection.wake_peer();
        all
    }

    /// Like a link's inject, and the wake-up that follows. False where there is no room.
    pub(crate) fn inject(&mut self, bytes: &[u8]) -> bool {
        let injected = self.outbox.inject(bytes);
        if self.connection.peer_sleeps().is_some() {
            self.connection.wake_peer();
        }
        injected
    }

    /// Like a link that continues with what waited.
    fn resume(&mut self) -> bool {
        let returned = self.outbox.loans.sweep(&self.connection);
        self.received.returned += returned;
        let mut any = returned > 0;
        if let Some(mut sending) = self.outbox.pending.take() {
            match self.outbox.write(&self.connection, &mut sending, || false).unwrap() {
                Written::Part => self.outbox.pending = Some(sending),
                Written::All | Written::Lent => any = true,
            }
        }
        self.connection.set_waiting(self.outbox.is_waiting());
        self.connection.wake_peer();
        any
    }

    fn turn(&mut self) -> bool {
        let any = self.outbox.is_waiting() && self.resume();
        let mut scratch = [0; connection::MAX_BODY];
        let turn = self.inbox.turn(LinkKey, &self.connection, &mut scratch, &mut self.received, &mut |_| ());
        match turn {
            Ok(turn) => any || turn != Turn::Nothing,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionAborted, "{error}");
                self.received.lost = true;
                true
            }
        }
    }

    /// Like a link that goes idle, and its driver in the reactor, until the doorbell.
    fn sleep(&mut self) {
        self.connection.fall_asleep();
        let waits = self.outbox.is_waiting();
        if !self.inbox.has_work() && !(waits && self.outbox.can_continue(&self.connection)) {
            self.doorbell.wait();
        }
        self.connection.awake();
    }

    /// Drives until the condition is true.
    pub(crate) fn until(&mut self, done: impl Fn(&End) -> bool) {
        while !done(self) {
            if !self.turn() {
                self.sleep();
            }
        }
    }

    /// Whether everything has been sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.outbox.pending.is_none()
    }

    /// Like a link's close.
    pub(crate) fn close(&mut self) {
        self.outbox.pending = None;
        self.outbox.loans.end(&self.connection);
    }
}

mod process {
    use std::sync::Arc;

    use crate::sync::Flag;

    pub(super) struct ShmPeer {
        pub own_user: bool,
        pub socket: (),
        /// Where its memory is.
        pub pid: usize,
        pub nonce: (),
        pub bell: Arc<Flag>,
    }

    impl ShmPeer {
        pub(super) fn ring(&self) {
            self.bell.raise();
        }

        pub(super) fn is_gone(&self) -> bool {
            false
        }

        pub(super) fn is_cut(&self) -> bool {
            false
        }

        pub(super) fn cut(&self) {
            panic!("a reader did not finish");
        }
    }
}

mod sys {
    pub(super) fn processor() -> Option<usize> {
        None
    }

    use std::io;

    use crate::memory::WriteAccess;
    use crate::watched::Watched;

    pub(super) const MAX_PIECES: usize = 1;

    #[derive(Clone, Copy)]
    pub(super) struct RemoteIoVec {
        pub address: u64,
        pub len: u64,
    }

    pub(super) fn max_call_len(_: &WriteAccess<'_>, _: usize) -> usize {
        usize::MAX
    }

    /// Reads the memory of the process.
    pub(super) fn read_process(pid: usize, _: &[RemoteIoVec], _: &WriteAccess<'_>, _: usize, _: ()) -> io::Result<bool> {
        // SAFETY: the memory lives as long as the model.
        let memory = unsafe { &*std::ptr::with_exposed_provenance::<Watched>(pid) };
        memory.read();
        Ok(true)
    }
}

mod blocks {
    use super::sys::RemoteIoVec;
    use crate::memory::{CopyPath, WriteAccess, shared::Mapping};

    pub(super) const MAX_BLOCKS: usize = 0;
    pub(super) const MAX_MAPPED: usize = 0;

    pub(super) fn read(_: &Mapping, _: &[RemoteIoVec], _: &WriteAccess<'_>, _: usize, _: CopyPath) -> bool {
        false
    }
}

mod handshake {
    use std::io;
    use std::os::fd::BorrowedFd;

    pub(super) enum ControlPacket {
        Block { id: u64, len: u64 },
    }

    pub(super) fn send<S>(_: &S, _: &ControlPacket, _: &[BorrowedFd<'_>]) -> io::Result<()> {
        Ok(())
    }
}
