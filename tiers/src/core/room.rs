//! Eviction: from L1 and from L2, always from the leaves, never a held node.

use super::flight::Late;
use super::{Core, Event, TierName};
use crate::config::{L3Write, WritePolicy};
use crate::planted::planted;
use crate::runs::{L1, L2, Runs};
use crate::tree::{Gone, NodeId};

/// The result of an eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Pages that are free now.
    pub freed: usize,
    /// Pages that will be free after backups that have started.
    pub pending: usize,
}

impl Core {
    /// Evicts at least `pages` pages from L1 and from each tail pool, or as many as possible.
    /// Returns the numbers without tail pools.
    pub fn evict(&mut self, pages: usize) -> Evicted {
        for tail in &mut self.tails {
            tail.pool.evict_l1(pages);
        }
        self.evict_l1(pages)
    }

    /// Evicts at least `pages` pages from L1, or as many as possible.
    pub(super) fn evict_l1(&mut self, pages: usize) -> Evicted {
        let mut evicted = Evicted::default();
        // Nodes that can neither be backed up nor dropped now.
        let mut stuck: Vec<NodeId> = Vec::new();
        while evicted.freed + evicted.pending < pages {
            let Some((node, in_l2)) = self.tree.next_of_l1(&stuck) else {
                break;
            };
            if in_l2 {
                evicted.freed += self.leave_l1(node);
            } else if self.config.write_policy == WritePolicy::WriteBack {
                match self.start_backup(node, true) {
                    Some(pending) => evicted.pending += pending,
                    None => match self.drop_subtree(node) {
                        Some(freed) => evicted.freed += freed,
                        None => stuck.push(node),
                    },
                }
            } else {
                let gone = self.tree.remove(node);
                self.stats.l1_dropped += gone.l1_keys.len() as u64;
                evicted.freed += self.give_back(gone);
            }
        }
        evicted
    }

    /// Removes a node from L1 that stays in L2. Returns the number of freed pages.
    pub(super) fn leave_l1(&mut self, node: NodeId) -> usize {
        let gone = self.tree.leave_l1(node);
        self.stats.l1_evicted += gone.l1_keys.len() as u64;
        self.give_back(gone)
    }

    /// Drops a node that cannot be backed up, with all nodes below it. `None` if any of them is
    /// held.
    pub(super) fn drop_subtree(&mut self, node: NodeId) -> Option<usize> {
        let gone = self.tree.remove_subtree(node)?;
        self.stats.subtree_dropped += (gone.l1_keys.len() + gone.l2_keys.len()) as u64;
        Some(self.give_back(gone))
    }

    /// Allocates L1 pages, after evictions if necessary.
    pub(super) fn take_l1(&mut self, pages: usize) -> Option<Runs<L1>> {
        let free = self.l1.free_pages() as usize;
        if free < pages {
            self.evict_l1(pages - free);
        }
        self.l1.allocate(u32::try_from(pages).ok()?)
    }

    /// Pages are those of a tenant now. Notes the pages that have rows of another tenant and are
    /// not overwritten as a whole, unless a forward still touches them.
    pub(super) fn take_over(&mut self, pages: &[u32], tenant: u64, is_overwritten: bool) {
        self.has_tenants |= tenant != 0;
        if !self.has_tenants {
            return;
        }
        for page in pages {
            let at = *page as usize;
            let former = std::mem::replace(&mut self.tenants[at], tenant);
            let is_foreign = former != tenant && !is_overwritten && !planted!(KeepsForeignRows);
            if is_foreign && self.touched[at] <= self.ended {
                self.unclean.push(*page);
            }
        }
    }

    /// The pages that requests got since the last call and that have rows of another tenant.
    /// Their rows must not be read before they are written: zero them where the host reads them.
    pub fn take_unclean(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unclean)
    }

    /// Allocates L2 pages, after evictions if necessary.
    pub(super) fn take_l2(&mut self, pages: usize) -> Option<Runs<L2>> {
        self.make_l2_room(pages);
        self.l2.allocate(u32::try_from(pages).ok()?)
    }

    /// Evicts nodes from L2 until this many pages are free, or until no node can be evicted.
    pub(super) fn make_l2_room(&mut self, pages: usize) {
        if pages > self.l2.pages() as usize {
            return;
        }
        let mut pending = 0;
        while self.l2.free_pages() as usize + pending < pages {
            if let Some(node) = self.tree.next_double() {
                let gone = self.tree.leave_l2(node);
                self.stats.l2_evicted += gone.l2_keys.len() as u64;
                self.give_back(gone);
                continue;
            }
            let node = match self.tree.next_of_l2() {
                Some(node) => {
                    self.count_unwritten(node);
                    node
                }
                // All that could leave has to be written first.
                None => match self.put_oldest() {
                    Some((Late::Queued, pages)) => {
                        pending += pages;
                        continue;
                    }
                    Some((Late::Declined, _)) => continue,
                    Some((Late::NoRoom, _)) => {
                        let Some(leaf) = self.tree.next_unwritten_leaf() else {
                            break;
                        };
                        let pages = self.tree.keys(leaf).map_or(0, <[_]>::len);
                        self.stats.put_refused += pages as u64;
                        leaf
                    }
                    Some((Late::Waits, _)) | None => break,
                },
            };
            let gone = self.tree.remove(node);
            self.stats.l2_evicted += gone.l2_keys.len() as u64;
            self.give_back(gone);
        }
    }

    /// Counts a node that leaves L2 and that L3 should have.
    fn count_unwritten(&mut self, node: NodeId) {
        if self.tree.is_in_l3(node) {
            return;
        }
        let pages = self.tree.keys(node).map_or(0, <[_]>::len) as u64;
        match self.config.l3_write {
            L3Write::Late => self.stats.put_declined += pages,
            _ if self.is_put_due(node) => self.stats.put_refused += pages,
            _ => {}
        }
    }

    /// Frees the removed pages and emits the events. Returns the number of freed L1 pages.
    pub(super) fn give_back(&mut self, gone: Gone) -> usize {
        self.free_l1(&gone.l1);
        self.free_l2(&gone.l2);
        for (tier, keys) in [(TierName::L1, gone.l1_keys), (TierName::L2, gone.l2_keys)] {
            if !keys.is_empty() {
                self.emit(Event::Removed { tier, keys });
            }
        }
        gone.l1.pages() as usize
    }
}
