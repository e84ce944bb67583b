//! Measures the table of the policy on a device that was just opened: a fraction of a second, and at most 64 MiB on both sides.
//!
//! What is measured is what serves: the same calls, through the same pools. Of several rounds the quickest counts, which others on the
//! machine have disturbed least.

use std::time::Duration;

use super::policy::{Cost, PROBES, Point, Probe, ROW_BYTES, ROWS, Table, Way};
use super::{Clock, CudaDevice};
use crate::device::Device;
use crate::error::DeviceError;
use crate::layout::{Layout, pool_bytes};
use crate::pool::{HostMemory, L1Pool, L2Pool};
use crate::shape::{Attention, KvShape};
use crate::ticket::Ticket;
use crate::transfer::{Direction, PagePair, Transfer};

/// Layers of a transfer: two, so that one is asked for while the other is copied.
const LAYERS: u32 = 2;

/// Rounds that count; the one before them finds memory cold.
const ROUNDS: usize = 3;

/// Pages of the pools: as many as there are rows at most.
const PAGES: u32 = ROWS[ROWS.len() - 1] as u32;

/// Measures every way that can be gone.
///
/// # Errors
/// There is no memory for it, and the device lives on; or the device is dead.
pub(super) fn table(device: &CudaDevice, clock: Clock) -> Result<Table, DeviceError> {
    let mut table = Table::default();
    for row_bytes in ROW_BYTES {
        let pools = Pools::new(device, row_bytes)?;
        for point in Point::all().filter(|point| point.row_bytes() == row_bytes) {
            for probe in PROBES {
                if let Some(cost) = pools.cost(device, &point, probe, clock)? {
                    table.set(&point, probe, cost);
                }
            }
        }
    }
    Ok(table)
}

/// Whether the driver takes batches, which is not only a question of having the function.
///
/// # Errors
/// There is no memory to try it with, or the device is dead.
pub(super) fn takes_batches(device: &CudaDevice) -> Result<bool, DeviceError> {
    let pools = Pools::new(device, ROW_BYTES[0])?;
    let transfer = pools.transfer(2, Probe::Batch)?;
    device.try_batch(Direction::Load, &transfer)
}

struct Pools {
    l1: L1Pool,
    l2: L2Pool,
}

impl Pools {
    fn new(device: &CudaDevice, row_bytes: u64) -> Result<Pools, DeviceError> {
        let too_large = |_| DeviceError::NoMemory {
            what: "measuring the device",
            bytes: row_bytes,
        };
        let row_bytes = u32::try_from(row_bytes).unwrap_or(u32::MAX);
        let shape = KvShape::of_rows(Attention::Mla, LAYERS, row_bytes, 1).map_err(too_large)?;
        let memory = HostMemory::zeroed(pool_bytes(&shape, PAGES))?;
        Ok(Pools {
            l2: device.register(memory, Layout::PageFirstDirect, &shape, PAGES)?,
            l1: device.alloc_l1(&shape, PAGES)?,
        })
    }

    /// Pages that are all neighbours, or of which no two are: one pool's order is the other's turned round.
    fn transfer(&self, rows: u64, probe: Probe) -> Result<Transfer, DeviceError> {
        let rows = u32::try_from(rows).unwrap_or(PAGES).min(PAGES);
        let pairs = (0..rows).map(|page| PagePair {
            l1: match probe {
                Probe::Merged => page,
                Probe::Scattered | Probe::Batch | Probe::Kernel => rows - 1 - page,
            },
            l2: page,
        });
        // SAFETY: nobody else knows these pools, and each transfer is over before the next begins.
        unsafe { Transfer::new(&self.l1, &self.l2, pairs.collect()) }
    }

    fn cost(
        &self,
        device: &CudaDevice,
        point: &Point,
        probe: Probe,
        clock: Clock,
    ) -> Result<Option<Cost>, DeviceError> {
        let transfer = self.transfer(point.rows(), probe)?;
        let way = probe.way();
        if !device.can(way, point.direction, &transfer) {
            return Ok(None);
        }
        let mut best: Option<Cost> = None;
        for round in 0..=ROUNDS {
            let cost = once(device, point.direction, &transfer, way, clock)?;
            if round > 0 && best.is_none_or(|best| cost.elapsed_ns < best.elapsed_ns) {
                best = Some(cost);
            }
        }
        Ok(best)
    }
}

fn once(
    device: &CudaDevice,
    direction: Direction,
    transfer: &Transfer,
    way: Way,
    clock: Clock,
) -> Result<Cost, DeviceError> {
    let started = clock();
    let tickets = device.put(direction, transfer, way);
    let asked = clock();
    tickets.last().map_or(Ok(()), Ticket::wait)?;
    let done = clock();
    let nanoseconds = |until: Duration| {
        let nanoseconds = until.saturating_sub(started).as_nanos() / u128::from(LAYERS);
        u64::try_from(nanoseconds).unwrap_or(u64::MAX - 1)
    };
    Ok(Cost {
        elapsed_ns: nanoseconds(done),
        cpu_ns: nanoseconds(asked),
    })
}
