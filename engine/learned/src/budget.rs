//! The copies of reclaim: as many as the bound of write amplification allows.
//!
//! Reclaim drops a page, with the chain below it, instead of copying it if its index is below a
//! share of that of the leaves evicted lately. The share is one while reclaim copies little: such a
//! page is among the next to be evicted anyway. It is the higher the more reclaim copies beyond the
//! bound, so that retention is given up, and one again as soon as the copies are within it. A page
//! of several stored children is copied in any case.

/// Copies for each byte put: a write amplification of 1.1, less the excess at which the share
/// suffices, and less the copies of the time before the first trial.
const COPIED_MAX: f64 = 0.06;

/// What is left of the past after one victim: about 200 count.
const FADE: f64 = 0.995;

/// The share is this power of the excess: twice the copies raise it to 256.
const POWER: i32 = 8;

const SHARE_MAX: f64 = 1e5;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// Bytes put and copied lately.
    put: f64,
    copied: f64,
    /// Totals at the last victim.
    totals: (u64, u64),
}

impl Budget {
    /// So many bytes have been put and copied in all. Copies of another order do not count:
    /// `is_followed` says whether reclaim follows the share.
    pub(super) fn written(&mut self, put: u64, copied: u64, is_followed: bool) {
        let (put_before, copied_before) = std::mem::replace(&mut self.totals, (put, copied));
        let copied_since = match is_followed {
            true => copied.saturating_sub(copied_before),
            false => 0,
        };
        self.put = FADE * self.put + put.saturating_sub(put_before) as f64;
        self.copied = FADE * self.copied + copied_since as f64;
    }

    /// The share of the index of evicted leaves below which a leaf is dropped.
    pub(super) fn share(&self) -> f32 {
        let allowed = COPIED_MAX * self.put;
        if self.copied <= allowed {
            return 1.0;
        }
        (self.copied / allowed).powi(POWER).min(SHARE_MAX) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_rises_while_too_much_is_copied_and_falls_at_once_when_it_is_no_more() {
        let mut budget = Budget::default();
        let (mut put, mut copied) = (0, 0);
        for _ in 0..100 {
            (put, copied) = (put + 100, copied + 50);
            budget.written(put, copied, true);
        }
        assert!(budget.share() > 1000.0, "{}", budget.share());
        let within = (1..1000).find(|_| {
            put += 100;
            budget.written(put, copied, true);
            budget.share() == 1.0
        });
        // As many victims as fade to the bound, and none more.
        assert!(within.is_some_and(|victims| victims < 300), "{within:?}");
    }

    #[test]
    fn copies_of_another_order_raise_no_share() {
        let mut budget = Budget::default();
        for count in 1..1000 {
            budget.written(count * 100, count * 50, false);
        }
        budget.written(100_000, 49_955, true);
        assert!(budget.share() < 1.1, "{}", budget.share());
    }
}
