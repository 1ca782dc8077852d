//! Queue pairs, and the work requests that are posted to them.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys as raw;
use rdma_sys::{ibv_access_flags as flags, ibv_qp_attr_mask as mask, ibv_qp_state as state, ibv_send_flags, ibv_wr_opcode};
use smallvec::SmallVec;

use super::cm::CmId;
use super::cq::Cq;
use super::mr::{AccessFlags, Mr, Mw, Sge};
use super::path::{ConnectionPath, no_attributes};
use super::pd::Pd;
use super::srq::Srq;
use super::{failed, is_forked, must, verbs};
use crate::deferred_log::defer;

/// Capacity of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct QpCapacity {
    /// Outstanding requests.
    pub requests: u32,
    /// Scatter/gather entries of one request.
    pub max_sge: u32,
    /// Bytes that are copied when a request is posted. A device that supports fewer is asked for none.
    pub inline: u32,
}

/// What a work request does.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Opcode {
    /// Sends a message.
    Send,
    /// Reads the peer's memory.
    Read { address: u64, key: u32 },
    /// Writes the peer's memory.
    Write { address: u64, key: u32 },
}

pub(in super::super) struct WorkRequest<'a> {
    pub id: u64,
    pub opcode: Opcode,
    pub sges: &'a [Sge],
    /// Its completion is reported, which covers all earlier requests.
    pub signalled: bool,
}

/// Receiver-not-ready timer: 0.64 ms, in the standard's encoding.
const PATIENCE: u8 = 12;

/// Retransmission timeout: 0.27 s, in the standard's encoding, eight times in all. The connection manager's own is up to eight
/// times as long. The refusal of a read can get lost when memory is deregistered in the middle of the answer (seen with
/// soft-RoCE): the reader then learns of it by this timeout.
const ANSWER: u8 = 16;

/// A reliable, connected queue pair.
pub(in super::super) struct Qp {
    raw: NonNull<raw::ibv_qp>,
    pub number: u32,
    /// Most bytes that are copied when a request is posted.
    inline: u32,
    /// Of a queue pair that the connection manager made.
    id: Option<Arc<CmId>>,
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
    pub fn managed(id: &Arc<CmId>, pd: &Arc<Pd>, cq: &Arc<Cq>, srq: &Arc<Srq>, capacity: QpCapacity) -> io::Result<Qp> {
        Qp::make(cq, Some(srq), capacity, pd, Some(id), &mut |wanted| {
            // SAFETY: the identifier, the domain and the queues are there.
            let made = unsafe { raw::rdma_create_qp(id.as_ptr(), pd.as_ptr(), wanted) };
            // SAFETY: the identifier is there.
            if made == 0 { unsafe { (*id.as_ptr()).qp } } else { null_mut() }
        })
    }

    /// One that [`Qp::connect`] connects, and that receives no messages.
    pub fn bare(pd: &Arc<Pd>, cq: &Arc<Cq>, capacity: QpCapacity) -> io::Result<Qp> {
        Qp::make(cq, None, capacity, pd, None, &mut |wanted| {
            // SAFETY: the domain and the queues are there.
            unsafe { raw::ibv_create_qp(pd.as_ptr(), wanted) }
        })
    }

    fn make(
        cq: &Arc<Cq>,
        srq: Option<&Arc<Srq>>,
        capacity: QpCapacity,
        pd: &Arc<Pd>,
        id: Option<&Arc<CmId>>,
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
                    max_send_sge: capacity.max_sge,
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

    /// Posts all requests, in order. After an error some of them may have been posted.
    ///
    /// # Safety
    /// Until the completion of a request, or of a later one, has been polled, or this queue pair is dropped, its memory must be
    /// registered, for local writes where it is read into. Memory that is sent must not be written meanwhile; memory that is
    /// read into must not be accessed, unless its user has set it aside for that.
    pub unsafe fn post(&self, work: &[WorkRequest<'_>]) -> io::Result<()> {
        let mut requests: SmallVec<[raw::ibv_send_wr; 8]> = SmallVec::new();
        for work in work {
            // SAFETY: it is made of numbers, and of pointers that may be null.
            let mut request = unsafe { MaybeUninit::<raw::ibv_send_wr>::zeroed().assume_init() };
            request.wr_id = work.id;
            request.sg_list = work.sges.as_ptr().cast_mut().cast();
            request.num_sge = work.sges.len() as i32;
            let mut wanted = if work.signalled { ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
            request.opcode = match work.opcode {
                Opcode::Send => {
                    let len: u32 = work.sges.iter().map(|sge| sge.0.length).sum();
                    wanted |= if len <= self.inline { ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 };
                    ibv_wr_opcode::IBV_WR_SEND
                }
                Opcode::Read { address, key } => {
                    request.wr.rdma = raw::rdma_t { remote_addr: address, rkey: key };
                    ibv_wr_opcode::IBV_WR_RDMA_READ
                }
                Opcode::Write { address, key } => {
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
        // SAFETY: the queue pair is there; the list is on this stack, and what it points to outlives the call; the caller
        // promises the rest about the memory.
        verbs("ibv_post_send", unsafe { raw::ibv_post_send(self.raw.as_ptr(), requests.as_mut_ptr(), &raw mut bad) })
    }

    /// Binds windows to memory for the peer, which can use their keys when that has completed; each completes by itself.
    ///
    /// # Safety
    /// The windows must be dropped before the memory is, and while either is there the peer may read and write the memory as
    /// `access` permits.
    pub unsafe fn open(&self, id: u64, windows: &[(&Mw, &Mr, u64, u64)], access: AccessFlags) -> io::Result<()> {
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

    /// Shortens the timer after which the peer retries when there was no receive buffer. Best effort: credits keep that from
    /// happening.
    pub fn set_patience(&self) {
        let mut attr = no_attributes();
        attr.qp_state = state::IBV_QPS_RTS;
        attr.min_rnr_timer = PATIENCE;
        if let Err(error) = self.modify(&mut attr, mask::IBV_QP_STATE | mask::IBV_QP_MIN_RNR_TIMER, "set the RNR timer") {
            defer(move || tracing::debug!(target: "calomel::verbs", %error, "an attribute of a queue pair stays as it is"));
        }
    }

    fn modify(&self, attr: &mut raw::ibv_qp_attr, which: mask, what: &str) -> io::Result<()> {
        // SAFETY: the queue pair is there.
        verbs(what, unsafe { raw::ibv_modify_qp(self.raw.as_ptr(), attr, which.0.cast_signed()) })
    }

    /// Moves it to the state INIT. With `open` the peer may do one-sided reads and writes.
    pub fn prepare(&self, path: &ConnectionPath, open: bool) -> io::Result<()> {
        let mut attr = path.attributes();
        attr.qp_state = state::IBV_QPS_INIT;
        let allowed = flags::IBV_ACCESS_REMOTE_READ | flags::IBV_ACCESS_REMOTE_WRITE;
        attr.qp_access_flags = if open { allowed.0 } else { 0 };
        let which = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, which, "a queue pair can't be prepared")
    }

    /// Connects it to the peer's queue pair. `ours` and `theirs` are the first packet sequence numbers; `asked` is the number
    /// of outstanding reads, and `answered` that of the peer's.
    pub fn connect(
        &self,
        path: &ConnectionPath,
        peer: u32,
        (ours, theirs): (u32, u32),
        (asked, answered): (u8, u8),
    ) -> io::Result<()> {
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
