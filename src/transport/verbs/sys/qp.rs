//! Queue pairs: what is asked of a device, and where what is sent arrives.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys as raw;
use rdma_sys::{ibv_access_flags as flags, ibv_qp_attr_mask as mask, ibv_qp_state as state, ibv_send_flags, ibv_wr_opcode};
use smallvec::SmallVec;

use super::cm::Id;
use super::device::{Access, Cq, Memory, Pd, Window};
use super::{failed, is_forked, must, verbs};

/// A stretch of registered memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in super::super) struct Piece(raw::ibv_sge);

impl Piece {
    pub fn new(address: u64, len: u32, key: u32) -> Piece {
        Piece(raw::ibv_sge { addr: address, length: len, lkey: key })
    }
}

/// A buffer for a message that is to come.
pub(in super::super) struct Receive {
    pub id: u64,
    pub buffer: Piece,
}

/// Buffers that many queue pairs receive into.
pub(in super::super) struct Srq {
    raw: NonNull<raw::ibv_srq>,
    _pd: Arc<Pd>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    pub fn new(pd: &Arc<Pd>, size: u32) -> io::Result<Arc<Srq>> {
        let mut wanted = raw::ibv_srq_init_attr {
            srq_context: null_mut(),
            attr: raw::ibv_srq_attr { max_wr: size, max_sge: 1, srq_limit: 0 },
        };
        // SAFETY: the domain is there.
        let made = unsafe { raw::ibv_create_srq(pd.as_ptr(), &raw mut wanted) };
        let raw = NonNull::new(made).ok_or_else(|| failed("ibv_create_srq", &io::Error::last_os_error()))?;
        Ok(Arc::new(Srq { raw, _pd: pd.clone() }))
    }

    /// Hands over buffers for messages.
    ///
    /// # Safety
    /// Until the completion of a buffer has been taken, or this queue is gone, its memory must be registered for local writes, and
    /// nobody may touch it.
    pub unsafe fn post(&self, buffers: &[Receive]) -> io::Result<()> {
        let mut pieces: SmallVec<[raw::ibv_sge; 32]> = buffers.iter().map(|buffer| buffer.buffer.0).collect();
        let mut requests: SmallVec<[raw::ibv_recv_wr; 32]> = SmallVec::new();
        for (buffer, piece) in buffers.iter().zip(&mut pieces) {
            requests.push(raw::ibv_recv_wr { wr_id: buffer.id, next: null_mut(), sg_list: piece, num_sge: 1 });
        }
        for at in 1..requests.len() {
            requests[at - 1].next = &raw mut requests[at];
        }
        if requests.is_empty() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: the queue is there; the list and what it points to are on this stack; the memory is as whoever calls promises.
        verbs("ibv_post_srq_recv", unsafe { raw::ibv_post_srq_recv(self.raw.as_ptr(), requests.as_mut_ptr(), &raw mut bad) })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // SAFETY: whatever queue pair uses it holds an `Arc` of it, so none does.
        must("ibv_destroy_srq", unsafe { raw::ibv_destroy_srq(self.raw.as_ptr()) });
    }
}

/// How much a queue pair can hold.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Capacity {
    /// Requests that are under way.
    pub requests: u32,
    /// Pieces of memory in one request.
    pub pieces: u32,
    /// Bytes that go along with a request. A device that can't do that, or not so many, is asked for none.
    pub inline: u32,
}

/// What is asked of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// To be received by the other side.
    Send,
    /// Out of the other side's memory.
    Read { address: u64, key: u32 },
    /// Into the other side's memory.
    Write { address: u64, key: u32 },
}

pub(in super::super) struct Work<'a> {
    pub id: u64,
    pub kind: Kind,
    pub pieces: &'a [Piece],
    /// Its end is to be told, and with it the end of all before it.
    pub signalled: bool,
}

/// When to try again after there was no room: in 0.64 ms, in the code of the standard.
const PATIENCE: u8 = 12;

/// When to ask again if nothing is heard: after 0.27 s, in the code of the standard, and eight times in all. The connection
/// manager's own is up to eight times as long. A refusal can get lost when memory is taken back in the middle of an answer (seen
/// with soft-RoCE): whoever asked finds that out by this.
const ANSWER: u8 = 16;

/// How to reach the other side, as the connection manager knows it.
#[derive(Clone, Copy)]
pub(in super::super) struct Path {
    way: raw::ibv_ah_attr,
    mtu: raw::ibv_mtu::Type,
    pkey_index: u16,
    port: u8,
    timeout: u8,
    retries: u8,
    patience: u8,
}

/// What is asked of a queue pair's attributes, of which nothing is set.
pub(super) fn no_attributes() -> raw::ibv_qp_attr {
    // SAFETY: it is made of numbers, which zeros are.
    unsafe { MaybeUninit::<raw::ibv_qp_attr>::zeroed().assume_init() }
}

impl Path {
    pub(super) fn new(ready_to_receive: &raw::ibv_qp_attr, ready_to_send: &raw::ibv_qp_attr) -> Path {
        Path {
            way: ready_to_receive.ah_attr,
            mtu: ready_to_receive.path_mtu,
            pkey_index: ready_to_receive.pkey_index,
            port: ready_to_receive.ah_attr.port_num,
            timeout: ready_to_send.timeout,
            retries: ready_to_send.retry_cnt,
            patience: ready_to_send.rnr_retry,
        }
    }

    fn attributes(&self) -> raw::ibv_qp_attr {
        raw::ibv_qp_attr {
            ah_attr: self.way,
            path_mtu: self.mtu,
            pkey_index: self.pkey_index,
            port_num: self.port,
            timeout: self.timeout,
            retry_cnt: self.retries,
            rnr_retry: self.patience,
            ..no_attributes()
        }
    }
}

/// A reliable, connected queue pair.
pub(in super::super) struct Qp {
    raw: NonNull<raw::ibv_qp>,
    pub number: u32,
    /// Most bytes that go along with a request.
    inline: u32,
    /// The connection manager's, which made it.
    id: Option<Arc<Id>>,
    _cq: Arc<Cq>,
    _srq: Option<Arc<Srq>>,
    _pd: Arc<Pd>,
}

// SAFETY: the functions of verbs may be called by any thread.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    /// One that the connection manager connects.
    pub fn managed(id: &Arc<Id>, pd: &Arc<Pd>, cq: &Arc<Cq>, srq: &Arc<Srq>, capacity: Capacity) -> io::Result<Qp> {
        Qp::make(cq, Some(srq), capacity, pd, Some(id), &mut |wanted| {
            // SAFETY: the identifier, the domain and the queues are there.
            let made = unsafe { raw::rdma_create_qp(id.as_ptr(), pd.as_ptr(), wanted) };
            // SAFETY: the identifier is there.
            if made == 0 { unsafe { (*id.as_ptr()).qp } } else { null_mut() }
        })
    }

    /// One that is connected by [`Qp::connect`], and receives no messages.
    pub fn bare(pd: &Arc<Pd>, cq: &Arc<Cq>, capacity: Capacity) -> io::Result<Qp> {
        Qp::make(cq, None, capacity, pd, None, &mut |wanted| {
            // SAFETY: the domain and the queues are there.
            unsafe { raw::ibv_create_qp(pd.as_ptr(), wanted) }
        })
    }

    fn make(
        cq: &Arc<Cq>,
        srq: Option<&Arc<Srq>>,
        capacity: Capacity,
        pd: &Arc<Pd>,
        id: Option<&Arc<Id>>,
        create: &mut dyn FnMut(&mut raw::ibv_qp_init_attr) -> *mut raw::ibv_qp,
    ) -> io::Result<Qp> {
        let mut last = None;
        for inline in [capacity.inline, 0] {
            let mut wanted = raw::ibv_qp_init_attr {
                qp_context: null_mut(),
                send_cq: cq.as_ptr(),
                recv_cq: cq.as_ptr(),
                srq: srq.map_or(null_mut(), |srq| srq.raw.as_ptr()),
                cap: raw::ibv_qp_cap {
                    max_send_wr: capacity.requests,
                    max_recv_wr: 0,
                    max_send_sge: capacity.pieces,
                    max_recv_sge: 0,
                    max_inline_data: inline,
                },
                qp_type: raw::ibv_qp_type::IBV_QPT_RC,
                sq_sig_all: 0,
            };
            if let Some(raw) = NonNull::new(create(&mut wanted)) {
                // SAFETY: it was made above.
                let number = unsafe { (*raw.as_ptr()).qp_num };
                let inline = wanted.cap.max_inline_data;
                return Ok(Qp { raw, number, inline, id: id.cloned(), _cq: cq.clone(), _srq: srq.cloned(), _pd: pd.clone() });
            }
            last = Some(failed("a queue pair can't be made", &io::Error::last_os_error()));
            if inline == 0 {
                break;
            }
        }
        Err(last.unwrap_or_else(|| io::Error::other("a queue pair can't be made")))
    }

    /// Asks for all of it, in this order. On an error some of it may have been asked for.
    ///
    /// # Safety
    /// Until its completion, or that of a later request, has been taken, or this queue pair is gone, the memory of each must be
    /// registered, for local writes where it is read into. What is sent must not be written meanwhile; what is read into must not
    /// be touched by anybody, unless that is what the memory is there for.
    pub unsafe fn post(&self, work: &[Work<'_>]) -> io::Result<()> {
        let mut requests: SmallVec<[raw::ibv_send_wr; 8]> = SmallVec::new();
        for work in work {
            // SAFETY: it is made of numbers, and of pointers that may be null.
            let mut request = unsafe { MaybeUninit::<raw::ibv_send_wr>::zeroed().assume_init() };
            request.wr_id = work.id;
            request.sg_list = work.pieces.as_ptr().cast_mut().cast();
            request.num_sge = work.pieces.len() as i32;
            let mut wanted = if work.signalled { ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
            request.opcode = match work.kind {
                Kind::Send => {
                    let len: u32 = work.pieces.iter().map(|piece| piece.0.length).sum();
                    wanted |= if len <= self.inline { ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 };
                    ibv_wr_opcode::IBV_WR_SEND
                }
                Kind::Read { address, key } => {
                    request.wr.rdma = raw::rdma_t { remote_addr: address, rkey: key };
                    ibv_wr_opcode::IBV_WR_RDMA_READ
                }
                Kind::Write { address, key } => {
                    request.wr.rdma = raw::rdma_t { remote_addr: address, rkey: key };
                    ibv_wr_opcode::IBV_WR_RDMA_WRITE
                }
            };
            request.send_flags = wanted;
            requests.push(request);
        }
        for at in 1..requests.len() {
            requests[at - 1].next = &raw mut requests[at];
        }
        if requests.is_empty() {
            return Ok(());
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is there; the list is on this stack, and what it points to outlives the call; the memory is as
        // whoever calls promises.
        verbs("ibv_post_send", unsafe { raw::ibv_post_send(self.raw.as_ptr(), requests.as_mut_ptr(), &raw mut bad) })
    }

    /// Opens windows to memory for the other side, which can use their keys when that has ended: each ends by itself.
    ///
    /// # Safety
    /// The windows must be dropped before the memory is, and while either is there the memory may be read and written by the
    /// other side, as `access` says.
    pub unsafe fn open(&self, id: u64, windows: &[(&Window, &Memory, u64, u64)], access: Access) -> io::Result<()> {
        let mut allowed = flags(0);
        for (is_wanted, flag) in
            [(access.remote_read, flags::IBV_ACCESS_REMOTE_READ), (access.remote_write, flags::IBV_ACCESS_REMOTE_WRITE)]
        {
            allowed |= if is_wanted { flag } else { flags(0) };
        }
        for (window, memory, address, len) in windows {
            // SAFETY: it is made of numbers, and of pointers that may be null.
            let mut request = unsafe { MaybeUninit::<raw::ibv_send_wr>::zeroed().assume_init() };
            request.wr_id = id;
            request.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
            request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
            let bind_info =
                raw::ibv_mw_bind_info { mr: memory.as_ptr(), addr: *address, length: *len, mw_access_flags: allowed.0 };
            request.bind_mw_tso_union.bind_mw = raw::bind_mw_t { mw: window.as_ptr(), rkey: window.key, bind_info };
            let mut bad = null_mut();
            // SAFETY: the queue pair, the window and the memory are there; the request is on this stack.
            verbs("ibv_post_send", unsafe { raw::ibv_post_send(self.raw.as_ptr(), &raw mut request, &raw mut bad) })?;
        }
        Ok(())
    }

    /// Has the other side try again soon when there was no room for what it sent. Best effort: it is not to come to that.
    pub fn set_patience(&self) {
        let mut attr = no_attributes();
        attr.qp_state = state::IBV_QPS_RTS;
        attr.min_rnr_timer = PATIENCE;
        if let Err(error) = self.modify(&mut attr, mask::IBV_QP_STATE | mask::IBV_QP_MIN_RNR_TIMER, "set the RNR timer") {
            tracing::debug!(target: "calomel::verbs", %error, "an attribute of a queue pair stays as it is");
        }
    }

    fn modify(&self, attr: &mut raw::ibv_qp_attr, which: mask, what: &str) -> io::Result<()> {
        // SAFETY: the queue pair is there.
        verbs(what, unsafe { raw::ibv_modify_qp(self.raw.as_ptr(), attr, which.0.cast_signed()) })
    }

    /// Readies it for being connected along a path. The other side may do one-sided reads and writes as `open` says.
    pub fn prepare(&self, path: &Path, open: bool) -> io::Result<()> {
        let mut attr = path.attributes();
        attr.qp_state = state::IBV_QPS_INIT;
        let allowed = flags::IBV_ACCESS_REMOTE_READ | flags::IBV_ACCESS_REMOTE_WRITE;
        attr.qp_access_flags = if open { allowed.0 } else { 0 };
        let which = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, which, "a queue pair can't be prepared")
    }

    /// Connects it to the other side's queue pair. `ours` and `theirs` are the packets' first numbers; `asked` is how many reads
    /// may be under way, and `answered` how many of the other side's.
    pub fn connect(&self, path: &Path, peer: u32, (ours, theirs): (u32, u32), (asked, answered): (u8, u8)) -> io::Result<()> {
        let mut attr = path.attributes();
        attr.qp_state = state::IBV_QPS_RTR;
        attr.dest_qp_num = peer;
        attr.rq_psn = theirs;
        attr.max_dest_rd_atomic = answered;
        attr.min_rnr_timer = PATIENCE;
        let which = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, which, "a queue pair can't be connected")?;
        attr.qp_state = state::IBV_QPS_RTS;
        attr.timeout = attr.timeout.min(ANSWER);
        attr.sq_psn = ours;
        attr.max_rd_atomic = asked;
        let which = mask::IBV_QP_STATE
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, which, "a queue pair can't be connected to send")
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        match &self.id {
            // SAFETY: the queue pair is the identifier's, and is destroyed once.
            Some(id) => unsafe { raw::rdma_destroy_qp(id.as_ptr()) },
            // SAFETY: it came from `ibv_create_qp`, and is not used any more.
            None => must("ibv_destroy_qp", unsafe { raw::ibv_destroy_qp(self.raw.as_ptr()) }),
        }
    }
}
