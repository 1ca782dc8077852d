//! Compiles the schema with Cap'n Proto's compiler, where it is installed.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(capnp)");
    println!("cargo::rerun-if-changed=echo.capnp");
    match capnpc::CompilerCommand::new().file("echo.capnp").default_parent_module(vec!["capnp_rpc".to_owned()]).run() {
        Ok(()) => println!("cargo::rustc-cfg=capnp"),
        Err(_) => println!("cargo::warning=capnp-rpc is left out: there is no `capnp` here (Debian: apt-get install capnproto)"),
    }
}
