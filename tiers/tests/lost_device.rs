//! A CUDA context that is lost under a cache, on the fake driver: the forward fails like any other,
//! and the device refuses all further work.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::path::Path;
use std::sync::Arc;

use larder_fake_cuda::driver::{Steering, default_stream, has_gpu, in_a_process_of_its_own};
use larder_kernels::cuda::Choice;
use larder_kernels::{
    ChunkAt, CudaDevice, CudaOptions, Device, HostDevice, HostMemory, KvShape, Layout, Ticket,
    pool_bytes,
};
use larder_tiers::core::{LoadBack, PrefetchState, Request};
use larder_tiers::l3::FilesL3;
use larder_tiers::prompt::Scope;
use larder_tiers::{Cache, Config, Parts};

const TOKENS: u64 = 21;
const PAGES: usize = 5;

fn shape() -> KvShape {
    KvShape::mha(2, 1, 8, 2, 4).unwrap()
}

fn gpu() -> CudaDevice {
    let options = CudaOptions {
        choice: Choice::Published,
        ..CudaOptions::default()
    };
    CudaDevice::open(&options).unwrap()
}

fn open(device: Arc<dyn Device>, files: &Path) -> Cache {
    let shape = shape();
    let mut config = Config::new(shape.page_tokens(), u64::from(shape.page_bytes()), 20, 40);
    config.load_threshold_tokens = 1;
    config.prefetch.threshold_tokens = 1;
    let memory = HostMemory::zeroed(pool_bytes(&shape, 41)).unwrap();
    let parts = Parts {
        l1: device.alloc_l1(&shape, 21).unwrap(),
        l2: device
            .register(memory, Layout::PageFirstDirect, &shape, 41)
            .unwrap(),
        device,
        l3: Some(Arc::new(FilesL3::new(files).unwrap())),
        ranks: None,
    };
    Cache::new(config, parts).unwrap()
}

fn chunks() -> impl Iterator<Item = ChunkAt> {
    let shape = shape();
    (0..PAGES as u32).flat_map(move |page| {
        (0..shape.parts()).flat_map(move |part| {
            (0..shape.layers()).map(move |layer| ChunkAt { part, layer, page })
        })
    })
}

fn right(at: ChunkAt) -> Vec<u8> {
    vec![(at.page * 16 + at.part * 4 + at.layer + 1) as u8; shape().chunk_bytes() as usize]
}

fn garbage(at: ChunkAt) -> Vec<u8> {
    vec![0xee; right(at).len()]
}

fn start(cache: &mut Cache, bytes: impl Fn(ChunkAt) -> Vec<u8>) -> Request {
    let prompt = cache.prompt(&Scope::default(), 0..TOKENS).unwrap();
    let mut request = cache.start(prompt, 0);
    cache.extend(&mut request, TOKENS as usize).unwrap();
    for at in chunks() {
        cache.write_chunk(&request, at, &bytes(at)).unwrap();
    }
    request
}

/// Ends the remaining work, and checks that no page leaked.
fn end(mut cache: Cache) {
    cache.drain().unwrap();
    cache.core().validate([]).unwrap();
    cache.reset().unwrap();
    assert_eq!(cache.core().free_pages(), (20, 40));
}

/// Number of pages that the next process finds. All of them must be right.
fn found(files: &Path) -> usize {
    let mut cache = open(Arc::new(HostDevice::new().unwrap()), files);
    let mut prompt = cache.prompt(&Scope::default(), 0..TOKENS).unwrap();
    let id = cache.prefetch(&mut prompt).unwrap();
    cache.drain().unwrap();
    let PrefetchState::Ended(pages) = cache.poll_prefetch(id).unwrap() else {
        end(cache);
        return 0;
    };
    let mut request = cache.start(prompt, 0);
    let loaded = cache.load_back(&mut request, 100).unwrap();
    assert!(matches!(loaded, LoadBack::Started(_, of) if of == pages));
    for at in chunks().take_while(|at| (at.page as usize) < pages) {
        let mut bytes = garbage(at);
        cache.read_chunk(&request, at, &mut bytes).unwrap();
        assert_eq!(bytes, right(at), "{at:?}");
    }
    cache.drain().unwrap();
    cache.finish(request, false, &Ticket::done());
    end(cache);
    pages
}

#[test]
fn a_context_lost_in_a_forward_loses_the_pages_of_that_forward_only() {
    let name = "a_context_lost_in_a_forward_loses_the_pages_of_that_forward_only";
    if has_gpu() || !in_a_process_of_its_own(name, &[]) {
        return;
    }
    let steering = Steering::new();
    let directory = tempfile::tempdir().unwrap();
    // The event is recorded, then the context is lost: the forward's output is undefined.
    for finishes_first in [false, true] {
        let files = directory.path().join(format!("garbage-{finishes_first}"));
        steering.fail(-1);
        let device = Arc::new(gpu());
        let mut cache = open(device.clone(), &files);
        let mut request = start(&mut cache, garbage);
        let ticket = device.record(default_stream()).unwrap();
        steering.fail_after(1);
        if finishes_first {
            cache.finish(request, true, &ticket);
        } else {
            assert!(cache.insert(&mut request, &ticket).is_err());
            assert!(cache.is_broken(&request));
            let again = cache.restart(request, TOKENS as usize, &ticket);
            assert_eq!(again.tokens(), 0, "nothing of it is cached");
            cache.finish(again, false, &Ticket::done());
        }
        assert_eq!(cache.stats().forward_failed, PAGES as u64);
        end(cache);
        assert_eq!(found(&files), 0);
    }
    // The context is lost at each call from the forward on.
    let (mut whole, mut none) = (0, 0);
    for nth in 1.. {
        let files = directory.path().join(format!("right-{nth}"));
        steering.fail(-1);
        let device = Arc::new(gpu());
        let mut cache = open(device.clone(), &files);
        let request = start(&mut cache, right);
        steering.fail_after(nth);
        let ticket = device.record(default_stream());
        let ticket = ticket.unwrap_or_else(Ticket::failed);
        cache.finish(request, true, &ticket);
        end(cache);
        match found(&files) {
            0 => none += 1,
            pages => {
                assert_eq!(pages, PAGES);
                whole += 1;
            }
        }
        if whole > 1 {
            break;
        }
    }
    assert!(none > 3, "{none}");
}
