//! Safe values for the objects of libfabric, closed when they are dropped: the only place that calls the library. Nothing here
//! blocks, but for the system calls that open and close objects. README.md explains the order in which they are closed.

#![allow(unsafe_code)]

mod av;
mod closing;
mod cq;
mod domain;
mod endpoint;
mod fabric;
mod info;
mod lending;
mod library;
mod operation;
mod raw;
mod registration;

use std::ffi::{CStr, c_int};
use std::io;

pub(super) use av::{Av, PeerAddress};
pub(super) use cq::Cq;
pub(super) use domain::Domain;
pub(super) use endpoint::{Endpoint, Posted, RemotePlace};
pub(super) use info::{EndpointName, Info, MAX_NAME, Purpose};
pub(super) use lending::{LoanHost, PATIENCE};
pub(super) use operation::{Completion, CompletionError, Label};
pub(super) use registration::{RegisteredRegion, RemoteExtent, RemoteRights};

/// The outcome of a function that returns 0, or an error number with the sign changed.
fn check(what: &str, returned: c_int) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(failed(what, -returned)) }
}

/// The error of a function, in the library's words.
fn failed(what: &str, error: c_int) -> io::Error {
    // Numbers below 256 are the system's.
    let kind = if error < 256 { io::Error::from_raw_os_error(error).kind() } else { io::ErrorKind::Other };
    io::Error::new(kind, format!("{what}: {} ({error})", text_of(error)))
}

/// The library's text for an error number.
fn text_of(error: c_int) -> String {
    let Ok(library) = library::library() else { return String::new() };
    // SAFETY: the function takes any number.
    let text = unsafe { (library.strerror)(error) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: it returns one of its constants, or a text that stays until this thread calls it again.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
