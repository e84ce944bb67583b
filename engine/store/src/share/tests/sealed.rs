//! Encrypted stores that several processes use.

use std::os::unix::fs::FileExt;
use std::sync::Barrier;

use larder_base::runtime::Instant;
use larder_core::grants::Finding;
use larder_core::index::ReadAs;
use larder_core::status::{MissReason, Refusal};

use super::*;
use crate::api::SharedReads;
use crate::error::StoreError;
use crate::keys::KeyUse;
use crate::keys::tests::{Sample, all_hit, get, key, namespace, options, position, put, put_with};
use crate::protocol::VERSION;
use crate::share::role::Role;
use crate::share::{Erasure, Inside, Part, erase_tenant};

const TENANT: Option<&str> = Some("a tenant by name");

fn attach(sample: &Sample, options: &OpenOptions) -> Store {
    Store::attach(&sample.path, options.clone()).unwrap()
}

/// Without the key of the store.
fn keyless() -> OpenOptions {
    options(1).with(|o| o.wrapping = None)
}

fn stored(count: usize) -> Vec<PutStatus> {
    vec![PutStatus::Stored; count]
}

#[test]
fn clients_seal_what_they_write_and_open_what_others_wrote() {
    let sample = Sample::new();
    let owner = attach(&sample, &options(1));
    let [client, other] = [options(1), keyless()].map(|options| attach(&sample, &options));
    assert_eq!([&client, &other].map(Store::part), [Part::Client; 2]);
    assert_eq!(put(&other, TENANT, 0..20), stored(20));
    assert_eq!(put(&client, TENANT, 20..40), stored(20));
    assert_eq!(put(&owner, TENANT, 40..60), stored(20));
    assert_eq!(put(&client, None, 0..5), stored(5));
    for store in [&owner, &client, &other] {
        all_hit(store, TENANT, 0..60);
        all_hit(store, None, 0..5);
    }
    owner.flush().unwrap();
    let bytes = sample.bytes();
    let (first, last) = (key(0), key(59));
    let texts: [&[u8]; 4] = [
        b"a tenant",
        b"part 01",
        &first.as_bytes()[..12],
        &last.as_bytes()[..12],
    ];
    for text in texts {
        assert_eq!(position(&bytes, text), None, "{}", text.escape_ascii());
    }
}

/// Their keys are made durable one after the other.
#[test]
fn first_puts_of_several_tenants_at_once_are_all_stored() {
    let sample = Sample::new();
    let owner = attach(&sample, &options(1));
    let client = attach(&sample, &keyless());
    let start = Barrier::new(8);
    let first = |number: u32| {
        let (store, tenant) = ([&owner, &client][number as usize % 2], number.to_string());
        start.wait();
        put(store, Some(&tenant), number..number + 1)
    };
    let statuses: Vec<_> = larder_base::runtime::thread::scope(|scope| {
        let puts: Vec<_> = (0..8).map(|at| scope.spawn(move || first(at))).collect();
        puts.into_iter().map(|put| put.join().unwrap()).collect()
    });
    assert_eq!(statuses, vec![stored(1); 8]);
    let local = owner.local().unwrap();
    let volumes = local.volumes.lock();
    let space = owner.namespace(&namespace(Some("without a wait"))).unwrap();
    let parts = [4096 * 3, 5000].map(|bytes| vec![0; bytes]);
    let parts = parts.each_ref().map(|part| IoSlice::new(part));
    let page = PutPage {
        key: key(0),
        parent: None,
        depth: 0,
        parts: &parts,
    };
    // Their holder may wait for a device that hangs.
    let other = client
        .namespace(&namespace(Some("without a wait")))
        .unwrap();
    for wait in [Duration::ZERO, Duration::from_millis(20)] {
        let options = PutOptions::waiting(wait);
        let statuses = owner.put(space, std::slice::from_ref(&page), options);
        assert_eq!(statuses, [PutStatus::Refused(Refusal::Busy)]);
        let statuses = client.put(other, std::slice::from_ref(&page), options);
        assert_eq!(statuses, [PutStatus::Refused(Refusal::Busy)]);
    }
    drop(volumes);
    let statuses = client.put(other, &[page], PutOptions::default());
    assert_eq!(statuses, [PutStatus::Stored]);
}

#[test]
fn a_process_with_the_key_takes_over_and_one_without_it_never_does() {
    let sample = Sample::new();
    let refused = Store::attach(&sample.path, keyless()).map(drop);
    assert!(matches!(refused, Err(StoreError::Sealed(_))));
    let owner = attach(&sample, &options(1));
    let other = attach(&sample, &keyless());
    put(&other, TENANT, 0..10);
    owner.close().unwrap();
    other.wait_for_owner(Instant::now() + Duration::from_secs(2));
    assert_eq!(other.part(), Part::Nobody);
    let next = attach(&sample, &options(1));
    assert_eq!(next.part(), Part::Owner);
    eventually("a client again", || other.part() == Part::Client);
    all_hit(&other, TENANT, 0..10);
    let heir = attach(&sample, &options(1));
    drop(next);
    eventually("a takeover", || heir.part() == Part::Owner);
    eventually("a client again", || other.part() == Part::Client);
    all_hit(&other, TENANT, 0..10);
    assert_eq!(put(&other, Some("another"), 0..3), stored(3));
    all_hit(&heir, Some("another"), 0..3);
}

#[test]
fn a_client_with_a_wrong_key_is_refused_before_it_may_write() {
    let sample = Sample::new();
    let _owner = attach(&sample, &options(1));
    let refused = Store::attach(&sample.path, options(2)).map(drop);
    assert!(matches!(refused, Err(StoreError::WrongKey { .. })));
    let (_directory, path) = created();
    let plain = keyless();
    let _owner = Store::attach(&path, plain).unwrap();
    let refused = Store::attach(&path, options(1)).map(drop);
    assert!(matches!(refused, Err(StoreError::Usage(_))));
}

#[test]
fn a_client_that_knows_no_encryption_is_refused() {
    let sample = Sample::new();
    let _owner = attach(&sample, &options(1));
    let older = keyless().with(|o| {
        (o.protocol.oldest, o.protocol.newest) = (VERSION - 1, VERSION - 1);
    });
    let refused = Store::attach(&sample.path, older).map(drop);
    assert!(
        matches!(refused, Err(StoreError::NotUnderstood { .. })),
        "{refused:?}"
    );
}

#[test]
fn shared_reads_carry_encrypted_pages() {
    let sample = Sample::new();
    let sharing = || options(1).with(|o| o.shared_reads = SharedReads::On);
    let owner = attach(&sample, &sharing());
    let client = attach(&sample, &sharing());
    assert_eq!(put(&client, TENANT, 0..30), stored(30));
    let space = |store: &Store| store.namespace(&namespace(TENANT)).unwrap();
    space(&owner);
    for store in [&owner, &client, &owner] {
        all_hit(store, TENANT, 0..30);
    }
    let report = owner.report().unwrap();
    assert!(report.staging.hits >= 30, "{:?}", report.staging);
    assert_eq!(report.staging.mismatches, 0);
    assert!(client.stats().staged_pages >= 30);
    let area = owner.staged();
    assert!(!area.is_empty());
    assert_eq!(position(&area, b"part 01"), None);
}

/// A connection that speaks for itself.
struct Line(UnixStream);

impl Line {
    fn open(sample: &Sample) -> Line {
        Line(UnixStream::connect(socket_path(&sample.path)).unwrap())
    }

    fn ask(&mut self, request: &Request<'_>) -> Reply {
        self.tell(request);
        let mut buffer = Vec::new();
        assert!(receive(&mut self.0, &mut buffer).unwrap());
        parse(&buffer).unwrap()
    }

    fn tell(&mut self, request: &Request<'_>) {
        send(&mut self.0, &mut Vec::new(), request).unwrap();
    }
}

#[test]
fn a_process_that_holds_no_marks_gets_no_key() {
    let sample = Sample::new();
    let owner = attach(&sample, &options(1));
    put(&owner, TENANT, 0..1);
    let mut first = Line::open(&sample);
    let hello = Request::Hello {
        magic: MAGIC,
        protocol: Protocol::default(),
    };
    let Reply::Welcome(welcome) = first.ask(&hello) else {
        panic!("no welcome");
    };
    assert!(welcome.sealed);
    let mut line = Line::open(&sample);
    line.ask(&Request::Join {
        magic: MAGIC,
        client: welcome.client,
        secret: welcome.secret,
    });
    let record = namespace(TENANT);
    let Reply::Namespace(namespace, ..) = line.ask(&Request::Namespace {
        record: record.encode(),
    }) else {
        panic!("no namespace");
    };
    let use_of = KeyUse::of_put(None, Duration::ZERO);
    let answer = line.ask(&Request::Keys { namespace, use_of });
    assert!(matches!(answer, Reply::Failed(_)), "{answer:?}");
}

/// The client finds these pages damaged.
fn hint(client: &Store, space: &Namespace, keys: &[PageKey]) {
    let role = client.inner.role().unwrap();
    let Role::Client(client) = &*role else {
        panic!("no client");
    };
    let remote = &client.remote;
    let id = remote.namespace(space).unwrap();
    let pinned = remote.pin(id, keys, ReadAs::Check);
    let extents: Vec<_> = pinned.iter().map(|page| page.unwrap().extent).collect();
    let found = keys.iter().zip(&extents);
    let found: Vec<_> = found
        .map(|(key, at)| (*key, *at, Finding::Mismatch))
        .collect();
    remote.verified(id, &found);
    remote.unpin(&extents);
}

/// Its key may be a wrong one.
#[test]
fn a_client_that_does_not_open_a_page_has_its_owner_look_and_nothing_is_forgotten() {
    let sample = Sample::new();
    let alone = options(1).with(|o| o.shared_reads = SharedReads::Off);
    let [owner, client] = [(); 2].map(|()| attach(&sample, &alone));
    put(&owner, TENANT, 0..4);
    let space = namespace(TENANT);
    hint(&client, &space, &[key(1), key(2)]);
    all_hit(&client, TENANT, 0..4);
    all_hit(&owner, TENANT, 0..4);
    let local = owner.local().unwrap();
    let id = local.namespace(&space).unwrap();
    let pinned = local.catalog().pin(id, &[key(2)], ReadAs::Check)[0].unwrap();
    local.catalog().unpin(&[pinned.extent]);
    let file = File::options().write(true).open(&sample.path).unwrap();
    file.write_all_at(&[0x77; 16], pinned.extent.offset + 64)
        .unwrap();
    assert_eq!(
        get(&client, TENANT, 2),
        GetStatus::Miss(MissReason::Damaged)
    );
    eventually("the owner has looked", || !owner.contains(id, &[key(2)])[0]);
    assert_eq!(put(&client, TENANT, 2..3), stored(1));
    all_hit(&owner, TENANT, 0..4);
}

const NAME: &str = "a tenant by name";
const ABSENT: GetStatus = GetStatus::Miss(MissReason::Absent);

fn all_absent(store: &Store, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert_eq!(get(store, TENANT, number), ABSENT, "{number}");
    }
}

#[test]
fn an_erased_tenant_is_gone_from_the_store_and_from_its_clients() {
    let sample = Sample::new();
    let owner = attach(&sample, &options(1));
    let client = attach(&sample, &keyless());
    let other = Some("another");
    assert_eq!(put(&client, TENANT, 0..20), stored(20));
    assert_eq!(put(&owner, other, 0..20), stored(20));
    all_hit(&owner, TENANT, 0..20);
    all_hit(&client, other, 0..20);
    let key = client.lent().unwrap();
    let erasure = erase_tenant(&client, NAME, Duration::from_secs(60)).unwrap();
    assert_eq!((erasure.pages, &erasure.waits_for[..]), (20, &[][..]));
    let left = client.lent().unwrap();
    assert!(
        erasure
            .slots
            .iter()
            .all(|slot| key.contains(slot) && !left.contains(slot))
    );
    for store in [&owner, &client] {
        all_absent(store, 0..20);
        all_hit(store, other, 0..20);
    }
    let again = erase_tenant(&owner, NAME, Duration::ZERO).unwrap();
    assert_eq!(again, Erasure::default());
    // A later put has another key.
    assert_eq!(put(&client, TENANT, 0..5), stored(5));
    all_hit(&owner, TENANT, 0..5);
    // As after a crash.
    drop((client, owner));
    let store = attach(&sample, &options(1));
    all_hit(&store, TENANT, 0..5);
    all_absent(&store, 5..20);
    all_hit(&store, other, 0..20);
    let local = store.local().unwrap();
    local.check_invariants().unwrap();
}

/// Archives and remotes may still have them.
#[test]
fn pages_of_before_an_erasure_do_not_come_back() {
    let sample = Sample::new();
    let owner = attach(&sample, &options(1));
    let client = attach(&sample, &keyless());
    let refused = vec![PutStatus::Refused(Refusal::Erased); 5];
    let made_at = |unix_s| PutOptions::waiting(Duration::from_secs(60)).made_at(unix_s);
    let (before, later) = (made_at(1), made_at(u64::MAX - 1));
    // No tenant was erased yet.
    for store in [&owner, &client] {
        let other = Some("another");
        assert!(
            put_with(store, other, 0..5, before)
                .iter()
                .all(|status| status.is_present())
        );
    }
    put(&client, TENANT, 0..20);
    erase_tenant(&client, NAME, Duration::from_secs(60)).unwrap();
    for store in [&owner, &client] {
        for options in [before, later] {
            assert_eq!(put_with(store, TENANT, 0..5, options), refused);
        }
        all_absent(store, 0..20);
    }
    // The tenant comes back by itself: from then on others may have pages of it, too.
    assert_eq!(put(&client, TENANT, 10..12), stored(2));
    for store in [&owner, &client] {
        assert_eq!(put_with(store, TENANT, 0..5, before), refused);
    }
    assert_eq!(put_with(&client, TENANT, 0..5, later), stored(5));
    assert_eq!(put_with(&owner, TENANT, 5..10, later), stored(5));
    all_hit(&owner, TENANT, 0..12);
    drop((client, owner));
    let store = attach(&sample, &options(1));
    assert_eq!(put_with(&store, TENANT, 15..20, before), refused);
    all_absent(&store, 15..20);
}

/// A stopped process is such a client.
#[test]
fn a_client_that_does_not_answer_is_named_until_its_marks_have_gone() {
    let sample = Sample::new();
    let owner = attach(&sample, &options(1));
    put(&owner, TENANT, 0..3);
    let (silent, _) = Remote::reach(&sample.path, &Protocol::default()).unwrap();
    let volume = File::options().read(true).write(true).open(&sample.path);
    let mut marks = guard::Marked::by(silent.client().0);
    marks.mark(&Arc::new(volume.unwrap().into())).unwrap();
    assert!(silent.marked().unwrap());
    let id = silent.namespace(&namespace(TENANT)).unwrap();
    silent.give_key(id, PutOptions::default()).unwrap();
    assert_eq!(silent.lent().unwrap().len(), 1);
    let erase = |patience| erase_tenant(&owner, NAME, Duration::from_secs(patience)).unwrap();
    let erasure = erase(0);
    assert_eq!((erasure.pages, erasure.waits_for.len()), (3, 1));
    // It reads nothing new.
    assert_eq!(silent.pin(id, &[key(0)], ReadAs::Check), [None]);
    assert_eq!(erase(0).waits_for, erasure.waits_for);
    silent.hang_up();
    eventually("it has gone", || owner.report().unwrap().clients == 0);
    assert_eq!(erase(0).waits_for, erasure.waits_for);
    drop(marks);
    assert_eq!(erase(60), Erasure::default());
}

#[test]
fn only_tenants_of_encrypted_stores_are_erased() {
    let (_directory, path) = created();
    let owner = Store::attach(&path, keyless()).unwrap();
    let erased = erase_tenant(&owner, NAME, Duration::ZERO);
    assert!(matches!(erased, Err(StoreError::Usage(_))));
}
