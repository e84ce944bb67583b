//! Bytes through all tiers: L1, L2, the real store, another process, and back. Also caches with a
//! faulty device, a faulty L3 or wrong pools.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use larder_engine::{CreateOptions, GetPage, OpenOptions, PageStore, PutPage, Store, create};
use larder_format::PageKey;
use larder_kernels::host::{Faults, Moment};
use larder_kernels::{
    ChunkAt, Device, DeviceError, Direction, ForeignStream, Gated, HostDevice, HostMemory, KvShape,
    L1Pool, L2Pool, LayerTickets, Layout, Refused, RowCopy, Tensors, Ticket, Transfer, pool_bytes,
};
use larder_tiers::cache::Time;
use larder_tiers::config::{PrefetchPolicy, WritePolicy};
use larder_tiers::core::{Declined, LoadBack, OpId, Order, PrefetchState, Request};
use larder_tiers::l3::{FilesL3, L3, StoreL3};
use larder_tiers::prompt::Scope;
use larder_tiers::{Cache, CacheError, Config, Parts};

use support::namespace;

const PAGES: u32 = 5;

struct Bench {
    cache: Cache,
    shape: KvShape,
}

fn shapes() -> Vec<KvShape> {
    let sizes = [1, 16, 64];
    let mha = sizes.map(|page| KvShape::mha(3, 2, 8, 2, page).unwrap());
    let mla = sizes.map(|page| KvShape::mla(3, 24, 2, page).unwrap());
    mha.into_iter().chain(mla).collect()
}

fn config(shape: &KvShape) -> Config {
    let mut config = Config::new(shape.page_tokens(), u64::from(shape.page_bytes()), 12, 20);
    config.load_threshold_tokens = 1;
    config.prefetch.threshold_tokens = 1;
    config.prefetch.batch_pages = 2;
    config.prefetch.policy = PrefetchPolicy::WaitComplete;
    config
}

impl Bench {
    fn new(shape: KvShape, layout: Layout, l3: Option<Arc<dyn L3>>, faults: Faults) -> Bench {
        Bench::with(config(&shape), shape, layout, l3, faults)
    }

    fn with(
        config: Config,
        shape: KvShape,
        layout: Layout,
        l3: Option<Arc<dyn L3>>,
        faults: Faults,
    ) -> Bench {
        let parts = Bench::parts(&config, shape, layout, l3, faults);
        Bench {
            cache: Cache::new(config, parts).unwrap(),
            shape,
        }
    }

    fn parts(
        config: &Config,
        shape: KvShape,
        layout: Layout,
        l3: Option<Arc<dyn L3>>,
        faults: Faults,
    ) -> Parts {
        let device = Arc::new(HostDevice::with_faults(faults).unwrap());
        let l1 = device.alloc_l1(&shape, config.l1_pages + 1).unwrap();
        let pages = config.l2_pages + 1;
        let memory = HostMemory::zeroed(pool_bytes(&shape, pages)).unwrap();
        let l2 = device.register(memory, layout, &shape, pages).unwrap();
        Parts {
            device,
            l1,
            l2,
            l3,
            ranks: None,
        }
    }

    fn tokens(&self) -> impl Iterator<Item = u64> + use<> {
        (0..u64::from(PAGES * self.shape.page_tokens()) + 1).map(|token| token * 3)
    }

    /// Whole pages of the prompt. With one token per page, the last token, which is always
    /// computed, has its own page.
    fn pages(&self) -> usize {
        self.tokens().count() / self.shape.page_tokens() as usize
    }

    fn start(&mut self) -> Request {
        let prompt = self.cache.prompt(&Scope::default(), self.tokens()).unwrap();
        self.cache.start(prompt, 0)
    }

    /// The expected bytes of a chunk of the prompt's page `page`.
    fn bytes(&self, page: usize, part: u32, layer: u32) -> Vec<u8> {
        let seed = page as u32 * 31 + part * 7 + layer * 3 + 1;
        (0..self.shape.chunk_bytes())
            .map(|at| (at.wrapping_mul(seed) >> 3 ^ seed) as u8)
            .collect()
    }

    fn chunks(&self) -> Vec<(usize, u32, u32)> {
        let shape = self.shape;
        let pages = 0..PAGES as usize;
        pages
            .flat_map(|page| {
                (0..shape.parts())
                    .flat_map(move |part| (0..shape.layers()).map(move |layer| (page, part, layer)))
            })
            .collect()
    }

    /// Computes the whole prompt without a cached part, and ends the request.
    fn compute(&mut self) {
        let mut request = self.start();
        let tokens = self.tokens().count() - request.tokens();
        self.cache.extend(&mut request, tokens).unwrap();
        for (page, part, layer) in self.chunks() {
            let bytes = self.bytes(page, part, layer);
            let page = page as u32;
            let at = ChunkAt { part, layer, page };
            self.cache.write_chunk(&request, at, &bytes).unwrap();
        }
        self.cache.finish(request, true, &Ticket::done());
        self.cache.drain().unwrap();
    }

    /// Runs the prompt on its cached part in L2, and compares every byte.
    fn load_and_compare(&mut self) {
        let mut request = self.start();
        assert_eq!(request.l2_pages(), PAGES as usize);
        let result = self.cache.load_back(&mut request, 100).unwrap();
        assert!(matches!(result, LoadBack::Started(_, 5)), "{result:?}");
        for (page, part, layer) in self.chunks() {
            let mut found = vec![0; self.shape.chunk_bytes() as usize];
            let at = ChunkAt {
                part,
                layer,
                page: page as u32,
            };
            self.cache.read_chunk(&request, at, &mut found).unwrap();
            assert_eq!(
                found,
                self.bytes(page, part, layer),
                "page {page}, part {part}, layer {layer}"
            );
        }
        self.cache.drain().unwrap();
        self.cache.finish(request, false, &Ticket::done());
    }

    fn prefetch(&mut self) -> PrefetchState {
        let mut prompt = self.cache.prompt(&Scope::default(), self.tokens()).unwrap();
        let id = self.cache.prefetch(&mut prompt).unwrap();
        self.cache.drain().unwrap();
        self.cache.poll_prefetch(id).unwrap()
    }

    fn leave(mut self) -> Cache {
        self.cache.drain().unwrap();
        self.cache.core().validate([]).unwrap();
        self.cache.reset().unwrap();
        let config = self.cache.core().config();
        assert_eq!(
            self.cache.core().free_pages(),
            (config.l1_pages, config.l2_pages)
        );
        self.cache
    }
}

fn no_faults() -> Faults {
    Box::new(|_| Ok(()))
}

/// Runs `with` for every shape and layout, over one store.
fn each(store: &Path, with: impl Fn(&mut Bench)) {
    let store: Arc<dyn PageStore> = Arc::new(Store::open(store, OpenOptions::default()).unwrap());
    for shape in shapes() {
        for layout in Layout::ALL {
            let l3 = StoreL3::new(store.clone(), &namespace("end-to-end", &shape, layout)).unwrap();
            let mut bench = Bench::new(shape, layout, Some(Arc::new(l3)), no_faults());
            with(&mut bench);
            bench.leave();
        }
    }
    store.close().unwrap();
}

const CHILD: &str = "LARDER_TIERS_STORE";

#[test]
fn bytes_come_back_from_l2_and_in_another_process_from_the_store_in_every_shape_and_layout() {
    if let Some(store) = std::env::var_os(CHILD) {
        each(Path::new(&store), |bench| {
            bench.compute();
            assert_eq!(bench.cache.stats().put, bench.pages() as u64);
            bench.cache.evict(100);
            bench.load_and_compare();
        });
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("store");
    let options = CreateOptions::new(256 << 20).with(|o| {
        o.segment_size = Some(16 << 20);
    });
    create(&store, &options).unwrap();
    let test =
        "bytes_come_back_from_l2_and_in_another_process_from_the_store_in_every_shape_and_layout";
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, &store)
        .status();
    assert!(child.unwrap().success());
    each(&store, |bench| {
        assert_eq!(bench.prefetch(), PrefetchState::Ended(bench.pages()));
        bench.load_and_compare();
        assert_eq!(
            bench.cache.stats().put,
            0,
            "pages read from L3 are not written to it again"
        );
    });
}

#[test]
fn a_directory_of_files_works_as_l3_and_a_torn_file_is_a_miss_that_is_repaired() {
    let directory = tempfile::tempdir().unwrap();
    for layout in Layout::ALL {
        let path = directory.path().join(layout.name());
        let l3: Arc<dyn L3> = Arc::new(FilesL3::new(&path).unwrap());
        let shape = KvShape::mha(3, 2, 8, 2, 16).unwrap();
        let mut bench = Bench::new(shape, layout, Some(l3), no_faults());
        bench.compute();
        bench.cache.reset().unwrap();
        assert_eq!(bench.prefetch(), PrefetchState::Ended(5));
        bench.load_and_compare();
        bench.cache.reset().unwrap();
        // Truncates the third page.
        let mut prompt = bench
            .cache
            .prompt(&Scope::default(), bench.tokens())
            .unwrap();
        bench.cache.core().hash_prompt(&mut prompt);
        let keys = larder_format::page_keys(
            &bench.tokens().collect::<Vec<_>>(),
            std::num::NonZero::<usize>::new(16).unwrap(),
            None,
            larder_format::TokenUnits::Single,
        );
        std::fs::write(path.join(format!("{}.kv", keys[2])), [1, 2, 3]).unwrap();
        assert_eq!(bench.prefetch(), PrefetchState::Ended(2));
        bench.cache.reset().unwrap();
        bench.compute();
        bench.cache.reset().unwrap();
        assert_eq!(bench.prefetch(), PrefetchState::Ended(5));
        bench.load_and_compare();
        bench.leave();
    }
}

/// An L3 that fails every call, or that reports all pages but returns none.
struct Useless {
    reports_all: bool,
}

impl L3 for Useless {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        if self.reports_all { keys.len() } else { 0 }
    }

    fn get(&self, _: &mut [GetPage<'_, '_>]) -> usize {
        0
    }

    fn put(&self, _: &[PutPage<'_>]) -> usize {
        0
    }

    fn touch(&self, _: &[PageKey]) {}
}

#[test]
fn an_l3_that_fails_every_call_or_returns_wrong_counts_is_a_miss_and_leaks_nothing() {
    for reports_all in [false, true] {
        let shape = KvShape::mla(2, 8, 2, 4).unwrap();
        let mut bench = Bench::new(
            shape,
            Layout::PageFirst,
            Some(Arc::new(Useless { reports_all })),
            no_faults(),
        );
        let state = bench.prefetch();
        assert_eq!(
            matches!(state, PrefetchState::Ended(0)),
            reports_all,
            "{state:?}"
        );
        bench.compute();
        assert_eq!(bench.cache.stats().put_failed, u64::from(PAGES));
        bench.cache.evict(100);
        bench.load_and_compare();
        bench.leave();
    }
}

fn failing(direction: Direction) -> Faults {
    Box::new(move |moment| match moment {
        Moment::Copy(of, 1) if of == direction => Err(DeviceError::Copy {
            layer: 1,
            why: "a test".into(),
        }),
        _ => Ok(()),
    })
}

#[test]
fn a_device_that_fails_every_backup_costs_hits_and_leaks_nothing() {
    for policy in WritePolicy::ALL {
        let shape = KvShape::mha(3, 2, 8, 2, 4).unwrap();
        let mut config = config(&shape);
        config.write_policy = policy;
        config.selective_hits = 1;
        let mut bench = Bench::with(
            config,
            shape,
            Layout::LayerFirst,
            None,
            failing(Direction::Store),
        );
        bench.compute();
        bench.cache.evict(100);
        bench.cache.drain().unwrap();
        assert_eq!(bench.cache.stats().backup_failed, u64::from(PAGES));
        assert_eq!(
            bench.start_matched(),
            0,
            "a page that was never copied is a miss"
        );
        bench.leave();
    }
}

impl Bench {
    fn start_matched(&mut self) -> usize {
        let request = self.start();
        let matched = request.l2_pages() + request.row_and_loads().0.shared_pages();
        self.cache.finish(request, false, &Ticket::done());
        matched
    }
}

#[test]
fn a_load_that_fails_breaks_its_request_which_then_computes_and_nothing_leaks() {
    let shape = KvShape::mha(3, 2, 8, 2, 4).unwrap();
    let mut bench = Bench::new(
        shape,
        Layout::PageFirstDirect,
        None,
        failing(Direction::Load),
    );
    bench.compute();
    bench.cache.evict(100);
    let mut request = bench.start();
    assert!(matches!(
        bench.cache.load_back(&mut request, 100).unwrap(),
        LoadBack::Started(_, 5)
    ));
    let pages = bench.cache.pages(&request).unwrap();
    assert!(pages.wait_layer(0).is_ok());
    assert!(pages.wait_layer(1).is_err());
    drop(pages);
    bench.cache.drain().unwrap();
    assert!(bench.cache.is_broken(&request));
    assert!(bench.cache.pages(&request).is_err());
    bench.cache.core().validate([&request]).unwrap();
    bench.cache.finish(request, true, &Ticket::done());
    let mut again = bench.start();
    assert_eq!(
        again.l2_pages(),
        PAGES as usize,
        "the copy in L2 is still valid"
    );
    let declined = bench.cache.load_back(&mut again, 0);
    assert_eq!(declined, Ok(LoadBack::OverQuota));
    bench.cache.finish(again, false, &Ticket::done());
    bench.leave();
}

#[test]
fn pools_that_do_not_fit_the_configuration_are_refused_by_name() {
    let shape = KvShape::mha(3, 2, 8, 2, 16).unwrap();
    let make = |change: fn(&mut Config)| {
        let device = Arc::new(HostDevice::new().unwrap());
        let memory = HostMemory::zeroed(pool_bytes(&shape, 21)).unwrap();
        let parts = Parts {
            l1: device.alloc_l1(&shape, 13).unwrap(),
            l2: device
                .register(memory, Layout::PageFirst, &shape, 21)
                .unwrap(),
            device,
            l3: None,
            ranks: None,
        };
        let mut config = config(&shape);
        change(&mut config);
        Cache::new(config, parts).map(drop)
    };
    make(|_| {}).unwrap();
    let error = make(|config| config.page_tokens = 64).unwrap_err();
    assert!(
        matches!(
            error,
            CacheError::Page {
                tier: "l1",
                found_tokens: 16,
                tokens: 64,
                ..
            }
        ),
        "{error}"
    );
    let error = make(|config| config.l2_pages = 21).unwrap_err();
    assert!(
        matches!(
            error,
            CacheError::Pool {
                tier: "l2",
                needed: 22,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        make(|config| config.loads_max = 0)
            .unwrap_err()
            .to_string()
            .contains("loads_max")
    );
}

/// A time in which nothing ends until the test allows it.
struct Held(Arc<AtomicBool>);

impl Time for Held {
    fn now_us(&mut self) -> u64 {
        0
    }

    fn begun(&mut self, _order: &Order) {}

    fn read_us(&mut self, _id: OpId, measured: u64) -> u64 {
        measured
    }

    fn is_over(&mut self, _id: OpId) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_cache_with_its_own_time_reports_an_end_only_at_that_time() {
    let shape = KvShape::mha(2, 1, 8, 1, 4).unwrap();
    let config = config(&shape);
    let is_over = Arc::new(AtomicBool::new(false));
    let parts = Bench::parts(
        &config,
        shape,
        Layout::PageFirst,
        None,
        Box::new(|_| Ok(())),
    );
    let time = Box::new(Held(is_over.clone()));
    let cache = Cache::in_time(config, parts, time).unwrap();
    let mut bench = Bench { cache, shape };
    let mut request = bench.start();
    let tokens = bench.tokens().count();
    bench.cache.extend(&mut request, tokens).unwrap();
    bench.cache.finish(request, true, &Ticket::done());
    // The copy ends during these polls, but no completion is reported.
    for _ in 0..1000 {
        assert_eq!(bench.cache.poll().unwrap(), 0);
    }
    assert_eq!(bench.cache.stats().backed_up, 0);
    is_over.store(true, Ordering::SeqCst);
    bench.cache.drain().unwrap();
    assert_eq!(bench.cache.stats().backed_up, u64::from(PAGES));
    bench.leave();
}

/// An L3 that reports all pages but loses each at the first read.
#[derive(Default)]
struct Forgetful(AtomicUsize);

impl L3 for Forgetful {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        keys.len()
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        match self.0.fetch_add(1, Ordering::SeqCst) {
            0 => 0,
            _ => pages.len(),
        }
    }

    fn put(&self, _: &[PutPage<'_>]) -> usize {
        0
    }

    fn touch(&self, _: &[PageKey]) {}
}

/// A time in which a read without pages ends at once, and any other read takes ten seconds.
struct Slow(u64);

impl Time for Slow {
    fn now_us(&mut self) -> u64 {
        0
    }

    fn begun(&mut self, order: &Order) {
        self.0 += u64::from(matches!(order, Order::Get { .. }));
    }

    fn read_us(&mut self, _id: OpId, _measured: u64) -> u64 {
        if self.0 == 1 { 1 } else { 10_000_000 }
    }

    fn is_over(&mut self, _id: OpId) -> bool {
        true
    }
}

#[test]
fn reads_without_pages_do_not_make_l3_look_fast() {
    let shape = KvShape::mla(2, 8, 2, 4).unwrap();
    let mut config = config(&shape);
    config.prefetch.break_even_tokens_per_second = std::num::NonZeroU32::new(1000);
    let l3 = Some(Arc::<Forgetful>::default() as Arc<dyn L3>);
    let parts = Bench::parts(&config, shape, Layout::PageFirst, l3, no_faults());
    let mut cache = Cache::in_time(config, parts, Box::new(Slow(0))).unwrap();
    let mut prefetch = |first: u64| {
        let mut prompt = cache.prompt(&Scope::default(), first..first + 9).unwrap();
        let id = cache.prefetch(&mut prompt).unwrap();
        cache.drain().unwrap();
        cache.poll_prefetch(id).unwrap()
    };
    assert_eq!(prefetch(0), PrefetchState::Ended(0));
    assert_eq!(
        prefetch(100),
        PrefetchState::Ended(2),
        "nothing is known yet"
    );
    let declined = PrefetchState::Declined(Declined::BreakEven);
    assert_eq!(prefetch(200), declined);
}

/// A device whose loads never end. As on a GPU, they hold no reference to their memory.
struct Hung(HostDevice);

impl Device for Hung {
    fn name(&self) -> String {
        "hung".to_owned()
    }

    fn register(
        &self,
        memory: HostMemory,
        layout: Layout,
        shape: &KvShape,
        pages: u32,
    ) -> Result<L2Pool, DeviceError> {
        self.0.register(memory, layout, shape, pages)
    }

    fn alloc_l1(&self, shape: &KvShape, pages: u32) -> Result<L1Pool, DeviceError> {
        self.0.alloc_l1(shape, pages)
    }

    fn adopt_l1(&self, _: Tensors, _: &KvShape, _: u32) -> Result<L1Pool, DeviceError> {
        Err(DeviceError::Closed)
    }

    fn load(&self, transfer: Transfer, _: &Ticket) -> Result<Gated<Transfer>, Refused> {
        let (promise, ticket) = Ticket::promised();
        std::mem::forget(promise);
        Ok(Gated::free(transfer).behind(LayerTickets::whole(ticket)))
    }

    fn store(&self, transfer: Transfer, after: &Ticket) -> Result<Gated<Transfer>, Refused> {
        self.0.store(transfer, after)
    }

    fn record(&self, _: ForeignStream) -> Result<Ticket, DeviceError> {
        Err(DeviceError::NoStreams)
    }

    fn hold(&self, _: ForeignStream, _: &Ticket) -> Result<(), DeviceError> {
        Err(DeviceError::NoStreams)
    }

    fn has_streams(&self) -> bool {
        false
    }

    unsafe fn copy_rows(
        &self,
        _: &L1Pool,
        _: RowCopy,
        _: Option<ForeignStream>,
    ) -> Result<Ticket, DeviceError> {
        Err(DeviceError::Closed)
    }

    unsafe fn read_l1(&self, _: &L1Pool, _: ChunkAt, _: &mut [u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Closed)
    }

    unsafe fn write_l1(&self, _: &L1Pool, _: ChunkAt, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Closed)
    }
}

#[test]
fn memory_of_a_load_whose_forward_never_ends_is_not_freed() {
    let shape = KvShape::mha(2, 1, 8, 1, 4).unwrap();
    let config = config(&shape);
    let (token, pages) = (Arc::new(()), config.l2_pages + 1);
    let bytes: &'static mut [u8] = Vec::leak(vec![0; pool_bytes(&shape, pages) as usize]);
    let (start, length) = (NonNull::from(&mut *bytes).cast(), bytes.len());
    // SAFETY: the bytes stay for ever, and only the pool uses them.
    let memory = unsafe { HostMemory::new(start, length, Box::new(token.clone())) };
    let device = Hung(HostDevice::new().unwrap());
    let parts = Parts {
        l1: device.alloc_l1(&shape, config.l1_pages + 1).unwrap(),
        l2: device
            .register(memory, Layout::PageFirst, &shape, pages)
            .unwrap(),
        device: Arc::new(device),
        l3: None,
        ranks: None,
    };
    let mut cache = Cache::new(config, parts).unwrap();
    let begin = |cache: &mut Cache, first: u64| {
        let prompt = cache.prompt(&Scope::default(), first..first + 9).unwrap();
        cache.start(prompt, 0)
    };
    let mut request = begin(&mut cache, 0);
    cache.extend(&mut request, 9).unwrap();
    cache.finish(request, true, &Ticket::done());
    cache.drain().unwrap();
    cache.evict(2);
    let (_promise, forward) = Ticket::promised();
    let mut running = begin(&mut cache, 100);
    // It has all pages of L1.
    let tokens = shape.page_tokens() as usize * cache.core().free_pages().0 as usize;
    cache.extend(&mut running, tokens).unwrap();
    cache.finish(running, false, &forward);
    let mut loading = begin(&mut cache, 0);
    let loaded = cache.load_back(&mut loading, 100);
    assert!(matches!(loaded, Ok(LoadBack::Started(_, 2))), "{loaded:?}");
    drop(cache);
    assert_eq!(Arc::strong_count(&token), 2);
}
