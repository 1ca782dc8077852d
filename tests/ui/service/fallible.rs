//! A fallible method returns a `Result`, and its error has a text.

struct NoText;

#[calomel::service]
trait Fallible {
    #[fallible]
    fn nothing(&self);
    #[fallible]
    fn number(&self) -> u8;
    #[fallible]
    fn reference(&self) -> Result<&str, String>;
}

#[calomel::service]
trait WithoutText {
    #[fallible]
    fn error(&self) -> Result<u8, NoText>;
}

fn main() {}
