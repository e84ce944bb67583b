//! The CUDA device without a GPU: on a fake driver (`larder_fake_cuda`) that is lazy, unordered and
//! strict; and without a driver.
//!
//! Covered: the driver calls, their arguments and order, and the handling of errors. Not covered:
//! whether a GPU behaves like the fake. `LARDER_REQUIRE_GPU=1` runs the same cases on a GPU and
//! fails if there is none.
//!
//! The driver is loaded once per process, so each test that needs a driver runs in its own process.
//! Needs a C++ compiler, or a GPU.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use std::sync::Arc;

use cudarc::driver::result;
use larder_fake_cuda::driver::{
    FAKE, Locked, Steering, child, compute, default_stream, device_tensors, fake, has_gpu,
    in_a_process_of_its_own, lacking,
};
use larder_kernels::cuda::policy::Way;
use larder_kernels::cuda::{Choice, CudaOptions, or_host};
use larder_kernels::{
    ChunkAt, CudaDevice, Device, DeviceError, Direction, HostDevice, HostMemory, KvShape, Layout,
    PagePair, Tensor, Tensors, Ticket, Transfer, pool_bytes,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::honest::found;
use support::{Case, Pools, case, cases, expected, host_tensors, tensors_of};

fn open(choice: Choice, piece_bytes: u64) -> CudaDevice {
    let options = CudaOptions {
        choice,
        piece_bytes,
        ..CudaOptions::default()
    };
    CudaDevice::open(&options).unwrap()
}

/// Runs `count` cases, or `LARDER_CASES` if it is set.
fn random_cases(count: u32, check: impl Fn(&Case)) {
    random_cases_divided(1, count, check);
}

/// Runs `count` cases, or this fraction of `LARDER_CASES` if it is set.
fn random_cases_divided(parts: u32, count: u32, check: impl Fn(&Case)) {
    let asked = std::env::var("LARDER_CASES").map(|count| count.parse::<u32>().unwrap());
    let count = asked.map_or(count, |asked| asked.div_ceil(parts));
    let rows = prop_oneof![1..9u32, Just(128), Just(200)].prop_map(|units| units * 16);
    let config = ProptestConfig {
        cases: count,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    TestRunner::new(config)
        .run(&cases(rows), |case| {
            check(&case);
            Ok(())
        })
        .unwrap();
}

fn copies_match_the_oracle(device: &dyn Device, case: &Case) {
    copies_through(device, case, &Pools::new(device, case));
}

fn copies_through(device: &dyn Device, case: &Case, pools: &Pools) {
    let (l1, l2) = (pools.l1_bytes(device), pools.l2_bytes());
    let (l1, l2) = expected(case, &l1, &l2, case.shape.layers());
    let moving = match case.direction {
        Direction::Load => device.load(pools.transfer(case), &Ticket::done()),
        Direction::Store => device.store(pools.transfer(case), &Ticket::done()),
    };
    let moving = moving.unwrap();
    for (ticket, _) in (0..).zip(case.layers()) {
        assert!(moving.wait_layer(ticket).is_ok());
    }
    assert_eq!(moving.open().unwrap().1, Ok(()));
    assert!(pools.l1_bytes(device) == l1, "L1: {case:?}");
    assert!(pools.l2_bytes() == l2, "L2: {case:?}");
}

#[test]
fn every_row_arrives_by_every_way() {
    if !in_a_process_of_its_own("every_row_arrives_by_every_way", &[]) {
        return;
    }
    for choice in [
        Choice::Always(Way::Kernel),
        Choice::Always(Way::Batch),
        Choice::Always(Way::Copies),
        Choice::Published,
    ] {
        let device = open(choice, 1 << 30);
        assert!(
            has_gpu() || device.name() == "fake GPU (kernels: built in)",
            "{}",
            device.name()
        );
        random_cases(60, |case| copies_match_the_oracle(&device, case));
    }
}

#[test]
fn tensors_of_an_engine_are_a_pool_like_any_other() {
    if !in_a_process_of_its_own("tensors_of_an_engine_are_a_pool_like_any_other", &[]) {
        return;
    }
    // Makes the context current, as an engine does.
    let _engine = compute();
    for choice in [
        Choice::Always(Way::Kernel),
        Choice::Always(Way::Batch),
        Choice::Always(Way::Copies),
        Choice::Published,
    ] {
        let device = open(choice, 1 << 30);
        random_cases_divided(4, 40, |case| {
            // Kernels do not accept unaligned addresses, so these transfers use another way.
            for skip in [0, 8] {
                let tensors = device_tensors(tensors_of(case), skip);
                let pools = Pools::of_tensors(&device, case, tensors);
                copies_through(&device, case, &pools);
            }
        });
    }
}

#[test]
fn tensors_are_freed_after_copies_in_flight() {
    if !in_a_process_of_its_own("tensors_are_freed_after_copies_in_flight", &[]) {
        return;
    }
    // The fake terminates the process if a tensor is freed too early.
    let _engine = compute();
    let device = open(Choice::Published, 1 << 30);
    let case = case(Direction::Load);
    let pools = Pools::of_tensors(&device, &case, device_tensors(tensors_of(&case), 0));
    let loading = device.load(pools.transfer(&case), &Ticket::done()).unwrap();
    drop(pools);
    drop(loading);
}

#[test]
fn invalid_tensors_are_refused_and_the_device_stays_usable() {
    const NAME: &str = "invalid_tensors_are_refused_and_the_device_stays_usable";
    if !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let _engine = compute();
    let device = open(Choice::Published, 1 << 30);
    let case = case(Direction::Load);
    let (count, bytes) = tensors_of(&case);
    let refused = |tensors| {
        let refused = device.adopt_l1(tensors, &case.shape, case.l1_pages);
        refused.unwrap_err().to_string()
    };
    let said = refused(device_tensors((count - 1, bytes), 0));
    assert!(said.contains("7 tensors"), "{said}");
    let said = refused(host_tensors((count, bytes), 0));
    assert!(
        said.contains("the tensor of layer 0 of part 0 is not in this device's memory"),
        "{said}"
    );
    // Freed memory. SAFETY: freed at once, and never read.
    let address = unsafe { result::malloc_sync(count * bytes) }.unwrap();
    // SAFETY: allocated above.
    unsafe { result::free_sync(address) }.unwrap();
    let tensors = (0..count as u64).map(|index| Tensor {
        address: address + index * bytes as u64,
        bytes: bytes as u64,
    });
    // SAFETY: the tensors are refused and never used.
    let said = refused(unsafe { Tensors::new(tensors.collect(), Box::new(())) });
    assert!(said.contains("CUDA_ERROR_INVALID_VALUE"), "{said}");
    copies_match_the_oracle(&device, &case);
}

#[test]
fn tensors_of_another_device_are_refused() {
    let variables = [("FAKE_OTHER_OWNER", "1")];
    if has_gpu() || !in_a_process_of_its_own("tensors_of_another_device_are_refused", &variables) {
        return;
    }
    let _engine = compute();
    let device = open(Choice::Published, 1 << 30);
    let case = case(Direction::Load);
    let refused = device.adopt_l1(
        device_tensors(tensors_of(&case), 0),
        &case.shape,
        case.l1_pages,
    );
    let said = refused.unwrap_err().to_string();
    assert!(said.ends_with("it is in that of device 1"), "{said}");
}

#[test]
fn memory_that_its_owner_has_locked_is_used_as_it_is() {
    if !in_a_process_of_its_own("memory_that_its_owner_has_locked_is_used_as_it_is", &[]) {
        return;
    }
    // The fake terminates the process if a copy spans two registrations, or if an unknown
    // registration is removed.
    let _engine = compute();
    let device = open(Choice::Always(Way::Copies), 1 << 30);
    let case = case(Direction::Load);
    let bytes = pool_bytes(&case.shape, case.l2_pages) as usize;
    let memory = Locked::new(bytes, 4096);
    let host = |memory: &Arc<Locked>, bytes| {
        // SAFETY: no other code touches it.
        let host = unsafe { HostMemory::new(memory.start(), bytes, Box::new(memory.clone())) };
        host.locked_by_its_owner()
    };
    let register = |memory| device.register(memory, case.layout, &case.shape, case.l2_pages);
    let l2 = register(host(&memory, bytes)).unwrap();
    let l1 = device.alloc_l1(&case.shape, case.l1_pages).unwrap();
    copies_through(&device, &case, &Pools::filled(&device, &case, l1, l2));
    // The memory is still locked, because its owner unlocks it.
    assert!(register(host(&memory, bytes)).is_ok());
    memory.unlock(1);
    let refused = register(host(&memory, bytes)).unwrap_err();
    assert!(
        matches!(refused, DeviceError::NotLockable { .. }),
        "{refused}"
    );
    copies_match_the_oracle(&device, &case);
}

#[test]
fn copies_stay_within_the_pieces_that_were_registered() {
    if !in_a_process_of_its_own("copies_stay_within_the_pieces_that_were_registered", &[]) {
        return;
    }
    // The fake terminates the process if a copy leaves its piece.
    for way in [Way::Copies, Way::Batch, Way::Kernel] {
        let device = open(Choice::Always(way), 4096);
        // Every page is registered separately, which is slow: a fraction of the cases is enough.
        random_cases_divided(4, 80, |case| copies_match_the_oracle(&device, case));
    }
}

#[test]
fn copy_engines_are_used_if_kernels_cannot_reach_the_host() {
    let other = [("FAKE_OTHER_ADDRESSES", "1")];
    if !in_a_process_of_its_own(
        "copy_engines_are_used_if_kernels_cannot_reach_the_host",
        &other,
    ) {
        return;
    }
    let device = open(Choice::Always(Way::Kernel), 1 << 30);
    random_cases(30, |case| copies_match_the_oracle(&device, case));
}

#[test]
fn work_after_a_ticket_waits_for_it_in_the_stream() {
    if !in_a_process_of_its_own("work_after_a_ticket_waits_for_it_in_the_stream", &[]) {
        return;
    }
    let device = open(Choice::Published, 1 << 30);
    // Pages are loaded, stored to other pages, and loaded again to their origin, each after the
    // previous step. The fake runs its streams in its own order. The default stream, as a foreign
    // stream, takes part.
    let default = default_stream();
    for _ in 0..50 {
        let case = case(Direction::Load);
        let pools = Pools::new(&device, &case);
        let before = pools.l2_bytes();
        let to_others = (0..8)
            .map(|page| PagePair {
                l1: page,
                l2: 8 + page,
            })
            .collect();
        let up = device.load(pools.transfer(&case), &Ticket::done()).unwrap();
        let last = up.gates()[0].layer(case.shape.layers() - 1);
        device.hold(default, &last).unwrap();
        let after = device.record(default).unwrap();
        // SAFETY: ordered by the tickets.
        let others = unsafe { Transfer::new(&pools.l1, &pools.l2, to_others) }.unwrap();
        let down = device.store(others, &after).unwrap();
        let again = device
            .load(pools.transfer(&case), &down.gates()[0].layer(0))
            .unwrap();
        assert_eq!(again.wait().1, Ok(()));
        assert_eq!(
            (up.open().unwrap().1, down.open().unwrap().1),
            (Ok(()), Ok(()))
        );
        let after = pools.l2_bytes();
        let part = 16 * case.shape.part_bytes() as usize;
        for part in [&after[..part], &after[part..]] {
            assert!(part[..part.len() / 2] == part[part.len() / 2..]);
        }
        assert!(after != before);
    }
}

#[test]
fn tickets_settle_layer_by_layer_and_the_cpu_need_not_wait() {
    if !in_a_process_of_its_own(
        "tickets_settle_layer_by_layer_and_the_cpu_need_not_wait",
        &[],
    ) {
        return;
    }
    let device = open(Choice::Published, 1 << 30);
    let case = case(Direction::Load);
    let pools = Pools::new(&device, &case);
    let loads: Vec<_> = (0..5)
        .map(|_| device.load(pools.transfer(&case), &Ticket::done()).unwrap())
        .collect();
    if !has_gpu() {
        // The fake executes work only on request.
        assert_eq!(loads[4].layer(0).map(|layer| layer.is_some()), Ok(false));
    }
    for load in &loads {
        for layer in 0..case.shape.layers() {
            found("the layer settles", || load.layer(layer).unwrap());
            let before = layer
                .checked_sub(1)
                .map(|before| load.layer(before).unwrap().is_some());
            assert_ne!(before, Some(false));
        }
    }
    assert!(loads.into_iter().all(|load| load.open().is_ok()));
}

#[test]
fn pools_dropped_during_copies_are_freed_after_them() {
    if !in_a_process_of_its_own("pools_dropped_during_copies_are_freed_after_them", &[]) {
        return;
    }
    // The fake terminates the process if a pool is freed too early.
    let device = open(Choice::Published, 4096);
    let case = case(Direction::Store);
    let pools = Pools::new(&device, &case);
    let storing = device
        .store(pools.transfer(&case), &Ticket::done())
        .unwrap();
    drop(pools);
    drop(storing);
    // The L2 pool alone.
    let pools = Pools::new(&device, &case);
    let storing = device
        .store(pools.transfer(&case), &Ticket::done())
        .unwrap();
    let l1 = pools.l1.clone();
    drop(pools);
    drop(storing);
    drop(l1);
    let pools = Pools::new(&device, &case);
    let storing = device
        .store(pools.transfer(&case), &Ticket::done())
        .unwrap();
    drop(device);
    drop(pools);
    assert_eq!(storing.wait().1, Ok(()));
}

#[test]
fn impossible_requests_are_refused_and_the_device_stays_usable() {
    if !in_a_process_of_its_own(
        "impossible_requests_are_refused_and_the_device_stays_usable",
        &[],
    ) {
        return;
    }
    let device = open(Choice::Published, 1 << 30);
    let huge = KvShape::mha(64, 64, 128, 2, 256).unwrap();
    let refused = device.alloc_l1(&huge, u32::MAX).unwrap_err();
    assert!(matches!(refused, DeviceError::NoMemory { .. }), "{refused}");
    let case = case(Direction::Load);
    let pools = Pools::new(&device, &case);
    // A ticket that only the CPU can settle, and a failed ticket.
    let (promise, pending) = Ticket::promised();
    let refused = device.load(pools.transfer(&case), &pending).unwrap_err();
    assert_eq!(refused.error, DeviceError::ForeignTicket);
    drop(promise);
    let refused = device.load(refused.transfer, &pending).unwrap_err();
    assert!(
        matches!(refused.error, DeviceError::After(_)),
        "{}",
        refused.error
    );
    // The host device refuses unsettled GPU tickets and pools of a GPU.
    let host = HostDevice::new().unwrap();
    let on_host = Pools::new(&host, &case);
    let moving = device.load(refused.transfer, &Ticket::done()).unwrap();
    let ticket = moving.gates()[0].layer(3);
    if !has_gpu() {
        let foreign = host.load(on_host.transfer(&case), &ticket).unwrap_err();
        assert_eq!(foreign.error, DeviceError::ForeignTicket);
    }
    ticket.wait().unwrap();
    assert_eq!(
        host.load(on_host.transfer(&case), &ticket)
            .unwrap()
            .wait()
            .1,
        Ok(())
    );
    let (transfer, _) = moving.wait();
    assert_eq!(
        host.load(transfer, &Ticket::done()).unwrap_err().error,
        DeviceError::ForeignPool
    );
    let foreign = device
        .load(on_host.transfer(&case), &Ticket::done())
        .unwrap_err();
    assert_eq!(foreign.error, DeviceError::ForeignPool);
    assert!(
        device
            .load(pools.transfer(&case), &Ticket::done())
            .unwrap()
            .wait()
            .1
            .is_ok()
    );
    // Memory that is already registered, and memory that starts in the middle of a page.
    let refused = |skip: usize, wanted: &str| {
        let start = pools.l2.start().as_ptr().wrapping_add(skip);
        let start = std::ptr::NonNull::new(start).unwrap();
        // SAFETY: never touched, because the memory is refused.
        let memory = unsafe { HostMemory::new(start, 4096, Box::new(pools.l2.clone())) };
        let refused = device.register(memory, Layout::PageFirst, &case.shape, 1);
        let said = refused.unwrap_err().to_string();
        assert!(said.contains(wanted), "{said}");
    };
    refused(0, "4096 bytes of the L2 pool cannot be page-locked");
    refused(16, "does not begin on a page");
}

/// Calls every operation of the device. Returns the first error.
fn everything() -> Result<(), DeviceError> {
    let device = CudaDevice::open(&CudaOptions {
        choice: Choice::Published,
        piece_bytes: 4096,
        ..CudaOptions::default()
    })?;
    let case = case(Direction::Load);
    let memory = HostMemory::zeroed(pool_bytes(&case.shape, case.l2_pages))?;
    let l2 = device.register(memory, case.layout, &case.shape, case.l2_pages)?;
    let l1 = device.alloc_l1(&case.shape, case.l1_pages)?;
    // SAFETY: no other code touches the pools.
    let transfer = unsafe { Transfer::new(&l1, &l2, case.pairs.clone()) }?;
    let default = default_stream();
    let after = device.record(default)?;
    let (transfer, loaded) = device
        .load(transfer, &after)
        .map_err(|refused| refused.error)?
        .wait();
    let storing = device
        .store(transfer, &Ticket::done())
        .map_err(|refused| refused.error)?;
    device.hold(default, &storing.gates()[0].layer(0))?;
    let gate = storing.gates()[0].layer(0);
    let poll = || gate.poll().map(|is_open| is_open.then_some(())).transpose();
    found("the first gate opens", poll)?;
    let at = ChunkAt {
        part: 0,
        layer: 0,
        page: 0,
    };
    let mut chunk = vec![0; case.shape.chunk_bytes() as usize];
    // SAFETY: nothing is in flight.
    unsafe { device.read_l1(&l1, at, &mut chunk) }?;
    // SAFETY: nothing is in flight.
    unsafe { device.write_l1(&l1, at, &chunk) }?;
    loaded.and(storing.wait().1)
}

#[test]
fn a_failure_of_any_call_is_handled() {
    if has_gpu() || !in_a_process_of_its_own("a_failure_of_any_call_is_handled", &[]) {
        return;
    }
    let steering = Steering::new();
    steering.fail(-1);
    assert_eq!(everything(), Ok(()));
    let calls = steering.calls();
    assert!(calls > 100, "{calls}");
    let mut unnoticed = 0;
    for nth in 1..=calls {
        steering.fail(nth);
        match everything() {
            // Only calls of the final cleanup may fail unnoticed.
            Err(error) => assert_eq!(unnoticed, 0, "call {nth}: {error}"),
            Ok(()) => unnoticed += 1,
        }
        let host = HostDevice::new().unwrap();
        assert!(host.alloc_l1(&case(Direction::Load).shape, 1).is_ok());
    }
    assert!(calls - unnoticed > 100, "{unnoticed} of {calls}");
    steering.fail(-1);
    assert_eq!(everything(), Ok(()));
}

#[test]
fn a_failure_in_the_middle_fails_the_layers_behind_it_and_hands_the_pages_back() {
    const NAME: &str =
        "a_failure_in_the_middle_fails_the_layers_behind_it_and_hands_the_pages_back";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let steering = Steering::new();
    let (mut whole, mut failed) = (0, 0);
    for nth in 1.. {
        steering.fail(-1);
        let device = open(Choice::Always(Way::Copies), 1 << 30);
        let case = case(Direction::Load);
        let pools = Pools::new(&device, &case);
        let transfer = pools.transfer(&case);
        steering.fail_after(nth);
        let (pages, outcome) = match device.load(transfer, &Ticket::done()) {
            Ok(loading) => {
                let (transfer, outcome) = loading.wait();
                (transfer.pairs().len(), outcome)
            }
            Err(refused) => (refused.transfer.pairs().len(), Err(refused.error)),
        };
        assert_eq!(pages, 8);
        if outcome.is_ok() {
            whole += 1;
            break;
        }
        failed += 1;
        // All later calls fail too.
        assert!(matches!(
            device.record(default_stream()),
            Err(DeviceError::Dead(_))
        ));
        let refused = device
            .load(pools.transfer(&case), &Ticket::done())
            .unwrap_err();
        assert!(
            matches!(refused.error, DeviceError::Dead(_)),
            "{}",
            refused.error
        );
    }
    assert!(whole == 1 && failed > 10, "{failed}");
}

#[test]
fn a_missing_device_is_reported() {
    if has_gpu()
        || !in_a_process_of_its_own("a_missing_device_is_reported", &[("FAKE_NO_DEVICE", "1")])
    {
        return;
    }
    let (device, why) = or_host(&CudaOptions::default()).unwrap();
    assert_eq!(
        why.unwrap().to_string(),
        "no CUDA device: CUDA_ERROR_NO_DEVICE"
    );
    // The host device takes over.
    random_cases(5, |case| copies_match_the_oracle(device.as_ref(), case));
}

#[test]
fn a_nonexistent_device_number_is_reported() {
    const NAME: &str = "a_nonexistent_device_number_is_reported";
    if has_gpu() || !in_a_process_of_its_own(NAME, &[]) {
        return;
    }
    let options = CudaOptions {
        ordinal: 1,
        ..CudaOptions::default()
    };
    let error = CudaDevice::open(&options).err().unwrap().to_string();
    assert_eq!(
        error,
        "no CUDA device: device 1 does not exist (number of devices: 1)"
    );
}

#[test]
#[ignore = "runs in the processes of the next two tests"]
fn opens_or_reports_why_not() {
    let options = CudaOptions {
        choice: Choice::Published,
        ..CudaOptions::default()
    };
    match CudaDevice::open(&options) {
        Ok(device) => println!("opened {}", device.name()),
        Err(error) => println!("{error}"),
    }
}

#[test]
fn a_missing_driver_function_is_reported_by_name() {
    if has_gpu() {
        return;
    }
    let Some(fake) = fake() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("libcuda.so");
    let whole = std::fs::read(fake.join("libcuda.so")).unwrap();
    let functions = FAKE
        .lines()
        .filter_map(|line| line.strip_prefix("Result cu"));
    let mut tried = 0;
    let optional = "MemcpyBatchAsync_v2";
    let names = functions.filter_map(|line| line.split('(').next());
    for function in names.filter(|name| *name != optional) {
        let function = format!("cu{function}");
        std::fs::write(&library, lacking(&whole, &function)).unwrap();
        let output = child("opens_or_reports_why_not", directory.path(), &[]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let wanted = format!("no CUDA device: the driver does not have {function};");
        assert!(
            output.status.success() && said.contains(&wanted),
            "{function}: {said}"
        );
        tried += 1;
    }
    assert_eq!(tried, 40);
}

#[test]
fn a_missing_driver_is_reported() {
    if has_gpu() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for library in ["", "libcuda.so", "libcuda.so.1"] {
        if !library.is_empty() {
            std::fs::write(directory.path().join(library), b"no library").unwrap();
        }
        let output = child("opens_or_reports_why_not", directory.path(), &[]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // On a machine with a driver, the driver is found in spite of the empty directory.
        let expected = ["no CUDA device: libcuda is not installed", "opened "];
        assert!(
            output.status.success() && expected.iter().any(|wanted| said.contains(wanted)),
            "{said}"
        );
    }
}
