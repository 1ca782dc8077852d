//! Stands in for `session` in a build without TLS: no values of these types exist.

use std::io;
use std::os::fd::RawFd;

use super::stream::TcpSend;

pub(super) enum Session {}

#[derive(Clone, Copy, Default)]
pub(super) struct SessionRead {
    pub total: usize,
    pub more: bool,
}

impl Session {
    pub(super) fn advance_handshake(&self, _: RawFd) -> io::Result<bool> {
        match *self {}
    }

    pub(super) fn read(&self, _: RawFd, _: &mut [u8], _: &mut Vec<u8>, _: impl Fn(usize)) -> io::Result<SessionRead> {
        match *self {}
    }

    pub(super) fn encrypt(&self, _: &mut TcpSend, _: usize) -> io::Result<usize> {
        match *self {}
    }

    pub(super) fn send(&self, _: RawFd, _: impl Fn(usize)) -> io::Result<bool> {
        match *self {}
    }

    pub(super) fn close(&self, _: RawFd) {
        match *self {}
    }
}
