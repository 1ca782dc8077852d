//! What several values of one type tell about it.

use crate::rpc::shape::{Field, Shape, overlaps, push_run};

/// What two values of one Rust type tell together. `None` when they contradict each other, as those of an untagged
/// enum do.
pub(super) fn merge(a: Shape, b: Shape) -> Option<Shape> {
    Some(match (a, b) {
        (Shape::Unknown, known) | (known, Shape::Unknown) => known,
        (Shape::Leaf(a), Shape::Leaf(b)) if a == b => Shape::Leaf(a),
        (Shape::Option(a), Shape::Option(b)) => Shape::Option(Box::new(merge(*a, *b)?)),
        (Shape::Seq(a), Shape::Seq(b)) => Shape::Seq(Box::new(merge(*a, *b)?)),
        (Shape::Map(a), Shape::Map(b)) => Shape::Map(Box::new((merge(a.0, b.0)?, merge(a.1, b.1)?))),
        (Shape::Tuple(a), Shape::Tuple(b)) if a == b => Shape::Tuple(a),
        (Shape::Tuple(a), Shape::Tuple(b)) => {
            let mut runs = Vec::new();
            for (count, a, b) in overlaps(&a, &b)? {
                push_run(&mut runs, count, merge(a.clone(), b.clone())?);
            }
            Shape::Tuple(runs)
        }
        (Shape::Struct(name, a), Shape::Struct(_, b)) if a.len() == b.len() => {
            let fields = a
                .into_iter()
                .zip(b)
                .map(|(a, b)| Some(Field { shape: merge(a.shape, b.shape)?, name: (a.name == b.name).then_some(a.name)? }));
            Shape::Struct(name, fields.collect::<Option<_>>()?)
        }
        (Shape::Enum(name, mut variants), Shape::Enum(_, others)) => {
            for other in others {
                match variants.binary_search_by_key(&other.index, |variant| variant.index) {
                    Err(at) => variants.insert(at, other),
                    Ok(at) if variants[at].name != other.name => return None,
                    Ok(at) => {
                        let content = std::mem::replace(&mut variants[at].content, Shape::Unknown);
                        variants[at].content = merge(content, other.content)?;
                    }
                }
            }
            Shape::Enum(name, variants)
        }
        _ => return None,
    })
}
