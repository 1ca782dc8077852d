//! Formats shapes for error messages: `Point { x: f64, y: f64 }`, `[u8]`, `?`.

use std::fmt::{self, Display, Write};

use super::{Ancestor, Leaf, Run, Shape, Variant};
use crate::text::clipped;

/// Longer texts end in `…`: they stand within a message, next to another shape.
const MAX_TEXT: usize = 300;

/// Tuples up to this long are spelled out, however alike their elements.
const SPELLED_OUT: u32 = 4;

impl Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = Clipped { out: f, left: MAX_TEXT, full: false };
        match write_shape(&mut out, &Ancestor { shape: self, up: None }) {
            Err(_) if out.full => f.write_str("…"),
            result => result,
        }
    }
}

/// Passes on the first bytes, then fails, so that a huge shape is not walked to its end.
struct Clipped<'a, 'f> {
    out: &'a mut fmt::Formatter<'f>,
    left: usize,
    full: bool,
}

impl Write for Clipped<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text.len() <= self.left {
            self.left -= text.len();
            return self.out.write_str(text);
        }
        self.full = true;
        self.out.write_str(clipped(text, self.left))?;
        Err(fmt::Error)
    }
}

fn write_shape(out: &mut Clipped<'_, '_>, at: &Ancestor<'_>) -> fmt::Result {
    match at.shape {
        Shape::Unknown => out.write_str("?"),
        Shape::Mixed => out.write_str("mixed"),
        Shape::Leaf(leaf) => out.write_str(leaf.text()),
        Shape::Option(inner) => {
            out.write_str("Option<")?;
            write_shape(out, &at.below(inner))?;
            out.write_str(">")
        }
        Shape::Seq(element) => {
            out.write_str("[")?;
            write_shape(out, &at.below(element))?;
            out.write_str("]")
        }
        Shape::Map(parts) => {
            out.write_str("{")?;
            write_shape(out, &at.below(&parts.0))?;
            out.write_str(": ")?;
            write_shape(out, &at.below(&parts.1))?;
            out.write_str("}")
        }
        Shape::Tuple(runs) => write_tuple(out, at, runs),
        Shape::Struct(name, fields) => {
            write!(out, "{name}{}{{", if name.is_empty() { "" } else { " " })?;
            for (i, field) in fields.iter().enumerate() {
                write!(out, "{} {}: ", if i == 0 { "" } else { "," }, field.name)?;
                write_shape(out, &at.below(&field.shape))?;
            }
            out.write_str(if fields.is_empty() { "}" } else { " }" })
        }
        Shape::Enum(name, variants) => {
            out.write_str(name)?;
            if let [variant] = &variants[..] {
                out.write_str("::")?;
                return write_variant(out, at, variant);
            }
            out.write_str("::{")?;
            for (i, variant) in variants.iter().enumerate() {
                out.write_str(if i == 0 { "" } else { ", " })?;
                write_variant(out, at, variant)?;
            }
            out.write_str("}")
        }
        Shape::Up(levels) => match at.ancestor(*levels).map(|target| target.shape) {
            Some(Shape::Struct(name, _) | Shape::Enum(name, _)) if !name.is_empty() => out.write_str(name),
            _ => out.write_str("…"),
        },
    }
}

fn write_tuple(out: &mut Clipped<'_, '_>, at: &Ancestor<'_>, runs: &[Run]) -> fmt::Result {
    if let [run] = runs
        && run.count > SPELLED_OUT
    {
        out.write_str("[")?;
        write_shape(out, &at.below(&run.shape))?;
        return write!(out, "; {}]", run.count);
    }
    out.write_str("(")?;
    let mut first = true;
    for run in runs {
        // A long run among others is `12 × u8`.
        let copies = if run.count > SPELLED_OUT { 1 } else { run.count };
        for _ in 0..copies {
            out.write_str(if first { "" } else { ", " })?;
            first = false;
            if copies != run.count {
                write!(out, "{} × ", run.count)?;
            }
            write_shape(out, &at.below(&run.shape))?;
        }
    }
    out.write_str(if matches!(runs, [Run { count: 1, .. }]) { ",)" } else { ")" })
}

fn write_variant(out: &mut Clipped<'_, '_>, at: &Ancestor<'_>, variant: &Variant) -> fmt::Result {
    out.write_str(&variant.name)?;
    let content = at.below(&variant.content);
    match &variant.content {
        Shape::Leaf(Leaf::Unit) => Ok(()),
        Shape::Tuple(runs) => write_tuple(out, &content, runs),
        Shape::Struct(name, _) if name.is_empty() => {
            out.write_str(" ")?;
            write_shape(out, &content)
        }
        _ => {
            out.write_str("(")?;
            write_shape(out, &content)?;
            out.write_str(")")
        }
    }
}
