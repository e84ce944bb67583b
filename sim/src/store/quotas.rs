//! Quotas: callers change them, and the store keeps to them.
//!
//! Three rules are checked. Between two steps of a task no group above its maximum has grown, and
//! no group below its minimum has shrunk, unless a page left by another way than eviction. An
//! opening finds the quotas of the last change that ended, or those of a change in progress.

use larder_core::core::Core;
use larder_engine::StoreError;
use larder_engine::format::BLOCK_BYTES;
use larder_store::quotas::{GroupKind, GroupName, QuotaChange, QuotaReport, QuotaSpec};

use super::calls::Caller;
use super::limits::Look;
use super::state::State;
use crate::classes::Class;

fn specs(report: &QuotaReport) -> Vec<QuotaSpec> {
    let groups = report.groups.iter();
    groups.map(|group| group.quota.clone()).collect()
}

impl State {
    /// A store was opened with these quotas.
    pub fn check_found_quotas(&mut self, report: &QuotaReport) {
        let faults = &self.world.setup.faults;
        let is_exact = !faults.spoils() && !faults.misleads() && !self.world.has_outage;
        let found = specs(report);
        self.quotas.in_force = Some(found.clone());
        if is_exact {
            let may_be = &self.quotas.may_be;
            assert!(report.fault.is_none(), "quotas cannot be read: {report:?}");
            assert!(
                may_be.contains(&found),
                "{found:?} are found, and not {may_be:?}"
            );
            self.quotas.may_be = vec![found];
        } else if report.fault.is_none() {
            // A copy that was not read now may be read by the next opening.
            self.quotas.may_be.push(found);
        }
    }

    /// Runs after each step of a task.
    pub fn check_quotas(&mut self) {
        if !self.world.setup.quotas {
            return;
        }
        let Some(epoch) = &self.epoch else { return };
        let index = epoch.index.clone();
        let look = self.try_core(|core: &Core| {
            let counters = core.counters();
            Look {
                groups: core.quota_levels(),
                levels: index
                    .group_levels()
                    .iter()
                    .map(|(_, level)| *level)
                    .collect(),
                counts: counters.store,
                replaced: counters.replaced,
            }
        });
        let Some(now) = look else { return };
        let before = self.quotas.seen.take();
        let of = |look: &Look| {
            look.groups
                .iter()
                .map(|of| of.quota.clone())
                .collect::<Vec<_>>()
        };
        if let Some(before) = before.filter(|before| of(before) == of(&now)) {
            self.compare(&before, &now);
        }
        self.quotas.seen = Some(now);
    }

    fn compare(&self, before: &Look, now: &Look) {
        let faults = &self.world.setup.faults;
        let others = |look: &Look| {
            let counts = &look.counts;
            let removed = counts.deleted + counts.damaged + counts.unfinished + counts.expired;
            removed + look.replaced + counts.evicted_below_minimum
        };
        // A put that fails, or is given up, leaves its group too.
        let may_shrink = others(before) != others(now)
            || faults.fail_writes()
            || faults.spoils()
            || faults.misleads()
            || faults.recall > 0.0
            || !self.recalled.is_empty()
            || self.deletions.has_erased && !self.putting.is_empty();
        for (at, group) in now.groups.iter().enumerate() {
            if before.groups[at].namespaces != group.namespaces {
                // One was named whose record had been lost.
                continue;
            }
            let (was, level) = (before.levels[at], now.levels[at]);
            let block = BLOCK_BYTES as u64;
            let max = group.quota.max.map_or(u64::MAX, |max| max / block);
            assert!(
                level <= max || level <= was,
                "{}: {level} blocks after {was}, at most {max}",
                group.quota.group
            );
            // A put that evicts a page of its own group may find no place after all.
            let pages = self.world.setup.namespaces.iter();
            let page = pages
                .map(|space| u64::from(space.shape().page_blocks()))
                .max();
            let slack = if max < u64::MAX { page.unwrap_or(0) } else { 0 };
            let min = group.quota.min.div_ceil(block).saturating_sub(slack);
            assert!(
                level >= min || level >= was || may_shrink,
                "{}: {level} blocks after {was}, at least {min}",
                group.quota.group
            );
        }
    }
}

impl Caller<'_> {
    /// Changes the quotas.
    pub fn change_quotas(&self) {
        let change = {
            let mut state = self.shared.lock();
            if !state.world.setup.quotas || state.quotas.changes > 0 {
                return;
            }
            let segments: u32 = state.world.setup.volumes.iter().sum();
            let most = u64::from(segments * state.world.setup.segment_blocks) / 2;
            let spaces = state.world.setup.namespaces.len();
            let State { world, lives, .. } = &mut *state;
            let dice = &mut world.dice;
            let group = GroupName {
                kind: GroupKind::Model,
                name: format!("model {}", dice.below(spaces)),
            };
            let min = if dice.chance(0.7) {
                dice.between(0, most / 2)
            } else {
                0
            };
            let max = dice.chance(0.6).then(|| min + dice.between(1, most));
            let change = match dice.below(10) {
                0 => QuotaChange::Clear,
                1 => QuotaChange::Remove(group),
                _ => QuotaChange::Set(QuotaSpec {
                    group,
                    min_bytes: min * BLOCK_BYTES as u64,
                    max_bytes: max.map(|max| max * BLOCK_BYTES as u64),
                    max_age_s: lives.draw_limit(dice),
                }),
            };
            state.quotas.changes += 1;
            let last = state.quotas.may_be.last().cloned().unwrap_or_default();
            let after = after(last, &change);
            state.quotas.may_be.push(after);
            change
        };
        self.set_quotas(&change);
    }

    /// Ends all quotas.
    pub fn clear_quotas(&self) {
        if self.shared.lock().world.setup.quotas {
            let mut state = self.shared.lock();
            state.quotas.may_be.push(Vec::new());
            drop(state);
            self.set_quotas(&QuotaChange::Clear);
        }
    }

    fn set_quotas(&self, change: &QuotaChange) {
        let before = {
            let mut state = self.shared.lock();
            // The times of puts may be read.
            state.listing += 1;
            state.quotas.count += 1;
            state.quotas.in_force.take()
        };
        let outcome = self.store.change_quotas(change);
        let mut state = self.shared.lock();
        state.listing -= 1;
        let failures = state.epoch.as_ref().map_or(0, |epoch| epoch.failures);
        let closes = state.closing;
        state
            .world
            .note(0, || format!("quotas {change:?} end: {outcome:?}"));
        let quotas = &mut state.quotas;
        quotas.changes = quotas.changes.saturating_sub(1);
        quotas.count += 1;
        match outcome {
            Ok(report) => {
                let found = specs(&report);
                let is_limited = found.iter().any(|spec| spec.max_age_s.is_some());
                quotas.in_force = Some(found.clone());
                quotas.may_be = vec![found];
                state.lives.limited(is_limited);
                state.world.count(Class::QuotasChanged);
            }
            // Refused: nothing was written.
            Err(StoreError::Quotas(_)) => {
                quotas.may_be.pop();
                quotas.in_force = before;
            }
            Err(error) => {
                assert!(failures > 0 || closes, "quotas cannot be changed: {error}");
                // The former ones are in force.
                let last = quotas.may_be.len() - 1;
                quotas.may_be.swap(last - 1, last);
            }
        }
    }
}

/// The quotas after a change.
fn after(mut list: Vec<QuotaSpec>, change: &QuotaChange) -> Vec<QuotaSpec> {
    match change {
        QuotaChange::None => {}
        QuotaChange::Clear => list.clear(),
        QuotaChange::Remove(group) => list.retain(|spec| spec.group != *group),
        QuotaChange::Set(spec) => {
            list.retain(|own| own.group != spec.group);
            list.push(spec.clone());
            list.sort_by(|a, b| a.group.name.cmp(&b.group.name));
        }
    }
    list
}
