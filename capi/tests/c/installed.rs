//! The library, installed once for all tests, and programs that use it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use std::time::SystemTime;

/// The directory of the crate.
pub fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where the library is installed.
pub fn prefix() -> &'static Path {
    static PREFIX: LazyLock<PathBuf> = LazyLock::new(|| {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("prefix");
        let mut install = Command::new(home().join("install"));
        done(install.arg(&prefix).arg("--archive").arg(archive()));
        prefix
    });
    &PREFIX
}

/// The archive that was built with this test. Those of other features lie beside it.
fn archive() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let built = test.parent().unwrap().read_dir().unwrap();
    let archives = built.map(|entry| entry.unwrap().path()).filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("liblarder_capi") && name.ends_with(".a")
    });
    let changed = |path: &PathBuf| -> SystemTime { path.metadata().unwrap().modified().unwrap() };
    archives.max_by_key(changed).unwrap()
}

/// A language with its flags.
#[derive(Clone, Copy, Debug)]
pub enum Language {
    C11,
    Cpp17,
}

/// Flags of sanitizers, by which an error ends the program.
pub const SANITIZED: &[&str] = &[
    "-g",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
];

impl Language {
    /// The compiler, with the flags of every program.
    pub fn compiler(self) -> Command {
        let (program, words) = match self {
            Language::C11 => ("cc", ["-std=c11", "-xc"]),
            Language::Cpp17 => ("c++", ["-std=c++17", "-xc++"]),
        };
        let mut command = Command::new(program);
        command.args(words).arg("-D_DEFAULT_SOURCE");
        command.args(["-Wall", "-Wextra", "-Werror", "-pedantic"]);
        command
    }
}

/// Compiles a program of `programs/` against the shared library.
pub fn compiled(name: &str, language: Language, flags: &[&str]) -> PathBuf {
    let source = home().join("tests/c/programs").join(name);
    linked(&source, &prefix().join("include"), language, flags)
}

/// Compiles a program with the headers in `include`.
pub fn linked(source: &Path, include: &Path, language: Language, flags: &[&str]) -> PathBuf {
    let library = prefix().join("lib");
    let name = source.file_stem().unwrap().to_str().unwrap();
    let kind = flags.concat().len();
    let to = prefix().join(format!("{name}-{language:?}-{kind}"));
    let mut command = language.compiler();
    command.arg(format!("-I{}", include.display())).args(flags);
    command.arg(source).arg("-o").arg(&to);
    command.arg(format!("-L{}", library.display()));
    command
        .args(["-llarder", "-lm"])
        .arg(format!("-Wl,-rpath,{}", library.display()));
    done(&mut command);
    to
}

/// Runs a command that must succeed. Returns what it printed.
pub fn done(command: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    assert!(status.success(), "{command:?}: {status}\n{out}\n{err}");
    out.into_owned()
}

/// Runs a program on a store in a directory of its own.
pub fn run(program: &Path, words: &[&str]) -> String {
    let directory = tempfile::tempdir().unwrap();
    done(Command::new(program).arg(directory.path()).args(words))
}

/// Whether a program is installed. Else says that `what` is skipped.
pub fn has(program: &str, what: &str) -> bool {
    let is_there = Command::new(program).arg("--version").output().is_ok();
    if !is_there {
        println!("SKIPPED: {what}, {program} is not installed");
    }
    is_there
}
