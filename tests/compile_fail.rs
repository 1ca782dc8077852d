//! What must not compile, does not, and says why: each program of `ui` begins with the error that it gets, and stands
//! beside the compiler's words.
//!
//! `TRYBUILD=overwrite cargo test --test compile_fail` writes those anew; read the difference before keeping it.

#[test]
fn misuse_does_not_compile() {
    let mut count = 0;
    for entry in std::fs::read_dir("tests/ui").unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let program = std::fs::read_to_string(&path).unwrap();
            let code = program.get(3..8).unwrap_or_default();
            let words = std::fs::read_to_string(path.with_extension("stderr")).unwrap_or_default();
            assert!(words.contains(&format!("error[{code}]")), "{} fails for another reason:\n{words}", path.display());
            count += 1;
        }
    }
    assert!(count >= 20, "programs are missing: {count}");
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
