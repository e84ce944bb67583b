//! A failed forward, a second request, the store, and another process: the right bytes are read
//! back.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use larder_engine::{CreateOptions, OpenOptions, PageStore, Store, create};
use larder_kernels::{
    ChunkAt, Device, DeviceError, HostDevice, HostMemory, KvShape, Layout, Ticket, pool_bytes,
};
use larder_tiers::core::{LoadBack, PrefetchState, Request};
use larder_tiers::l3::StoreL3;
use larder_tiers::prompt::Scope;
use larder_tiers::{Cache, Config, Parts};

use crate::support::namespace;

const TOKENS: u64 = 37;

fn shape() -> KvShape {
    KvShape::mha(2, 1, 8, 2, 4).unwrap()
}

/// A cache over the store.
fn open(store: &Path) -> (Cache, Arc<dyn PageStore>) {
    let shape = shape();
    let mut config = Config::new(shape.page_tokens(), u64::from(shape.page_bytes()), 40, 80);
    config.load_threshold_tokens = 1;
    config.prefetch.threshold_tokens = 1;
    let device = Arc::new(HostDevice::new().unwrap());
    let l1 = device.alloc_l1(&shape, config.l1_pages + 1).unwrap();
    let pages = config.l2_pages + 1;
    let memory = HostMemory::zeroed(pool_bytes(&shape, pages)).unwrap();
    let l2 = device.register(memory, Layout::PageFirstDirect, &shape, pages);
    let store: Arc<dyn PageStore> = Arc::new(Store::open(store, OpenOptions::default()).unwrap());
    let namespace = namespace("failed-forward", &shape, Layout::PageFirstDirect);
    let parts = Parts {
        device,
        l1,
        l2: l2.unwrap(),
        l3: Some(Arc::new(StoreL3::new(store.clone(), &namespace).unwrap())),
        ranks: None,
    };
    (Cache::new(config, parts).unwrap(), store)
}

/// The chunks of the prompt's whole pages from `from` on.
fn chunks(from: usize) -> impl Iterator<Item = ChunkAt> {
    let shape = shape();
    let pages = from as u32..TOKENS as u32 / shape.page_tokens();
    pages.flat_map(move |page| {
        (0..shape.parts()).flat_map(move |part| {
            (0..shape.layers()).map(move |layer| ChunkAt { part, layer, page })
        })
    })
}

/// The right bytes of a chunk.
fn bytes(at: ChunkAt) -> Vec<u8> {
    let seed = at.page * 31 + at.part * 7 + at.layer * 3 + 1;
    let byte = |index: u32| (index.wrapping_mul(seed) >> 2 ^ seed) as u8;
    (0..shape().chunk_bytes()).map(byte).collect()
}

fn start(cache: &mut Cache) -> Request {
    let prompt = cache.prompt(&Scope::default(), 0..TOKENS).unwrap();
    let mut request = cache.start(prompt, 0);
    let left = TOKENS as usize - request.tokens();
    cache.extend(&mut request, left).unwrap();
    request
}

fn write(cache: &Cache, request: &Request, bytes: impl Fn(ChunkAt) -> Vec<u8>) {
    for at in chunks(request.row_and_loads().0.shared_pages()) {
        cache.write_chunk(request, at, &bytes(at)).unwrap();
    }
}

/// The forward fails before or after the end of its request, with or without a poll in between.
/// Then the prompt is requested again.
fn fail_and_ask_again(cache: &mut Cache, fails_late: bool) {
    let mut request = start(cache);
    write(cache, &request, |at| vec![0xee; bytes(at).len()]);
    let (promise, ticket) = Ticket::promised();
    cache.insert(&mut request, &ticket).unwrap();
    if fails_late {
        cache.finish(request, false, &ticket);
        promise.settle(Err(DeviceError::Closed));
    } else {
        promise.settle(Err(DeviceError::Closed));
        cache.finish(request, false, &Ticket::done());
    }
    cache.drain().unwrap();
    let again = start(cache);
    write(cache, &again, bytes);
    cache.finish(again, true, &Ticket::done());
    cache.drain().unwrap();
}

const CHILD: &str = "LARDER_FAILED_FORWARD_STORE";
const LATE: &str = "LARDER_FAILED_FORWARD_LATE";

#[test]
fn after_a_failed_forward_another_process_reads_the_right_bytes() {
    if let Some(store) = std::env::var_os(CHILD) {
        let (mut cache, store) = open(Path::new(&store));
        fail_and_ask_again(&mut cache, std::env::var_os(LATE).is_some());
        drop(cache);
        return store.close().unwrap();
    }
    for late in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let options = CreateOptions::new(256 << 20).with(|o| {
            o.segment_size = Some(16 << 20);
        });
        create(&path, &options).unwrap();
        let test = "restart::after_a_failed_forward_another_process_reads_the_right_bytes";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", test, "--nocapture"]);
        child.env(CHILD, &path);
        if late {
            child.env(LATE, "1");
        }
        assert!(child.status().unwrap().success());

        let (mut cache, store) = open(&path);
        let mut prompt = cache.prompt(&Scope::default(), 0..TOKENS).unwrap();
        let id = cache.prefetch(&mut prompt).unwrap();
        cache.drain().unwrap();
        assert_eq!(cache.poll_prefetch(id).unwrap(), PrefetchState::Ended(9));
        let mut request = cache.start(prompt, 0);
        let loaded = cache.load_back(&mut request, 100).unwrap();
        assert!(matches!(loaded, LoadBack::Started(_, 9)), "{loaded:?}");
        for at in chunks(0) {
            let mut found = bytes(at);
            found.fill(0);
            cache.read_chunk(&request, at, &mut found).unwrap();
            assert_eq!(found, bytes(at), "{at:?}, the forward failed late: {late}");
        }
        cache.finish(request, false, &Ticket::done());
        cache.drain().unwrap();
        cache.core().validate([]).unwrap();
        drop(cache);
        store.close().unwrap();
    }
}
