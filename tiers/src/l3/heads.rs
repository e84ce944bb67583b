//! The page store as L3 of ranks that hold some of a model's heads.
//!
//! ```text
//!   8 heads in 4 groups        | 0 1 | 2 3 | 4 5 | 6 7 |      a namespace each
//!   rank 1 of 2 has pages of               [  2 groups ]
//!   rank 3 of 4 has pages of                     [  1  ]
//! ```
//!
//! Each group of heads is a namespace of its own, so ranks find the pages of ranks that hold other
//! numbers of heads. The parts of a page in `page_head` are one run of bytes for each group. A rank
//! has a page if it has all its groups.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use larder_engine::{Count, GetPage, PageStore, PutOptions, PutPage, StoreError};
use larder_format::{Namespace, PageKey};

use super::{L3, StoreL3};

/// See the module documentation.
pub struct HeadsL3 {
    /// Of the pages of this rank, as its pools have them.
    namespace: Namespace,
    groups: Vec<StoreL3>,
}

impl HeadsL3 {
    /// The pages of a rank, of this namespace in its pools, in groups of heads of these namespaces:
    /// each is an equal share of each part, in this order.
    ///
    /// # Errors
    /// Those of [`StoreL3::new`].
    pub fn new(
        store: &Arc<dyn PageStore>,
        namespace: Namespace,
        groups: &[Namespace],
        puts: PutOptions,
    ) -> Result<HeadsL3, StoreError> {
        let of = |group| Ok(StoreL3::new(store.clone(), group)?.with_puts(puts));
        Ok(HeadsL3 {
            namespace,
            groups: groups.iter().map(of).collect::<Result<_, StoreError>>()?,
        })
    }

    /// The groups of this rank, with their numbers among these.
    fn each(&self) -> impl Iterator<Item = (usize, &StoreL3)> {
        self.groups.iter().enumerate()
    }
}

/// The bytes of a group in a part.
fn of_group(bytes: usize, group: usize, groups: usize) -> std::ops::Range<usize> {
    let share = bytes / groups;
    group * share..(group + 1) * share
}

impl L3 for HeadsL3 {
    fn namespace(&self) -> Option<&Namespace> {
        Some(&self.namespace)
    }

    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        let groups = self.groups.iter();
        groups.fold(keys.len(), |longest, group| {
            group.longest_prefix(&keys[..longest])
        })
    }

    fn contains(&self, keys: &[PageKey]) -> Vec<bool> {
        let mut all = vec![true; keys.len()];
        for group in &self.groups {
            let has = group.contains(keys);
            all.iter_mut().zip(has).for_each(|(all, has)| *all &= has);
        }
        all
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        let mut whole = pages.len();
        for (group, l3) in self.each() {
            let pages = &mut pages[..whole];
            let keys: Vec<PageKey> = pages.iter().map(|page| page.key).collect();
            let slices = |page| group_of_mut(page, group, self.groups.len());
            let mut parts: Vec<Vec<IoSliceMut<'_>>> = pages.iter_mut().map(slices).collect();
            let mut pages: Vec<GetPage<'_, '_>> = keys
                .into_iter()
                .zip(&mut parts)
                .map(|(key, parts)| GetPage { key, parts })
                .collect();
            whole = l3.get(&mut pages);
        }
        whole
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        let mut whole = pages.len();
        for (group, l3) in self.each() {
            let pages = &pages[..whole];
            let slices = |page| group_of(page, group, self.groups.len());
            let parts: Vec<Vec<IoSlice<'_>>> = pages.iter().map(slices).collect();
            let pages: Vec<PutPage<'_>> = pages
                .iter()
                .zip(&parts)
                .map(|(page, parts)| PutPage { parts, ..*page })
                .collect();
            whole = l3.put(&pages);
        }
        whole
    }

    fn touch(&self, keys: &[PageKey]) {
        self.groups.iter().for_each(|group| group.touch(keys));
    }

    /// Counts once for a request, though it has pages in all groups.
    fn count(&self, count: Count) {
        if let Some(first) = self.groups.first() {
            first.count(count);
        }
    }
}

fn group_of_mut<'p>(
    page: &'p mut GetPage<'_, '_>,
    group: usize,
    groups: usize,
) -> Vec<IoSliceMut<'p>> {
    let parts = page.parts.iter_mut();
    let slices = parts.map(|part| {
        let range = of_group(part.len(), group, groups);
        IoSliceMut::new(&mut part[range])
    });
    slices.collect()
}

fn group_of<'p>(page: &'p PutPage<'_>, group: usize, groups: usize) -> Vec<IoSlice<'p>> {
    let parts = page.parts.iter();
    let slices = parts.map(|part| IoSlice::new(&part[of_group(part.len(), group, groups)]));
    slices.collect()
}
