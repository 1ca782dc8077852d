//! Defining, removing and redefining procedures; providers.

use calomel::{Error, Provider, Registration, Request};

use crate::assert_error;
use crate::support::Net;

fn a_second_definition_of_a_name_is_an_error(net: &Net) {
    let pair = net.pair();
    pair.server.define("once", |_: &Request, ()| 1u8).unwrap();
    let second = pair.server.define("once", |_: &Request, ()| 2u8);
    assert_error!(second, Error::AlreadyDefined { name, provider: 0, .. } if name == "once");
    let second = pair.server.define_async("once", |_: Request, ()| async { 2u8 });
    assert_error!(second, Error::AlreadyDefined { .. });
    let second = pair.server.define_deferred("once", |_: calomel::Responder<u8>, ()| {});
    assert_error!(second, Error::AlreadyDefined { .. });
    assert_eq!(pair.client.procedure::<(), u8>("once").on(&pair.to_server).call(&()).unwrap(), 1);
}

fn dropped_registration_keeps_the_procedure(net: &Net) {
    let pair = net.pair();
    drop(pair.server.define("stays", |_: &Request, ()| 1u8).unwrap());
    assert_eq!(pair.client.procedure::<(), u8>("stays").on(&pair.to_server).call(&()).unwrap(), 1);
}

fn removed_procedure_can_be_defined_again(net: &Net) {
    let pair = net.pair();
    let changing = pair.client.procedure::<(), u32>("changing");
    for round in 0..10 {
        let registration: Registration = pair.server.define("changing", move |_: &Request, ()| round).unwrap();
        assert_eq!(changing.on(&pair.to_server).call(&()).unwrap(), round);
        registration.remove();
        assert_error!(changing.on(&pair.to_server).call(&()), Error::NoSuchProcedure { .. });
    }
    // With other types, too.
    pair.server.define("changing", |_: &Request, text: String| text.len()).unwrap();
    let changing = pair.client.procedure::<String, usize>("changing");
    assert_eq!(changing.on(&pair.to_server).call(&"four".into()).unwrap(), 4);
}

fn late_remove_keeps_the_next_definition(net: &Net) {
    let pair = net.pair();
    let first = pair.server.define("name", |_: &Request, ()| 1u8).unwrap();
    first.remove();
    let second = pair.server.provider(3).define("name", |_: &Request, ()| 2u8).unwrap();
    pair.server.define("name", |_: &Request, ()| 3u8).unwrap();
    second.remove();
    assert_eq!(pair.client.procedure::<(), u8>("name").on(&pair.to_server).call(&()).unwrap(), 3);
}

fn a_handler_in_progress_survives_its_removal(net: &Net) {
    let pair = net.pair();
    let (entered, go) = (crate::support::Gate::default(), crate::support::Gate::default());
    let (e, g) = (entered.clone(), go.clone());
    let registration = pair
        .server
        .define("slow", move |_: &Request, ()| {
            e.open();
            g.wait();
            5u8
        })
        .unwrap();
    let pending = pair.client.procedure::<(), u8>("slow").on(&pair.to_server).start(&()).unwrap();
    entered.wait();
    registration.remove();
    go.open();
    assert_eq!(pending.wait().unwrap(), 5);
}

fn values_of_a_removed_handler_are_dropped(net: &Net) {
    let pair = net.pair();
    let owned = std::sync::Arc::new(());
    let moved = owned.clone();
    let registration = pair
        .server
        .define("owner", move |_: &Request, ()| {
            let _ = &moved;
        })
        .unwrap();
    pair.client.procedure::<(), ()>("owner").on(&pair.to_server).call(&()).unwrap();
    registration.remove();
    crate::support::eventually("the closure was dropped", || std::sync::Arc::strong_count(&owned) == 1);
}

fn providers_serve_one_name_with_different_handlers(net: &Net) {
    let pair = net.pair();
    for id in [0, 1, 7, u16::MAX] {
        let provider: Provider = pair.server.provider(id);
        assert_eq!(provider.id(), id);
        provider.define("id", move |request: &Request, ()| (id, request.provider_id())).unwrap();
    }
    let id = pair.client.procedure::<(), (u16, u16)>("id");
    for expected in [0, 1, 7, u16::MAX] {
        let endpoint = pair.to_server.provider(expected);
        assert_eq!(id.on(&endpoint).call(&()).unwrap(), (expected, expected));
    }
    assert_eq!(id.on(&pair.to_server).call(&()).unwrap(), (0, 0));
    assert_error!(pair.server.provider(7).define("id", |_: &Request, ()| ()), Error::AlreadyDefined { provider: 7, .. });
}

fn provider_zero_is_the_engine_itself(net: &Net) {
    let pair = net.pair();
    pair.server.provider(0).define("zero", |_: &Request, ()| 0u8).unwrap();
    assert_error!(pair.server.define("zero", |_: &Request, ()| 1u8), Error::AlreadyDefined { .. });
    assert_eq!(pair.client.procedure::<(), u8>("zero").on(&pair.to_server).call(&()).unwrap(), 0);
}

fn providers_define_in_all_three_ways(net: &Net) {
    let pair = net.pair();
    let provider = pair.server.provider(2);
    provider.define("plain", |_: &Request, n: u8| n + 1).unwrap();
    provider.define_async("async", |_: Request, n: u8| async move { n + 2 }).unwrap();
    provider
        .define_deferred("deferred", |responder: calomel::Responder<u8>, n: u8| {
            responder.respond(&(n + 3)).unwrap();
        })
        .unwrap();
    let endpoint = pair.to_server.provider(2);
    for (name, answer) in [("plain", 11), ("async", 12), ("deferred", 13)] {
        let procedure = pair.client.procedure::<u8, u8>(name);
        assert_eq!(procedure.on(&endpoint).call(&10).unwrap(), answer);
        assert_error!(procedure.on(&pair.to_server).call(&10), Error::NoSuchProcedure { .. });
    }
}

fn unknown_provider_and_unknown_procedure_are_different_errors(net: &Net) {
    let pair = net.pair();
    pair.server.provider(1).define("here", |_: &Request, ()| ()).unwrap();
    let here = pair.client.procedure::<(), ()>("here");
    assert_error!(
        here.on(pair.to_server.provider(9)).call(&()),
        Error::NoSuchProvider { provider: 9, name, .. } if name == "here"
    );
    let gone = pair.client.procedure::<(), ()>("gone");
    assert_error!(gone.on(pair.to_server.provider(1)).call(&()), Error::NoSuchProcedure { name, .. } if name == "gone");
    assert_error!(gone.on(&pair.to_server).call(&()), Error::NoSuchProcedure { .. });
}

fn provider_without_procedures_is_unknown(net: &Net) {
    let pair = net.pair();
    let registration = pair.server.provider(5).define("only", |_: &Request, ()| ()).unwrap();
    let only = pair.client.procedure::<(), ()>("only");
    only.on(pair.to_server.provider(5)).call(&()).unwrap();
    registration.remove();
    let result = only.on(pair.to_server.provider(5)).call(&());
    assert_error!(result, Error::NoSuchProvider { .. } | Error::NoSuchProcedure { .. });
}

suite![
    a_second_definition_of_a_name_is_an_error,
    dropped_registration_keeps_the_procedure,
    removed_procedure_can_be_defined_again,
    late_remove_keeps_the_next_definition,
    a_handler_in_progress_survives_its_removal,
    values_of_a_removed_handler_are_dropped,
    providers_serve_one_name_with_different_handlers,
    provider_zero_is_the_engine_itself,
    providers_define_in_all_three_ways,
    unknown_provider_and_unknown_procedure_are_different_errors,
    provider_without_procedures_is_unknown,
];
