//! The code of a service: the trait, the client, the server.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::{Attribute, Ident, Lifetime, Type};

use crate::declaration::{Argument, Method, Service, first_generic, ungrouped};

/// What a client takes by value.
const PRIMITIVES: [&str; 16] =
    ["bool", "char", "i8", "i16", "i32", "i64", "i128", "isize", "u8", "u16", "u32", "u64", "u128", "usize", "f32", "f64"];

/// The attributes of a method that its copies in the client have too.
const COPIED: [&str; 5] = ["doc", "cfg", "cfg_attr", "deprecated", "allow"];

fn named<'a>(attributes: &'a [Attribute], names: &'a [&str]) -> impl Iterator<Item = &'a Attribute> {
    attributes.iter().filter(|attribute| names.iter().any(|name| attribute.path().is_ident(name)))
}

impl Service {
    pub fn generate(&self) -> TokenStream {
        let (declaration, client, server) = (self.declaration(), self.client(), self.server());
        quote!(#declaration #client #server)
    }

    /// The trait, and its implementation for shared values.
    fn declaration(&self) -> TokenStream {
        let Service { attributes, visibility, ident, methods, .. } = self;
        let conditions = self.conditions();
        let (signatures, forwards): (Vec<_>, Vec<_>) = methods
            .iter()
            .map(|method| {
                let (attributes, name, signature) = (&method.attributes, &method.ident, &method.signature);
                let conditions = named(attributes, &["cfg"]);
                let names = method.request.iter().chain(&method.arguments).map(|argument| &argument.ident);
                let forward = quote!(#(#conditions)* #signature { <__Service as #ident>::#name(self, #(#names),*) });
                // Spans of the method, to which lints point.
                (quote_spanned!(name.span()=> #(#attributes)* #signature;), forward)
            })
            .unzip();
        quote! {
            #(#attributes)*
            #visibility trait #ident: ::core::marker::Send + ::core::marker::Sync + 'static {
                #(#signatures)*
            }

            #conditions
            #[allow(deprecated)]
            impl<__Service: #ident + ?::core::marker::Sized> #ident for ::std::sync::Arc<__Service> {
                #(#forwards)*
            }
        }
    }

    fn client(&self) -> TokenStream {
        let Service { krate, visibility, ident, client, methods, .. } = self;
        let conditions = self.conditions();
        let doc = format!("Calls [`{ident}`] at a peer, or at one provider of a peer. Cheap to clone; keeps no engine alive.");
        let fields = methods.iter().map(|method| method.field(krate));
        let values = methods.iter().map(|Method { attributes, ident, procedure, .. }| {
            let conditions = named(attributes, &["cfg"]);
            quote_spanned!(Span::mixed_site()=> #(#conditions)* #ident: engine.procedure(#procedure).on(endpoint),)
        });
        let with_timeout = methods.iter().map(|method| {
            let (ident, span, conditions) = (&method.ident, method.span(), named(&method.attributes, &["cfg"]));
            let krate = spanned(krate, span);
            let call = quote_spanned!(span=> ::core::clone::Clone::clone(&self.#ident));
            quote_spanned!(span=> #(#conditions)* #ident: #krate::Call::timeout(#call, timeout),)
        });
        let methods = methods.iter().map(|method| method.client(self));
        quote_spanned! {Span::mixed_site()=>
            #conditions
            #[doc = #doc]
            #[derive(::core::clone::Clone, ::core::fmt::Debug)]
            #visibility struct #client {
                #(#fields)*
            }

            #conditions
            #[allow(dead_code, clippy::should_implement_trait, clippy::too_many_arguments, clippy::type_complexity)]
            impl #client {
                /// A client of the peer, or of the provider, that `endpoint` names.
                #visibility fn new(endpoint: impl ::core::convert::AsRef<#krate::Endpoint>) -> Self {
                    let endpoint = ::core::convert::AsRef::as_ref(&endpoint);
                    let engine = endpoint.engine();
                    Self { #(#values)* }
                }

                /// The same client, with the time that each of its calls may take; otherwise the engine's default timeout.
                #[must_use]
                #visibility fn timeout(&self, timeout: ::core::time::Duration) -> Self {
                    Self { #(#with_timeout)* }
                }

                #(#methods)*
            }
        }
    }

    fn server(&self) -> TokenStream {
        let Service { krate, visibility, ident, server, methods, .. } = self;
        let conditions = self.conditions();
        let doc = format!(
            "The procedures of a [`{ident}`] that is served. Dropping this leaves them defined; [`remove`](Self::remove) \
             removes them."
        );
        let count = methods.len();
        let definitions = methods.iter().map(|method| method.definition(self));
        quote_spanned! {Span::mixed_site()=>
            #conditions
            #[doc = #doc]
            #[derive(::core::clone::Clone, ::core::fmt::Debug)]
            #visibility struct #server {
                registrations: ::std::vec::Vec<#krate::Registration>,
            }

            #conditions
            #[allow(dead_code, deprecated)]
            impl #server {
                /// Serves `service` at the engine itself, which owns it from then on. To keep a handle, serve an `Arc`.
                ///
                /// # Errors
                /// `AlreadyDefined` when the engine has a procedure of one of the names, and `Finalized`. After an error
                /// none of the procedures is defined.
                #visibility fn serve(engine: &#krate::Engine, service: impl #ident) -> #krate::Result<Self> {
                    Self::serve_at(&engine.provider(0), service)
                }

                /// Serves `service` at a provider, on the provider's handler pool if it has one.
                ///
                /// # Errors
                /// As [`serve`](Self::serve).
                #visibility fn serve_at(provider: &#krate::Provider, service: impl #ident) -> #krate::Result<Self> {
                    let service = ::std::sync::Arc::new(service);
                    let mut server = Self { registrations: ::std::vec::Vec::with_capacity(#count) };
                    let mut define_all = || -> #krate::Result<()> {
                        #(#definitions)*
                        ::core::result::Result::Ok(())
                    };
                    let defined = define_all();
                    if defined.is_err() {
                        server.remove();
                    }
                    defined.map(|()| server)
                }

                /// Removes the procedures: later calls end with `NoSuchProcedure`, handlers in progress go on. False when
                /// they were removed before.
                #visibility fn remove(&self) -> ::core::primitive::bool {
                    self.registrations.iter().fold(false, |removed, registration| registration.remove() | removed)
                }
            }
        }
    }

    /// The `cfg` attributes, which decide on all that is generated.
    fn conditions(&self) -> TokenStream {
        let conditions = named(&self.attributes, &["cfg"]);
        quote!(#(#conditions)*)
    }
}

impl Method {
    /// Where the compiler's messages about generated code point, with variables that the user's names can't mean.
    fn span(&self) -> Span {
        self.ident.span().resolved_at(Span::mixed_site())
    }

    /// The client's field for the calls of this method. A call of longer references serves as one of shorter ones.
    fn field(&self, krate: &TokenStream) -> TokenStream {
        let Method { attributes, ident, result, .. } = self;
        let conditions = named(attributes, &["cfg"]);
        let lifetime = Lifetime::new("'static", Span::call_site());
        let types: Vec<_> = self.arguments.iter().map(|argument| borrowed(&argument.ty, Some(&lifetime))).collect();
        let arguments = one_or_tuple(&types);
        quote!(#(#conditions)* #ident: #krate::Call<#arguments, #result>,)
    }

    /// The methods of the client.
    fn client(&self, service: &Service) -> TokenStream {
        let Method { ident, start, result, .. } = self;
        let (span, visibility) = (self.span(), &service.visibility);
        let krate = spanned(&service.krate, span);
        let copied: Vec<_> = named(&self.attributes, &COPIED).collect();
        let name = ident.unraw().to_string();
        let fallback = (!copied.iter().any(|attribute| attribute.path().is_ident("doc")))
            .then(|| format!("Calls `{name}` of [`{}`].", service.ident));
        let fallback = fallback.map(|text| quote!(#[doc = #text]));

        let names: Vec<_> = self.arguments.iter().map(|argument| &argument.ident).collect();
        let types: Vec<_> = self.arguments.iter().map(|argument| borrowed(&argument.ty, None)).collect();
        let values = one_or_tuple(&names);
        let call = |verb: &str| {
            let verb = Ident::new(verb, span);
            quote_spanned!(span=> #krate::Call::#verb(&self.#ident, &#values))
        };
        let call_path = format!("{}::Call", krate.to_string().replace(' ', "").trim_start_matches("::"));
        let conditions: Vec<_> = named(&self.attributes, &["cfg", "deprecated"]).collect();
        if self.one_way {
            let errors = format!("As [`Call::notify`]({call_path}::notify), which says what `Ok` means.");
            let started = format!("As [`{name}`](Self::{name}), for async code: it waits without blocking the thread.");
            let start_errors = format!("As [`Call::notify_async`]({call_path}::notify_async).");
            let (blocking, starting) = (call("notify"), call("notify_async"));
            return quote_spanned! {span=>
                #(#copied)*
                #fallback
                ///
                /// One way: the server sends no response.
                ///
                /// # Errors
                #[doc = #errors]
                #visibility fn #ident(&self, #(#names: #types),*) -> #krate::Result<()> { #blocking }

                #(#conditions)*
                #[doc = #started]
                ///
                /// # Errors
                #[doc = #start_errors]
                #visibility async fn #start(&self, #(#names: #types),*) -> #krate::Result<()> { #starting.await }
            };
        }
        let [errors, start_errors] = ["call", "start"].map(|verb| format!("As [`Call::{verb}`]({call_path}::{verb})."));
        let started = format!("Starts a call of [`{name}`](Self::{name}), and returns at once.");
        let (blocking, starting) = (call("call"), call("start"));
        quote_spanned! {span=>
            #(#copied)*
            #fallback
            ///
            /// # Errors
            #[doc = #errors]
            #visibility fn #ident(&self, #(#names: #types),*) -> #krate::Result<#result> { #blocking }

            #(#conditions)*
            #[doc = #started]
            ///
            /// # Errors
            #[doc = #start_errors]
            #visibility fn #start(&self, #(#names: #types),*) -> #krate::Result<#krate::Pending<#result>> { #starting }
        }
    }

    /// Defines the procedure at `provider`, in the body of `serve_at`.
    fn definition(&self, service: &Service) -> TokenStream {
        let Method { ident, procedure, returned, .. } = self;
        let (span, declaration) = (self.span(), &service.ident);
        let krate = spanned(&service.krate, span);
        let conditions = named(&self.attributes, &["cfg"]);
        // Not the names of the arguments, which may be those of variables here.
        let names: Vec<_> = (0..self.arguments.len()).map(|n| format_ident!("argument_{n}", span = span)).collect();
        let types: Vec<_> = self.arguments.iter().map(|Argument { ty, .. }| quote!(#ty)).collect();
        let (pattern, arguments) = (one_or_tuple(&names), one_or_tuple(&types));
        let define = match (self.is_async, self.fallible) {
            (false, false) => "define",
            (false, true) => "define_try",
            (true, false) => "define_async",
            (true, true) => "define_try_async",
        };
        let define = Ident::new(define, span);
        let definition = if self.is_async {
            let request = self.request.iter().map(|_| quote_spanned!(span=> &request));
            quote_spanned! {span=>
                #define(#procedure, move |request: #krate::Request, #pattern: #arguments| {
                    let service = ::core::clone::Clone::clone(&service);
                    async move {
                        let _ = &request;
                        #declaration::#ident(&*service, #(#request,)* #(#names),*).await
                    }
                })
            }
        } else {
            let request = self.request.iter().map(|_| quote_spanned!(span=> request));
            quote_spanned! {span=>
                #define(#procedure, move |request: &#krate::Request, #pattern: #arguments| -> #returned {
                    let _ = request;
                    #declaration::#ident(&*service, #(#request,)* #(#names),*)
                })
            }
        };
        quote_spanned! {span=>
            #(#conditions)*
            {
                let service = ::core::clone::Clone::clone(&service);
                server.registrations.push(provider.#definition?);
            }
        }
    }
}

/// The tokens of a path, with another span.
fn spanned(path: &TokenStream, span: Span) -> TokenStream {
    let at_span = |mut token: TokenTree| {
        token.set_span(span);
        token
    };
    path.clone().into_iter().map(at_span).collect()
}

/// What stands for a call's arguments: `()`, the only one, or a tuple.
fn one_or_tuple<T: quote::ToTokens>(parts: &[T]) -> TokenStream {
    match parts {
        [one] => quote!(#one),
        parts => quote!((#(#parts),*)),
    }
}

/// The type by which the client takes an argument. It is encoded as the argument's type is.
fn borrowed(ty: &Type, lifetime: Option<&Lifetime>) -> TokenStream {
    let reference = quote!(&#lifetime #ty);
    let Type::Path(path) = ungrouped(ty) else { return reference };
    let Some(last) = path.path.segments.last() else { return reference };
    match (last.ident.to_string().as_str(), first_generic(ty)) {
        ("String", None) => quote!(&#lifetime ::core::primitive::str),
        ("Vec", Some(element)) => quote!(&#lifetime [#element]),
        ("Option", Some(content)) => {
            let content = borrowed(content, lifetime);
            quote!(::core::option::Option<#content>)
        }
        (name, None) if path.path.segments.len() == 1 && PRIMITIVES.contains(&name) => quote!(#ty),
        _ => reference,
    }
}
