//! The macro behind `calomel::service`. Use it through the crate calomel, with its feature `macros`: its documentation is
//! there, and its tests are calomel's `tests/service.rs`.
//!
//! `declaration.rs` reads a trait, and refuses what can't be served; `generate.rs` writes the trait, its client and its server.

mod declaration;
mod generate;

use proc_macro2::TokenStream;
use syn::Result;
use syn::parse::Parser;

use declaration::{Options, Service};

// A doc comment here would follow that of `calomel::service`.
#[expect(missing_docs)]
#[proc_macro_attribute]
pub fn service(options: proc_macro::TokenStream, declaration: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand(options.into(), declaration.into()).unwrap_or_else(|errors| errors.into_compile_error()).into()
}

fn expand(options: TokenStream, declaration: TokenStream) -> Result<TokenStream> {
    let mut parsed = Options::default();
    syn::meta::parser(|option| parsed.read(&option)).parse2(options)?;
    Ok(Service::new(parsed, syn::parse2(declaration)?)?.generate())
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::*;

    /// A program may know calomel by another name only, which tests of calomel itself can't try.
    #[test]
    fn a_renamed_crate_is_the_only_path_to_calomel() {
        let declaration = quote! {
            trait Everything {
                fn blocking(&self, text: String, bytes: Option<Vec<u8>>) -> u8;
                async fn later(&self, request: &Request);
                #[one_way]
                fn one_way(&self, number: u8);
            }
        };
        let renamed = expand(quote!(crate = "some::rpc"), declaration.clone()).unwrap().to_string();
        assert!(!renamed.contains("calomel"), "{renamed}");
        let usual = expand(quote!(), declaration).unwrap().to_string();
        assert_eq!(usual.replace(":: calomel", "some :: rpc").replace("calomel::", "some::rpc::"), renamed);
    }
}
