//! Arguments that borrow from a request's bytes.

use serde::Deserialize;

/// Arguments that borrow from the bytes that were received; see [`Engine::define_borrowed`](crate::Engine::define_borrowed).
/// Implemented for `str` and `[u8]`; a type of your own names itself with the lifetime:
///
/// ```
/// use calomel::BorrowedArgs;
///
/// #[derive(serde::Deserialize)]
/// struct Put<'a> {
///     key: &'a str,
///     #[serde(borrow)]
///     value: &'a [u8],
/// }
///
/// impl BorrowedArgs for Put<'static> {
///     type With<'a> = Put<'a>;
/// }
/// ```
pub trait BorrowedArgs {
    /// The type with the lifetime of one call.
    type With<'a>: Deserialize<'a>;
}

impl BorrowedArgs for str {
    type With<'a> = &'a str;
}

impl BorrowedArgs for [u8] {
    type With<'a> = &'a [u8];
}
