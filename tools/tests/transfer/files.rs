//! The file that an export makes: never half of one, never over something that is there.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::inotify;

use crate::home::{EVEN, archived, put};
use crate::support::home::Home;
use crate::support::honest::found;
use crate::support::sparse::pack;
use crate::support::{chain, fails, overwrite, text};

fn small() -> Home {
    let home = Home::new();
    home.with(|store| put(store, EVEN, &chain(1, 10)));
    home
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_that_is_there_is_replaced_only_by_force() {
    let source = small();
    let file = source.beside("archive");
    std::fs::write(&file, "precious").unwrap();
    let words = ["is there already", "--force"];
    source.says("export", &[text(&file)], 3, &words);
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    source.report("export", &[text(&file), "--force"], 0);
    assert_eq!(archived(&file).len(), 10);
    assert_eq!(names(source.directory.path()), ["archive", "store"]);
}

#[test]
fn the_file_is_its_users_alone_as_the_store_is() {
    let source = small();
    let archive = source.export("archive", &[]);
    std::fs::set_permissions(&archive, Permissions::from_mode(0o644)).unwrap();
    let replaced = source.export("archive", &["--force"]);
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&replaced), 0o600);
    assert_eq!(mode(&source.path), 0o600);
}

#[test]
fn no_volume_of_a_store_is_ever_replaced() {
    let (source, other) = (small(), small());
    let before = pack(&source.path);
    let own = [text(&source.path), "--force"];
    source.says("export", &own, 3, &["is a volume of"]);
    let others = [text(&source.path), "--force"];
    other.says("export", &others, 3, &["is a volume of"]);
    assert!(before == pack(&source.path));
    let two = Home::shaped(&["volume-1"], 5, 16 << 20);
    let second = two.beside("volume-1");
    // Also without a readable superblock.
    for offset in [0, 64 << 10] {
        overwrite(&second, offset, &[0; 4096]);
    }
    let second = [text(&second), "--force"];
    two.says("export", &second, 3, &["is a volume of the store"]);
}

#[test]
fn places_where_no_file_can_be_are_refused_before_any_work() {
    let source = small();
    let directory = source.beside("directory");
    std::fs::create_dir(&directory).unwrap();
    let options = [text(&directory), "--force"];
    source.says("export", &options, 3, &["no regular file"]);
    let nowhere = directory.join("missing/archive");
    source.says("export", &[text(&nowhere)], 3, &["archive"]);
    let source = source.beside("no-store");
    let export = ["export", text(&source), text(&nowhere)];
    fails(&export, 3, &["check the path"]);
}

#[test]
fn the_report_of_an_export_to_standard_output_goes_to_standard_error() {
    let source = small();
    let output = source.larder("export", &["-", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let report: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(report["pages"], 10);
    assert_eq!(report["file_bytes"], output.stdout.len());
    let file = source.beside("archive");
    std::fs::write(&file, &output.stdout).unwrap();
    assert_eq!(archived(&file).len(), 10);
}

#[test]
fn an_export_to_a_reader_that_goes_away_fails_and_says_so() {
    let source = Home::new();
    source.with(|store| (1..=5).for_each(|seed| put(store, EVEN, &chain(seed, 100))));
    let mut export = source.larder("export", &["-"]);
    let mut child = export
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("standard output"), "{message}");
}

/// Starts an export and sends it a signal as soon as its file is begun; its exit code, unless the
/// signal killed it.
fn interrupted_export(source: &Home, file: &Path, signal: Signal) -> Option<i32> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let watch = inotify::init(flags).unwrap();
    let directory = source.directory.path();
    inotify::add_watch(&watch, directory, inotify::WatchFlags::CREATE).unwrap();
    let mut export = source.larder("export", &[text(file)]);
    let mut child = export
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    found("its file is begun", || {
        rustix::io::read(&watch, &mut [0_u8; 4096]).ok()
    });
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
    child.wait().unwrap().code()
}

#[test]
fn an_export_that_is_interrupted_or_killed_makes_no_file() {
    let source = Home::shaped(&[], 16, 16 << 20);
    source.with(|store| (1..=10).for_each(|seed| put(store, EVEN, &chain(seed, 240))));
    let file = source.beside("archive");
    for (signal, code) in [(Signal::SIGINT, Some(130)), (Signal::SIGKILL, None)] {
        // It may be through before the signal comes.
        let ended = (0..50).any(|_| {
            let ended = interrupted_export(&source, &file, signal);
            let was_through = ended == Some(0);
            assert_eq!(file.exists(), was_through);
            if was_through {
                std::fs::remove_file(&file).unwrap();
            } else {
                assert_eq!(ended, code);
            }
            !was_through
        });
        assert!(ended, "{signal}: every export was faster than the signal");
        if signal == Signal::SIGINT {
            assert_eq!(names(source.directory.path()), ["store"]);
        }
    }
}
