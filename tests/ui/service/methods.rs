//! What a service's methods must not be.

use std::sync::Arc;

#[calomel::service]
trait Methods {
    fn generic<T>(&self, value: T);
    fn lifetime<'a>(&'a self, value: u8);
    fn by_value(self);
    fn by_unique_reference(&mut self);
    fn by_arc(self: Arc<Self>);
    fn without_receiver(value: u8);
    fn with_body(&self) {}
    unsafe fn unsafe_method(&self);
    extern "C" fn foreign(&self);
}

fn main() {}
