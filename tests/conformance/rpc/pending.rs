//! Calls in progress: waiting for one, for all, for any; as futures; cancelled; dropped.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Engine, Error, Pending, Procedure, Request, Responder};

use crate::assert_error;
use crate::support::{BOUND, Gate, Net, block_on, eventually};

/// Calls that the test answers in an order of its choice.
#[derive(Clone, Default)]
struct Held(Arc<Mutex<HashMap<u32, Responder<u32>>>>);

impl Held {
    fn define(server: &Engine) -> Held {
        let held = Held::default();
        let here = held.clone();
        server
            .define_deferred("held", move |responder: Responder<u32>, key: u32| {
                here.0.lock().unwrap().insert(key, responder);
            })
            .unwrap();
        held
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Answers call `key` with `key + 1000`, once it has arrived.
    fn answer(&self, key: u32) {
        eventually("the call arrived", || self.0.lock().unwrap().contains_key(&key));
        let responder = self.0.lock().unwrap().remove(&key).unwrap();
        responder.respond(&(key + 1000)).unwrap();
    }
}

fn procedure(client: &Engine) -> Procedure<u32, u32> {
    client.procedure("held")
}

fn started_call_is_ready_once_answered(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let pending: Pending<u32> = procedure(&pair.client).on(&pair.to_server).start(&1).unwrap();
    eventually("the call arrived", || held.len() == 1);
    assert!(!pending.is_ready());
    held.answer(1);
    eventually("the answer arrived", || pending.is_ready());
    assert_eq!(pending.wait().unwrap(), 1001);
}

fn many_concurrent_calls_are_answered(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let pendings: Vec<_> = (0..500).map(|i| procedure(&pair.client).on(&pair.to_server).start(&i).unwrap()).collect();
    eventually("all calls arrived", || held.len() == 500);
    for i in (0..500).rev() {
        held.answer(i);
    }
    for (i, pending) in pendings.into_iter().enumerate() {
        assert_eq!(pending.wait().unwrap(), i as u32 + 1000);
    }
}

fn wait_any_returns_the_first_answered_call(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let mut pendings: Vec<_> = (0..5).map(|i| procedure(&pair.client).on(&pair.to_server).start(&i).unwrap()).collect();
    let mut left = vec![0, 1, 2, 3, 4];
    for key in [3, 0, 4, 1, 2] {
        held.answer(key);
        let (index, answer) = Pending::wait_any(&mut pendings);
        assert_eq!(answer.unwrap(), key + 1000);
        assert_eq!(left.remove(index), key);
        assert_eq!(pendings.len(), left.len());
    }
}

fn wait_any_waits_for_an_answer(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let mut pendings: Vec<_> = (0..3).map(|i| procedure(&pair.client).on(&pair.to_server).start(&i).unwrap()).collect();
    eventually("all calls arrived", || held.len() == 3);
    let late = held.clone();
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        late.answer(1);
    });
    let (index, answer) = Pending::wait_any(&mut pendings);
    assert_eq!((index, answer.unwrap()), (1, 1001));
    thread.join().unwrap();
    held.answer(0);
    held.answer(2);
}

fn wait_any_returns_errors(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let call = procedure(&pair.client);
    let mut pendings = vec![
        call.on(&pair.to_server).start(&0).unwrap(),
        call.on(&pair.to_server).timeout(Duration::from_millis(20)).start(&1).unwrap(),
    ];
    let (index, answer) = Pending::wait_any(&mut pendings);
    assert_eq!(index, 1);
    assert_error!(answer, Error::Timeout { .. });
    held.answer(0);
    assert_eq!(Pending::wait_any(&mut pendings).1.unwrap(), 1000);
    assert!(pendings.is_empty());
}

fn wait_any_waits_for_several_servers(net: &Net) {
    let client = net.client();
    let servers: Vec<_> = (0..4).map(|_| net.server()).collect();
    let held: Vec<_> = servers.iter().map(Held::define).collect();
    let mut pendings: Vec<_> = servers
        .iter()
        .zip(0..)
        .map(|(server, i)| procedure(&client).on(client.lookup(server.address()).unwrap()).start(&i).unwrap())
        .collect();
    let mut left = vec![0, 1, 2, 3];
    for key in [2, 0, 3, 1] {
        held[key as usize].answer(key);
        let (index, answer) = Pending::wait_any(&mut pendings);
        assert_eq!(answer.unwrap(), key + 1000);
        assert_eq!(left.remove(index), key);
    }
}

fn wait_all_returns_the_answers_in_order(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let pendings: Vec<_> = (0..20).map(|i| procedure(&pair.client).on(&pair.to_server).start(&i).unwrap()).collect();
    for i in (0..20).rev() {
        held.answer(i);
    }
    let answers: Vec<u32> = Pending::wait_all(pendings).into_iter().map(Result::unwrap).collect();
    assert_eq!(answers, (1000..1020).collect::<Vec<_>>());
    assert!(Pending::<u32>::wait_all(Vec::new()).is_empty());
}

fn awaited_pending_returns_the_answer(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let pending = procedure(&pair.client).on(&pair.to_server).start(&7).unwrap();
    let late = held.clone();
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        late.answer(7);
    });
    assert_eq!(block_on(pending).unwrap(), 1007);
    thread.join().unwrap();
}

fn concurrently_awaited_calls_are_answered(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let (call, to) = (procedure(&pair.client), &pair.to_server);
    let thread = thread::spawn(move || (0..3).rev().for_each(|i| held.answer(i)));
    let (a, b, c) = block_on(async {
        let (a, b, c) = (call.on(to).start(&0)?, call.on(to).start(&1)?, call.on(to).start(&2)?);
        calomel::Result::Ok((a.await?, b.await?, c.await?))
    })
    .unwrap();
    assert_eq!((a, b, c), (1000, 1001, 1002));
    thread.join().unwrap();
}

fn call_dropped_after_a_poll_leaves_the_link_usable(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let mut pending = procedure(&pair.client).on(&pair.to_server).start(&1).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(Pin::new(&mut pending).poll(&mut context), Poll::Pending));
    drop(pending);
    let next = procedure(&pair.client).on(&pair.to_server).start(&2).unwrap();
    held.answer(2);
    assert_eq!(next.wait().unwrap(), 1002);
}

fn future_polled_by_a_second_task_wakes_that_task(net: &Net) {
    // Polled with one waker, then awaited with another: the second one is woken.
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let mut pending = procedure(&pair.client).on(&pair.to_server).start(&1).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(Pin::new(&mut pending).poll(&mut context), Poll::Pending));
    let thread = thread::spawn(move || block_on(pending));
    thread::sleep(Duration::from_millis(20));
    held.answer(1);
    assert_eq!(thread.join().unwrap().unwrap(), 1001);
}

fn cancelled_call_ends_at_once_and_is_cancelled_at_the_server(net: &Net) {
    let pair = net.pair();
    let (entered, seen) = (Gate::default(), Gate::default());
    let (e, s) = (entered.clone(), seen.clone());
    pair.server
        .define("endless", move |request: &Request, ()| {
            e.open();
            let begin = Instant::now();
            while !request.is_cancelled() && begin.elapsed() < BOUND {
                thread::sleep(Duration::from_millis(1));
            }
            if request.is_cancelled() {
                s.open();
            }
        })
        .unwrap();
    let endless = pair.client.procedure::<(), ()>("endless");
    let pending = endless.on(&pair.to_server).start(&()).unwrap();
    entered.wait();
    let begin = Instant::now();
    pending.cancel();
    let error = pending.wait().unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert!(error.to_string().contains("endless"), "{error}");
    assert_error!(Err::<(), _>(error), Error::Cancelled { .. });
    seen.wait();
}

fn cancel_of_an_answered_call_keeps_the_answer(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    let pending = procedure(&pair.client).on(&pair.to_server).start(&1).unwrap();
    held.answer(1);
    eventually("the answer arrived", || pending.is_ready());
    pending.cancel();
    assert_eq!(pending.wait().unwrap(), 1001);
}

fn cancel_and_answer_race_to_exactly_one_end(net: &Net) {
    let pair = net.pair();
    pair.server.define("quick", |_: &Request, n: u32| n).unwrap();
    let quick = pair.client.procedure::<u32, u32>("quick");
    for round in 0..200u32 {
        let pending = quick.on(&pair.to_server).start(&round).unwrap();
        for _ in 0..round % 40 {
            std::hint::spin_loop();
        }
        pending.cancel();
        match pending.wait() {
            Ok(answer) => assert_eq!(answer, round),
            Err(error) => assert_error!(Err::<(), _>(error), Error::Cancelled { .. }),
        }
    }
    assert_eq!(quick.on(&pair.to_server).call(&1).unwrap(), 1);
}

fn dropped_calls_leave_room_for_others(net: &Net) {
    let pair = net.pair();
    let held = Held::define(&pair.server);
    for i in 0..300 {
        drop(procedure(&pair.client).on(&pair.to_server).start(&i).unwrap());
    }
    let pending = procedure(&pair.client).on(&pair.to_server).start(&1000).unwrap();
    held.answer(1000);
    assert_eq!(pending.wait().unwrap(), 2000);
}

suite![
    started_call_is_ready_once_answered,
    many_concurrent_calls_are_answered,
    wait_any_returns_the_first_answered_call,
    wait_any_waits_for_an_answer,
    wait_any_returns_errors,
    wait_any_waits_for_several_servers,
    wait_all_returns_the_answers_in_order,
    awaited_pending_returns_the_answer,
    concurrently_awaited_calls_are_answered,
    call_dropped_after_a_poll_leaves_the_link_usable,
    future_polled_by_a_second_task_wakes_that_task,
    cancelled_call_ends_at_once_and_is_cancelled_at_the_server,
    cancel_of_an_answered_call_keeps_the_answer,
    cancel_and_answer_race_to_exactly_one_end,
    dropped_calls_leave_room_for_others,
];
