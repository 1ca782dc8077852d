//! Misuse does not compile: each program in `ui` begins with the code of the expected error; the compiler's message is in the
//! file beside it.
//!
//! `TRYBUILD=overwrite cargo test --test compile_fail` rewrites the messages; read the difference before you commit it.

/// Hints that some messages must contain: what to use instead.
const ADVICE: [(&str, &str); 10] = [
    ("borrowed_writable_outside_a_scope", "engine.scope"),
    ("map_of_values", "newtype with `unsafe impl Buffer`"),
    ("scope_owned_buffer", "engine.expose(buffer, mode)"),
    ("scope_shared_for_writing", "expose_read_only"),
    ("started_pull_into_a_borrow", "s.start_pull_into"),
    ("vector_of_vectors", "Segments"),
    ("writable_bool", "expose_read_only"),
    ("writable_shared", "expose_read_only"),
    ("writable_string", "expose_read_only"),
    ("writable_struct", "bytemuck::Pod"),
];

#[test]
fn misuse_does_not_compile() {
    let programs = trybuild::TestCases::new();
    programs.compile_fail("tests/ui/*.rs");
    // It compiles the programs, and compares the messages, when it is dropped.
    drop(programs);
    let mut count = 0;
    for entry in std::fs::read_dir("tests/ui").unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let program = std::fs::read_to_string(&path).unwrap();
            let code = program.get(3..8).unwrap_or_default();
            let words = std::fs::read_to_string(path.with_extension("stderr")).unwrap();
            assert!(words.contains(&format!("error[{code}]")), "{} fails for another reason:\n{words}", path.display());
            count += 1;
        }
    }
    assert!(count >= 20, "programs are missing: {count}");
    for (name, advice) in ADVICE {
        let words = std::fs::read_to_string(format!("tests/ui/{name}.stderr")).unwrap();
        assert!(words.contains(advice), "the message for {name} lacks {advice}:\n{words}");
    }
}
