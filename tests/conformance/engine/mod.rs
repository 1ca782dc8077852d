//! Tests of engines: addresses, connections, limits, access control, timers, and finalize.

mod address;
mod after;
mod config;
mod dialling;
mod external;
mod finalize;
mod goodbye;
mod hooks;
mod idle;
mod in_flight;
mod knobs;
mod limits;
mod listening;
mod mixups;
mod monitoring;
mod peers;
mod providers;
mod reach;
mod shutdown;
mod timers;
mod trust;
mod world;
