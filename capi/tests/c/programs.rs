//! Programs: each runs in C and in C++, and again with the sanitizers of the compiler.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use crate::installed::{Language, SANITIZED, compiled, done, home, linked, prefix, run};

/// Runs a program as C and as C++, with the sanitizers and without.
fn in_all_ways(name: &str) {
    run(&compiled(name, Language::C11, SANITIZED), &[]);
    run(&compiled(name, Language::Cpp17, &[]), &[]);
}

#[test]
fn every_call_works_as_the_header_says() {
    in_all_ways("tour.c");
}

#[test]
fn wrong_arguments_are_errors() {
    in_all_ways("arguments.c");
}

#[test]
fn handles_are_of_no_use_in_a_child_of_fork() {
    // Not with the address sanitizer: its allocator may be locked at the moment of a fork, and then
    // the child waits without end.
    run(
        &compiled(
            "forked.c",
            Language::C11,
            &["-fsanitize=undefined", "-fno-sanitize-recover=all"],
        ),
        &[],
    );
    run(&compiled("forked.c", Language::Cpp17, &[]), &[]);
}

#[test]
fn threads_share_a_store_and_a_queue() {
    in_all_ways("threads.c");
}

#[test]
fn objects_of_the_cpp_header_free_themselves() {
    run(&compiled("objects.cpp", Language::Cpp17, SANITIZED), &[]);
}

#[test]
fn a_panic_in_any_function_is_an_internal_error() {
    let planted = run(&compiled("panics.c", Language::C11, SANITIZED), &[]);
    // All functions but those without a result, which free or name something.
    assert_eq!(planted.trim(), "19");
}

#[test]
fn the_example_serves_from_the_store_after_a_kill_with_the_same_words() {
    let source = home().join("examples/engine.c");
    let include = prefix().join("include");
    let program = linked(&source, &include, Language::C11, &["-O2"]);
    let printed = run(&program, &[]);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 6, "{printed}");
    assert!(
        lines.iter().all(|line| line.ends_with("words the same")),
        "{printed}"
    );
    for (line, stored) in lines[3..].iter().zip(["560", "576", "608"]) {
        assert!(
            line.contains(&format!(" {stored} from the store")),
            "{printed}"
        );
    }
}

/// The program of the faults.
fn faults() -> Command {
    static PROGRAM: LazyLock<PathBuf> =
        LazyLock::new(|| compiled("faults.c", Language::C11, SANITIZED));
    Command::new(&*PROGRAM)
}

fn one_step(step: &str, path: &Path) -> String {
    done(faults().arg(step).arg(path))
}

/// Where the first part of the first page lies in the store's file.
fn place_of_first_page(store: &Path) -> u64 {
    let part: Vec<u8> = (0..8192_usize)
        .map(|at| (3 + at * 7 + at / 256) as u8)
        .collect();
    let mut bytes = Vec::new();
    File::open(store).unwrap().read_to_end(&mut bytes).unwrap();
    let found = bytes.windows(64).position(|window| window == &part[..64]);
    found.unwrap() as u64
}

#[test]
fn a_damaged_page_is_a_miss_and_a_damaged_store_an_error() {
    let directory = tempfile::tempdir().unwrap();
    one_step("write", directory.path());
    assert_eq!(
        one_step("read", directory.path()).trim(),
        ["OK"; 8].join(" ")
    );
    let store = directory.path().join("larder.store");
    let file = File::options().write(true).open(&store).unwrap();
    file.write_all_at(b"\xff\x00\xff\x00", place_of_first_page(&store) + 100)
        .unwrap();
    assert_eq!(
        one_step("read", directory.path()).trim(),
        format!("DAMAGED {}", ["OK"; 7].join(" "))
    );
    // The whole front, with every copy of what the store is read by.
    file.write_all_at(&vec![0x5a; 64 << 20], 0).unwrap();
    let said = one_step("read", directory.path());
    assert!(said.starts_with("refused: "), "{said}");
    fs::write(&store, b"").unwrap();
    let said = one_step("read", directory.path());
    assert!(said.starts_with("refused: "), "{said}");
}

/// A program that runs, with its standard input and output.
struct Talk {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Talk {
    fn begin(step: &str, path: &Path) -> Talk {
        let mut command = faults();
        command.arg(step).arg(path);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Talk { child, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn go_on(&mut self) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(b"\n").unwrap();
    }

    fn signal(&self, name: &str) {
        done(
            Command::new("kill")
                .arg(format!("-{name}"))
                .arg(self.child.id().to_string()),
        );
    }

    /// Stops it. A signal is sent, and each thread stops at its next step.
    fn stop(&self) {
        self.signal("STOP");
        let tasks = PathBuf::from(format!("/proc/{}/task", self.child.id()));
        let is_stopped = |task: fs::DirEntry| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap();
            stat.rsplit_once(')').unwrap().1.starts_with(" T")
        };
        let all = || tasks.read_dir().unwrap().map(Result::unwrap);
        while !all().all(is_stopped) {
            std::thread::yield_now();
        }
    }

    fn ends_well(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn pages_of_a_stopped_owner_miss_in_time_and_those_of_a_killed_one_are_found_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut owner = Talk::begin("own", directory.path());
    assert_eq!(owner.line(), "ready");
    let mut client = Talk::begin("join", directory.path());
    assert_eq!(client.line(), ["OK"; 8].join(" "));
    owner.stop();
    client.go_on();
    let missed = client.line();
    assert!(!missed.contains("OK"), "{missed}");
    client.ends_well();
    owner.signal("KILL");
    owner.child.wait().unwrap();
    assert_eq!(
        one_step("read", directory.path()).trim(),
        ["OK"; 8].join(" ")
    );
}

/// A file system in memory, until it is dropped.
struct Disk {
    mounted: PathBuf,
}

impl Disk {
    /// `None` where none can be mounted, which is reported.
    fn mount(mounted: PathBuf) -> Option<Disk> {
        fs::create_dir(&mounted).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=48m", "tmpfs"]);
        let is_mounted = mount
            .arg(&mounted)
            .output()
            .is_ok_and(|out| out.status.success());
        if !is_mounted {
            println!("SKIPPED: a disk that fills, a file system is mounted by root alone");
        }
        is_mounted.then_some(Disk { mounted })
    }

    /// Moves a store's file there, without its empty blocks. A link is left behind.
    fn take_in(&self, store: &Path) {
        let moved = self.mounted.join("store");
        done(
            Command::new("cp")
                .arg("--sparse=always")
                .arg(store)
                .arg(&moved),
        );
        fs::remove_file(store).unwrap();
        symlink(&moved, store).unwrap();
    }

    /// Fills it with another file.
    fn fill(&self) -> PathBuf {
        let other = self.mounted.join("other");
        let mut file = File::create(&other).unwrap();
        while file.write_all(&[1; 1 << 16]).is_ok() {}
        other
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("--lazy")
            .arg(&self.mounted)
            .status();
    }
}

#[test]
fn a_disk_that_fills_refuses_pages_and_the_store_works_again_with_room() {
    let directory = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::mount(directory.path().join("disk")) else {
        return;
    };
    let path = directory.path().join("store");
    one_step("write", &path);
    disk.take_in(&path.join("larder.store"));
    let mut program = Talk::begin("full", &path);
    assert_eq!(program.line(), "ready");
    let other = disk.fill();
    program.go_on();
    assert_eq!(program.line(), "READ_ONLY_SERVICE");
    assert_eq!(program.line(), "served");
    fs::remove_file(other).unwrap();
    program.go_on();
    assert_eq!(program.line(), "stored");
    program.ends_well();
    assert_eq!(one_step("read", &path).trim(), ["OK"; 8].join(" "));
}
