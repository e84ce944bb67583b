//! Pools of pages that only the end of a prefix needs: sliding windows, and states.
//!
//! ```text
//!  prefix of p pages    | 0 | 1 | ............ | p-3 | p-2 | p-1 |
//!  window of 2 pages                                 |  x  |  x  |    its pages [p-2, p)
//!  state                                                   |  x  |    the block behind page p-1
//! ```
//!
//! A state is a window of one page: the state at a border is kept under the key of the page before
//! it. So one rule holds for all: a prefix of `p` pages can be continued if each pool has its pages
//! `[p - trailing, p)`, from 0 on.
//!
//! A page is found by its key, which names all tokens up to its end. The pools know no tree: a
//! split, or the loss of a page elsewhere, does not concern them.
//!
//! Invariants:
//! - an entry has a page in L1 or in L2;
//! - a held page stays. A page of L1 whose bytes turned out not to be valid leaves its entry at
//!   once, and is freed with its last hold;
//! - only entries whose forward and load have ended are copied or leave a tier.
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `legal` | the prefixes that all pools can continue |
//! | `entry` | one page, in L1 and in L2 |

mod entry;
mod legal;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use larder_format::PageKey;

use crate::pool::PagePool;
use crate::runs::{L1, L2, Run, Runs, Tier};
use crate::tree::{Flaw, LoadId, claim};
use entry::Entry;

pub use entry::{Hold, TailId};
pub use legal::{Legal, longest};

/// Numbers of pages that left a pool for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TailsGone {
    /// From L1.
    pub l1: u64,
    /// From L2.
    pub l2: u64,
}

/// A page of L1 that is not valid, until its last hold is released.
#[derive(Debug)]
struct Lost {
    page: u32,
    holds: u32,
}

/// See the module documentation.
#[derive(Debug)]
pub struct TailPool {
    /// Pages at the end of a prefix that it needs: at least one.
    trailing: usize,
    l1: PagePool<L1>,
    l2: PagePool<L2>,
    entries: BTreeMap<TailId, Entry>,
    keys: HashMap<PageKey, TailId>,
    /// The entries that may leave a tier, least recently used first.
    l1_order: BTreeSet<(u64, TailId)>,
    l2_order: BTreeSet<(u64, TailId)>,
    lost: Vec<Lost>,
    /// Keys of pages that L3 has and that were used since the last report to it.
    warm: BTreeSet<PageKey>,
    next: u64,
    tick: u64,
    gone: TailsGone,
}

impl TailPool {
    /// A pool of free pages.
    #[must_use]
    pub fn new(trailing: usize, l1_pages: u32, l2_pages: u32) -> TailPool {
        TailPool {
            trailing,
            l1: PagePool::new(l1_pages),
            l2: PagePool::new(l2_pages),
            entries: BTreeMap::new(),
            keys: HashMap::new(),
            l1_order: BTreeSet::new(),
            l2_order: BTreeSet::new(),
            lost: Vec::new(),
            warm: BTreeSet::new(),
            next: 0,
            tick: 0,
            gone: TailsGone::default(),
        }
    }

    /// Number of pages at the end of a prefix that it needs.
    #[must_use]
    pub fn trailing(&self) -> usize {
        self.trailing
    }

    /// Number of pages in L1 and L2, free and taken.
    #[must_use]
    pub fn pages(&self) -> (u32, u32) {
        (self.l1.pages(), self.l2.pages())
    }

    /// Number of free pages in L1 and L2.
    #[must_use]
    pub fn free_pages(&self) -> (u32, u32) {
        (self.l1.free_pages(), self.l2.free_pages())
    }

    /// Number of pages of L1 that are free or can be freed.
    #[must_use]
    pub fn available(&self) -> usize {
        self.l1.free_pages() as usize + self.l1_order.len()
    }

    /// Pages that have left for room.
    #[must_use]
    pub fn gone(&self) -> TailsGone {
        self.gone
    }

    /// Whether it has the page of this key, in L1 or, unless `in_l1`, in L2.
    #[must_use]
    pub fn has(&self, key: &PageKey, in_l1: bool) -> bool {
        let entry = self.find(key).and_then(|id| self.entries.get(&id));
        entry.is_some_and(|entry| !in_l1 || entry.l1.is_some())
    }

    /// Number of entries.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has this entry.
    #[must_use]
    pub fn has_entry(&self, id: TailId) -> bool {
        self.entries.contains_key(&id)
    }

    /// Whether it has the page of this key in L1, and no load is filling it.
    #[must_use]
    pub fn is_readable(&self, key: &PageKey) -> bool {
        let entry = self.find(key).and_then(|id| self.entries.get(&id));
        entry.is_some_and(|entry| entry.l1.is_some() && entry.loading.is_none())
    }

    /// The entry of a key.
    #[must_use]
    pub fn find(&self, key: &PageKey) -> Option<TailId> {
        self.keys.get(key).copied()
    }

    fn change<R>(&mut self, id: TailId, change: impl FnOnce(&mut Entry) -> R) -> R {
        let entry = self.entries.get_mut(&id).expect("a held entry is there");
        self.l1_order.remove(&(entry.used, id));
        self.l2_order.remove(&(entry.used, id));
        let result = change(entry);
        if entry.may_leave_l1() {
            self.l1_order.insert((entry.used, id));
        }
        if entry.may_leave_l2() {
            self.l2_order.insert((entry.used, id));
        }
        if entry.l1.is_none() && entry.l2.is_none() {
            self.keys.remove(&entry.key);
            self.entries.remove(&id);
        }
        result
    }

    /// Holds an entry: its page of L1 if it has one, else that of L2. Counts as a use.
    pub fn hold(&mut self, id: TailId) -> Hold {
        self.tick += 1;
        let tick = self.tick;
        let (hold, warm) = self.change(id, |entry| {
            entry.used = tick;
            (entry.hold(id), entry.is_in_l3.then_some(entry.key))
        });
        self.warm.extend(warm);
        hold
    }

    /// The keys of pages that L3 has and that were used since the last call.
    pub fn take_warm(&mut self) -> Vec<PageKey> {
        std::mem::take(&mut self.warm).into_iter().collect()
    }

    /// Holds the page of L2 alone.
    pub fn hold_l2(&mut self, id: TailId) -> Hold {
        self.change(id, |entry| entry.hold_l2(id))
    }

    /// Releases a hold. A page of L1 that has been lost is freed with its last one.
    pub fn release(&mut self, hold: Hold) {
        let (id, page) = (hold.id, hold.page);
        if !self.is_lost(&hold) {
            return self.change(id, |entry| entry.release(hold));
        }
        let at = self.lost.iter().position(|lost| Some(lost.page) == page);
        let at = at.expect("a lost page stays until its last hold is released");
        self.lost[at].holds -= 1;
        if self.lost[at].holds == 0 {
            let lost = self.lost.swap_remove(at);
            self.free_l1(lost.page);
        }
    }

    /// Whether the held page of L1 has been lost.
    #[must_use]
    pub fn is_lost(&self, hold: &Hold) -> bool {
        let entry = self.entries.get(&hold.id);
        hold.page.is_some() && entry.is_none_or(|entry| entry.l1 != hold.page)
    }

    /// Whether the forward and the load of the held page have ended.
    #[must_use]
    pub fn is_settled(&self, hold: &Hold) -> bool {
        let entry = self.entries.get(&hold.id);
        self.is_lost(hold) || entry.is_none_or(Entry::is_settled)
    }

    /// Whether an entry has a page of L1. A load may be filling it.
    #[must_use]
    pub fn is_in_l1(&self, id: TailId) -> bool {
        self.entries
            .get(&id)
            .is_some_and(|entry| entry.l1.is_some())
    }

    /// Whether the forward that writes a page has not ended.
    #[must_use]
    pub fn is_pending(&self, id: TailId) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.is_pending)
    }

    /// The load that fills the held page.
    #[must_use]
    pub fn load_of(&self, hold: &Hold) -> Option<LoadId> {
        self.entries.get(&hold.id)?.loading
    }

    /// A free page of L1. Evicts an entry if there is none.
    pub fn take_l1(&mut self) -> Option<u32> {
        if self.l1.free_pages() == 0 {
            self.evict_l1(1);
        }
        take(&mut self.l1)
    }

    /// A free page of L2. Evicts an entry if there is none.
    pub fn take_l2(&mut self) -> Option<u32> {
        if self.l2.free_pages() == 0 {
            let (_, id) = self.l2_order.first().copied()?;
            self.gone.l2 += 1;
            let page = self.change(id, |entry| {
                entry.is_in_l3 = false;
                entry.l2.take()
            });
            page.into_iter().for_each(|page| self.free_l2(page));
        }
        take(&mut self.l2)
    }

    /// Evicts this many entries from L1, or as many as possible. Returns their number.
    pub fn evict_l1(&mut self, pages: usize) -> usize {
        let mut evicted = 0;
        while evicted < pages
            && let Some((_, id)) = self.l1_order.first().copied()
        {
            let page = self.change(id, |entry| entry.l1.take());
            page.into_iter().for_each(|page| self.free_l1(page));
            evicted += 1;
        }
        self.gone.l1 += evicted as u64;
        evicted
    }

    /// Drops all entries that nothing holds.
    pub fn drop_unheld(&mut self) {
        self.evict_l1(usize::MAX);
        while let Some((_, id)) = self.l2_order.first().copied() {
            let page = self.change(id, |entry| entry.l2.take());
            page.into_iter().for_each(|page| self.free_l2(page));
        }
    }

    /// Frees a page of L1 that no entry has.
    pub fn free_l1(&mut self, page: u32) {
        free(&mut self.l1, page);
    }

    /// Frees a page of L2 that no entry has.
    pub fn free_l2(&mut self, page: u32) {
        free(&mut self.l2, page);
    }

    fn entry_of(&mut self, key: PageKey) -> TailId {
        if let Some(id) = self.find(&key) {
            return id;
        }
        self.next += 1;
        let id = TailId(self.next);
        self.keys.insert(key, id);
        self.entries.insert(id, Entry::new(key));
        id
    }

    /// Gives the pool a page of L1. `is_pending`: the forward that writes it has not ended. `None`,
    /// and the page stays with the caller, if the pool has the page of this key in L1.
    pub fn give_l1(&mut self, key: PageKey, page: u32, is_pending: bool) -> Option<TailId> {
        if self.has(&key, true) {
            return None;
        }
        self.tick += 1;
        let tick = self.tick;
        let id = self.entry_of(key);
        self.change(id, |entry| {
            entry.l1 = Some(page);
            entry.is_pending = is_pending;
            entry.used = tick;
        });
        Some(id)
    }

    /// Gives the pool a page of L2 that L3 has. `None`, and the page stays with the caller, if the
    /// pool has the page of this key in L2.
    pub fn give_l2(&mut self, key: PageKey, page: u32) -> Option<TailId> {
        let found = self.find(&key).and_then(|id| self.entries.get(&id));
        if found.is_some_and(|entry| entry.l2.is_some() || entry.is_backing_up) {
            return None;
        }
        self.tick += 1;
        let tick = self.tick;
        let id = self.entry_of(key);
        self.change(id, |entry| {
            entry.l2 = Some(page);
            entry.is_in_l3 = true;
            entry.used = tick;
        });
        Some(id)
    }

    /// The forward that writes the page of L1 has ended.
    pub fn settle(&mut self, id: TailId) {
        if self.entries.contains_key(&id) {
            self.change(id, |entry| entry.is_pending = false);
        }
    }

    /// The page of L1 is not valid: its forward or its load has failed. Returns whether there was
    /// one.
    pub fn lose(&mut self, id: TailId) -> bool {
        let Some(entry) = self.entries.get(&id).filter(|of| of.l1.is_some()) else {
            return false;
        };
        let holds = entry.l1_holds;
        let page = self.change(id, Entry::lose);
        match page {
            Some(page) if holds > 0 => self.lost.push(Lost { page, holds }),
            Some(page) => self.free_l1(page),
            None => {}
        }
        true
    }

    /// A copy to L2 begins, if the entry wants one. Returns its page of L1, and the hold of the
    /// copy.
    pub fn begin_backup(&mut self, id: TailId) -> Option<(u32, Hold)> {
        let entry = self.entries.get(&id)?;
        let page = entry.l1.filter(|_| entry.wants_backup())?;
        let hold = self.change(id, |entry| {
            entry.is_backing_up = true;
            entry.hold(id)
        });
        Some((page, hold))
    }

    /// A copy has ended: with this page of L2 if it succeeded. Returns whether it is to be written
    /// to L3.
    pub fn end_backup(&mut self, hold: Hold, l2: Option<u32>) -> bool {
        let id = hold.id;
        let is_due = self.change(id, |entry| {
            entry.is_backing_up = false;
            entry.l2 = l2;
            l2.is_some()
        });
        self.release(hold);
        is_due
    }

    /// A load from L2 into this page of L1 begins. Returns the page of L2, and the hold of the
    /// load.
    pub fn begin_load(&mut self, id: TailId, page: u32, load: LoadId) -> Option<(u32, Hold)> {
        let l2 = self.entries.get(&id)?.l2?;
        let hold = self.change(id, |entry| {
            entry.l1 = Some(page);
            entry.loading = Some(load);
            entry.hold(id)
        });
        Some((l2, hold))
    }

    /// A load has ended.
    pub fn end_load(&mut self, hold: Hold, is_good: bool) {
        if is_good && !self.is_lost(&hold) {
            self.change(hold.id, |entry| entry.loading = None);
        } else if !self.is_lost(&hold) {
            self.lose(hold.id);
        }
        self.release(hold);
    }

    /// A write to L3 begins, if the entry wants one. Returns its key, its page of L2, and the hold
    /// of the write.
    pub fn begin_put(&mut self, id: TailId) -> Option<(PageKey, u32, Hold)> {
        let entry = self.entries.get(&id)?;
        let (key, page) = (entry.key, entry.l2.filter(|_| entry.wants_put())?);
        let hold = self.change(id, |entry| {
            entry.is_putting = true;
            entry.hold_l2(id)
        });
        Some((key, page, hold))
    }

    /// A write to L3 has ended.
    pub fn end_put(&mut self, hold: Hold, is_stored: bool) {
        self.change(hold.id, |entry| {
            entry.is_putting = false;
            entry.is_in_l3 = is_stored;
        });
        self.release(hold);
    }

    /// Number of holds.
    #[must_use]
    pub fn holds(&self) -> u32 {
        let held = self.entries.values().map(|of| of.l1_holds + of.l2_holds);
        held.chain(self.lost.iter().map(|lost| lost.holds)).sum()
    }

    /// Marks every page that the pool's entries have in these tables.
    ///
    /// # Errors
    /// A page has another owner, or does not exist; or an entry is not listed where it belongs.
    pub fn claim_pages(&self, l1: &mut [bool], l2: &mut [bool]) -> Result<(), Flaw> {
        for (id, entry) in &self.entries {
            let flaw = |what| Flaw {
                node: u32::try_from(id.0).unwrap_or(u32::MAX),
                what,
            };
            let place = (entry.used, *id);
            let is_listed = self.l1_order.contains(&place) == entry.may_leave_l1()
                && self.l2_order.contains(&place) == entry.may_leave_l2();
            if !is_listed || self.keys.get(&entry.key) != Some(id) {
                return Err(flaw("a tail page is not listed where it belongs"));
            }
            claim(&one::<L1>(entry.l1), l1).map_err(flaw)?;
            claim(&one::<L2>(entry.l2), l2).map_err(flaw)?;
        }
        for lost in &self.lost {
            claim(&one::<L1>(Some(lost.page)), l1).map_err(|what| Flaw { node: 0, what })?;
        }
        Ok(())
    }

    /// Whether the pages of this number are free, in L1 and in L2.
    #[must_use]
    pub fn is_free(&self, page: u32) -> (bool, bool) {
        (self.l1.is_free(page), self.l2.is_free(page))
    }

    /// A digest of all state on which ranks must agree.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let entries = self.entries.iter();
        entries.fold(self.tick, |sum, (id, entry)| {
            sum.rotate_left(7) ^ id.0 ^ entry.digest()
        })
    }
}

fn one<T: Tier>(page: Option<u32>) -> Runs<T> {
    page.map_or_else(Runs::default, |page| Runs::from(Run::new(page, 1)))
}

fn take<T: Tier>(pool: &mut PagePool<T>) -> Option<u32> {
    pool.allocate(1)?.page_numbers().next()
}

fn free<T: Tier>(pool: &mut PagePool<T>, page: u32) {
    if let Err(error) = pool.free(&one(Some(page))) {
        panic!("a tail page has two owners: {error}");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn key(number: u8) -> PageKey {
        PageKey::from_bytes([number; 32])
    }

    #[test]
    fn a_lost_page_is_freed_with_its_last_hold_and_its_copy_in_l2_stays() {
        let mut pool = TailPool::new(1, 2, 1);
        let page = pool.take_l1().unwrap();
        let id = pool.give_l1(key(1), page, false).unwrap();
        let (_, copy) = pool.begin_backup(id).unwrap();
        let l2 = pool.take_l2();
        assert!(pool.end_backup(copy, l2));
        let hold = pool.hold(id);
        assert!(pool.lose(id) && pool.is_lost(&hold));
        assert_eq!(pool.free_pages(), (1, 0));
        assert!(pool.has(&key(1), false) && !pool.has(&key(1), true));
        pool.release(hold);
        assert_eq!(pool.free_pages(), (2, 0));
    }

    #[test]
    fn the_least_recently_used_page_without_a_hold_leaves_first() {
        let mut pool = TailPool::new(1, 3, 0);
        let ids: Vec<TailId> = (0..3)
            .map(|number| {
                let page = pool.take_l1().unwrap();
                pool.give_l1(key(number), page, number == 2).unwrap()
            })
            .collect();
        let hold = pool.hold(ids[0]);
        assert!(pool.take_l1().is_some());
        assert!(!pool.has(&key(1), true), "the only page that may leave");
        assert_eq!(pool.take_l1(), None, "one is held, one is pending");
        pool.settle(ids[2]);
        pool.release(hold);
        assert!(pool.take_l1().is_some());
        assert!(!pool.has(&key(2), true) && pool.has(&key(0), true));
    }
}
