//! The steps that a conversation consists of.

use crate::fuzzing::script::script;

script! {
    /// A number in a message of an adversary.
    enum Number {
        /// The number of an operation at the host, the latest first.
        Known { which: u8 },
        Small { n: u8 },
        /// This far below the largest.
        Top { below: u8 },
        Power { n: u8 },
        Any { n: u64 },
    }
}

script! {
    enum Size {
        Small { n: u8 },
        Middle { n: u16 },
        /// About a chunk.
        Chunk { more: u8 },
        Large { n: u32 },
        Number { n: Number },
    }
}

script! {
    enum Token {
        /// What the host exposes, or has exposed, in this slot.
        Slot { n: u8 },
        /// What the honest peer exposes.
        Honest,
        Any { n: u64 },
    }
}

script! {
    struct Extent { transfer: Number, stale: bool, token: Token, offset: Size, len: Size }
}

script! {
    struct Leased { first: Number, count: Size }
}

script! {
    /// The announced length of a body.
    enum Claim {
        /// Its real length.
        True,
        False { size: Size },
    }
}

script! {
    enum Offset {
        /// The end of the last chunk of this stream.
        Next,
        At { size: Size },
    }
}

script! {
    struct Word { kind: u8, size: Size }
}

script! {
    /// A message of an adversary.
    enum AdversaryMessage {
        Request {
            call: Number,
            procedure: u8,
            name: u8,
            budget: Number,
            how: u8,
            shape: u8,
            leases: Leased,
            body: u8,
            claim: Claim,
        },
        Response { call: Number, shape: u8, leases: Leased, body: u8, claim: Claim },
        Refuse { call: Number, status: Word },
        Cancel { call: Number },
        Pull { range: Extent },
        Push { range: Extent },
        Done { transfer: Number, status: Word },
        Abort { transfer: Number, push: bool },
        /// With the payload, and the trailing byte that tells whether it is complete.
        Data { stream: u8, id: Number, offset: Offset, len: Size, good: bool },
        Ping,
        Pong,
        Goodbye,
        Release { leases: Leased },
        Revoked { token: Token },
        ResumptionToken { token_number: Number },
        Handled { count: Number },
        Shutdown { call: Number },
        /// With the number of bytes that it has received, or another one.
        Idle { true_count: bool, exposes: bool },
        IdleAgreed,
        InUse,
        RandomBytes { bytes: Vec<u8> },
        /// A frame with this content.
        Framed { bytes: Vec<u8>, head: u8 },
        /// The state is repeated so often.
        TraceContext { ids: u8, flags: u8, state: Vec<u8>, times: u8 },
        List { call: Number, is_answer: bool, head: Number, width: u8 },
    }
}

script! {
    enum Target {
        Honest,
        /// The peer that the host takes it for.
        Adversary { which: u8 },
        /// The address that the host dials.
        Listener,
    }
}

script! {
    /// What happens next. Steps take effect at once, and messages arrive at once.
    enum Step {
        Send { sender: u8, what: AdversaryMessage },
        /// Without letting time pass: several messages arrive together.
        SendBuffered { sender: u8, what: AdversaryMessage },
        Dial,
        Handshake { sender: u8, incarnation: u8, token_number: Number, claims: u8, limit: Size },
        HangUp { sender: u8 },
        Call { target: Target, procedure: u8, len: Size, one_way: bool, patience: u16, leases: u8 },
        Pull { target: Target, token: Token, offset: Size, len: Size, patience: u16 },
        Push { target: Target, token: Token, offset: Size, len: Size, patience: u16 },
        Expose { slot: u8, len: Size, mode: u8 },
        Revoke { slot: u8 },
        Answer { which: u8, len: Size, leases: u8 },
        Refuse { which: u8, status: Word },
        CancelOperation { which: u8 },
        ReleaseLeases { which: u8 },
        /// The honest peer pulls from a slot, and calls.
        Visit { slot: u8, len: Size },
        Wait { ms: u16 },
        Cut { sender: u8 },
        Drain,
    }
}
