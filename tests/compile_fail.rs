//! What must not compile, does not, and says why: each file of `ui` stands beside the message that it gets.
//!
//! `TRYBUILD=overwrite cargo test --test compile_fail` writes the messages anew; read the difference before keeping it.

/// The error codes that each of the programs has to fail with.
const CODES: [(&str, &str); 12] = [
    ("borrowed_outside_a_scope", "E0597"),
    ("pull_into_read_only", "E0277"),
    ("reclaimed_exposure_used", "E0382"),
    ("scope_buffer_read_inside", "E0502"),
    ("scope_buffer_shorter_than_the_scope", "E0597"),
    ("scope_buffer_written_inside", "E0499"),
    ("scope_escape", "E0521"),
    ("vector_of_vectors", "E0277"),
    ("view_of_writable", "E0599"),
    ("writable_bool", "E0277"),
    ("writable_string", "E0277"),
    ("write_at_read_only", "E0599"),
];

#[test]
fn misuse_does_not_compile() {
    let ui = std::path::Path::new("tests/ui");
    for (name, code) in CODES {
        let stderr = std::fs::read_to_string(ui.join(name).with_extension("stderr")).unwrap_or_default();
        if !stderr.is_empty() {
            assert!(stderr.contains(code), "{name} fails for another reason than {code}:\n{stderr}");
        }
    }
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
