//! A disk that several transfers share equally. When one ends, the others become faster.
//!
//! The time that the disk has given to each transfer in flight is one number, `attained`. With `n`
//! in flight it grows `n` times slower than the clock. A transfer that needs `service` ends when
//! `attained` has grown by that much since its start. Invariant: no transfer in flight ends before
//! `attained`.

use std::collections::BTreeMap;

/// Virtual nanoseconds.
pub type Nanos = u64;

/// Parts of a nanosecond in which shares are counted.
const PARTS: u64 = 1000;

/// See the module.
pub struct SharedDisk<T> {
    attained: u64,
    at: Nanos,
    busy: Nanos,
    begun: u64,
    /// By the `attained` at which they end.
    under_way: BTreeMap<(u64, u64), T>,
}

impl<T> SharedDisk<T> {
    /// An idle disk.
    pub fn new() -> SharedDisk<T> {
        SharedDisk {
            attained: 0,
            at: 0,
            busy: 0,
            begun: 0,
            under_way: BTreeMap::new(),
        }
    }

    /// Starts a transfer that would take `service` alone.
    pub fn begin(&mut self, now: Nanos, service: Nanos, transfer: T) {
        self.advance(now);
        let key = (self.attained + service * PARTS, self.begun);
        self.begun += 1;
        self.under_way.insert(key, transfer);
    }

    /// The end of the next transfer, if no other begins before.
    pub fn next_end(&self) -> Option<Nanos> {
        let ((end, _), _) = self.under_way.first_key_value()?;
        let left = (end - self.attained) * self.under_way.len() as u64;
        Some(self.at + left.div_ceil(PARTS))
    }

    /// The transfer that ends now, if one does.
    pub fn end(&mut self, now: Nanos) -> Option<T> {
        if self.next_end()? > now {
            return None;
        }
        self.advance(now);
        self.under_way.pop_first().map(|(_, transfer)| transfer)
    }

    /// Time during which the disk was busy.
    pub fn busy(&self) -> Nanos {
        self.busy
    }

    fn advance(&mut self, now: Nanos) {
        let passed = now - self.at;
        self.at = now;
        let Some(((end, _), _)) = self.under_way.first_key_value() else {
            return;
        };
        self.busy += passed;
        let share = passed * PARTS / self.under_way.len() as u64;
        self.attained = (self.attained + share).min(*end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every end: its time and its transfer.
    fn ends(mut disk: SharedDisk<char>) -> Vec<(Nanos, char)> {
        let mut ends = Vec::new();
        while let Some(at) = disk.next_end() {
            ends.extend(disk.end(at).map(|transfer| (at, transfer)));
        }
        ends
    }

    #[test]
    fn alone_a_transfer_takes_what_it_needs() {
        let mut disk = SharedDisk::new();
        disk.begin(500, 1000, 'a');
        assert_eq!(ends(disk), [(1500, 'a')]);
    }

    #[test]
    fn two_at_once_each_have_half_of_it() {
        let mut disk = SharedDisk::new();
        disk.begin(0, 1000, 'a');
        disk.begin(0, 300, 'b');
        assert_eq!(ends(disk), [(600, 'b'), (1300, 'a')]);
    }

    #[test]
    fn one_that_begins_later_slows_what_is_left_of_the_first() {
        let mut disk = SharedDisk::new();
        disk.begin(0, 1000, 'a');
        disk.begin(900, 1000, 'b');
        assert_eq!(disk.next_end(), Some(1100));
        assert_eq!(disk.end(1099), None);
        assert_eq!(disk.end(1100), Some('a'));
        assert_eq!(disk.next_end(), Some(2000));
        assert_eq!(disk.end(2000), Some('b'));
        assert_eq!((disk.next_end(), disk.busy()), (None, 2000));
    }
}
