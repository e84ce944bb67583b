//! The virtual clock, with the interface of `std::time`.

use std::cell::Cell;
use std::ops::{Add, AddAssign, Sub, SubAssign};
pub use std::time::Duration;

/// The first moment of a world: late enough that a day can be subtracted.
pub(crate) const BEGIN: Instant = Instant(1 << 50);

thread_local! {
    /// The present moment of this thread's world, which alone moves it.
    static NOW: Cell<Instant> = const { Cell::new(BEGIN) };
}

/// Moves the clock.
pub(crate) fn set_clock(now: Instant) {
    NOW.set(now);
}

/// The clocks of a machine beside the virtual one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clocks {
    /// The time of day is so many milliseconds ahead of the virtual clock.
    pub ahead_ms: i64,
    /// The machine has slept for so many milliseconds, in which the virtual clock stood still.
    pub asleep_ms: u64,
    /// A time service keeps the time of day right.
    pub is_synchronised: bool,
}

thread_local! {
    static CLOCKS: Cell<Clocks> = const { Cell::new(Clocks::NEW) };
}

impl Clocks {
    /// Those of a new machine.
    pub(crate) const NEW: Clocks = Clocks {
        ahead_ms: 0,
        asleep_ms: 0,
        is_synchronised: false,
    };

    /// The clocks of this thread's machine.
    #[must_use]
    pub fn get() -> Clocks {
        CLOCKS.get()
    }

    /// Sets the clocks of this thread's machine.
    pub fn set(self) {
        CLOCKS.set(self);
    }
}

/// A moment of the virtual clock, in nanoseconds. A world begins long after moment zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub(crate) u64);

/// Nanoseconds of a duration.
///
/// # Panics
/// If they do not fit 64 bits (580 years).
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("a duration beyond 64 bits of nanoseconds")
}

impl Instant {
    /// The present moment.
    #[must_use]
    pub fn now() -> Instant {
        NOW.get()
    }

    /// The time since this moment.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Instant::now().saturating_duration_since(*self)
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    #[must_use]
    pub fn duration_since(&self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    #[must_use]
    pub fn saturating_duration_since(&self, earlier: Instant) -> Duration {
        self.duration_since(earlier)
    }

    /// The moment a duration later, if it can be represented.
    #[must_use]
    pub fn checked_add(&self, duration: Duration) -> Option<Instant> {
        let duration = u64::try_from(duration.as_nanos()).ok()?;
        self.0.checked_add(duration).map(Instant)
    }

    /// The moment a duration earlier, if it can be represented.
    #[must_use]
    pub fn checked_sub(&self, duration: Duration) -> Option<Instant> {
        let duration = u64::try_from(duration.as_nanos()).ok()?;
        self.0.checked_sub(duration).map(Instant)
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, duration: Duration) -> Instant {
        let sum = self.0.checked_add(nanoseconds(duration));
        Instant(sum.expect("a moment beyond the end of the clock"))
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;

    fn sub(self, duration: Duration) -> Instant {
        let difference = self.0.checked_sub(nanoseconds(duration));
        Instant(difference.expect("a moment before the begin of the clock"))
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Instant) -> Duration {
        self.duration_since(earlier)
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl SubAssign<Duration> for Instant {
    fn sub_assign(&mut self, duration: Duration) {
        *self = *self - duration;
    }
}
