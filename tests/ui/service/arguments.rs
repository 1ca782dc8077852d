//! What arguments and results must not be.

use std::borrow::Cow;
use std::fmt::Display;

use calomel::Request;

#[calomel::service]
trait Arguments {
    fn text(&self, text: &str);
    fn bytes(&self, bytes: &[u8]);
    fn number(&self, number: &u64);
    fn unique(&self, request: &mut Request);
    fn late(&self, number: u8, request: &Request);
    fn within(&self, text: Option<&str>, array: [&u8; 2]);
    fn lifetime(&self, text: Cow<'static, str>);
    fn unnamed(&self, value: impl Display);
    fn object(&self, value: Box<dyn Display>);
    fn own(&self, value: Vec<Self>);
    fn pattern(&self, (a, b): (u8, u8));
    fn mutable(&self, mut a: u8);
    fn ignored(&self, _: u8);
    fn attribute(&self, #[cfg(any())] a: u8);
    fn result(&self) -> &str;
    fn unnamed_result(&self) -> impl Display;
    fn own_result(&self) -> Self;
    #[rustfmt::skip]
    fn many(&self, a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8, h: u8, i: u8, j: u8, k: u8, l: u8, m: u8, n: u8, o: u8, p: u8, q: u8);
}

fn main() {}
