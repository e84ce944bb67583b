//! A forward that is launched behind its loads on the fake driver: the host waits for nothing of
//! the device, and each layer waits in the stream.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_fake_cuda::driver::{Steering, default_stream, has_gpu, in_a_process_of_its_own};
use larder_kernels::cuda::Choice;
use larder_kernels::{CudaDevice, CudaOptions, Device, KvShape};
use larder_tiers::prefix::L1Memory;
use larder_tiers::{Model, PrefixCache, PrefixOptions, Sequence};

const LAYERS: u32 = 6;
const TOKENS: u64 = 21;
const PATIENCE: Duration = Duration::from_secs(60);

/// Calls in which the host waits for the device.
const WAITS: [&str; 3] = [
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuMemcpyDtoHAsync_v2",
];

fn settle(cache: &PrefixCache) {
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
}

/// Launches a forward for all tokens that are not cached. Returns the waits of the stream for each
/// layer.
fn launch(device: &CudaDevice, steering: &Steering, sequence: &mut Sequence) -> Vec<i64> {
    let slots = sequence.slots().unwrap();
    let mut waits = Vec::new();
    for layer in 0..LAYERS {
        let before = steering.called("cuStreamWaitEvent");
        for ticket in slots.tickets(layer) {
            device.hold(default_stream(), &ticket).unwrap();
        }
        // The kernels of the layer follow here.
        waits.push(steering.called("cuStreamWaitEvent") - before);
    }
    let ticket = device.record(default_stream()).unwrap();
    sequence.computed_by(sequence.len(), &ticket).unwrap();
    waits
}

#[test]
fn the_host_waits_for_nothing_and_each_layer_waits_in_the_stream() {
    let name = "the_host_waits_for_nothing_and_each_layer_waits_in_the_stream";
    if has_gpu() || !in_a_process_of_its_own(name, &[]) {
        return;
    }
    let steering = Steering::new();
    let options = CudaOptions {
        choice: Choice::Published,
        ..CudaOptions::default()
    };
    let device = Arc::new(CudaDevice::open(&options).unwrap());
    let shape = KvShape::mha(LAYERS, 1, 8, 2, 4).unwrap();
    let l1 = device.alloc_l1(&shape, 21).unwrap();
    let options = PrefixOptions::new(&Model::new("m", "w", "bf16", shape), 20, 40).with(|o| {
        o.l1 = Some(L1Memory::Pool(device.clone(), l1));
        o.polls_itself = false;
    });
    let cache = options.over(None).unwrap();
    let tokens: Vec<u64> = (0..TOKENS).collect();
    let mut first = cache.begin(&tokens).unwrap();
    assert_eq!(launch(&device, &steering, &mut first), [0; LAYERS as usize]);
    first.keep().unwrap();
    settle(&cache);
    cache.evict(usize::MAX).unwrap();

    let waits = || WAITS.map(|call| steering.called(call));
    let before = waits();
    let mut sequence = cache.begin(&tokens).unwrap();
    assert_eq!(sequence.cached().l2, 20);
    assert!(!sequence.is_loaded(), "the load has not run");
    let in_stream = launch(&device, &steering, &mut sequence);
    assert_eq!(in_stream, [1; LAYERS as usize]);
    assert_eq!(waits(), before, "the host waits in {WAITS:?}");
    // Rejected tokens end in a page of the tree: rows are copied in the stream, without a wait.
    settle(&cache);
    assert_eq!(sequence.verify(), Ok(true));
    let before = waits();
    sequence.truncate_on(6, default_stream()).unwrap();
    assert_eq!(
        steering.called("cuMemcpyDtoDAsync_v2"),
        2 * i64::from(LAYERS)
    );
    assert_eq!(waits(), before);
    assert_eq!(sequence.slots().unwrap().pages().len(), 2);
    cache.audit([&sequence]).unwrap();
    drop(sequence);
    settle(&cache);
    cache.audit([]).unwrap();
}
