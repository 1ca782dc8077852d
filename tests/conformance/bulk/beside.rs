//! Bulk data and calls at the same time, between the same engines.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use calomel::{Bulk, BulkMode, Endpoint, Engine, Error, HandlerResult, Request};

use crate::support::{Net, Pair, end, eventually, pattern, rounds};

/// Large enough for a connection of its own, where the transport has such.
const LEN: usize = 3 << 20;

fn serve(server: &Engine) {
    server.define("echo", |_: &Request, text: String| text).unwrap();
    let engine = server.clone();
    // Transfers may fail where an engine ends. Handlers that panicked would print backtraces, which takes seconds in a guest.
    let pull = move |request: &Request, (bulk, seed): (Bulk, u64)| -> HandlerResult<String> {
        let mut bytes = vec![0u8; bulk.len()];
        bulk.on(request.endpoint()).pull_into(&mut bytes)?;
        assert!(bytes == pattern(seed, LEN), "the bytes are wrong");
        Ok(engine.address().to_string())
    };
    server.define_try("pull", pull).unwrap();
    let push = |request: &Request, (bulk, seed): (Bulk, u64)| -> HandlerResult<()> {
        bulk.on(request.endpoint()).push_from(&pattern(seed, LEN))?;
        Ok(())
    };
    server.define_try("push", push).unwrap();
}

fn echoes(client: &Engine, to: &Endpoint, text: &str) {
    assert_eq!(client.procedure::<String, String>("echo").on(to).call(&text.to_owned()).unwrap(), text);
}

/// Moves `LEN` bytes in each way.
fn moves(client: &Engine, to: &Endpoint, seed: u64) -> calomel::Result<()> {
    let exposed = client.expose(pattern(seed, LEN), BulkMode::ReadWrite)?;
    client.procedure::<(Bulk, u64), String>("pull").on(to).call(&(exposed.bulk(), seed))?;
    client.procedure::<(Bulk, u64), ()>("push").on(to).call(&(exposed.bulk(), seed + 1))?;
    assert!(exposed.reclaim() == pattern(seed + 1, LEN), "the bytes are wrong");
    Ok(())
}

fn transfers_and_calls_at_the_same_time_arrive_whole(net: &Net) {
    let Pair { server, client, to_server: to } = &net.pair();
    serve(server);
    let done = &AtomicBool::new(false);
    thread::scope(|scope| {
        let movers: Vec<_> = (0..3u64)
            .map(|mover| scope.spawn(move || (0..rounds(6)).for_each(|n| moves(client, to, 100 * mover + n as u64).unwrap())))
            .collect();
        for caller in 0..2 {
            scope.spawn(move || {
                while !done.load(Ordering::SeqCst) {
                    echoes(client, to, &format!("caller {caller}"));
                }
            });
        }
        let results: Vec<_> = movers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::SeqCst);
        results.into_iter().for_each(|result| result.unwrap());
    });
}

/// A server that takes one connection serves one client, with bulk data of any length; and then the next.
fn server_at_its_limit_of_connections_moves_bulk_data(net: &Net) {
    let server = net.server_with(|builder| builder.max_connections(1));
    serve(&server);
    for seed in 0..3 {
        let client = net.client();
        let to = client.lookup(server.address()).unwrap();
        // The one before has ended its connection, which the server may not know yet.
        eventually("the server takes the connection", || match moves(&client, &to, seed) {
            Ok(()) => true,
            Err(Error::Unreachable { .. } | Error::Disconnected { .. }) => false,
            Err(error) => panic!("{error}"),
        });
        for _ in 0..rounds(3) {
            moves(&client, &to, seed).unwrap();
            echoes(&client, &to, "beside");
        }
        end(&client);
    }
}

fn engine_that_keeps_to_one_connection_moves_bulk_data(net: &Net) {
    for count in [0, 4] {
        let Pair { server, client, to_server: to } = &net.pair_with(|builder| builder.bulk_connections(count));
        serve(server);
        thread::scope(|scope| {
            for mover in 0..4 {
                scope.spawn(move || (0..rounds(3)).for_each(|n| moves(client, to, 10 * mover + n as u64).unwrap()));
            }
        });
    }
}

/// Engines end while bulk data moves: each operation ends, and so do the engines.
fn engines_that_end_during_transfers_end_them(net: &Net) {
    for ends in ["server", "client"] {
        let Pair { server, client, to_server: to } = &net.pair();
        serve(server);
        moves(client, to, 1).unwrap();
        thread::scope(|scope| {
            let movers: Vec<_> = (0..3u64)
                .map(|mover| {
                    scope.spawn(move || {
                        let mut seed = 1000 * mover;
                        while moves(client, to, seed).is_ok() {
                            seed += 2;
                        }
                    })
                })
                .collect();
            echoes(client, to, "beside");
            end(if ends == "server" { server } else { client });
            movers.into_iter().for_each(|mover| mover.join().unwrap());
        });
    }
}

suite![
    transfers_and_calls_at_the_same_time_arrive_whole,
    server_at_its_limit_of_connections_moves_bulk_data,
    engine_that_keeps_to_one_connection_moves_bulk_data,
    engines_that_end_during_transfers_end_them
];
