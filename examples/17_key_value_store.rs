//! A key-value store: values travel as bulks, databases are providers, and the server is restarted while its clients work. They
//! notice nothing but a delay.
//!
//! `cargo run --release --example 17_key_value_store`

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use calomel::{Address, Bulk, BulkMode, Endpoint, Engine, HandlerResult, Procedure, Request, Retry};

const DATABASES: u16 = 2;
const KEYS: usize = 200;
const RESTARTS: usize = 3;
const LARGEST_VALUE: usize = 1 << 20;
/// Far more than a restart takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// What outlives a server: in production it would be on disk.
type Values = Arc<Mutex<HashMap<String, Arc<[u8]>>>>;

fn main() -> calomel::Result<()> {
    let databases: Vec<Values> = (0..DATABASES).map(|_| Values::default()).collect();
    let mut server = serve("tcp://127.0.0.1:0".parse()?, &databases)?;
    let address = server.address();

    thread::scope(|threads| {
        let address = &address;
        let clients: Vec<_> = (1..=DATABASES).map(|id| threads.spawn(move || use_database(address, id))).collect();
        let mut restarts = 0;
        while restarts < RESTARTS && !clients.iter().all(|client| client.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            server.finalize()?;
            server = serve(address.clone(), &databases)?;
            restarts += 1;
        }
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })?;

    let stored: usize = databases.iter().map(|values| values.lock().unwrap().len()).sum();
    println!("{stored} values are stored, and all were read back");
    assert_eq!(stored, KEYS * usize::from(DATABASES));
    Ok(())
}

/// A new server. It defines its procedures first, and listens then, so that no client finds it without them.
fn serve(address: Address, databases: &[Values]) -> calomel::Result<Engine> {
    let engine = Engine::builder().build()?;
    for (id, values) in (1..).zip(databases) {
        let (provider, to_put, to_get) = (engine.provider(id), Arc::clone(values), Arc::clone(values));
        provider.define_try("put", move |request: &Request, (key, value): (String, Bulk)| -> HandlerResult<()> {
            if value.len() > LARGEST_VALUE {
                return Err(format!("a value of {} bytes exceeds {LARGEST_VALUE}", value.len()).into());
            }
            let mut bytes = vec![0; value.len()];
            value.on(request.endpoint()).pull_into(&mut bytes[..])?;
            to_put.lock().unwrap().insert(key, bytes.into());
            Ok(())
        })?;
        // The result is the length of the value, of which as much is pushed as the caller has memory for.
        provider.define_try("get", move |request: &Request, (key, room): (String, Bulk)| {
            let Some(value) = to_get.lock().unwrap().get(&key).cloned() else { return Ok(None) };
            room.on(request.endpoint()).push_from(&value[..])?;
            calomel::Result::Ok(Some(value.len()))
        })?;
    }
    engine.listen(&address)?;
    Ok(engine)
}

/// One database, as clients see it. The arguments of a call can be borrowed: `&'static` stands for any lifetime.
struct Database {
    provider: Endpoint,
    put: Procedure<(&'static str, Bulk), ()>,
    get: Procedure<(&'static str, Bulk), Option<usize>>,
}

impl Database {
    fn connect(engine: &Engine, address: &Address, id: u16) -> calomel::Result<Database> {
        let provider = engine.lookup(address)?.provider(id);
        provider.wait_ready(PATIENCE)?;
        Ok(Database { provider, put: engine.procedure("put"), get: engine.procedure("get") })
    }

    /// Storing the same value twice changes nothing, so a call that may have been carried out can be repeated.
    fn put(&self, key: &str, value: &[u8]) -> calomel::Result<()> {
        self.provider.engine().scope(|scope| {
            let bulk = scope.expose_read_only(value)?;
            self.put.on(&self.provider).retry(Retry::new(50)).call(&(key, bulk))
        })
    }

    fn get(&self, key: &str) -> calomel::Result<Option<Vec<u8>>> {
        let mut value = vec![0; LARGEST_VALUE];
        let length = self.provider.engine().scope(|scope| {
            let bulk = scope.expose(&mut value[..], BulkMode::WriteOnly)?;
            self.get.on(&self.provider).retry(Retry::new(50)).call(&(key, bulk))
        })?;
        value.truncate(length.unwrap_or_default());
        Ok(length.map(|_| value))
    }
}

fn use_database(address: &Address, id: u16) -> calomel::Result<()> {
    let engine = Engine::client("tcp")?;
    let database = Database::connect(&engine, address, id)?;
    let value = |number: usize| vec![(number % 251) as u8 + id as u8; number * 500];
    for number in 0..KEYS {
        database.put(&format!("key {number}"), &value(number))?;
    }
    for number in 0..KEYS {
        assert_eq!(database.get(&format!("key {number}"))?, Some(value(number)));
    }
    assert_eq!(database.get("no such key")?, None);
    Ok(())
}
