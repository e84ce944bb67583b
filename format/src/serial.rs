//! Run numbers and serials: what orders everything in a store.
//!
//! Each open of a store takes the next [`Run`]. Within it, births, commits and segment sequences are drawn from one
//! growing [`Serial`], the run in its top 24 bits and a counter in its low 40. So a page's birth is below the commit
//! of the group that carries it, every serial of a later run is above every one of an earlier run, and a delete
//! kills exactly the births below its own.
//!
//! A crash cannot make a serial appear twice: the run is on disk, synced, before the first serial of it is drawn.
//! Running out is a value (`None`), never a wrap-around: a store outlives 16 million opens, and a run a million
//! million serials.

use std::fmt;

const RUN_BITS: u32 = 24;
const COUNTER_BITS: u32 = 40;
const COUNTER_MAX: u64 = (1 << COUNTER_BITS) - 1;
const RUN_MAX: u32 = (1 << RUN_BITS) - 1;

const _: () = assert!(RUN_BITS + COUNTER_BITS == u64::BITS);

/// One opening of a store, counted from 1. At most 2^24 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run(u32);

impl Run {
    /// No run: the run of [`Serial::ZERO`]. Never a store's.
    pub const ZERO: Run = Run(0);
    /// The run that creates a store.
    pub const FIRST: Run = Run(1);

    /// `None` above 2^24 - 1.
    #[must_use]
    pub const fn new(run: u32) -> Option<Run> {
        if run <= RUN_MAX { Some(Run(run)) } else { None }
    }

    /// The run as a number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The run after this one; `None` when the store has been opened 2^24 - 1 times.
    #[must_use]
    pub const fn next(self) -> Option<Run> {
        Run::new(self.0.saturating_add(1))
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A point in the life of a store: run and counter. Shown as `run.counter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Serial(u64);

impl Serial {
    /// Before everything: "none yet".
    pub const ZERO: Serial = Serial(0);
    /// After everything.
    pub const MAX: Serial = Serial(u64::MAX);

    /// The lowest serial of a run (counter 0): above all serials of earlier runs.
    #[must_use]
    pub const fn first_of(run: Run) -> Serial {
        Serial((run.0 as u64) << COUNTER_BITS)
    }

    /// The run it was drawn in; [`Run::ZERO`] for [`Serial::ZERO`].
    #[must_use]
    pub const fn run(self) -> Run {
        Run((self.0 >> COUNTER_BITS) as u32)
    }

    /// Its place within the run, below 2^40.
    #[must_use]
    pub const fn counter(self) -> u64 {
        self.0 & COUNTER_MAX
    }

    /// The serial after this one in the same run; `None` when the counter is exhausted: the run must then be ended
    /// by opening the store again.
    #[must_use]
    pub const fn next(self) -> Option<Serial> {
        if self.counter() < COUNTER_MAX {
            Some(Serial(self.0.wrapping_add(1)))
        } else {
            None
        }
    }

    /// As it lies on disk.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// From what lies on disk. Any value is a serial; whether one belongs where it stands is checked by the
    /// structure that holds it.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Serial {
        Serial(raw)
    }

    /// Whether a store can have drawn it: runs start at 1.
    pub(crate) const fn is_drawn(self) -> bool {
        self.run().0 != 0
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.run(), self.counter())
    }
}
