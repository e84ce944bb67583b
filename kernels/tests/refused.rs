//! Errors of single driver calls, on the fake driver (`larder_fake_cuda`): the GPU goes on with
//! the work in flight, so pages are handed back only after their copies. Also streams that an
//! engine captures into a graph, and streams that stand still.
//!
//! A GPU returns no error at a chosen call, so these tests need the fake.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use larder_fake_cuda::driver::{Steering, default_stream, has_gpu, in_a_process_of_its_own};
use larder_kernels::cuda::policy::Way;
use larder_kernels::cuda::{Choice, CudaOptions};
use larder_kernels::{CudaDevice, Device, DeviceError, Direction, Ticket};
use support::{Case, Pools, case, expected};

fn open(way: Way) -> CudaDevice {
    let options = CudaOptions {
        choice: Choice::Always(way),
        ..CudaOptions::default()
    };
    CudaDevice::open(&options).unwrap()
}

/// L2 after the case.
fn stored(device: &CudaDevice, pools: &Pools, case: &Case) -> Vec<u8> {
    let (l1, l2) = (pools.l1_bytes(device), pools.l2_bytes());
    expected(case, &l1, &l2, case.shape.layers()).1
}

#[test]
fn a_transfer_in_flight_ends_after_its_copies_when_another_call_fails() {
    const NAME: &str = "a_transfer_in_flight_ends_after_its_copies_when_another_call_fails";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let device = open(Way::Copies);
    let case = case(Direction::Store);
    let pools = Pools::new(&device, &case);
    let l2 = stored(&device, &pools, &case);
    let storing = device.store(pools.transfer(&case), &Ticket::done());
    Steering::new().refuse(c"cuEventCreate");
    assert!(device.record(default_stream()).is_err());
    assert_eq!(storing.unwrap().wait().1, Ok(()));
    assert!(pools.l2_bytes() == l2);
}

#[test]
fn a_refused_transfer_hands_its_pages_back_after_the_copies_that_began() {
    const NAME: &str = "a_refused_transfer_hands_its_pages_back_after_the_copies_that_began";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let device = open(Way::Copies);
    let case = case(Direction::Store);
    let pools = Pools::new(&device, &case);
    let l2 = stored(&device, &pools, &case);
    Steering::new().refuse(c"cuEventRecord");
    let storing = device.store(pools.transfer(&case), &Ticket::done());
    assert!(storing.unwrap().wait().1.is_err());
    assert!(pools.l2_bytes() == l2);
}

#[test]
fn a_load_without_memory_for_its_page_list_is_batched() {
    const NAME: &str = "a_load_without_memory_for_its_page_list_is_batched";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let steering = Steering::new();
    let device = open(Way::Kernel);
    let case = case(Direction::Load);
    let pools = Pools::new(&device, &case);
    let (l1, l2) = (pools.l1_bytes(&device), pools.l2_bytes());
    let (l1, _) = expected(&case, &l1, &l2, case.shape.layers());
    let load = || {
        let loading = device.load(pools.transfer(&case), &Ticket::done());
        assert_eq!(loading.unwrap().wait().1, Ok(()));
        steering.counted()
    };
    steering.refuse(c"cuMemAllocAsync");
    steering.counted();
    assert!(matches!(load(), [0, batches, 0] if batches > 0));
    assert!(pools.l1_bytes(&device) == l1);
    steering.counted();
    assert!(matches!(load(), [0, 0, kernels] if kernels > 0));
}

#[test]
fn captures_of_an_engine_stay_whole_and_its_captured_streams_are_refused() {
    const NAME: &str = "captures_of_an_engine_stay_whole_and_its_captured_streams_are_refused";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let steering = Steering::new();
    let device = open(Way::Copies);
    let case = case(Direction::Load);
    let pools = Pools::new(&device, &case);
    steering.capture(true);
    let loading = device.load(pools.transfer(&case), &Ticket::done()).unwrap();
    let first = loading.gates()[0].layer(0);
    first.poll().unwrap();
    let refused = Err(DeviceError::Capturing);
    assert_eq!(device.record(default_stream()).map(drop), refused);
    assert_eq!(device.hold(default_stream(), &first), refused);
    assert_eq!(loading.wait().1, Ok(()));
    assert_eq!(steering.broken(), 0);
    steering.capture(false);
    assert!(device.record(default_stream()).unwrap().wait().is_ok());
}

#[test]
fn a_stream_of_an_engine_that_fails_leaves_the_device_usable() {
    const NAME: &str = "a_stream_of_an_engine_that_fails_leaves_the_device_usable";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let steering = Steering::new();
    let device = open(Way::Copies);
    let recorded = |refused| {
        steering.refuse(refused);
        device.record(default_stream()).map(drop)
    };
    for call in [c"cuStreamIsCapturing", c"cuEventRecord"] {
        let outcome = recorded(call);
        assert!(
            matches!(outcome, Err(DeviceError::Stream { .. })),
            "{outcome:?}"
        );
    }
    let ticket = device.record(default_stream()).unwrap();
    steering.refuse(c"cuStreamWaitEvent");
    let outcome = device.hold(default_stream(), &ticket);
    assert!(
        matches!(outcome, Err(DeviceError::Stream { .. })),
        "{outcome:?}"
    );
    assert_eq!(device.hold(default_stream(), &ticket), Ok(()));
}

#[test]
fn a_device_is_dropped_beside_work_that_never_ends() {
    const NAME: &str = "a_device_is_dropped_beside_work_that_never_ends";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    // The fake ends the process at a wait for what never happens.
    let device = open(Way::Kernel);
    let case = case(Direction::Load);
    let pools = Pools::new(&device, &case);
    Steering::new().stall();
    let after = device.record(default_stream()).unwrap();
    // Its memory is in use for ever, so nothing of it is freed.
    std::mem::forget(device.load(pools.transfer(&case), &after).unwrap());
    drop((device, pools));
    assert_eq!(after.poll(), Ok(false));
}
