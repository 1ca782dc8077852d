//! One end sends payloads to the other, both in this process: which way they take.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;

use super::super::super::Consumed;
use super::super::process::ShmPeer;
use super::super::segment::SharedSegment;
use super::*;
use crate::Address;
use crate::memory::Region;
use crate::transport::Link;

const CHUNK: usize = STEP;

/// The two connections of one link, both of this process.
fn ends(nonce: &u64) -> [Arc<Connection>; 2] {
    let [a, b] = [SharedSegment::create().unwrap(), SharedSegment::create().unwrap()];
    let peer = || ShmPeer {
        own_user: true,
        socket: Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()),
        pid: std::process::id() as i32,
        handle: None,
        nonce: (*nonce, (&raw const *nonce).addr() as u64),
        doorbell: None,
        cut: AtomicBool::new(false),
    };
    let attach = |fd: &OwnedFd| SharedSegment::attach(fd.as_fd()).unwrap();
    let (far_a, far_b) = (attach(&a.0), attach(&b.0));
    [(a.1, far_b), (b.1, far_a)].map(|(mine, theirs)| {
        let connection = Connection::new(mine, theirs, peer(), true);
        connection.lends.store(true, Ordering::Relaxed);
        Arc::new(connection)
    })
}

/// Gives each payload memory of its own. Frames announce payloads of so many bytes, in this order; behind the last one, none.
#[derive(Default)]
struct Target {
    lens: VecDeque<usize>,
    /// Bytes of frames that have arrived.
    frames: usize,
}

impl Sink for Target {
    fn accepted(&mut self, _: Address) -> LinkKey {
        unreachable!()
    }
    fn attach(&mut self, _: LinkKey, _: Arc<dyn Link>) {}
    fn connected(&mut self, _: LinkKey) {}
    fn chunk(&mut self, _: LinkKey, _: usize) {}
    fn bytes(&mut self, _: LinkKey, bytes: &[u8]) -> Option<Consumed<Slice>> {
        self.frames += bytes.len();
        let target = self.lens.pop_front().map(|len| {
            let memory = Some(Slice::whole(&Region::from_vec(vec![0; len])));
            ReceiveTarget { memory, len, total: len }
        });
        Some(Consumed { used: bytes.len(), target })
    }
    fn payload_done(&mut self, _: LinkKey, status: PayloadStatus) {
        assert_eq!(status, PayloadStatus::Whole);
    }
    fn heard(&mut self, _: LinkKey) {}
    fn sent(&mut self, _: LinkKey, _: Vec<u8>, _: bool) {}
    fn returned(&mut self, _: LinkKey) {}
    fn rma_capable(&mut self, _: LinkKey) {}
    fn rma_done(&mut self, _: LinkKey, _: u64, _: io::Result<()>) {}
    fn closed(&mut self, _: LinkKey, _: io::Error) {}
}

/// Reads all that has arrived.
fn read(inbox: &mut ShmInbox, connection: &Arc<Connection>, target: &mut Target) {
    let mut scratch = vec![0; MAX_BODY];
    while inbox.turn(LinkKey(1), connection, &mut scratch, target, &mut |_| ()).unwrap() == Turn::Something {}
}

/// Sends a payload; true when it was lent.
fn transfer(outbox: &mut ShmOutbox, inbox: &mut ShmInbox, [near, far]: &[Arc<Connection>; 2], len: usize) -> bool {
    let mut sending = outbox.begin(vec![1], Some(Slice::whole(&Region::from_vec(vec![5; len]))));
    let mut target = Target { lens: [len].into(), frames: 0 };
    loop {
        let written = outbox.write(near, &mut sending, || true).unwrap();
        read(inbox, far, &mut target);
        outbox.loans.sweep(near);
        match written {
            Written::Part => {}
            Written::All => return false,
            Written::Lent => return true,
        }
    }
}

/// Where size classes begin, behind [`SMALL`].
const CLASSES: [usize; 4] = [12 << 10, 24 << 10, 48 << 10, CHUNK];

/// What a receiver asks for, in the bits of the size class.
fn asked(wanted: u64, len: usize) -> u64 {
    wanted >> (2 * CLASSES.into_iter().filter(|least| len >= *least).count())
}

/// All words in which one bit differs from the others, and both in which none does.
fn words() -> impl Iterator<Item = u64> {
    let one = |bit: usize| 1 << bit;
    [0].into_iter().chain((0..2 * (CLASSES.len() + 1)).map(one)).flat_map(|word| [word, !word])
}

/// A frame behind a payload may be a request: a turn ends there, and what is behind it does not make it wait.
#[test]
fn turn_ends_behind_a_frame_that_follows_a_payload() {
    let nonce = 1;
    let ends = ends(&nonce);
    let (mut outbox, mut inbox) = (ShmOutbox::new(&ends[0], KernelCopyPolicy::Never), ShmInbox::new(&ends[1]));
    const LEN: usize = 32 << 10;
    let payload = || Some(Slice::whole(&Region::from_vec(vec![5; LEN])));
    for payload in [payload(), None, payload()] {
        let mut sending = outbox.begin(vec![1], payload);
        assert!(matches!(outbox.write(&ends[0], &mut sending, || true), Ok(Written::All)));
    }
    let mut target = Target { lens: [LEN].into(), frames: 0 };
    let mut turn = |target: &mut Target| inbox.turn(LinkKey(1), &ends[1], &mut vec![0; MAX_BODY], target, &mut |_| ()).unwrap();
    assert_eq!((turn(&mut target), target.frames), (Turn::Something, 2));
    target.lens.push_back(LEN);
    assert_eq!((turn(&mut target), target.frames), (Turn::Something, 3));
    assert_eq!(turn(&mut target), Turn::Nothing);
}

/// A sender looks whether something has arrived, and then has to be continued, though there is room.
#[test]
fn send_stops_for_what_has_arrived_and_can_continue_at_once() {
    let nonce = 1;
    let ends = ends(&nonce);
    let mut outbox = ShmOutbox::new(&ends[0], KernelCopyPolicy::Never);
    let asked = std::cell::Cell::new(0);
    let mut sending = outbox.begin(vec![1], Some(Slice::whole(&Region::from_vec(vec![5; 100 << 10]))));
    let stops = || {
        asked.set(asked.get() + 1);
        false
    };
    for stretch in 1..=3 {
        assert!(matches!(outbox.write(&ends[0], &mut sending, stops), Ok(Written::Part)));
        assert_eq!(asked.get(), stretch);
        outbox.pending = Some(sending);
        assert!(outbox.is_waiting() && outbox.can_continue(&ends[0]));
        sending = outbox.pending.take().unwrap();
    }
    assert!(matches!(outbox.write(&ends[0], &mut sending, stops), Ok(Written::All)));
}

/// The peer's wish changes nothing about what it may read.
#[test]
fn memory_is_lent_only_by_the_policy_and_to_a_peer_that_may_read_it() {
    let nonce = 1;
    for policy in [KernelCopyPolicy::Never, KernelCopyPolicy::Measured, KernelCopyPolicy::Always] {
        let lens = [SMALL, SMALL + 1].into_iter().chain(CLASSES);
        let cases = lens.flat_map(|len| words().flat_map(move |wanted| [(len, wanted, true), (len, wanted, false)]));
        for (len, wanted, may_read) in cases {
            let ends = ends(&nonce);
            ends[0].lends.store(may_read, Ordering::Relaxed);
            let (mut outbox, mut inbox) = (ShmOutbox::new(&ends[0], policy), ShmInbox::new(&ends[1]));
            ends[1].mine.words().wanted.0.store(wanted, Ordering::Relaxed);
            let lent = transfer(&mut outbox, &mut inbox, &ends, len);
            let asked = policy == KernelCopyPolicy::Measured && asked(wanted, len) & 1 == 1;
            let by_policy = policy == KernelCopyPolicy::Always || asked;
            assert_eq!(lent, may_read && by_policy && len > SMALL, "{policy:?} {may_read} {wanted} {len}");
        }
    }
}

/// And the kind of the record says so.
#[test]
fn payload_is_written_by_the_path_that_the_receiver_asks_for() {
    let nonce = 4;
    let lens = [SMALL, SMALL + 1].into_iter().chain(CLASSES.into_iter().flat_map(|least| [least - 1, least]));
    for (len, wanted) in lens.flat_map(|len| words().map(move |wanted| (len, wanted))) {
        let ends = ends(&nonce);
        let mut outbox = ShmOutbox::new(&ends[0], KernelCopyPolicy::Never);
        ends[1].mine.words().wanted.0.store(wanted, Ordering::Relaxed);
        let within_caches = len <= SMALL || asked(wanted, len) & 2 != 0;
        let expected = if within_caches { CopyPath::Cached } else { CopyPath::Streaming };
        let payload = Slice::whole(&Region::from_vec(vec![1; len]));
        let mut sending = outbox.begin(vec![1; 10], Some(payload));
        assert!(outbox.write(&ends[0], &mut sending, || true).is_ok());
        let mut consumer = Consumer::new(ends[1].mine.clone(), ends[1].theirs.clone());
        let frame = consumer.next().unwrap().unwrap();
        consumer.pass(frame);
        let kind = consumer.next().unwrap().map(|record| record.kind);
        let by_kind = [(RecordKind::Payload, CopyPath::Cached), (RecordKind::PayloadPastCaches, CopyPath::Streaming)];
        assert!(by_kind.iter().any(|(of, path)| kind == Some(*of) && *path == expected), "{wanted:b} {len}: {kind:?}");
    }
}

#[test]
fn receiver_asks_for_both_ways_unless_it_may_not_read() {
    let nonce = 2;
    for (reads, len) in [(true, CHUNK), (true, CHUNK / 2), (true, CHUNK / 8), (true, SMALL + 1), (false, CHUNK)] {
        let mut ends = ends(&nonce);
        Arc::get_mut(&mut ends[1]).unwrap().reads = reads;
        let (mut outbox, mut inbox) = (ShmOutbox::new(&ends[0], KernelCopyPolicy::Measured), ShmInbox::new(&ends[1]));
        let lent = (0..2000).filter(|_| transfer(&mut outbox, &mut inbox, &ends, len)).count();
        assert!(if reads { (1..2000).contains(&lent) } else { lent == 0 }, "{reads} {len}: {lent}");
    }
}

/// Payloads of two classes arrive in turn, each before the one in front of it is copied, and by different ways.
#[test]
fn ways_of_a_class_are_measured_also_between_payloads_of_another() {
    let nonce = 5;
    let ends = ends(&nonce);
    let (mut outbox, mut inbox) = (ShmOutbox::new(&ends[0], KernelCopyPolicy::Measured), ShmInbox::new(&ends[1]));
    let lens = [64 << 10, 10 << 10];
    let wanted = &ends[1].mine.words().wanted.0;
    let asked_for = || asked(wanted.load(Ordering::Relaxed), lens[1]) & 3;
    let (mut before, mut changes) = (asked_for(), 0);
    for round in 0..20_000 {
        // The longer ones are lent, whatever was found to be faster.
        wanted.fetch_or(WANTS_LOANS << (WANTED_BITS * size_class(lens[0])), Ordering::Relaxed);
        let mut target = Target { lens: lens.into(), frames: 0 };
        for len in lens {
            let mut sending = outbox.begin(vec![1], Some(Slice::whole(&Region::from_vec(vec![5; len]))));
            assert!(!matches!(outbox.write(&ends[0], &mut sending, || true).unwrap(), Written::Part), "there is room for both");
        }
        read(&mut inbox, &ends[1], &mut target);
        outbox.loans.sweep(&ends[0]);
        if round > 2_000 && asked_for() != before {
            changes += 1;
        }
        before = asked_for();
        if changes == 6 {
            return;
        }
    }
    panic!("only {changes} trials of the shorter ones have begun or ended");
}

/// Bytes that are sent at once neither overtake a send that waits nor are cut.
#[test]
fn bytes_are_injected_whole_and_only_while_nothing_waits() {
    let nonce = 3;
    let ends = ends(&nonce);
    let (mut outbox, mut inbox) = (ShmOutbox::new(&ends[0], KernelCopyPolicy::Always), ShmInbox::new(&ends[1]));
    let mut sent = 0;
    while outbox.inject(&[1; 4000]) {
        sent += 4000;
    }
    let mut target = Target::default();
    read(&mut inbox, &ends[1], &mut target);
    assert_eq!(target.frames, sent);
    assert!(sent > MAX_BODY, "{sent} bytes fill the ring");
    assert!(!outbox.inject(&[1; MAX_BODY + 1]), "longer than a record");

    // A loan is out until the peer has read it; a pending send, until it is continued.
    let mut sending = outbox.begin(vec![1], Some(Slice::whole(&Region::from_vec(vec![5; CHUNK]))));
    assert!(matches!(outbox.write(&ends[0], &mut sending, || true).unwrap(), Written::Lent));
    assert!(!outbox.inject(b"beside a loan"));
    target.lens.push_back(CHUNK);
    read(&mut inbox, &ends[1], &mut target);
    assert_eq!(outbox.loans.sweep(&ends[0]), 1);
    outbox.pending = Some(outbox.begin(vec![2], None));
    assert!(!outbox.inject(b"before what is pending"));
    outbox.pending = None;
    assert!(outbox.inject(b"now"));
}
