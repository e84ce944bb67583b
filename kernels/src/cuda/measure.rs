//! Measures the policy table when a device is opened. This takes a fraction of a second and at most
//! 64 MiB on both sides.
//!
//! The measurement uses the same calls and the same pool types as normal operation. The minimum
//! over several rounds counts, because it is least disturbed by other load on the machine.
//!
//! A layer of a transfer is submitted while its predecessor is copied. So the cost of a layer is
//! the difference between a transfer of twice the layers and one alone: the latency of the first
//! layer, which includes its submission, and the page list of the kernel are in both.

use std::time::Duration;

use super::CudaDevice;
use super::options::Clock;
use super::policy::{Cost, PROBES, Point, Probe, ROW_BYTES, ROWS, Table, Way};
use crate::device::Device;
use crate::error::DeviceError;
use crate::layout::{Layout, pool_bytes};
use crate::pool::{HostMemory, L1Pool, L2Pool};
use crate::shape::{Attention, KvShape};
use crate::ticket::Ticket;
use crate::transfer::{Direction, PagePair, Transfer};

/// Layers of a transfer.
const LAYERS: u32 = 2;

/// Measured rounds. One warm-up round runs before them, because memory is cold.
const ROUNDS: usize = 3;

/// Pages of the pools: the maximum number of rows.
const PAGES: u32 = ROWS[ROWS.len() - 1] as u32;

/// Measures every available way.
///
/// # Errors
/// There is not enough memory, and the device stays usable; or the device is dead.
pub(super) fn table(device: &CudaDevice, clock: Clock) -> Result<Table, DeviceError> {
    let mut table = Table::default();
    for row_bytes in ROW_BYTES {
        let pools = Pools::new(device, row_bytes, PAGES)?;
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

/// Whether the driver accepts batches. The presence of the function alone does not prove it.
///
/// # Errors
/// There is not enough memory for the test, or the device is dead.
pub(super) fn takes_batches(device: &CudaDevice) -> Result<bool, DeviceError> {
    let pages = 2;
    let pools = Pools::new(device, ROW_BYTES[0], pages)?;
    let transfer = pools.transfer(pages.into(), Probe::Batch)?;
    device.try_batch(Direction::Load, &transfer)
}

struct Pools {
    l1: L1Pool,
    l2: L2Pool,
}

impl Pools {
    fn new(device: &CudaDevice, row_bytes: u64, pages: u32) -> Result<Pools, DeviceError> {
        let too_large = |_| DeviceError::NoMemory {
            what: "measuring the device",
            bytes: row_bytes,
        };
        let row_bytes = u32::try_from(row_bytes).unwrap_or(u32::MAX);
        let shape = KvShape::of_rows(Attention::Mla, LAYERS, row_bytes, 1).map_err(too_large)?;
        let memory = HostMemory::zeroed(pool_bytes(&shape, pages))?;
        Ok(Pools {
            l2: device.register(memory, Layout::PageFirstDirect, &shape, pages)?,
            l1: device.alloc_l1(&shape, pages)?,
        })
    }

    /// A transfer whose pages are either all neighbours, or no two of them are neighbours. For the
    /// latter, the page order of one pool is the reverse of the other's.
    fn transfer(&self, rows: u64, probe: Probe) -> Result<Transfer, DeviceError> {
        let rows = u32::try_from(rows).unwrap_or(PAGES).min(PAGES);
        let pairs = (0..rows).map(|page| PagePair {
            l1: match probe {
                Probe::Merged => page,
                Probe::Scattered | Probe::Batch | Probe::Kernel => rows - 1 - page,
            },
            l2: page,
        });
        // SAFETY: no other code uses these pools, and each transfer is over before the next begins.
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
        let unknown = Cost {
            elapsed_ns: u64::MAX,
            cpu_ns: u64::MAX,
        };
        let mut least = [unknown; 2];
        for round in 0..=ROUNDS {
            for (count, least) in (1..).zip(&mut least) {
                let cost = once(device, point.direction, &transfer, way, clock, count)?;
                if round > 0 {
                    least.elapsed_ns = least.elapsed_ns.min(cost.elapsed_ns);
                    least.cpu_ns = least.cpu_ns.min(cost.cpu_ns);
                }
            }
        }
        let [one, two] = least;
        let per_layer = |total: u64| total / u64::from(LAYERS);
        let cpu_ns = per_layer(two.cpu_ns.saturating_sub(one.cpu_ns));
        // No layer is faster than its submission.
        let elapsed_ns = per_layer(two.elapsed_ns.saturating_sub(one.elapsed_ns)).max(cpu_ns);
        Ok(Some(Cost { elapsed_ns, cpu_ns }))
    }
}

/// The cost of all layers, each `count` times, of a transfer.
fn once(
    device: &CudaDevice,
    direction: Direction,
    transfer: &Transfer,
    way: Way,
    clock: Clock,
    count: usize,
) -> Result<Cost, DeviceError> {
    let started = clock();
    let tickets = device.put_often(direction, transfer, way, count);
    let asked = clock();
    tickets.last().map_or(Ok(()), Ticket::wait)?;
    let done = clock();
    let nanoseconds = |until: Duration| {
        let nanoseconds = until.saturating_sub(started).as_nanos();
        u64::try_from(nanoseconds).unwrap_or(u64::MAX - 1)
    };
    Ok(Cost {
        elapsed_ns: nanoseconds(done),
        cpu_ns: nanoseconds(asked),
    })
}
