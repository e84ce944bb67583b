//! Lookups without I/O: the instructions of a call in C above those of the call in Rust that it
//! makes. Times are printed, and no test depends on them.

use std::path::Path;
use std::process::Command;

use crate::installed::{Language, compiled, has, run};

const IN_C: &str = "larder_longest_prefix";

/// The call in Rust.
const IN_RUST: &str = "larder_handle::store::Space::longest_prefix";

const CALLS: u64 = 200;

/// Instructions within the function in C and, in the same calls, within the one in Rust. Two runs
/// cannot be compared: each store draws a hash of its own, and with it the pages of its curve.
fn counted(program: &Path, keys: &str) -> [u64; 2] {
    let directory = tempfile::tempdir().unwrap();
    let profile = directory.path().join("profile");
    let mut valgrind = Command::new("valgrind");
    valgrind
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(format!("--toggle-collect={IN_C}"))
        .arg(program)
        .arg(directory.path().join("store"))
        .arg(keys)
        .arg(CALLS.to_string());
    succeeded(&mut valgrind);
    let mut annotate = Command::new("callgrind_annotate");
    annotate.args(["--inclusive=yes", "--threshold=100"]);
    let functions = succeeded(annotate.arg(&profile));
    [IN_C, IN_RUST].map(|name| inclusive(&functions, name) / CALLS)
}

/// The count at the start of the function's line. Lines are in the order of the counts, so that
/// the first of a name is no closure within the function.
fn inclusive(functions: &str, name: &str) -> u64 {
    let mut lines = functions.lines();
    let line = lines.find(|line| line.contains(name)).expect(name);
    let count = line.split_whitespace().next().unwrap();
    count.replace(',', "").parse().unwrap()
}

/// The output of a program that ends well.
fn succeeded(program: &mut Command) -> String {
    let ended = program.output().unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{errors}");
    String::from_utf8(ended.stdout).unwrap()
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
        let [in_c, in_rust] = counted(&program, keys);
        println!("{keys} keys: {in_c} instructions a call in C, {in_rust} in Rust");
        assert!(in_rust > 100, "{IN_RUST} was not found: {in_rust}");
        assert!(
            in_c > in_rust && in_c - in_rust <= most,
            "{in_c} - {in_rust} for {keys} keys"
        );
    }
}
