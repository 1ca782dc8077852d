//! Names that are taken.

#[calomel::service]
trait Names {
    fn twice(&self);
    fn twice(&self, number: u8);
    #[rename = "shared"]
    fn one(&self);
    #[rename = "shared"]
    fn other(&self);
    fn new(&self);
    fn timeout(&self);
    fn job(&self);
    fn start_job(&self);
    #[one_way]
    fn log(&self);
    fn log_async(&self);
    #[rename(brackets)]
    fn renamed(&self);
    #[rename = 5]
    fn number(&self);
}

fn main() {}
