//! A process that forks while it has a cache: the child can exit, and the parent continues.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use larder_kernels::{Device, HostDevice, HostMemory, KvShape, Layout, Ticket, pool_bytes};
use larder_tiers::l3::FilesL3;
use larder_tiers::prompt::Scope;
use larder_tiers::ranks::{Ranks, SocketRank, Timeouts};
use larder_tiers::{Cache, Config, Model, Parts, PrefixOptions};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, fork};

/// A cache over a directory of files, and its device.
fn open(files: &Path, ranks: Option<Box<dyn Ranks>>) -> (Cache, Arc<HostDevice>) {
    let shape = KvShape::mha(2, 1, 8, 2, 4).unwrap();
    let mut config = Config::new(shape.page_tokens(), u64::from(shape.page_bytes()), 20, 40);
    config.prefetch.threshold_tokens = 1;
    let device = Arc::new(HostDevice::new().unwrap());
    let memory = HostMemory::zeroed(pool_bytes(&shape, 41)).unwrap();
    let parts = Parts {
        l1: device.alloc_l1(&shape, 21).unwrap(),
        l2: device
            .register(memory, Layout::PageFirst, &shape, 41)
            .unwrap(),
        device: device.clone(),
        l3: Some(Arc::new(FilesL3::new(files).unwrap())),
        ranks,
    };
    (Cache::new(config, parts).unwrap(), device)
}

/// Keeps ten pages.
fn keep(cache: &mut Cache) {
    let prompt = cache.prompt(&Scope::default(), 0..40).unwrap();
    let mut request = cache.start(prompt, 0);
    cache.extend(&mut request, 40).unwrap();
    cache.finish(request, true, &Ticket::done());
}

/// Drops the cache in a forked child. Returns the cache of the parent.
fn forked(cache: Cache, device: Arc<HostDevice>) -> Cache {
    // SAFETY: the child only drops its objects, which is the purpose of these tests, and ends by
    // `_exit`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // A signal ends a child that hangs.
            alarm::set(60);
            drop(cache);
            drop(device);
            // SAFETY: the child has no other thread.
            unsafe { libc::_exit(7) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 7)));
            cache
        }
    }
}

#[test]
fn a_forked_child_drops_a_cache_without_waiting_and_the_parent_continues() {
    let directory = tempfile::tempdir().unwrap();
    let (mut cache, device) = open(directory.path(), None);
    keep(&mut cache);
    let mut cache = forked(cache, device);
    cache.drain().unwrap();
    assert_eq!(cache.stats().put, 10);
}

#[test]
fn a_forked_child_of_a_host_drops_its_cache_and_the_ranks_of_the_parent_continue() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("ranks");
    let timeouts = Timeouts {
        gather: Duration::from_secs(60),
        call: Duration::from_secs(600),
    };
    let work = |cache: &mut Cache| {
        keep(cache);
        cache.drain().unwrap();
        cache.stats().put
    };
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let ranks = SocketRank::join(&socket, 1, 2, timeouts).unwrap();
            let (mut cache, _device) = open(&directory.path().join("1"), Some(Box::new(ranks)));
            work(&mut cache)
        });
        let ranks = SocketRank::host(&socket, 2, timeouts).unwrap();
        let (cache, device) = open(&directory.path().join("0"), Some(Box::new(ranks)));
        // The guest may wait in a call.
        let mut cache = forked(cache, device);
        assert_eq!(work(&mut cache), 10);
        assert_eq!(guest.join().unwrap(), 10);
    });
}

#[test]
fn a_forked_child_closes_a_prefix_cache_while_another_thread_of_the_parent_calls_it() {
    let shape = KvShape::mha(2, 1, 8, 2, 4).unwrap();
    let model = Model::new("toy", "", "f32", shape);
    let cache = PrefixOptions::new(&model, 20, 20).over(None).unwrap();
    // SAFETY: the copy is used in the child alone, and the original is not used there.
    let copy = unsafe { std::ptr::read(&raw const cache) };
    let (begun, begins) = mpsc::channel();
    let (end, ends) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let cache = &cache;
        scope.spawn(move || {
            let held = cache.with_core(|_| {
                begun.send(()).unwrap();
                ends.recv().unwrap();
            });
            held.unwrap();
        });
        begins.recv().unwrap();
        // SAFETY: the child closes the cache, which is the purpose of this test, and ends by
        // `_exit`.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                // A signal ends a child that hangs.
                alarm::set(60);
                let _closed = copy.close();
                // SAFETY: the child has no other thread.
                unsafe { libc::_exit(7) }
            }
            ForkResult::Parent { child } => {
                std::mem::forget(copy);
                end.send(()).unwrap();
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 7)));
            }
        }
    });
    cache.close().unwrap();
}
