//! Windows and states to L2, to L3, and back to L1.
//!
//! They are copied to L2 when their forwards have ended, whatever the write policy, and written to
//! L3 from there, as long as half of the pool in L2 is not on its way. Nothing orders them: each
//! page is of use by itself.

use std::collections::{BTreeSet, VecDeque};

use super::flight::{Flight, TailIds};
use super::order::{TailPage, TailPair};
use super::{Core, Fence, Order};
use crate::config::L3Write;
use crate::tails::{Hold, TailId};
use crate::tree::LoadId;
use larder_format::PageKey;

impl Core {
    /// The forwards that write these pages have ended.
    pub(super) fn settle_tails(&mut self, ids: &[(usize, TailId)]) {
        for (pool, id) in ids {
            self.tails[*pool].pool.settle(*id);
        }
        self.back_up_tails(ids);
    }

    /// Pages of full attention were lost: so are those under the same keys whose forwards have not
    /// ended.
    pub(super) fn lose_tails(&mut self, keys: &[Vec<PageKey>]) {
        if self.tails.is_empty() {
            return;
        }
        let mut lost = BTreeSet::new();
        for key in keys.iter().flatten() {
            for (number, tail) in self.tails.iter_mut().enumerate() {
                let pending = tail.pool.find(key).filter(|id| tail.pool.is_pending(*id));
                if let Some(id) = pending {
                    tail.pool.lose(id);
                    lost.insert((number, id));
                }
            }
        }
        // Their entries may get other pages, which wait for their own forwards.
        let pending = self.pending.iter_mut();
        for tails in pending.filter_map(|pending| pending.tails.as_mut()) {
            tails.given.retain(|of| !lost.contains(of));
        }
    }

    fn back_up_tails(&mut self, ids: &[(usize, TailId)]) {
        let (mut pairs, mut holds) = (Vec::new(), Vec::new());
        for &(pool, id) in ids {
            let of = &mut self.tails[pool].pool;
            let Some((l1, hold)) = of.begin_backup(id).filter(|_| of.pages().1 > 0) else {
                continue;
            };
            let Some(l2) = of.take_l2() else {
                self.stats.backup_no_room += 1;
                of.end_backup(hold, None);
                self.tails_refused.insert((pool, id));
                continue;
            };
            pairs.push(TailPair { pool, l1, l2 });
            holds.push((pool, hold, l2));
        }
        if !pairs.is_empty() {
            let id = self.fresh_id();
            self.orders.push_back(Order::BackUpTails { id, pairs });
            self.flights.insert(id, Flight::TailBackup(holds));
        }
    }

    pub(super) fn tails_backed_up(&mut self, holds: Vec<(usize, Hold, u32)>, is_good: bool) {
        for (pool, hold, l2) in holds {
            let (of, id) = (&mut self.tails[pool].pool, hold.id());
            if of.end_backup(hold, is_good.then_some(l2)) {
                self.stats.backed_up += 1;
                self.tails_due.push_back((pool, id));
            } else {
                of.free_l2(l2);
                self.stats.backup_failed += 1;
                self.tails_failed.insert((pool, id));
            }
        }
        self.forget_tails();
        self.put_tails();
    }

    /// Orders the writes to L3 that are due.
    fn put_tails(&mut self) {
        if self.config.l3_write == L3Write::Never {
            self.tails_due.clear();
        }
        let mut later = VecDeque::new();
        while let Some((pool, id)) = self.tails_due.pop_front() {
            let tail = &mut self.tails[pool];
            if tail.puts > tail.pool.pages().1 as usize / 2 {
                later.push_back((pool, id));
                continue;
            }
            let Some((key, l2, hold)) = tail.pool.begin_put(id) else {
                continue;
            };
            tail.puts += 1;
            let id = self.fresh_id();
            let page = TailPage { pool, key, l2 };
            self.orders.push_back(Order::PutTail { id, page });
            self.flights.insert(id, Flight::TailPut(pool, hold));
        }
        self.tails_due = later;
    }

    pub(super) fn tail_put_ended(&mut self, pool: usize, hold: Hold, is_stored: bool) {
        let id = hold.id();
        let tail = &mut self.tails[pool];
        tail.puts -= 1;
        tail.pool.end_put(hold, is_stored);
        if is_stored {
            self.stats.put += 1;
        } else {
            self.stats.put_failed += 1;
            self.tails_failed.insert((pool, id));
        }
        // L2 may have room now.
        let refused = std::mem::take(&mut self.tails_refused);
        self.back_up_tails(&refused.into_iter().collect::<TailIds>());
        self.forget_tails();
        self.put_tails();
    }

    /// Forgets copies of entries that are gone, before these are the majority.
    fn forget_tails(&mut self) {
        let entries: usize = self.tails.iter().map(|tail| tail.pool.entries()).sum();
        let tails = &self.tails;
        for ids in [&mut self.tails_failed, &mut self.tails_refused] {
            if ids.len() > 2 * entries {
                ids.retain(|(pool, id)| tails[*pool].pool.has_entry(*id));
            }
        }
    }

    /// Tries the copies again that have failed, each once.
    pub(super) fn retry_tails(&mut self) {
        let mut failed = std::mem::take(&mut self.tails_failed);
        failed.append(&mut self.tails_refused);
        let failed: TailIds = failed.into_iter().collect();
        self.back_up_tails(&failed);
        self.tails_due.extend(failed);
        self.put_tails();
    }

    /// Begins the load of pages into these pages of L1. Returns the pairs, their holds, and the
    /// newest forward that may still touch the pages of L1.
    pub(super) fn begin_tail_load(
        &mut self,
        into: Vec<(usize, TailId, u32)>,
        load: LoadId,
    ) -> (Vec<TailPair>, Vec<(usize, Hold)>, Fence) {
        let (mut pairs, mut holds, mut after) = (Vec::new(), Vec::new(), Fence::default());
        for (pool, id, l1) in into {
            let tail = &mut self.tails[pool];
            let touched = tail.touched.get(l1 as usize).copied();
            after = after.max(touched.unwrap_or_default());
            match tail.pool.begin_load(id, l1, load) {
                Some((l2, hold)) => {
                    pairs.push(TailPair { pool, l1, l2 });
                    holds.push((pool, hold));
                }
                None => tail.pool.free_l1(l1),
            }
        }
        (pairs, holds, after)
    }

    pub(super) fn end_tail_load(&mut self, holds: Vec<(usize, Hold)>, is_good: bool) {
        for (pool, hold) in holds {
            match is_good {
                true => self.stats.loaded += 1,
                false => self.stats.load_failed += 1,
            }
            self.tails[pool].pool.end_load(hold, is_good);
        }
    }

    /// Number of pages of tail pools in backups.
    pub(super) fn tail_backups_out(&self) -> usize {
        let pages = self.flights.values().map(|flight| match flight {
            Flight::TailBackup(holds) => holds.len(),
            _ => 0,
        });
        pages.sum()
    }

    /// Pages of L2 that backups of tail pools are filling.
    pub(super) fn tail_flights(&self, pool: usize) -> impl Iterator<Item = u32> {
        let of_flight = |flight: &Flight| match flight {
            Flight::TailBackup(holds) => {
                let own = holds.iter().filter(|(of, ..)| *of == pool);
                own.map(|(_, _, l2)| *l2).collect()
            }
            _ => Vec::new(),
        };
        let pages: Vec<u32> = self.flights.values().flat_map(of_flight).collect();
        pages.into_iter()
    }

    /// Holds of a tail pool in flights.
    pub(super) fn tail_flight_holds(&self, pool: usize) -> u32 {
        let holds = self.flights.values().map(|flight| match flight {
            Flight::TailBackup(holds) => holds.iter().filter(|(of, ..)| *of == pool).count(),
            Flight::Load { tails, .. } => tails.iter().filter(|(of, _)| *of == pool).count(),
            Flight::TailPut(of, _) => usize::from(*of == pool),
            Flight::Backup { .. } | Flight::Put { .. } => 0,
        });
        u32::try_from(holds.sum::<usize>()).unwrap_or(u32::MAX)
    }
}
