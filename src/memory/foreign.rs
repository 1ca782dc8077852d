//! Buffers of other crates, each behind the feature of the crate's name.

#[cfg(feature = "bytes")]
mod bytes_buffers {
    use bytes::{Bytes, BytesMut};

    use super::super::buffer::{Buffer, ReadOnly, View, Writable, WritableBuffer};

    // SAFETY: the bytes are immutable, and shared behind a pointer.
    unsafe impl Buffer for Bytes {
        type Access = ReadOnly;
        fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
            each(self);
        }
    }

    impl View for Bytes {
        type Target = [u8];
        fn view(&self) -> &[u8] {
            self
        }
    }

    // SAFETY: the bytes lie on the heap, and stay there until the value is mutated or dropped. Values that were split off it
    // share the allocation, but no byte.
    unsafe impl Buffer for BytesMut {
        type Access = Writable;
        fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
            each(self);
        }
    }

    // SAFETY: as above, and any bytes are bytes.
    unsafe impl WritableBuffer for BytesMut {
        fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
            each(self);
        }
    }

    impl View for BytesMut {
        type Target = [u8];
        fn view(&self) -> &[u8] {
            self
        }
    }
}

/// A file that is mapped can be changed or truncated by others. Its constructors are unsafe for that reason: their caller
/// promises that it is not, while the map exists.
#[cfg(feature = "memmap2")]
mod maps {
    use memmap2::{Mmap, MmapMut};

    use super::super::buffer::{Buffer, ReadOnly, View, Writable, WritableBuffer};

    // SAFETY: the map stays where it is until it is dropped, and is not written, as the caller of its constructor has promised.
    unsafe impl Buffer for Mmap {
        type Access = ReadOnly;
        fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
            each(self);
        }
    }

    impl View for Mmap {
        type Target = [u8];
        fn view(&self) -> &[u8] {
            self
        }
    }

    // SAFETY: the map stays where it is until it is dropped. It is anonymous and private, or the caller of its constructor has
    // promised that nothing else writes the file.
    unsafe impl Buffer for MmapMut {
        type Access = Writable;
        fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
            each(self);
        }
    }

    // SAFETY: as above, and any bytes are bytes.
    unsafe impl WritableBuffer for MmapMut {
        fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
            each(self);
        }
    }

    impl View for MmapMut {
        type Target = [u8];
        fn view(&self) -> &[u8] {
            self
        }
    }
}

#[cfg(feature = "ndarray")]
mod arrays {
    use ndarray::{ArcArray, Array, Dimension};

    use super::super::buffer::{Buffer, Element, ReadElement, ReadOnly, View, Writable, WritableBuffer};

    /// Segments are contiguous: an array with gaps, such as a slice with a step, has no such memory.
    fn check(is_contiguous: bool, shape: &[usize], strides: &[isize]) -> Result<(), String> {
        if is_contiguous {
            return Ok(());
        }
        let instead = "expose a copy, `array.as_standard_layout().into_owned()`";
        Err(format!("an array of shape {shape:?} with strides {strides:?} is not contiguous: {instead}"))
    }

    macro_rules! arrays {
        ($($kind:ident, $access:ty);*) => {$(
            // SAFETY: the elements lie on the heap, and stay there until the array is mutated or dropped; in an `ArcArray`,
            // other owners that write copy them first. `NoUninit` elements have no bytes that can't be read, and none that
            // change behind a shared reference.
            unsafe impl<T: ReadElement, D: Dimension> Buffer for $kind<T, D> {
                type Access = $access;
                /// # Panics
                /// When the array is not contiguous, which `check_layout` finds.
                fn read_segments(&self, each: &mut dyn FnMut(&[u8])) {
                    let Some(elements) = self.as_slice_memory_order() else { panic!("an array that is not contiguous") };
                    each(bytemuck::cast_slice(elements));
                }
                fn check_layout(&self) -> Result<(), String> {
                    check(self.as_slice_memory_order().is_some(), self.shape(), self.strides())
                }
            }

            impl<T, D> View for $kind<T, D> {
                type Target = Self;
                fn view(&self) -> &Self {
                    self
                }
            }
        )*};
    }

    arrays!(Array, Writable; ArcArray, ReadOnly);

    // SAFETY: as above; the array owns its elements alone, and `Pod` elements are valid whatever bytes they hold.
    unsafe impl<T: Element, D: Dimension> WritableBuffer for Array<T, D> {
        /// # Panics
        /// As `read_segments`.
        fn write_segments(&mut self, each: &mut dyn FnMut(&mut [u8])) {
            let Some(elements) = self.as_slice_memory_order_mut() else { panic!("an array that is not contiguous") };
            each(bytemuck::cast_slice_mut(elements));
        }
    }
}
