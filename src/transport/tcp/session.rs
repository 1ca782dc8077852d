//! TLS over one socket.
//!
//! Payloads are copied: out of the memory that they are in piece by piece, and each piece is encrypted and sent before the
//! next is looked at; and into the memory that they are for when they are decrypted and checked. So what a peer has not proved
//! to have sent never gets there, and memory is never in use for longer than one copy.

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use super::super::Unauthorized;
use super::sending::TcpSend;
use super::sys;
use crate::tls::{INSIDE, Tls};
use crate::{Error, Result};

/// What is encrypted at a time: four records. One is too little for a system call.
const PIECE: usize = 64 << 10;

/// How an engine speaks TLS.
pub(super) struct Secure {
    client: Arc<ClientConfig>,
    server: Option<Arc<ServerConfig>>,
    name: Option<ServerName<'static>>,
}

impl Secure {
    pub(super) fn new(tls: &Tls) -> Result<Secure> {
        Ok(Secure { client: tls.client()?, server: tls.server()?, name: tls.name().cloned() })
    }

    /// Whether there is anything to listen with.
    pub(super) fn check_listening(&self, what: &str) -> Result<()> {
        let reason = "with TLS it takes a certificate, and the engine was given none: see `Tls::identity`";
        let none = || Error::Unsupported { what: what.to_owned(), reason: reason.to_owned() };
        self.server.as_ref().map(drop).ok_or_else(none)
    }

    /// For a connection to this address.
    pub(super) fn dial(&self, ip: IpAddr) -> io::Result<Session> {
        let name = self.name.clone().unwrap_or_else(|| ip.into());
        let connection = ClientConnection::new(self.client.clone(), name).map_err(io::Error::other)?;
        Ok(Session::new(connection.into()))
    }

    /// For a connection that was accepted.
    pub(super) fn accept(&self) -> io::Result<Session> {
        let config = self.server.clone().ok_or_else(|| io::Error::other("there is no certificate to show"))?;
        let connection = ServerConnection::new(config).map_err(io::Error::other)?;
        Ok(Session::new(connection.into()))
    }
}

pub(super) struct Session {
    state: Mutex<SessionState>,
    /// The peer's, when the handshake is done.
    certificate: OnceLock<Arc<[u8]>>,
}

struct SessionState {
    connection: Connection,
    /// How the stream ended, while what came before that is being dealt with.
    end: Option<io::Error>,
}

/// What one look at the socket has brought.
#[derive(Clone, Copy, Default)]
pub(super) struct Looked {
    /// Bytes that came, encrypted or not.
    pub total: usize,
    /// There may be more.
    pub more: bool,
}

/// A socket that does not block, as rustls takes it.
struct NonBlockingSocket(RawFd);

impl Read for NonBlockingSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        sys::receive_plain(self.0, buffer)
    }
}

impl Write for NonBlockingSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        sys::send_all(self.0, &[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        sys::send_all(self.0, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Session {
    fn new(mut connection: Connection) -> Session {
        // No more is written than a piece at a time, and that when all before it is out.
        connection.set_buffer_limit(None);
        Session { state: Mutex::new(SessionState { connection, end: None }), certificate: OnceLock::new() }
    }

    /// Goes on with the handshake; true when it is done. An error says what is wrong with the peer, and has been told to it.
    pub(super) fn shake(&self, fd: RawFd) -> io::Result<bool> {
        let connection = &mut self.state.lock().connection;
        loop {
            send(connection, fd, &|_| ())?;
            if !connection.is_handshaking() {
                break;
            }
            // Straight from the socket: what lies behind the handshake stays there, or in `connection`.
            match connection.read_tls(&mut NonBlockingSocket(fd)) {
                Ok(0) => return Err(ended_in_handshake()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if let Err(error) = connection.process_new_packets() {
                // What is to be said about it, if there is room.
                let _ = send(connection, fd, &|_| ());
                return Err(in_words(&error));
            }
        }
        if connection.alpn_protocol() != Some(INSIDE) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak calomel's protocol inside of TLS"));
        }
        if let Some(certificate) = connection.peer_certificates().and_then(|chain| chain.first()) {
            let _ = self.certificate.set(Arc::from(certificate.as_ref()));
        }
        Ok(true)
    }

    pub(super) fn certificate(&self) -> Option<Arc<[u8]>> {
        self.certificate.get().cloned()
    }

    /// Reads once. What the peer has proved to have sent goes behind `plain`.
    pub(super) fn read(&self, fd: RawFd, scratch: &mut [u8], plain: &mut Vec<u8>, count: impl Fn(usize)) -> io::Result<Looked> {
        let SessionState { connection, end } = &mut *self.state.lock();
        // What came with the end of the handshake.
        take(connection, plain)?;
        if !plain.is_empty() {
            return Ok(Looked { total: plain.len(), more: true });
        }
        if let Some(end) = end.take() {
            return Err(end);
        }
        let total = sys::receive_plain(fd, scratch)?;
        if total == 0 {
            let reason = "its bytes end without the end that TLS demands: it died, or the connection was cut off";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        let mut came = &scratch[..total];
        while end.is_none() && !came.is_empty() {
            *end = match feed(connection, &mut came) {
                Ok(true) => None,
                Ok(false) => Some(io::Error::new(io::ErrorKind::ConnectionAborted, "it closed the connection")),
                Err(error) => Some(error),
            };
            take(connection, plain)?;
        }
        // Of what is wrong, the peer is told; and keys are renewed.
        let _ = send(connection, fd, &count);
        match end.take() {
            Some(error) if plain.is_empty() => Err(error),
            error => {
                *end = error;
                Ok(Looked { total, more: total == scratch.len() || end.is_some() })
            }
        }
    }

    /// Encrypts, and sends what the socket takes; true when all of it is out. Counts what the socket has taken.
    pub(super) fn write(&self, fd: RawFd, sending: &mut TcpSend, count: impl Fn(usize)) -> io::Result<bool> {
        let mut staged = Vec::new();
        loop {
            if !send(&mut self.state.lock().connection, fd, &count)? {
                return Ok(false);
            }
            if sending.is_done() {
                return Ok(true);
            }
            // What is decrypted meanwhile is not waited for.
            let head = sending.stage(PIECE, &mut staged);
            let pieces = [IoSlice::new(&sending.bytes[head]), IoSlice::new(&staged)];
            let taken = self.state.lock().connection.writer().write_vectored(&pieces)?;
            sending.took(taken, &staged);
        }
    }

    /// Sends what is left over: answers of TLS itself.
    pub(super) fn flush(&self, fd: RawFd, count: impl Fn(usize)) {
        // An error comes up again where somebody waits for it.
        let _ = send(&mut self.state.lock().connection, fd, &count);
    }

    /// Says that nothing follows, if there is room for that.
    pub(super) fn close(&self, fd: RawFd) {
        let connection = &mut self.state.lock().connection;
        connection.send_close_notify();
        let _ = send(connection, fd, &|_| ());
    }
}

/// Sends what is encrypted; true when all of it is out.
fn send(connection: &mut Connection, fd: RawFd, count: &dyn Fn(usize)) -> io::Result<bool> {
    while connection.wants_write() {
        match connection.write_tls(&mut NonBlockingSocket(fd)) {
            Ok(n) => count(n),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Decrypts some of what came; false at the end of the stream.
fn feed(connection: &mut Connection, came: &mut &[u8]) -> io::Result<bool> {
    // Nothing is read behind the end.
    let taken = connection.read_tls(came)?;
    let state = connection.process_new_packets().map_err(|error| in_words(&error))?;
    Ok(taken > 0 && !state.peer_has_closed())
}

/// Puts what is decrypted behind `plain`.
fn take(connection: &mut Connection, plain: &mut Vec<u8>) -> io::Result<()> {
    let mut reader = connection.reader();
    loop {
        let len = match reader.fill_buf() {
            Ok(chunk) => {
                plain.extend_from_slice(chunk);
                chunk.len()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        if len == 0 {
            return Ok(());
        }
        reader.consume(len);
    }
}

fn ended_in_handshake() -> io::Error {
    let reason = "it ended the connection in the middle of the TLS handshake: perhaps it does not speak TLS";
    io::Error::new(io::ErrorKind::UnexpectedEof, reason)
}

/// What is wrong, as users are told.
fn in_words(error: &rustls::Error) -> io::Error {
    use AlertDescription as Alert;
    use rustls::Error as Wrong;
    let unauthorized = |reason: String| io::Error::new(io::ErrorKind::PermissionDenied, Unauthorized(reason));
    let broken = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    match error {
        Wrong::InvalidCertificate(error) => unauthorized(format!("its certificate is not accepted: {error}")),
        Wrong::NoCertificatesPresented => unauthorized("it shows no certificate".to_owned()),
        Wrong::AlertReceived(Alert::CertificateRequired) => {
            unauthorized("it wants to see a certificate, and this engine has none".to_owned())
        }
        Wrong::AlertReceived(
            alert @ (Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            // A signature is not by whom it is said to be.
            | Alert::DecryptError
            | Alert::AccessDenied),
        ) => unauthorized(format!("it does not accept this engine's certificate: {alert:?}")),
        Wrong::InvalidMessage(_) => broken(format!("it does not speak TLS, or its bytes were changed on the way: {error}")),
        Wrong::DecryptError => broken("its bytes were changed on the way: they don't pass the check of TLS".to_owned()),
        Wrong::AlertReceived(Alert::BadRecordMac) => {
            broken("this engine's bytes were changed on the way: they don't pass the check of TLS".to_owned())
        }
        error => broken(format!("TLS: {error}")),
    }
}
