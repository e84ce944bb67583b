//! Repairs and retirements on a device that fails: it does not read or write some blocks. And
//! compactions that are killed at any write. The public interface covers all other tests.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::IoSlice;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use larder_base::memory::AlignedBuf;
use larder_core::index::SegmentId;
use larder_core::status::PutStatus;
use larder_disk::{Action, Choice, Disk, DiskError, Done, Op, Piece};
use larder_format::{BLOCK_BYTES, Namespace, PageKey, PageShape, TokenUnits, page_keys};
use larder_store::api::{DiskWrapper, OpenOptions, PageStore, PutOptions, PutPage};
use larder_store::encoder::CodecChoice;
use larder_store::error::StoreError;
use larder_store::recovery::Whole;
use larder_store::store::opening::{self, Opening};
use larder_store::volume::Access;
use larder_store::volume::create::{CreateOptions, create};
use larder_sync::Mutex;

use std::ops::ControlFlow;
use std::sync::Arc;

use super::owner::Owner;
use super::*;
use crate::survey::{Survey, SurveyOptions};

const SEGMENT_BYTES: u64 = 16 << 20;
const PAGE_BYTES: u32 = 64 << 10;
const GARBAGE: u8 = 0xee;

/// A disk that does not receive all operations.
struct FaultyDisk {
    disk: Arc<dyn Disk>,
    /// Answers the operations that the disk must not receive, and returns the rest.
    pass: Box<dyn Fn(Vec<Op>) -> Vec<Op> + Send + Sync>,
}

impl FaultyDisk {
    /// Refuses some reads of the only volume, by their bytes.
    fn refusing(
        disk: Arc<dyn Disk>,
        errno: i32,
        refuses: impl Fn(Range<u64>) -> bool + Send + Sync + 'static,
    ) -> Arc<dyn Disk> {
        let takes = move |op: Op| match &op.action {
            Action::Read { offset, buffer } if refuses(*offset..offset + buffer.len() as u64) => {
                refuse(&op, DiskError::Os(errno));
                None
            }
            _ => Some(op),
        };
        let pass = Box::new(move |ops: Vec<Op>| ops.into_iter().filter_map(&takes).collect());
        Arc::new(FaultyDisk { disk, pass })
    }

    /// Destroys blocks, and refuses their reads until they have been written.
    fn with_bad_blocks(disk: Arc<dyn Disk>, path: &Path, offsets: &[u64]) -> Arc<dyn Disk> {
        let file = File::options().read(true).write(true).open(path).unwrap();
        for &offset in offsets {
            file.write_all_at(&[GARBAGE; BLOCK_BYTES], offset).unwrap();
        }
        let bad = Mutex::new(offsets.to_vec());
        FaultyDisk::refusing(disk, libc::EIO, move |asked| {
            let mut bad = bad.lock();
            bad.retain(|at| {
                let mut block = [0; BLOCK_BYTES];
                file.read_exact_at(&mut block, *at).unwrap();
                block == [GARBAGE; BLOCK_BYTES]
            });
            bad.iter().any(|at| asked.contains(at))
        })
    }

    /// Lets a block be read once.
    fn readable_once(disk: Arc<dyn Disk>, offset: u64) -> Arc<dyn Disk> {
        let reads = AtomicU64::new(0);
        FaultyDisk::refusing(disk, libc::EIO, move |asked| {
            asked.contains(&offset) && reads.fetch_add(1, Relaxed) > 0
        })
    }

    /// Cancels the first read of a block.
    fn cancelled_once(disk: Arc<dyn Disk>, offset: u64) -> Arc<dyn Disk> {
        let reads = AtomicU64::new(0);
        FaultyDisk::refusing(disk, libc::ECANCELED, move |asked| {
            asked.contains(&offset) && reads.fetch_add(1, Relaxed) == 0
        })
    }

    /// Refuses some operations of the second volume.
    fn second_refusing(
        disk: Arc<dyn Disk>,
        errno: i32,
        refuses: impl Fn(&Action) -> bool + Send + Sync + 'static,
    ) -> Arc<dyn Disk> {
        let takes = move |op: &Op| {
            let is_refused = op.volume == 1 && refuses(&op.action);
            if is_refused {
                refuse(op, DiskError::Os(errno));
            }
            !is_refused
        };
        let pass = Box::new(move |ops: Vec<Op>| ops.into_iter().filter(&takes).collect());
        Arc::new(FaultyDisk { disk, pass })
    }

    /// Takes so many writes, and then ends this thread: its next submission unwinds.
    fn killed_after(disk: Arc<dyn Disk>, writes: u64) -> Arc<dyn Disk> {
        let left = AtomicU64::new(writes);
        let victim = std::thread::current().id();
        let pass = Box::new(move |ops: Vec<Op>| {
            let is_write = |op: &&Op| matches!(op.action, Action::Write { .. });
            let writes = ops.iter().filter(is_write).count() as u64;
            let before = left.load(Relaxed);
            left.store(before.saturating_sub(writes), Relaxed);
            if writes < before || writes == 0 {
                return ops;
            }
            ops.iter().for_each(|op| refuse(op, DiskError::Shutdown));
            if std::thread::current().id() == victim && !std::thread::panicking() {
                std::panic::resume_unwind(Box::new("killed"));
            }
            Vec::new()
        });
        Arc::new(FaultyDisk { disk, pass })
    }
}

fn refuse(op: &Op, error: DiskError) {
    op.sink.done(vec![Done {
        tag: op.tag,
        result: Err(error),
        buffer: None,
    }]);
}

impl Disk for FaultyDisk {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let good = (self.pass)(ops);
        // SAFETY: this caller has the same contract.
        unsafe { self.disk.submit(good) };
    }

    fn expire(&self) {
        self.disk.expire();
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: this caller has the same contract.
        unsafe { self.disk.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.disk.choice()
    }

    fn shutdown(&self) {
        self.disk.shutdown();
    }
}

fn namespace() -> Namespace {
    Namespace::builder("m", "w1", 64, PageShape::new(&[PAGE_BYTES]).unwrap())
        .build()
        .unwrap()
}

fn chain(seed: u64, pages: u64) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages).map(|page| seed << 24 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// A closed store with these chains, each put by itself.
fn store_with(directory: &Path, chains: &[Vec<PageKey>]) -> PathBuf {
    store_on(&[directory.join("store")], chains)
}

/// The same on several volumes.
fn store_on(volumes: &[PathBuf], chains: &[Vec<PageKey>]) -> PathBuf {
    let path = volumes[0].clone();
    let size = volumes.len() as u64 * ((1 << 20) + 8 * SEGMENT_BYTES);
    let options = CreateOptions::new(size).with(|o| {
        o.segment_size = Some(SEGMENT_BYTES);
        o.volumes = volumes[1..].to_vec();
    });
    create(&path, &options).unwrap();
    let store = larder_store::share::Store::open(&path, OpenOptions::default()).unwrap();
    let id = store.namespace(&namespace()).unwrap();
    let memory = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
    let parts = [IoSlice::new(&memory)];
    for keys in chains {
        let pages: Vec<PutPage<'_>> = keys
            .iter()
            .zip(0..)
            .map(|(key, depth)| PutPage {
                key: *key,
                parent: None,
                depth,
                parts: &parts,
            })
            .collect();
        let statuses = store.put(id, &pages, PutOptions::default());
        assert_eq!(statuses, vec![PutStatus::Stored; keys.len()]);
    }
    store.close().unwrap();
    path
}

fn survey(path: &Path) -> Survey {
    Survey::new(path, &SurveyOptions::default()).unwrap()
}

/// The offset of the written segment, and the number of its descriptor blocks.
fn written_segment(path: &Path) -> (u64, u64) {
    let survey = survey(path);
    let found = survey
        .segments
        .iter()
        .find(|facts| facts.records > 0)
        .unwrap();
    (found.offset, u64::from(found.descriptor_blocks))
}

fn block_offset(segment: u64, index: u64) -> u64 {
    segment + SEGMENT_BYTES - (index + 1) * BLOCK_BYTES as u64
}

/// Repairs segment 0 of a store on a disk that does not read these blocks.
fn repair_without(path: &Path, bad: &[u64]) -> Repaired {
    let (file, bad) = (path.to_owned(), bad.to_vec());
    repair_through(
        path,
        DiskWrapper::new(move |disk| FaultyDisk::with_bad_blocks(disk, &file, &bad)),
    )
}

/// Repairs segment 0 of a store through a layer over its disk.
fn repair_through(path: &Path, wrapper: DiskWrapper) -> Repaired {
    try_repair(path, wrapper).unwrap()
}

fn try_repair(path: &Path, wrapper: DiskWrapper) -> Result<Repaired, StoreError> {
    let options = OpenOptions::default().with(|o| o.disk_wrapper = Some(wrapper));
    let segment = SegmentName {
        volume: 0,
        number: 0,
    };
    let plan = Repair {
        headers: vec![segment],
        segments: vec![segment],
        ..Repair::default()
    };
    let mut progress = |_, _| ControlFlow::Continue(());
    repair(path, &options, &plan, &mut progress)
}

/// The pages of a store. It must be sound.
fn sound(path: &Path) -> BTreeSet<PageKey> {
    let survey = survey(path);
    assert!(survey.flaws.is_empty(), "{:?}", survey.flaws);
    let mut lost = Vec::new();
    survey
        .check_payloads(|_| ControlFlow::Continue(()), |bad| lost.push(bad))
        .unwrap();
    assert!(lost.is_empty(), "{lost:?}");
    survey.live().map(|page| page.key).collect()
}

/// Checks that the store is sound and holds exactly these pages.
fn check(path: &Path, keys: &[PageKey]) {
    assert_eq!(sound(path), keys.iter().copied().collect());
}

#[test]
fn pages_whose_descriptors_can_be_read_are_saved_from_a_segment_with_an_unreadable_block() {
    let directory = tempfile::tempdir().unwrap();
    let chains: Vec<Vec<PageKey>> = (1..=3).map(|seed| chain(seed, 20)).collect();
    let path = store_with(directory.path(), &chains);
    let (segment, blocks) = written_segment(&path);
    let repaired = repair_without(&path, &[block_offset(segment, blocks - 1)]);
    assert_eq!((repaired.emptied_segments, repaired.moved_pages), (1, 40));
    check(&path, &chains[..2].concat());
}

#[test]
fn an_unreadable_segment_is_released_and_its_pages_never_count_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = store_with(directory.path(), &[chain(1, 20)]);
    let (segment, blocks) = written_segment(&path);
    let mut last = [0; BLOCK_BYTES];
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.read_exact_at(&mut last, block_offset(segment, 0))
        .unwrap();
    let mut bad: Vec<u64> = (0..blocks)
        .map(|index| block_offset(segment, index))
        .collect();
    bad.extend([segment, segment + BLOCK_BYTES as u64]);
    let repaired = repair_without(&path, &bad);
    assert_eq!((repaired.emptied_segments, repaired.moved_pages), (1, 0));
    check(&path, &[]);
    // The device reads the block again after all.
    file.write_all_at(&last, block_offset(segment, 0)).unwrap();
    check(&path, &[]);
}

#[test]
fn a_segment_with_an_unreadable_block_is_left_with_its_deletions() {
    let directory = tempfile::tempdir().unwrap();
    let (kept, gone) = (chain(1, 20), chain(2, 20));
    let path = store_with(directory.path(), &[kept.clone(), gone.clone()]);
    {
        let store = larder_store::share::Store::open(&path, OpenOptions::default()).unwrap();
        let id = store.namespace(&namespace()).unwrap();
        assert_eq!(store.delete(id, &gone).unwrap(), 20);
        store.close().unwrap();
    }
    let (segment, blocks) = written_segment(&path);
    // The last block has the deletions, and nothing else.
    let last = block_offset(segment, blocks - 1);
    let repaired = repair_through(
        &path,
        DiskWrapper::new(move |disk| FaultyDisk::readable_once(disk, last)),
    );
    let first = SegmentName {
        volume: 0,
        number: 0,
    };
    assert_eq!(repaired.stuck, [first]);
    assert_eq!((repaired.emptied_segments, repaired.moved_pages), (0, 0));
    check(&path, &kept);
}

#[test]
fn repair_without_room_reports_it_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let chains: Vec<Vec<PageKey>> = (1..=3).map(|seed| chain(seed, 20)).collect();
    let path = store_with(directory.path(), &chains);
    let (segment, blocks) = written_segment(&path);
    assert_eq!(segment, larder_format::SEGMENTS_OFFSET);
    // The state of the other segments is unknown.
    let mut bad: Vec<u64> = (1..8)
        .flat_map(|number| [0, 1].map(|copy| (number, copy)))
        .map(|(number, copy)| segment + number * SEGMENT_BYTES + copy * BLOCK_BYTES as u64)
        .collect();
    bad.push(block_offset(segment, blocks - 1));
    let repaired = repair_without(&path, &bad);
    let first = SegmentName {
        volume: 0,
        number: 0,
    };
    assert_eq!(repaired.stuck, [first]);
    assert_eq!((repaired.emptied_segments, repaired.moved_pages), (0, 0));
    let mut found: Vec<PageKey> = survey(&path).live().map(|page| page.key).collect();
    let mut wanted = chains[..2].concat();
    found.sort_unstable();
    wanted.sort_unstable();
    let lost: Vec<_> = wanted.iter().filter(|key| !found.contains(key)).collect();
    let undead: Vec<_> = found.iter().filter(|key| !wanted.contains(key)).collect();
    assert!(
        lost.is_empty() && undead.is_empty(),
        "lost {lost:?}, undead {undead:?}"
    );
}

#[test]
fn an_unreadable_header_copy_is_written_again_from_the_other_copy() {
    for copy in 0..2 {
        let directory = tempfile::tempdir().unwrap();
        let keys = chain(1, 20);
        let path = store_with(directory.path(), std::slice::from_ref(&keys));
        let (segment, _) = written_segment(&path);
        let repaired = repair_without(&path, &[segment + copy * BLOCK_BYTES as u64]);
        assert_eq!(repaired.moved_pages, 20);
        check(&path, &keys);
    }
}

#[test]
fn a_header_copy_that_this_process_cannot_read_is_not_taken_for_a_bad_one() {
    for copy in 0..2 {
        let directory = tempfile::tempdir().unwrap();
        let keys = chain(1, 20);
        let path = store_with(directory.path(), std::slice::from_ref(&keys));
        let (segment, _) = written_segment(&path);
        let offset = segment + copy * BLOCK_BYTES as u64;
        let repaired = try_repair(
            &path,
            DiskWrapper::new(move |disk| FaultyDisk::cancelled_once(disk, offset)),
        );
        let error = repaired.err().unwrap();
        assert!(matches!(error, StoreError::NotRead { .. }), "{error}");
        check(&path, &keys);
    }
}

/// A closed store, full of chains that were put in turns, page by page. Pages are alike: plain, or
/// made smaller by the codec.
fn full_store(directory: &Path, codec: CodecChoice) -> PathBuf {
    let path = directory.join("store");
    let options = CreateOptions::new((1 << 20) + 12 * SEGMENT_BYTES).with(|o| {
        o.segment_size = Some(SEGMENT_BYTES);
    });
    create(&path, &options).unwrap();
    let options = OpenOptions::default().with(|o| o.codec = codec);
    let store = larder_store::share::Store::open(&path, options).unwrap();
    let id = store.namespace(&namespace()).unwrap();
    let memory = AlignedBuf::zeroed(PAGE_BYTES as usize).unwrap();
    let parts = [IoSlice::new(&memory)];
    let chains: Vec<Vec<PageKey>> = (1..=40).map(|seed| chain(seed, 70)).collect();
    for depth in 0..70 {
        for chain in &chains {
            let page = PutPage {
                key: chain[depth],
                parent: depth.checked_sub(1).map(|before| chain[before]),
                depth: u32::try_from(depth).unwrap(),
                parts: &parts,
            };
            let options = PutOptions::waiting(Duration::from_secs(60));
            assert_eq!(store.put(id, &[page], options), [PutStatus::Stored]);
        }
    }
    assert!(store.stats().evicted > 0);
    // A compaction needs the free segments that reclaim keeps.
    let until = Instant::now() + Duration::from_secs(60);
    while store.stats().free_segments < 2 && Instant::now() < until {
        std::thread::yield_now();
    }
    store.close().unwrap();
    path
}

/// Compacts a store on a disk that takes so many writes; `None` if they did not suffice.
fn compact_within(path: &Path, writes: u64) -> Option<Compacted> {
    let options = OpenOptions::default().with(|o| {
        o.disk_wrapper = Some(DiskWrapper::new(move |disk| {
            FaultyDisk::killed_after(disk, writes)
        }));
    });
    let mut progress = |_, _| ControlFlow::Continue(());
    let compact = || compact(path, &options, false, &mut progress);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(compact));
    done.ok()?.ok()
}

#[test]
fn compactions_that_are_killed_at_any_write_leave_room_for_the_next() {
    compact_with_kills(CodecChoice::Off);
}

#[test]
fn so_do_those_of_encoded_pages() {
    compact_with_kills(CodecChoice::Bf16);
}

fn compact_with_kills(codec: CodecChoice) {
    let directory = tempfile::tempdir().unwrap();
    let path = full_store(directory.path(), codec);
    let before = sound(&path);
    let ends: Vec<Option<Compacted>> = (0..40)
        .map(|at| compact_within(&path, 2 + at * 11 % 37))
        .collect();
    assert!(ends[0].is_none() && ends[1].is_none(), "{ends:?}");
    let is_stuck = |done: &&Compacted| done.left_pages > 0;
    assert_eq!(ends.iter().flatten().find(is_stuck), None);
    let done = compact_within(&path, u64::MAX).unwrap();
    assert_eq!(done.left_pages, 0, "{done:?}");
    // Evicted pages may have come back.
    assert!(sound(&path).is_superset(&before));
}

/// Retires the second volume of a store through a layer over its disk.
fn retire_through(
    volumes: &[PathBuf],
    wrap: impl Fn(Arc<dyn Disk>) -> Arc<dyn Disk> + Send + Sync + 'static,
) -> Result<Retired, StoreError> {
    let wrapper = DiskWrapper::new(wrap);
    let options = OpenOptions::default().with(|o| o.disk_wrapper = Some(wrapper));
    let mut progress = |_, _| ControlFlow::Continue(());
    retire(&volumes[0], &volumes[1], &options, false, &mut progress)
}

#[test]
fn a_retirement_that_the_device_fails_evicts_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let volumes = [directory.path().join("a"), directory.path().join("b")];
    let chains: Vec<Vec<PageKey>> = (1..=8).map(|seed| chain(seed, 40)).collect();
    let path = store_on(&volumes, &chains);
    let found = survey(&path);
    let mut written = found.segments.iter();
    let written = written.find(|of| of.volume == 1 && of.records > 0).unwrap();
    let last = block_offset(written.offset, u64::from(written.descriptor_blocks) - 1);
    let is_it = move |at: u64, length: usize| (at..at + length as u64).contains(&last);
    // Its descriptors can be read at the open alone.
    let retired = retire_through(&volumes, move |disk| {
        let reads = AtomicU64::new(0);
        FaultyDisk::second_refusing(disk, libc::EIO, move |action| match action {
            Action::Read { offset, buffer } => {
                is_it(*offset, buffer.len()) && reads.fetch_add(1, Relaxed) > 0
            }
            _ => false,
        })
    });
    let number = written.number;
    assert!(
        matches!(&retired, Err(StoreError::NotEmptied { path, segment })
            if *path == volumes[1] && *segment == number),
        "{retired:?}"
    );
    check(&path, &chains.concat());
    // Its pages cannot be read for a reason that says nothing about them.
    let data = written.offset + 3 * BLOCK_BYTES as u64..written.offset + SEGMENT_BYTES / 2;
    let retired = retire_through(&volumes, move |disk| {
        let data = data.clone();
        FaultyDisk::second_refusing(disk, libc::ENOMEM, move |action| match action {
            Action::Read { offset, .. } => data.contains(offset),
            _ => false,
        })
    });
    assert!(
        matches!(&retired, Err(StoreError::NotEmptied { .. })),
        "{retired:?}"
    );
    check(&path, &chains.concat());
    let retired = retire_through(&volumes, |disk| disk).unwrap();
    assert_eq!(retired.evicted_pages, 0);
    check(&path, &chains.concat());
}

#[test]
fn a_retiring_volume_that_refuses_writes_leaves_the_room_of_the_others_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let volumes = [directory.path().join("a"), directory.path().join("b")];
    let chains: Vec<Vec<PageKey>> = (1..=40).map(|seed| chain(seed, 64)).collect();
    let path = store_on(&volumes, &chains);
    let bytes = std::fs::metadata(&volumes[1]).unwrap().len();
    let segments = larder_format::SEGMENTS_OFFSET..larder_format::tail_offset(bytes);
    let refuses = move |action: &Action| match action {
        Action::Write { offset, .. } => segments.contains(offset),
        _ => false,
    };
    let wrapper = DiskWrapper::new(move |disk| {
        FaultyDisk::second_refusing(disk, libc::EROFS, refuses.clone())
    });
    let options = OpenOptions::default().with(|o| o.disk_wrapper = Some(wrapper));
    let (opened, disk) = opening::open_volumes(&path, &options, Access::Exclusive).unwrap();
    let opening: Opening<Whole> = Opening::new(opened, disk, &options).unwrap();
    let (owner, _) = Owner::begin(opening, &[], &options).unwrap();
    let retire = || {
        owner.local.with_core(|core| {
            core.retire(1, 0);
            (
                core.counters().store.evicted,
                core.read_only_volumes().len(),
            )
        })
    };
    assert_eq!(retire().1, 0);
    for id in (0..).map(SegmentId).take(owner.spots.len()) {
        if owner.spots[id.0 as usize].volume == 1 {
            owner.empty(id, |page| page.from);
        }
    }
    // The header of an emptied segment is refused.
    let _ = opening::settle(&owner.local);
    let counters = || owner.local.with_core(|core| core.counters());
    let evicted = counters().store.evicted;
    assert_eq!(retire(), (evicted, 1), "{:?}", counters());
}
