//! Sizes, credits and times.

use std::time::Duration;

/// Longest message, in bytes: room for a call with a body of some kilobytes. With [`CREDITS`], a link has 128 KiB of receive
/// buffers.
pub(super) const MESSAGE: usize = 8 << 10;

/// Messages that a peer may send before the receiver has handled the first.
pub(super) const CREDITS: u32 = 16;

/// Receives that are posted for the messages of a link: those that take credit, and a few that take none; and, once payloads go
/// between bulk endpoints, for the reply to each that may be on its way at a time.
pub(super) const RECEIVES: usize = CREDITS as usize + 4;
pub(super) const REPLIES: usize = 16;
/// Receives of an endpoint for messages of strangers.
pub(super) const STRANGERS: usize = 64;

/// Messages that may wait for room at the provider, before the peer counts as one that reads nothing. Those that take credit wait
/// elsewhere.
pub(super) const MAX_UNSENT: usize = 64;

/// Messages that the provider may keep for one peer. Credit allows an honest one far fewer.
pub(super) const MOST_KEPT: u64 = 80;
/// Of the messages that are copied when they are posted, one in so many is posted with a completion.
pub(super) const NOTED_EVERY: u64 = 8;
// A driver that is busy handles neither completions nor credit: an honest peer runs out of credit first, with two connections.
const _: () = assert!(2 * (RECEIVES + REPLIES) as u64 + NOTED_EVERY <= MOST_KEPT);

/// Longest payload, in bytes, that is sent at a time: so many bytes after another transfer's turn a link turns to it. Each is
/// announced, asked for and reported.
pub(super) const CHUNK: usize = 2 << 20;

/// Payloads of a peer that may be announced and are not reported, since one before them has not arrived; and how many a sender has
/// at most, those in messages included. Only [`REPLIES`] of them go between bulk endpoints.
pub(super) const MAX_ANNOUNCED: usize = 64;
pub(super) const MOST_ANNOUNCED: usize = 48;

/// Longest payload that comes at once: agreeing on a place takes longer than copying it.
pub(super) const EAGER: usize = 64 << 10;
/// Receives of a link for such payloads, and the bytes that one has room for: several that leave at the same time go together,
/// since four times as many bytes take two and a half times as long.
pub(super) const SLOTS: usize = 8;
pub(super) const SLOT: usize = 4 * EAGER;

/// The arrival of so many payloads, or of the payloads of so many slots, is reported by a message of its own. Of fewer it is
/// reported with what else is sent to the peer, or when the driver has polled so often, or sleeps.
pub(super) const TAKEN_AT_ONCE: usize = 2;
pub(super) const MOST_POLLS: u32 = 16;

/// When a hello is sent again. The provider may lose the first message to a process that was restarted.
pub(super) const HELLO_AGAIN: Duration = Duration::from_millis(200);

/// When a post that found no room, or no connection, is tried again, if no event comes before.
pub(super) const RETRY: Duration = Duration::from_millis(2);
/// The same for a link that has waited for long: its peer may be dead.
pub(super) const RETRY_SLOWLY: Duration = Duration::from_millis(50);

/// The longest sleep where the provider may miss an event, or has no descriptor: while links are expected; and while there are
/// links, but no descriptor.
pub(super) const NAP: Duration = Duration::from_millis(10);
pub(super) const SHORT_NAP: Duration = Duration::from_millis(1);

/// How long after the end of a peer's process its last messages may take.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// How long the end of the transport waits for messages to be sent.
pub(super) const LINGER: Duration = Duration::from_millis(200);

/// For so long a payload may be expected without any arriving on the link. A slow network takes a second for a megabyte.
pub(super) const STALL: Duration = Duration::from_secs(30);

/// Time limit of the test that decides on RMA. It makes half a dozen connections, which takes two seconds where the processor is
/// emulated.
pub(super) const SELF_TEST: Duration = Duration::from_secs(5);

/// Longest part of a transfer by RMA; how many parts of one transfer may be under way, and of all transfers of a link.
pub(super) const PART: usize = 1 << 20;
pub(super) const PARTS: usize = 4;
pub(super) const MAX_PARTS: usize = 16;

/// For so long no part of any transfer by RMA of a link may complete, or begin, while there are some.
pub(super) const RMA_STALL: Duration = Duration::from_secs(3);

/// A link does without RMA for a while once it has failed so often in a row. A stall counts for several failures, since it takes
/// much longer.
pub(super) const RMA_FAILURES: u32 = 12;
pub(super) const STALL_FAILURES: u32 = 6;
pub(super) const RMA_PAUSE: Duration = Duration::from_secs(60);

/// Memory with more segments is not registered for RMA: each has a key, and bulks carry 64 KiB of them, of several endpoints.
pub(super) const MOST_SEGMENTS: usize = 512;
