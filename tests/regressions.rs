//! Problems known from other RPC and RDMA systems, and the tests that prevent them here: those in this file, and by path those
//! of the suites `conformance` (c) and `processes` (p).
//!
//! | problem | tests |
//! |---|---|
//! | a transport error that can't be tied to a call; clients wait for ever | p `dying::server_killed_or_stopped_ends_calls_with_disconnected`, p `foreign::call_to_silent_server_is_unreachable_after_the_connect_timeout`, c `engine::reach::call_to_an_address_without_a_listener_fails_at_once` |
//! | cancel completes twice, or never | c `rpc::pending::cancel_and_answer_race_to_exactly_one_end`, `cancelled_call_ends_at_once_and_is_cancelled_at_the_server`, c `bulk::transfer::cancelled_pull_ends_soon_and_writes_no_more` |
//! | a timed-out transfer writes into memory that has another owner | c `bulk::borrowed`, c `bulk::transfer::dropped_transfer_does_not_write_freed_memory`, c `bulk::reclaim`, p `transfers::transfers_with_stopped_peer_time_out` |
//! | the timed-out client is gone, the server goes on for ever | c `rpc::deadlines::call_beyond_its_timeout_fails_with_timeout`, c `rpc::asynchronous::pending_future_is_dropped_when_its_call_times_out`, c `rpc::deferred::responder_knows_that_its_call_has_ended`, p `dying::client_killed_or_stopped_cancels_its_calls` |
//! | a restarted peer gets old traffic, or hangs | p `restart`, c `engine::reach::restarted_server_serves_calls_and_rejects_old_bulks` |
//! | a client killed in mid-transfer crashes the server | p `transfers::puller_killed_or_stopped_releases_the_memory`, `pusher_killed_or_stopped_releases_the_memory`, `owner_killed_or_stopped_ends_the_pull`, `owner_killed_or_stopped_ends_the_push` |
//! | "try again" reaches the user; depth limits hang | [`calls_beyond_the_limits_are_answered_or_refused`], c `rpc::pending::many_concurrent_calls_are_answered`, c `bulk::transfer::many_concurrent_transfers_succeed`, c `rpc::nested` |
//! | sizes around the eager limit break; one-way with overflow frees too soon | c `rpc::sizes`, c `bulk::sizes`, [`a_gibibyte_is_pushed_and_pulled`] |
//! | registration caches keyed by address corrupt data | c `bulk::reclaim::thousands_of_exposures_are_independent`, `memory_of_a_dropped_exposure_is_not_written_any_more`, [`memory_exposed_again_rejects_its_old_bulks`] |
//! | finalize hangs, crashes, is not thread-safe | c `engine::finalize`, c `engine::in_flight`, c `engine::after`, p `dying::finalize_with_stopped_peer_is_bounded` |
//! | fork breaks it | p `leftovers::call_in_forked_child_fails` |
//! | busy polling is fast and not the default; a progress thread slows clients | p `leftovers::idle_engines_use_no_cpu_time`; the benchmarks measure the speed |
//! | the server must dial back; NAT and containers fail | c `bulk::basics::handler_pulls_and_pushes_its_callers_memory`, c `rpc::request::callers_endpoint_is_usable_after_the_call`, c `bulk::forward::origin_of_a_callers_bulk_reaches_the_caller` |
//! | `process_vm_readv` is forbidden | `tests/shm/limits.rs`: `transfers_succeed_when_one_side_may_not_read_the_other`, `transfers_succeed_when_neither_side_may_read_the_other`; the suite `on_shm_no_kernel_copy` of c |
//! | "frame too large" looks like "disconnected" | c `rpc::sizes::arguments_above_the_limit_are_refused`, `results_above_the_limit_are_refused`, `messages_above_the_receivers_limit_are_refused` |
//! | a peer that vanishes without closing its connection hangs all streams | p `dying` and `transfers` with SIGSTOP, p `foreign::call_to_full_accept_queue_is_unreachable_after_the_connect_timeout` |
//! | a second `define` of a name silently wins; hashes of names collide | c `rpc::define::a_second_definition_of_a_name_is_an_error`, [`names_that_collide_under_common_hashes_are_distinct`] |
//! | a decode error hangs the caller; an exception kills the server | c `rpc::faults` |
//! | a bulk slice is unchecked | c `bulk::slices::slice_beyond_the_end_is_out_of_range` |
//! | chunks that don't divide evenly overrun | c `bulk::sizes`, c `bulk::model::random_transfers_agree_with_the_model` |
//! | a forged descriptor reads the heap | c `bulk::forged`, p `foreign::garbage_from_one_peer_leaves_others_connected` |
//! | keys 1, 2, 3; the mode checked by the initiator | c `bulk::denied::tokens_of_consecutive_exposures_are_random`, c `bulk::forged::forged_mode_grants_no_access` |
//! | a dead address: lookup succeeds, the call hangs and burns a core | p `foreign::call_to_closed_port_is_unreachable_at_once`, `call_to_full_accept_queue_is_unreachable_after_the_connect_timeout` |
//! | a missing argument or a wrong type is garbage, or aborts the server | c `rpc::faults::arguments_of_another_type_fail_with_type_mismatch`, `results_of_another_type_fail_with_type_mismatch` |
//! | a range longer than the region is silently clamped | c `bulk::slices::slice_beyond_the_end_is_out_of_range` |
//! | a bulk freed before the pull | c `bulk::denied::transfer_with_revoked_memory_fails_with_revoked`, c `bulk::eager::eager_bulk_is_revoked_when_its_exposure_is_dropped` |
//! | a handler that never answers hangs its caller | c `rpc::deferred::dropped_responder_fails_its_call_with_no_response`, c `rpc::deadlines::call_without_a_timeout_has_the_engines_default` |
//! | a killed process leaves things behind | p `restart::address_in_use_is_an_error_until_its_engine_is_killed`, p `leftovers::ended_engines_leave_no_threads_and_no_descriptors` |

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use calomel::{BulkMode, Engine, Error, Pending, Request, Responder};

use common::*;

const LISTEN: [&str; 2] = ["loop://regressions-", "tcp://127.0.0.1:0"];

/// Runs the test with a server and a client on each transport.
fn on_each_transport(name: &str, test: impl Fn(&Engine, &Engine, &calomel::Endpoint)) {
    for listen in LISTEN {
        let listen = if listen.ends_with('-') { format!("{listen}{name}") } else { listen.to_owned() };
        let (server, client) = (Engine::server(listen).unwrap(), Engine::builder().build().unwrap());
        let to_server = client.lookup(server.address()).unwrap();
        test(&server, &client, &to_server);
        client.finalize().unwrap();
        server.finalize().unwrap();
    }
}

#[test]
fn calls_beyond_the_limits_are_answered_or_refused() {
    const CALLS: usize = 40_000;
    let _watchdog = Watchdog::start("calls_beyond_the_limits_are_answered_or_refused");
    on_each_transport("calls", |server, client, to_server| {
        let (hold, held) = mpsc::channel();
        server.define_deferred("held", move |reply: Responder<u32>, n: u32| hold.send((reply, n)).unwrap()).unwrap();
        server.define("fine", |_: &Request, n: u32| n).unwrap();
        let held_call = client.procedure::<u32, u32>("held");
        // No call is answered before all are sent, so that no window hides the limits.
        let pendings: Vec<Pending<u32>> = (0..CALLS as u32).map(|n| held_call.on(to_server).start(&n).unwrap()).collect();
        let (mut answered, mut refused) = (0, 0);
        let begin = Instant::now();
        let done = Arc::new(AtomicBool::new(false));
        let stop = done.clone();
        let answer_all = std::thread::spawn(move || {
            while !stop.load(Ordering::SeqCst) && begin.elapsed() < 2 * BOUND {
                if let Ok((reply, n)) = held.recv_timeout(Duration::from_millis(10)) {
                    reply.respond(&(n + 1)).unwrap();
                }
            }
            // The handler sends into this as long as its engine lives.
            held
        });
        for (n, pending) in pendings.into_iter().enumerate() {
            match pending.wait() {
                Ok(answer) => {
                    assert_eq!(answer, n as u32 + 1);
                    answered += 1;
                }
                Err(Error::Busy { reason, .. }) => {
                    assert!(reason.chars().any(|c| c.is_ascii_digit()), "{reason} names no limit");
                    refused += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        done.store(true, Ordering::SeqCst);
        assert!(begin.elapsed() < BOUND);
        assert_eq!(answered + refused, CALLS);
        assert!(answered > 1000, "{answered} answered, {refused} refused");
        // Afterwards the connection is usable as before.
        for n in 0..100 {
            assert_eq!(client.procedure::<u32, u32>("fine").on(to_server).call(&n).unwrap(), n);
        }
        drop(answer_all.join().unwrap());
    });
}

#[test]
fn names_that_collide_under_common_hashes_are_distinct() {
    let _watchdog = Watchdog::start("names_that_collide_under_common_hashes_are_distinct");
    on_each_transport("names", |server, client, to_server| {
        // With 32 bits: djb2, djb2 with xor, FNV-1a, CRC-32.
        let pairs = [
            ("hetairas", "mentioner"),
            ("heliotropes", "neurospora"),
            ("costarring", "liquor"),
            ("declinate", "macallums"),
            ("plumless", "buckeroo"),
        ];
        for (a, b) in pairs {
            server.define(a, move |_: &Request, ()| a.to_owned()).unwrap();
            server.define(b, move |_: &Request, ()| b.to_owned()).unwrap();
        }
        for name in pairs.iter().flat_map(|pair| [pair.0, pair.1]) {
            assert_eq!(client.procedure::<(), String>(name).on(to_server).call(&()).unwrap(), name);
        }
        // And many more names, against other hashes.
        for n in 0..20_000u32 {
            server.define(&format!("procedure {n}"), move |_: &Request, ()| n).unwrap();
        }
        let pendings: Vec<_> = (0..20_000u32)
            .map(|n| client.procedure::<(), u32>(&format!("procedure {n}")).on(to_server).start(&()).unwrap())
            .collect();
        for (n, pending) in pendings.into_iter().enumerate() {
            match pending.wait() {
                Ok(answer) => assert_eq!(answer, n as u32),
                Err(Error::Busy { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
    });
}

#[test]
fn memory_exposed_again_rejects_its_old_bulks() {
    let _watchdog = Watchdog::start("memory_exposed_again_rejects_its_old_bulks");
    on_each_transport("memory", |server, _, to_server| {
        // The vector keeps its address; the bulks of its earlier exposures must not give access.
        let mut buffer = vec![0u8; 100_000];
        let mut old = Vec::new();
        for round in 1..50u8 {
            let exposed = server.expose(buffer, BulkMode::ReadWrite).unwrap();
            let bulk = exposed.bulk();
            assert_eq!(bulk.on(to_server).push_from(&[round; 1000][..]).unwrap(), 1000);
            for stale in &old {
                let stale: &calomel::Bulk = stale;
                assert_error!(stale.on(to_server).push_from(&[0xffu8; 1000][..]), Error::Revoked { .. });
            }
            buffer = exposed.reclaim();
            assert!(buffer[..1000].iter().all(|&b| b == round) && buffer[1000..].iter().all(|&b| b == 0));
            old.push(bulk);
        }
    });
}

#[test]
#[ignore = "takes 3 GiB of memory"]
fn a_gibibyte_is_pushed_and_pulled() {
    const LEN: usize = (1 << 30) + 7;
    let _watchdog = Watchdog::start("a_gibibyte_is_pushed_and_pulled");
    on_each_transport("gibibyte", |server, _, to_server| {
        let data = pattern(1, LEN);
        let theirs = server.expose(vec![0u8; LEN], BulkMode::ReadWrite).unwrap();
        let remote = theirs.bulk().on(to_server);
        assert_eq!(remote.push_from(&data).unwrap(), LEN);
        let mut copy = vec![0u8; LEN];
        assert_eq!(remote.pull_into(&mut copy).unwrap(), LEN);
        assert!(copy == data);
    });
}
