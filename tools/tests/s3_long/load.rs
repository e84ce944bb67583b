//! A load of puts and gets of local pages, and its times.

use std::time::{Duration, Instant};

use crate::home::EVEN;
use crate::node::Node;
use crate::support::chain;

/// Time between the begins of two steps. A load at a fixed rate: its times show whether calls wait,
/// not how much of the processors the other processes leave.
const STEP: Duration = Duration::from_millis(50);

/// Time of one slice, which has one median for puts and one for gets.
const SLICE: Duration = Duration::from_secs(5);

/// Pages of a step's put, and of its get.
const PAGES: u64 = 4;

/// Seed of the chain that gets read. Chains of puts have the ones above it.
const READ: u64 = 1000;

/// The median times of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    pub put: Duration,
    pub get: Duration,
}

pub struct Load<'a> {
    node: &'a Node,
    steps: u64,
}

impl<'a> Load<'a> {
    pub fn new(node: &'a Node) -> Load<'a> {
        node.put(EVEN, &chain(READ, PAGES));
        Load { node, steps: 0 }
    }

    /// Runs so many slices. `beside` runs between the slices, and is not measured.
    pub fn slices(&mut self, number: usize, mut beside: impl FnMut()) -> Vec<Slice> {
        let slice = |_| {
            let slice = self.slice();
            beside();
            slice
        };
        (0..number).map(slice).collect()
    }

    fn slice(&mut self) -> Slice {
        let (begin, mut puts, mut gets) = (Instant::now(), Vec::new(), Vec::new());
        while begin.elapsed() < SLICE {
            self.steps += 1;
            let (step, new) = (Instant::now(), chain(READ + self.steps, PAGES));
            self.node.put(EVEN, &new);
            puts.push(step.elapsed());
            let get = Instant::now();
            assert_eq!(
                self.node.read(EVEN, &chain(READ, PAGES)),
                [true; PAGES as usize]
            );
            gets.push(get.elapsed());
            // The rate is a part of the load.
            std::thread::sleep(STEP.saturating_sub(step.elapsed()));
        }
        Slice {
            put: median(puts),
            get: median(gets),
        }
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// The median of the ratios of pairs, and the interval that has the true one in 96 of 100 cases:
/// from the third lowest to the third highest of twelve.
#[derive(Clone, Copy, Debug)]
pub struct Paired {
    pub median: f64,
    pub from: f64,
    pub to: f64,
}

pub const PAIRS: usize = 12;

/// The ratios of `that` to `this`.
pub fn paired(this: &[Slice], that: &[Slice], of: impl Fn(&Slice) -> Duration) -> Paired {
    let pairs = this.iter().zip(that);
    let ratio = |(this, that)| of(that).as_secs_f64() / of(this).as_secs_f64();
    let mut ratios: Vec<f64> = pairs.map(ratio).collect();
    assert_eq!(ratios.len(), PAIRS);
    ratios.sort_unstable_by(f64::total_cmp);
    Paired {
        median: f64::midpoint(ratios[PAIRS / 2 - 1], ratios[PAIRS / 2]),
        from: ratios[2],
        to: ratios[PAIRS - 3],
    }
}
