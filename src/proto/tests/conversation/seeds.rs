//! Seeds of conversations: each operation succeeds once, and is refused once.

use super::steps::*;
use crate::fuzzing::script::written;

pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let known = || Number::Known { which: 0 };
    let small = |n| Size::Small { n };
    let none = || Leased { first: Number::Small { n: 0 }, count: small(0) };
    let send = |what| Step::Send { sender: 0, what };
    let reply = |what| Step::Send { sender: 1, what };
    let request = |call, body, claim| AdversaryMessage::Request {
        call: Number::Small { n: call },
        procedure: 1,
        name: 1,
        budget: Number::Any { n: 10_000_000 },
        how: 2,
        shape: 3,
        leases: none(),
        body,
        claim,
    };
    let range = |transfer, len| Extent {
        transfer: Number::Small { n: transfer },
        stale: false,
        token: Token::Slot { n: 0 },
        offset: small(0),
        len: Size::Middle { n: len },
    };
    let data =
        |stream, id, len| AdversaryMessage::Data { stream, id, offset: Offset::Next, len: Size::Middle { n: len }, good: true };
    let number = |n| Number::Small { n };
    let leased = |first, count| Leased { first: number(first), count: small(count) };
    let handshake =
        |claims, incarnation| Step::Handshake { sender: 2, incarnation, token_number: known(), claims, limit: small(0) };
    let call = |len| Step::Call { target: Target::Listener, procedure: 0, len, one_way: false, patience: 9000, leases: 2 };
    let honest = |n| Step::Call { target: Target::Honest, procedure: 1, len: n, one_way: false, patience: 9000, leases: 0 };
    let respond = |body, claim| AdversaryMessage::Response { call: known(), shape: 3, leases: none(), body, claim };
    let calls = [
        send(request(1, 20, Claim::True)),
        Step::Answer { which: 0, len: Size::Middle { n: 18_000 }, leases: 2 },
        send(AdversaryMessage::Release { leases: leased(0, 2) }),
        send(AdversaryMessage::List { call: number(2), is_answer: false, head: number(2), width: 1 }),
        send(request(2, 0, Claim::False { size: Size::Middle { n: 5000 } })),
        send(data(2, number(2), 3000)),
        send(data(2, number(2), 2000)),
        Step::Refuse { which: 0, status: Word { kind: 5, size: small(1) } },
        send(request(3, 30, Claim::True)),
        send(AdversaryMessage::Cancel { call: number(3) }),
        Step::Answer { which: 0, len: small(1), leases: 0 },
    ];
    let trace = |state: &str, times| {
        send(AdversaryMessage::TraceContext { ids: 0x35, flags: 1, state: state.as_bytes().to_vec(), times })
    };
    let traces = [
        trace("a=1,b=2", 1),
        send(request(1, 20, Claim::True)),
        trace("x=", 200),
        trace("", 0),
        send(request(2, 0, Claim::False { size: Size::Middle { n: 5000 } })),
        send(data(2, number(2), 5000)),
        Step::Answer { which: 0, len: small(1), leases: 0 },
        Step::Answer { which: 0, len: small(1), leases: 0 },
        trace("x=", 255),
        trace("x=", 255),
        trace("x=", 255),
    ];
    let own_calls = [
        call(small(100)),
        reply(respond(3, Claim::True)),
        call(Size::Middle { n: 18_000 }),
        reply(respond(0, Claim::False { size: Size::Middle { n: 6000 } })),
        reply(data(3, known(), 4096)),
        reply(data(3, known(), 1904)),
        honest(Size::Middle { n: 17_000 }),
        call(small(3)),
        reply(AdversaryMessage::Refuse { call: known(), status: Word { kind: 9, size: small(1) } }),
        call(small(3)),
        Step::CancelOperation { which: 9 },
    ];
    let transfers = [
        Step::Expose { slot: 0, len: Size::Middle { n: 12_000 }, mode: 2 },
        send(AdversaryMessage::Pull { range: range(1, 12_000) }),
        send(AdversaryMessage::Push { range: range(2, 5000) }),
        send(data(1, number(2), 4096)),
        send(data(1, number(2), 904)),
        Step::Visit { slot: 0, len: small(200) },
        send(AdversaryMessage::Push { range: range(3, 5000) }),
        Step::Revoke { slot: 0 },
        send(data(1, number(3), 5000)),
        send(AdversaryMessage::Abort { transfer: number(3), push: true }),
    ];
    // For the honest peer only; not writable; not readable; a token of another host; out of bounds; a stale incarnation.
    let denied = [
        Step::Expose { slot: 0, len: Size::Middle { n: 3000 }, mode: 14 },
        send(AdversaryMessage::Pull { range: range(1, 3000) }),
        send(AdversaryMessage::Push { range: range(2, 100) }),
        send(data(1, number(2), 100)),
        Step::Visit { slot: 0, len: small(200) },
        Step::Expose { slot: 0, len: Size::Middle { n: 3000 }, mode: 0 },
        send(AdversaryMessage::Push { range: range(3, 100) }),
        send(data(1, number(3), 100)),
        Step::Expose { slot: 0, len: Size::Middle { n: 3000 }, mode: 3 },
        send(AdversaryMessage::Pull { range: range(4, 100) }),
        send(AdversaryMessage::Pull { range: Extent { token: Token::Honest, ..range(5, 100) } }),
        send(AdversaryMessage::Pull { range: Extent { offset: Size::Number { n: Number::Top { below: 9 } }, ..range(6, 10) } }),
        send(AdversaryMessage::Push { range: Extent { stale: true, ..range(7, 10) } }),
        Step::Push { target: Target::Honest, token: Token::Honest, offset: small(0), len: small(50), patience: 9000 },
    ];
    let (token, offset) = (Token::Honest, small(10));
    let own_transfers = [
        Step::Pull {
            target: Target::Listener,
            token: token.clone(),
            offset: small(0),
            len: Size::Middle { n: 6000 },
            patience: 9000,
        },
        reply(data(0, known(), 4096)),
        reply(data(0, known(), 1904)),
        Step::Push {
            target: Target::Listener,
            token: token.clone(),
            offset: small(0),
            len: Size::Middle { n: 6000 },
            patience: 9000,
        },
        reply(AdversaryMessage::Done { transfer: known(), status: Word { kind: 0, size: small(0) } }),
        Step::Pull { target: Target::Honest, token, offset, len: Size::Middle { n: 9000 }, patience: 9000 },
        Step::Wait { ms: 4000 },
    ];
    // Twice the second half.
    let half =
        |id| AdversaryMessage::Data { stream: 0, id, offset: Offset::At { size: small(100) }, len: small(100), good: true };
    let misplaced = [
        Step::Pull { target: Target::Listener, token: Token::Honest, offset: small(0), len: small(200), patience: 9000 },
        reply(half(known())),
        reply(half(known())),
    ];
    let connections = [
        Step::Dial,
        handshake(2, 1),
        Step::Send { sender: 2, what: AdversaryMessage::ResumptionToken { token_number: number(5) } },
        Step::Send { sender: 2, what: request(1, 5, Claim::True) },
        honest(small(5)),
        Step::Wait { ms: 1500 },
        Step::HangUp { sender: 2 },
        Step::Dial,
        Step::Cut { sender: 1 },
        call(small(3)),
        Step::Handshake { sender: 4, incarnation: 3, token_number: known(), claims: 1, limit: small(0) },
        Step::SendBuffered { sender: 4, what: AdversaryMessage::Ping },
        Step::Send { sender: 4, what: AdversaryMessage::Goodbye },
        Step::Drain,
    ];
    let propose = |true_count| AdversaryMessage::Idle { true_count, exposes: false };
    let idle = [
        // The host agrees, and calls the adversary, which does not close the connection, but calls, and is served.
        send(AdversaryMessage::ResumptionToken { token_number: number(5) }),
        send(propose(true)),
        Step::Call { target: Target::Adversary { which: 0 }, procedure: 1, len: small(3), one_way: true, patience: 9, leases: 0 },
        send(propose(false)),
        send(request(1, 5, Claim::True)),
        Step::Answer { which: 0, len: small(3), leases: 0 },
        send(propose(true)),
        send(AdversaryMessage::InUse),
        // The host has dialled another adversary, and the honest peer.
        reply(AdversaryMessage::ResumptionToken { token_number: number(6) }),
        honest(small(5)),
        Step::Wait { ms: 5000 },
        reply(AdversaryMessage::InUse),
        Step::Wait { ms: 3000 },
        honest(small(5)),
        reply(AdversaryMessage::IdleAgreed),
        Step::Wait { ms: 3000 },
        honest(small(5)),
        send(AdversaryMessage::IdleAgreed),
    ];
    vec![
        ("idle", written(&idle)),
        ("calls", written(&calls)),
        ("own_calls", written(&own_calls)),
        ("transfers", written(&transfers)),
        ("denied", written(&denied)),
        ("own_transfers", written(&own_transfers)),
        ("misplaced", written(&misplaced)),
        ("connections", written(&connections)),
        ("traces", written(&traces)),
    ]
}
