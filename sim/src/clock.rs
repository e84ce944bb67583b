//! The clock of a run, and its jumps. The core treats a step back as a clock that stands still. It
//! accepts any jump forward.

use crate::classes::Class;
use crate::world::World;

/// Jumps of the clock, in milliseconds: an hour, a month, a century.
const LEAPS_MS: [u64; 3] = [3_600_000, 2_592_000_000, 3_155_760_000_000];

/// Longest step back, in milliseconds.
const BACK_MS_MAX: u64 = 5_000;

/// Longest time for which the clock stands still, in steps.
const FROZEN_STEPS_MAX: u64 = 200;

impl World {
    /// The clock may jump between two steps.
    pub fn disturb_clock(&mut self) {
        let faults = &self.setup.faults;
        let (forward, back, frozen) =
            (faults.clock_forward, faults.clock_back, faults.clock_frozen);
        if self.strikes(Class::ClockForward, forward) {
            self.now_ms = self.now_ms.saturating_add(self.dice.pick(&LEAPS_MS));
        }
        if self.strikes(Class::ClockBack, back) {
            let step = self.dice.between(1, BACK_MS_MAX);
            self.now_ms = self.now_ms.saturating_sub(step);
        }
        if self.strikes(Class::ClockFrozen, frozen) {
            self.frozen_until = self.moment + self.dice.between(1, FROZEN_STEPS_MAX);
        }
    }

    /// Time passes: up to the next wakeup (`wakes_at`), or by a little.
    pub fn pass_time(&mut self, wakes_at: Option<u64>) {
        if self.moment < self.frozen_until && !self.calm {
            return;
        }
        self.now_ms += self.dice.between(0, self.setup.tick_ms);
        if let Some(at) = wakes_at.filter(|_| self.dice.chance(0.2)) {
            self.now_ms = self.now_ms.max(at);
        }
    }
}
