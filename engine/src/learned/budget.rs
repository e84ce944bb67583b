//! The copies of reclaim: as many as the bound of write amplification allows.
//!
//! Reclaim drops a leaf instead of copying it if its index is below a share of that of the leaves
//! evicted lately. The share begins at one: such a leaf is among the next to be evicted anyway. It
//! grows while reclaim copies more than the bound allows, and falls while it copies less. So
//! retention is given up before the bound is exceeded.

/// Copies for each byte put: a write amplification of 1.1, less the reaction time of the share.
const COPIED_MAX: f64 = 0.08;

/// What is left of the past after one victim: about 200 count.
const FADE: f64 = 0.995;

/// Change of the share after one victim.
const STEP: f32 = 1.05;

const SHARE_MAX: f32 = 1e5;

/// See the module.
#[derive(Debug)]
pub(super) struct Budget {
    share: f32,
    /// Bytes put and copied lately.
    put: f64,
    copied: f64,
    /// Totals at the last victim.
    totals: (u64, u64),
}

impl Default for Budget {
    fn default() -> Budget {
        Budget {
            share: 1.0,
            put: 0.0,
            copied: 0.0,
            totals: (0, 0),
        }
    }
}

impl Budget {
    /// So many bytes have been put and copied in all. Copies of another order do not count:
    /// `is_followed` says whether reclaim follows the share.
    pub(super) fn written(&mut self, put: u64, copied: u64, is_followed: bool) {
        let (put_before, copied_before) = std::mem::replace(&mut self.totals, (put, copied));
        if !is_followed {
            (self.share, self.put, self.copied) = (1.0, 0.0, 0.0);
            return;
        }
        self.put = FADE * self.put + put.saturating_sub(put_before) as f64;
        self.copied = FADE * self.copied + copied.saturating_sub(copied_before) as f64;
        self.share = if self.copied > COPIED_MAX * self.put {
            (self.share * STEP).min(SHARE_MAX)
        } else {
            (self.share / STEP).max(1.0)
        };
    }

    /// The share of the index of evicted leaves below which a leaf is dropped.
    pub(super) fn share(&self) -> f32 {
        self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_rises_while_too_much_is_copied_and_falls_again() {
        let mut budget = Budget::default();
        let (mut put, mut copied) = (0, 0);
        for _ in 0..100 {
            (put, copied) = (put + 100, copied + 50);
            budget.written(put, copied, true);
        }
        assert!(budget.share() > 100.0, "{}", budget.share());
        for _ in 0..2000 {
            put += 100;
            budget.written(put, copied, true);
        }
        assert!(budget.share() < 1.01, "{}", budget.share());
    }

    #[test]
    fn copies_of_another_order_raise_no_share() {
        let mut budget = Budget::default();
        for count in 1..1000 {
            budget.written(count * 100, count * 50, false);
        }
        budget.written(100_000, 50_000, true);
        assert!(budget.share() < 1.1, "{}", budget.share());
    }
}
