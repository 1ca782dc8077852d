//! Scripts of fuzz runs, encoded as bytes: each choice takes a byte or a number of fixed width, in order. Any bytes are a
//! script, and zeros follow their end. So a small change of the bytes is a small change of the run. Seeds are encoded the
//! same way.

/// One or several choices.
pub(crate) trait Script: Sized {
    fn read(from: &mut &[u8]) -> Self;
    fn write(&self, to: &mut Vec<u8>);
}

/// Decodes all values in the bytes, but at most `most`.
pub(crate) fn read_all<T: Script>(mut bytes: &[u8], most: usize) -> Vec<T> {
    let mut all = Vec::new();
    while !bytes.is_empty() && all.len() < most {
        all.push(T::read(&mut bytes));
    }
    all
}

pub(crate) fn written<T: Script>(all: &[T]) -> Vec<u8> {
    let mut bytes = Vec::new();
    all.iter().for_each(|each| each.write(&mut bytes));
    bytes
}

macro_rules! number {
    ($($type:ty)*) => {$(
        impl Script for $type {
            fn read(from: &mut &[u8]) -> Self {
                let mut bytes = [0; size_of::<Self>()];
                let (now, rest) = from.split_at(from.len().min(bytes.len()));
                bytes[..now.len()].copy_from_slice(now);
                *from = rest;
                Self::from_le_bytes(bytes)
            }

            fn write(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
number!(u8 u16 u32 u64);

impl Script for bool {
    fn read(from: &mut &[u8]) -> bool {
        u8::read(from) % 2 == 1
    }

    fn write(&self, to: &mut Vec<u8>) {
        to.push(u8::from(*self));
    }
}

/// Up to 255 bytes, behind their length.
impl Script for Vec<u8> {
    fn read(from: &mut &[u8]) -> Vec<u8> {
        let len = usize::from(u8::read(from)).min(from.len());
        let (now, rest) = from.split_at(len);
        *from = rest;
        now.to_vec()
    }

    fn write(&self, to: &mut Vec<u8>) {
        let len = self.len().min(255);
        to.push(len as u8);
        to.extend_from_slice(&self[..len]);
    }
}

/// Defines an enum, or a struct, that is read and written as a script: the number of the variant, and the fields in order.
macro_rules! script {
    (
        $(#[$meta:meta])*
        enum $name:ident { $($(#[$of_variant:meta])* $variant:ident $({ $($field:ident: $type:ty),* $(,)? })?),* $(,)? }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub(crate) enum $name { $($(#[$of_variant])* $variant $({ $($field: $type),* })?),* }

        impl $crate::fuzzing::script::Script for $name {
            fn read(from: &mut &[u8]) -> Self {
                const COUNT: u8 = [$(stringify!($variant)),*].len() as u8;
                let mut left = <u8 as $crate::fuzzing::script::Script>::read(from) % COUNT;
                $(
                    if left == 0 {
                        return $name::$variant $({ $($field: $crate::fuzzing::script::Script::read(from)),* })?;
                    }
                    left -= 1;
                )*
                unreachable!("variant {left} beyond the last")
            }

            fn write(&self, to: &mut Vec<u8>) {
                const NAMES: &[&str] = &[$(stringify!($variant)),*];
                let number = |name| NAMES.iter().position(|each| *each == name).unwrap_or(0) as u8;
                match self {
                    $($name::$variant $({ $($field),* })? => {
                        to.push(number(stringify!($variant)));
                        $($($crate::fuzzing::script::Script::write($field, to);)*)?
                    })*
                }
            }
        }
    };
    ($(#[$meta:meta])* struct $name:ident { $($(#[$of_field:meta])* $field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub(crate) struct $name { $($(#[$of_field])* pub $field: $type),* }

        impl $crate::fuzzing::script::Script for $name {
            fn read(from: &mut &[u8]) -> Self {
                $name { $($field: $crate::fuzzing::script::Script::read(from)),* }
            }

            fn write(&self, to: &mut Vec<u8>) {
                $($crate::fuzzing::script::Script::write(&self.$field, to);)*
            }
        }
    };
}
pub(crate) use script;
