//! Clients that misuse the staging area do not affect others. And the errors of a process that
//! reaches no owner.
#![allow(clippy::unwrap_used)]

mod sealed;

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder_base::system::holder::{HolderState, LockHolder};
use larder_core::status::{GetStatus, PutStatus};
use larder_format::{Namespace, PageKey, PageShape, TokenUnits, page_keys};

use super::remote::{ReachError, Remote};
use super::wire::{Link, MAGIC, Reply, Request, parse, receive, send};
use crate::api::{GetPage, OpenOptions, PageStore, PutOptions, PutPage};
use crate::catalog::Catalog;
use crate::honest::{eventually, skipped};
use crate::protocol::Protocol;
use crate::share::Store;
use crate::staging::{Look, Slot, SlotId};
use crate::store::staged::Stage;
use crate::volume::create::{CreateOptions, create};
use crate::volume::guard;
use crate::volume::socket::socket_path;

const PAGES: usize = 24;
const COUNT: u64 = PAGES as u64;
const PAGE_BYTES: u32 = 5000;

/// A store with [`PAGES`] pages in it, its owner, a client, and a second client that the protocol
/// alone keeps from misbehaving.
struct Scene {
    directory: tempfile::TempDir,
    owner: Store,
    client: Store,
    other: Remote,
    keys: Vec<PageKey>,
}

/// A store of 256 MiB in segments of 16 MiB, and its directory.
pub(crate) fn created() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = CreateOptions::new(256 << 20).with(|o| {
        o.segment_size = Some(16 << 20);
    });
    create(&path, &options).unwrap();
    (directory, path)
}

/// A namespace with pages of one part.
pub(crate) fn namespace(page_bytes: u32) -> Namespace {
    Namespace::builder("m", "", 64, PageShape::new(&[page_bytes]).unwrap())
        .pool("")
        .build()
        .unwrap()
}

fn bytes_of(key: &PageKey) -> Vec<u8> {
    key.as_bytes()
        .iter()
        .copied()
        .cycle()
        .take(PAGE_BYTES as usize)
        .collect()
}

impl Scene {
    fn new() -> Scene {
        let (directory, path) = created();
        let owner = Store::attach(&path, OpenOptions::default()).unwrap();
        let client = Store::attach(&path, OpenOptions::default()).unwrap();
        let (other, _) = Remote::reach(&path, &Protocol::default()).unwrap();
        let tokens: Vec<u64> = (0..PAGES as u64).collect();
        let keys = page_keys(
            &tokens,
            std::num::NonZeroUsize::MIN,
            None,
            TokenUnits::Single,
        );
        let scene = Scene {
            directory,
            owner,
            client,
            other,
            keys,
        };
        scene.put();
        scene
    }

    fn put(&self) {
        let space = self.owner.namespace(&namespace(PAGE_BYTES)).unwrap();
        let bytes: Vec<Vec<u8>> = self.keys.iter().map(bytes_of).collect();
        let parts: Vec<[IoSlice<'_>; 1]> = bytes.iter().map(|b| [IoSlice::new(b)]).collect();
        let pages: Vec<PutPage<'_>> = (0..)
            .zip(self.keys.iter().zip(&parts))
            .map(|(depth, (key, parts))| PutPage {
                key: *key,
                parent: None,
                depth,
                parts,
            })
            .collect();
        let statuses = self.owner.put(space, &pages, PutOptions::default());
        assert_eq!(statuses, vec![PutStatus::Stored; PAGES]);
    }

    /// Gets all pages; each must be found and be correct.
    fn get(&self, store: &Store) {
        let space = store.namespace(&namespace(PAGE_BYTES)).unwrap();
        let mut bytes = vec![vec![0; PAGE_BYTES as usize]; PAGES];
        let mut parts: Vec<[IoSliceMut<'_>; 1]> =
            bytes.iter_mut().map(|b| [IoSliceMut::new(b)]).collect();
        let mut pages: Vec<GetPage<'_, '_>> = self
            .keys
            .iter()
            .zip(&mut parts)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = store.get(space, &mut pages, None);
        assert_eq!(statuses, vec![GetStatus::Hit; PAGES]);
        for (key, bytes) in self.keys.iter().zip(&bytes) {
            assert!(*bytes == bytes_of(key), "wrong bytes for {key}");
        }
    }

    /// Takes the pages' slots, as the client that has to read or to copy them.
    fn take_slots(&self) -> Vec<Slot> {
        let space = self.other.namespace(&namespace(PAGE_BYTES)).unwrap();
        let (_, pages) = self.other.stage(space, &self.keys);
        pages
            .iter()
            .map(|page| page.unwrap().slot.unwrap())
            .collect()
    }

    /// Changes every byte of a slot.
    fn scribble(&self, slot: SlotId) {
        let space = self.other.namespace(&namespace(PAGE_BYTES)).unwrap();
        let area = self.other.area(space).unwrap();
        let piece = area.piece(slot, 2 * larder_format::BLOCK_BYTES).unwrap();
        // SAFETY: the piece is in the area, which is mapped; there are no references to its
        // bytes.
        unsafe { std::ptr::write_bytes(piece.ptr, 0xa7, piece.len) };
    }

    fn report(&self) -> crate::staging::StagingReport {
        self.owner.report().unwrap().staging
    }

    /// Polls until the condition holds: clients do not wait until their releases are processed.
    fn until(&self, what: &str, is_so: impl Fn(crate::staging::StagingReport) -> bool) {
        eventually(what, || is_so(self.report()));
    }
}

#[test]
fn a_client_that_does_not_fill_its_slots_costs_the_others_one_wait() {
    let scene = Scene::new();
    assert!(scene.take_slots().iter().all(|slot| slot.fill));
    scene.get(&scene.client);
    scene.until("one waited for, the others looked at", |report| {
        report.timeouts == COUNT
    });
    scene.get(&scene.owner);
    scene.get(&scene.client);
    let report = scene.report();
    assert_eq!(report.timeouts, COUNT, "no process waits for it again");
    assert_eq!(report.fills, 2 * COUNT);
    assert_eq!(scene.client.stats().staged_pages, COUNT);
}

#[test]
fn waiters_of_a_client_that_dies_get_the_pages_all_the_same() {
    let scene = Scene::new();
    assert!(scene.take_slots().iter().all(|slot| slot.fill));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| scene.get(&scene.client));
        scene.other.hang_up();
        waits.join().unwrap();
    });
    scene.get(&scene.owner);
    assert!(scene.report().fills > COUNT);
}

#[test]
fn a_dead_clients_slots_are_not_reused_while_its_mark_is_there() {
    let scene = Scene::new();
    let volume: OwnedFd = File::options()
        .read(true)
        .write(true)
        .open(scene.directory.path().join("store"))
        .unwrap()
        .into();
    let mut marks = guard::Marked::by(scene.other.client().0);
    marks.mark(&Arc::new(volume)).unwrap();
    let slots = scene.take_slots();
    scene.other.hang_up();
    let until_it_is = |lingering: u32, pages: u64| {
        eventually(&format!("{lingering} lingering, {pages} pages"), || {
            scene.owner.report().unwrap().lingering == lingering && scene.report().pages == pages
        });
    };
    until_it_is(1, COUNT);
    scene.get(&scene.client);
    scene.get(&scene.owner);
    assert_eq!(
        scene.report().pages,
        2 * PAGES as u64,
        "other slots than {slots:?}"
    );
    drop(marks);
    until_it_is(0, COUNT);
}

#[test]
fn arbitrary_writes_into_the_area_cause_no_wrong_bytes() {
    let scene = Scene::new();
    // While another process appears to be reading.
    let space = scene.other.namespace(&namespace(PAGE_BYTES)).unwrap();
    let area = scene.other.area(space).unwrap();
    for slot in scene.take_slots() {
        scene.scribble(slot.id);
        area.settle(slot.id, true);
    }
    scene.get(&scene.client);
    scene.until("all noticed", |report| report.mismatches == COUNT);
    // After it was read.
    scene.get(&scene.owner);
    for slot in scene.take_slots() {
        assert_eq!((slot.fill, area.look(slot.id)), (false, Look::Ready));
        scene.scribble(slot.id);
    }
    scene.get(&scene.client);
    scene.until("all noticed", |report| report.mismatches == 2 * COUNT);
    // The words: each state, for the present use and for another.
    for (generation, is_there) in [(0, true), (0, false), (1, true), (1, false)] {
        for Slot { id, .. } in scene.take_slots() {
            let id = SlotId {
                generation: id.generation + generation,
                ..id
            };
            area.begin(id);
            area.settle(id, is_there);
        }
        scene.get(&scene.client);
        scene.get(&scene.owner);
    }
    assert_eq!(scene.owner.stats().misses + scene.client.stats().misses, 0);
    assert_eq!(scene.owner.stats().damaged, 0, "the pages are not to blame");
}

#[test]
fn releasing_slots_that_a_client_does_not_hold_changes_nothing() {
    let scene = Scene::new();
    scene.get(&scene.client);
    let space = scene.other.namespace(&namespace(PAGE_BYTES)).unwrap();
    let (_, pages) = scene.other.stage(space, &scene.keys[..1]);
    let page = pages[0].unwrap();
    for filled in [true, false] {
        for unit in [0, 1, 7, u32::MAX] {
            let end = crate::staging::SlotEnd {
                unit,
                filled,
                served: crate::staging::Served::Wrongly,
            };
            scene.other.unstage(&[page.pinned.extent], &[end]);
        }
    }
    scene.get(&scene.client);
    scene.get(&scene.owner);
    assert_eq!(scene.owner.part(), super::Part::Owner);
}

#[test]
fn a_silent_connection_does_not_block_a_close() {
    let (_directory, path) = created();
    let owner = Store::attach(&path, OpenOptions::default()).unwrap();
    let silent = UnixStream::connect(socket_path(&path)).unwrap();
    let (closed, outcome) = std::sync::mpsc::channel();
    std::thread::spawn(move || closed.send(owner.close().is_ok()));
    let patience = Duration::from_secs(30);
    assert_eq!(outcome.recv_timeout(patience), Ok(true));
    drop(silent);
}

#[test]
fn a_client_that_waits_for_its_own_unwritten_put_does_not_block_a_close() {
    let (_directory, path) = created();
    let owner = Store::attach(&path, OpenOptions::default()).unwrap();
    let id = owner.namespace(&namespace(4096)).unwrap();
    let mut first = UnixStream::connect(socket_path(&path)).unwrap();
    let mut buffer = Vec::new();
    let mut ask = |request: &Request<'_>| {
        send(&mut first, &mut buffer, request).unwrap();
        buffer.clear();
        assert!(receive(&mut first, &mut buffer).unwrap());
        parse::<Reply>(&buffer).unwrap()
    };
    // Without totals, which would come between the replies.
    let hello = Request::Hello {
        magic: MAGIC,
        protocol: Protocol {
            features: 0,
            ..Protocol::default()
        },
    };
    let Reply::Welcome(welcome) = ask(&hello) else {
        panic!("no welcome");
    };
    let volume = OwnedFd::from(File::options().write(true).open(&path).unwrap());
    let mut marks = guard::Marked::by(welcome.client.0);
    marks.mark(&Arc::new(volume)).unwrap();
    assert!(matches!(ask(&Request::Marked), Reply::Done));
    let reserve = Request::Reserve {
        namespace: id.0,
        keys: &[1; 32],
        links: vec![Link::default()],
    };
    let Reply::Reserved { reservation, .. } = ask(&reserve) else {
        panic!("no reservation");
    };
    let wait = Request::Wait {
        reservations: vec![reservation],
    };
    send(&mut first, &mut buffer, &wait).unwrap();
    let (closed, outcome) = std::sync::mpsc::channel();
    std::thread::spawn(move || closed.send(owner.close().is_err()));
    // Its marks are there: its extents are not granted again.
    assert_eq!(outcome.recv_timeout(Duration::from_secs(30)), Ok(true));
}

#[test]
fn a_file_in_the_sockets_place_is_left_alone() {
    let (_directory, path) = created();
    let socket = socket_path(&path);
    std::fs::write(&socket, "mine").unwrap();
    let before = std::fs::read(&path).unwrap();
    let refused = Store::attach(&path, OpenOptions::default()).err().unwrap();
    assert!(refused.to_string().contains("no socket"), "{refused}");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "mine");
    // Nor is the store opened for nothing, again and again.
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn a_store_in_a_directory_that_its_user_may_not_change_is_left_alone() {
    let (directory, path) = created();
    if !rustix::process::geteuid().is_root() {
        skipped(
            "a store in the directory of another user",
            "this is not root",
        );
        return;
    }
    for (path, mode) in [(directory.path(), 0o755), (&path, 0o666)] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
    let before = std::fs::read(&path).unwrap();
    let store = path.clone();
    let by_another_user = move || {
        // Of this thread alone.
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534)).unwrap();
        Store::attach(&store, OpenOptions::default()).err().unwrap()
    };
    let refused = std::thread::spawn(by_another_user).join().unwrap();
    let said = refused.to_string();
    assert!(said.contains("serving the catalog"), "{said}");
    assert!(std::fs::read(&path).unwrap() == before);
}

/// Rights of the socket: mode, user and group.
fn rights(socket: &Path) -> (u32, u32, u32) {
    let found = socket.metadata().unwrap();
    (found.mode() & 0o777, found.uid(), found.gid())
}

#[test]
fn a_new_owner_serves_the_group_that_the_last_owner_served() {
    let (_directory, path) = created();
    let gid = rustix::process::getgid().as_raw();
    let group = OpenOptions::default().with(|o| o.group = Some(gid));
    let owner = Store::attach(&path, group).unwrap();
    let (before, socket) = (rights(&socket_path(&path)), socket_path(&path));
    assert_eq!((before.0, before.2), (0o660, gid));
    let client = Store::attach(&path, OpenOptions::default()).unwrap();
    drop(owner);
    eventually("the client takes over", || {
        client.part() == super::Part::Owner
    });
    assert_eq!(rights(&socket), before);
}

#[test]
fn a_store_that_root_serves_stays_its_users() {
    let (directory, path) = created();
    if !rustix::process::geteuid().is_root() {
        skipped("a store that root serves for a user", "this is not root");
        return;
    }
    let user = 65_534;
    std::os::unix::fs::chown(&path, Some(user), None).unwrap();
    std::os::unix::fs::chown(directory.path(), Some(user), None).unwrap();
    let _owner = Store::attach(&path, OpenOptions::default()).unwrap();
    let (mode, uid, _) = rights(&socket_path(&path));
    assert_eq!((mode, uid), (0o600, user));
}

#[test]
fn a_store_is_reached_through_links_to_it() {
    let (directory, path) = created();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for (first, second) in [(&path, &link), (&link, &path)] {
        let owner = Store::attach(first, OpenOptions::default()).unwrap();
        let client = Store::attach(second, OpenOptions::default()).unwrap();
        assert_eq!(client.part(), super::Part::Client);
        assert!(super::report(second).is_ok());
        client.close().unwrap();
        owner.close().unwrap();
    }
}

/// A process that recovers a large store holds its lock long before it records its name.
#[test]
fn attaching_waits_longer_for_an_opening_process_than_for_a_holder() {
    let locked = |state| crate::error::StoreError::Locked {
        path: PathBuf::from("store"),
        holder: LockHolder { pid: 1, state },
        is_unserved: true,
    };
    let patience = |state| super::patience_with(&locked(state));
    for state in [HolderState::Exited, HolderState::OutOfSight] {
        assert!(patience(state) > patience(HolderState::Running));
    }
    let gone = crate::error::StoreError::OwnerGone;
    assert_eq!(super::patience_with(&gone), super::ATTACH_PATIENCE);
}

#[test]
fn an_owner_of_another_release_causes_an_error_about_the_release_alone() {
    let said = |error| super::not_served(Path::new("store"), &error).to_string();
    let other = said(ReachError::Version {
        theirs: 1,
        release: "0.0.1".to_owned(),
        ours: Protocol::default(),
    });
    assert!(other.contains("release 0.0.1") && !other.contains("larder serve"));
    let absent = said(ReachError::Nobody);
    assert!(absent.contains("no such file"), "{absent}");
    let (_directory, path) = created();
    let nobody = super::not_served(&path, &ReachError::Nobody).to_string();
    assert!(nobody.contains("start `larder serve`"), "{nobody}");
}

#[test]
fn advice_about_users_comes_with_a_refusal_of_the_user_alone() {
    let said = |kind: std::io::ErrorKind| {
        let error = ReachError::from(std::io::Error::from(kind));
        super::not_served(Path::new("store"), &error).to_string()
    };
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, PermissionDenied, TimedOut, WouldBlock};
    for kind in [BrokenPipe, ConnectionReset, TimedOut, WouldBlock] {
        assert!(
            !said(kind).contains("user") && !said(kind).contains("group"),
            "{}",
            said(kind)
        );
    }
    assert!(said(PermissionDenied).contains("run it as the user"));
}
