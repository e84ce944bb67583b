//! Chooses the way to copy a layer: the cheapest by a table measured on the device.
//!
//! The table holds the [`Cost`] of each way for each direction, row size and number of rows. For
//! other sizes, the nearest point on a logarithmic scale is used. Rows that are neighbours in both
//! pools are copied as one 2D copy. Separate copies are therefore measured twice, with no
//! neighbours and with all rows as neighbours; the cost in between is interpolated.
//!
//! The price of a way is the time of the layer plus half the CPU time. A scheduler thread spends
//! the CPU time before it launches the forward pass: it delays a forward pass that takes longer
//! than its load, and none that waits for its load. A kernel takes compute units away from the
//! forward pass, so its time counts [`KERNEL_PERCENT`] percent.
//!
//! Invariants: stores never use a kernel. Every chosen way is available. Separate copies are always
//! available.

use crate::kernel::SOURCE;
use crate::transfer::{Direction, Transfer};

/// The way in which the copies of a layer are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// One copy-engine call per copy: a plain copy, or a 2D copy of a run of pages.
    Copies,
    /// One copy-engine call for all rows, with one descriptor per row.
    Batch,
    /// One kernel for all rows. Loads only.
    Kernel,
}

/// All ways. Among ways of equal price the first is chosen: it uses the fewest shared resources.
pub const WAYS: [Way; 3] = [Way::Copies, Way::Batch, Way::Kernel];

/// Row sizes that are measured, in bytes.
pub const ROW_BYTES: [u64; 5] = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];

/// Row counts that are measured.
pub const ROWS: [u64; 4] = [4, 16, 64, 256];

/// Weight of a kernel's time, in percent. Beside busy compute, a load by kernel takes 6 to 20 %
/// longer, and the compute 1 to 2 % (H200, `examples/timeline.rs`).
pub const KERNEL_PERCENT: u64 = 110;

/// By published figures, rows of at least this many bytes use copy engines: on H100 the break-even
/// is between 28 and 64 KiB.
const COPIES_FROM_BYTES: u64 = 64 << 10;

/// Below this number of short rows, copy engines are used too: a launch and its page list cost as
/// much.
const KERNEL_FROM_SHORT: u64 = 16;

/// From this number of copies per layer on, a kernel is used for rows of any length. At about 2
/// microseconds per call, the published figure, the CPU would be slower than the link.
const KERNEL_FROM_COPIES: u64 = 64;

/// Calls of a load that a stream takes in any case while it waits for compute. When its queue is
/// full, the next call blocks: on an H200 after 1,021 calls, or 26,000 rows of batches.
const CALLS_MAX: u64 = 512;

/// Rows of batches, likewise.
const BATCHED_ROWS_MAX: u64 = 16_000;

/// Increases when the measurement or its encoding changes.
const VERSION: u8 = 2;

/// The work of one layer of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Bytes per row: the average length that is contiguous on both sides.
    pub row_bytes: u64,
    /// Number of rows.
    pub rows: u64,
    /// Number of calls as separate copies: at most one per row, and one in total if all rows are
    /// neighbours.
    pub copies: u64,
}

impl Work {
    /// One layer of this transfer.
    #[must_use]
    pub fn of(transfer: &Transfer) -> Work {
        let (mut bytes, mut rows, mut copies) = (0, 0, 0);
        for copy in transfer.copies(transfer.layers().start) {
            bytes += copy.rows.width * copy.rows.count;
            rows += copy.rows.count;
            copies += 1;
        }
        Work {
            row_bytes: bytes / rows.max(1),
            rows,
            copies,
        }
    }

    /// Whether a transfer of `layers` such layers may fill the queue of its stream by this way, so
    /// that its submission blocks. A kernel is one call.
    #[must_use]
    pub fn crowds_stream(&self, way: Way, layers: u32) -> bool {
        let layers = u64::from(layers);
        match way {
            Way::Copies => self.copies.saturating_mul(layers) > CALLS_MAX,
            Way::Batch => self.rows.saturating_mul(layers) > BATCHED_ROWS_MAX,
            Way::Kernel => false,
        }
    }
}

/// The cost of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Time of a layer among others of its transfer, in nanoseconds. At least `cpu_ns`.
    pub elapsed_ns: u64,
    /// CPU time of the submission, in nanoseconds.
    pub cpu_ns: u64,
}

/// The measurements of each point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Separate copies; no two rows are neighbours.
    Scattered,
    /// Separate copies; all rows are neighbours and form one 2D copy.
    Merged,
    /// A batch of rows; no two rows are neighbours.
    Batch,
    /// A kernel.
    Kernel,
}

/// All measurements.
pub const PROBES: [Probe; 4] = [Probe::Scattered, Probe::Merged, Probe::Batch, Probe::Kernel];

impl Probe {
    /// The way that this measurement covers.
    #[must_use]
    pub fn way(self) -> Way {
        match self {
            Probe::Scattered | Probe::Merged => Way::Copies,
            Probe::Batch => Way::Batch,
            Probe::Kernel => Way::Kernel,
        }
    }
}

/// A point of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Index into [`ROW_BYTES`].
    size: usize,
    /// Index into [`ROWS`].
    count: usize,
    /// The direction of the copy.
    pub direction: Direction,
}

const DIRECTIONS: [Direction; 2] = [Direction::Load, Direction::Store];
const POINTS: usize = ROW_BYTES.len() * ROWS.len() * DIRECTIONS.len();

impl Point {
    /// All points, grouped by row size.
    pub fn all() -> impl Iterator<Item = Point> {
        (0..POINTS).map(|index| Point {
            size: index / (ROWS.len() * DIRECTIONS.len()),
            count: index / DIRECTIONS.len() % ROWS.len(),
            direction: DIRECTIONS[index % DIRECTIONS.len()],
        })
    }

    fn nearest(direction: Direction, work: &Work) -> Point {
        Point {
            size: nearest(&ROW_BYTES, work.row_bytes),
            count: nearest(&ROWS, work.rows),
            direction,
        }
    }

    /// Bytes per row.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        ROW_BYTES[self.size]
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> u64 {
        ROWS[self.count]
    }

    fn index(&self) -> usize {
        let direction = usize::from(self.direction == Direction::Store);
        (self.size * ROWS.len() + self.count) * DIRECTIONS.len() + direction
    }
}

/// The index of the number with the smallest ratio to `number`, in either direction.
fn nearest(sorted: &[u64], number: u64) -> usize {
    let square = u128::from(number) * u128::from(number);
    sorted
        .windows(2)
        .take_while(|pair| u128::from(pair[0]) * u128::from(pair[1]) <= square)
        .count()
}

/// The cost of each way at each point, if it was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table(Vec<[Option<Cost>; PROBES.len()]>);

impl Default for Table {
    fn default() -> Table {
        Table(vec![[None; PROBES.len()]; POINTS])
    }
}

impl Table {
    /// Records a measurement.
    pub fn set(&mut self, point: &Point, probe: Probe, cost: Cost) {
        self.0[point.index()][probe as usize] = Some(cost);
    }

    /// The recorded measurement.
    #[must_use]
    pub fn get(&self, point: &Point, probe: Probe) -> Option<Cost> {
        self.0[point.index()][probe as usize]
    }

    /// Whether there are measurements of this kind.
    #[must_use]
    pub fn has(&self, probe: Probe) -> bool {
        self.0.iter().any(|costs| costs[probe as usize].is_some())
    }

    /// The cheapest available way.
    #[must_use]
    pub fn choose(&self, direction: Direction, work: &Work, can: impl Fn(Way) -> bool) -> Way {
        let point = Point::nearest(direction, work);
        let prices = WAYS.into_iter().filter_map(|way| {
            let price = self.price(&point, work, way)?;
            can(way).then_some((way, price))
        });
        prices
            .min_by_key(|(_, price)| *price)
            .map_or(Way::Copies, |(way, _)| way)
    }

    fn price(&self, point: &Point, work: &Work, way: Way) -> Option<u64> {
        let price = |probe| self.get(point, probe).map(|cost| price(probe, cost));
        match way {
            Way::Batch => price(Probe::Batch),
            Way::Kernel => price(Probe::Kernel),
            Way::Copies => {
                let (merged, scattered) = (price(Probe::Merged)?, price(Probe::Scattered)?);
                let (calls, most) = (work.copies.saturating_sub(1), work.rows.saturating_sub(1));
                let dearer = u128::from(scattered.saturating_sub(merged));
                let share = dearer * u128::from(calls) / u128::from(most.max(1));
                Some(merged.saturating_add(u64::try_from(share).unwrap_or(u64::MAX)))
            }
        }
    }

    /// The cache file name. It contains everything that the table depends on: `device` is the UUID
    /// of the device, `driver` the version of the driver.
    #[must_use]
    pub fn name(device: &[u8; 16], driver: i32) -> String {
        let mut stamp = blake3::Hasher::new();
        stamp.update(&[VERSION]).update(SOURCE.as_bytes());
        for number in ROW_BYTES.iter().chain(&ROWS) {
            stamp.update(&number.to_le_bytes());
        }
        let device: String = device.iter().map(|byte| format!("{byte:02x}")).collect();
        let stamp = stamp.finalize().to_hex();
        format!("policy-{device}-driver-{driver}-{}", &stamp[..16])
    }

    /// The encoding used in the cache.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let costs = self.0.iter().flatten();
        let numbers = costs.flat_map(|cost| match cost {
            Some(cost) => [cost.elapsed_ns, cost.cpu_ns],
            None => [u64::MAX; 2],
        });
        numbers.flat_map(u64::to_le_bytes).collect()
    }

    /// Returns `None` if the bytes are not a valid table.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Table> {
        let mut table = Table::default();
        let (numbers, rest) = bytes.as_chunks::<8>();
        let (pairs, one) = numbers.as_chunks::<2>();
        if pairs.len() != POINTS * PROBES.len() || !rest.is_empty() || !one.is_empty() {
            return None;
        }
        for (cost, [elapsed, cpu]) in table.0.iter_mut().flatten().zip(pairs) {
            let (elapsed_ns, cpu_ns) = (u64::from_le_bytes(*elapsed), u64::from_le_bytes(*cpu));
            *cost = (elapsed_ns != u64::MAX).then_some(Cost { elapsed_ns, cpu_ns });
        }
        Some(table)
    }
}

fn price(probe: Probe, cost: Cost) -> u64 {
    let percent = match probe {
        Probe::Kernel => KERNEL_PERCENT,
        Probe::Scattered | Probe::Merged | Probe::Batch => 100,
    };
    let elapsed = cost.elapsed_ns / 100 * percent + cost.elapsed_ns % 100 * percent / 100;
    elapsed.saturating_add(cost.cpu_ns / 2)
}

/// The way recommended by published figures, used without measurements.
#[must_use]
pub fn published(direction: Direction, work: &Work, can: impl Fn(Way) -> bool) -> Way {
    let short = work.row_bytes < COPIES_FROM_BYTES && work.copies >= KERNEL_FROM_SHORT;
    let better = short || work.copies >= KERNEL_FROM_COPIES || !can(Way::Copies);
    if direction == Direction::Load && better && can(Way::Kernel) {
        return Way::Kernel;
    }
    if work.copies > 1 && can(Way::Batch) {
        return Way::Batch;
    }
    Way::Copies
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A table in which each way costs the same at all points. Order: scattered, merged, batch,
    /// kernel.
    fn table(elapsed: [u64; 4], cpu: [u64; 4]) -> Table {
        let mut table = Table::default();
        for point in Point::all() {
            for (probe, (elapsed_ns, cpu_ns)) in
                PROBES.into_iter().zip(std::iter::zip(elapsed, cpu))
            {
                table.set(&point, probe, Cost { elapsed_ns, cpu_ns });
            }
        }
        table
    }

    fn work(rows: u64, copies: u64) -> Work {
        Work {
            row_bytes: 32 << 10,
            rows,
            copies,
        }
    }

    fn chosen(table: &Table, work: &Work) -> Way {
        table.choose(Direction::Load, work, |_| true)
    }

    #[test]
    fn the_cheapest_way_is_chosen_and_cpu_time_counts() {
        let scattered = work(64, 64);
        let quick = table([900, 900, 800, 700], [0; 4]);
        assert_eq!(chosen(&quick, &scattered), Way::Kernel);
        let costly = table([900, 900, 800, 700], [0, 0, 0, 80]);
        assert_eq!(chosen(&costly, &scattered), Way::Batch);
        let costlier = table([900, 900, 800, 700], [0, 0, 250, 400]);
        assert_eq!(chosen(&costlier, &scattered), Way::Copies);
        // A kernel of equal speed would disturb the forward pass.
        let equal = table([1000, 1000, 1000, 910], [0; 4]);
        assert_eq!(chosen(&equal, &scattered), Way::Copies);
    }

    #[test]
    fn an_unavailable_way_is_never_chosen_however_cheap() {
        let table = table([900, 900, 800, 1], [0; 4]);
        let can = |way| way != Way::Kernel;
        let way = table.choose(Direction::Load, &work(64, 64), can);
        assert_eq!(way, Way::Batch);
        assert_eq!(
            table.choose(Direction::Load, &work(64, 64), |_| false),
            Way::Copies
        );
        assert_eq!(
            Table::default().choose(Direction::Load, &work(64, 64), |_| true),
            Way::Copies
        );
    }

    #[test]
    fn the_cost_of_separate_copies_depends_on_their_number() {
        // 1000 for one call, 6100 for 52.
        let table = table([6100, 1000, 2000, 9000], [0; 4]);
        let at = |copies| chosen(&table, &work(52, copies));
        assert_eq!([at(1), at(10), at(11)], [Way::Copies; 3]);
        assert_eq!([at(12), at(52)], [Way::Batch; 2]);
    }

    #[test]
    fn each_transfer_is_looked_up_at_the_nearest_point() {
        let near = |row_bytes, rows| {
            let work = Work {
                row_bytes,
                rows,
                copies: rows,
            };
            let point = Point::nearest(Direction::Store, &work);
            (point.row_bytes() >> 10, point.rows())
        };
        assert_eq!(near(1, 1), (4, 4));
        assert_eq!(near(8 << 10, 8), (16, 16));
        assert_eq!(near((8 << 10) - 1, 7), (4, 4));
        assert_eq!(near(72 << 10, 31), (64, 16));
        assert_eq!(near(u64::MAX, u64::MAX), (128, 256));
        let all: Vec<Point> = Point::all().collect();
        assert!(
            all.iter()
                .enumerate()
                .all(|(at, point)| point.index() == at)
        );
    }

    #[test]
    fn a_table_decodes_from_its_own_bytes_only() {
        let mut table = table([1, 2, 3, 4], [5, 6, 7, 8]);
        table.0[7][3] = None;
        let bytes = table.to_bytes();
        assert_eq!(Table::from_bytes(&bytes), Some(table));
        assert_eq!(Table::from_bytes(&bytes[1..]), None);
        assert_eq!(Table::from_bytes(&bytes[16..]), None);
        assert_eq!(Table::from_bytes(&[&bytes[..], &[0; 16]].concat()), None);
        assert_eq!(Table::from_bytes(&[]), None);
    }

    #[test]
    fn tables_of_other_devices_and_drivers_have_other_names() {
        let name = Table::name(&[1; 16], 13_000);
        assert_ne!(name, Table::name(&[2; 16], 13_000));
        assert_ne!(name, Table::name(&[1; 16], 13_010));
    }

    #[test]
    fn a_load_that_may_fill_its_stream_is_one_of_many_calls() {
        let crowds = |way, rows, copies, layers| {
            let work = Work {
                row_bytes: 128 << 10,
                rows,
                copies,
            };
            work.crowds_stream(way, layers)
        };
        assert!(!crowds(Way::Batch, 500, 500, 32) && crowds(Way::Batch, 501, 501, 32));
        assert!(!crowds(Way::Copies, 500, 16, 32) && crowds(Way::Copies, 500, 17, 32));
        assert!(!crowds(Way::Kernel, u64::MAX, u64::MAX, u32::MAX));
        assert!(crowds(Way::Batch, u64::MAX, 1, u32::MAX));
    }

    #[test]
    fn published_figures_load_many_or_short_copies_by_kernel() {
        let way = |direction, row_bytes, copies, without: Option<Way>| {
            let work = Work {
                row_bytes,
                rows: copies,
                copies,
            };
            published(direction, &work, |way| Some(way) != without)
        };
        let load = |row_bytes, copies| way(Direction::Load, row_bytes, copies, None);
        assert_eq!(load(32 << 10, 16), Way::Kernel);
        assert_eq!(load(32 << 10, 15), Way::Batch);
        assert_eq!(load(64 << 10, 63), Way::Batch);
        assert_eq!(load(64 << 10, 64), Way::Kernel);
        assert_eq!(load(64 << 10, 1), Way::Copies);
        assert_eq!(way(Direction::Store, 4 << 10, 512, None), Way::Batch);
        let batch = Some(Way::Batch);
        assert_eq!(way(Direction::Load, 64 << 10, 63, batch), Way::Copies);
        assert_eq!(way(Direction::Store, 4 << 10, 512, batch), Way::Copies);
        let copies = Some(Way::Copies);
        assert_eq!(way(Direction::Load, 64 << 10, 63, copies), Way::Kernel);
        let none = work(512, 512);
        assert_eq!(published(Direction::Load, &none, |_| false), Way::Copies);
    }
}
