//! Opens, closes and surveys while reads are refused.
#![allow(clippy::unwrap_used)]

use std::io::IoSlice;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_core::status::PutStatus;
use larder_disk::mailbox::{ReadAt, read_all};
use larder_disk::{Action, Choice, Disk, DiskError, Done, Op, Piece, Witness};
use larder_format::{Namespace, PageKey, PageShape};
use larder_offline::survey::{Survey, SurveyError, SurveyOptions};
use larder_store::api::{DiskWrapper, OpenOptions, PageStore, PutOptions, PutPage};
use larder_store::error::StoreError;
use larder_store::share::Store;
use larder_store::store::opening::open_volumes;
use larder_store::volume::Access;
use larder_store::volume::create::{CreateOptions, create};

const PAGE_BYTES: usize = 65536;

fn created() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = CreateOptions::new(256 << 20).with(|o| o.segment_size = Some(16 << 20));
    create(&path, &options).unwrap();
    (directory, path)
}

fn namespace(page_bytes: u32) -> Namespace {
    let shape = PageShape::new(&[page_bytes]).unwrap();
    Namespace::builder("m", "", 64, shape).build().unwrap()
}

/// Carries out so many reads, and answers every further one with an error.
struct Refusing {
    disk: Arc<dyn Disk>,
    reads: Arc<AtomicU64>,
    carried_out: u64,
    errno: i32,
}

impl Disk for Refusing {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let is_carried_out = |op: &mut Op| {
            !matches!(op.action, Action::Read { .. })
                || self.reads.fetch_add(1, Ordering::Relaxed) < self.carried_out
        };
        let mut refused = ops;
        let ops = refused.extract_if(.., is_carried_out).collect();
        // SAFETY: this caller has the same contract.
        unsafe { self.disk.submit(ops) };
        for op in refused {
            op.sink.done(vec![Done {
                tag: op.tag,
                result: Err(DiskError::Os(self.errno)),
                buffer: None,
            }]);
        }
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

fn refusing(carried_out: u64, errno: i32) -> impl Fn(Arc<dyn Disk>) -> Arc<dyn Disk> {
    counting(Arc::default(), carried_out, errno)
}

fn counting(
    reads: Arc<AtomicU64>,
    carried_out: u64,
    errno: i32,
) -> impl Fn(Arc<dyn Disk>) -> Arc<dyn Disk> {
    move |disk| {
        Arc::new(Refusing {
            disk,
            reads: reads.clone(),
            carried_out,
            errno,
        })
    }
}

#[test]
fn a_read_without_memory_is_noticed() {
    let (_directory, path) = created();
    let options = OpenOptions::default();
    let (volumes, disk) = open_volumes(&path, &options, Access::ReadOnly).unwrap();
    let disk = Witness::new(disk, Arc::default());
    let bytes = 1 << 60;
    let read = ReadAt {
        volume: 0,
        offset: 0,
        bytes,
    };
    assert!(read_all(&disk, &[read])[0].is_err());
    assert!(disk.verdict().is_err());
    disk.shutdown();
    drop(volumes);
}

/// A closed store with one page.
fn stored() -> (tempfile::TempDir, PathBuf) {
    let (directory, path) = created();
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let id = store.namespace(&namespace(65536)).unwrap();
    let page = PutPage {
        key: PageKey::from_bytes([1; 32]),
        parent: None,
        depth: 0,
        parts: &[IoSlice::new(&[7; PAGE_BYTES])],
    };
    let stored = store.put(id, &[page], PutOptions::default());
    assert_eq!(stored, [PutStatus::Stored]);
    store.close().unwrap();
    (directory, path)
}

#[test]
fn a_store_that_this_process_cannot_read_is_not_opened_and_keeps_its_pages() {
    let (_directory, path) = stored();
    let before = std::fs::read(&path).unwrap();
    for carried_out in [0, 3] {
        let wrapper = DiskWrapper::new(refusing(carried_out, libc::ECANCELED));
        let options = OpenOptions::default().with(|o| o.disk_wrapper = Some(wrapper));
        let opened = Store::open(&path, options);
        let error = opened.err().unwrap();
        assert!(matches!(error, StoreError::NotRead { .. }), "{error}");
    }
    // All segments, without the superblocks: these name the last process that opened the store.
    let segments = usize::try_from(larder_format::SEGMENTS_OFFSET).unwrap();
    assert!(std::fs::read(&path).unwrap()[segments..] == before[segments..]);
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let id = store.namespace(&namespace(65536)).unwrap();
    let is_there = store.contains(id, &[PageKey::from_bytes([1; 32])]);
    assert_eq!(is_there, [true]);
    store.close().unwrap();
}

#[test]
fn a_read_that_this_process_fails_is_not_called_damage() {
    let (_directory, path) = stored();
    let options = SurveyOptions::default();
    let unread = Survey::through(&path, &options, refusing(2, libc::ENOMEM));
    let error = unread.err().unwrap();
    let is_not_read = matches!(error, SurveyError::Store(StoreError::NotRead { .. }));
    assert!(is_not_read, "{error}");

    let counted = Arc::new(AtomicU64::new(0));
    let whole = Survey::through(&path, &options, counting(counted.clone(), u64::MAX, 0));
    drop(whole.unwrap());
    let structures = counted.load(Ordering::Relaxed);
    for (errno, is_damage) in [(libc::EPERM, false), (libc::EIO, true)] {
        let survey = Survey::through(&path, &options, refusing(structures, errno)).unwrap();
        let mut lost = 0;
        let checked = survey.check_payloads(|_| ControlFlow::Continue(()), |_| lost += 1);
        assert_eq!((checked.is_ok(), lost), (is_damage, u64::from(is_damage)));
    }
}
