//! What a conversation is made of.

use crate::fuzzing::script::script;

script! {
    /// A number that a liar names.
    enum Number {
        /// One that means something to the host, the latest first.
        Known { which: u8 },
        Small { n: u8 },
        /// So far from the largest.
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
        /// What the host exposes, or has exposed, in this place.
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
    /// How long a message is said to be.
    enum Claim {
        /// As long as it is.
        True,
        False { size: Size },
    }
}

script! {
    enum Offset {
        /// Where the last chunk of this stream has ended.
        Next,
        At { size: Size },
    }
}

script! {
    struct Word { kind: u8, size: Size }
}

script! {
    /// What a liar says.
    enum Saying {
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
        /// With the payload, and the byte behind it that says whether it is good.
        Data { stream: u8, id: Number, offset: Offset, len: Size, good: bool },
        Ping,
        Pong,
        Goodbye,
        Release { leases: Leased },
        Revoked { token: Token },
        Ticket { ticket: Number },
        Handled { count: Number },
        Shutdown { call: Number },
        Noise { bytes: Vec<u8> },
        /// A frame with this inside.
        Framed { bytes: Vec<u8>, head: u8 },
    }
}

script! {
    enum Whom {
        Honest,
        /// By the peer that it is taken for.
        Liar { which: u8 },
        /// Where the host dials.
        Listener,
    }
}

script! {
    /// What happens next. What the host or somebody else does is done at once; what somebody says arrives at once too.
    enum Step {
        Say { who: u8, what: Saying },
        /// Without waiting for what comes of it: several arrive together.
        Mumble { who: u8, what: Saying },
        Dial,
        Greet { who: u8, incarnation: u8, ticket: Number, claims: u8, limit: Size },
        HangUp { who: u8 },
        Call { whom: Whom, procedure: u8, len: Size, one_way: bool, patience: u16, leases: u8 },
        Pull { whom: Whom, token: Token, offset: Size, len: Size, patience: u16 },
        Push { whom: Whom, token: Token, offset: Size, len: Size, patience: u16 },
        Expose { slot: u8, len: Size, mode: u8 },
        Revoke { slot: u8 },
        Answer { which: u8, len: Size, leases: u8 },
        Decline { which: u8, status: Word },
        Abandon { which: u8 },
        LetGo { which: u8 },
        /// The honest peer pulls from a slot, and calls.
        Visit { slot: u8, len: Size },
        Wait { ms: u16 },
        Cut { who: u8 },
        Drain,
    }
}
