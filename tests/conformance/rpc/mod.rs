//! Tests of calls: how procedures are defined, and how calls are made, answered and ended.

mod adversarial;
pub mod asynchronous;
mod attributes;
mod call;
mod checked;
mod crowd;
mod deadlines;
mod deferred;
mod define;
mod fallible;
mod faults;
mod nested;
mod one_way;
mod pending;
mod polls;
mod pools;
mod request;
mod retry;
mod short;
mod sizes;
mod traces;
mod types;
mod values;
mod wakers;
