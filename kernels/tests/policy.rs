//! The choice of the way to copy, on the fake driver and in its time: measured once, cached, and
//! used.
//!
//! Covered: the table contains the measured times, the cache returns only valid data, and a device
//! that cannot be measured still works. Not covered: the speed of any GPU.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use larder_fake_cuda::driver::{Steering, child, fake, has_gpu, in_a_process_of_its_own, lacking};
use larder_kernels::cuda::policy::{Point, Probe, Way};
use larder_kernels::cuda::{Choice, CudaOptions};
use larder_kernels::{
    CudaDevice, Device, DeviceError, Direction, KvShape, Layout, PagePair, Ticket,
};
use support::{Case, Pools};

fn steering() -> &'static Steering {
    static STEERING: OnceLock<Steering> = OnceLock::new();
    STEERING.get_or_init(Steering::new)
}

fn fake_time() -> Duration {
    Duration::from_nanos(steering().now().unsigned_abs())
}

/// Opens a device with measurements in the fake's time. Nothing is moved.
fn open(cache: Option<&Path>) -> Result<CudaDevice, DeviceError> {
    steering().still(true);
    let device = CudaDevice::open(&CudaOptions {
        choice: Choice::Measured,
        cache: cache.map(Path::to_owned),
        clock: fake_time,
        ..CudaOptions::default()
    });
    steering().still(false);
    device
}

/// Whether this is the process of a test on the fake.
fn over_the_fake(test: &str, variables: &[(&str, &str)]) -> bool {
    !has_gpu() && in_a_process_of_its_own(test, variables)
}

/// Sixteen pages of 32 KiB per layer, neighbours or not.
fn case(direction: Direction, neighbours: bool) -> Case {
    Case {
        shape: KvShape::mla(2, 16, 1, 2048).unwrap(),
        layout: Layout::PageFirstDirect,
        direction,
        l1_pages: 16,
        l2_pages: 16,
        pairs: (0..16)
            .map(|page| PagePair {
                l1: if neighbours { page } else { 15 - page },
                l2: page,
            })
            .collect(),
        only: None,
    }
}

/// The ways that a transfer used: copies, batches, kernels.
fn went(device: &CudaDevice, case: &Case) -> [bool; 3] {
    let pools = Pools::new(device, case);
    steering().counted();
    let moving = match case.direction {
        Direction::Load => device.load(pools.transfer(case), &Ticket::done()),
        Direction::Store => device.store(pools.transfer(case), &Ticket::done()),
    };
    moving.unwrap().wait().1.unwrap();
    steering().counted().map(|count| count > 0)
}

const COPIES: [bool; 3] = [true, false, false];
const BATCH: [bool; 3] = [false, true, false];
const KERNEL: [bool; 3] = [false, false, true];

/// Whether the open measured the device.
fn was_measured(cache: &Path) -> bool {
    steering().counted();
    let device = open(Some(cache)).unwrap();
    assert!(device.table().is_some());
    steering().counted() != [0, 0, 0]
}

#[test]
fn transfers_use_the_way_measured_as_cheapest() {
    if !over_the_fake("transfers_use_the_way_measured_as_cheapest", &[]) {
        return;
    }
    let (load, store) = (case(Direction::Load, false), case(Direction::Store, false));
    for (speeds, loaded, stored) in [
        ([90, 90, 20], KERNEL, BATCH),
        ([90, 20, 90], BATCH, BATCH),
        ([20, 90, 90], COPIES, COPIES),
        ([20, 90, 1], KERNEL, COPIES),
    ] {
        steering().speeds(speeds);
        let device = open(None).unwrap();
        assert_eq!(went(&device, &load), loaded, "{speeds:?}");
        assert_eq!(went(&device, &store), stored, "{speeds:?}");
    }
    // At equal speed, one call per page costs more than a batch, and one call for all pages costs
    // less.
    steering().speeds([20, 20, 90]);
    let device = open(None).unwrap();
    assert_eq!(went(&device, &load), BATCH);
    assert_eq!(went(&device, &case(Direction::Load, true)), COPIES);
}

#[test]
fn layers_of_a_small_load_share_launches_and_a_load_of_many_copies_is_one_by_kernel() {
    const NAME: &str =
        "layers_of_a_small_load_share_launches_and_a_load_of_many_copies_is_one_by_kernel";
    if !over_the_fake(NAME, &[]) {
        return;
    }
    // Kernels are the dearest, and rows of 16 KiB.
    steering().speeds([1, 1, 90]);
    let device = open(None).unwrap();
    let load = |layers, pages: u32| Case {
        shape: KvShape::mla(layers, 16, 1, 1024).unwrap(),
        layout: Layout::PageFirstDirect,
        direction: Direction::Load,
        l1_pages: pages,
        l2_pages: pages,
        pairs: (0..pages)
            .map(|page| PagePair {
                l1: pages - 1 - page,
                l2: page,
            })
            .collect(),
        only: None,
    };
    assert_eq!(went(&device, &load(32, 500)), BATCH);
    assert_eq!(went(&device, &load(32, 501)), KERNEL);
    let launches = |layers, pages| {
        let device = CudaDevice::open(&CudaOptions {
            choice: Choice::Always(Way::Kernel),
            ..CudaOptions::default()
        });
        let device = device.unwrap();
        let case = load(layers, pages);
        let pools = Pools::new(&device, &case);
        steering().counted();
        let loading = device.load(pools.transfer(&case), &Ticket::done());
        loading.unwrap().wait().1.unwrap();
        steering().counted()
    };
    // Launches of at least 2 MiB.
    assert_eq!(launches(32, 4), [0, 0, 1]);
    assert_eq!(launches(32, 16), [0, 0, 4]);
    assert_eq!(launches(9, 32), [0, 0, 3]);
    assert_eq!(launches(9, 128), [0, 0, 9]);
}

#[test]
fn the_table_holds_the_measured_times() {
    if !over_the_fake("the_table_holds_the_measured_times", &[]) {
        return;
    }
    steering().speeds([20, 30, 40]);
    let device = open(None).unwrap();
    let table = device.table().unwrap();
    for point in Point::all() {
        let cost = |probe| table.get(&point, probe);
        assert_eq!(
            cost(Probe::Kernel).is_some(),
            point.direction == Direction::Load
        );
        let kib = point.rows() * point.row_bytes() / 1024;
        for (probe, speed) in [
            (Probe::Scattered, 20),
            (Probe::Merged, 20),
            (Probe::Batch, 30),
        ] {
            let cost = cost(probe).unwrap();
            let copying = cost.elapsed_ns - cost.cpu_ns;
            // The call that records the end of a store is not one of each layer.
            let expected = (kib * speed).saturating_sub(1000)..kib * speed + 2000;
            assert!(expected.contains(&copying), "{point:?} {probe:?} {cost:?}");
        }
        // One call per row, and one for all.
        let calls = cost(Probe::Scattered).unwrap().cpu_ns - cost(Probe::Merged).unwrap().cpu_ns;
        assert!(calls >= (point.rows() - 1) * 1000, "{point:?} {calls}");
    }
    let again = open(None).unwrap();
    assert_eq!(again.table(), device.table());
}

#[test]
fn a_device_is_measured_again_only_if_its_table_is_torn_or_of_another_device() {
    const NAME: &str = "a_device_is_measured_again_only_if_its_table_is_torn_or_of_another_device";
    if !over_the_fake(NAME, &[]) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let cache = home.path().join("not there yet");
    assert!(was_measured(&cache));
    assert!(!was_measured(&cache));
    let file = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap();
    let whole = std::fs::read(file.path()).unwrap();
    for torn in [0, 1, whole.len() / 2, whole.len() - 1] {
        std::fs::write(file.path(), &whole[..torn]).unwrap();
        assert!(was_measured(&cache), "{torn}");
        assert!(!was_measured(&cache), "{torn}");
    }
    let mut spoiled = whole.clone();
    spoiled[100] ^= 1;
    std::fs::write(file.path(), &spoiled).unwrap();
    assert!(was_measured(&cache));
    // A whole file that is not a table.
    let short = larder_kernels::cuda::cache::Cache::new(&cache);
    short
        .put(file.file_name().to_str().unwrap(), b"no table")
        .unwrap();
    assert!(was_measured(&cache));
    steering().device(2);
    assert!(was_measured(&cache));
    steering().device(1);
    assert!(!was_measured(&cache));
    // If the cache cannot be written, each start measures.
    let nowhere = file.path().join("below a file");
    assert!(was_measured(&nowhere) && was_measured(&nowhere));
}

#[test]
fn a_cached_table_decides_the_way() {
    if !over_the_fake("a_cached_table_decides_the_way", &[]) {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let load = case(Direction::Load, false);
    steering().speeds([90, 20, 90]);
    assert_eq!(went(&open(Some(cache.path())).unwrap(), &load), BATCH);
    // A changed speed that no open measures.
    steering().speeds([90, 90, 20]);
    assert_eq!(went(&open(Some(cache.path())).unwrap(), &load), BATCH);
}

#[test]
fn a_device_that_cannot_be_measured_uses_published_figures() {
    let locks_nothing = [("FAKE_LOCKS_NOTHING", "1")];
    if !over_the_fake(
        "a_device_that_cannot_be_measured_uses_published_figures",
        &locks_nothing,
    ) {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let device = open(Some(cache.path())).unwrap();
    assert!(device.table().is_none());
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    // The device works once memory can be locked. SAFETY: a separate process without other threads
    // that read its environment.
    unsafe { std::env::remove_var("FAKE_LOCKS_NOTHING") };
    assert_eq!(went(&device, &case(Direction::Load, false)), KERNEL);
    assert_eq!(went(&device, &case(Direction::Store, false)), COPIES);
}

#[test]
fn a_device_that_dies_while_it_is_measured_is_an_error_and_leaves_no_table() {
    const NAME: &str = "a_device_that_dies_while_it_is_measured_is_an_error_and_leaves_no_table";
    if !over_the_fake(NAME, &[]) {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    steering().fail(-1);
    drop(open(None).unwrap());
    let calls = steering().calls();
    assert!(calls > 1000, "{calls}");
    // At some calls of each kind, and at all calls before the first copy.
    let moments = (40..120).chain((120..calls - 100).step_by(usize::try_from(calls / 60).unwrap()));
    for nth in moments {
        steering().fail(nth);
        let error = open(Some(cache.path()))
            .err()
            .unwrap_or_else(|| panic!("call {nth} of {calls}"));
        assert!(
            matches!(error, DeviceError::Driver { .. } | DeviceError::Dead(_)),
            "call {nth}: {error}"
        );
        assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    }
    steering().fail(-1);
    assert!(was_measured(cache.path()));
}

#[test]
fn a_driver_that_refuses_batches_receives_none() {
    if !over_the_fake(
        "a_driver_that_refuses_batches_receives_none",
        &[("FAKE_REFUSES_BATCHES", "1")],
    ) {
        return;
    }
    steering().speeds([90, 1, 90]);
    let device = open(None).unwrap();
    let table = device.table().unwrap();
    assert!(Point::all().all(|point| table.get(&point, Probe::Batch).is_none()));
    assert_ne!(went(&device, &case(Direction::Load, false)), BATCH);
    assert_eq!(went(&device, &case(Direction::Store, false)), COPIES);
}

#[test]
#[ignore = "runs in the process of the next test"]
fn works_without_batches() {
    steering().speeds([90, 1, 90]);
    let device = open(None).unwrap();
    assert_eq!(went(&device, &case(Direction::Store, false)), COPIES);
    let always = CudaOptions {
        choice: Choice::Always(Way::Batch),
        ..CudaOptions::default()
    };
    let device = CudaDevice::open(&always).unwrap();
    assert_eq!(went(&device, &case(Direction::Load, false)), COPIES);
}

#[test]
fn a_driver_without_batches_still_works() {
    if has_gpu() {
        return;
    }
    let Some(fake) = fake() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let whole = std::fs::read(fake.join("libcuda.so")).unwrap();
    let library = lacking(&whole, "cuMemcpyBatchAsync_v2");
    std::fs::write(directory.path().join("libcuda.so"), library).unwrap();
    let output = child("works_without_batches", directory.path(), &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

/// On a GPU: prints the measurements.
#[test]
fn a_gpu_is_measured_and_its_table_is_kept() {
    if !has_gpu() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let options = CudaOptions {
        cache: Some(cache.path().to_owned()),
        ..CudaOptions::default()
    };
    let device = CudaDevice::open(&options).unwrap();
    let table = device.table().unwrap();
    for point in Point::all() {
        let us = |probe| {
            table
                .get(&point, probe)
                .map_or("      -      -".to_owned(), |cost| {
                    format!("{:7}{:7}", cost.elapsed_ns / 1000, cost.cpu_ns / 1000)
                })
        };
        println!(
            "{:?} {:4} KiB x {:3}, us and CPU us: scattered {}  merged {}  batch {}  kernel {}",
            point.direction,
            point.row_bytes() >> 10,
            point.rows(),
            us(Probe::Scattered),
            us(Probe::Merged),
            us(Probe::Batch),
            us(Probe::Kernel),
        );
        assert!(table.get(&point, Probe::Scattered).is_some());
    }
    let again = CudaDevice::open(&options).unwrap();
    assert_eq!(again.table(), Some(table));
}
