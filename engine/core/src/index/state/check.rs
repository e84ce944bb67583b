//! Checks the invariants of the state, for tests and the simulation.

use super::{Share, State};
use crate::index::slab::{LIVE, ORPHAN, PageId, QUEUED};

impl State {
    /// Checks the invariants (see `state`), in about a microsecond a page. Returns the first
    /// violation.
    pub(in crate::index) fn check(&self) -> Result<(), String> {
        self.counted.check()?;
        let children = self.check_slots()?;
        self.check_links(&children)?;
        self.check_queue()
    }

    /// Returns the number of pages that point at each slot.
    fn check_slots(&self) -> Result<Vec<u32>, String> {
        let mut children = vec![0_u32; self.slab.slots()];
        let mut of_namespace = vec![Share::default(); self.of_namespace.len()];
        let (mut pages, mut ghosts) = (0, 0);
        for id in self.slab.ids() {
            let entry = self.slab.entry(id);
            let link = self.slab.link(id);
            let is_page = entry.spot.has(LIVE);
            if !is_page && link.children == 0 {
                continue;
            }
            *(if is_page { &mut pages } else { &mut ghosts }) += 1;
            let share = of_namespace.get_mut(usize::from(entry.spot.namespace().0));
            if let Some(share) = share.filter(|_| is_page) {
                share.pages += 1;
                share.saved += u64::from(self.slab.place(id).saved);
            }
            let found = self.find_slot(entry.spot.namespace(), entry.key());
            if found != Some(id) {
                return Err(format!("the key of slot {} leads to {found:?}", id.0));
            }
            if link.parent == PageId::NONE {
                continue;
            }
            if !is_page || entry.spot.has(ORPHAN) {
                return Err(format!(
                    "slot {} is a ghost or an orphan with a parent",
                    id.0
                ));
            }
            match children.get_mut(link.parent.0 as usize) {
                Some(count) => *count += 1,
                None => return Err(format!("slot {} has a parent beyond the slab", id.0)),
            }
        }
        if of_namespace != self.of_namespace {
            return Err("the pages of namespaces are counted wrongly".to_owned());
        }
        if let Some(groups) = &self.groups {
            let shares = of_namespace.iter();
            let shares: Vec<_> = shares.map(|of| (of.pages as u64, of.saved)).collect();
            groups.check(&shares)?;
        }
        let free = self.slab.free_count();
        if pages != self.pages
            || self.table.len() != pages + ghosts
            || self.slab.slots() != pages + ghosts + free
        {
            return Err(format!(
                "{pages} pages, {ghosts} ghosts, {free} free; but {} pages, {} in table, {} slots",
                self.pages,
                self.table.len(),
                self.slab.slots()
            ));
        }
        Ok(children)
    }

    fn check_links(&self, children: &[u32]) -> Result<(), String> {
        // The walk that visited a slot first: a second visit by the same walk is a circle.
        let mut walks = vec![0_u32; self.slab.slots()];
        for (start, counted) in self.slab.ids().zip(children) {
            let entry = self.slab.entry(start);
            if self.children(start) != *counted {
                let stored = self.children(start);
                return Err(format!(
                    "slot {} has {counted} children, but its count is {stored}",
                    start.0
                ));
            }
            if !entry.spot.has(LIVE) {
                continue;
            }
            let walk = start.0 + 1;
            let mut at = start;
            while at != PageId::NONE && walks[at.0 as usize] == 0 {
                walks[at.0 as usize] = walk;
                at = self.slab.link(at).parent;
            }
            if at != PageId::NONE && walks[at.0 as usize] == walk {
                return Err(format!("slot {} is its own ancestor", at.0));
            }
        }
        Ok(())
    }

    fn check_queue(&self) -> Result<(), String> {
        if self.chosen.is_some() {
            return self.check_filed();
        }
        let mut held = vec![false; self.slab.slots()];
        for id in self.groups.iter().flat_map(|groups| groups.all_held()) {
            held[id.0 as usize] = true;
        }
        for (id, filed) in self.cold.held() {
            if std::mem::replace(&mut held[id.0 as usize], true) {
                return Err(format!("slot {} is queued twice", id.0));
            }
            let entry = self.slab.entry(id);
            if entry.spot.has(LIVE) && filed > entry.mark().heat() {
                return Err(format!("slot {} is queued hotter than it is", id.0));
            }
        }
        for id in self.slab.ids() {
            let spot = self.slab.entry(id).spot;
            let is_leaf = spot.has(LIVE) && self.slab.link(id).children == 0;
            if spot.has(QUEUED) != held[id.0 as usize] || is_leaf && !spot.has(QUEUED) {
                return Err(format!(
                    "slot {} is queued and does not know, or is not",
                    id.0
                ));
            }
        }
        Ok(())
    }

    /// The pages that a policy holds are its own; every leaf must have been filed with it.
    fn check_filed(&self) -> Result<(), String> {
        for id in self.slab.ids() {
            let spot = self.slab.entry(id).spot;
            let is_leaf = spot.has(LIVE) && self.slab.link(id).children == 0;
            if is_leaf && !spot.has(QUEUED) {
                return Err(format!("slot {} is a leaf that was not filed", id.0));
            }
        }
        Ok(())
    }
}
