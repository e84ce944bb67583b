//! Copies of rows within L1, on the host and in the order of a stream.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use larder_fake_cuda::driver::{default_stream, in_a_process_of_its_own};
use larder_kernels::{
    CudaDevice, CudaOptions, Device, DeviceError, Direction, ForeignStream, HostDevice, RowCopy,
    Ticket,
};
use support::{Case, Pools, case, heads_at};

const COPY: RowCopy = RowCopy {
    from: 3,
    to: 6,
    rows: 3,
};

/// The bytes of L1 after a copy of rows, one row at a time.
fn copied(case: &Case, l1: &[u8], copy: RowCopy) -> Vec<u8> {
    let mut after = l1.to_vec();
    let bytes = case.shape.head_bytes() as usize;
    for part in 0..case.shape.parts() {
        for layer in 0..case.shape.layers() {
            for token in 0..copy.rows {
                let layout = larder_kernels::Layout::LayerFirst;
                let of = |page| {
                    heads_at(
                        layout,
                        &case.shape,
                        case.l1_pages,
                        (part, layer, page, token),
                    )
                };
                for (from, to) in of(copy.from).zip(of(copy.to)) {
                    after[to..to + bytes].copy_from_slice(&l1[from..from + bytes]);
                }
            }
        }
    }
    after
}

fn copy_of(device: &dyn Device, pools: &Pools, stream: Option<ForeignStream>) {
    let case = case(Direction::Load);
    let before = pools.l1_bytes(device);
    for rows in [0, 1, 3, case.shape.page_tokens()] {
        let copy = RowCopy { rows, ..COPY };
        // SAFETY: nothing else touches the pages.
        let ticket = unsafe { device.copy_rows(&pools.l1, copy, stream) }.unwrap();
        ticket.wait().unwrap();
        assert_eq!(pools.l1_bytes(device), copied(&case, &before, copy));
    }
    for (copy, error) in [
        (RowCopy { from: 8, ..COPY }, "there is no page 8"),
        (RowCopy { to: 3, ..COPY }, "page 3 of L1 is in the same"),
        (RowCopy { rows: 5, ..COPY }, "5 cannot be copied"),
    ] {
        // SAFETY: as above.
        let refused = unsafe { device.copy_rows(&pools.l1, copy, stream) }.unwrap_err();
        assert!(refused.to_string().contains(error), "{refused}");
    }
}

#[test]
fn rows_are_copied_on_the_host_at_once() {
    let device = HostDevice::new().unwrap();
    let pools = Pools::new(&device, &case(Direction::Load));
    assert!(!device.has_streams());
    copy_of(&device, &pools, None);
    // SAFETY: nothing is copied.
    let refused = unsafe { device.copy_rows(&pools.l1, COPY, Some(default_stream())) };
    assert_eq!(refused.err(), Some(DeviceError::NoStreams));
}

#[test]
fn rows_are_copied_in_the_order_of_the_stream() {
    if !in_a_process_of_its_own("rows_are_copied_in_the_order_of_the_stream", &[]) {
        return;
    }
    let device = CudaDevice::open(&CudaOptions::default()).unwrap();
    let case = case(Direction::Load);
    let pools = Pools::new(&device, &case);
    assert!(device.has_streams());
    let stream = Some(default_stream());
    copy_of(&device, &pools, stream);
    // SAFETY: nothing is copied.
    let refused = unsafe { device.copy_rows(&pools.l1, COPY, None) };
    assert_eq!(refused.err(), Some(DeviceError::StreamNeeded));
    // Behind a load that the stream waits for.
    let before = pools.l1_bytes(&device);
    let mut case = case;
    case.pairs.retain(|pair| pair.l1 != COPY.to);
    let (loaded, _) = support::expected(&case, &before, &pools.l2_bytes(), case.shape.layers());
    let loading = device.load(pools.transfer(&case), &Ticket::done()).unwrap();
    for gate in loading.gates() {
        (0..case.shape.layers()).for_each(|layer| {
            device.hold(default_stream(), &gate.layer(layer)).unwrap();
        });
    }
    // SAFETY: the stream waits for the load of the source; nothing else touches the destination.
    let ticket = unsafe { device.copy_rows(&pools.l1, COPY, stream) }.unwrap();
    ticket.wait().unwrap();
    loading.wait().1.unwrap();
    assert_eq!(pools.l1_bytes(&device), copied(&case, &loaded, COPY));
}
