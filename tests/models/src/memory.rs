//! Calomel's own regions, and shared blocks, of which there are none.

#[path = "../../../src/memory/copying.rs"]
mod copying;
#[path = "../../../src/memory/loan.rs"]
mod loan;
#[path = "../../../src/memory/region.rs"]
mod region;

mod message {
    use std::ops::Deref;

    pub(super) enum MessageBuffer {
        Heap(Vec<u8>),
    }

    impl MessageBuffer {
        pub(super) fn address(&mut self) -> *mut u8 {
            let MessageBuffer::Heap(bytes) = self;
            bytes.as_mut_ptr()
        }

        pub(super) fn len(&self) -> usize {
            let MessageBuffer::Heap(bytes) = self;
            bytes.len()
        }
    }

    pub(crate) struct ReceivedMessage {
        pub(super) buffer: Option<MessageBuffer>,
        pub(super) begin: usize,
    }

    impl ReceivedMessage {
        pub(super) unsafe fn complete(&mut self) {}
    }

    impl Deref for ReceivedMessage {
        type Target = [u8];
        fn deref(&self) -> &[u8] {
            match &self.buffer {
                Some(MessageBuffer::Heap(bytes)) => &bytes[self.begin..],
                None => &[],
            }
        }
    }

    pub(super) const BEGIN: usize = 0;

    pub(super) fn buffer(len: usize) -> MessageBuffer {
        MessageBuffer::Heap(vec![0; len])
    }

    pub(super) fn list_buffer(_: usize, _: usize, _: usize) -> (MessageBuffer, [*mut u8; 2]) {
        unreachable!("no model has a list")
    }

    pub(super) fn keep(_: MessageBuffer) {}
}

pub(crate) use copying::CopyPath;
pub(crate) use loan::Loan;
pub(crate) use region::{CopyOutcome, Operation, ReadAccess, Region, Slice, WriteAccess, copy};

pub(crate) mod shared {
    use std::io;
    use std::os::fd::BorrowedFd;

    pub(crate) struct Mapping;

    pub(crate) struct Block {
        pub mapping: Mapping,
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
        pub(crate) fn give(&self) -> BorrowedFd<'_> {
            unreachable!("there are none")
        }
    }
}
