//! Compute during loads, on the fake driver and in its time. `examples/timeline.rs` measures the
//! same on a GPU.
//!
//! Covered: layers are computed as soon as their tickets settle, the measurements add up, and a
//! forward pass that waits for all layers is detected. Not covered: times on a GPU.

#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod support;

use larder_fake_cuda::driver::{Steering, has_gpu, in_a_process_of_its_own};
use larder_kernels::cuda::policy::Way;
use larder_kernels::cuda::{Choice, CudaOptions};
use larder_kernels::{CudaDevice, Device, HostMemory, KvShape, Layout, PagePair, pool_bytes};
use support::timeline::{Beside, Figures, Kind, Layer, SLOWER, Stage, Waits};

const WAYS: [Way; 3] = [Way::Copies, Way::Batch, Way::Kernel];

fn over_the_fake(test: &str) -> bool {
    !has_gpu() && in_a_process_of_its_own(test, &[])
}

fn open(way: Way) -> CudaDevice {
    // A layer takes about a millisecond. The times count, not the bytes.
    let steering = Steering::new();
    steering.speeds([500; 3]);
    steering.still(true);
    let options = CudaOptions {
        choice: Choice::Always(way),
        ..CudaOptions::default()
    };
    CudaDevice::open(&options).unwrap()
}

fn stage(device: &CudaDevice) -> Stage<'_> {
    // Layers of a kernel's least launch.
    let (shape, pages) = (KvShape::mha(8, 2, 64, 2, 64).unwrap(), 64);
    let memory = HostMemory::zeroed(pool_bytes(&shape, pages)).unwrap();
    let l2 = device.register(memory, Layout::PageFirstDirect, &shape, pages);
    let pools = (device.alloc_l1(&shape, pages).unwrap(), l2.unwrap());
    let pairs = (0..pages).map(|page| PagePair {
        l1: pages - 1 - page,
        l2: page,
    });
    Stage::new(device, pools, pairs.collect(), 1 << 16)
}

fn is_about(ms: f64, expected: f64) -> bool {
    (ms / expected - 1.0).abs() < 0.005
}

#[test]
fn compute_behind_the_tickets_takes_as_long_as_the_longer_of_both_and_a_layer() {
    const NAME: &str = "compute_behind_the_tickets_takes_as_long_as_the_longer_of_both_and_a_layer";
    if !over_the_fake(NAME) {
        return;
    }
    for way in WAYS {
        let device = open(way);
        let stage = stage(&device);
        let (load_ms, layers) = (stage.load_ms(), 8.0);
        for kind in [Kind::Idle, Kind::Busy, Kind::Streaming] {
            for share in [0.5, 1.0, 2.0] {
                let work = stage.work_of(kind, load_ms * share / layers);
                let run = stage.figures(work, Waits::ByLayer);
                let (load, compute) = (run.load_ms, run.compute_ms);
                assert!(
                    (compute / load / share - 1.0).abs() < 0.1,
                    "{way:?} {work:?} {run:?}"
                );
                // The longer of the two, plus one layer of the other.
                let expected = (load + compute / layers).max(compute + load / layers);
                assert!(
                    is_about(run.together_ms, expected),
                    "{expected} {way:?} {work:?} {run:?}"
                );
                assert!(run.is_good(kind), "{way:?} {work:?} {run:?}");
            }
        }
    }
}

#[test]
fn a_forward_that_waits_for_all_layers_is_too_slow() {
    if !over_the_fake("a_forward_that_waits_for_all_layers_is_too_slow") {
        return;
    }
    let device = open(Way::Kernel);
    let stage = stage(&device);
    for share in [0.5, 1.0, 2.0] {
        let work = stage.work_of(Kind::Busy, stage.load_ms() * share / 8.0);
        let run = stage.figures(work, Waits::ForAll);
        assert!(
            is_about(run.together_ms, run.load_ms + run.compute_ms),
            "{run:?}"
        );
        assert!(run.is_in_order() && !run.is_good(Kind::Busy), "{run:?}");
    }
}

#[test]
fn compute_is_measured_during_loads() {
    if !over_the_fake("compute_is_measured_during_loads") {
        return;
    }
    for way in WAYS {
        let device = open(way);
        let stage = stage(&device);
        for kind in [Kind::Busy, Kind::Streaming] {
            let load_ms = stage.load_ms();
            let run = stage.beside(stage.work_of(kind, load_ms), 3);
            // The fake's streams share no resources.
            assert!(run.slower().abs() < 0.005, "{way:?} {kind:?} {run:?}");
            assert!(is_about(run.load_ms, load_ms), "{way:?} {load_ms} {run:?}");
        }
    }
}

/// Times of two layers, and the time of each part alone.
fn figures(layers: [[f64; 3]; 2], load_ms: f64, compute_ms: f64) -> Figures {
    let layers = layers.map(|[loaded, begun, computed]| Layer {
        loaded,
        begun,
        computed,
    });
    Figures {
        load_ms,
        compute_ms,
        together_ms: layers[1].computed,
        layers: layers.to_vec(),
    }
}

#[test]
fn runs_that_are_too_long_or_out_of_order_are_not_good() {
    let good = figures([[10.0, 10.0, 20.0], [20.0, 20.0, 30.0]], 20.0, 20.0);
    assert!(good.is_in_order() && good.is_good(Kind::Idle));
    // The longer of the two, one layer, 30 us per layer and 1 %.
    assert!((good.bound_ms(Kind::Idle) - 30.26).abs() < 1e-9);
    assert!((good.bound_ms(Kind::Busy) - 31.77).abs() < 1e-9);
    let late = figures([[10.0, 10.0, 20.0], [20.0, 21.0, 31.0]], 20.0, 20.0);
    assert!(!late.is_good(Kind::Idle) && late.is_good(Kind::Busy));
    for layers in [
        [[10.0, 9.0, 20.0], [20.0, 20.0, 30.0]],
        [[10.0, 10.0, 21.0], [20.0, 20.0, 30.0]],
        [[10.0, 10.0, 11.0], [9.0, 20.0, 30.0]],
    ] {
        let run = figures(layers, 20.0, 20.0);
        assert!(!run.is_in_order() && !run.is_good(Kind::Idle), "{run:?}");
    }
    let beside = Beside {
        alone_ms: 100.0,
        beside_ms: 106.0,
        load_ms: 1.0,
    };
    assert!((beside.slower() - 0.06).abs() < 1e-9 && beside.slower() > SLOWER);
}
