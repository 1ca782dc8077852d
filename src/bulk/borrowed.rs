//! Borrowed memory that a scope exposes: slices and single values, and several of them as the segments of one bulk.

use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

use crate::memory::{Element, ReadElement};

/// Borrowed memory that [`Scope::expose`](crate::Scope::expose) exposes for writing too: `&mut [T]`, `&mut T`, `&mut [T; N]`,
/// a `&mut` to an owner of a slice such as `Vec<T>`, and several of them as the segments of one bulk: tuples of up to 12, also
/// of different element types, arrays, and `Vec`s. `T` is [`bytemuck::Pod`].
///
/// The compiler infers `Kind`, which only tells these types apart.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be exposed for writing in a scope",
    label = "not a unique borrow of plain data",
    note = "give a `&mut [T]`, `&mut Vec<T>` or `&mut T` with `T: bytemuck::Pod`, or a tuple, an array or a `Vec` of them",
    note = "shared borrows can be exposed with `expose_read_only`",
    note = "an owned buffer is exposed outside of the scope: `engine.expose(buffer, mode)`"
)]
pub trait BorrowedSegmentsMut<'a, Kind>: sealed::BorrowedSegmentsMut<'a, Kind> {}

/// Borrowed memory that [`Scope::expose_read_only`](crate::Scope::expose_read_only) exposes: `&[T]`, `&T`, `&[T; N]`, `&str`,
/// a reference to an owner of a slice or text such as `Vec<T>` and `String`, and several of them as the segments of one bulk:
/// tuples of up to 12, also of different element types, arrays, and `Vec`s. `T` is [`bytemuck::NoUninit`].
///
/// The compiler infers `Kind`, which only tells these types apart.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be exposed for reading in a scope",
    label = "not a shared borrow of plain data",
    note = "give a `&[T]`, `&Vec<T>`, `&str` or `&T` with `T: bytemuck::NoUninit`, or a tuple, an array or a `Vec` of them",
    note = "an owned buffer is exposed outside of the scope: `engine.expose_read_only(buffer)`"
)]
pub trait BorrowedSegments<'a, Kind>: sealed::BorrowedSegments<'a, Kind> {}

/// The kinds, which keep the implementations apart: `Vec<T>` is no plain data today, but the compiler can't rule out that it
/// will be.
pub mod kind {
    /// A slice.
    pub enum Elements {}
    /// Text.
    pub enum Text {}
    /// One value.
    pub enum Value {}
    /// An owner of a slice.
    pub enum Owner {}
    /// An owner of text.
    pub enum TextOwner {}
    /// Several of one kind.
    pub struct Several<Kind>(Kind);
}

use kind::{Elements, Owner, Several, Text, TextOwner, Value};

/// The segments of one bulk that peers may write, in order.
pub(super) type SegmentListMut<'a> = SmallVec<[&'a mut [u8]; 4]>;
/// The segments of one bulk that peers read, in order.
pub(super) type SegmentList<'a> = SmallVec<[&'a [u8]; 4]>;

pub(super) mod sealed {
    use super::{SegmentList, SegmentListMut};

    pub trait BorrowedSegmentsMut<'a, Kind> {
        #[doc(hidden)]
        fn append_to(self, segments: &mut SegmentListMut<'a>);
    }

    pub trait BorrowedSegments<'a, Kind> {
        #[doc(hidden)]
        fn append_to(self, segments: &mut SegmentList<'a>);
    }
}

macro_rules! borrowed {
    ($trait:ident $list:ident: $([$($generics:tt)*] $type:ty, $kind:ty, |$this:ident| $bytes:expr;)*) => {$(
        #[diagnostic::do_not_recommend]
        impl<'a, $($generics)*> $trait<'a, $kind> for $type {}
        impl<'a, $($generics)*> sealed::$trait<'a, $kind> for $type {
            fn append_to(self, segments: &mut $list<'a>) {
                let $this = self;
                segments.push($bytes);
            }
        }
    )*};
}

borrowed! { BorrowedSegmentsMut SegmentListMut:
    [T: Element] &'a mut [T], Elements, |this| bytemuck::cast_slice_mut(this);
    [T: Element] &'a mut T, Value, |this| bytemuck::bytes_of_mut(this);
    [B: DerefMut<Target = [T]>, T: Element] &'a mut B, Owner, |this| bytemuck::cast_slice_mut(this);
}

borrowed! { BorrowedSegments SegmentList:
    [T: ReadElement] &'a [T], Elements, |this| bytemuck::cast_slice(this);
    [T: ReadElement] &'a T, Value, |this| bytemuck::bytes_of(this);
    [B: Deref<Target = [T]>, T: ReadElement] &'a B, Owner, |this| bytemuck::cast_slice(this);
    [] &'a str, Text, |this| this.as_bytes();
    [B: Deref<Target = str>] &'a B, TextOwner, |this| this.as_bytes();
}

macro_rules! several {
    ($trait:ident $list:ident: $([$($generics:tt)*] $type:ty;)*) => {$(
        #[diagnostic::do_not_recommend]
        impl<'a, Kind, B: $trait<'a, Kind>, $($generics)*> $trait<'a, Several<Kind>> for $type {}
        impl<'a, Kind, B: $trait<'a, Kind>, $($generics)*> sealed::$trait<'a, Several<Kind>> for $type {
            fn append_to(self, segments: &mut $list<'a>) {
                self.into_iter().for_each(|buffer| buffer.append_to(segments));
            }
        }
    )*};
}

several! { BorrowedSegmentsMut SegmentListMut: [] Vec<B>; [const N: usize] [B; N]; }
several! { BorrowedSegments SegmentList: [] Vec<B>; [const N: usize] [B; N]; }

macro_rules! tuples {
    ($trait:ident $list:ident: $(($($name:ident $kind:ident),+);)*) => {$(
        #[diagnostic::do_not_recommend]
        impl<'a, $($name: $trait<'a, $kind>, $kind),+> $trait<'a, ($($kind,)+)> for ($($name,)+) {}
        impl<'a, $($name: $trait<'a, $kind>, $kind),+> sealed::$trait<'a, ($($kind,)+)> for ($($name,)+) {
            #[allow(non_snake_case)]
            fn append_to(self, segments: &mut $list<'a>) {
                let ($($name,)+) = self;
                $($name.append_to(segments);)+
            }
        }
    )*};
}

macro_rules! tuples_of {
    ($($trait:ident $list:ident)*) => {$(
        tuples! { $trait $list:
            (A KA);
            (A KA, B KB);
            (A KA, B KB, C KC);
            (A KA, B KB, C KC, D KD);
            (A KA, B KB, C KC, D KD, E KE);
            (A KA, B KB, C KC, D KD, E KE, F KF);
            (A KA, B KB, C KC, D KD, E KE, F KF, G KG);
            (A KA, B KB, C KC, D KD, E KE, F KF, G KG, H KH);
            (A KA, B KB, C KC, D KD, E KE, F KF, G KG, H KH, I KI);
            (A KA, B KB, C KC, D KD, E KE, F KF, G KG, H KH, I KI, J KJ);
            (A KA, B KB, C KC, D KD, E KE, F KF, G KG, H KH, I KI, J KJ, K KK);
            (A KA, B KB, C KC, D KD, E KE, F KF, G KG, H KH, I KI, J KJ, K KK, L KL);
        }
    )*};
}

tuples_of!(BorrowedSegmentsMut SegmentListMut BorrowedSegments SegmentList);
