//! User code that runs where messages are received may use the engine: no lock of it is held.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use calomel::{BulkMode, Engine, Error, Exposed, Pending, Request};

use crate::assert_error;
use crate::support::{BOUND, Net, eventually};

/// Values that a hook drops.
type Droppable = Mutex<Vec<Box<dyn std::any::Any + Send>>>;

fn authorize_hook_that_uses_the_engine_does_not_deadlock(net: &Net) {
    static PENDING: &str = "pending";
    let (engine, asked) = (Arc::new(OnceLock::<calomel::WeakEngine>::new()), Arc::new(AtomicUsize::new(0)));
    let droppable: Arc<Droppable> = Arc::default();
    let (own, count, drops, other) = (engine.clone(), asked.clone(), droppable.clone(), net.server());
    other.define("hello", |_: &Request, ()| 7u8).unwrap();
    let other_address = other.address();
    let decide = move |caller: &calomel::Caller<'_>| {
        let endpoint = caller.endpoint();
        assert!(endpoint.is_connected());
        assert_eq!(endpoint.transport(), caller.transport());
        let _ = (caller.process(), endpoint.address(), format!("{caller:?}"));
        let engine = own.get().unwrap().upgrade().unwrap();
        let _ = (engine.refusals().total(), engine.addresses());
        // A hook can't wait for a call to its caller or to another engine: such calls fail at once.
        let elsewhere = engine.lookup(&other_address).unwrap();
        for peer in [&endpoint, &elsewhere] {
            let begin = Instant::now();
            let call = engine.procedure::<(), u8>("hello").on(peer).timeout(Duration::from_secs(10));
            assert_error!(call.call(&()), Error::Unsupported { .. });
            assert!(begin.elapsed() < Duration::from_secs(5), "the call took {:?}", begin.elapsed());
            let started: Pending<u8> = call.start(&()).unwrap();
            drop(started);
            // A message is sent if there is a connection.
            let _ = call.notify(&());
        }
        let mut exposed: Exposed<Vec<u8>> = engine.expose(vec![0u8; 100_000], BulkMode::ReadWrite).unwrap();
        assert_error!(endpoint.shutdown(), Error::Unsupported { .. });
        let begun = exposed.bulk().on(&endpoint).pull_into(&mut [0u8; 10][..]);
        assert_error!(begun, Error::OtherEngine { .. });
        exposed = engine.expose(exposed.reclaim(), BulkMode::ReadOnly).unwrap();
        drop(exposed);
        let later: Vec<_> = std::mem::take(&mut *drops.lock().unwrap());
        drop(later);
        count.fetch_add(1, Ordering::SeqCst);
        caller.procedure() != "denied"
    };
    let server = net.server_with(|builder| builder.authorize(decide));
    engine.set(server.downgrade()).unwrap();
    server.define("twice", |_: &Request, n: u32| 2 * n).unwrap();
    server.define(PENDING, |_: &Request, n: u32| n).unwrap();
    let client = net.client();
    client.define("hello", |_: &Request, ()| 8u8).unwrap();
    let peer = client.lookup(server.address()).unwrap();
    let twice = client.procedure::<u32, u32>("twice");
    let to_client = OnceLock::new();
    for n in 0..20 {
        // One value of each type whose drop sends something to a peer, dropped in the hook.
        let memory = server.expose(vec![1u8; 1000], BulkMode::ReadWrite).unwrap();
        let spare: Engine = net.builder().build().unwrap();
        let pending = spare.procedure::<u32, u32>(PENDING).on(spare.lookup(server.address()).unwrap());
        if n == 0 {
            let _ = to_client.set(server.lookup(other.address()).unwrap());
        }
        let call = server.procedure::<(), u8>("hello").on(to_client.get().unwrap()).start(&()).unwrap();
        droppable.lock().unwrap().extend([
            Box::new(memory) as Box<dyn std::any::Any + Send>,
            Box::new(pending),
            Box::new(spare),
            Box::new(call),
        ]);
        assert_eq!(twice.on(&peer).timeout(BOUND).call(&n).unwrap(), 2 * n);
        assert_error!(client.procedure::<(), ()>("denied").on(&peer).timeout(BOUND).call(&()), Error::AccessDenied { .. });
    }
    // Many at a time, some of which arrive in one read.
    let many: Vec<Pending<u32>> = (0..100).map(|n| twice.on(&peer).timeout(BOUND).start(&n).unwrap()).collect();
    for (n, answer) in Pending::wait_all(many).into_iter().enumerate() {
        assert_eq!(answer.unwrap(), 2 * n as u32);
    }
    twice.on(&peer).notify(&1).unwrap();
    eventually("the one-way call is asked about", || asked.load(Ordering::SeqCst) >= 141);
}

suite![authorize_hook_that_uses_the_engine_does_not_deadlock];
