//! What a service's trait must not be.

#[calomel::service]
trait Generic<T>
where
    T: Send,
{
    fn method(&self, value: T);
}

#[calomel::service]
trait Super: Send + Clone {
    fn method(&self);
}

#[calomel::service]
unsafe trait Unsafe {
    fn method(&self);
}

#[calomel::service]
trait Items {
    type Value;
    const LIMIT: usize;
    fn method(&self);
}

#[calomel::service]
trait Empty {}

#[calomel::service]
struct NoTrait;

fn main() {}
