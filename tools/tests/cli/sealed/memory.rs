//! The memory of a process that serves an encrypted store.

use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Place, documents};
use crate::support::honest::{Process, skipped};
use crate::support::{as_user, text};

/// The user `nobody`.
const USER: u32 = 65_534;

/// What another process of the same user finds out about a server.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    /// The owner of the files about it in `/proc`.
    owner: u32,
    has_maps: bool,
    has_memory: bool,
}

fn can_read(file: &str, user: Option<u32>) -> bool {
    let mut read = Command::new("head");
    read.args(["-c", "1", file]);
    if let Some(user) = user {
        read.uid(user).gid(user);
    }
    // The first page of a process is not mapped, so that a read of its memory fails: it can be
    // opened, and that is all that is asked here.
    let read = read.stdout(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&read.stderr).into_owned();
    !said.contains("ermission denied")
}

fn seen_while_served(store: &str, key: &[&str], user: Option<u32>) -> Seen {
    let serve = [&["serve", store, "--json"][..], key].concat();
    let mut server = as_user(&serve, user);
    let mut server = Process(server.stdout(Stdio::piped()).spawn().unwrap());
    documents::first_document(&mut server.0);
    let pid = server.0.id();
    let about = |file: &str| format!("/proc/{pid}/{file}");
    let seen = Seen {
        owner: std::fs::metadata(about("mem")).unwrap().uid(),
        has_maps: can_read(&about("maps"), user),
        has_memory: can_read(&about("mem"), user),
    };
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).unwrap();
    assert!(server.0.wait().unwrap().success());
    seen
}

#[test]
fn other_processes_of_its_user_cannot_read_the_memory_of_a_server_with_keys() {
    let user = rustix::process::geteuid().is_root().then_some(USER);
    if let Err(error) = as_user(&["--version"], user).output() {
        return skipped("the memory of a server, for its user", error);
    }
    let place = Place::new();
    let key = place.key("key");
    let stores = [
        place.store("plain", None),
        place.store("sealed", Some(&key)),
    ];
    for path in [text(place.0.path()), &stores[0], &stores[1], &key] {
        chown(path, user, user).unwrap();
    }
    let own = user.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let plain = seen_while_served(&stores[0], &[], user);
    if (plain.owner, plain.has_maps) != (own, true) {
        return skipped("the memory of a server, for its user", format!("{plain:?}"));
    }
    let sealed = seen_while_served(&stores[1], &["--key-file", &key], user);
    let none = Seen {
        owner: 0,
        has_maps: false,
        has_memory: false,
    };
    assert_eq!(sealed, none);
}
