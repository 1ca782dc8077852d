//! Processes that fork. In the child, each operation on the parent's engines fails at once; the child may drop them, exit, run
//! another program, or make its own engines. The parent is not affected.
//!
//! The fork happens while other threads call and transfer, so that in the child locks are held by threads that do not exist
//! there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{
    BufferPool, Bulk, BulkMode, Endpoint, Engine, EngineBuffer, Error, Exposed, HandlerPool, Pending, PooledBuffer, ReadOnly,
    Registration, Released, Request, Responder, Timer, Transfer,
};

use crate::roles::say;
use crate::support::*;

const LEN: usize = 1 << 20;
/// Too small to be shared with peers.
const SMALL: usize = 1000;

fn forked_child_gets_errors_and_can_drop_everything() {
    let _watchdog = Watchdog::start("forked_child_gets_errors_and_can_drop_everything");
    let mut child = Child::start("forks", &[]);
    child.hear("forked well");
    assert!(child.wait(BOUND).success());
}

fn forked_child_makes_engines_while_threads_of_the_parent_wait_for_locks() {
    let _watchdog = Watchdog::start("forked_child_makes_engines_while_threads_of_the_parent_wait_for_locks");
    let mut child = Child::start("forks-often", &[]);
    child.hear("forked well");
    assert!(child.wait(BOUND).success());
}

fn idle_connections_are_closed_while_a_forked_child_has_copies_of_them() {
    let _watchdog = Watchdog::start("idle_connections_are_closed_while_a_forked_child_has_copies_of_them");
    let mut child = Child::start("forks-idle", &[]);
    child.hear("forked well");
    assert!(child.wait(BOUND).success());
}

/// One of each kind of value that a process may have when it forks.
struct Belongings {
    engine: Engine,
    to_self: Endpoint,
    /// Calls without a response.
    pendings: Vec<Pending<()>>,
    pulls: Vec<Transfer<Vec<u8>>>,
    writable: Exposed<Vec<u8>>,
    shared: Exposed<EngineBuffer>,
    /// Engine memory that is not exposed: large and small.
    buffers: [EngineBuffer; 2],
    buffer_pool: BufferPool,
    pooled: PooledBuffer,
    seen: Exposed<EngineBuffer, ReadOnly>,
    constant: Exposed<Vec<u8>, ReadOnly>,
    released: Released,
    /// A call to this process.
    request: Request,
    responders: Vec<Responder<()>>,
    registration: Registration,
    timer: Timer,
    pool: HandlerPool,
}

impl Belongings {
    fn new(engine: &Engine, to: &Endpoint, caller: &Engine) -> Belongings {
        let (keep, kept) = std::sync::mpsc::channel();
        let pool = HandlerPool::new(2);
        let registration =
            engine.pool(&pool).define_deferred("keep", move |reply: Responder<()>, ()| keep.send(reply).unwrap()).unwrap();
        let to_here = caller.lookup(engine.address()).unwrap();
        let keep = caller.procedure::<(), ()>("keep");
        let mut responders = Vec::new();
        for _ in 0..3 {
            // Its caller gives up at once, which does not matter.
            keep.on(&to_here).notify(&()).unwrap();
            responders.push(kept.recv_timeout(BOUND).unwrap());
        }
        let never = engine.procedure::<(), ()>("never").on(to);
        // As of tasks, the first of which drives while it is polled.
        let mut pendings: Vec<_> = (0..5).map(|_| never.start(&()).unwrap()).collect();
        let mut context = Context::from_waker(Waker::noop());
        assert!(pendings.iter_mut().all(|pending| Pin::new(pending).poll(&mut context).is_pending()));
        let memory = engine.procedure::<(), Bulk>("memory").on(to).call(&()).unwrap();
        let pull = |_| {
            let local = engine.expose(vec![0u8; memory.len()], BulkMode::ReadWrite).unwrap();
            memory.on(to).start_pull_into(local)
        };
        let writable = engine.expose(pattern(1, LEN), BulkMode::ReadWrite).unwrap();
        let mut buffer = engine.alloc(LEN);
        buffer.copy_from_slice(&pattern(2, LEN));
        let filled = |seed: u64, len: usize| {
            let mut buffer = engine.alloc(len);
            buffer.copy_from_slice(&pattern(seed, len));
            buffer
        };
        let buffer_pool = engine.buffer_pool(LEN, 2);
        let mut pooled = buffer_pool.take().unwrap();
        pooled.copy_from_slice(&pattern(7, LEN));
        Belongings {
            buffers: [filled(5, LEN), filled(5, SMALL)],
            buffer_pool,
            pooled,
            seen: engine.expose_read_only(filled(6, LEN)).unwrap(),
            engine: engine.clone(),
            to_self: to_here,
            pendings,
            pulls: (0..4).map(pull).collect(),
            released: writable.released(),
            writable,
            shared: engine.expose(buffer, BulkMode::ReadWrite).unwrap(),
            constant: engine.expose_read_only(pattern(3, LEN)).unwrap(),
            request: responders[0].request().clone(),
            responders,
            registration,
            timer: engine.timer(Duration::from_secs(3600), || {}).unwrap(),
            pool,
        }
    }

    /// In the child: the number of the first step with a wrong result; 0 if there is none.
    fn are_of_no_use(mut self, to: &Endpoint) -> i32 {
        let mut step = 0;
        macro_rules! must {
            ($condition:expr) => {
                step += 1;
                if !$condition {
                    return step;
                }
            };
        }
        macro_rules! fails {
            ($result:expr) => {
                must!($result.is_err_and(|error: Error| error.to_string().contains("fork")));
            };
        }
        /// The call panics, with the reason in its message.
        macro_rules! says_so {
            ($what:expr) => {
                let panic = catch_unwind(AssertUnwindSafe(|| _ = std::hint::black_box($what)))
                    .map_err(|panic| panic.downcast::<String>());
                must!(panic.is_err_and(|text| text.is_ok_and(|text| text.contains("in a forked child"))));
            };
        }
        // Takes locks that a thread of the parent may have held at the fork.
        std::panic::set_hook(Box::new(|_| ()));
        let engine = &self.engine;
        // 1: calls.
        let add = engine.procedure::<(u32, u32), u32>("add").on(to);
        fails!(add.call(&(1, 2)));
        fails!(add.start(&(1, 2)));
        fails!(add.notify(&(1, 2)));
        fails!(engine.procedure::<(), ()>("never known before").on(&self.to_self).call(&()));
        // 5: the engine's own operations.
        fails!(engine.lookup(to.address()));
        fails!(engine.define("of the child", |_: &Request, ()| ()));
        fails!(engine.define_async("of the child", |_: Request, ()| async {}));
        fails!(engine.pool(&self.pool).define("of the child", |_: &Request, ()| ()));
        fails!(engine.expose(vec![0u8; 10], BulkMode::ReadWrite));
        fails!(engine.expose_to(to, vec![0u8; 10], BulkMode::ReadWrite));
        fails!(engine.expose_read_only(vec![0u8; 10]));
        let mut bytes = [0u8; 10];
        fails!(engine.scope(|scope| scope.expose(&mut bytes[..], BulkMode::ReadWrite)));
        fails!(engine.timer(Duration::ZERO, || {}));
        must!(engine.addresses() == [engine.address()]);
        engine.on_prefinalize(|| {});
        engine.on_finalize(|| {});
        fails!(self.buffer_pool.take_timeout(Duration::from_secs(3600)));
        // 16: the peer.
        fails!(to.shutdown());
        must!(!to.is_connected() && to.transport().is_none());
        // 18: calls in progress.
        let mut pendings = std::mem::take(&mut self.pendings);
        must!(pendings.iter().all(Pending::is_ready));
        pendings[0].cancel();
        fails!(pendings.pop().unwrap().wait());
        fails!(Pending::wait_any(&mut pendings).1);
        fails!(block_on(pendings.pop().unwrap()));
        drop(pendings);
        // 22: transfers.
        let bulk = self.writable.bulk();
        fails!(bulk.on(to).pull_into(&mut [0u8; 10][..]));
        fails!(bulk.on(to).push_from(&self.writable));
        fails!(bulk.origin(engine));
        let mut pulls = std::mem::take(&mut self.pulls);
        must!(pulls.iter().all(Transfer::is_ready));
        pulls[0].cancel();
        let (result, back) = pulls.pop().unwrap().wait();
        fails!(result);
        drop(back);
        let (result, back) = block_on(pulls.pop().unwrap());
        fails!(result);
        drop(back.reclaim());
        drop(pulls);
        // 27: exposed memory.
        must!(bulk.slice(1, 2).is_ok() && self.writable.slice(1, 2).is_ok());
        fails!(self.writable.read_at(0, &mut [0u8; 10]));
        fails!(self.writable.write_at(0, &[0u8; 10]));
        must!(*self.constant.view() == pattern(3, LEN));
        must!(!self.released.is_released());
        self.released.wait();
        fails!(self.released.wait_timeout(BOUND));
        block_on(self.released.clone());
        must!(self.writable.reclaim() == pattern(1, LEN));
        drop(self.constant);
        // 34: engine memory, which belongs to the parent.
        let part = self.seen.bulk().slice(10, 100).unwrap();
        fails!(engine.procedure::<Bulk, ()>("takes").on(to).call(&part));
        says_so!(self.seen.view()[0]);
        says_so!(self.buffers[0][0]);
        says_so!(self.buffers[0].fill(0));
        says_so!(bulk.on(to).push_from(&self.buffers[0][..]));
        says_so!(bulk.on(to).pull_into(&mut self.buffers[0][..]));
        must!(format!("{:?}", self.buffers[0]) == format!("EngineBuffer({LEN} bytes)"));
        must!(*self.buffers[1] == pattern(5, SMALL)[..]);
        self.buffers[1].fill(0);
        let mut back = self.shared.reclaim();
        says_so!(back[0]);
        says_so!(back[0] = 0);
        says_so!(self.pooled.fill(0));
        must!(format!("{:?}", self.pooled) == format!("PooledBuffer({LEN} bytes)"));
        must!(self.buffer_pool.take().is_none() && self.buffer_pool.available() == 0);
        let mut own = engine.alloc(LEN);
        must!(all_are(&own, 0));
        own.copy_from_slice(&pattern(8, LEN));
        drop((back, self.buffers, self.pooled, self.buffer_pool, self.seen));
        must!(*own == pattern(8, LEN)[..]);
        drop(own);
        // 49: calls to this process.
        must!(self.request.is_cancelled());
        fails!(self.responders.pop().unwrap().respond(&()));
        self.responders.pop().unwrap().fail("in the child");
        drop(self.responders);
        must!(!self.registration.remove());
        must!(!self.timer.cancel());
        drop((self.request, self.pool));
        // 53: the end.
        self.engine.wait_for_finalize();
        must!(self.engine.finalize().is_ok());
        0
    }
}

/// The last thing that the child does.
fn end(how: usize) -> i32 {
    match how % 4 {
        0 => 0,
        1 => std::process::exit(0),
        2 => {
            let (program, end) = (c"/bin/true", std::ptr::null());
            // SAFETY: both are texts that end with a zero, and the list ends with a null.
            unsafe { libc::execl(program.as_ptr(), program.as_ptr(), end as *const libc::c_char) };
            101
        }
        _ => {
            // The child can't use a device that the parent uses.
            let address = if is_over_verbs() { "tcp://127.0.0.1:0".to_owned() } else { anywhere() };
            let (server, client) = (configured().listen(address).build().unwrap(), client());
            define_add(&server);
            let endpoint = client.lookup(server.address()).unwrap();
            assert_serves(&client, &endpoint);
            let exposed = server.expose(pattern(4, LEN), BulkMode::ReadWrite).unwrap();
            let mut bytes = vec![0u8; LEN];
            assert_eq!(exposed.bulk().on(&endpoint).pull_into(&mut bytes).unwrap(), LEN);
            assert!(bytes == pattern(4, LEN));
            client.finalize().unwrap();
            server.finalize().unwrap();
            0
        }
    }
}

/// Forks, and waits for the child; its status.
fn fork(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child does what a user's child would do, and ends without returning from here. Locks of this program that
    // other threads hold are the library's to handle.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: takes a number. A child that hangs is ended by this signal.
        unsafe { libc::alarm(15 * patience()) };
        let code = catch_unwind(AssertUnwindSafe(child)).unwrap_or(100);
        // SAFETY: ends the process, without running what belongs to the parent.
        unsafe { libc::_exit(code) };
    }
    assert!(pid > 0);
    let mut status = 0;
    // SAFETY: the pointer is to a variable of the right type.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    status
}

/// The role behind [`forked_child_gets_errors_and_can_drop_everything`].
pub fn run() {
    // A long heartbeat: no peer is disconnected because the machine is busy.
    let patient = || builder().listen(anywhere()).default_timeout(2 * BOUND).build().unwrap();
    let (peer, engine) = (patient(), patient());
    define_add(&peer);
    define_add(&engine);
    peer.define("echo", |_: &Request, text: String| text).unwrap();
    let (keep, _kept) = std::sync::mpsc::channel();
    peer.define_deferred("never", move |reply: Responder<()>, ()| keep.send(reply).unwrap()).unwrap();
    let memory = peer.expose(pattern(9, LEN), BulkMode::ReadWrite).unwrap();
    let bulk = memory.bulk();
    peer.define("memory", move |_: &Request, ()| bulk.clone()).unwrap();
    let to = engine.lookup(peer.address()).unwrap();
    assert_serves(&engine, &to);
    let (stop, done) = (AtomicBool::new(false), Arc::new(AtomicU64::new(0)));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let echo = || engine.procedure::<String, String>("echo");
                while !stop.load(Ordering::SeqCst) {
                    assert_eq!(echo().on(&to).call(&"x".repeat(20_000)).unwrap().len(), 20_000);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
            scope.spawn(|| {
                let mut bytes = vec![0u8; LEN];
                while !stop.load(Ordering::SeqCst) {
                    assert_eq!(memory.bulk().on(&to).pull_into(&mut bytes).unwrap(), LEN);
                    assert!(bytes == pattern(9, LEN));
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let begin = Instant::now();
        for round in 0..24 {
            let belongings = Belongings::new(&engine, &to, &peer);
            let before = done.load(Ordering::SeqCst);
            // A copy of them: the parent's stay with the parent.
            let mut belongings = std::mem::ManuallyDrop::new(belongings);
            let status = fork(|| {
                // SAFETY: no other code in this process takes them.
                let belongings = unsafe { std::mem::ManuallyDrop::take(&mut belongings) };
                match belongings.are_of_no_use(&to) {
                    0 => end(round),
                    step => step,
                }
            });
            // SAFETY: the child took its copies, in another process.
            let belongings = unsafe { std::mem::ManuallyDrop::take(&mut belongings) };
            if status != 0 {
                stop.store(true, Ordering::SeqCst);
                panic!("round {round}: status {status:x}: a step, 64 for a panic, or the signal of a hang, e");
            }
            // The parent's values are unchanged.
            for pull in belongings.pulls {
                let (result, local) = pull.wait();
                assert_eq!(result.unwrap(), LEN);
                assert!(local.reclaim() == pattern(9, LEN));
            }
            assert!(belongings.writable.reclaim() == pattern(1, LEN));
            assert!(*belongings.shared.reclaim() == pattern(2, LEN)[..]);
            assert!(*belongings.buffers[0] == pattern(5, LEN)[..] && *belongings.buffers[1] == pattern(5, SMALL)[..]);
            assert!(*belongings.pooled == pattern(7, LEN)[..] && belongings.buffer_pool.available() == 1);
            drop(belongings.pooled);
            assert!(*belongings.seen.view() == pattern(6, LEN)[..] && belongings.buffer_pool.available() == 2);
            assert!(belongings.pendings.iter().all(|pending| !pending.is_ready()));
            assert!(belongings.timer.cancel() && belongings.registration.remove());
            assert_serves(&engine, &to);
            eventually("the other threads go on", || done.load(Ordering::SeqCst) > before);
            if begin.elapsed() > BOUND / 2 {
                break;
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
    drop(memory);
    peer.finalize().unwrap();
    engine.finalize().unwrap();
    say("forked well");
}

/// The role behind [`forked_child_makes_engines_while_threads_of_the_parent_wait_for_locks`]. Locks that are not the engine's
/// own would be held at some fork, by a thread that does not exist in the child: a process-wide table of waiting threads, for
/// one.
pub fn run_often() {
    let (server, client) = (configured().listen(anywhere()).build().unwrap(), client());
    define_add(&server);
    let to = client.lookup(server.address()).unwrap();
    let (stop, pool) = (AtomicBool::new(false), client.buffer_pool(SMALL, 1));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    drop(pool.take_timeout(BOUND).unwrap());
                }
            });
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    assert_serves(&client, &to);
                }
            });
        }
        let child = || {
            let engine = self::client();
            let waits = |_| {
                let pool = engine.buffer_pool(SMALL, 1);
                let _taken = pool.take();
                assert!(pool.take_timeout(Duration::from_micros(1)).is_err());
            };
            (0..50).for_each(waits);
            end(3)
        };
        let begin = Instant::now();
        let status = (0..100).take_while(|_| begin.elapsed() < BOUND / 2).map(|_| fork(child)).find(|status| *status != 0);
        stop.store(true, Ordering::SeqCst);
        assert_eq!(status, None, "64: a panic; e: the signal of a hang");
    });
    client.finalize().unwrap();
    server.finalize().unwrap();
    say("forked well");
}

/// The role behind [`idle_connections_are_closed_while_a_forked_child_has_copies_of_them`]. The child sends nothing on them, and
/// closes none.
pub fn run_idle() {
    let idle = || builder().listen(anywhere()).idle_timeout(Duration::from_millis(20)).build().unwrap();
    let (peer, engine) = (idle(), idle());
    define_add(&peer);
    let to = engine.lookup(peer.address()).unwrap();
    to.ping(BOUND).unwrap();
    thread::scope(|scope| {
        let child = scope.spawn(|| {
            fork(|| {
                for _ in 0..30 {
                    thread::sleep(Duration::from_millis(20));
                    if to.ping(BOUND).is_ok() || !engine.peers().is_empty() {
                        return 1;
                    }
                }
                0
            })
        });
        for _ in 0..5 {
            assert_serves(&engine, &to);
            eventually("the connection is closed", || engine.peers().is_empty() && peer.peers().is_empty());
        }
        assert_eq!(child.join().unwrap(), 0);
    });
    peer.finalize().unwrap();
    engine.finalize().unwrap();
    say("forked well");
}

over_each!(
    forked_child_gets_errors_and_can_drop_everything,
    forked_child_makes_engines_while_threads_of_the_parent_wait_for_locks,
    idle_connections_are_closed_while_a_forked_child_has_copies_of_them
);
