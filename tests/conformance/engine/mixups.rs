//! Objects of one engine used with another: an error at once, and never a call to another peer than the intended one.
//!
//! | call | objects of two engines | what it does |
//! |---|---|---|
//! | `Procedure::on(endpoint)`, then `call`, `start`, `notify` | procedure, endpoint | `OtherEngine`, nothing is sent |
//! | `Grant::only(endpoint)`, then `expose_with`; `expose_to(endpoint)` | engine, endpoint | `OtherEngine`, nothing is exposed |
//! | `pull_into`, `push_from`, `start_…`, `>>`, `<<` with an `Exposed` or an `ExposedSlice` | remote bulk, exposure | `OtherEngine`, no byte is transferred |
//! | `Bulk::on(endpoint)` of a peer that is not the owner, also of an own bulk | bulk, peer | `OtherEngine`, whatever the length |
//! | a bulk for one call, in a call of another engine | bulk, call | `OtherEngine`: no call of its owner would begin |
//! | any other bulk, in a call or an answer of another engine | bulk, call | travels: it names its owner, and the sender holds the lease |
//! | `Bulk::on(endpoint)` of the owner, `Bulk::origin(engine)` | bulk, engine | works: any engine may use a bulk that it has |
//! | `Engine::pool`, `Provider::pool` with a shared `HandlerPool` | engine, pool | works: a pool belongs to no engine |
//! | buffers of `Engine::alloc` and of a `BufferPool` | engine, buffer | works: they belong to no engine |
//! | `Pending::wait_any` and `wait_all` | calls of several engines | works |
//!
//! `Request`, `Responder`, `Registration`, `Timer`, `Transfer`, `Released` and `Scope` contain their engine, so they can't be
//! used with another one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, Error, Exposed, Grant, HandlerPool, Pending, Request};

use crate::assert_error;
use crate::support::{BOUND, Net, all_are, eventually, pattern, travelled};

/// A bulk that is sent eagerly inside a call, and one that is not.
const LENGTHS: [usize; 2] = [100, 100_000];

type Moved = Result<usize, String>;

/// Asserts that `work` fails at once with `OtherEngine`.
#[track_caller]
fn mixed_up<T>(what: &str, work: impl FnOnce() -> calomel::Result<T>) {
    let begin = Instant::now();
    match work() {
        Err(error @ Error::OtherEngine { .. }) => assert!(error.to_string().contains("belongs to"), "{error}"),
        Err(error) => panic!("{what}: {error:?}"),
        Ok(_) => panic!("{what}: a success"),
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{what} took {:?}", begin.elapsed());
}

/// A server that counts its calls.
fn counting(net: &Net) -> (Engine, Arc<AtomicUsize>) {
    let server = net.server();
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    server.define("count", move |_: &Request, ()| count.fetch_add(1, Ordering::SeqCst)).unwrap();
    (server, calls)
}

fn call_at_an_endpoint_of_another_engine_fails(net: &Net) {
    let (first, first_calls) = counting(net);
    let (second, second_calls) = counting(net);
    let (one, other) = (net.client(), net.client());
    // Each is the first peer that its engine has looked up.
    let to_first = one.lookup(first.address()).unwrap();
    let to_second = other.lookup(second.address()).unwrap();
    let count = other.procedure::<(), usize>("count");
    for _ in 0..2 {
        mixed_up("call", || count.on(&to_first).call(&()));
        mixed_up("call of a provider", || count.on(to_first.provider(3)).call(&()));
        mixed_up("start", || count.on(&to_first).start(&()));
        mixed_up("notify", || count.on(&to_first).timeout(Duration::from_secs(1)).notify(&()));
        // The first round runs before the connection exists, the second with it.
        count.on(&to_second).call(&()).unwrap();
    }
    assert_eq!((first_calls.load(Ordering::SeqCst), second_calls.load(Ordering::SeqCst)), (0, 2));
    // The address can be shared.
    assert_eq!(count.on(other.lookup(to_first.address()).unwrap()).call(&()).unwrap(), 0);
}

/// A server that pulls from bulks, through its caller's endpoint or from their owner, and keeps them.
struct Fetcher {
    engine: Engine,
    kept: Arc<Mutex<Vec<Bulk>>>,
}

fn fetcher(net: &Net) -> Fetcher {
    let engine = net.server();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = kept.clone();
    let fetch = move |request: &Request, (from_owner, bulk): (bool, Bulk)| -> Moved {
        let mut bytes = vec![0u8; bulk.len()];
        let remote = if from_owner { bulk.origin(request.engine()) } else { Ok(bulk.on(request.endpoint())) };
        let moved = remote.and_then(|remote| remote.pull_into(&mut bytes)).map_err(|error| format!("{error:?}"))?;
        assert!(bytes == pattern(7, bytes.len()));
        keep.lock().unwrap().push(bulk);
        Ok(moved)
    };
    engine.define("fetch", fetch).unwrap();
    Fetcher { engine, kept }
}

fn bulk_sent_by_another_engine_is_found_at_its_owner(net: &Net) {
    for len in LENGTHS {
        let Fetcher { engine: server, kept } = fetcher(net);
        let (owner, sender) = (net.server(), net.client());
        let to_server = sender.lookup(server.address()).unwrap();
        let fetch = sender.procedure::<(bool, Bulk), Moved>("fetch");
        let exposed = owner.expose_read_only(pattern(7, len)).unwrap();
        let released = exposed.released();
        // The sending engine does not own the memory, which is an error at any length.
        let found = fetch.on(&to_server).call(&(false, exposed.bulk())).unwrap();
        assert!(found.as_ref().is_err_and(|error| error.starts_with("OtherEngine")), "{len} bytes: {found:?}");
        // The pull from its owner succeeds.
        assert_eq!(fetch.on(&to_server).call(&(true, exposed.bulk())).unwrap(), Ok(len));
        assert_eq!(kept.lock().unwrap().len(), 1);
        assert!(!released.is_released(), "the server holds it");
        // Once revoked, it can't be accessed, although another engine has sent it.
        assert!(exposed.reclaim() == pattern(7, len));
        let bulk = kept.lock().unwrap().pop().unwrap();
        assert_error!(bulk.origin(&server).unwrap().pull_into(&mut vec![0u8; len]), Error::Revoked { .. });
        drop(bulk);
        eventually("the lease comes back through the engine that sent the bulk", || released.is_released());
    }
}

fn bulk_received_by_one_engine_is_forwarded_by_another(net: &Net) {
    for len in LENGTHS {
        let Fetcher { engine: server, kept } = fetcher(net);
        let (owner, middle, sender) = (net.server(), net.server(), net.client());
        let (received_tx, received_rx) = mpsc::channel();
        middle.define("take", move |_: &Request, bulk: Bulk| received_tx.send(bulk).unwrap()).unwrap();
        let exposed = owner.expose_read_only(pattern(7, len)).unwrap();
        let released = exposed.released();
        owner.procedure::<Bulk, ()>("take").on(owner.lookup(middle.address()).unwrap()).call(&exposed.bulk()).unwrap();
        let bulk = received_rx.recv_timeout(BOUND).unwrap();
        let to_server = sender.lookup(server.address()).unwrap();
        let fetch = sender.procedure::<(bool, Bulk), Moved>("fetch");
        let found = fetch.on(&to_server).call(&(false, bulk.clone())).unwrap();
        assert!(found.as_ref().is_err_and(|error| error.starts_with("OtherEngine")), "{len} bytes: {found:?}");
        assert_eq!(fetch.on(&to_server).call(&(true, bulk.clone())).unwrap(), Ok(len));
        // The engine that forwards the bulk may use it as well.
        let mut bytes = vec![0u8; len];
        assert_eq!(bulk.on(sender.lookup(owner.address()).unwrap()).pull_into(&mut bytes).unwrap(), len);
        assert!(bytes == pattern(7, len));
        drop(bulk);
        assert!(!released.is_released(), "the server holds it");
        assert!(exposed.reclaim() == pattern(7, len));
        let bulk = kept.lock().unwrap().pop().unwrap();
        assert_error!(bulk.origin(&server).unwrap().pull_into(&mut vec![0u8; len]), Error::Revoked { .. });
        drop(bulk);
        eventually("the lease comes back through two engines", || released.is_released());
    }
}

fn transfer_with_a_peer_that_is_not_the_owner_fails(net: &Net) {
    let (owner, client) = (net.server(), net.client());
    owner.define("hello", |_: &Request, ()| ()).unwrap();
    let to_owner = client.lookup(owner.address()).unwrap();
    let kept = Arc::new(Mutex::new(Vec::<Exposed<_, calomel::ReadOnly>>::new()));
    let keep = kept.clone();
    let open = move |request: &Request, len: usize| {
        let exposed = request.engine().expose_read_only(pattern(7, len)).unwrap();
        let bulk = exposed.bulk();
        keep.lock().unwrap().push(exposed);
        bulk
    };
    owner.define("open", open).unwrap();
    for len in LENGTHS {
        let bulk = client.procedure::<usize, Bulk>("open").on(&to_owner).call(&len).unwrap();
        let third = net.server();
        third.define("hello", |_: &Request, ()| ()).unwrap();
        let to_third = client.lookup(third.address()).unwrap();
        for connected in [false, true] {
            if connected {
                client.procedure::<(), ()>("hello").on(&to_third).call(&()).unwrap();
            }
            let mut bytes = vec![0u8; len];
            mixed_up("pull", || bulk.on(&to_third).pull_into(&mut bytes));
            assert!(all_are(&bytes, 0));
            mixed_up("push", || travelled(&bulk).on(&to_third).push_from(&bytes));
            let local = client.expose(vec![0u8; len], BulkMode::ReadWrite).unwrap();
            let (result, local) = bulk.on(&to_third).start_push_from(local).wait();
            mixed_up("start_push_from", || result);
            drop(local);
        }
        assert_eq!(bulk.on(&to_owner).pull_into(&mut vec![0u8; len]).unwrap(), len);
    }
}

fn own_bulk_at_a_peers_endpoint_fails(net: &Net) {
    let pair = net.pair();
    pair.server.define("hello", |_: &Request, ()| ()).unwrap();
    for len in LENGTHS {
        let exposed = pair.client.expose(pattern(7, len), BulkMode::ReadWrite).unwrap();
        mixed_up("pull", || exposed.bulk().on(&pair.to_server).pull_into(&mut vec![0u8; len]));
        mixed_up("push", || exposed.bulk().on(&pair.to_server).push_from(&vec![0u8; len]));
        pair.client.procedure::<(), ()>("hello").on(&pair.to_server).call(&()).unwrap();
        assert!(exposed.reclaim() == pattern(7, len));
    }
    // An engine's endpoint of itself works.
    let exposed = pair.server.expose(pattern(7, 100), BulkMode::ReadWrite).unwrap();
    let to_itself = pair.server.lookup(pair.server.address()).unwrap();
    assert_eq!(exposed.bulk().on(&to_itself).pull_into(&mut [0u8; 100]).unwrap(), 100);
    assert_eq!(exposed.bulk().origin(&pair.server).unwrap().pull_into(&mut [0u8; 100]).unwrap(), 100);
}

fn transfer_with_an_exposure_of_another_engine_fails(net: &Net) {
    let pair = net.pair();
    let other = net.client();
    for len in LENGTHS {
        let theirs = pair.server.expose(pattern(7, len), BulkMode::ReadWrite).unwrap();
        let remote = travelled(&theirs.bulk()).on(&pair.to_server);
        let foreign = other.expose(vec![1u8; len], BulkMode::ReadWrite).unwrap();
        let part = || foreign.slice(0, len / 2).unwrap();
        mixed_up("pull_into", || remote.pull_into(&foreign));
        let half = part();
        mixed_up("pull_into a part", || remote.pull_into(&half));
        mixed_up("pull_into a part by value", || remote.pull_into(part()));
        mixed_up("push_from", || remote.push_from(&foreign));
        mixed_up("push_from a part", || remote.push_from(part()));
        mixed_up(">>", || &remote >> &foreign);
        mixed_up("<<", || remote.clone() << &part());
        // Within one engine's memory, too.
        let own = pair.client.expose(vec![2u8; len], BulkMode::ReadWrite).unwrap();
        let home = own.bulk().origin(&pair.client).unwrap();
        mixed_up("pull_into from own memory", || home.pull_into(&foreign));
        mixed_up("push_from into own memory", || home.push_from(&foreign));
        let (result, slice) = remote.start_pull_into(part()).wait();
        mixed_up("start_pull_into", || result);
        assert_eq!(slice.len(), len / 2);
        let (result, foreign) = remote.start_push_from(foreign).wait();
        mixed_up("start_push_from", || result);
        assert!(foreign.reclaim() == vec![1; len]);
        assert!(own.reclaim() == vec![2; len]);
        assert!(theirs.reclaim() == pattern(7, len));
    }
}

fn grant_for_an_endpoint_of_another_engine_fails(net: &Net) {
    let pair = net.pair();
    let other = net.client();
    let to_server = other.lookup(pair.server.address()).unwrap();
    let only = Grant::new().only(&to_server);
    mixed_up("expose_with", || pair.client.expose_with(vec![0u8; 10], BulkMode::ReadOnly, &only));
    mixed_up("expose_read_only_with", || pair.client.expose_read_only_with(vec![0u8; 10], &only));
    mixed_up("expose_to", || pair.client.expose_to(&to_server, vec![0u8; 10], BulkMode::ReadOnly));
    let mut buffer = [0u8; 10];
    mixed_up("Scope::expose_with", || {
        pair.client.scope(|scope| scope.expose_with(&mut buffer[..], BulkMode::ReadOnly, &only).map(drop))
    });
}

fn bulk_for_one_call_in_a_call_of_another_engine_fails(net: &Net) {
    for len in LENGTHS {
        let Fetcher { engine: server, .. } = fetcher(net);
        let (owner, other) = (net.server(), net.client());
        let exposed = owner.expose_read_only_with(pattern(7, len), &Grant::new().for_one_call()).unwrap();
        let fetch = other.procedure::<(bool, Bulk), Moved>("fetch");
        let to_server = other.lookup(server.address()).unwrap();
        mixed_up("call", || fetch.on(&to_server).call(&(true, exposed.bulk())));
        mixed_up("start", || fetch.on(&to_server).start(&(true, exposed.bulk())));
        assert!(exposed.released().is_released());
        // The one call is still to come.
        let fetch = owner.procedure::<(bool, Bulk), Moved>("fetch");
        assert_eq!(fetch.on(owner.lookup(server.address()).unwrap()).call(&(false, exposed.bulk())).unwrap(), Ok(len));
    }
}

fn pools_and_buffers_work_with_any_engine(net: &Net) {
    let pair = net.pair();
    let other = net.server();
    let pool = HandlerPool::new(2);
    for server in [&pair.server, &other] {
        server.pool(&pool).define("twice", |_: &Request, n: u32| 2 * n).unwrap();
    }
    let to_other = pair.server.lookup(other.address()).unwrap();
    let mut pending = vec![
        pair.client.procedure::<u32, u32>("twice").on(&pair.to_server).start(&1).unwrap(),
        pair.server.procedure::<u32, u32>("twice").on(&to_other).start(&2).unwrap(),
    ];
    let mut answers = Vec::new();
    while !pending.is_empty() {
        answers.push(Pending::wait_any(&mut pending).1.unwrap());
    }
    answers.sort_unstable();
    assert_eq!(answers, [2, 4]);
    let buffers = pair.server.buffer_pool(100_000, 1);
    let exposed = pair.client.expose(buffers.take().unwrap(), BulkMode::WriteOnly).unwrap();
    let to_client = exposed.bulk().origin(&pair.client).unwrap();
    assert_eq!(to_client.push_from(&vec![9u8; 100_000]).unwrap(), 100_000);
    assert!(all_are(&exposed.reclaim(), 9));
    assert_eq!(buffers.available(), 1);
}

fn bulk_of_a_scope_sent_by_another_engine_is_usable(net: &Net) {
    let Fetcher { engine: server, kept } = fetcher(net);
    let (owner, sender) = (net.server(), net.client());
    let to_server = sender.lookup(server.address()).unwrap();
    let fetch = sender.procedure::<(bool, Bulk), Moved>("fetch");
    for len in LENGTHS {
        let data = pattern(7, len);
        let fetched = owner.scope(|scope| {
            let bulk = scope.expose_read_only(&data[..])?;
            fetch.on(&to_server).call(&(true, bulk))
        });
        assert_eq!(fetched.unwrap(), Ok(len));
        let bulk = kept.lock().unwrap().pop().unwrap();
        assert_error!(bulk.origin(&server).unwrap().pull_into(&mut vec![0u8; len]), Error::Revoked { .. });
    }
}

suite![
    call_at_an_endpoint_of_another_engine_fails,
    bulk_sent_by_another_engine_is_found_at_its_owner,
    bulk_received_by_one_engine_is_forwarded_by_another,
    transfer_with_a_peer_that_is_not_the_owner_fails,
    own_bulk_at_a_peers_endpoint_fails,
    transfer_with_an_exposure_of_another_engine_fails,
    grant_for_an_endpoint_of_another_engine_fails,
    bulk_for_one_call_in_a_call_of_another_engine_fails,
    pools_and_buffers_work_with_any_engine,
    bulk_of_a_scope_sent_by_another_engine_is_usable,
];
