//! Services declared as traits: `#[calomel::service]`. Each test runs over loop, tcp and shared memory.

#![deny(missing_docs)]

mod common;

use std::collections::{HashMap, VecDeque};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use calomel::{Bulk, BulkMode, Endpoint, Engine, Error, HandlerPool, HandlerResult, Pending, Request};
use serde::{Deserialize, Serialize};

use common::{BOUND, Watchdog, block_on, eventually};

/// Why a value was not found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum StoreError {
    /// There is no value of the key.
    NotFound {
        /// The key.
        key: String,
    },
}

/// A key-value store.
#[calomel::service]
pub trait Store {
    /// Stores a value; returns the old one.
    fn put(&self, key: String, value: Vec<u8>) -> Option<Vec<u8>>;
    /// A result of its own.
    fn get(&self, key: String) -> Result<Vec<u8>, StoreError>;
    /// Answers when the key is there, or after a while.
    #[fallible]
    async fn wait_for(&self, request: &Request, key: String) -> HandlerResult<Vec<u8>>;
    /// One way.
    #[one_way]
    #[fallible]
    fn log(&self, line: String) -> Result<(), String>;
    /// One way, and async.
    #[one_way]
    async fn log_later(&self, line: String);
    /// Pulls the caller's memory.
    #[fallible]
    fn fill(&self, request: &Request, key: String, memory: Bulk) -> calomel::Result<usize>;
    /// The number of the provider that was called.
    fn place(&self, request: &Request) -> u16;
    /// Takes as long as it says.
    fn sleep(&self, duration: Duration);
    /// Panics.
    fn panic(&self, message: String);
}

#[derive(Default)]
struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    lines: Mutex<Vec<String>>,
}

impl Store for MemoryStore {
    fn put(&self, key: String, value: Vec<u8>) -> Option<Vec<u8>> {
        self.values.lock().unwrap().insert(key, value)
    }

    fn get(&self, key: String) -> Result<Vec<u8>, StoreError> {
        self.values.lock().unwrap().get(&key).cloned().ok_or(StoreError::NotFound { key })
    }

    async fn wait_for(&self, request: &Request, key: String) -> HandlerResult<Vec<u8>> {
        // The caller serves too, and is called while its call is being handled.
        let caller = request.endpoint();
        let suffix = CallerClient::new(caller).start_suffix(&key)?.await?;
        let value = self.values.lock().unwrap().get(&key).cloned().ok_or("no such value")?;
        Ok([value, suffix].concat())
    }

    fn log(&self, line: String) -> Result<(), String> {
        self.lines.lock().unwrap().push(line);
        Err("ignored".to_owned())
    }

    async fn log_later(&self, line: String) {
        self.log(line).unwrap_err();
    }

    fn fill(&self, request: &Request, key: String, memory: Bulk) -> calomel::Result<usize> {
        let local = request.engine().expose(vec![0u8; memory.len()], BulkMode::WriteOnly)?;
        let moved = memory.on(request.endpoint()).pull_into(&local)?;
        self.put(key, local.reclaim());
        Ok(moved)
    }

    fn place(&self, request: &Request) -> u16 {
        request.provider_id()
    }

    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }

    fn panic(&self, message: String) {
        panic!("{message}");
    }
}

/// What the caller serves; private, and used by both sides.
#[calomel::service(name = "caller of a store")]
trait Caller {
    fn suffix(&self, key: String) -> Vec<u8>;
}

struct Suffix(&'static str);

impl Caller for Suffix {
    fn suffix(&self, key: String) -> Vec<u8> {
        format!("{}{}", self.0, key.len()).into_bytes()
    }
}

/// Services can be declared by other macros.
macro_rules! service_of {
    ($service:ident, $method:ident, $argument:ident, $ty:ty) => {
        #[calomel::service]
        trait $service {
            fn $method(&self, $argument: $ty) -> $ty;
            fn twice(&self, number: u8, text: $ty) -> $ty;
            #[one_way]
            async fn ignore(&self, text: $ty);
        }
    };
}

service_of!(Echo, echo, value, String);

struct Loud;

impl Echo for Loud {
    fn echo(&self, value: String) -> String {
        value.to_uppercase()
    }

    fn twice(&self, number: u8, text: String) -> String {
        text.repeat(2 * usize::from(number))
    }

    async fn ignore(&self, _: String) {}
}

/// Two engines that both listen.
struct Pair {
    server: Engine,
    client: Engine,
    peer: Endpoint,
}

impl Pair {
    fn new(scheme: &str) -> Pair {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let [server, client] = [(); 2].map(|()| {
            let address = match scheme {
                "tcp" => "tcp://127.0.0.1:0".to_owned(),
                scheme => format!("{scheme}://service-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)),
            };
            Engine::builder().listen(address).same_host_upgrade(false).default_timeout(BOUND).build().unwrap()
        });
        let peer = client.lookup(server.address()).unwrap();
        Pair { server, client, peer }
    }

    /// A store that is served at the engine itself, and its client.
    fn store(&self) -> (Arc<MemoryStore>, StoreServer, StoreClient) {
        let store = Arc::new(MemoryStore::default());
        let server = StoreServer::serve(&self.server, store.clone()).unwrap();
        (store, server, StoreClient::new(&self.peer))
    }
}

/// Runs each test over each transport.
macro_rules! tests {
    ($(fn $test:ident($pair:ident: &Pair) $body:block)*) => {
        $(mod $test {
            use super::*;

            fn test($pair: &Pair) $body

            tests!(@rows $test loop_ "loop", tcp "tcp", shm "shm");
        })*
    };
    (@rows $test:ident $($row:ident $scheme:literal),*) => {
        $(#[test]
        fn $row() {
            let _watchdog = Watchdog::start(concat!(stringify!($test), " over ", $scheme));
            let pair = Pair::new($scheme);
            test(&pair);
            pair.client.finalize().unwrap();
            pair.server.finalize().unwrap();
        })*
    };
}

tests! {
    fn a_client_calls(pair: &Pair) {
        let (store, _server, client) = pair.store();
        assert_eq!(client.put("a", b"one").unwrap(), None);
        assert_eq!(client.put("a", &vec![2; 100_000]).unwrap(), Some(b"one".to_vec()));
        assert_eq!(client.get("a").unwrap(), Ok(vec![2; 100_000]));
        assert_eq!(store.values.lock().unwrap().len(), 1);
        // The procedures have names, and can be called without the client.
        let get = pair.client.procedure::<str, Result<Vec<u8>, StoreError>>("Store.get");
        assert_eq!(get.on(&pair.peer).call("a").unwrap().unwrap().len(), 100_000);
        let put = pair.client.procedure::<(String, Vec<u8>), Option<Vec<u8>>>("Store.put");
        assert_eq!(put.on(&pair.peer).call(&("b".to_owned(), vec![1])).unwrap(), None);
    }

    fn errors_of_a_method_are_its_result(pair: &Pair) {
        let (_store, _server, client) = pair.store();
        assert_eq!(client.get("absent").unwrap(), Err(StoreError::NotFound { key: "absent".to_owned() }));
    }

    fn a_client_starts_calls(pair: &Pair) {
        let (_store, _server, client) = pair.store();
        let started: Vec<_> = (0..10u8).map(|i| client.start_put(&i.to_string(), &[i]).unwrap()).collect();
        assert!(Pending::wait_all(started).into_iter().all(|old| old.unwrap().is_none()));
        let value = block_on(async { client.start_get("7").unwrap().await });
        assert_eq!(value.unwrap(), Ok(vec![7]));
    }

    fn an_async_method_calls_its_caller(pair: &Pair) {
        let (_store, _server, client) = pair.store();
        CallerServer::serve(&pair.client, Suffix("-")).unwrap();
        client.put("key", b"value").unwrap();
        assert_eq!(client.wait_for("key").unwrap(), b"value-3");
        assert_error!(client.wait_for("absent"), Error::Failed { ref message, .. } if message == "no such value");
    }

    fn one_way_methods_have_no_response(pair: &Pair) {
        let (store, _server, client) = pair.store();
        let () = client.log("first").unwrap();
        let () = client.log_later("second").unwrap();
        let third: Box<dyn Future<Output = calomel::Result<()>> + Send + '_> = Box::new(client.log_async("third"));
        let () = block_on(Box::into_pin(third)).unwrap();
        eventually("all lines are there", || store.lines.lock().unwrap().len() == 3);
        let mut lines = store.lines.lock().unwrap().clone();
        lines.sort();
        assert_eq!(lines, ["first", "second", "third"]);
    }

    fn a_method_pulls_a_bulk(pair: &Pair) {
        let (_store, _server, client) = pair.store();
        let memory = pair.client.expose_read_only(vec![5u8; 300_000]).unwrap();
        assert_eq!(client.fill("bulk", &memory.bulk()).unwrap(), 300_000);
        assert_eq!(client.get("bulk").unwrap(), Ok(vec![5; 300_000]));
        let bulk = memory.bulk();
        memory.reclaim();
        assert_error!(client.fill("bulk", &bulk), Error::Failed { ref message, .. } if message.contains("revoked"));
    }

    fn a_client_has_a_timeout(pair: &Pair) {
        let (_store, _server, client) = pair.store();
        let hasty = client.timeout(Duration::from_millis(20));
        assert_error!(hasty.sleep(&Duration::from_millis(300)), Error::Timeout { .. });
        assert_error!(hasty.start_sleep(&Duration::from_millis(300)).unwrap().wait(), Error::Timeout { .. });
        client.sleep(&Duration::from_millis(30)).unwrap();
    }

    fn a_method_panics(pair: &Pair) {
        let (_store, _server, client) = pair.store();
        assert_error!(client.panic("no luck"), Error::HandlerPanicked { ref message, .. } if message.contains("no luck"));
        assert_eq!(client.put("still", b"there").unwrap(), None);
    }

    fn two_services_and_three_providers(pair: &Pair) {
        let (_store, _server, client) = pair.store();
        CallerServer::serve(&pair.server, Suffix("+")).unwrap();
        let pool = HandlerPool::new(2);
        StoreServer::serve_at(&pair.server.provider(1), MemoryStore::default()).unwrap();
        let second = StoreServer::serve_at(&pair.server.provider(2).pool(&pool), MemoryStore::default()).unwrap();
        let clients = [client, StoreClient::new(pair.peer.provider(1)), StoreClient::new(pair.peer.provider(2))];
        for (id, client) in clients.iter().enumerate() {
            assert_eq!(client.place().unwrap(), id as u16);
            assert_eq!(client.put("key", &[id as u8]).unwrap(), None);
        }
        assert_eq!(CallerClient::new(&pair.peer).suffix("ab").unwrap(), b"+2");
        assert!(second.remove());
        assert!(!second.clone().remove());
        assert_error!(clients[2].place(), Error::NoSuchProvider { .. });
        assert_eq!(clients[1].get("key").unwrap(), Ok(vec![1]));
    }

    fn a_dropped_server_goes_on(pair: &Pair) {
        let (_store, server, client) = pair.store();
        drop(server.clone());
        assert_eq!(client.place().unwrap(), 0);
        assert!(server.remove());
        assert_error!(client.place(), Error::NoSuchProcedure { .. });
        let shared: Arc<dyn Caller> = Arc::new(Suffix("dyn"));
        CallerServer::serve(&pair.server, shared).unwrap();
        assert_eq!(CallerClient::new(&pair.peer).suffix("").unwrap(), b"dyn0");
    }

    fn a_taken_name_leaves_no_procedure(pair: &Pair) {
        let taken = pair.server.define("Store.place", |_: &Request, ()| 9u16).unwrap();
        let store = Arc::new(MemoryStore::default());
        let refused = StoreServer::serve(&pair.server, store.clone());
        assert_error!(refused, Error::AlreadyDefined { ref name, .. } if name == "Store.place");
        assert_eq!(Arc::strong_count(&store), 1);
        let client = StoreClient::new(&pair.peer);
        assert_eq!(client.place().unwrap(), 9);
        assert_error!(client.put("key", b""), Error::NoSuchProcedure { .. });
        assert!(taken.remove());
        StoreServer::serve(&pair.server, store).unwrap();
        assert_eq!(client.place().unwrap(), 0);
    }

    fn a_macro_declares_a_service(pair: &Pair) {
        EchoServer::serve(&pair.server, Loud).unwrap();
        let client = EchoClient::new(&pair.peer);
        assert_eq!(client.echo("echo").unwrap(), "ECHO");
        assert_eq!(client.start_twice(1, "x").unwrap().wait().unwrap(), "xx");
        client.ignore("x").unwrap();
    }

    fn every_number_and_kind_of_arguments(pair: &Pair) {
        odd::OddServer::serve(&pair.server, odd::Server).unwrap();
        let client = odd::OddClient::new(&pair.peer);
        client.nothing().unwrap();
        assert_eq!(client.one(&(1, 2)).unwrap(), (1, 2));
        assert_eq!(client.r#type(3, "4").unwrap(), "3 4");
        assert_eq!(client.start_type(3, "5").unwrap().wait().unwrap(), "3 5");
        let names = client.names(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12).unwrap();
        assert_eq!(names, (1..=12).collect::<Vec<_>>());
        let sixteen = client.sixteen(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15).unwrap();
        assert_eq!(sixteen, 120);
        let names = ["a".to_owned(), "b".to_owned()];
        let (array, queue) = (["z"; 2].map(str::to_owned), VecDeque::from([1]));
        let mixed = client.mixed(true, 'x', Some("y"), Some(&[1.5]), None, &names, &array, &queue);
        assert_eq!(mixed.unwrap(), "true x Some(\"y\") Some([1.5]) None [\"a\", \"b\"] [\"z\", \"z\"] [1]");
        assert_eq!(client.own_request(&odd::own::Request { text: "own".to_owned() }).unwrap().text, "own");
        assert!(client.own_result().unwrap().is_err());
        assert_eq!(pair.client.procedure::<i8, i8>("Odd.called_otherwise").on(&pair.peer).call(&1).unwrap(), -1);
        assert_eq!(client.renamed(2).unwrap(), -2);
        client.clone().unwrap();
    }
}

mod odd {
    use std::collections::VecDeque;

    /// Types whose names are those of types that the generated code uses.
    pub(crate) mod own {
        use serde::{Deserialize, Serialize};

        #[derive(Serialize, Deserialize)]
        pub(crate) struct Request {
            pub(crate) text: String,
        }

        pub(crate) type Result = std::result::Result<(), ()>;
    }

    use own::{Request, Result};

    #[allow(dead_code)]
    struct Engine;
    #[allow(dead_code)]
    struct Pending;
    #[allow(dead_code, non_camel_case_types)]
    struct Arc;

    #[calomel::service]
    pub(crate) trait Odd {
        fn nothing(&self);
        fn one(&self, pair: (u8, u8)) -> (u8, u8);
        fn r#type(&self, r#fn: i32, r#match: String) -> String;
        /// Names that generated code might use itself.
        #[allow(clippy::too_many_arguments)]
        fn names(
            &self,
            call: i32,
            service: i32,
            server: i32,
            timeout: i32,
            provider: i32,
            request: i32,
            endpoint: i32,
            engine: i32,
            argument_0: i32,
            registrations: i32,
            define_all: i32,
            defined: i32,
        ) -> Vec<i32>;
        #[allow(clippy::too_many_arguments)]
        fn sixteen(
            &self,
            a: u32,
            b: u32,
            c: u32,
            d: u32,
            e: u32,
            f: u32,
            g: u32,
            h: u32,
            i: u32,
            j: u32,
            k: u32,
            l: u32,
            m: u32,
            n: u32,
            o: u32,
            p: u32,
        ) -> u32;
        #[allow(clippy::too_many_arguments)]
        fn mixed(
            &self,
            truth: bool,
            letter: char,
            text: Option<String>,
            floats: std::option::Option<Vec<f64>>,
            none: Option<VecDeque<u8>>,
            texts: Vec<String>,
            array: [String; 2],
            queue: VecDeque<u8>,
        ) -> std::string::String;
        async fn own_request(&self, request: Request) -> Request;
        fn own_result(&self) -> Result;
        #[rename = "called_otherwise"]
        fn renamed(&self, number: i8) -> i8;
        #[cfg(any())]
        fn absent(&self, number: NoSuchType);
        #[deprecated]
        #[one_way]
        fn old(&self);
        /// Methods of traits that the generated code uses.
        fn clone(&self);
        fn remove(&self);
        fn serve(&self);
        fn as_ref(&self);
    }

    pub(crate) struct Server;

    impl Odd for Server {
        fn nothing(&self) {}

        fn one(&self, pair: (u8, u8)) -> (u8, u8) {
            pair
        }

        fn r#type(&self, r#fn: i32, r#match: String) -> String {
            format!("{} {}", r#fn, r#match)
        }

        fn names(
            &self,
            a: i32,
            b: i32,
            c: i32,
            d: i32,
            e: i32,
            f: i32,
            g: i32,
            h: i32,
            i: i32,
            j: i32,
            k: i32,
            l: i32,
        ) -> Vec<i32> {
            vec![a, b, c, d, e, f, g, h, i, j, k, l]
        }

        fn sixteen(
            &self,
            a: u32,
            b: u32,
            c: u32,
            d: u32,
            e: u32,
            f: u32,
            g: u32,
            h: u32,
            i: u32,
            j: u32,
            k: u32,
            l: u32,
            m: u32,
            n: u32,
            o: u32,
            p: u32,
        ) -> u32 {
            a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p
        }

        fn mixed(
            &self,
            truth: bool,
            letter: char,
            text: Option<String>,
            floats: Option<Vec<f64>>,
            none: Option<VecDeque<u8>>,
            texts: Vec<String>,
            array: [String; 2],
            queue: VecDeque<u8>,
        ) -> String {
            format!("{truth} {letter} {text:?} {floats:?} {none:?} {texts:?} {array:?} {queue:?}")
        }

        async fn own_request(&self, request: Request) -> Request {
            request
        }

        fn own_result(&self) -> Result {
            Err(())
        }

        fn renamed(&self, number: i8) -> i8 {
            -number
        }

        fn old(&self) {}

        fn clone(&self) {}

        fn remove(&self) {}

        fn serve(&self) {}

        fn as_ref(&self) {}
    }
}

#[test]
fn misuse_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/service/*.rs");
}
