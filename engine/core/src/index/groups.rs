//! Groups of namespaces with quotas: the blocks of their pages, the leaves that eviction leaves to
//! them, and the order in which a group evicts its own pages.
//!
//! The *level* of a group is the blocks of its stored pages and of those being put. The order of
//! eviction takes no leaf that would bring a group below its minimum. Such a leaf is *held*: the
//! queue or the policy that returned it does not hold it any more, until the level has risen. Then
//! the coldest held leaves go back, one for each eviction and group, and more if nothing else can
//! go. So an eviction costs no walk over the leaves of the groups at their minima.
//!
//! A group above its maximum evicts its own leaves, the least recently used first, whatever the
//! policy. Their order is gathered from all entries when it is first needed, and again when all
//! gathered leaves are gone. Parents that become leaves meanwhile join it. So an entry is looked at
//! about once while the group's pages are replaced once.
//!
//! Without quotas there are no groups, and none of this costs more than a branch.

use super::coldness::Heap;
use super::slab::PageId;
use super::types::{Heat, NamespaceSlot};

/// The limits of a group, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// Eviction keeps its level at or above this.
    pub min: u64,
    /// Its level stays at or below this.
    pub max: u64,
}

/// The group of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Membership {
    /// No quota.
    #[default]
    None,
    /// That of the group with this number.
    Of(u16),
    /// Of several groups: its pages count for none, and none may be put.
    Several,
}

/// How long a group whose leaves must all stay is not gathered again, in milliseconds.
const BARREN_MS: u64 = 100;

#[derive(Debug)]
struct Group {
    limits: GroupLimits,
    /// Blocks of its stored pages.
    stored: u64,
    /// Blocks of its pages that are being put.
    coming: u64,
    held: Heap,
    /// Its leaves as they were gathered. Entries may be stale, and come twice.
    own: Heap,
    /// When a gathering found no leaf that could go.
    barren_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Member {
    group: Membership,
    /// Blocks of a plain page.
    blocks: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Groups {
    members: Vec<Member>,
    list: Vec<Group>,
    /// By slot: whether it is held.
    held: Vec<u64>,
}

impl Group {
    fn level(&self) -> u64 {
        self.stored + self.coming
    }

    fn may_lose(&self, blocks: u64) -> bool {
        self.level() >= self.limits.min + blocks
    }
}

impl Groups {
    pub(super) fn new(limits: &[GroupLimits]) -> Groups {
        let group = |limits: &GroupLimits| Group {
            limits: *limits,
            stored: 0,
            coming: 0,
            held: Heap::new(),
            own: Heap::new(),
            barren_ms: None,
        };
        Groups {
            list: limits.iter().map(group).collect(),
            ..Groups::default()
        }
    }

    fn member(&self, namespace: NamespaceSlot) -> Member {
        let member = self.members.get(usize::from(namespace.0));
        member.copied().unwrap_or_default()
    }

    pub(super) fn membership(&self, namespace: NamespaceSlot) -> Membership {
        self.member(namespace).group
    }

    fn of(&self, namespace: NamespaceSlot) -> Option<(&Group, u32)> {
        let member = self.member(namespace);
        match member.group {
            Membership::Of(group) => Some((self.list.get(usize::from(group))?, member.blocks)),
            Membership::None | Membership::Several => None,
        }
    }

    fn of_mut(&mut self, namespace: NamespaceSlot) -> Option<(&mut Group, u32)> {
        let member = self.member(namespace);
        match member.group {
            Membership::Of(group) => Some((self.list.get_mut(usize::from(group))?, member.blocks)),
            Membership::None | Membership::Several => None,
        }
    }

    /// Puts a namespace with so many pages, and so many blocks saved, into a group.
    pub(super) fn join(
        &mut self,
        namespace: NamespaceSlot,
        group: Membership,
        blocks: u32,
        (pages, saved): (u64, u64),
    ) {
        let stored = |blocks: u32| (pages * u64::from(blocks)).saturating_sub(saved);
        if let Some((group, blocks)) = self.of_mut(namespace) {
            group.stored = group.stored.saturating_sub(stored(blocks));
        }
        let at = usize::from(namespace.0);
        if self.members.len() <= at {
            self.members.resize(at + 1, Member::default());
        }
        self.members[at] = Member { group, blocks };
        if let Some((group, blocks)) = self.of_mut(namespace) {
            group.stored += stored(blocks);
        }
    }

    // ---- counts

    #[inline]
    pub(super) fn count_in(&mut self, namespace: NamespaceSlot, saved: u32) {
        if let Some((group, blocks)) = self.of_mut(namespace) {
            group.stored += u64::from(blocks.saturating_sub(saved));
        }
    }

    #[inline]
    pub(super) fn count_out(&mut self, namespace: NamespaceSlot, saved: u32) {
        if let Some((group, blocks)) = self.of_mut(namespace) {
            let blocks = u64::from(blocks.saturating_sub(saved));
            group.stored = group.stored.saturating_sub(blocks);
        }
    }

    pub(super) fn coming(&mut self, namespace: NamespaceSlot, blocks: u32) {
        if let Some((group, _)) = self.of_mut(namespace) {
            group.coming += u64::from(blocks);
        }
    }

    pub(super) fn came(&mut self, namespace: NamespaceSlot, blocks: u32) {
        if let Some((group, _)) = self.of_mut(namespace) {
            group.coming = group.coming.saturating_sub(blocks.into());
        }
    }

    /// Blocks of the stored pages of a group, and its level.
    pub(super) fn levels(&self) -> impl Iterator<Item = (u64, u64)> {
        self.list.iter().map(|group| (group.stored, group.level()))
    }

    // ---- limits

    /// Whether eviction may take a page of a namespace that saved so many blocks.
    pub(super) fn may_evict(&self, namespace: NamespaceSlot, saved: u32) -> bool {
        let of = self.of(namespace);
        of.is_none_or(|(group, blocks)| group.may_lose(blocks.saturating_sub(saved).into()))
    }

    /// The same if so many blocks of the group are about to come.
    pub(super) fn may_evict_for(&self, namespace: NamespaceSlot, saved: u32, more: u32) -> bool {
        self.of(namespace).is_none_or(|(group, blocks)| {
            let blocks = u64::from(blocks.saturating_sub(saved));
            group.level() + u64::from(more) >= group.limits.min + blocks
        })
    }

    /// The same for so many pages at once, which saved so many blocks.
    pub(super) fn may_evict_all(&self, namespace: NamespaceSlot, pages: u64, saved: u64) -> bool {
        let of = self.of(namespace);
        let blocks = |of: u32| (pages * u64::from(of)).saturating_sub(saved);
        of.is_none_or(|(group, of)| group.may_lose(blocks(of)))
    }

    /// The maximum of a namespace's group.
    pub(super) fn max_of(&self, namespace: NamespaceSlot) -> u64 {
        self.of(namespace)
            .map_or(u64::MAX, |(group, _)| group.limits.max)
    }

    /// Whether its group is above its maximum with so many blocks more.
    pub(super) fn is_above(&self, namespace: NamespaceSlot, blocks: u32) -> bool {
        let of = self.of(namespace);
        of.is_some_and(|(group, _)| group.level() + u64::from(blocks) > group.limits.max)
    }

    /// Whether its group is below its minimum.
    pub(super) fn is_low(&self, namespace: NamespaceSlot) -> bool {
        let of = self.of(namespace);
        of.is_some_and(|(group, _)| group.level() < group.limits.min)
    }

    /// The first group above its maximum.
    pub(super) fn above(&self) -> Option<u16> {
        let above = |group: &Group| group.level() > group.limits.max;
        let at = self.list.iter().position(above)?;
        u16::try_from(at).ok()
    }

    // ---- leaves that stay

    const fn bit(id: PageId) -> (usize, u64) {
        (id.0 as usize / 64, 1 << (id.0 % 64))
    }

    pub(super) fn is_held(&self, id: PageId) -> bool {
        let (word, bit) = Self::bit(id);
        self.held.get(word).is_some_and(|held| held & bit != 0)
    }

    /// Holds a leaf of this heat.
    pub(super) fn hold(&mut self, namespace: NamespaceSlot, id: PageId, heat: Heat) {
        let (word, bit) = Self::bit(id);
        if self.held.len() <= word {
            self.held.resize(word + 1, 0);
        }
        self.held[word] |= bit;
        if let Some((group, _)) = self.of_mut(namespace) {
            group.held.push(heat, id);
        }
    }

    /// A slot is not held any more. Returns whether it was. Its entry is stale.
    pub(super) fn let_go(&mut self, id: PageId) -> bool {
        let was_held = self.is_held(id);
        if was_held {
            let (word, bit) = Self::bit(id);
            self.held[word] &= !bit;
        }
        was_held
    }

    /// All slots that are held.
    pub(super) fn all_held(&self) -> impl Iterator<Item = PageId> {
        (0_u32..).zip(&self.held).flat_map(|(word, held)| {
            let bits = (0..64).filter(move |bit| held & 1 << bit != 0);
            bits.map(move |bit| PageId(word * 64 + bit))
        })
    }

    /// Takes the coldest held leaf of each group that may lose it. `state` is the namespace, the
    /// saved blocks and the heat of a slot.
    pub(super) fn release(
        &mut self,
        state: impl Fn(PageId) -> (NamespaceSlot, u32, Heat),
        released: &mut Vec<PageId>,
    ) {
        for at in 0..self.list.len() {
            while let Some((filed, id)) = self.list[at].held.top() {
                let (namespace, saved, heat) = state(id);
                let own = Membership::Of(u16::try_from(at).unwrap_or(u16::MAX));
                if !self.is_held(id) || self.membership(namespace) != own {
                    self.list[at].held.pop();
                } else if heat > filed {
                    self.list[at].held.replace_top(heat, id);
                } else if self.may_evict(namespace, saved) {
                    self.list[at].held.pop();
                    self.let_go(id);
                    released.push(id);
                    break;
                } else {
                    break;
                }
            }
        }
    }

    // ---- evictions of a group

    /// The coldest leaf that was gathered.
    pub(super) fn next_own(&mut self, group: u16) -> Option<(Heat, PageId)> {
        let own = &mut self.list.get_mut(usize::from(group))?.own;
        let top = own.top()?;
        own.pop();
        Some(top)
    }

    pub(super) fn add_own(&mut self, group: u16, heat: Heat, id: PageId) {
        if let Some(group) = self.list.get_mut(usize::from(group)) {
            group.own.push(heat, id);
        }
    }

    /// Whether gathering may find a leaf that can go.
    pub(super) fn may_gather(&self, group: u16, now_ms: u64) -> bool {
        let group = self.list.get(usize::from(group));
        group.is_some_and(|group| {
            let barren = group.barren_ms;
            barren.is_none_or(|since| now_ms >= since.saturating_add(BARREN_MS))
        })
    }

    /// Begins a gathering anew.
    pub(super) fn forget_own(&mut self, group: u16) {
        if let Some(group) = self.list.get_mut(usize::from(group)) {
            group.own = Heap::new();
        }
    }

    /// States whether the gathering found a leaf that could go.
    pub(super) fn gathered(&mut self, group: u16, found: bool, now_ms: u64) {
        if let Some(group) = self.list.get_mut(usize::from(group)) {
            group.barren_ms = (!found).then_some(now_ms);
        }
    }

    // ---- the rest

    pub(super) fn lower(&mut self, cut: u32) {
        for group in &mut self.list {
            group.held.lower(cut);
            group.own.lower(cut);
        }
    }

    pub(super) fn ram_bytes(&self) -> usize {
        let heaps = self.list.iter();
        let heaps = heaps.map(|group| group.held.ram_bytes() + group.own.ram_bytes());
        heaps.sum::<usize>()
            + self.list.capacity() * size_of::<Group>()
            + self.members.capacity() * size_of::<Member>()
            + self.held.capacity() * size_of::<u64>()
    }

    /// Compares the counted blocks with those of all pages, by namespace.
    pub(super) fn check(&self, shares: &[(u64, u64)]) -> Result<(), String> {
        let mut stored = vec![0; self.list.len()];
        for (slot, (pages, saved)) in (0..=u16::MAX).map(NamespaceSlot).zip(shares) {
            let member = self.member(slot);
            if let Membership::Of(group) = member.group {
                let blocks = (pages * u64::from(member.blocks)).saturating_sub(*saved);
                stored[usize::from(group)] += blocks;
            }
        }
        let counted: Vec<u64> = self.list.iter().map(|group| group.stored).collect();
        match stored == counted {
            true => Ok(()),
            false => Err(format!(
                "groups have {stored:?} blocks, {counted:?} counted"
            )),
        }
    }
}
