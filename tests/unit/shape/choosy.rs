//! Types whose parts refuse values, and types whose parts depend on values: alone, and one behind the other.

use super::*;

/// What follows a tag that is written by hand is of the type that the tag says.
#[test]
fn a_list_of_what_is_tagged_by_hand() {
    tagged_by_hand::<0, 1>();
    tagged_by_hand::<1, 0>();
    tagged_by_hand::<1, 2>();
    tagged_by_hand::<2, 1>();
}

fn tagged_by_hand<const TEXT: u8, const NUMBER: u8>() {
    #[derive(Debug, PartialEq)]
    enum Tagged<const TEXT: u8, const NUMBER: u8> {
        Number(u32),
        Text(String),
    }
    impl<const TEXT: u8, const NUMBER: u8> Serialize for Tagged<TEXT, NUMBER> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            match self {
                Tagged::Number(number) => (NUMBER, number).serialize(serializer),
                Tagged::Text(text) => (TEXT, text).serialize(serializer),
            }
        }
    }
    impl<'de, const TEXT: u8, const NUMBER: u8> Deserialize<'de> for Tagged<TEXT, NUMBER> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Reader<const TEXT: u8, const NUMBER: u8>;
            impl<'de, const TEXT: u8, const NUMBER: u8> Visitor<'de> for Reader<TEXT, NUMBER> {
                type Value = Tagged<TEXT, NUMBER>;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("a tag and its content")
                }
                fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
                    let short = || de::Error::custom("too short");
                    Ok(match elements.next_element::<u8>()?.ok_or_else(short)? {
                        tag if tag == NUMBER => Tagged::Number(elements.next_element()?.ok_or_else(short)?),
                        tag if tag == TEXT => Tagged::Text(elements.next_element()?.ok_or_else(short)?),
                        _ => return Err(de::Error::custom("no such tag")),
                    })
                }
            }
            deserializer.deserialize_tuple(2, Reader::<TEXT, NUMBER>)
        }
    }
    let number = || Tagged::<TEXT, NUMBER>::Number(1);
    let text = || Tagged::<TEXT, NUMBER>::Text("a".into());
    round_trips(number());
    round_trips(text());
    round_trips(Some(number()));
    round_trips(Some(text()));
    round_trips((1u16, vec![text()]));
    round_trips(vec![number(), text()]);
    round_trips(BTreeMap::from([(1u8, number()), (2, text())]));
    // Behind types that refuse most values: runs that make values up differently have to get past them.
    round_trips((NonZeroU32::MIN, number()));
    round_trips((NonZeroU32::MIN, text()));
    round_trips((Identifier([7; 16]), number()));
    round_trips((Identifier([7; 16]), text()));
    round_trips((Level::new("1.0.0"), number()));
    round_trips((Level::new("1.0.0"), text()));
    round_trips((Some(Identifier([7; 16])), vec![Level::new("1.0.0")], text()));
    // And behind types whose validation is of the whole.
    round_trips((vec![1u8], Even(4), number()));
    round_trips((vec![1u8], Even(4), text()));
    round_trips((Span { low: 1, high: 2 }, number()));
    round_trips((Span { low: 1, high: 2 }, text()));
    let engine = crate::Engine::client("loop").unwrap();
    let bulk = engine.expose(vec![7u8; 10], crate::BulkMode::ReadWrite).unwrap().bulk();
    let behind = Shape::of_type::<(crate::Bulk, Tagged<TEXT, NUMBER>)>();
    assert!(behind.accepts(&Shape::of_value(&(&bulk, number()))), "{behind}");
    assert!(behind.accepts(&Shape::of_value(&(&bulk, text()))), "{behind}");
    let behind = Shape::of_type::<(Option<crate::Bulk>, Vec<crate::Bulk>, Tagged<TEXT, NUMBER>)>();
    assert!(behind.accepts(&Shape::of_value(&(Some(&bulk), vec![&bulk], text()))), "{behind}");
}

/// As above, with a tag that refuses all other numbers itself.
#[test]
fn what_is_tagged_by_a_number_that_is_checked() {
    checked_tag::<0, 1>();
    checked_tag::<1, 0>();
    checked_tag::<1, 2>();
    checked_tag::<2, 1>();
    checked_tag::<0, 2>();
}

fn checked_tag<const TEXT: u8, const NUMBER: u8>() {
    #[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
    #[serde(try_from = "u8")]
    struct Tag<const TEXT: u8, const NUMBER: u8>(u8);
    impl<const TEXT: u8, const NUMBER: u8> TryFrom<u8> for Tag<TEXT, NUMBER> {
        type Error = &'static str;
        fn try_from(tag: u8) -> Result<Self, &'static str> {
            if tag == TEXT || tag == NUMBER { Ok(Tag(tag)) } else { Err("no such tag") }
        }
    }
    #[derive(Debug)]
    struct Item<const TEXT: u8, const NUMBER: u8>;
    impl<'de, const TEXT: u8, const NUMBER: u8> Deserialize<'de> for Item<TEXT, NUMBER> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Reader<const TEXT: u8, const NUMBER: u8>;
            impl<'de, const TEXT: u8, const NUMBER: u8> Visitor<'de> for Reader<TEXT, NUMBER> {
                type Value = Item<TEXT, NUMBER>;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("a tag and its content")
                }
                fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
                    let short = || de::Error::custom("too short");
                    let Tag(tag) = elements.next_element::<Tag<TEXT, NUMBER>>()?.ok_or_else(short)?;
                    if tag == TEXT {
                        elements.next_element::<String>()?.ok_or_else(short)?;
                    } else {
                        elements.next_element::<u32>()?.ok_or_else(short)?;
                    }
                    Ok(Item)
                }
            }
            deserializer.deserialize_tuple(2, Reader::<TEXT, NUMBER>)
        }
    }
    let (number, text) = ((NUMBER, 5u32), (TEXT, "text"));
    let accept = |shape: Shape, values: [Shape; 2]| {
        for value in values {
            assert!(shape.accepts(&value), "{shape} refuses {value} ({TEXT}, {NUMBER})");
        }
    };
    accept(Shape::of_type::<Item<TEXT, NUMBER>>(), [Shape::of_value(&number), Shape::of_value(&text)]);
    let behind = [Shape::of_value(&(1u32, &number)), Shape::of_value(&(1u32, &text))];
    accept(Shape::of_type::<(NonZeroU32, Item<TEXT, NUMBER>)>(), behind);
    let behind = [Shape::of_value(&("1.0.0", &number)), Shape::of_value(&("1.0.0", &text))];
    accept(Shape::of_type::<(Level, Item<TEXT, NUMBER>)>(), behind);
}

/// A validation that relates values which refuse others themselves.
#[test]
fn what_is_behind_related_values_is_known() {
    #[derive(Deserialize)]
    struct Bounds {
        max: NonZeroU32,
        min: NonZeroU32,
    }
    #[derive(Deserialize)]
    #[serde(try_from = "Bounds")]
    struct Falling;
    impl TryFrom<Bounds> for Falling {
        type Error = &'static str;
        fn try_from(bounds: Bounds) -> Result<Falling, &'static str> {
            if bounds.min < bounds.max { Ok(Falling) } else { Err("empty") }
        }
    }
    #[derive(Deserialize)]
    #[serde(try_from = "Bounds")]
    struct Large;
    impl TryFrom<Bounds> for Large {
        type Error = &'static str;
        fn try_from(bounds: Bounds) -> Result<Large, &'static str> {
            if bounds.min.get() * bounds.max.get() >= 16 { Ok(Large) } else { Err("small") }
        }
    }
    #[derive(Deserialize)]
    #[serde(try_from = "HashSet<NonZeroU32>")]
    struct Several;
    impl TryFrom<HashSet<NonZeroU32>> for Several {
        type Error = &'static str;
        fn try_from(set: HashSet<NonZeroU32>) -> Result<Several, &'static str> {
            if set.len() > 1 { Ok(Several) } else { Err("few") }
        }
    }
    assert_eq!(text_of::<(Falling, u16)>(), "(Bounds { max: u32, min: u32 }, u16)");
    assert_eq!(text_of::<(Large, u16)>(), "(Bounds { max: u32, min: u32 }, u16)");
    assert_eq!(text_of::<(Several, u16)>(), "([u32], u16)");
    // Different numbers, beside values that refuse others.
    #[derive(Deserialize)]
    #[serde(try_from = "[(u32, Level); 3]")]
    struct Team;
    impl TryFrom<[(u32, Level); 3]> for Team {
        type Error = &'static str;
        fn try_from(members: [(u32, Level); 3]) -> Result<Team, &'static str> {
            let numbers: HashSet<u32> = members.iter().map(|(number, _)| *number).collect();
            if numbers.len() == 3 { Ok(Team) } else { Err("twice") }
        }
    }
    assert_eq!(text_of::<(Team, u16)>(), "(((u32, str), (u32, str), (u32, str)), u16)");
    // In a type within itself, the outer value and the inner ones are presented different values.
    #[derive(Deserialize)]
    #[serde(try_from = "RawComment")]
    struct Comment;
    #[derive(Deserialize)]
    struct RawComment {
        id: u64,
        parent: u64,
        #[serde(rename = "replies")]
        _replies: Vec<Comment>,
    }
    impl TryFrom<RawComment> for Comment {
        type Error = &'static str;
        fn try_from(raw: RawComment) -> Result<Comment, &'static str> {
            if raw.id != raw.parent { Ok(Comment) } else { Err("its own parent") }
        }
    }
    let comment = text_of::<(Comment, Identifier, u16)>();
    assert!(comment.ends_with(", bytes, u16)"), "{comment}");
}

/// Many values that refuse some do not keep tracing from its end.
#[test]
fn what_stands_before_many_choosy_values_is_known() {
    type Ten = [NonZeroU32; 10];
    type Many = (Level, Identifier, (Ten, Ten), (Level, Identifier), NonZeroU128, NonZeroI8);
    let shape = Shape::of_type::<((u8, u32), Vec<Many>, Many, u16)>();
    assert!(shape.accepts(&Shape::of_value(&((1u8, 2u32), Vec::<u8>::new(), many(), 3u16))), "{shape}");
    assert!(!shape.accepts(&Shape::of_value(&((1u8, 2u32), Vec::<u8>::new(), many(), "no number"))), "{shape}");
    fn many() -> impl Serialize {
        let identifier = || Identifier([7; 16]);
        (Level::new("1.0.0"), identifier(), ([1u32; 10], [1u32; 10]), (Level::new("1.0.0"), identifier()), 1u128, 1i8)
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawSpan")]
struct Span {
    low: u8,
    high: u8,
}

#[derive(Deserialize)]
struct RawSpan {
    low: u8,
    high: u8,
}

impl TryFrom<RawSpan> for Span {
    type Error = &'static str;
    fn try_from(RawSpan { low, high }: RawSpan) -> Result<Span, &'static str> {
        if low < high { Ok(Span { low, high }) } else { Err("empty") }
    }
}

/// Sixteen bytes, as crates for identifiers read them.
#[derive(Debug, PartialEq)]
struct Identifier([u8; 16]);

impl Serialize for Identifier {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Identifier {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl Visitor<'_> for Reader {
            type Value = Identifier;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("sixteen bytes")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Identifier, E> {
                bytes.try_into().map(Identifier).map_err(|_| E::custom("of another length"))
            }
        }
        deserializer.deserialize_bytes(Reader)
    }
}

/// A text of three numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String")]
struct Level(String);

impl Level {
    fn new(text: &str) -> Level {
        Level(text.to_owned())
    }
}

impl TryFrom<String> for Level {
    type Error = &'static str;
    fn try_from(text: String) -> Result<Level, &'static str> {
        let numbers: Vec<&str> = text.split('.').collect();
        if numbers.len() == 3 && numbers.iter().all(|n| n.parse::<u8>().is_ok()) { Ok(Level(text)) } else { Err("no level") }
    }
}

/// A validation that refuses the first value of the whole: what is behind a bulk in it is found all the same.
#[test]
fn what_is_behind_a_bulk_in_a_validated_type_is_known() {
    #[derive(Deserialize)]
    #[serde(try_from = "Raw")]
    struct Checked;
    #[derive(Deserialize)]
    struct Raw {
        bulk: crate::Bulk,
        kind: Kind,
        count: u32,
    }
    #[derive(Deserialize)]
    enum Kind {
        One,
        Two(u8),
        Three { name: String },
    }
    impl TryFrom<Raw> for Checked {
        type Error = &'static str;
        fn try_from(raw: Raw) -> Result<Checked, &'static str> {
            if raw.count == 1 { Err("the first value") } else { Ok(Checked) }
        }
    }
    let expected =
        "(Raw { bulk: Bulk { exposed_memory: bytes }, kind: Kind::{One, Two(u8), Three { name: str }}, count: u32 }, u16)";
    assert_eq!(text_of::<(Checked, u16)>(), expected);
}
