//! What a server's type must be.

use std::cell::Cell;
use std::rc::Rc;

#[calomel::service]
trait Work {
    async fn work(&self, number: u8) -> u8;
}

struct NotSync(Cell<u8>);

impl Work for NotSync {
    async fn work(&self, number: u8) -> u8 {
        self.0.replace(number)
    }
}

struct NotSend;

impl Work for NotSend {
    async fn work(&self, number: u8) -> u8 {
        let number = Rc::new(number);
        std::future::ready(()).await;
        *number
    }
}

struct Other;

impl Work for Other {
    async fn work(&self, number: u16) -> u8 {
        number as u8
    }
}

fn main() {}
