//! States on the fake driver of a GPU: copies in the order of the stream of the forwards, and
//! behind the loads of the state from which a sequence starts.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../examples/hybrid_engine.rs"]
mod toy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_fake_cuda::driver::{default_stream, has_gpu, in_a_process_of_its_own};
use larder_kernels::cuda::Choice;
use larder_kernels::{ChunkAt, CudaDevice, CudaOptions, Device, DeviceError, Ticket};
use larder_tiers::prefix::{L1Memory, SequenceError};
use larder_tiers::{PrefixCache, PrefixOptions, Sequence};

use toy::{PAGE, STATE};

const PATIENCE: Duration = Duration::from_secs(60);

/// Both sections of the block of a state.
fn state(device: &CudaDevice, cache: &PrefixCache, block: u32) -> [Vec<u8>; 2] {
    device.record(default_stream()).unwrap().wait().unwrap();
    let pools = cache.component_l1(STATE);
    [(0, 16), (1, 24)].map(|(section, bytes)| {
        let mut into = vec![0; bytes];
        let at = ChunkAt {
            part: 0,
            layer: 0,
            page: block,
        };
        // SAFETY: all work on the stream has ended, and nothing else touches the block.
        unsafe { device.read_l1(&pools[section], at, &mut into) }.unwrap();
        into
    })
}

/// A forward that leaves this state.
fn forward(device: &CudaDevice, cache: &PrefixCache, sequence: &mut Sequence, until: usize) {
    let stream = default_stream();
    sequence.prepare_on(until, stream).unwrap();
    device.record(stream).unwrap().wait().unwrap();
    let block = sequence.state_block(STATE).unwrap();
    for (section, bytes) in [(0, 16), (1, 24)] {
        let at = ChunkAt {
            part: 0,
            layer: 0,
            page: block,
        };
        let pool = &cache.component_l1(STATE)[section];
        // SAFETY: as above.
        unsafe { device.write_l1(pool, at, &vec![until as u8; bytes]) }.unwrap();
    }
    let ticket = device.record(stream).unwrap();
    sequence.computed_on(until, &ticket, stream).unwrap();
}

fn right(until: usize) -> [Vec<u8>; 2] {
    [vec![until as u8; 16], vec![until as u8; 24]]
}

#[test]
fn states_are_copied_in_the_order_of_the_stream() {
    let name = "states_are_copied_in_the_order_of_the_stream";
    if has_gpu() || !in_a_process_of_its_own(name, &[]) {
        return;
    }
    let options = CudaOptions {
        choice: Choice::Published,
        ..CudaOptions::default()
    };
    let device = Arc::new(CudaDevice::open(&options).unwrap());
    let model = toy::model().unwrap();
    let l1 = device.alloc_l1(&model.shape(), 41).unwrap();
    let options = PrefixOptions::new(&model, 40, 40).with(|o| {
        o.l1 = Some(L1Memory::Pool(device.clone(), l1));
    });
    let cache = options.over_each(Vec::new()).unwrap();
    let tokens: Vec<u64> = (0..3 * PAGE as u64 + 1).collect();
    let mut sequence = cache.begin(&tokens).unwrap();
    for page in 1..=3 {
        forward(&device, &cache, &mut sequence, page * PAGE);
        sequence.share().unwrap();
    }
    // The next forward changes the block, not the copy.
    forward(&device, &cache, &mut sequence, tokens.len());
    let needed = Err(SequenceError::Device(DeviceError::StreamNeeded));
    assert_eq!(sequence.computed_by(tokens.len(), &Ticket::done()), needed);
    sequence.keep().unwrap();
    for tier in ["L1", "L2"] {
        let mut branches: Vec<Sequence> = (0..2).map(|_| cache.begin(&tokens).unwrap()).collect();
        for branch in &mut branches {
            assert_eq!(branch.cached().tokens(), 3 * PAGE, "{tier}");
            assert_eq!(branch.prepare(tokens.len()), needed);
            branch.prepare_on(tokens.len(), default_stream()).unwrap();
        }
        let blocks: Vec<u32> = branches
            .iter()
            .map(|branch| branch.state_block(STATE).unwrap())
            .collect();
        assert_ne!(blocks[0], blocks[1]);
        for block in blocks {
            assert_eq!(state(&device, &cache, block), right(3 * PAGE), "{tier}");
        }
        cache.audit(&branches).unwrap();
        drop(branches);
        assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
        cache.evict(usize::MAX).unwrap();
    }
}
