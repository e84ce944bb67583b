//! An L3 that is written late.

use larder_format::PageKey;
use larder_tiers::config::{L3Write, WritePolicy};
use larder_tiers::core::{Event, TierName};

use super::World;

impl World {
    /// Whether L3 is written late, and gets all pages that way: not with write_back.
    pub(super) fn is_late(&self) -> bool {
        let config = self.core.config();
        config.l3_write == L3Write::Late && config.write_policy != WritePolicy::WriteBack
    }

    /// L3 is asked to store pages: it has those before them.
    pub(super) fn check_put(&mut self, keys: &[PageKey], parent: Option<PageKey>) {
        if self.core.config().l3_write == L3Write::Late {
            let has_parent = parent.is_none_or(|parent| self.l3.contains(&parent));
            assert!(has_parent, "a page is written without the page before it");
            self.offered.extend(keys);
        }
    }

    /// Pages that leave L2 for the sake of new weights are in L3, or it was asked to store them.
    pub(super) fn check_promised(&mut self) {
        let is_late = self.is_late();
        while let Some(order) = self.core.next_order() {
            self.take_order(order);
        }
        for event in self.core.take_events() {
            if let Event::Removed { tier, keys } = &event
                && is_late
                && *tier == TierName::L2
            {
                let mut keys = keys.iter();
                let is_offered = |key| self.l3.contains(key) || self.offered.contains(key);
                assert!(
                    keys.all(is_offered),
                    "pages were dropped that L3 should have"
                );
            }
            self.take_event(event);
        }
    }
}
