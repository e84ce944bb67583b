//! A process whose descriptors 0, 1 and 2 are closed: no file of a store gets such a number.
#![allow(clippy::unwrap_used)]

mod common;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use common::honest::skipped;
use common::{Home, MIB, Pool, chain};
use larder_engine::{
    CreateOptions, DiskKind, OpenOptions, PageStore, Part, PutStatus, SharedReads, Store, create,
};

const ROLE: &str = "LARDER_TEST_STANDARD";
const PAGES: usize = 8;

fn close(fds: &[i32]) {
    for fd in fds {
        // SAFETY: no object of this process owns a standard descriptor.
        unsafe { libc::close(*fd) };
    }
}

/// The files that have the numbers of standard descriptors.
fn standard() -> String {
    let mut found = String::new();
    for fd in 0..3 {
        let file = std::fs::read_link(format!("/proc/self/fd/{fd}"));
        let file = file.map_or("closed".to_owned(), |file| file.display().to_string());
        write!(found, "{fd}={file} ").unwrap();
    }
    found
}

fn options(disk: DiskKind) -> OpenOptions {
    OpenOptions::default().with(|o| {
        o.disk = disk;
        // Memory that an owner passes to its clients.
        o.shared_reads = SharedReads::On;
    })
}

/// Creates a store, and uses it as owner and as client. The descriptors are closed before each
/// step. Returns the files that have their numbers after it.
fn use_a_store(path: &Path, disk: DiskKind, closed: &[i32]) -> String {
    let mut found = String::new();
    let mut step = |name: &str| {
        writeln!(found, "{name}: {}", standard()).unwrap();
        close(closed);
    };
    close(closed);
    create(path, &CreateOptions::new(128 * MIB)).unwrap();
    step("created");
    let owner = Store::attach(path, options(disk)).unwrap();
    step("owner");
    let clients = [0, 1].map(|_| {
        let client = Store::attach(path, options(disk)).unwrap();
        step("client");
        client
    });
    assert_eq!(owner.part(), Part::Owner);
    for (seed, client) in (1..).zip(&clients) {
        assert_eq!(client.part(), Part::Client);
        let pool = Pool::new(client, "m", &[65536]);
        assert_eq!(
            pool.put(&chain(seed, PAGES)),
            vec![PutStatus::Stored; PAGES]
        );
        for reader in clients.iter().chain([&owner]) {
            let pool = Pool::new(reader, "m", &[65536]);
            assert_eq!(pool.hits(&chain(seed, PAGES)), PAGES);
        }
        step("pages");
    }
    owner.close().unwrap();
    step("closed");
    for client in clients {
        client.close().unwrap();
    }
    step("all closed");
    found
}

#[test]
fn no_descriptor_of_a_store_has_the_number_of_a_standard_one() {
    if let Ok(role) = std::env::var(ROLE) {
        let mut role = role.split(',');
        let mut next = || role.next().unwrap().to_owned();
        let (path, disk, closed) = (next(), next(), next());
        let closed: Vec<i32> = closed.bytes().map(|digit| (digit - b'0').into()).collect();
        let found = use_a_store(Path::new(&path), disk.parse().unwrap(), &closed);
        std::fs::write(format!("{path}.report"), found).unwrap();
        return;
    }
    for disk in ["uring", "threads"] {
        let kind: DiskKind = disk.parse().unwrap();
        let probe = Home::with_store(128 * MIB);
        if let Err(error) = Store::open(&probe.path, options(kind)) {
            skipped(&format!("standard descriptors, {disk}"), error);
            continue;
        }
        for closed in ["", "0", "1", "2", "01", "02", "12", "012"] {
            let home = Home::new();
            let mut child = Command::new(std::env::current_exe().unwrap());
            let test = "no_descriptor_of_a_store_has_the_number_of_a_standard_one";
            let ended = child
                .args(["--exact", test, "--nocapture"])
                .env(ROLE, format!("{},{disk},{closed}", home.path.display()))
                .output()
                .unwrap();
            let case = format!("{disk}, closed {closed:?}");
            assert!(ended.status.success(), "{case}: {ended:?}");
            let found = std::fs::read_to_string(format!("{}.report", home.path.display())).unwrap();
            assert!(found.contains("all closed"), "{case}: {found}");
            for line in found.lines() {
                for fd in closed.chars() {
                    let is_free = ["closed", "/dev/null"]
                        .iter()
                        .any(|file| line.contains(&format!("{fd}={file} ")));
                    assert!(is_free, "{case}: {line}");
                }
            }
        }
    }
}
