//! A record as services pass them on, of enums, texts and lists; and one as simulations have lists of, of numbers only.

use serde::{Deserialize, Serialize};

#[derive(Clone, Serialize, Deserialize)]
pub enum Kind {
    Plain,
    Sized { width: u32, height: u32 },
    Named(String),
}

#[derive(Clone, Serialize, Deserialize)]
pub struct Record {
    id: u64,
    kind: Kind,
    name: String,
    scores: Vec<f32>,
    parts: Vec<Kind>,
}

pub fn record() -> Record {
    let parts = vec![Kind::Plain, Kind::Sized { width: 640, height: 480 }, Kind::Named("thumbnail".into())];
    Record { id: 1 << 40, kind: Kind::Sized { width: 1920, height: 1080 }, name: "frame".into(), scores: vec![0.5; 16], parts }
}

/// It takes 64 bytes in memory, and some 55 in a message.
#[derive(Serialize, Deserialize)]
pub struct Particle {
    id: u64,
    position: [f64; 3],
    velocity: [f64; 3],
    charge: f32,
    alive: bool,
}

pub fn particle(id: u64) -> Particle {
    Particle { id, position: [id as f64, 0.5, -1.0], velocity: [1.0; 3], charge: -1.0, alive: true }
}
