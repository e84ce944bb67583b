//! Programs and libraries of different releases of one ABI.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use larder_capi::types::ABI;

use crate::installed::{Language, done, home, linked, prefix, run};

/// The definitions of a header: constants with their values.
fn constants(header: &str) -> BTreeSet<(String, String)> {
    let rows = header
        .lines()
        .filter_map(|line| line.strip_prefix("#define LARDER_"));
    let rows = rows.filter_map(|row| row.split_once(' '));
    let value = |text: &str| text.split("/*").next().unwrap_or("").trim().to_owned();
    rows.filter(|(name, _)| !name.contains('(') && !name.ends_with("_INIT"))
        .map(|(name, text)| (name.to_owned(), value(text)))
        .collect()
}

#[test]
fn a_program_of_the_first_header_runs_with_this_library() {
    let recorded = home().join(format!("tests/abi/{ABI}"));
    let program = linked(&recorded.join("program.c"), &recorded, Language::C11, &[]);
    run(&program, &[]);
    let header = |path| fs::read_to_string(path).unwrap();
    let first = constants(&header(recorded.join("larder.h")));
    let now = constants(&header(home().join("include/larder.h")));
    assert!(
        first.is_subset(&now),
        "{:?}",
        first.difference(&now).collect::<Vec<_>>()
    );
}

/// The header says that a later function has a symbol version of its own. So the loader refuses the
/// program before its first instruction, even if the call is bound lazily.
#[test]
fn a_program_of_a_later_library_is_refused_by_the_loader() {
    let directory = tempfile::tempdir().unwrap();
    let later = directory.path().join("later");
    fs::create_dir(&later).unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let library = write(
        "library.c",
        "unsigned larder_abi(void) { return 1; }\nint larder_added(void) { return 1; }\n",
    );
    let map = write(
        "map",
        "LARDER_1 { global: larder_abi; local: *; };\n\
         LARDER_1.1 { global: larder_added; } LARDER_1;\n",
    );
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wl,-soname,liblarder.so.1"]);
    compiler.arg(format!("-Wl,--version-script,{}", map.display()));
    done(
        compiler
            .arg(library)
            .arg("-o")
            .arg(later.join("liblarder.so.1")),
    );
    std::os::unix::fs::symlink("liblarder.so.1", later.join("liblarder.so")).unwrap();
    let source = write(
        "program.c",
        "#include <stdio.h>\nunsigned larder_abi(void);\nint larder_added(void);\n\
         int main(int argc, char **argv) {\n(void)argv; puts(\"begun\");\n\
         return argc > 5 ? larder_added() : (int)larder_abi() - 1; }\n",
    );
    let program = directory.path().join("program");
    let mut compiler = Command::new("cc");
    compiler
        .arg(source)
        .arg("-o")
        .arg(&program)
        .arg("-Wl,-z,lazy");
    done(
        compiler
            .arg(format!("-L{}", later.display()))
            .arg("-llarder"),
    );
    assert_eq!(
        done(Command::new(&program).env("LD_LIBRARY_PATH", &later)),
        "begun\n"
    );
    let mut with_this = Command::new(&program);
    let ended = with_this
        .env("LD_LIBRARY_PATH", prefix().join("lib"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && ended.stdout.is_empty(), "{said}");
    assert!(said.contains("LARDER_1.1"), "{said}");
}
