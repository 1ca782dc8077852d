//! Values that take far more memory than their encoding.

use calomel::{EngineBuilder, Error, MessageSide, Request};

use crate::support::{Net, rounds};

const LIMIT: usize = 4 << 20;

fn limited(builder: EngineBuilder) -> EngineBuilder {
    builder.max_message_size(1 << 20).max_bytes_in_flight_per_peer(LIMIT)
}

/// Lists of empty texts are refused with the numbers, as arguments and as results; lists of other texts are accepted up to the
/// largest message, repeatedly.
fn lists_beyond_the_memory_limit_are_refused(net: &Net) {
    let pair = net.pair_with(limited);
    pair.server.define("count", |_: &Request, list: Vec<String>| list.len()).unwrap();
    pair.server.define("make", |_: &Request, (count, text): (usize, String)| vec![text; count]).unwrap();
    let count = pair.client.procedure::<Vec<String>, usize>("count").on(&pair.to_server);
    let make = pair.client.procedure::<(usize, String), Vec<String>>("make").on(&pair.to_server);
    let texts = vec!["eleven more".to_owned(); 80_000];
    for _ in 0..rounds(3) {
        assert_eq!(count.call(&texts).unwrap(), 80_000);
        assert_eq!(make.call(&(80_000, texts[0].clone())).unwrap(), texts);
        // More texts are accepted if they are empty: only the memory counts.
        assert_eq!(count.call(&vec![String::new(); 300_000]).unwrap(), 300_000);
        match count.call(&vec![String::new(); 900_000]) {
            Err(Error::Decode { side: MessageSide::Arguments, reason, .. }) => {
                assert!(reason.contains("900003") && reason.contains(&LIMIT.to_string()), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        match make.call(&(900_000, String::new())) {
            Err(Error::Decode { side: MessageSide::Result, reason, .. }) => {
                assert!(reason.contains("900003") && reason.contains(&(4 * LIMIT).to_string()), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}

suite!(lists_beyond_the_memory_limit_are_refused);
