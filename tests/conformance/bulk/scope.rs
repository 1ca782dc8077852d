//! Borrowed memory, exposed for as long as a scope lasts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use calomel::{Bulk, BulkMode, Engine, Error, Request};

use crate::assert_error;
use crate::support::{BOUND, Net, all_are, eventually, pattern};

const LEN: usize = 4 << 20;

fn handler_transfers_with_borrowed_memory(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("double", |request: &Request, bulk: Bulk| {
            let mut numbers = vec![0u32; bulk.len() / 4];
            bulk.on(request.endpoint()).pull_into(&mut numbers).unwrap();
            numbers.iter_mut().for_each(|n| *n *= 2);
            bulk.on(request.endpoint()).push_from(&numbers).unwrap()
        })
        .unwrap();
    let double = pair.client.procedure::<Bulk, usize>("double");
    let mut numbers: Vec<u32> = (0..50_000).collect();
    let moved = pair
        .client
        .scope(|s| {
            let bulk = s.expose(&mut numbers[10..], BulkMode::ReadWrite)?;
            assert_eq!((bulk.len(), bulk.mode()), (4 * 49_990, BulkMode::ReadWrite));
            double.on(&pair.to_server).call(&bulk)
        })
        .unwrap();
    assert_eq!(moved, 4 * 49_990);
    assert!((0..10).all(|i| numbers[i] == i as u32));
    assert!((10..50_000).all(|i| numbers[i] == 2 * i as u32));
}

fn several_buffers_of_one_scope_are_usable(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("copy", |request: &Request, (from, text, to): (Bulk, Bulk, Bulk)| {
            let mut bytes = vec![0u8; from.len() + text.len()];
            from.on(request.endpoint()).pull_into(&mut bytes[..from.len()]).unwrap();
            text.on(request.endpoint()).pull_into(&mut bytes[from.len()..]).unwrap();
            to.on(request.endpoint()).push_from(&bytes).unwrap()
        })
        .unwrap();
    let copy = pair.client.procedure::<(Bulk, Bulk, Bulk), usize>("copy");
    let (source, text, mut target) = (pattern(1, 10_000), String::from("text"), [0u8; 10_004]);
    let (head, tail) = source.split_at(5000);
    let moved = pair.client.scope(|s| {
        let from = s.expose_read_only(head)?;
        let text = s.expose_read_only(text.as_str())?;
        let to = s.expose(&mut target[..], BulkMode::WriteOnly)?;
        // Memory borrowed for reading can still be read by the owner.
        assert_eq!(from.len(), head.len());
        copy.on(&pair.to_server).call(&(from, text, to))
    });
    assert_eq!(moved.unwrap(), 5004);
    assert!(target[..5000] == *head && target[5000..5004] == *b"text" && all_are(&target[5004..], 0));
    assert!(tail == &source[5000..]);
}

fn scope_returns_its_closures_result(net: &Net) {
    let engine = net.client();
    assert_eq!(engine.scope(|_| Ok(String::from("fine"))).unwrap(), "fine");
    let nothing = engine.lookup(net.dead_address()).unwrap();
    let result = engine.scope(|s| {
        let bulk = s.expose_read_only(&[1u8, 2][..])?;
        engine.procedure::<Bulk, ()>("x").on(&nothing).call(&bulk)
    });
    assert_error!(result, Error::Unreachable { .. });
}

fn nested_scopes_are_usable(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("first", |request: &Request, bulk: Bulk| {
            let mut byte = [0u8];
            bulk.on(request.endpoint()).pull_into(&mut byte[..]).unwrap();
            byte[0]
        })
        .unwrap();
    let first = pair.client.procedure::<Bulk, u8>("first");
    let (mut a, mut b) = ([1u8; 10_000], [2u8; 10_000]);
    let sum = pair.client.scope(|outer| {
        let a = outer.expose(&mut a[..], BulkMode::ReadWrite)?;
        let inner = pair.client.scope(|inner| {
            let b = inner.expose(&mut b[..], BulkMode::ReadWrite)?;
            Ok(first.on(&pair.to_server).call(&a)? + first.on(&pair.to_server).call(&b)?)
        })?;
        b.fill(5);
        Ok(inner + first.on(&pair.to_server).call(&a)?)
    });
    assert_eq!(sum.unwrap(), 4);
    assert_eq!(b[0], 5);
}

fn bulk_that_outlives_its_scope_is_revoked(net: &Net) {
    let pair = net.pair();
    for len in [1, 100, 100_000] {
        let mut buffer = vec![1u8; len];
        let mut escaped = None;
        pair.server
            .scope(|s| {
                escaped = Some(s.expose(&mut buffer, BulkMode::ReadWrite)?);
                Ok(())
            })
            .unwrap();
        let remote = escaped.unwrap().on(&pair.to_server);
        assert_error!(remote.push_from(&vec![2u8; len]), Error::Revoked { .. });
        assert_error!(remote.pull_into(&mut vec![2u8; len]), Error::Revoked { .. });
        assert!(all_are(&buffer, 1));
    }
}

/// A peer that pushes into a bulk until a push fails.
struct Pusher {
    pushes: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    ended: mpsc::Receiver<Error>,
}

impl Pusher {
    fn define(engine: &Engine) -> Pusher {
        let (pushes, stop) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (sender, ended) = mpsc::channel();
        let (count, stopped) = (pushes.clone(), stop.clone());
        engine
            .define("push on", move |request: &Request, bulk: Bulk| {
                let remote = bulk.on(request.endpoint());
                let begin = Instant::now();
                for round in (0..=u8::MAX).cycle() {
                    let bytes = vec![round; bulk.len()];
                    if let Err(error) = remote.push_from(&bytes) {
                        let _ = sender.send(error);
                        return;
                    }
                    count.fetch_add(1, Ordering::SeqCst);
                    if stopped.load(Ordering::SeqCst) || begin.elapsed() > BOUND {
                        return;
                    }
                }
            })
            .unwrap();
        Pusher { pushes, stop, ended }
    }

    /// Returns while pushes are in progress.
    fn wait_until_pushing(&self) {
        let before = self.pushes.load(Ordering::SeqCst);
        eventually("the peer pushes", || self.pushes.load(Ordering::SeqCst) >= before + 3);
    }

    /// Asserts that the last push failed because the exposure had ended.
    fn assert_revoked(&self) {
        let error = self.ended.recv_timeout(BOUND).unwrap();
        assert_error!(Err::<(), _>(error), Error::Revoked { .. });
    }
}

impl Drop for Pusher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// Asserts that no peer writes the memory any more.
#[track_caller]
fn assert_quiet(buffer: &[u8]) {
    let snapshot = buffer.to_vec();
    crate::support::stays("the memory is not written", Duration::from_millis(60), || std::hint::black_box(buffer) == snapshot);
}

fn end_of_the_scope_fences_pushes(net: &Net) {
    let pair = net.pair();
    let pusher = Pusher::define(&pair.server);
    let push = pair.client.procedure::<Bulk, ()>("push on");
    let mut buffer = vec![0u8; LEN];
    for _ in 0..4 {
        pair.client
            .scope(|s| {
                let bulk = s.expose(&mut buffer, BulkMode::WriteOnly)?;
                push.on(&pair.to_server).notify(&bulk)?;
                pusher.wait_until_pushing();
                Ok(())
            })
            .unwrap();
        assert_quiet(&buffer);
        pusher.assert_revoked();
    }
}

fn error_in_the_scope_fences_pushes(net: &Net) {
    let pair = net.pair();
    let pusher = Pusher::define(&pair.server);
    let push = pair.client.procedure::<Bulk, ()>("push on");
    let missing = pair.client.procedure::<(), ()>("missing");
    let mut buffer = vec![0u8; LEN];
    let result = pair.client.scope(|s| {
        let bulk = s.expose(&mut buffer, BulkMode::WriteOnly)?;
        let _pending = push.on(&pair.to_server).start(&bulk)?;
        pusher.wait_until_pushing();
        missing.on(&pair.to_server).call(&())
    });
    assert_quiet(&buffer);
    assert_error!(result, Error::NoSuchProcedure { .. });
    pusher.assert_revoked();
}

fn panic_in_the_scope_fences_pushes(net: &Net) {
    let pair = net.pair();
    let pusher = Pusher::define(&pair.server);
    let push = pair.client.procedure::<Bulk, ()>("push on");
    let mut buffer = vec![0u8; LEN];
    for _ in 0..4 {
        let panic = catch_unwind(AssertUnwindSafe(|| {
            pair.client.scope(|s| -> calomel::Result<()> {
                let bulk = s.expose(&mut buffer, BulkMode::WriteOnly)?;
                push.on(&pair.to_server).notify(&bulk)?;
                pusher.wait_until_pushing();
                panic!("in the scope");
            })
        }));
        assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"in the scope"));
        assert_quiet(&buffer);
        pusher.assert_revoked();
    }
    // The engine is still usable.
    pair.server.define("fine", |_: &Request, n: u8| n).unwrap();
    assert_eq!(pair.client.procedure::<u8, u8>("fine").on(&pair.to_server).call(&1).unwrap(), 1);
}

fn leaked_bulk_does_not_prolong_its_scope(net: &Net) {
    let pair = net.pair();
    let pusher = Pusher::define(&pair.server);
    let push = pair.client.procedure::<Bulk, ()>("push on");
    let mut buffer = vec![0u8; LEN];
    pair.client
        .scope(|s| {
            let bulk = s.expose(&mut buffer, BulkMode::WriteOnly)?;
            std::mem::forget(push.on(&pair.to_server).start(&bulk)?);
            std::mem::forget(bulk);
            pusher.wait_until_pushing();
            Ok(())
        })
        .unwrap();
    assert_quiet(&buffer);
    pusher.assert_revoked();
}

suite![
    handler_transfers_with_borrowed_memory,
    several_buffers_of_one_scope_are_usable,
    scope_returns_its_closures_result,
    nested_scopes_are_usable,
    bulk_that_outlives_its_scope_is_revoked,
    end_of_the_scope_fences_pushes,
    error_in_the_scope_fences_pushes,
    panic_in_the_scope_fences_pushes,
    leaked_bulk_does_not_prolong_its_scope,
];
