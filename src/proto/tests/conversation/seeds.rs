//! Conversations to begin with: everything goes well once, and everything is refused once.

use super::steps::*;
use crate::fuzzing::script::written;

pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let known = || Number::Known { which: 0 };
    let small = |n| Size::Small { n };
    let none = || Leased { first: Number::Small { n: 0 }, count: small(0) };
    let say = |what| Step::Say { who: 0, what };
    let answers = |what| Step::Say { who: 1, what };
    let request = |call, body, claim| Saying::Request {
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
    let data = |stream, id, len| Saying::Data { stream, id, offset: Offset::Next, len: Size::Middle { n: len }, good: true };
    let number = |n| Number::Small { n };
    let leased = |first, count| Leased { first: number(first), count: small(count) };
    let greet = |claims, incarnation| Step::Greet { who: 2, incarnation, ticket: known(), claims, limit: small(0) };
    let call = |len| Step::Call { whom: Whom::Listener, procedure: 0, len, one_way: false, patience: 9000, leases: 2 };
    let honest = |n| Step::Call { whom: Whom::Honest, procedure: 1, len: n, one_way: false, patience: 9000, leases: 0 };
    let respond = |body, claim| Saying::Response { call: known(), shape: 3, leases: none(), body, claim };
    let calls = [
        say(request(1, 20, Claim::True)),
        Step::Answer { which: 0, len: Size::Middle { n: 18_000 }, leases: 2 },
        say(Saying::Release { leases: leased(0, 2) }),
        say(request(2, 0, Claim::False { size: Size::Middle { n: 5000 } })),
        say(data(2, number(2), 3000)),
        say(data(2, number(2), 2000)),
        Step::Decline { which: 0, status: Word { kind: 5, size: small(1) } },
        say(request(3, 30, Claim::True)),
        say(Saying::Cancel { call: number(3) }),
        Step::Answer { which: 0, len: small(1), leases: 0 },
    ];
    let own_calls = [
        call(small(100)),
        answers(respond(3, Claim::True)),
        call(Size::Middle { n: 18_000 }),
        answers(respond(0, Claim::False { size: Size::Middle { n: 6000 } })),
        answers(data(3, known(), 4096)),
        answers(data(3, known(), 1904)),
        honest(Size::Middle { n: 17_000 }),
        call(small(3)),
        answers(Saying::Refuse { call: known(), status: Word { kind: 9, size: small(1) } }),
        call(small(3)),
        Step::Abandon { which: 9 },
    ];
    let transfers = [
        Step::Expose { slot: 0, len: Size::Middle { n: 12_000 }, mode: 2 },
        say(Saying::Pull { range: range(1, 12_000) }),
        say(Saying::Push { range: range(2, 5000) }),
        say(data(1, number(2), 4096)),
        say(data(1, number(2), 904)),
        Step::Visit { slot: 0, len: small(200) },
        say(Saying::Push { range: range(3, 5000) }),
        Step::Revoke { slot: 0 },
        say(data(1, number(3), 5000)),
        say(Saying::Abort { transfer: number(3), push: true }),
    ];
    // For the honest peer only; for nobody to write; for nobody to read; what the host has of others, and wild guesses.
    let denied = [
        Step::Expose { slot: 0, len: Size::Middle { n: 3000 }, mode: 14 },
        say(Saying::Pull { range: range(1, 3000) }),
        say(Saying::Push { range: range(2, 100) }),
        say(data(1, number(2), 100)),
        Step::Visit { slot: 0, len: small(200) },
        Step::Expose { slot: 0, len: Size::Middle { n: 3000 }, mode: 0 },
        say(Saying::Push { range: range(3, 100) }),
        say(data(1, number(3), 100)),
        Step::Expose { slot: 0, len: Size::Middle { n: 3000 }, mode: 3 },
        say(Saying::Pull { range: range(4, 100) }),
        say(Saying::Pull { range: Extent { token: Token::Honest, ..range(5, 100) } }),
        say(Saying::Pull { range: Extent { offset: Size::Number { n: Number::Top { below: 9 } }, ..range(6, 10) } }),
        say(Saying::Push { range: Extent { stale: true, ..range(7, 10) } }),
        Step::Push { whom: Whom::Honest, token: Token::Honest, offset: small(0), len: small(50), patience: 9000 },
    ];
    let (token, offset) = (Token::Honest, small(10));
    let own_transfers = [
        Step::Pull {
            whom: Whom::Listener,
            token: token.clone(),
            offset: small(0),
            len: Size::Middle { n: 6000 },
            patience: 9000,
        },
        answers(data(0, known(), 4096)),
        answers(data(0, known(), 1904)),
        Step::Push {
            whom: Whom::Listener,
            token: token.clone(),
            offset: small(0),
            len: Size::Middle { n: 6000 },
            patience: 9000,
        },
        answers(Saying::Done { transfer: known(), status: Word { kind: 0, size: small(0) } }),
        Step::Pull { whom: Whom::Honest, token, offset, len: Size::Middle { n: 9000 }, patience: 9000 },
        Step::Wait { ms: 4000 },
    ];
    // Twice the second half.
    let half = |id| Saying::Data { stream: 0, id, offset: Offset::At { size: small(100) }, len: small(100), good: true };
    let misplaced = [
        Step::Pull { whom: Whom::Listener, token: Token::Honest, offset: small(0), len: small(200), patience: 9000 },
        answers(half(known())),
        answers(half(known())),
    ];
    let connections = [
        Step::Dial,
        greet(2, 1),
        Step::Say { who: 2, what: Saying::Ticket { ticket: number(5) } },
        Step::Say { who: 2, what: request(1, 5, Claim::True) },
        honest(small(5)),
        Step::Wait { ms: 1500 },
        Step::HangUp { who: 2 },
        Step::Dial,
        Step::Cut { who: 1 },
        call(small(3)),
        Step::Greet { who: 4, incarnation: 3, ticket: known(), claims: 1, limit: small(0) },
        Step::Mumble { who: 4, what: Saying::Ping },
        Step::Say { who: 4, what: Saying::Goodbye },
        Step::Drain,
    ];
    vec![
        ("calls", written(&calls)),
        ("own_calls", written(&own_calls)),
        ("transfers", written(&transfers)),
        ("denied", written(&denied)),
        ("own_transfers", written(&own_transfers)),
        ("misplaced", written(&misplaced)),
        ("connections", written(&connections)),
    ]
}
