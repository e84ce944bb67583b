//! The header against the library: types, sizes, numbers and names.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fmt::Write;
use std::mem::offset_of;
use std::process::Command;

use larder_capi::answer::{Code, Error};
use larder_capi::types::{
    ABI, BATCH_MAX, Char, FOREVER, Finished, KEY_BYTES, OpenOptions, Options, Part, PutOptions,
    QueueOptions, TOKENS_MAX,
};
use larder_capi::{about, jobs, pages, store};
use larder_handle::status::Status;

use crate::installed::{Language, done, home, prefix};

/// A type with its name in C.
trait InC {
    fn name() -> String;
}

macro_rules! named {
    ($($rust:ty => $c:literal,)*) => {
        $(impl InC for $rust {
            fn name() -> String {
                $c.to_owned()
            }
        })*
    };
}

named! {
    () => "void", c_void => "void", Char => "char",
    u8 => "uint8_t", i32 => "int32_t", u32 => "uint32_t", u64 => "uint64_t", usize => "size_t",
    Error => "larder_error", store::Store => "larder_store", pages::Namespace => "larder_namespace",
    jobs::Queue => "larder_queue", Part => "larder_part", Finished => "larder_finished",
    OpenOptions => "larder_open_options", PutOptions => "larder_put_options",
    QueueOptions => "larder_queue_options",
}

impl<T: InC> InC for *const T {
    fn name() -> String {
        format!("{} const *", T::name())
    }
}

impl<T: InC> InC for *mut T {
    fn name() -> String {
        format!("{} *", T::name())
    }
}

/// A function with its type in C.
trait Function {
    fn signature(self) -> String;
}

macro_rules! functions {
    ($($argument:ident)*) => {
        impl<R: InC, $($argument: InC,)*> Function for unsafe extern "C" fn($($argument),*) -> R {
            fn signature(self) -> String {
                let arguments: &[String] = &[$($argument::name()),*];
                let arguments = match arguments {
                    [] => "void".to_owned(),
                    some => some.join(", "),
                };
                format!("{} ({arguments})", R::name())
            }
        }
    };
}

functions!();
functions!(A);
functions!(A B);
functions!(A B C);
functions!(A B C D);
functions!(A B C D E);
functions!(A B C D E F);
functions!(A B C D E F G);
functions!(A B C D E F G H);
functions!(A B C D E F G H I);
functions!(A B C D E F G H I J);
functions!(A B C D E F G H I J K);

/// Names of functions with their types.
macro_rules! all {
    ($($module:ident::$name:ident($($argument:tt)*),)*) => {
        vec![$((
            stringify!($name),
            ($module::$name as unsafe extern "C" fn($($argument)*) -> _).signature(),
        ),)*]
    };
}

fn exported() -> Vec<(&'static str, String)> {
    all![
        about::larder_abi(),
        about::larder_version(),
        about::larder_status_name(_),
        about::larder_error_code(_),
        about::larder_error_text(_),
        about::larder_error_free(_),
        about::larder_log_fd(_, _),
        store::larder_attach(_, _, _, _),
        store::larder_open(_, _, _, _),
        store::larder_close(_, _, _),
        store::larder_store_free(_),
        store::larder_flush(_, _),
        store::larder_stats(_, _, _),
        store::larder_text_free(_),
        pages::larder_namespace_open(_, _, _, _),
        pages::larder_namespace_free(_),
        pages::larder_chain(_, _, _, _, _, _, _, _, _),
        pages::larder_longest_prefix(_, _, _, _, _),
        pages::larder_contains(_, _, _, _, _),
        pages::larder_put(_, _, _, _, _, _, _),
        pages::larder_get(_, _, _, _, _, _, _),
        pages::larder_touch(_, _, _, _),
        pages::larder_delete(_, _, _, _, _),
        pages::larder_clear(_, _, _),
        jobs::larder_queue_open(_, _, _, _),
        jobs::larder_queue_fd(_),
        jobs::larder_submit_put(_, _, _, _, _, _, _, _, _, _, _),
        jobs::larder_submit_get(_, _, _, _, _, _, _, _, _, _),
        jobs::larder_poll(_, _, _, _, _, _),
        jobs::larder_queue_free(_),
    ]
}

/// A struct, with the offsets of its fields.
macro_rules! laid_out {
    ($code:ident, $rust:ident, $c:literal: $($field:ident)*) => {
        let size = size_of::<$rust>();
        writeln!($code, "_Static_assert(sizeof({}) == {size}, \"{}\");", $c, $c).unwrap();
        let mut fields = 0;
        $(
            let (at, field) = (offset_of!($rust, $field), stringify!($field));
            let line = format!("_Static_assert(offsetof({}, {field}) == {at}, \"{field}\");", $c);
            writeln!($code, "{line}").unwrap();
            fields += size_of_val(&of_field(|made: &$rust| &raw const made.$field));
        )*
        // Without a field that the list lacks, and without padding, whose bytes no rule sets.
        assert_eq!(fields, size, "{}", $c);
    };
}

/// A value of a field's type.
fn of_field<S, T: Copy>(_: impl Fn(&S) -> *const T) -> std::mem::MaybeUninit<T> {
    std::mem::MaybeUninit::uninit()
}

#[test]
fn the_header_has_the_librarys_types_sizes_and_numbers() {
    let mut code = "#include <larder.h>\n".to_owned();
    for (name, signature) in exported() {
        let same = format!("__builtin_types_compatible_p(__typeof__({name}), {signature})");
        writeln!(
            code,
            "_Static_assert({same}, \"{name} is not {signature}\");"
        )
        .unwrap();
    }
    laid_out!(code, Part, "larder_part": base length);
    laid_out!(code, Finished, "larder_finished": job tag pages);
    laid_out!(code, OpenOptions, "larder_open_options":
        struct_size size page_bytes lease_ms hang_limit_ms read_only settings);
    laid_out!(code, PutOptions, "larder_put_options":
        struct_size before wait_ms depth loose hint_class hint_priority);
    laid_out!(code, QueueOptions, "larder_queue_options": struct_size threads jobs job_bytes);
    let mut numbers = vec![
        ("LARDER_ABI".to_owned(), i128::from(ABI)),
        ("LARDER_KEY_BYTES".to_owned(), KEY_BYTES as i128),
        (
            "LARDER_PARTS_MAX".to_owned(),
            larder_format::PARTS_MAX as i128,
        ),
        ("LARDER_BATCH_MAX".to_owned(), BATCH_MAX as i128),
        ("LARDER_TOKENS_MAX".to_owned(), TOKENS_MAX as i128),
        ("LARDER_FOREVER".to_owned(), i128::from(FOREVER)),
        ("LARDER_DONE".to_owned(), Code::Done as i128),
        ("LARDER_E_ARGUMENT".to_owned(), Code::Argument as i128),
        ("LARDER_E_STORE".to_owned(), Code::Store as i128),
        ("LARDER_E_CLOSED".to_owned(), Code::Closed as i128),
        ("LARDER_E_FULL".to_owned(), Code::Full as i128),
        ("LARDER_E_TIMEOUT".to_owned(), Code::Timeout as i128),
        ("LARDER_E_FORKED".to_owned(), Code::Forked as i128),
        ("LARDER_E_INTERNAL".to_owned(), Code::Internal as i128),
    ];
    let statuses = Status::NAMES.map(|(name, status)| (format!("LARDER_{name}"), status as i128));
    numbers.extend(statuses);
    for (name, number) in &numbers {
        let number = match *number {
            large if large > i128::from(u32::MAX) => format!("{large}u"),
            small => small.to_string(),
        };
        writeln!(code, "_Static_assert({name} == {number}, \"{name}\");").unwrap();
    }
    let source = prefix().join("contract.c");
    std::fs::write(&source, &code).unwrap();
    let mut compiler = Language::C11.compiler();
    compiler
        .arg("-Wno-sign-compare")
        .arg("-fsyntax-only")
        .arg(&source);
    done(compiler.arg(format!("-I{}", home().join("include").display())));

    // No number and no function of the header is left out.
    let header = std::fs::read_to_string(home().join("include/larder.h")).unwrap();
    let defined: BTreeSet<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("#define LARDER_"))
        .filter_map(|line| line.split_once(' '))
        .map(|(name, _)| name)
        .filter(|name| !matches!(*name, "API" | "MUST_USE") && !name.ends_with("_INIT"))
        .collect();
    let known: BTreeSet<&str> = numbers
        .iter()
        .map(|(name, _)| &name["LARDER_".len()..])
        .collect();
    assert_eq!(defined, known);
    let declared = names(&header, "(");
    assert_eq!(
        declared,
        exported()
            .into_iter()
            .map(|(name, _)| name.to_owned())
            .collect()
    );
}

/// Words `larder_...` in code, before `end`.
fn names(text: &str, end: &str) -> BTreeSet<String> {
    let mut is_comment = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        is_comment |= line.trim_start().starts_with("/*");
        if !is_comment {
            let words = line.split(|c: char| !(c.is_alphanumeric() || "_(;".contains(c)));
            let names = words
                .filter_map(|word| word.split_once(end))
                .map(|(name, _)| name);
            found.extend(
                names
                    .filter(|name| name.starts_with("larder_"))
                    .map(str::to_owned),
            );
        }
        is_comment &= !line.contains("*/");
    }
    found
}

#[test]
fn both_libraries_have_the_functions_of_the_header_and_no_other_name() {
    let map = std::fs::read_to_string(home().join("package/larder.map")).unwrap();
    let declared: BTreeSet<String> = exported()
        .into_iter()
        .map(|(name, _)| name.to_owned())
        .collect();
    assert_eq!(names(&map, ";"), declared);

    let shared = prefix().join("lib/liblarder.so.1");
    let listed = done(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(&shared),
    );
    let symbols = listed
        .lines()
        .map(|line| line.split_whitespace().last().unwrap());
    let mut versions = BTreeSet::new();
    let mut found = BTreeSet::new();
    for symbol in symbols {
        match symbol.split_once("@@") {
            Some((name, version)) => {
                found.insert(name.to_owned());
                versions.insert(version);
            }
            None => assert_eq!(symbol, "LARDER_1"),
        }
    }
    assert_eq!(found, declared);
    assert_eq!(versions, BTreeSet::from(["LARDER_1"]));

    let archive = prefix().join("lib/liblarder.a");
    let listed = done(
        Command::new("nm")
            .args(["-g", "--defined-only"])
            .arg(archive),
    );
    let global = listed
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2));
    assert_eq!(global.map(str::to_owned).collect::<BTreeSet<_>>(), declared);

    let dynamic = done(Command::new("readelf").arg("-dW").arg(shared));
    assert!(dynamic.contains("[liblarder.so.1]"), "{dynamic}");
    let needed: BTreeSet<&str> = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .map(|line| line.split(['[', ']']).nth(1).unwrap())
        .collect();
    let usual = [
        "libc.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
    ];
    let others = [
        "ld-linux-aarch64.so.1",
        "libdl.so.2",
        "libpthread.so.0",
        "librt.so.1",
    ];
    let known = BTreeSet::from_iter(usual.into_iter().chain(others));
    assert!(needed.is_subset(&known), "{needed:?}");
    assert!(
        !dynamic.contains("RPATH") && !dynamic.contains("RUNPATH"),
        "{dynamic}"
    );
}

#[test]
fn the_statuses_are_those_of_python() {
    let python = home().join("../python/larder_kv/store.py");
    let text = std::fs::read_to_string(python).unwrap();
    let (_, class) = text.split_once("class Status(enum.IntEnum):").unwrap();
    let class = class.split("\nclass ").next().unwrap();
    let rows = class
        .lines()
        .filter_map(|line| line.strip_prefix("    ")?.split_once(" = "));
    let found: Vec<(String, u8)> = rows
        .filter_map(|(name, code)| Some((name.to_owned(), code.parse().ok()?)))
        .collect();
    let known = Status::NAMES.map(|(name, status)| (name.to_owned(), status as u8));
    assert_eq!(found, known);
}

#[test]
fn the_first_size_of_each_struct_is_that_of_the_first_header() {
    assert_eq!(OpenOptions::FIRST, 56);
    assert_eq!(PutOptions::FIRST, 40);
    assert_eq!(QueueOptions::FIRST, 32);
}

#[test]
fn the_headers_compile_in_every_standard_without_a_warning() {
    let include = home().join("include");
    let check = |program: &str, standard: &str, header: &str| {
        let language = if program == "cc" { "c" } else { "c++" };
        let mut compiler = Command::new(program);
        compiler.args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            "-Wconversion",
            "-Wshadow",
        ]);
        compiler.args([&format!("-std={standard}"), "-fsyntax-only", "-x", language]);
        compiler.arg(format!("-I{}", include.display()));
        done(compiler.arg(include.join(header)));
    };
    for standard in ["c99", "c11", "c17"] {
        check("cc", standard, "larder.h");
    }
    for standard in ["c++11", "c++17", "c++20"] {
        check("c++", standard, "larder.h");
    }
    for standard in ["c++17", "c++20"] {
        check("c++", standard, "larder.hpp");
    }
}
