//! The buffers that can be exposed.

use std::sync::Arc;

use bytemuck::{NoUninit, Pod};

use super::engine_buffer::{EngineBuffer, PooledBuffer};
use super::shared::Block;

/// Peers may write what is exposed, or transfers may write it here: no view of it can be had.
#[derive(Clone, Copy, Debug)]
pub enum Writable {}

/// Neither peers nor transfers write what is exposed, so it can be viewed meanwhile.
#[derive(Clone, Copy, Debug)]
pub enum ReadOnly {}

/// What peers may write: any [`bytemuck::Pod`] type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not plain data that peers may write",
    label = "not every sequence of bytes is a valid value of it",
    note = "use an integer, a float, or an array of them, or derive `bytemuck::Pod` for a `#[repr(C)]` struct of them",
    note = "`bool`, `char` and enums can be exposed with `expose_read_only`",
    note = "several buffers are one bulk as `Segments(vec![a, b])`, not as a `Vec` of them"
)]
pub trait Element: Pod {}

#[diagnostic::do_not_recommend]
impl<T: Pod> Element for T {}

/// What peers may read: any [`bytemuck::NoUninit`] type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not plain data that peers may read",
    label = "some of its bytes may be uninitialized, or mean nothing elsewhere",
    note = "use an integer, a float, a `bool`, a `char`, or an array of them, or derive `bytemuck::NoUninit` for a `#[repr(C)]` struct of them",
    note = "several buffers are one bulk as `Segments(vec![a, b])`, not as a `Vec` of them"
)]
pub trait ReadElement: NoUninit {}

#[diagnostic::do_not_recommend]
impl<T: NoUninit> ReadElement for T {}

/// Memory that can be exposed for reading; `T` is [`bytemuck::NoUninit`]:
///
/// - lists: `Vec<T>`, `Box<[T]>`, `[T; N]`, `Arc<[T]>`, `Arc<Vec<T>>`, `&'static [T]`;
/// - single values: `Box<T>`;
/// - text: `String`, `Box<str>`, `Arc<str>`, `&'static str`;
/// - engine memory ([`Engine::alloc`](crate::Engine::alloc), [`BufferPool`](crate::BufferPool));
/// - with the features of these names: `bytes::{Bytes, BytesMut}`, `memmap2::{Mmap, MmapMut}`, `ndarray::{Array, ArcArray}`;
/// - several of them as the segments of one bulk: tuples of up to 12, and [`Segments`].
///
/// # Structs of buffers
///
/// A struct of arrays is exposed as the tuple of its fields, and put together again from what
/// [`reclaim`](crate::Exposed::reclaim) returns. That is safe code, and the compiler checks that no field is forgotten:
///
/// ```
/// # use calomel::{BulkMode, Engine};
/// struct Particles {
///     mass: Vec<f32>,
///     position: Vec<[f64; 3]>,
/// }
///
/// # fn main() -> calomel::Result<()> {
/// # let engine = Engine::client("loop")?;
/// # let particles = Particles { mass: vec![1.0; 10], position: vec![[0.0; 3]; 10] };
/// let Particles { mass, position } = particles;
/// let exposed = engine.expose((mass, position), BulkMode::ReadWrite)?; // segment 0: masses, segment 1: positions
/// // … peers transfer …
/// let (mass, position) = exposed.reclaim();
/// let particles = Particles { mass, position };
/// # assert_eq!((particles.mass.len(), particles.position.len()), (10, 10));
/// # Ok(())
/// # }
/// ```
///
/// Where the struct must stay as it is, its fields are borrowed in a scope:
/// `engine.scope(|s| s.expose((&mut particles.mass, &mut particles.position), mode))`.
///
/// # Other types
///
/// A type that owns its memory becomes a buffer by an `unsafe impl Buffer` for a newtype of it, which has to keep what is said
/// below. Without `unsafe` code, `bytes::Bytes::from_owner(value)` makes a read-only buffer of each `AsRef<[u8]>`.
///
/// # When it is exposed
///
/// When a buffer is exposed, the library moves it into a box of its own, asks for the segments once, and keeps their addresses.
/// From then on, until the buffer is returned or dropped, it is neither moved nor mutated, and no reference to it exists except
/// those that [`View::view`] is called with.
///
/// # Safety
/// - **Stable addresses.** The segments that `read_segments` has named keep their addresses and lengths as long as the buffer is
///   neither moved, nor mutated through `&mut`, nor dropped. That holds on any thread, also when other methods are called
///   through a shared reference meanwhile, `View::view` and `Debug` among them.
/// - **Leaks.** An exposure that is leaked, as by [`std::mem::forget`], is never returned: peers go on reading, and writing
///   where they may, for as long as the process lives. So the memory must not end by itself: not at the end of a borrow (the
///   type has to be `'static` to be exposed; borrowed memory goes through [`Engine::scope`](crate::Engine::scope)), not with a
///   thread, not when other code frees or reuses it. Only the buffer's own `Drop` may free it.
/// - **Content.** Every byte of a segment is initialized, and readable for as long as the segment lasts. It is not written
///   behind a shared reference: no cells, no memory that another process or a device writes, no second owner that can.
/// - **Drop.** The library drops or returns the buffer when no peer, device or transfer accesses its memory any more; `Drop`
///   may free it, keep it for others, or write it. It may run on any thread where the buffer is `Send`, and must not
///   wait for the engine.
/// - `read_segments` names the same segments each time, and does nothing else: it is called with no lock held, and may panic,
///   in which case the buffer is leaked.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be exposed",
    label = "not a buffer of plain data",
    note = "expose a `Vec<T>`, `Box<[T]>`, `Box<T>`, `[T; N]`, `String`, `Arc<[T]>`, `engine.alloc(len)`, or a tuple of them",
    note = "several buffers of one type are one bulk as `Segments(vec![a, b])`; a struct is exposed as the tuple of its fields",
    note = "a type of another crate takes a newtype with `unsafe impl Buffer`, or, read-only, `bytes::Bytes::from_owner`",
    note = "borrowed memory is exposed inside `engine.scope(|s| s.expose(&mut buf[..], mode))`"
)]
pub unsafe trait Buffer {
    /// How an [`Exposed`](crate::Exposed) of this buffer is meant when its type does not say.
    type Access;
    /// Calls `each` with every segment, in order.
    fn read_segments(&self, each: &mut dyn FnMut(&[u8]));
    /// Why this value can't be exposed as it is: [`Engine::expose`](crate::Engine::expose) returns it in
    /// [`Error::Unsupported`](crate::Error::Unsupported), and asks for no segments. Each value of most types can be exposed.
    fn check_layout(&self) -> Result<(), String> {
        Ok(())
    }
    /// Calls `each` with the segments that are engine memory.
    #[doc(hidden)]
    fn engine_memory(&self, _each: &mut dyn FnMut(EngineMemory<'_>)) {}
}

/// A segment that peers can map, all of it.
#[doc(hidden)]
pub struct EngineMemory<'a>(pub(super) &'a Arc<Block>);

/// Memory that can be exposed for writing too: `Vec<T>`, `Box<[T]>`, `Box<T>`, `[T; N]`, engine memory, `bytes::BytesMut`,
/// `memmap2::MmapMut`, `ndarray::Array`, tuples of them, and [`Segments`]; `T` is [`bytemuck::Pod`].
///
/// # Safety
/// As for [`Buffer`], and besides:
///
/// - `write_segments` names the segments of `read_segments`, at the same addresses, of the same lengths, in the same order.
/// - **No alias.** The buffer owns its memory alone: no other value, reference, mapping or process reads or writes it while the
///   buffer lives, and no two of its segments overlap.
/// - Any bytes may be written, at any time and in any order, also half of an element: whatever they are, they are valid for
///   the buffer's own type when it is given back, and for its `Drop`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't be exposed for writing",
    label = "peers could write anything into it",
    note = "expose a `Vec<T>`, `Box<[T]>`, `Box<T>`, `[T; N]` with a `T: bytemuck::Pod`, or `engine.alloc(len)`",
    note = "`String`, `Arc<[T]>` and `&'static [T]` can be exposed with `expose_read_only`",
    note = "a type of another crate takes a newtype with `unsafe impl WritableBuffer`",
    note = "borrowed memory is exposed inside `engine.scope(|s| s.expose(&mut buf[..], mode))`"
)]
pub unsafe trait WritableBuffer: Buffer {
    /// Calls `each` with every segment, in order.
    fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8]));
}

/// Buffers that can be viewed while they are exposed read-only.
pub trait View {
    /// What is seen: `[T]` of a list, `T` of a `Box<T>`, `str` of text, an array or a tuple itself.
    type Target: ?Sized;
    /// The buffer's content.
    fn view(&self) -> &Self::Target;
}

/// Several buffers of one type as the segments of one bulk, in one address space. (A plain `Vec<Vec<T>>` could not be told
/// apart from a `Vec<T>`.)
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments<B>(pub Vec<B>);

macro_rules! slices {
    ($([$($generics:tt)*] $kind:ty),*) => {$(
        // SAFETY: the elements lie on the heap, or in the value itself, and stay there until it is mutated or moved;
        // `NoUninit` elements have no bytes that can't be read, and none that change behind a shared reference.
        unsafe impl<T: ReadElement, $($generics)*> Buffer for $kind {
            type Access = Writable;
            fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
                each(bytemuck::cast_slice(&self[..]));
            }
        }
        // SAFETY: as above; `Pod` elements are valid whatever bytes they hold.
        unsafe impl<T: Element, $($generics)*> WritableBuffer for $kind {
            fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
                each(bytemuck::cast_slice_mut(&mut self[..]));
            }
        }
        impl<T: ReadElement, $($generics)*> View for $kind {
            type Target = [T];
            fn view(&self) -> &[T] {
                self
            }
        }
    )*};
}

slices!([] Vec<T>, [] Box<[T]>, [const N: usize] [T; N]);

macro_rules! shared {
    ($($kind:ty),*) => {$(
        // SAFETY: the elements lie behind a shared pointer, so they can't be written; `NoUninit` elements have no bytes
        // that can't be read, and none that change behind a shared reference.
        unsafe impl<T: ReadElement> Buffer for $kind {
            type Access = ReadOnly;
            fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
                each(bytemuck::cast_slice(&self[..]));
            }
        }
        impl<T: ReadElement> View for $kind {
            type Target = [T];
            fn view(&self) -> &[T] {
                self
            }
        }
    )*};
}

shared!(Arc<[T]>, Arc<Vec<T>>, &'static [T]);

macro_rules! texts {
    ($($kind:ty),*) => {$(
        // SAFETY: the text is static, or lies on the heap, alone or shared, and stays there until the value is mutated or
        // dropped.
        unsafe impl Buffer for $kind {
            type Access = ReadOnly;
            fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
                each(self.as_bytes());
            }
        }
        impl View for $kind {
            type Target = str;
            fn view(&self) -> &str {
                self
            }
        }
    )*};
}

texts!(String, Box<str>, Arc<str>, &'static str);

// SAFETY: the value lies on the heap, and stays there until the box is dropped; `NoUninit` values have no bytes that can't be
// read, and none that change behind a shared reference.
unsafe impl<T: ReadElement> Buffer for Box<T> {
    type Access = Writable;
    fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
        each(bytemuck::bytes_of(&**self));
    }
}

// SAFETY: as above; a `Pod` value is valid whatever bytes it holds.
unsafe impl<T: Element> WritableBuffer for Box<T> {
    fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
        each(bytemuck::bytes_of_mut(&mut **self));
    }
}

impl<T: ReadElement> View for Box<T> {
    type Target = T;
    fn view(&self) -> &T {
        self
    }
}

macro_rules! engine_memory {
    ($($kind:ty),*) => {$(
        // SAFETY: the bytes lie on the heap, or in a mapping, and stay where they are until the value is dropped.
        unsafe impl Buffer for $kind {
            type Access = Writable;
            fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
                each(self);
            }
            fn engine_memory(&self, each: &mut dyn FnMut(EngineMemory<'_>)) {
                self.block().into_iter().for_each(|block| each(EngineMemory(block)));
            }
        }
        // SAFETY: as above, and any bytes are bytes.
        unsafe impl WritableBuffer for $kind {
            fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
                each(self);
            }
        }
        impl View for $kind {
            type Target = [u8];
            fn view(&self) -> &[u8] {
                self
            }
        }
    )*};
}

engine_memory!(EngineBuffer, PooledBuffer);

// SAFETY: each element's segments stay where they are, and so do the elements, until the list is mutated.
unsafe impl<B: Buffer> Buffer for Segments<B> {
    type Access = B::Access;
    fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
        self.0.iter().for_each(|buffer| buffer.read_segments(each));
    }
    fn check_layout(&self) -> Result<(), String> {
        self.0.iter().try_for_each(Buffer::check_layout)
    }
    fn engine_memory(&self, each: &mut dyn FnMut(EngineMemory<'_>)) {
        self.0.iter().for_each(|buffer| buffer.engine_memory(each));
    }
}

// SAFETY: as above.
unsafe impl<B: WritableBuffer> WritableBuffer for Segments<B> {
    fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
        self.0.iter_mut().for_each(|buffer| buffer.write_segments(each));
    }
}

impl<B> View for Segments<B> {
    type Target = [B];
    fn view(&self) -> &[B] {
        &self.0
    }
}

macro_rules! tuples {
    ($(($first:ident $($name:ident)*)),*) => {$(
        // SAFETY: each element's segments stay where they are as long as the tuple does.
        unsafe impl<$first: Buffer, $($name: Buffer),*> Buffer for ($first, $($name),*) {
            type Access = $first::Access;
            #[allow(non_snake_case)]
            fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
                let ($first, $($name),*) = self;
                $first.read_segments(each);
                $($name.read_segments(each);)*
            }
            #[allow(non_snake_case)]
            fn check_layout(&self) -> Result<(), String> {
                let ($first, $($name),*) = self;
                $first.check_layout()?;
                $($name.check_layout()?;)*
                Ok(())
            }
            #[allow(non_snake_case)]
            fn engine_memory(&self, each: &mut dyn FnMut(EngineMemory<'_>)) {
                let ($first, $($name),*) = self;
                $first.engine_memory(each);
                $($name.engine_memory(each);)*
            }
        }
        // SAFETY: as above.
        unsafe impl<$first: WritableBuffer, $($name: WritableBuffer),*> WritableBuffer for ($first, $($name),*) {
            #[allow(non_snake_case)]
            fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
                let ($first, $($name),*) = self;
                $first.write_segments(each);
                $($name.write_segments(each);)*
            }
        }
        impl<$first, $($name),*> View for ($first, $($name),*) {
            type Target = ($first, $($name),*);
            fn view(&self) -> &Self::Target {
                self
            }
        }
    )*};
}

tuples!(
    (A B),
    (A B C),
    (A B C D),
    (A B C D E),
    (A B C D E F),
    (A B C D E F G),
    (A B C D E F G H),
    (A B C D E F G H I),
    (A B C D E F G H I J),
    (A B C D E F G H I J K),
    (A B C D E F G H I J K L)
);
