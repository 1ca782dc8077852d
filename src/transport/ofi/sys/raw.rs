//! The C declarations of libfabric 2.0 (symbol version `FABRIC_1.8`) that are used here: structures, tables of functions, and
//! constants. Later versions of libfabric only append fields to structures that the library itself allocates.
//!
//! `ci/ofi` compares offsets, sizes and constants with the headers of the installed library: see `layout`.

use std::ffi::{c_char, c_int, c_void};

pub(super) type FiAddr = u64;

/// The interface that is asked for: 2.0.
pub(super) const API_VERSION: u32 = 2 << 16;

macro_rules! constants {
    ($($name:ident : $type:ty = $value:expr),* $(,)?) => {
        $(pub(super) const $name: $type = $value;)*
        /// Name and value of each.
        #[cfg(test)]
        const CONSTANTS: &[(&str, u64)] = &[$((stringify!($name), $name as u64)),*];
    };
}

constants! {
    FI_RMA: u64 = 1 << 2,
    FI_TAGGED: u64 = 1 << 3,
    FI_READ: u64 = 1 << 8,
    FI_WRITE: u64 = 1 << 9,
    FI_RECV: u64 = 1 << 10,
    FI_SEND: u64 = 1 << 11,
    FI_REMOTE_READ: u64 = 1 << 12,
    FI_REMOTE_WRITE: u64 = 1 << 13,
    FI_REMOTE_CQ_DATA: u64 = 1 << 17,
    FI_COMPLETION: u64 = 1 << 24,
    FI_DELIVERY_COMPLETE: u64 = 1 << 28,
    FI_NUMERICHOST: u64 = 1 << 55,
    FI_SOURCE: u64 = 1 << 57,
    FI_DIRECTED_RECV: u64 = 1 << 59,
    FI_CONTEXT: u64 = 1 << 59,
    FI_CONTEXT2: u64 = 1 << 52,
    FI_ORDER_SAS: u64 = 1 << 8,
    FI_EP_RDM: c_int = 3,
    FI_THREAD_SAFE: c_int = 1,
    FI_PROGRESS_MANUAL: c_int = 2,
    FI_RM_ENABLED: c_int = 2,
    FI_CQ_FORMAT_TAGGED: c_int = 4,
    FI_WAIT_NONE: c_int = 0,
    FI_WAIT_FD: c_int = 3,
    FI_GETWAIT: c_int = 5,
    FI_ENABLE: c_int = 6,
    FI_SOCKADDR: u32 = 1,
    FI_SOCKADDR_IN: u32 = 2,
    FI_SOCKADDR_IN6: u32 = 3,
    FI_MR_VIRT_ADDR: c_int = 1 << 4,
    FI_MR_ALLOCATED: c_int = 1 << 5,
    FI_MR_PROV_KEY: c_int = 1 << 6,
    FI_MR_ENDPOINT: c_int = 1 << 9,
    FI_EAVAIL: c_int = 259,
    FI_ETRUNC: c_int = 265,
    FI_ADDR_UNSPEC: u64 = u64::MAX,
}

/// Declares structures as C has them, and lists their fields for `layout`.
macro_rules! structures {
    ($(struct $rust:ident = $c:literal { $($field:ident : $type:ty),* $(,)? })*) => {
        $(
            #[repr(C)]
            pub(super) struct $rust { $(pub $field: $type),* }
        )*
        /// Structure, field, offset and size, for each field.
        #[cfg(test)]
        fn fields() -> Vec<(&'static str, &'static str, usize, usize)> {
            vec![$($((
                $c,
                stringify!($field),
                std::mem::offset_of!($rust, $field),
                size_of::<$type>(),
            )),*),*]
        }
    };
}

/// A function of a table that is not called.
type Unused = *const c_void;

structures! {
    struct FiInfo = "fi_info" {
        next: *mut FiInfo,
        caps: u64,
        mode: u64,
        addr_format: u32,
        src_addrlen: usize,
        dest_addrlen: usize,
        src_addr: *mut c_void,
        dest_addr: *mut c_void,
        handle: *mut c_void,
        tx_attr: *mut TxAttr,
        rx_attr: *mut RxAttr,
        ep_attr: *mut EpAttr,
        domain_attr: *mut DomainAttr,
        fabric_attr: *mut FabricAttr,
        nic: *mut c_void,
    }
    struct TxAttr = "fi_tx_attr" {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        inject_size: usize,
        size: usize,
        iov_limit: usize,
        rma_iov_limit: usize,
        tclass: u32,
    }
    struct RxAttr = "fi_rx_attr" {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        total_buffered_recv: usize,
        size: usize,
        iov_limit: usize,
    }
    struct EpAttr = "fi_ep_attr" {
        type_: c_int,
        protocol: u32,
        protocol_version: u32,
        max_msg_size: usize,
    }
    struct DomainAttr = "fi_domain_attr" {
        domain: *mut c_void,
        name: *mut c_char,
        threading: c_int,
        control_progress: c_int,
        data_progress: c_int,
        resource_mgmt: c_int,
        av_type: c_int,
        mr_mode: c_int,
        mr_key_size: usize,
        cq_data_size: usize,
    }
    struct FabricAttr = "fi_fabric_attr" {
        fabric: *mut c_void,
        name: *mut c_char,
        prov_name: *mut c_char,
        prov_version: u32,
        api_version: u32,
    }
    struct Fid = "fid" {
        fclass: usize,
        context: *mut c_void,
        ops: *const FidOps,
    }
    struct FidOps = "fi_ops" {
        size: usize,
        close: unsafe extern "C" fn(*mut Fid) -> c_int,
        bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
        control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
    }
    struct FidFabric = "fid_fabric" {
        fid: Fid,
        ops: *const FabricOps,
    }
    struct FabricOps = "fi_ops_fabric" {
        size: usize,
        domain: unsafe extern "C" fn(*mut FidFabric, *mut FiInfo, *mut *mut FidDomain, *mut c_void) -> c_int,
        passive_ep: Unused,
        eq_open: Unused,
        wait_open: Unused,
        trywait: unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, c_int) -> c_int,
    }
    struct FidDomain = "fid_domain" {
        fid: Fid,
        ops: *const DomainOps,
        mr: *const MrOps,
    }
    struct DomainOps = "fi_ops_domain" {
        size: usize,
        av_open: unsafe extern "C" fn(*mut FidDomain, *mut AvAttr, *mut *mut FidAv, *mut c_void) -> c_int,
        cq_open: unsafe extern "C" fn(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, *mut c_void) -> c_int,
        endpoint: unsafe extern "C" fn(*mut FidDomain, *mut FiInfo, *mut *mut FidEp, *mut c_void) -> c_int,
    }
    struct MrOps = "fi_ops_mr" {
        size: usize,
        reg: unsafe extern "C" fn(
            *mut Fid, *const c_void, usize, u64, u64, u64, u64, *mut *mut FidMr, *mut c_void,
        ) -> c_int,
    }
    struct FidMr = "fid_mr" {
        fid: Fid,
        mem_desc: *mut c_void,
        key: u64,
    }
    struct AvAttr = "fi_av_attr" {
        type_: c_int,
        rx_ctx_bits: c_int,
        count: usize,
        ep_per_node: usize,
        name: *const c_char,
        map_addr: *mut c_void,
        flags: u64,
    }
    struct FidAv = "fid_av" {
        fid: Fid,
        ops: *const AvOps,
    }
    struct AvOps = "fi_ops_av" {
        size: usize,
        insert: unsafe extern "C" fn(*mut FidAv, *const c_void, usize, *mut FiAddr, u64, *mut c_void) -> c_int,
        insertsvc: Unused,
        insertsym: Unused,
        remove: unsafe extern "C" fn(*mut FidAv, *mut FiAddr, usize, u64) -> c_int,
    }
    struct CqAttr = "fi_cq_attr" {
        size: usize,
        flags: u64,
        format: c_int,
        wait_obj: c_int,
        signaling_vector: c_int,
        wait_cond: c_int,
        wait_set: *mut c_void,
    }
    struct FidCq = "fid_cq" {
        fid: Fid,
        ops: *const CqOps,
    }
    struct CqOps = "fi_ops_cq" {
        size: usize,
        read: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize) -> isize,
        readfrom: Unused,
        readerr: unsafe extern "C" fn(*mut FidCq, *mut CqErrEntry, u64) -> isize,
    }
    struct CqEntry = "fi_cq_tagged_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
    }
    struct CqErrEntry = "fi_cq_err_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
        olen: usize,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
        src_addr: FiAddr,
    }
    struct FidEp = "fid_ep" {
        fid: Fid,
        ops: *const EpOps,
        cm: *const CmOps,
        msg: Unused,
        rma: *const RmaOps,
        tagged: *const TaggedOps,
    }
    struct EpOps = "fi_ops_ep" {
        size: usize,
        cancel: unsafe extern "C" fn(*mut Fid, *mut c_void) -> isize,
    }
    struct CmOps = "fi_ops_cm" {
        size: usize,
        setname: Unused,
        getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
    }
    struct RmaOps = "fi_ops_rma" {
        size: usize,
        read: unsafe extern "C" fn(*mut FidEp, *mut c_void, usize, *mut c_void, FiAddr, u64, u64, *mut c_void) -> isize,
        readv: unsafe extern "C" fn(
            *mut FidEp, *const libc::iovec, *mut *mut c_void, usize, FiAddr, u64, u64, *mut c_void,
        ) -> isize,
        readmsg: Unused,
        write: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, FiAddr, u64, u64, *mut c_void) -> isize,
        writev: unsafe extern "C" fn(
            *mut FidEp, *const libc::iovec, *mut *mut c_void, usize, FiAddr, u64, u64, *mut c_void,
        ) -> isize,
    }
    struct TaggedMessage = "fi_msg_tagged" {
        msg_iov: *const libc::iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: FiAddr,
        tag: u64,
        ignore: u64,
        context: *mut c_void,
        data: u64,
    }
    struct TaggedOps = "fi_ops_tagged" {
        size: usize,
        recv: unsafe extern "C" fn(*mut FidEp, *mut c_void, usize, *mut c_void, FiAddr, u64, u64, *mut c_void) -> isize,
        recvv: unsafe extern "C" fn(
            *mut FidEp, *const libc::iovec, *mut *mut c_void, usize, FiAddr, u64, u64, *mut c_void,
        ) -> isize,
        recvmsg: Unused,
        send: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, FiAddr, u64, *mut c_void) -> isize,
        sendv: Unused,
        sendmsg: unsafe extern "C" fn(*mut FidEp, *const TaggedMessage, u64) -> isize,
        inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, FiAddr, u64) -> isize,
    }
}

/// For each object, a function that returns one of its tables of functions.
macro_rules! tables {
    ($($object:ident . $field:ident : $table:ident),* $(,)?) => {
        $(impl $object {
            /// A table of functions, which is a constant of the provider.
            ///
            /// # Safety
            /// The object must be open.
            pub(super) unsafe fn $field(object: *mut $object) -> &'static $table {
                // SAFETY: the caller promises that the object is there.
                let table = unsafe { (*object).$field };
                // SAFETY: an open object has this table, which is never freed.
                unsafe { &*table }
            }
        })*
    };
}

tables! {
    Fid.ops: FidOps,
    FidFabric.ops: FabricOps,
    FidDomain.ops: DomainOps,
    FidDomain.mr: MrOps,
    FidAv.ops: AvOps,
    FidCq.ops: CqOps,
    FidEp.cm: CmOps,
    FidEp.rma: RmaOps,
    FidEp.tagged: TaggedOps,
}

/// Memory that a provider uses while an operation is in progress: `struct fi_context2`.
#[repr(C)]
#[derive(Default)]
pub(super) struct ProviderContext([usize; 8]);

/// Not a check by itself: prints what `ci/ofi` compares with the headers of libfabric.
#[test]
#[ignore = "prints the layout for ci/ofi"]
fn layout() {
    println!("size fi_context2 {}", size_of::<ProviderContext>());
    for (structure, field, offset, size) in fields() {
        println!("field {structure} {} {offset} {size}", field.trim_end_matches('_'));
    }
    for (name, value) in CONSTANTS {
        println!("constant {name} {value}");
    }
}
