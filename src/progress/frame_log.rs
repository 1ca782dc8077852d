//! What engines say to each other, at level TRACE of target `calomel::proto`: each message that is sent or has arrived, without
//! the secrets in it.

use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};

use crate::deferred_log::defer;
use crate::proto::wire::{self, BorrowedBytes, MAGIC, Message, Range};
use crate::transport::LinkKey;

/// The first bytes of a piece of the handshake, which end with the length of the rest.
const HANDSHAKE_PREFIX: usize = 16;

/// Whether messages may be logged. One comparison, as it is asked for all bytes that are sent or arrive.
#[inline]
pub(super) fn is_on() -> bool {
    LevelFilter::TRACE <= STATIC_MAX_LEVEL && LevelFilter::TRACE <= LevelFilter::current()
}

/// Logs the messages in the first `len` bytes: whole pieces of a handshake, and whole frames. `direction`: sent, or received.
#[cold]
#[inline(never)]
pub(super) fn log(direction: &'static str, link: LinkKey, bytes: &[u8], len: usize) {
    let (link, mut bytes) = (link.0, bytes.get(..len).unwrap_or_default());
    while !bytes.is_empty() {
        let (message, details, len) = if bytes.starts_with(&MAGIC) {
            let rest = bytes.get(HANDSHAKE_PREFIX - 4..).and_then(|rest| rest.first_chunk::<4>());
            let len = rest.map_or(0, |len| u32::from_le_bytes(*len) as usize).saturating_add(HANDSHAKE_PREFIX);
            ("handshake", format!("{len} bytes"), len)
        } else {
            let mut message = Message::Ping;
            match wire::take_into(bytes, &mut message) {
                Ok(Some((Some(_), len))) => (name(&message), details(&message), len),
                Ok(Some((None, len))) => (name(&message), "the body is damaged".to_owned(), len),
                Ok(None) | Err(_) => ("no message", format!("{} bytes", bytes.len()), bytes.len()),
            }
        };
        // The caller holds locks, under which no subscriber may run: not even to ask it whether it wants this target.
        defer(move || tracing::trace!(target: "calomel::proto", direction, link, details, "{message}"));
        bytes = bytes.get(len..).unwrap_or_default();
    }
}

fn name(message: &Message<'_>) -> &'static str {
    match message {
        Message::Request { .. } => "request",
        Message::Response { .. } => "response",
        Message::Refuse { .. } => "refuse",
        Message::Cancel { .. } => "cancel",
        Message::Pull(_) => "pull",
        Message::Push(_) => "push",
        Message::Done { .. } => "done",
        Message::Abort { .. } => "abort",
        Message::Data { .. } => "data",
        Message::Ping => "ping",
        Message::Pong => "pong",
        Message::Goodbye => "goodbye",
        Message::Release(_) => "release",
        Message::Revoked { .. } => "revoked",
        Message::ResumptionToken { .. } => "resumption token",
        Message::Handled { .. } => "handled",
        Message::Shutdown { .. } => "shutdown",
        Message::Echo { .. } => "echo",
        Message::Identify { .. } => "identify",
        Message::TraceContext { .. } => "trace context",
        Message::Idle { .. } => "idle",
        Message::IdleAgreed => "idle agreed",
        Message::InUse => "in use",
        Message::List { .. } => "list",
    }
}

/// Tokens are left out: a peer that has one may use the memory, or show that it is the engine that it was.
fn details(message: &Message<'_>) -> String {
    match message {
        Message::Request { call, procedure, declaration, provider, budget_us, one_way, leases, size } => {
            let name = declaration.map(|declaration| format!(" `{}`", declaration.name)).unwrap_or_default();
            let (kind, leases) = (if *one_way { "one-way call" } else { "call" }, leases.count);
            format!(
                "{kind} {call}, procedure {procedure}{name}, provider {provider}, {size} bytes, {leases} bulks, {budget_us} us left"
            )
        }
        Message::Response { call, result, shape: BorrowedBytes(shape), leases, released, size } => {
            let declared = if shape.is_empty() { "" } else { " (declared)" };
            let released = if released.count > 0 { format!(", {} released", released.count) } else { String::new() };
            format!("call {call}, type {result}{declared}, {size} bytes, {} bulks{released}", leases.count)
        }
        Message::Refuse { call, status } => format!("call {call}, {status:?}"),
        Message::Cancel { call } | Message::Shutdown { call } | Message::Echo { call } => format!("call {call}"),
        Message::Identify { call, provider } => format!("call {call}, provider {provider}"),
        Message::Pull(range) | Message::Push(range) => {
            let Range { transfer, owner: _, token: _, offset, len } = range;
            format!("transfer {transfer}, {len} bytes at {offset}")
        }
        Message::Done { transfer, status } => format!("transfer {transfer}, {status:?}"),
        Message::Abort { transfer, push } => format!("transfer {transfer}, {}", if *push { "push" } else { "pull" }),
        Message::Data { stream, id, offset, len } => format!("{stream:?} {id}, {len} bytes at {offset}"),
        Message::Release(leases) => format!("{} bulks from number {} on", leases.count, leases.first),
        Message::Handled { count, calls, bytes } => format!("{count} calls, credit for {calls} more, of {bytes} bytes"),
        Message::TraceContext { trace_id, parent_id, flags, state } => {
            let (trace, span) = (u128::from_be_bytes(*trace_id), u64::from_be_bytes(*parent_id));
            format!("trace {trace:032x}, span {span:016x}, flags {flags:02x}, state `{state}`")
        }
        Message::Revoked { token: _ } | Message::ResumptionToken { token: _ } => String::new(),
        Message::Idle { received, exposes } => {
            format!("received {received} bytes{}", if *exposes { ", exposes memory" } else { "" })
        }
        Message::List { call, is_answer, head, width } => {
            let kind = if *is_answer { "answer to call" } else { "call" };
            format!("{kind} {call}, numbers of {width} bytes behind {head} bytes")
        }
        Message::Ping | Message::Pong | Message::Goodbye | Message::IdleAgreed | Message::InUse => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_told() {
        let range = Range { transfer: 5, owner: 6, token: [77; 16], offset: 10, len: 20 };
        let number = u128::from_le_bytes([77; 16]);
        for message in [
            Message::Pull(range),
            Message::Push(range),
            Message::Revoked { token: [77; 16] },
            Message::ResumptionToken { token: number },
        ] {
            let text = details(&message);
            assert!(!text.contains("77") && !text.contains("4d4d") && !text.contains(&number.to_string()), "{text}");
        }
        assert_eq!(details(&Message::Pull(range)), "transfer 5, 20 bytes at 10");
    }
}
