//! A process that forks while it has a cache: the child can exit, and the parent continues.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use larder_kernels::{Device, HostDevice, HostMemory, KvShape, Layout, Ticket, pool_bytes};
use larder_tiers::l3::FilesL3;
use larder_tiers::prompt::Scope;
use larder_tiers::{Cache, Config, Parts};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, fork};

#[test]
fn a_forked_child_drops_a_cache_without_waiting_and_the_parent_continues() {
    let directory = tempfile::tempdir().unwrap();
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
        l3: Some(Arc::new(FilesL3::new(directory.path()).unwrap())),
        ranks: None,
    };
    let mut cache = Cache::new(config, parts).unwrap();
    let prompt = cache.prompt(&Scope::default(), 0..40).unwrap();
    let mut request = cache.start(prompt, 0);
    cache.extend(&mut request, 40).unwrap();
    cache.finish(request, true, &Ticket::done());
    // SAFETY: the child only drops its objects, which is the purpose of this test, and ends by
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
        }
    }
    cache.drain().unwrap();
    assert_eq!(cache.stats().put, 10);
}
