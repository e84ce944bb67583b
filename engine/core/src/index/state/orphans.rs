//! Orphans: pages whose parent was unknown, or not stored, when they were published. They are
//! linked later, as lookups find them.

use super::State;
use crate::index::slab::{ORPHAN, PageId};
use crate::index::types::{Adoption, Parent, Publish};

/// Most steps from a page towards the head of its chain when a link is checked for a circle. A
/// longer chain stays in two pieces (each evicted from its own end).
const ADOPT_WALK_MAX: usize = 1 << 20;

impl State {
    /// The child and the parent, if the child is an orphan, both are stored, and the link closes no
    /// circle as far as `steps` steps show. The steps taken are subtracted.
    pub(in crate::index) fn can_adopt(
        &self,
        pair: &Adoption,
        steps: &mut usize,
    ) -> Option<(PageId, PageId)> {
        let child = self.find(pair.namespace, pair.child)?;
        let parent = self.find(pair.namespace, pair.parent)?;
        if !self.slab.entry(child).spot.has(ORPHAN) || child == parent {
            return None;
        }
        // Only a page with children can be its parent's ancestor.
        if self.slab.link(child).children > 0 {
            let mut above = parent;
            for _ in 0..ADOPT_WALK_MAX {
                *steps = steps.checked_sub(1)?;
                above = self.slab.link(above).parent;
                if above == PageId::NONE {
                    return Some((child, parent));
                }
                if above == child {
                    return None;
                }
            }
            return None;
        }
        Some((child, parent))
    }

    /// Links every orphan whose parent is stored, except for links that would close a circle.
    ///
    /// An orphan heads its tree, so a link closes a circle exactly if the parent is in that very
    /// tree. The head of each page's tree is found along paths that are shortened on the way. For
    /// the many orphans of an open: it takes 4 bytes a slot meanwhile, and checks every slot.
    pub(in crate::index) fn adopt_all(&mut self, orphans: &[Adoption]) {
        let ids = self.slab.ids();
        let mut above: Vec<PageId> = ids.map(|id| self.slab.link(id).parent).collect();
        for pair in orphans {
            let child = self.find(pair.namespace, pair.child);
            let parent = self.find(pair.namespace, pair.parent);
            let (Some(child), Some(parent)) = (child, parent) else {
                continue;
            };
            let is_orphan = self.slab.entry(child).spot.has(ORPHAN);
            if is_orphan && head_of(&mut above, parent) != child {
                self.adopt(child, parent);
                above[child.0 as usize] = parent;
            }
        }
    }

    /// Links the pair that `can_adopt` returned.
    pub(in crate::index) fn adopt(&mut self, child: PageId, parent: PageId) {
        self.slab.entry_mut(child).spot.clear(ORPHAN);
        self.link(child, parent);
        self.tell(|chosen, view| chosen.linked(view, child));
    }
}

/// The link of a page to the parent that its put names.
pub(super) fn adoption(page: &Publish) -> Option<Adoption> {
    let Parent::Key(parent) = page.parent else {
        return None;
    };
    Some(Adoption {
        namespace: page.namespace,
        child: page.key,
        parent,
    })
}

/// The head of the tree of a page; halves the path on the way.
fn head_of(above: &mut [PageId], mut at: PageId) -> PageId {
    loop {
        let up = above[at.0 as usize];
        if up == PageId::NONE {
            return at;
        }
        let further = above[up.0 as usize];
        if further != PageId::NONE {
            above[at.0 as usize] = further;
        }
        at = up;
    }
}
