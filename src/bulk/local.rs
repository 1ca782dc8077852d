//! The local side of transfers: exposed buffers, slices of them, and plain slices.

use crate::memory::{Element, ReadElement};

use super::exposed::{Exposed, ExposedSlice};
use super::remote::RemoteBulk;
use crate::Result;
use crate::memory::{BorrowedRegion, Buffer, Slice, Writable, WritableBuffer};

/// What [`RemoteBulk::pull_into`](crate::RemoteBulk::pull_into) can fill: `&Exposed`, `&ExposedSlice`, `&mut [T]`,
/// `&mut Vec<T>`, `&mut [T; N]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be pulled into",
    note = "give a reference to an `Exposed` that was made by `engine.expose`, an `ExposedSlice` of one, or a `&mut [T]` with `T: bytemuck::Pod`"
)]
pub trait PullTarget: sealed::PullTarget {}

/// What [`RemoteBulk::push_from`](crate::RemoteBulk::push_from) can send: `&Exposed`, `&ExposedSlice`, `&[T]`, `&Vec<T>`,
/// `&[T; N]`, `&str`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be pushed from",
    note = "give a reference to an `Exposed`, an `ExposedSlice`, or a `&[T]` with `T: bytemuck::NoUninit`"
)]
pub trait PushSource: sealed::PushSource {}

pub(super) mod sealed {
    use crate::memory::Slice;
    use crate::{RemoteBulk, Result};

    pub trait PullTarget {
        /// Runs `transfer` with the memory, which is reached through its region only meanwhile. Fails when the memory is
        /// exposed by another engine than the one that transfers.
        #[doc(hidden)]
        fn with(self, remote: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize>;
    }

    pub trait PushSource {
        #[doc(hidden)]
        fn with(self, remote: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize>;
    }
}

macro_rules! local {
    ($trait:ident: $([$($generics:tt)*] $kind:ty, |$this:ident| $slice:expr;)*) => {$(
        impl<$($generics)*> $trait for $kind {}
        impl<$($generics)*> sealed::$trait for $kind {
            fn with(self, remote: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize> {
                let $this = self;
                remote.check_local($this.shared())?;
                transfer(&$slice)
            }
        }
    )*};
}

// The `BorrowedRegion` stays on the stack of `with` until the transfer is over: dropping it closes the region, on a panic too.
macro_rules! borrowed {
    ($trait:ident: $([$($generics:tt)*] $kind:ty, |$this:ident| $borrowed:expr;)*) => {$(
        impl<$($generics)*> $trait for $kind {}
        impl<$($generics)*> sealed::$trait for $kind {
            fn with(self, _: &RemoteBulk, transfer: impl FnOnce(&Slice) -> Result<usize>) -> Result<usize> {
                let $this = self;
                let borrowed: BorrowedRegion<'_> = $borrowed;
                transfer(&Slice::whole(borrowed.region()))
            }
        }
    )*};
}

local! { PullTarget:
    [B: WritableBuffer] &Exposed<B, Writable>, |this| this.whole();
    [] &ExposedSlice<Writable>, |this| this.slice;
    [] ExposedSlice<Writable>, |this| this.slice;
}

borrowed! { PullTarget:
    [T: Element] &mut [T], |this| BorrowedRegion::writable(bytemuck::cast_slice_mut(this));
    [T: Element] &mut Vec<T>, |this| BorrowedRegion::writable(bytemuck::cast_slice_mut(this));
    [T: Element, const N: usize] &mut [T; N], |this| BorrowedRegion::writable(bytemuck::cast_slice_mut(this));
}

local! { PushSource:
    [B: Buffer, A] &Exposed<B, A>, |this| this.whole();
    [A] &ExposedSlice<A>, |this| this.slice;
    [A] ExposedSlice<A>, |this| this.slice;
}

borrowed! { PushSource:
    [T: ReadElement] &[T], |this| BorrowedRegion::read_only(bytemuck::cast_slice(this));
    [T: ReadElement] &Vec<T>, |this| BorrowedRegion::read_only(bytemuck::cast_slice(this));
    [T: ReadElement, const N: usize] &[T; N], |this| BorrowedRegion::read_only(bytemuck::cast_slice(this));
    [] &str, |this| BorrowedRegion::read_only(this.as_bytes());
    [] &String, |this| BorrowedRegion::read_only(this.as_bytes());
}
