//! Arguments whose bytes do not match their declared type: the server refuses them, and stays usable.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use calomel::{Error, MessageSide, Request};
use serde::ser::SerializeTuple;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::assert_error;
use crate::support::{Net, Pair};

#[derive(Serialize, Deserialize, Debug, PartialEq)]
enum Chain {
    End,
    Link(Box<Chain>),
}

impl Chain {
    fn of(links: usize) -> Chain {
        (0..links).fold(Chain::End, |chain, _| Chain::Link(Box::new(chain)))
    }
}

/// Serializes as a valid `T`, or as bytes that are no valid `T`. The receiver has accepted the type before the invalid bytes
/// arrive; it detects them by their other shape, or when it decodes them.
#[derive(Debug)]
enum Forged<T> {
    Valid(T),
    Bytes(Vec<u8>),
}

impl<T: Serialize> Serialize for Forged<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Forged::Valid(value) => value.serialize(serializer),
            Forged::Bytes(bytes) => {
                let mut tuple = serializer.serialize_tuple(bytes.len())?;
                bytes.iter().try_for_each(|byte| tuple.serialize_element(byte))?;
                tuple.end()
            }
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Forged<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(deserializer).map(Forged::Valid)
    }
}

/// Calls `name` with valid values, and then with `bytes`; asserts that these are refused without harm.
#[track_caller]
fn assert_refused<T>(pair: &Pair, name: &str, valid: Vec<T>, bytes: Vec<u8>)
where
    T: Serialize + for<'de> Deserialize<'de> + 'static,
{
    let procedure = pair.client.procedure::<Forged<T>, usize>(name);
    for value in valid {
        procedure.on(&pair.to_server).call(&Forged::Valid(value)).unwrap();
    }
    let begin = Instant::now();
    let error = procedure.on(&pair.to_server).call(&Forged::Bytes(bytes)).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert_error!(
        Err::<(), _>(error),
        Error::Decode { side: MessageSide::Arguments, .. } | Error::TypeMismatch { side: MessageSide::Arguments, .. }
    );
    let chain = pair.client.procedure::<Chain, usize>("chain");
    assert_eq!(chain.on(&pair.to_server).call(&Chain::of(2)).unwrap(), 2);
}

fn pair(net: &Net) -> Pair {
    let pair = net.pair();
    pair.server
        .define("chain", |_: &Request, mut chain: Chain| {
            let mut links = 0usize;
            while let Chain::Link(next) = chain {
                chain = *next;
                links += 1;
            }
            links
        })
        .unwrap();
    pair
}

fn endlessly_nested_values_are_refused(net: &Net) {
    let pair = pair(net);
    for links in [0, 1, 20] {
        let chain = pair.client.procedure::<Chain, usize>("chain");
        assert_eq!(chain.on(&pair.to_server).call(&Chain::of(links)).unwrap(), links);
    }
    // A valid value that is too deep for the stacks of handlers; building it takes a larger stack.
    let deep = thread::Builder::new().stack_size(1 << 30);
    let caller = pair.client.procedure::<Chain, usize>("chain");
    let to = pair.to_server.clone();
    let result = deep.spawn(move || caller.on(&to).call(&Chain::of(50_000)).map(|_| ())).unwrap().join().unwrap();
    assert_error!(result, Error::Decode { side: MessageSide::Arguments, .. });
    let chain = pair.client.procedure::<Chain, usize>("chain");
    assert_eq!(chain.on(&pair.to_server).call(&Chain::of(2)).unwrap(), 2);
}

fn sequences_with_forged_lengths_are_refused(net: &Net) {
    let pair = pair(net);
    pair.server.define("numbers", |_: &Request, numbers: Vec<u64>| numbers.len()).unwrap();
    pair.server.define("texts", |_: &Request, texts: Vec<String>| texts.len()).unwrap();
    pair.server.define("units", |_: &Request, units: Vec<()>| units.len()).unwrap();
    pair.server.define("map", |_: &Request, map: HashMap<u8, ()>| map.len()).unwrap();
    for len in [1_000_000_000, u64::from(u32::MAX), u64::MAX / 2, u64::MAX] {
        let bytes = postcard::to_stdvec(&len).unwrap();
        assert_refused(&pair, "numbers", vec![vec![1u64]], bytes.clone());
        assert_refused(&pair, "texts", vec![vec!["text".to_owned()]], bytes.clone());
        assert_refused(&pair, "units", vec![vec![()]], bytes.clone());
        assert_refused(&pair, "map", vec![HashMap::from([(1u8, ())])], bytes);
    }
    let units = pair.client.procedure::<Vec<()>, usize>("units");
    assert_eq!(units.on(&pair.to_server).call(&vec![(); 1000]).unwrap(), 1000);
}

fn too_many_or_too_few_bytes_are_refused(net: &Net) {
    let pair = pair(net);
    pair.server.define("number", |_: &Request, n: u32| n as usize).unwrap();
    pair.server.define("text", |_: &Request, text: String| text.len()).unwrap();
    assert_refused(&pair, "number", vec![1u32], vec![]);
    assert_refused(&pair, "number", vec![1u32], vec![1, 7]);
    assert_refused(&pair, "number", vec![1u32], vec![0xff; 4]);
    assert_refused(&pair, "text", vec!["text".to_owned()], vec![5, b'a', b'b']);
    assert_refused(&pair, "text", vec!["text".to_owned()], vec![2, 0xff, 0xfe]);
}

suite![endlessly_nested_values_are_refused, sequences_with_forged_lengths_are_refused, too_many_or_too_few_bytes_are_refused,];
