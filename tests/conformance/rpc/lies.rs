//! Values whose bytes are not what their type would write: the server refuses them, and lives on.

use std::time::{Duration, Instant};

use calomel::{Error, Request, Side};
use serde::ser::{SerializeSeq, SerializeTuple};
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

/// Passes for a [`Chain`], of any length: written without recursion, as nobody honest could.
#[derive(Debug)]
struct FalseChain(usize);

impl Serialize for FalseChain {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(self.0 + 1)?;
        (0..self.0).try_for_each(|_| tuple.serialize_element(&1u32))?;
        tuple.serialize_element(&0u32)?;
        tuple.end()
    }
}

impl<'de> Deserialize<'de> for FalseChain {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FalseChain, D::Error> {
        Chain::deserialize(deserializer).map(|_| FalseChain(0))
    }
}

/// Passes for a sequence of `T`, and claims any length, without elements behind it.
#[derive(Debug)]
struct FalseLength<T>(usize, std::marker::PhantomData<T>);

impl<T> Serialize for FalseLength<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_seq(Some(self.0))?.end()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for FalseLength<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::<T>::deserialize(deserializer).map(|_| FalseLength(0, std::marker::PhantomData))
    }
}

#[track_caller]
fn assert_refused<T>(pair: &Pair, result: calomel::Result<T>, begin: Instant) {
    assert_error!(result, Error::Decode { side: Side::Arguments, .. });
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    let chain = pair.client.procedure::<Chain, usize>("chain");
    assert_eq!(chain.on(&pair.to_server).call(&Chain::of(2)).unwrap(), 2);
}

fn define_chain(pair: &Pair) {
    pair.server
        .define("chain", |_: &Request, mut chain: Chain| {
            let mut links = 0;
            while let Chain::Link(next) = chain {
                chain = *next;
                links += 1;
            }
            links
        })
        .unwrap();
}

fn values_without_end_overflow_no_stack(net: &Net) {
    let pair = net.pair();
    define_chain(&pair);
    for links in [0, 1, 20] {
        let chain = pair.client.procedure::<Chain, usize>("chain");
        assert_eq!(chain.on(&pair.to_server).call(&Chain::of(links)).unwrap(), links);
    }
    let chain = pair.client.procedure::<FalseChain, usize>("chain");
    assert_eq!(chain.on(&pair.to_server).call(&FalseChain(20)).unwrap(), 20);
    for links in [100_000, 3_000_000] {
        let begin = Instant::now();
        assert_refused(&pair, chain.on(&pair.to_server).call(&FalseChain(links)), begin);
    }
}

fn sequences_that_claim_any_length_allocate_nothing(net: &Net) {
    let pair = net.pair();
    define_chain(&pair);
    pair.server.define("numbers", |_: &Request, numbers: Vec<u64>| numbers.len()).unwrap();
    pair.server.define("texts", |_: &Request, texts: Vec<String>| texts.len()).unwrap();
    pair.server.define("units", |_: &Request, units: Vec<()>| units.len()).unwrap();
    for len in [1_000_000_000, u32::MAX as usize, usize::MAX / 2, usize::MAX] {
        let begin = Instant::now();
        let numbers = pair.client.procedure::<FalseLength<u64>, usize>("numbers");
        assert_refused(&pair, numbers.on(&pair.to_server).call(&FalseLength(len, Default::default())), begin);
        let texts = pair.client.procedure::<FalseLength<String>, usize>("texts");
        assert_refused(&pair, texts.on(&pair.to_server).call(&FalseLength(len, Default::default())), begin);
        let units = pair.client.procedure::<FalseLength<()>, usize>("units");
        assert_refused(&pair, units.on(&pair.to_server).call(&FalseLength(len, Default::default())), begin);
    }
    let units = pair.client.procedure::<Vec<()>, usize>("units");
    assert_eq!(units.on(&pair.to_server).call(&vec![(); 1000]).unwrap(), 1000);
}

/// Writes one byte more than its type has.
#[derive(Debug)]
struct TooMuch(u32);

impl Serialize for TooMuch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.0, 7u8).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TooMuch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TooMuch, D::Error> {
        u32::deserialize(deserializer).map(TooMuch)
    }
}

fn bytes_too_many_or_too_few_are_refused(net: &Net) {
    #[derive(Debug)]
    struct TooLittle;
    impl Serialize for TooLittle {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_unit()
        }
    }
    impl<'de> Deserialize<'de> for TooLittle {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TooLittle, D::Error> {
            u32::deserialize(deserializer).map(|_| TooLittle)
        }
    }
    let pair = net.pair();
    define_chain(&pair);
    pair.server.define("number", |_: &Request, n: u32| n).unwrap();
    let begin = Instant::now();
    let little = pair.client.procedure::<TooLittle, u32>("number");
    assert_refused(&pair, little.on(&pair.to_server).call(&TooLittle), begin);
    let much = pair.client.procedure::<TooMuch, u32>("number");
    assert_refused(&pair, much.on(&pair.to_server).call(&TooMuch(1)), begin);
}

suite![
    values_without_end_overflow_no_stack,
    sequences_that_claim_any_length_allocate_nothing,
    bytes_too_many_or_too_few_are_refused,
];
