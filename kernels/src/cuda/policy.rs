//! Which way the copies of a layer go: the one that costs least by a table measured on the device.
//!
//! The table holds, for each direction, size of a row and number of rows, what each way takes ([`Cost`]). Where rows lie between its
//! points the nearest one is asked, on a scale of ratios. Rows that are neighbours in both pools go as one 2D copy, so that these are
//! measured twice, with no neighbours and with nothing but neighbours, and what lies between costs in between.
//!
//! The price of a way is the time until the layer is there and the CPU's time on top, since a scheduler's thread spends it. A kernel
//! takes compute units away from the forward: its time counts [`KERNEL_PERCENT`] percent.
//!
//! Invariants: stores never go by kernel; every way that is chosen is one that can be gone; copies of their own always can.

use crate::kernel::SOURCE;
use crate::transfer::{Direction, Transfer};

/// How the copies of a layer go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each by a call of its own to the copy engines: a plain copy, or a 2D copy of a run of pages.
    Copies,
    /// All by one call to the copy engines, a descriptor a row.
    Batch,
    /// All by one kernel. Loads only.
    Kernel,
}

/// All of them; of equals the first is taken, which leaves most alone.
pub const WAYS: [Way; 3] = [Way::Copies, Way::Batch, Way::Kernel];

/// Sizes of rows that are measured, in bytes.
pub const ROW_BYTES: [u64; 5] = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];

/// Numbers of rows that are measured.
pub const ROWS: [u64; 4] = [4, 16, 64, 256];

/// What a kernel's time counts, in percent.
pub const KERNEL_PERCENT: u64 = 105;

/// By published figures, rows from this many bytes on go by copy engine: on H100 the break-even is between 28 and 64 KiB.
const COPIES_FROM_BYTES: u64 = 64 << 10;

/// Fewer short rows than this go by copy engine too: a launch and its page list cost as much.
const KERNEL_FROM_SHORT: u64 = 16;

/// Copies from this many a layer on go by kernel, however long their rows: at about 2 microseconds a call, the figure that others have
/// published, the CPU would be slower than the link.
const KERNEL_FROM_COPIES: u64 = 64;

/// Goes up when what is measured, or how it is written down, is another.
const VERSION: u8 = 1;

/// What one layer of a transfer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Bytes of a row: what lies together on both sides, on average.
    pub row_bytes: u64,
    /// Rows.
    pub rows: u64,
    /// Calls that they take as copies of their own: at most one a row, one for all where all are neighbours.
    pub copies: u64,
}

impl Work {
    /// A layer of this transfer.
    #[must_use]
    pub fn of(transfer: &Transfer) -> Work {
        let (mut bytes, mut rows, mut copies) = (0, 0, 0);
        for copy in transfer.copies(0) {
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
}

/// What one layer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Until it is there, from the moment at which it is asked for, in nanoseconds.
    pub elapsed_ns: u64,
    /// Until it has been asked for: the CPU's time, in nanoseconds.
    pub cpu_ns: u64,
}

/// What is measured at each point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Copies of their own, no two of them neighbours.
    Scattered,
    /// Copies of their own, all of them neighbours: one 2D copy.
    Merged,
    /// A batch of rows, no two of them neighbours.
    Batch,
    /// A kernel.
    Kernel,
}

/// All of them.
pub const PROBES: [Probe; 4] = [Probe::Scattered, Probe::Merged, Probe::Batch, Probe::Kernel];

impl Probe {
    /// The way that it measures.
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
    /// Which way it goes.
    pub direction: Direction,
}

const DIRECTIONS: [Direction; 2] = [Direction::Load, Direction::Store];
const POINTS: usize = ROW_BYTES.len() * ROWS.len() * DIRECTIONS.len();

impl Point {
    /// All points, those with rows of one size together.
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

    /// Bytes of a row.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        ROW_BYTES[self.size]
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> u64 {
        ROWS[self.count]
    }

    fn index(&self) -> usize {
        let direction = usize::from(self.direction == Direction::Store);
        (self.size * ROWS.len() + self.count) * DIRECTIONS.len() + direction
    }
}

/// The index of the number that is the fewest times larger or smaller.
fn nearest(sorted: &[u64], number: u64) -> usize {
    let square = u128::from(number) * u128::from(number);
    sorted
        .windows(2)
        .take_while(|pair| u128::from(pair[0]) * u128::from(pair[1]) <= square)
        .count()
}

/// What each way costs at each point, if it was measured there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table(Vec<[Option<Cost>; PROBES.len()]>);

impl Default for Table {
    fn default() -> Table {
        Table(vec![[None; PROBES.len()]; POINTS])
    }
}

impl Table {
    /// Writes down what was measured.
    pub fn set(&mut self, point: &Point, probe: Probe, cost: Cost) {
        self.0[point.index()][probe as usize] = Some(cost);
    }

    /// What was measured.
    #[must_use]
    pub fn get(&self, point: &Point, probe: Probe) -> Option<Cost> {
        self.0[point.index()][probe as usize]
    }

    /// The cheapest way of those that can be gone.
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

    /// Its name in the cache: what it depends on. `device` is the device's UUID, `driver` the driver's version.
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

    /// As it is kept.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let costs = self.0.iter().flatten();
        let numbers = costs.flat_map(|cost| match cost {
            Some(cost) => [cost.elapsed_ns, cost.cpu_ns],
            None => [u64::MAX; 2],
        });
        numbers.flat_map(u64::to_le_bytes).collect()
    }

    /// None where these are not the bytes of a table.
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
    elapsed.saturating_add(cost.cpu_ns)
}

/// The way that published figures speak for, where nothing was measured.
#[must_use]
pub fn published(direction: Direction, work: &Work, can: impl Fn(Way) -> bool) -> Way {
    let short = work.row_bytes < COPIES_FROM_BYTES && work.copies >= KERNEL_FROM_SHORT;
    let better = short || work.copies >= KERNEL_FROM_COPIES;
    if direction == Direction::Load && better && can(Way::Kernel) {
        return Way::Kernel;
    }
    Way::Copies
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A table in which each way takes so long everywhere: scattered, merged, batch, kernel.
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
    fn the_cheapest_way_is_taken_and_the_time_of_the_cpu_counts() {
        let scattered = work(64, 64);
        let quick = table([900, 900, 800, 700], [0; 4]);
        assert_eq!(chosen(&quick, &scattered), Way::Kernel);
        let costly = table([900, 900, 800, 700], [0, 0, 0, 150]);
        assert_eq!(chosen(&costly, &scattered), Way::Batch);
        let costlier = table([900, 900, 800, 700], [0, 0, 200, 400]);
        assert_eq!(chosen(&costlier, &scattered), Way::Copies);
        // A kernel that is as fast is in the forward's way.
        let equal = table([1000, 1000, 1000, 960], [0; 4]);
        assert_eq!(chosen(&equal, &scattered), Way::Copies);
    }

    #[test]
    fn a_way_that_cannot_be_gone_is_not_taken_however_cheap() {
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
    fn copies_of_their_own_cost_by_how_many_there_are() {
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
    fn a_table_comes_back_from_its_bytes_and_from_no_others() {
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
    fn by_published_figures_many_or_short_copies_are_loaded_by_kernel() {
        let way = |direction, row_bytes, copies| {
            let work = Work {
                row_bytes,
                rows: copies,
                copies,
            };
            published(direction, &work, |_| true)
        };
        assert_eq!(way(Direction::Load, 32 << 10, 16), Way::Kernel);
        assert_eq!(way(Direction::Load, 32 << 10, 15), Way::Copies);
        assert_eq!(way(Direction::Load, 64 << 10, 63), Way::Copies);
        assert_eq!(way(Direction::Load, 64 << 10, 64), Way::Kernel);
        assert_eq!(way(Direction::Store, 4 << 10, 512), Way::Copies);
        let none = work(512, 512);
        assert_eq!(published(Direction::Load, &none, |_| false), Way::Copies);
    }
}
