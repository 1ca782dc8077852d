//! Shared memory and eventfds of both processes, on which the raw side of shared memory is built.
//!
//! The parent creates them and the child inherits the descriptors. All `unsafe` code of the benchmarks is here.
#![allow(unsafe_code, reason = "system calls and memory that two processes share")]

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Write},
    mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
    sync::atomic::AtomicU64,
};

/// Room for the cache lines that signal; the data follows.
const HEADER: usize = 64 << 10;
/// The largest data size.
pub const ROOM: usize = 256 << 20;

/// A mapping of the shared file. Both sides may access the words at any time; the words decide which side may access the data.
struct Area {
    base: NonNull<u8>,
}

// SAFETY: the mapping lives as long as the value, at the same address for every thread.
unsafe impl Send for Area {}
// SAFETY: the header is accessed by atomic words only; the protocol of the rounds orders the copies of the data.
unsafe impl Sync for Area {}

impl Area {
    fn map(file: &OwnedFd) -> io::Result<Area> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the system's choice, of a file that is that long.
        let base = unsafe { libc::mmap(ptr::null_mut(), HEADER + ROOM, access, flags, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Area { base: NonNull::new(base.cast()).expect("no mapping lies at zero") })
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped, and nothing borrowed from it outlives the value.
        unsafe { libc::munmap(self.base.as_ptr().cast(), HEADER + ROOM) };
    }
}

pub struct Shared {
    area: Area,
    file: OwnedFd,
    /// Signalled by the client, and signalled by the server.
    doorbells: [Doorbell; 2],
}

impl Shared {
    /// Child processes inherit its descriptors until [`Shared::keep`].
    pub fn create() -> io::Result<Shared> {
        // SAFETY: the name is a C string.
        let file = owned(unsafe { libc::memfd_create(c"calomel-bench".as_ptr(), 0) })?;
        File::from(file.try_clone()?).set_len((HEADER + ROOM) as u64)?;
        // SAFETY: takes numbers only.
        let doorbell = || owned(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK) });
        Ok(Shared { area: Area::map(&file)?, doorbells: [Doorbell::new(doorbell()?)?, Doorbell::new(doorbell()?)?], file })
    }

    /// In the child: from the numbers that the parent gave on the command line.
    pub fn inherit(numbers: &[String]) -> io::Result<Shared> {
        let mut files = Vec::new();
        for number in numbers {
            let number: RawFd = number.parse().map_err(io::Error::other)?;
            // SAFETY: the parent made it for this process, which takes it once.
            files.push(unsafe { OwnedFd::from_raw_fd(number) });
        }
        let files: [OwnedFd; 3] = files.try_into().map_err(|_| io::Error::other("three descriptors are inherited"))?;
        let [file, out, back] = files;
        Ok(Shared { area: Area::map(&file)?, doorbells: [Doorbell::new(out)?, Doorbell::new(back)?], file })
    }

    pub fn numbers(&self) -> [String; 3] {
        [self.file.as_raw_fd(), self.doorbells[0].file.as_raw_fd(), self.doorbells[1].file.as_raw_fd()]
            .map(|number| number.to_string())
    }

    /// From now on child processes do not inherit them.
    pub fn keep(&self) -> io::Result<()> {
        for file in [self.file.as_raw_fd(), self.doorbells[0].file.as_raw_fd(), self.doorbells[1].file.as_raw_fd()] {
            // SAFETY: takes numbers only, of a descriptor that is open.
            checked(unsafe { libc::fcntl(file, libc::F_SETFD, libc::FD_CLOEXEC) } as isize)?;
        }
        Ok(())
    }

    /// A word with a cache line to itself.
    pub fn line(&self, number: usize) -> &AtomicU64 {
        assert!(number < HEADER / 64);
        // SAFETY: within the mapping.
        let word = unsafe { self.area.base.byte_add(number * 64) };
        // SAFETY: aligned to a cache line, mapped as long as `self`, and nothing but atomic accesses of it exist.
        unsafe { word.cast().as_ref() }
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let target = self.data(offset, bytes.len());
        // SAFETY: the target is that long and in no Rust allocation; the reader waits for the signal.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    }

    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let source = self.data(offset, bytes.len());
        // SAFETY: the source is that long and in no Rust allocation; the writer waits for the signal.
        unsafe { ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) };
    }

    fn data(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= ROOM && len <= ROOM - offset, "within the data");
        // SAFETY: within the mapping.
        unsafe { self.area.base.as_ptr().add(HEADER + offset) }
    }

    pub fn client_doorbell(&self) -> &Doorbell {
        &self.doorbells[0]
    }

    pub fn server_doorbell(&self) -> &Doorbell {
        &self.doorbells[1]
    }
}

/// An eventfd, and an epoll instance to sleep in until it is signalled.
pub struct Doorbell {
    file: File,
    poll: OwnedFd,
}

impl Doorbell {
    fn new(file: OwnedFd) -> io::Result<Doorbell> {
        // SAFETY: takes numbers only.
        let poll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
        // SAFETY: both descriptors are open, and the event is read during the call only.
        checked(unsafe { libc::epoll_ctl(poll.as_raw_fd(), libc::EPOLL_CTL_ADD, file.as_raw_fd(), &raw mut event) } as isize)?;
        Ok(Doorbell { file: file.into(), poll })
    }

    pub fn ring(&self) -> io::Result<()> {
        (&self.file).write_all(&1u64.to_ne_bytes())
    }

    pub fn sleep(&self) -> io::Result<()> {
        loop {
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            // SAFETY: room for one event.
            let count = unsafe { libc::epoll_wait(self.poll.as_raw_fd(), &raw mut event, 1, -1) };
            checked(count as isize)?;
            match (&self.file).read(&mut [0; 8]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                outcome => return outcome.map(drop),
            }
        }
    }
}

/// Reads another process' memory.
pub fn vm_read(pid: u32, address: u64, bytes: &mut [u8]) -> io::Result<()> {
    whole(bytes.len(), |done| {
        let rest = &mut bytes[done..];
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let remote = libc::iovec { iov_base: ptr::without_provenance_mut(address as usize + done), iov_len: rest.len() };
        // SAFETY: the local range is borrowed mutably; the system checks the remote one.
        unsafe { libc::process_vm_readv(pid as libc::pid_t, &raw const local, 1, &raw const remote, 1, 0) }
    })
}

/// Writes another process' memory.
pub fn vm_write(pid: u32, address: u64, bytes: &[u8]) -> io::Result<()> {
    whole(bytes.len(), |done| {
        let rest = &bytes[done..];
        let local = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
        let remote = libc::iovec { iov_base: ptr::without_provenance_mut(address as usize + done), iov_len: rest.len() };
        // SAFETY: the local range is borrowed and only read; the benchmark's client keeps the remote range for this write
        // alone.
        unsafe { libc::process_vm_writev(pid as libc::pid_t, &raw const local, 1, &raw const remote, 1, 0) }
    })
}

/// Calls `step` until `len` bytes are transferred.
fn whole(len: usize, mut step: impl FnMut(usize) -> isize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        done += checked(step(done))? as usize;
    }
    Ok(())
}

/// Raises this process' limit of open files to the hard limit, and returns it.
pub fn raise_file_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is written during the call only.
    checked(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } as isize)?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the limit is read during the call only.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } as isize)?;
    Ok(limit.rlim_cur)
}

/// While it lives, this thread, and the threads and processes that it starts, run on one core.
pub struct OneCore {
    before: libc::cpu_set_t,
}

impl OneCore {
    pub fn keep() -> io::Result<OneCore> {
        // SAFETY: a set of bits, for which zero is valid.
        let [mut before, mut one]: [libc::cpu_set_t; 2] = unsafe { mem::zeroed() };
        // SAFETY: room for the set.
        checked(unsafe { libc::sched_getaffinity(0, size_of_val(&before), &raw mut before) } as isize)?;
        // SAFETY: within the set.
        let is_allowed = |core: &usize| unsafe { libc::CPU_ISSET(*core, &before) };
        // Interrupts are handled on the first one, as a rule.
        let last = (0..libc::CPU_SETSIZE as usize).rev().find(is_allowed).ok_or_else(|| io::Error::other("there is no core"))?;
        // SAFETY: within the set.
        unsafe { libc::CPU_SET(last, &mut one) };
        // SAFETY: the set is read during the call only.
        checked(unsafe { libc::sched_setaffinity(0, size_of_val(&one), &raw const one) } as isize)?;
        Ok(OneCore { before })
    }
}

impl Drop for OneCore {
    fn drop(&mut self) {
        // SAFETY: the set is read during the call only.
        unsafe { libc::sched_setaffinity(0, size_of_val(&self.before), &raw const self.before) };
    }
}

fn owned(number: RawFd) -> io::Result<OwnedFd> {
    checked(number as isize)?;
    // SAFETY: a descriptor that the system has just made, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn checked(outcome: isize) -> io::Result<isize> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(outcome) }
}
