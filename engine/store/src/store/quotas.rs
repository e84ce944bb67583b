//! The quotas of a store in this process: kept in its first volume, followed by its core.

use larder_format::{Quota, Quotas};

use super::LocalStore;
use crate::error::StoreError;
use crate::quotas::{QuotaChange, QuotaReport};
use crate::volume::quotas::QuotaState;

impl LocalStore {
    /// The quotas of the store, and the use of each.
    #[must_use]
    pub fn quotas(&self) -> QuotaReport {
        let levels = self.local.with_core(|core| core.quota_levels());
        QuotaReport {
            fault: self.quotas.lock().fault().map(str::to_owned),
            groups: levels.into_iter().map(Into::into).collect(),
            removes_old_pages: self.local.removes_old_pages(),
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
            let list = changed(&self.quotas.lock(), change)?.list;
            let checked = self.local.with_core(|core| core.check_quotas(&list));
            checked.map_err(|refusal| StoreError::Quotas(refusal.to_string()))?;
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
}

/// The quotas after a change.
fn changed(state: &QuotaState, change: &QuotaChange) -> Result<Quotas, StoreError> {
    let mut quotas = match state {
        _ if *change == QuotaChange::Clear => Quotas::default(),
        QuotaState::Known(quotas) => quotas.clone(),
        QuotaState::Unreadable(fault) => {
            return Err(StoreError::Quotas(format!(
                "they cannot be read ({fault}): `larder quota --clear` removes them all, then set \
                 each anew"
            )));
        }
    };
    let refused = StoreError::Quotas;
    match change {
        QuotaChange::Set(spec) => quotas.set(spec.quota().map_err(refused)?),
        QuotaChange::Remove(name) => {
            let group = name.group().map_err(refused)?;
            if !quotas.remove(&group) {
                return Err(refused(format!("{group} has none")));
            }
        }
        QuotaChange::None | QuotaChange::Clear => {}
    }
    quotas
        .validate()
        .map_err(|error| refused(error.to_string()))?;
    Ok(quotas)
}
