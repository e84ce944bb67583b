//! Volumes that are deleted, moved or replaced while their owner lives.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::slice::from_ref;

use larder_engine::{
    CreateOptions, OpenOptions, PageStore, Part, PutStatus, Store, StoreError, create, report,
};
use larder_store::volume::socket::socket_path;
use nix::unistd::{Uid, chroot, seteuid};
use rustix::fs::{CWD, FileType, Mode};

use super::attach;
use super::common::honest::{eventually, skipped};
use super::common::{Home, MIB, Pool, chain};
use super::descriptors::Loop;

const PAGES: usize = 6;

/// The paths of the volumes that an owner states as displaced.
fn displaced(owner: &Store) -> Vec<PathBuf> {
    let report = owner.report().unwrap();
    let volumes = report.displaced_volumes.into_iter();
    volumes.map(|volume| volume.path).collect()
}

fn put(store: &Store, seed: u64) {
    let pool = Pool::new(store, "m", &[65536]);
    assert_eq!(
        pool.put(&chain(seed, PAGES)),
        vec![PutStatus::Stored; PAGES]
    );
}

fn hits(store: &Store, seed: u64) -> usize {
    Pool::new(store, "m", &[65536]).hits(&chain(seed, PAGES))
}

fn create_small(path: &Path) {
    create(path, &CreateOptions::new(128 * MIB)).unwrap();
}

/// Takes the served store at a path away, and puts another one there.
type Replace = fn(&Path);

fn deleted_and_created(path: &Path) {
    fs::remove_file(path).unwrap();
    create_small(path);
}

fn replaced_by_another_store(path: &Path) {
    let other = path.with_extension("other");
    create_small(&other);
    fs::rename(&other, path).unwrap();
}

/// The socket stays beside the former file.
fn directory_replaced(path: &Path) {
    let directory = path.parent().unwrap();
    fs::rename(directory, directory.with_extension("former")).unwrap();
    fs::create_dir(directory).unwrap();
    create_small(path);
}

#[test]
fn row_28_another_store_at_the_path_of_a_served_one_is_used_at_once_beside_its_owner() {
    let ways: [(&str, Replace, bool); 3] = [
        ("deleted and created", deleted_and_created, true),
        ("replaced", replaced_by_another_store, true),
        ("directory replaced", directory_replaced, false),
    ];
    for (way, replace, keeps_socket) in ways {
        let home = Home::new();
        let path = home.directory.path().join("stores/store");
        fs::create_dir(path.parent().unwrap()).unwrap();
        create(&path, &CreateOptions::new(256 * MIB)).unwrap();
        let open = || Store::attach(&path, OpenOptions::default()).unwrap();
        let (former, client) = (open(), open());
        put(&client, 1);
        replace(&path);

        let asked = report(&path).err().unwrap();
        let text = asked.to_string();
        match keeps_socket {
            true => assert!(
                matches!(asked, StoreError::ServesAnother { .. })
                    && text.contains(&format!("Process {}", std::process::id())),
                "{way}: {text}"
            ),
            false => assert!(
                matches!(asked, StoreError::NotServed { .. }),
                "{way}: {text}"
            ),
        }
        let owner = open();
        assert_eq!(owner.part(), Part::Owner, "{way}");
        assert_eq!(hits(&owner, 1), 0, "{way}");
        put(&owner, 2);
        assert_eq!(open().part(), Part::Client, "{way}");
        assert_eq!(report(&path).unwrap().stats.pages, PAGES as u64, "{way}");

        // The former owner goes on, knows its state, and leaves the socket of the next one alone.
        assert_eq!(displaced(&former), from_ref(&path), "{way}");
        assert_eq!(hits(&former, 1), PAGES, "{way}");
        former.close().unwrap();
        let next = open();
        assert_eq!(
            (next.part(), hits(&next, 2)),
            (Part::Client, PAGES),
            "{way}"
        );
        assert_eq!(displaced(&owner), [] as [PathBuf; 0], "{way}");
        // A client of the former owner follows the path.
        eventually("the client has an owner again", || {
            client.part() == Part::Client
        });
        assert_eq!(hits(&client, 2), PAGES, "{way}");
    }
}

#[test]
fn an_owner_whose_file_is_gone_answers_and_states_it() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    put(&owner, 1);
    let path = &home.path;
    assert_eq!(displaced(&owner), [] as [PathBuf; 0]);
    let aside = path.with_extension("aside");
    fs::rename(path, &aside).unwrap();
    let asked = report(path).unwrap();
    let found: Vec<_> = asked.displaced_volumes.iter().map(|of| &of.path).collect();
    assert_eq!(found, [path]);
    assert_eq!(asked.stats.pages, PAGES as u64);
    // A file that is no store does not change that.
    fs::write(path, "Dear all").unwrap();
    assert_eq!(report(path).unwrap().displaced_volumes.len(), 1);
    fs::rename(&aside, path).unwrap();
    assert_eq!(displaced(&owner), [] as [PathBuf; 0]);
    fs::remove_file(path).unwrap();
    assert_eq!(displaced(&owner), from_ref(path));
    let refused = Store::attach(path, OpenOptions::default());
    let own = Some(std::process::id());
    assert!(matches!(refused, Err(StoreError::Removed { owner, .. }) if owner == own));
}

#[test]
fn each_volume_each_directory_and_each_link_counts() {
    let home = Home::on_volumes(3, 128 * MIB);
    let volume = |number: usize| home.directory.path().join(format!("volume {number}"));
    let link = home.directory.path().join("link");
    symlink(&home.path, &link).unwrap();
    let owner = Store::attach(&link, OpenOptions::default()).unwrap();
    assert_eq!(displaced(&owner), [] as [PathBuf; 0]);

    fs::remove_file(volume(2)).unwrap();
    fs::rename(volume(1), volume(7)).unwrap();
    fs::copy(volume(7), volume(1)).unwrap();
    assert_eq!(displaced(&owner), [volume(1), volume(2)]);

    let other = home.directory.path().join("other");
    fs::write(&other, "another file").unwrap();
    fs::remove_file(&link).unwrap();
    symlink(&other, &link).unwrap();
    assert!(displaced(&owner).contains(&link));
    fs::remove_file(&link).unwrap();
    symlink(&home.path, &link).unwrap();
    assert!(!displaced(&owner).contains(&link));

    let directory = home.directory.path();
    let aside = directory.with_extension("aside");
    fs::rename(directory, &aside).unwrap();
    assert_eq!(displaced(&owner).len(), 3);
    fs::rename(&aside, directory).unwrap();
    assert_eq!(displaced(&owner).len(), 2);
}

#[test]
fn a_device_is_the_same_under_every_node() {
    let home = Home::new();
    let file = fs::File::create(&home.path).unwrap();
    file.set_len(256 * MIB).unwrap();
    let Some(device) = Loop::over(&home.path) else {
        skipped("a displaced device", "no loop device can be made");
        return;
    };
    let number = rustix::fs::stat(&device.0).unwrap().st_rdev;
    let node = home.directory.path().join("node");
    let make = |number| {
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, &node, FileType::BlockDevice, mode, number).unwrap();
    };
    make(number);
    let options = CreateOptions::new(256 * MIB).with(|o| {
        o.segment_size = Some(16 * MIB);
    });
    if let Err(error) = create(&node, &options) {
        skipped("a displaced device", error);
        return;
    }
    let owner = attach(&Home {
        path: node.clone(),
        ..Home::new()
    });
    fs::remove_file(&node).unwrap();
    assert_eq!(displaced(&owner), from_ref(&node));
    // As a device manager does after an event.
    make(number);
    assert_eq!(displaced(&owner), [] as [PathBuf; 0]);
    fs::remove_file(&node).unwrap();
    make(rustix::fs::makedev(7, 0xf_ffff));
    assert_eq!(displaced(&owner), from_ref(&node));
    owner.close().unwrap();
}

#[test]
fn a_stranger_on_the_socket_keeps_nobody_from_a_store_that_it_does_not_hold() {
    let home = Home::with_store(256 * MIB);
    let stranger = UnixListener::bind(socket_path(&home.path)).unwrap();
    std::thread::spawn(move || {
        use std::io::Write;
        while let Ok((mut stream, _)) = stranger.accept() {
            let _ = stream.write_all(b"\x03\0\0\0not a greeting");
        }
    });
    let owner = attach(&home);
    assert_eq!(owner.part(), Part::Owner);
    assert_eq!(attach(&home).part(), Part::Client);
}

const ROLE: &str = "LARDER_TEST_PLACES";

/// Repeats a test in a process of its own, whose state the test changes. True in that process.
fn is_alone(test: &str) -> bool {
    if std::env::var(ROLE).as_deref() == Ok(test) {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let ended = child
        .args(["--exact", &format!("places::{test}"), "--nocapture"])
        .env(ROLE, test)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{told}");
    told.lines()
        .filter(|line| line.starts_with("SKIPPED"))
        .for_each(|line| eprintln!("{line}"));
    false
}

#[test]
fn a_process_may_change_its_working_directory() {
    if !is_alone("a_process_may_change_its_working_directory") {
        return;
    }
    let home = Home::with_store(256 * MIB);
    std::env::set_current_dir(home.directory.path()).unwrap();
    let open = || Store::attach(Path::new("store"), OpenOptions::default()).unwrap();
    let (owner, client) = (open(), open());
    put(&client, 1);
    std::env::set_current_dir("/").unwrap();
    assert_eq!(displaced(&owner), [] as [PathBuf; 0]);
    owner.close().unwrap();
    eventually("the client owns the store", || client.part() == Part::Owner);
    assert_eq!(hits(&client, 1), PAGES);
}

#[test]
fn a_path_that_cannot_be_looked_at_is_no_sign_of_a_displaced_file() {
    if !is_alone("a_path_that_cannot_be_looked_at_is_no_sign_of_a_displaced_file") {
        return;
    }
    if !Uid::effective().is_root() {
        skipped("a path that cannot be looked at", "this needs root");
        return;
    }
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let for_root = fs::Permissions::from_mode(0o700);
    fs::set_permissions(home.directory.path(), for_root).unwrap();
    seteuid(Uid::from_raw(65534)).unwrap();
    assert!(fs::metadata(&home.path).is_err());
    assert_eq!(displaced(&owner), [] as [PathBuf; 0]);
    seteuid(Uid::from_raw(0)).unwrap();
    let other = tempfile::tempdir().unwrap();
    chroot(other.path()).unwrap();
    std::env::set_current_dir("/").unwrap();
    assert!(fs::metadata(&home.path).is_err());
    assert_eq!(displaced(&owner), [] as [PathBuf; 0]);
}
