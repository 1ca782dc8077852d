//! What must not compile, does not, and says why: each program of `ui` begins with the error that it gets, and stands
//! beside the compiler's words.
//!
//! `TRYBUILD=overwrite cargo test --test compile_fail` writes those anew; read the difference before keeping it.

/// What some of the messages have to say: what to do instead.
const ADVICE: [(&str, &str); 6] = [
    ("borrowed_writable_outside_a_scope", "engine.scope"),
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
    // It compiles them, and compares, when it is dropped.
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
        assert!(words.contains(advice), "{name} does not speak of {advice}:\n{words}");
    }
}
