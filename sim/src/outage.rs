//! Outages: reads of a part of a volume that fail for a while, with an error of the medium or of
//! the path to it. They spoil nothing: no page may leave for them.

use std::time::Duration;

use larder_sim_runtime::time::Instant;

use crate::classes::Class;
use crate::world::{Outage, World};

const EIO: i32 = 5;
const ENODEV: i32 = 19;
const ENODATA: i32 = 61;
const ENOLINK: i32 = 67;
const ETIMEDOUT: i32 = 110;

impl World {
    /// Draws whether an outage begins now, of at most `most`.
    pub fn draw_outage(&mut self, class: Class, most: Duration) {
        if self.outage.is_some() || !self.strikes(class, self.setup.faults.outage) {
            return;
        }
        let volume = self.dice.below(self.setup.volumes.len());
        let all = self.disk.volumes()[volume].blocks();
        let from = match self.dice.chance(0.3) {
            true => 0,
            false => self.dice.below(all),
        };
        let blocks = from..from + 1 + self.dice.below(all - from);
        let errno = self.dice.pick(&[EIO, ENODATA, ETIMEDOUT, ENOLINK, ENODEV]);
        let most = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        let time = Duration::from_millis(self.dice.between(1, most));
        self.note(errno as u64, || {
            format!("reads of {volume}:{blocks:?} fail for {time:?} with error {errno}")
        });
        self.has_outage = true;
        self.outage = Some(Outage {
            volume,
            blocks,
            until: Instant::now() + time,
            errno,
        });
    }

    /// The error of a read that an outage concerns.
    pub fn outage_of(&mut self, volume: usize, start: usize, count: usize) -> Option<i32> {
        let outage = self.outage.as_ref()?;
        if outage.until <= Instant::now() || self.calm {
            self.outage = None;
            return None;
        }
        let blocks = &outage.blocks;
        let is_hit = volume == outage.volume && start < blocks.end && blocks.start < start + count;
        is_hit.then_some(outage.errno)
    }
}
