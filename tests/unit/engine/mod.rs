//! Engines as a whole.

#[cfg(not(few_tests))]
mod devices;
#[cfg(not(few_tests))]
mod driving;
#[cfg(not(few_tests))]
mod faults;
mod instructions;
#[cfg(not(few_tests))]
pub(crate) mod measure;
mod small;
#[cfg(not(few_tests))]
mod work;
