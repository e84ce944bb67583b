//! The host device against the oracle, and its behaviour under faults.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_kernels::host::{IN_FLIGHT_MAX, Moment};
use larder_kernels::{
    ChunkAt, Device, DeviceError, Direction, ForeignStream, Gated, HostDevice, HostMemory, KvShape,
    Layout, PagePair, Promise, Refused, Tensor, Tensors, Ticket, Tier, Transfer, pool_bytes,
};
use proptest::prelude::*;
use support::{Case, Pools, cases, expected, host_tensors, noise, tensors_of};

fn submit(
    device: &dyn Device,
    direction: Direction,
    transfer: Transfer,
    after: &Ticket,
) -> Gated<Transfer> {
    let taken = match direction {
        Direction::Load => device.load(transfer, after),
        Direction::Store => device.store(transfer, after),
    };
    taken.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_row_arrives_and_nothing_else_changes(case in cases(1..70u32)) {
        let device = HostDevice::new().unwrap();
        let pools = Pools::new(&device, &case);
        let (l1, l2) = expected(
            &case,
            &pools.l1_bytes(&device),
            &pools.l2_bytes(),
            case.shape.layers(),
        );
        let moving = submit(&device, case.direction, pools.transfer(&case), &Ticket::done());
        let (transfer, outcome) = moving.wait();
        prop_assert_eq!(outcome, Ok(()));
        prop_assert!(pools.l1_bytes(&device) == l1);
        prop_assert!(pools.l2_bytes() == l2);
        let moved: u64 = transfer
            .layers()
            .flat_map(|layer| transfer.copies(layer))
            .map(|copy| copy.rows.width * copy.rows.count)
            .sum();
        prop_assert_eq!(moved, transfer.bytes());
    }

    #[test]
    fn tensors_of_an_engine_are_a_pool_like_any_other(case in cases(1..70u32), skip in 0..16usize) {
        let device = HostDevice::new().unwrap();
        let pools = Pools::of_tensors(&device, &case, host_tensors(tensors_of(&case), skip));
        let (l1, l2) = expected(
            &case,
            &pools.l1_bytes(&device),
            &pools.l2_bytes(),
            case.shape.layers(),
        );
        let moving = submit(&device, case.direction, pools.transfer(&case), &Ticket::done());
        let (_, outcome) = moving.wait();
        prop_assert_eq!(outcome, Ok(()));
        prop_assert!(pools.l1_bytes(&device) == l1);
        prop_assert!(pools.l2_bytes() == l2);
    }

    #[test]
    fn a_layer_arrives_with_its_ticket_and_the_next_layer_does_not(case in cases(1..40u32)) {
        let case = Case { direction: Direction::Load, ..case };
        let device = HostDevice::stepped(Box::new(|_| Ok(())));
        let pools = Pools::new(&device, &case);
        let (before, l2) = (pools.l1_bytes(&device), pools.l2_bytes());
        let loading = device.load(pools.transfer(&case), &Ticket::done()).unwrap();
        for (ticket, layer) in (0..).zip(case.layers()) {
            prop_assert!(loading.layer(ticket).unwrap().is_none());
            prop_assert!(device.step(Direction::Load));
            prop_assert!(loading.layer(ticket).unwrap().is_some());
            prop_assert!(pools.l1_bytes(&device) == expected(&case, &before, &l2, layer + 1).0);
        }
        prop_assert_eq!(loading.open().unwrap().1, Ok(()));
        prop_assert!(!device.step(Direction::Load));
    }
}

fn shape() -> KvShape {
    KvShape::mha(3, 2, 8, 2, 4).unwrap()
}

fn case(layout: Layout, direction: Direction) -> Case {
    Case {
        shape: shape(),
        layout,
        direction,
        l1_pages: 8,
        l2_pages: 8,
        pairs: support::pairs(8, 8, 5, 3),
        only: None,
    }
}

fn pairs(pairs: &[(u32, u32)]) -> Vec<PagePair> {
    let pair = |&(l1, l2)| PagePair { l1, l2 };
    pairs.iter().map(pair).collect()
}

#[test]
fn bytes_survive_a_load_and_a_store_in_all_layouts() {
    for layout in Layout::ALL {
        let device = HostDevice::new().unwrap();
        let case = case(layout, Direction::Load);
        let pools = Pools::new(&device, &case);
        let before = pools.l2_bytes();
        let (transfer, _) = device
            .load(pools.transfer(&case), &Ticket::done())
            .unwrap()
            .wait();
        for pair in transfer.pairs() {
            for (start, bytes) in pools.l2.page_runs(pair.l2).unwrap() {
                // SAFETY: a run of this pool, and nothing is in flight.
                unsafe { start.write_bytes(0xee, bytes as usize) };
            }
        }
        assert_ne!(pools.l2_bytes(), before);
        let (_, outcome) = device.store(transfer, &Ticket::done()).unwrap().wait();
        assert_eq!(
            (outcome, pools.l2_bytes() == before),
            (Ok(()), true),
            "{layout}"
        );
    }
}

#[test]
fn the_runs_of_a_page_cover_exactly_its_bytes() {
    for layout in Layout::ALL {
        let device = HostDevice::stepped(Box::new(|_| Ok(())));
        let case = case(layout, Direction::Load);
        let pools = Pools::new(&device, &case);
        let mut wanted = vec![0u8; pools.l2_bytes().len()];
        pools.set_l2(&wanted);
        for (start, bytes) in pools.l2.page_runs(5).unwrap() {
            // SAFETY: a run of this pool, and nothing is in flight.
            unsafe { start.write_bytes(7, bytes as usize) };
        }
        let head = shape().head_bytes() as usize;
        for part in 0..2 {
            for layer in 0..3 {
                for token in 0..4 {
                    let row = (part, layer, 5, token);
                    for at in support::heads_at(layout, &case.shape, 8, row) {
                        wanted[at..at + head].fill(7);
                    }
                }
            }
        }
        assert!(pools.l2_bytes() == wanted, "{layout}");
        assert!(pools.l2.page_runs(8).is_err());
    }
}

#[test]
fn nothing_is_copied_before_its_prerequisite_settles() {
    for direction in [Direction::Load, Direction::Store] {
        let device = HostDevice::stepped(Box::new(|_| Ok(())));
        let case = case(Layout::PageFirstDirect, direction);
        let pools = Pools::new(&device, &case);
        let (forward, after) = Ticket::promised();
        let moving = submit(&device, direction, pools.transfer(&case), &after);
        assert!(!device.step(direction));
        // The copy must see the writes that the forward pass makes before it settles the ticket.
        pools.set_l1(&device, &noise(77, pool_bytes(&case.shape, 8) as usize));
        pools.set_l2(&noise(78, pool_bytes(&case.shape, 8) as usize));
        let (l1, l2) = expected(&case, &pools.l1_bytes(&device), &pools.l2_bytes(), 3);
        forward.settle(Ok(()));
        while device.step(direction) {}
        assert_eq!(moving.open().unwrap().1, Ok(()));
        assert!(pools.l1_bytes(&device) == l1 && pools.l2_bytes() == l2);
    }
}

#[test]
fn a_thread_takes_up_a_transfer_when_its_ticket_settles() {
    let device = HostDevice::new().unwrap();
    let case = case(Layout::PageFirst, Direction::Store);
    let pools = Pools::new(&device, &case);
    let new = noise(79, pool_bytes(&case.shape, 8) as usize);
    let (forward, after) = Ticket::promised();
    let storing = device.store(pools.transfer(&case), &after).unwrap();
    pools.set_l1(&device, &new);
    assert!(storing.layer(0).unwrap().is_none());
    let l2 = expected(&case, &new, &pools.l2_bytes(), 3).1;
    forward.settle(Ok(()));
    assert_eq!(storing.wait().1, Ok(()));
    assert!(pools.l2_bytes() == l2);
}

#[test]
fn a_forward_that_follows_the_tickets_sees_each_layer_whole_and_of_its_own_round() {
    const ROUNDS: u8 = 200;
    let device = HostDevice::new().unwrap();
    let case = case(Layout::PageFirst, Direction::Load);
    let pools = Pools::new(&device, &case);
    let bytes = pool_bytes(&case.shape, 8) as usize;
    // Three loads into the same pages are in flight at a time. Each waits for the forward pass that
    // reads the data of the previous load. Each reads from its own L2 pool, whose bytes contain the
    // round number.
    let sources: Vec<Pools> = (0..3)
        .map(|_| Pools {
            l1: pools.l1.clone(),
            ..Pools::new(&device, &case)
        })
        .collect();
    let mut forwards = std::collections::VecDeque::new();
    let mut after = Ticket::done();
    for round in 1..=ROUNDS {
        if forwards.len() == sources.len() {
            let (round, loading, promise) = forwards.pop_front().unwrap();
            forward(&device, &pools, round, loading, promise);
        }
        let source = &sources[usize::from(round) % sources.len()];
        source.set_l2(&vec![round; bytes]);
        let loading = device.load(source.transfer(&case), &after).unwrap();
        let promise;
        (promise, after) = Ticket::promised();
        forwards.push_back((round, loading, promise));
    }
    for (round, loading, promise) in forwards {
        forward(&device, &pools, round, loading, promise);
    }
}

/// Reads each layer as soon as it is available, then releases the pages.
fn forward(device: &HostDevice, pools: &Pools, round: u8, loading: Gated<Transfer>, done: Promise) {
    let mut chunk = vec![0; shape().chunk_bytes() as usize];
    for layer in 0..shape().layers() {
        for pair in loading.wait_layer(layer).unwrap().pairs() {
            for part in 0..2 {
                let at = ChunkAt {
                    part,
                    layer,
                    page: pair.l1,
                };
                // SAFETY: the layer's ticket has settled, and the next load waits for `done`.
                unsafe { device.read_l1(&pools.l1, at, &mut chunk) }.unwrap();
                assert!(
                    chunk.iter().all(|byte| *byte == round),
                    "round {round}, layer {layer}"
                );
            }
        }
    }
    done.settle(Ok(()));
    assert_eq!(loading.wait().1, Ok(()));
}

#[test]
fn a_transfer_fails_and_copies_nothing_after_a_failed_prerequisite() {
    let device = HostDevice::new().unwrap();
    let case = case(Layout::PageFirst, Direction::Load);
    let pools = Pools::new(&device, &case);
    let before = pools.l1_bytes(&device);
    let (forward, after) = Ticket::promised();
    let loading = device.load(pools.transfer(&case), &after).unwrap();
    drop(forward);
    let (transfer, outcome) = loading.wait();
    assert_eq!(
        outcome,
        Err(DeviceError::After(Arc::new(DeviceError::Abandoned)))
    );
    assert!(pools.l1_bytes(&device) == before);
    // The pages came back, and the device is still usable.
    assert_eq!(
        device.load(transfer, &Ticket::done()).unwrap().wait().1,
        Ok(())
    );
}

#[test]
fn a_failed_layer_fails_later_layers_and_no_other_transfer() {
    let broken = Arc::new(AtomicBool::new(true));
    let seen = broken.clone();
    let error = DeviceError::Copy {
        layer: 1,
        why: "planted".to_owned(),
    };
    let planted = error.clone();
    let device = HostDevice::with_faults(Box::new(move |moment| match moment {
        Moment::Copy(Direction::Load, 1) if seen.load(Ordering::Relaxed) => Err(planted.clone()),
        _ => Ok(()),
    }))
    .unwrap();
    let case = case(Layout::PageFirstDirect, Direction::Load);
    let pools = Pools::new(&device, &case);
    let loading = device.load(pools.transfer(&case), &Ticket::done()).unwrap();
    assert!(loading.wait_layer(0).is_ok());
    assert_eq!(loading.wait_layer(1).unwrap_err(), error);
    assert_eq!(loading.wait_layer(2).unwrap_err(), error);
    let (transfer, outcome) = loading.wait();
    assert_eq!(outcome, Err(error));
    broken.store(false, Ordering::Relaxed);
    assert_eq!(
        device.load(transfer, &Ticket::done()).unwrap().wait().1,
        Ok(())
    );
}

#[test]
fn a_refused_transfer_comes_back_and_a_failed_pool_is_an_error() {
    let device = HostDevice::with_faults(Box::new(|moment| match moment {
        Moment::Submit(Direction::Store) => Err(DeviceError::Closed),
        Moment::Allocate | Moment::Register => Err(DeviceError::NoStreams),
        _ => Ok(()),
    }))
    .unwrap();
    let memory = HostMemory::zeroed(1 << 16).unwrap();
    let registered = device.register(memory, Layout::PageFirst, &shape(), 8);
    assert_eq!(registered.unwrap_err(), DeviceError::NoStreams);
    assert_eq!(
        device.alloc_l1(&shape(), 8).unwrap_err(),
        DeviceError::NoStreams
    );

    let device = HostDevice::with_faults(Box::new(|moment| match moment {
        Moment::Submit(Direction::Store) => Err(DeviceError::Closed),
        _ => Ok(()),
    }))
    .unwrap();
    let case = case(Layout::PageFirst, Direction::Store);
    let pools = Pools::new(&device, &case);
    let Refused { error, transfer } = device
        .store(pools.transfer(&case), &Ticket::done())
        .unwrap_err();
    assert_eq!((error, transfer.pairs().len()), (DeviceError::Closed, 5));
}

#[test]
fn invalid_transfers_are_refused() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let case = case(Layout::PageFirst, Direction::Load);
    let pools = Pools::new(&device, &case);
    let of = |list: &[(u32, u32)]| {
        // SAFETY: no device receives the transfer.
        unsafe { Transfer::new(&pools.l1, &pools.l2, pairs(list)) }.map(drop)
    };
    assert_eq!(of(&[]), Ok(()));
    assert_eq!(
        of(&[(0, 1), (0, 2)]),
        Err(DeviceError::PageTwice {
            tier: Tier::L1,
            page: 0
        })
    );
    assert_eq!(
        of(&[(3, 7), (1, 2), (2, 7)]),
        Err(DeviceError::PageTwice {
            tier: Tier::L2,
            page: 7
        })
    );
    assert_eq!(
        of(&[(8, 1)]),
        Err(DeviceError::NoSuchPage {
            tier: Tier::L1,
            page: 8,
            pages: 8
        })
    );
    assert_eq!(
        of(&[(1, u32::MAX)]),
        Err(DeviceError::NoSuchPage {
            tier: Tier::L2,
            page: u32::MAX,
            pages: 8
        })
    );
    let other = device
        .alloc_l1(&KvShape::mla(3, 32, 1, 4).unwrap(), 8)
        .unwrap();
    // SAFETY: no device receives the transfer.
    let mixed = unsafe { Transfer::new(&other, &pools.l2, Vec::new()) };
    assert_eq!(mixed.unwrap_err(), DeviceError::ShapesDiffer);
}

#[test]
fn pools_of_another_device_are_refused() {
    let [one, two] = [(); 2].map(|()| HostDevice::new().unwrap());
    let case = case(Layout::PageFirst, Direction::Load);
    let (of_one, of_two) = (Pools::new(&one, &case), Pools::new(&two, &case));
    let foreign = two
        .load(of_one.transfer(&case), &Ticket::done())
        .unwrap_err();
    assert_eq!(foreign.error, DeviceError::ForeignPool);
    let mixed = Pools {
        l1: of_two.l1.clone(),
        l2: of_one.l2,
    };
    let unknown = two
        .load(mixed.transfer(&case), &Ticket::done())
        .unwrap_err();
    assert_eq!(unknown.error, DeviceError::NotRegistered);
    let at = ChunkAt {
        part: 0,
        layer: 0,
        page: 0,
    };
    // SAFETY: nothing is in flight.
    let read = unsafe { one.read_l1(&of_two.l1, at, &mut []) };
    assert_eq!(read, Err(DeviceError::ForeignPool));
}

#[test]
fn chunks_that_do_not_exist_are_refused() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let pool = device.alloc_l1(&shape(), 8).unwrap();
    let mut chunk = vec![0; shape().chunk_bytes() as usize];
    let mut read = |part, layer, page, bytes: usize| {
        // SAFETY: nothing is in flight.
        unsafe { device.read_l1(&pool, ChunkAt { part, layer, page }, &mut chunk[..bytes]) }
    };
    let bytes = shape().chunk_bytes() as usize;
    assert_eq!(read(1, 2, 7, bytes), Ok(()));
    assert_eq!(
        read(2, 2, 7, bytes),
        Err(DeviceError::NoSuchLayer { part: 2, layer: 2 })
    );
    assert_eq!(
        read(1, 3, 7, bytes),
        Err(DeviceError::NoSuchLayer { part: 1, layer: 3 })
    );
    assert!(matches!(
        read(1, 2, 8, bytes),
        Err(DeviceError::NoSuchPage { page: 8, .. })
    ));
    assert!(matches!(
        read(1, 2, 7, bytes - 1),
        Err(DeviceError::ChunkSize { .. })
    ));
}

#[test]
fn memory_that_is_too_small_or_unavailable_is_an_error() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let needed = pool_bytes(&shape(), 8);
    let memory = HostMemory::zeroed(needed - 1).unwrap();
    let refused = device
        .register(memory, Layout::LayerFirst, &shape(), 8)
        .unwrap_err();
    assert_eq!(
        refused,
        DeviceError::MemoryTooSmall {
            pages: 8,
            needed,
            found: needed - 1
        }
    );
    let huge = KvShape::mha(64, 64, 128, 2, 256).unwrap();
    let refused = device.alloc_l1(&huge, u32::MAX).unwrap_err();
    assert_eq!(
        refused,
        DeviceError::NoMemory {
            what: "an L1 pool",
            bytes: pool_bytes(&huge, u32::MAX)
        }
    );
    assert!(HostMemory::zeroed(u64::MAX).is_err());
}

#[test]
fn a_device_refuses_transfers_above_its_limit() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let case = case(Layout::PageFirst, Direction::Load);
    let pools = Pools::new(&device, &case);
    let empty = || {
        pools.transfer(&Case {
            pairs: Vec::new(),
            ..case.clone()
        })
    };
    let taken: Vec<_> = (0..IN_FLIGHT_MAX)
        .map(|_| device.load(empty(), &Ticket::done()).unwrap())
        .collect();
    let refused = device.store(empty(), &Ticket::done()).unwrap_err();
    assert_eq!(
        refused.error,
        DeviceError::Busy {
            in_flight: IN_FLIGHT_MAX
        }
    );
    while device.step(Direction::Load) {}
    assert!(taken.into_iter().all(|load| load.open().is_ok()));
    assert!(device.store(refused.transfer, &Ticket::done()).is_ok());
}

#[test]
fn closing_a_device_fails_transfers_in_flight() {
    let device = HostDevice::new().unwrap();
    let case = case(Layout::PageFirst, Direction::Load);
    let pools = Pools::new(&device, &case);
    let (_never, after) = Ticket::promised();
    let loading = device.load(pools.transfer(&case), &after).unwrap();
    let behind = device.load(pools.transfer(&case), &Ticket::done()).unwrap();
    drop(device);
    assert_eq!(loading.wait().1, Err(DeviceError::Closed));
    assert_eq!(behind.wait().1, Err(DeviceError::Closed));
}

#[test]
fn the_host_device_has_no_streams() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    // SAFETY: the host device does not use streams.
    let stream = unsafe { ForeignStream::new(0) };
    assert_eq!(device.record(stream).unwrap_err(), DeviceError::NoStreams);
    assert_eq!(
        device.hold(stream, &Ticket::done()).unwrap_err(),
        DeviceError::NoStreams
    );
}

#[test]
fn offsets_past_4_gib_are_right() {
    // Address space only: untouched memory costs nothing. K ends past 4 GiB in both pools.
    let shape = KvShape::mha(4, 8, 128, 2, 64).unwrap();
    let pages = 5000;
    let (l1_page, l2_page) = (pages - 1, pages - 3);
    for layout in Layout::ALL {
        let device = HostDevice::new().unwrap();
        let memory = HostMemory::zeroed(pool_bytes(&shape, pages)).unwrap();
        let l2 = device.register(memory, layout, &shape, pages).unwrap();
        let l1 = device.alloc_l1(&shape, pages).unwrap();
        let row = shape.row_bytes() as usize;
        let mark = noise(5, row);
        let (part, layer, token) = (1, 3, 63);
        let heads = support::heads_at(layout, &shape, pages, (part, layer, l2_page, token));
        let heads: Vec<*mut u8> = heads
            .inspect(|at| assert!(*at > 4 << 30))
            .map(|at| l2.start().as_ptr().wrapping_add(at))
            .collect();
        let head = shape.head_bytes() as usize;
        for (at, mark) in heads.iter().zip(mark.chunks(head)) {
            // SAFETY: a head of an existing row, and nothing is in flight.
            unsafe { at.copy_from_nonoverlapping(mark.as_ptr(), head) };
        }
        let list = pairs(&[(l1_page, l2_page)]);
        // SAFETY: no other code touches the pools.
        let transfer = unsafe { Transfer::new(&l1, &l2, list) }.unwrap();
        let (transfer, _) = device.load(transfer, &Ticket::done()).unwrap().wait();
        let mut chunk = vec![0; shape.chunk_bytes() as usize];
        // SAFETY: nothing is in flight.
        unsafe {
            device.read_l1(
                &l1,
                ChunkAt {
                    part,
                    layer,
                    page: l1_page,
                },
                &mut chunk,
            )
        }
        .unwrap();
        assert!(chunk.ends_with(&mark) && chunk[..chunk.len() - row].iter().all(|byte| *byte == 0));
        for at in &heads {
            // SAFETY: a head of an existing row, and nothing is in flight.
            unsafe { at.write_bytes(0, head) };
        }
        let (_, outcome) = device.store(transfer, &Ticket::done()).unwrap().wait();
        assert_eq!(outcome, Ok(()));
        for (at, mark) in heads.iter().zip(mark.chunks(head)) {
            // SAFETY: a head of an existing row, and nothing is in flight.
            let back = unsafe { std::slice::from_raw_parts(*at, head) };
            assert!(back == mark, "{layout}");
        }
    }
}

#[test]
fn invalid_tensors_are_refused_with_the_reason() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let case = case(Layout::PageFirst, Direction::Load);
    let (count, bytes) = tensors_of(&case);
    let memory = vec![0u8; (count + 1) * bytes];
    let start = memory.as_ptr().expose_provenance() as u64;
    // The valid case: consecutive tensors.
    let right: Vec<Tensor> = (0..count as u64)
        .map(|index| Tensor {
            address: start + index * bytes as u64,
            bytes: bytes as u64,
        })
        .collect();
    let adopt = |tensors: Vec<Tensor>| {
        // SAFETY: no code touches the memory, and it outlives the pool.
        let tensors = unsafe { Tensors::new(tensors, Box::new(())) };
        device.adopt_l1(tensors, &case.shape, case.l1_pages)
    };
    assert!(adopt(right.clone()).is_ok());
    let refused = |spoil: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = right.clone();
        spoil(&mut tensors);
        adopt(tensors).unwrap_err().to_string()
    };
    for (spoil, wanted) in [
        (
            &(|tensors: &mut Vec<Tensor>| tensors.truncate(5)) as &dyn Fn(&mut Vec<Tensor>),
            "no L1 pool: 5 tensors, but the KV shape has 6 layers in all its parts",
        ),
        (
            &|tensors| tensors[4].bytes -= 1,
            "no L1 pool: the tensor of layer 1 of part 1 has 1023 bytes, 8 pages need 1024",
        ),
        (
            &|tensors| tensors[1].address = 0,
            "no L1 pool: the tensor of layer 1 of part 0 is not in memory: \
             it was freed, or never allocated",
        ),
        (
            &|tensors| tensors[1].address = u64::MAX - 100,
            "no L1 pool: the tensor of layer 1 of part 0 is not in memory: \
             it was freed, or never allocated",
        ),
        (
            &|tensors| tensors[0].address += 1,
            "no L1 pool: the tensors of layer 0 of part 0 and of layer 1 of part 0 overlap",
        ),
        (
            &|tensors| tensors[5] = tensors[0],
            "no L1 pool: the tensors of layer 0 of part 0 and of layer 2 of part 1 overlap",
        ),
    ] {
        assert_eq!(refused(spoil), wanted);
    }
}

#[test]
fn pools_that_share_memory_are_refused() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let case = case(Layout::PageFirst, Direction::Load);
    let bytes = pool_bytes(&case.shape, case.l2_pages) as usize;
    let (count, tensor_bytes) = tensors_of(&case);
    let memory = vec![0u8; 2 * bytes];
    let start = memory.as_ptr().expose_provenance();
    let refused = |l2_at: usize| {
        let tensors = (0..count).map(|index| Tensor {
            address: (start + index * tensor_bytes) as u64,
            bytes: tensor_bytes as u64,
        });
        // SAFETY: no code touches the memory, and it outlives the pool.
        let tensors = unsafe { Tensors::new(tensors.collect(), Box::new(())) };
        let l1 = device
            .adopt_l1(tensors, &case.shape, case.l1_pages)
            .unwrap();
        let l2_start = std::ptr::NonNull::from(&memory[l2_at]);
        // SAFETY: as for the tensors.
        let host = unsafe { HostMemory::new(l2_start, bytes, Box::new(())) };
        let l2 = device
            .register(host, case.layout, &case.shape, case.l2_pages)
            .unwrap();
        // SAFETY: no device receives the transfer.
        unsafe { Transfer::new(&l1, &l2, case.pairs.clone()) }.map(drop)
    };
    assert_eq!(refused(bytes), Ok(()));
    assert_eq!(refused(bytes - 1), Err(DeviceError::PoolsOverlap));
    assert_eq!(refused(0), Err(DeviceError::PoolsOverlap));
}
