//! Quotas: the group of each namespace, and the limits of groups, which the index keeps.

use std::fmt;

use larder_format::{BLOCK_BYTES, Namespace, Quota, QuotaGroup};

use super::Core;
use super::base::Base;
use crate::index::{GroupLimits, Membership, NamespaceSlot};

/// Why quotas cannot be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QuotaRefusal {
    /// The minima are more than half of the usable room, all in bytes.
    Minima {
        /// Their sum.
        min: u64,
        /// Half of the usable room, less the pinned pages.
        most: u64,
    },
    /// A namespace would be in two groups.
    TwoGroups {
        /// The namespace.
        namespace: String,
        /// The groups.
        groups: Box<[QuotaGroup; 2]>,
    },
}

impl fmt::Display for QuotaRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QuotaRefusal::Minima { min, most } => write!(
                f,
                "the minima would be {min} bytes in all, and {most} bytes can be kept so, half of \
                 the usable room less the pinned pages: lower them"
            ),
            QuotaRefusal::TwoGroups { namespace, groups } => write!(
                f,
                "namespace {namespace} would be in two groups, {} and {}: remove the quota of one",
                groups[0], groups[1]
            ),
        }
    }
}

/// A quota in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaLevel {
    /// The quota.
    pub quota: Quota,
    /// Blocks of the stored pages of its group.
    pub stored_blocks: u64,
    /// Its namespaces that the store knows.
    pub namespaces: u64,
}

impl Base {
    /// The group of a namespace, by the quotas in force.
    fn membership(&self, slot: NamespaceSlot, quotas: &[Quota]) -> Membership {
        let mut of = self.groups_of(slot, quotas);
        match (of.next(), of.next()) {
            (None, _) => Membership::None,
            (Some(group), None) => Membership::Of(u16::try_from(group).unwrap_or(u16::MAX)),
            (Some(_), Some(_)) => Membership::Several,
        }
    }

    /// The limit of its pages' lifetimes, in seconds: the shortest of its groups.
    fn lifetime(&self, slot: NamespaceSlot, quotas: &[Quota]) -> Option<u32> {
        let groups = self.groups_of(slot, quotas);
        let limits = groups.filter_map(|group| quotas[group].max_age_s);
        let limit = limits.min()?;
        Some(u32::try_from(limit).unwrap_or(u32::MAX))
    }

    fn groups_of(&self, slot: NamespaceSlot, quotas: &[Quota]) -> impl Iterator<Item = usize> {
        let state = self.namespaces.get(slot);
        let fields = state.record.as_ref().map(Namespace::fields);
        let has = move |quota: &Quota| quota.group.has(state.fingerprint, fields);
        let quotas = quotas.iter().enumerate();
        quotas.filter_map(move |(group, quota)| has(quota).then_some(group))
    }

    /// A namespace was named, or its record became known.
    pub(super) fn join_group(&self, slot: NamespaceSlot) {
        if !self.quotas.is_empty() {
            let group = self.membership(slot, &self.quotas);
            let blocks = self.namespaces.page_blocks(slot);
            self.index.join(slot, group, blocks);
            if let Some(limit) = self.lifetime(slot, &self.quotas) {
                self.index.limit_life(slot, limit);
            }
        }
    }
}

impl Core {
    /// Whether quotas can be set: the minima fit, and no namespace is in two groups.
    ///
    /// # Errors
    /// See [`QuotaRefusal`].
    pub fn check_quotas(&self, quotas: &[Quota]) -> Result<(), QuotaRefusal> {
        let minima = quotas.iter().map(|quota| quota.min);
        let min = minima.fold(0, u64::saturating_add);
        let (_, pinned) = self.kept_totals();
        let most = (self.segments.usable_blocks().1 / 2).saturating_sub(pinned);
        let most = most * BLOCK_BYTES as u64;
        if min > most {
            return Err(QuotaRefusal::Minima { min, most });
        }
        for (slot, state) in self.base.namespaces.iter() {
            let mut of = self.base.groups_of(slot, quotas);
            if let (Some(one), Some(other)) = (of.next(), of.next()) {
                let name = state.fingerprint.to_string();
                let group = |at: usize| quotas[at].group.clone();
                return Err(QuotaRefusal::TwoGroups {
                    namespace: name,
                    groups: Box::new([group(one), group(other)]),
                });
            }
        }
        Ok(())
    }

    /// Follows these quotas from now on. A group above its maximum loses pages when its next page
    /// is put, or when the store needs room.
    pub fn set_quotas(&mut self, quotas: Vec<Quota>) {
        let limits: Vec<GroupLimits> = quotas.iter().map(limits_of).collect();
        let slots = self.base.namespaces.iter().map(|(slot, _)| slot);
        let members: Vec<_> = slots
            .map(|slot| {
                let blocks = self.base.namespaces.page_blocks(slot);
                (slot, self.base.membership(slot, &quotas), blocks)
            })
            .collect();
        let coming = self.puts.coming();
        self.base.index.set_groups(&limits, &members, coming);
        let lives: Vec<_> = members
            .iter()
            .filter_map(|(slot, ..)| Some((*slot, self.base.lifetime(*slot, &quotas)?)))
            .collect();
        self.base.index.limit_lives(&lives);
        self.base.quotas = quotas;
    }

    /// A caller has written to a volume outside of the segments: the next round of syncs covers it.
    /// A sync of the caller's own could lose other writes unnoticed.
    pub fn written_beside(&mut self, volume: usize) {
        self.segments.mark_volume_dirty(volume);
    }

    /// The quotas in force, with the use of each.
    #[must_use]
    pub fn quota_levels(&self) -> Vec<QuotaLevel> {
        let base = &self.base;
        let mut namespaces = vec![0; base.quotas.len()];
        for (slot, _) in base.namespaces.iter() {
            if let Membership::Of(group) = base.membership(slot, &base.quotas) {
                namespaces[usize::from(group)] += 1;
            }
        }
        let stored = base.index.group_levels().into_iter();
        let of = base.quotas.iter().zip(stored).zip(namespaces);
        of.map(|((quota, (stored_blocks, _)), namespaces)| QuotaLevel {
            quota: quota.clone(),
            stored_blocks,
            namespaces,
        })
        .collect()
    }
}

fn limits_of(quota: &Quota) -> GroupLimits {
    let block = BLOCK_BYTES as u64;
    GroupLimits {
        min: quota.min.div_ceil(block),
        max: quota.max.map_or(u64::MAX, |max| max / block),
    }
}
