//! Transfers that block, as methods and as operators, and their local side: exposed buffers, slices of them, and plain slices.

use std::ops::{Shl, Shr};

use super::exposed::{Exposed, ExposedSlice};
use super::remote::RemoteBulk;
use crate::Result;
use crate::memory::{BorrowedRegion, Buffer, Element, ReadElement, Slice, Writable, WritableBuffer};

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
    use super::RemoteBulk;
    use crate::Result;
    use crate::memory::Slice;

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
    [T: Element] &mut [T], |this| BorrowedRegion::writable([bytemuck::cast_slice_mut(this)]);
    [T: Element] &mut Vec<T>, |this| BorrowedRegion::writable([bytemuck::cast_slice_mut(this)]);
    [T: Element, const N: usize] &mut [T; N], |this| BorrowedRegion::writable([bytemuck::cast_slice_mut(this)]);
}

local! { PushSource:
    [B: Buffer, A] &Exposed<B, A>, |this| this.whole();
    [A] &ExposedSlice<A>, |this| this.slice;
    [A] ExposedSlice<A>, |this| this.slice;
}

borrowed! { PushSource:
    [T: ReadElement] &[T], |this| BorrowedRegion::read_only([bytemuck::cast_slice(this)]);
    [T: ReadElement] &Vec<T>, |this| BorrowedRegion::read_only([bytemuck::cast_slice(this)]);
    [T: ReadElement, const N: usize] &[T; N], |this| BorrowedRegion::read_only([bytemuck::cast_slice(this)]);
    [] &str, |this| BorrowedRegion::read_only([this.as_bytes()]);
    [] &String, |this| BorrowedRegion::read_only([this.as_bytes()]);
}

impl RemoteBulk {
    /// Copies from the peer's memory into local memory, and blocks until that is done. Returns the number of bytes.
    ///
    /// On an error, any part of the target may have been written. Once this returns, the transfer does not write the target any
    /// more.
    ///
    /// # Errors
    /// [`Timeout`](crate::Error::Timeout), [`Unreachable`](crate::Error::Unreachable),
    /// [`Disconnected`](crate::Error::Disconnected), [`PeerRestarted`](crate::Error::PeerRestarted),
    /// [`AccessDenied`](crate::Error::AccessDenied), [`Revoked`](crate::Error::Revoked),
    /// [`OutOfRange`](crate::Error::OutOfRange), [`Finalized`](crate::Error::Finalized);
    /// [`OtherEngine`](crate::Error::OtherEngine) when the endpoint is not the owner's, or the target is exposed by another
    /// engine.
    pub fn pull_into(&self, target: impl PullTarget) -> Result<usize> {
        target.with(self, |slice| self.run(true, slice))
    }

    /// Copies from local memory into the peer's, and blocks until that is done. Returns the number of bytes.
    ///
    /// On an error, any part of the peer's memory may have been written, and some of it with zeros: the rest of a chunk that
    /// was in progress when the push ended. Once this returns, the transfer does not read the source any more.
    ///
    /// # Errors
    /// As [`RemoteBulk::pull_into`].
    pub fn push_from(&self, source: impl PushSource) -> Result<usize> {
        source.with(self, |slice| self.run(false, slice))
    }
}

/// Both directions, for each kind of local memory: data flows along the arrow, whichever side is written first.
macro_rules! operators {
    ($remote:ty: $([$($generics:tt)*] $source:ty, [$($limits:tt)*] $target:ty;)*) => {$(
        impl<$($limits)*> Shr<$target> for $remote {
            type Output = Result<usize>;
            /// `remote >> &local` pulls: as [`RemoteBulk::pull_into`].
            fn shr(self, local: $target) -> Result<usize> {
                self.pull_into(local)
            }
        }
        impl<$($limits)*> Shl<$remote> for $target {
            type Output = Result<usize>;
            /// `&local << remote` pulls: as [`RemoteBulk::pull_into`].
            fn shl(self, remote: $remote) -> Result<usize> {
                remote.pull_into(self)
            }
        }
        impl<$($generics)*> Shl<$source> for $remote {
            type Output = Result<usize>;
            /// `remote << &local` pushes: as [`RemoteBulk::push_from`].
            fn shl(self, local: $source) -> Result<usize> {
                self.push_from(local)
            }
        }
        impl<$($generics)*> Shr<$remote> for $source {
            type Output = Result<usize>;
            /// `&local >> remote` pushes: as [`RemoteBulk::push_from`].
            fn shr(self, remote: $remote) -> Result<usize> {
                remote.push_from(self)
            }
        }
    )*};
}

macro_rules! operators_of {
    ($($remote:ty),*) => {$(
        operators! { $remote:
            [B: Buffer, A] &Exposed<B, A>, [B: WritableBuffer] &Exposed<B, Writable>;
            [A] &ExposedSlice<A>, [] &ExposedSlice<Writable>;
            [A] ExposedSlice<A>, [] ExposedSlice<Writable>;
        }
    )*};
}

operators_of!(RemoteBulk, &RemoteBulk);
