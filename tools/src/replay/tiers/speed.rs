//! The speed of the disk and the memory, measured in the same run: the basis of virtual time.
//!
//! The disk is measured by `larder bench` on a store of its own beside the replay's, with pages of
//! full size. Batches give the bytes per second, single pages the additional time of a call. The
//! speed of the link between L2 and L1 is that of memcpy, or `--link`: the link of a host, not of a
//! GPU.

use std::path::Path;
use std::time::Instant;

use larder_engine::{CreateOptions, OpenOptions, PageStore, Store};
use larder_format::PageShape;

use super::machine::bytes_nanos;
use super::shared::Nanos;
use crate::bench::{self, Op, Plan};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::open::closing;
use crate::policy::Policy;
use crate::size::ByteSize;
use crate::workload::{self, Content};

/// Bytes that a measurement moves, about.
const SAMPLE_BYTES: u64 = 128 << 20;

/// Fewest and most pages of a measurement.
const PAGES: std::ops::RangeInclusive<u64> = 8..=64;

/// Largest page that is measured. Larger ones move no faster.
const PAGE_BYTES_MAX: u64 = 8 << 20;

/// Fewest pages for which a segment has room, and its bytes.
const SEGMENT_PAGES: u64 = 8;
const SEGMENT_BYTES_MIN: u64 = 32 << 20;

/// Segments beyond the ones that the pages fill.
const SEGMENTS_FREE: u64 = 6;

/// Bytes of a copy, and the number of copies: the best one counts.
const COPY_BYTES: usize = 64 << 20;
const COPIES: usize = 5;

/// Bytes per second of a disk, and additional nanoseconds for each call.
#[derive(Clone, Copy)]
pub struct DiskSpeed {
    /// Of reads.
    pub read: (f64, Nanos),
    /// Of writes.
    pub write: (f64, Nanos),
}

/// Measures the disk under `directory` with pages of this shape.
///
/// # Errors
/// There is no room for a store there, or it does not work.
pub fn disk(
    directory: &Path,
    shape: &PageShape,
    interrupt: &Interrupt,
) -> Result<DiskSpeed, Failure> {
    let in_the_way = |error: std::io::Error| {
        Failure::environment(format!(
            "{}: measuring the disk: {error}; choose another --store",
            directory.display()
        ))
    };
    let parts = u32::try_from(shape.parts()).unwrap_or(u32::MAX);
    let shape = if shape.page_bytes() > PAGE_BYTES_MAX {
        workload::shape(ByteSize(PAGE_BYTES_MAX), parts)?
    } else {
        *shape
    };
    let page_bytes = shape.page_bytes();
    let pages = (SAMPLE_BYTES / page_bytes).clamp(*PAGES.start(), *PAGES.end());
    let scratch = tempfile::tempdir_in(directory).map_err(in_the_way)?;
    let path = scratch.path().join("store");
    let segment_bytes = (page_bytes * SEGMENT_PAGES)
        .next_power_of_two()
        .max(SEGMENT_BYTES_MIN);
    // Pages of two puts and a get.
    let segments = 3 * pages / (SEGMENT_PAGES - 1) + SEGMENTS_FREE;
    let options = CreateOptions::new(segment_bytes * segments).with(|o| {
        o.segment_size = Some(segment_bytes);
        o.prewrite = true;
    });
    larder_engine::create(&path, &options)?;
    let options = OpenOptions::default().with(|o| o.eviction = Policy::default().maker());
    let depth = options.depth;
    let speeds = closing(&Store::open(&path, options)?, |store| {
        let of = |op| {
            let plan = |batch| Plan {
                path: &path,
                op,
                parts,
                content: Content::Words,
                pages,
                batch,
                keys: 0,
                seed: 1,
                depth,
                by_turns: false,
            };
            speed(plan, store, &shape, interrupt)
        };
        Ok(DiskSpeed {
            write: of(Op::Put)?,
            read: of(Op::Get)?,
        })
    })?;
    scratch.close().map_err(in_the_way)?;
    Ok(speeds)
}

fn speed<'p>(
    plan: impl Fn(u64) -> Plan<'p>,
    store: &dyn PageStore,
    shape: &PageShape,
    interrupt: &Interrupt,
) -> Result<(f64, Nanos), Failure> {
    let batch = plan(1).pages.div_ceil(4);
    let batches = bench::speed(&plan(batch), store, shape, interrupt)?;
    let single = bench::speed(&plan(1), store, shape, interrupt)?;
    let moving = bytes_nanos(shape.page_bytes(), batches.bytes_per_second);
    let call = u64::try_from(single.call.as_nanos()).unwrap_or(u64::MAX);
    Ok((batches.bytes_per_second, call.saturating_sub(moving)))
}

/// Bytes a second that one thread copies.
pub fn memcpy() -> f64 {
    let from = vec![1_u8; COPY_BYTES];
    let mut to = vec![2_u8; COPY_BYTES];
    let mut best = f64::INFINITY;
    for _ in 0..COPIES {
        let started = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        best = best.min(started.elapsed().as_secs_f64());
    }
    crate::usage::per_second(COPY_BYTES as u64, best)
}
