//! Pages that are computed faster than read, on a disk that is slowed down.

use std::num::NonZeroU32;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use larder_disk::{Action, Choice, Disk, Op, Piece};
use larder_engine::Store;
use larder_handle::place::{Attached, open_options, options};
use larder_handle::store::Handle;
use larder_store::api::DiskWrapper;

use super::*;

/// Bytes per second of reads, while it is not 0; reads come one after the other.
#[derive(Default)]
struct Speed(AtomicU64);

struct SlowDisk {
    inner: Arc<dyn Disk>,
    speed: Arc<Speed>,
    /// When the reads so far are over.
    free: Mutex<Instant>,
}

impl Disk for SlowDisk {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let mut bytes = 0;
        for op in &ops {
            if let Action::Read { buffer, .. } = &op.action {
                bytes += buffer.len() as u64;
            }
        }
        let speed = self.speed.0.load(Ordering::SeqCst);
        if let Some(nanoseconds) = (bytes * 1_000_000_000).checked_div(speed) {
            let until = {
                let mut free = self.free.lock().unwrap();
                *free = (*free).max(Instant::now()) + Duration::from_nanos(nanoseconds);
                *free
            };
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        // SAFETY: as the caller guarantees; the operations are passed on as they are.
        unsafe { self.inner.submit(ops) }
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: as the caller guarantees.
        unsafe { self.inner.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.inner.choice()
    }

    fn shutdown(&self) {
        self.inner.shutdown();
    }
}

/// A backend over a store whose disk has this speed, for an engine that computes 1,000 tokens per
/// second. Pages have one token and 1 MiB, so computing them has the speed of 1,000 MiB/s.
fn slow_backend(path: &Path, server: Server, memory: &mut Memories) -> (Arc<Backend>, Arc<Speed>) {
    let mut config = config_of(path, "fail", "144MiB");
    config.prefill_rate = NonZeroU32::new(1000);
    let volume = place::volume_of(path);
    let page_bytes = Some(PAGE_BYTES as u64);
    larder_engine::create(&volume, &options(&volume, &config, page_bytes).unwrap()).unwrap();
    let speed = Arc::new(Speed::default());
    let wrapper = DiskWrapper::new({
        let speed = speed.clone();
        move |inner| {
            Arc::new(SlowDisk {
                inner,
                speed: speed.clone(),
                free: Mutex::new(Instant::now()),
            })
        }
    });
    let options = open_options(&config).with(|o| o.disk_wrapper = Some(wrapper));
    let store = Store::attach(&volume, options).unwrap();
    let handle = Handle::new(Attached {
        store: Arc::new(store),
        l4: None,
        volume,
        remark: None,
    });
    let place = Place::Attached(Arc::new(handle));
    let backend = Arc::new(Backend::new(place, server, &config));
    register(&backend, "kv", memory);
    (backend, speed)
}

/// Looks up until a measurement has ended, which the first lookup starts.
fn exists_when_measured(backend: &Arc<Backend>, chain: &[PageKey]) -> usize {
    assert_eq!(backend.exists("kv", chain, Chain::default(), None), 0);
    let worth = backend.worth.as_ref().unwrap();
    let patience = Instant::now() + Duration::from_secs(120);
    while worth.seconds(1).is_none() {
        assert!(Instant::now() < patience, "no measurement");
        std::thread::yield_now();
    }
    backend.exists("kv", chain, Chain::default(), None)
}

#[test]
fn pages_on_a_slow_disk_are_left_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(16);
    let (backend, speed) = slow_backend(directory.path(), server(), &mut memory);
    let chain = keys(16, 1);
    let indices: Vec<i64> = (0..16).collect();
    let stored = backend.set("kv", &chain, &indices, Some(Chain::default()));
    assert_eq!(stored, [true; 16]);
    speed.0.store(20 << 20, Ordering::SeqCst);
    for pages in [1, 4, 16] {
        assert_eq!(exists_or_none(&backend, &chain[..pages]), 0);
    }
    let (slow, unmeasured) = (
        count(&backend, "rank_slow_pages"),
        count(&backend, "rank_unmeasured_pages"),
    );
    assert!(slow > 0 && unmeasured > 0, "{slow} {unmeasured}");
    // The report of the owner, for `stat` and `doctor`.
    let report = larder_engine::report(&place::volume_of(directory.path())).unwrap();
    let counts = report.processes[0].counts.unwrap();
    assert_eq!((counts.slow, counts.unmeasured), (slow, unmeasured));
    assert!(backend.close());
}

/// The first lookup waits for its measurement.
fn exists_or_none(backend: &Arc<Backend>, chain: &[PageKey]) -> usize {
    match backend.worth.as_ref().unwrap().seconds(1) {
        None => exists_when_measured(backend, chain),
        Some(_) => backend.exists("kv", chain, Chain::default(), None),
    }
}

#[test]
fn what_is_read_faster_than_computed_is_found_and_learnt_from() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(16);
    let (backend, _) = slow_backend(directory.path(), server(), &mut memory);
    let chain = keys(16, 1);
    let indices: Vec<i64> = (0..16).collect();
    assert_eq!(
        backend.set("kv", &chain, &indices, Some(Chain::default())),
        [true; 16]
    );
    // As fast as memory, on any disk.
    let worth = backend.worth.as_ref().unwrap();
    worth.read(1 << 30, Duration::from_millis(1));
    assert_eq!(backend.exists("kv", &chain, Chain::default(), None), 16);
    let before = worth.seconds(1).unwrap();
    assert_eq!(backend.get("kv", &chain, &indices), [true; 16]);
    assert!(
        worth.seconds(1).unwrap() > before,
        "a real read is slower than that"
    );
    assert_eq!(count(&backend, "rank_unmeasured_pages"), 0);
    assert!(backend.close());
}

#[test]
fn the_first_rank_decides_for_all() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = Memories::new(4);
    let mut other = server();
    other.tp = (1, 2);
    let (backend, _) = slow_backend(directory.path(), other, &mut memory);
    let chain = keys(4, 1);
    assert_eq!(
        backend.set("kv", &chain, &[0, 1, 2, 3], Some(Chain::default())),
        [true; 4]
    );
    assert!(backend.worth.is_none());
    assert_eq!(backend.exists("kv", &chain, Chain::default(), None), 4);
    assert!(backend.close());
}
