//! A client and a server over one transport, and the raw references.

use std::cell::RefCell;

use calomel::{Endpoint, Engine, Error};

use super::{Outcome, Plan, Transport, process::Process, raw::Connection, report::Report};

/// The client and the server of one transport.
pub struct Site<'a> {
    pub transport: Transport,
    pub client: Engine,
    /// The server's endpoint at the client.
    pub peer: Endpoint,
    pub address: String,
    pub process: Process<'a>,
    pub raw: RefCell<Connection>,
    /// The server in this process, for a transport that does not reach another one.
    pub local: Option<Engine>,
}

impl<'a> Site<'a> {
    /// `None`, and a line in the report, if the transport is unavailable.
    pub fn open(
        plan: &'a Plan,
        report: &mut Report<'_>,
        transport: Transport,
        define: fn(&Engine) -> calomel::Result<()>,
    ) -> Outcome<Option<Site<'a>>> {
        let client = match transport.client() {
            Err(error @ Error::Unsupported { .. }) => {
                report.skip(format!("{}: skipped: {error}", transport.name()));
                return Ok(None);
            }
            outcome => outcome?,
        };
        let local = if transport == Transport::Loop { Some(transport.server()?) } else { None };
        let (process, raw) = Process::start(plan, Some(transport).filter(|_| local.is_none()))?;
        let mut address = process.address.clone();
        if let Some(engine) = &local {
            define(engine)?;
            address = engine.address().to_string();
        }
        let peer = client.lookup(&*address)?;
        Ok(Some(Site { transport, client, peer, address, process, raw: RefCell::new(raw), local }))
    }

    pub fn name(&self) -> &'static str {
        self.transport.name()
    }

    /// The process of the server's engine.
    pub fn server_pid(&self) -> u32 {
        if self.local.is_some() { std::process::id() } else { self.process.pid() }
    }
}
