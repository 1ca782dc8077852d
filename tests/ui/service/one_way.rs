//! A one-way method returns nothing.

#[calomel::service]
trait OneWay {
    #[one_way]
    fn number(&self) -> u8;
    #[one_way]
    async fn result(&self) -> Result<(), String>;
    #[one_way(always)]
    fn unit(&self) -> ();
    #[one_way]
    #[fallible]
    fn fallible(&self) -> Result<u8, String>;
}

fn main() {}
