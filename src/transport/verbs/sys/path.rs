//! How a queue pair reaches its peer.

use std::mem::MaybeUninit;

use rdma_sys as raw;

/// How to reach the peer, as the connection manager knows it.
#[derive(Clone, Copy)]
pub(in super::super) struct ConnectionPath {
    way: raw::ibv_ah_attr,
    mtu: raw::ibv_mtu::Type,
    pkey_index: u16,
    port: u8,
    timeout: u8,
    retries: u8,
    patience: u8,
}

/// Attributes of a queue pair, none of which is set.
pub(super) fn no_attributes() -> raw::ibv_qp_attr {
    // SAFETY: it is made of numbers, which zeros are.
    unsafe { MaybeUninit::<raw::ibv_qp_attr>::zeroed().assume_init() }
}

impl ConnectionPath {
    pub(super) fn new(ready_to_receive: &raw::ibv_qp_attr, ready_to_send: &raw::ibv_qp_attr) -> ConnectionPath {
        ConnectionPath {
            way: ready_to_receive.ah_attr,
            mtu: ready_to_receive.path_mtu,
            pkey_index: ready_to_receive.pkey_index,
            port: ready_to_receive.ah_attr.port_num,
            timeout: ready_to_send.timeout,
            retries: ready_to_send.retry_cnt,
            patience: ready_to_send.rnr_retry,
        }
    }

    pub(super) fn attributes(&self) -> raw::ibv_qp_attr {
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
