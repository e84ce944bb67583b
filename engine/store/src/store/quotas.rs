//! The quotas of a store in this process: kept in its first volume, followed by its core.

use larder_core::core::{QuotaLevel, QuotaRefusal};
use larder_format::{Quota, QuotaGroup, Quotas};

use super::LocalStore;
use crate::error::StoreError;
use crate::quotas::{QuotaChange, QuotaReport};
use crate::volume::quotas::QuotaState;

impl LocalStore {
    /// The quotas of the store, and the use of each.
    #[must_use]
    pub fn quotas(&self) -> QuotaReport {
        self.report(|group| group)
    }

    /// The same for reports and metrics: without the names of tenants of an encrypted store.
    pub(crate) fn shown_quotas(&self) -> QuotaReport {
        self.report(|group| self.shown(group))
    }

    fn report(&self, name: impl Fn(QuotaGroup) -> QuotaGroup) -> QuotaReport {
        let levels = self.local.with_core(|core| core.quota_levels());
        let named = levels.into_iter().map(|level| {
            let group = name(level.quota.group);
            let quota = Quota {
                group,
                ..level.quota
            };
            QuotaLevel { quota, ..level }.into()
        });
        QuotaReport {
            fault: self.quotas.lock().fault().map(str::to_owned),
            groups: named.collect(),
            removes_old_pages: self.local.removes_old_pages(),
        }
    }

    /// A group as messages, reports and metrics name it.
    fn shown(&self, group: QuotaGroup) -> QuotaGroup {
        match (&self.local.keys, group) {
            (Some(keys), QuotaGroup::Tenant(name)) => QuotaGroup::Tenant(keys.shown_tenant(&name)),
            (_, group) => group,
        }
    }

    /// Changes the quotas. They are durable, and in force, when this returns.
    ///
    /// # Errors
    /// [`StoreError::Quotas`] if the change is refused. After an error of the device a later open
    /// may find the former quotas or these.
    pub fn change_quotas(&self, change: &QuotaChange) -> Result<QuotaReport, StoreError> {
        if *change != QuotaChange::None {
            let _gate = self.enter_to_write()?;
            let mut volumes = self.volumes.lock();
            let list = self.changed(change)?.list;
            let checked = self.local.with_core(|core| core.check_quotas(&list));
            checked.map_err(|refusal| {
                let shown = match refusal {
                    QuotaRefusal::TwoGroups { namespace, groups } => QuotaRefusal::TwoGroups {
                        namespace,
                        groups: Box::new(groups.map(|group| self.shown(group))),
                    },
                    minima @ QuotaRefusal::Minima { .. } => minima,
                };
                StoreError::Quotas(shown.to_string())
            })?;
            let sync = || self.local.sync_first();
            let quotas = volumes.set_quotas(self.data.disk.as_ref(), list, sync)?;
            let list = quotas.list.clone();
            let limits = |quotas: &[Quota]| quotas.iter().any(|quota| quota.max_age_s.is_some());
            let are_limited = limits(&list);
            self.local.with_core(|core| core.set_quotas(list));
            *self.quotas.lock() = QuotaState::Known(quotas);
            if are_limited {
                self.local.note_clock(&mut volumes, true);
                self.local.learn_puts();
            }
            self.local.limit_lives(are_limited);
        }
        Ok(self.quotas())
    }

    /// The quotas after a change.
    fn changed(&self, change: &QuotaChange) -> Result<Quotas, StoreError> {
        let mut quotas = match &*self.quotas.lock() {
            _ if *change == QuotaChange::Clear => Quotas::default(),
            QuotaState::Known(quotas) => quotas.clone(),
            QuotaState::Unreadable(fault) => {
                return Err(StoreError::Quotas(format!(
                    "they cannot be read ({fault}): `larder quota --clear` removes them all, then \
                     set each anew"
                )));
            }
        };
        let refused = StoreError::Quotas;
        match change {
            QuotaChange::Set(spec) => quotas.set(spec.quota().map_err(refused)?),
            QuotaChange::Remove(name) => {
                let group = name.group().map_err(refused)?;
                if !quotas.remove(&group) {
                    return Err(refused(format!("{} has none", self.shown(group))));
                }
            }
            QuotaChange::None | QuotaChange::Clear => {}
        }
        quotas
            .validate()
            .map_err(|error| refused(error.to_string()))?;
        Ok(quotas)
    }
}
