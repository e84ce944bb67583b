//! The installed files: pkg-config and CMake, the archive and the shared library.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::installed::{Language, done, has, home, prefix, run};

/// A copy of the installation at another place, with one of the two libraries.
fn moved(to: &Path, library: &str) {
    let lib = to.join("lib");
    fs::create_dir_all(&lib).unwrap();
    for name in ["lib/pkgconfig", "lib/cmake", "include"] {
        symlink(prefix().join(name), to.join(name)).unwrap();
    }
    symlink(prefix().join("lib").join(library), lib.join(library)).unwrap();
}

/// Flags of pkg-config for an installation, which is given by its path.
fn flags(at: &Path, words: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    let said = done(command.args(words).arg(at.join("lib/pkgconfig/larder.pc")));
    said.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn pkg_config_has_the_flags_of_the_shared_library() {
    if !has("pkg-config", "the flags of pkg-config") {
        return;
    }
    let program = prefix().join("with-pkg-config");
    let mut compiler = Language::C11.compiler();
    compiler
        .arg(home().join("tests/c/programs/tour.c"))
        .arg("-o")
        .arg(&program);
    compiler.args(flags(prefix(), &["--cflags", "--libs"]));
    done(compiler.arg(format!("-Wl,-rpath,{}", prefix().join("lib").display())));
    run(&program, &[]);
}

#[test]
fn pkg_config_lists_all_libraries_that_the_archive_needs() {
    if !has("pkg-config", "the flags of pkg-config --static") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // No shared library lies there, which the linker would take first.
    let lib = directory.path().join("lib");
    moved(directory.path(), "liblarder.a");
    let mut flags = flags(prefix(), &["--static", "--cflags", "--libs"]);
    for flag in flags.iter_mut().filter(|flag| flag.starts_with("-L")) {
        *flag = format!("-L{}", lib.display());
    }
    for (source, language) in [("tour.c", Language::C11), ("threads.c", Language::Cpp17)] {
        let program = directory.path().join(source).with_extension("");
        let mut compiler = language.compiler();
        compiler.arg(home().join("tests/c/programs").join(source));
        // Nothing else: each symbol must be found.
        compiler.arg("-Wl,-z,defs,--gc-sections").args(&flags);
        done(compiler.arg("-o").arg(&program));
        let needed = done(Command::new("readelf").arg("-dW").arg(&program));
        assert!(!needed.contains("liblarder"), "{needed}");
        run(&program, &[]);
    }
}

#[test]
fn the_cmake_package_has_both_libraries() {
    if !has("cmake", "the CMake package") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = home().join("tests/c/programs/tour.c");
    let project = format!(
        "cmake_minimum_required(VERSION 3.16)\nproject(tour C)\nfind_package(larder {} REQUIRED)\n\
         foreach(kind larder static)\n  add_executable(with_${{kind}} {})\n  \
         target_compile_definitions(with_${{kind}} PRIVATE _DEFAULT_SOURCE)\n  \
         target_link_libraries(with_${{kind}} PRIVATE larder::${{kind}})\nendforeach()\n",
        env!("CARGO_PKG_VERSION"),
        source.display()
    );
    fs::write(directory.path().join("CMakeLists.txt"), project).unwrap();
    let build = directory.path().join("build");
    let mut configure = Command::new("cmake");
    configure
        .arg("-S")
        .arg(directory.path())
        .arg("-B")
        .arg(&build);
    done(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display())));
    done(Command::new("cmake").arg("--build").arg(&build));
    for kind in ["larder", "static"] {
        run(&build.join(format!("with_{kind}")), &[]);
    }
}
