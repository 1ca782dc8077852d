//! Fuzz target: the receiving side of a tcp link. Frames and payloads arrive in arbitrary pieces, with valid and invalid
//! trailers, and targets that are withdrawn during a payload.

mod plan;
mod seeds;
mod steps;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::super::{Consumed, Link, LinkKey, PayloadStatus, ReceiveTarget, Sink};
use super::SCRATCH;
use super::stream::{BEHIND_PAYLOAD, TcpReceiver};
use crate::Address;
use crate::fuzzing::script::{Script, read_all};
use crate::memory::{RegionBuffer, Segments, Slice};
use plan::{Announced, ArrivingPayload, CLOSE, StreamEvent, StreamPlan, announced, frame};
pub(crate) use seeds::seeds;
use steps::{Arrival, Mark, stream};

const STEPS: usize = 200;
/// Guard bytes on either side of a target.
const AROUND: usize = 32;
const SECRET: u8 = 0xd5;
const KEY: LinkKey = LinkKey(7);

/// A payload's target, between guard bytes.
struct StreamTarget {
    memory: RegionBuffer<Segments<Vec<u8>>>,
    slice: Slice,
    ends: bool,
}

impl StreamTarget {
    fn new(announced: &Announced) -> StreamTarget {
        let whole = vec![SECRET; announced.len + 2 * AROUND];
        let mut segments: Vec<_> = whole.chunks(announced.piece).map(<[u8]>::to_vec).collect();
        // Segments may be empty.
        segments.insert(1, Vec::new());
        let memory = RegionBuffer::writable(Segments(segments));
        let slice = Slice::whole(memory.region()).part(AROUND, announced.len).expect("the memory is longer");
        StreamTarget { slice: if announced.ends { slice.for_one_operation() } else { slice }, memory, ends: announced.ends }
    }

    fn withdraw(&self) {
        if self.ends { self.slice.end() } else { self.memory.region().close() }
    }

    /// Checks that the target begins with these bytes, and that nothing else was written in it or around it.
    fn check(self, bytes: &[u8]) {
        let len = self.slice.len;
        let all = self.memory.take().0.concat();
        let (before, rest) = all.split_at(AROUND);
        let (target, behind) = rest.split_at(len);
        let (arrived, untouched) = target.split_at(bytes.len());
        assert!(arrived == bytes, "a payload's target has other bytes than were sent");
        assert!(untouched.iter().all(|byte| *byte == SECRET), "a payload's target was written beyond the bytes that arrived");
        assert!([before, behind].concat().iter().all(|byte| *byte == SECRET), "memory around a payload's target was written");
    }
}

/// The sink: records what is reported.
#[derive(Default)]
struct StreamSink {
    events: Vec<StreamEvent>,
    targets: Vec<Option<StreamTarget>>,
}

impl Sink for StreamSink {
    fn accepted(&mut self, _: Address) -> LinkKey {
        unreachable!("this sink accepts no links")
    }
    fn attach(&mut self, _: LinkKey, _: Arc<dyn Link>) {}
    fn connected(&mut self, _: LinkKey) {}
    fn chunk(&mut self, _: LinkKey, _: usize) {}
    fn bytes(&mut self, key: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        assert!(key == KEY && !bytes.is_empty());
        let mut used = 0;
        while let Some(len) = frame(&bytes[used..]) {
            let frame_bytes = &bytes[used..used + len];
            self.events.push(StreamEvent::Frame(frame_bytes.to_vec()));
            used += len;
            if frame_bytes == [CLOSE] {
                self.events.push(StreamEvent::Closed);
                return None;
            }
            if let Some(announced) = announced(frame_bytes) {
                let target = (!announced.nowhere).then(|| StreamTarget::new(&announced));
                target.iter().filter(|_| announced.over).for_each(StreamTarget::withdraw);
                let (memory, len) = (target.as_ref().map(|target| target.slice.clone()), announced.len);
                let receive_target = ReceiveTarget { memory, len, total: len };
                self.targets.push(target);
                return Some(Consumed { used, target: Some(receive_target) });
            }
        }
        Some(Consumed { used, target: None })
    }
    fn payload_done(&mut self, key: LinkKey, status: PayloadStatus) {
        assert_eq!(key, KEY);
        self.events.push(StreamEvent::PayloadDone(status));
    }
    fn heard(&mut self, _: LinkKey) {}
    fn sent(&mut self, _: LinkKey, _: Vec<u8>, _: bool) {}
    fn returned(&mut self, _: LinkKey) {}
    fn rma_capable(&mut self, _: LinkKey) {}
    fn rma_done(&mut self, _: LinkKey, _: u64, _: std::io::Result<()>) {}
    fn closed(&mut self, _: LinkKey, _: std::io::Error) {}
}

/// One end of a link, at which a stream arrives.
struct StreamEnd<'a> {
    plan: &'a StreamPlan,
    receiving: TcpReceiver,
    covered: AtomicBool,
    sink: StreamSink,
    /// So many events were compared with the plan.
    checked: usize,
    scratch: Vec<u8>,
    sockets: (OwnedFd, OwnedFd),
}

impl StreamEnd<'_> {
    fn new(plan: &StreamPlan, short: bool) -> StreamEnd<'_> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let sockets = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("two sockets");
        let scratch = vec![0xee; if short { BEHIND_PAYLOAD } else { SCRATCH }];
        let (receiving, covered, sink) = Default::default();
        StreamEnd { plan, receiving, covered, sink, checked: 0, scratch, sockets }
    }

    /// Feeds bytes that follow `at` others; false when the stream has ended.
    fn feed(&mut self, at: usize, bytes: &[u8]) -> bool {
        let fed = self.receiving.feed(KEY, bytes, &self.covered, &mut self.sink);
        if fed.is_err() {
            self.sink.events.push(StreamEvent::Refused);
        }
        let goes_on = self.sink.events.last().is_none_or(|last| !matches!(last, StreamEvent::Refused | StreamEvent::Closed));
        assert_eq!(fed.unwrap_or(false), goes_on);
        self.check(at + bytes.len(), goes_on);
        goes_on
    }

    /// Sends bytes through the socket, and reads them as a link does.
    fn read(&mut self, mut at: usize, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let written = rustix::io::write(&self.sockets.0, bytes).expect("an empty socket has room");
            bytes = &bytes[written..];
            let end = at + written;
            loop {
                let read = match self.receiving.read(self.sockets.1.as_raw_fd(), &mut self.scratch) {
                    Ok(read) => read,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::WouldBlock);
                        break;
                    }
                };
                assert!(0 < read.total && read.in_scratch <= read.total && read.total <= end - at);
                let placed = read.total - read.in_scratch;
                if placed > 0 {
                    let arriving = self.plan.payloads.iter().find(|payload| at < payload.begin + payload.len);
                    assert!(arriving.is_some_and(|payload| payload.begin <= at && at + placed <= payload.begin + payload.len));
                    assert!(read.in_scratch <= BEHIND_PAYLOAD);
                }
                let arrived = self.scratch[..read.in_scratch].to_vec();
                if !self.feed(at + placed, &arrived) {
                    return false;
                }
                at += read.total;
                if !read.more {
                    break;
                }
            }
            assert_eq!(at, end, "bytes are left in the socket, and the receiver reported no more");
        }
        true
    }

    /// Checks that after so many bytes exactly the planned events were reported.
    fn check(&mut self, at: usize, goes_on: bool) {
        let due = self.plan.events.partition_point(|(then, _)| *then <= at);
        let events = self.sink.events[self.checked..].iter();
        let wanted = self.plan.events[self.checked..due].iter().map(|(_, event)| event);
        assert!(events.eq(wanted), "unexpected events within the first {at} bytes");
        self.checked = due;
        if goes_on {
            assert_eq!(self.receiving.has_payload(), self.plan.is_arriving(at));
            assert_eq!(self.receiving.partial().len(), self.plan.partial(at), "bytes of frames are kept, or lost");
            let idle = self.receiving.partial().is_empty();
            assert!(!idle || self.receiving.partial().capacity() == 0, "an idle link keeps a buffer");
        }
    }
}

/// Plays the stream up to its end, or to where it is refused.
fn play(stream: &[u8], marks: &BTreeMap<usize, Mark>, plan: &StreamPlan, arrival: &Arrival, cuts: bool) {
    let mut end = StreamEnd::new(plan, arrival.short);
    let every = match usize::from(arrival.every) {
        0 => stream.len(),
        // At most some hundred reads.
        every => every.max(stream.len() / 300),
    };
    let (mut at, mut socket, mut goes_on) = (0, arrival.socket, true);
    while goes_on && at < stream.len() {
        if let Some(mark) = marks.get(&at) {
            end.covered.fetch_or(mark.covers, Ordering::Relaxed);
            end.sink
                .targets
                .last()
                .iter()
                .filter(|_| mark.withdraws)
                .for_each(|last| last.iter().for_each(StreamTarget::withdraw));
            socket = mark.socket.filter(|_| cuts).unwrap_or(socket);
        }
        let mut later = marks.range(at + 1..).filter(|(_, mark)| cuts || mark.covers || mark.withdraws);
        let next = later.next().map_or(stream.len(), |(next, _)| *next).min(at + every).min(stream.len());
        goes_on = if socket { end.read(at, &stream[at..next]) } else { end.feed(at, &stream[at..next]) };
        at = next;
    }
    let StreamEnd { sink, mut receiving, mut scratch, sockets: (theirs, mine), .. } = end;
    if goes_on {
        drop(theirs);
        let read = receiving.read(mine.as_raw_fd(), &mut scratch).expect("the end of what was sent");
        assert_eq!((read.total, read.in_scratch), (0, 0));
    }
    assert_eq!(end.checked, plan.events.len(), "planned events are missing");
    assert_eq!(sink.targets.len(), plan.payloads.len());
    for (target, ArrivingPayload { begin, len, withdrawn, .. }) in sink.targets.into_iter().zip(&plan.payloads) {
        let arrived = (begin + len).min(*withdrawn).min(stream.len());
        target.into_iter().for_each(|target| target.check(&stream[*begin..arrived]));
    }
}

/// Plays a stream cut in several ways, and checks that the same events follow.
pub fn receiving(mut bytes: &[u8]) {
    let arrival = Arrival::read(&mut bytes);
    let (stream, marks) = stream(&read_all(bytes, STEPS));
    let withdrawn: Vec<usize> = marks.iter().filter(|(_, mark)| mark.withdraws).map(|(at, _)| *at).collect();
    let covered = marks.iter().find(|(_, mark)| mark.covers).map_or(usize::MAX, |(at, _)| *at);
    let plan = StreamPlan::new(&stream, &withdrawn, covered);
    play(&stream, &marks, &plan, &arrival, true);
    // At once by the other path, and byte by byte.
    for (every, socket) in [(0, !arrival.socket), (1, arrival.socket)] {
        play(&stream, &marks, &plan, &Arrival { every, socket, ..arrival }, false);
    }
}
