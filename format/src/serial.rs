//! Epochs ([`Run`]) and serial numbers: the order of all events in a store.
//!
//! Each open of a store starts the next epoch. Within an epoch, versions, commits and segment
//! generations are drawn from one increasing [`Serial`], with the epoch in its top 24 bits and a
//! counter in its low 40. Therefore the version of a page is below the commit of the group that
//! contains it, every serial of a later epoch is above every serial of an earlier epoch, and a
//! tombstone deletes exactly the versions below its own.
//!
//! A crash cannot make a serial appear twice: the epoch is persisted before its first serial is
//! drawn. Exhaustion is a value (`None`), never a wrap-around. The limits are 16 million opens per
//! store and 2^40 serials per epoch.

use std::fmt;

const RUN_BITS: u32 = 24;
const COUNTER_BITS: u32 = 40;
const COUNTER_MAX: u64 = (1 << COUNTER_BITS) - 1;
const RUN_MAX: u32 = (1 << RUN_BITS) - 1;

const _: () = assert!(RUN_BITS + COUNTER_BITS == u64::BITS);

/// An epoch: one open of a store, counted from 1. At most 2^24 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run(u32);

impl Run {
    /// No epoch: the epoch of [`Serial::ZERO`]. No store ever has it.
    pub const ZERO: Run = Run(0);
    /// The epoch that creates a store.
    pub const FIRST: Run = Run(1);

    /// `None` above 2^24 - 1.
    #[must_use]
    pub const fn new(run: u32) -> Option<Run> {
        if run <= RUN_MAX { Some(Run(run)) } else { None }
    }

    /// The epoch as a number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The next epoch; `None` after 2^24 - 1 opens of the store.
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

/// A point in the history of a store: epoch and counter. Shown as `run.counter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Serial(u64);

impl Serial {
    /// Below all serials: "none yet".
    pub const ZERO: Serial = Serial(0);
    /// Above all serials.
    pub const MAX: Serial = Serial(u64::MAX);

    /// The lowest serial of an epoch (counter 0): above all serials of earlier epochs.
    #[must_use]
    pub const fn first_of(run: Run) -> Serial {
        Serial((run.0 as u64) << COUNTER_BITS)
    }

    /// The epoch of the serial; [`Run::ZERO`] for [`Serial::ZERO`].
    #[must_use]
    pub const fn run(self) -> Run {
        Run((self.0 >> COUNTER_BITS) as u32)
    }

    /// The counter within the epoch, below 2^40.
    #[must_use]
    pub const fn counter(self) -> u64 {
        self.0 & COUNTER_MAX
    }

    /// The next serial of the same epoch; `None` if the counter is exhausted. The store must then
    /// be opened again to start a new epoch.
    #[must_use]
    pub const fn next(self) -> Option<Serial> {
        if self.counter() < COUNTER_MAX {
            Some(Serial(self.0.wrapping_add(1)))
        } else {
            None
        }
    }

    /// The raw value, as stored on disk.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// From the raw value on disk. Any value is a serial; the structure that contains it checks
    /// whether it is allowed there.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Serial {
        Serial(raw)
    }

    /// Whether a store can have drawn this serial: epochs start at 1.
    pub(crate) const fn is_drawn(self) -> bool {
        self.run().0 != 0
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.run(), self.counter())
    }
}
