//! Calomel's own regions, and shared blocks, of which there are none.

#[path = "../../../src/memory/region.rs"]
mod region;

mod message {
    use std::ops::Deref;

    pub(crate) struct Message(pub Vec<u8>);

    impl Deref for Message {
        type Target = [u8];
        fn deref(&self) -> &[u8] {
            &self.0
        }
    }

    pub(super) fn buffer(len: usize) -> Vec<u8> {
        vec![0; len]
    }

    pub(super) fn keep(_: Vec<u8>) {}
}

pub(crate) use region::{Copied, Loan, Operation, ReadAccess, Region, Slice, WriteAccess, copy};

pub(crate) mod shared {
    use std::io;
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::sync::Arc;

    pub(crate) struct Mapping;

    pub(crate) struct Block {
        pub mapping: Mapping,
        pub fd: OwnedFd,
        pub id: u64,
    }

    impl Mapping {
        pub(crate) fn address(&self) -> *mut u8 {
            std::ptr::null_mut()
        }

        pub(crate) fn len(&self) -> usize {
            0
        }
    }

    pub(crate) fn attach(_: BorrowedFd<'_>, _: usize) -> io::Result<Mapping> {
        Ok(Mapping)
    }

    impl Block {
        pub(crate) fn find(_: *const u8) -> Option<(Arc<Block>, usize)> {
            None
        }
    }
}
