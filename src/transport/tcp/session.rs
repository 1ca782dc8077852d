//! The TLS session of one socket.
//!
//! Payloads are copied. A sender copies a piece out of exposed memory, encrypts and sends it, and only then copies the next. A
//! receiver copies to the target what it has decrypted and authenticated. So no unauthenticated byte reaches a target, and
//! exposed memory is in use only for the time of a copy.

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};

use crate::sync::Mutex;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use super::super::{Unauthorized, closed_by_peer};
use super::stream::{MAX_TRAILER, TcpSend};
use super::sys;
use crate::tls::{INSIDE, Tls};
use crate::{Error, Result};

/// Bytes that are encrypted at a time: four records, since one is too little for a system call.
const PIECE: usize = 64 << 10;

/// The TLS configuration of an engine.
pub(super) struct Secure {
    client: Arc<ClientConfig>,
    server: Option<Arc<ServerConfig>>,
    name: Option<ServerName<'static>>,
}

impl Secure {
    pub(super) fn new(tls: &Tls) -> Result<Secure> {
        Ok(Secure { client: tls.client()?, server: tls.server()?, name: tls.name().cloned() })
    }

    /// Fails if there is no certificate to listen with.
    pub(super) fn check_listening(&self, what: &str) -> Result<()> {
        let reason = "a TLS listener needs a certificate, and the engine has none: see `Tls::identity`";
        let none = || Error::Unsupported { what: what.to_owned(), reason: reason.to_owned() };
        self.server.as_ref().map(drop).ok_or_else(none)
    }

    /// Creates the session of a connection to this address.
    pub(super) fn dial(&self, ip: IpAddr) -> io::Result<Session> {
        let name = self.name.clone().unwrap_or_else(|| ip.into());
        let connection = ClientConnection::new(self.client.clone(), name).map_err(io::Error::other)?;
        Ok(Session::new(connection.into()))
    }

    /// Creates the session of an accepted connection.
    pub(super) fn accept(&self) -> io::Result<Session> {
        let config =
            self.server.clone().ok_or_else(|| io::Error::other("a TLS listener needs a certificate, and the engine has none"))?;
        let connection = ServerConnection::new(config).map_err(io::Error::other)?;
        Ok(Session::new(connection.into()))
    }
}

pub(super) struct Session {
    state: Mutex<SessionState>,
    /// The peer's certificate; set when the handshake is over.
    certificate: OnceLock<Arc<[u8]>>,
}

struct SessionState {
    connection: Connection,
    /// How the stream ended; reported after what came before that is handled.
    end: Option<io::Error>,
}

/// The outcome of one read from the socket.
#[derive(Clone, Copy, Default)]
pub(super) struct SessionRead {
    /// Bytes that arrived, encrypted or decrypted.
    pub total: usize,
    /// There may be more.
    pub more: bool,
}

/// Adapts a non-blocking socket to the traits that rustls takes.
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
        // `write` limits the buffer: it adds a piece only when the previous one is sent.
        connection.set_buffer_limit(None);
        Session { state: Mutex::new(SessionState { connection, end: None }), certificate: OnceLock::new() }
    }

    /// Continues the handshake; true when it is over. An error has the reason, and the peer was sent an alert.
    pub(super) fn advance_handshake(&self, fd: RawFd) -> io::Result<bool> {
        let connection = &mut self.state.lock().connection;
        loop {
            send(connection, fd, &|_| ())?;
            if !connection.is_handshaking() {
                break;
            }
            // Read from the socket directly: bytes behind the handshake stay there, or in `connection`.
            match connection.read_tls(&mut NonBlockingSocket(fd)) {
                Ok(0) => return Err(ended_in_handshake()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if let Err(error) = connection.process_new_packets() {
                // The alert, if the socket accepts it.
                let _ = send(connection, fd, &|_| ());
                return Err(describe(&error));
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

    /// Reads once, and appends what is decrypted and authenticated to `plain`.
    pub(super) fn read(
        &self,
        fd: RawFd,
        scratch: &mut [u8],
        plain: &mut Vec<u8>,
        count: impl Fn(usize),
    ) -> io::Result<SessionRead> {
        let SessionState { connection, end } = &mut *self.state.lock();
        // Bytes that arrived with the end of the handshake.
        append_decrypted(connection, plain)?;
        if !plain.is_empty() {
            return Ok(SessionRead { total: plain.len(), more: true });
        }
        if let Some(end) = end.take() {
            return Err(end);
        }
        let total = sys::receive_plain(fd, scratch)?;
        if total == 0 {
            let reason = "its bytes end without the end that TLS demands: it died, or the connection was cut off";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        let mut arrived = &scratch[..total];
        while end.is_none() && !arrived.is_empty() {
            *end = match feed(connection, &mut arrived) {
                Ok(true) => None,
                Ok(false) => Some(closed_by_peer()),
                Err(error) => Some(error),
            };
            append_decrypted(connection, plain)?;
        }
        // Sends what TLS itself has to send: alerts, and key updates.
        let _ = send(connection, fd, &count);
        match end.take() {
            Some(error) if plain.is_empty() => Err(error),
            error => {
                *end = error;
                Ok(SessionRead { total, more: total == scratch.len() || end.is_some() })
            }
        }
    }

    /// Encrypts some of a send, about `most` bytes at most, and returns how many.
    pub(super) fn encrypt(&self, sending: &mut TcpSend, most: usize) -> io::Result<usize> {
        let mut staged = Vec::new();
        // The lock is not held while the payload is copied, so reads can go on.
        let head = sending.stage(most.clamp(MAX_TRAILER, PIECE), &mut staged);
        let pieces = [IoSlice::new(&sending.bytes[head]), IoSlice::new(&staged)];
        let taken = self.state.lock().connection.writer().write_vectored(&pieces)?;
        sending.advance(taken, &staged);
        Ok(taken)
    }

    /// Sends what TLS has buffered; true when the socket has accepted all of it.
    pub(super) fn send(&self, fd: RawFd, count: impl Fn(usize)) -> io::Result<bool> {
        send(&mut self.state.lock().connection, fd, &count)
    }

    /// Sends the closing alert, if the socket accepts it.
    pub(super) fn close(&self, fd: RawFd) {
        let connection = &mut self.state.lock().connection;
        connection.send_close_notify();
        let _ = send(connection, fd, &|_| ());
    }
}

/// Sends what is encrypted; true when all is sent.
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

/// Decrypts some of what arrived; false at the end of the stream.
fn feed(connection: &mut Connection, arrived: &mut &[u8]) -> io::Result<bool> {
    // rustls reads nothing behind the end.
    let taken = connection.read_tls(arrived)?;
    let state = connection.process_new_packets().map_err(|error| describe(&error))?;
    Ok(taken > 0 && !state.peer_has_closed())
}

/// Appends what is decrypted to `plain`.
fn append_decrypted(connection: &mut Connection, plain: &mut Vec<u8>) -> io::Result<()> {
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
    let reason = "it closed the connection during the TLS handshake: perhaps it does not speak TLS";
    io::Error::new(io::ErrorKind::UnexpectedEof, reason)
}

/// The error that users get for an error of TLS.
fn describe(error: &rustls::Error) -> io::Error {
    use AlertDescription as Alert;
    use rustls::Error as Wrong;
    let unauthorized = |reason: String| io::Error::new(io::ErrorKind::PermissionDenied, Unauthorized(reason));
    let broken = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    match error {
        Wrong::InvalidCertificate(error) => unauthorized(format!("its certificate is not accepted: {error}")),
        Wrong::NoCertificatesPresented => unauthorized("it sent no certificate".to_owned()),
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
            // The signature does not match the certificate.
            | Alert::DecryptError
            | Alert::AccessDenied),
        ) => unauthorized(format!("it does not accept this engine's certificate: {alert:?}")),
        Wrong::InvalidMessage(_) => broken(format!("it does not speak TLS, or its bytes were corrupted in transit: {error}")),
        Wrong::DecryptError => broken("its bytes were corrupted in transit: TLS can't authenticate them".to_owned()),
        Wrong::AlertReceived(Alert::BadRecordMac) => {
            broken("this engine's bytes were corrupted in transit: the peer can't authenticate them".to_owned())
        }
        error => broken(format!("TLS: {error}")),
    }
}
