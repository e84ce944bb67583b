//! Making room: in L1 by leaving L1, in L2 by leaving L2, always from the leaves, never what somebody holds.

use super::{Core, Event, TierName};
use crate::config::{L3Write, WritePolicy};
use crate::runs::{L1, L2, Runs};
use crate::tree::{Gone, NodeId};

/// What making room came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Pages that are free now.
    pub freed: usize,
    /// Pages that will be when backups that have begun have ended.
    pub pending: usize,
}

impl Core {
    /// Lets at least `pages` pages leave L1, or what can.
    pub fn evict(&mut self, pages: usize) -> Evicted {
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

    /// A node leaves L1 and stays in L2. How many pages that freed.
    pub(super) fn leave_l1(&mut self, node: NodeId) -> usize {
        let gone = self.tree.leave_l1(node);
        self.stats.l1_evicted += gone.l1_keys.len() as u64;
        self.give_back(gone)
    }

    /// Drops a node that cannot be backed up, and all below it; `None` when somebody holds any of it.
    pub(super) fn drop_subtree(&mut self, node: NodeId) -> Option<usize> {
        let gone = self.tree.remove_subtree(node)?;
        self.stats.subtree_dropped += (gone.l1_keys.len() + gone.l2_keys.len()) as u64;
        Some(self.give_back(gone))
    }

    /// L1 pages, made room for where there are too few free.
    pub(super) fn take_l1(&mut self, pages: usize) -> Option<Runs<L1>> {
        let free = self.l1.free_pages() as usize;
        if free < pages {
            self.evict(pages - free);
        }
        self.l1.allocate(u32::try_from(pages).ok()?)
    }

    /// L2 pages, made room for where there are too few free.
    pub(super) fn take_l2(&mut self, pages: usize) -> Option<Runs<L2>> {
        self.make_l2_room(pages);
        self.l2.allocate(u32::try_from(pages).ok()?)
    }

    /// Lets nodes leave L2 until so many pages are free, or nothing more can leave.
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
            let Some(node) = self.tree.next_of_l2() else {
                break;
            };
            let on_its_way = match self.config.l3_write {
                L3Write::OnEviction => self.start_put(node, true),
                L3Write::OnBackup | L3Write::Selective | L3Write::Never => None,
            };
            if let Some(put) = on_its_way {
                pending += put;
                continue;
            }
            let gone = self.tree.remove(node);
            self.stats.l2_evicted += gone.l2_keys.len() as u64;
            self.give_back(gone);
        }
    }

    /// Gives back what left, and tells of it. How many pages of L1 that freed.
    pub(super) fn give_back(&mut self, gone: Gone) -> usize {
        self.free_l1(&gone.l1);
        self.free_l2(&gone.l2);
        for (tier, keys) in [(TierName::L1, gone.l1_keys), (TierName::L2, gone.l2_keys)] {
            if !keys.is_empty() {
                self.tell(Event::Removed { tier, keys });
            }
        }
        gone.l1.pages() as usize
    }
}
