//! Lookups without I/O: the instructions of a call in C above those of the call in Rust that it
//! makes. Times are printed, and no test depends on them.

use std::path::Path;
use std::process::Command;

use crate::installed::{Language, compiled, has, run};

/// The call in Rust.
const IN_RUST: &str = "larder_handle::store::Space::longest_prefix";

const CALLS: u64 = 200;

/// Instructions within a function, in a run with so many keys a call.
fn counted(program: &Path, keys: &str, function: &str) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    valgrind.arg(format!("--toggle-collect={function}"));
    valgrind
        .arg(program)
        .arg(directory.path())
        .arg(keys)
        .arg(CALLS.to_string());
    let ended = valgrind.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{said}");
    let (_, count) = said.split_once("Collected : ").unwrap();
    count.lines().next().unwrap().trim().parse().unwrap()
}

#[test]
fn a_lookup_has_few_instructions_above_those_in_rust() {
    let program = compiled("lookups.c", Language::C11, &["-O2"]);
    print!("{}", run(&program, &["1", "100000"]));
    print!("{}", run(&program, &["128", "10000"]));
    if !has("valgrind", "the instructions of lookups") {
        return;
    }
    for (keys, most) in [("1", 1_000), ("128", 3_000)] {
        let [in_c, in_rust] =
            ["larder_longest_prefix", IN_RUST].map(|name| counted(&program, keys, name) / CALLS);
        println!("{keys} keys: {in_c} instructions a call in C, {in_rust} in Rust");
        assert!(in_rust > 100, "{IN_RUST} was not found: {in_rust}");
        assert!(
            in_c > in_rust && in_c - in_rust <= most,
            "{in_c} - {in_rust} for {keys} keys"
        );
    }
}
