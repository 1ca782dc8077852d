//! Fuzz targets: each function takes bytes as a peer might send them, or a script of what peers and this side do, and
//! panics if an invariant is violated. `fuzz/README.md` describes each. Not part of the library's interface.

pub(crate) mod script;

#[cfg(test)]
mod tests;

pub use crate::proto::fuzzing::{conversation, frames, greeting};
pub use crate::rpc::fuzzing::{arguments, bulk, shapes};
pub use crate::transport::fuzzing::{packets, ring};
pub use crate::transport::tcp_fuzzing::receiving;

/// The seeds of a target: their names and bytes.
pub fn seeds(target: &str) -> Vec<(&'static str, Vec<u8>)> {
    match target {
        "frames" => crate::proto::fuzzing::seeds_of_frames(),
        "greeting" => crate::proto::fuzzing::seeds_of_greeting(),
        "conversation" => crate::proto::fuzzing::seeds_of_conversation(),
        "arguments" => crate::rpc::fuzzing::seeds_of_arguments(),
        "bulk" => crate::rpc::fuzzing::seeds_of_bulk(),
        "shapes" => crate::rpc::fuzzing::seeds_of_shapes(),
        "ring" => crate::transport::fuzzing::seeds_of_ring(),
        "packets" => crate::transport::fuzzing::seeds_of_packets(),
        "receiving" => crate::transport::tcp_fuzzing::seeds(),
        _ => Vec::new(),
    }
}
