//! The quotas of a store in this process: kept in its first volume, followed by its core.

use larder_core::core::Core;
use larder_format::Quotas;

use super::LocalStore;
use crate::catalog::Catalog;
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
            let volumes = self.volumes.lock();
            let list = changed(&self.quotas.lock(), change)?.list;
            let checked = self.local.with_core(|core| core.check_quotas(&list));
            checked.map_err(|refusal| StoreError::Quotas(refusal.to_string()))?;
            // A round of syncs that runs already may not cover the write: the next one does.
            let sync = || {
                self.local.with_core(Core::written_beside);
                Catalog::flush(&*self.local)?;
                Catalog::flush(&*self.local)
            };
            let quotas = volumes.set_quotas(self.data.disk.as_ref(), list, sync)?;
            let list = quotas.list.clone();
            self.local.with_core(|core| core.set_quotas(list));
            *self.quotas.lock() = QuotaState::Known(quotas);
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
