//! Monitoring: statistics, hooks, and the dump of what is in progress.

use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use calomel::{
    Bulk, BulkMode, CallStats, Endpoint, Engine, Error, HandlerStats, Monitor, MonitoredCall, MonitoredTransfer, Request,
    RequestState, Responder, Stats, TransferDirection,
};

use crate::support::{BOUND, Net, Pair, eventually};

#[track_caller]
fn calls_of<'a>(stats: &'a Stats, procedure: &str) -> &'a CallStats {
    let found: Vec<&CallStats> = stats.calls.iter().filter(|calls| calls.procedure == procedure).collect();
    assert_eq!(found.len(), 1, "{:?}", stats.calls);
    found[0]
}

#[track_caller]
fn handler_of<'a>(stats: &'a Stats, procedure: &str, provider: u16) -> &'a HandlerStats {
    let is_it = |handler: &&HandlerStats| (&*handler.procedure, handler.provider) == (procedure, provider);
    let found: Vec<&HandlerStats> = stats.handlers.iter().filter(is_it).collect();
    assert_eq!(found.len(), 1, "{:?}", stats.handlers);
    found[0]
}

/// The number of calls and their errors.
fn counts(calls: u64, errors: &std::collections::BTreeMap<String, u64>) -> (u64, Vec<(&str, u64)>) {
    (calls, errors.iter().map(|(kind, count)| (&**kind, *count)).collect())
}

fn calls_are_counted_and_timed_at_both_ends(net: &Net) {
    const SLEEP: Duration = Duration::from_millis(20);
    let Pair { server, client, to_server } = net.pair();
    server.define("length", |_: &Request, text: String| text.len() as u32).unwrap();
    server
        .provider(7)
        .define_try("sleep", |_: &Request, fails: bool| {
            std::thread::sleep(SLEEP);
            if fails { Err("as wanted") } else { Ok(()) }
        })
        .unwrap();
    let length = client.procedure::<str, u32>("length").on(&to_server);
    for _ in 0..10 {
        assert_eq!(length.call(&"x".repeat(100)).unwrap(), 100);
    }
    // Started, and one whose result is never taken.
    length.start("four").unwrap().wait().unwrap();
    let untaken = length.start("four").unwrap();
    eventually("it is answered", || untaken.is_ready());
    drop(untaken);
    let sleep = client.procedure::<bool, ()>("sleep").on(to_server.provider(7));
    sleep.call(&false).unwrap();
    assert!(matches!(sleep.call(&true), Err(Error::Failed { .. })));
    let unknown = client.procedure::<(), ()>("unknown").on(&to_server);
    assert!(unknown.call(&()).is_err());

    let stats = client.stats();
    assert!(stats.measured && stats.handlers.is_empty());
    let found = calls_of(&stats, "length");
    assert_eq!((found.provider, &found.parent), (0, &None));
    assert_eq!(counts(found.calls, &found.errors), (12, vec![]));
    assert!((1000..2000).contains(&found.sent_bytes) && found.received_bytes >= 12, "{found:?}");
    assert_eq!(found.time.count, 12);
    assert!(found.time.p50 <= found.time.p90 && found.time.p99 <= found.time.max && found.time.mean() <= found.time.max);
    let found = calls_of(&stats, "sleep");
    assert_eq!(found.provider, 7);
    assert_eq!(counts(found.calls, &found.errors), (2, vec![("Failed", 1)]));
    assert!(found.time.p50 >= SLEEP && found.time.total >= 2 * SLEEP, "{:?}", found.time);
    assert_eq!(counts(1, &calls_of(&stats, "unknown").errors), (1, vec![("NoSuchProcedure", 1)]));

    // A handler is timed when it has returned, which is after its caller has the response.
    eventually("all handlers have returned", || {
        let stats = server.stats();
        stats.handlers.iter().map(|handler| handler.running.count).sum::<u64>() == 14
    });
    let stats = server.stats();
    assert!(stats.calls.is_empty());
    let found = handler_of(&stats, "length", 0);
    assert_eq!(counts(found.calls, &found.errors), (12, vec![]));
    assert_eq!((found.waiting.count, found.running.count), (12, 12));
    assert!((1000..2000).contains(&found.received_bytes) && found.sent_bytes >= 12, "{found:?}");
    let found = handler_of(&stats, "sleep", 7);
    assert_eq!(counts(found.calls, &found.errors), (2, vec![("Failed", 1)]));
    assert!(found.running.p50 >= SLEEP, "{:?}", found.running);
    assert_eq!(stats.unknown_procedures, 1);
}

fn a_peer_that_makes_up_names_makes_no_entries(net: &Net) {
    let Pair { server, client, to_server } = net.pair();
    server.define("known", |_: &Request, ()| ()).unwrap();
    for number in 0..200 {
        assert!(client.procedure::<(), ()>(&format!("made up {number}")).on(&to_server).call(&()).is_err());
    }
    let stats = server.stats();
    assert_eq!((stats.handlers.len(), stats.unknown_procedures), (1, 200));
}

fn handlers_that_answer_later_are_timed_until_they_answer(net: &Net) {
    const PAUSE: Duration = Duration::from_millis(20);
    let Pair { server, client, to_server } = net.pair();
    let (held, responders) = mpsc::channel();
    let held = Mutex::new(held);
    server.define_deferred("later", move |responder: Responder<u8>, ()| drop(held.lock().unwrap().send(responder))).unwrap();
    server.define_async("async", |_: Request, ()| async { 1u8 }).unwrap();
    server.define_deferred("panics", |_: Responder<u8>, ()| panic!("as wanted")).unwrap();
    let call = |name| client.procedure::<(), u8>(name).on(&to_server).start(&()).unwrap();
    let later = call("later");
    let responder: Responder<u8> = responders.recv_timeout(BOUND).unwrap();
    std::thread::sleep(PAUSE);
    responder.respond(&1).unwrap();
    later.wait().unwrap();
    call("async").wait().unwrap();
    assert!(matches!(call("panics").wait(), Err(Error::HandlerPanicked { .. })));
    // The caller may have the response before it is counted.
    eventually("all are counted", || server.stats().handlers.iter().map(|handler| handler.calls).sum::<u64>() == 3);
    let stats = server.stats();
    let found = handler_of(&stats, "later", 0);
    assert_eq!((found.calls, found.running.count), (1, 1));
    assert!(found.running.max >= PAUSE, "{found:?}");
    assert_eq!(handler_of(&stats, "async", 0).running.count, 1);
    let found = handler_of(&stats, "panics", 0);
    assert_eq!(counts(found.calls, &found.errors), (1, vec![("HandlerPanicked", 1)]));
}

fn a_nested_call_knows_the_procedure_that_makes_it(net: &Net) {
    let Pair { server, client, to_server } = net.pair();
    client.define("leaf", |_: &Request, ()| 1u32).unwrap();
    let leaf = |request: &Request| request.engine().procedure::<(), u32>("leaf").on(request.endpoint());
    server.define("blocking", move |request: &Request, ()| leaf(request).call(&()).unwrap()).unwrap();
    server
        .define_async("async", move |request: Request, ()| async move {
            // The second is made when the first has woken the task, maybe on another thread.
            leaf(&request).start(&()).unwrap().await.unwrap() + leaf(&request).start(&()).unwrap().await.unwrap()
        })
        .unwrap();
    assert_eq!(client.procedure::<(), u32>("blocking").on(&to_server).call(&()).unwrap(), 1);
    assert_eq!(client.procedure::<(), u32>("async").on(&to_server).call(&()).unwrap(), 2);
    let to_client = server.peers().remove(0);
    assert_eq!(server.procedure::<(), u32>("leaf").on(&to_client).call(&()).unwrap(), 1);
    let stats = server.stats();
    let mut found: Vec<_> = stats.calls.iter().map(|calls| (calls.parent.as_deref(), calls.calls)).collect();
    found.sort();
    assert_eq!(found, [(None, 1), (Some("async"), 2), (Some("blocking"), 1)]);
}

fn transfers_peers_and_memory_are_counted(net: &Net) {
    const LEN: usize = 200_000;
    let Pair { server, client, to_server } = net.pair();
    server
        .define("swap", |request: &Request, (from, to): (Bulk, Bulk)| {
            let mut bytes = vec![0u8; from.len()];
            from.on(request.endpoint()).pull_into(&mut bytes).unwrap();
            to.on(request.endpoint()).push_from(&bytes).unwrap();
            assert!(to.on(request.endpoint()).pull_into(&mut bytes).is_err());
        })
        .unwrap();
    let from = client.expose(vec![7u8; LEN], BulkMode::ReadOnly).unwrap();
    let to = client.expose(vec![0u8; LEN], BulkMode::WriteOnly).unwrap();
    client.procedure::<(Bulk, Bulk), ()>("swap").on(&to_server).call(&(from.bulk(), to.bulk())).unwrap();

    let stats = client.stats();
    assert_eq!((stats.exposed_regions, stats.exposed_bytes), (2, 2 * LEN as u64));
    assert_eq!(stats.refusals.mode, 1);
    let [peer] = &stats.peers[..] else { panic!("{:?}", stats.peers) };
    assert_eq!((&peer.address, peer.transport), (&server.address(), to_server.transport()));
    assert_eq!((peer.waiting, peer.traffic.calls, peer.traffic.requests), (0, 1, 0));
    drop((from, to));
    assert_eq!((client.stats().exposed_regions, client.stats().exposed_bytes), (0, 0));

    let stats = server.stats();
    let found: Vec<_> = stats.transfers.iter().map(|t| (t.direction, t.up_to, t.transfers, t.bytes)).collect();
    let (pull, push) = (TransferDirection::Pull, TransferDirection::Push);
    assert_eq!(found, [(pull, 1 << 20, 2, LEN as u64), (push, 1 << 20, 1, LEN as u64)]);
    assert_eq!(counts(2, &stats.transfers[0].errors), (2, vec![("AccessDenied", 1)]));
    assert!(stats.transfers.iter().all(|transfers| transfers.time.count == transfers.transfers));
    let [peer] = &stats.peers[..] else { panic!("{:?}", stats.peers) };
    assert_eq!((peer.traffic.requests, peer.traffic.transfers, peer.traffic.transferred_bytes), (1, 2, 2 * LEN as u64));
    let [transport] = &stats.transports[..] else { panic!("{:?}", stats.transports) };
    assert_eq!((transport.accepted, transport.open, transport.dialled, transport.ended), (1, 1, 0, 0));
    assert_eq!(Some(transport.transport), server.peers()[0].transport());

    // What a peer has counted stays when its connection ends.
    to_server.forget();
    eventually("the connection has ended", || server.stats().transports[0].ended == 1);
    let stats = server.stats();
    assert_eq!((stats.transports[0].open, stats.transports[0].traffic.transfers), (0, 2));
    assert!(stats.transports[0].traffic.sent_bytes > 0 && stats.transports[0].traffic.received_bytes > 0);
}

fn one_way_calls_and_cancelled_ones_are_counted(net: &Net) {
    let Pair { server, client, to_server } = net.pair();
    let (held, responders) = mpsc::channel();
    let held = Mutex::new(held);
    server.define("note", |_: &Request, _: u64| ()).unwrap();
    server.define_deferred("held", move |responder: Responder<()>, ()| drop(held.lock().unwrap().send(responder))).unwrap();
    let note = client.procedure::<u64, ()>("note").on(&to_server);
    for number in 0..5 {
        note.notify(&number).unwrap();
    }
    let call = client.procedure::<(), ()>("held").on(&to_server).start(&()).unwrap();
    let responder = responders.recv_timeout(BOUND).unwrap();
    drop(call);
    drop(responder);
    let stats = client.stats();
    assert_eq!(counts(calls_of(&stats, "note").calls, &calls_of(&stats, "note").errors), (5, vec![]));
    assert_eq!(counts(1, &calls_of(&stats, "held").errors), (1, vec![("Cancelled", 1)]));
    eventually("all are handled", || handler_of(&server.stats(), "note", 0).calls == 5);
}

fn calls_are_timed_and_errors_are_counted_by_peer_and_transport(net: &Net) {
    let (client, quick, slow) = (net.client(), net.server(), net.server());
    quick.define("work", |_: &Request, ()| ()).unwrap();
    slow.define("work", |_: &Request, ()| thread::sleep(Duration::from_millis(20))).unwrap();
    let work = client.procedure::<(), ()>("work");
    let missing = client.procedure::<(), ()>("missing");
    let (to_quick, to_slow) = (client.lookup(quick.address()).unwrap(), client.lookup(slow.address()).unwrap());
    for _ in 0..3 {
        work.on(&to_quick).call(&()).unwrap();
        work.on(&to_slow).call(&()).unwrap();
    }
    missing.on(&to_slow).call(&()).unwrap_err();
    let stats = client.stats();
    assert_eq!(stats.calls.iter().map(|call| call.calls).collect::<Vec<_>>(), [1, 6], "peers are counted together");
    let peer = |endpoint: &Endpoint| stats.peers.iter().find(|peer| peer.address == endpoint.address()).unwrap();
    let (quick, slow) = (peer(&to_quick), peer(&to_slow));
    assert_eq!((quick.time.count, quick.errors.len()), (3, 0));
    assert_eq!((slow.time.count, slow.errors.clone()), (4, [("NoSuchProcedure".to_owned(), 1)].into()));
    assert!(slow.time.max >= Duration::from_millis(20) && slow.time.p50 >= Duration::from_millis(20), "{:?}", slow.time);
    let times = stats.transports.iter().map(|transport| transport.time.count).sum::<u64>();
    let errors: Vec<_> = stats.transports.iter().flat_map(|transport| transport.errors.clone()).collect();
    assert_eq!((times, errors), (7, vec![("NoSuchProcedure".to_owned(), 1)]));
}

fn nothing_is_measured_where_that_is_turned_off(net: &Net) {
    let Pair { server, client, to_server } = net.pair_with(|builder| builder.statistics(false));
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    assert_eq!(client.procedure::<(i32, i32), i32>("sum").on(&to_server).call(&(1, 2)).unwrap(), 3);
    for stats in [server.stats(), client.stats()] {
        assert!(!stats.measured && stats.calls.is_empty() && stats.handlers.is_empty() && stats.transfers.is_empty());
        // What connections count is there.
        assert_eq!(stats.transports[0].traffic.calls + stats.transports[0].traffic.requests, 1);
    }
}

fn peers_get_statistics_where_that_is_allowed(net: &Net) {
    let allowing = net.server_with(|builder| builder.remote_stats(true));
    let client = net.client();
    allowing.define("answer", |_: &Request, ()| 42u8).unwrap();
    let peer = client.lookup(allowing.address()).unwrap();
    client.procedure::<(), u8>("answer").on(&peer).call(&()).unwrap();
    // The caller may have the response before it is counted.
    eventually("the call is counted", || handler_of(&allowing.stats(), "answer", 0).calls == 1);
    let found = peer.provider(9).stats().unwrap();
    assert_eq!((handler_of(&found, "answer", 0).calls, &found.addresses), (1, &allowing.addresses()));
    assert_eq!(found.peers.len(), 1);

    let silent = net.server();
    let denied = client.lookup(silent.address()).unwrap().stats();
    assert!(matches!(denied, Err(Error::AccessDenied { .. })), "{denied:?}");
    let choosy = net.server_with(|builder| builder.remote_stats(true).authorize(|caller| caller.procedure() != "calomel.stats"));
    let denied = client.lookup(choosy.address()).unwrap().stats();
    assert!(matches!(denied, Err(Error::AccessDenied { .. })), "{denied:?}");
}

fn statistics_for_peers_are_bounded(net: &Net) {
    let server = net.server_with(|builder| builder.remote_stats(true));
    for number in 0..1000 {
        server.define(&format!("procedure {number}"), |_: &Request, ()| ()).unwrap();
    }
    let client = net.client();
    let peer = client.lookup(server.address()).unwrap();
    client.procedure::<(), ()>("procedure 999").on(&peer).call(&()).unwrap();
    eventually("the call is counted", || handler_of(&server.stats(), "procedure 999", 0).calls == 1);
    let found = peer.stats().unwrap();
    assert_eq!((found.handlers.len(), found.left_out), (256, 1001 - 256));
    assert_eq!(handler_of(&found, "procedure 999", 0).calls, 1);
    assert_eq!(server.stats().handlers.len(), 1001);
}

/// Notes what it is told, and panics each time.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn add(&self, note: String) {
        self.0.lock().unwrap().push(note);
        panic!("as wanted");
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl Monitor for Notes {
    fn call_begins(&self, call: &MonitoredCall<'_>) {
        self.add(format!("call {}", call.procedure));
    }
    fn call_ended(&self, call: &MonitoredCall<'_>, error: Option<&Error>) {
        self.add(format!("called {} {}", call.procedure, error.is_none()));
    }
    fn handler_begins(&self, call: &MonitoredCall<'_>) {
        self.add(format!("handle {}", call.procedure));
    }
    fn handler_ended(&self, call: &MonitoredCall<'_>, error: Option<&Error>) {
        self.add(format!("handled {} {}", call.procedure, error.is_none()));
    }
    fn transfer_begins(&self, transfer: &MonitoredTransfer<'_>) {
        self.add(format!("{:?} {}", transfer.direction, transfer.bytes));
    }
    fn transfer_ended(&self, transfer: &MonitoredTransfer<'_>, error: Option<&Error>) {
        self.add(format!("{:?} {} {}", transfer.direction, transfer.bytes, error.is_none()));
    }
}

fn a_monitor_is_told_of_the_beginning_and_the_end_of_each_operation(net: &Net) {
    let (ours, theirs) = (Notes::default(), Notes::default());
    let server = net.server_with(|builder| builder.monitor(theirs.clone()));
    // Hooks do not depend on statistics.
    let client = net.client_with(|builder| builder.monitor(ours.clone()).statistics(false));
    let Pair { server, client, to_server } = Pair::of(server, client);
    server
        .define("pull", |request: &Request, bulk: Bulk| {
            let mut bytes = vec![0u8; bulk.len()];
            bulk.on(request.endpoint()).pull_into(&mut bytes).unwrap()
        })
        .unwrap();
    let memory = client.expose(vec![1u8; 10_000], BulkMode::ReadOnly).unwrap();
    assert_eq!(client.procedure::<Bulk, usize>("pull").on(&to_server).call(&memory.bulk()).unwrap(), 10_000);
    assert_eq!(ours.take(), ["call pull", "called pull true"]);
    eventually("the handler has ended", || theirs.0.lock().unwrap().len() == 4);
    assert_eq!(theirs.take(), ["handle pull", "Pull 10000", "Pull 10000 true", "handled pull true"]);
    assert!(client.procedure::<(), ()>("nothing").on(&to_server).call(&()).is_err());
    assert_eq!(ours.take(), ["call nothing", "called nothing false"]);
    assert!(client.procedure::<u8, usize>("pull").on(&to_server).call(&1).is_err());
    eventually("the handler has ended", || theirs.0.lock().unwrap().len() == 2);
    assert_eq!(theirs.take(), ["handle pull", "handled pull false"]);
}

fn a_dump_shows_what_hangs(net: &Net) {
    let Pair { server, client, to_server } = net.pair();
    let (held, responders) = mpsc::channel();
    let held = Mutex::new(held);
    server
        .provider(3)
        .define_deferred("stuck", move |responder: Responder<()>, _: u8| drop(held.lock().unwrap().send(responder)))
        .unwrap();
    let memory = server.expose(vec![0u8; 100], BulkMode::ReadWrite).unwrap();
    let stuck = client.procedure::<u8, ()>("stuck").on(to_server.provider(3)).timeout(Duration::from_secs(500));
    let call = stuck.start(&1).unwrap();
    let responder = responders.recv_timeout(BOUND).unwrap();

    let dump = client.dump().unwrap();
    let [found] = &dump.calls[..] else { panic!("{dump:#?}") };
    assert_eq!((found.procedure.as_deref(), found.provider, &found.peer), (Some("stuck"), 3, &server.address()));
    assert!(found.age < BOUND && found.left > Duration::from_secs(400) && !found.one_way);
    let [connection] = &dump.connections[..] else { panic!("{dump:#?}") };
    assert_eq!((connection.open, connection.dialled, connection.waiting, connection.handling), (true, true, 1, 0));

    let dump = server.dump().unwrap();
    assert!(dump.calls.is_empty() && !dump.closed);
    let [found] = &dump.requests[..] else { panic!("{dump:#?}") };
    assert_eq!((found.procedure.as_deref(), found.provider, found.state), (Some("stuck"), 3, RequestState::Handler));
    assert_eq!(found.peer.as_ref(), Some(&server.peers()[0].address()));
    assert_eq!((dump.exposed_regions, dump.exposed_bytes), (1, 100));
    assert_eq!(dump.connections[0].handling, 1);

    drop(call);
    eventually("it is cancelled", || server.dump().unwrap().requests[0].state == RequestState::Cancelled);
    drop((responder, memory));
    assert!(server.dump().unwrap().requests.is_empty() && client.dump().unwrap().calls.is_empty());
    server.finalize().unwrap();
    assert!(server.dump().unwrap().closed);
}

fn statistics_survive_the_engine(net: &Net) {
    let Pair { server, client, to_server } = net.pair();
    server.define("sum", |_: &Request, (x, y): (i32, i32)| x + y).unwrap();
    client.procedure::<(i32, i32), i32>("sum").on(&to_server).call(&(1, 2)).unwrap();
    let engines: [&Engine; 2] = [&client, &server];
    engines.iter().for_each(|engine| engine.finalize().unwrap());
    assert_eq!(calls_of(&client.stats(), "sum").calls, 1);
    assert_eq!(handler_of(&server.stats(), "sum", 0).calls, 1);
    assert_eq!(server.stats().transports[0].open, 0);
}

suite!(
    calls_are_counted_and_timed_at_both_ends,
    a_peer_that_makes_up_names_makes_no_entries,
    handlers_that_answer_later_are_timed_until_they_answer,
    a_nested_call_knows_the_procedure_that_makes_it,
    transfers_peers_and_memory_are_counted,
    one_way_calls_and_cancelled_ones_are_counted,
    calls_are_timed_and_errors_are_counted_by_peer_and_transport,
    nothing_is_measured_where_that_is_turned_off,
    peers_get_statistics_where_that_is_allowed,
    statistics_for_peers_are_bounded,
    a_monitor_is_told_of_the_beginning_and_the_end_of_each_operation,
    a_dump_shows_what_hangs,
    statistics_survive_the_engine,
);
