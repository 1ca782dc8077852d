//! A peer that is no engine: it speaks to the connection manager and the device by itself, and says whatever a test wants.

use std::mem::MaybeUninit;
use std::net::SocketAddrV4;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use rdma_sys as raw;

use crate::support::*;

/// Messages under way, of each direction.
const ROOM: usize = 64;
/// Room for each.
const SLOT: usize = 8192;
/// What verbs promise of memory that peers may write.
const LOCAL_WRITE: i32 = 1;

/// What an engine says of itself when it connects: see `transport::verbs::wire`.
pub fn hello(versions: (u16, u16)) -> Vec<u8> {
    let mut out = b"calverbs".to_vec();
    out.extend(versions.0.to_le_bytes());
    out.extend(versions.1.to_le_bytes());
    out.extend(4096u32.to_le_bytes());
    out.extend(16u16.to_le_bytes());
    out.extend([16, 0]);
    out.extend(0x1234_5678_9abc_u64.to_le_bytes());
    out.extend(0xfeed_0000_u64.to_le_bytes());
    out
}

/// The versions in what an engine has said of itself.
pub fn versions(said: &[u8]) -> (u16, u16) {
    assert!(said.starts_with(b"calverbs"), "{said:?}");
    (u16::from_le_bytes([said[8], said[9]]), u16::from_le_bytes([said[10], said[11]]))
}

fn parameters(data: &[u8]) -> raw::rdma_conn_param {
    raw::rdma_conn_param {
        private_data: data.as_ptr().cast(),
        private_data_len: data.len() as u8,
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    }
}

#[track_caller]
fn ok(returned: i32) {
    assert_eq!(returned, 0, "{}", std::io::Error::last_os_error());
}

fn socket(address: &str) -> libc::sockaddr_in {
    let address: SocketAddrV4 = address.strip_prefix("verbs://").unwrap().parse().unwrap();
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    }
}

fn identifier() -> *mut raw::rdma_cm_id {
    let mut id = null_mut();
    // SAFETY: without a channel its functions wait; the pointer is to a pointer.
    ok(unsafe { raw::rdma_create_id(null_mut(), &mut id, null_mut(), raw::rdma_port_space::RDMA_PS_TCP) });
    id
}

/// What the other side has said, with the event that an identifier has last had.
///
/// # Safety
/// The identifier must be there.
unsafe fn said(id: *mut raw::rdma_cm_id) -> Vec<u8> {
    // SAFETY: as the caller promises.
    let event = unsafe { (*id).event };
    if event.is_null() {
        return Vec::new();
    }
    // SAFETY: it is kept until the next one comes.
    let event = unsafe { &*event };
    // SAFETY: the connection is a reliable one, whose events have this parameter.
    let parameter = unsafe { event.param.conn };
    if parameter.private_data.is_null() {
        return Vec::new();
    }
    // SAFETY: the data lives as long as the event, and has this length.
    unsafe { std::slice::from_raw_parts(parameter.private_data.cast::<u8>(), parameter.private_data_len.into()) }.to_vec()
}

/// One end of a connection.
pub struct Raw {
    id: *mut raw::rdma_cm_id,
    memory: Box<[u8]>,
    region: *mut raw::ibv_mr,
    sent: usize,
    /// What the other side has said of itself.
    pub met: Vec<u8>,
}

// SAFETY: the functions of verbs may be called by any thread, and this one is used by one at a time.
unsafe impl Send for Raw {}

impl Raw {
    fn new(id: *mut raw::rdma_cm_id) -> Raw {
        // SAFETY: it is made of numbers and of pointers that may be null.
        let mut wanted = unsafe { MaybeUninit::<raw::ibv_qp_init_attr>::zeroed().assume_init() };
        wanted.cap.max_send_wr = ROOM as u32;
        wanted.cap.max_recv_wr = ROOM as u32;
        wanted.cap.max_send_sge = 1;
        wanted.cap.max_recv_sge = 1;
        wanted.qp_type = raw::ibv_qp_type::IBV_QPT_RC;
        // SAFETY: the identifier has a device; what is not given is made.
        ok(unsafe { raw::rdma_create_qp(id, null_mut(), &mut wanted) });
        let mut memory = vec![0u8; 2 * ROOM * SLOT].into_boxed_slice();
        // SAFETY: the identifier is there.
        let domain = unsafe { (*id).pd };
        // SAFETY: the memory is forgotten before it is freed: see `drop`.
        let region = unsafe { raw::ibv_reg_mr(domain, memory.as_mut_ptr().cast(), memory.len(), LOCAL_WRITE) };
        assert!(!region.is_null(), "{}", std::io::Error::last_os_error());
        let raw = Raw { id, memory, region, sent: 0, met: Vec::new() };
        (0..ROOM).for_each(|slot| raw.receive_into(slot));
        raw
    }

    /// Connects to an engine; or what that has said when it refused.
    pub fn dial(address: &str, hello: &[u8]) -> Result<Raw, Vec<u8>> {
        let id = identifier();
        let mut to = socket(address);
        // SAFETY: the identifier is there, and the address is one.
        ok(unsafe { raw::rdma_resolve_addr(id, null_mut(), (&raw mut to).cast(), 2000) });
        // SAFETY: the identifier is there.
        ok(unsafe { raw::rdma_resolve_route(id, 2000) });
        let mut raw = Raw::new(id);
        let mut parameters = parameters(hello);
        // SAFETY: the identifier is there, and the parameters and their data outlive the call.
        let connected = unsafe { raw::rdma_connect(id, &mut parameters) };
        // SAFETY: the identifier is there.
        raw.met = unsafe { said(id) };
        if connected == 0 { Ok(raw) } else { Err(raw.met.clone()) }
    }

    fn piece(&self, slot: usize, len: usize) -> raw::ibv_sge {
        // SAFETY: the region was made in `new`.
        let lkey = unsafe { (*self.region).lkey };
        raw::ibv_sge { addr: self.memory.as_ptr().addr() as u64 + (slot * SLOT) as u64, length: len as u32, lkey }
    }

    fn receive_into(&self, slot: usize) {
        let mut piece = self.piece(slot, SLOT);
        let mut wanted = raw::ibv_recv_wr { wr_id: slot as u64, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut bad = null_mut();
        // SAFETY: the identifier is there.
        let pair = unsafe { (*self.id).qp };
        // SAFETY: the queue pair is there, and the slot is its own until something has come.
        unsafe { raw::ibv_post_recv(pair, &mut wanted, &mut bad) };
    }

    /// Asks for a message to be sent, whatever it is; false when nothing can be sent any more.
    pub fn post(&mut self, message: &[u8]) -> bool {
        let slot = ROOM + self.sent % ROOM;
        self.sent += 1;
        self.memory[slot * SLOT..][..message.len()].copy_from_slice(message);
        let mut piece = self.piece(slot, message.len());
        // SAFETY: it is made of numbers and of pointers that may be null.
        let mut wanted = unsafe { MaybeUninit::<raw::ibv_send_wr>::zeroed().assume_init() };
        wanted.sg_list = &mut piece;
        wanted.num_sge = 1;
        wanted.opcode = raw::ibv_wr_opcode::IBV_WR_SEND;
        wanted.send_flags = raw::ibv_send_flags::IBV_SEND_SIGNALED.0;
        let mut bad = null_mut();
        // SAFETY: the identifier is there.
        let pair = unsafe { (*self.id).qp };
        // SAFETY: the queue pair is there, and its slot is not written again before so many others have been.
        unsafe { raw::ibv_post_send(pair, &mut wanted, &mut bad) == 0 }
    }

    fn poll(queue: *mut raw::ibv_cq) -> Option<raw::ibv_wc> {
        let mut found = MaybeUninit::<raw::ibv_wc>::uninit();
        // SAFETY: the queue is there, and there is room for one.
        let count = unsafe { raw::ibv_poll_cq(queue, 1, found.as_mut_ptr()) };
        // SAFETY: one was written.
        (count == 1).then(|| unsafe { found.assume_init() })
    }

    /// True when all that was posted, `count` of it, has arrived. What is not received is retried for a long time.
    pub fn arrived(&self, count: usize) -> bool {
        // SAFETY: the identifier is there.
        let queue = unsafe { (*self.id).send_cq };
        for _ in 0..count {
            let begin = Instant::now();
            let end = loop {
                match Raw::poll(queue) {
                    None if begin.elapsed() < BOUND / 5 => std::thread::sleep(Duration::from_micros(200)),
                    end => break end,
                }
            };
            if end.is_none_or(|end| end.status != 0) {
                return false;
            }
        }
        true
    }

    pub fn send(&mut self, message: &[u8]) -> bool {
        self.post(message) && self.arrived(1)
    }

    /// The next message; `None` when the connection is over, or nothing comes.
    pub fn next(&mut self, time: Duration) -> Option<Vec<u8>> {
        // SAFETY: the identifier is there.
        let queue = unsafe { (*self.id).recv_cq };
        let begin = Instant::now();
        while begin.elapsed() < time {
            let Some(end) = Raw::poll(queue) else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            if end.status != 0 {
                return None;
            }
            let slot = end.wr_id as usize;
            let message = self.memory[slot * SLOT..][..end.byte_len as usize].to_vec();
            self.receive_into(slot);
            return Some(message);
        }
        None
    }

    /// True when the other side ends the connection, in time: it says farewell, or hangs up.
    pub fn is_hung_up_on(&mut self) -> bool {
        const BYE: u8 = 8;
        let begin = Instant::now();
        while begin.elapsed() < BOUND / 2 {
            match self.next(Duration::from_millis(100)) {
                Some(message) if message.first() == Some(&BYE) => return true,
                Some(_) => {}
                // Of a queue pair that is in order everything arrives.
                None if !self.send(&message(0, &[])) => return true,
                None => {}
            }
        }
        false
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Not disconnected first, which would wait for an event that may not come: its end tells the other side.
        // SAFETY: the queue pair is the identifier's, and is destroyed once.
        unsafe { raw::rdma_destroy_qp(self.id) };
        // SAFETY: nothing uses the region any more.
        unsafe { raw::ibv_dereg_mr(self.region) };
        // SAFETY: nothing uses the identifier any more.
        unsafe { raw::rdma_destroy_id(self.id) };
    }
}

/// A message as engines send them: what it is, nothing to report, and the rest.
pub fn message(tag: u8, rest: &[u8]) -> Vec<u8> {
    [&[tag, 0, 0, 0, 0, 0, 0, 0], rest].concat()
}

/// A listener that is no engine.
pub struct Listener {
    id: *mut raw::rdma_cm_id,
    pub address: String,
}

// SAFETY: the functions of the connection manager may be called by any thread.
unsafe impl Send for Listener {}

impl Listener {
    pub fn new() -> Listener {
        let id = identifier();
        let mut at = socket(&anywhere());
        // SAFETY: the identifier is there, and the address is one.
        ok(unsafe { raw::rdma_bind_addr(id, (&raw mut at).cast()) });
        // SAFETY: the identifier is there.
        ok(unsafe { raw::rdma_listen(id, 8) });
        // SAFETY: the identifier is there.
        let port = u16::from_be(unsafe { raw::rdma_get_src_port(id) });
        let address = verbs_address(port);
        Listener { id, address }
    }

    fn request(&self) -> *mut raw::rdma_cm_id {
        let mut id = null_mut();
        // SAFETY: the listener is there, and the pointer is to a pointer.
        ok(unsafe { raw::rdma_get_request(self.id, &mut id) });
        id
    }

    /// Waits for a connection request, and rejects it; returns its private data.
    pub fn refuse(&self, data: &[u8]) -> Vec<u8> {
        let id = self.request();
        // SAFETY: the identifier is there.
        let met = unsafe { said(id) };
        // SAFETY: the identifier is there, and the data outlives the call.
        ok(unsafe { raw::rdma_reject(id, data.as_ptr().cast(), data.len() as u8) });
        // SAFETY: nothing uses the identifier any more.
        unsafe { raw::rdma_destroy_id(id) };
        met
    }

    /// Waits for a connection request, and accepts it.
    pub fn accept(&self, hello: &[u8]) -> Raw {
        let id = self.request();
        // SAFETY: the identifier is there.
        let met = unsafe { said(id) };
        let mut raw = Raw::new(id);
        raw.met = met;
        let mut parameters = parameters(hello);
        // SAFETY: the identifier is there, and the parameters and their data outlive the call.
        ok(unsafe { raw::rdma_accept(id, &mut parameters) });
        raw
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // SAFETY: nothing uses the identifier any more.
        unsafe { raw::rdma_destroy_id(self.id) };
    }
}
