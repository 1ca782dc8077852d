//! Handlers that may fail, and procedures whose arguments are borrowed for a moment.

use std::fmt;

use calomel::{Bulk, BulkMode, Engine, Error, HandlerResult, Procedure, Request};
use serde::{Deserialize, Serialize};

use crate::support::{Net, block_on};

#[derive(Debug, Serialize, Deserialize, PartialEq)]
enum StoreError {
    Full { free: u64 },
    Locked,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Full { free } => write!(f, "only {free} bytes are free"),
            StoreError::Locked => f.write_str("the store is locked"),
        }
    }
}

impl std::error::Error for StoreError {}

fn failed<T: fmt::Debug>(result: calomel::Result<T>) -> String {
    match result {
        Err(Error::Failed { name, message, .. }) => format!("{name}: {message}"),
        other => panic!("{other:?}"),
    }
}

fn error_of_a_handler_reaches_the_caller(net: &Net) {
    let pair = net.pair();
    let server = &pair.server;
    server.define_try("parse", |_: &Request, text: String| text.parse::<i32>()).unwrap();
    server.define_try("own", |_: &Request, free: u64| if free > 9 { Ok(free) } else { Err(StoreError::Full { free }) }).unwrap();
    server.define_try("text", |_: &Request, fine: bool| if fine { Ok(1u8) } else { Err("as a text") }).unwrap();
    server
        .define_try("boxed", |_: &Request, text: String| -> HandlerResult<i64> {
            let number: i64 = text.parse()?;
            if number < 0 {
                return Err(format!("{number} is negative").into());
            }
            Ok(number)
        })
        .unwrap();
    let parse = pair.client.procedure::<str, i32>("parse");
    assert_eq!(parse.on(&pair.to_server).call("17").unwrap(), 17);
    assert_eq!(failed(parse.on(&pair.to_server).call("x")), "parse: invalid digit found in string");
    let own = pair.client.procedure::<u64, u64>("own");
    assert_eq!(own.on(&pair.to_server).call(&10).unwrap(), 10);
    assert_eq!(failed(own.on(&pair.to_server).call(&3)), "own: only 3 bytes are free");
    assert_eq!(failed(pair.client.procedure::<bool, u8>("text").on(&pair.to_server).call(&false)), "text: as a text");
    let boxed = pair.client.procedure::<str, i64>("boxed");
    assert_eq!(failed(boxed.on(&pair.to_server).call("-4")), "boxed: -4 is negative");
    assert_eq!(boxed.on(&pair.to_server).call("4").unwrap(), 4);
}

fn error_of_this_library_reaches_the_caller(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_try("fetch", |request: &Request, remote: Bulk| -> calomel::Result<Vec<u8>> {
            let local = request.engine().expose(vec![0u8; remote.len()], BulkMode::WriteOnly)?;
            remote.slice(0, 20)?.on(request.endpoint()).pull_into(&local)?;
            Ok(local.reclaim())
        })
        .unwrap();
    let fetch = pair.client.procedure::<Bulk, Vec<u8>>("fetch");
    let long = pair.client.expose_read_only(vec![1u8; 20]).unwrap();
    assert_eq!(fetch.on(&pair.to_server).call(&long.bulk()).unwrap(), vec![1; 20]);
    let short = pair.client.expose_read_only(vec![1u8; 5]).unwrap();
    let message = failed(fetch.on(&pair.to_server).call(&short.bulk()));
    assert_eq!(message, "fetch: 20 bytes at offset 0 lie outside the 5 bytes there are");
}

fn error_of_an_async_handler_reaches_the_caller(net: &Net) {
    let pair = net.pair();
    pair.server
        .define_try_async("parse", |_: Request, text: String| async move {
            let number: u16 = text.parse()?;
            HandlerResult::Ok(number)
        })
        .unwrap();
    let parse = pair.client.procedure::<str, u16>("parse");
    assert_eq!(block_on(parse.on(&pair.to_server).start("65535").unwrap()).unwrap(), 65535);
    let message = failed(block_on(parse.on(&pair.to_server).start("65536").unwrap()));
    assert_eq!(message, "parse: number too large to fit in target type");
}

fn panic_in_an_error_is_a_panic_of_the_handler(net: &Net) {
    #[derive(Debug)]
    struct Unprintable;
    impl fmt::Display for Unprintable {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            panic!("it can't be printed")
        }
    }
    impl std::error::Error for Unprintable {}
    let pair = net.pair();
    pair.server.define_try("bad", |_: &Request, ()| Err::<u8, _>(Unprintable)).unwrap();
    let bad = pair.client.procedure::<(), u8>("bad");
    let error = bad.on(&pair.to_server).call(&()).unwrap_err();
    assert!(matches!(&error, Error::HandlerPanicked { message, .. } if message.contains("printed")), "{error}");
    assert!(matches!(bad.on(&pair.to_server).call(&()), Err(Error::HandlerPanicked { .. })));
}

fn result_of_define_travels_as_a_value(net: &Net) {
    let pair = net.pair();
    pair.server.define("put", |_: &Request, locked: bool| if locked { Err(StoreError::Locked) } else { Ok(3u8) }).unwrap();
    let put = pair.client.procedure::<bool, Result<u8, StoreError>>("put");
    assert_eq!(put.on(&pair.to_server).call(&true).unwrap(), Err(StoreError::Locked));
    assert_eq!(put.on(&pair.to_server).call(&false).unwrap(), Ok(3));
}

/// A client keeps its procedures; what it calls them with lives for a moment.
struct Store {
    put: Procedure<(&'static str, &'static [u8], Option<Bulk>), usize>,
}

impl Store {
    fn new(engine: &Engine) -> Store {
        Store { put: engine.procedure("put") }
    }
}

fn stored_procedure_takes_short_borrows(net: &Net) {
    let pair = net.pair();
    pair.server
        .define("put", |_: &Request, (key, value, bulk): (String, Vec<u8>, Option<Bulk>)| {
            key.len() + value.len() + bulk.map_or(0, |bulk| bulk.len())
        })
        .unwrap();
    let store = Store::new(&pair.client);
    let exposed = pair.client.expose_read_only(vec![0u8; 100]).unwrap();
    for n in 0..3 {
        let (key, value) = (format!("key {n}"), vec![7u8; n]);
        let bulk = (n == 2).then(|| exposed.bulk());
        let expected = key.len() + n + if n == 2 { 100 } else { 0 };
        assert_eq!(store.put.on(&pair.to_server).call(&(&key, &value, bulk.clone())).unwrap(), expected);
        let pending = store.put.on(&pair.to_server).start(&(&key, &value, bulk.clone())).unwrap();
        drop((key, value));
        assert_eq!(pending.wait().unwrap(), expected);
    }
}

suite!(
    error_of_a_handler_reaches_the_caller,
    error_of_this_library_reaches_the_caller,
    error_of_an_async_handler_reaches_the_caller,
    panic_in_an_error_is_a_panic_of_the_handler,
    result_of_define_travels_as_a_value,
    stored_procedure_takes_short_borrows,
);
