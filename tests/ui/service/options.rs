//! The options of a service.

#[calomel::service(rename = "other")]
trait Unknown {
    fn method(&self);
}

#[calomel::service(name)]
trait NoName {
    fn method(&self);
}

#[calomel::service(crate = "not a path")]
trait NoPath {
    fn method(&self);
}

fn main() {}
