//! What is generated has documentation, where the methods have.
#![deny(missing_docs, unreachable_pub, warnings)]

/// A service.
#[calomel::service]
pub trait Documented {
    /// A method.
    fn documented(&self);
    fn undocumented(&self, number: u8) -> u8;
    #[one_way]
    fn undocumented_one_way(&self);
}

mod private {
    // Used by no code.
    #[calomel::service]
    trait Private {
        fn method(&self, hidden: Hidden) -> Hidden;
    }

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Hidden;
}

fn main() {}
