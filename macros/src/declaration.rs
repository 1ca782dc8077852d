//! What a service's trait declares, and what it must not.

use std::collections::HashMap;

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::ext::IdentExt;
use syn::meta::ParseNestedMeta;
use syn::{
    Attribute, Error, Expr, ExprLit, FnArg, GenericArgument, Generics, Ident, ItemTrait, Lit, LitStr, Pat, PatType, Path,
    PathArguments, PathSegment, ReceiverKind, Result, ReturnType, Signature, TraitItem, TraitItemFn, Type, Visibility,
    parse_quote,
};

/// Serde has tuples of so many elements.
const MAX_ARGUMENTS: usize = 16;

/// The options of `#[service(…)]`.
#[derive(Default)]
pub struct Options {
    name: Option<LitStr>,
    krate: Option<Path>,
}

impl Options {
    pub fn read(&mut self, option: &ParseNestedMeta) -> Result<()> {
        if option.path.is_ident("name") {
            self.name = Some(option.value()?.parse()?);
        } else if option.path.is_ident("crate") {
            self.krate = Some(option.value()?.parse::<LitStr>()?.parse()?);
        } else {
            return Err(option.error("the options of a service are `name = \"…\"` and `crate = \"…\"`"));
        }
        Ok(())
    }
}

/// A trait that has passed all checks.
pub struct Service {
    /// The path of the crate calomel.
    pub krate: TokenStream,
    pub attributes: Vec<Attribute>,
    pub visibility: Visibility,
    pub ident: Ident,
    pub client: Ident,
    pub server: Ident,
    pub methods: Vec<Method>,
}

pub struct Method {
    pub attributes: Vec<Attribute>,
    pub ident: Ident,
    /// The client's method that starts a call of this one; of a one-way method, its async form.
    pub start: Ident,
    /// The name by which peers call it.
    pub procedure: LitStr,
    /// Its signature in the trait.
    pub signature: Signature,
    pub is_async: bool,
    pub one_way: bool,
    /// An error ends the call, and is no part of its result.
    pub fallible: bool,
    /// The argument `request: &Request`.
    pub request: Option<Argument>,
    pub arguments: Vec<Argument>,
    /// What is sent.
    pub result: TokenStream,
    /// What the method returns: `result`, or a `Result` with that in `Ok`.
    pub returned: TokenStream,
}

pub struct Argument {
    pub ident: Ident,
    pub ty: Type,
}

/// Collects errors, so that the compiler shows all of them at once.
#[derive(Default)]
struct Errors(Option<Error>);

impl Errors {
    fn add(&mut self, error: Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(error),
            None => self.0 = Some(error),
        }
    }

    fn at(&mut self, tokens: impl ToTokens, message: &str) {
        self.add(Error::new_spanned(tokens, message));
    }

    fn none_of(&mut self, generics: &Generics, message: &str) {
        if !generics.params.is_empty() {
            self.at(generics, message);
        }
        if let Some(clause) = &generics.where_clause {
            self.at(clause, message);
        }
    }
}

impl Service {
    pub fn new(options: Options, declaration: ItemTrait) -> Result<Service> {
        let ItemTrait { attrs: attributes, vis: visibility, ident, generics, supertraits, items, .. } = &declaration;
        let mut errors = Errors::default();
        if let Some(unsafety) = &declaration.unsafety {
            errors.at(unsafety, "a service is a safe trait");
        }
        errors.none_of(generics, "a service has no generic parameters: both sides know its types");
        if !supertraits.is_empty() {
            errors.at(supertraits, "a service names no supertraits: `Send`, `Sync` and `'static` are added to it");
        }
        let prefix = options.name.map_or_else(|| ident.unraw().to_string(), |name| name.value());
        let mut methods = Vec::new();
        for item in items {
            match item {
                TraitItem::Fn(function) => methods.extend(Method::new(&prefix, function, &mut errors)),
                other => errors.at(other, "a service has methods only"),
            }
        }
        if items.is_empty() {
            errors.at(ident, "a service has at least one method");
        }
        check_names(&methods, &mut errors);
        if let Some(errors) = errors.0 {
            return Err(errors);
        }
        Ok(Service {
            krate: options.krate.map_or_else(|| quote!(::calomel), |path| quote!(#path)),
            attributes: attributes.clone(),
            visibility: visibility.clone(),
            client: format_ident!("{}Client", ident.unraw()),
            server: format_ident!("{}Server", ident.unraw()),
            ident: ident.clone(),
            methods,
        })
    }
}

/// Reports methods whose names or procedures are taken, and those that collide with what every client has.
fn check_names(methods: &[Method], errors: &mut Errors) {
    let (mut names, mut procedures) = (HashMap::new(), HashMap::new());
    for own in ["new", "timeout"] {
        names.insert(own.to_owned(), format!("`{own}` is a function of every client: choose another name for the method"));
    }
    for Method { ident, procedure, .. } in methods {
        let name = ident.unraw().to_string();
        match names.get(&name) {
            Some(taken) => errors.at(ident, taken),
            None => {
                if procedures.insert(procedure.value(), ()).is_some() {
                    errors.at(procedure, &format!("two methods are called by the name `{}`", procedure.value()));
                }
                names.insert(name.clone(), format!("two methods are named `{name}`"));
            }
        }
    }
    for Method { ident, start, .. } in methods {
        if let Some(other) = methods.iter().find(|other| other.ident == *start) {
            let message = format!("the client's `{start}` starts a call of `{ident}`: choose another name for the method");
            errors.at(&other.ident, &message);
        }
    }
}

impl Method {
    /// `None` when errors were added.
    fn new(prefix: &str, function: &TraitItemFn, errors: &mut Errors) -> Option<Method> {
        let Signature { constness, asyncness, abi, ident, generics, inputs, variadic, output, .. } = &function.sig;
        let before = errors.0.iter().flatten().count();
        for qualifier in [constness.to_token_stream(), function.sig.safety.to_token_stream(), abi.to_token_stream()] {
            if !qualifier.is_empty() {
                errors.at(qualifier, "a method of a service is a plain or an `async` function");
            }
        }
        if let Some(variadic) = variadic {
            errors.at(variadic, "a method of a service has a fixed number of arguments");
        }
        errors.none_of(generics, "a method of a service has no generic parameters: both sides know its types");
        if let Some(body) = &function.default {
            errors.at(body, "a method of a service has no body: the server implements it");
        }

        let (mut one_way, mut fallible, mut rename, mut attributes) = (false, false, None, Vec::new());
        for attribute in &function.attrs {
            let flag = match attribute.path() {
                path if path.is_ident("one_way") => Some(&mut one_way),
                path if path.is_ident("fallible") => Some(&mut fallible),
                _ => None,
            };
            if let Some(flag) = flag {
                attribute.meta.require_path_only().err().into_iter().for_each(|error| errors.add(error));
                *flag = true;
            } else if attribute.path().is_ident("rename") {
                match text_of(attribute) {
                    Ok(name) => rename = Some(name),
                    Err(error) => errors.add(error),
                }
            } else {
                attributes.push(attribute.clone());
            }
        }

        let returned = match output {
            ReturnType::Default => parse_quote!(()),
            ReturnType::Type(_, ty) => (**ty).clone(),
        };
        let mut result = &returned;
        if fallible {
            match first_generic(&returned) {
                Some(ok) => result = ok,
                None => errors.at(output_or(output, ident), "a fallible method returns a `Result`, whose `Ok` is sent"),
            }
        }
        if one_way && !matches!(ungrouped(result), Type::Tuple(unit) if unit.elems.is_empty()) {
            errors.at(result, "a one-way method returns nothing: no response is sent");
        }
        check_type(result, "results", errors);

        match inputs.first() {
            Some(FnArg::Receiver(receiver)) => {
                let by_reference = matches!(&receiver.kind, ReceiverKind::Reference(_, None, None));
                if !by_reference {
                    errors.at(receiver, "a method of a service takes `&self`: several calls run at a time");
                }
            }
            _ => errors.add(Error::new(ident.span(), "a method of a service takes `&self` first")),
        }
        let (mut request, mut arguments) = (None, Vec::new());
        for (position, input) in inputs.iter().filter_map(typed).enumerate() {
            let Some(ident) = name_of(input, errors) else { continue };
            let argument = Argument { ident, ty: (*input.ty).clone() };
            if is_request(&input.ty) {
                if position > 0 {
                    errors.at(input, "the request comes first, after `&self`");
                }
                request = Some(argument);
            } else {
                check_type(&input.ty, "arguments", errors);
                arguments.push(argument);
            }
        }
        if arguments.len() > MAX_ARGUMENTS {
            errors.at(&arguments[MAX_ARGUMENTS].ident, "a method has at most 16 arguments: group some in a struct");
        }

        let mut signature = function.sig.clone();
        if signature.asyncness.take().is_some() {
            // Which `async fn` can't say: the engine polls the future on its threads.
            signature.output = parse_quote!(-> impl ::core::future::Future<Output = #returned> + ::core::marker::Send);
        }
        let name = rename.unwrap_or_else(|| LitStr::new(&ident.unraw().to_string(), ident.span()));
        let method = Method {
            attributes,
            start: if one_way { format_ident!("{}_async", ident.unraw()) } else { format_ident!("start_{}", ident.unraw()) },
            procedure: LitStr::new(&format!("{prefix}.{}", name.value()), name.span()),
            ident: ident.clone(),
            signature,
            is_async: asyncness.is_some(),
            one_way,
            fallible,
            request,
            arguments,
            result: quote!(#result),
            returned: quote!(#returned),
        };
        (errors.0.iter().flatten().count() == before).then_some(method)
    }
}

/// The text of `#[rename = "…"]`.
fn text_of(attribute: &Attribute) -> Result<LitStr> {
    match &attribute.meta.require_name_value()?.value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Ok(text.clone()),
        other => Err(Error::new_spanned(other, "a name is a string: `#[rename = \"…\"]`")),
    }
}

/// What a method's result is reported at: its name, where it has none.
fn output_or<'a>(output: &'a ReturnType, name: &'a Ident) -> &'a dyn ToTokens {
    match output {
        ReturnType::Default => name,
        ReturnType::Type(_, ty) => ty,
    }
}

/// The type within parentheses, and within those that can't be seen around a type that `macro_rules` has passed on.
pub fn ungrouped(mut ty: &Type) -> &Type {
    loop {
        ty = match ty {
            Type::Group(group) => &group.elem,
            Type::Paren(paren) => &paren.elem,
            _ => return ty,
        }
    }
}

/// The `T` of `Vec<T>`, `Result<T, E>`, `io::Result<T>` and their like.
pub fn first_generic(ty: &Type) -> Option<&Type> {
    let Type::Path(path) = ungrouped(ty) else { return None };
    let PathArguments::AngleBracketed(arguments) = &path.path.segments.last()?.arguments else { return None };
    match arguments.args.first()? {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    }
}

fn typed(input: &FnArg) -> Option<&PatType> {
    match input {
        FnArg::Typed(input) => Some(input),
        FnArg::Receiver(_) => None,
    }
}

fn name_of(input: &PatType, errors: &mut Errors) -> Option<Ident> {
    if let Some(attribute) = input.attrs.first() {
        errors.at(attribute, "an argument of a service has no attributes");
    }
    match &*input.pat {
        Pat::Ident(name) if name.by_ref.is_none() && name.mutability.is_none() && name.subpat.is_none() => {
            Some(name.ident.clone())
        }
        other => {
            errors.at(other, "an argument of a service has a name, and no pattern");
            None
        }
    }
}

/// True for `&Request`, by whatever path.
fn is_request(ty: &Type) -> bool {
    let Type::Reference(reference) = ungrouped(ty) else { return false };
    let Type::Path(path) = ungrouped(&reference.elem) else { return false };
    let last = path.path.segments.last();
    reference.mutability.is_none() && reference.lifetime.is_none() && last.is_some_and(|last| last.ident == "Request")
}

/// Reports what is no type of a value that can be sent.
fn check_type(ty: &Type, role: &str, errors: &mut Errors) {
    let owned = |instead: &str| format!("{role} are sent, so they own what they hold{instead}");
    match ungrouped(ty) {
        Type::Reference(reference) => {
            let instead = match &*reference.elem {
                Type::Path(path) if path.path.is_ident("str") => ": write `String`".to_owned(),
                Type::Slice(_) => ": write `Vec<_>`".to_owned(),
                _ if role == "arguments" => "; only `request: &Request`, the call itself, is a reference".to_owned(),
                _ => String::new(),
            };
            errors.at(reference, &owned(&instead));
        }
        Type::ImplTrait(_) | Type::TraitObject(_) => {
            errors.at(ty, &format!("{role} are sent, so both sides know their types: name one"));
        }
        Type::Path(path) => {
            path.qself.iter().for_each(|qself| check_type(&qself.ty, role, errors));
            for PathSegment { ident, arguments, .. } in &path.path.segments {
                if ident == "Self" {
                    errors.at(ident, &format!("{role} are sent, so both sides know their types: `Self` is the server's"));
                }
                let PathArguments::AngleBracketed(arguments) = arguments else { continue };
                for argument in &arguments.args {
                    match argument {
                        GenericArgument::Lifetime(lifetime) => errors.at(lifetime, &owned("")),
                        GenericArgument::Type(ty) => check_type(ty, role, errors),
                        _ => {}
                    }
                }
            }
        }
        Type::Tuple(tuple) => tuple.elems.iter().for_each(|ty| check_type(ty, role, errors)),
        Type::Array(array) => check_type(&array.elem, role, errors),
        Type::Slice(slice) => check_type(&slice.elem, role, errors),
        _ => {}
    }
}
