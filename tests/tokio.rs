//! Engines on tokio: callers and async handlers, on runtimes of one thread and of several.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use calomel::{BulkMode, Engine, Error, HandlerResult, Request};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};

const LONG: Duration = Duration::from_secs(20);

fn several_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs a test on both kinds of runtime, with a time limit.
fn on_both<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for runtime in [several_threads(), one_thread()] {
        runtime.block_on(async { timeout(LONG, test()).await.expect("the test hangs") });
    }
}

async fn pair() -> (Engine, Engine, calomel::Endpoint) {
    let (server, client) = (Engine::server("tcp://127.0.0.1:0").unwrap(), Engine::client("tcp").unwrap());
    let peer = client.lookup_async(server.address()).await.unwrap();
    (server, client, peer)
}

#[test]
fn handler_sleeps_and_spawns_on_the_runtime_that_built_its_engine() {
    on_both(|| async {
        let (server, client, peer) = pair().await;
        let handler = |_: Request, ms: u64| async move {
            sleep(Duration::from_millis(ms)).await;
            tokio::spawn(async move { ms + 1 }).await.unwrap()
        };
        server.define_async("later", handler).unwrap();
        let later = client.procedure::<u64, u64>("later");
        assert_eq!(later.on(&peer).start(&20).unwrap().await.unwrap(), 21);
        // Many at a time sleep at the same time.
        let begin = std::time::Instant::now();
        let calls: Vec<_> = (0..50).map(|_| later.on(&peer).start(&100).unwrap()).collect();
        for call in calls {
            assert_eq!(call.await.unwrap(), 101);
        }
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        server.finalize_async().await.unwrap();
    });
}

#[test]
fn runtime_can_be_given_to_an_engine_that_is_built_outside() {
    let runtime = several_threads();
    let server = Engine::builder().listen("loop://").tokio(runtime.handle().clone()).build().unwrap();
    server
        .define_try_async("nap", |_: Request, ms: u64| async move {
            timeout(Duration::from_millis(ms), sleep(LONG)).await.map_err(|_| "it took too long")?;
            HandlerResult::Ok(())
        })
        .unwrap();
    let client = Engine::client("loop").unwrap();
    let peer = client.lookup(server.address()).unwrap();
    let error = client.procedure::<u64, ()>("nap").on(&peer).call(&10).unwrap_err();
    assert!(matches!(&error, Error::Failed { message, .. } if message == "it took too long"), "{error}");
}

#[test]
fn ping_notify_and_the_end_are_awaited() {
    on_both(|| async {
        let (server, client, peer) = pair().await;
        assert!(peer.ping_async(LONG).await.unwrap() < LONG);
        let seen = Arc::new(AtomicUsize::new(0));
        let count = seen.clone();
        let add = move |_: &Request, bytes: Vec<u8>| {
            count.fetch_add(bytes.len(), Ordering::SeqCst);
        };
        server.define("note", add).unwrap();
        let note = client.procedure::<Vec<u8>, ()>("note");
        // More than the peer's credit at a time, so that some wait for it; and two that are announced.
        for _ in 0..2000 {
            note.on(&peer).notify_async(&vec![1u8; 1000]).await.unwrap();
        }
        for _ in 0..2 {
            note.on(&peer).notify_async(&vec![1u8; 1_000_000]).await.unwrap();
        }
        client.finalize_async().await.unwrap();
        while seen.load(Ordering::SeqCst) < 4_000_000 {
            sleep(Duration::from_millis(5)).await;
        }
        let waiting = {
            let server = server.clone();
            tokio::spawn(async move { server.wait_for_finalize_async().await })
        };
        server.finalize_async().await.unwrap();
        waiting.await.unwrap();
    });
}

#[test]
fn notify_ends_at_its_deadline_where_the_peer_is_behind() {
    on_both(|| async {
        let server = Engine::builder().listen("tcp://127.0.0.1:0").handler_threads(1).build().unwrap();
        let (gate, opened) = std::sync::mpsc::channel::<()>();
        let opened = std::sync::Mutex::new(opened);
        let wait = move |_: &Request, _: Vec<u8>| {
            let _ = opened.lock().unwrap().recv_timeout(LONG);
        };
        server.define("stuck", wait).unwrap();
        let client = Engine::client("tcp").unwrap();
        let peer = client.lookup(server.address()).unwrap();
        let stuck = client.procedure::<Vec<u8>, ()>("stuck");
        let call = stuck.on(&peer).timeout(Duration::from_millis(200));
        let mut outcome = Ok(());
        for _ in 0..100_000 {
            outcome = call.notify_async(&vec![0u8; 10_000]).await;
            if outcome.is_err() {
                break;
            }
        }
        assert!(matches!(outcome, Err(Error::Busy { .. })), "{outcome:?}");
        // A future that is dropped while it waits leaves no waiter behind: later calls go through.
        let waiting = timeout(Duration::from_millis(20), stuck.on(&peer).notify_async(&vec![0u8; 10_000])).await;
        assert!(waiting.is_err());
        drop(gate);
        stuck.on(&peer).timeout(LONG).notify_async(&vec![0u8; 10_000]).await.unwrap();
        server.finalize_async().await.unwrap();
    });
}

#[test]
fn transfers_are_awaited() {
    on_both(|| async {
        let (server, client, peer) = pair().await;
        server
            .define_try_async("fill", |request: Request, remote: calomel::Bulk| async move {
                let local = request.engine().expose(vec![7u8; remote.len()], BulkMode::ReadOnly)?;
                let (pushed, local) = remote.on(request.endpoint()).start_push_from(local).await;
                drop(local);
                pushed
            })
            .unwrap();
        let local = client.expose(vec![0u8; 3_000_000], BulkMode::WriteOnly).unwrap();
        let fill = client.procedure::<calomel::Bulk, usize>("fill");
        assert_eq!(fill.on(&peer).start(&local.bulk()).unwrap().await.unwrap(), 3_000_000);
        assert!(local.reclaim().iter().all(|byte| *byte == 7));
    });
}

#[test]
fn pending_calls_take_part_in_select() {
    on_both(|| async {
        let (server, client, peer) = pair().await;
        server.define_async("sleep", |_: Request, ms: u64| sleep(Duration::from_millis(ms))).unwrap();
        let call = client.procedure::<u64, ()>("sleep");
        let (quick, slow) = (call.on(&peer).start(&10).unwrap(), call.on(&peer).start(&10_000).unwrap());
        tokio::select! {
            ended = quick => ended.unwrap(),
            ended = slow => panic!("{ended:?}"),
        }
        server.finalize_async().await.unwrap();
    });
}

/// Serves an engine in a task, as any socket: its descriptor in the runtime's own event loop, which is edge-triggered.
#[allow(unsafe_code)]
fn serve_in_a_task(engine: &Engine) -> tokio::task::JoinHandle<()> {
    let engine = engine.clone();
    tokio::spawn(async move {
        let interest = tokio::io::Interest::READABLE;
        // SAFETY: the descriptor is borrowed from the engine, which keeps it open and outlives this registration.
        let descriptor = unsafe { tokio::io::unix::AsyncFd::register_with_interest(engine.as_fd(), interest) }.unwrap();
        loop {
            let mut guard = descriptor.readable().await.unwrap();
            match engine.progress(Duration::ZERO) {
                // There may be more; other tasks get their turn first.
                Ok(true) => tokio::task::yield_now().await,
                Ok(false) => guard.clear_ready(),
                Err(Error::Finalized { .. }) => return,
                Err(error) => panic!("{error}"),
            }
        }
    })
}

#[test]
fn runtime_serves_engines_without_threads() {
    on_both(|| async {
        let external = || Engine::builder().progress(calomel::Progress::External).handler_threads(0).same_host_upgrade(false);
        let server = external().listen("tcp://127.0.0.1:0").build().unwrap();
        let client = external().build().unwrap();
        let tasks = [serve_in_a_task(&server), serve_in_a_task(&client)];
        let handler = |_: Request, ms: u64| async move {
            sleep(Duration::from_millis(ms)).await;
            ms + 1
        };
        server.define_async("later", handler).unwrap();
        server.define("sum", |_: &Request, (x, y): (u64, u64)| x + y).unwrap();
        let memory = server.expose(vec![7u8; 2_000_000], BulkMode::ReadOnly).unwrap();
        let peer = client.lookup_async(server.address()).await.unwrap();
        for x in 0..200 {
            assert_eq!(client.procedure::<(u64, u64), u64>("sum").on(&peer).start(&(x, 1)).unwrap().await.unwrap(), x + 1);
        }
        let later = client.procedure::<u64, u64>("later").on(&peer);
        let calls: Vec<_> = (0..30).map(|ms| later.start(&ms).unwrap()).collect();
        for (ms, call) in calls.into_iter().enumerate() {
            assert_eq!(call.await.unwrap(), ms as u64 + 1);
        }
        let late = client.procedure::<u64, u64>("later").on(&peer).timeout(Duration::from_millis(20)).start(&2_000).unwrap();
        assert!(matches!(late.await, Err(Error::Timeout { .. })));
        let local = client.expose(vec![0u8; 2_000_000], BulkMode::ReadWrite).unwrap();
        let (pulled, local) = memory.bulk().on(&peer).start_pull_into(local).await;
        assert_eq!(pulled.unwrap(), 2_000_000);
        assert!(local.reclaim().iter().all(|byte| *byte == 7));
        client.finalize_async().await.unwrap();
        server.finalize_async().await.unwrap();
        for task in tasks {
            task.await.unwrap();
        }
    });
}
