//! Encrypted stores under the offline tools: with the key, without it, and killed at each write.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod kills;

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{Pool, chain};
use larder_disk::probe::Want;
use larder_engine::format::{
    BLOCK_BYTES, Namespace, PageKey, PageShape, SEGMENTS_OFFSET, Serial, StoreId, Superblock,
};
use larder_engine::{CreateOptions, OpenOptions, PageStore, Store, StoreError, create};
use larder_format::{
    KEY_SLOTS_MAX, KEYRING_BYTES, KeyringCopy, SlotState, TENANT_FIELD, keyring_offsets,
};
use larder_offline::survey::{Encryption, FlawReason, Sealed, Survey, SurveyError, SurveyOptions};
use larder_offline::{
    Repair, compact, copy_into, rekey, repair, restore, retire, rotate, superblock_to_save,
};
use larder_seal::{Keyring, Vault, WrappingKey};
use larder_store::share::erase_tenant;
use larder_store::volume::create::add;

const PARTS: [u32; 2] = [8192, 5000];
const SEGMENT: u64 = 256 << 10;
const VOLUME: u64 = 6 << 20;

fn key(byte: u8) -> WrappingKey {
    WrappingKey::new(&Vault::new(), &[byte; 32]).unwrap()
}

fn options(byte: u8) -> OpenOptions {
    OpenOptions::default().with(|o| {
        o.disk = Want::Threads;
        o.wrapping = Some(key(byte));
    })
}

fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(())
}

/// A closed store of two volumes, with pages of two tenants.
struct Sample {
    directory: tempfile::TempDir,
    paths: [PathBuf; 2],
}

impl Sample {
    fn new() -> Sample {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let paths = ["a", "b"].map(|name| directory.path().join(name));
        let sample = Sample { directory, paths };
        let options = CreateOptions::new(2 * VOLUME).with(|o| {
            o.segment_size = Some(SEGMENT);
            o.volumes = vec![sample.paths[1].clone()];
            o.wrapping = Some(key(1));
        });
        assert!(create(sample.path(), &options).unwrap().is_encrypted);
        let store = sample.open(1);
        for tenant in ["a", "b"] {
            let pool = pool(&store, tenant);
            for seed in 1..=4 {
                let stored = pool.put(&chain(seed, 20));
                assert!(
                    stored.iter().all(|status| status.is_present()),
                    "{stored:?}"
                );
            }
        }
        store.close().unwrap();
        sample
    }

    fn path(&self) -> &Path {
        &self.paths[0]
    }

    fn open(&self, byte: u8) -> Store {
        Store::open(self.path(), options(byte)).unwrap()
    }

    fn hits(&self, byte: u8, tenant: &str) -> usize {
        let store = self.open(byte);
        let pool = pool(&store, tenant);
        let hits = (1..=4).map(|seed| pool.hits(&chain(seed, 20))).sum();
        store.close().unwrap();
        hits
    }

    #[track_caller]
    fn all_hit(&self, byte: u8) {
        assert_eq!((self.hits(byte, "a"), self.hits(byte, "b")), (80, 80));
    }

    fn bytes(&self) -> [Vec<u8>; 2] {
        self.paths.each_ref().map(|path| fs::read(path).unwrap())
    }

    fn set(&self, bytes: &[Vec<u8>; 2]) {
        for (path, bytes) in self.paths.iter().zip(bytes) {
            fs::write(path, bytes).unwrap();
        }
    }

    fn survey(&self, sealed: Sealed) -> Result<Survey, SurveyError> {
        let options = SurveyOptions {
            sealed,
            ..SurveyOptions::default()
        };
        Survey::new(self.path(), &options)
    }

    fn unlocked(&self, byte: u8) -> Survey {
        self.survey(Sealed::Unlocked(key(byte))).unwrap()
    }

    fn copies(&self) -> Vec<Option<KeyringCopy>> {
        let store = store_of(self.path());
        let copies = self.paths.iter().flat_map(|path| {
            let bytes = fs::read(path).unwrap();
            keyring_offsets(bytes.len() as u64).map(|at| {
                let at = usize::try_from(at).unwrap();
                KeyringCopy::decode(&bytes[at..at + KEYRING_BYTES], store).ok()
            })
        });
        copies.collect()
    }

    fn generations(&self) -> Vec<Option<u64>> {
        let copies = self.copies().into_iter();
        copies.map(|copy| Some(copy?.generation)).collect()
    }

    fn erase(&self, tenant: &str) {
        let store = self.open(1);
        let erased = erase_tenant(&store, tenant, Duration::ZERO).unwrap();
        assert!(!erased.slots.is_empty() && erased.waits_for.is_empty());
        store.close().unwrap();
    }

    fn delete_half_of(&self, tenant: &str) {
        let store = self.open(1);
        let id = store.namespace(&namespace(tenant)).unwrap();
        let gone: Vec<PageKey> = chain(1, 20).into_iter().chain(chain(3, 20)).collect();
        store.delete(id, &gone).unwrap();
        store.close().unwrap();
    }

    /// Another writer puts another key into the slot of a tenant.
    fn replace_key_of(&self, tenant: &str) {
        self.change(|ring| {
            ring.erase(tenant, Serial::ZERO, &mut random).unwrap();
            fill(ring);
            let slot = ring.add_tenant(tenant, Serial::MAX, &mut random, 1);
            assert_eq!(slot.unwrap().get(), 2);
        });
    }

    /// Writes a keyring to all places, changed from the present one.
    fn change(&self, change: impl FnOnce(&mut Keyring)) {
        let copy = self.copies().into_iter().flatten();
        let copy = copy.max_by_key(|copy| copy.generation).unwrap();
        let mut ring = Keyring::open(copy, &key(1), &Vault::new()).unwrap();
        change(&mut ring);
        for path in &self.paths {
            write_keyring(path, &ring.copy().encode());
        }
    }
}

/// Fills a keyring with other tenants.
fn fill(ring: &mut Keyring) {
    for number in ring.copy().slots.len()..KEY_SLOTS_MAX {
        let tenant = number.to_string();
        ring.add_tenant(&tenant, Serial::ZERO, &mut random, 1)
            .unwrap();
    }
}

fn store_of(path: &Path) -> StoreId {
    superblock_to_save(path).unwrap().store
}

fn write_keyring(path: &Path, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(path).unwrap();
    for offset in keyring_offsets(file.metadata().unwrap().len()) {
        file.write_all_at(bytes, offset).unwrap();
    }
}

fn namespace(tenant: &str) -> Namespace {
    let builder = Namespace::builder("m", "", 64, PageShape::new(&PARTS).unwrap());
    builder.extra(TENANT_FIELD, tenant).build().unwrap()
}

fn pool<'a>(store: &'a Store, tenant: &str) -> Pool<'a> {
    Pool {
        store,
        id: store.namespace(&namespace(tenant)).unwrap(),
        model: tenant.to_owned(),
        parts: PARTS.to_vec(),
    }
}

#[test]
fn without_its_key_a_survey_has_all_but_the_pages() {
    let sample = Sample::new();
    let before = sample.bytes();
    assert!(matches!(
        sample.survey(Sealed::Refused),
        Err(SurveyError::Store(StoreError::Sealed(_)))
    ));
    assert!(matches!(
        sample.survey(Sealed::Unlocked(key(2))),
        Err(SurveyError::Store(StoreError::WrongKey { .. }))
    ));
    let unlocked = sample.unlocked(1);
    assert_eq!(unlocked.encryption, Encryption::Unlocked);
    assert_eq!((unlocked.live().len(), unlocked.namespaces.len()), (160, 2));
    assert_eq!(unlocked.flaws.len(), 0);
    let checked = unlocked
        .check_payloads(|_| ControlFlow::Continue(()), |_| ())
        .unwrap();
    assert_eq!((checked.good, checked.unopened), (160, 0));
    let locked = sample.survey(Sealed::Locked).unwrap();
    assert_eq!(locked.encryption, Encryption::Locked { pages: Some(160) });
    assert_eq!(locked.counts(), None);
    assert_eq!((locked.live().len(), locked.namespaces.len()), (0, 0));
    assert_eq!(locked.flaws.len(), 0);
    for (with, without) in unlocked.segments.iter().zip(&locked.segments) {
        assert_eq!(
            (
                with.state,
                with.sequence,
                with.descriptor_blocks,
                with.data_bytes
            ),
            (
                without.state,
                without.sequence,
                without.descriptor_blocks,
                without.data_bytes
            )
        );
    }
    drop((unlocked, locked));
    assert!(before == sample.bytes());
}

#[test]
fn damage_is_found_without_the_key_and_repaired_with_it() {
    let sample = Sample::new();
    let file = fs::File::options().write(true).open(sample.path()).unwrap();
    let header = SEGMENTS_OFFSET;
    file.write_all_at(&[0x5a; 64], header).unwrap();
    let [copy, ..] = keyring_offsets(VOLUME);
    file.write_all_at(&[0x5a; 64], copy).unwrap();
    for sealed in [Sealed::Locked, Sealed::Unlocked(key(1))] {
        let survey = sample.survey(sealed).unwrap();
        let kinds: Vec<&str> = survey.flaws.iter().map(|flaw| flaw.reason.kind()).collect();
        assert_eq!(kinds, ["keyring", "header"]);
        let is_good = |reason: &FlawReason| {
            matches!(
                reason,
                FlawReason::Keyring {
                    other_is_good: true,
                    ..
                }
            )
        };
        assert!(is_good(&survey.flaws[0].reason));
    }
    let plan = Repair::plan(&sample.unlocked(1), &[]);
    let mut progress = |_, _| ControlFlow::Continue(());
    assert!(matches!(
        repair(sample.path(), &OpenOptions::default(), &plan, &mut progress),
        Err(StoreError::Sealed(_))
    ));
    let done = repair(sample.path(), &options(1), &plan, &mut progress).unwrap();
    assert_eq!((done.keyrings, done.dropped_pages), (1, 0));
    assert!(sample.unlocked(1).flaws.is_empty());
    sample.all_hit(1);
}

/// An unreadable keyring is never taken for an empty one.
#[test]
fn without_a_keyring_everything_is_refused_and_nothing_is_written() {
    let sample = Sample::new();
    for path in &sample.paths {
        write_keyring(path, &vec![0x5a; KEYRING_BYTES]);
    }
    let before = sample.bytes();
    let is_refused = |error: &StoreError| matches!(error, StoreError::Keyring { .. });
    let mut progress = |_, _| ControlFlow::Continue(());
    let (path, with) = (sample.path(), options(1));
    let grown = CreateOptions::new(4 * VOLUME).with(|o| {
        o.grow = true;
        o.wrapping = Some(key(1));
    });
    let added = sample.directory.path().join("c");
    let refused = [
        Store::open(path, with.clone()).map(drop),
        rotate(path, &with, &key(2)),
        compact(path, &with, false, &mut progress).map(drop),
        retire(path, &sample.paths[1], &with, false, &mut progress).map(drop),
        repair(path, &with, &Repair::default(), &mut progress).map(drop),
        create(path, &grown).map(drop),
        add(path, &added, &grown).map(drop),
    ];
    for (number, refused) in refused.into_iter().enumerate() {
        assert!(refused.is_err_and(|error| is_refused(&error)), "{number}");
    }
    assert!(matches!(
        sample.survey(Sealed::Unlocked(key(1))),
        Err(SurveyError::Store(StoreError::Keyring { .. }))
    ));
    let survey = sample.survey(Sealed::Locked).unwrap();
    let lost = survey
        .flaws
        .iter()
        .filter(|flaw| flaw.reason.kind() == "keyring");
    assert_eq!(lost.count(), 7);
    drop(survey);
    assert!(before == sample.bytes() && !added.exists());
}

#[test]
fn a_store_grows_and_gets_volumes_with_the_keyring_in_all_places() {
    let sample = Sample::new();
    let added = sample.directory.path().join("c");
    let grown = CreateOptions::new(4 * VOLUME).with(|o| {
        o.grow = true;
        o.wrapping = Some(key(1));
    });
    for wrong in [None, Some(key(2))] {
        let grown = grown.clone().with(|o| o.wrapping = wrong.clone());
        create(sample.path(), &grown).unwrap_err();
        add(sample.path(), &added, &grown).unwrap_err();
    }
    assert!(!added.exists());
    assert!(create(sample.path(), &grown).unwrap().is_grown);
    let first = sample.generations()[0];
    assert!(first.is_some() && sample.generations().iter().all(|it| *it == first));
    assert!(sample.unlocked(1).flaws.is_empty());
    sample.all_hit(1);
    let one = grown.with(|o| (o.size, o.grow) = (VOLUME, false));
    assert!(add(sample.path(), &added, &one).unwrap().is_grown);
    let sample = Sample {
        paths: [sample.paths[0].clone(), added],
        directory: sample.directory,
    };
    assert!(sample.generations().iter().all(|it| *it == first));
    assert!(sample.unlocked(1).flaws.is_empty());
    sample.all_hit(1);
}

/// Moves need the master key alone: pages move too whose key another writer has replaced.
#[test]
fn compaction_copies_the_bytes_of_tenants_without_keys() {
    let sample = Sample::new();
    sample.delete_half_of("b");
    sample.replace_key_of("a");
    let mut progress = |_, _| ControlFlow::Continue(());
    let done = compact(sample.path(), &options(1), false, &mut progress).unwrap();
    assert!(done.moved_pages > 0 && done.damaged_pages == 0, "{done:?}");
    let survey = sample.unlocked(1);
    let checked = survey
        .check_payloads(|_| ControlFlow::Continue(()), |_| ())
        .unwrap();
    assert_eq!((checked.good, checked.unopened), (120, 80));
    // Another store gets what the keys open.
    let other = sample.directory.path().join("other");
    let fresh = CreateOptions::new(VOLUME).with(|o| {
        o.segment_size = Some(SEGMENT);
        o.wrapping = Some(key(3));
    });
    create(&other, &fresh).unwrap();
    let store = Store::open(&other, options(3)).unwrap();
    let copied = copy_into(&survey, &store, &mut progress).unwrap();
    assert_eq!(
        (copied.pages, copied.sealed_pages, copied.damaged_pages),
        (40, 80, 0)
    );
    assert_eq!(pool(&store, "b").hits(&chain(2, 20)), 20);
    store.close().unwrap();
    drop(survey);
    assert_eq!((sample.hits(1, "a"), sample.hits(1, "b")), (0, 40));
}

#[test]
fn no_tool_moves_the_pages_of_an_erased_tenant() {
    let sample = Sample::new();
    sample.erase("a");
    sample.delete_half_of("b");
    let mut progress = |_, _| ControlFlow::Continue(());
    let done = compact(sample.path(), &options(1), false, &mut progress).unwrap();
    assert!(
        done.planned_pages <= 40 && done.damaged_pages == 0,
        "{done:?}"
    );
    let survey = sample.unlocked(1);
    assert_eq!((survey.live().len(), survey.flaws.len()), (40, 0));
    drop(survey);
    assert_eq!((sample.hits(1, "a"), sample.hits(1, "b")), (0, 40));
}

/// A page of the old key would be a page of the new tenant's.
#[test]
fn the_slot_of_an_erased_tenant_is_given_again_behind_its_last_segment() {
    let sample = Sample::new();
    sample.erase("a");
    sample.change(fill);
    let store = sample.open(1);
    let keys = chain(1, 20);
    let hits = |tenant: &str| {
        let pool = pool(&store, tenant);
        pool.put(&keys);
        pool.hits(&keys)
    };
    assert_eq!(hits("c"), 0);
    for seed in 0..300 {
        pool(&store, "b").put(&chain(seed, 20));
    }
    assert_eq!((hits("d"), hits("e")), (20, 0));
    store.close().unwrap();
    let store = sample.open(1);
    assert_eq!(pool(&store, "d").hits(&keys), 20);
    store.close().unwrap();
    assert_eq!(sample.hits(1, "a"), 0);
}

/// A tag that a writer without the key has changed is no damage, and is found.
#[test]
fn a_keyring_of_other_keys_is_not_taken_for_damage() {
    let sample = Sample::new();
    sample.replace_key_of("a");
    let survey = sample.unlocked(1);
    let checked = survey
        .check_payloads(|_| ControlFlow::Continue(()), |_| ())
        .unwrap();
    assert_eq!((checked.good, checked.bad, checked.unopened), (160, 0, 80));
}

impl Sample {
    /// The live pages of each slot of the keyring.
    fn slots(&self) -> BTreeMap<u16, usize> {
        let survey = self.unlocked(1);
        let mut slots = BTreeMap::new();
        for page in survey.live() {
            *slots.entry(page.seal.unwrap().slot.get()).or_default() += 1;
        }
        slots
    }
}

#[test]
fn a_renewal_gives_tenants_new_keys_and_leaves_no_page_with_a_former_one() {
    let sample = Sample::new();
    let mut progress = |_, _| ControlFlow::Continue(());
    assert_eq!(sample.slots(), BTreeMap::from([(2, 80), (3, 80)]));
    let before = sample.bytes();
    for (tenant, pages) in [(Some("b"), 80), (None, 160)] {
        let planned = rekey(sample.path(), &options(1), tenant, true, &mut progress).unwrap();
        assert_eq!((planned.planned_pages, planned.moved_pages), (pages, 0));
    }
    assert!(before == sample.bytes());
    let done = rekey(sample.path(), &options(1), Some("a"), false, &mut progress).unwrap();
    assert_eq!((done.planned_pages, done.left_pages), (80, 0));
    assert_eq!(sample.slots(), BTreeMap::from([(3, 80), (4, 80)]));
    let former = sample.copies()[0].as_ref().unwrap().slots[1].state;
    assert!(matches!(former, SlotState::Erased(_)));
    sample.all_hit(1);
    let done = rekey(sample.path(), &options(1), None, false, &mut progress).unwrap();
    assert_eq!((done.planned_pages, done.left_pages), (160, 0));
    // The namespaces without a tenant have a key too. The order of the three is left to chance.
    let slots: Vec<_> = sample.slots().into_iter().collect();
    assert!(matches!(slots[..], [(5.., 80), (6..=7, 80)]), "{slots:?}");
    let survey = sample.unlocked(1);
    let checked = survey.check_payloads(|_| ControlFlow::Continue(()), |_| ());
    assert_eq!(checked.unwrap().good, 160);
    drop(survey);
    sample.all_hit(1);
    for (wrong, tenant) in [(2, None), (1, Some("none"))] {
        rekey(sample.path(), &options(wrong), tenant, false, &mut progress).unwrap_err();
    }
    sample.all_hit(1);
}

#[test]
fn saved_superblocks_bring_no_keyring_back() {
    let sample = Sample::new();
    let saved = superblock_to_save(sample.path()).unwrap();
    let wraps = |copy: &KeyringCopy| copy.wraps[0].key.bytes;
    let former = wraps(sample.copies()[0].as_ref().unwrap());
    let file = saved.encode_saved().unwrap();
    assert!(!file.windows(16).any(|part| part == &former[..16]));
    rotate(sample.path(), &options(1), &key(2)).unwrap();
    destroy_superblocks(&sample);
    let restored = restore(sample.path(), &sample.paths[1..], &saved, false).unwrap();
    assert_eq!(restored.destroyed, 2);
    assert!(matches!(
        Store::open(sample.path(), options(1)).map(drop),
        Err(StoreError::WrongKey { .. })
    ));
    sample.all_hit(2);
    // The keyring of the time of the save, or none, is refused.
    let now = superblock_to_save(sample.path()).unwrap();
    assert!(now.keyring > saved.keyring);
    let old = {
        let older = Sample::new();
        older.copies()[0].clone().unwrap()
    };
    let store = saved.store;
    let old = KeyringCopy { store, ..old };
    for bytes in [old.encode(), vec![0; KEYRING_BYTES]] {
        for path in &sample.paths {
            write_keyring(path, &bytes);
        }
        destroy_superblocks(&sample);
        let before = sample.bytes();
        restore(sample.path(), &sample.paths[1..], &now, false).unwrap_err();
        assert!(before == sample.bytes());
    }
}

fn destroy_superblocks(sample: &Sample) {
    for path in &sample.paths {
        let file = fs::File::options().write(true).open(path).unwrap();
        let bytes = file.metadata().unwrap().len();
        for offset in larder_format::superblock_offsets(bytes) {
            file.write_all_at(&[0; BLOCK_BYTES], offset).unwrap();
        }
        assert!(Superblock::decode(&fs::read(path).unwrap()[..BLOCK_BYTES]).is_err());
    }
}
