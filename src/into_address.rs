//! Conversion to an address, which fails with an error of the library.

use std::str::FromStr;

use serde::{Deserialize, Deserializer};

use crate::address::MAX_LEN;
use crate::{Address, Error, Result, Transport};

/// Conversion to an address: for `&str`, `String`, [`Address`] and references to them.
pub trait IntoAddress {
    /// Parses or returns the address.
    ///
    /// # Errors
    /// [`Error::InvalidAddress`] when the text is not an address.
    fn into_address(self) -> Result<Address>;

    /// As `into_address`, for a listener: a text may also name a transport alone, such as `tcp`, for any free port on all
    /// interfaces, or `shm`, for a name that the engine chooses.
    ///
    /// # Errors
    /// [`Error::InvalidAddress`] when the text is neither.
    fn into_listen_address(self) -> Result<Address>
    where
        Self: Sized,
    {
        let address = self.into_address();
        let Err(Error::InvalidAddress { text, .. }) = &address else { return address };
        let scheme = Transport::parse(text).filter(|_| !text.contains(':'));
        scheme.and_then(Address::any_of).map_or(address, Ok)
    }
}

impl IntoAddress for &str {
    fn into_address(self) -> Result<Address> {
        self.parse()
    }
}

impl IntoAddress for String {
    fn into_address(self) -> Result<Address> {
        self.parse()
    }
}

impl IntoAddress for &String {
    fn into_address(self) -> Result<Address> {
        self.parse()
    }
}

impl IntoAddress for Address {
    fn into_address(self) -> Result<Address> {
        Ok(self)
    }
}

impl IntoAddress for &Address {
    fn into_address(self) -> Result<Address> {
        Ok(self.clone())
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Address> {
        let invalid =
            |reason: &str| Error::InvalidAddress { text: text.chars().take(MAX_LEN).collect(), reason: reason.to_owned() };
        Address::parse(text).map_err(invalid)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Address, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
