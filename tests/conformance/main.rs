//! One suite for every transport: what the public API promises holds on all of them.
//!
//! A test is a function that takes a [`Net`](support::Net), which makes engines on the transport under test; `suite!`
//! turns a list of such functions into one `#[test]` a transport.

/// Runs the tests of a module over every transport. A new transport is a new line here.
macro_rules! suite {
    ($($test:ident),* $(,)?) => {
        suite!(@ on_loop, "loop", "loop://", [$($test),*]);
        suite!(@ on_tcp, "tcp", "tcp://127.0.0.1:0", [$($test),*]);
    };
    (@ $module:ident, $scheme:literal, $listen:literal, [$($test:ident),*]) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    let name = concat!(module_path!(), "::", stringify!($test));
                    crate::support::run(name, $scheme, $listen, super::$test);
                }
            )*
        }
    };
}

#[path = "../common/mod.rs"]
mod common;
mod support;

mod bulk;
mod engine;
mod rpc;
